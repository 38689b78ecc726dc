"""What real models do that makes tracers fail, or record something else than what runs."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import fxfuse
from tests.models.answers import right
from tests.models.zoo import HAS_TRANSFORMERS, at_batch

WIDTH, HIDDEN, HEADS, LENGTH = 32, 64, 4, 6
PITFALLS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any], int]]] = {}
"""Kind -> what makes a model, the arguments of a call, and how many candidates are fused with these as example."""


def pitfall(kind: str, fused: int, **more: Callable[[], Any]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Registers a class whose forward takes ``x`` [2, LENGTH, WIDTH], and ``more``."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        def build() -> tuple[nn.Module, dict[str, Any], int]:
            torch.manual_seed(0)
            model = cls().eval()
            return model, {"x": torch.randn(2, LENGTH, WIDTH), **{k: make() for k, make in more.items()}}, fused

        PITFALLS[kind] = build
        return cls

    return register


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.proj = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.act(self.fc(x)))


def _decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return wrapper


@pitfall("decorated forward", 1)
class Decorated(MLP):
    @_decorated
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.mlp(x) * scale


class _Wraps(MLP):
    """Wraps the forward of each of its subclasses, as layers that can be checkpointed do."""

    def __init_subclass__(cls) -> None:
        cls.forward = _decorated(cls.forward)


@pitfall("forward wrapped by a base class", 1)
class Wrapped(_Wraps):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


class _Inner(MLP):
    def forward(self, x: torch.Tensor, *args: Any, scale: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        return self.mlp(x) if scale is None else self.mlp(x) * scale


@pitfall("keywords handed on", 1, scale=lambda: torch.ones(1), unused=lambda: None)
class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.inner(x, **kwargs)


@pitfall("starred shape", 1)
class StarredShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inner = _Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], HEADS, -1)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:-1], -1)
        return self.inner(x + self.out(y.contiguous()))


@pitfall("optional argument left out", 1)
class LeftOut(MLP):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, ids: Any = None) -> torch.Tensor:
        x = x if mask is None else x * mask
        return self.mlp(x) if ids is None else self.mlp(x)[ids]


@pitfall("optional argument given", 1, mask=lambda: torch.ones(1, LENGTH, 1))
class Given(LeftOut):
    pass


@pitfall("tensors kept on the module", 1)
class KeepsTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias, self.kept = _Inner(), nn.Parameter(torch.randn(WIDTH)), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = str(x.device)
        if key not in self.kept:
            self.kept[key] = self.bias * 2
        return self.inner(x) + self.kept[key]


@pitfall("buffers and factories of a size", 1)
class OfASize(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16, WIDTH), persistent=False)
        self.register_buffer("one", torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        x = x + self.table[positions] + self.table[: x.shape[1]]
        return self.mlp(x) * self.one.expand(x.shape[1], -1) + torch.zeros(x.shape[0], 1, 1)


@pitfall("functional dropout", 1)
class FunctionalDropout(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.act(self.fc(x)), 0.5, training=self.training)
        return F.dropout(self.proj(h), 0.5, training=self.training)


class _Reversed(nn.Linear):
    """Multiplies by hand, and in an order of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.flip(-1) @ self.weight.T) * 0.5


@pitfall("Linear with another forward", 0)
class OtherForward(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.fc = _Reversed(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


@pitfall("Linear that is never called", 1)
class NeverCalled(MLP):
    """Its weight is read, and its bias put together."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("k_bias", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        q, k, v = F.linear(x, self.qkv.weight, bias=bias).chunk(3, dim=-1)
        return self.mlp(F.scaled_dot_product_attention(q, k, v))


@pitfall("weight changed by the forward", 0)
class ChangesWeight(MLP):
    """Divides a weight in place at its first call in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.divided = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.divided:
            self.proj.weight.div_(2)
            self.divided = True
        return x + self.proj(self.fc(x).sigmoid())


@pitfall("work hidden in torch's own modules", 2)
class TorchsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        self.encoder, self.decoder = (layer(WIDTH, HEADS, HIDDEN, batch_first=True) for layer in layers)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.attention(x, x, x, need_weights=False)[0], self.encoder(x))


@pitfall("numpy constants", 1)
class NumpyConstants(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.root = np.sqrt(np.float32(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x / np.sqrt(HIDDEN)) * self.root + np.float64(0.5)


@pitfall("asks what its argument is", 1)
class AsksWhat(MLP):
    def forward(self, x: Any) -> torch.Tensor:
        if not (torch.is_tensor(x) and isinstance(x, torch.Tensor)):
            raise TypeError("a tensor is needed")
        return self.mlp(x)


@pitfall("asks whether its argument is callable", 1)
class AsksCallable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, x: Any) -> torch.Tensor:
        return self.inner(x() if callable(x) else x)


@pitfall("named tuples and attributes of tensors", 1)
class Named(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.max(dim=-1, keepdim=True).values
        return self.mlp((x - largest).mT.mT) @ self.proj.weight.new_ones(WIDTH, WIDTH).T


SHARED_ACTIVATION = nn.GELU()


@pitfall("modules outside the tree", 2)
class OutsideTheTree(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Tanh()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[0](self.proj(SHARED_ACTIVATION(self.fc(x))))


class _PartialActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


@pitfall("activation held as a partial function", 1)
class Partial(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = _PartialActivation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


@pitfall("shared layers and tied weights", 2)
class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = _Inner(), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.same, self.head.weight = self.layer, self.layer.proj.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.linear(self.same(self.layer(x)), self.head.weight.T))


@pitfall("a part of a list of modules", 2)
class SlicedList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Inner() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        return x


@pitfall("dtype behind a part without a graph", 1)
class AsksDtype(MLP):
    """Clamps in half precision alone, after an attention whose result may have any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = StarredShape(), nn.LayerNorm(WIDTH)
        self.attention.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attention(x))
        x = self.norm(x + F.dropout(self.mlp(x), 0.1, training=self.training))
        return x.clamp(-100, 100) if x.dtype == torch.float16 and x.isinf().any() else x


@pitfall("dtype behind a part without a graph, before its norm", 1)
class AsksDtypeOfResidual(AsksDtype):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        x = x + self.mlp(self.norm(x))
        return x.clamp(-100, 100) if x.dtype == torch.float16 and x.isinf().any() else x


@pitfall("device of a computed value", 1)
class AsksDevice(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.fc(x).chunk(2, dim=-1)
        if gate.device.type == "mps":
            gate = gate.float()
        if x.device.type != "meta":
            value = value * 1.0
        return value * F.gelu(gate)


@pitfall("a part of a list of modules beside a projection", 3)
class SlicedBesideAProjection(SlicedList):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.Sequential(nn.Tanh(), nn.Identity(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps[1:](self.steps[:2](self.fc(super().forward(x))))


@pytest.mark.parametrize("with_example", [False, True], ids=["bare", "example"])
@pytest.mark.parametrize("kind", PITFALLS)
@pytest.mark.filterwarnings("ignore::fxfuse.errors.ExampleWarning")
def test_right_fused_and_unchanged(kind: str, with_example: bool) -> None:
    model, call, fused = PITFALLS[kind]()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {path: dict(vars(m)) for path, m in model.named_modules()}
    optimized = fxfuse.optimize(model, example_kwargs=call if with_example else None)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {path: vars(m) for path, m in model.named_modules()} == attributes
    report = fxfuse.report(optimized)
    if with_example:
        assert len(report.fused) == fused, report
    expected = PITFALLS[kind]()[0]
    with torch.no_grad():
        for batch in (2, 3):
            given = {k: at_batch(v, batch) if k == "x" else v for k, v in call.items()}
            assert right(optimized(**given), expected, **given)
        given = tree_map(lambda t: t[:, :4] if isinstance(t, torch.Tensor) and t.ndim == 3 else t, call)
        assert right(optimized(**given), expected, **given)


def test_a_dtype_that_decided_is_checked() -> None:
    model, call, _ = PITFALLS["dtype behind a part without a graph"]()
    optimized = fxfuse.optimize(model, example_kwargs=call).bfloat16()
    x = call["x"].bfloat16()
    with torch.no_grad():
        assert right(optimized(x), model.bfloat16(), x)
    calls = fxfuse.report(optimized).calls[""]
    assert (calls.fused, calls.fallback) == (0, 1)
    assert list(calls.reasons) == ["fc.weight: expected torch.float32, found torch.bfloat16"]


def test_a_device_that_decided_is_checked() -> None:
    model, call, _ = PITFALLS["device of a computed value"]()
    optimized = fxfuse.optimize(model, example_kwargs=call).to("meta")
    with torch.no_grad():
        assert optimized(call["x"].to("meta")).shape == (2, LENGTH, HIDDEN // 2)
    reasons = [why for calls in fxfuse.report(optimized).calls.values() for why in calls.reasons]
    assert reasons == ["x: expected no device meta, found meta"]


def test_dropout_is_that_of_the_mode() -> None:
    model, call, _ = PITFALLS["functional dropout"]()
    optimized = fxfuse.optimize(model, example_kwargs=call).train()
    zeros = (optimized(**call) == 0).float().mean().item()
    assert zeros > 0.25, "half of them are dropped"
    assert fxfuse.report(optimized).calls[""].fused == 0


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
def test_activations_of_transformers() -> None:
    from transformers.activations import ACT2FN

    class Uses(MLP):
        forward = MLP.mlp

    for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "tanh"):
        model = Uses().eval()
        model.act = ACT2FN[name]
        x = torch.randn(2, LENGTH, WIDTH)
        optimized = fxfuse.optimize(model, x)
        assert [e.rule for e in fxfuse.report(optimized).fused] == ["linear_act"], name
        with torch.no_grad():
            assert right(optimized(x), model, x), name


def test_a_torchvision_that_does_not_import(tmp_path: Path) -> None:
    """It makes transformers fail; fxfuse asks for neither."""
    for package in ("torchvision", "transformers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    code = (
        "import torch, fxfuse\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()\n"
        "optimized = fxfuse.optimize(model, torch.randn(2, 8))\n"
        "assert fxfuse.report(optimized).fused\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
    subprocess.run([sys.executable, "-c", code], check=True)
