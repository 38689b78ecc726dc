"""gated_linear: act(gate(x)) * up(x) in every spelling, and what only looks like it."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from tests.conftest import Written, assert_fuses, assert_kept, randn

DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu, tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu, tanh by hand": lambda h: 0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h.pow(3)))),
    "gelu, erf by hand": lambda h: h * 0.5 * (1.0 + torch.erf(h / 2**0.5)),
    "silu": F.silu,
    "silu by hand": lambda h: h * torch.sigmoid(h),
    "silu in place": lambda h: F.silu(h, inplace=True),
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda h: h.sigmoid_(),
    "tanh": torch.tanh,
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "relu2": lambda h: F.relu(h) ** 2,
    "leaky_relu": lambda h: F.leaky_relu(h, 0.2),
    "elu": lambda h: F.elu(h, 0.5),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": lambda h: F.softplus(h, 2.0, 10.0),
    "mish": F.mish,
    "mish by hand": lambda h: h * torch.tanh(F.softplus(h)),
    "clamp": lambda h: h.clamp(min=0),
}
MODULES = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": nn.ReLU(inplace=True),
    "nn.GELU": nn.GELU(),
    "nn.SiLU": nn.SiLU(),
    "nn.GELU tanh": nn.GELU(approximate="tanh"),
    "nn.Sigmoid": nn.Sigmoid(),
    "nn.Tanh": nn.Tanh(),
    "nn.LeakyReLU": nn.LeakyReLU(0.2),
    "nn.ELU": nn.ELU(),
    "nn.Hardswish": nn.Hardswish(),
    "nn.Hardsigmoid": nn.Hardsigmoid(),
    "nn.Softplus": nn.Softplus(),
    "nn.Mish": nn.Mish(),
}
GONE = ["linear", "matmul", "mm", "add", "mul", "chunk", "split", "getitem", "narrow", "glu", "einsum"]


def projection(seed: int, bias: bool = True, features: int = 6) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(6, features, bias=bias)


ORDERS = {
    "act(gate) * up": lambda x, gate, up, act: act(gate(x)) * up(x),
    "up * act(gate)": lambda x, gate, up, act: up(x) * act(gate(x)),
}


@pytest.mark.parametrize("act", [*ACTIVATIONS.values(), *MODULES.values()], ids=[*ACTIVATIONS, *MODULES])
@pytest.mark.parametrize("row", ORDERS.values(), ids=ORDERS)
def test_activation(row, act, example):
    model = Written(row, gate=projection(1), up=projection(2), act=act)
    report = assert_fuses(
        "gated_linear",
        model,
        [randn(3, 4, 6)],
        gone=GONE,
        new=["gated_linear"],
        example=example,
        dtypes=DTYPES if example else DTYPES[:1],
    )
    assert len(report.fused) == 1
    assert not report.kept


# h is made by two projections: x, wg, bg, wu, bu -> product
SEPARATE = {
    "F.linear": lambda x, wg, bg, wu, bu: F.silu(F.linear(x, wg, bg)) * F.linear(x, wu, bu),
    "torch.mul": lambda x, wg, bg, wu, bu: torch.mul(F.silu(F.linear(x, wg, bg)), F.linear(x, wu, bu)),
    ".mul": lambda x, wg, bg, wu, bu: F.linear(x, wu, bu).mul(F.silu(F.linear(x, wg, bg))),
    ".mul_": lambda x, wg, bg, wu, bu: F.silu(F.linear(x, wg, bg)).mul_(F.linear(x, wu, bu)),
    "*=": lambda x, wg, bg, wu, bu: operator.imul(F.linear(x, wu, bu), F.silu(F.linear(x, wg, bg))),
    "torch.multiply": lambda x, wg, bg, wu, bu: torch.multiply(F.silu(F.linear(x, wg, bg)), F.linear(x, wu, bu)),
    "no biases": lambda x, wg, bg, wu, bu: F.silu(F.linear(x, wg)) * F.linear(x, wu),
    "bias on the gate": lambda x, wg, bg, wu, bu: F.silu(F.linear(x, wg, bg)) * F.linear(x, wu),
    "bias on up": lambda x, wg, bg, wu, bu: F.linear(x, wu, bu) * F.silu(F.linear(x, wg)),
    "matmul and add": lambda x, wg, bg, wu, bu: F.silu(x @ wg + bg) * (x @ wu + bu),
    "matmul": lambda x, wg, bg, wu, bu: F.silu(x @ wg) * (x @ wu),
    "matmul of transposed": lambda x, wg, bg, wu, bu: F.silu(x @ wg.T) * (x @ wu.t()),
    "matmul, bias on the gate": lambda x, wg, bg, wu, bu: F.silu(x @ wg + bg) * (x @ wu),
    "matmul, bias on up": lambda x, wg, bg, wu, bu: (x @ wu + bu) * F.silu(x @ wg),
    "matmul gate, linear up": lambda x, wg, bg, wu, bu: F.silu(x @ wg) * F.linear(x, wu, bu),
    "linear gate, matmul up": lambda x, wg, bg, wu, bu: F.silu(F.linear(x, wg, bg)) * torch.matmul(x, wu),
    "einsum": lambda x, wg, bg, wu, bu: (
        F.silu(torch.einsum("...k,kn->...n", x, wg)) * torch.einsum("...k,nk->...n", x, wu)
    ),
    "one weight twice": lambda x, wg, bg, wu, bu: F.silu(F.linear(x, wg, bg)) * F.linear(x, wg, bu),
    "a weight and its transpose": lambda x, wg, bg, wu, bu: F.silu(F.linear(x, wg, bg)) * F.linear(x, wg.t(), bu),
    "dropout in eval": lambda x, wg, bg, wu, bu: F.dropout(F.silu(F.linear(x, wg, bg)), 0.1, False) * F.linear(x, wu),
    "both activated: the first": lambda x, wg, bg, wu, bu: F.silu(F.linear(x, wg, bg)) * F.linear(x, wu, bu) / 1.0,
}
WEIGHTS = {"wg": randn(1, 6, 6), "bg": randn(2, 6), "wu": randn(4, 6, 6), "bu": randn(5, 6)}


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("row", SEPARATE.values(), ids=SEPARATE)
def test_separate(row, shape, example):
    model = Written(row, **WEIGHTS)
    report = assert_fuses("gated_linear", model, [randn(3, *shape)], gone=GONE, new=["gated_linear"], example=example)
    assert len([e for e in report.fused if e.rule == "gated_linear"]) == 1


@pytest.mark.parametrize("row", SEPARATE.values(), ids=SEPARATE)
def test_separate_with_weights_as_arguments(row):
    assert_fuses("gated_linear", row, [randn(3, 4, 6), *WEIGHTS.values()], gone=GONE, new=["gated_linear"])


def test_mm(example):
    def row(x, wg, bg, wu, bu):
        return F.silu(torch.mm(x, wg)) * torch.mm(x, wu)

    assert_fuses(
        "gated_linear", Written(row, **WEIGHTS), [randn(3, 4, 6)], gone=GONE, new=["gated_linear"], example=example
    )


def _chunk(h, n):
    return h.chunk(2, dim=-1)


def _split_at(h):
    return h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :]


def _split_at_size(h):
    half = h.size(-1) // 2
    return h[..., :half], h[..., half:]


# id -> h of 2 n features taken apart, n = 4
PARTS = {
    "h.chunk(2, dim=-1)": _chunk,
    "h.chunk(2, -1)": lambda h, n: h.chunk(2, -1),
    "torch.chunk": lambda h, n: torch.chunk(h, 2, dim=-1),
    "torch.chunk, keywords": lambda h, n: torch.chunk(input=h, chunks=2, dim=-1),
    "h.chunk(chunks=2)": lambda h, n: h.chunk(chunks=2, dim=-1),
    "h.split(n)": lambda h, n: h.split(n, dim=-1),
    "h.split(n, -1)": lambda h, n: h.split(n, -1),
    "h.split([n, n])": lambda h, n: h.split([n, n], dim=-1),
    "h.split((n, n))": lambda h, n: h.split((n, n), dim=-1),
    "torch.split": lambda h, n: torch.split(h, n, dim=-1),
    "torch.split([n, n])": lambda h, n: torch.split(h, [n, n], dim=-1),
    "split by half of the size": lambda h, n: h.split(h.shape[-1] // 2, dim=-1),
    "split by h.size(-1) // 2": lambda h, n: torch.split(h, h.size(-1) // 2, dim=-1),
    "split_with_sizes": lambda h, n: h.split_with_sizes([n, n], dim=-1),
    "torch.split_with_sizes": lambda h, n: torch.split_with_sizes(h, [n, n], -1),
    "h.tensor_split(2)": lambda h, n: h.tensor_split(2, dim=-1),
    "torch.tensor_split": lambda h, n: torch.tensor_split(h, 2, dim=-1),
    "torch.tensor_split at [n]": lambda h, n: torch.tensor_split(h, [n], dim=-1),
    "tensor_split at (n,)": lambda h, n: h.tensor_split((n,), dim=-1),
    "narrow": lambda h, n: (h.narrow(-1, 0, n), h.narrow(-1, n, n)),
    "torch.narrow": lambda h, n: (torch.narrow(h, -1, 0, n), torch.narrow(h, dim=-1, start=n, length=n)),
    "narrow from the end": lambda h, n: (h.narrow(-1, 0, n), h.narrow(-1, -n, n)),
    "h[..., :n], h[..., n:]": lambda h, n: (h[..., :n], h[..., n:]),
    "h[..., 0:n], h[..., n:2n]": lambda h, n: (h[..., 0:n], h[..., n : 2 * n]),
    "h[..., :-n], h[..., -n:]": lambda h, n: (h[..., :-n], h[..., -n:]),
    "h[..., :n:1]": lambda h, n: (h[..., :n:1], h[..., n::1]),
    "h[..., :h.shape[-1] // 2]": lambda h, n: _split_at(h),
    "half = h.size(-1) // 2": lambda h, n: _split_at_size(h),
    "h.shape[-1] // 2 of size()": lambda h, n: (h[..., : h.size()[-1] // 2], h[..., h.size()[-1] // 2 :]),
    "h[..., ::2], h[..., 1::2]": lambda h, n: (h[..., ::2], h[..., 1::2]),
    "h[..., 0::2], h[..., 1::2]": lambda h, n: (h[..., 0::2], h[..., 1::2]),
    "chunk and an index": lambda h, n: (h.chunk(2, -1)[0], h.chunk(2, -1)[1]),
    "chunk and index -1": lambda h, n: (h.chunk(2, -1)[0], h.chunk(2, -1)[-1]),
}
OF_TWO = {  # where the number of dimensions is known, or taken for granted
    "chunk(2, 1)": lambda h, n: h.chunk(2, 1),
    "chunk(2, dim=1)": lambda h, n: torch.chunk(h, 2, dim=1),
    "split(n, 1)": lambda h, n: h.split(n, 1),
    "split([n, n], dim=1)": lambda h, n: h.split([n, n], dim=1),
    "tensor_split(2, dim=1)": lambda h, n: h.tensor_split(2, dim=1),
    "narrow(1)": lambda h, n: (h.narrow(1, 0, n), h.narrow(1, n, n)),
    "h[:, :n], h[:, n:]": lambda h, n: (h[:, :n], h[:, n:]),
    "h[:, ::2], h[:, 1::2]": lambda h, n: (h[:, ::2], h[:, 1::2]),
    "h.shape[-1] // 2": lambda h, n: (h[:, : h.shape[-1] // 2], h[:, h.shape[-1] // 2 :]),
}
OF_THREE = {
    "chunk(2, 2)": lambda h, n: h.chunk(2, 2),
    "split(n, dim=2)": lambda h, n: h.split(n, dim=2),
    "h[:, :, :n], h[:, :, n:]": lambda h, n: (h[:, :, :n], h[:, :, n:]),
}
PACKED = [
    *[pytest.param(parts, (2, 3, 6), id=name) for name, parts in PARTS.items()],
    *[pytest.param(parts, (4, 6), id=f"{name} (2-D)") for name, parts in OF_TWO.items()],
    *[pytest.param(parts, (2, 3, 6), id=f"{name} (3-D)") for name, parts in OF_THREE.items()],
]
SIDES = {
    "act(first) * second": lambda a, b: F.silu(a) * b,
    "second * act(first)": lambda a, b: b * F.silu(a),
    "first * act(second)": lambda a, b: a * F.silu(b),
    "act(second) * first": lambda a, b: torch.mul(F.silu(b), a),
}


def _packed(x, fc, parts, side, n):
    a, b = parts(fc(x), n)
    return side(a, b)


@pytest.mark.parametrize("side", [pytest.param(act, id=name) for name, act in SIDES.items() if "* act(" not in name])
@pytest.mark.parametrize(("parts", "shape"), PACKED)
def test_packed(parts, shape, side):
    model = Written(_packed, fc=projection(1, features=8), parts=parts, side=side, n=4)
    for example in (False, True):
        report = assert_fuses(
            "gated_linear", model, [randn(3, *shape)], gone=GONE, new=["gated_linear_packed"], example=example
        )
        assert len(report.fused) == 1
        assert not report.kept


WHOLE = {
    "F.linear": lambda x, w, b: F.linear(x, w, b),
    "F.linear without a bias": lambda x, w, b: F.linear(x, w),
    "x @ w.T + b": lambda x, w, b: x @ w.T + b,
    "x @ w.T": lambda x, w, b: x @ w.T,
    "torch.matmul": lambda x, w, b: torch.matmul(x, w.t()),
    "torch.mm": lambda x, w, b: torch.mm(x, w.t()),
    "torch.addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "einsum": lambda x, w, b: torch.einsum("...k,nk->...n", x, w),
    "dropout in eval": lambda x, w, b: F.dropout(F.linear(x, w, b), 0.5, training=False),
}
GLU = {
    "F.glu": lambda h: F.glu(h),
    "F.glu, dim=-1": lambda h: F.glu(h, dim=-1),
    "F.glu, by position": lambda h: F.glu(h, -1),
    "F.glu, dim=1": lambda h: F.glu(h, dim=1),
    "aten.glu": lambda h: torch.ops.aten.glu.default(h),
    "chunk": lambda h: operator.mul(h.chunk(2, -1)[0], torch.sigmoid(h.chunk(2, -1)[1])),
    "halves": lambda h: F.silu(h[..., :4]) * h[..., 4:],
}


@pytest.mark.parametrize("act", GLU.values(), ids=GLU)
@pytest.mark.parametrize("whole", WHOLE.values(), ids=WHOLE)
def test_packed_projection(whole, act, example):
    model = Written(
        lambda x, w, b, whole, act: act(whole(x, w, b)), w=randn(1, 8, 6), b=randn(2, 8), whole=whole, act=act
    )
    assert_fuses(
        "gated_linear",
        model,
        [randn(3, 4, 6)],
        gone=GONE,
        new=["gated_linear_packed"],
        example=example,
        dtypes=DTYPES if example else DTYPES[:1],
    )


@pytest.mark.parametrize("whole", WHOLE.values(), ids=WHOLE)
def test_packed_projection_with_weights_as_arguments(whole):
    def row(x, w, b):
        return GLU["halves"](whole(x, w, b))

    assert_fuses(
        "gated_linear", row, [randn(3, 4, 6), randn(1, 8, 6), randn(2, 8)], gone=GONE, new=["gated_linear_packed"]
    )


@pytest.mark.parametrize("glu", [nn.GLU(), nn.GLU(dim=-1), nn.GLU(dim=1)], ids=["dim default", "dim -1", "dim 1"])
def test_glu_module(glu, example):
    model = Written(lambda x, fc, glu: glu(fc(x)), fc=projection(1, features=8), glu=glu)
    assert_fuses("gated_linear", model, [randn(3, 4, 6)], gone=GONE, new=["gated_linear_packed"], example=example)


@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_packed_activation(act, example):
    model = Written(_packed, fc=projection(1, features=8), parts=_chunk, side=lambda a, b: act(a) * b, n=4)
    report = assert_fuses(
        "gated_linear", model, [randn(3, 4, 6)], gone=GONE, new=["gated_linear_packed"], example=example
    )
    assert len(report.fused) == 1
    assert not report.kept


class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(6, 8, False),
            nn.Linear(6, 8, False),
            nn.Linear(8, 6, False),
        )

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def test_whole_mlp(example):
    assert_fuses(
        "gated_linear",
        SwiGlu(),
        [randn(3, 2, 4, 6)],
        gone=["mul", "silu"],
        new=["gated_linear", "linear"],
        example=example,
        dtypes=DTYPES,
    )


def test_mlps_back_to_back(example):
    model = nn.Sequential(SwiGlu(), SwiGlu(), SwiGlu())
    report = assert_fuses("gated_linear", model, [randn(3, 4, 6)], gone=["mul", "silu"], example=example)
    assert len(report.fused) == 3


def test_gate_and_up_are_one_module(example):
    # silu(h) * h: one projection, read twice
    model = Written(lambda x, fc: F.silu(fc(x)) * fc(x), fc=projection(1))
    report = assert_kept("gated_linear", model, [randn(3, 4, 6)], why=None, example=example)
    assert [(e.rule, e.reason) for e in report.kept] == [("linear_act", "fc is read by mul as well")]


def _gate_returned(x, gate, up):
    g = gate(x)
    return F.silu(g) * up(x), g


def _activated_returned(x, gate, up):
    a = F.silu(gate(x))
    return a * up(x), a


def _up_read(x, gate, up):
    u = up(x)
    return F.silu(gate(x)) * u + u.mean()


def _input_written(x, gate, up):
    g = gate(x)
    x.zero_()
    return F.silu(g) * up(x)


def _view_of_input_written(x, gate, up):
    first = x[0]
    g = F.silu(gate(x))
    first.zero_()
    return g * up(x)


def _gate_written(x, gate, up):
    g = gate(x)
    u = up(x)
    g.mul_(2.0)
    return F.silu(g) * u


def _up_written(x, gate, up):
    u = up(x)
    u[0].zero_()
    return F.silu(gate(x)) * u


def _depends(x, gate, up):
    g = F.silu(gate(x))
    return g * up(x + g)


SEPARATE_KEPT = {
    "gate returned": (_gate_returned, "gate is returned as well"),
    "activated gate returned": (_activated_returned, "silu is returned as well"),
    "up read": (_up_read, "up is read by mean as well"),
    "input written": (_input_written, "zero_ writes, before mul, what the match reads"),
    "view of input written": (_view_of_input_written, "zero_ writes, before mul, what the match reads"),
    "gate written": (_gate_written, "gate is written by mul_"),
    "row of up written": (_up_written, "up is read by getitem as well"),
    "another input": (lambda x, gate, up: F.silu(gate(x)) * up(x + 1), None),
    "up of the gate": (lambda x, gate, up: F.silu(gate(x)) * up(gate(x)), None),
    "up of the activated gate": (_depends, None),
    "activation of the product": (lambda x, gate, up: F.silu(gate(x) * up(x)), None),
    "no activation": (lambda x, gate, up: gate(x) * up(x), None),
    "both activated": (lambda x, gate, up: F.silu(gate(x)) * torch.tanh(up(x)), None),
    "sum": (lambda x, gate, up: F.silu(gate(x)) + up(x), None),
    "quotient": (lambda x, gate, up: F.silu(gate(x)) / up(x), None),
    "norm on the gate": (lambda x, gate, up: F.silu(F.layer_norm(gate(x), (6,))) * up(x), None),
    "up scaled": (lambda x, gate, up: F.silu(gate(x)) * (up(x) * 2), None),
    "up shifted, as GPT-OSS does": (lambda x, gate, up: (up(x) + 1) * F.silu(gate(x)), None),
    "gate scaled": (lambda x, gate, up: F.silu(gate(x) * 2) * up(x), None),
    "product with the input": (lambda x, gate, up: F.sigmoid(gate(x)) * x, None),
    "a number": (lambda x, gate, up: F.silu(gate(x)) * 2, None),
    "computed argument": (
        lambda x, gate, up: F.softplus(gate(x), x.size(-1)) * up(x),
        "softplus has an argument computed at run time",
    ),
    "out=": (lambda x, gate, up: torch.mul(F.silu(gate(x)), up(x), out=x), "mul writes x in place"),
}


@pytest.mark.parametrize(("row", "why"), SEPARATE_KEPT.values(), ids=SEPARATE_KEPT)
def test_separate_kept(row, why, example):
    model = Written(row, gate=projection(1), up=projection(2))
    assert_kept("gated_linear", model, [randn(3, 4, 6)], why=why, example=example)


def _halves(first, second):
    return lambda h: F.silu(first(h)) * second(h)


def _whole_returned(h):
    a, b = h.chunk(2, -1)
    return F.silu(a) * b, h


def _part_returned(h):
    a, b = h.chunk(2, -1)
    return F.silu(a) * b, b


def _part_twice(h):
    a, b = h.chunk(2, -1)
    return F.silu(a) * b + a


def _size_returned(h):
    n = h.shape[-1] // 2
    return F.silu(h[..., :n]) * h[..., n:], n


def _whole_written(h):
    a, b = h.chunk(2, -1)
    h.mul_(2.0)
    return F.silu(a) * b


def _part_written(h):
    a, b = h.chunk(2, -1)
    b.mul_(2.0)
    return F.silu(a) * b


def _three(h):
    a, b, _ = h.chunk(3, -1)
    return F.silu(a) * b


def _other_parts(h, other):
    return F.silu(h.chunk(2, -1)[0]) * other.chunk(2, -1)[1]


NOT_HALVES = "the two parts are not the two halves of fc"
# id -> (what is done with h [4, 12], reason)
PACKED_KEPT = {
    "whole returned": (_whole_returned, "fc is returned as well"),
    "part returned": (_part_returned, "getitem_1 is returned as well"),
    "part read twice": (_part_twice, "getitem is read by add as well"),
    "half of the size returned": (_size_returned, "floordiv is returned as well"),
    "whole written": (_whole_written, "fc is written by mul_"),
    "part written": (_part_written, "getitem_1 is written by mul_"),
    "first with itself": (_halves(lambda h: h[..., :6], lambda h: h[..., :6]), NOT_HALVES),
    "overlapping": (_halves(lambda h: h[..., :6], lambda h: h[..., 5:11]), NOT_HALVES),
    "a gap": (_halves(lambda h: h[..., :5], lambda h: h[..., 7:]), NOT_HALVES),
    "unequal split": (lambda h: F.silu(h.split([6, 6], -1)[0]) * h.split([6, 5, 1], -1)[0], None),
    "halves in another order of narrow": (
        _halves(lambda h: h.narrow(-1, 0, 6), lambda h: h.narrow(-1, 1, 6)),
        NOT_HALVES,
    ),
    "strided with a half": (_halves(lambda h: h[..., ::2], lambda h: h[..., 6:]), NOT_HALVES),
    "strided with itself": (_halves(lambda h: h[..., ::2], lambda h: h[..., ::2]), NOT_HALVES),
    "every third": (_halves(lambda h: h[..., ::3], lambda h: h[..., 1::3]), None),
    "chunk(3)": (_three, None),
    "chunk(4)": (lambda h: F.silu(h.chunk(4, -1)[0]) * h.chunk(4, -1)[1], None),
    "chunk over the rows": (
        lambda h: F.silu(h.chunk(2, 0)[0]) * h.chunk(2, 0)[1],
        "dimension 0 is the last one only of 1 dimensions",
    ),
    "chunk over the rows, dim left out": (
        lambda h: F.silu(h.chunk(2)[0]) * h.chunk(2)[1],
        "dimension 0 is the last one only of 1 dimensions",
    ),
    "split over the rows": (
        lambda h: F.silu(h.split(6)[0]) * h.split(6)[1],
        "dimension 0 is the last one only of 1 dimensions",
    ),
    "slices of the rows": (lambda h: F.silu(h[:6]) * h[6:], None),
    "one feature": (lambda h: F.silu(h[..., 0]) * h[..., 1], None),
    "view in between": (lambda h: F.silu(h.view(-1, 2, 6)[:, 0]) * h.view(-1, 2, 6)[:, 1], None),
    "norm in between": (lambda h: _halves(lambda h: h[..., :6], lambda h: h[..., 6:])(F.layer_norm(h, (12,))), None),
    "no activation": (lambda h: h[..., :6] * h[..., 6:], None),
    "glu over the rows": (lambda h: F.glu(h, 0), "dimension 0 is the last one only of 1 dimensions"),
    "glu over the last but one": (lambda h: F.glu(h, -2), "glu over dimension -2, not the last"),
    "glu of a norm": (lambda h: F.glu(F.layer_norm(h, (12,))), None),
}


@pytest.mark.parametrize(("act", "why"), PACKED_KEPT.values(), ids=PACKED_KEPT)
def test_packed_kept(act, why):
    # with an example: whether dimension 0 is the last one is then known
    model = Written(lambda x, fc, act: act(fc(x)), fc=projection(1, features=12), act=act)
    assert_kept("gated_linear", model, [randn(3, 12, 6)], why=why)


def test_parts_of_two_projections(example):
    def row(x, gate, up):
        return F.silu(gate(x).chunk(2, -1)[0]) * up(x).chunk(2, -1)[1]

    model = Written(row, gate=projection(1), up=projection(2))
    assert_kept("gated_linear", model, [randn(3, 4, 6)], why=None, example=example)


def test_odd_width(example):
    def row(x, fc):
        return F.silu(fc(x)[..., :3]) * fc(x)[..., 4:]

    assert_kept("gated_linear", Written(row, fc=projection(1, features=7)), [randn(3, 4, 6)], why=None, example=example)


def test_gate_narrower_than_up(example):
    model = Written(lambda x, gate, up: F.silu(gate(x)) * up(x), gate=projection(1, features=1), up=projection(2))
    assert_kept("gated_linear", model, [randn(3, 4, 6)], why="gate has 1 features, up 6", example=example)


def test_dimension_taken_for_granted_is_checked():
    model = Written(lambda x, fc: F.silu(fc(x).chunk(2, 1)[0]) * fc(x).chunk(2, 1)[1], fc=projection(1, features=8))
    optimized = fxfuse.optimize(model)
    x = randn(3, 5, 4, 6)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), rtol=0, atol=0)
    (reason,) = fxfuse.report(optimized).calls[""].reasons
    assert reason == "argument x: expected 2 dimensions, found 3"


def test_exact_numerics(example):
    why = "numerics='exact' forbids rounding at other places"
    assert_kept("gated_linear", SwiGlu(), [randn(3, 4, 6)], why=why, example=example, numerics="exact")


def test_excluded(example):
    assert_kept(
        "gated_linear",
        SwiGlu(),
        [randn(3, 4, 6)],
        why="excluded by Options.exclude",
        example=example,
        exclude="gated_linear",
        new=["linear_act", "mul"],
    )


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), nn.Dropout(0.0)], ids=["p 0.5", "p 0"])
def test_dropout_module(drop, example):
    model = Written(
        lambda x, gate, up, drop: drop(F.silu(gate(x))) * up(x), gate=projection(1), up=projection(2), drop=drop
    )
    assert_fuses("gated_linear", model.eval(), [randn(3, 4, 6)], gone=GONE, new=["gated_linear"], example=example)
    optimized = fxfuse.optimize(model.eval(), (randn(3, 4, 6),))
    optimized.train()
    torch.manual_seed(0)
    ours = optimized(randn(3, 4, 6))
    torch.manual_seed(0)
    torch.testing.assert_close(ours, model.train()(randn(3, 4, 6)), rtol=0, atol=0)


def test_taken_apart_from_behind(example):
    model = Written(
        lambda x, fc: torch.nn.functional.silu(fc(x).chunk(2, -2)[0]) * fc(x).chunk(2, -2)[1], fc=nn.Linear(6, 6)
    )
    why = "taken apart along dimension -2, not the last"
    assert_kept("gated_linear", model, [randn(3, 4, 6)], why=why, example=example)
