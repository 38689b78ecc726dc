"""What a trace records, and what it refuses rather than to get wrong."""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.capture.dtypes import Dtypes
from fxfuse.capture.value import finfo
from tests.models.answers import right

WIDTH = 128
"""Wide enough for the fused kernels."""
OUTSIDE = nn.GELU()
FACTOR = 1.5


class Model(nn.Module):
    """``forward(x)`` is ``run(self, x)``, with two projections at hand."""

    run: Callable[..., Any]

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and name in ("scale", "shift"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return type(self).run(self, x)


def model_of(run: Callable[..., Any], **attributes: Any) -> Model:
    return type("Model", (Model,), {"run": staticmethod(run)})(**attributes).eval()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["plain", "example"])
def optimize(request: pytest.FixtureRequest) -> Callable[[nn.Module], nn.Module]:
    given = torch.randn(2, WIDTH) if request.param == "example" else None
    return lambda model: fxfuse.optimize(model, given)


def reason_for(optimized: nn.Module, path: str = "") -> str:
    return next((u.reason for u in fxfuse.report(optimized).uncaptured if u.path == path), "")


def mlp(m: Any, x: torch.Tensor, between: Callable[..., Any] = lambda h: h) -> torch.Tensor:
    return m.down(between(F.relu(m.up(x))))


RECORDED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "factory": (lambda m, x: mlp(m, x) + torch.arange(WIDTH) * torch.ones(1), {}),
    "factory of a size": (lambda m, x: mlp(m, x) + torch.ones_like(x).cumsum(0), {}),
    "square root of a size": (lambda m, x: mlp(m, x) / math.sqrt(x.size(0)), {}),
    "size": (lambda m, x: mlp(m, x) * x.shape[0] + x.size(-1), {}),
    "reshape by sizes": (lambda m, x: mlp(m, x).view(x.shape[0], -1, 4).flatten(1), {}),
    "numpy scalar": (lambda m, x: mlp(m, x) / np.sqrt(7.0) + np.float32(0.5), {}),
    "plain tensor attribute": (lambda m, x: mlp(m, x) * m.held, {"held": torch.full((1,), 3.0)}),
    "product of parameters": (lambda m, x: F.relu(F.linear(x, m.up.weight @ m.down.weight, m.up.bias * 2)), {}),
    "transposed parameter": (lambda m, x: F.relu(x @ m.up.weight.T + m.up.bias), {}),
    "module outside": (lambda m, x: m.down(OUTSIDE(m.up(x))), {}),
    "attribute of a part": (
        lambda m, x: mlp(m, x) * m.conv.stride[0] + m.up.out_features,
        {"conv": nn.Conv1d(1, 1, 2, 2)},
    ),
    "modules in a list": (lambda m, x: m.layers[1](F.relu(m.layers[0](x))), {}),
    "global": (lambda m, x: mlp(m, x) * FACTOR, {}),
    "isinstance": (lambda m, x: mlp(m, x) if isinstance(x, torch.Tensor) else x[0], {}),
    "not isinstance": (lambda m, x: x[0] if isinstance(x, (list, tuple)) else mlp(m, x), {}),
    "is_tensor": (lambda m, x: mlp(m, x) if torch.is_tensor(x) else None, {}),
    "dtype": (lambda m, x: mlp(m, x) if x.dtype == m.up.weight.dtype else x * 0, {}),
    "dtype of a computed value": (
        lambda m, x: mlp(m, x, lambda h: h if m.act(h).dtype == m.down.weight.dtype else h.float()),
        {"act": nn.ReLU()},
    ),
    "tuple": (lambda m, x: (mlp(m, x), x), {}),
    "dict": (lambda m, x: {"y": mlp(m, x), "n": 3, "none": None}, {}),
    "in place on its own": (lambda m, x: mlp(m, x).mul_(2).add_(1), {}),
    "in place between": (lambda m, x: mlp(m, x, lambda h: h.mul_(2)), {}),
    "item": (lambda m, x: _with_item(mlp(m, x), (slice(None), 0), 0), {}),
    "item by a size": (lambda m, x: _with_item(mlp(m, x), slice(x.shape[0] // 2), x[-1:]), {}),
    "item by a mask": (lambda m, x: _with_item(mlp(m, x), x > 0, torch.finfo(x.dtype).min), {}),
    "item by indices": (lambda m, x: _with_item(mlp(m, x), (..., torch.arange(3)), m.up.bias[:3]), {}),
}


def _with_item(y: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    y[key] = value
    return y


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_and_right_at_other_sizes(optimize, name):
    run, attributes = RECORDED[name]
    model = model_of(run, **attributes)
    if name == "modules in a list":
        model.layers = [model.up, model.down]
    optimized = optimize(model)
    with torch.no_grad():
        for rows in (2, 5, 0):
            given = torch.randn(rows, WIDTH)
            # Of nothing, a size that is left open cannot be told.
            if rows or name not in ("square root of a size", "reshape by sizes"):
                assert right(optimized(given), model, given)
    report = fxfuse.report(optimized)
    assert report.calls[""].fused >= 2, (reason_for(optimized), report.calls)
    assert sum(c.fallback for c in report.calls.values()) == 0


ASSIGNED: dict[str, Callable[..., Any]] = {
    "a view": lambda h: (_with_item(h[:, 3:], ..., 1.0), h)[1],
    "a factory": lambda h: h * _with_item(torch.zeros(h.shape[0], WIDTH), (..., slice(3, None)), h[:, 3:]),
    "an item in place": lambda h: (operator.setitem(h, 0, operator.iadd(h[0], 1.0)), h)[1],
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_items_of_a_computed_value(name):
    """Only an example tells that it is a tensor."""
    model = model_of(lambda m, x: mlp(m, x, ASSIGNED[name]))
    optimized = fxfuse.optimize(model, torch.randn(2, WIDTH))
    with torch.no_grad():
        for rows in (2, 5):
            given = torch.randn(rows, WIDTH)
            assert right(optimized(given), model, given)
    assert fxfuse.report(optimized).calls[""].fused == 2
    assert reason_for(fxfuse.optimize(model)) == "assigns to items of a value that is not known to be a tensor"


def test_a_dtype_is_asked_of_each_value_once(monkeypatch):
    """Residuals double the paths to an argument at each layer."""
    asked = Counter()
    keeps = Dtypes.keeps
    monkeypatch.setattr(Dtypes, "keeps", lambda self, node: asked.update([node]) or keeps(self, node))

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(12):
            h = h + F.gelu(h)
        return mlp(m, h if h.dtype == x.dtype else x)

    optimized = fxfuse.optimize(model_of(run))
    assert not reason_for(optimized)
    assert len(asked) == 24
    assert max(asked.values()) <= 4


def test_random_numbers_are_drawn_anew(optimize):
    model = model_of(lambda m, x: mlp(m, x) * torch.rand(1) + torch.randn(WIDTH))
    optimized = optimize(model)
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        torch.manual_seed(1)
        first, second = optimized(given), optimized(given)
        assert not torch.equal(first, second)
        # The same numbers in float64: the model's own draws, put in the place of the draws.
        torch.manual_seed(1)
        scale, shift = torch.rand(1), torch.randn(WIDTH)
        assert right(
            first,
            model_of(
                lambda m, x: mlp(m, x) * m.scale + m.shift, scale=scale, shift=shift, up=model.up, down=model.down
            ),
            given,
        )
    report = fxfuse.report(optimized)
    assert sum(c.fused for c in report.calls.values()) >= 2
    assert "" in report.calls or "random numbers" in reason_for(optimized)


WRITING: dict[str, Callable[..., Any]] = {
    "add": lambda x: operator.iadd(x, 1.0),
    "multiply": lambda x: operator.imul(x, 2.0),
    "divide": lambda x: operator.itruediv(x, 2.0),
    "power": lambda x: operator.ipow(x, 2),
    "method": lambda x: x.add_(1.0),
    "a view": lambda x: operator.iadd(x[:1], 1.0),
    "an item": lambda x: operator.setitem(x, 0, 1.0),
    "a transposed view": lambda x: operator.isub(x.T, 1.0),
}


@pytest.mark.parametrize("name", WRITING)
def test_writes_into_an_argument(optimize, name):
    """``x += 1`` writes the caller's tensor, and every other name of it sees that."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        other = x
        WRITING[name](x)
        return mlp(m, other) + x

    model = model_of(run)
    optimized = optimize(model)
    given, twin = torch.full((2, WIDTH), 3.0), torch.full((2, WIDTH), 3.0)
    with torch.no_grad():
        got = optimized(given)
        model(twin)
        assert torch.equal(given, twin)
        assert not torch.equal(given, torch.full((2, WIDTH), 3.0))
        assert right(got, model, torch.full((2, WIDTH), 3.0))
    assert fxfuse.report(optimized).calls[""].fused == 1


def test_an_item_that_is_assigned_in_between_keeps_apart(optimize):
    model = model_of(lambda m, x: m.down(F.relu(_with_item(m.up(x), (..., 0), -x[:, 0]))))
    optimized = optimize(model)
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert right(optimized(given), model, given)
    kept = {e.rule: e.reason for e in fxfuse.report(optimized).kept}
    assert kept["linear_act"] == "up is written by setitem"
    assert not fxfuse.report(optimized).fused


def test_items_of_what_may_be_no_tensor(optimize):
    """A list would hold what is put into it, and not a copy."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            return [x @ self.w if x.sum() > 0 else x]

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.part(x)
        y[0] = h = m.up(x)
        h.mul_(2)
        return m.down(y[0])

    model = model_of(run, part=Part())
    optimized = optimize(model)
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert right(optimized(given), model, given)
    assert reason_for(optimized) == "assigns to items of a value that is not known to be a tensor"


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "control flow by value": (
        lambda m, x: mlp(m, x) if x.sum() > 0 else x,
        {},
        "decides by a value or size that is not known before the call",
    ),
    "callable": (lambda m, x: mlp(m, x() if callable(x) else x), {}, "calls a value of the graph"),
    "counter": (lambda m, x: (setattr(m, "count", m.count + 1), mlp(m, x))[1], {"count": 0}, "changes Model.count"),
    "new attribute": (lambda m, x: (setattr(m, "last", 1), mlp(m, x))[1], {}, "changes Model.last"),
    "list": (lambda m, x: (m.seen.append(1), mlp(m, x))[1], {"seen": []}, "changes Model.seen"),
    "nested list": (lambda m, x: (m.seen["a"].append(1), mlp(m, x))[1], {"seen": {"a": []}}, "changes Model.seen"),
    "counting dictionary": (lambda m, x: (m.seen.update("a"), mlp(m, x))[1], {"seen": Counter()}, "changes Model.seen"),
    "cache of proxies": (lambda m, x: m.seen.setdefault("y", mlp(m, x)), {"seen": {}}, "changes Model.seen"),
    "autocast": (lambda m, x: _under_autocast(m, x), {}, "enters autocast"),
    "element of a list in place": (
        lambda m, x: mlp(m, x) + m.held[0].add_(1),
        {"held": [torch.zeros(1)]},
        "writes a tensor",
    ),
    "attribute of a tensor": (lambda m, x: (setattr(x, "data", x + 1), mlp(m, x))[1], {}, "sets data of a value"),
    "set": (lambda m, x: {mlp(m, x)}, {}, "returns a set"),
    "own class": (lambda m, x: Output(mlp(m, x)), {}, "returns a Output"),
}


class Output:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    def double(self) -> Output:
        return Output(self.y.double())


def _under_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mlp(m, x)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(optimize, name):
    run, attributes, why = REFUSED[name]
    model = model_of(run, **attributes)
    kept = {key: (value, repr(value)) for key, value in model.__dict__.items()}
    optimized = optimize(model)
    assert reason_for(optimized).startswith(why), reason_for(optimized)
    for owner in (model, optimized):
        assert {k for k in owner.__dict__ if not k.startswith("_")} == {k for k in kept if not k.startswith("_")}
    assert all(model.__dict__[key] is value and repr(value) == text for key, (value, text) in kept.items())
    assert "forward" not in optimized.__dict__
    # The projections are regions of their own.
    assert {r.path for r in fxfuse.report(optimized).regions if r.installed} == {"up", "down"}


def test_a_refusal_says_where(optimize):
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return mlp(m, x) if x.sum() > 0 else x

    place = f"test_tracer.py:{run.__code__.co_firstlineno + 1}"
    assert reason_for(optimize(model_of(run))).endswith(f"not known before the call (TraceError, {place})")


class Settings:
    def __init__(self) -> None:
        self.calls, self.width = 0, WIDTH


def test_the_type_of_a_computed_value():
    """Only an example tells it."""
    model = model_of(lambda m, x: mlp(m, x) if isinstance(x + 1, torch.Tensor) else x)
    assert reason_for(fxfuse.optimize(model)) == "decides by the type of a value that is not known before the call"
    given = torch.randn(2, WIDTH)
    optimized = fxfuse.optimize(model, given)
    with torch.no_grad():
        assert right(optimized(given), model, given)
    assert fxfuse.report(optimized).calls[""].fused == 1


def test_an_object_that_the_forward_changes(optimize):
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.settings.calls += 1
        return mlp(m, x)

    settings = Settings()
    model = model_of(run, settings=settings)
    optimized = optimize(model)
    assert reason_for(optimized) == "changes Settings when it is called"
    assert settings.calls == 0
    with torch.no_grad():
        optimized(torch.randn(2, WIDTH))
    assert settings.calls == 1


def test_an_object_that_the_forward_copies(optimize):
    """Nobody would know of which object the copy tells something."""
    model = model_of(lambda m, x: mlp(m, x) * copy.deepcopy(m.settings).width, settings=Settings())
    assert reason_for(optimize(model)) == "copies a Settings, which may change"


def test_wrong_by_luck_of_the_dtype_is_noticed(optimize):
    model = model_of(lambda m, x: mlp(m, x) if x.dtype == m.up.weight.dtype else x * 0)
    optimized = optimize(model)
    with torch.no_grad():
        assert right(
            optimized(torch.ones(2, WIDTH).bfloat16()), model_of(lambda m, x: x * 0), torch.ones(2, WIDTH).bfloat16()
        )
    assert fxfuse.report(optimized).calls[""].reasons == {"x: expected torch.float32, found torch.bfloat16": 1}


def test_a_submodule_called_self(optimize):
    model = model_of(lambda m, x: m.down(F.relu(m._modules["self"](x))))
    model.add_module("self", model.up)
    optimized = optimize(model)
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert right(optimized(given), model, given)
        assert right(fxfuse.graphs(optimized)[""](given), model, given)
    assert fxfuse.report(optimized).calls[""].fused == 1


def test_around_a_part_without_a_graph(optimize):
    """Neither the part nor what it returns is guessed at."""

    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else x * 2

    model = model_of(lambda m, x: mlp(m, m.part(x)), part=Part())
    optimized = optimize(model)
    with torch.no_grad():
        for given in (torch.ones(2, WIDTH), -torch.ones(2, WIDTH)):
            assert right(optimized(given), model, given)
    assert fxfuse.report(optimized).calls[""].fused == 2


def test_around_a_part_within_a_part_without_a_graph(optimize):
    """What one trace must keep as a call, one around it must keep as well."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if x.sum() > 0 else x * 2

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    model = model_of(lambda m, x: mlp(m, m.part(x)), part=Part())
    optimized = optimize(model)
    with torch.no_grad():
        for given in (torch.ones(2, WIDTH), -torch.ones(2, WIDTH)):
            assert right(optimized(given), model, given)
    report = fxfuse.report(optimized)
    assert report.calls[""].fused == 2
    assert {r.path for r in report.regions} == {"", "part.inner.fc"}


def test_a_part_that_returns_several_things(optimize):
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            return (x @ self.w if x.sum() > 0 else x), None

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y, extra = m.part(x)
        return mlp(m, y) if extra is None else mlp(m, extra)

    model = model_of(run, part=Part())
    optimized = optimize(model)
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert right(optimized(given), model, given)
    assert reason_for(optimized).startswith(("takes apart what part returns", "was wrong on the example"))
    assert {r.path for r in fxfuse.report(optimized).regions if r.installed} == {"up", "down"}


def test_what_lies_inside_a_wrong_region_serves(monkeypatch):
    """A graph that the example shows to be wrong leaves its children to be captured by themselves."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(x)))

    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return None if x.sum() != 0 else x

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.inner(x if m.part(x) is None else x * 2)

    model = model_of(run, inner=Inner(), part=Part())
    given = torch.randn(2, WIDTH)
    optimized = fxfuse.optimize(model, given)
    assert reason_for(optimized).startswith("was wrong on the example")
    assert [e.region for e in fxfuse.report(optimized).fused] == ["inner"]
    with torch.no_grad():
        assert right(optimized(given), model, given)


def test_leaves_of_a_region_have_regions_inside(optimize):
    """A hook makes the block a call; what it runs is captured all the same, and the hook runs around it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(x)))

    model = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)).eval()
    model[0].register_forward_hook(lambda m, a, y: y * 2)
    optimized = optimize(model)
    assert [e.region for e in fxfuse.report(optimized).fused] == ["0"]
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert right(optimized(given), model, given)


def test_functions_leave_no_trace_of_the_trace():
    """The names that a trace puts into the model's own file for its time are gone."""
    fxfuse.optimize(model_of(RECORDED["isinstance"][0]))
    assert "isinstance" not in globals()
    assert torch.is_tensor.__module__ == "torch"


def test_a_global_bound_anew_is_noticed(optimize, monkeypatch):
    model = model_of(RECORDED["global"][0])
    optimized = optimize(model)
    given = torch.randn(2, WIDTH)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    with torch.no_grad():
        assert right(optimized(given), model, given)
    assert fxfuse.report(optimized).calls[""].reasons == {"FACTOR is no longer what it was": 1}


def test_an_attribute_of_a_part_is_watched(optimize):
    model = model_of(*RECORDED["attribute of a part"][:1], conv=nn.Conv1d(1, 1, 2, 2))
    optimized = optimize(model)
    given = torch.randn(2, WIDTH)
    with torch.no_grad():
        model.conv = optimized.conv = nn.Conv1d(1, 1, 2, 3)
        assert right(optimized(given), model, given)
        del optimized.conv
        with pytest.raises(AttributeError):
            optimized(given)
    assert list(fxfuse.report(optimized).calls[""].reasons)[1:] == ["module conv is gone"]


def test_what_stands_for_finfo_while_a_trace_runs_is_it_for_other_threads():
    assert finfo(torch.bfloat16).eps == torch.finfo(torch.bfloat16).eps
    assert finfo().eps == torch.finfo().eps
    assert isinstance(torch.finfo(torch.float32), finfo)
    assert not isinstance(1.0, finfo)
