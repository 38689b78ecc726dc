"""Gradients, inference, training flags, autocast and defaults, at any time; dtypes and kinds of tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from tests.models.answers import right
from tests.optimize.model import HIDDEN, MLP, SMALL, WIDTH, assert_answers, calls_of


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


def test_fx_trace(pair, x):
    model, optimized = pair
    traced = fx.symbolic_trace(optimized, concrete_args={"residual": None, "twice": False})
    with torch.no_grad():
        assert right(traced(x), model, x)


# gradients


GRAD_MODES: dict[str, tuple[Callable[[], Any], str]] = {
    "grad": (torch.enable_grad, "plain"),
    "no_grad": (torch.no_grad, "fused"),
    "inference": (torch.inference_mode, "fused"),
    "inference off": (lambda: torch.inference_mode(False), "plain"),
    "grad inside no_grad": (lambda: _both(torch.no_grad, torch.enable_grad), "plain"),
    "no_grad inside inference": (lambda: _both(torch.inference_mode, torch.no_grad), "fused"),
    "grad inside inference": (lambda: _both(torch.inference_mode, torch.enable_grad), "plain"),
    "set_grad_enabled": (lambda: torch.set_grad_enabled(False), "fused"),
}


@contextlib.contextmanager
def _both(outer: Callable[[], Any], inner: Callable[[], Any]) -> Iterator[None]:
    with outer(), inner():
        yield


@pytest.mark.parametrize("mode", GRAD_MODES)
def test_grad_modes(pair, x, mode):
    """Each for one call, between fused ones; what comes out is an inference tensor, or needs a gradient, as eager's."""
    model, optimized = pair
    enter, runs = GRAD_MODES[mode]
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
    with enter():
        assert_answers(optimized, model, x, runs=runs)
        ours, theirs = optimized(x), model(x)
        for about in ("requires_grad", "is_leaf"):
            assert getattr(ours, about) == getattr(theirs, about), about
        assert ours.is_inference() == theirs.is_inference()
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


def test_inference_tensors_outside(pair, x):
    """What was made inside inference mode is used outside, as argument, weight and buffer."""
    model, optimized = pair
    model.requires_grad_(False)
    with torch.inference_mode():
        made, weight, offset = torch.randn(3, WIDTH), torch.randn(HIDDEN, WIDTH), torch.ones(WIDTH)
    with torch.no_grad():
        assert_answers(optimized, model, made, runs="fused")
    assert_answers(optimized, model, made, runs="fused")
    for m in (optimized, model):
        m.up.weight = nn.Parameter(weight, requires_grad=False)
        m.offset = offset
    assert optimized.up.weight.is_inference()
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
        assert_answers(optimized, model, made, runs="fused")
    with torch.inference_mode():
        weight.mul_(2)
        assert_answers(optimized, model, x, runs="fused")
    assert_answers(optimized, model, x, runs="fused")
    given = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        optimized(given)


@pytest.mark.parametrize("example", [False, True])
def test_a_model_made_in_inference_mode(x, example):
    with torch.inference_mode():
        model = MLP().eval()
    optimized = fxfuse.optimize(model, x if example else None)
    assert not fxfuse.report(optimized).notes
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_answers(optimized, model, x, runs="fused")
    model.requires_grad_(False)
    assert_answers(optimized, model, x, runs="fused")


@pytest.mark.parametrize("example", [False, True])
def test_optimized_in_inference_mode(x, example):
    """The model is not what the mode makes of tensors: it can be trained afterwards."""
    model = MLP().eval()
    with torch.inference_mode():
        optimized = fxfuse.optimize(model, x if example else None)
        assert_answers(optimized, model, x, runs="fused")
    assert not any(t.is_inference() for t in (*optimized.parameters(), *optimized.buffers()))
    assert_answers(optimized, model, x, runs="plain", why="gradients are needed")
    optimized(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# training flags


class Nested(nn.Module):
    """Modules whose forward depends on the flag, at several depths: torch's own, and one that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(WIDTH, SMALL), nn.GELU(), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(SMALL)
        self.blocks = nn.ModuleList([Noisy(), Noisy()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return x


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(SMALL, SMALL), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(torch.relu(self.up(x)), 0.5, self.training)
        return self.act(y if not self.training else y * 2)


PATHS = [path for path, _ in Nested().named_modules()]


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_training_flags_anywhere(x, path, example):
    """train() and eval() of one module: each call is the model's own, random numbers and running statistics too."""
    model = Nested().eval()
    twin = copy.deepcopy(model)
    optimized = fxfuse.optimize(model, x if example else None)
    assert fxfuse.report(optimized).fused
    fused = 0
    with torch.no_grad():
        for flag in (True, False):
            for m in (optimized, twin):
                m.get_submodule(path).train(flag)
            assert [m.training for m in optimized.modules()] == [m.training for m in twin.modules()]
            torch.manual_seed(1)
            ours = optimized(x)
            assert right(ours, _Seeded(twin), x)
            assert torch.equal(optimized.norm.running_mean, twin.norm.running_mean)
            if flag:
                fused = sum(c.fused for c in fxfuse.report(optimized).calls.values())
    # In evaluation the regions are back.
    assert sum(c.fused for c in fxfuse.report(optimized).calls.values()) > fused


class _Seeded(nn.Module):
    """The same random numbers at each call, of which ``right`` makes two."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return self.module(x)


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("cls", [MLP, Nested])
def test_optimized_in_training_mode(x, cls, example):
    """Regions serve evaluation, so that is what an example is run in."""
    model = cls().train()
    running = {name: b.clone() for name, b in model.named_buffers()}
    optimized = fxfuse.optimize(model, x if example else None)
    assert all(m.training for m in (*model.modules(), *optimized.modules()))
    assert all(torch.equal(b, running[name]) for name, b in model.named_buffers())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.manual_seed(1)
        ours = optimized(x)
        assert right(ours, _Seeded(twin), x)
        assert calls_of(optimized).fused == 0
        optimized.eval(), twin.eval()
        twin.load_state_dict(optimized.state_dict())
        assert_answers(optimized, twin, x, runs="fused")


# defaults


def test_default_dtype(pair, x):
    model, optimized = pair
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            torch.set_default_dtype(dtype)
            with torch.no_grad():
                assert_answers(optimized, model, x, runs="fused")
            assert optimized(x).dtype is torch.float32
    finally:
        torch.set_default_dtype(before)


class Makes(nn.Module):
    """Makes tensors in its forward, whose dtype and device are the defaults of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.relu(self.up(x)), torch.ones(3), torch.tensor([1.0, 2.0]) * 2


@pytest.mark.parametrize("example", [False, True])
def test_defaults_of_the_call_hold_for_what_it_makes(x, example):
    model = Makes().eval()
    optimized = fxfuse.optimize(model, x if example else None)
    before = torch.get_default_dtype()
    facts = lambda m: [(t.dtype, t.device) for t in m(x)]  # noqa: E731
    try:
        with torch.no_grad():
            assert facts(optimized) == facts(model)
            torch.set_default_dtype(torch.float64)
            assert facts(optimized) == facts(model)
            assert facts(model)[1][0] is torch.float64
            with torch.device("meta"):
                assert facts(optimized) == facts(model)
                assert facts(model)[1][1].type == "meta"
    finally:
        torch.set_default_dtype(before)


def test_default_device(pair, x):
    """A default device says where new tensors go; it is no reason to leave the fused graph."""
    model, optimized = pair
    with torch.no_grad():
        for device in ("cpu", "meta"):
            with torch.device(device):
                assert_answers(optimized, model, x, runs="fused")
            torch.set_default_device(device)
            try:
                assert_answers(optimized, model, x, runs="fused")
            finally:
                torch.set_default_device(None)


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_optimized_under_a_default_device(x, device, example):
    model, makes = MLP().eval(), Makes().eval()
    with torch.device(device):
        optimized = fxfuse.optimize(model, x if example else None)
        made = fxfuse.optimize(makes, x if example else None)
        with torch.no_grad():
            assert_answers(optimized, model, x, runs="fused")
            assert [t.device for t in made(x)] == [t.device for t in makes(x)]
    assert not fxfuse.report(optimized).notes
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
        assert [t.device for t in made(x)] == [t.device for t in makes(x)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_between_calls(pair, x, dtype):
    model, optimized = pair
    with torch.no_grad():
        for enabled in (True, False, True):
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                assert_answers(optimized, model, x, runs="plain" if enabled else "fused")
                assert optimized(x).dtype is model(x).dtype
        with torch.autocast("cpu", dtype=dtype), torch.autocast("cpu", enabled=False):
            assert_answers(optimized, model, x, runs="fused")
    with torch.autocast("cpu", dtype=dtype):
        gradients = []
        for m in (optimized, model):
            m.zero_grad()
            m(x).float().square().sum().backward()
            gradients.append([p.grad.clone() for p in m.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("example", [False, True])
def test_optimized_under_autocast(x, example):
    model = MLP().eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimized = fxfuse.optimize(model, x if example else None)
        with torch.no_grad():
            assert_answers(optimized, model, x, runs="plain", why="autocast is on")
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
