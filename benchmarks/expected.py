"""How far is the implementation that is expected to be fastest from the one that is: ``python -m benchmarks.expected``.

On a GPU, bfloat16: both operators of gated MLPs, at the sizes of the suites ``mlp`` and ``sweep``. What is expected is
what a first call takes where nothing was measured. Times are the chooser's own, of calls in turns, and those that it
has measured before.
"""

from __future__ import annotations

import sys

import torch
from tabulate import tabulate

import fxfuse
from benchmarks import gpu
from fxfuse import ops, tuning
from fxfuse.bench.progress import Progress

DECODE = tuple(gpu.Size(rows, 4096, 14336) for rows in (1, 4, 16, 64))
SIZES = (*gpu.PREFILL, *DECODE, *gpu.SWEEP)


def rows_of(size: gpu.Size) -> list[tuple[float, list[str]]]:
    """By operator: the time of what is expected by that of the fastest, and the row that tells it."""
    target = gpu.target("geglu", gpu.GATED["geglu"], size)
    optimized = fxfuse.optimize(target.model, target.args, tune="off")
    with torch.no_grad():
        found = tuning.of_graph(fxfuse.graphs(optimized)[""], target.args)
    told = tuning.measure(found, fxfuse.report(optimized), pack=False)
    rows = []
    for places, measured in zip(found.values(), told, strict=True):
        expected = ops.expected(places.target, places.tensors[0], places.rest)
        fastest = min(measured.seconds, key=measured.seconds.__getitem__)
        times = [measured.seconds[name] for name in (expected, fastest)]
        ratio = times[0] / times[1]
        rows.append(
            (ratio, [str(size), measured.op, expected, fastest, *(f"{t * 1e6:.1f}" for t in times), f"{ratio:.3f}"])
        )
    return rows


def main() -> int:
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 2
    rows = []
    with Progress() as progress:
        for size in SIZES:
            progress(f"expected against measured: {size}")
            rows += rows_of(size)
    head = ["rows, K, N", "operator", "expected", "fastest", "us", "us", "ratio"]
    print(tabulate([row for _, row in sorted(rows, reverse=True)], headers=head, disable_numparse=True))
    within = sum(ratio <= 1.05 for ratio, _ in rows)
    print(f"{within} of {len(rows)} within 5 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
