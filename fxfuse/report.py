"""What fxfuse did to a model, what it left alone and why, and how the calls since then went."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from tabulate import tabulate

from fxfuse.folding import folded

SCHEMA = 1
"""Version of the JSON form."""


@dataclass(frozen=True)
class Event:
    """One candidate, or one step that made candidates possible."""

    kind: Literal["fused", "kept", "tidied", "lowered"]
    rule: str
    """The pass, by the stem of its file."""
    form: str
    """The rule inside the pass."""
    region: str
    """Module path of the region; "" is the model itself."""
    nodes: tuple[str, ...]
    """Names in the graph as traced (``graphs(model, original=True)``), the root first."""
    source: str
    """``file:line: code`` of the model's own statement, or ""."""
    reason: str
    """What the nodes became, or why they stay."""
    kernels_saved: int = 0
    """Predicted GPU kernel launches saved per call."""
    bytes_saved: int | None = None
    """Predicted bytes of memory traffic saved per call at the example's sizes; None where these are not known."""


@dataclass(frozen=True)
class Uncaptured:
    """A module that is in no region."""

    path: str
    kind: str
    """Its class."""
    reason: str


@dataclass
class RegionInfo:
    """One traced subtree."""

    path: str
    kind: str
    nodes_before: int
    nodes_after: int
    installed: bool
    note: str = ""


@dataclass
class Calls:
    """How the calls of one region went."""

    fused: int = 0
    replayed: int = 0
    """Fused calls that replayed a CUDA graph."""
    plain: int = 0
    """Calls that gradients, autocast or an active mode kept on the model's own forward."""
    fallback: int = 0
    """Calls that broke an assumption of the trace, and so ran the model's own forward."""
    reasons: Counter[str] = field(default_factory=Counter)

    def count_replay(self) -> None:
        self.replayed += 1


@dataclass(frozen=True)
class Measured:
    """The implementations of one operator at one size, and the one that is taken."""

    op: str
    """The operator and what follows in it: ``linear``, ``gated_linear silu``."""
    dtype: str
    weight: str
    """``NxK``; with the bias and the layout in memory where these are not the usual ones."""
    rows: str
    """The row counts that it holds for: ``512-1023``."""
    taken: str
    seconds: dict[str, float]
    """Implementation -> its median time a call."""
    regions: tuple[str, ...]
    """Module paths of the regions in which the operator was called at this size; "" is the model itself."""
    when: Literal["now", "before"]
    """Whether it was measured for this model, or found in the table of measured choices."""

    @property
    def size(self) -> tuple[str, ...]:
        return self.op, self.dtype, self.weight, self.rows

    def row(self) -> list[str]:
        """As ``MEASURED_HEAD`` names the columns."""
        times = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in self.seconds.items())
        return [*self.size, self.taken, times, self.when]


MEASURED_HEAD = ["operator", "dtype", "weight", "rows", "taken", "us a call", "when"]


@dataclass
class Coverage:
    """How many of the model's ``nn.Linear`` modules lie in traced regions."""

    seen: int = 0
    captured: int = 0


class Packed(Protocol):
    """Copies of weights in an implementation's own layout."""

    limit: int
    """Bytes that they may take together."""

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Report:
    """The record of one ``optimize`` or ``rewrite``. ``print`` it, or read its attributes."""

    def __init__(self, model: str):
        self.model = model
        self.events: list[Event] = []
        self.regions: list[RegionInfo] = []
        self.uncaptured: list[Uncaptured] = []
        self.coverage = Coverage()
        self.linears: dict[str, str] = {}
        """Path of each ``nn.Linear`` -> why it is in no fused operator; "" where it is in one."""
        self.calls: dict[str, Calls] = {}
        """Region path -> counts; they go on counting while the model runs."""
        self.measured: list[Measured] = []
        self.packed: Packed | None = None
        """The packed copies of weights, as they are now; None where ``Options(pack=)`` allows none."""
        self.options: list[str] = []
        """Options that differ from the defaults, and what they do."""
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}
        """Time by stage of optimize(): those of copy, example, trace, rewrite, check, tune, install that there were."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count what runs in it towards a stage."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    @property
    def fused(self) -> list[Event]:
        return [e for e in self.events if e.kind == "fused"]

    @property
    def kept(self) -> list[Event]:
        return [e for e in self.events if e.kind == "kept"]

    @property
    def kernels_saved(self) -> int:
        return sum(e.kernels_saved for e in self.events if e.kind != "kept")

    @property
    def bytes_saved(self) -> int | None:
        known = [e.bytes_saved for e in self.fused if e.bytes_saved is not None]
        return sum(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "events": [asdict(e) for e in self.events],
            "regions": [asdict(r) for r in self.regions],
            "uncaptured": [asdict(u) for u in self.uncaptured],
            "coverage": asdict(self.coverage),
            "linears": self.linears,
            "calls": {path: {**asdict(c), "reasons": dict(c.reasons)} for path, c in self.calls.items()},
            "measured": [asdict(m) for m in self.measured],
            "packed": self.packed and {k: getattr(self.packed, k) for k in ("count", "nbytes", "limit")},
            "kernels_saved": self.kernels_saved,
            "bytes_saved": self.bytes_saved,
            "options": self.options,
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_markdown(self) -> str:
        return self._render("github", "## ")

    def __str__(self) -> str:
        return self._render("simple", "")

    def explained(self) -> str:
        """The text, and of each ``nn.Linear`` that is in no fused operator why."""
        unfused = ([path or ".", why] for path, why in self.linears.items() if why)
        parts = _table("simple", "Linears in no fused operator", ["Linear", "why"], unfused, [0])
        return "\n\n".join([str(self), *parts])

    def __repr__(self) -> str:
        return f"<fxfuse report of {self.model}: {len(self.fused)} fused, {len(self.kept)} kept>"

    def _render(self, style: str, mark: str) -> str:
        launches = "1 kernel launch" if self.kernels_saved == 1 else f"{self.kernels_saved} kernel launches"
        saved = f", {launches} saved per call" if self.kernels_saved else ""
        traffic = f", {_size(self.bytes_saved)} less memory traffic" if self.bytes_saved else ""
        parts = [
            f"{mark}{self.model}: {len(self.fused)} fused, {len(self.kept)} kept{saved}{traffic} (predicted); "
            f"{self.coverage.captured} of {self.coverage.seen} Linears in {len(self.regions)} captured region"
            + ("s" if len(self.regions) != 1 else "")
        ]

        def table(title: str, head: list[str], rows: Iterable[list[str]], paths: Sequence[int] = ()) -> None:
            parts.extend(_table(style, f"{mark}{title}", head, rows, paths))

        table(
            "fused",
            ["rule", "region", "nodes", "source", "result"],
            ([e.rule, e.region or ".", ", ".join(e.nodes), short_source(e.source), e.reason] for e in self.fused),
            [1],
        )
        table(
            "lowered (one op, a faster implementation)",
            ["rule", "region", "node", "source", "result"],
            (
                [e.rule, e.region or ".", e.nodes[0], short_source(e.source), e.reason]
                for e in self.events
                if e.kind == "lowered"
            ),
            [1],
        )
        table(
            "kept",
            ["rule", "region", "node", "source", "reason"],
            ([e.rule, e.region or ".", ", ".join(e.nodes), short_source(e.source), e.reason] for e in self.kept),
            [1],
        )
        table(
            "not captured",
            ["module", "class", "reason"],
            ([u.path or ".", u.kind, u.reason] for u in self.uncaptured),
            [0],
        )
        table(
            "regions left as they were",
            ["region", "class", "note"],
            ([r.path or ".", r.kind, r.note] for r in self.regions if not r.installed),
            [0],
        )
        table("implementations, measured", MEASURED_HEAD, (m.row() for m in self.measured))
        if self.packed:
            parts.append(
                f"{mark}packed weights\n{self.packed.count} copies, {_size(self.packed.nbytes)} of at most "
                f"{_size(self.packed.limit)}; fxfuse.refresh() drops them"
            )
        table(
            "calls since",
            ["region", "fused", "plain", "fallback", "reasons"],
            (
                [
                    path or ".",
                    f"{c.fused}, {c.replayed} replayed" if c.replayed else str(c.fused),
                    str(c.plain),
                    str(c.fallback),
                    "; ".join(f"{why} ({n})" for why, n in c.reasons.most_common()),
                ]
                for path, c in self.calls.items()
                if c.fused or c.plain or c.fallback
            ),
            [0],
        )
        if self.options:
            parts.append(f"{mark}options\n" + "\n".join(self.options))
        if self.notes:
            parts.append(f"{mark}notes\n" + "\n".join(self.notes))
        if self.seconds:
            stages = ", ".join(f"{stage} {seconds * 1e3:.0f}" for stage, seconds in self.seconds.items())
            parts.append(f"{mark}time taken, ms\n{stages}")
        return "\n\n".join(parts)


def _table(style: str, title: str, head: list[str], rows: Iterable[list[str]], paths: Sequence[int]) -> list[str]:
    """A titled table, or nothing without rows. Equal rows of a model's layers are one, with how often it comes."""
    found = folded(list(rows), paths=paths)
    if not found:
        return []
    body = [row for _, row in found]
    if any(count > 1 for count, _ in found):
        head, body = ["times", *head], [[str(count), *row] for count, row in found]
    return [f"{title}\n" + tabulate(body, headers=head, tablefmt=style, disable_numparse=True)]


def short_source(source: str) -> str:
    """``/long/path/file.py:12: code`` as ``file.py:12: code``."""
    place, colon, code = source.partition(": ")
    return place.rpartition("/")[2] + colon + code


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
