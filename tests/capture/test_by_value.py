"""What a forward decides by values of its arguments is decided as in the example, and asked again at each call."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from fxfuse.capture import arguments, by_value, value
from fxfuse.facts import Fact
from tests.models.answers import right


def mask_of(rows):
    return torch.ones(rows, 4, dtype=torch.long)


class Writes(nn.Module):
    """Has no graph, so that a trace around it calls it."""

    def forward(self, x, mask):
        if x.sum() < 1e9:
            mask.mul_(1)


class Masked(nn.Module):
    """Does without the mask where nothing is masked."""

    def __init__(self, decide):
        super().__init__()
        self.layer, self.decide = nn.Sequential(nn.Linear(8, 16), nn.GELU()), decide
        self.writes, self.in_place, self.hooked = Writes(), nn.Threshold(0, 0, inplace=True), nn.Identity()
        self.hooked.register_forward_pre_hook(lambda module, given: (given[0].mul_(1),))

    def forward(self, x, mask):
        x = self.layer(x)
        if self.decide(self, x, mask):
            return x
        return x * mask.unsqueeze(-1)


def optimized(decide, x=None, mask=None):
    model = Masked(decide).eval()
    x, mask = torch.randn(2, 4, 8) if x is None else x, mask_of(2) if mask is None else mask
    return model, fxfuse.optimize(model, (x, mask), tune="off")


def holds(fused, model, *arguments):
    with torch.no_grad():
        return right(fused(*arguments), model, *arguments)


def whole(self, x, mask):
    return mask.sum() == mask.numel()


DECISIONS = {
    "a tensor": whole,
    "a bool": lambda self, x, mask: torch.equal(mask, torch.ones_like(mask)),
    "not": lambda self, x, mask: not (mask == 0).any(),
    "of sizes": lambda self, x, mask: (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)).all(),
    "by its device": lambda self, x, mask: (torch.zeros(mask.shape[1], device=mask.device) < mask).all(),
    "in": lambda self, x, mask: 0 not in mask[:, [0, -1]],
    "twice": lambda self, x, mask: bool(whole(self, x, mask)) and whole(self, x, mask),
}


@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)
def test_it_is_asked_again_at_each_call(decide):
    model, fused = optimized(decide)
    report = fxfuse.report(fused)
    assert [r.path for r in report.regions] == [""]
    assert "mul" not in str(fxfuse.graphs(fused)[""].graph), "in the example nothing was masked"
    for rows in (2, 3):
        assert holds(fused, model, torch.randn(rows, 4, 8), mask_of(rows))
    assert (report.calls[""].fused, report.calls[""].fallback) == (2, 0)
    mask = mask_of(2)
    mask[1, 3] = 0
    assert holds(fused, model, torch.randn(2, 4, 8), mask)
    assert (report.calls[""].fused, report.calls[""].fallback) == (2, 1)
    (why,) = report.calls[""].reasons
    assert why.startswith("what is decided by values (test_by_value.py:")
    negated = decide in (DECISIONS["not"], DECISIONS["in"])
    expected = "expected False" if negated else "expected True"
    assert why.endswith(f"): {expected}")


def test_the_graph_keeps_nothing_of_the_question():
    _, fused = optimized(whole)
    graph = fxfuse.graphs(fused, original=True)[""].graph
    assert [n.op for n in graph.nodes] == ["placeholder", "placeholder", "call_module", "call_module", "output"]


def test_what_the_answer_is_computed_from_may_be_needed_as_well():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, mask):
            kept = mask > 0
            y = F.relu(self.linear(x))
            return y * kept if kept.all() else y * 2

    model = Model().eval()
    x, mask = torch.randn(2, 8), torch.ones(2, 8, dtype=torch.long)
    fused = fxfuse.optimize(model, (x, mask), tune="off")
    assert holds(fused, model, x, mask)
    assert holds(fused, model, x, torch.zeros(2, 8, dtype=torch.long))
    assert (fxfuse.report(fused).calls[""].fused, fxfuse.report(fused).calls[""].fallback) == (1, 1)


def written(self, x, mask):
    mask.mul_(1)
    return whole(self, x, mask)


def assigned(self, x, mask):
    own = mask.clone()
    own[0] = 1
    return own.all()


def written_by_a_view(self, x, mask):
    mask.view(-1)[:2].mul_(1)
    return whole(self, x, mask)


def written_as_out(self, x, mask):
    torch.mul(mask, 1, out=mask)
    return whole(self, x, mask)


def after_a_module(self, x, mask):
    self.writes(x, mask)
    return whole(self, x, mask)


@fx.wrap
def wrapped(mask):
    mask.mul_(1)


def after(write):
    """A decision after a write that leaves the example as it is."""

    def decide(self, x, mask):
        write(self, mask)
        return whole(self, x, mask)

    return decide


def shifted(self, mask):
    mask <<= 0


def decided_before(self, x, mask):
    first = mask[0, 0]
    decided = bool(first)
    mask.mul_(1)
    return decided and first


NOT_ASKED = {
    "after a shift in place": after(shifted),
    "after an operator that asks to be in place": after(lambda self, mask: F.threshold(mask, 0, 0, inplace=True)),
    "after the same by its place": after(lambda self, mask: F.threshold(mask, 0, 0, True)),
    "after an overload": after(lambda self, mask: torch.ops.aten.mul_.Tensor(mask, 1)),
    "after a packet of overloads": after(lambda self, mask: torch.ops.aten.mul_(mask, 1)),
    "after a wrapped function": after(lambda self, mask: wrapped(mask)),
    "after a module in place": after(lambda self, mask: self.in_place(mask)),
    "after a module with a hook": after(lambda self, mask: self.hooked(mask)),
    "by an overload that writes": lambda self, x, mask: torch.ops.aten.mul_.Tensor(mask, 1).all(),
    "again after a write": decided_before,
    "after a module that may write": after_a_module,
    "after a write by a view": written_by_a_view,
    "after a write as out": written_as_out,
    "by a weight": lambda self, x, mask: (x > 100).any(),
    "at random": lambda self, x, mask: (torch.rand(mask.shape) < 2).all(),
    "after a write": written,
    "by a dtype": lambda self, x, mask: (mask.to(x.dtype) == 1).all(),
    "by floating-point values": lambda self, x, mask: (x < 1000).all(),
    "after an assignment": assigned,
}


def test_nothing_is_asked_where_another_argument_is_written_to():
    """The two may lie in one memory."""

    def forward(x, weight, mask, other):
        other.zero_()
        y = F.gelu(F.linear(x, weight))
        return y if mask.any() else y * 2

    x, weight, both = torch.randn(2, 8), torch.randn(4, 8), mask_of(2)
    fused = fxfuse.optimize(forward, (x, weight, both.clone(), both.clone()), tune="off")
    (refused,) = fxfuse.report(fused).uncaptured
    assert refused.reason.startswith("decides by a value")
    assert torch.equal(fused(x, weight, both, both), F.gelu(F.linear(x, weight)) * 2)


def test_layers_that_are_alike_are_asked_one_by_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Masked(whole) for _ in range(4))

        def forward(self, xs, mask, padded):
            if xs.sum() > 1e9:  # no graph has this
                return xs
            return [layer(xs, padded if i % 2 else mask) for i, layer in enumerate(self.layers)]

    model = Model().eval()
    padded = mask_of(2)
    padded[0, 0] = 0
    given = torch.randn(2, 4, 8), mask_of(2), padded
    fused = fxfuse.optimize(model, given, tune="off")
    assert [r.path for r in fxfuse.report(fused).regions if r.installed] == [f"layers.{i}" for i in range(4)]
    assert holds(fused, model, *given)
    assert [c.fused for c in fxfuse.report(fused).calls.values()] == [1] * 4


def test_a_proxy_of_another_tracer_is_what_it_is():
    """Another thread may trace by torch.fx meanwhile, with functions in which isinstance is another."""
    proxy = fx.Proxy(fx.Graph().placeholder("x"))
    assert value.is_instance(proxy, fx.Proxy)
    assert not value.is_instance(proxy, torch.Tensor)


@pytest.mark.parametrize("decide", NOT_ASKED.values(), ids=NOT_ASKED)
def test_what_cannot_be_asked_again_ends_the_trace(decide):
    model, fused = optimized(decide)
    assert "" not in [r.path for r in fxfuse.report(fused).regions if r.installed]
    (refused,) = [u for u in fxfuse.report(fused).uncaptured if not u.path]
    assert refused.reason.startswith(
        "decides by a value or size that is not known before the call (TraceError, test_by"
    )
    for _ in range(2):
        assert holds(fused, model, torch.randn(2, 4, 8), mask_of(2))


def test_a_question_that_raises_is_answered_by_the_forward():
    _, fused = optimized(lambda self, x, mask: (mask.view(2, 4) == 1).all())
    with torch.no_grad(), pytest.raises(RuntimeError, match="shape '\\[2, 4\\]' is invalid"):
        fused(torch.randn(3, 4, 8), mask_of(3))
    (why,) = fxfuse.report(fused).calls[""].reasons
    assert why.endswith("expected True")


def test_nothing_is_asked_while_a_stream_is_captured(monkeypatch):
    """Whoever waits for the GPU then ends the capture; the forward decides by itself what to do."""
    _, fused = optimized(whole)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with torch.no_grad():
        fused(torch.randn(2, 4, 8), mask_of(2))
    (why,) = fxfuse.report(fused).calls[""].reasons
    assert why.endswith("expected True")


def test_without_an_example_nothing_is_decided():
    fused = fxfuse.optimize(Masked(whole).eval())
    (refused,) = [u for u in fxfuse.report(fused).uncaptured if not u.path]
    assert refused.reason.startswith("decides by a value")


def test_a_function_too():
    def act(x, weight, mask):
        y = F.gelu(F.linear(x, weight))
        return y if mask.all() else y * mask

    x, weight, mask = torch.randn(2, 8), torch.randn(4, 8), mask_of(2)
    fused = fxfuse.optimize(act, (x, weight, mask), tune="off")
    assert fxfuse.report(fused).fused
    mask[0, 0] = 0
    with torch.no_grad():
        assert torch.allclose(fused(x, weight, mask), act(x, weight, mask), atol=1e-6)
    assert fxfuse.report(fused).calls[""].fallback == 1


def test_whoever_asks_whether_it_is_traced_hears_no():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = F.relu(self.linear(x))
            return y * 0 if isinstance(x, fx.Proxy) else y

    model = Model().eval()
    x = torch.randn(2, 8)
    for fused in (fxfuse.optimize(model), fxfuse.optimize(model, x, tune="off")):
        assert [r.path for r in fxfuse.report(fused).regions] == [""]
        assert holds(fused, model, x)


def test_a_question_takes_so_many_nodes_at_most(monkeypatch):
    monkeypatch.setattr(by_value, "_MOST", 2)
    _, fused = optimized(whole)
    assert [r.path for r in fxfuse.report(fused).regions] == [""]
    monkeypatch.setattr(by_value, "_MOST", 1)
    _, fused = optimized(whole)
    assert "" not in [r.path for r in fxfuse.report(fused).regions]


def test_inside_a_model_that_has_no_graph():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Masked(whole)

        def forward(self, x, mask):
            return self.inner(x if x.sum() < 1e9 else x * 2, (mask > 0).long())

    model = Outer().eval()
    fused = fxfuse.optimize(model, (torch.randn(2, 4, 8), mask_of(2)), tune="off")
    report = fxfuse.report(fused)
    assert [r.path for r in report.regions if r.installed] == ["inner"]
    assert "mul" not in str(fxfuse.graphs(fused)["inner"].graph)
    for mask in (mask_of(3), torch.zeros(3, 4)):
        assert holds(fused, model, torch.randn(3, 4, 8), mask)
    assert (report.calls["inner"].fused, report.calls["inner"].fallback) == (1, 1)


def test_only_small_arguments_without_floating_point_are_kept(monkeypatch):
    monkeypatch.setattr(arguments, "_MOST_TOLD", 8)
    given = torch.ones(8), torch.ones(8, dtype=torch.long), torch.ones(9, dtype=torch.bool)
    (floating, small, large), _ = arguments.Recorded.of(given, {}).told
    assert (floating, large) == (Fact.of(given[0]), Fact.of(given[2]))
    assert torch.equal(small, given[1])
    given[1].zero_()
    assert small.all(), "a forward may write into what it was given"
