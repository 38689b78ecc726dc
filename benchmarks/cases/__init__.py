"""One module a pass, of its stem: ``CASES`` maps a name to a callable that returns (model, args, kwargs).

The sizes that all cases share are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

ROWS, DIM, HIDDEN = 128, 768, 3072


def example(cls: Callable[[int, int], nn.Module]) -> Example:
    """``cls(dim, hidden)`` in eval mode with a [rows, dim] input."""
    torch.manual_seed(0)
    return cls(DIM, HIDDEN).eval(), (torch.randn(ROWS, DIM),), {}
