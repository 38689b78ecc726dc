"""The logic of the Triton kernel, by Triton's interpreter: without a GPU. test_portable.py runs this file."""

import math

import pytest
import torch
import torch.nn.functional as F

from fxfuse.ops.activations import ACTIVATIONS
from fxfuse.ops.gpu import portable
from fxfuse.ops.gpu.source import Epilogue, lies


def run(act, args, *, gated, x, w0, w1, b0, b1, name="triton64"):
    epilogue = Epilogue(act, args, gated, b0 is not None, x.dtype)
    launch = portable.Launch(epilogue, name, lies(w0), *w0.shape, "cpu")
    y = torch.full((x.shape[0], w0.shape[0]), math.nan, dtype=x.dtype)
    assert launch(x, x.shape[0], w0, w1, b0, b1, y)
    return y


def apply(act, args, h):
    return ACTIVATIONS[act].function(h, *args) if act else h


def plain(act, args, gated):
    def function(x, w0, w1, b0, b1):
        y = apply(act, args, F.linear(x, w0, b0))
        return y * F.linear(x, w1, b1) if gated else y

    return function


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act", ["", *ACTIVATIONS])
def test_every_activation(act, gated, assert_right):
    args = ACTIVATIONS[act].defaults if act else ()
    tensors = torch.randn(70, 40), torch.randn(66, 40), torch.randn(66, 40), torch.randn(66), torch.randn(66)
    names = dict(zip(("x", "w0", "w1", "b0", "b1"), tensors, strict=True))
    y = run(act, args, gated=gated, **names if gated else {**names, "w1": names["w0"], "b1": None})
    assert_right(y, plain(act, args, gated), *tensors)


@pytest.mark.parametrize("name", portable.TILES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (129, 5, 33), (64, 128, 32), (200, 130, 70)])
def test_sizes_that_no_tile_divides(name, bias, m, n, k, assert_right):
    x, w0, w1 = torch.randn(m, k), torch.randn(n, k), torch.randn(n, k)
    b0, b1 = (torch.randn(n), torch.randn(n)) if bias else (None, None)
    y = run("silu", (), gated=True, x=x, w0=w0, w1=w1, b0=b0, b1=b1, name=name)
    assert_right(y, plain("silu", (), True), x, w0, w1, b0, b1)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(40, 24).t(),
        torch.randn(48, 40)[::2],
        torch.randn(24, 80)[:, :40],
        torch.randn(40, 48).t()[24:],
    ],
    ids=["transposed", "even rows", "columns of a wider one", "half of a transposed one"],
)
def test_weights_are_read_where_they_lie(weight, assert_right):
    x, bias = torch.randn(33, 40), torch.randn(24)
    weight = weight if weight.data_ptr() % 16 == 0 else weight.clone()
    y = run("relu", (), gated=False, x=x, w0=weight, w1=weight, b0=bias, b1=None)
    assert_right(y, lambda x, w, b: F.relu(F.linear(x, w, b)), x, weight, bias)


@pytest.mark.parametrize("act", ["", *ACTIVATIONS])
def test_nan_and_inf_stand_where_eager_has_them(act):
    special = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 3e38, -3e38, 0.0])
    x, weight, args = torch.zeros(2, 8), torch.zeros(8, 8), ACTIVATIONS[act].defaults if act else ()
    y = run(act, args, gated=False, x=x, w0=weight, w1=weight, b0=special, b1=None)
    # Eager's erf-gelu makes NaN of inf on the CPU, and inf of 3e38; on a GPU it is this:
    e = 0.5 * special * (1 + torch.erf(special / 2**0.5)) if act == "gelu" else apply(act, args, special)
    e = e.expand(2, 8)
    for where in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(where(y), where(e)), where.__name__


def test_sixteen_bits(assert_right):  # the interpreter multiplies no bfloat16
    x, weight, bias = (torch.randn(s, dtype=torch.float16) for s in ((20, 40), (24, 40), (24,)))
    y = run("gelu", (), gated=False, x=x, w0=weight, w1=weight, b0=bias, b1=None)
    assert_right(y, lambda x, w, b: F.gelu(F.linear(x, w, b)), x, weight, bias)


def test_operands_that_are_not_aligned_are_left_alone():
    x, weight = torch.randn(5 * 8 + 1)[1:].view(5, 8), torch.randn(8, 8)
    launch = portable.Launch(Epilogue("relu", (), False, False, torch.float32), "triton64", lies(weight), 8, 8, "cpu")
    assert not launch(x, 5, weight, weight, None, None, torch.empty(5, 8))
