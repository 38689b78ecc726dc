"""act(gate(x)) * up(x): separate projections, one packed projection, and F.glu."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Example, example


class Separate(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.gate(x), approximate="tanh") * self.up(x)


class Packed(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return up * F.silu(gate)


class Glu(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.both = nn.Linear(dim, 2 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.both(x))


def separate() -> Example:
    return example(Separate)


def packed() -> Example:
    return example(Packed)


def glu() -> Example:
    return example(Glu)


CASES = {"separate": separate, "packed": packed, "glu": glu}
