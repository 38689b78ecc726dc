"""A line on stderr that says what is going on, on a terminal only."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

_WIDTH = 20


def bar(done: int, total: int) -> str:
    """How much of ``total`` is done, as a bar of fixed width."""
    full = _WIDTH * done // total
    return f"[{'#' * full}{'.' * (_WIDTH - full)}]"


class Progress:
    """Call it with a text to replace the line; leaving the context wipes it. Silent where stderr is no terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        self._write(f"{self._what}: {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Wipe the line, before something else is printed."""
        self._write("")

    def _write(self, line: str) -> None:
        if self._shown:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
