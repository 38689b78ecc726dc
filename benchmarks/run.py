"""Suites of benchmarks: ``python -m benchmarks.run --suite mlp-cpu``. All the measuring is in ``fxfuse.bench``.

``mlp-cpu``  geglu-mlp, ffn and matmul-add at 512, 16 and 1 rows, float32 and bfloat16, against every column
``mlp``      on a GPU, bfloat16: one projection, gated MLPs and their decode sizes, against every column
``sweep``    on a GPU, bfloat16: gated MLPs of many sizes against eager
``cases``    the cases of each pass (``benchmarks/cases/<stem>.py``) against eager
``seed``     the five set-ups of ``benchmarks/seed.py``, profiled: no times, but what runs
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import cases, gpu, seed
from fxfuse.bench import render, targets
from fxfuse.bench.measure import Result, measure
from fxfuse.bench.progress import Progress
from fxfuse.bench.publish import Outputs
from fxfuse.bench.targets import Target
from fxfuse.bench.timer import QUICK, Effort

RESULTS = Path(__file__).parent / "results"


Row = tuple[str, Target, Sequence[str] | None]


def mlp_cpu() -> Iterator[Row]:
    for name in ("geglu-mlp", "ffn", "matmul-add"):
        for dtype in ("float32", "bfloat16"):
            for rows in (512, 16, 1):
                target = targets.load(name, device="cpu", dtype=dtype, rows=rows)
                yield f"{name} M={rows}", target, None


def all_cases() -> Iterator[Row]:
    for module in pkgutil.iter_modules(cases.__path__):
        for name, build in importlib.import_module(f"benchmarks.cases.{module.name}").CASES.items():
            label = f"{module.name}/{name}"
            yield label, Target(label, *build()), ("eager", "fxfuse")


def mlp() -> Iterator[Row]:
    for label, build in gpu.PROJECTIONS.items():
        yield label, gpu.target(label, build, gpu.SEED), ("compile", "gemms")
    for label, build in gpu.GATED.items():
        for size in gpu.PREFILL:
            columns = None if size == gpu.SEED else ("compile", "liger", "gemms")
            yield f"{label} {size}", gpu.target(label, build, size), columns
    for rows in (1, 4, 16, 64):
        size = gpu.Size(rows, 4096, 14336)
        yield f"swiglu {size}", gpu.target("swiglu", gpu.GATED["swiglu"], size), ("compile", "liger", "gemms")
    tiny = gpu.Size(8, 256, 512)
    yield f"geglu {tiny}", gpu.target("geglu", gpu.GATED["geglu"], tiny), ("compile", "liger")


def sweep() -> Iterator[Row]:
    for size in gpu.SWEEP:
        yield f"geglu {size}", gpu.target("geglu", gpu.GATED["geglu"], size), ()


SUITES = {"mlp-cpu": mlp_cpu, "mlp": mlp, "sweep": sweep, "cases": all_cases}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one suite, print its table and write its figures to ``benchmarks/results``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Run a suite of benchmarks.")
    parser.add_argument("--suite", choices=(*SUITES, "seed"), required=True)
    parser.add_argument("--quick", action="store_true", help="a few short rounds")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/SUITE.json")
    options = parser.parse_args(argv)
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: a time takes a round at least")
    file = options.json or RESULTS / f"{options.suite}.json"
    file.parent.mkdir(exist_ok=True)
    if options.suite == "seed":
        found = [row for size in seed.SIZES for row in seed.rows(size)]
        print(seed.table(found))
        file.write_text(seed.as_json(found) + "\n")
        return 0
    effort = QUICK if options.quick else Effort()
    if options.repeats:
        effort = replace(effort, rounds=options.repeats, budget_s=None)
    settings = {"suite": options.suite, **asdict(effort)}
    results: list[Result] = []
    for label, target, columns in SUITES[options.suite]():
        with Progress(label) as progress:
            results.append(measure(target, columns, label=label, effort=effort, progress=progress))
        # After each: a suite takes long, and what it has found outlives what may happen to it.
        Outputs(json=str(file)).write(results, settings)
    print(render.summary(results), render.LEGEND, sep="\n\n")
    missing = [f"{r.label} {r.dtype}: {gone.name}: {gone.reason}" for r in results for gone in r.left_out]
    if missing:
        print("\nleft out:", *missing, sep="\n  ")
    return 1 if any(result.fxfuse_failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
