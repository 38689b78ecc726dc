"""Every case, with and without example inputs: where gradients are on (bit for bit) and where the fused graph runs."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import fxfuse
from fxfuse import numerics
from tests.cases import models
from tests.conftest import traced

SEED = 20240


def build(case: models.Case) -> tuple[nn.Module, list[models.Call], dict[str, Any]]:
    torch.manual_seed(SEED)
    model, calls, *rest = case.build()
    expected = rest[0] if rest else {}
    model.train(bool(expected.get("train")))
    return model, [c if isinstance(c, models.Call) else models.Call(*c) for c in calls], expected


def optimized(case: models.Case, example: bool) -> nn.Module:
    model, (first, *_), _ = build(case)
    given = example and not first.kwargs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxfuse.errors.ExampleWarning)  # some cases begin with a call that eager refuses
        result = fxfuse.optimize(model, build(case)[1][0].args) if given else fxfuse.optimize(model)
    untouched = build(case)[0]
    same_state(model, untouched)
    same_state(result, untouched)
    assert result.training == untouched.training
    return result


def same_state(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, other))
    same(ours, theirs)


def same(value: Any, other: Any) -> None:
    """Equal to the bit, NaN included, and of the same types."""
    if isinstance(other, Tensor):
        assert (value.dtype, value.shape, value.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True, check_stride=False)
    elif isinstance(other, dict):
        assert list(value) == list(other)
        for key in other:
            same(value[key], other[key])
    elif hasattr(other, "__dataclass_fields__"):
        assert type(value) is type(other)
        same(vars(value), vars(other))
    elif isinstance(other, (list, tuple)):
        # torch.fx has its own immutable list
        assert len(value) == len(other)
        assert isinstance(value, list if isinstance(other, list) else type(other))
        for pair in zip(value, other, strict=True):
            same(*pair)
    else:
        assert type(value) is type(other)
        assert value == other or (value != value and other != other)


def attempt(model: nn.Module, call: models.Call, seed: int) -> tuple[Any, Exception | None]:
    torch.manual_seed(seed)
    try:
        return model(*call.args, **call.kwargs), None
    except Exception as error:
        return None, error


def memory(outputs: Any, call: models.Call) -> list[list[bool]]:
    """Which outputs share memory with which arguments."""

    def place(t):
        return t.untyped_storage().data_ptr() if isinstance(t, Tensor) and t.numel() else object()

    arguments = [place(t) for t in tree_leaves((call.args, call.kwargs))]
    return [[place(t) == a for a in arguments] for t in tree_leaves(outputs)]


def pairs(case: models.Case, example: bool, context: Any):
    """(index, model, optimized, its call, the same call, outputs of both) of each call that eager answers."""
    model, theirs, expected = build(case)
    result, ours = optimized(case, example), build(case)[1]
    for i, (call, other) in enumerate(zip(ours, theirs, strict=True)):
        with context(), expected.get("context", contextlib.nullcontext)():
            wanted, refusal = attempt(model, other, i)
            got, error = attempt(result, call, i)
        assert (refusal is not None) == (i in expected.get("raises", ())), f"the case itself is broken: {refusal!r}"
        assert (error is None) == (refusal is None), f"call {i}: eager {refusal!r}, optimized {error!r}"
        if refusal is None:
            yield i, model, result, call, other, got, wanted


def needs_gradient(call: models.Call) -> models.Call:
    for t in tree_leaves((call.args, call.kwargs)):
        if isinstance(t, Tensor) and t.is_floating_point() and t.is_leaf and 0 not in t.stride():
            t.requires_grad_(True)
    return call


def backward(outputs: Any) -> None:
    roots = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])


@pytest.mark.parametrize("case", models.NUMERIC.values(), ids=models.NUMERIC)
def test_with_gradients(case, example):
    # gradients are wanted, so the model's own forward runs: the same to the last bit
    for i, model, result, call, other, got, wanted in pairs(case, example, torch.enable_grad):
        if isinstance(result, fx.GraphModule):  # it has no other forward than the rewritten graph
            assert numerics.judge(got, wanted, *exact(case, i, result))
        else:
            same(got, wanted)
        same((call.args, call.kwargs), (other.args, other.kwargs))
        assert memory(got, call) == memory(wanted, other)
        same_state(result, model)
    expected = build(case)[2]
    if not (expected.get("train") or expected.get("grad")):
        return
    model, theirs, _ = build(case)
    result, ours = optimized(case, example), build(case)[1]
    for i, (call, other) in enumerate(zip(ours, theirs, strict=True)):
        if i in expected.get("raises", ()):
            continue
        torch.manual_seed(i)
        backward(model(*needs_gradient(other).args, **other.kwargs))
        torch.manual_seed(i)
        backward(result(*needs_gradient(call).args, **call.kwargs))

        def gradients(m, c):
            return [t.grad for t in (*m.parameters(), *tree_leaves((c.args, c.kwargs))) if isinstance(t, Tensor)]

        if isinstance(result, fx.GraphModule):
            torch.testing.assert_close(gradients(result, call), gradients(model, other))
        else:
            same(gradients(result, call), gradients(model, other))


@pytest.mark.parametrize("case", models.NUMERIC.values(), ids=models.NUMERIC)
def test_without_gradients(case, example):
    report = None
    for i, model, result, call, other, got, wanted in pairs(case, example, torch.no_grad):
        report = fxfuse.report(result)
        assert memory(got, call) == memory(wanted, other)
        same((call.args, call.kwargs), (other.args, other.kwargs))
        same_state(result, model)
        reference = exact(case, i, result) if report.fused else None
        if reference is None:
            same(got, wanted)
        else:
            verdict = numerics.judge(plain(got), plain(wanted), *map(plain, reference))
            assert verdict, f"call {i}: {verdict.reason}"
    expected = build(case)[2]
    if report is None:
        return
    assert len(report.fused) >= expected.get("fused", 0), str(report)
    assert not (expected.get("not_fused") and report.fused), str(report)


def exact(case: models.Case, index: int, result: nn.Module) -> Any:
    """A call in float64, and its magnitudes: by torch.fx's own trace, or where that is another call by the region's.

    None where neither can be had, or where autocast rounds; the answers must be equal then.
    """
    for trace in (traced, lambda model: fxfuse.graphs(result, original=True)[""]):
        model, calls, expected = build(case)
        with contextlib.suppress(Exception):
            gm = trace(model)
            for i, call in enumerate(calls[: index + 1]):  # a model may change with each call
                torch.manual_seed(i)
                reference = numerics.reference(gm, call.args, call.kwargs)
            if not expected.get("context"):
                return reference
    return None


def plain(value: Any) -> Any:
    """Dataclasses as dicts, which torch's trees know."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(v) for name, v in vars(value).items()}
    return [plain(v) for v in value] if type(value) in (list, tuple) else value


@pytest.mark.parametrize("case", models.BEHAVIOUR.values(), ids=models.BEHAVIOUR)
def test_behaviour(case, example):
    def optimize(model, example_inputs=None):
        given = example or case.kind == "bad-input"
        return fxfuse.optimize(model, example_inputs) if given else fxfuse.optimize(model)

    torch.manual_seed(SEED)
    case.build(optimize)
