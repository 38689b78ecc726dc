"""Plain linears inside a region: nothing to fuse, but a faster product on the same weights."""

from __future__ import annotations

from torch import nn

from benchmarks.cases import Example, example


def linear() -> Example:
    return example(nn.Linear)


def two_linears() -> Example:
    return example(
        lambda dim, hidden: nn.Sequential(nn.Linear(dim, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, dim))
    )


CASES = {"linear": linear, "two-linears": two_linears}
