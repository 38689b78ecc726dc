"""Builds and launches hopper.cu: linear and gated linear with their epilogue, for many rows, on Hopper GPUs."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch
from torch import Tensor

from fxfuse.ops.gpu.driver import Kernel, Launcher, TensorMap, built
from fxfuse.ops.gpu.source import DTYPES, Epilogue, Lies, source, wgmma

_BM, _BK, _SLAB, _CLUSTER, _GROUP = 128, 64, 32, 2, 8
_THREADS = 384
_MOST_SHARED_MEMORY = 227 * 1024
TILES = (192, 128)
"""Weight rows of a tile. More need more registers than there are; 192 do most work per byte, 128 fill the last wave."""


def serves(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def takes(rows: int, n: int, k: int) -> bool:
    """Whether the kernel computes these sizes: rows of 16 bytes for the copy engine, steps enough for the biases."""
    return rows > 0 and k % 8 == 0 and n % 8 == 0 and k >= 256


def tiles(lies: Lies) -> tuple[int, ...]:
    """The tiles that there are for a weight that lies so: a transposed one comes in blocks of 64 rows."""
    return TILES[1:] if lies.transposed else TILES


def microseconds(rows: int, n: int, k: int, wn: int, *, gated: bool, processors: int) -> float:
    """What the kernel is expected to take.

    A block takes 4 * wn cycles a step and 750 a tile that no other tile hides; the clock is what an H200 held at its
    power limit on 8192 x 768 x 3072, 2048 x 1024 x 4096 and 512 x 4096 x 14336, all within 10 %.
    """
    out = wn // 2 if gated else wn
    tiles = -(-rows // (_BM * _CLUSTER)) * -(-n // out)
    waves = -(-tiles // (processors // _CLUSTER))
    megahertz = 1350 if wn == 192 else 1250
    return 5 + waves * (-(-k // _BK) * 4 * wn + 750) / megahertz


def _memory(wn: int, gated: bool) -> tuple[int, int, int]:
    """Stages, sets of slabs, and bytes of shared memory: two sets, unless that leaves less than four stages."""
    stage, slabs = (_BM + wn) * _BK * 2, 2 * 64 * (wn // 2 if gated else wn) * 2
    rest = 2 * wn * 2 + 1024 + 256  # biases, alignment, barriers
    for sets in (2, 1):
        stages = (_MOST_SHARED_MEMORY - sets * slabs - rest) // stage
        if stages >= 4:
            break
    return stages, sets, stages * stage + sets * slabs + rest


@functools.cache
def kernel(epilogue: Epilogue, wn: int, transposed: bool, device: int) -> Kernel:
    """Compiled and loaded on ``device``, once a process. CudaError where that fails."""
    _, _, memory = _memory(wn, epilogue.gated)
    with torch.cuda.device(device):
        text = kernel_source(epilogue, wn, transposed)
        return built(text, epilogue.kernel(_tile(wn)), "sm_90a", _THREADS, memory)


def kernel_source(epilogue: Epilogue, wn: int, transposed: bool) -> str:
    """The CUDA C++ of the kernel."""
    stages, sets, _ = _memory(wn, epilogue.gated)
    constants = {"BM": _BM, "BK": _BK, "CLUSTER": _CLUSTER, "SLAB": _SLAB, "GROUP": _GROUP}
    constants |= {"WN": wn, "STAGES": stages, "SLAB_SETS": sets, "TRANSPOSED": int(transposed)}
    multiply = wgmma(wn, DTYPES[epilogue.dtype], b_transposed=transposed)
    return source(("hopper.cuh", "hopper.cu"), epilogue, _tile(wn), constants, multiply)


def _tile(wn: int) -> str:
    return f"{_BM}x{wn}x{_BK}"


class Launch:
    """One kernel with its arguments, to be launched again and again: what did not change is not set again."""

    def __init__(self, epilogue: Epilogue, wn: int, lies: Lies, n: int, k: int, device: int):
        self.n, self.device = n, device
        self.columns = wn // 2 if epilogue.gated else wn
        self.clusters = torch.cuda.get_device_properties(device).multi_processor_count // _CLUSTER
        self.lock = threading.Lock()
        self.weight_rows, columns = lies.shape(n, k)
        box = (_BK, 64) if lies.transposed else (wn // 2, _BK)
        self.x = TensorMap(epilogue.dtype, k, k, (_BM, _BK))
        self.weights = [TensorMap(epilogue.dtype, columns, lies.step, box) for _ in range(2)]
        self.y = TensorMap(epilogue.dtype, n, n, (64, _SLAB), swizzle=64)
        self.numbers = (ctypes.c_int * 3)(0, n, k)
        self.biases = (ctypes.c_void_p * 2)()
        biases, numbers = ctypes.addressof(self.biases), ctypes.addressof(self.numbers)
        maps = (self.x, *self.weights, self.y)
        addresses = [*(m.address for m in maps), biases, biases + 8, numbers, numbers + 4, numbers + 8]
        self.launcher = Launcher(kernel(epilogue, wn, lies.transposed, device), addresses)

    def __call__(
        self, x: Tensor, rows: int, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None, out: Tensor
    ) -> bool:
        """Enqueue ``out`` = epilogue of x [rows, K], contiguous, and weights [N, K]; False if one lies unaligned."""
        pointers = (x.data_ptr(), w0.data_ptr(), w1.data_ptr(), out.data_ptr())
        bias_pointers = (0 if bias0 is None else bias0.data_ptr(), 0 if bias1 is None else bias1.data_ptr())
        if (pointers[0] | pointers[1] | pointers[2] | bias_pointers[0] | bias_pointers[1]) & 15:
            return False
        tiles = -(-rows // (_BM * _CLUSTER)) * -(-self.n // self.columns)
        blocks = min(self.clusters, tiles) * _CLUSTER
        with self.lock:
            self.x.encode(pointers[0], rows)
            self.weights[0].encode(pointers[1], self.weight_rows)
            self.weights[1].encode(pointers[2], self.weight_rows)
            self.y.encode(pointers[3], rows)
            self.biases[0], self.biases[1] = bias_pointers
            self.numbers[0] = rows
            self.launcher.launch(blocks, torch._C._cuda_getCurrentRawStream(self.device))
        return True
