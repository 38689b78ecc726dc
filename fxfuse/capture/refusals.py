"""What a refusal says of an exception that a forward raised while it was traced."""

from __future__ import annotations

import os
import traceback

import torch
from torch import fx

NOT_A_FORWARD = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<")
"""How the file names of code begin that is PyTorch's, fxfuse's or generated."""


def explained(error: Exception) -> str:
    """The reason in one line, with the exception and the place in the forward."""
    text = " ".join(str(error).split())
    if isinstance(error, fx.proxy.TraceError):
        text = "decides by a value or size that is not known before the call" if "control flow" in text else text
    kind = f"{type(error).__name__}{_place(error)}"
    return f"{text[:160]} ({kind})" if text else kind


def _place(error: Exception) -> str:
    """``, file:line`` of the innermost statement of the forward that an error passed; "" where it passed none."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(name, line) for name, line in places if not name.startswith(NOT_A_FORWARD)]
    return f", {os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""
