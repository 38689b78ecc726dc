"""Where the results of ``fxfuse bench`` go: written whole after each target, so that a crash or ^C loses no other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxfuse.bench import html, render, schema
from fxfuse.bench.measure import Result
from fxfuse.choose import write_whole


@dataclass(frozen=True)
class Outputs:
    """The files of one ``bench``; None: not asked for. ``json`` may be ``-``, standard output."""

    json: str | None = None
    markdown: str | None = None
    html: str | None = None
    profile: str | None = None
    """A ``fxfuse.profile/1`` file whose charts the HTML report shows as well."""

    def check(self) -> None:
        """Raise before anything is measured where a file could not be written or made in the end."""
        for option in ("json", "markdown", "html"):
            file = getattr(self, option)
            if file not in (None, "-") and not Path(file).resolve().parent.is_dir():
                raise FileNotFoundError(f"--{option} {file}: there is no such folder")
        if self.profile is not None:
            schema.read(self.profile, schema.PROFILE)
        if self.html is not None:
            html.environment()

    def write(self, results: Sequence[Result], settings: dict[str, Any], unfinished: Sequence[str] = ()) -> None:
        """Write every file anew. ``unfinished``: the targets that there is no result for yet."""
        if self.json not in (None, "-"):
            _write(str(self.json), render.as_json(results, settings, unfinished) + "\n", last=not unfinished)
        if self.markdown is not None:
            _write(self.markdown, render.as_markdown(results, unfinished), last=not unfinished)
        if self.html is not None:
            profile = None if self.profile is None else schema.read(self.profile, schema.PROFILE)
            _write(self.html, html.report(results, unfinished, profile), last=not unfinished)


def _write(file: str, text: str, *, last: bool) -> None:
    place = Path(file)
    if place.exists() and not place.is_file():
        # A pipe or a device cannot be replaced, and keeps what was written to it before.
        if last:
            place.write_text(text, encoding="utf-8")
        return
    place = place.resolve()  # what a link points to is replaced, and not the link
    write_whole(place, text.encode())
    mask = os.umask(0)
    os.umask(mask)
    place.chmod(0o666 & ~mask)
