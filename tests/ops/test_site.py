"""Sites of regions: what they remember of one call never spoils the next."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxfuse
from fxfuse.ops import Kept, onednn
from fxfuse.ops.gated_linear.cpu import GatedSite, PackedSite
from fxfuse.ops.linear_act.cpu import Site

N, K = 24, 16


def gelu(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def columns(n=N, k=K):
    return torch.randn(k, n).t()


CALLS = {
    "more rows": lambda: (torch.randn(40, K), torch.randn(N, K), torch.randn(N)),
    "one row": lambda: (torch.randn(1, K), torch.randn(N, K), torch.randn(N)),
    "no rows": lambda: (torch.randn(0, K), torch.randn(N, K), torch.randn(N)),
    "one dimension": lambda: (torch.randn(K), torch.randn(N, K), torch.randn(N)),
    "three dimensions": lambda: (torch.randn(2, 3, K), torch.randn(N, K), torch.randn(N)),
    "no bias": lambda: (torch.randn(5, K), torch.randn(N, K), None),
    "a strided bias": lambda: (torch.randn(5, K), torch.randn(N, K), torch.randn(2 * N)[::2]),
    "a transposed weight": lambda: (torch.randn(5, K), columns(), torch.randn(N)),
    "a strided weight": lambda: (torch.randn(5, K), torch.randn(2 * N, K)[::2], torch.randn(N)),
    "a wider weight": lambda: (torch.randn(5, 2 * K), torch.randn(N, 2 * K), torch.randn(N)),
    "a taller weight": lambda: (torch.randn(5, K), torch.randn(2 * N, K), torch.randn(2 * N)),
    "strided rows": lambda: (torch.randn(5, 2 * K)[:, ::2], torch.randn(N, K), torch.randn(N)),
    "no columns": lambda: (torch.randn(5, 0), torch.randn(N, 0), torch.randn(N)),
    "bfloat16": lambda: tuple(t.bfloat16() for t in (torch.randn(5, K), torch.randn(N, K), torch.randn(N))),
    "float64": lambda: tuple(t.double() for t in (torch.randn(5, K), torch.randn(N, K), torch.randn(N))),
}


@pytest.mark.parametrize("second", CALLS)
def test_a_call_after_another(second, onednn_calls, assert_right):
    site = Site("gelu")
    with torch.inference_mode():
        site.run(torch.randn(5, K), torch.randn(N, K), torch.randn(N))
        assert onednn_calls == ["gelu"]
        for call in (CALLS[second](), CALLS[second](), CALLS["three dimensions"]()):
            assert_right(site.run(*call), gelu, *call)


@pytest.mark.parametrize("second", CALLS)
def test_a_gated_call_after_another(second, onednn_calls, assert_right):
    two, packed = GatedSite("silu"), PackedSite("silu", (), "up_gate")
    with torch.inference_mode():
        for case in ("three dimensions", second, second):
            x, weight, bias = CALLS[case]()
            up = weight.roll(1, 0).as_strided(weight.shape, weight.stride()) if case != "a strided weight" else weight
            assert_right(
                two.run(x, weight, bias, up, bias),
                lambda x, w, b, up: F.silu(F.linear(x, w, b)) * F.linear(x, up, b),
                x,
                weight,
                bias,
                up,
            )

            def plain(x, w, b):
                up, gate = F.linear(x, w, b).chunk(2, -1)
                return F.silu(gate) * up

            assert_right(packed.run(x, weight, bias), plain, x, weight, bias)


def test_errors_after_a_good_call_are_eagers(onednn_calls):
    site = Site("gelu")
    weight, bias = torch.randn(N, K), torch.randn(N)
    with torch.inference_mode():
        site.run(torch.randn(5, K), weight, bias)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            site.run(torch.randn(5, K + 1), weight, bias)
        with pytest.raises(RuntimeError, match="dtype"):
            site.run(torch.randn(5, K), weight.double(), bias)


def test_rows_between_two_powers_of_two_are_judged_by_the_lower(monkeypatch):
    """Which of two row counts comes first decides nothing: both run what suits the smaller."""
    monkeypatch.setattr(onednn, "_LEAST_WORK", {torch.float32: (1, 12 * N * K)})
    weight = torch.randn(N, K)
    answers = []
    for order in ((15, 8), (8, 15)):
        kept = onednn.Weight()
        answers.append({rows: kept.way(torch.randn(rows, K), weight, None) for rows in order})
    assert answers[0] == answers[1] == {8: None, 15: None}
    assert onednn.Weight().way(torch.randn(16, K), weight, None) is onednn.NO_POST_OP


def test_a_kept_view_is_made_once_and_sees_new_values():
    kept, weight = Kept(torch.t), nn.Parameter(torch.randn(3, 4))
    with torch.inference_mode():
        view = kept(weight)
        weight.data[0, 0] = 7.0
        assert kept(weight) is view
    assert view[0, 0] == 7.0
    assert not view.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda w: torch.randn(3, 4),
        lambda w: w.data[:2],
        lambda w: w.data.t(),
        lambda w: w.data[:, :3],
        lambda w: w.data.view(torch.int32),
        lambda w: w.data.double(),
    ],
    ids=["memory", "rows", "strides", "columns", "dtype", "wider dtype"],
)
def test_a_kept_view_is_made_anew(change):
    kept, weight = Kept(torch.t), nn.Parameter(torch.randn(3, 4), requires_grad=False)
    kept(weight)
    weight.data = change(weight)
    assert torch.equal(kept(weight), weight.t())
    assert kept(weight).dtype is weight.dtype


class MatmulAdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(K, N)), nn.Parameter(torch.randn(N))

    def forward(self, x):
        return F.gelu(x @ self.w + self.b)


def test_a_copy_of_a_region_has_sites_of_its_own():
    model, x = fxfuse.optimize(MatmulAdd().eval()), torch.randn(5, K)
    with torch.inference_mode():
        model(x)
        other = copy.deepcopy(model)
        other.w.data.zero_()
        assert torch.equal(other(x), F.gelu(other.b).expand(5, N))
        assert not torch.equal(model(x), other(x))
    assert other.__dict__["_fxfuse"].body is not model.__dict__["_fxfuse"].body


def test_the_memory_of_a_weight_that_moved_is_given_back_at_the_next_call():
    model, x = fxfuse.optimize(MatmulAdd().eval()), torch.randn(5, K)
    with torch.inference_mode():
        model(x)
        before = StorageWeakRef(model.w.untyped_storage())
        model.bfloat16()
        model(x.bfloat16())
    assert before.expired()
