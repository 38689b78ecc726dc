"""The door is open for plain inference alone, and behind it every call still gives eager's answer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxfuse import ops
from fxfuse.ops import door
from fxfuse.ops.linear_act import cpu

X, WEIGHT, BIAS = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)


class Subclass(Tensor):
    pass


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def implementation_calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each call that reaches the implementation."""
    calls: list[None] = []

    def counting(implementation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(*args: object) -> Tensor:
            calls.append(None)
            return implementation(*args)

        return counted

    for name in ("linear", "linear_act"):
        monkeypatch.setattr(cpu, name, counting(getattr(cpu, name)))
    return calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: nn.Parameter(t, requires_grad=False)], ids=["tensor", "parameter"]
)
def test_open_for_plain_inference(mode, wrap, implementation_calls):
    with mode():
        ops.linear_act(X, wrap(WEIGHT), wrap(BIAS), "gelu")
        ops.linear(X, wrap(WEIGHT))
    assert len(implementation_calls) == 2


def test_open_for_parameters_without_grad_mode(implementation_calls):
    weight = nn.Parameter(WEIGHT)
    with torch.no_grad():
        ops.linear(X, weight)
    assert len(implementation_calls) == 1
    ops.linear(X, weight)
    assert len(implementation_calls) == 1


@contextmanager
def _autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


CLOSED = {
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "default device": lambda: torch.device("cpu"),
    "forward AD": forward_ad.dual_level,
    "autocast": _autocast,
}


@pytest.mark.parametrize("how", CLOSED)
def test_closed_under_a_mode(how, implementation_calls):
    with torch.no_grad(), CLOSED[how]():
        assert not door.is_open(X, WEIGHT, BIAS)
        y, e = ops.linear_act(X, WEIGHT, BIAS, "gelu"), F.gelu(F.linear(X, WEIGHT, BIAS))
    assert implementation_calls == []
    assert y.dtype is e.dtype
    assert torch.equal(y, e)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("kind", ["subclass", "gradient"])
def test_closed_for_any_operand(which, kind, implementation_calls):
    tensors = [X, WEIGHT, BIAS]
    tensors[which] = (
        tensors[which].as_subclass(Subclass) if kind == "subclass" else tensors[which].clone().requires_grad_()
    )
    y = ops.linear_act(*tensors, "gelu")
    assert implementation_calls == []
    assert torch.equal(y, F.gelu(F.linear(X, WEIGHT, BIAS)))
    assert isinstance(y, Subclass) if kind == "subclass" else y.requires_grad


@pytest.mark.parametrize("which", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["subclass", "gradient"])
def test_closed_for_any_operand_of_a_gated_linear(which, kind, implementation_calls):
    tensors = [X, WEIGHT, BIAS, WEIGHT, BIAS]
    tensors[which] = (
        tensors[which].as_subclass(Subclass) if kind == "subclass" else tensors[which].clone().requires_grad_()
    )
    y = ops.gated_linear(*tensors, "gelu")
    assert implementation_calls == []
    assert torch.equal(y, F.gelu(F.linear(X, WEIGHT, BIAS)) * F.linear(X, WEIGHT, BIAS))
    assert isinstance(y, Subclass) if kind == "subclass" else y.requires_grad


def test_closed_in_a_transform(implementation_calls):
    with torch.no_grad():
        y = torch.func.vmap(lambda x: ops.linear_act(x, WEIGHT, BIAS, "gelu"))(X)
        captured = torch.func.vmap(lambda b: ops.linear_act(X, WEIGHT, BIAS, "gelu") + b)(torch.zeros(3, 5))
    assert implementation_calls == []
    torch.testing.assert_close(y, F.gelu(F.linear(X, WEIGHT, BIAS)))
    torch.testing.assert_close(captured[0], F.gelu(F.linear(X, WEIGHT, BIAS)))


def test_forward_mode_keeps_the_tangent():
    tangent = torch.randn_like(X)
    with torch.no_grad(), forward_ad.dual_level():
        x = forward_ad.make_dual(X, tangent)
        ours = forward_ad.unpack_dual(ops.linear_act(x, WEIGHT, BIAS, "gelu")).tangent
        eager = forward_ad.unpack_dual(F.gelu(F.linear(x, WEIGHT, BIAS))).tangent
        operator = forward_ad.unpack_dual(torch.ops.fxfuse.linear_act(x, WEIGHT, BIAS, "gelu")).tangent
    assert torch.equal(ours, eager)
    assert torch.equal(operator, eager)


def test_closed_in_jit_trace(implementation_calls):
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: ops.linear_act(x, WEIGHT, BIAS, "gelu"), (X,), check_trace=False)
    assert implementation_calls == []
    assert "fxfuse::" not in str(traced.graph)
    assert "aten::gelu" in str(traced.graph)
    x = torch.randn(7, 6)
    assert torch.equal(traced(x), F.gelu(F.linear(x, WEIGHT, BIAS)))


def test_closed_for_fake_tensors(implementation_calls):
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = ops.linear_act(mode.from_tensor(X), WEIGHT, BIAS, "gelu")
    assert implementation_calls == []
    assert y.shape == (4, 5)


CALLS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, w, b: ops.linear(x, w, b),
    "linear_act": lambda x, w, b: ops.linear_act(x, w, b, "leaky_relu", (0.3,)),
    "gated_linear": lambda x, w, b: ops.gated_linear(x, w, b, w, None, "gelu"),
    "gated_linear_packed": lambda x, w, b: ops.gated_linear_packed(x, w, b, "silu", (), "up_gate"),
}


@pytest.mark.parametrize("name", CALLS)
def test_fx_records_one_node(name):
    graph_module = fx.symbolic_trace(CALLS[name])
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [getattr(ops, name)]
    assert f"fxfuse_ops_{name}(" in graph_module.code
    weight, bias = torch.randn(6, 6), torch.randn(6)
    with torch.no_grad():
        assert torch.equal(graph_module(X, weight, bias), CALLS[name](X, weight, bias))


def test_fx_records_a_node_whose_input_alone_is_traced():
    graph_module = fx.symbolic_trace(lambda x: ops.linear(x, WEIGHT))
    assert ops.linear in [node.target for node in graph_module.graph.nodes]
