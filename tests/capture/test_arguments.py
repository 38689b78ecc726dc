"""All kinds of parameters: the fused forward takes them as the model's does, and what is not as traced falls back."""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse

WIDTH = 16


class Mode(enum.Enum):
    A = 1
    B = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def core(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        y = torch.relu(self.up(x))
        for value in more:
            if isinstance(value, torch.Tensor):
                y = y + value
            elif isinstance(value, (int, float)):
                y = y * value
        return y


class Positional(Model):
    def forward(self, x, bias=None, /, scale=2.0):
        return self.core(x, bias, scale)


class KeywordOnly(Model):
    def forward(self, x, *, bias=None, scale=2.0):
        return self.core(x, bias, scale)


class VarPositional(Model):
    def forward(self, x, *more, scale=1.0):
        return self.core(x, *more, scale)


class VarKeyword(Model):
    def forward(self, x, **more):
        return self.core(x, *more.values())


class Everything(Model):
    def forward(self, x, /, bias, *rest, scale=1.0, mode=Mode.A, **more):
        return self.core(x, bias, *rest, scale, *more.values()) * (2 if mode is Mode.B else 1)


class Names(Model):
    """Parameters with names that generated code might use."""

    def forward(self, region, constant_0=1.0, read_0=None, m1=None, body=2.0, _=None, args=3.0, autocast=None):
        return self.core(region, constant_0, read_0, m1, body, args)


class Sequences(Model):
    def forward(self, x, dims=(1, 2), sizes=[3.0]):  # noqa: B006
        return self.core(x, *dims, *sizes)


class Dicts(Model):
    def forward(self, x, more=None, also=()):
        return self.core(x, *(more or {}).values(), *(value for each in also for value in each.get("of", ())))


X, BIAS = torch.randn(3, WIDTH), torch.randn(WIDTH)
# class, the example call, other calls and whether they run fused
CALLS: list[tuple[type[Model], tuple[Any, ...], dict[str, Any], list[tuple[tuple[Any, ...], dict[str, Any], bool]]]] = [
    (
        Positional,
        (X, BIAS),
        {},
        [((X, BIAS, 2.0), {}, True), ((X, BIAS), {"scale": 3.0}, False), ((X,), {}, False), ((X, BIAS, 2), {}, False)],
    ),
    (
        KeywordOnly,
        (X,),
        {"bias": BIAS},
        [((), {"bias": BIAS, "x": X}, True), ((X,), {}, False), ((X,), {"scale": 2.0, "bias": BIAS}, True)],
    ),
    (
        VarPositional,
        (X, BIAS, BIAS),
        {},
        [
            ((X, BIAS, BIAS), {"scale": 1.0}, True),
            ((X, BIAS), {}, False),
            ((X, BIAS, 2.0), {}, False),
            ((X,), {}, False),
        ],
    ),
    (
        VarKeyword,
        (X,),
        {"a": BIAS, "b": 2.0},
        [
            ((X,), {"b": 2.0, "a": BIAS}, False),
            ((X,), {"a": BIAS, "b": 2.0}, True),
            ((X,), {"a": BIAS, "c": 2.0}, False),
            ((X,), {"a": BIAS}, False),
            ((X,), {"a": BIAS, "b": 3.0}, False),
            ((X,), {"a": 1.0, "b": 2.0}, False),
        ],
    ),
    (
        Everything,
        (X, BIAS, BIAS),
        {"mode": Mode.B, "k": BIAS},
        [
            ((X, BIAS, BIAS), {"k": BIAS, "mode": Mode.B, "scale": 1.0}, True),
            ((X, BIAS, BIAS), {"k": BIAS, "mode": Mode.A}, False),
            ((X, BIAS), {"k": BIAS, "mode": Mode.B}, False),
            ((X,), {"bias": BIAS}, False),
        ],
    ),
    (
        Names,
        (X,),
        {"m1": BIAS},
        [
            ((X, 1.0, None, BIAS), {}, True),
            ((X,), {"m1": BIAS, "_": None}, True),
            ((X,), {"body": 1.0, "m1": BIAS}, False),
        ],
    ),
    (
        Sequences,
        (X,),
        {},
        [((X, (1, 2)), {}, True), ((X,), {"sizes": [3.0]}, True), ((X, (2, 1)), {}, False), ((X, [1, 2]), {}, False)],
    ),
    (
        Dicts,
        (X, {"a": BIAS, "b": 2.0}, ({"of": (BIAS, 3.0)},)),
        {},
        [
            ((X, {"a": BIAS + 1, "b": 2.0}, ({"of": (X, 3.0)},)), {}, True),
            ((X, {"b": 2.0, "a": BIAS}, ({"of": (BIAS, 3.0)},)), {}, False),
            ((X, {"a": BIAS}, ({"of": (BIAS, 3.0)},)), {}, False),
            ((X, {"a": BIAS, "b": 3.0}, ({"of": (BIAS, 3.0)},)), {}, False),
            ((X, None, ({"of": (BIAS, 3.0)},)), {}, False),
            ((X, {"a": BIAS, "b": 2.0}, ({"off": (BIAS, 3.0)},)), {}, False),
            ((X, {"a": BIAS, "b": 2.0}, ({"of": ()},)), {}, False),
            ((X, {"a": BIAS, "b": 2.0}), {}, False),
        ],
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].__name__)
def test_calls(call):
    cls, args, kwargs, others = call
    model = cls().eval()
    optimized = fxfuse.optimize(model, args, kwargs)
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    calls = fxfuse.report(optimized).calls[""]
    with torch.no_grad():
        for more_args, more_kwargs, fused in [(args, kwargs, True), *others]:
            before = calls.fused
            # Too small for the fused kernels: equal to the last bit.
            assert torch.equal(optimized(*more_args, **more_kwargs), model(*more_args, **more_kwargs))
            assert calls.fused - before == fused, (more_args, more_kwargs, calls.reasons)
    assert calls.fallback == sum(not fused for *_, fused in others)
    assert all(reason.startswith(("argument ", "expected ")) for reason in calls.reasons)


@pytest.mark.parametrize("cls", [Positional, KeywordOnly, VarPositional, Names, Sequences])
def test_without_an_example_defaults_are_assumed(cls):
    model = cls().eval()
    optimized = fxfuse.optimize(model)
    with torch.no_grad():
        assert torch.equal(optimized(X), model(X))
    assert fxfuse.report(optimized).calls[""].fused == 1


def test_a_list_changed_by_its_owner():
    sizes = [3.0]
    model = Sequences().eval()
    optimized = fxfuse.optimize(model, (X,), {"sizes": sizes})
    sizes[0] = 5.0
    with torch.no_grad():
        assert torch.equal(optimized(X, sizes=sizes), model(X, sizes=sizes))

    def scaled(x: torch.Tensor, sizes: list[float]) -> torch.Tensor:
        return torch.relu(F.linear(x, torch.ones(4, WIDTH))) * sizes[0]

    optimized = fxfuse.optimize(scaled, (X, sizes))
    sizes[0] = 7.0
    assert torch.equal(optimized(X, sizes), scaled(X, sizes))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Kept:
    """A cache, say: neither a tensor nor a constant."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


OTHERS = [{1: X}, [X], Pair(X, X), Kept(), {1, 2}, X.numpy(), len]
USES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda other: other.seen,
    "element": lambda other: other[0],
    "iteration": lambda other: [*other],
    "length": lambda other: len(other),
    "truth": lambda other: 1 if other else 0,
    "membership": lambda other: X in other,
    "type": lambda other: isinstance(other, torch.Tensor),
    "call": lambda other: other(),
    "function": lambda other: torch.cat(other),
    "arithmetic": lambda other: other + 1,
    "comparison": lambda other: other == 1,
}


@pytest.mark.parametrize("value", OTHERS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("use", USES)
def test_arguments_of_other_kinds_are_not_looked_into(use, value):
    class Taking(Model):
        def forward(self, x, other):
            with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, RuntimeError):
                USES[use](other)
            return self.core(x)

    model = Taking().eval()
    optimized = fxfuse.optimize(model, (X, value))
    (uncaptured,) = fxfuse.report(optimized).uncaptured
    assert uncaptured.reason == f"its argument other is a {type(value).__name__}"
    with torch.no_grad():
        assert torch.equal(optimized(X, value), model(X, value))


class Attends(nn.Module):
    """Has no graph: it asks what it is given, and keeps what it has seen there."""

    def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
        if isinstance(kept, Kept):
            kept.seen.append(x)
            return x + len(kept.seen)
        return x * 2 if kept is None else x + kept[0]


class HandsOn(Model):
    def __init__(self) -> None:
        super().__init__()
        self.attends = Attends()

    def forward(self, x, kept=None):
        return self.core(x if kept is None else self.attends(x, kept=kept))


@pytest.mark.parametrize("value", [Pair(BIAS, X), [BIAS], {0: BIAS}, Kept()], ids=lambda v: type(v).__name__)
def test_an_argument_is_handed_on(value):
    model = HandsOn().eval()
    optimized = fxfuse.optimize(model, (X, value))
    calls = fxfuse.report(optimized).calls[""]
    assert not isinstance(value, Kept) or value.seen == []
    with torch.no_grad():
        for _ in range(2):
            ours, theirs = copy.deepcopy(value), copy.deepcopy(value)
            for _ in range(2):
                assert torch.equal(optimized(X, ours), model(X, theirs))
            assert not isinstance(ours, Kept) or len(ours.seen) == len(theirs.seen) == 2
        assert (calls.fused, calls.fallback) == (4, 0)
        assert torch.equal(optimized(X), model(X))
    assert list(calls.reasons) == [f"argument kept: expected a {type(value).__name__}, found None"]


def test_what_is_handed_on_may_need_gradients():
    model = HandsOn().eval().requires_grad_(False)
    optimized = fxfuse.optimize(model, (X, [BIAS]))
    bias = BIAS.clone().requires_grad_()
    optimized(X, [bias]).sum().backward()
    ours, bias.grad = bias.grad, None
    model(X, [bias]).sum().backward()
    assert torch.equal(ours, bias.grad)
    assert list(fxfuse.report(optimized).calls[""].reasons) == ["gradients are needed"]


def test_a_dict_of_arguments_may_need_gradients():
    model = Dicts().eval().requires_grad_(False)
    optimized = fxfuse.optimize(model, (X, {"a": BIAS}))
    # A dict that nothing takes as a whole is no value of the graph.
    assert [n.target for n in fxfuse.graphs(optimized)[""].graph.find_nodes(op="placeholder")] == ["x", "more_a"]
    optimized(X, {"a": BIAS}).sum()
    optimized(X, {"a": BIAS.clone().requires_grad_()}).sum().backward()
    assert fxfuse.report(optimized).calls[""].fused == 1
    assert list(fxfuse.report(optimized).calls[""].reasons) == ["gradients are needed"]


REFUSED: dict[str, tuple[Callable[[Model, Any, dict[str, Any]], Any], str]] = {
    "pops": (lambda m, x, more: m.core(x, more.pop("a")), "changes its argument more"),
    "adds": (lambda m, x, more: (more.update(c=x), m.core(x, more["a"]))[1], "changes its argument more"),
    "returns": (lambda m, x, more: (m.core(x, more["a"]), more), "its argument more is a dict"),
    "hands on what it uses within": (
        lambda m, x, more: m.attends(m.core(x, more["c"]["of"][0]), more),
        "its argument more is a dict",
    ),
    "hands on what it uses": (lambda m, x, more: m.attends(m.core(x, more["a"]), more), "its argument more is a dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dict_is_what_it_was_given_and_no_other(name):
    class Taking(HandsOn):
        def forward(self, x, more):
            return REFUSED[name][0](self, x, more)

    class Attends(nn.Module):
        def forward(self, x: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
            return x + (more.pop("a") if x.sum() > 0 else more["a"])

    model = Taking().eval()
    model.attends = Attends()
    ours, theirs = ({"a": BIAS, "b": 2.0, "c": {"of": (BIAS,)}} for _ in range(2))
    optimized = fxfuse.optimize(model, (X, dict(ours)))
    assert REFUSED[name][1] in [u.reason for u in fxfuse.report(optimized).uncaptured if not u.path]
    with torch.no_grad():
        optimized(X, ours)
        model(X, theirs)
    assert list(ours) == list(theirs)


def test_a_dict_that_is_handed_on_is_the_same():
    class Emptying(nn.Module):
        def forward(self, x: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
            return x + kept.popitem()[1] if x.sum() != 0 else x

    model = HandsOn().eval()
    model.attends = Emptying()
    optimized = fxfuse.optimize(model, (X, {"b": BIAS}))
    given = {"b": BIAS}
    with torch.no_grad():
        assert torch.equal(optimized(X, given), model(X, {"b": BIAS}))
    assert not given
    assert fxfuse.report(optimized).calls[""].fused == 1


def test_arguments_that_would_have_one_name():
    class Taking(Model):
        def forward(self, x, more, more_a):
            return self.core(x, more["a"], more_a)

    optimized = fxfuse.optimize(Taking().eval(), (X, {"a": BIAS}, X))
    reasons = {u.path: u.reason for u in fxfuse.report(optimized).uncaptured}
    assert reasons[""] == "two of its arguments would be called more_a in a graph"


def test_names_that_generated_code_needs():
    class Taking(Model):
        def forward(self, x, type=None):
            return self.core(x)

    optimized = fxfuse.optimize(Taking().eval())
    assert "its parameter type has a name" in fxfuse.report(optimized).uncaptured[0].reason
    with torch.no_grad():
        assert optimized(X, type=3).shape == X.shape


def test_one_tensor_given_twice_stays_one():
    """Attention asks whether its key is its query."""
    same = []

    class Asking(Model):
        def forward(self, query, key):
            same.append(query is key)
            return self.core(query, key)

    model = Asking().eval()
    fxfuse.optimize(model, (X, X))
    assert same[0] is True
