"""The sizes and modules of the GPU suites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxfuse.bench import models
from fxfuse.bench.targets import Target


@dataclass(frozen=True)
class Size:
    """Rows, model width, hidden width."""

    rows: int
    dim: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.rows}, {self.dim}, {self.hidden}"


class MatmulThenAdd(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(dim, hidden) / dim**0.5), nn.Parameter(torch.randn(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(torch.matmul(x, self.weight), self.bias)


class LinearThen(nn.Module):
    def __init__(self, dim: int, hidden: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(dim, hidden), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


Build = Callable[[int, int], nn.Module]

PROJECTIONS: dict[str, Build] = {
    "matmul then add": MatmulThenAdd,
    "linear, gelu tanh": lambda dim, hidden: LinearThen(dim, hidden, nn.GELU("tanh")),
    "linear, gelu erf": lambda dim, hidden: LinearThen(dim, hidden, nn.GELU()),
    "linear, silu": lambda dim, hidden: LinearThen(dim, hidden, F.silu),
    "linear, relu": lambda dim, hidden: LinearThen(dim, hidden, F.relu),
}
GATED: dict[str, Build] = {"geglu": models.GegluMLP, "swiglu": models.SwigluMLP}

SEED = Size(8192, 768, 3072)
PREFILL = (SEED, Size(2048, 1024, 4096), Size(4096, 4096, 14336))
SWEEP = tuple(
    Size(rows, dim, hidden)
    for rows in (1, 5, 16, 33, 64, 100, 128, 250, 512, 1000, 2048, 4096, 16384)
    for dim, hidden in ((512, 1344), (768, 3072), (1000, 2666), (2048, 8192), (4096, 14336), (8192, 21824))
)
"""Widths of 2.6 to 4 times, some that no tile divides; a run that is cut short has had each of them."""


def target(label: str, build: Build, size: Size) -> Target:
    """A module of a size with random weights, on the GPU in bfloat16."""
    with torch.device("cuda"):  # where half a billion random weights take no time
        model = build(size.dim, size.hidden).eval().to(torch.bfloat16)
    x = torch.randn(size.rows, size.dim, device="cuda", dtype=torch.bfloat16)
    return Target(label, model, (x,), {})
