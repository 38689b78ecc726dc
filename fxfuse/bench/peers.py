"""The columns of a benchmark: how each variant of a target is made, and why one may be missing.

A builder takes a Target and returns what is called in the model's place. It raises DoesNotApply with the reason where
it has nothing to offer. Adding a peer is one builder and one line in PEERS.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import fxfuse
from fxfuse.bench import models
from fxfuse.bench.targets import Target
from fxfuse.errors import FxfuseError

Run = Callable[..., Any]


class DoesNotApply(Exception):
    """This peer has nothing to offer for this target; the text says why."""


class TargetRaised(FxfuseError, RuntimeError):
    """The target's own forward raised on its example inputs."""


@dataclass(frozen=True)
class Variant:
    """A column that can be timed."""

    name: str
    run: Run
    prepare_s: float
    """Seconds to make it: optimizing. What compiles when it is called does so in its first call."""
    first_call_s: float
    output: Any
    """What the first call returned."""


@dataclass(frozen=True)
class LeftOut:
    """A column that cannot, and why."""

    name: str
    reason: str


def build(name: str, target: Target, make: Callable[[Target], Run] | None = None) -> Variant | LeftOut:
    """Make the variant ``name`` of ``target`` and call it once. Raises TargetRaised where the plain model raises.

    ``make``: what makes it; None for its line in ``PEERS``.
    """
    # A forward may write to its inputs; the next variant must meet them as they were.
    args, kwargs = tree_map_only(Tensor, torch.clone, target.example())
    start = time.perf_counter()
    try:
        run = (make or PEERS[name])(target)
        made = time.perf_counter()
        with torch.inference_mode():
            output = run(*args, **kwargs)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
    except DoesNotApply as reason:
        return LeftOut(name, str(reason))
    except Exception as error:
        if name == "eager":
            raise TargetRaised(f"{target.name}: the model's forward raised {one_line(error)}") from error
        return LeftOut(name, f"raised {one_line(error)}")
    return Variant(name, run, made - start, time.perf_counter() - made, output)


def one_line(error: BaseException, *, named: bool = True, width: int = 300) -> str:
    """The first line of an exception's text, after the name of its type if ``named``."""
    text = f"{type(error).__name__}: {error}" if named else str(error)
    first = text.strip().partition("\n")[0].rstrip()
    return first if len(first) <= width else first[: width - 1] + "…"


def columns(device: str) -> tuple[str, ...]:
    """The columns that there may be on a kind of device."""
    return tuple(name for name in PEERS if DEVICES.get(name, device) == device)


def _only_on(kind: str, target: Target) -> None:
    if target.device.type != kind:
        raise DoesNotApply(f"measured on {kind} only")


def _eager(target: Target) -> Run:
    return target.model


def _fxfuse(target: Target) -> Run:
    args, kwargs = target.example()
    optimized: nn.Module = fxfuse.optimize(target.model, example_inputs=args, example_kwargs=kwargs)
    return optimized


def _compile(target: Target) -> Run:
    return torch.compile(target.model)


def _compile_max(target: Target) -> Run:
    _only_on("cuda", target)
    return torch.compile(target.model, mode="max-autotune-no-cudagraphs")


def _compile_freezing(target: Target) -> Run:
    _only_on("cpu", target)
    # As an option and not through the global config: torch.compile reuses code between calls whose options are equal.
    return torch.compile(target.model, options={"freezing": True})


def _onednn(target: Target) -> Run:
    _, kwargs = target.example()
    by_hand = BY_HAND.get(type(target.model))
    if by_hand is None or kwargs:
        raise DoesNotApply("written by hand for the built-in MLPs only")
    _only_on("cpu", target)
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        raise DoesNotApply("this build of torch has no mkldnn::_linear_pointwise")
    return _ByHand(by_hand(target.model))


class _ByHand(nn.Module):
    """What one would write in the model's place: a module, like every other column, whose forward calls oneDNN."""

    def __init__(self, run: Run):
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


def _liger(target: Target) -> Run:
    model = target.model
    if not isinstance(model, (models.GegluMLP, models.SwigluMLP)):
        raise DoesNotApply("has gated MLPs only")
    _only_on("cuda", target)
    try:
        geglu = importlib.import_module("liger_kernel.ops.geglu")
        swiglu = importlib.import_module("liger_kernel.ops.swiglu")
    except ImportError as missing:
        raise DoesNotApply("liger-kernel is not installed") from missing
    if isinstance(model, models.GegluMLP):
        gate, up, down, product = model.gate, model.up, model.down, geglu.LigerGELUMulFunction
    else:
        gate, up, down, product = model.gate_proj, model.up_proj, model.down_proj, swiglu.LigerSiLUMulFunction

    def run(x: Tensor) -> Tensor:
        y: Tensor = down(product.apply(gate(x), up(x)))
        return y

    return run


def _gemms(target: Target) -> Run:
    """No answer but a floor: the model's products alone, each as cuBLAS computes it, without bias and activation."""
    _only_on("cuda", target)
    args, _ = target.example()
    linears = [m for m in target.model.modules() if isinstance(m, nn.Linear)]
    if len(args) != 1 or not linears:
        raise DoesNotApply("for models of one tensor argument and nn.Linear only")
    x = args[0]
    inputs = {m.in_features: torch.randn(x.numel() // x.shape[-1], m.in_features).to(x) for m in linears}

    def run(_x: Tensor) -> Tensor:
        for m in linears:
            y = torch.mm(inputs[m.in_features], m.weight.t())
        return y

    return run


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "none", how: str = "") -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, act, [], how)


def _times(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, "mul")


def _geglu_by_hand(m: models.GegluMLP) -> Run:
    gate, up, down = m.gate, m.up, m.down

    def run(x: Tensor) -> Tensor:
        g = _pointwise(x, gate.weight, gate.bias, "gelu", "tanh")
        return _pointwise(_times(x, g, up.weight, up.bias), down.weight, down.bias)

    return run


def _swiglu_by_hand(m: models.SwigluMLP) -> Run:
    gate, up, down = m.gate_proj, m.up_proj, m.down_proj

    def run(x: Tensor) -> Tensor:
        return _pointwise(_times(x, _pointwise(x, gate.weight, None, "swish"), up.weight, None), down.weight, None)

    return run


def _packed_by_hand(m: models.PackedGluMLP) -> Run:
    gate, up = m.gate_up.weight.chunk(2)
    down = m.down.weight

    def run(x: Tensor) -> Tensor:
        return _pointwise(_times(x, _pointwise(x, gate, None, "swish"), up, None), down, None)

    return run


def _two_linears(w1: Tensor, b1: Tensor, how: str, w2: Tensor, b2: Tensor) -> Run:
    def run(x: Tensor) -> Tensor:
        return _pointwise(_pointwise(x, w1, b1, "gelu", how), w2, b2)

    return run


def _ffn_by_hand(m: models.FeedForward) -> Run:
    up, down = m.net[0], m.net[2]
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    return _two_linears(up.weight, up.bias, "none", down.weight, down.bias)


def _matmul_add_by_hand(m: models.MatmulAddMLP) -> Run:
    return _two_linears(m.w1.t(), m.b1, "none", m.w2.t(), m.b2)


def _conv1d_by_hand(m: models.Conv1dMLP) -> Run:
    return _two_linears(m.c_fc.weight.t(), m.c_fc.bias, "tanh", m.c_proj.weight.t(), m.c_proj.bias)


BY_HAND: dict[type[nn.Module], Callable[[Any], Run]] = {
    models.GegluMLP: _geglu_by_hand,
    models.SwigluMLP: _swiglu_by_hand,
    models.FeedForward: _ffn_by_hand,
    models.MatmulAddMLP: _matmul_add_by_hand,
    models.Conv1dMLP: _conv1d_by_hand,
    models.PackedGluMLP: _packed_by_hand,
}

#: In the order of the columns; eager and fxfuse are in every run.
PEERS: dict[str, Callable[[Target], Run]] = {
    "eager": _eager,
    "fxfuse": _fxfuse,
    "compile": _compile,
    "compile-freezing": _compile_freezing,
    "compile-max": _compile_max,
    "liger": _liger,
    "gemms": _gemms,
    "onednn": _onednn,
}
DEVICES = {"compile-freezing": "cpu", "onednn": "cpu", "compile-max": "cuda", "liger": "cuda", "gemms": "cuda"}
"""Columns that are measured on one kind of device only."""
FLOORS = frozenset({"gemms"})
"""Columns that do not compute the model's answer, and are not held to it."""
