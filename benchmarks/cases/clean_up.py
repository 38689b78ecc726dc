"""Spellings that say nothing: each hides a linear+activation until clean_up has removed it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Example, example


class NoOpViews(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.drop = nn.Dropout(0.1)
        self.rest = nn.Identity()
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rest(self.drop(self.up(x)) / 1.0)
        return self.down(self.drop(F.relu(h.transpose(0, 1).transpose(0, 1))))


class SameTwice(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.up(x).sigmoid())


def no_op_views() -> Example:
    return example(NoOpViews)


def same_twice() -> Example:
    return example(SameTwice)


CASES = {"no-op-views": no_op_views, "same-twice": same_twice}
