"""What this device can do: bytes a second to and from its memory, multiply-adds a second in each dtype.

Measured once and kept on disk beside the table of measured choices: a file for each device and torch, so that programs
that measure at the same time overwrite each other with figures as good.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from fxfuse import choose
from fxfuse.bench.timer import Clock, clock_for
from fxfuse.ops import onednn

_COPIED = 256 * 1024 * 1024
"""Bytes: several times the last cache of CPUs and GPUs of today."""
_ROUNDS = 5
_LONG_ENOUGH_S = 0.02
_LARGEST = 8192


@dataclass(frozen=True)
class Rates:
    """Of one device."""

    bandwidth: float
    """Bytes a second, read and written together, of a large copy."""
    flops: dict[str, float]
    """dtype -> floating-point operations a second of a large square product, by the fastest implementation there is."""
    kept: str
    """The file that they are kept in, or why they could not be."""

    def floor_s(self, flops: int, moved: int, dtype: str) -> float:
        """The least time for so many operations and bytes: whichever takes longer. A dtype unknown here is free."""
        products = flops / self.flops[dtype] if flops and dtype in self.flops else 0.0
        return max(products, moved / self.bandwidth)


def rates(device: torch.device, dtypes: Iterable[torch.dtype]) -> Rates:
    """The rates of ``device`` for products in ``dtypes``; what was not measured before is, in a second or two."""
    name = choose.device_name("cpu" if device.type == "cpu" else str(device))
    identity = f"{name}, torch {torch.__version__}"
    known = _read(identity)
    wanted = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}
    missing = [key for key in ("bandwidth", *wanted) if key not in known]
    kept = ""
    if missing:
        clock = clock_for(device)
        for key in missing:
            known[key] = _bandwidth(device, clock) if key == "bandwidth" else _flops(device, wanted[key], clock)
        kept = _write(identity, known)
    flops = {key: known[key] for key in wanted}
    return Rates(known["bandwidth"], flops, kept or str(_file(identity)))


def clear() -> None:
    """Forget every rate, of other devices and versions too. OSError where that fails."""
    for file in (choose.folder() / "rates").glob("*.json"):
        file.unlink(missing_ok=True)


def _file(identity: str) -> Path:
    return choose.folder() / "rates" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _read(identity: str) -> dict[str, float]:
    """What the file has; nothing where it cannot be read, or was spoilt."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, TypeError, AttributeError, KeyError):
        data = json.loads(_file(identity).read_text())
        found = {str(key): float(value) for key, value in data["rates"].items()}
        if data["of"] == identity and all(0 < value < math.inf for value in found.values()):
            return found
    return {}


def _write(identity: str, known: dict[str, float]) -> str:
    """Why the rates could not be kept; "" where they are."""
    try:
        file = _file(identity)
        file.parent.mkdir(parents=True, exist_ok=True)
        choose.write_whole(file, json.dumps({"of": identity, "rates": known}, indent=1).encode())
    except (OSError, RuntimeError) as error:
        return f"for this run only: {error}"
    return ""


def _bandwidth(device: torch.device, clock: Clock) -> float:
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / _least(lambda: target.copy_(source), clock)


def _flops(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """Of square products that double until they take long enough."""
    best, n = 0.0, 256
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = min(_least(call, clock) for call in _products(a, b))
        best = max(best, 2 * n**3 / seconds)
        if seconds > _LONG_ENOUGH_S or n >= _LARGEST:
            return best
        n *= 2


def _products(a: torch.Tensor, b: torch.Tensor) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = [lambda: torch.mm(a, b)]
    if a.device.type == "cpu" and onednn.has(a.dtype):
        calls.append(lambda: onednn.pointwise(a, b, None, *onednn.NO_POST_OP))
    return calls


def _least(call: Callable[[], object], clock: Clock) -> float:
    """The shortest of a few rounds: what others do on the machine only ever adds."""
    with torch.inference_mode():
        return min(clock.block(call, 1) for _ in range(_ROUNDS))
