"""spelled_activation: arithmetic becomes the activation that it computes, and nothing else does.

What linear_act makes of each spelling stands in its own table; here is what the arithmetic itself becomes.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from tests.conftest import Written, assert_right, ops_of, randn

ROOT_2, ROOT_2_PI = math.sqrt(2.0), math.sqrt(2.0 / math.pi)
X = randn(3, 4, 6)


def optimized(act, example, **options):
    model = Written(lambda x, fc, act: act(fc(x)), fc=nn.Linear(6, 6), act=act)
    result = fxfuse.optimize(model, (X,), **options) if example else fxfuse.optimize(model, **options)
    assert_right(model, result, [X])
    return result


BECOMES = {
    "gelu, erf": (lambda h: h * 0.5 * (1.0 + torch.erf(h / ROOT_2)), "gelu"),
    "gelu, tanh": (lambda h: 0.5 * h * (1.0 + torch.tanh(ROOT_2_PI * (h + 0.044715 * torch.pow(h, 3.0)))), "gelu"),
    "silu": (lambda h: h * torch.sigmoid(h), "silu"),
    "quick_gelu": (lambda h: h * torch.sigmoid(1.702 * h), "quick_gelu"),
    "mish": (lambda h: h * torch.tanh(F.softplus(h)), "mish"),
    "relu2": (lambda h: F.relu(h) ** 2, "relu2"),
}


@pytest.mark.parametrize(("act", "name"), BECOMES.values(), ids=BECOMES)
def test_becomes(act, name, example):
    # linear_act is left out, so that the activation itself shows
    result = optimized(act, example, exclude="linear_act")
    assert ops_of(result) == ["linear", name]
    (event,) = [e for e in fxfuse.report(result).events if e.rule == "spelled_activation"]
    assert event.kind == "tidied"
    assert event.source.startswith(__file__)


@pytest.mark.parametrize(("act", "name"), BECOMES.values(), ids=BECOMES)
def test_of_a_view_and_of_half_a_projection(act, name, example):
    result = optimized(lambda h: act(h[..., :3]) + act(h.view(-1, 3)[:4]), example)
    assert ops_of(result).count(name) == 2


STAYS = {
    "0.4 for 0.5": lambda h: 0.4 * h * (1 + torch.erf(h / ROOT_2)),
    "2 for 1": lambda h: 0.5 * h * (2 + torch.erf(h / ROOT_2)),
    "minus": lambda h: 0.5 * h * (1 - torch.erf(h / ROOT_2)),
    "a minus inside": lambda h: 0.5 * h * (1 + torch.erf(-h / ROOT_2)),
    "another variable": lambda h: 0.5 * h * (1 + torch.erf((h + 1) / ROOT_2)),
    "erf of another value": lambda h: 0.5 * h * (1 + torch.erf(h.sum(0) / ROOT_2)),
    "without the half": lambda h: h * (1 + torch.erf(h / ROOT_2)),
    "without x": lambda h: 0.5 * (1 + torch.erf(h / ROOT_2)),
    "x twice": lambda h: 0.5 * h * h * (1 + torch.erf(h / ROOT_2)),
    "alpha": lambda h: 0.5 * h * torch.add(torch.erf(h / ROOT_2), 1, alpha=2),
    "fifth power": lambda h: 0.5 * h * (1 + torch.tanh(ROOT_2_PI * (h + 0.044715 * h**5))),
    "square for cube": lambda h: 0.5 * h * (1 + torch.tanh(ROOT_2_PI * (h + 0.044715 * h**2))),
    "no cube": lambda h: 0.5 * h * (1 + torch.tanh(ROOT_2_PI * h)),
    "floor division": lambda h: torch.div(h, 2, rounding_mode="floor") * (1 + torch.erf(h / ROOT_2)),
    "sigmoid of half": lambda h: h * torch.sigmoid(h.chunk(2, -1)[0]).repeat(1, 2),
    "sigmoid of -x": lambda h: h * torch.sigmoid(-h),
    "sigmoid of x + 1": lambda h: h * torch.sigmoid(h + 1),
    "sigmoid of x * x": lambda h: h * torch.sigmoid(h * h),
    "2 x sigmoid(x)": lambda h: 2 * h * torch.sigmoid(h),
    "x / sigmoid(x)": lambda h: h / torch.sigmoid(h),
    "x tanh(x)": lambda h: h * torch.tanh(h),
    "x tanh(softplus(2 x))": lambda h: h * torch.tanh(F.softplus(2 * h)),
    "x tanh(softplus(x, beta=2))": lambda h: h * torch.tanh(F.softplus(h, beta=2)),
    "relu cubed": lambda h: F.relu(h) ** 3,
    "relu to the half": lambda h: F.relu(h) ** 0.5,
    "relu times x": lambda h: F.relu(h) * h,
    "relu of the square": lambda h: F.relu(h**2),
}


@pytest.mark.parametrize("act", STAYS.values(), ids=STAYS)
def test_stays(act, example):
    result = optimized(act, example)
    assert not {"gelu", "silu", "quick_gelu", "mish", "relu2"} & set(ops_of(result))
    assert not [e for e in fxfuse.report(result).events if e.rule == "spelled_activation" and e.kind == "tidied"]


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (
            lambda h: 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.044715 * h**3))),
            "looks like gelu, but its constants are {1: 0.8, 3: 0.035772}, "
            "not {1: 0.7978845608028654, 3: 0.035677408136300125}",
        ),
        (
            lambda h: 0.5 * h * (1 + torch.erf(h * 0.7)),
            "looks like gelu, but its constants are {1: 0.7}, not {1: 0.7071067811865475}",
        ),
        (
            lambda h: 0.5 * h * (1 + torch.erf(h)),
            "looks like gelu, but its constants are {1: 1.0}, not {1: 0.7071067811865475}",
        ),
    ],
)
def test_other_constants_are_reported(act, why, example):
    report = fxfuse.report(optimized(act, example))
    assert [(e.rule, e.reason) for e in report.kept if e.rule == "spelled_activation"] == [("spelled_activation", why)]


def _curve_returned(h):
    t = torch.erf(h / ROOT_2)
    return 0.5 * h * (1.0 + t), t


def _sigmoid_returned(h):
    s = torch.sigmoid(h)
    return h * s, s


def _relu_returned(h):
    r = F.relu(h)
    return r**2, r


def _written_between(h):
    s = torch.sigmoid(h)
    h.mul_(2.0)
    return h * s


def _x_in_place(h):
    return h.mul_(torch.sigmoid(h))


def _sigmoid_in_place(h):
    return h * h.sigmoid_()


def _inner_in_place(h):
    return 0.5 * h * (1 + torch.erf(h / ROOT_2).mul_(0.5))


@pytest.mark.parametrize(
    "act",
    [
        _curve_returned,
        _sigmoid_returned,
        _relu_returned,
        _written_between,
        _x_in_place,
        _sigmoid_in_place,
        _inner_in_place,
    ],
)
def test_parts_that_are_read_or_written(act, example):
    result = optimized(act, example)
    assert not [e for e in fxfuse.report(result).events if e.rule == "spelled_activation"]


def test_integers_have_no_gelu(example):
    # the arithmetic makes floats of integers; F.silu does not take them
    model = Written(lambda x, w, n: x @ w + n * torch.sigmoid(n), w=randn(1, 6, 6), n=torch.arange(6))
    result = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert "sigmoid" in ops_of(result)
    assert_right(model, result, [X])


def test_an_input_may_be_integer(example):
    model = Written(lambda x, w: torch.relu((x * torch.sigmoid(x)) @ w), w=randn(1, 6, 6))
    result = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert "sigmoid" in ops_of(result)
    assert_right(model, result, [torch.arange(24).reshape(4, 6)])


def test_exact_numerics_leave_arithmetic(example):
    report = fxfuse.report(optimized(BECOMES["silu"][0], example, numerics="exact"))
    assert [e.kind for e in report.events] == ["kept"], "the sigmoid is the candidate that remains"


def test_a_rounded_quotient_is_no_scale(example):
    def row(x, fc):
        h = fc(x)
        return 0.5 * h * (1 + torch.erf(torch.div(h, 1.4142135623730951, rounding_mode="floor")))

    model = Written(row, fc=nn.Linear(6, 6))
    x = randn(3, 4, 6)
    optimized = fxfuse.optimize(model, (x,)) if example else fxfuse.optimize(model)
    assert not fxfuse.report(optimized).events
    with torch.no_grad():
        assert torch.equal(optimized(x), model(x))
