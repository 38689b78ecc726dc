"""Launches portable_kernel.py, in Triton: for GPUs and sizes that have no kernel of their own, where it was measured.

Triton's launcher costs 25 us of host time, as much as the two or three launches that it replaces.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxfuse.ops.gpu.driver import CudaError
from fxfuse.ops.gpu.source import DTYPES, Epilogue, Lies

LEAST_ROWS = 16
"""Of a product of Triton's."""


class Tile(NamedTuple):
    rows: int
    columns: int
    """Of y; half of it for each weight of a gated product."""
    warps: int
    stages: int


TILES = {"triton128": Tile(128, 128, 8, 3), "triton64": Tile(64, 64, 4, 4)}
"""By name of the implementation."""


def serves(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0) and _kernels() is not None


def computes(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are worth a try: of float32 only where TF32 may stand for it."""
    return dtype in DTYPES or (dtype is torch.float32 and allows_tf32())


def allows_tf32() -> bool:
    """The user's setting for products on CUDA devices, however it was made."""
    allowed: bool = torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    return allowed


@functools.cache
def _kernels() -> Any:
    try:
        return importlib.import_module("fxfuse.ops.gpu.portable_kernel")
    except ImportError:  # no Triton beside this torch
        return None


class Launch:
    """One kernel, compiled for the dtype of ``epilogue`` and aligned operands. CudaError where that fails."""

    def __init__(self, epilogue: Epilogue, name: str, lies: Lies, n: int, k: int, device: str):
        kernels, tile = _kernels(), TILES[name]
        self.kernel, self.n, self.rows = kernels.fxfuse_linear, n, tile.rows
        self.columns = tile.columns // 2 if epilogue.gated else tile.columns
        step_n, step_k = (1, lies.step) if lies.transposed else (lies.step, 1)
        a0, a1 = (*epilogue.act_args, 0.0, 0.0)[:2]
        tiling = {"BM": tile.rows, "BN": self.columns, "BK": 128 // epilogue.dtype.itemsize, "GROUP": 8}
        compiling = {"PRECISION": "tf32", "num_warps": tile.warps, "num_stages": tile.stages}
        wanted = {"ACT": kernels.ACTIVATIONS[epilogue.act], "GATED": epilogue.gated, "BIAS": epilogue.bias}
        sizes = {"N": n, "K": k, "step_n": step_n, "step_k": step_k, "a0": a0, "a1": a1}
        self.fixed = sizes | wanted | tiling | compiling
        nothing = torch.empty(0, dtype=epilogue.dtype, device=torch.device(device))
        try:
            self(nothing, 0, nothing, nothing, None, None, nothing)
        except Exception as error:  # of whatever compiles it
            raise CudaError(f"Triton refused a kernel: {error}") from error

    def __call__(
        self, x: Tensor, rows: int, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None, out: Tensor
    ) -> bool:
        """Enqueue ``out`` = epilogue of x [rows, K], contiguous, and weights [N, K]; False if one lies unaligned."""
        bias0, bias1 = x if bias0 is None else bias0, x if bias1 is None else bias1  # not read
        tensors = {"x": x, "w0": w0, "w1": w1, "bias0": bias0, "bias1": bias1, "y": out}
        for tensor in tensors.values():
            if tensor.data_ptr() & 15:  # a kernel of its own, which would be compiled now
                return False
        tiles = -(-rows // self.rows) * -(-self.n // self.columns)
        self.kernel[(tiles,)](**tensors, M=rows, **self.fixed)
        return True
