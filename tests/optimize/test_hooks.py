"""Hooks of every kind, on the root and inside, added before and after optimize()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module

import fxfuse
from tests.models.answers import right
from tests.optimize.model import MLP, WIDTH, assert_answers, entries, same_bits

Add = Callable[[nn.Module, list[str]], Any]
"""Registers a hook on a module that writes into the list when it runs."""


def _answer(log: list[str], value: Any) -> Any:
    log.append("ran")
    return value


FORWARD_HOOKS: dict[str, Add] = {
    "forward": lambda m, log: m.register_forward_hook(lambda m, a, y: _answer(log, y * 2)),
    "forward with_kwargs": lambda m, log: m.register_forward_hook(
        lambda m, a, k, y: _answer(log, y + len(a) + len(k)), with_kwargs=True
    ),
    "forward prepend": lambda m, log: m.register_forward_hook(lambda m, a, y: _answer(log, y * 2), prepend=True),
    "forward always_call": lambda m, log: m.register_forward_hook(
        lambda m, a, y: _answer(log, y * 2), always_call=True
    ),
    "pre": lambda m, log: m.register_forward_pre_hook(lambda m, a: _answer(log, (a[0] * 2,))),
    "pre with_kwargs": lambda m, log: m.register_forward_pre_hook(
        lambda m, a, k: _answer(log, ((a[0] * 2,), k)), with_kwargs=True
    ),
}
BACKWARD_HOOKS: dict[str, Add] = {
    "backward": lambda m, log: m.register_full_backward_hook(lambda m, i, o: _answer(log, (i[0] * 2,))),
    "backward pre": lambda m, log: m.register_full_backward_pre_hook(lambda m, o: _answer(log, (o[0] * 2,))),
    "backward of old": lambda m, log: m.register_backward_hook(lambda m, i, o: _answer(log, None)),
}
STATE_HOOKS: dict[str, Add] = {
    "state_dict": lambda m, log: m._register_state_dict_hook(lambda m, state, *_: _answer(log, _marked(state))),
    "state_dict post": lambda m, log: m.register_state_dict_post_hook(
        lambda m, state, prefix, meta: _answer(log, None)
    ),
    "state_dict pre": lambda m, log: m.register_state_dict_pre_hook(lambda m, prefix, keep: _answer(log, None)),
    "load_state_dict pre": lambda m, log: m.register_load_state_dict_pre_hook(
        lambda m, state, *_: _answer(log, _doubled(state))
    ),
    "load_state_dict post": lambda m, log: m.register_load_state_dict_post_hook(
        lambda m, keys: _answer(log, _filled(m))
    ),
}


def _marked(state: dict[str, Any]) -> Any:
    state["mark"] = torch.ones(1)


def _filled(module: nn.Module) -> None:
    next(module.parameters()).data.fill_(0.1)


def _doubled(state: dict[str, Any]) -> Any:
    for name in list(state):
        state[name] = state[name] * 2


PLACES: dict[str, Callable[[MLP], nn.Module]] = {
    "root": lambda m: m,
    "inside": lambda m: m.up,
    "last": lambda m: m.down,
    "act": lambda m: m.act,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FORWARD_HOOKS)
@pytest.mark.parametrize("example", [False, True])
def test_forward_hooks(x, kind, place, when, example):
    """Each hook runs once a call, on the optimized copy alone, and its answer counts; removed, it is gone."""
    model = MLP().eval()
    ours: list[str] = []
    theirs: list[str] = []
    twin = copy.deepcopy(model)
    removed = FORWARD_HOOKS[kind](PLACES[place](twin), theirs)
    if when == "before":
        handle = FORWARD_HOOKS[kind](PLACES[place](model), ours)
    optimized = fxfuse.optimize(model, x if example else None)
    with torch.no_grad():
        plain = MLP.forward(copy.deepcopy(twin), x)
        if when == "after":
            assert_answers(optimized, model, x, runs="fused")
            handle = FORWARD_HOOKS[kind](PLACES[place](optimized), ours)
        for _ in range(2):
            del ours[:], theirs[:]
            got = optimized(x)
            assert ours == ["ran"]
            assert right(got, twin, x)
        assert not same_bits(plain, twin(x)) or place != "root"
        handle.remove(), removed.remove()
        if when == "before" and place != "root":
            return  # the handle takes the hook from the model that was given, not from its copy
        del ours[:]
        got = optimized(x)
        if when == "after":
            assert ours == []
            assert right(got, twin, x)
    assert entries(optimized) > 0


def test_handles_of_the_original_belong_to_the_original(x):
    model = MLP().eval()
    handle = model.up.register_forward_hook(lambda m, a, y: y * 2)
    hooked = copy.deepcopy(model)
    optimized, same = fxfuse.optimize(model, x), fxfuse.optimize(copy.deepcopy(model), x, inplace=True)
    handle.remove()
    with torch.no_grad():
        assert right(optimized(x), hooked, x)
        assert right(same(x), hooked, x)
        (handle,) = [model.up.register_forward_hook(lambda m, a, y: y * 3)]
        assert right(optimized(x), hooked, x)


@pytest.mark.parametrize("place", ["root", "up"])
def test_always_called_hooks_run_where_the_forward_raises(pair, place):
    _, optimized = pair
    ran: list[str] = []
    module = optimized if place == "root" else optimized.up
    module.register_forward_hook(lambda m, a, y: ran.append("ran"), always_call=True)
    with torch.no_grad(), pytest.raises(RuntimeError):
        optimized(torch.randn(3, WIDTH + 1))
    assert ran == ["ran"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", BACKWARD_HOOKS)
def test_backward_hooks(x, kind, place, when):
    model = MLP().eval()
    twin = copy.deepcopy(model)
    ours: list[str] = []
    theirs: list[str] = []
    BACKWARD_HOOKS[kind](PLACES[place](twin), theirs)
    if when == "before":
        BACKWARD_HOOKS[kind](PLACES[place](model), ours)
    optimized = fxfuse.optimize(model, x)
    if when == "after":
        BACKWARD_HOOKS[kind](PLACES[place](optimized), ours)
    gradients = []
    for m in (optimized, twin):
        given = x.clone().requires_grad_()
        m(given).square().sum().backward()
        gradients.append([given.grad, *(p.grad for p in m.parameters())])
    assert ours == theirs == ["ran"]
    assert all(map(torch.equal, *gradients))
    with torch.no_grad():
        assert right(optimized(x), twin, x)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["root", "inside"])
@pytest.mark.parametrize("kind", STATE_HOOKS)
def test_state_dict_hooks(x, kind, place, when):
    model = MLP().eval()
    twin = copy.deepcopy(model)
    ours: list[str] = []
    theirs: list[str] = []
    STATE_HOOKS[kind](PLACES[place](twin), theirs)
    if when == "before":
        STATE_HOOKS[kind](PLACES[place](model), ours)
    optimized = fxfuse.optimize(model, x)
    if when == "after":
        with torch.no_grad():
            assert_answers(optimized, model, x, runs="fused")
        STATE_HOOKS[kind](PLACES[place](optimized), ours)
    state, expected = optimized.state_dict(), twin.state_dict()
    assert state.keys() == expected.keys()
    state = {name: value.clone() for name, value in state.items() if name != "mark"}
    for m in (optimized, twin):
        m.load_state_dict(dict(state))
    assert ours == theirs
    assert ours
    with torch.no_grad():
        # Hooks of a module's state have no part in its forward.
        assert_answers(optimized, twin, x, runs="fused")


def test_hooks_are_given_the_module_that_they_run_on(x):
    class Loads(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.loaded = 0
            self.register_load_state_dict_pre_hook(Loads.count)
            self._register_load_state_dict_pre_hook(self.count)
            self.up._register_load_state_dict_pre_hook(lambda *_: self.count())

        def count(self, *_: Any) -> None:
            self.loaded += 1

    model = Loads().eval()
    optimized = fxfuse.optimize(model, x)
    optimized.load_state_dict(MLP().state_dict())
    assert (optimized.loaded, model.loaded) == (3, 0)
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


GLOBAL_HOOKS = {
    "forward": lambda log: nn_module.register_module_forward_hook(lambda m, a, y: log.append(type(m).__name__)),
    "pre": lambda log: nn_module.register_module_forward_pre_hook(lambda m, a: log.append(type(m).__name__)),
    "always_call": lambda log: nn_module.register_module_forward_hook(
        lambda m, a, y: log.append(type(m).__name__), always_call=True
    ),
    "backward": lambda log: nn_module.register_module_full_backward_hook(lambda m, i, o: log.append(type(m).__name__)),
    "backward pre": lambda log: nn_module.register_module_full_backward_pre_hook(
        lambda m, o: log.append(type(m).__name__)
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_global_hooks(x, kind, when):
    """They see each module of the model, and none while it is optimized."""
    model = MLP().eval()
    log: list[str] = []
    handle = GLOBAL_HOOKS[kind](log) if when == "before" else None
    optimized = None
    try:
        optimized = fxfuse.optimize(model)
        assert log == []
        handle = handle or GLOBAL_HOOKS[kind](log)
        given = x.clone().requires_grad_()
        for m in (optimized, model):
            log.append("call")
            m(given).sum().backward()
        seen = " ".join(log).split("call")
        assert seen[1].strip() == seen[2].strip() != ""
        with torch.no_grad():
            assert_answers(optimized, model, x, runs="fallback", why="global module hooks: expected none")
    finally:
        if handle is not None:
            handle.remove()
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


def test_a_module_of_torchs_with_a_forward_of_its_own_may_write_to_what_it_is_given():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.note = nn.Linear(8, 8), nn.Identity()
            self.note.forward = lambda seen: seen.add_(1)

        def forward(self, x, seen):
            self.note(seen)
            return nn.functional.relu(self.linear(x))

    x, seen = torch.randn(2, 8), torch.zeros(2)
    optimized = fxfuse.optimize(Model().eval(), x, {"seen": seen}, tune="off")
    with torch.no_grad():
        optimized(x, seen)
    assert seen.eq(1).all()
