"""Forward and backward as one step: what ``--train`` times. No optimizer runs, and no parameter changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxfuse.bench import peers
from fxfuse.bench.peers import LeftOut, Run, Variant, one_line
from fxfuse.bench.targets import BadTarget, Target

Gradients = Sequence[Tensor | None]


def steps(target: Target, built: Mapping[str, Variant]) -> tuple[dict[str, Callable[[], Gradients]], list[LeftOut]]:
    """A step of each variant whose gradients are right; the others with the reason.

    Raises BadTarget for a model without parameters that learn, or whose result does not depend on one.
    """
    args, kwargs = target.example()
    parameters = _learning(target)
    found: dict[str, Callable[[], Gradients]] = {}
    left_out: list[LeftOut] = []
    eager: Gradients = ()
    exact: Gradients = ()
    for name, variant in built.items():
        if name in peers.FLOORS:
            left_out.append(LeftOut(name, "has no gradients"))
            continue
        step = _step(variant.run, parameters, args, kwargs)
        try:
            gradients = step()
        except Exception as error:
            if name == "eager":
                raise BadTarget(f"{target.name}: its backward raised {one_line(error)}") from error
            left_out.append(LeftOut(name, f"raised {one_line(error)}"))
            continue
        if name == "eager":
            eager, exact = gradients, _exact(target)
        wrong = _wrong(gradients, eager, exact)
        if wrong:
            left_out.append(LeftOut(name, f"wrong gradients: {wrong}"))
        else:
            found[name] = step
    return found, left_out


def _step(
    run: Run, parameters: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Gradients]:
    def step() -> Gradients:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = tree_leaves(run(*args, **kwargs))
            results = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            ones = [torch.ones_like(t) for t in results]
            return torch.autograd.grad(results, parameters, ones, allow_unused=True)

    return step


def _exact(target: Target) -> Gradients:
    wide = target.in_float64()
    return _step(wide.model, _learning(wide), *wide.example())()


def _learning(target: Target) -> list[Tensor]:
    return [p for p in target.model.parameters() if p.requires_grad]


def _wrong(gradients: Gradients, eager: Gradients, exact: Gradients) -> str:
    """The rule of ``fxfuse.numerics`` for the norm of each gradient's error, on the scale of the gradient itself."""
    for i, (g, e, r) in enumerate(zip(gradients, eager, exact, strict=True)):
        if g is None or e is None or r is None:
            if not (g is None and e is None):
                return f"parameter {i} has {'none' if g is None else 'one'}, eager {'none' if e is None else 'one'}"
            continue
        error, eager_error = (g.double() - r).norm(), (e.double() - r).norm()
        allowed = 2 * eager_error + 4 * torch.finfo(g.dtype).eps * r.norm()
        if not error <= allowed:
            return f"of parameter {i} the norm of the error is {error.item():.3g}, {allowed.item():.3g} is allowed"
    return ""
