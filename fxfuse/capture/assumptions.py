"""What a trace took for granted, as checks that run at every call.

The checks of a region are generated as one expression, since each costs some tens of nanoseconds and a region may
have a hundred. Where it is false, the same checks run one by one; the first that fails says what it expected and found.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from fxfuse.capture.arguments import Arguments
from fxfuse.capture.tree import HOOKS

P = inspect.Parameter

SCOPE: dict[str, Any] = {
    "plain_types": frozenset({torch.Tensor, nn.Parameter}),
    "unserved": frozenset({torch.float64, torch.complex64, torch.complex128, torch.complex32}),
    "compiling": torch.compiler.is_compiling,
    "function_modes": torch._C._len_torch_function_stack,
    "dispatch_modes": torch._C._len_torch_dispatch_stack,
    "functorch_level": torch._C._functorch.maybe_current_level,
    "jit_tracing": torch._C._get_tracing_state,
    "forward_ad": torch.autograd.forward_ad,
    "autocast": torch._C._is_any_autocast_enabled,
    "grad_enabled": torch.is_grad_enabled,
    "global_pre_hooks": nn_module._global_forward_pre_hooks,
    "global_hooks": nn_module._global_forward_hooks,
    "global_backward_hooks": nn_module._global_backward_hooks,
    "global_backward_pre_hooks": nn_module._global_backward_pre_hooks,
}
"""Names that generated code may use."""


@dataclass(frozen=True)
class Check:
    """One condition of staying on the fused graph."""

    holds: str
    """Python expression, true where the condition is met."""
    kind: Literal["plain", "fallback"]
    """Whether a call that fails it is an ordinary plain call, or breaks an assumption of the trace."""
    why: str
    """Python expression of the reason, evaluated where it is not met."""


ENVIRONMENT = (
    Check("not compiling()", "plain", "'torch.compile or torch.export is tracing'"),
    Check("not function_modes()", "plain", "'a torch function mode is active'"),
    Check("not dispatch_modes()", "plain", "'a torch dispatch mode is active'"),
    Check("functorch_level() is None", "plain", "'inside a functorch transform'"),
    Check("jit_tracing() is None", "plain", "'torch.jit.trace is tracing'"),
    Check("forward_ad._current_level < 0", "plain", "'forward-mode AD is active'"),
    Check("not autocast()", "plain", "'autocast is on'"),
    Check(
        "not (global_pre_hooks or global_hooks or global_backward_hooks or global_backward_pre_hooks)",
        "fallback",
        "'global module hooks: expected none'",
    ),
)


def of_arguments(
    arguments: Arguments, ranks: dict[str, int], shapes: dict[str, tuple[int, ...]], scope: dict[str, Any]
) -> list[Check]:
    """Checks of the arguments; constants that they compare with are put into ``scope``."""
    checks = []
    for name, count in arguments.counts.items():
        checks.append(
            Check(f"len({name}) == {count}", "fallback", f"f'expected {count} in *{name}, found {{len({name})}}'")
        )
        if arguments.signature.parameters[name].kind is P.VAR_KEYWORD:
            keys = [e for e in (*arguments.free.values(), *arguments.constants) if e.startswith(f"{name}['")]
            for expression in keys:
                key = expression[len(name) + 1 : -1]
                checks.append(Check(f"{key} in {name}", "fallback", f"'expected the keyword argument ' + {key}"))
    for expression, value in arguments.constants.items():
        constant = f"constant_{len(scope)}"
        scope[constant] = value
        checks.append(
            Check(
                _equal(expression, constant, value),
                "fallback",
                f"f'argument {_quoted(expression)}: expected {{{constant}!r}}, found {{describe({expression})}}'",
            )
        )
    for expression in arguments.free.values():
        shown = _quoted(expression)
        checks.append(
            Check(
                f"type({expression}) in plain_types",
                "fallback",
                f"f'argument {shown}: expected a plain tensor, found {{describe({expression})}}'",
            )
        )
        checks.append(
            Check(f"{expression}.dtype not in unserved", "plain", f"f'argument {shown} is {{{expression}.dtype}}'")
        )
    for name, rank in ranks.items():
        expression = arguments.free[name]
        checks.append(
            Check(
                f"{expression}.ndim == {rank}",
                "fallback",
                f"f'argument {_quoted(expression)}: expected {rank} dimensions, found {{{expression}.ndim}}'",
            )
        )
    for name, shape in shapes.items():
        expression = arguments.free[name]
        checks.append(
            Check(
                f"{expression}.shape == {tuple(shape)}",
                "fallback",
                f"f'argument {_quoted(expression)}: expected shape {tuple(shape)}, '"
                f" f'found {{tuple({expression}.shape)}}'",
            )
        )
    return checks


def of_gradients(arguments: Arguments, owner: str | None) -> Check:
    needing = [f"{e}.requires_grad" for e in arguments.free.values()]
    if owner:
        needing.append(f"any(p.requires_grad for p in {owner}.parameters())")
    return Check(f"not (grad_enabled() and ({' or '.join(needing) or 'False'}))", "plain", "'gradients are needed'")


def of_module(local: str, reach: str, path: str, module: nn.Module) -> Iterable[Check]:
    """Checks of a module that the graph stands in for. ``local`` names it; ``reach`` is how the model reaches it."""
    shown = _quoted(path or type(module).__name__)
    if path:
        yield Check(f"{reach} is {local}", "fallback", f"'module {shown} was replaced'")
        hooks = " or ".join(f"{local}.{h}" for h in HOOKS)
        yield Check(f"not ({hooks})", "fallback", f"'module {shown} has hooks: expected none'")
        yield Check(f"'forward' not in {local}.__dict__", "fallback", f"'module {shown} has a forward of its own'")
    yield Check(
        f"{local}.__class__ is class_{local}",
        "fallback",
        f"f'module {shown}: expected class {type(module).__name__}, found {{type({local}).__name__}}'",
    )
    if type(module) is nn.Dropout:
        yield of_training(local, path)


def of_training(local: str, path: str) -> Check:
    return Check(f"{local}.training is False", "plain", f"'module {_quoted(path or '.')} is in training mode'")


def of_attribute(local: str, path: str, name: str, value: Any, scope: dict[str, Any]) -> Check:
    """Check of a plain attribute that the forward read while it was traced."""
    if name == "training":
        return of_training(local, path)
    constant = f"constant_{len(scope)}"
    scope[constant] = value
    found = f"{local}.__dict__.get({name!r}, constant_{len(scope) - 1})"
    return Check(
        _equal(found, constant, value),
        "fallback",
        f"f'attribute {_quoted(f'{path}.{name}'.lstrip('.'))}: expected {{{constant}!r}}, '"
        f" f'found {{describe({local}.{name})}}'",
    )


def _equal(expression: str, constant: str, value: Any) -> str:
    same = f"{expression} is {constant}"
    if value is None or isinstance(value, bool):
        return same
    return f"({same} or type({expression}) is type({constant}) and {expression} == {constant})"


def of_read(target: str, name: str, reach: str, value: Any) -> Iterable[Check]:
    """Checks of a parameter, buffer or attribute that the graph reads; binds it to the local ``name``."""
    yield Check(f"({name} := {reach}) is not None", "fallback", f"'{_quoted(target)} is gone'")
    if isinstance(value, torch.Tensor):
        yield Check(f"type({name}) in plain_types", "plain", f"f'{_quoted(target)} is a {{type({name}).__name__}}'")


def describe(value: Any) -> str:
    """A value in a reason: tensors by their type alone."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


SCOPE["describe"] = describe


def _quoted(text: str) -> str:
    """``text`` for use inside a single-quoted (f-)string literal."""
    return text.replace("'", '"').replace("{", "(").replace("}", ")")
