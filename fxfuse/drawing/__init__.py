"""Drawings of what ``optimize`` did to a model's regions: SVG, HTML, DOT and JSON, with nothing else installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxfuse.errors import unknown_format

# What draws is imported by what draws: networkx would be more than half of what `import fxfuse` costs.
if TYPE_CHECKING:
    from fxfuse.drawing.view import View


def draw(model: Any, file: str | Path) -> Path:
    """Write a drawing of an optimized model's regions before and after, and return where it is.

    The ending of ``file`` tells the format: .svg, .html, .dot or .json. Regions of equal structure are drawn once, and
    so are layers that repeat in a region.

    Raises:
        ``errors.NotOptimized``: ``model`` did not come from ``optimize``. ValueError: another ending. OSError: ``file``
        cannot be written.
    """
    from fxfuse.drawing.view import view

    render, path = renderer(file), Path(file)
    path.write_text(render(view(model)), encoding="utf-8")
    return path


def renderer(file: str | Path) -> Callable[[View], str]:
    """What writes the format that the ending of ``file`` names; ``errors.UnknownFormat`` for another ending."""
    from fxfuse.drawing.formats import FORMATS

    path = Path(file)
    known = FORMATS.get(path.suffix.removeprefix(".").lower())
    if known is None:
        raise unknown_format(path.name, list(FORMATS))
    return known
