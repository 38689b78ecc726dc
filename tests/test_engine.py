"""The engine: order of passes, bound on rewriting, provenance, operand order and near misses, what a refusal says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fxfuse.passes import DEFAULT
from torch import fx, nn

import fxfuse
from fxfuse import engine, errors
from fxfuse.options import Options
from fxfuse.rule import Rule
from tests.conftest import Written, assert_fuses, randn


def traced(function, **state) -> fx.GraphModule:
    return fx.symbolic_trace(Written(function, **state))


def run(gm: fx.GraphModule, *rules: Rule, **options) -> engine.Rewriting:
    return engine.run(gm, rules, Options(**options))


def names(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op.startswith("call_")]


class ReluToTanh(Rule):
    def pattern(self, op, x):
        return op.relu(x)

    def rewrite(self, m, graph):
        return graph.call_function(torch.tanh, (m.x,))


class TanhToRelu(Rule):
    def pattern(self, op, x):
        return op.tanh(x)

    def rewrite(self, m, graph):
        return graph.call_function(torch.relu, (m.x,))


class PingPong(Rule):
    """Its own replacement keeps matching it."""

    def pattern(self, op, x):
        return op.any_of("act", ("relu", "tanh"), x)

    def rewrite(self, m, graph):
        return graph.call_function(torch.tanh if m.op("act") == "relu" else torch.relu, (m.x,))


class ReadsItself(Rule):
    """Leaves a graph that uses a value before it is made."""

    def pattern(self, op, x):
        return op.relu(x)

    def rewrite(self, m, graph):
        new = graph.call_function(torch.tanh, (m.x,))
        new.args = tuple(m.root.users)
        return new


def test_passes_run_in_the_order_given():
    gm = traced(lambda x: torch.relu(x))
    run(gm, ReluToTanh(), TanhToRelu())
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [torch.relu]
    gm = traced(lambda x: torch.relu(x))
    run(gm, TanhToRelu(), ReluToTanh())
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [torch.tanh]


def test_the_order_of_the_default_passes():
    order = list(dict.fromkeys(rule.name for rule in DEFAULT))
    assert order == ["clean_up", "spelled_activation", "matmul_add", "gated_linear", "linear_act", "lower_linear"]


def test_a_rule_that_finds_work_for_ever_is_named():
    gm = traced(lambda x: torch.relu(x))
    with pytest.raises(errors.RewriteFailed, match=r"pass PingPong .* it still found work after 16 sweeps"):
        run(gm, PingPong())


def test_an_invalid_graph_names_its_pass():
    gm = traced(lambda x: torch.neg(torch.relu(x)))
    with pytest.raises(
        errors.RewriteFailed, match=r"(?s)pass ReadsItself left an invalid graph: .*used before.*exclude"
    ):
        run(gm, ReadsItself())


def test_excluded_by_name():
    gm = traced(lambda x: torch.relu(x))
    (event,) = run(gm, ReluToTanh(), exclude=[ReluToTanh().name]).events
    assert (event.kind, event.reason) == ("kept", "excluded by Options.exclude")


def test_exact_numerics_leave_only_exact_rules():
    gm = traced(lambda x: torch.relu(x))
    (event,) = run(gm, ReluToTanh(), numerics="exact").events
    assert (event.kind, event.reason) == ("kept", "numerics='exact' forbids rounding at other places")


def test_provenance():
    gm, report = fxfuse.rewrite(traced(lambda x, w, b: torch.relu(x @ w + b), w=randn(1, 6, 6), b=randn(2, 6)))
    (new,) = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "linear_act"]
    assert new.meta["fxfuse"] == "LinearAct"
    assert new.meta["fxfuse_from"] == ("relu", "add", "matmul")
    (helper,) = [n for n in gm.graph.nodes if n.target is torch.t]
    assert helper.meta["fxfuse"] == "MatmulAdd"
    assert helper.meta["fxfuse_from"] == ("add", "matmul")
    assert [(e.kind, e.rule, e.form, e.nodes) for e in report.events] == [
        ("fused", "matmul_add", "MatmulAdd", ("add", "matmul")),
        ("fused", "linear_act", "LinearAct", ("relu", "linear")),
    ]


def test_the_source_is_the_statement_of_the_root():
    def row(x, w, b):
        h = x @ w
        h = h + b  # here it becomes a linear
        return torch.relu(h)  # and here a fused one

    report = fxfuse.report(fxfuse.optimize(Written(row, w=randn(1, 6, 6), b=randn(2, 6))))
    assert [e.source.rpartition(": ")[2] for e in report.fused] == [
        "h = h + b  # here it becomes a linear",
        "return torch.relu(h)  # and here a fused one",
    ]
    assert all(e.source.startswith(__file__) for e in report.fused)


def test_the_original_graph_stays():
    gm = traced(lambda x, w, b: torch.relu(x @ w + b), w=randn(1, 6, 6), b=randn(2, 6))
    before = str(gm.graph)
    new, _ = fxfuse.rewrite(gm)
    assert str(gm.graph) == before
    assert str(new.graph) != before
    assert new.w is gm.w


def test_rewriting_twice_changes_nothing_more():
    gm = traced(lambda x, w, b: F.silu(x @ w + b) * (x @ w.t()), w=randn(1, 6, 6), b=randn(2, 6))
    once, first = fxfuse.rewrite(gm)
    twice, second = fxfuse.rewrite(once)
    assert first.fused
    assert not second.fused
    assert not [e for e in second.events if e.kind == "tidied"]
    assert names(twice) == names(once)


class Add(Rule):
    """relu(a) + tanh(b), in either order."""

    def pattern(self, op, a, b):
        return op.add(op.relu(a), op.tanh(b))

    def check(self, m):
        m.require(m.a is not m.b, "both are {}", m.a)

    def rewrite(self, m, graph):
        return graph.call_function(torch.sub, (m.a, m.b))


@pytest.mark.parametrize(
    "row",
    [
        lambda x: torch.relu(x[0]) + torch.tanh(x[1]),
        lambda x: torch.tanh(x[1]) + torch.relu(x[0]),
        lambda x: torch.add(torch.tanh(x[1]), torch.relu(x[0])),
        lambda x: torch.relu(x[0]).add(other=torch.tanh(x[1])),
    ],
)
def test_operand_order(row):
    gm = traced(row)
    (event,) = run(gm, Add()).events
    assert event.kind == "fused"
    (new,) = [n for n in gm.graph.nodes if n.target is torch.sub]
    assert [a.args[1] for a in new.args] == [0, 1], "the bindings follow the pattern and not the program"


def test_alpha_breaks_the_symmetry():
    swapped = traced(lambda x: torch.add(torch.tanh(x[1]), torch.relu(x[0]), alpha=2))
    assert not run(swapped, Add()).events


@pytest.mark.parametrize(
    "row",
    [
        lambda x: torch.relu(x[0]) + torch.relu(x[1]),
        lambda x: torch.tanh(x[0]) + torch.tanh(x[1]),
        lambda x: torch.relu(x[0]) - torch.tanh(x[1]),
        lambda x: torch.relu(x[0]) + 1,
        lambda x: torch.relu(x[0]) + x[1],
    ],
)
def test_near_misses_say_nothing(row):
    assert not run(traced(row), Add()).events


def test_a_refusal_of_the_check_is_reported_once():
    gm = traced(lambda x: torch.relu(x) + torch.tanh(x))
    (event,) = run(gm, Add(), Add()).events
    assert (event.kind, event.reason, event.nodes) == ("kept", "both are x", ("add",))


class Same(Rule):
    """relu(x) * x: the same name twice is the same value."""

    def pattern(self, op, x):
        return op.mul(op.relu(x), x)

    def rewrite(self, m, graph):
        return graph.call_function(torch.neg, (m.x,))


@pytest.mark.parametrize(
    ("row", "count"),
    [
        (lambda x: torch.relu(x) * x, 1),
        (lambda x: x * torch.relu(x), 1),
        (lambda x: torch.relu(x) * (x + 1), 0),
        (lambda x: torch.relu(x + 1) * x, 0),
    ],
)
def test_the_same_name_is_the_same_value(row, count):
    assert len(run(traced(row), Same()).events) == count


def test_a_value_between_two_parts_of_a_match():
    # relu feeds tanh as well, so the sum cannot stand where relu stood without standing before tanh's operand
    gm = traced(lambda x: torch.relu(x) + torch.tanh(torch.relu(x) + 1))
    (event, *_) = run(gm, *DEFAULT[:4], Add()).events
    assert event.kind in ("tidied", "kept")
    assert "sub" not in names(gm)


def test_random_numbers_stay():
    def row(x, w, b):
        torch.rand(3)
        F.dropout(x, 0.5)
        return torch.relu(x @ w + b)

    model = Written(row, w=randn(1, 6, 6), b=randn(2, 6))
    optimized = fxfuse.optimize(model, (randn(3, 4, 6),))
    with torch.no_grad():
        states = []
        for m in (model, optimized):
            torch.manual_seed(0)
            m(randn(3, 4, 6))
            states.append(torch.random.get_rng_state())
    assert torch.equal(*states), "the random numbers of a dead call were not drawn"


def test_dead_code_goes_and_writes_stay():
    def row(x, w, b, seen):
        x @ w
        seen.add_(1)
        return x @ w + b

    model = Written(row, w=randn(1, 6, 6), b=randn(2, 6), seen=torch.zeros((), dtype=torch.int64))
    optimized = fxfuse.optimize(model)
    with torch.no_grad():
        optimized(randn(3, 4, 6))
    assert int(optimized.seen) == 1
    (gm,) = fxfuse.graphs(optimized).values()
    assert names(gm) == ["add_", "t", "linear"]


def test_one_parameter_is_read_once():
    model = Written(lambda x, fc: fc(x).relu() + fc(x + 1), fc=nn.Linear(6, 6))
    (gm,) = fxfuse.graphs(fxfuse.optimize(model)).values()
    assert sorted(str(n.target) for n in gm.graph.nodes if n.op == "get_attr") == ["fc.bias", "fc.weight"]


def test_kernels_and_bytes_saved():
    model = Written(lambda x, w, b: torch.relu(x @ w + b), w=randn(1, 6, 6), b=randn(2, 6))
    report = fxfuse.report(fxfuse.optimize(model, (randn(3, 4, 6),)))
    assert report.kernels_saved == 2
    assert report.bytes_saved == 2 * 2 * 4 * 6 * 4, "two intermediates of [4, 6] float32, each written and read"
    bare = fxfuse.report(fxfuse.optimize(model))
    assert bare.kernels_saved == 2
    assert bare.bytes_saved is None


def test_sizes_of_the_host_are_no_kernels():
    def row(x, fc):
        return F.silu(fc(x)[..., : fc(x).shape[-1] // 2]) * fc(x)[..., fc(x).shape[-1] // 2 :]

    report = fxfuse.report(fxfuse.optimize(Written(row, fc=nn.Linear(6, 8))))
    assert [e.kernels_saved for e in report.fused] == [2]


@pytest.mark.parametrize("numerics", ["fused", "exact"])
def test_a_graph_of_aten_calls(numerics, example):
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(randn(1, 6, 6)), nn.Parameter(randn(2, 6))

        def forward(self, x):
            h = torch.ops.aten.linear.default(x, self.w, self.b)
            return torch.ops.aten.gelu.default(h, approximate="tanh")

    gm = fx.symbolic_trace(Mlp())
    x = randn(3, 4, 6)
    new, report = fxfuse.rewrite(gm, (x,) if example else None, options=Options(numerics=numerics))
    assert len(report.fused) == (numerics == "fused")
    with torch.no_grad():
        torch.testing.assert_close(new(x), gm(x))


def test_a_fused_rule_and_its_report_agree(example):
    report = assert_fuses(
        "linear_act", Written(lambda x, fc: F.relu(fc(x)), fc=nn.Linear(6, 6)), [randn(3, 4, 6)], example=example
    )
    (event,) = report.fused
    assert (event.form, event.nodes, event.reason) == ("LinearAct", ("relu", "fc"), "is now linear_act")
