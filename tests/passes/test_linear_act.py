"""linear_act: every activation in every spelling after every spelling of a projection, and what only looks like one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from tests.conftest import Written, assert_fuses, assert_kept, ops_of, randn

ROOT_2, ROOT_2_PI = math.sqrt(2.0), math.sqrt(2.0 / math.pi)
DTYPES = (torch.float32, torch.bfloat16)


def _squared(h):
    r = torch.relu(h)
    return r * r


def _relu2_in_place(h):
    return F.relu(h).square_()


# id -> (activation of h, what it becomes: name and arguments)
SPELLINGS = {
    "nn.ReLU": (nn.ReLU(), "relu"),
    "nn.ReLU, in place": (nn.ReLU(inplace=True), "relu"),
    "F.relu": (lambda h: F.relu(h), "relu"),
    "F.relu, inplace=True": (lambda h: F.relu(h, inplace=True), "relu"),
    "F.relu, in place by position": (lambda h: F.relu(h, True), "relu"),
    "F.relu, input=": (lambda h: F.relu(input=h), "relu"),
    "F.relu_": (lambda h: F.relu_(h), "relu"),
    "torch.relu": (lambda h: torch.relu(h), "relu"),
    "torch.relu_": (lambda h: torch.relu_(h), "relu"),
    ".relu": (lambda h: h.relu(), "relu"),
    ".relu_": (lambda h: h.relu_(), "relu"),
    "aten.relu": (lambda h: torch.ops.aten.relu.default(h), "relu"),
    ".clamp(min=0)": (lambda h: h.clamp(min=0), "relu"),
    ".clamp(0)": (lambda h: h.clamp(0.0), "relu"),
    "torch.clamp": (lambda h: torch.clamp(h, min=0), "relu"),
    "torch.clip": (lambda h: torch.clip(h, 0, None), "relu"),
    ".clamp_min(0)": (lambda h: h.clamp_min(0), "relu"),
    "torch.clamp_min": (lambda h: torch.clamp_min(h, 0.0), "relu"),
    ".clamp_(min=0)": (lambda h: h.clamp_(min=0), "relu"),
    ".clamp_min_(0)": (lambda h: h.clamp_min_(0), "relu"),
    "nn.GELU": (nn.GELU(), "gelu"),
    "F.gelu": (lambda h: F.gelu(h), "gelu"),
    "F.gelu, none": (lambda h: F.gelu(h, approximate="none"), "gelu"),
    "aten.gelu": (lambda h: torch.ops.aten.gelu.default(h), "gelu"),
    "erf: x * 0.5 * (1 + erf(x / sqrt 2))": (lambda h: h * 0.5 * (1.0 + torch.erf(h / ROOT_2)), "gelu"),
    "erf: 0.5 * x * (1 + erf)": (lambda h: 0.5 * h * (1.0 + torch.erf(h / 1.4142135623730951)), "gelu"),
    "erf: x * 0.70710678": (lambda h: h * 0.5 * (1.0 + torch.erf(h * 0.7071067811865476)), "gelu"),
    "erf: x * 0.7071 in single precision": (lambda h: 0.5 * h * (torch.erf(h * 0.70710677) + 1), "gelu"),
    "erf: (erf + 1) first": (lambda h: (torch.erf(h / ROOT_2) + 1) * h * 0.5, "gelu"),
    "erf: x * (0.5 * (1 + erf))": (lambda h: h * (0.5 * (1 + torch.erf(h / ROOT_2))), "gelu"),
    "erf: x * (1 + erf) / 2": (lambda h: h * (1 + torch.erf(h / ROOT_2)) / 2, "gelu"),
    "erf: x / 2 * (1 + erf)": (lambda h: h / 2.0 * (1 + torch.erf(h / ROOT_2)), "gelu"),
    "erf: methods": (lambda h: h.mul(0.5).mul(h.div(ROOT_2).erf().add(1.0)), "gelu"),
    "erf: functions": (
        lambda h: torch.mul(torch.mul(h, 0.5), torch.add(torch.special.erf(torch.div(h, ROOT_2)), 1)),
        "gelu",
    ),
    "erf: sqrt(0.5)": (lambda h: 0.5 * h * (1 + torch.erf(math.sqrt(0.5) * h)), "gelu"),
    "nn.GELU, tanh": (nn.GELU(approximate="tanh"), "gelu_tanh"),
    "F.gelu, tanh": (lambda h: F.gelu(h, approximate="tanh"), "gelu_tanh"),
    "tanh: GPT-2": (
        lambda h: 0.5 * h * (1.0 + torch.tanh(ROOT_2_PI * (h + 0.044715 * torch.pow(h, 3.0)))),
        "gelu_tanh",
    ),
    "tanh: .pow(3)": (lambda h: 0.5 * h * (1 + torch.tanh(ROOT_2_PI * (h + 0.044715 * h.pow(3)))), "gelu_tanh"),
    "tanh: x ** 3": (lambda h: h * 0.5 * (1 + torch.tanh(ROOT_2_PI * (h + 0.044715 * h**3))), "gelu_tanh"),
    "tanh: x * x * x": (lambda h: 0.5 * h * (1 + torch.tanh(ROOT_2_PI * (h + 0.044715 * h * h * h))), "gelu_tanh"),
    "tanh: x * square": (lambda h: 0.5 * h * (1 + (ROOT_2_PI * (h + 0.044715 * h.square() * h)).tanh()), "gelu_tanh"),
    "tanh: FastGELU": (
        lambda h: 0.5 * h * (1.0 + torch.tanh(h * 0.7978845608 * (1.0 + 0.044715 * h * h))),
        "gelu_tanh",
    ),
    "tanh: BLOOM": (lambda h: h * 0.5 * (1.0 + torch.tanh(0.79788456 * h * (1 + 0.044715 * h * h))), "gelu_tanh"),
    "tanh: tanh + 1 first": (lambda h: (torch.tanh(ROOT_2_PI * (0.044715 * h**3 + h)) + 1) * 0.5 * h, "gelu_tanh"),
    "tanh: x * (0.5 * (1 + tanh))": (
        lambda h: h * (0.5 * (1 + torch.tanh(ROOT_2_PI * (h + 0.044715 * h**3)))),
        "gelu_tanh",
    ),
    "tanh: / 2": (lambda h: h * (1 + torch.tanh((h + h**3 * 0.044715) * ROOT_2_PI)) / 2, "gelu_tanh"),
    "tanh: constants multiplied out": (
        lambda h: 0.5 * h * (1 + torch.tanh(0.7978845608028654 * h + 0.035677408136300125 * h**3)),
        "gelu_tanh",
    ),
    "tanh: torch.add, torch.mul": (
        lambda h: torch.mul(0.5 * h, torch.add(torch.tanh(torch.mul(torch.add(h, 0.044715 * h**3), ROOT_2_PI)), 1)),
        "gelu_tanh",
    ),
    "tanh: alpha": (lambda h: 0.5 * h * (1 + torch.tanh(ROOT_2_PI * torch.add(h, h**3, alpha=0.044715))), "gelu_tanh"),
    "nn.SiLU": (nn.SiLU(), "silu"),
    "nn.SiLU, in place": (nn.SiLU(inplace=True), "silu"),
    "F.silu": (lambda h: F.silu(h), "silu"),
    "F.silu, inplace=True": (lambda h: F.silu(h, inplace=True), "silu"),
    "x * sigmoid(x)": (lambda h: h * torch.sigmoid(h), "silu"),
    "sigmoid(x) * x": (lambda h: torch.sigmoid(h) * h, "silu"),
    "x.mul(x.sigmoid())": (lambda h: h.mul(h.sigmoid()), "silu"),
    "torch.mul(x, F.sigmoid(x))": (lambda h: torch.mul(h, F.sigmoid(h)), "silu"),
    "x * expit(x)": (lambda h: h * torch.special.expit(h), "silu"),
    "nn.Sigmoid": (nn.Sigmoid(), "sigmoid"),
    "torch.sigmoid": (lambda h: torch.sigmoid(h), "sigmoid"),
    "F.sigmoid": (lambda h: F.sigmoid(h), "sigmoid"),
    "torch.special.expit": (lambda h: torch.special.expit(h), "sigmoid"),
    ".sigmoid": (lambda h: h.sigmoid(), "sigmoid"),
    ".sigmoid_": (lambda h: h.sigmoid_(), "sigmoid"),
    "torch.sigmoid_": (lambda h: torch.sigmoid_(h), "sigmoid"),
    "nn.Tanh": (nn.Tanh(), "tanh"),
    "torch.tanh": (lambda h: torch.tanh(h), "tanh"),
    "F.tanh": (lambda h: F.tanh(h), "tanh"),
    ".tanh": (lambda h: h.tanh(), "tanh"),
    ".tanh_": (lambda h: h.tanh_(), "tanh"),
    "x * sigmoid(1.702 * x)": (lambda h: h * torch.sigmoid(1.702 * h), "quick_gelu, (1.702,)"),
    "sigmoid(x * 1.702) * x": (lambda h: torch.sigmoid(h * 1.702) * h, "quick_gelu, (1.702,)"),
    "x.mul(sigmoid(x.mul(1.702)))": (lambda h: h.mul(h.mul(1.702).sigmoid()), "quick_gelu, (1.702,)"),
    "x * sigmoid(1.5 * x)": (lambda h: h * torch.sigmoid(1.5 * h), "quick_gelu, (1.5,)"),
    "relu(x) ** 2": (lambda h: F.relu(h) ** 2, "relu2"),
    "relu(x) ** 2.0": (lambda h: torch.relu(h) ** 2.0, "relu2"),
    "relu(x).pow(2)": (lambda h: h.relu().pow(2), "relu2"),
    "torch.pow(relu(x), 2)": (lambda h: torch.pow(F.relu(h), 2), "relu2"),
    "torch.pow(relu(x), exponent=2)": (lambda h: torch.pow(F.relu(h), exponent=2), "relu2"),
    "torch.square(relu(x))": (lambda h: torch.square(F.relu(h)), "relu2"),
    "relu(x).square()": (lambda h: F.relu(h).square(), "relu2"),
    "square_ of relu": (_relu2_in_place, "relu2"),
    "r * r": (_squared, "relu2"),
    "relu(x) * relu(x)": (lambda h: F.relu(h) * F.relu(h), "relu2"),
    "clamp(x, min=0) ** 2": (lambda h: h.clamp(min=0) ** 2, "relu2"),
    "nn.ReLU, then square": (nn.Sequential(nn.ReLU(), Written(lambda h: h.square())), "relu2"),
    "nn.LeakyReLU": (nn.LeakyReLU(0.2), "leaky_relu, (0.2,)"),
    "nn.LeakyReLU, in place": (nn.LeakyReLU(0.1, inplace=True), "leaky_relu, (0.1,)"),
    "F.leaky_relu": (lambda h: F.leaky_relu(h), "leaky_relu, (0.01,)"),
    "F.leaky_relu, 0.3": (lambda h: F.leaky_relu(h, 0.3), "leaky_relu, (0.3,)"),
    "F.leaky_relu, keyword": (lambda h: F.leaky_relu(h, negative_slope=0.3), "leaky_relu, (0.3,)"),
    "F.leaky_relu, inplace=True": (lambda h: F.leaky_relu(h, 0.3, inplace=True), "leaky_relu, (0.3,)"),
    "F.leaky_relu_": (lambda h: F.leaky_relu_(h, 0.3), "leaky_relu, (0.3,)"),
    "nn.ELU": (nn.ELU(), "elu, (1.0,)"),
    "nn.ELU, in place": (nn.ELU(0.5, inplace=True), "elu, (0.5,)"),
    "F.elu": (lambda h: F.elu(h, alpha=0.5), "elu, (0.5,)"),
    "F.elu, in place by position": (lambda h: F.elu(h, 0.5, True), "elu, (0.5,)"),
    "F.elu_": (lambda h: F.elu_(h), "elu, (1.0,)"),
    "nn.Hardswish": (nn.Hardswish(), "hardswish"),
    "F.hardswish": (lambda h: F.hardswish(h), "hardswish"),
    "F.hardswish, inplace=True": (lambda h: F.hardswish(h, inplace=True), "hardswish"),
    "nn.Hardsigmoid": (nn.Hardsigmoid(), "hardsigmoid"),
    "F.hardsigmoid": (lambda h: F.hardsigmoid(h), "hardsigmoid"),
    "F.hardsigmoid, inplace=True": (lambda h: F.hardsigmoid(h, inplace=True), "hardsigmoid"),
    "nn.Softplus": (nn.Softplus(), "softplus, (1.0, 20.0)"),
    "nn.Softplus, beta": (nn.Softplus(beta=2, threshold=3), "softplus, (2.0, 3.0)"),
    "F.softplus": (lambda h: F.softplus(h), "softplus, (1.0, 20.0)"),
    "F.softplus, beta": (lambda h: F.softplus(h, 0.5), "softplus, (0.5, 20.0)"),
    "F.softplus, threshold": (lambda h: F.softplus(h, threshold=1), "softplus, (1.0, 1.0)"),
    "nn.Mish": (nn.Mish(), "mish"),
    "nn.Mish, in place": (nn.Mish(inplace=True), "mish"),
    "F.mish": (lambda h: F.mish(h), "mish"),
    "x * tanh(softplus(x))": (lambda h: h * torch.tanh(F.softplus(h)), "mish"),
    "tanh(softplus(x)) * x": (lambda h: F.softplus(h).tanh() * h, "mish"),
    "x.mul(tanh(softplus(x)))": (lambda h: h.mul(torch.tanh(F.softplus(h))), "mish"),
}


def becomes(gm) -> list[str]:
    """Each linear_act call as ``name`` or ``name, arguments``."""
    calls = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "linear_act"]
    return [n.args[3] + (f", {n.args[4]}" if n.args[4] else "") for n in calls]


@pytest.mark.parametrize(("act", "name"), SPELLINGS.values(), ids=SPELLINGS)
def test_spelling(act, name, example):
    model = Written(lambda x, fc, act: act(fc(x)), fc=nn.Linear(6, 5), act=act)
    report = assert_fuses(
        "linear_act",
        model,
        [randn(3, 4, 6) * 3],
        new=["linear_act"],
        example=example,
        dtypes=DTYPES if example else DTYPES[:1],
    )
    (gm,) = fxfuse.graphs(fxfuse.optimize(model)).values()
    assert becomes(gm) == [name]
    assert [n for n in gm.graph.nodes if n.op.startswith("call_")] == [n for n in gm.graph.nodes if "fxfuse" in n.meta]
    assert len(report.fused) == 1


class Conv1D(nn.Module):
    """GPT-2's projection: addmm on a [K, N] weight, and a view."""

    def __init__(self, features: int, inputs: int):
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(randn(5, inputs, features))
        self.bias = nn.Parameter(randn(6, features))

    def forward(self, x):
        shape = x.size()[:-1] + (self.features,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(shape)


class InOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(5, 6, 6)), nn.Parameter(randn(6, 6))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return torch.addmm(self.bias, rows, self.weight).unflatten(0, x.shape[:-1])


NEW_GELU = SPELLINGS["tanh: GPT-2"][0]
BASES = {
    "F.linear": lambda x, w, b, fc, act: act(F.linear(x, w, b)),
    "F.linear without a bias": lambda x, w, b, fc, act: act(F.linear(x, w)),
    "aten.linear": lambda x, w, b, fc, act: act(torch.ops.aten.linear.default(x, w, b)),
    "nn.Linear without a bias": lambda x, w, b, fc, act: act(fc(x)),
    "nn.Linear without a bias, and one": lambda x, w, b, fc, act: act(fc(x) + b),
    "x @ w + b": lambda x, w, b, fc, act: act(x @ w + b),
    "x @ w": lambda x, w, b, fc, act: act(x @ w),
    "x @ w.T": lambda x, w, b, fc, act: act(x @ w.T),
    "torch.matmul, b first": lambda x, w, b, fc, act: act(b + torch.matmul(x, w.t())),
    "torch.mm": lambda x, w, b, fc, act: act(torch.mm(x, w)),
    "torch.mm and a bias": lambda x, w, b, fc, act: act(torch.mm(x, w).add_(b)),
    "torch.addmm": lambda x, w, b, fc, act: act(torch.addmm(b, x, w)),
    "torch.add, alpha": lambda x, w, b, fc, act: act(torch.add(x @ w, b, alpha=2)),
    "einsum": lambda x, w, b, fc, act: act(torch.einsum("...k,kn->...n", x, w) + b),
    "einsum without a bias": lambda x, w, b, fc, act: act(torch.einsum("...k,nk->...n", x, w)),
    "tensordot": lambda x, w, b, fc, act: act(torch.tensordot(x, w, dims=1) + b),
    "F.linear, then a view": lambda x, w, b, fc, act: act(F.linear(x, w, b).view(-1, 3, 2)),
    "F.linear, then flatten": lambda x, w, b, fc, act: act(F.linear(x, w, b).flatten()),
    "dropout in eval": lambda x, w, b, fc, act: act(F.dropout(F.linear(x, w, b), 0.1, training=False)),
    "dropout of 0": lambda x, w, b, fc, act: act(F.dropout(F.linear(x, w, b), p=0.0)),
    "divided by 1": lambda x, w, b, fc, act: act(F.linear(x, w, b) / 1.0),
}
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": lambda h: F.leaky_relu(h, 0.2),
    "elu": F.elu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "mish": F.mish,
    "relu2": _squared,
    "GPT-2's gelu": NEW_GELU,
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "ESM's gelu": SPELLINGS["erf: x * 0.5 * (1 + erf(x / sqrt 2))"][0],
}


@pytest.mark.parametrize("act", [pytest.param(ACTIVATIONS[n], id=n) for n in ("relu", "gelu", "GPT-2's gelu", "relu2")])
@pytest.mark.parametrize("row", BASES.values(), ids=BASES)
def test_projection(row, act, example):
    model = Written(row, w=randn(1, 6, 6), b=randn(2, 6), fc=nn.Linear(6, 6, bias=False), act=act)
    gone = ["linear", "matmul", "mm", "addmm", "einsum", "tensordot", "relu", "gelu", "tanh", "pow"]
    report = assert_fuses("linear_act", model, [randn(3, 4, 6)], gone=gone, new=["linear_act"], example=example)
    assert len([e for e in report.fused if e.rule == "linear_act"]) == 1
    assert not report.kept


@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("projection", [Conv1D(8, 6), InOut()], ids=["Conv1D", "flatten, addmm, unflatten"])
def test_projection_with_views_round_it(projection, act, example):
    model = nn.Sequential(projection, Written(lambda h, act: act(h), act=act))
    report = assert_fuses("linear_act", model, [randn(3, 2, 4, 6)], gone=["addmm"], new=["linear_act"], example=example)
    assert not report.kept


@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_weights_as_arguments(act):
    def row(x, w, b):
        return act(x @ w + b)

    assert_fuses("linear_act", row, [randn(3, 4, 6), randn(1, 6, 6), randn(2, 6)], gone=["matmul"], new=["linear_act"])


def test_sequential(example):
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.1), nn.Linear(6, 6), nn.ReLU(inplace=True)).eval()
    report = assert_fuses(
        "linear_act",
        model,
        [randn(3, 4, 6)],
        gone=["linear", "relu", "gelu", "dropout"],
        new=["linear_act"],
        example=example,
        source=False,
    )
    assert len(report.fused) == 2


def test_one_module_twice(example):
    def row(x, fc):
        return (torch.relu(fc(x)), fc(x + 1))

    model = Written(row, fc=nn.Linear(6, 6))
    assert_fuses("linear_act", model, [randn(3, 4, 6)], gone=["relu"], new=["linear_act", "linear"], example=example)


def test_products_of_two_calls_are_one(example):
    # The projection is written twice, as it is in `fc(x) * fc(x).sigmoid()`.
    model = Written(lambda x, fc: fc(x) * torch.sigmoid(fc(x)), fc=nn.Linear(6, 6))
    report = assert_fuses("linear_act", model, [randn(3, 4, 6)], gone=["sigmoid", "mul"], example=example)
    assert len(report.fused) == 1


def _relu_in_place_then_read(h):
    y = F.relu(h, inplace=True)
    return y + h


def _view_is_returned(h):
    first = h[0]
    return torch.relu_(h), first


def _written_before(h):
    h.mul_(2.0)
    return torch.relu(h)


def _row_written_before(h):
    h[0].zero_()
    return torch.relu(h)


def _written_after(h):
    y = torch.relu(h)
    h.zero_()
    return y


def _wrong_gelu(h):
    return 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.044715 * h**3)))


def _wrong_erf(h):
    return 0.5 * h * (1 + torch.erf(h / 1.4))


def _inner_is_returned(h):
    t = torch.tanh(h)
    return t * 2, h


# id -> (activation of h = fc(x), reason of linear_act); None: no candidate, or what becomes of it is another rule's
KEPT = {
    "pre-activation returned": (lambda h: (torch.relu(h), h), "fc is returned as well"),
    "pre-activation read": (lambda h: torch.relu(h) + h.mean(), "fc is read by mean as well"),
    "pre-activation added": (lambda h: F.gelu(h) + h, "fc is read by add as well"),
    "two activations": (lambda h: torch.relu(h) + torch.tanh(h), "fc is read by tanh as well"),
    "in place, read again": (_relu_in_place_then_read, "fc is read by add as well"),
    "in place, view returned": (_view_is_returned, "fc is read by getitem as well"),
    "written before": (_written_before, "fc is written by mul_"),
    "row written before": (_row_written_before, "fc is read by getitem as well"),
    "written after": (_written_after, "fc is written by zero_"),
    "read for its shape": (lambda h: torch.relu(h) / h.size(-1), "fc is read by size as well"),
    "gelu of other constants": (_wrong_gelu, None),
    "gelu with erf of another constant": (_wrong_erf, None),
    "tanh, pre-activation returned": (_inner_is_returned, "fc is returned as well"),
    "silu of another value": (lambda h: h * torch.sigmoid(h + 1), None),
    "swish with a negative scale": (lambda h: h * torch.sigmoid(-h), None),
    "softcap": (lambda h: torch.tanh(h / 30.0) * 30.0, None),
    "softmax": (lambda h: torch.softmax(h, -1), None),
    "norm in between": (lambda h: torch.relu(F.layer_norm(h, (5,))), None),
    "negated": (lambda h: torch.relu(-h), None),
    "scaled": (lambda h: torch.relu(h * 2), None),
    "clamp to [0, 6]": (lambda h: h.clamp(0, 6), None),
    "clamp from 1": (lambda h: h.clamp(min=1.0), None),
    "clamp from above": (lambda h: h.clamp(max=0), None),
    "relu6": (lambda h: F.relu6(h), None),
    "mish of another softplus": (lambda h: h * torch.tanh(F.softplus(h, beta=2)), "fc is read by mul as well"),
    "softplus of a computed beta": (
        lambda h: F.softplus(h, beta=h.size(-1)),
        "softplus has an argument computed at run time",
    ),
    "leaky_relu of a computed slope": (
        lambda h: F.leaky_relu(h, 1 / h.shape[0]),
        "leaky_relu has an argument computed at run time",
    ),
    "out=": (lambda h: torch.sigmoid(h, out=h), "sigmoid writes fc in place"),
    "cast in between": (lambda h: torch.relu(h.double()), None),
    "reduced": (lambda h: torch.relu(h.sum(-1)), None),
    "indexed": (lambda h: torch.relu(h[..., :2]), None),
    "transposed": (lambda h: torch.relu(h.transpose(0, 1)), None),
}


@pytest.mark.parametrize(("act", "why"), KEPT.values(), ids=KEPT)
def test_kept(act, why, example):
    model = Written(lambda x, fc, act: act(fc(x)), fc=nn.Linear(6, 5), act=act)
    assert_kept("linear_act", model, [randn(3, 4, 6)], why=why, example=example)


def test_dropout_that_drops(example):
    model = Written(lambda x, fc: torch.relu(F.dropout(fc(x), 0.5)), fc=nn.Linear(128, 128))
    x = randn(3, 4, 128)
    optimized = fxfuse.optimize(model, (x,)) if example else fxfuse.optimize(model)
    assert ops_of(optimized) == ["linear", "dropout", "relu"]
    assert not fxfuse.report(optimized).kept
    with torch.no_grad():
        torch.manual_seed(0)
        dropped = optimized(x)
        torch.manual_seed(0)
        torch.testing.assert_close(dropped, model(x))


def test_relu_of_which_more_is_read(example):
    # relu is taken in; what follows it is left
    model = Written(lambda x, fc: torch.relu(fc(x)).pow(3), fc=nn.Linear(6, 5))
    assert_fuses("linear_act", model, [randn(3, 4, 6)], gone=["relu"], new=["linear_act", "pow"], example=example)


# id -> (act of h = x @ w, w, x, reason): a bare product with an activation
BARE = {
    "weight an activation": (lambda x, w: torch.relu(x @ x.t()), "weight is an activation (t)"),
    "attention": (lambda x, w: torch.tanh((x @ w) @ x.t()), "weight is an activation (t)"),
    "weight 3-D": (lambda x, w: torch.relu(x @ w.expand(2, 6, 6)), "weight has shape (2, 6, 6), not two dimensions"),
    "rank unknown": (
        lambda x, w: torch.relu(torch.mm(x[:2], w)),
        "torch.mm takes two dimensions only (its rank is not known)",
    ),
    "product read": (lambda x, w: torch.relu(F.softmax(x @ w, -1)), None),
}


@pytest.mark.parametrize(("row", "why"), BARE.values(), ids=BARE)
def test_bare_product_kept(row, why, example):
    assert_kept("linear_act", Written(row, w=randn(1, 6, 6)), [randn(3, 4, 6)], why=why, example=example)


def test_integer_product(example):
    ones = torch.ones(6, 6, dtype=torch.int64)
    why = "weight is int64, not floating point"
    model = Written(lambda x, w: torch.relu(x @ w), w=ones)
    assert_kept("linear_act", model, [ones], why=why, example=example)


def test_exact_numerics(example):
    model = Written(lambda x, fc: torch.relu(fc(x)), fc=nn.Linear(6, 5))
    why = "numerics='exact' forbids rounding at other places"
    assert_kept("linear_act", model, [randn(3, 4, 6)], why=why, example=example, numerics="exact")


def test_excluded(example):
    model = Written(lambda x, fc: torch.relu(fc(x)), fc=nn.Linear(128, 128))
    x = randn(3, 4, 128)
    why = "excluded by Options.exclude"
    assert_kept("linear_act", model, [x], why=why, example=example, exclude="linear_act", new=["relu"])


def test_hooked_linear_stays(example):
    fc = nn.Linear(6, 6)
    fc.register_forward_hook(lambda module, args, out: out * 2)
    model = Written(lambda x, fc: torch.relu(fc(x)), fc=fc)
    optimized = fxfuse.optimize(model, (randn(3, 4, 6),)) if example else fxfuse.optimize(model)
    assert not fxfuse.report(optimized).fused
    with torch.no_grad():
        torch.testing.assert_close(optimized(randn(3, 4, 6)), model(randn(3, 4, 6)), rtol=0, atol=0)


def test_values_of_every_kind(example):
    # an identity weight hands the values to the activation as they are
    x = torch.tensor([[-1e4, -88.0, -20.0, -5.0, -1e-3, -0.0], [1e4, 88.0, 20.0, 5.0, 1e-3, 0.0]])
    for act in ACTIVATIONS.values():
        model = Written(lambda x, w, act: act(x @ w), w=torch.eye(6), act=act)
        assert_fuses("linear_act", model, [x], new=["linear_act"], example=example)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_has_no_kernel_on_any_device_stays(dtype):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()).to(dtype).eval()
    (kept,) = fxfuse.report(fxfuse.optimize(model)).kept
    assert kept.reason in (
        f"there are no kernels for {str(dtype).removeprefix('torch.')}",
        "weight is complex64, not floating point",
    )
