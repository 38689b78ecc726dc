"""Each call gives the model's answer, whatever was done to the model since, and the ledger says which way it went."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

import fxfuse
from tests.models.answers import right
from tests.optimize.model import HIDDEN, MLP, SMALL, WIDTH, PlusOne, assert_answers, calls_of


def test_fused_and_why_not(pair, x):
    model, optimized = pair
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
        assert_answers(optimized, model, x=x, runs="fused")
        assert_answers(optimized, model, x, None, twice=False, runs="fused")
        assert_answers(optimized, model, twice=False, x=x, residual=None, runs="fused")
        assert_answers(optimized, model, torch.randn(2, 5, WIDTH), runs="fused")
        assert_answers(optimized, model, torch.randn(0, WIDTH), runs="fused")
        assert_answers(optimized, model, torch.randn(WIDTH, 3).t(), runs="fused")
        assert_answers(optimized, model, x, x, runs="fallback", why="argument residual: expected None, found a Tensor")
        assert_answers(
            optimized, model, x, twice=True, runs="fallback", why="argument twice: expected False, found True"
        )
    with torch.inference_mode():
        assert_answers(optimized, model, torch.randn(3, WIDTH), runs="fused")
        made_here = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert_answers(optimized, model, made_here, runs="fused")


def test_errors_of_the_call_are_the_models_own(pair, x):
    model, optimized = pair
    with pytest.raises(TypeError) as expected:
        model()
    with pytest.raises(TypeError) as got:
        optimized()
    assert str(got.value) == str(expected.value)
    with torch.no_grad(), pytest.raises(RuntimeError):
        optimized(torch.randn(3, WIDTH + 1))
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


def test_gradients_take_the_plain_path(pair, x):
    model, optimized = pair
    assert_answers(optimized, model, x, runs="plain", why="gradients are needed")
    given = x.clone().requires_grad_()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert_answers(optimized, model, given, runs="plain", why="gradients are needed")
    ours, theirs = (torch.autograd.grad(m(given).sum(), given)[0] for m in (optimized, model))
    assert torch.equal(ours, theirs)
    assert_answers(optimized, model, x, runs="fused")


def test_gradients_of_the_parameters(pair, x):
    model, optimized = pair
    for m in (optimized, model):
        m(x).square().sum().backward()
        m.__dict__["grads"] = [p.grad.clone() for p in m.parameters()]
        m.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(optimized.grads, model.grads, strict=True))


def test_training_flag_at_any_time(x):
    model = MLP().train()
    optimized = fxfuse.optimize(model)
    assert optimized.training
    with torch.no_grad():
        torch.manual_seed(1)
        got = optimized(x)
        torch.manual_seed(1)
        assert torch.equal(got, model(x))
        assert calls_of(optimized).plain == 1
        assert_answers(optimized.eval(), model.eval(), x, runs="fused")
        optimized.drop.train(), model.drop.train()
        torch.manual_seed(1)
        got = optimized(x)
        torch.manual_seed(1)
        assert torch.equal(got, model(x))
        assert calls_of(optimized).plain == 2
        assert_answers(optimized.eval(), model.eval(), x, runs="fused")


CHANGES: dict[str, tuple[Callable[[MLP], Any], str]] = {
    "attribute": (lambda m: setattr(m, "scale", 2.0), "attribute scale: expected 1.0, found 2.0"),
    "private attribute": (lambda m: setattr(m, "_shift", 2.0), "attribute _shift: expected 0.0, found 2.0"),
    "type of a number": (lambda m: setattr(m, "scale", 1), "attribute scale: expected 1.0, found 1"),
    "attribute over the class's": (lambda m: setattr(m, "gain", 3.0), "attribute gain: expected 1.0, found 3.0"),
    "element of a list": (
        lambda m: m.sizes.__setitem__(0, 4.0),
        "attribute sizes: expected what it held, found [4.0, 0.0]",
    ),
    "function": (lambda m: setattr(m, "last", torch.abs), "attribute last: expected the one it was"),
    "module": (lambda m: setattr(m, "act", nn.ReLU()), "module act was replaced"),
    "linear": (lambda m: setattr(m, "up", nn.Linear(WIDTH, HIDDEN, bias=False)), "module up was replaced"),
    "forward hook": (lambda m: m.up.register_forward_hook(lambda m, a, y: y + 1), "module up has hooks: expected none"),
    "forward pre hook": (
        lambda m: m.down.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
        "module down has hooks: expected none",
    ),
    "inner forward": (
        lambda m: setattr(m.act, "forward", lambda x: x * 0.5),
        "module act has a forward of its own",
    ),
    "class": (lambda m: setattr(m.act, "__class__", nn.Tanh), "module act: expected class GELU, found Tanh"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_is_noticed(pair, x, change):
    model, optimized = pair
    alter, why = CHANGES[change]
    with torch.no_grad():
        plain = model(x)
        if change in ("linear",):
            alter(optimized)
            model.up = optimized.up
        else:
            shared = optimized.sizes is model.sizes
            alter(optimized)
            if not (change == "element of a list" and shared):
                alter(model)
        before = calls_of(optimized).fallback
        assert right(optimized(x), model, x)
        assert change == "type of a number" or not torch.equal(model(x), plain)
        assert calls_of(optimized).fallback == before + 1
        assert any(reason.startswith(why) for reason in calls_of(optimized).reasons), calls_of(optimized).reasons


def test_a_parameter_replaced_after_is_used(pair, x):
    model, optimized = pair
    optimized.up.weight = model.up.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH))
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
        optimized.down.bias = model.down.bias = None
        assert_answers(optimized, model, x, runs="fallback", why="down.bias is gone")


def test_values_written_after_are_used(pair, x):
    model, optimized = pair
    with torch.no_grad():
        model.up.weight.data += 1
        optimized.offset.fill_(3)
        assert_answers(optimized, model, x, runs="fused")
        optimized.load_state_dict(MLP().state_dict())
        assert_answers(optimized, model, x, runs="fused")
        optimized.to(torch.bfloat16)
        assert model.up.weight.dtype is torch.bfloat16
        assert_answers(optimized, model, x.bfloat16(), runs="fused")


def test_parametrization_after(pair, x):
    model, optimized = pair

    class Double(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w * 2

    parametrize.register_parametrization(optimized.up, "weight", Double())
    with torch.no_grad():
        twin = copy.deepcopy(model)
        twin.up.weight.mul_(2)
        assert right(optimized(x), twin, x)
    assert calls_of(optimized).fallback == 1
    assert type(model.up) is nn.Linear


def test_hooks_before_and_after(x):
    seen = []
    model = MLP().eval()
    model.act.register_forward_hook(lambda m, a, y: seen.append("before") or y * 2)
    optimized = fxfuse.optimize(model)
    with torch.no_grad():
        got = optimized(x)
        assert seen == ["before"]
        assert right(got, model, x)
    # A hook on the region's own module runs around the fused forward.
    optimized.register_forward_hook(lambda m, a, y: y + 1)
    with torch.no_grad():
        before = calls_of(optimized, "").fused if "" in fxfuse.report(optimized).calls else 0
        assert right(optimized(x), nn.Sequential(model, PlusOne()), x)
        assert "" not in fxfuse.report(optimized).calls or calls_of(optimized, "").fused == before + 1


def test_bound_hooks_follow_the_copy(x):
    class Counting(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0
            self.up.register_forward_hook(self.note)

        def note(self, module: nn.Module, args: Any, output: Any) -> None:
            self.count += 1

    model = Counting().eval()
    optimized = fxfuse.optimize(model)
    with torch.no_grad():
        assert right(optimized(x), model, x)
    assert (optimized.count, model.count) == (1, 1)


def test_global_hooks(pair, x):
    model, optimized = pair
    seen = []
    handle = register_module_forward_hook(lambda m, a, y: seen.append(type(m).__name__))
    try:
        with torch.no_grad():
            got = optimized(x)
    finally:
        handle.remove()
    assert seen == ["Linear", "GELU", "Dropout", "Linear", "MLP"]
    assert calls_of(optimized).reasons == {"global module hooks: expected none": 1}
    assert right(got, model, x)
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


def test_a_region_whose_assumptions_keep_failing_is_taken_out(pair, x):
    model, optimized = pair
    optimized.scale = model.scale = 3.0
    with torch.no_grad():
        for _ in range(200):
            optimized(x)
        assert right(optimized(x), model, x)
    assert calls_of(optimized).fallback < 200
    assert "forward" not in optimized.__dict__
    assert "attribute scale: expected 1.0, found 3.0" in fxfuse.report(optimized).notes[0]
    fxfuse.restore(optimized)
    assert set(optimized.__dict__) == set(model.__dict__)


_CALLERS = 1.0


def test_names_of_whoever_calls_optimize_do_not_matter(x, monkeypatch):
    model = MLP().eval()
    optimized = fxfuse.optimize(model, x * _CALLERS)
    function = fxfuse.optimize(lambda x: torch.relu(x @ torch.ones(WIDTH, SMALL)), x * _CALLERS)
    monkeypatch.setitem(globals(), "_CALLERS", 2.0)
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
        function(x)
    assert calls_of(function).fused == 1
