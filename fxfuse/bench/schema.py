"""The shapes of the JSON files that commands write and read, and a check that says in a sentence what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxfuse.errors import FxfuseError

BENCH, PROFILE = "fxfuse.bench/1", "fxfuse.profile/1"


class BadDocument(FxfuseError, ValueError):
    """A JSON file is none of the schema that it is read as."""


@dataclass(frozen=True)
class _Record:
    """An object with these keys; with ``more``, others may stand beside them."""

    fields: Mapping[str, Any]
    more: bool = False
    later: Mapping[str, Any] = field(default_factory=dict)
    """Keys that files from before they came do not have."""


@dataclass(frozen=True)
class _List:
    of: Any


@dataclass(frozen=True)
class _Map:
    """An object from any names to values of one shape."""

    of: Any


@dataclass(frozen=True)
class _Or:
    """This shape, or null."""

    shape: Any


@dataclass(frozen=True)
class _Number:
    least: float = -math.inf
    above: float = -math.inf


_SECONDS, _COUNT = _Number(above=0.0), _Number(least=0.0)
_RATIO = _Record({"median": _SECONDS, "p20": _SECONDS, "p80": _SECONDS, "rankable": bool})
_VARIANT = _Record(
    {
        "name": str,
        "median_s": _SECONDS,
        "p20_s": _SECONDS,
        "p80_s": _SECONDS,
        "rounds": _Number(least=1.0),
        "calls": _Number(least=1.0),
        "setup_s": _COUNT,
        "speedup_over_eager": _RATIO,
        "fxfuse_speedup": _Or(_RATIO),
        "submit_s": _Or(_SECONDS),
        "kernels": _Or(_COUNT),
        "end_to_end_s": _Or(_SECONDS),
        "extra_bytes": _Or(_COUNT),
    },
    later={"first_call_s": _COUNT},
)
_EVENT = _Record(
    {"kind": str, "rule": str, "region": str, "nodes": _List(str), "source": str, "reason": str}, more=True
)
_REPORT = _Record(
    {
        "model": str,
        "events": _List(_EVENT),
        "regions": _List(_Record({"path": str, "kind": str, "installed": bool, "note": str}, more=True)),
        "uncaptured": _List(_Record({"path": str, "kind": str, "reason": str})),
        "notes": _List(str),
        "coverage": _Record({"seen": _COUNT, "captured": _COUNT}),
    }
)
_RESULT = _Record(
    {
        "target": str,
        "device": str,
        "dtype": str,
        "had_core": _COUNT,
        "fused": _COUNT,
        "lowered": _COUNT,
        "kernels_saved": _Number(),
        "ops": _Map(_COUNT),
        "variants": _List(_VARIANT),
        "weaker_gate": str,
        "left_out": _List(_Record({"name": str, "reason": str})),
        "report": _Or(_REPORT),
    },
    later={"held_bytes": _COUNT},
)
_BENCH = _Record(
    {
        "schema": str,
        "machine": _Record({"cpu": str, "threads": _Number(least=1.0), "gpu": _Or(str)}, more=True),
        "versions": _Map(str),
        "settings": _Record({}, more=True),
        "results": _List(_RESULT),
        "unfinished": _List(str),
    }
)
_SETUP = _Record(
    {
        "name": str,
        "kernels": _List(_Record({"name": str, "kind": str, "start_us": _COUNT, "us": _COUNT}, more=True)),
        "regions": _List(
            _Record(
                {
                    "region": str,
                    "flops": _Or(_COUNT),
                    "bytes": _Or(_COUNT),
                    "floor_us": _Or(_COUNT),
                    "observed_us": _Or(_COUNT),
                },
                more=True,
            )
        ),
        "lines": _List(_Record({}, more=True)),
    },
    more=True,
)
_PROFILE = _Record({"schema": str, "setups": _List(_SETUP)}, more=True)


def read(file: str | Path, schema: str) -> dict[str, Any]:
    """The document in ``file``. BadDocument names the file and what is wrong with it; OSError where it cannot be read.

    ``schema``: ``BENCH`` or ``PROFILE``.
    """
    try:
        document: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
        check(document, schema)
    except BadDocument as wrong:
        raise BadDocument(f"{file}: {wrong}") from None
    except ValueError as wrong:
        raise BadDocument(f"{file} is no JSON: {wrong}") from wrong
    return document


def check(document: Any, schema: str) -> None:
    """Raise BadDocument where ``document`` is none of ``schema``; the text says where, and what stands there."""
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise BadDocument(f"its schema is {found!r}, not {schema!r}")
    _check(document, _BENCH if schema == BENCH else _PROFILE, "")
    if schema == BENCH:
        _check_results(document["results"])


def _check_results(results: list[dict[str, Any]]) -> None:
    seen: set[tuple[str, ...]] = set()
    for i, result in enumerate(results):
        row = (result["target"], result["device"], result["dtype"])
        if row in seen:
            raise BadDocument(f"results[{i}] is {', '.join(row)} again")
        seen.add(row)
        names = [variant["name"] for variant in result["variants"]]
        if "eager" not in names:
            raise BadDocument(f"results[{i}].variants has no eager, which all others are compared with")
        for j, variant in enumerate(result["variants"]):
            if not variant["p20_s"] <= variant["median_s"] <= variant["p80_s"]:
                raise BadDocument(f"results[{i}].variants[{j}].median_s is not between p20_s and p80_s")


def _check(value: Any, shape: Any, at: str) -> None:
    where = at or "the document"
    if isinstance(shape, _Or):
        if value is not None:
            _check(value, shape.shape, at)
    elif isinstance(shape, _Record):
        _expect(isinstance(value, dict), value, "an object", where)
        _check_names(value, shape, where)
        for name, inner in {**shape.fields, **shape.later}.items():
            if name in value:
                _check(value[name], inner, f"{at}.{name}".removeprefix("."))
    elif isinstance(shape, _Map):
        _expect(isinstance(value, dict), value, "an object", where)
        for name, inner in value.items():
            _check(inner, shape.of, f"{at}.{name}")
    elif isinstance(shape, _List):
        _expect(isinstance(value, list), value, "a list", where)
        for i, inner in enumerate(value):
            _check(inner, shape.of, f"{at}[{i}]")
    elif isinstance(shape, _Number):
        _check_number(value, shape, where)
    else:
        _expect(isinstance(value, shape), value, {str: "a text", bool: "true or false"}[shape], where)


def _check_names(value: dict[str, Any], shape: _Record, where: str) -> None:
    missing = [name for name in shape.fields if name not in value]
    if missing:
        raise BadDocument(f"{where} has no {missing[0]}")
    unknown = [name for name in value if name not in shape.fields and name not in shape.later]
    if unknown and not shape.more:
        raise BadDocument(f"{where} has {unknown[0]}, which the schema does not know")


def _check_number(value: Any, shape: _Number, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _expect(number, value, "a number", where)
    if value < shape.least:
        raise BadDocument(f"{where} is {value:g}, not at least {shape.least:g}")
    if value <= shape.above:
        raise BadDocument(f"{where} is {value:g}, not above {shape.above:g}")


def _expect(holds: bool, value: Any, what: str, where: str) -> None:
    if not holds:
        text = json.dumps(value, default=repr)
        raise BadDocument(f"{where} is {text if len(text) <= 40 else text[:40] + '...'}, not {what}")
