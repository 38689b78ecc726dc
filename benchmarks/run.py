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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks import cases, gpu, seed
from fxfuse.bench import render, targets
from fxfuse.bench.measure import Result, measure
from fxfuse.bench.progress import Progress, bar
from fxfuse.bench.publish import Outputs, write
from fxfuse.bench.targets import Target
from fxfuse.bench.timer import QUICK, Effort

RESULTS = Path(__file__).parent / "results"


Row = tuple[str, Callable[[], Target], Sequence[str] | None]
"""Label, what builds the target, and columns."""


def mlp_cpu() -> Iterator[Row]:
    for name in ("geglu-mlp", "ffn", "matmul-add"):
        for dtype in ("float32", "bfloat16"):
            for rows in (512, 16, 1):
                yield f"{name} M={rows}", partial(targets.load, name, device="cpu", dtype=dtype, rows=rows), None


def all_cases() -> Iterator[Row]:
    for module in pkgutil.iter_modules(cases.__path__):
        for name, build in importlib.import_module(f"benchmarks.cases.{module.name}").CASES.items():
            label = f"{module.name}/{name}"
            yield label, partial(_case, label, build), ("eager", "fxfuse")


def _case(label: str, build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> Target:
    return Target(label, *build())


def mlp() -> Iterator[Row]:
    for label, build in gpu.PROJECTIONS.items():
        yield label, partial(gpu.target, label, build, gpu.SEED), ("compile", "gemms")
    for label, build in gpu.GATED.items():
        for size in gpu.PREFILL:
            columns = None if size == gpu.SEED else ("compile", "liger", "gemms")
            yield f"{label} {size}", partial(gpu.target, label, build, size), columns
    for rows in (1, 4, 16, 64):
        size = gpu.Size(rows, 4096, 14336)
        yield f"swiglu {size}", partial(gpu.target, "swiglu", gpu.GATED["swiglu"], size), ("compile", "liger", "gemms")
    tiny = gpu.Size(8, 256, 512)
    yield f"geglu {tiny}", partial(gpu.target, "geglu", gpu.GATED["geglu"], tiny), ("compile", "liger")


def sweep() -> Iterator[Row]:
    for size in gpu.SWEEP:
        yield f"geglu {size}", partial(gpu.target, "geglu", gpu.GATED["geglu"], size), ()


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
    try:
        return _seed(file) if options.suite == "seed" else _suite(file, options)
    except KeyboardInterrupt:
        print("run: interrupted", file=sys.stderr)
        return 130


def _seed(file: Path) -> int:
    found: list[seed.Row] = []
    try:
        for size in seed.SIZES:
            for row in seed.rows(size):
                found.append(row)
                write(str(file), seed.as_json(found) + "\n", last=False)
        write(str(file), seed.as_json(found) + "\n", last=True)
    finally:  # after an error or ^C too: what was finished is worth keeping
        print(seed.table(found))
    return 0


def _suite(file: Path, options: argparse.Namespace) -> int:
    effort = QUICK if options.quick else Effort()
    if options.repeats:
        effort = replace(effort, rounds=options.repeats, budget_s=None)
    settings = {"suite": options.suite, **asdict(effort)}
    results: list[Result] = []
    rows = list(SUITES[options.suite]())
    labels = [label for label, _, _ in rows]
    try:
        for done, (label, build, columns) in enumerate(rows, 1):
            with Progress(f"{bar(done - 1, len(rows))} {label}") as progress:
                results.append(measure(build(), columns, label=label, effort=effort, progress=progress))
            # After each: a suite takes long, and what it has found outlives what may happen to it.
            Outputs(json=str(file)).write(results, settings, unfinished=labels[done:])
    finally:
        _print(results)
    return 1 if any(result.fxfuse_failed for result in results) else 0


def _print(results: Sequence[Result]) -> None:
    print(render.summary(results), render.LEGEND, sep="\n\n")
    missing = [f"{r.label} {r.dtype}: {gone.name}: {gone.reason}" for r in results for gone in r.left_out]
    if missing:
        print("\nleft out:", *missing, sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
