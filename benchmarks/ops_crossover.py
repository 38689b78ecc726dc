"""Where does oneDNN's linear beat eager's on this machine? Prints the table behind the rule in fxfuse/ops/onednn.py.

    python benchmarks/ops_crossover.py [--dtype float32 bfloat16] [--act none gelu] [--seconds 0.2]

For each size: eager's F.linear and activation, oneDNN's fused operator on the same unpacked weights, their ratio
(above 1: oneDNN is faster), and what fxfuse.ops chose. Medians of interleaved repeats, inference mode.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate

import fxfuse.ops
from fxfuse.ops import onednn
from fxfuse.ops.activations import activation

WEIGHTS = (
    (32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (64, 512), (512, 64), (256, 256), (32, 4096), (4096, 32),
    (384, 384), (512, 512), (768, 768), (1024, 1024), (768, 3072), (3072, 768), (2048, 2048), (4096, 4096),
)  # fmt: skip
"""(K, N)"""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
MOST_WORK = 2.5e9  # M * K * N: keeps the whole sweep to a few minutes


def interleaved(variants: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median microseconds of each variant: they take turns until the time is up, five times at least."""
    for variant in variants:
        variant()
    times: list[list[float]] = [[] for _ in variants]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for variant, samples in zip(variants, times, strict=True):
            start = time.perf_counter()
            variant()
            samples.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(samples) for samples in times]


def measure(m: int, k: int, n: int, dtype: torch.dtype, act: str, seconds: float) -> list[object]:
    """One row of the table."""
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((m, k), (n, k), (n,)))

    def eager() -> torch.Tensor:
        h = torch.nn.functional.linear(x, weight, bias)
        return h if act == "none" else activation(act).function(h)

    def direct() -> torch.Tensor:
        if act in onednn.POST_OPS:
            return onednn.pointwise(x, weight, bias, *onednn.POST_OPS[act])
        h = onednn.pointwise(x, weight, bias, "none", (), "")
        return h if act == "none" else activation(act).apply(h)

    def chosen() -> torch.Tensor:
        return fxfuse.ops.linear(x, weight, bias) if act == "none" else fxfuse.ops.linear_act(x, weight, bias, act)

    eager_us, direct_us, chosen_us = interleaved([eager, direct, chosen], seconds)
    choice = "oneDNN" if onednn.can(x, weight, bias) and onednn.pays(dtype, n, k, m) else "eager"
    return [act, m, k, n, eager_us, direct_us, eager_us / direct_us, choice, eager_us / chosen_us]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--act", nargs="+", default=["none", "gelu_tanh"], help="none, or names of activations")
    parser.add_argument("--seconds", type=float, default=0.1, help="per size")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    headers = ["act", "M", "K", "N", "eager us", "oneDNN us", "ratio", "choice", "fxfuse ratio"]
    for dtype in options.dtype:
        with torch.inference_mode():
            rows = [
                measure(m, k, n, getattr(torch, dtype), act, options.seconds)
                for act in options.act
                for k, n in WEIGHTS
                for m in ROWS
                if m * k * n <= MOST_WORK
            ]
        print(dtype)
        print(tabulate(rows, headers=headers, floatfmt=("", "", "", "", ".1f", ".1f", ".2f", "", ".2f")))


if __name__ == "__main__":
    main()
