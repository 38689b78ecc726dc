"""A product and an addition that are a linear, in three spellings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.cases import Example, example


class _Raw(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, hidden) / math.sqrt(dim))
        self.bias = nn.Parameter(torch.randn(hidden))


class MatmulPlus(_Raw):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Addmm(_Raw):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class LateBias(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, hidden, bias=False)
        self.bias = nn.Parameter(torch.randn(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.proj(x), self.bias)


def matmul_plus() -> Example:
    return example(MatmulPlus)


def addmm() -> Example:
    return example(Addmm)


def late_bias() -> Example:
    return example(LateBias)


CASES = {"matmul-plus": matmul_plus, "addmm": addmm, "late-bias": late_bias}
