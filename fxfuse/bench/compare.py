"""Whether fxfuse lost or gained from one ``fxfuse.bench/1`` to another, judged by its ratios against eager.

Ratios and not times: eager ran in the same rounds, so that a busy or a slower machine has met both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tabulate import tabulate

from fxfuse.bench.timer import Spread
from fxfuse.tuning import HAD_CORE

MARGIN = 0.03
"""Medians of the same code differ by up to so much between two processes, which no spread within one shows."""

Row = tuple[str, str, str]
"""Target, device, dtype."""


@dataclass(frozen=True)
class Verdict:
    """One row of both files."""

    row: Row
    before: Spread | None
    """How many times as fast as eager; None where fxfuse gave no answer to time, or the row is not there."""
    after: Spread | None
    word: Literal["faster", "slower", "same", "no answer", "answers now", "too busy", "only before", "only after"]

    @property
    def regression(self) -> bool:
        return self.word in ("slower", "no answer")

    @property
    def ranked(self) -> bool:
        return self.word not in ("too busy", "only before", "only after")


@dataclass(frozen=True)
class _Side:
    """One row in all runs of a side."""

    ratio: Spread | None
    """None where any run gave no answer."""
    busy: bool
    """Whether other programs had the cores in any run: what eager and fxfuse lose by that is not alike."""


def compare(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], margin: float = MARGIN) -> list[Verdict]:
    """A verdict for each row of either side. Each side: documents of ``fxfuse.bench/1``, one for each run of it.

    A row is slower or faster where the medians differ by more than ``margin`` and the spreads (20th to 80th percentile,
    the lowest and the highest of all runs) do not touch. Where a CPU was busy with something else in any run, it ranks
    nothing.
    """
    old, new = _rows(before), _rows(after)
    return [_verdict(row, old, new, margin) for row in dict.fromkeys([*old, *new])]


def _verdict(row: Row, old: dict[Row, _Side], new: dict[Row, _Side], margin: float) -> Verdict:
    if row not in new:
        return Verdict(row, old[row].ratio, None, "only before")
    if row not in old:
        return Verdict(row, None, new[row].ratio, "only after")
    a, b = old[row].ratio, new[row].ratio
    if b is None:
        return Verdict(row, a, b, "same" if a is None else "no answer")
    if a is None:
        return Verdict(row, a, b, "answers now")
    if old[row].busy or new[row].busy:
        return Verdict(row, a, b, "too busy")
    change = b.median / a.median - 1
    if change < -margin and b.p80 < a.p20:
        return Verdict(row, a, b, "slower")
    if change > margin and b.p20 > a.p80:
        return Verdict(row, a, b, "faster")
    return Verdict(row, a, b, "same")


def _rows(runs: Sequence[dict[str, Any]]) -> dict[Row, _Side]:
    found: dict[Row, list[dict[str, Any]]] = {}
    for run in runs:
        for result in run["results"]:
            found.setdefault((result["target"], result["device"], result["dtype"]), []).append(result)
    return {row: _side(results) for row, results in found.items()}


def _side(results: Sequence[dict[str, Any]]) -> _Side:
    busy = any(result["device"] == "cpu" and result["had_core"] < HAD_CORE for result in results)
    ratios = [v["speedup_over_eager"] for result in results for v in result["variants"] if v["name"] == "fxfuse"]
    if len(ratios) < len(results):
        return _Side(None, busy)
    middle = Spread.of([ratio["median"] for ratio in ratios]).median
    lowest, highest = min(ratio["p20"] for ratio in ratios), max(ratio["p80"] for ratio in ratios)
    return _Side(Spread(middle, lowest, highest), busy)


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as a table for the terminal."""
    rows = [
        (*v.row, _ratio(v.before), _ratio(v.after), f"{v.after.median / v.before.median - 1:+.1%}", v.word)
        if v.before and v.after
        else (*v.row, _ratio(v.before), _ratio(v.after), "", v.word)
        for v in verdicts
    ]
    head = ("target", "device", "dtype", "before, x eager", "after, x eager", "change", "")
    return tabulate(rows, head, disable_numparse=True)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What else differs between two runs, each as a line: machine and versions."""
    sides = [{**run["machine"], **run["versions"]} for run in (before, after)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    pairs = [(name, *(side.get(name, "unknown") for side in sides)) for name in names]
    return [f"{name} is {b}, was {a}" for name, a, b in pairs if a != b]


def _ratio(spread: Spread | None) -> str:
    return f"{spread.median:.2f} ({spread.p20:.2f}–{spread.p80:.2f})" if spread else "—"
