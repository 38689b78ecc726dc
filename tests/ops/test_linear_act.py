import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxfuse import ops
from fxfuse.ops import ACTIVATIONS, onednn

K, N = 37, 51

INPUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "1-D": lambda d: torch.randn(K, dtype=d),
    "one row": lambda d: torch.randn(1, K, dtype=d),
    "2-D": lambda d: torch.randn(5, K, dtype=d),
    "3-D": lambda d: torch.randn(2, 3, K, dtype=d),
    "4-D": lambda d: torch.randn(2, 1, 3, K, dtype=d),
    "transposed": lambda d: torch.randn(K, 5, dtype=d).t(),
    "strided": lambda d: torch.randn(5, 2 * K, dtype=d)[:, ::2],
    "expanded": lambda d: torch.randn(1, K, dtype=d).expand(5, K),
    "permuted": lambda d: torch.randn(K, 2, 3, dtype=d).permute(1, 2, 0),
}
DENSE_WEIGHTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "[N, K]": lambda d: torch.randn(N, K, dtype=d),
    "[K, N].t()": lambda d: torch.randn(K, N, dtype=d).t(),
}
OTHER_WEIGHTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "every other row": lambda d: torch.randn(2 * N, K, dtype=d)[::2],
    "every other column": lambda d: torch.randn(N, 2 * K, dtype=d)[:, ::2],
    "columns of a wider one": lambda d: torch.randn(N, 2 * K, dtype=d)[:, :K],
    "rows of a transposed one": lambda d: torch.randn(K, 2 * N, dtype=d).t()[:N],
    "expanded": lambda d: torch.randn(1, K, dtype=d).expand(N, K),
}
DENSE_BIASES: dict[str, Callable[[torch.dtype], Tensor | None]] = {
    "[N]": lambda d: torch.randn(N, dtype=d),
    "None": lambda d: None,
}
OTHER_BIASES: dict[str, Callable[[torch.dtype], Tensor | None]] = {
    "strided": lambda d: torch.randn(2 * N, dtype=d)[::2],
    "expanded": lambda d: torch.randn(1, dtype=d).expand(N),
}
WEIGHTS = DENSE_WEIGHTS | OTHER_WEIGHTS
BIASES = DENSE_BIASES | OTHER_BIASES
ARGUMENTS = {"quick_gelu": (1.5,), "leaky_relu": (0.3,), "elu": (0.7,), "softplus": (2.0, 3.0)}

Call = Callable[..., Tensor]


@pytest.fixture(params=[ops.linear_act, torch.ops.fxfuse.linear_act], ids=["door", "operator"])
def linear_act(request: pytest.FixtureRequest) -> Call:
    return request.param


@pytest.fixture(params=[ops.linear, torch.ops.fxfuse.linear], ids=["door", "operator"])
def linear(request: pytest.FixtureRequest) -> Call:
    return request.param


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", ["1-D", "one row", "3-D", "strided"])
def test_every_activation(act, shape, dtype, linear_act, onednn_calls, assert_right):
    x, weight, bias = INPUTS[shape](dtype), torch.randn(N, K, dtype=dtype) / 6, torch.randn(N, dtype=dtype)
    with torch.inference_mode():
        y = linear_act(x, weight, bias, act)
    assert len(onednn_calls) == 1
    assert_right(y, lambda x, w, b: ACTIVATIONS[act].function(F.linear(x, w, b)), x, weight, bias)


@pytest.mark.parametrize("act", ARGUMENTS)
def test_arguments_of_the_activation(act, dtype, linear_act, onednn_calls, assert_right):
    args = ARGUMENTS[act]
    x, weight, bias = torch.randn(5, K, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(N, dtype=dtype)
    with torch.inference_mode():
        y = linear_act(x, weight, bias, act, args)
    assert len(onednn_calls) == 1
    assert_right(y, lambda x, w, b: ACTIVATIONS[act].function(F.linear(x, w, b), *args), x, weight, bias)


@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("weight", DENSE_WEIGHTS)
@pytest.mark.parametrize("bias", DENSE_BIASES)
def test_every_input(shape, weight, bias, dtype, linear, onednn_calls, assert_right):
    x, w, b = INPUTS[shape](dtype), WEIGHTS[weight](dtype), BIASES[bias](dtype)
    with torch.inference_mode():
        y = linear(x, w, b)
    assert onednn_calls == ["none"]
    assert_right(y, lambda x, w, b: F.linear(x, w, b), x, w, b)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("bias", BIASES)
def test_every_weight_and_bias(weight, bias, dtype, linear, onednn_calls, assert_right):
    x, w, b = torch.randn(5, K, dtype=dtype), WEIGHTS[weight](dtype), BIASES[bias](dtype)
    with torch.inference_mode():
        y = linear(x, w, b)
    # oneDNN would compute other weights by its reference kernel, and read other biases wrongly.
    assert onednn_calls == (["none"] if weight in DENSE_WEIGHTS and bias in DENSE_BIASES else [])
    assert_right(y, lambda x, w, b: F.linear(x, w, b), x, w, b)


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K)])
def test_no_rows(shape, dtype, linear_act, onednn_calls):
    with torch.inference_mode():
        y = linear_act(torch.randn(shape, dtype=dtype), torch.randn(N, K, dtype=dtype), None, "relu")
    assert y.shape == (*shape[:-1], N)
    assert y.dtype is dtype
    assert onednn_calls == []


def test_no_rows_for_a_large_weight(dtype, linear):
    weight = torch.zeros(1024, 1024, dtype=dtype)
    with torch.inference_mode():
        assert linear(weight[:0], weight, None).shape == (0, 1024)


def test_no_columns(dtype, linear_act, onednn_calls):
    bias = torch.randn(N, dtype=dtype)
    with torch.inference_mode():
        y = linear_act(torch.randn(2, 0, dtype=dtype), torch.randn(N, 0, dtype=dtype), bias, "relu")
    assert torch.equal(y, F.relu(bias).expand(2, N))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_are_eagers(dtype, linear_act):
    x, weight, bias = (torch.randn(s, dtype=torch.float64).to(dtype) for s in ((5, K), (N, K), (N,)))
    if dtype in onednn._LEAST_WORK:
        pytest.skip(f"oneDNN has {dtype} here")
    with torch.inference_mode():
        assert torch.equal(linear_act(x, weight, bias, "gelu"), F.gelu(F.linear(x, weight, bias)))


SPECIAL = [
    math.nan,
    math.inf,
    -math.inf,
    3e38,
    -3e38,
    1e38,
    -1e38,
    1e30,
    -1e30,
    1e20,
    -1e13,
    1e13,
    0.0,
    -0.0,
    1.0,
    -1.0,
]


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("columns", [len(SPECIAL), 129, 3072])
@pytest.mark.parametrize("transposed", [False, True], ids=["[N, K]", "[K, N]"])
@pytest.mark.parametrize("where_from", ["bias", "weight"])
def test_nan_and_inf_stand_where_eager_has_them(
    act, rows, columns, transposed, where_from, dtype, linear_act, onednn_calls
):
    special = torch.tensor(SPECIAL, dtype=torch.float64).repeat(columns // len(SPECIAL) + 1)[:columns].to(dtype)
    x, weight, bias = torch.zeros(rows, K, dtype=dtype), torch.zeros(columns, K, dtype=dtype), None
    if where_from == "weight":
        x[:, 0], weight[:, 0] = 1.0, special
    else:
        bias = special
    if transposed:
        weight = weight.t().contiguous().t()
    with torch.inference_mode():
        y, e = ops.linear_act(x, weight, bias, act), ACTIVATIONS[act].function(F.linear(x, weight, bias))
    assert len(onednn_calls) == 1
    for where in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(where(y), where(e)), (where.__name__, special[(where(y) != where(e)).any(0)])


def test_inf_and_nan_in_x(dtype, linear, onednn_calls):
    x, weight = torch.randn(4, K).to(dtype), torch.randn(N, K).to(dtype)
    x[1, 3], x[2, 5] = math.inf, math.nan
    with torch.inference_mode():
        y, e = linear(x, weight, None), F.linear(x, weight)
    assert onednn_calls == ["none"]
    for where in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(where(y), where(e))


WRONG: dict[str, Callable[[], tuple[Any, ...]]] = {
    "x has other columns": lambda: (torch.randn(5, K + 1), torch.randn(N, K), None),
    "x is 0-d": lambda: (torch.tensor(1.0), torch.randn(N, K), None),
    "bias of one": lambda: (torch.randn(5, K), torch.randn(N, K), torch.randn(2)),
    "bias is too long": lambda: (torch.randn(5, K), torch.randn(N, K), torch.randn(N + 1)),
    "bias is another dtype": lambda: (torch.randn(5, K), torch.randn(N, K), torch.randn(N).bfloat16()),
    "float32 bias in bfloat16": lambda: (torch.randn(5, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N)),
    "weight is another dtype": lambda: (torch.randn(5, K), torch.randn(N, K).bfloat16(), None),
    "x is integers": lambda: (torch.ones(5, K, dtype=torch.long), torch.randn(N, K), None),
    "weight is 3-D": lambda: (torch.randn(5, K), torch.randn(2, N, K), torch.randn(N)),
    "bias is on meta": lambda: (torch.randn(5, K), torch.randn(N, K), torch.randn(N, device="meta")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_eagers(wrong, linear, onednn_calls):
    x, weight, bias = WRONG[wrong]()
    with torch.inference_mode():
        with pytest.raises(RuntimeError) as eager:
            F.linear(x, weight, bias)
        with pytest.raises(RuntimeError) as ours:
            linear(x, weight, bias)
    assert str(ours.value) == str(eager.value)


@pytest.mark.parametrize(
    "arguments", [(None, torch.randn(N, K)), (torch.randn(5, K), None), ([1.0], torch.randn(1, 1))]
)
def test_what_is_no_tensor_is_a_type_error(arguments):
    with pytest.raises(TypeError):
        F.linear(*arguments)
    with pytest.raises(TypeError):
        ops.linear(*arguments)


@pytest.mark.parametrize(
    "bias", [torch.randn(()), torch.randn(1, N), torch.randn(5, N), torch.randn(1)], ids=lambda b: str(b.shape)
)
def test_biases_that_eager_broadcasts(bias, linear, onednn_calls, assert_right):
    x, weight = torch.randn(5, K), torch.randn(N, K)
    with torch.inference_mode():
        y = linear(x, weight, bias)
    assert_right(y, lambda x, w, b: F.linear(x, w, b), x, weight, bias)


def test_a_weight_of_one_dimension(linear, onednn_calls):
    x, weight = torch.randn(5, K), torch.randn(K)
    with torch.inference_mode():
        assert torch.equal(linear(x, weight, None), F.linear(x, weight))
    assert onednn_calls == []


def test_an_unknown_activation_is_named(linear_act):
    with pytest.raises(ValueError, match="unknown activation 'gleu'; known are relu, gelu"):
        linear_act(torch.randn(2, K), torch.randn(N, K), None, "gleu")


def test_sparse_and_nested_inputs_are_eagers(onednn_calls):
    weight = torch.randn(N, K)
    sparse = torch.eye(K).to_sparse()
    nested = torch.nested.nested_tensor([torch.randn(2, K), torch.randn(3, K)])
    with torch.no_grad():
        assert torch.equal(ops.linear(sparse, weight), F.linear(sparse, weight))
        for got, expected in zip(ops.linear(nested, weight).unbind(), F.linear(nested, weight).unbind(), strict=True):
            assert torch.equal(got, expected)
    assert onednn_calls == []


def test_onednn_can_be_switched_off(onednn_calls):
    x, weight = torch.randn(5, K), torch.randn(N, K)
    with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(ops.linear(x, weight), F.linear(x, weight))
    assert onednn_calls == []


def test_a_lower_fp32_precision_is_left_to_eager(onednn_calls):
    x, weight = torch.randn(5, K), torch.randn(N, K)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with torch.inference_mode():
            assert torch.equal(ops.linear(x, weight), F.linear(x, weight))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert onednn_calls == []


def test_small_products_are_eagers():
    x, weight, bias = torch.randn(16, 64), torch.randn(64, 64), torch.randn(64)
    assert onednn.Weight().way(x, weight, bias) is None
    assert not onednn.Weight().way(x[:1].bfloat16(), weight.bfloat16(), bias.bfloat16())


def test_large_products_are_onednns():
    x, weight, bias = torch.randn(1, 768), torch.randn(3072, 768), torch.randn(3072)
    assert (onednn.Weight().way(x, weight, bias) is not None) == (torch.float32 in onednn._LEAST_WORK)


def test_the_input_is_not_written_to(dtype, linear_act):
    x, weight, bias = torch.randn(5, K, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(N, dtype=dtype)
    before = [t.clone() for t in (x, weight, bias)]
    for act in ACTIVATIONS:
        with torch.inference_mode():
            linear_act(x, weight, bias, act)
    assert all(torch.equal(now, then) for now, then in zip((x, weight, bias), before, strict=True))


@pytest.mark.parametrize("epilogue", [False, True])
def test_a_weight_that_cannot_gain_is_never_taken(epilogue):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for n, k in ((64, 64), (128, 128), (3072, 768)):
            if not onednn.may_gain(dtype, n, k, epilogue=True):
                assert not onednn.Weight().way(
                    torch.empty(1 << 14, k, dtype=dtype), torch.empty(n, k, dtype=dtype), None
                )
    assert not onednn.may_gain(torch.float64, 3072, 768, epilogue=epilogue)
    assert not onednn.may_gain(torch.float32, 64, 64, epilogue=epilogue)
    assert onednn.may_gain(torch.float32, 3072, 768, epilogue=epilogue) == (torch.float32 in onednn._LEAST_WORK)
    assert onednn.may_gain(torch.bfloat16, 64, 64, epilogue=epilogue) == (
        epilogue and torch.bfloat16 in onednn._LEAST_WORK
    )


def test_leaky_relu_without_a_slope_keeps_nan(linear_act):
    x, w = torch.randn(512, 256), torch.randn(256, 256)
    x[3, 4] = float("nan")
    with torch.no_grad():
        assert torch.equal(
            linear_act(x, w, None, "leaky_relu", (0.0,)).isnan(), F.leaky_relu(F.linear(x, w), 0.0).isnan()
        )
