from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxfuse import ops
from fxfuse.ops import ACTIVATIONS, LAYOUTS

K, H = 37, 51

Call = Callable[..., Tensor]


@pytest.fixture(params=[ops.gated_linear, torch.ops.fxfuse.gated_linear], ids=["door", "operator"])
def gated_linear(request: pytest.FixtureRequest) -> Call:
    return request.param


@pytest.fixture(params=[ops.gated_linear_packed, torch.ops.fxfuse.gated_linear_packed], ids=["door", "operator"])
def gated_linear_packed(request: pytest.FixtureRequest) -> Call:
    return request.param


def halves(h: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Gate and up, as models take them apart."""
    first, second = (h[..., ::2], h[..., 1::2]) if layout.endswith("strided") else h.chunk(2, dim=-1)
    return (second, first) if layout.startswith("up") else (first, second)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(K,), (2, 3, K)], ids=str)
@pytest.mark.parametrize("biases", ["both", "gate"])
def test_two_weights(act, shape, biases, dtype, gated_linear, onednn_calls, assert_right):
    x, gate, up = (torch.randn(s, dtype=dtype) for s in (shape, (H, K), (H, K)))
    gate_bias = None if biases == "none" else torch.randn(H, dtype=dtype)
    up_bias = torch.randn(H, dtype=dtype) if biases == "both" else None
    with torch.inference_mode():
        y = gated_linear(x, gate, gate_bias, up, up_bias, act)
    assert len(onednn_calls) == 2
    assert onednn_calls[1] == "mul"

    def plain(x, gate, gate_bias, up, up_bias):
        return ACTIVATIONS[act].function(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)

    assert_right(y, plain, x, gate, gate_bias, up, up_bias)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", ["gelu", "silu", "relu", "quick_gelu"])
@pytest.mark.parametrize("transposed", [False, True], ids=["[2H, K]", "[K, 2H].t()"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_one_packed_weight(layout, act, transposed, with_bias, dtype, gated_linear_packed, onednn_calls, assert_right):
    x = torch.randn(2, 3, K, dtype=dtype)
    weight = torch.randn(K, 2 * H, dtype=dtype).t() if transposed else torch.randn(2 * H, K, dtype=dtype)
    bias = torch.randn(2 * H, dtype=dtype) if with_bias else None
    with torch.inference_mode():
        y = gated_linear_packed(x, weight, bias, act, (), layout)
    # Halves of the rows are dense only in a contiguous weight: elsewhere one product, then its halves.
    assert len(onednn_calls) == (1 if transposed or layout.endswith("strided") else 2)

    def plain(x, weight, bias):
        gate, up = halves(F.linear(x, weight, bias), layout)
        return ACTIVATIONS[act].function(gate) * up

    assert_right(y, plain, x, weight, bias)


def test_arguments_of_the_activation(dtype, gated_linear, gated_linear_packed, onednn_calls, assert_right):
    x, weight = torch.randn(5, K, dtype=dtype), torch.randn(2 * H, K, dtype=dtype)

    def plain(x, weight):
        gate, up = halves(F.linear(x, weight), "gate_up")
        return F.leaky_relu(gate, 0.3) * up

    with torch.inference_mode():
        for y in (
            gated_linear(x, weight[:H], None, weight[H:], None, "leaky_relu", (0.3,)),
            gated_linear_packed(x, weight, None, "leaky_relu", (0.3,), "gate_up"),
        ):
            assert_right(y, plain, x, weight)
    assert onednn_calls == ["leaky_relu", "mul"] * 2


@pytest.mark.parametrize(("gate_rows", "up_rows"), [(1, H), (H, 1)])
def test_a_gate_that_broadcasts(gate_rows, up_rows, gated_linear, onednn_calls, assert_right):
    x, gate, up = torch.randn(5, K), torch.randn(gate_rows, K), torch.randn(up_rows, K)
    with torch.inference_mode():
        y = gated_linear(x, gate, None, up, None, "silu")
    assert_right(y, lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), x, gate, up)


def test_a_second_weight_that_onednn_does_not_take(gated_linear, onednn_calls, assert_right):
    x, gate, up = torch.randn(5, K), torch.randn(H, K), torch.randn(2 * H, K)[::2]
    with torch.inference_mode():
        y = gated_linear(x, gate, None, up, None, "silu")
    assert onednn_calls == ["swish"]
    assert_right(y, lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), x, gate, up)


def test_a_strided_packed_bias(gated_linear_packed, onednn_calls, assert_right):
    x, weight, bias = torch.randn(5, K), torch.randn(2 * H, K), torch.randn(4 * H)[::2]
    for layout in LAYOUTS:
        with torch.inference_mode():
            y = gated_linear_packed(x, weight, bias, "silu", (), layout)

        def plain(x, weight, bias, layout=layout):
            gate, up = halves(F.linear(x, weight, bias), layout)
            return F.silu(gate) * up

        assert_right(y, plain, x, weight, bias)


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K)])
def test_no_rows(shape, dtype, gated_linear, gated_linear_packed):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(2 * H, K, dtype=dtype)
    with torch.inference_mode():
        for y in (
            gated_linear(x, weight[:H], None, weight[H:], None, "gelu"),
            gated_linear_packed(x, weight, None, "gelu", (), "gate_up"),
        ):
            assert y.shape == (*shape[:-1], H)
            assert y.dtype is dtype


def test_errors_are_eagers(gated_linear, onednn_calls):
    x, gate, up = torch.randn(5, K), torch.randn(H, K), torch.randn(H - 2, K)
    with pytest.raises(RuntimeError) as eager:
        F.silu(F.linear(x, gate)) * F.linear(x, up)
    with torch.inference_mode(), pytest.raises(RuntimeError) as ours:
        gated_linear(x, gate, None, up, None, "silu")
    assert str(ours.value) == str(eager.value)


def test_an_odd_packed_weight_is_refused(gated_linear_packed):
    for layout in LAYOUTS:
        with torch.inference_mode(), pytest.raises(RuntimeError):
            gated_linear_packed(torch.randn(5, K), torch.randn(2 * H + 1, K), None, "silu", (), layout)


def test_an_unknown_layout_is_named(gated_linear_packed):
    with pytest.raises(ValueError, match="unknown layout 'interleaved'; known are gate_up"):
        gated_linear_packed(torch.randn(2, K), torch.randn(2 * H, K), None, "silu", (), "interleaved")
