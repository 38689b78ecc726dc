"""Autocast, dtypes, tensor subclasses, tracers and function transforms see the model's own operators."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.answers import right
from tests.optimize.model import WIDTH, assert_answers, calls_of


def test_autocast(pair, x):
    model, optimized = pair
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_answers(optimized, model, x, runs="plain", why="autocast is on")


def test_float64(pair, x):
    model, optimized = pair
    optimized.double()
    with torch.no_grad():
        assert_answers(optimized, model, x.double(), runs="plain", why="argument x is torch.float64")


def test_tensor_subclass(pair, x):
    model, optimized = pair

    class Mine(torch.Tensor):
        pass

    given = x.as_subclass(Mine)
    with torch.no_grad():
        assert_answers(
            optimized, model, given, runs="fallback", why="argument x: expected a plain tensor, found a Mine"
        )
        assert type(optimized(given)) is Mine


@pytest.mark.parametrize("layout", ["sparse", "nested"])
def test_other_layouts(pair, x, layout):
    """Their Python type is Tensor as well."""
    model, optimized = pair
    given = x.to_sparse() if layout == "sparse" else torch.nested.nested_tensor([x, x[:2]])
    with torch.no_grad():
        try:
            expected = model.up(given)
        except (RuntimeError, NotImplementedError) as error:
            expected = error
        if isinstance(expected, Exception):
            with pytest.raises(type(expected)):
                optimized(given)
        else:
            try:
                expected = model(given)
            except (RuntimeError, NotImplementedError) as error:
                with pytest.raises(type(error)):
                    optimized(given)
            else:
                assert optimized(given).layout == expected.layout


def test_torch_compile(pair, x):
    model, optimized = pair
    torch._dynamo.reset()
    compiled = torch.compile(optimized, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert right(compiled(x), model, x)
        y = torch.randn(7, WIDTH)
        assert right(compiled(y), model, y)
    assert calls_of(optimized).fallback == 0


def test_torch_export(pair, x):
    model, optimized = pair
    with torch.no_grad():
        exported = torch.export.export(optimized, (x,))
        assert right(exported.module()(x), model, x)


def test_jit_trace(pair, x):
    model, optimized = pair
    with torch.no_grad():
        traced = torch.jit.trace(optimized, (x,))
        assert right(traced(x), model, x)
    assert "torch.jit.trace is tracing" in calls_of(optimized).reasons


def test_fx_trace(pair, x):
    model, optimized = pair
    traced = fx.symbolic_trace(optimized, concrete_args={"residual": None, "twice": False})
    with torch.no_grad():
        assert right(traced(x), model, x)


def test_vmap(pair):
    model, optimized = pair
    given = torch.randn(4, 3, WIDTH)
    with torch.no_grad():
        got = torch.func.vmap(optimized)(given)
        assert right(got, model, given)
    assert "inside a functorch transform" in calls_of(optimized).reasons


def test_functional_call(pair, x):
    model, optimized = pair
    replaced = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        got = torch.func.functional_call(optimized, replaced, (x,))
        twin = copy.deepcopy(model)
        twin.load_state_dict(replaced, strict=False)
        assert right(got, twin, x)
        assert_answers(optimized, model, x, runs="fused")


def test_grad_of_a_functional_call(pair, x):
    model, optimized = pair
    state = {name: p.detach() for name, p in model.named_parameters()}

    def loss(m: nn.Module) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
        return lambda state: torch.func.functional_call(m, state, (x,)).square().sum()

    ours, theirs = (torch.func.grad(loss(m))(state) for m in (optimized, model))
    assert all(torch.equal(ours[name], theirs[name]) for name in state)


def test_forward_mode(pair, x):
    model, optimized = pair
    ours, theirs = (torch.func.jvp(m, (x,), (torch.ones_like(x),)) for m in (optimized, model))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_fake_tensors(pair):
    _, optimized = pair
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        got = optimized(torch.empty(5, WIDTH))
    assert got.shape == (5, WIDTH)
    assert "a torch dispatch mode is active" in calls_of(optimized).reasons
