"""clean_up: what computes nothing goes, so that the parts of a pattern stand side by side; what computes stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from tests.conftest import Written, assert_right, ops_of, randn

X = randn(3, 4, 6)

# id -> (h -> value, ops that are gone, ops that stay), on h = fc(x) before a relu
IDLE = {
    "h / 1.0": (lambda h: h / 1.0, ["div"]),
    "h / 1": (lambda h: torch.div(h, 1), ["div"]),
    "h * 1": (lambda h: h * 1, ["mul"]),
    "1 * h": (lambda h: 1 * h, ["mul"]),
    "h.mul(1.0)": (lambda h: h.mul(1.0), ["mul"]),
    "dropout of 0": (lambda h: F.dropout(h, 0.0), ["dropout"]),
    "dropout in eval": (lambda h: F.dropout(h, 0.5, training=False), ["dropout"]),
    "dropout in eval, in place": (lambda h: F.dropout(h, 0.5, False, True), ["dropout"]),
    "torch.dropout in eval": (lambda h: torch.dropout(h, 0.5, train=False), ["dropout"]),
    "view of its own shape": (lambda h: h.view(h.shape), ["reshape", "getattr"]),
    "view of its own size": (lambda h: h.view(h.size()), ["reshape", "size"]),
    "reshape to its own shape": (lambda h: h.reshape(h.shape), ["reshape"]),
    "torch.reshape": (lambda h: torch.reshape(h, h.shape), ["reshape"]),
    "transposed twice": (lambda h: h.transpose(0, 1).transpose(0, 1), ["transpose"]),
    "transposed twice, negative": (lambda h: h.transpose(-1, -2).transpose(-2, -1), ["transpose"]),
    "transposed back": (lambda h: h.transpose(0, 1).transpose(1, 0), ["transpose"]),
    "h.t().t()": (lambda h: h.t().t(), ["t"]),
    "h.T.T": (lambda h: h.T.T, ["getattr"]),
    "h.mT.mT": (lambda h: h.mT.mT, ["getattr"]),
    "permuted twice": (lambda h: h.permute(1, 0).permute(1, 0), ["permute"]),
    "permuted by nothing": (lambda h: h.permute(0, 1), ["permute"]),
    "swapaxes twice": (lambda h: h.swapaxes(0, 1).swapaxes(0, 1), ["transpose"]),
    "nn.Identity": (nn.Identity(), ["Identity"]),
    "nn.Dropout": (nn.Dropout(0.5), ["dropout", "Dropout"]),
    "nothing": (lambda h: h, []),
    "all of them": (
        lambda h: (F.dropout(h.view(h.shape) / 1.0, 0.0) * 1).t().t(),
        ["reshape", "div", "dropout", "mul", "t"],
    ),
}


@pytest.mark.parametrize(("act", "gone"), IDLE.values(), ids=IDLE)
def test_nothing_between_a_projection_and_its_activation(act, gone, example):
    model = Written(lambda x, fc, act: torch.relu(act(fc(x))), fc=nn.Linear(6, 6), act=act).eval()
    optimized = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert ops_of(optimized) == ["linear_act"], fxfuse.graphs(optimized)[""].code
    assert_right(model, optimized, [X])
    assert [e.rule for e in fxfuse.report(optimized).events if e.kind == "fused"] == ["linear_act"]


@pytest.mark.parametrize(
    ("act", "gone"), [pair for pair in IDLE.values() if pair[1]], ids=[n for n, p in IDLE.items() if p[1]]
)
def test_exact_numerics_clean_up_too(act, gone):
    model = Written(lambda x, fc, act: torch.relu(act(fc(x))), fc=nn.Linear(6, 6), act=act).eval()
    optimized = fxfuse.optimize(model, (X,), numerics="exact")
    report = fxfuse.report(optimized)
    assert not report.fused
    assert [e.rule for e in report.events if e.kind == "tidied"] or act in (IDLE["nn.Identity"][0],)


# id -> (h -> value, op that must stay)
BUSY = {
    "h / 2": (lambda h: h / 2, "div"),
    "h * 2": (lambda h: h * 2, "mul"),
    "h * True": (lambda h: h * True, "mul"),
    "h / 1, rounded": (lambda h: torch.div(h, 1, rounding_mode="floor"), "div"),
    "h / 1, truncated": (lambda h: h.div(1, rounding_mode="trunc"), "div"),
    "1 / h": (lambda h: 1 / h, "div"),
    "view of another shape": (lambda h: h.view(6, 4), "reshape"),
    "transposed once": (lambda h: h.transpose(0, 1), "transpose"),
    "transposed by others": (lambda h: h.view(4, 3, 2).transpose(0, 1).transpose(1, 2), "transpose"),
    "permuted round": (lambda h: h.view(4, 3, 2).permute(1, 2, 0).permute(1, 2, 0), "permute"),
}


@pytest.mark.parametrize(("act", "stays"), BUSY.values(), ids=BUSY)
def test_what_computes_stays(act, stays, example):
    # beside something that is fused, since a region that gained nothing is not kept
    model = Written(lambda x, fc, act: (act(fc(x)), torch.relu(fc(x + 1))), fc=nn.Linear(6, 6), act=act)
    optimized = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert stays in ops_of(optimized)
    assert_right(model, optimized, [X])


def test_integers_stay_as_they_are(example):
    # 1.0 makes floats of integers
    def row(x, w, n):
        return torch.relu(x @ w) + n / 1.0 + n * 1

    model = Written(row, w=randn(1, 6, 6), n=torch.arange(6))
    optimized = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert {"div", "mul"} <= set(ops_of(optimized))
    assert_right(model, optimized, [X])


@pytest.mark.parametrize(
    "row",
    [
        lambda x, fc: (fc(x) / 1.0, fc(x)),
        lambda x, fc: (fc(x) * 1,) * 2,
        lambda x, fc: ((x * 1).add_(1.0), fc(x)),
        lambda x, fc: ((x / 1.0).mul_(2.0), fc(x), x),
    ],
)
def test_outputs_share_no_memory_that_they_did_not_share(row, example):
    model = Written(row, fc=nn.Linear(6, 6))
    optimized = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert_right(model, optimized, [X])
    with torch.no_grad():
        theirs, ours = model(X.clone()), optimized(X.clone())

        def same(outputs):
            return [[a.data_ptr() == b.data_ptr() for a in outputs] for b in outputs]

        assert same(ours) == same(theirs)


SAME_TWICE = {
    "sigmoid": lambda x, fc: fc(x) * torch.sigmoid(fc(x)),
    "three times": lambda x, fc: fc(x) + fc(x) * fc(x),
    "activation": lambda x, fc: torch.relu(fc(x)) + torch.relu(fc(x)) * 2,
}


@pytest.mark.parametrize("row", SAME_TWICE.values(), ids=SAME_TWICE)
def test_one_call_for_equal_calls(row, example):
    model = Written(row, fc=nn.Linear(6, 6))
    optimized = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert len([op for op in ops_of(optimized) if op in ("linear", "linear_act")]) == 1
    assert_right(model, optimized, [X])


def _written_between(x, fc):
    a = torch.sigmoid(x)
    x.mul_(2.0)
    return fc(a) + torch.sigmoid(x)


def _view_written_between(x, fc):
    first = x[0]
    a = torch.sigmoid(x)
    first.zero_()
    return fc(a) + torch.sigmoid(x)


def _result_written(x, fc):
    a = torch.sigmoid(x)
    b = torch.sigmoid(x)
    a.mul_(2.0)
    return fc(a) + b


def _both_returned(x, fc):
    return torch.sigmoid(x), torch.sigmoid(x), fc(x)


def _in_place_twice(x, fc):
    h = fc(x)
    a = h.relu_()
    return a + h.relu_()


@pytest.mark.parametrize(
    "row",
    [
        _written_between,
        _view_written_between,
        _result_written,
        _both_returned,
        _in_place_twice,
        lambda x, fc: torch.softmax(x, 0) + torch.softmax(x, 1) + fc(x),
        lambda x, fc: F.gelu(x) + F.gelu(x, approximate="tanh") + fc(x),
        lambda x, fc: F.leaky_relu(x, 0.1) + F.leaky_relu(x, 0.2) + fc(x),
    ],
)
def test_calls_that_are_not_equal(row, example):
    model = Written(row, fc=nn.Linear(6, 6))
    optimized = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert_right(model, optimized, [X])
    with torch.no_grad():
        outputs = optimized(X.clone())
    if isinstance(outputs, tuple):
        assert len({t.data_ptr() for t in outputs}) == len(outputs)


def test_true_is_not_one():
    # True == 1 and hash alike; F.gelu(h, approximate=...) and the like must not be unified by such equality
    model = Written(lambda x, fc: F.elu(fc(x), 1.0) + F.elu(fc(x), True), fc=nn.Linear(6, 6))
    assert_right(model, fxfuse.optimize(model, (X,)), [X])


VIEWS = {
    "view": lambda h: torch.relu(h.view(2, 2, 6)),
    "reshape": lambda h: F.gelu(h.reshape(-1)),
    "flatten": lambda h: torch.tanh(torch.flatten(h)),
    "unflatten": lambda h: F.silu(h.unflatten(0, (2, 2))),
    "keyword": lambda h: F.gelu(input=h.view(2, 2, 6), approximate="tanh"),
    "view(input=)": lambda h: torch.relu(torch.reshape(input=h, shape=(2, 12))),
    "in place": lambda h: F.relu(h.view(2, 2, 6), inplace=True),
    "relu_": lambda h: h.view(2, 2, 6).relu_(),
    "hand-written": lambda h: h.view(-1) * torch.sigmoid(h.view(-1)),
}


@pytest.mark.parametrize("act", VIEWS.values(), ids=VIEWS)
def test_an_activation_moves_before_a_view(act, example):
    model = Written(lambda x, fc, act: act(fc(x)), fc=nn.Linear(6, 6), act=act)
    optimized = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    ops = ops_of(optimized)
    assert ops[0] == "linear_act", fxfuse.graphs(optimized)[""].code
    assert len(ops) == 2, fxfuse.graphs(optimized)[""].code
    assert_right(model, optimized, [X])


def _view_read(h):
    v = h.view(-1)
    return torch.relu(v), v.sum()


def _view_written(h):
    v = h.view(-1)
    y = torch.relu(v)
    v.zero_()
    return y


@pytest.mark.parametrize("act", [_view_read, _view_written, lambda h: (torch.relu_(h.view(-1)), h)])
def test_views_that_are_read_or_written(act, example):
    model = Written(lambda x, fc, act: act(fc(x)), fc=nn.Linear(6, 6), act=act)
    optimized = fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)
    assert_right(model, optimized, [X])
    assert not [e for e in fxfuse.report(optimized).fused if e.rule == "linear_act"]


def test_a_graph_given_by_hand():
    gm = fx.symbolic_trace(Written(lambda x, fc: torch.relu(fc(x) / 1.0), fc=nn.Linear(6, 6)))
    new, report = fxfuse.rewrite(gm)
    assert [e.kind for e in report.events] == ["tidied", "fused"]
    assert "div" not in ops_of(new)


def test_a_view_that_leaves_out_a_dimension_stays(example):
    """Of two sizes it has two dimensions, also where x has three."""
    x = randn(0, 3, 1, 8)
    model = Written(lambda x, w, b: torch.relu(F.linear(x, w, b).view(x.size(0), 6)), w=randn(1, 6, 8), b=randn(2, 6))
    with torch.no_grad():
        assert fxfuse.optimize(model, x if example else None)(x).shape == (3, 6)
    model = Written(
        lambda x, w, b: (y := torch.relu(F.linear(x, w, b))).view(y.size(0), y.size(-1)), w=randn(1, 6, 8), b=None
    )
    with torch.no_grad():
        assert fxfuse.optimize(model, x if example else None)(x).shape == (3, 6)
        assert fxfuse.optimize(model, x[:, 0] if example else None)(x).shape == (3, 6)
        assert fxfuse.optimize(model, x if example else None)(x[:, 0]).shape == (3, 6)
