"""What every kernel's CUDA C++ begins with: what it computes beside the product, and the names of its 16-bit type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[Tensor, int, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], bool]
"""Enqueues a kernel: x, its rows, weights, biases, output. False where they do not lie as the kernel wants them."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""The types that kernels are built for, as PTX calls them."""


class Lies(NamedTuple):
    """How a weight [N, K] lies in memory."""

    transposed: bool
    """Whether neighbours along N are neighbours in memory; else those along K are."""
    step: int
    """Elements from one row to the next, or for a transposed one from one column to the next."""

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Of the matrix whose rows are dense: of the weight, or of its transpose."""
        return (k, n) if self.transposed else (n, k)


def lies(weight: Tensor) -> Lies | None:
    """How a weight [N, K] lies, None where neither its rows nor its columns are dense."""
    row, column = weight.stride()
    if column == 1 and row >= weight.shape[1]:
        return Lies(False, row)
    return Lies(True, column) if row == 1 and column >= weight.shape[0] else None


@dataclass(frozen=True)
class Epilogue:
    """act(linear(x, w0, bias0)), and for ``gated`` that times linear(x, w1, bias1). ``act`` "" is the identity."""

    act: str
    act_args: tuple[float, ...]
    gated: bool
    bias: bool
    dtype: torch.dtype

    def kernel(self, tile: str) -> str:
        """What a kernel with this epilogue is called in traces: what it computes, and in tiles of which size."""
        op = "gated_linear" if self.gated else "linear"
        return "_".join(["fxfuse", op, *filter(None, [self.act]), DTYPES[self.dtype], tile])


_C_NAMES = {"": "identity", "tanh": "tanh_"}  # as activations.cuh has them

_CONVERSIONS = {
    torch.bfloat16: """
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 word; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(hi), "f"(lo)); return word;
}
__device__ __forceinline__ float to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
""",
    torch.float16: """
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 word; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(hi), "f"(lo)); return word;
}
__device__ __forceinline__ float to_float(u16 bits) {
  float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits)); return y;
}
""",
}


def source(files: Sequence[str], epilogue: Epilogue, tile: str, constants: Mapping[str, int], multiply: str) -> str:
    """The CUDA C++ of ``epilogue.kernel(tile)``: ``files`` after what they expect to be defined."""
    arguments = ", ".join(["v", *(f"{float(a)!r}f" for a in epilogue.act_args)])
    name = _C_NAMES.get(epilogue.act, epilogue.act)
    defines = {
        "KERNEL": epilogue.kernel(tile),
        **constants,
        "TEN_BITS": int(epilogue.dtype is torch.float16),
        "GATED": int(epilogue.gated),
        "BIAS": int(epilogue.bias),
        "ACT(v)": f"{name}({arguments})",
    }
    here = resources.files(__package__)
    return "\n".join(
        [
            "typedef unsigned short u16;\ntypedef unsigned int u32;\ntypedef unsigned long long u64;",
            *(f"#define {key} {value}" for key, value in defines.items()),
            _CONVERSIONS[epilogue.dtype],
            here.joinpath("activations.cuh").read_text(),
            multiply,
            *(here.joinpath(file).read_text() for file in files),
        ]
    )


def wgmma(n: int, kind: str, *, a_transposed: bool = False, b_transposed: bool = False) -> str:
    """``multiply`` of m64 x ``n`` x k16 on Hopper, whose accumulator of n / 2 registers has to be spelled out.

    An operand lies in rows of k; a transposed one in rows of m or n.
    """
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], u64 a, u64 b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "{instruction} {{{registers}}}, %{count}, %{count + 1}, p, 1, 1, {int(a_transposed)}, {int(b_transposed)};\\n}}"
    : {operands} : "l"(a), "l"(b), "r"(accumulate));
}}
"""
