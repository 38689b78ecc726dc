"""torch.ops.fxfuse.*: derivatives, transforms, compilers and exporters meet ordinary operators."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fxfuse import ops
from fxfuse.ops import ACTIVATIONS

K, N = 6, 8

OPERATORS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, w, b: torch.ops.fxfuse.linear(x, w, b),
    "linear_act": lambda x, w, b: torch.ops.fxfuse.linear_act(x, w, b, "gelu_tanh"),
    "gated_linear": lambda x, w, b: torch.ops.fxfuse.gated_linear(x, w, b, w * 2, None, "silu"),
    "gated_linear_packed": lambda x, w, b: torch.ops.fxfuse.gated_linear_packed(x, w, b, "gelu", [], "gate_up_strided"),
}
DOORS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, w, b: ops.linear(x, w, b),
    "linear_act": lambda x, w, b: ops.linear_act(x, w, b, "gelu_tanh"),
    "gated_linear": lambda x, w, b: ops.gated_linear(x, w, b, w * 2, None, "silu"),
    "gated_linear_packed": lambda x, w, b: ops.gated_linear_packed(x, w, b, "gelu", (), "gate_up_strided"),
}
EAGER: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear_act": lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
    "gated_linear": lambda x, w, b: F.silu(F.linear(x, w, b)) * F.linear(x, w * 2),
    "gated_linear_packed": lambda x, w, b: F.gelu(F.linear(x, w, b)[..., ::2]) * F.linear(x, w, b)[..., 1::2],
}

Call = Callable[..., Tensor]


@pytest.fixture(params=OPERATORS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[OPERATORS, DOORS], ids=["operator", "door"])
def ours(request: pytest.FixtureRequest, name: str) -> Call:
    return request.param[name]


@pytest.fixture
def eager(name: str) -> Call:
    return EAGER[name]


def operands(dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = torch.randn(3, K, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(N, dtype=dtype)
    return x.requires_grad_(requires_grad), weight.requires_grad_(requires_grad), bias.requires_grad_(requires_grad)


def test_gradients(ours, eager):
    tensors = operands(requires_grad=True)
    for y, e in zip(
        torch.autograd.grad(ours(*tensors).square().sum(), tensors),
        torch.autograd.grad(eager(*tensors).square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(y, e)


def test_derivatives_of_both_orders(ours):
    tensors = operands(requires_grad=True)
    assert torch.autograd.gradcheck(ours, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, tensors)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradients_of_every_activation(act):
    tensors = operands(requires_grad=True)
    y = torch.autograd.grad(ops.linear_act(*tensors, act).sum(), tensors)
    e = torch.autograd.grad(ACTIVATIONS[act].function(F.linear(*tensors)).sum(), tensors)
    for ours, eager in zip(y, e, strict=True):
        assert torch.equal(ours, eager)


@pytest.fixture
def no_loop_over_the_batch() -> Iterator[None]:
    """vmap raises where it would run an operator once for each element of the batch."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def test_transforms(ours, eager, no_loop_over_the_batch):
    x, weight, bias = operands()
    batch = torch.randn(5, N, K, dtype=torch.float64)
    for transformed in (
        lambda f: vmap(f, (None, 0, None))(x, batch, bias),
        lambda f: grad(lambda w: f(x, w, bias).sum())(weight),
        lambda f: vmap(grad(lambda w: f(x, w, bias).sum()))(batch),
        lambda f: hessian(lambda b: f(x, weight, b).square().sum())(bias),
        lambda f: jvp(lambda x: f(x, weight, bias), (x,), (torch.ones_like(x),))[1],
    ):
        torch.testing.assert_close(transformed(ours), transformed(eager))


def test_autocast(ours, eager, onednn_calls):
    tensors = operands(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y, e = ours(*tensors), eager(*tensors)
    assert y.dtype is e.dtype is torch.bfloat16
    torch.testing.assert_close(y, e, rtol=0, atol=0)


def test_flops_are_eagers(ours, eager):
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), FlopCounterMode(display=False) as counted:
            ours(*operands(torch.float32))
        with mode(), FlopCounterMode(display=False) as expected:
            x, w, b = operands(torch.float32)
            eager(x, w, b)
        if eager is EAGER["gated_linear_packed"]:  # eager's lambda spells its one product twice
            assert 2 * counted.get_total_flops() == expected.get_total_flops() > 0
        else:
            assert counted.get_total_flops() == expected.get_total_flops() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(name, dtype, requires_grad):
    x, weight, bias = operands(dtype, requires_grad)
    rest = {
        "linear": (),
        "linear_act": ("leaky_relu", [0.3]),
        "gated_linear": (weight, None, "gelu"),
        "gated_linear_packed": ("silu", [], "up_gate"),
    }[name]
    torch.library.opcheck(getattr(torch.ops.fxfuse, name).default, (x, weight, bias, *rest))


def test_meta(name):
    x, weight, bias = (t.to("meta") for t in operands())
    y = OPERATORS[name](x, weight, bias)
    assert y.device.type == "meta"
    assert y.shape == EAGER[name](x, weight, bias).shape


def test_make_fx_of_the_function_sees_eagers_operators(name):
    with torch.no_grad():
        graph_module = make_fx(DOORS[name])(*operands())
    assert not [node for node in graph_module.graph.nodes if "fxfuse" in str(node.target)]


def test_make_fx_of_the_operator_keeps_it(name):
    with torch.no_grad():
        graph_module = make_fx(OPERATORS[name], tracing_mode="symbolic")(*operands())
    assert getattr(torch.ops.fxfuse, name).default in [node.target for node in graph_module.graph.nodes]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compile(name, backend, requires_grad):
    seen = []

    def looking(graph_module, inputs):
        seen.extend(str(node.target) for node in graph_module.graph.nodes)
        return torch._dynamo.lookup_backend(backend)(graph_module, inputs)

    torch._dynamo.reset()
    tensors, plain = operands(torch.float32, requires_grad), operands(torch.float32)
    compiled = torch.compile(DOORS[name], fullgraph=True, backend=looking)
    y = compiled(*tensors)
    assert f"fxfuse.{name}.default" in seen
    torch.testing.assert_close(y, DOORS[name](*tensors))
    if requires_grad:
        got = torch.autograd.grad(y.sum(), tensors)
        for g, e in zip(got, torch.autograd.grad(EAGER[name](*tensors).sum(), tensors), strict=True):
            torch.testing.assert_close(g, e)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*plain), EAGER[name](*plain))


class Layer(nn.Module):
    def __init__(self, function: Call) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.linear.weight, self.linear.bias)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_holds_eagers_operators_only(name, strict):
    x, _, _ = operands(torch.float32)
    layer = Layer(DOORS[name])
    program = torch.export.export(layer, (x,), strict=strict)
    assert not [node for node in program.graph.nodes if "fxfuse" in str(node.target)]
    torch.testing.assert_close(program.module()(x), EAGER[name](x, layer.linear.weight, layer.linear.bias))


def test_compile_of_a_vmap():
    x, weight, bias = operands(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: vmap(lambda row: ops.linear_act(row, weight, bias, "silu"))(x), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), F.silu(F.linear(x, weight, bias)))


def test_parameters_are_not_held():
    """A weak reference to a parameter makes swapping it impossible."""
    layer = Layer(DOORS["linear_act"])
    with torch.no_grad():
        layer(torch.randn(2, K))
    layer(torch.randn(2, K))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert layer(torch.randn(2, K, dtype=torch.float64)).dtype is torch.float64
