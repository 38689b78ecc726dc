"""Packed copies of weights: right answers whatever becomes of the weight, one copy a weight, bounded, and dropped."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import choose
from fxfuse.ops import onednn, prepack
from fxfuse.ops.activations import ACTIVATIONS, activation
from fxfuse.ops.gated_linear.cpu import PrepackedGatedSite, PrepackedPackedSite
from fxfuse.ops.linear_act.cpu import PrepackedSite

N, K = 40, 24

pytestmark = pytest.mark.usefixtures("onednn_calls")


def site(*args, store=None, of=PrepackedSite):
    store = store or prepack.Store(2**30)

    def weights(*args, **kwargs):
        return prepack.Weight(store, *args, **kwargs)

    return of(*args, weights=weights), store


@pytest.fixture(autouse=True)
def one_row_too(monkeypatch):
    """Copies at every size, as measuring may choose them."""

    def expected(self, *call):
        pays = onednn.Weight.expected(self, *call) != choose.PLAIN
        return self.allowed()[-1] if pays else choose.PLAIN

    monkeypatch.setattr(prepack.Weight, "expected", expected)


def weight(n=N, k=K, *, transposed=False, dtype=torch.float32):
    return (torch.randn(k, n).t() if transposed else torch.randn(n, k)).to(dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("act", ["", "gelu", "gelu_tanh", "silu", "relu", "tanh", "hardswish"])
def test_same_answers(act, rows, transposed, dtype, assert_right):
    one, store = site(act)
    x, w, b = (t.to(dtype) for t in (torch.randn(rows, K), weight(transposed=transposed), torch.randn(N)))
    with torch.inference_mode():
        for _ in range(2):
            assert_right(
                one.run(x, w, b),
                lambda x, w, b: activation(act).function(F.linear(x, w, b)) if act else F.linear(x, w, b),
                x,
                w,
                b,
            )
            assert_right(
                one.run(x, w, None),
                lambda x, w: activation(act).function(F.linear(x, w)) if act else F.linear(x, w),
                x,
                w,
            )
    assert store.count == 1
    assert store.nbytes >= w.numel() * w.element_size()
    assert one.weight.operand(x, w).layout is torch._mkldnn


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("act", ["", *ACTIVATIONS])
def test_not_a_number_and_infinity_as_eager_has_them(act, transposed, rows, dtype, assert_right):
    one, _ = site(act)
    w, b = weight(transposed=transposed, dtype=dtype), torch.zeros(N, dtype=dtype)
    w[:4, 0] = torch.tensor([1.0, -1.0, 0.0, 2.0])
    plain = activation(act).function if act else lambda h: h
    with torch.inference_mode():
        for value in (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 100.0, -100.0):
            x = torch.zeros(rows, K, dtype=dtype)
            x[:, 0] = value
            ours, eager = one.run(x, w, b), plain(F.linear(x, w, b))
            assert torch.equal(ours.isnan(), eager.isnan()), (value, ours[0, :4], eager[0, :4])
            assert torch.equal(ours.isposinf(), eager.isposinf()), (value, ours[0, :4], eager[0, :4])
            assert torch.equal(ours.isneginf(), eager.isneginf()), (value, ours[0, :4], eager[0, :4])


def test_gated(dtype, assert_right):
    one, store = site("silu", of=PrepackedGatedSite)
    x, gate, up, b = (t.to(dtype) for t in (torch.randn(5, K), weight(), weight(), torch.randn(N)))
    with torch.inference_mode():
        for _ in range(2):
            y = one.run(x, gate, b, up, None)
            assert_right(y, lambda x, g, b, u: F.silu(F.linear(x, g, b)) * F.linear(x, u), x, gate, b, up)
    assert store.count == 2


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "gate_up_strided"])
def test_stacked(layout, assert_right):
    one, store = site("silu", (), layout, of=PrepackedPackedSite)
    x, w, b = torch.randn(5, K), weight(2 * N), torch.randn(2 * N)

    def plain(x, w, b):
        h = F.linear(x, w, b)
        first, second = (h[..., ::2], h[..., 1::2]) if "strided" in layout else h.chunk(2, -1)
        return F.silu(first) * second if layout.startswith("gate") else F.silu(second) * first

    with torch.inference_mode():
        for _ in range(2):
            assert_right(one.run(x, w, b), plain, x, w, b)
            w.mul_(1.5)
    assert store.count == (1 if "strided" in layout else 2)


def fused_adamw(p):
    p.grad = torch.ones_like(p)
    torch.optim.AdamW([p], lr=0.1, fused=True).step()


def foreach_sgd(p):
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.1, foreach=True).step()


def in_place(p):
    with torch.no_grad():
        p.mul_(2)


def one_element(p):
    with torch.no_grad():
        p[3, 5] = 7


def through_numpy(p):
    p.detach().numpy()[:] *= 2


def moved(p):
    p.data = p.data.clone() * 3


def strided_otherwise(p):
    p.data = (p.data * 3).t().contiguous().t()


CHANGES = {
    "fused AdamW": fused_adamw,
    "foreach SGD": foreach_sgd,
    "in place": in_place,
    "one element": one_element,
    ".data": lambda p: p.data.add_(1),
    "numpy": through_numpy,
    "moved": moved,
    "other strides": strided_otherwise,
    "cast and back": lambda p: (moved(p), setattr(p, "data", p.data.bfloat16().float())),
    "not a number": lambda p: p.data.fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_weight_is_noticed(change):
    one, store = site()
    p, x = nn.Parameter(weight()), torch.randn(5, K)
    with torch.no_grad():
        one.run(x, p, None)
        before = one.weight.operand(x, p)
    CHANGES[change](p)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(one.run(x, p, None), F.linear(x, p), equal_nan=True)
        assert one.weight.operand(x, p) is not before
    gc.collect()
    assert store.count <= 1


def test_weights_of_other_kinds_after_another(assert_right):
    one, store = site("gelu")
    kinds = [
        weight(),
        weight(transposed=True),
        weight(2 * N),
        weight(N, 2 * K),
        weight().double(),
        weight(2 * N)[::2],
        weight(4, 4),
        weight(),
    ]
    with torch.inference_mode():
        for w in kinds:
            x = torch.randn(5, w.shape[1]).to(w.dtype)
            assert_right(one.run(x, w, None), lambda x, w: F.gelu(F.linear(x, w)), x, w)
    assert store.count <= 1


def test_a_weight_that_changes_at_every_call_is_no_longer_packed():
    one, store = site()
    w, x = weight(), torch.randn(5, K)
    with torch.inference_mode():
        for _ in range(prepack._CHANGES + 3):
            torch.testing.assert_close(one.run(x, w, None), F.linear(x, w))
            w.add_(1)
        assert one.weight.operand(x, w) is w
    assert store.count == 0


def test_bytes_are_bounded():
    size = prepack.Copy(weight()).nbytes
    assert size > N * K * 4, "it is padded"
    full = prepack.Store(2 * size - 1)
    first, second = site(store=full)[0], site(store=full)[0]
    w, v, x = weight(), weight(), torch.randn(5, K)
    with torch.inference_mode():
        for one, of in ((first, w), (second, v), (first, w), (second, v)):
            torch.testing.assert_close(one.run(x, of, None), F.linear(x, of))
        assert second.weight.operand(x, v) is v
    assert (full.count, full.nbytes) == (1, size)


def test_a_copy_that_is_larger_than_its_weight_does_not_fit_where_the_weight_would():
    one, store = site(store=prepack.Store(N * K * 4))
    with torch.inference_mode():
        one.run(torch.randn(5, K), weight(), None)
    assert store.count == 0


def test_a_copy_that_cannot_be_made_is_done_without(monkeypatch):
    def fails(*_args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", fails)
    one, store = site()
    w, x = weight(), torch.randn(5, K)
    with torch.inference_mode():
        torch.testing.assert_close(one.run(x, w, None), F.linear(x, w))
    assert store.count == 0


def test_a_weight_at_two_places_has_one_copy():
    first, store = site()
    second, _ = site("gelu", store=store)
    w, x = weight(), torch.randn(5, K)
    with torch.inference_mode():
        first.run(x, w, None), second.run(x, w, None)
        assert first.weight.operand(x, w) is second.weight.operand(x, w)
        w.add_(1)
        for _ in range(2):
            torch.testing.assert_close(first.run(x, w, None), F.linear(x, w))
            torch.testing.assert_close(second.run(x, w, None), F.gelu(F.linear(x, w)))
    assert store.count == 1


def test_the_memory_of_a_weight_that_moved_is_given_back_at_the_next_call():
    one, _ = site()
    p, x = nn.Parameter(weight(), requires_grad=False), torch.randn(5, K)
    with torch.no_grad():
        one.run(x, p, None)
        old = weakref.ref(one.weight._copy)
        p.data = p.data.clone()
        one.run(x, p, None)
    assert old() is None


def test_one_row_is_expected_to_gain_nothing(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(onednn, "_LEAST_WORK", dict.fromkeys(onednn._LEAST_WORK, (1, 1)))
    one, store = site()
    w = weight()
    with torch.inference_mode():
        for rows, count in ((1, 0), (2, 1), (1, 1)):
            x = torch.randn(rows, K)
            torch.testing.assert_close(one.run(x, w, None), F.linear(x, w))
            assert store.count == count
            assert (one.weight.operand(x, w) is w) == (rows == 1)
        transposed = weight(transposed=True)
        x = torch.randn(1, K)
        torch.testing.assert_close(one.run(x, transposed, None), F.linear(x, transposed))
        assert one.weight.operand(x, transposed) is not transposed


# of a model


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.fixture
def mlp():
    return MLP().eval()


X = torch.randn(4, 128)


def call(model):
    with torch.inference_mode():
        return model(X)


def packed(model):
    return fxfuse.report(model).packed


def test_only_where_it_is_allowed(mlp):
    model = fxfuse.optimize(mlp, X)
    call(model)
    assert packed(model) is None
    assert fxfuse.report(model).to_dict()["packed"] is None


def test_memory_in_the_report(mlp):
    model = fxfuse.optimize(mlp, X, pack=True)
    assert (packed(model).count, packed(model).nbytes) == (0, 0)
    call(model)
    assert fxfuse.report(model).to_dict()["packed"] == {"count": 2, "nbytes": 2 * 128 * 256 * 4, "limit": 2**30}
    assert "2 copies, 256.0 KiB of at most 1.0 GiB" in str(fxfuse.report(model))
    torch.testing.assert_close(call(model), call(mlp))


def test_as_many_bytes_as_asked_for(mlp):
    model = fxfuse.optimize(mlp, pack=128 * 256 * 4)
    torch.testing.assert_close(call(model), call(mlp))
    assert packed(model).count == 1


@pytest.mark.parametrize("pack", [-1, "yes", 1.5, None])
def test_another_value(pack):
    with pytest.raises(ValueError, match="takes True, False or a number of bytes"):
        fxfuse.Options(pack=pack)


def test_refresh_drops_the_copies(mlp):
    model = fxfuse.optimize(mlp, pack=True)
    call(model)
    # Between the numbers that are compared.
    model.up.weight.data[0, 1] = 1000.0
    assert fxfuse.refresh(model) is model
    assert packed(model).count == 0
    torch.testing.assert_close(call(model), call(mlp))
    assert packed(model).count == 2


def test_threads_while_copies_are_dropped_and_made(mlp):
    model, expected = fxfuse.optimize(mlp, pack=True), call(mlp)
    done = threading.Event()

    def serve(_):
        answers = []
        while not done.is_set() or not answers:
            answers.append(call(model))
        return answers

    with ThreadPoolExecutor(4) as pool:
        served = pool.map(serve, range(4))
        for _ in range(50):
            fxfuse.refresh(model)
            call(model)
        done.set()
        for answers in served:
            for answer in answers:
                torch.testing.assert_close(answer, expected)
    assert packed(model).count == 2


def test_restore_drops_the_copies(mlp):
    model = fxfuse.optimize(mlp, pack=True)
    call(model)
    store = packed(model)
    assert store.count == 2
    fxfuse.restore(model)
    gc.collect()
    assert store.count == 0


def test_a_deepcopy_has_its_own(mlp):
    model = fxfuse.optimize(mlp, pack=True)
    call(model)
    other = copy.deepcopy(model)
    assert packed(other) is not packed(model)
    assert (packed(other).count, packed(model).count) == (0, 2)
    other.up.weight.data.zero_()
    torch.testing.assert_close(call(other), other.down(F.gelu(other.up(X))))
    torch.testing.assert_close(call(model), call(mlp))
    assert packed(other).count == 2


def test_a_pickle_has_none(mlp):
    model = fxfuse.optimize(mlp, pack=True)
    call(model)
    assert len(pickle.dumps(model)) < 2 * len(pickle.dumps(mlp))
    report = pickle.loads(pickle.dumps(fxfuse.report(model)))
    assert (report.packed.count, report.packed.limit) == (0, 2**30)


def test_a_function():
    w, b = torch.randn(256, 128), torch.randn(256)
    fast = fxfuse.optimize(lambda x: torch.tanh(F.linear(x, w, b)), X, pack=True)
    torch.testing.assert_close(call(fast), torch.tanh(F.linear(X, w, b)))
    assert packed(fast).count == 1


def test_a_model_whose_weights_were_made_in_inference_mode():
    with torch.inference_mode():
        mlp = MLP().eval()
        model = fxfuse.optimize(mlp, pack=True)
        torch.testing.assert_close(model(X), mlp(X))
        model.up.weight.mul_(2)
        torch.testing.assert_close(model(X), mlp(X))
    assert packed(model).count == 2
    assert onednn.has(torch.float32)
