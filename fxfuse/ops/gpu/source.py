"""What every kernel's CUDA C++ begins with: what it computes beside the product, and the names of its 16-bit type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import torch

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""The types that kernels are built for, as PTX calls them."""


@dataclass(frozen=True)
class Epilogue:
    """act(linear(x, w0, bias0)), and for ``gated`` that times linear(x, w1, bias1). ``act`` "" is the identity."""

    act: str
    act_args: tuple[float, ...]
    gated: bool
    bias: bool
    dtype: torch.dtype


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


def source(file: str, epilogue: Epilogue, constants: Mapping[str, int], multiply: str) -> str:
    """The CUDA C++ of one kernel: ``file`` after what it expects to be defined."""
    arguments = ", ".join(["v", *(f"{float(a)!r}f" for a in epilogue.act_args)])
    name = _C_NAMES.get(epilogue.act, epilogue.act)
    defines = {
        **constants,
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
            here.joinpath(file).read_text(),
        ]
    )
