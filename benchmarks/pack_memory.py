"""What packed weights cost and bring: ``python -m benchmarks.pack_memory [--rows 16]``.

A GPT-2 of 124M parameters with random weights, as transformers builds it, each variant in a process of its own: peak
resident memory after a few calls, the bytes of the copies as the report has them, and the median time of a call.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from tabulate import tabulate

import fxfuse

VARIANTS = ("eager", "fxfuse", "fxfuse, packed")
_CALLS = 15


def measure(variant: str, rows: int) -> dict[str, float]:
    """Run one variant in this process."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    tokens = torch.randint(50257, (1, rows))
    if variant != "eager":
        # Without an example and its trial runs, so that the peak is that of the calls.
        model = fxfuse.optimize(model, inplace=True, tune="off", pack=variant.endswith("packed"))
    seconds = []
    with torch.inference_mode():
        for _ in range(_CALLS):
            start = time.perf_counter()
            model(tokens)
            seconds.append(time.perf_counter() - start)
    store = None if variant == "eager" else fxfuse.report(model).packed
    return {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "copies": store.nbytes if store else 0,
        "ms": statistics.median(seconds[3:]) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="tokens")
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one and print it as JSON")
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.rows)))
        return
    table = []
    for variant in VARIANTS:
        command = [sys.executable, "-m", "benchmarks.pack_memory", "--rows", str(options.rows), "--variant", variant]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        table.append([variant, found["peak"] / 2**20, found["copies"] / 2**20, found["ms"]])
    print(f"GPT-2 124M, {options.rows} tokens, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(
        tabulate(
            table, headers=["", "peak RSS, MiB", "packed copies, MiB", "ms a call"], floatfmt=("", ".0f", ".0f", ".1f")
        )
    )


if __name__ == "__main__":
    main()
