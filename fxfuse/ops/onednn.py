"""oneDNN's linear with its post-operations, on the user's own, unpacked weights.

`torch.ops.mkldnn._linear_pointwise(x, weight, bias, attr, scalars, algorithm)` computes attr(linear(x, weight, bias))
and its `.binary(x, other, weight, bias, "mul")` overload linear(x, weight, bias) * other, both while the product is
still in registers or cache. They have no derivative, are missing from some builds, and check little: `can` does.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C import _get_fp32_precision_getter, _get_mkldnn_enabled

from fxfuse import choose
from fxfuse.ops.activations import ACTIVATIONS

AVAILABLE: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

if AVAILABLE:
    # An overload's __call__ only forwards to `_op`, at 0.5 us a call.
    pointwise = torch.ops.mkldnn._linear_pointwise.default._op
    binary = torch.ops.mkldnn._linear_pointwise.binary._op

PostOp = tuple[str, Sequence[float], str]
"""attr, scalars, algorithm."""
NO_POST_OP: PostOp = ("none", (), "")
_UNKNOWN: PostOp = ("", (), "")

POST_OPS: dict[str, PostOp] = {
    "gelu": ("gelu", (), "none"),
    "gelu_tanh": ("gelu", (), "tanh"),
    "silu": ("swish", (), ""),
    "sigmoid": ("sigmoid", (), ""),
    "tanh": ("tanh", (), ""),
    "leaky_relu": ("leaky_relu", ACTIVATIONS["leaky_relu"].defaults, ""),
}
"""activation -> the post-operation that agrees with eager, NaN and inf included, with its default scalars.

Left out, tried on torch 2.13: relu and hardsigmoid make a number of NaN; hardswish stays finite where eager's product
overflows; swish has no scale for quick-gelu; elu, softplus and mish are refused as undefined.
"""


def post_op(act: str, act_args: Sequence[float], *, row_kernel: bool) -> PostOp:
    """The post-operation that computes `act` as eager does; else NO_POST_OP.

    `row_kernel`: the product is one fp32 row with a contiguous weight, for which oneDNN has a kernel of its own.
    """
    found = POST_OPS.get(act)
    # That kernel's erf-gelu has inf and 3e38 where eager has NaN and inf.
    if found is None or (act == "gelu" and row_kernel):
        return NO_POST_OP
    # With a slope of 0 it makes a number of NaN.
    if act == "leaky_relu" and act_args and act_args[0] == 0:
        return NO_POST_OP
    attr, scalars, algorithm = found
    return attr, act_args or scalars, algorithm


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


def may_gain(dtype: torch.dtype, n: int, k: int, *, epilogue: bool) -> bool:
    """True if oneDNN can beat eager at some M for a weight [N, K]: worth a call of ours, which costs 2 us, at all.

    `epilogue`: there is an activation, a product or a bias to add. In 16 bits eager's bare product is oneDNN's own, but
    a bias is written into the output first and read back: with it, oneDNN was 1.0 to 1.35 times as fast from 16**3
    multiplications on (the machine of `_least_work`), most where the product is small; without it, 0.97 to 1.13 times.
    """
    least = _LEAST_WORK.get(dtype)
    return least is not None and n * k >= least[0] and (epilogue or dtype is torch.float32)


# What oneDNN refuses (operands of other devices or dtypes, sparse and nested ones, sizes that do not fit), eager serves
# or says what is wrong with it. So `can` need not ask for that.
REFUSALS = (RuntimeError, IndexError)


def has(dtype: torch.dtype) -> bool:
    """True if this build and CPU have products of this dtype."""
    return dtype in _LEAST_WORK


def pays(dtype: torch.dtype, n: int, k: int, rows: int) -> bool:
    """True if oneDNN is expected to be as fast as eager at a product of `rows` rows with a weight [N, K]."""
    least = _LEAST_WORK.get(dtype)
    size = n * k
    return least is not None and size >= least[0] and (size >= _ALWAYS or rows * size >= least[1])


def can(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if oneDNN computes linear(x, weight, bias) rightly, and without its slow reference kernel, or refuses it.

    May raise one of REFUSALS, which means no.
    """
    if weight.dim() != 2 or not x.is_cpu or not is_on(x.dtype):
        return False
    # Weights of other strides are computed by oneDNN's reference kernel, hundreds of times slower than eager.
    if not weight.is_contiguous() and weight.stride() != (1, weight.shape[0]):
        return False
    # A bias is read as N adjacent numbers whatever its shape and strides say, one on "meta" too. Only a float32 one is
    # let in beside another dtype, where eager refuses it.
    return bias is None or (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.shape[0] == weight.shape[0]
        and bias.is_cpu
        and bias.dtype is x.dtype
    )


_FULL_PRECISION = ("none", "ieee")


def is_on(dtype: torch.dtype) -> bool:
    """True if the user's settings leave linears of this dtype to oneDNN."""
    # Where the user allows less than fp32, eager decides by its own sizes whether to make use of it.
    return _get_mkldnn_enabled() and (
        dtype is not torch.float32 or _get_fp32_precision_getter("mkldnn", "matmul") in _FULL_PRECISION
    )


Known = tuple[torch.dtype | None, tuple[int, ...] | None, int, dict[int, PostOp | None]]
"""x's dtype, the weight's strides (None: contiguous), its columns; by rows.bit_length() what `Weight.way` answers."""


class Weight:
    """What is known of the weight at one place of a region, so that a call need not ask again.

    Beside a product of 100 us, whose weight has just swept the caches, each question to a tensor counts. A region asks
    for types, dtypes and shapes at each call; what may change without its noticing is asked here.
    """

    __slots__ = ("act", "act_args", "known", "only", "op", "parts")
    choices: tuple[str, ...] = (choose.PLAIN, choose.ONEDNN)
    """Implementations among which measured choices are made."""

    def __init__(
        self,
        act: str = "",
        act_args: Sequence[float] = (),
        *,
        op: str = "linear",
        parts: int = 1,
        only: str | None = None,
    ):
        """
        Args:
            act: the activation that follows the product, "" for none.
            op: the operator that the product belongs to, as ``choose.Key`` has it.
            parts: into how many products of equal size the operator divides this one for oneDNN.
            only: the implementation to take, whatever was measured.
        """
        self.act, self.act_args, self.op, self.parts, self.only = act, act_args, op, parts, only
        self.known: Known = (None, None, 1, {})

    def way(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> PostOp | None:
        """The post-operation with which oneDNN is to compute linear(x, weight, bias); None: eager is to compute it.

        NO_POST_OP where an activation follows: it is to be applied to the product. May raise one of REFUSALS.
        """
        dtype, strides, columns, ways = self.known
        if (
            x.dtype is dtype
            and (weight.is_contiguous() if strides is None else weight.stride() == strides)
            and (bias is None or bias.is_contiguous())
            # is_on(dtype) without a call of it
            and _get_mkldnn_enabled()
            and (dtype is not torch.float32 or _get_fp32_precision_getter("mkldnn", "matmul") in _FULL_PRECISION)
        ):
            way = ways.get((x.numel() // columns).bit_length(), _UNKNOWN)
            if way is not _UNKNOWN:
                return way
        return self._found_out(x, weight, bias)

    def _found_out(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> PostOp | None:
        if not can(x, weight, bias) or not weight.numel():
            return None
        k = weight.shape[1]
        bucket = (x.numel() // k).bit_length()
        # The least of the bucket: eager where in doubt.
        rows = choose.least_rows(bucket)
        strides = None if weight.is_contiguous() else weight.stride()
        way = None
        if self._implementation(x, weight, bias, rows) != choose.PLAIN:
            row_kernel = rows == 1 and x.dtype is torch.float32 and strides is None
            way = post_op(self.act, self.act_args, row_kernel=row_kernel) if self.act else NO_POST_OP
        before = self.known
        ways = before[3] if before[:3] == (x.dtype, strides, k) else {}
        self.known = (x.dtype, strides, k, {**ways, bucket: way})
        return way

    def _implementation(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> str:
        """The name of the implementation for a bucket of rows: the one asked for, else measured, else expected best."""
        if self.only is not None:
            return self.only
        measured = choose.CHOICES.get(self.key(x, weight, bias)) if choose.CHOICES.any() else None
        if measured is not None:
            return measured.among(self.allowed())
        return self.expected(x, weight, rows)

    def expected(self, x: Tensor, weight: Tensor, rows: int) -> str:
        """The implementation for a bucket of rows where nothing was measured; ``rows``: the least of it."""
        n, k = weight.shape
        return choose.ONEDNN if pays(x.dtype, n // self.parts, k, rows) else choose.PLAIN

    def allowed(self) -> tuple[str, ...]:
        return self.choices

    def key(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> choose.Key:
        """What a choice for this call is kept by."""
        n, k = weight.shape
        return choose.Key(
            choose.device_name("cpu"),
            self.op,
            x.dtype,
            n,
            k,
            not weight.is_contiguous(),
            bias is not None,
            (x.numel() // k).bit_length(),
        )


Weights = Callable[..., Weight]
"""A class of weights, or one with some of its arguments given."""
