"""Activations written out in arithmetic, each between two linears."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.cases import Example, example


class Between(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], dim: int, hidden: int) -> None:
        super().__init__()
        self.act = act
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def gelu_erf(h: Tensor) -> Tensor:
    return h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))


def gelu_tanh(h: Tensor) -> Tensor:
    return 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))


def silu(h: Tensor) -> Tensor:
    return h * torch.sigmoid(h)


def quick_gelu(h: Tensor) -> Tensor:
    return h * torch.sigmoid(1.702 * h)


def relu_squared(h: Tensor) -> Tensor:
    return torch.relu(h) ** 2


def _case(act: Callable[[Tensor], Tensor]) -> Callable[[], Example]:
    return lambda: example(lambda dim, hidden: Between(act, dim, hidden))


CASES = {
    "gelu-erf": _case(gelu_erf),
    "gelu-tanh": _case(gelu_tanh),
    "silu": _case(silu),
    "quick-gelu": _case(quick_gelu),
    "relu-squared": _case(relu_squared),
}
