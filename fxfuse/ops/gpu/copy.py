"""Builds copy.cu: copies in a CUDA graph, which go from or to another address at each launch of the graph.

That costs the host 2 us a copy on an H200, where a copy beside the graph costs 6 by a kernel and 8 by the driver.
"""

from __future__ import annotations

import ctypes
import functools
from importlib import resources

import torch

from fxfuse.ops.gpu.driver import CudaError, Kernel, Launcher, built, edits_graphs

_THREADS = 256
_BLOCKS = 1024
"""At most: more bytes are copied in turns."""


@functools.cache
def kernel(device: int) -> Kernel:
    """Compiled and loaded on ``device``, once a process. CudaError where that fails."""
    major, minor = torch.cuda.get_device_capability(device)
    text = resources.files(__package__).joinpath("copy.cu").read_text()
    with torch.cuda.device(device):
        return built(text, "fxfuse_copy", f"sm_{major}{minor}", _THREADS)


def serves(device: int) -> bool:
    """Whether such copies can be made on ``device``. Nothing is loaded for them later."""
    try:
        kernel(device)
    except (CudaError, OSError):  # no compiler beside this torch, say
        return False
    return edits_graphs()


class Copy:
    """A copy of ``size`` bytes on a device that is served, as a node of a CUDA graph. Not for two threads at once."""

    def __init__(self, to: int, source: int, size: int, device: int, stream: int):
        """Becomes part of what is captured of ``stream``."""
        self._arguments, self._ends = (ctypes.c_uint64 * 3)(to, source, size), [to, source]
        first = ctypes.addressof(self._arguments)
        launcher = Launcher(kernel(device), [first, first + 8, first + 16])
        self._node = launcher.capture(min(-(-size // (16 * _THREADS)), _BLOCKS), stream)

    def read_from(self, source: int, executable: int) -> None:
        """From the next launch of the instantiated graph on."""
        self._redirect(1, source, executable)

    def write_to(self, to: int, executable: int) -> None:
        """From the next launch of the instantiated graph on."""
        self._redirect(0, to, executable)

    def _redirect(self, end: int, address: int, executable: int) -> None:
        if self._ends[end] != address:
            self._arguments[end] = address
            self._node.update(executable)
            self._ends[end] = address
