"""The door: when may an operator call its implementation directly, beside the dispatcher's custom-operator path?

Only when nobody but the implementation is meant to see the call: no mode, no transform, no tracer, no gradient. Every
fused call passes here, so the code is straight-line and each question is the cheapest one that torch answers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _get_tracing_state, _is_any_autocast_enabled, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


def is_open(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if linear(x, weight, bias) may run its implementation directly: see the module's docstring."""
    return (
        # Dynamo folds this to True and looks no further; it must come first.
        not is_dynamo_compiling()
        and type(x) in PLAIN_TYPES
        and type(weight) in PLAIN_TYPES
        and (bias is None or type(bias) in PLAIN_TYPES)
        and not _len_torch_function_stack()
        and not _len_torch_dispatch_stack()
        and maybe_current_level() is None
        and _get_tracing_state() is None
        # Forward-mode duals are plain tensors and need no grad mode.
        and forward_ad._current_level < 0
        and not (_is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type))
        and not (
            is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        )
    )


def are_plain(weight: Tensor, bias: Tensor | None) -> bool:
    """The same of a second weight and bias of a call whose first ones is_open has let in."""
    return (
        type(weight) in PLAIN_TYPES
        and (bias is None or type(bias) in PLAIN_TYPES)
        and not (is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)))
    )


def needs_gradient(tensors: Sequence[Tensor | None]) -> bool:
    """True if a derivative of a function of `tensors` may be asked for: backward, or forward mode."""
    return forward_ad._current_level >= 0 or (
        is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    )


def behind(
    public: Callable[..., Tensor],
    operator: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    tensors: tuple[Tensor | None, ...],
    rest: tuple[Any, ...] = (),
) -> Tensor:
    """The call public(*tensors, *rest) where the door is closed.

    torch.compile keeps the registered operator (its own kernels then serve the compiled graph); torch.fx records one
    node that calls `public`; everything else (gradients, autocast, transforms, modes, subclasses, export) sees eager's
    own operators, which need no fxfuse to be understood, differentiated or loaded.
    """
    if is_dynamo_compiling():
        # The flag itself: Dynamo of torch 2.11 takes is_exporting() to be true whenever it traces.
        if not torch.compiler._is_exporting_flag and all(t is None or type(t) in PLAIN_TYPES for t in tensors):
            return operator(*tensors, *rest)
    elif any(isinstance(tensor, Proxy) for tensor in tensors):
        return torch.overrides.handle_torch_function(public, tensors, *tensors, *rest)
    return plain(*tensors, *rest)
