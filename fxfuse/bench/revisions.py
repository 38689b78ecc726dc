"""Two revisions of a checkout benched in turns, each in processes and with measured choices of its own."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fxfuse.bench import schema
from fxfuse.bench.progress import bar
from fxfuse.errors import FxfuseError

FOLDERS = {"fxfuse": "fxfuse", "passes": "fxfuse/passes"}
"""Folder in the checkout -> folder as installed."""


class BenchFailed(FxfuseError, RuntimeError):
    """A revision cannot be had, or its benchmark failed."""


def bench(
    root: Path,
    base: str,
    arguments: Sequence[str],
    *,
    runs: int,
    progress: Callable[[str], object] = lambda _text: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The documents of ``runs`` runs of revision ``base``, and as many of the checkout at ``root`` as it is.

    ``arguments``: those of ``fxfuse bench``, without outputs. Who goes first alternates, so that a machine that gets
    slower or warmer favours neither. Raises BenchFailed.
    """
    with tempfile.TemporaryDirectory(prefix="fxfuse-compare-") as folder:
        sides = {"base": Path(folder, "base"), "head": Path(folder, "head")}
        _unpack(root, base, sides["base"])
        _copy(root, sides["head"])
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(runs):
            for turn, side in enumerate(sorted(sides, reverse=number % 2 == 1)):
                revision = base if side == "base" else "this checkout"
                progress(f"{bar(2 * number + turn, 2 * runs)} run {number + 1} of {runs}, {revision}")
                found[side].append(_run(sides[side], arguments))
    return found["base"], found["head"]


def _unpack(root: Path, revision: str, place: Path) -> None:
    """The packages of ``revision``. An archive and not a worktree: nothing is left in the repository, come what may."""
    archive = subprocess.run(["git", "archive", revision, *FOLDERS], cwd=root, capture_output=True, check=False)
    if archive.returncode:
        raise BenchFailed(f"git archive {revision}: {archive.stderr.decode(errors='replace').strip()}")
    whole = place.with_suffix(".tree")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(whole, filter="data")
    _copy(whole, place)


def _copy(root: Path, place: Path) -> None:
    for source, target in FOLDERS.items():
        shutil.copytree(root / source, place / target, ignore=shutil.ignore_patterns("__pycache__"))


def _run(package: Path, arguments: Sequence[str]) -> dict[str, Any]:
    out = package / "bench.json"
    # -P: the folder that we stand in is a checkout too, and would be imported in place of the copy.
    command = [sys.executable, "-P", "-m", "fxfuse", "bench", *arguments, "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(package), "FXFUSE_CACHE": str(package / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # 1: fxfuse gave no right answer, which the file says and the comparison judges
    if done.returncode not in (0, 1) or not out.is_file():
        raise BenchFailed(f"fxfuse bench {' '.join(arguments)} failed: {done.stderr.strip() or done.returncode}")
    return schema.read(out, schema.BENCH)
