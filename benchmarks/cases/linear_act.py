"""A linear and an activation of torch, as one projection with an epilogue."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.cases import Example, example


def _case(act: Callable[[], nn.Module]) -> Callable[[], Example]:
    return lambda: example(lambda dim, hidden: nn.Sequential(nn.Linear(dim, hidden), act()))


CASES = {
    "relu": _case(nn.ReLU),
    "gelu": _case(nn.GELU),
    "gelu-tanh": _case(lambda: nn.GELU(approximate="tanh")),
    "silu": _case(nn.SiLU),
    "mish": _case(nn.Mish),
}
