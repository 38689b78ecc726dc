"""What tests of passes share: assert_fuses and assert_kept, models written as one row of a table, poisoned memory."""

from __future__ import annotations

import copy
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

import fxfuse
from fxfuse import choose, cli, numerics, tuning
from fxfuse.report import Event, Report
from fxfuse.spellings import spell


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.txt anew; read the diff")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fresh memory is full of NaN, so that an output which nobody wrote shows."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture
def second_target_raises(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Let ``fxfuse bench`` measure its first target, and raise this at the second."""
    real, seen = cli.measure, []

    def raising(error: BaseException) -> None:
        def measure(target: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(target.name)
            if len(seen) == 2:
                raise error
            return real(target, *args, **kwargs)

        monkeypatch.setattr(cli, "measure", measure)

    return raising


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def unmeasured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """No test reads or writes the user's table of measured choices, and none measures but those that ask for it."""
    # A folder for each test: what the commands that it starts have measured is not the next one's.
    monkeypatch.setenv("FXFUSE_CACHE", str(cache / str(next(_numbers))))
    monkeypatch.setattr(choose, "CHOICES", choose.Choices())
    if "measuring" not in request.fixturenames:
        monkeypatch.setattr(tuning, "measure", lambda *args, **kwargs: [])


@pytest.fixture
def measuring() -> None:
    """The test is about measuring."""


_numbers = itertools.count()


@pytest.fixture(params=[False, True], ids=["bare", "example"])
def example(request: pytest.FixtureRequest) -> bool:
    """Whether optimize is given example inputs."""
    return request.param


class Written(nn.Module):
    """A model that is one function of its input and its own tensors: ``forward(x) = row(x, *state.values())``.

    Floating-point tensors become parameters and others buffers; modules and numbers are kept as they are.
    """

    def __init__(self, row: Callable[..., Any], **state: Any):
        super().__init__()
        self.row, self.names = row, tuple(state)
        for name, value in state.items():
            if not isinstance(value, Tensor):
                setattr(self, name, value)
            elif value.is_floating_point() and not isinstance(value, nn.Parameter):
                setattr(self, name, nn.Parameter(value))
            elif isinstance(value, nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Any:
        return self.row(x, *[getattr(self, name) for name in self.names])


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ops_of(model: Any) -> list[str]:
    """The ops of the rewritten graphs by their canonical names, by their own names where the table has none."""
    return [
        _op(node, gm) for gm in fxfuse.graphs(model).values() for node in gm.graph.nodes if node.op.startswith("call_")
    ]


def _op(node: fx.Node, gm: fx.GraphModule) -> str:
    call = spell(node)
    if call is not None:
        return call.name
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def assert_fuses(
    rule: str,
    target: Any,
    inputs: Sequence[Tensor],
    *,
    gone: Collection[str] = (),
    new: Collection[str] = (),
    example: bool = True,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    source: bool = True,
    **options: Any,
) -> Report:
    """``rule`` fuses ``target``, a module or function: no op of ``gone`` is left, all of ``new`` are, same answers.

    In every dtype of ``dtypes``, to which a module and the floating-point inputs are cast. ``source``: each event names
    a line of the calling file. Returns the last report.
    """
    for dtype in dtypes:
        model, args = _cast(target, dtype), tree_map(lambda t, d=dtype: _to(t, d), tuple(inputs))
        optimized = _optimized(model, args, example, options)
        report = fxfuse.report(optimized)
        events = [e for e in report.events if e.rule == rule and e.kind in ("fused", "tidied")]
        assert events, f"{rule} did not fuse; the report:\n{report}\n{_code(optimized)}"
        if source:
            _assert_source(events, sys._getframe(1).f_code.co_filename)
        ops = ops_of(optimized)
        assert not set(gone).intersection(ops), f"{sorted(set(gone).intersection(ops))} left:\n{_code(optimized)}"
        assert set(new) <= set(ops), f"no {sorted(set(new) - set(ops))}:\n{_code(optimized)}"
        assert_right(model, optimized, args)
    return report


def assert_kept(
    rule: str,
    target: Any,
    inputs: Sequence[Tensor],
    *,
    why: str | None,
    example: bool = True,
    new: Collection[str] = (),
    absent: Collection[str] = (),
    **options: Any,
) -> Report:
    """``rule`` fuses nothing in ``target`` and gives exactly the reason ``why``; with None it does not speak of it.

    Ops in ``new`` must be there and those in ``absent`` must not: what becomes of the model instead.
    """
    optimized = _optimized(target, tuple(inputs), example, options)
    report = fxfuse.report(optimized)
    found = [e for e in report.events if e.rule == rule and e.kind == "fused"]
    assert not found, f"{rule} fused:\n{report}\n{_code(optimized)}"
    kept = [e for e in report.kept if e.rule == rule]
    reasons = [e.reason for e in kept]
    if why is None:
        assert not reasons, f"{rule} says {reasons}"
    else:
        assert why in reasons, f"the reasons are {reasons}; the report:\n{report}\n{_code(optimized)}"
        _assert_source([e for e in kept if e.reason == why], sys._getframe(1).f_code.co_filename)
    ops = ops_of(optimized)
    assert set(new) <= set(ops), _code(optimized)
    assert not set(absent).intersection(ops), _code(optimized)
    assert_right(target, optimized, tuple(inputs))
    return report


def assert_right(model: Any, optimized: Any, args: Sequence[Any]) -> None:
    """Same answers by the rule of ``fxfuse.numerics``, arguments left as eager leaves them, the fused path taken."""
    ours, theirs, exact = (tree_map(_copy, tuple(args)) for _ in range(3))
    with torch.no_grad():
        eager = model(*theirs)
        answer = optimized(*ours)
    verdict = numerics.judge(answer, eager, *numerics.reference(traced(model), exact))
    assert verdict, f"{verdict.reason}\n{_code(optimized)}"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for region in fxfuse.report(optimized).calls.values():
        assert region.fallback + region.plain == 0, region.reasons


def traced(model: Any) -> fx.GraphModule:
    """The model's graph by torch.fx alone."""
    if isinstance(model, fx.GraphModule):
        return model
    return fx.GraphModule(model if isinstance(model, nn.Module) else nn.Module(), _Tracer().trace(model))


def _optimized(target: Any, args: tuple[Any, ...], example: bool, options: dict[str, Any]) -> Any:
    optimized = fxfuse.optimize(target, args, **options) if example else fxfuse.optimize(target, **options)
    report = fxfuse.report(optimized)
    assert not report.notes, report
    assert not [u for u in report.uncaptured if u.path == ""], report
    assert not [r for r in report.regions if r.note.startswith("taken out")], report
    return optimized


def _assert_source(events: Sequence[Event], file: str) -> None:
    for event in events:
        assert event.source.startswith(f"{file}:"), f"the source of {event.nodes} is {event.source!r}"


class _InPlace(fx.Proxy):
    """torch.fx itself traces ``h += b`` as ``h = h + b``, which is another program."""


def _augmented(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda proxy, other: proxy.tracer.create_proxy("call_function", function, (proxy, other), {})


for _name in ("add", "sub", "mul", "truediv"):
    setattr(_InPlace, f"__i{_name}__", _augmented(getattr(operator, f"i{_name}")))


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _InPlace(node, self)


def _cast(target: Any, dtype: torch.dtype) -> Any:
    return copy.deepcopy(target).to(dtype) if isinstance(target, nn.Module) else target


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _copy(value: Any) -> Any:
    """The same values in the same strides."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())


def _code(model: Any) -> str:
    return "\n".join(gm.code for gm in fxfuse.graphs(model).values())
