"""Layers of a model that are alike are traced and rewritten once; what makes one unlike another gets its own trace."""

from __future__ import annotations

import copy
import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import engine
from fxfuse.capture import walk
from tests.models.answers import right
from tests.optimize.model import WIDTH

DEPTH = 5


class Layer(nn.Module):
    """One with all that a layer may have: a number, a configuration, a buffer, a function, a leaf."""

    def __init__(self, number: int, config: types.SimpleNamespace) -> None:
        super().__init__()
        self.number, self.config, self.scale = number, config, 2.0
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.fc, self.proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = functools.partial(F.gelu, approximate=config.approximate)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.table = torch.randn(WIDTH)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        h = self.proj(self.act(self.fc(self.norm(x))))
        h = self.drop(h) * self.scale + self.shift + self.table
        return x + h * 2 if twice else x + h


class Model(nn.Module):
    """No trace can take it whole: it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        config = types.SimpleNamespace(approximate="tanh")
        self.layers = nn.ModuleList(Layer(i, config) for i in range(DEPTH))
        self.last_twice = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, twice=self.last_twice and i == DEPTH - 1)
            if x.isnan().any():
                return x
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the traces of layers, and how many graphs were rewritten."""
    done: Counter[str] = Counter()
    trace, rewrite = walk.trace_module, engine.run

    def traced(root: nn.Module, *args: Any, **kwargs: Any) -> Any:
        done["traces"] += isinstance(root, Layer)
        return trace(root, *args, **kwargs)

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        done["rewrites"] += 1
        return rewrite(*args, **kwargs)

    monkeypatch.setattr(walk, "trace_module", traced)
    monkeypatch.setattr(engine, "run", rewritten)
    return done


def assert_all_fused(optimized: nn.Module, model: nn.Module, x: torch.Tensor, calls: int = 1) -> None:
    with torch.no_grad():
        assert right(optimized(x), model, x)
    counts = fxfuse.report(optimized).calls
    assert {path: c.fused for path, c in counts.items()} == {f"layers.{i}": calls for i in range(DEPTH)}, counts


@pytest.mark.parametrize("example", [False, True])
def test_once_for_all_that_are_alike(model, x, work, example):
    optimized = fxfuse.optimize(model, x if example else None)
    assert work == {"traces": 1, "rewrites": 1}
    assert_all_fused(optimized, model, x)
    report = fxfuse.report(optimized)
    assert Counter(e.region for e in report.fused) == {f"layers.{i}": 1 for i in range(DEPTH)}
    assert [r.path for r in report.regions] == [f"layers.{i}" for i in range(DEPTH)]
    fused, plain = ([f"layers.{i}.{name}" for i in range(DEPTH)] for name in ("fc", "proj"))
    assert {name: not why for name, why in report.linears.items()} == dict.fromkeys(fused, True) | dict.fromkeys(
        plain, False
    )


def test_each_region_is_its_own(model, x):
    """Weights, counts, hooks and copies are those of the layer."""
    optimized = fxfuse.optimize(model, x)
    for i, (path, gm) in enumerate(fxfuse.graphs(optimized).items()):
        assert path == f"layers.{i}"
        assert gm.fc.weight is model.layers[i].fc.weight
    twin = copy.deepcopy(optimized)
    for tree in (model, optimized):
        tree.layers[1].scale = 3.0
        tree.layers[2].fc.register_forward_hook(lambda module, args, y: y + 1)
    with torch.no_grad():
        assert right(optimized(x), model, x)
    counts = fxfuse.report(optimized).calls
    assert [(c.fused, c.fallback) for c in counts.values()] == [(1, 0), (0, 1), (0, 1), (1, 0), (1, 0)]
    assert dict(counts["layers.1"].reasons) == {"attribute scale: expected 2.0, found 3.0": 1}
    assert_all_fused(twin, fxfuse.restore(copy.deepcopy(twin)), x)


def _numbers(model: Model) -> None:
    model.layers[-1].number = "last"


def _weights(model: Model) -> None:
    model.layers[-1].load_state_dict({k: v + 1 for k, v in model.layers[-1].state_dict().items()})


@pytest.mark.parametrize("change", [_numbers, _weights])
def test_what_may_differ(model, x, work, change):
    change(model)
    assert_all_fused(fxfuse.optimize(model, x), model, x)
    assert work == {"traces": 1, "rewrites": 1}


class Other(Layer):
    pass


def _replace(name: str, new: Callable[[], Any]) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        setattr(model.layers[-1], name, new())

    change.__name__ = name
    return change


def _parameter(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        owner = model.layers[-1].get_submodule(name.rpartition(".")[0])
        old = getattr(owner, name.rpartition(".")[2])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(new(old.detach())))

    change.__name__ = name
    return change


def _class(model: Model) -> None:
    model.layers[-1] = Other(DEPTH - 1, model.layers[0].config)


def _argument(model: Model) -> None:
    model.last_twice = True


def _probability(model: Model) -> None:
    model.layers[-1].drop.p = 0.0


def _epsilon(model: Model) -> None:
    model.layers[-1].norm.eps = 0.5


def _tied(model: Model) -> None:
    model.layers[-1].shift = model.layers[-1].table


def _configuration(model: Model) -> None:
    model.layers[-1].config = types.SimpleNamespace(approximate="none")


def _more(model: Model) -> None:
    model.layers[-1].more = 1


@pytest.mark.parametrize(
    "change",
    [
        _replace("scale", lambda: 3.0),
        _replace("scale", lambda: 2),
        _replace("act", lambda: functools.partial(F.gelu, approximate="none")),
        _replace("act", lambda: F.gelu),
        _replace("table", lambda: torch.randn(2, 1, WIDTH)),
        _replace("shift", lambda: torch.randn(())),
        _replace("drop", nn.Identity),
        _replace("proj", lambda: nn.Linear(2 * WIDTH, WIDTH, bias=False)),
        _parameter("fc.weight", lambda w: w.t().contiguous().t()),
        _class,
        _argument,
        _probability,
        _epsilon,
        _tied,
        _configuration,
        _more,
    ],
)
def test_what_makes_a_layer_unlike_the_others(model, x, work, change):
    change(model)
    assert_all_fused(fxfuse.optimize(model.eval(), x), model, x)
    assert work == {"traces": 2, "rewrites": 2}


def _hook(model: Model) -> None:
    model.layers[-1].fc.register_forward_hook(lambda module, args, y: y + 1)


def _own_forward(model: Model) -> None:
    fc = model.layers[-1].fc
    fc.forward = types.MethodType(lambda self, x: F.linear(x, self.weight, self.bias) * 2, fc)


@pytest.mark.parametrize("change", [_hook, _own_forward])
def test_a_layer_whose_linear_is_more_than_it_was(model, x, change):
    change(model)
    optimized = fxfuse.optimize(model, x)
    with torch.no_grad():
        assert right(optimized(x), model, x)
    counts = fxfuse.report(optimized).calls
    assert {f"layers.{i}": counts[f"layers.{i}"].fused for i in range(DEPTH - 1)} == {
        f"layers.{i}": 1 for i in range(DEPTH - 1)
    }
    assert not [e for e in fxfuse.report(optimized).fused if e.region == f"layers.{DEPTH - 1}"]


def test_two_kinds_by_turns(model, x, work):
    for layer in model.layers[::2]:
        layer.scale = 3.0
    assert_all_fused(fxfuse.optimize(model, x), model, x)
    assert work == {"traces": 2, "rewrites": 2}


FAR = torch.arange(float(WIDTH))


def test_tensors_from_elsewhere_are_not_shared(x, work):
    """A trace has them as constants of its own."""

    class Reaching(Layer):
        def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
            return super().forward(x, twice) + FAR

    model = Model()
    model.layers = nn.ModuleList(Reaching(i, model.layers[0].config) for i in range(DEPTH))
    assert_all_fused(fxfuse.optimize(model.eval(), x), model, x)
    assert work == {"traces": DEPTH, "rewrites": DEPTH}


def test_one_that_is_wrong_is_taken_out_alone(model, x, monkeypatch):
    from fxfuse.capture import build

    judge = build.differing

    def differing(target: nn.Module, regions: list[Any], *args: Any) -> dict[str, str]:
        found = judge(target, regions, *args)
        return {**found, "layers.3": "was wrong"} if "layers.3" in {r.path for r in regions} else found

    monkeypatch.setattr(build, "differing", differing)
    optimized = fxfuse.optimize(model, x)
    with torch.no_grad():
        assert right(optimized(x), model, x)
    report = fxfuse.report(optimized)
    assert [u.reason for u in report.uncaptured if u.path == "layers.3"] == ["was wrong"]
    assert {f"layers.{i}" for i in (0, 1, 2, 4)} <= set(report.calls)
    assert "layers.3" not in report.calls
