"""Copies of a module tree: what refers into the tree refers into the copy, and what does not is the same object."""

from __future__ import annotations

import functools
import inspect
import types

import torch
from torch import nn

import fxfuse
from fxfuse.capture.tree import copy_tree
from tests.models.answers import right

WIDTH = 128


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        self.alias = self.up
        self.steps = [self.up, self.act, self.down]
        self.by_name = {"first": (self.up, [self.act])}
        self.method, self.bound = self.shifted, functools.partial(self.apply_to, self.down)
        self.__dict__["outside"], self.note = OUTSIDE, object()
        self.count = 0
        self.up.register_forward_pre_hook(self.counting)
        self.register_forward_hook(self.counting)

    def counting(self, module: nn.Module, args: object, output: object = None) -> None:
        self.count += 1

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x) + 1

    def apply_to(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return self.method(x) + self.bound(x) + self.by_name["first"][0](x)


OUTSIDE = nn.Linear(2, 2)


def test_references_into_the_tree():
    tree = Tree()
    copied = copy_tree(tree)
    assert type(copied) is Tree
    assert copied.steps == [copied.up, copied.act, copied.down]
    assert copied.alias is copied.up is not tree.up
    assert copied.by_name["first"] == (copied.up, [copied.act])
    assert copied.method.__self__ is copied
    assert copied.bound.func.__self__ is copied
    assert copied.bound.args == (copied.down,)
    assert copied.outside is OUTSIDE
    assert copied.note is tree.note
    (hook,) = copied.up._forward_pre_hooks.values()
    assert hook.__self__ is copied
    assert tree.steps == [tree.up, tree.act, tree.down]
    assert all(a is b for a, b in zip(copied.parameters(), tree.parameters(), strict=True))


def test_functions_that_hold_modules():
    class Closures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.seen = nn.Linear(WIDTH, WIDTH), []
            self.in_closure = lambda x: self.up(x)
            self.in_defaults = lambda x, up=self.up: up(x)
            self.nested = functools.wraps(self.in_closure)(lambda x: self.in_closure(x))
            self.method = types.MethodType(lambda module, x: self.up(x) if module is self else None, self)
            self.partial = functools.update_wrapper(functools.partial(self.in_closure), Closures.forward)
            self.alike, self.plain = self.in_closure, torch.relu

            def again(x: torch.Tensor, times: int) -> torch.Tensor:
                return again(self.up(x), times - 1) if times else x

            self.recursive = functools.partial(again, times=1)
            self.not_of_the_tree = lambda x: OUTSIDE(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Documented."""
            functions = (self.in_closure, self.in_defaults, self.nested, self.method, self.partial, self.recursive)
            return sum(function(x) for function in functions)

    model = Closures().eval()
    copied = copy_tree(model)
    copied.up = nn.Linear(WIDTH, WIDTH)
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        first = copied.up(given)
        for name in ("in_closure", "nested", "method", "partial", "recursive"):
            assert torch.equal(getattr(copied, name)(given), first), name
        assert torch.equal(copied.in_defaults(given), model.up(given))
        assert copied.in_defaults.__defaults__[0] is not model.up
    assert copied.nested.__wrapped__ is copied.in_closure is copied.alike
    assert inspect.signature(copied.partial) == inspect.signature(Closures.forward)
    assert copied.partial.__doc__ == "Documented."
    assert copied.plain is model.plain
    assert copied.not_of_the_tree is model.not_of_the_tree
    for example in (None, given):
        optimized = fxfuse.optimize(model, example, inplace=True)
        with torch.no_grad():
            handle = model.up.register_forward_hook(lambda m, a, y: y + 1)
            expected = 6 * (given @ model.up.weight.T + model.up.bias + 1)
            torch.testing.assert_close(optimized(given), expected)
        handle.remove()
        fxfuse.restore(optimized)


def test_slots():
    class Slotted(nn.Module):
        __slots__ = ("empty", "inner")

    tree = Slotted()
    tree.add_module("up", nn.Linear(2, 2))
    object.__setattr__(tree, "inner", [tree.up])
    copied = copy_tree(tree)
    assert copied.inner == [copied.up]
    assert not hasattr(copied, "empty")


def test_an_optimized_tree_is_independent():
    tree = Tree().eval()
    optimized = fxfuse.optimize(tree)
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        got = optimized(given)
        assert tree.count == 0
        assert right(got, tree, given)
    # up runs twice in the forward, and the hook of the tree itself once
    assert optimized.count == 3


def test_isolated_containers():
    tree = Tree()
    tree.seen = {"list": [], "nested": {"list": []}}
    copied = copy_tree(tree, isolate=True)
    copied.seen["list"].append(1)
    copied.seen["nested"]["list"].append(1)
    copied._buffers["new"] = torch.ones(1)
    assert tree.seen == {"list": [], "nested": {"list": []}}
    assert "new" not in tree._buffers


def test_shared_modules_and_tied_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
            self.head.weight = self.embedding.weight
            self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
            self.again = nn.ModuleList([self.block, self.block])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embedding(x)
            for block in self.again:
                h = block(h)
            return torch.sigmoid(self.head(h))

    model = Tied().eval()
    given = torch.randint(0, 32, (2, 5))
    for example in (None, given):
        optimized = fxfuse.optimize(model, example)
        assert optimized.head.weight is optimized.embedding.weight is model.head.weight
        assert optimized.again[0] is optimized.again[1] is optimized.block
        assert len(fxfuse.report(optimized).fused) == 3
        with torch.no_grad():
            assert right(optimized(given), model, given)
        assert [*optimized.state_dict()] == [*model.state_dict()]


def test_a_shared_module_without_a_graph_is_one_call_each_time():
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x) if x.sum() > 0 else -self.up(x)

    part = Part()
    model = nn.Sequential(part, nn.Linear(WIDTH, WIDTH), nn.ReLU(), part).eval()
    given = torch.randn(2, WIDTH)
    for example in (None, given):
        optimized = fxfuse.optimize(model, example)
        with torch.no_grad():
            assert right(optimized(given), model, given)
        assert {r.path for r in fxfuse.report(optimized).regions if r.installed} == {"", "0.up"}
