"""What a trace took for granted, as checks that run at every call.

The checks of a region are generated as one expression, since each costs some tens of nanoseconds and a region may
have a hundred. Where it is false, the same checks run one by one; the first that fails says what it expected and found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from fxfuse.capture.arguments import Arguments
from fxfuse.capture.names import Name
from fxfuse.capture.tree import HOOKS, contents, same

SCOPE: dict[str, Any] = {
    "fx_unserved": frozenset({torch.float64, torch.complex64, torch.complex128, torch.complex32}),
    "fx_Tensor": torch.Tensor,
    "fx_Parameter": nn.Parameter,
    # Cheaper than is_compiling(); the exporters that do without Dynamo work by modes, which are asked for as well.
    "fx_compiling": torch.compiler.is_dynamo_compiling,
    "fx_function_modes": torch._C._len_torch_function_stack,
    "fx_dispatch_modes": torch._C._len_torch_dispatch_stack,
    "fx_functorch_level": torch._C._functorch.maybe_current_level,
    "fx_jit_tracing": torch._C._get_tracing_state,
    "fx_forward_ad": torch.autograd.forward_ad,
    "fx_autocast": torch._C._is_any_autocast_enabled,
    "fx_torch": torch,
    "fx_grad_enabled": torch.is_grad_enabled,
    "fx_global_pre_hooks": nn_module._global_forward_pre_hooks,
    "fx_global_hooks": nn_module._global_forward_hooks,
    "fx_global_backward_hooks": nn_module._global_backward_hooks,
    "fx_global_backward_pre_hooks": nn_module._global_backward_pre_hooks,
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
    Check("not fx_compiling()", "plain", "'torch.compile or torch.export is tracing'"),
    Check("not fx_function_modes()", "plain", "'a torch function mode is active'"),
    Check("not fx_dispatch_modes()", "plain", "'a torch dispatch mode is active'"),
    Check("fx_functorch_level() is None", "plain", "'inside a functorch transform'"),
    Check("fx_jit_tracing() is None", "plain", "'torch.jit.trace is tracing'"),
    Check("fx_forward_ad._current_level < 0", "plain", "'forward-mode AD is active'"),
    Check("not fx_autocast()", "plain", "'autocast is on'"),
    Check(
        "not (fx_global_pre_hooks or fx_global_hooks or fx_global_backward_hooks or fx_global_backward_pre_hooks)",
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
    for name, keys in arguments.keys.items():
        constant = f"fx_constant_{len(scope)}"
        scope[constant] = keys
        why = f"f'expected {{{constant}}} in **{name}, found {{tuple({name})}}'"
        checks.append(Check(f"tuple({name}) == {constant}", "fallback", why))
    for expression, value in arguments.constants.items():
        constant = f"fx_constant_{len(scope)}"
        scope[constant] = value
        checks.append(
            Check(
                _equal(expression, constant, value),
                "fallback",
                f"f'argument {_quoted(expression)}: expected {{{constant}!r}}, found {{fx_describe({expression})}}'",
            )
        )
    for expression in arguments.free.values():
        shown = _quoted(expression)
        checks.append(
            Check(
                f"(type({expression}) is fx_Tensor or type({expression}) is fx_Parameter)",
                "fallback",
                f"f'argument {shown}: expected a plain tensor, found {{fx_describe({expression})}}'",
            )
        )
        checks.append(
            Check(f"{expression}.dtype not in fx_unserved", "plain", f"f'argument {shown} is {{{expression}.dtype}}'")
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
    return Check(f"not (fx_grad_enabled() and ({' or '.join(needing) or 'False'}))", "plain", "'gradients are needed'")


def of_module(local: str, reach: str, path: str, module: nn.Module) -> Iterable[Check]:
    """Checks of a module that the graph stands in for. ``local`` names it; ``reach`` is how the model reaches it."""
    shown = _quoted(path or type(module).__name__)
    if path:
        yield Check(f"{reach} is {local}", "fallback", f"'module {shown} was replaced'")
        hooks = " or ".join(f"{local}.{h}" for h in HOOKS)
        yield Check(f"not ({hooks})", "fallback", f"'module {shown} has hooks: expected none'")
        yield Check(f"'forward' not in {local}.__dict__", "fallback", f"'module {shown} has a forward of its own'")
    yield Check(
        f"{local}.__class__ is fx_class_{local}",
        "fallback",
        f"f'module {shown}: expected class {type(module).__name__}, found {{type({local}).__name__}}'",
    )
    if type(module) is nn.Dropout:
        yield of_training(local, path)


def of_holder(local: str, reach: str, path: str) -> Check:
    """Check of a module that only attributes are read from; binds it to the name ``local``."""
    return Check(f"({local} := {reach}) is not None", "fallback", f"'module {_quoted(path)} is gone'")


def of_container(reach: str, path: str, count: int) -> Check:
    """Check of how many modules a container holds; which they are is checked of each."""
    shown = _quoted(path or ".")
    why = f"'container {shown}: expected {count} modules, found ' + str(len({reach}._modules))"
    return Check(f"len({reach}._modules) == {count}", "fallback", why)


def of_training(local: str, path: str) -> Check:
    return Check(f"{local}.training is False", "plain", f"'module {_quoted(path or '.')} is in training mode'")


def of_attribute(local: str, path: str, name: str, module: nn.Module, held: list[Any]) -> Check:
    """Check of a plain attribute that the forward read while it was traced; what it was goes into ``held``."""
    if name == "training":
        return of_training(local, path)
    on_instance = name in module.__dict__
    value = module.__dict__[name] if on_instance else getattr(module, name)
    found = f"{local}.__dict__.get({name!r})" if on_instance else f"getattr({local}, {name!r}, None)"
    constant = f"fx_held_{len(held)}"
    held.append(contents(value))
    shown = _quoted(f"{path}.{name}".lstrip("."))
    if isinstance(held[-1], (bool, int, float, str)):
        holds, expected = _equal(found, constant, value), f"{{{constant}!r}}"
    elif held[-1] is value:
        holds, expected = f"{found} is {constant}", "the one it was"
    else:
        holds, expected = f"fx_same(fx_contents({found}), {constant})", "what it held"
    return Check(
        holds,
        "fallback",
        f"f'attribute {shown}: expected {expected}, found {{fx_describe(getattr({local}, \"{name}\", None))}}'",
    )


def of_dtype(target: str, reach: str, dtype: torch.dtype) -> Check:
    """Check of a dtype that the forward decided by."""
    found = f'getattr({reach}, "dtype", None)'
    why = f"'{_quoted(target)}: expected {dtype}, found ' + str({found})"
    return Check(f"{found} is fx_{dtype}", "fallback", why)


def of_name(name: Name, scope: dict[str, Any]) -> Check:
    """Check of a number or tensor that a function finds by name. These belong to no module: they stay in ``scope``."""
    place, constant = f"fx_place_{len(scope)}", f"fx_constant_{len(scope)}"
    scope[place], scope[constant] = name.place, contents(name.value)
    found = f"{place}.get({name.name!r})" if isinstance(name.place, dict) else f"{place}.cell_contents"
    if scope[constant] is not name.value:
        holds = f"fx_same(fx_contents({found}), {constant})"
    elif isinstance(name.value, torch.Tensor):
        holds = f"{found} is {constant}"
    else:
        holds = _equal(found, constant, name.value)
    return Check(holds, "fallback", f"'{name.name} is no longer what it was'")


def _equal(expression: str, constant: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"fx_same(fx_contents({expression}), fx_contents({constant}))"
    same = f"{expression} is {constant}"
    if value is None or isinstance(value, bool):
        return same
    return f"({same} or type({expression}) is type({constant}) and {expression} == {constant})"


def of_read(target: str, name: str, reach: str, value: Any) -> Iterable[Check]:
    """Checks of a parameter, buffer or attribute that the graph reads; binds it to the local ``name``.

    Rules and operators count on its shape, which another parameter in its place may change, and ``.data`` as well.
    """
    yield Check(f"({name} := {reach}) is not None", "fallback", f"'{_quoted(target)} is gone'")
    if isinstance(value, torch.Tensor):
        types = ("fx_Parameter", "fx_Tensor") if isinstance(value, nn.Parameter) else ("fx_Tensor", "fx_Parameter")
        plain = f"(type({name}) is {types[0]} or type({name}) is {types[1]})"
        yield Check(plain, "plain", f"f'{_quoted(target)} is a {{type({name}).__name__}}'")
        shape = tuple(value.shape)
        yield Check(
            f"{name}.shape == {shape}",
            "fallback",
            f"f'{_quoted(target)}: expected shape {shape}, found {{tuple({name}.shape)}}'",
        )


def of_like(target: str, name: str, other: str) -> Check:
    """Check that two tensors which had one dtype still do."""
    why = f"f'{_quoted(target)} is {{{name}.dtype}} beside {{{other}.dtype}}'"
    return Check(f"{name}.dtype is {other}.dtype", "fallback", why)


def describe(value: Any) -> str:
    """A value in a reason: tensors by their type alone."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


SCOPE |= {"fx_describe": describe, "fx_contents": contents, "fx_same": same}


def _quoted(text: str) -> str:
    """``text`` for use inside a single-quoted (f-)string literal."""
    return text.replace("'", '"').replace("{", "(").replace("}", ")")
