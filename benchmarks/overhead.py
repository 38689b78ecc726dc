"""What do a region's checks cost, as a share of the time that eager's own forward keeps the host busy?

    python -m benchmarks.overhead [--rounds 30] [--threads 1] [--source geglu-mlp]

The checks of a region: its generated forward with a stub in the place of its body, less a call of an empty module. The
share: that, by the host time of the region's own forward, on the CPU with tensors of the target's size. Medians of
rounds in which all take turns. ``--source`` prints the generated forward of one target.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import fxfuse
from fxfuse.bench import models
from fxfuse.bench.timer import Effort, WallClock, interleaved

TARGETS: dict[str, Callable[[], models.Example]] = {
    "geglu-mlp, 1 row": lambda: models.BUILT_IN["geglu-mlp"].build(1),
    "geglu-mlp, 16 rows": lambda: models.BUILT_IN["geglu-mlp"].build(16),
    "geglu of 32 -> 64, 1 row": lambda: (models.GegluMLP(32, 64).eval(), (torch.randn(1, 32),), {}),
    "ffn of 32 -> 64, 1 row": lambda: (models.FeedForward(32, 64).eval(), (torch.randn(1, 32),), {}),
    "ffn, 1 row": lambda: models.BUILT_IN["ffn"].build(1),
    "matmul-add, 1 row": lambda: models.BUILT_IN["matmul-add"].build(1),
    "gpt2-like": lambda: models.BUILT_IN["gpt2-like"].build(0),
    "llama-like": lambda: models.BUILT_IN["llama-like"].build(0),
    "attention of width 32": lambda: (Attention().eval(), (torch.randn(1, 4, 32),), {}),
    "gpt2-like, 1 x 1 token": lambda: _one_token(models.GPT2Like),
    "llama-like, 1 x 1 token": lambda: _one_token(models.LlamaLike),
    "gpt2-like of width 32": lambda: _small(models.GPT2Like),
    "llama-like of width 32": lambda: _small(models.LlamaLike),
}


def _one_token(cls: type[nn.Module]) -> models.Example:
    return cls().eval(), (torch.randint(64, (1, 1)),), {}


def _small(cls: Any) -> models.Example:
    """So small that what the host does is nearly all of its time, as where a GPU computes."""
    return cls(vocab=64, dim=32, heads=2).eval(), (torch.randint(64, (1, 4)),), {}


class Attention(nn.Module):
    """Decides by sizes, as those of transformers do."""

    def __init__(self, dim: int = 32, head: int = 8):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.head, self.mlp = head, models.FeedForward(dim, 2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head)
        q, k, v = (projection(x).view(shape).transpose(1, 2) for projection in (self.q, self.k, self.v))
        is_causal = bool(q.shape[2] > 1 and q.shape[2] == k.shape[2])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.mlp(self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1)))


class Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--source", choices=list(TARGETS), help="print the generated forward of one target")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.source:
        print(optimized(TARGETS[options.source]()).__dict__["_fxfuse"].source)
        return
    rows = [[name, *measure(build(), options.rounds)] for name, build in TARGETS.items()]
    print(f"torch {torch.__version__}, {options.threads} threads; microseconds")
    head = ["region", "checks", "eager", "forward with stub", "empty module", "checks us", "share of eager"]
    print(tabulate(rows, headers=head, floatfmt=("", "", ".1f", ".2f", ".2f", ".2f", ".1%")))


def optimized(example: models.Example) -> nn.Module:
    """The model, whose own region is the one that is measured."""
    model, args, kwargs = example
    return fxfuse.optimize(model, args, kwargs, tune="off")


def measure(example: models.Example, rounds: int) -> list[Any]:
    """One row of the table: how many checks, and medians in microseconds."""
    model, args, kwargs = example
    ours = optimized(example)
    region = ours.__dict__["_fxfuse"]
    with torch.inference_mode():
        result = model(*args, **kwargs)
    region.body = lambda *values: result
    empty = Empty()
    race = interleaved(
        {
            "eager": lambda: model(*args, **kwargs),
            "stub": lambda: ours(*args, **kwargs),
            "empty": lambda: empty(*args),
        },
        clock=WallClock(),
        effort=Effort(rounds=rounds, warmup_s=0.1, block_s=0.002, budget_s=10.0),
    )
    if region.calls.fallback or region.calls.plain:
        raise RuntimeError(f"the stub did not run: {dict(region.calls.reasons)}")
    eager, stub, empty_call = (
        1e6 * statistics.median(race.timings[name].samples) for name in ("eager", "stub", "empty")
    )
    return [
        region.source.count("if not fx_holds:"),
        eager,
        stub,
        empty_call,
        stub - empty_call,
        (stub - empty_call) / eager,
    ]


if __name__ == "__main__":
    main()
