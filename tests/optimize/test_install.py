"""Forwards that others put on instances, and what restore puts back."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxfuse
from tests.models.answers import right
from tests.optimize.model import HIDDEN, MLP, WIDTH, Stack, assert_answers, assert_counted, calls_of


def add_hook(module: nn.Module, pre: Callable[[Any], Any]) -> None:
    """As accelerate hooks a module: the old forward is kept on the instance, and a partial takes its place."""
    module._old_forward = module.forward

    def new_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*map(pre, args), **kwargs)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)


def remove_hook(module: nn.Module) -> None:
    module.forward = module._old_forward
    del module._old_forward


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("place", ["blocks.0", "blocks.1.up", ""])
def test_hooked_as_accelerate_does_before(x, place, inplace, example):
    model, twin = Stack().eval(), Stack().eval()
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):
        add_hook(m.get_submodule(place), lambda v: v * 2)
    before = _attributes(model)
    signature = inspect.signature(model.get_submodule(place).forward)
    optimized = fxfuse.optimize(model, x if example else None, inplace=inplace)
    assert inspect.signature(optimized.get_submodule(place).forward) == signature
    assert fxfuse.report(optimized).fused
    with torch.no_grad():
        assert right(optimized(x), twin, x)
        assert_counted(optimized, twin, x)
        remove_hook(optimized.get_submodule(place))
        remove_hook(twin.get_submodule(place))
        assert right(optimized(x), twin, x)
        fxfuse.restore(optimized)
        assert right(optimized(x), twin, x)
    if not inplace:
        assert_same_attributes(before, model)


@pytest.mark.parametrize("place", ["", "up", "act"])
def test_hooked_as_accelerate_does_after(pair, x, place):
    optimized = pair[1]
    twin = copy.deepcopy(pair[0])
    with torch.no_grad():
        assert_answers(optimized, twin, x, runs="fused")
        for m in (optimized, twin):
            add_hook(m.get_submodule(place), lambda v: v * 2)
        for _ in range(2):
            assert_counted(optimized, twin, x)
        if place == "":
            with pytest.raises(fxfuse.errors.RestoreRefused, match="the model"):
                fxfuse.restore(optimized)
            assert_counted(optimized, twin, x)
        for m in (optimized, twin):
            remove_hook(m.get_submodule(place))
        assert right(optimized(x), twin, x)
        fxfuse.restore(optimized)
        assert right(optimized(x), twin, x)


def test_accelerate_itself(pair, x):
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubling(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] * 2, *args[1:]), kwargs

    model = Stack().eval()
    hooks.add_hook_to_module(model.blocks[0], Doubling())
    twin = Stack().eval()
    twin.load_state_dict(model.state_dict())
    hooks.add_hook_to_module(twin.blocks[0], Doubling())
    optimized = fxfuse.optimize(model, x)
    with torch.no_grad():
        assert right(optimized(x), twin, x)
        for m in (optimized, twin):
            hooks.add_hook_to_module(m.blocks[1].up, Doubling())
            hooks.add_hook_to_module(m, Doubling())
        assert right(optimized(x), twin, x)
        for m in (optimized, twin):
            hooks.remove_hook_from_submodules(m)
            hooks.remove_hook_from_module(m)
        assert right(optimized(x), twin, x)
        fxfuse.restore(optimized)
        assert right(optimized(x), twin, x)


# restore


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {path: dict(m.__dict__) for path, m in model.named_modules()}


def assert_same_attributes(before: dict[str, dict[str, Any]], model: nn.Module) -> None:
    """Each module's ``__dict__`` has the same names, in the same order, of the same objects."""
    after = _attributes(model)
    assert before.keys() == after.keys()
    for path, attributes in before.items():
        assert [*after[path]] == [*attributes], path
        for name, value in attributes.items():
            assert after[path][name] is value, f"{path}.{name}"


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("runs", [0, 1, 200])
def test_restore_puts_back_each_attribute(x, runs, example):
    model = Stack().eval()
    add_hook(model.blocks[0], lambda v: v * 2)
    model.blocks[1].up.register_forward_hook(lambda m, a, y: y)
    before, keys = _attributes(model), [*model.state_dict()]
    optimized = fxfuse.optimize(model, x if example else None, inplace=True)
    assert optimized is model
    with torch.no_grad():
        for _ in range(runs):
            optimized(x)
    assert fxfuse.restore(optimized) is model
    assert_same_attributes(before, model)
    assert [*model.state_dict()] == keys


def test_restore_of_a_copy_leaves_a_copy(pair, x):
    """What comes back is a copy of the module objects still, which shares parameters and answers as the model does."""
    model, optimized = pair
    fxfuse.restore(optimized)
    assert _attributes(optimized).keys() == _attributes(model).keys()
    assert all([*a] == [*b] for a, b in zip(_attributes(optimized).values(), _attributes(model).values(), strict=True))
    assert all(a is b for a, b in zip(optimized.parameters(), model.parameters(), strict=True))
    assert not any(a is b for a, b in zip(optimized.modules(), model.modules(), strict=True))


def test_what_was_added_since_stays(pair, x):
    """restore takes away what optimize put there, and nothing that anybody else did."""
    optimized = pair[1]
    twin = copy.deepcopy(pair[0])
    for m in (optimized, twin):
        m.register_forward_hook(lambda m, a, y: y + 1)
        m.extra = nn.Linear(2, 2)
        m.scale, m.note = 2.0, "mine"
        m.up = nn.Linear(WIDTH, HIDDEN)
    twin.load_state_dict(optimized.state_dict())
    fxfuse.restore(optimized)
    assert [*optimized.__dict__] == [*twin.__dict__]
    assert (optimized.scale, optimized.note) == (2.0, "mine")
    with torch.no_grad():
        assert right(optimized(x), twin, x)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_part_that_was_optimized_by_itself_stays(x, inplace):
    """restore undoes one optimize(): of the model around the part, or of the part inside the model."""
    model = Stack().eval()
    twin = copy.deepcopy(model)
    fxfuse.optimize(model.blocks[0], x, inplace=True)
    before = _attributes(model)
    around = fxfuse.optimize(model, x, inplace=inplace)
    with torch.no_grad():
        assert right(around(x), twin, x)
        fxfuse.restore(around)
        assert_same_attributes(before, model)
        assert_answers(model.blocks[0], twin.blocks[0], x, runs="fused")
        around = fxfuse.optimize(model, x, inplace=True)
        fxfuse.restore(model.blocks[0])
        assert right(around(x), twin, x)
        fxfuse.restore(around)
    assert {name for m in model.modules() for name in m.__dict__} == {n for m in twin.modules() for n in m.__dict__}


def test_a_module_in_two_optimized_models(x):
    shared = MLP().eval()
    twin = copy.deepcopy(shared)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.ReLU())
    for model in (first, second):
        fxfuse.optimize(model, x, inplace=True)
    with torch.no_grad():
        assert right(second(x), nn.Sequential(twin, nn.ReLU()), x)
        fxfuse.restore(first)
        assert right(second(x), nn.Sequential(twin, nn.ReLU()), x)
        fxfuse.restore(second)
    assert set(shared.__dict__) == set(twin.__dict__)


def test_a_module_that_has_left_is_restored_too(x):
    model = Stack().eval()
    model.blocks[1].register_forward_hook(lambda m, a, y: None)
    before = dict(model.blocks[1].__dict__)
    optimized = fxfuse.optimize(model, x, inplace=True)
    gone, optimized.blocks[1] = optimized.blocks[1], MLP().eval()
    fxfuse.restore(optimized)
    assert gone.__dict__ == before


def test_restore_inside_is_refused_as_well(x):
    stack = Stack().eval()
    stack.blocks[1].register_forward_hook(lambda m, a, y: None)
    optimized = fxfuse.optimize(stack, x)
    inner = optimized.blocks[1]
    fused = inner.forward
    inner.forward = lambda *args: fused(*args) * 2
    with pytest.raises(fxfuse.errors.RestoreRefused, match=r"blocks\.1"):
        fxfuse.restore(optimized)
    assert calls_of(optimized, "blocks.1").fused == 0
    with torch.no_grad():
        optimized(x)
    assert calls_of(optimized, "blocks.1").fused == 1  # nothing was undone by halves
    inner.forward = fused
    fxfuse.restore(optimized)
    with torch.no_grad():
        assert torch.equal(optimized(x), stack(x))


class Everything(MLP):
    """Class attributes, properties, methods, slots and a metaclass's doing, which a copy is to keep."""

    __slots__ = ("slotted",)
    kinds = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self._width, self.slotted = WIDTH, 7

    @property
    def width(self) -> int:
        return self._width

    @width.setter
    def width(self, value: int) -> None:
        self._width = value

    @functools.cached_property
    def twice(self) -> int:
        return 2 * self._width

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def made(cls) -> type:
        return cls

    def extra_repr(self) -> str:
        return f"width={self.width}"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("example", [False, True])
def test_the_class_with_all_it_has(x, example):
    model = Everything().eval()
    optimized = fxfuse.optimize(model, x if example else None)
    assert type(optimized) is Everything
    assert (optimized.width, optimized.twice, optimized.slotted) == (WIDTH, 2 * WIDTH, 7)
    assert (optimized.kinds, optimized.static(), optimized.made()) == (("a", "b"), "static", Everything)
    assert (len(optimized), optimized[4], str(optimized), dir(optimized)[:0]) == (3, 4, str(model), [])
    optimized.width = 5
    assert (optimized.width, model.width) == (5, WIDTH)
    with torch.no_grad():
        assert right(optimized(x), model, x)
