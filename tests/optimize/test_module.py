"""A module comes back as what it was; options, report, graphs; and restore undoes it all."""

from __future__ import annotations

import copy
import inspect
import json

import pytest
import torch
from torch import fx, nn

import fxfuse
from tests.models.answers import right
from tests.optimize.model import MLP, WIDTH, PlusOne, Stack, assert_answers, calls_of


def test_the_same_module(pair):
    model, optimized = pair
    assert type(optimized) is MLP
    assert optimized is not model
    assert [*optimized.state_dict()] == [*model.state_dict()]
    ours, theirs = dict(optimized.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    assert optimized.offset is model.offset


def test_the_original_is_untouched(x):
    model = Stack().eval()
    before = {path: dict(m.__dict__) for path, m in model.named_modules()}
    fxfuse.optimize(model, x)
    after = {path: dict(m.__dict__) for path, m in model.named_modules()}
    assert before.keys() == after.keys()
    for path in before:
        assert before[path].keys() == after[path].keys()
        assert all(after[path][name] is value for name, value in before[path].items())


def test_inplace(x):
    model = MLP().eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        optimized = fxfuse.optimize(model, x, inplace=True)
        assert optimized is model
        assert right(model(x), twin, x)
        assert calls_of(model).fused == 1
        fxfuse.restore(model)
    assert set(model.__dict__) == set(MLP().__dict__)


def test_signature_and_documentation(pair):
    model, optimized = pair
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    assert inspect.getfullargspec(optimized.forward) == inspect.getfullargspec(model.forward)
    assert optimized.forward.__doc__ == "The documented forward."
    assert optimized.forward.__name__ == "forward"
    assert optimized.forward.__qualname__ == model.forward.__qualname__


def test_twice_changes_nothing(pair, x):
    _, optimized = pair
    before = dict(optimized.__dict__)
    assert fxfuse.optimize(optimized) is optimized
    assert fxfuse.optimize(optimized, x) is optimized
    assert optimized.__dict__ == before


def test_a_model_of_optimized_parts(x):
    stack = Stack().eval()
    stack.blocks[0] = fxfuse.optimize(stack.blocks[0])
    optimized = fxfuse.optimize(stack, x)
    assert len(fxfuse.report(optimized).fused) == 2
    with torch.no_grad():
        assert right(optimized(x), stack, x)


def test_restore_puts_back_exactly(pair, x):
    model, optimized = pair
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
    assert fxfuse.restore(optimized) is optimized
    assert set(optimized.__dict__) == set(model.__dict__)
    with torch.no_grad():
        assert torch.equal(optimized(x), model(x))
    with pytest.raises(fxfuse.errors.NotOptimized):
        fxfuse.report(optimized)
    with pytest.raises(fxfuse.errors.NotOptimized):
        fxfuse.restore(optimized)
    with torch.no_grad():
        assert_answers(fxfuse.optimize(optimized), model, x, runs="fused")


def test_an_instance_forward_stays(x):
    model = Stack().eval()
    own = lambda x: x * 0.5  # noqa: E731
    model.blocks[1].forward = own
    optimized = fxfuse.optimize(model, x, inplace=True)
    assert model.blocks[1].forward is own
    assert "blocks.1" not in fxfuse.report(optimized).calls
    with torch.no_grad():
        assert torch.equal(optimized(x), optimized.blocks[0](x) * 0.5)
    fxfuse.restore(optimized)
    assert model.blocks[1].forward is own


def test_restore_is_refused_where_somebody_wrapped_the_forward(pair, x):
    model, optimized = pair
    fused = optimized.forward
    optimized.forward = lambda x: fused(x) + 1
    with pytest.raises(fxfuse.errors.RestoreRefused, match="replaced after"):
        fxfuse.restore(optimized)
    with torch.no_grad():
        assert right(optimized(x), nn.Sequential(model, PlusOne()), x)
    optimized.forward = fused
    fxfuse.restore(optimized)
    assert set(optimized.__dict__) == set(model.__dict__)


def test_strict():
    with pytest.raises(fxfuse.errors.NothingFused, match="nothing was fused"):
        fxfuse.optimize(nn.Linear(WIDTH, WIDTH), strict={"fuse"})
    assert fxfuse.report(fxfuse.optimize(MLP(), strict={"fuse"})).fused


def test_exact_numerics_calls_the_same_kernels(x):
    model = MLP().eval()
    optimized = fxfuse.optimize(model, x, numerics="exact")
    assert not fxfuse.report(optimized).fused
    with torch.no_grad():
        assert torch.equal(optimized(x), model(x))
    assert any("exact" in e.reason for e in fxfuse.report(optimized).kept)


@pytest.mark.parametrize(
    ("exclude", "fused"),
    [("blocks.0", ["blocks.1"]), ("MLP", []), ("linear_act", []), (("blocks.0", "blocks.1"), []), ((), ["", ""])],
)
def test_exclude(x, exclude, fused):
    stack = Stack().eval()
    optimized = fxfuse.optimize(stack, x, exclude=exclude)
    nodes = [e.source for e in fxfuse.report(optimized).fused]
    assert len(nodes) == len(fused)
    excluded = {u.path for u in fxfuse.report(optimized).uncaptured if u.reason == "excluded by Options.exclude"}
    named = {exclude} if isinstance(exclude, str) else set(exclude)
    assert excluded == {
        path for path, m in stack.named_modules() if path in named or (type(m).__name__ in named and path)
    }
    with torch.no_grad():
        assert right(optimized(x), stack, x)


@pytest.mark.parametrize(("exclude", "fused"), [("blocks.0.up", 1), ("Linear", 0), ("GELU", 0), ("blocks.1.act", 1)])
@pytest.mark.parametrize("example", [False, True])
def test_exclude_of_one_of_torchs_own_modules(x, exclude, fused, example):
    stack = Stack().eval()
    optimized = fxfuse.optimize(stack, x if example else None, exclude=exclude)
    assert len(fxfuse.report(optimized).fused) == fused
    with torch.no_grad():
        assert right(optimized(x), stack, x)
    _, report = fxfuse.rewrite(fx.symbolic_trace(stack), options=fxfuse.Options(exclude=exclude))
    assert len(report.fused) == fused


def test_unknown_options():
    with pytest.raises(ValueError, match="takes 'fused' or 'exact'"):
        fxfuse.optimize(MLP(), numerics="fast")
    with pytest.raises(ValueError, match="takes 'fuse'"):
        fxfuse.optimize(MLP(), strict={"speed"})
    with pytest.raises(TypeError):
        fxfuse.optimize(MLP(), speed=True)


def test_report_as_data(pair, x):
    _, optimized = pair
    report = fxfuse.report(optimized)
    assert {e.kind for e in report.events} <= {"fused", "kept", "tidied", "lowered"}
    (event,) = report.fused
    assert (event.rule, event.region) == ("linear_act", "")
    assert "optimize/model.py:" in event.source
    assert "self.up(x)" in event.source
    assert set(event.nodes) <= {n.name for n in fxfuse.graphs(optimized, original=True)[""].graph.nodes}
    assert [r.path for r in report.regions if r.installed] == [""]
    assert (report.coverage.seen, report.coverage.captured) == (2, 2)
    assert not report.uncaptured
    with torch.no_grad():
        optimized(x)
    data = json.loads(report.to_json())
    assert data["calls"][""]["fused"] == 1
    assert data["events"][0].keys() >= {"kind", "rule", "region", "nodes", "source", "reason"}
    assert "linear_act" in str(report)
    assert "| linear_act" in report.to_markdown()


def test_graphs(pair, x):
    model, optimized = pair
    for original, target in ((False, "linear_act"), (True, None)):
        graph = fxfuse.graphs(optimized, original=original)[""]
        names = [getattr(n.target, "__name__", n.target) for n in graph.graph.nodes]
        assert (target in names) == (target is not None)
        with torch.no_grad():
            assert right(graph(x), model, x)
            assert right(fx.Interpreter(graph).run(x), model, x)
            assert right(fx.Transformer(graph).transform()(x), model, x)
        graph.graph.lint()
        graph.graph.print_tabular()
        assert "def forward" in graph.code
        assert "class" in graph.print_readable(print_output=False)
        assert next(iter(graph.parameters())) is next(iter(model.parameters()))


def test_graphs_are_the_callers_own(pair, x):
    """To edit one changes nothing about the model, nor about its copies."""
    model, optimized = pair
    for original in (False, True):
        gm = fxfuse.graphs(optimized, original=original)[""]
        (output,) = (n for n in gm.graph.nodes if n.op == "output")
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_function(torch.neg, (output.args[0],)),)
        gm.recompile()
        with torch.no_grad():
            assert right(-gm(x), model, x)
            assert_answers(optimized, model, x, runs="fused")
            assert_answers(copy.deepcopy(optimized), model, x, runs="fused")
            assert right(fxfuse.graphs(optimized, original=original)[""](x), model, x)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_graph_module_and_back(x, inplace):
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).eval())
    twin, graph, code = copy.deepcopy(gm), gm.graph, gm.code
    optimized = fxfuse.optimize(gm, x, inplace=inplace)
    assert (optimized is gm) == inplace
    assert (gm.code == code) == (not inplace)
    assert "linear_act" in optimized.code
    (original,) = fxfuse.graphs(optimized, original=True).values()
    assert original.code == code
    with torch.no_grad():
        assert right(optimized(x), twin, x)
        assert torch.equal(original(x), twin(x))
        assert fxfuse.restore(optimized) is optimized
        assert torch.equal(optimized(x), twin(x))
    assert optimized.code == code
    assert (optimized.graph is graph) == inplace
    assert set(optimized.__dict__) == set(twin.__dict__)
    with pytest.raises(fxfuse.errors.NotOptimized):
        fxfuse.restore(optimized)
