"""The acceptance script over a folder: what it counts, and what it does not accept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import acceptance

ZOO = """
import torch
from torch import nn


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.fc(x) * self.calls


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval(), (torch.randn(2, 4, 8),), {}


def counting():
    return Calls().eval(), (torch.randn(2, 8),), {}


def raising():
    return mlp()[0], (torch.randn(2, 4, 9),), {}


ZOO = {"mlp": mlp, "counting": counting, "raising": raising}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "zoo.py").write_text(ZOO)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("mlp", 0, ["2 of 2 Linears in regions (100.0%); fused: 1 linear_act", "as given, batch, length"]),
        ("counting", 1, ["another answer", "1 Linears in no region: changes Calls.calls when it is called"]),
        ("raising", 1, ["RuntimeError: mat1 and mat2 shapes cannot be multiplied"]),
    ],
)
def test_exit_codes(name: str, code: int, told: list[str], folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", acceptance.__name__, str(folder), name], capture_output=True, text=True, check=False
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    for text in told:
        assert text in ran.stdout
