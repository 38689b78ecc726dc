"""What ``cuda_graphs=True`` saves the host: ``python -m benchmarks.cuda_graphs``, on a GPU.

A replay of a graph of eager's own forward, that copies nothing in or out, is the floor. Times are end to end, the host
waiting for each call, and until a call is submitted; medians, bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxfuse
from fxfuse.bench import models
from fxfuse.bench.timer import Effort, SubmitClock, WallClock, interleaved

EFFORT = Effort(rounds=30, warmup_s=0.1, block_s=0.002)


def raw_replay(model: Callable[..., Any], x: Tensor) -> Callable[[], object]:
    """Replays of the model's forward on ``x`` where it lies."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
    return graph.replay


def main() -> int:
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 2
    targets: dict[str, tuple[nn.Module, Tensor]] = {
        "geglu 8, 256, 512": (models.GegluMLP(256, 512), torch.randn(8, 256)),
        "swiglu 1, 4096, 14336": (models.SwigluMLP(4096, 14336), torch.randn(1, 4096)),
        "24 geglu 8, 768, 3072": (nn.Sequential(*(models.GegluMLP() for _ in range(24))), torch.randn(8, 768)),
    }
    rows: list[list[str]] = []
    with torch.inference_mode():
        for name, (model, x) in targets.items():
            model, x = model.eval().to("cuda", torch.bfloat16), x.to("cuda", torch.bfloat16)
            fused, replayed = fxfuse.optimize(model, x), fxfuse.optimize(model, x, cuda_graphs=True)
            calls: dict[str, Callable[[], object]] = {
                "eager": lambda m=model, x=x: m(x),
                "fxfuse": lambda m=fused, x=x: m(x),
                "fxfuse, cuda_graphs": lambda m=replayed, x=x: m(x),
                "raw replay of eager": raw_replay(model, x),
                "raw replay of fxfuse": raw_replay(fused, x),
            }
            waiting = {name: lambda call=call: (call(), torch.cuda.synchronize()) for name, call in calls.items()}
            end_to_end = interleaved(waiting, clock=WallClock(), effort=EFFORT).timings
            submitted = interleaved(calls, clock=SubmitClock(), effort=EFFORT).timings
            rows += [
                [
                    name,
                    call,
                    f"{end_to_end[call].spread.median * 1e6:.1f}",
                    f"{submitted[call].spread.median * 1e6:.1f}",
                ]
                for call in calls
            ]
    print(tabulate(rows, headers=["model", "call", "end to end us", "submitted us"], disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
