"""Registers an operator of the `fxfuse` namespace for every way that PyTorch may reach it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxfuse.ops.door import needs_gradient

_LIBRARY = torch.library.Library("fxfuse", "DEF")


def register(
    schema: str,
    plain: Callable[..., Tensor],
    cpu: Callable[..., Tensor],
    cuda: Callable[..., Tensor],
    flops: Callable[..., int],
) -> torch._ops.OpOverload:
    """Define `schema` ("name(arguments) -> Tensor") and say what each dispatch key runs.

    `plain` is the same function in eager's own operators: it serves gradients (any order), vmap and the other
    transforms, autocast, other devices, and shape propagation. `cpu` and `cuda` are the implementations.
    `flops` takes the shapes in place of the tensors, as torch.utils.flop_counter asks.
    """
    name = _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,)).partition("(")[0]
    operator: torch._ops.OpOverload = getattr(torch.ops.fxfuse, name).default

    def autograd(*args: object) -> Tensor:
        if needs_gradient([arg for arg in args if isinstance(arg, Tensor)]):
            return plain(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    _LIBRARY.impl(name, plain, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, autograd, "Autograd")
    for transform in ("FuncTorchBatched", "AutocastCPU", "AutocastCUDA"):
        _LIBRARY.impl(name, plain, transform)
    torch.library.register_fake(f"fxfuse::{name}", plain, lib=_LIBRARY)
    register_flop_formula(getattr(torch.ops.fxfuse, name))(flops)
    return operator
