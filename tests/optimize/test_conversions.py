"""Casts and moves, on the optimized model or on the one it shares its parameters with, by every setting of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxfuse
from tests.models.answers import right
from tests.optimize.model import HIDDEN, MLP, WIDTH, assert_answers, calls_of

Conversion = Callable[[nn.Module], Any]


@pytest.fixture(params=["data", "swap", "overwrite"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How ``.to()`` puts converted values into a module."""
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion(), future.get_overwrite_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(request.param == "swap")
    future.set_overwrite_module_params_on_conversion(request.param == "overwrite")
    yield request.param
    future.set_swap_module_params_on_conversion(before[0])
    future.set_overwrite_module_params_on_conversion(before[1])


CASTS: dict[str, tuple[Conversion, torch.dtype, str]] = {
    "half": (lambda m: m.half(), torch.float16, "fused"),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16, "fused"),
    "double": (lambda m: m.double(), torch.float64, "plain"),
    "to dtype": (lambda m: m.to(torch.bfloat16), torch.bfloat16, "fused"),
    "to like": (lambda m: m.to(torch.empty(0, dtype=torch.float16)), torch.float16, "fused"),
    "to device and dtype": (lambda m: m.to("cpu", torch.float16), torch.float16, "fused"),
    "type": (lambda m: m.type(torch.bfloat16), torch.bfloat16, "fused"),
    "apply": (lambda m: m._apply(lambda t: t.bfloat16()), torch.bfloat16, "fused"),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_and_back(pair, x, cast):
    """The region stays, in each dtype, with the values that the cast left."""
    model, optimized = pair
    convert, dtype, runs = CASTS[cast]
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
        twin = convert(copy.deepcopy(model))
        convert(optimized)
        assert {t.dtype for t in optimized.state_dict().values()} == {dtype}
        assert_answers(optimized, twin, x.to(dtype), runs=runs)
        optimized.float(), twin.float()
        assert_answers(optimized, twin, x, runs="fused")


@pytest.mark.parametrize("cast", CASTS)
def test_parameters_stay_shared(pair, x, cast, way):
    """A cast of either acts on both, as long as torch keeps the Parameter objects."""
    model, optimized = pair
    convert, dtype, runs = CASTS[cast]
    convert(model)
    shared = [a is b for a, b in zip(model.parameters(), optimized.parameters(), strict=True)]
    assert shared == [way != "overwrite"] * len(shared)
    with torch.no_grad():
        if way == "overwrite":  # the buffer is cast, the parameters of the copy are not: what that gives is torch's
            for ours, theirs in zip(optimized.parameters(), model.parameters(), strict=True):
                ours.data = theirs.data
        assert_answers(optimized, model, x.to(dtype), runs=runs)


def test_one_module_cast(pair, x):
    """Layers in a wider dtype than the rest are what torch refuses, in the same words."""
    optimized = pair[1]
    model = copy.deepcopy(pair[0])
    optimized.up.double(), model.up.double()
    with torch.no_grad():
        with pytest.raises(RuntimeError) as expected:
            model(x)
        with pytest.raises(RuntimeError) as got:
            optimized(x)
    assert str(got.value) == str(expected.value)
    optimized.up.float(), model.up.float()
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


def test_requires_grad_acts_on_both(pair, x):
    model, optimized = pair
    optimized.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    assert_answers(optimized, model, x, runs="fused")
    model.requires_grad_(True)
    assert_answers(optimized, model, x, runs="plain", why="gradients are needed")


def test_to_meta_and_back(pair, x):
    """Weights taken away and given again: what runs in between has no values, what runs after has the new ones."""
    model, optimized = pair
    twin = copy.deepcopy(model)
    new = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    with torch.no_grad():
        for m in (optimized, twin):
            m.to("meta")
            assert m(x.to("meta")).is_meta
            m.to_empty(device="cpu")
            m.load_state_dict(new)
        assert_answers(optimized, twin, x, runs="fused")


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("load", ["to_empty", "assign"])
def test_optimized_without_values(x, example, load):
    """A model may be optimized on the meta device and loaded afterwards."""
    with torch.device("meta"):
        model = MLP().eval()
    twin = MLP().eval()
    optimized = fxfuse.optimize(model, x.to("meta") if example else None)
    if load == "to_empty":
        optimized.to_empty(device="cpu")
    optimized.load_state_dict(twin.state_dict(), assign=load == "assign")
    with torch.no_grad():
        assert_answers(optimized, twin, x, runs="fused")


def test_shared_and_tied_weights(x, way):
    """One Parameter in two layers, one layer in two places: a cast, a step and a load reach each once."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.again.weight = self.first.weight
            self.block = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            self.blocks = nn.ModuleList([self.block, self.block])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return torch.sigmoid(self.again(torch.relu(self.first(x))))

    for example in (None, x):
        model = Tied().eval()
        optimized = fxfuse.optimize(model, example)
        twin = copy.deepcopy(model)
        for m in (optimized, twin):
            m.bfloat16().float()
            assert (m.first.weight is m.again.weight) == (way != "overwrite")
            m(x).square().sum().backward()
            torch.optim.SGD(m.parameters(), lr=0.01).step()
            m.load_state_dict({name: value * 1.5 for name, value in m.state_dict().items()})
        with torch.no_grad():
            assert right(optimized(x), twin, x)
        assert calls_of(optimized).fused == 1
