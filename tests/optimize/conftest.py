"""A model beside its optimized copy, for all tests here."""

from __future__ import annotations

import pytest
import torch

import fxfuse
from tests.optimize.model import MLP, WIDTH


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, WIDTH)


@pytest.fixture(params=["plain", "example"])
def pair(request: pytest.FixtureRequest, x: torch.Tensor) -> tuple[MLP, MLP]:
    """A model and its optimized copy."""
    model = MLP().eval()
    return model, fxfuse.optimize(model, x if request.param == "example" else None)
