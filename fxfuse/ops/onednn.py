"""oneDNN's linear with its post-operations, on the user's own, unpacked weights.

`torch.ops.mkldnn._linear_pointwise(x, weight, bias, attr, scalars, algorithm)` computes attr(linear(x, weight, bias))
and its `.binary(x, other, weight, bias, "mul")` overload linear(x, weight, bias) * other, both while the product is
still in registers or cache. They have no derivative, are missing from some builds, and check little: `takes` does.
"""

import torch
from torch import Tensor
from torch._C import _get_fp32_precision_getter, _get_mkldnn_enabled

from fxfuse.ops.activations import ACTIVATIONS

AVAILABLE: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

if AVAILABLE:
    # An overload's __call__ only forwards to `_op`, at 0.5 us a call.
    pointwise = torch.ops.mkldnn._linear_pointwise.default._op
    binary = torch.ops.mkldnn._linear_pointwise.binary._op

POST_OPS: dict[str, tuple[str, tuple[float, ...], str]] = {
    "gelu": ("gelu", (), "none"),
    "gelu_tanh": ("gelu", (), "tanh"),
    "silu": ("swish", (), ""),
    "sigmoid": ("sigmoid", (), ""),
    "tanh": ("tanh", (), ""),
    "leaky_relu": ("leaky_relu", ACTIVATIONS["leaky_relu"].defaults, ""),
}
"""activation -> (attr, default scalars, algorithm) of the post-operation that agrees with eager, NaN and inf included.

Left out, tried on torch 2.13: relu and hardsigmoid make a number of NaN; hardswish stays finite where eager's product
overflows; swish has no scale for quick-gelu; elu, softplus and mish are refused as undefined.
"""


def _least_work() -> dict[torch.dtype, tuple[int, int]]:
    """dtype -> (N * K, M * N * K) from which oneDNN is taken; dtypes that this build and CPU lack are left out.

    float32: eager is MKL, which has less to set up: about 3 us a call against 20. On two cores of an AMD EPYC with
    AVX-512, torch 2.13, no activation (benchmarks/ops_crossover.py, but the tenth percentile, since others used the
    machine), oneDNN was 0.2 to 1.1 times as fast as eager under 2**23 multiplications, 0.9 to 1.4 times up to 2**24
    and 1.0 to 1.5 times above, but under 1 for weights of 64 x 128 even there; weights of a million elements and more
    gave 1.0 to 3 times at any M. With an activation it gains earlier; in between, eager is kept. MKL is better on
    Intel's own CPUs, where these bounds may be too low.

    bfloat16, float16: eager's product is oneDNN's own kernel from 16**3 multiplications on. Below, eager's plain loop
    is five times faster (4 us against 20).
    """
    if not AVAILABLE:
        return {}
    least = {torch.float32: (128 * 128, 2**24)}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        least[torch.bfloat16] = (1, 16**3 + 1)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        least[torch.float16] = (1, 16**3 + 1)
    return least


_LEAST_WORK = _least_work()
_ALWAYS = 1024 * 1024


def may_gain(dtype: torch.dtype, n: int, k: int, *, fused: bool) -> bool:
    """True if oneDNN can beat eager at some M for a weight [N, K]: worth a call of ours, which costs 2 us, at all.

    `fused`: with an activation or a product in the epilogue; a plain linear can gain in float32 only.
    """
    least = _LEAST_WORK.get(dtype)
    return least is not None and n * k >= least[0] and (fused or dtype is torch.float32)


# What oneDNN refuses (operands of other devices or dtypes, sparse and nested ones, sizes that do not fit), eager serves
# or says what is wrong with it. So `takes` need not ask for that.
REFUSALS = (RuntimeError, IndexError)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if linear(x, weight, bias) may go to oneDNN: what it does not refuse, it computes rightly and fast enough.

    This runs at every call, beside products of 100 us: each question here costs 0.05 us, and several times that when
    the weights have just swept the caches. May raise one of REFUSALS, which means no.
    """
    dtype = x.dtype
    least = _LEAST_WORK.get(dtype)
    shape = weight.shape
    if least is None or len(shape) != 2:
        return False
    n, k = shape
    size = n * k
    if size < least[0] or (size < _ALWAYS and x.numel() * n < least[1]):
        return False
    if not (x.is_cpu and _get_mkldnn_enabled() and fits(weight, bias, dtype, n)):
        return False
    # Where the user allows less than fp32, eager decides by its own sizes whether to make use of it.
    return dtype is not torch.float32 or _get_fp32_precision_getter("mkldnn", "matmul") in ("none", "ieee")


def fits(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, n: int) -> bool:
    """The part of `takes` that looks at the strides of a weight [N, K] and at its bias."""
    # Weights of other strides are computed by oneDNN's reference kernel, hundreds of times slower than eager.
    if not weight.is_contiguous() and weight.stride() != (1, n):
        return False
    # A bias is read as N adjacent numbers whatever its strides say, one without dimensions or on "meta" too. Only a
    # float32 one is let in beside another dtype, where eager refuses it.
    return bias is None or (bias.stride() == (1,) and bias.is_cpu and (dtype is torch.float32 or bias.dtype is dtype))
