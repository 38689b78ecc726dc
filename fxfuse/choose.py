"""Which implementation of an operator runs: the one measured fastest, or what a documented heuristic says.

Measured choices are kept by device, operator, dtype, weight and power-of-two bucket of rows, in memory and in one JSON
file under the user's cache folder. A choice is never needed: without the file, or with one that cannot be read or
written, the heuristics of the implementations decide what was not measured, and one warning says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxfuse.errors import ChoicesWarning

FORMAT = 1
"""Of the file. It is part of its name, so that versions with another one do not meet."""
PLAIN, ONEDNN, ONEDNN_PACKED = "plain", "onednn", "onednn-packed"
"""Names of implementations: eager's own operators; oneDNN on the model's own weight; oneDNN on a packed copy of it."""


class Key(NamedTuple):
    """What a choice is made for."""

    device: str
    """As ``device_name`` gives it."""
    op: str
    """Operator and what shapes its work: ``linear``, ``linear_act gelu``, ``gated_linear silu``."""
    dtype: torch.dtype
    n: int
    k: int
    """The weight is [n, k]."""
    transposed: bool
    """Whether the weight lies in memory as [k, n]."""
    bias: bool
    bucket: int
    """``rows.bit_length()``: row counts between two powers of two share a choice."""

    @property
    def rows(self) -> str:
        """The row counts of the bucket, as ``1`` or ``512-1023``."""
        least = least_rows(self.bucket)
        return str(least) if self.bucket < 2 else f"{least}-{2 * least - 1}"


def least_rows(bucket: int) -> int:
    """The least row count of a bucket."""
    return 1 << bucket >> 1


class Choice(NamedTuple):
    """What was measured for a key."""

    order: tuple[str, ...]
    """Implementations, the best first; where not every one is allowed, the first that is. PLAIN is among them."""
    seconds: Mapping[str, float]
    """Implementation -> its median time a call."""

    def among(self, allowed: Collection[str]) -> str:
        return next((name for name in self.order if name in allowed), PLAIN)


def device_name(kind: str) -> str:
    """What measured times depend on: the processor, its vector extensions and threads, or the GPU (``cuda:1``)."""
    if kind != "cpu":
        return torch.cuda.get_device_name(torch.device(kind))
    return f"{_processor()}, {torch.get_num_threads()} threads"


@functools.cache
def _processor() -> str:
    name = ""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> str:
    """Other versions have other implementations."""
    from fxfuse import __version__

    return f"fxfuse {__version__}, torch {torch.__version__}"


def folder() -> Path:
    """``$FXFUSE_CACHE``, else ``fxfuse`` under ``$XDG_CACHE_HOME`` or ``~/.cache``. RuntimeError without a home."""
    own = os.environ.get("FXFUSE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fxfuse"


def file() -> Path:
    """Where the table is. RuntimeError without a home folder."""
    return folder() / f"choices-{FORMAT}.json"


# What reading and writing may raise: json raises RecursionError on lists in lists, and Path one RuntimeError for a user
# without a home.
_TROUBLE = (OSError, ValueError, RuntimeError)

Entries = dict[str, Any]
"""Key as text -> what ``_entry`` makes of a choice."""


class Choices:
    """The measured choices of a process. The file is read at the first question, and written at each change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table: dict[Key, Choice] = {}
        self._loaded = self._warned = False

    def get(self, key: Key) -> Choice | None:
        """What was measured for ``key``, in this process or before."""
        if not self._loaded:
            self._load()
        return self._table.get(key)

    def any(self) -> bool:
        """Whether anything was measured for these versions, on whatever device."""
        if not self._loaded:
            self._load()
        return bool(self._table)

    def put(self, choices: Mapping[Key, Choice]) -> None:
        """Add choices, in place of older ones, and keep them on disk beside what others have written there."""
        self._load()
        self._table.update(choices)
        if choices:
            with self._one_warning("written"):
                _merge(versions(), {_text(key): _entry(key, choice) for key, choice in choices.items()})

    def clear(self) -> None:
        """Forget every choice, of other devices and versions too, here and on disk. OSError where that fails."""
        with self._lock:
            self._table, self._loaded = {}, True
        file().unlink(missing_ok=True)

    def _load(self) -> None:
        with self._lock:
            if self._loaded:
                return
            entries: Entries = {}
            with self._one_warning("read"):
                entries = read().get(versions(), {})
            for entry in entries.values():
                # One entry that was spoilt by hand says nothing about the others.
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    key, choice = _parsed(entry)
                    self._table[key] = choice
            self._loaded = True

    @contextlib.contextmanager
    def _one_warning(self, what: str) -> Iterator[None]:
        """Turns what a disk may do to us into one warning a process: the model works without the file."""
        try:
            yield
        except _TROUBLE as error:
            if not self._warned:
                self._warned = True
                warnings.warn(_warning(what, error), ChoicesWarning, stacklevel=2)


def _warning(what: str, error: BaseException) -> str:
    place = "the table of measured choices"
    with contextlib.suppress(RuntimeError):
        place += f", {file()},"
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"{place} could not be {what}: {reason[:200]}. What is measured holds for this process only. "
        "Set FXFUSE_CACHE to a folder that can be written, or see `fxfuse cache`."
    )


def read() -> dict[str, Entries]:
    """Versions -> their entries, as they are on disk. OSError, ValueError or RuntimeError where there is no reading."""
    try:
        data = json.loads(file().read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("versions"), dict):
        raise ValueError(f"it is no table of format {FORMAT}")
    return {version: entries for version, entries in data["versions"].items() if isinstance(entries, dict)}


def count() -> tuple[int, int]:
    """How many choices the file has for this CPU and these versions, and for others. Raises what ``read`` raises."""
    table, device = read(), device_name("cpu")
    ours = sum(text.startswith(f"{device} | ") for text in table.get(versions(), {}))
    return ours, sum(map(len, table.values())) - ours


def _merge(version: str, entries: Entries) -> None:
    """Replace the file by one with ``entries`` as well."""
    target = file()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_suffix(".lock")):
        # Read again: other processes may have written since.
        unreadable: Exception | None = None
        try:
            everything = read()
        except (ValueError, RecursionError) as error:
            everything, unreadable = {}, error
        everything.setdefault(version, {}).update(entries)
        text = json.dumps({"format": FORMAT, "versions": everything}, indent=1, sort_keys=True)
        write_whole(target, text.encode())
    if unreadable is not None:
        raise ValueError(f"{unreadable}; it was begun anew") from unreadable


def write_whole(target: Path, data: bytes) -> None:
    """Make ``target`` a file with ``data``, whole or not at all: readers never see half. OSError where it fails."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """One writer at a time, where the system has file locks; elsewhere one of two writers at once may lose an entry."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with lock.open("w") as handle:
        # Not for ever: whoever holds it may have been stopped.
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        else:
            raise OSError(f"{lock} is held by another process")
        yield


_ATTEMPTS = 200
"""10 ms apart; a writer is done within a few."""


def _text(key: Key) -> str:
    """The key of an entry in the file: no more than something unique that people can read and sort."""
    form = "transposed " * key.transposed + "bias " * key.bias
    return f"{key.device} | {key.op} {_name(key.dtype)} {key.n}x{key.k} {form}rows {key.rows}"


def _entry(key: Key, choice: Choice) -> dict[str, Any]:
    return {"key": {**key._asdict(), "dtype": _name(key.dtype)}, "order": choice.order, "seconds": dict(choice.seconds)}


def _parsed(entry: Any) -> tuple[Key, Choice]:
    """The inverse of ``_entry``; ValueError, KeyError, TypeError or AttributeError for anything else."""
    fields = entry["key"]
    dtype = getattr(torch, fields["dtype"])
    seconds = {str(name): float(value) for name, value in entry["seconds"].items()}
    order = tuple(entry["order"])
    if not isinstance(dtype, torch.dtype) or PLAIN not in order or not set(order) <= seconds.keys():
        raise ValueError("no choice")
    return Key(**{**fields, "dtype": dtype}), Choice(order, seconds)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CHOICES = Choices()
"""Those of this process."""
