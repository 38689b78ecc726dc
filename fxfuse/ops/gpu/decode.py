"""Builds and launches decode.cu: linear and gated linear with their epilogue, for few rows, at the speed of memory."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch
from torch import Tensor

from fxfuse.ops.gpu.driver import Kernel, Launcher, built
from fxfuse.ops.gpu.source import DTYPES, Epilogue, source

MOST_ROWS = 15
"""With more, reading x again in each block costs what one product less brings."""


def _shape(rows: int, gated: bool) -> tuple[int, int, int]:
    """TOKENS, WARPS, DEPTH: what was fastest on an H200 at 4096 and 14336."""
    if rows <= 8:
        return 1, 16, 2
    return (2, 8, 1) if gated else (2, 16, 2)


def serves(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes(rows: int, n: int, k: int) -> bool:
    """Whether the kernel computes these sizes: rows of 16 bytes."""
    return 0 < rows <= MOST_ROWS and k > 0 and k % 8 == 0 and n > 0


@functools.cache
def kernel(epilogue: Epilogue, shape: tuple[int, int, int], device: int) -> Kernel:
    """Compiled and loaded on ``device``, once a process. CudaError where that fails."""
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        text = kernel_source(epilogue, shape)
        return built(text, epilogue.kernel(_tile(shape)), f"sm_{major}{minor}", shape[1] * 32)


def kernel_source(epilogue: Epilogue, shape: tuple[int, int, int]) -> str:
    """The CUDA C++ of the kernel."""
    constants = dict(zip(("TOKENS", "WARPS", "DEPTH"), shape, strict=True))
    return source(("decode.cu",), epilogue, _tile(shape), constants, _multiply(DTYPES[epilogue.dtype]))


def _tile(shape: tuple[int, int, int]) -> str:
    tokens, warps, _ = shape
    return f"{8 * tokens}x16x{32 * warps}"


def _multiply(kind: str) -> str:
    c = "{%0, %1, %2, %3}"
    return f"""
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {c}, {{%4, %5, %6, %7}}, {{%8, %9}}, {c};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}
"""


class Launch:
    """One kernel with its arguments, to be launched again and again."""

    def __init__(self, epilogue: Epilogue, rows: int, n: int, k: int, device: int):
        """For ``rows`` at most."""
        self.device, self.lock = device, threading.Lock()
        self.blocks = -(-n // (8 if epilogue.gated else 16))
        self.pointers = (ctypes.c_void_p * 6)()
        self.numbers = (ctypes.c_int * 3)(0, n, k)
        pointers, numbers = ctypes.addressof(self.pointers), ctypes.addressof(self.numbers)
        addresses = [*(pointers + 8 * i for i in range(6)), *(numbers + 4 * i for i in range(3))]
        self.launcher = Launcher(kernel(epilogue, _shape(rows, epilogue.gated), device), addresses)

    def __call__(
        self, x: Tensor, rows: int, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None, out: Tensor
    ) -> bool:
        """Enqueue ``out`` = epilogue of x [rows, K] and weights [N, K], contiguous; False if one lies unaligned."""
        read = (x.data_ptr(), w0.data_ptr(), w1.data_ptr())
        if (read[0] | read[1] | read[2]) & 15:
            return False
        bias_pointers = (0 if bias0 is None else bias0.data_ptr(), 0 if bias1 is None else bias1.data_ptr())
        with self.lock:
            for i, pointer in enumerate((*read, out.data_ptr(), *bias_pointers)):
                self.pointers[i] = pointer
            self.numbers[0] = rows
            self.launcher.launch(self.blocks, torch._C._cuda_getCurrentRawStream(self.device))
        return True
