"""The model that these tests optimize, and one call of it with its entry in the ledger."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxfuse
from fxfuse.report import Calls
from tests.models.answers import right

WIDTH, HIDDEN = 64, 256
SMALL = 32
"""Too small for the fused kernels, so that a function is equal to the last bit."""


class MLP(nn.Module):
    """Something of everything that a trace takes for granted."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.5)
        self.scale, self._shift, self.sizes, self.last = 1.0, 0.0, [1.0, 0.0], torch.neg
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, *, twice: bool = False) -> torch.Tensor:
        """The documented forward."""
        y = self.down(self.drop(self.act(self.up(x)))) * self.scale * self.gain + self._shift + self.offset
        y = self.last(y) * self.sizes[0]
        y = y if residual is None else y + residual
        return y * 2 if twice else y


class PlusOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def calls_of(optimized: Any, path: str = "") -> Calls:
    return fxfuse.report(optimized).calls[path]


def assert_answers(optimized: Any, model: Any, *args: Any, runs: str, why: str = "", **kwargs: Any) -> None:
    """One call: the model's answer, and in the ledger it ``runs`` fused, plain or fallback, for the reason ``why``."""
    before = copy.deepcopy(calls_of(optimized))
    got = optimized(*args, **kwargs)
    after = calls_of(optimized)
    went = {kind: getattr(after, kind) - getattr(before, kind) for kind in ("fused", "plain", "fallback")}
    assert went == {**dict.fromkeys(went, 0), runs: 1}, after.reasons
    assert right(got, model, *args, **kwargs)
    if why:
        assert why in dict(after.reasons - before.reasons), after.reasons


Change = Callable[[Any], Any]
"""Does something to a model that is to change its answer."""


def assert_follows(pair: tuple[nn.Module, nn.Module], change: Change, *args: Any, runs: str) -> None:
    """The same change to an optimized model and to a plain one of its own weights: the next call answers alike.

    ``runs``: what the ledger says of it; "" where any entry will do, as it depends on how soon a region gives up.
    """
    model, optimized = pair
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert_answers(optimized, model, *args, runs="fused")
        before = twin(*args)
    change(optimized)
    change(twin)
    with torch.no_grad():
        for _ in range(2):
            if runs:
                assert_answers(optimized, twin, *args, runs=runs)
            else:
                assert_counted(optimized, twin, *args)
        assert not same_bits(before, twin(*args)), "the change is to change the answer"


def assert_counted(optimized: nn.Module, model: nn.Module, *args: Any) -> None:
    """One call: the model's answer, and an entry in the ledger of some region."""
    before = entries(optimized)
    assert right(optimized(*args), model, *args)
    assert entries(optimized) > before


def entries(optimized: nn.Module) -> int:
    return sum(c.fused + c.plain + c.fallback for c in fxfuse.report(optimized).calls.values())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(map(torch.equal, ours.values(), theirs.values()))
