"""How a forward is called: which arguments are free tensors in a trace, which constants to it, which handed on."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxfuse.capture.value import Untraceable
from fxfuse.facts import Fact

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    enum.Enum,
)
_TAKEN = frozenset({"any", "dict", "getattr", "len", "list", "str", "tuple", "type"})
"""Built-in names in generated code; every other name of its own there begins with ``fx_``."""
_MOST_TOLD = 1 << 16
"""Elements. No activations are among them, and no mask for each pair of positions of a long text."""
P = inspect.Parameter


@dataclass(frozen=True)
class Handed:
    """An argument that is neither a tensor nor a constant: a forward may hand it on to a module that it calls."""

    kind: type


@dataclass
class Recorded:
    """One call of a module in the example run: tensors as Facts, constants as they were, and others by their class."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    told: tuple[tuple[Any, ...], dict[str, Any]]
    """The same, with copies of masks, positions and the like in place of their Facts: forwards decide by these."""

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
        def note(value: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
            # Nothing else is kept alive by it.
            if isinstance(value, torch.Tensor):
                return of_tensor(value)
            if _is_constant(value):
                return value
            if _is_named(value):
                return {key: note(v, of_tensor) for key, v in value.items()}
            return tuple(note(v, of_tensor) for v in value) if type(value) is tuple else Handed(type(value))

        facts, told = (
            (tuple(note(a, of_tensor) for a in args), {k: note(v, of_tensor) for k, v in kwargs.items()})
            for of_tensor in (Fact.of, _told)
        )
        return Recorded(*facts, told)


def _told(tensor: torch.Tensor) -> torch.Tensor | Fact:
    known = type(tensor) is torch.Tensor and not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
    return tensor.detach().clone() if known and tensor.numel() <= _MOST_TOLD else Fact.of(tensor)


@dataclass
class Arguments:
    """The parameters of a forward and what a trace makes of each."""

    signature: inspect.Signature
    """The parameters as the function itself has them, decorators not looked through."""
    free: dict[str, str] = field(default_factory=dict)
    """placeholder name -> Python expression for it in the scope of the parameters."""
    handed: dict[str, tuple[str, type]] = field(default_factory=dict)
    """placeholder name -> Python expression and class of what the trace may only hand on, dicts among it."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Python expression -> the value that the trace took it to have."""
    counts: dict[str, int] = field(default_factory=dict)
    """Name of *args -> how many the trace took there to be."""
    nested: dict[str, int | tuple[str, ...]] = field(default_factory=dict)
    """Python expression of an argument that is a tuple or dict -> how many elements, or the keys in their order.

    Each element is an argument by itself. What holds another comes first.
    """
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of **kwargs -> the keywords that the trace took there to be, in their order: a forward may go by it."""
    facts: dict[str, Fact] = field(default_factory=dict)
    """placeholder name -> its Fact in the recorded call."""

    @property
    def placeholders(self) -> dict[str, str]:
        """Placeholder name -> Python expression for it, in the order of the graph."""
        return {**self.free, **{name: expression for name, (expression, _) in self.handed.items()}}

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Placeholder name -> what it stands for in a call, in the order of the graph."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: eval(expression, {}, dict(bound.arguments)) for name, expression in self.placeholders.items()}

    def call(
        self, placeholder: Callable[[str], Any], given: Callable[[dict[str, Any], Any], None] = lambda *_: None
    ) -> tuple[tuple, dict[str, Any]]:
        """Arguments to trace the forward with. ``given`` gets each dict among them, and its own placeholder."""
        made = {expression: placeholder(name) for name, expression in self.placeholders.items()}

        def value(expression: str) -> Any:
            elements = self.nested.get(expression)
            if isinstance(elements, int):
                return tuple(value(f"{expression}[{i}]") for i in range(elements))
            if elements is not None:
                opened = {key: value(_item(expression, key)) for key in elements}
                given(opened, made[expression])
                return opened
            return made[expression] if expression in made else self.constants[expression]

        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD):
                args.append(value(name))
            elif parameter.kind is P.VAR_POSITIONAL:
                args.extend(value(f"{name}[{i}]") for i in range(self.counts[name]))
            elif parameter.kind is P.KEYWORD_ONLY:
                kwargs[name] = value(name)
            else:
                kwargs.update({key: value(_item(name, key)) for key in self.keys[name]})
        return tuple(args), kwargs


def plan(forward: Callable[..., Any], recorded: Recorded | None) -> Arguments:
    """Decide for each parameter of ``forward`` (bound, so without self), from a recorded call or its defaults alone."""
    try:
        signature = inspect.signature(forward, follow_wrapped=False)
    except (TypeError, ValueError) as error:
        raise Untraceable(f"its forward has no signature ({error})") from error
    taken = [name for name in signature.parameters if name in _TAKEN or name.startswith("fx_")]
    if taken:
        raise Untraceable(f"its parameter {taken[0]} has a name that the generated forward uses itself")
    plan = Arguments(signature)
    if recorded is not None:
        bound = signature.bind(*recorded.args, **recorded.kwargs)
        bound.apply_defaults()
        given = bound.arguments
    elif hasattr(forward, "__wrapped__"):
        raise Untraceable("its forward is wrapped by a decorator, so only example inputs would tell how it is called")
    else:
        given = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is P.VAR_POSITIONAL:
            values = given.get(name, ())
            plan.counts[name] = len(values)
            for i, value in enumerate(values):
                _decide(plan, f"{name}_{i}", f"{name}[{i}]", value)
        elif parameter.kind is P.VAR_KEYWORD:
            items = given.get(name, {})
            plan.keys[name] = tuple(items)
            for key, value in items.items():
                _decide(plan, f"{name}_{key}", _item(name, key), value)
        elif name in given:
            _decide(plan, name, name, given[name])
        elif parameter.default is P.empty:
            _name(plan, name)
            plan.free[name] = name
        else:
            _decide(plan, name, name, parameter.default)
    return plan


def _item(name: str, key: str) -> str:
    # Double quotes, since the expression also stands inside single-quoted messages.
    return f'{name}["{key}"]'


def _decide(plan: Arguments, placeholder: str, expression: str, value: Any) -> None:
    if not placeholder.isidentifier():
        raise Untraceable(f"its argument {expression} has a name that is no identifier")
    if isinstance(value, (Fact, torch.Tensor)):
        _name(plan, placeholder)
        plan.free[placeholder] = expression
        plan.facts[placeholder] = value if isinstance(value, Fact) else Fact.of(value)
    elif _is_constant(value):
        # A list of its own: the caller's may change.
        plan.constants[expression] = list(value) if isinstance(value, list) else value
    elif type(value) is tuple:
        plan.nested[expression] = len(value)
        for i, element in enumerate(value):
            _decide(plan, f"{placeholder}_{i}", f"{expression}[{i}]", element)
    elif _is_named(value):
        plan.nested[expression] = tuple(value)
        _name(plan, placeholder)
        plan.handed[placeholder] = expression, dict
        for key, element in value.items():
            _decide(plan, f"{placeholder}_{key}", _item(expression, key), element)
    else:
        _name(plan, placeholder)
        plan.handed[placeholder] = expression, value.kind if isinstance(value, Handed) else type(value)


def _name(plan: Arguments, placeholder: str) -> None:
    if placeholder in plan.free or placeholder in plan.handed:
        raise Untraceable(f"two of its arguments would be called {placeholder} in a graph")


def _is_named(value: Any) -> bool:
    """Whether a value is a dict as of keyword arguments."""
    return type(value) is dict and all(type(key) is str and key.isidentifier() for key in value)


def _is_constant(value: Any) -> bool:
    return all(isinstance(v, _CONSTANTS) for v in (value if type(value) in (tuple, list) else [value]))
