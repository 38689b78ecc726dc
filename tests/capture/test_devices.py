"""What a forward decides by where a computed value lies, and what it asks about autocast there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from tests.models.answers import right

WIDTH = 128


class Model(nn.Module):
    """``forward(x)`` is an MLP, scaled by ``run(self, x)``."""

    run: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) * type(self).run(self, x)


def _under_no_autocast(device: str) -> int:
    with torch.autocast(device) if torch.is_autocast_enabled(device) else torch.no_grad():
        return 2


DECIDED: dict[str, Callable[..., Any]] = {
    "sum": lambda m, x: 2 if (x + m.table).device.type == "meta" else 3,
    "one of several": lambda m, x: 2 if (x @ x.mT).device.type in ("mps", "meta") else 3,
    "product of parameters": lambda m, x: 2 if m.down(m.table * 2).norm().device.type != "meta" else 3,
    "made beside": lambda m, x: 2 if (torch.ones(3, device=x.device) + x[0, 0]).device.type == "meta" else 3,
    "autocast": lambda m, x: _under_no_autocast((x + 1).device.type),
}


@pytest.mark.parametrize("name", DECIDED)
def test_decided_as_in_the_example(name):
    model = type("Model", (Model,), {"run": staticmethod(DECIDED[name])})().eval()
    given = torch.randn(2, WIDTH)
    optimized = fxfuse.optimize(model, given, tune="off")
    with torch.no_grad():
        for x in (given, torch.randn(5, WIDTH)):
            assert right(optimized(x), model, x)
        assert fxfuse.report(optimized).calls[""].fused == 2
        if name != "autocast":
            optimized.to("meta")(given.to("meta"))
            why = list(fxfuse.report(optimized).calls[""].reasons)
            assert len(why) == 1
            assert why[0].endswith("expected no device meta, found meta")


def test_under_autocast_the_forward_asks_by_itself():
    model = type("Model", (Model,), {"run": staticmethod(DECIDED["autocast"])})().eval()
    given = torch.randn(2, WIDTH)
    optimized = fxfuse.optimize(model, given, tune="off")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(optimized(given), model(given))
    assert fxfuse.report(optimized).calls[""].reasons == {"autocast is on": 1}
