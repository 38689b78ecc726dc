"""Builds and launches stream.cu: linear and gated linear with their epilogue, for few rows, on Hopper GPUs."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxfuse.ops.gpu.driver import Kernel, Launcher, TensorMap, built
from fxfuse.ops.gpu.source import DTYPES, Epilogue, Lies, Run, source, wgmma

_BK = 64
_SHARED_MEMORY = 227 * 1024
"""Of a multiprocessor."""
MOST_ROWS = 127


class Shape(NamedTuple):
    """How the work is cut up."""

    tokens: int
    """Rows of x, in eights."""
    groups: int
    """Warpgroups of a block, 64 weight rows each."""
    split: int
    """Blocks that share the columns of a tile."""
    blocks: int
    """Blocks that a multiprocessor holds at a time, and divides its shared memory between."""

    @property
    def stages(self) -> int:
        """What a block has room for, beside barriers, what alignment takes and the kilobyte that each block costs."""
        return (_SHARED_MEMORY // self.blocks - 2048) // self._stage

    @property
    def memory(self) -> int:
        """Bytes of shared memory of a block."""
        return self.stages * self._stage + 1024

    @property
    def tile(self) -> str:
        return f"{self.tokens}x{64 * self.groups}x{_BK}"

    @property
    def _stage(self) -> int:
        return (64 * self.groups + self.tokens) * _BK * 2 + 16


def shape(rows: int, n: int, *, gated: bool, transposed: bool, processors: int) -> Shape:
    """What was fastest on an H200 (132 processors), within 10 % for weights of 6144 to 28672 rows."""
    tokens = max(8, 1 << (rows - 1).bit_length())
    groups = 2 if gated and transposed else 1  # whose copies bring 64 rows of one weight
    tiles = -(-(2 * n if gated else n) // (64 * groups))
    if tiles * groups >= 3 * processors:  # they do not all run at once: larger ones read x less often
        return Shape(tokens, 4, 1, 1) if tokens > 64 else Shape(tokens, 2, 1, 3)
    split = next((s for s in (1, 2, 4) if tiles * s >= processors // 2), 8)
    # Clusters of 4 and 8 do not find room for themselves on every part of the chip, but for smaller blocks.
    alone = split <= 2 and tiles * split <= processors
    return Shape(tokens, groups, split, 1 if alone else 2 if tokens * groups > 128 else 3)


def serves(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def takes(rows: int, n: int, k: int) -> bool:
    """Whether the kernel computes these sizes: rows of 16 bytes for the copy engine."""
    return 0 < rows <= MOST_ROWS and k > 0 and k % 8 == 0 and n > 0


def gains(rows: int, n: int, *, epilogue: Epilogue, processors: int) -> bool:
    """Whether it is expected to beat eager: with more rows, only by the kernels that it saves."""
    if rows <= 32:
        return True
    return bool(epilogue.act) and (rows <= 64 or (2 * n if epilogue.gated else n) >= 3 * 64 * processors)


@functools.cache
def kernel(epilogue: Epilogue, shape: Shape, transposed: bool, device: int) -> Kernel:
    """Compiled and loaded on ``device``, once a process. CudaError where that fails."""
    with torch.cuda.device(device):
        text = kernel_source(epilogue, shape, transposed)
        return built(text, epilogue.kernel(shape.tile), "sm_90a", 128 * shape.groups + 32, shape.memory)


def kernel_source(epilogue: Epilogue, shape: Shape, transposed: bool) -> str:
    """The CUDA C++ of the kernel."""
    constants = {"TOKENS": shape.tokens, "GROUPS": shape.groups, "SPLIT": shape.split}
    constants |= {"BK": _BK, "STAGES": shape.stages, "TRANSPOSED": int(transposed)}
    multiply = wgmma(shape.tokens, DTYPES[epilogue.dtype], a_transposed=transposed)
    return source(("hopper.cuh", "stream.cu"), epilogue, shape.tile, constants, multiply)


class Launch:
    """One kernel with its arguments, to be launched again and again: what did not change is not set again."""

    def __init__(self, epilogue: Epilogue, shape: Shape, lies: Lies, n: int, k: int, device: int):
        """For ``shape.tokens`` rows at most."""
        self.device = device
        out = 32 * shape.groups if epilogue.gated else 64 * shape.groups
        self.blocks = -(-n // out) * shape.split
        self.lock = threading.Lock()
        self.weight_rows, columns = lies.shape(n, k)
        box = (_BK if lies.transposed else 32 * shape.groups, _BK)
        self.x = TensorMap(epilogue.dtype, k, k, (shape.tokens, _BK))
        self.weights = [TensorMap(epilogue.dtype, columns, lies.step, box) for _ in range(2)]
        self.pointers = (ctypes.c_void_p * 3)()
        self.numbers = (ctypes.c_int * 3)(0, n, k)
        pointers, numbers = ctypes.addressof(self.pointers), ctypes.addressof(self.numbers)
        addresses = [*(m.address for m in (self.x, *self.weights)), *(pointers + 8 * i for i in range(3))]
        addresses += [numbers + 4 * i for i in range(3)]
        self.launcher = Launcher(kernel(epilogue, shape, lies.transposed, device), addresses)

    def __call__(
        self, x: Tensor, rows: int, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None, out: Tensor
    ) -> bool:
        """Enqueue ``out`` = epilogue of x [rows, K], contiguous, and weights [N, K]; False if one lies unaligned."""
        pointers = (x.data_ptr(), w0.data_ptr(), w1.data_ptr())
        if (pointers[0] | pointers[1] | pointers[2]) & 15:
            return False
        bias_pointers = (0 if bias0 is None else bias0.data_ptr(), 0 if bias1 is None else bias1.data_ptr())
        with self.lock:
            self.x.encode(pointers[0], rows)
            self.weights[0].encode(pointers[1], self.weight_rows)
            self.weights[1].encode(pointers[2], self.weight_rows)
            self.pointers[0] = out.data_ptr()
            self.pointers[1], self.pointers[2] = bias_pointers
            self.numbers[0] = rows
            self.launcher.launch(self.blocks, torch._C._cuda_getCurrentRawStream(self.device))
        return True


def launch(epilogue: Epilogue, least: int, most: int, lies: Lies, n: int, k: int, device: int) -> Run:
    """What launches the kernel for ``least`` to ``most`` rows of x; CudaError where there is none."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    few, many = (
        shape(rows, n, gated=epilogue.gated, transposed=lies.transposed, processors=processors)
        for rows in (least, most)
    )
    of_many = Launch(epilogue, many, lies, n, k, device)
    if few == many:
        return of_many
    # A power of two needs half the tokens of what follows it.
    of_few, tokens = Launch(epilogue, few, lies, n, k, device), few.tokens

    def run(x: Tensor, rows: int, *others: Any) -> bool:
        return (of_few if rows <= tokens else of_many)(x, rows, *others)

    return run
