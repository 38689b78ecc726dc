"""Where the results of ``fxfuse bench`` go: written whole after each target, so that a crash or ^C loses no other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxfuse.bench import html, render, schema
from fxfuse.bench.measure import Result
from fxfuse.choose import write_whole
from fxfuse.errors import FxfuseError


class BadOutput(FxfuseError, ValueError):
    """A file that was asked for could not be written in the end."""


def check_place(option: str, file: str) -> None:
    """Raise BadOutput, which names the command line's ``option``, where ``file`` cannot be written; ``-`` can."""
    place = Path(file)
    folder = place.resolve().parent
    if file == "-":
        return
    if not folder.is_dir():
        raise BadOutput(f"{option} {file}: there is no such folder")
    if place.is_dir():
        raise BadOutput(f"{option} {file}: this is a folder, and no file")
    if not os.access(place if place.exists() and not place.is_file() else folder, os.W_OK):
        raise BadOutput(f"{option} {file}: there is no right to write there")


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
        files = {option: getattr(self, option) for option in ("json", "markdown", "html")}
        named: dict[Path, str] = {}
        for option, file in files.items():
            if file is None:
                continue
            check_place(f"--{option}", file)
            first = named.setdefault(Path(file).resolve(), option)
            if first != option and (Path(file).is_file() or not Path(file).exists()):
                raise BadOutput(f"--{first} and --{option} name one file: {file}")
        if self.profile is not None:
            if self.html is None:
                raise BadOutput("--profile is for the HTML report: --html FILE says where that goes")
            schema.read(self.profile, schema.PROFILE)
        if self.html is not None:
            html.environment()

    def write(
        self,
        results: Sequence[Result],
        settings: dict[str, Any],
        unfinished: Sequence[str] = (),
        profiles: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write every file anew. ``unfinished``: the targets that there is no result for yet. ``profiles``: documents
        of ``fxfuse.profile/1`` for the HTML report, where ``profile`` names no file."""
        if self.json not in (None, "-"):
            write(str(self.json), render.as_json(results, settings, unfinished) + "\n", last=not unfinished)
        if self.markdown is not None:
            write(self.markdown, render.as_markdown(results, unfinished), last=not unfinished)
        if self.html is not None:
            shown = profiles if self.profile is None else [schema.read(self.profile, schema.PROFILE)]
            write(self.html, html.report(results, unfinished, shown), last=not unfinished)


def write(file: str, text: str, *, last: bool) -> None:
    """Replace ``file`` by one with ``text``. A pipe or a device is written to when it is the ``last`` time."""
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
