"""The activations that fused operators know: one name each, and what eager PyTorch computes under it.

A name stands for a function of one tensor and a few numbers. The pre-activation is the output of a linear layer, so it
is freshly made and nobody else holds it: implementations may use the in-place form where one exists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _nn


@dataclass(frozen=True)
class Activation:
    """One activation: how eager spells it, and its parameters."""

    name: str
    function: Callable[..., Tensor]
    """function(h, *args) -> tensor like h, in eager's own operators, so that it differentiates and traces."""
    in_place: Callable[..., Tensor] | None = None
    """The same values written over h; None where torch has no such operator."""
    defaults: tuple[float, ...] = ()
    """The values of `args` where a call leaves them out."""

    def of(self, args: Sequence[float]) -> Callable[[Tensor], Tensor]:
        """h -> function(h, *args)."""
        return _with(self.function, args)

    def over(self, args: Sequence[float]) -> Callable[[Tensor], Tensor]:
        """The same written over h where that can be: h must be floating-point and the caller's own."""
        return _with(self.in_place or self.function, args)


def _with(function: Callable[..., Tensor], args: Sequence[float]) -> Callable[[Tensor], Tensor]:
    # Without arguments torch's own function is called with nothing in between.
    return (lambda h: function(h, *args)) if args else function


def quick_gelu(h: Tensor, scale: float = 1.702) -> Tensor:
    """h * sigmoid(scale * h). A function of its own, since graphs call it where a model wrote it out."""
    return h * torch.sigmoid(scale * h)


def relu2(h: Tensor) -> Tensor:
    """relu(h) ** 2. A function of its own, since graphs call it where a model wrote it out."""
    return F.relu(h) ** 2


def _leaky_relu(h: Tensor, negative_slope: float = 0.01) -> Tensor:
    return F.leaky_relu(h, negative_slope)


def _elu(h: Tensor, alpha: float = 1.0) -> Tensor:
    return F.elu(h, alpha)


def _softplus(h: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return F.softplus(h, beta, threshold)


def _gelu_tanh(h: Tensor) -> Tensor:
    return F.gelu(h, approximate="tanh")


_ALL = (
    Activation("relu", F.relu, torch.relu_),
    Activation("gelu", F.gelu, _nn.gelu_),  # type: ignore[attr-defined]
    Activation("gelu_tanh", _gelu_tanh, lambda h: _nn.gelu_(h, approximate="tanh")),  # type: ignore[attr-defined]
    Activation("silu", F.silu, _nn.silu_),
    Activation("sigmoid", torch.sigmoid, torch.sigmoid_),
    Activation("tanh", torch.tanh, torch.tanh_),
    Activation("quick_gelu", quick_gelu, defaults=(1.702,)),
    Activation("relu2", relu2, lambda h: torch.relu_(h).square_()),
    Activation("leaky_relu", _leaky_relu, F.leaky_relu_, defaults=(0.01,)),
    Activation("elu", _elu, F.elu_, defaults=(1.0,)),
    Activation("hardswish", F.hardswish, _nn.hardswish_),
    Activation("hardsigmoid", F.hardsigmoid, _nn.hardsigmoid_),
    Activation("softplus", _softplus, defaults=(1.0, 20.0)),
    Activation("mish", F.mish, _nn.mish_),
)

ACTIVATIONS: dict[str, Activation] = {activation.name: activation for activation in _ALL}
"""name -> Activation. Adding one is one line here; a device that has no kernel for it runs its plain function."""


def activation(name: str) -> Activation:
    """The activation called `name`; ValueError, naming the known ones, where there is none."""
    found = ACTIVATIONS.get(name)
    if found is None:
        raise ValueError(f"unknown activation {name!r}; known are {', '.join(ACTIVATIONS)}")
    return found
