"""linear and gated linear with their epilogue in Triton, for every GPU that Triton serves and however operands lie.

Imported by portable.py, where there is a Triton.
"""

import triton
import triton.language as tl


@triton.jit
def identity(v, a0, a1):
    return v


@triton.jit
def relu(v, a0, a1):
    return tl.where(v < 0, 0.0, v)  # lets NaN through, as max would not


@triton.jit
def relu2(v, a0, a1):
    v = tl.where(v < 0, 0.0, v)
    return v * v


@triton.jit
def leaky_relu(v, a0, a1):
    return tl.where(v > 0, v, a0 * v)


@triton.jit
def sigmoid(v, a0, a1):
    return tl.sigmoid(v)


@triton.jit
def silu(v, a0, a1):
    return v * tl.sigmoid(v)


@triton.jit
def quick_gelu(v, a0, a1):
    return v * tl.sigmoid(a0 * v)


@triton.jit
def tanh(v, a0, a1):
    return 2 * tl.sigmoid(2 * v) - 1


@triton.jit
def gelu_tanh(v, a0, a1):
    return v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))


@triton.jit
def gelu(v, a0, a1):
    return 0.5 * v * (1 + tl.math.erf(v * 0.7071067811865476))


@triton.jit
def elu(v, a0, a1):
    return tl.where(v > 0, v, a0 * (tl.exp(v) - 1))


@triton.jit
def to_six(v):
    v = tl.where(v < 0, 0.0, v)
    return tl.where(v > 6, 6.0, v)


@triton.jit
def hardswish(v, a0, a1):
    return v * to_six(v + 3) * 0.16666666666666666


@triton.jit
def hardsigmoid(v, a0, a1):
    return to_six(v + 3) * 0.16666666666666666


@triton.jit
def softplus(v, a0, a1):
    return tl.where(a0 * v > a1, v, tl.log(1 + tl.exp(a0 * v)) / a0)


@triton.jit
def mish(v, a0, a1):
    e = tl.exp(tl.where(v > 20, 20.0, v))
    n = e * (e + 2)
    return v * (n / (n + 2))


ACTIVATIONS = {
    "": identity,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "quick_gelu": quick_gelu,
    "relu2": relu2,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "hardswish": hardswish,
    "hardsigmoid": hardsigmoid,
    "softplus": softplus,
    "mish": mish,
}


# M changes from call to call; a kernel of its own for each kind of M would be compiled when it is needed.
@triton.jit(do_not_specialize=["M"])
def fxfuse_linear(
    x,  # [M, K], contiguous
    w0,  # [N, K], step_n and step_k elements between neighbours
    w1,  # likewise; only for GATED
    bias0,  # [N]; only for BIAS
    bias1,
    y,  # [M, N], contiguous
    M,
    N,
    K,
    step_n,
    step_k,
    a0: tl.constexpr,  # of the activation
    a1: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,  # of a product of two float32
    BM: tl.constexpr,  # rows of x, columns of y and columns of x of a tile
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,  # tile rows that are walked before the next tile column, so that they meet in the L2 cache
):
    tile, tile_rows, tile_columns = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = tile // (GROUP * tile_columns)
    height = tl.minimum(tile_rows - group * GROUP, GROUP)
    within = tile % (GROUP * tile_columns)
    row, column = group * GROUP + within % height, within // height

    m, n, k = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    # 64 bits before the products: tensors may have more than 2**31 elements.
    from_x = x + m[:, None].to(tl.int64) * K + k[None, :]
    from_w = k[:, None].to(tl.int64) * step_k + n[None, :].to(tl.int64) * step_n
    in_m, in_n = m[:, None] < M, n[None, :] < N
    sum0, sum1 = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        in_k = k < K - start
        a = tl.load(from_x, mask=in_m & in_k[None, :], other=0.0)
        b0 = tl.load(w0 + from_w, mask=in_n & in_k[:, None], other=0.0)
        sum0 = tl.dot(a, b0, sum0, input_precision=PRECISION)
        if GATED:
            b1 = tl.load(w1 + from_w, mask=in_n & in_k[:, None], other=0.0)
            sum1 = tl.dot(a, b1, sum1, input_precision=PRECISION)
        from_x += BK
        from_w += tl.cast(BK, tl.int64) * step_k
    if BIAS:
        sum0 += tl.load(bias0 + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    result = ACT(sum0, a0, a1)
    if GATED:
        if BIAS:
            sum1 += tl.load(bias1 + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
        result *= sum1
    to = y + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(to, result.to(y.dtype.element_ty), mask=in_m & in_n)
