"""What a trace took for granted, as checks that run at every call.

The checks of a region are generated as one expression, since each costs some tens of nanoseconds and a region may
have a hundred. Where it is false, the same checks run one by one; the first that fails says what it expected and found.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from fxfuse.capture import terms
from fxfuse.capture.arguments import Arguments
from fxfuse.capture.assumed import ABSENT, Decision, place_of
from fxfuse.capture.names import Name
from fxfuse.capture.tree import contents, intact, same


def only_default_device() -> bool:
    """Whether the active torch function modes do nothing but give factories a device, which the graph's ask for too."""
    return all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


SCOPE: dict[str, Any] = terms.SCOPE | {
    "fx_unserved": frozenset({torch.float64, torch.complex64, torch.complex128, torch.complex32}),
    "fx_Tensor": torch.Tensor,
    "fx_Parameter": nn.Parameter,
    # Cheaper than is_compiling(); the exporters that do without Dynamo work by modes, which are asked for as well.
    "fx_compiling": torch.compiler.is_dynamo_compiling,
    "fx_function_modes": torch._C._len_torch_function_stack,
    "fx_default_device": only_default_device,
    "fx_dispatch_modes": torch._C._len_torch_dispatch_stack,
    "fx_functorch_level": torch._C._functorch.maybe_current_level,
    "fx_jit_tracing": torch._C._is_tracing,
    "fx_forward_ad": torch.autograd.forward_ad,
    "fx_autocast": torch._C._is_any_autocast_enabled,
    "fx_torch": torch,
    "fx_getattribute": object.__getattribute__,
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
    at: str | None = None
    """Path of the inlined module that the condition is about: a trace that only called it would not need this."""


ENVIRONMENT = (
    Check("not fx_compiling()", "plain", "'torch.compile or torch.export is tracing'"),
    Check("(not fx_function_modes() or fx_default_device())", "plain", "'a torch function mode is active'"),
    Check("not fx_dispatch_modes()", "plain", "'a torch dispatch mode is active'"),
    Check("fx_functorch_level() is None", "plain", "'inside a functorch transform'"),
    Check("not fx_jit_tracing()", "plain", "'torch.jit.trace is tracing'"),
    Check("fx_forward_ad._current_level < 0", "plain", "'forward-mode AD is active'"),
    Check("not fx_autocast()", "plain", "'autocast is on'"),
    Check(
        "not (fx_global_pre_hooks or fx_global_hooks or fx_global_backward_hooks or fx_global_backward_pre_hooks)",
        "fallback",
        "'global module hooks: expected none'",
    ),
)


def of_arguments(
    arguments: Arguments,
    ranks: dict[str, int],
    shapes: dict[str, tuple[int, ...]],
    sized: set[str],
    scope: dict[str, Any],
) -> list[Check]:
    """Checks of the arguments; constants that they compare with are put into ``scope``.

    ``sized``: placeholder names of those whose shape gets a name, for checks that follow.
    """
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
    for expression, elements in arguments.nested.items():
        cls, told = ("tuple", "len") if isinstance(elements, int) else ("dict", "tuple")
        shown = f"{quoted(expression)}: expected a {cls} of {quoted(repr(elements))}"
        why = f"f'argument {shown}, found {{fx_describe({expression})}}'"
        checks.append(Check(f"type({expression}) is {cls} and {told}({expression}) == {elements!r}", "fallback", why))
    for expression, value in arguments.constants.items():
        constant = f"fx_constant_{len(scope)}"
        scope[constant] = value
        checks.append(
            Check(
                _equal(expression, constant, value),
                "fallback",
                f"f'argument {quoted(expression)}: expected {{{constant}!r}}, found {{fx_describe({expression})}}'",
            )
        )
    for expression, kind in arguments.handed.values():
        constant = f"fx_constant_{len(scope)}"
        scope[constant] = kind
        why = f"f'argument {quoted(expression)}: expected a {kind.__name__}, found {{fx_describe({expression})}}'"
        checks.append(Check(f"type({expression}) is {constant}", "fallback", why))
    for expression in arguments.free.values():
        shown = quoted(expression)
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
        found = f"len({terms.SHAPE}{name} := {expression}.shape)" if name in sized else f"{expression}.ndim"
        checks.append(
            Check(
                f"{found} == {rank}",
                "fallback",
                f"f'argument {quoted(expression)}: expected {rank} dimensions, found {{{expression}.ndim}}'",
            )
        )
    for name, shape in shapes.items():
        expression = arguments.free[name]
        checks.append(
            Check(
                f"{expression}.shape == {tuple(shape)}",
                "fallback",
                f"f'argument {quoted(expression)}: expected shape {tuple(shape)}, '"
                f" f'found {{tuple({expression}.shape)}}'",
            )
        )
    return checks


def of_size(text: str, decision: Decision, arguments: Arguments) -> Check:
    """Check of a number that follows from the sizes of arguments, over the names that ``of_arguments`` gave these."""
    place = quoted(place_of(decision.source))
    found = "another" if terms.MAY_RAISE.search(text) else f"{{{text}}}"
    why = f"{quoted(terms.shown(text, arguments.free))}: expected {decision.value}, found {found}"
    where = f" (by {place})" if place else ""
    holds = f"{text} is {decision.value}" if isinstance(decision.value, bool) else f"{text} == {decision.value!r}"
    return Check(holds, "fallback", f"f'{why}' {where!r}")


def of_shape(target: str, reach: str, shape: tuple[int, ...]) -> Check:
    """Check of the shape of a tensor of the model that the graph does not read."""
    found = f'getattr({reach}, "shape", None)'
    why = f"'{quoted(target)}: expected shape {shape}, found ' + str({found})"
    return Check(f"{found} == {shape}", "fallback", why)


def of_gradients(arguments: Arguments, owner: str | None) -> Check:
    # What is handed on may hold tensors that need one.
    needing = ["True"] if arguments.handed else [f"{e}.requires_grad" for e in arguments.free.values()]
    if owner:
        needing.append(f"any(p.requires_grad for p in {owner}.parameters())")
    return Check(f"not (fx_grad_enabled() and ({' or '.join(needing) or 'False'}))", "plain", "'gradients are needed'")


def of_module(local: str, reach: str, path: str, module: nn.Module, cls: str) -> Iterable[Check]:
    """Checks of a module that the graph stands in for.

    ``local`` names it, ``reach`` is how the model reaches it, and ``cls`` names its class.
    """
    shown = quoted(path or type(module).__name__)
    at, table = path or None, attributes(local)
    if path:
        yield Check(f"{reach} is {local}", "fallback", f"'module {shown} was replaced'", at)
        # Hooks of backward change nothing where no gradient is needed, and a call that needs one is not fused.
        hooks = f"({table} := {local}.__dict__)['_forward_hooks'] or {table}['_forward_pre_hooks']"
        yield Check(f"not ({hooks})", "fallback", f"'module {shown} has hooks: expected none'", at)
        own = f"('forward' not in {table} or fx_intact({local}))"  # or that of a region inside this one
        yield Check(own, "fallback", f"'module {shown} has a forward of its own'", at)
    yield Check(
        f"type({local}) is {cls}",
        "fallback",
        f"f'module {shown}: expected class {type(module).__name__}, found {{type({local}).__name__}}'",
        at,
    )
    if type(module) is nn.Dropout:
        yield of_training(local, path)
    if type(module) is nn.Linear and module.bias is None:
        yield of_absent(local, path, "bias", module)


def attributes(local: str) -> str:
    """The name of a module's ``__dict__``. Reading attributes there takes a third of the time: nn.Module has a
    ``__getattr__``, which keeps Python from remembering where they are."""
    return f"fx_d_{local}"


def of_owner() -> Check:
    """No check: binds the name of the owner's attributes."""
    return Check(f"({attributes('self')} := self.__dict__) is not None", "fallback", "'it has no attributes'")


def of_class(cls: str, name: str, kind: type, given: str) -> Check:
    """Check of what a class gives its modules under a name. ``cls`` names the class, ``given`` what it gave."""
    found = f"{cls}.{name}" if name.isidentifier() else f"getattr({cls}, {name!r}, None)"
    # A method of the class is bound anew each time.
    holds = f"{found} == {given}" if kind is types.MethodType else f"{found} is {given}"
    return Check(holds, "fallback", f"f'{{{cls}.__name__}}.{quoted(name)} is no longer what it was'")


def of_method(local: str, path: str, name: str) -> Check:
    """Check that an instance has nothing of its own in the place of a method."""
    shown = quoted(f"{path}.{name}".lstrip("."))
    holds = f"{name!r} not in {attributes(local)}"
    return Check(holds, "fallback", f"'method {shown} was replaced'", path or None)


def of_absent(local: str, path: str, name: str, module: nn.Module) -> Check:
    """Check of an attribute that was not there, or None where parameters, buffers and modules are kept."""
    shown = quoted(f"{path}.{name}".lstrip("."))
    tables = ("_parameters", "_buffers", "_modules")
    kept = [table for table in tables if name in getattr(module, table)]
    if kept:
        holds = f"{attributes(local)}[{kept[0]!r}][{name!r}] is None"
    else:
        places = (attributes(local), *(f"{attributes(local)}[{table!r}]" for table in tables))
        holds = " and ".join(f"{name!r} not in {place}" for place in places)
    return Check(holds, "fallback", f"'attribute {shown}: expected none'", path or None)


def of_holder(local: str, reach: str, path: str) -> Check:
    """Check of a module that only attributes are read from; binds it to the name ``local``."""
    holds = f"({attributes(local)} := ({local} := {reach}).__dict__) is not None"
    return Check(holds, "fallback", f"'module {quoted(path)} is gone'")


def of_container(modules: str, path: str, count: int) -> Check:
    """Check of how many modules a container holds (``modules`` is its table); which they are is checked of each."""
    shown = quoted(path or ".")
    why = f"'container {shown}: expected {count} modules, found ' + str(len({modules}))"
    return Check(f"len({modules}) == {count}", "fallback", why)


def of_training(local: str, path: str) -> Check:
    return Check(
        f"{attributes(local)}['training'] is False", "plain", f"'module {quoted(path or '.')} is in training mode'"
    )


def of_attribute(local: str, path: str, name: str, module: nn.Module, held: list[Any]) -> Check:
    """Check of a plain attribute that the forward read while it was traced; what it was goes into ``held``."""
    on_instance = name in module.__dict__
    if name == "training" and on_instance:
        return of_training(local, path)
    value = module.__dict__[name] if on_instance else getattr(module, name)
    found = f"{attributes(local)}.get({name!r})" if on_instance else f"getattr({local}, {name!r}, None)"
    return _of_value(f"attribute {quoted(f'{path}.{name}'.lstrip('.'))}", found, value, held, path or None)


def of_foreign(owner: Any, name: str, value: Any, held: list[Any]) -> Check:
    """Check of an attribute of an object that is no module; the object and the value go into ``held``."""
    local = _held(owner, held)
    shown = f"{type(owner).__name__}.{quoted(name)}"
    if value is ABSENT:
        return Check(f"not hasattr({local}, {name!r})", "fallback", f"'attribute {shown}: expected none'")
    plain = type(owner).__getattribute__ is object.__getattribute__
    if not plain and name in (getattr(owner, "__dict__", None) or ()):
        # Past what the class does at each read: that was done while tracing, and noted.
        found = f"fx_getattribute({local}, '__dict__')[{name!r}]"
    else:
        found = f"getattr({local}, {name!r}, None)"
    return _of_value(f"attribute {shown}", found, value, held, None)


def _held(value: Any, held: list[Any]) -> str:
    """The name of a value in ``held``, where it is put if it is not there."""
    place = next((i for i, v in enumerate(held) if v is value), len(held))
    if place == len(held):
        held.append(value)
    return f"fx_held_{place}"


def _of_value(shown: str, found: str, value: Any, held: list[Any], at: str | None) -> Check:
    """Check that the expression ``found`` still gives ``value``."""
    constant = f"fx_held_{len(held)}"
    held.append(contents(value))
    if isinstance(held[-1], (bool, int, float, str)):
        holds, expected = _equal(found, constant, value), f"{{{constant}!r}}"
    elif held[-1] is value:
        holds, expected = f"{found} is {constant}", "the one it was"
    else:
        holds, expected = f"fx_same(fx_contents({found}), {constant})", "what it held"
    shown_found = found.replace("'", '"')  # it stands inside a single-quoted f-string
    return Check(holds, "fallback", f"f'{shown}: expected {expected}, found {{fx_describe({shown_found})}}'", at)


def of_answer(name: str, answer: Any, scope: dict[str, Any]) -> Check:
    """Check of what a function of torch answered about PyTorch's state."""
    constant = f"fx_constant_{len(scope)}"
    scope[constant] = answer
    call = f"fx_torch.{name}()"
    kind: Literal["plain", "fallback"] = "plain" if name == "is_grad_enabled" else "fallback"
    return Check(f"{call} == {constant}", kind, f"f'torch.{name}: expected {{{constant}}}, found {{{call}}}'")


def of_dtype(target: str, reach: str, dtype: torch.dtype) -> Check:
    """Check of a dtype that the forward decided by."""
    found = f'getattr({reach}, "dtype", None)'
    why = f"'{quoted(target)}: expected {dtype}, found ' + str({found})"
    return Check(f"{found} is fx_{dtype}", "fallback", why)


def of_device(target: str, reach: str, name: str, was: bool) -> Check:
    """Check that a tensor lies on a device of this name, or does not, as when the forward decided by it."""
    why = f"'{quoted(target)}: expected {'' if was else 'no '}device {quoted(name)}, found ' + {reach}.device.type"
    return Check(f"({reach}.device.type == {name!r}) is {was}", "fallback", why)


def of_name(name: Name, scope: dict[str, Any]) -> Check:
    """Check of what a function finds by name. These belong to no module: they stay in ``scope``."""
    place, constant = f"fx_place_{len(scope)}", f"fx_constant_{len(scope)}"
    scope[place], scope[constant] = name.place, contents(name.value)
    found = f"{place}.get({name.name!r})" if isinstance(name.place, dict) else f"{place}.cell_contents"
    if scope[constant] is not name.value:
        holds = f"fx_same(fx_contents({found}), {constant})"
    elif isinstance(name.value, (type(None), bool, int, float, str)):
        holds = _equal(found, constant, name.value)
    else:
        holds = f"{found} is {constant}"
    return Check(holds, "fallback", f"'{name.name} is no longer what it was'")


def _equal(expression: str, constant: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"fx_same(fx_contents({expression}), fx_contents({constant}))"
    same = f"{expression} is {constant}"
    if value is None or isinstance(value, bool):
        return same
    return f"({same} or type({expression}) is type({constant}) and {expression} == {constant})"


def of_read(target: str, name: str, reach: str, value: Any, at: str | None) -> Iterable[Check]:
    """Checks of a parameter, buffer or attribute that the graph reads; binds it to the local ``name``.

    Rules and operators count on its shape, which another parameter in its place may change, and ``.data`` as well.
    """
    yield Check(f"({name} := {reach}) is not None", "fallback", f"'{quoted(target)} is gone'", at)
    if isinstance(value, torch.Tensor):
        types = ("fx_Parameter", "fx_Tensor") if isinstance(value, nn.Parameter) else ("fx_Tensor", "fx_Parameter")
        plain = f"(type({name}) is {types[0]} or type({name}) is {types[1]})"
        yield Check(plain, "plain", f"f'{quoted(target)} is a {{type({name}).__name__}}'")
        shape = tuple(value.shape)
        yield Check(
            f"{name}.shape == {shape}",
            "fallback",
            f"f'{quoted(target)}: expected shape {shape}, found {{tuple({name}.shape)}}'",
            at,
        )


def of_like(target: str, name: str, other: str, dtype: str, at: str | None) -> Check:
    """Check that a tensor still has the dtype of another; ``dtype`` is an expression for it."""
    why = f"f'{quoted(target)} is {{{name}.dtype}} beside {{{other}.dtype}}'"
    return Check(f"{name}.dtype is {dtype}", "fallback", why, at)


def describe(value: Any) -> str:
    """A value in a reason: tensors by their type alone."""
    kind = f"a {type(value).__name__}"
    return kind if isinstance(value, torch.Tensor) or len(repr(value)) >= 40 else repr(value)


SCOPE |= {"fx_describe": describe, "fx_contents": contents, "fx_same": same, "fx_intact": intact}


def quoted(text: str) -> str:
    """``text`` for use inside a single-quoted (f-)string literal."""
    return text.replace("'", '"').replace("{", "(").replace("}", ")")
