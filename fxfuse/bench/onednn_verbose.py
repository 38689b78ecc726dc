"""The lines that oneDNN prints of each primitive that it runs: which implementation, on which layouts, and how long."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch

PRODUCTS = frozenset({"matmul", "inner_product"})
_FIELDS = 13
"""After the four that name the format: engine, primitive, implementation, propagation, memory, attributes, auxiliary,
problem, time."""


@dataclass(frozen=True)
class Primitive:
    """One primitive that ran."""

    primitive: str
    implementation: str
    memory: str
    """dtype and layout of each operand: ``src:f32::blocked:ab::f0 wei:...``."""
    post_ops: str
    """What is computed with it: ``eltwise_gelu_tanh``, ``binary_mul:f32``; "" for nothing."""
    problem: str
    """Its sizes."""
    us: float


def primitives(call: Callable[[], object]) -> list[Primitive]:
    """The primitives of one call, in order; none where this torch is built without oneDNN.

    oneDNN writes to standard output by itself, so that is caught, for the whole process, while the call lasts.
    """
    if not torch.backends.mkldnn.is_available():
        return []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as caught:
        output = os.dup(1)
        os.dup2(caught.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                call()
        finally:
            sys.stdout.flush()
            os.dup2(output, 1)
            os.close(output)
        caught.seek(0)
        lines = caught.read().decode(errors="replace").splitlines()
    return [found for line in lines if (found := parse(line)) is not None]


def parse(line: str) -> Primitive | None:
    """One line of format v1; None for lines that tell of something else."""
    fields = line.split(",")
    if fields[:4] != ["onednn_verbose", "v1", "primitive", "exec"] or len(fields) < _FIELDS:
        return None
    _, _, _, _, _, primitive, implementation, _, memory, attributes, _, problem, *_ = fields
    post_ops = next((a.partition(":")[2] for a in attributes.split() if a.startswith("attr-post-ops:")), "")
    return Primitive(primitive, implementation, memory, post_ops, problem, float(fields[-1]) * 1e3)
