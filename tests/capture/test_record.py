"""The trial run on the example: the model, its tensors, what it holds and the random state are as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import errors
from fxfuse.capture.record import record
from fxfuse.facts import Fact

WIDTH = 16


class Holder:
    def __init__(self) -> None:
        self.calls, self.seen = 0, []


class Writing(nn.Module):
    """Runs ``write`` on itself in its forward."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.write = nn.Linear(WIDTH, WIDTH), write
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("running", torch.zeros(WIDTH))
        self.plain, self.listed, self.cache, self.holder = torch.zeros(WIDTH), [torch.zeros(WIDTH)], {}, Holder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return F.relu(self.up(x)) * self.gain


def _everything(model: Writing) -> list[torch.Tensor]:
    return [*model.parameters(), model.running, model.plain, *model.listed]


WRITES_SHARED = {
    "in place": lambda m: m.gain.data.add_(1),
    "copy": lambda m: m.gain.data.copy_(torch.zeros(WIDTH)),
    "a view": lambda m: m.gain.data[:3].zero_(),
    "out": lambda m: torch.add(torch.ones(WIDTH), 1, out=m.gain),
    "a list of them": lambda m: torch._foreach_add_([m.gain.data], 1.0),
    "set item": lambda m: _set_first(m.gain.data),
    "a tensor in a list": lambda m: m.listed[0].add_(1),
}


def _set_first(tensor: torch.Tensor) -> None:
    tensor[0] = 5.0


@pytest.mark.parametrize("name", WRITES_SHARED)
def test_writes_into_what_a_trial_shares_are_stopped(name):
    model = Writing(WRITES_SHARED[name]).eval()
    before = [t.detach().clone() for t in _everything(model)]
    with pytest.warns(errors.ExampleWarning, match="writes into a tensor of the model"):
        optimized = fxfuse.optimize(model, torch.randn(2, WIDTH))
    assert all(map(torch.equal, _everything(model), before))
    with torch.no_grad():
        optimized(torch.randn(2, WIDTH))
    assert not all(map(torch.equal, _everything(optimized), before))


WRITES_OWN = {
    "buffer": lambda m: m.running.add_(1),
    "buffer replaced": lambda m: setattr(m, "running", m.running + 1),
    "plain tensor": lambda m: m.plain.add_(1),
    "attribute": lambda m: setattr(m, "counted", 1),
    "dictionary": lambda m: m.cache.update(a=1),
    "object": lambda m: setattr(m.holder, "calls", m.holder.calls + 1),
    "random state": lambda m: torch.rand(3),
}


@pytest.mark.parametrize("name", WRITES_OWN)
def test_a_trial_leaves_no_trace(name):
    model = Writing(WRITES_OWN[name]).eval()
    before = [t.detach().clone() for t in _everything(model)]
    keys, state = set(model.__dict__), torch.random.get_rng_state()
    _optimize(model)
    assert all(map(torch.equal, _everything(model), before))
    assert set(model.__dict__) == keys
    assert (model.cache, model.holder.calls) == ({}, 0)
    assert torch.equal(torch.random.get_rng_state(), state)


def _optimize(model: nn.Module) -> nn.Module:
    return fxfuse.optimize(model, torch.ones(2, WIDTH))


def test_inputs_are_not_written():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, cache: Holder) -> torch.Tensor:
            cache.seen.append(x)
            return F.relu(self.up(x.add_(1)))

    given, cache = torch.zeros(2, WIDTH), Holder()
    fxfuse.optimize(InPlace().eval(), (given, cache))
    assert not given.any()
    assert cache.seen == []


def test_what_is_recorded():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unused = nn.Linear(WIDTH, 4), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, *, flag: bool) -> torch.Tensor:
            return self.inner(x[:1]) if flag else self.unused(x)

    calls = record(Outer(), (torch.randn(3, WIDTH),), {"flag": True})
    assert set(calls) == {"", "inner"}
    assert calls[""].kwargs == {"flag": True}
    assert calls["inner"].args == (Fact((1, WIDTH), torch.float32, torch.device("cpu")),)


def test_batch_norm_in_training_keeps_its_statistics():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fxfuse.optimize(model, torch.randn(8, WIDTH))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
