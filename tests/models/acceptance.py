"""Holds a folder of models to their eager answers, and counts what is captured and fused.

    python -m tests.models.acceptance FOLDER [NAME ...] [--import MODULE]

FOLDER has a ``zoo.py`` with ``ZOO``: name -> a callable that gives (model in eval mode, args, kwargs), the same each
time. NAME leaves out entries without one of these in their name; ``--import`` loads a module of the folder first.

Each entry is optimized with and without its example, and called with it, with one row more, and with three quarters of
its second dimension, where eager takes these. Exit code 1: an answer is wrong, a class is another, something raised, or
fewer than 97 % of the Linears that the examples run lie in regions. A Linear that is a region by itself does not count:
nothing can be fused with it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import fxfuse
from fxfuse.report import Report
from tests.models.answers import right, tensors_of
from tests.models.zoo import Entry, at_batch

LEAST_CAPTURED = 0.97


@dataclass
class Outcome:
    """What became of one entry."""

    name: str
    kind: str = ""
    """The model's class."""
    run: int = 0
    """Linears whose forward the example runs."""
    captured: dict[bool, int] = field(default_factory=dict)
    """How many of these lie in regions, with the example (True) and without."""
    fused: dict[bool, Counter[str]] = field(default_factory=dict)
    """Fused candidates by pass, with and without."""
    sizes: str = ""
    """The calls that eager answers: as the example, another batch, another length."""
    missed: Counter[str] = field(default_factory=Counter)
    """With the example: why Linears lie in no region."""
    notes: list[str] = field(default_factory=list)
    """Of the reports."""
    wrong: list[str] = field(default_factory=list)

    def row(self) -> list[Any]:
        ways = [way for way in (True, False) if way in self.fused]
        captured = "/".join(str(self.captured[way]) for way in ways)
        fused = " / ".join(_counts(self.fused[way]) or "none" for way in ways)
        return [self.name, self.kind, self.run, captured, fused, self.sizes, "; ".join(self.wrong)]


HEAD = ["entry", "class", "Linears run", "in regions", "fused with / without example", "sizes", "wrong"]


def accept(name: str, build: Callable[[], Entry]) -> Outcome:
    outcome = Outcome(name)
    for with_example in (True, False):
        try:
            _accept(outcome, build, with_example)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:200]
            outcome.wrong.append(f"{_way(with_example)}: {type(error).__name__}: {text} ({where.name})")
    return outcome


def _accept(outcome: Outcome, build: Callable[[], Entry], with_example: bool) -> None:
    model, args, kwargs = build()
    outcome.kind = type(model).__name__
    optimize = functools.partial(fxfuse.optimize, tune="off")
    optimized = optimize(model, args, kwargs) if with_example else optimize(model)
    report = fxfuse.report(optimized)
    if type(optimized) is not type(model):
        outcome.wrong.append(f"{_way(with_example)}: the model is a {type(optimized).__name__}")
    outcome.notes += report.notes
    ran = _linears_run(model, args, kwargs)
    missed = {path: _why_missed(path, report) for path in ran}
    outcome.run = len(ran)
    outcome.captured[with_example] = sum(why is None for why in missed.values())
    outcome.fused[with_example] = Counter(e.rule for e in report.fused)
    if with_example:
        outcome.missed = Counter(why for why in missed.values() if why is not None)
    tried = []
    for size, (more_args, more_kwargs) in _calls(model, args, kwargs):
        tried.append(size)
        if not _answers(optimized, model, more_args, more_kwargs):
            outcome.wrong.append(f"{_way(with_example)}: another answer ({size})")
    outcome.sizes = ", ".join(tried)


def _way(with_example: bool) -> str:
    return "with the example" if with_example else "bare"


def _answers(optimized: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the optimized model answers as the model does, in the same class; random numbers are drawn alike."""
    answers = []
    for m in (optimized, model):
        torch.manual_seed(0)
        with torch.no_grad():
            answers.append(m(*tree_map(_own, args), **tree_map(_own, kwargs)))
    if type(answers[0]) is not type(answers[1]):
        return False
    if all(map(torch.equal, *map(tensors_of, answers))):
        return True
    torch.manual_seed(0)
    with torch.no_grad():
        return right(answers[0], model, *args, **kwargs)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _calls(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """The example, and the calls made of it that eager takes."""
    yield "as given", (args, kwargs)
    batch = max((t.shape[0] for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim), default=0)
    changes = {"batch": lambda t: at_batch(t, batch + 1) if t.ndim and t.shape[0] == batch else t, "length": _shorter}
    for size, change in changes.items():
        call = tree_map(lambda t, change=change: change(t) if isinstance(t, torch.Tensor) else t, (args, kwargs))
        try:
            with torch.no_grad():
                model(*tree_map(_own, call[0]), **tree_map(_own, call[1]))
        except Exception:  # a model of one batch size or length
            continue
        yield size, call


def _shorter(tensor: torch.Tensor) -> torch.Tensor:
    """Three quarters of the second dimension, which is the length where it is one: images have channels there."""
    return tensor[:, : 3 * tensor.shape[1] // 4].contiguous() if tensor.ndim in (2, 3) else tensor


def _linears_run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Paths of the Linears whose forward the example runs."""
    ran: dict[str, None] = {}
    handles = [
        module.register_forward_pre_hook(lambda _module, _args, path=path: ran.setdefault(path))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(*tree_map(_own, args), **tree_map(_own, kwargs))
    for handle in handles:
        handle.remove()
    return list(ran)


def _why_missed(path: str, report: Report) -> str | None:
    """Why a Linear lies in no region but its own; None where it does: what is closest to it decides."""
    captured = [(r.path, None) for r in report.regions if r.path != path]
    above = [*captured, *((u.path, u.reason) for u in report.uncaptured)]
    around = [(len(p), why) for p, why in above if not p or path == p or path.startswith(f"{p}.")]
    return max(around, key=lambda found: found[0], default=(0, "it is the model itself"))[1]


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def summary(outcomes: list[Outcome]) -> tuple[str, bool]:
    """The totals, and whether they are good enough."""
    run = sum(o.run for o in outcomes)
    lines = [f"{len(outcomes)} entries, {sum(bool(o.wrong) for o in outcomes)} with something wrong"]
    for with_example in (True, False):
        captured = sum(o.captured.get(with_example, 0) for o in outcomes)
        fused = sum((o.fused.get(with_example, Counter[str]()) for o in outcomes), Counter[str]())
        share = f" ({captured / run:.1%})" if run else ""
        lines.append(f"{_way(with_example)}: {captured} of {run} Linears in regions{share}; fused: {_counts(fused)}")
    missed = sum((o.missed for o in outcomes), Counter[str]())
    lines += [f"{count} Linears in no region: {why}" for why, count in missed.most_common()]
    lines += [f"{o.name}: {note}" for o in outcomes for note in dict.fromkeys(o.notes)]
    enough = sum(o.captured.get(True, 0) for o in outcomes) >= LEAST_CAPTURED * run
    return "\n".join(lines), enough and not any(o.wrong for o in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--import", dest="first", metavar="MODULE")
    options = parser.parse_intermixed_args()
    sys.path.insert(0, options.folder)
    if options.first:
        importlib.import_module(options.first)
    entries = importlib.import_module("zoo").ZOO
    outcomes = []
    for name, build in entries.items():
        if options.names and not any(part in name for part in options.names):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they would tell is in the notes of the report
            outcomes.append(accept(name, build))
        print(*outcomes[-1].row(), sep=" | ", flush=True)
        gc.collect()
    text, good = summary(outcomes)
    print(tabulate([o.row() for o in outcomes], headers=HEAD), text, sep="\n\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
