"""What the name of a GPU kernel says: what kind of work it does, and of a product its tile, layout and dtype."""

from __future__ import annotations

import re
from dataclasses import dataclass

GEMM, FUSED_GEMM, ELEMENTWISE, REDUCE, COPY, GATHER, ATTENTION, OTHER = (
    "gemm",
    "fused gemm",
    "elementwise",
    "reduce",
    "copy",
    "gather",
    "attention",
    "other",
)

_KINDS = (
    (COPY, r"^fxfuse_copy$"),
    (FUSED_GEMM, r"^fxfuse_"),
    (REDUCE, r"splitk_?reduce|reduce_kernel|softmax|layer_?norm|rowwise_?moments|^triton_(red|per)_"),
    (ATTENTION, r"flash|fmha|attention|sdpa"),
    (GEMM, r"gemm|gemv|nvjet|cutlass|xmma|^triton_(tem|mm)_|dot_kernel"),
    (COPY, r"^memcpy|copy_kernel|catarray"),
    (GATHER, r"gather|index_?select|index_elementwise|embedding"),
    (ELEMENTWISE, r"elementwise|^triton_poi_|geglu|swiglu|pointwise"),
)
"""The first that is found counts: what reduces a split-k product is named after it, and a copy is elementwise."""

_TILES = (
    r"tilesize(\d+x\d+x\d+)",
    r"_(\d+x\d+_\d+x\d+)_",
    r"_(\d+x\d+_\d+x\d+)$",
    r"[^0-9](\d+x\d+(?:x\d+)?)(?:[^0-9]|$)",
)
_NVJET_DTYPES = {"t": "bfloat16", "h": "float16", "s": "float32", "d": "float64", "q": "float8"}
_DTYPES = (("bfloat16", r"bf16|bfloat16"), ("float16", r"f16|half|hgemm"), ("float32", r"f32|float|sgemm"))


@dataclass(frozen=True)
class Described:
    """What a name says; "" where it says nothing."""

    kind: str
    tile: str = ""
    layout: str = ""
    """``tn`` and the like: whether each operand is transposed, in cuBLAS's column-major order."""
    dtype: str = ""


def describe(name: str) -> Described:
    """Read the name of a kernel, or of a copy, as the profiler has it."""
    low = name.lower()
    kind = next((kind for kind, pattern in _KINDS if re.search(pattern, low)), OTHER)
    if kind not in (GEMM, FUSED_GEMM):
        return Described(kind)
    return Described(kind, _tile(low), _layout(name), _dtype(low))


_FUNCTORS = r"(\w+?)(?:CUDAKernelImpl|Functor\b|_kernel_cuda)|CUDAFunctor_(\w+)"
_ADAPTERS = ("AUnary", "BUnary", "Binary", "Unary")


def short(name: str) -> str:
    """The name without template arguments, but for the function that a pointwise kernel computes."""
    name = name.removeprefix("void ")
    bare, _, arguments = name.partition("<")
    found = ["".join(groups) for groups in re.findall(_FUNCTORS, arguments)]
    functor = next((functor for functor in found if functor not in _ADAPTERS), "")
    bare = bare.rpartition("::")[2]
    return f"{bare}<{functor}>" if functor else bare


def _tile(low: str) -> str:
    return next((found[1] for pattern in _TILES if (found := re.search(pattern, low))), "")


def _layout(name: str) -> str:
    if name.startswith("nvjet"):  # the last three letters: both operands and the output
        found = re.search(r"_([TN])([TN])[TN](?:$|_)", name)
        return f"{found[1]}{found[2]}".lower() if found else ""
    found = re.search(r"_([tn][tn])(?:_|$)", name)
    return found[1] if found else ""


def _dtype(low: str) -> str:
    nvjet = re.match(r"nvjet(?:_sm\d+)?_([a-z])[a-z]{2}_", low)
    if nvjet:
        return _NVJET_DTYPES.get(nvjet[1], "")
    return next((dtype for dtype, pattern in _DTYPES if re.search(pattern, low)), "")
