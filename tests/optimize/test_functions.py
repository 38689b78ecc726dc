"""Functions come back as functions, graphs as graphs."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from tests.models.answers import right
from tests.optimize.model import HIDDEN, MLP, SMALL, WIDTH, assert_answers


def test_function(x):
    w = torch.randn(WIDTH, SMALL)

    def act(
        a: torch.Tensor, /, b: torch.Tensor, *, bias: torch.Tensor | None = None, twice: bool = False
    ) -> torch.Tensor:
        """Documented."""
        y = torch.sigmoid(a @ b + bias) if bias is not None else torch.sigmoid(a @ b)
        return y * 2 if twice else y

    optimized = fxfuse.optimize(act, (x, w))
    assert optimized is not act
    assert optimized.__wrapped__ is act
    assert inspect.signature(optimized) == inspect.signature(act)
    assert (optimized.__name__, optimized.__doc__) == ("act", "Documented.")
    assert len(fxfuse.report(optimized).fused) == 1
    assert_answers(optimized, act, x, w, runs="fused")
    assert_answers(optimized, act, x, b=w, bias=None, runs="fused")
    assert_answers(optimized, act, x, w, bias=torch.randn(SMALL), runs="fallback")
    assert_answers(optimized, act, x, w, twice=True, runs="fallback")
    assert_answers(optimized, act, x.requires_grad_(), w, runs="plain", why="gradients are needed")
    assert fxfuse.optimize(optimized) is optimized
    assert fxfuse.restore(optimized) is act


_FACTOR = 2.0


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * _FACTOR


@pytest.mark.parametrize("with_example", [False, True])
def test_function_over_names(x, monkeypatch, with_example):
    w, shift, tables = torch.randn(SMALL, WIDTH), 1.0, [torch.zeros(SMALL)]

    def act(x: torch.Tensor) -> torch.Tensor:
        return _scaled(torch.relu(F.linear(x, w, tables[0]))) + shift

    def change() -> None:
        nonlocal w, shift
        w, shift = torch.randn(SMALL, WIDTH), 5.0

    optimized = fxfuse.optimize(act, x if with_example else None)
    assert len(fxfuse.report(optimized).fused) == 1
    assert_answers(optimized, act, x, runs="fused")
    w.mul_(2)
    assert_answers(optimized, act, x, runs="fused")
    tables[0] = torch.ones(SMALL)
    assert_answers(optimized, act, x, runs="fallback", why="tables is no longer what it was")
    change()
    assert_answers(optimized, act, x, runs="fallback")
    fresh = fxfuse.optimize(act)
    assert_answers(fresh, act, x, runs="fused")
    monkeypatch.setitem(globals(), "_FACTOR", 7.0)
    assert_answers(fresh, act, x, runs="fallback", why="_FACTOR is no longer what it was")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda m: lambda x: m(x), "calls the module MLP, which may change"),
        (lambda m: m.forward, "it is a method"),
        (lambda m: lambda x, kind="a": m.act(x) if x.sum() > 0 else x, "decides by a value"),
        (lambda m: lambda type: torch.relu(F.linear(type, torch.ones(WIDTH, WIDTH))), "its parameter type"),
    ],
)
def test_function_left_as_it_is(x, make, reason):
    function = make(MLP().eval())
    optimized = fxfuse.optimize(function)
    (uncaptured,) = fxfuse.report(optimized).uncaptured
    assert uncaptured.reason.startswith(reason)
    assert inspect.signature(optimized) == inspect.signature(function)
    with torch.no_grad():
        assert torch.equal(optimized(x), function(x))
    assert fxfuse.restore(optimized) == function


def test_graph_module(x):
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH)).eval())
    before = str(traced.graph)
    optimized = fxfuse.optimize(traced, x)
    assert isinstance(optimized, fx.GraphModule)
    assert str(traced.graph) == before
    assert "linear_act" in optimized.code
    assert [*optimized.state_dict()] == [*traced.state_dict()]
    assert all(a is b for a, b in zip(optimized.parameters(), traced.parameters(), strict=True))
    with torch.no_grad():
        for run in (optimized, fx.Interpreter(optimized).run, fx.Transformer(optimized).transform()):
            assert right(run(x), traced, x)
        assert right(copy.deepcopy(optimized)(x), traced, x)
    optimized.graph.lint()
    optimized.graph.print_tabular()
    assert "linear_act" in optimized.print_readable(print_output=False)
    assert fxfuse.optimize(optimized) is optimized
    assert [e.rule for e in fxfuse.report(optimized).fused] == ["linear_act"]
    grown = x.clone().requires_grad_()
    ours, theirs = (torch.autograd.grad(m(grown).sum(), grown)[0] for m in (optimized, traced))
    assert torch.equal(ours, theirs)


def test_rewrite(x):
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh()).eval())
    before = str(traced.graph)
    graph, report = fxfuse.rewrite(traced)
    assert [e.rule for e in report.fused] == ["linear_act"]
    assert str(traced.graph) == before
    with torch.no_grad():
        assert right(graph(x), traced, x)
    with pytest.raises(TypeError):
        fxfuse.rewrite(MLP())


def test_an_argument_that_is_called_as_a_built_in_function_is():
    """torch.fx gives its node another name, input_1; what is known of it, and checked, is the argument's."""

    def function(input, sum, filter):
        return torch.relu(input @ sum + filter)

    x, w, b = torch.randn(3, 8), torch.randn(8, 4), torch.randn(4)
    optimized = fxfuse.optimize(function, (x, w, b))
    assert [event.rule for event in fxfuse.report(optimized).fused] == ["matmul_add", "linear_act"]
    with torch.no_grad():
        for operands in ((x, w, b), (x, w, torch.randn(3, 4)), (x, torch.randn(2, 8, 4), b), (x[0], w, b)):
            torch.testing.assert_close(optimized(*operands), function(*operands))
    assert fxfuse.report(optimized).calls[""].fallback == 2
