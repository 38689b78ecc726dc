"""Calls captured as CUDA graphs give the answers that they give without, whatever happens between them."""

import copy
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.bench import models
from fxfuse.capture.replay import MOST


class Model(nn.Module):
    def __init__(self, step=lambda model, y, x: y):
        super().__init__()
        self.mlp, self.step = models.GegluMLP(256, 512), step

    def forward(self, x, scale=None):
        y = x + self.mlp(x)
        return self.step(self, y if scale is None else y * scale, x)


def built(step=lambda model, y, x: y, **options):
    with torch.inference_mode(False):
        model = Model(step).cuda().bfloat16().eval()
    return fxfuse.optimize(model, **options), fxfuse.optimize(model, cuda_graphs=True, **options)


def data(rows=4):
    return torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode])
def no_gradients(request):
    with request.param():
        yield


def counts(optimized):
    calls = fxfuse.report(optimized).calls[""]
    return calls.fused, calls.replayed


def test_the_second_call_of_a_kind_is_captured():
    plain, replayed = built()
    for done in range(5):
        x = data()
        assert torch.equal(replayed(x), plain(x))
        assert counts(replayed) == (done + 1, done)
    assert fxfuse.report(replayed).notes == []


def test_results_are_the_callers_own():
    plain, replayed = built()
    xs = [data() for _ in range(4)]
    kept = [replayed(x) for x in xs]
    kept[1].add_(1)
    for x, y in zip(xs[2:], kept[2:], strict=True):
        assert torch.equal(y, plain(x))


def test_each_kind_has_a_graph_of_its_own_and_the_oldest_goes():
    plain, replayed = built()
    for rows in [*range(1, MOST + 3), 1, MOST + 2]:
        for _ in range(3):
            x = data(rows)
            assert torch.equal(replayed(x), plain(x))
    assert len(replayed.forward.__func__.__globals__["fx_region"].body.graphs) == MOST


def test_weights_may_change_and_move():
    plain, replayed = built()
    x = data()
    replayed(x), replayed(x)
    replayed.mlp.up.weight.mul_(2)
    assert torch.equal(replayed(x), plain(x))
    with torch.inference_mode(False), torch.no_grad():
        replayed.mlp.up.weight.data = replayed.mlp.up.weight * 0.25
    assert torch.equal(replayed(x), plain(x))
    replayed.load_state_dict({k: v * 0.5 for k, v in replayed.state_dict().items()})
    assert torch.equal(replayed(x), plain(x))
    assert counts(replayed) == (5, 3), "a call with a weight elsewhere runs by itself"


def test_arguments_of_other_values_and_types():
    plain, replayed = built()
    x, tensor = data(), torch.full((), 0.5, device="cuda", dtype=torch.bfloat16)
    for scale in [None, 2.0, tensor, 3.0, None, 2.0, tensor, 3.0, None, 2.0, tensor]:
        assert torch.equal(replayed(x, scale), plain(x, scale))


def test_streams_and_threads_take_turns():
    plain, replayed = built()
    x = data(2000)
    replayed(x), replayed(x)
    wrong = []

    def serve(which):
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                x = data(2000)
                if not torch.equal(replayed(x), plain(x)):
                    wrong.append(which)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_in_flight_keep_their_memory():
    plain, replayed = built()
    xs = [data() for _ in range(300)]
    ys = [replayed(x) for x in xs]
    assert all(torch.equal(y, plain(x)) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize(
    "lie",
    [
        lambda x: x,
        lambda x: F.pad(x.flatten(), (1, 0))[1:].view(4, 256),
        lambda x: x.t().contiguous().t(),
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x[:1].expand(4, 256),
        lambda x: -(torch.complex(x.float(), -x.float()).conj().imag).to(x.dtype),
    ],
    ids=["dense", "unaligned", "transposed", "strided", "expanded", "of a conjugate"],
)
def test_arguments_and_results_lie_anyhow(lie):
    plain, replayed = built(lambda model, y, x: (y[:, :3].clone(), y.t().clone(), y.sum(), y[:0].clone(), y * 2, 5))
    replayed(lie(data()))
    for _ in range(3):
        x = lie(data())
        # What a graph reads lies as its argument does, but for holes and alignment.
        ours, theirs = replayed(x), plain(torch.empty_like(x).copy_(x))
        assert ours[-1] == 5
        for our, their in zip(ours[:-1], theirs[:-1], strict=True):
            assert our.stride() == their.stride()
            assert torch.equal(our, their)
    assert counts(replayed)[1] == 3


def test_random_numbers_go_on():
    _, replayed = built(lambda model, y, x: y + torch.rand_like(y))
    x = data()
    seen = [replayed(x) for _ in range(4)]
    assert counts(replayed)[1] == 3
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))
    torch.manual_seed(0)
    one = [replayed(x), replayed(x)]
    torch.manual_seed(0)
    assert all(map(torch.equal, one, [replayed(x), replayed(x)]))


def item(model, y, x):
    return y * y.float().sum().item()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda model, y, x: (y, x), "a result shares memory with an argument, a weight or another result"),
        (lambda model, y, x: (y, y[0]), "a result shares memory with an argument, a weight or another result"),
        (lambda model, y, x: (y, model.mlp.up.bias), "a result shares memory with an argument"),
        (lambda model, y, x: y.cpu(), "rror"),
        (item, "rror"),
    ],
)
def test_what_cannot_be_captured_runs_by_itself(step, why):
    plain, replayed = built(step)
    x = data()
    for _ in range(4):
        ours, theirs = replayed(x), plain(x)
        assert all(map(torch.equal, ours, theirs)) if isinstance(ours, tuple) else torch.equal(ours, theirs)
    (note,) = fxfuse.report(replayed).notes
    assert why in note
    assert counts(replayed) == (4, 0)
    # Nothing of the attempt is left: streams, memory and random numbers are as they were.
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(3, device="cuda").isfinite().all()
    plain, replayed = built()
    replayed(x), replayed(x)
    assert counts(replayed) == (2, 1)


def test_copies_have_graphs_of_their_own():
    plain, replayed = built()
    x = data()
    replayed(x), replayed(x)
    other = copy.deepcopy(replayed)
    other.mlp.up.weight.zero_()
    assert not torch.equal(other(x), replayed(x))
    assert not torch.equal(other(x), replayed(x))
    assert torch.equal(replayed(x), plain(x))


def test_gradients_and_captures_of_the_callers_own_stay_outside():
    plain, replayed = built()
    x = data()
    replayed(x), replayed(x)
    with torch.inference_mode(False), torch.enable_grad():
        y = replayed(data())
        y.sum().backward()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = replayed(x)
    x.copy_(data())
    graph.replay()
    assert torch.equal(y, plain(x))
    assert counts(replayed)[1] == 1


def test_of_a_function():
    weight = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) / 16

    def act(x, w):
        return F.silu(F.linear(x, w))

    replayed = fxfuse.optimize(act, cuda_graphs=True)
    for _ in range(3):
        x = data()
        assert torch.equal(replayed(x, weight), fxfuse.optimize(act)(x, weight))
    assert counts(replayed) == (3, 2)
