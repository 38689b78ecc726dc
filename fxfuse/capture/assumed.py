"""What a trace took for granted of everything but its arguments; each is checked at each call."""

from __future__ import annotations

import os
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()
"""What a forward found where it asked for an attribute that there was not."""


def place_of(source: str) -> str:
    """``file:line: code`` without the folders of the file; "" where there is none."""
    path, _, line = source.partition(": ")
    return f"{os.path.basename(path)}: {line}" if path else ""


@dataclass(frozen=True)
class Decision:
    """What a forward took a number to be that follows from sizes."""

    value: Any
    source: str
    """``file:line: code`` of where the number comes from."""


@dataclass(frozen=True)
class Question:
    """What a forward decided by the values of its arguments."""

    module: fx.GraphModule
    """Computes what is true or not."""
    arguments: tuple[str, ...]
    """Python expressions of what it takes, over the names that a region's checks have."""
    example: tuple[Any, ...]
    """These in the example, with the ``Fact`` of each tensor."""
    answer: bool
    source: str
    """``file:line: code`` of where the value comes from."""


@dataclass
class Assumed:
    """Collected while a forward is traced. Module paths are relative to the module that is traced."""

    attributes: set[tuple[str, str]] = field(default_factory=set)
    """(module path, name) of the plain attributes that were read, ``training`` among them."""
    absent: set[tuple[str, str]] = field(default_factory=set)
    """(module path, name) of attributes that were asked for and not there, or None in a table of nn.Module."""
    methods: set[tuple[str, str]] = field(default_factory=set)
    """(module path, name) of the functions and properties that the module's class gave."""
    iterated: set[str] = field(default_factory=set)
    """Paths of modules that were asked which modules they hold."""
    foreign: dict[tuple[int, str], tuple[Any, str, Any]] = field(default_factory=dict)
    """(object, name, value) of what was read of objects that are no modules, by the object's identity and the name."""
    answers: dict[str, Any] = field(default_factory=dict)
    """Name of a function of torch -> what it answered about PyTorch's state."""
    code: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)
    """Functions that made nodes, with the names of the files that they stand in."""
    dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    """See ``Dtypes.assumed``."""
    devices: dict[tuple[str, str], dict[str, bool]] = field(default_factory=dict)
    """See ``devices.Decisions``."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Placeholder name -> the rank that the argument was taken to have."""
    shapes: set[str] = field(default_factory=set)
    """Targets of tensors of the model whose shape something was taken from."""
    sizes: dict[str, Decision] = field(default_factory=dict)
    """Text of a ``Term`` -> what it was taken to be."""
    questions: list[Question] = field(default_factory=list)
