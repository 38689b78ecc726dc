"""The benchmark of what a region's checks cost measures what it says."""

from __future__ import annotations

import torch

from benchmarks import overhead
from fxfuse.bench.models import GegluMLP


def test_measure():
    example = (GegluMLP(32, 64).eval(), (torch.randn(1, 32),), {})
    checks, eager, stub, empty, cost, share = overhead.measure(example, rounds=5)
    assert checks > 20
    assert min(eager, stub, empty) > 0
    assert (cost, share) == (stub - empty, (stub - empty) / eager)


def test_every_target_is_one_region_of_a_module():
    for name, build in overhead.TARGETS.items():
        if "1 row" in name or "width 32" in name:
            assert "_fxfuse" in overhead.optimized(build()).__dict__, name
