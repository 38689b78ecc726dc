"""Measuring the implementations of a model's operators: when, what is concluded, and what is said of it."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from fxfuse import choose, ops, tuning
from fxfuse.bench.timer import Race, Timing
from fxfuse.ops import onednn
from tests.conftest import Written, randn

K, N = 16, 32

pytestmark = [
    pytest.mark.usefixtures("measuring"),
    pytest.mark.skipif(not onednn.AVAILABLE, reason="there is nothing to choose from"),
]


class Times:
    """In the clock's place: what each implementation took, and the implementations that were asked."""

    def __init__(self):
        self.of = {"plain": (2.0,) * 5, "onednn": (1.0,) * 5, "onednn-packed": (0.5,) * 5}
        self.had_core = 1.0
        self.races = []

    def __call__(self, calls, **_):
        for call in calls.values():
            call()
        self.races.append(tuple(calls))
        return Race({name: Timing(self.of[name], 1) for name in calls}, self.had_core)


@pytest.fixture
def times(monkeypatch):
    monkeypatch.setattr(tuning, "interleaved", found := Times())
    return found


@pytest.fixture
def taken(monkeypatch):
    """oneDNN's calls."""
    calls = []
    real = onednn.pointwise
    monkeypatch.setattr(onednn, "pointwise", lambda *args: calls.append(args[3]) or real(*args))
    return calls


def ffn(layers=1):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)) for _ in range(layers)]).eval()


def call(model, rows=4):
    with torch.inference_mode():
        return model(randn(0, rows, K))


# K and N are too small for single linears to be lowered, so that ffn() has one fused operator: linear_act.


def test_each_size_is_measured_once(times):
    model = fxfuse.optimize(ffn(layers=6), randn(0, 4, K))
    assert times.races == [("plain", "onednn")]
    (told,) = fxfuse.report(model).measured
    assert (told.op, told.dtype, told.weight, told.rows) == ("linear_act gelu", "float32", f"{N}x{K}", "4-7")
    assert (told.taken, told.regions, told.when) == ("onednn", ("",), "now")
    # Of one call, where several places took turns.
    assert told.seconds["plain"] == 2 * told.seconds["onednn"] > 0
    # The next model finds it in the table.
    (told,) = fxfuse.report(fxfuse.optimize(ffn(), randn(0, 5, K))).measured
    assert told.when == "before"
    assert len(times.races) == 1
    fxfuse.optimize(ffn(), randn(0, 8, K))
    assert len(times.races) == 2


def test_the_choice_is_what_runs(times, taken):
    call(fxfuse.optimize(ffn()))
    assert not taken, "by the heuristic this is too small for oneDNN"
    model = fxfuse.optimize(ffn(), randn(0, 4, K))
    taken.clear()
    call(model)
    assert taken == ["gelu"]
    call(model, rows=100)
    assert taken == ["gelu"], "another size, which was not measured"


@pytest.mark.parametrize(
    ("onednn_took", "choice"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0), "onednn"),
        ((1.9, 1.9, 1.9, 1.9, 1.9), "onednn"),
        ((1.97, 1.97, 1.97, 1.97, 1.97), "plain"),
        ((2.0, 2.0, 2.0, 2.0, 2.0), "plain"),
        ((1.0, 1.0, 1.0, 3.0, 3.0), "plain"),
        ((3.0, 3.0, 3.0, 3.0, 3.0), "plain"),
    ],
    ids=["faster", "5 % faster", "less than 3 % faster", "a tie", "doubtful", "slower"],
)
def test_ties_and_doubts_go_to_the_plain_sequence(onednn_took, choice, times, taken):
    times.of["onednn"] = onednn_took
    model = fxfuse.optimize(ffn(), randn(0, 4, K))
    assert fxfuse.report(model).measured[0].taken == choice
    taken.clear()
    call(model)
    assert taken == (["gelu"] if choice == "onednn" else [])
    # It stays a region: another size may choose otherwise.
    assert fxfuse.report(model).calls[""].fused == 1


@pytest.mark.parametrize(
    ("onednn_took", "choice"),
    [((2.0,) * 5, "onednn"), ((2.0, 2.0, 2.2, 2.2, 2.2), "onednn"), ((2.2,) * 5, "plain")],
    ids=["a tie", "doubtful", "slower"],
)
def test_ties_and_doubts_leave_what_is_expected(onednn_took, choice, times, monkeypatch):
    monkeypatch.setattr(onednn, "_LEAST_WORK", {torch.float32: (1, 1)})
    times.of["onednn"] = onednn_took
    assert fxfuse.report(fxfuse.optimize(ffn(), randn(0, 4, K))).measured[0].taken == choice


def test_a_plain_choice_holds_where_the_heuristic_says_otherwise(times, taken, monkeypatch):
    monkeypatch.setattr(onednn, "_LEAST_WORK", {torch.float32: (1, 1)})
    times.of["onednn"] = (3.0,) * 5
    model = fxfuse.optimize(ffn(), randn(0, 4, K))
    taken.clear()
    call(model)
    assert not taken
    call(model, rows=100)
    assert taken


@pytest.mark.parametrize(
    ("plain", "unpacked", "packed", "order"),
    [
        (3.0, 2.0, 1.0, ("onednn-packed", "onednn", "plain")),
        (3.0, 2.0, 1.99, ("onednn", "plain")),
        (3.0, 3.0, 2.0, ("onednn-packed", "plain")),
        (3.0, 4.0, 5.0, ("plain",)),
    ],
)
def test_each_must_beat_those_that_ask_for_less(plain, unpacked, packed, order, times):
    times.of = {"plain": (plain,) * 5, "onednn": (unpacked,) * 5, "onednn-packed": (packed,) * 5}
    fxfuse.optimize(ffn(), randn(0, 4, K), pack=True)
    (choice,) = choose.CHOICES._table.values()
    assert choice.order == order


def test_a_candidate_that_was_not_measured_before_is_measured_now(times):
    fxfuse.optimize(ffn(), randn(0, 4, K))
    model = fxfuse.optimize(ffn(), randn(0, 4, K), pack=True)
    assert times.races == [("plain", "onednn"), ("plain", "onednn", "onednn-packed")]
    assert fxfuse.report(model).measured[0].taken == "onednn-packed"
    # Who may not pack takes the best of the rest.
    model = fxfuse.optimize(ffn(), randn(0, 4, K))
    assert fxfuse.report(model).measured[0].taken == "onednn"
    assert len(times.races) == 2


def test_nothing_is_concluded_on_a_busy_machine(times, taken):
    times.had_core = 0.5
    model = fxfuse.optimize(ffn(), randn(0, 4, K))
    report = fxfuse.report(model)
    assert not report.measured
    assert report.notes == [
        "nothing was measured for 1 of 1 operators and sizes: other programs had the processor meanwhile"
    ]
    taken.clear()
    call(model)
    assert not taken, "the heuristic decides"
    times.had_core = 1.0
    assert fxfuse.report(fxfuse.optimize(ffn(), randn(0, 4, K))).measured, "the next model measures again"


def test_the_time_is_bounded(times, monkeypatch):
    monkeypatch.setattr(tuning, "BUDGET_S", 0.0)
    report = fxfuse.report(fxfuse.optimize(ffn(), randn(0, 4, K)))
    assert not times.races
    assert report.notes == ["nothing was measured for 1 of 1 operators and sizes: 0 s were up"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: fxfuse.optimize(ffn(), randn(0, 4, K), tune="off"),
        lambda: fxfuse.optimize(ffn()),
        lambda: fxfuse.optimize(ffn(), randn(0, 4, K), numerics="exact"),
        lambda: fxfuse.optimize(ffn().double(), randn(0, 4, K, dtype=torch.float64)),
        lambda: fxfuse.optimize(ffn().to("meta"), torch.empty(4, K, device="meta")),
        lambda: fxfuse.optimize(ffn(), randn(0, 0, K)),
    ],
    ids=["off", "no example", "nothing fused", "nothing to choose", "no values", "no rows"],
)
def test_nothing_is_measured(build, times):
    report = fxfuse.report(build())
    assert not times.races
    assert not report.measured
    assert not report.notes
    assert not choose.file().exists()


def test_what_was_measured_holds_with_tuning_off(times, taken):
    fxfuse.optimize(ffn(), randn(0, 4, K))
    taken.clear()
    call(fxfuse.optimize(ffn(), tune="off"))
    assert taken == ["gelu"]


@pytest.mark.parametrize(
    ("options", "runs"),
    [({}, 2), ({"tune": "off"}, 2), ({"check": False}, 2), ({"tune": "off", "check": False}, 1)],
    ids=["both", "check", "measure", "neither"],
)
def test_the_example_runs_twice_at_most(options, runs, times):
    """Once to see which arguments modules get, once to compare what regions answer and to see what they call."""
    count = 0

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ffn()

        def forward(self, x):
            nonlocal count
            count += type(x) is torch.Tensor
            return self.inner(x) if x.sum() < 1e9 else x  # no graph has this, only the regions inside

    fxfuse.optimize(Counted().eval(), randn(0, 4, K), **options)
    assert count == runs
    assert len(times.races) == (options.get("tune") != "off")


def test_the_report_shows_it(times):
    report = fxfuse.report(fxfuse.optimize(ffn(), randn(0, 4, K)))
    times.of["onednn"] = (3.0,) * 5
    assert "implementations, measured" in str(report)
    assert "plain 2000000, onednn 1000000" in str(report)
    (told,) = json.loads(report.to_json())["measured"]
    assert told["taken"] == "onednn"
    assert told["seconds"] == {"plain": 2.0, "onednn": 1.0}
    assert "tune" in report.seconds


def gated(x, gate, up):
    return F.silu(gate(x)) * up(x)


def stacked(x, both):
    gate, up = both(x).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    ("model", "op", "weight"),
    [
        (Written(gated, gate=nn.Linear(K, N), up=nn.Linear(K, N)), "gated_linear silu", f"{N}x{K}"),
        (Written(stacked, both=nn.Linear(K, 2 * N)), "gated_linear_packed silu gate_up", f"{2 * N}x{K}"),
        (
            Written(lambda x, w, b: torch.tanh(x @ w + b), w=randn(1, K, N), b=randn(2, N)),
            "linear_act tanh",
            f"{N}x{K}, transposed",
        ),
        (Written(lambda x, w: torch.tanh(F.linear(x, w)), w=randn(1, N, K)), "linear_act tanh", f"{N}x{K}, no bias"),
    ],
    ids=["gated", "stacked", "transposed", "no bias"],
)
@pytest.mark.parametrize("choice", ["plain", "onednn", "onednn-packed"])
def test_every_operator_runs_its_choice(model, op, weight, choice, times, taken, monkeypatch):
    times.of[choice] = (0.1,) * 5
    model = model.eval()
    optimized = fxfuse.optimize(model, randn(0, 4, K), pack=True)
    report = fxfuse.report(optimized)
    (told,) = (m for m in report.measured if m.op == op)
    assert (told.weight, told.taken) == (weight, choice)
    binaries = []
    real = onednn.binary
    monkeypatch.setattr(onednn, "binary", lambda *args: binaries.append(args) or real(*args))
    taken.clear()
    with torch.inference_mode():
        torch.testing.assert_close(optimized(randn(0, 4, K)), model(randn(0, 4, K)))
    products = len(taken) + len(binaries)
    assert products == (0 if choice == "plain" else 2 if "gated" in op else 1)
    assert report.packed.count == (products if choice == "onednn-packed" else 0)


def test_a_function(times):
    w, b = randn(1, N, K), randn(2, N)

    def function(x):
        return torch.tanh(F.linear(x, w, b))

    optimized = fxfuse.optimize(function, randn(0, 4, K))
    (told,) = fxfuse.report(optimized).measured
    assert (told.op, told.rows) == ("linear_act tanh", "4-7")
    (told,) = fxfuse.tune(optimized, [(64, K)])
    assert told.rows == "64-127"


def test_a_real_measurement():
    model = fxfuse.optimize(ffn(layers=2), randn(0, 4, K))
    report = fxfuse.report(model)
    if report.measured:  # else others had the processor, and the report says so
        (told,) = report.measured
        assert told.seconds.keys() == {"plain", "onednn"}
        assert all(0 < seconds < 1 for seconds in told.seconds.values())
    else:
        assert "other programs" in report.notes[0]
    torch.testing.assert_close(call(model), call(ffn(layers=2)))


# fxfuse.tune


def test_other_sizes(times, taken):
    model = fxfuse.optimize(ffn())
    call(model), call(model, rows=600)
    assert not taken
    told = fxfuse.tune(model, [(4, K), (600, K), (randn(0, 2, K),)])
    assert [m.rows for m in told] == ["4-7", "512-1023", "2-3"]
    assert fxfuse.report(model).measured == told
    # What its sites had found out is forgotten.
    taken.clear()
    call(model), call(model, rows=600), call(model, rows=2)
    assert taken == ["gelu"] * 3


def test_what_was_measured_before_is_measured_again(times):
    model = fxfuse.optimize(ffn(), randn(0, 4, K))
    times.of["onednn"] = (3.0,) * 5
    fxfuse.tune(model, [(4, K)])
    (told,) = fxfuse.report(model).measured
    assert told.taken == "plain"
    assert choose.Choices().get(next(iter(choose.CHOICES._table))).order == ("plain",)


def test_the_users_random_numbers_go_on_as_they_would_have(times):
    model = fxfuse.optimize(ffn())
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    fxfuse.tune(model, [(4, K)])
    assert torch.equal(torch.randn(2), expected)


def test_a_graph_module(times, taken):
    gm = fxfuse.optimize(fx.symbolic_trace(ffn()))
    call(gm)
    assert not taken
    (told,) = fxfuse.tune(gm, [(4, K)])
    assert told.op == "linear_act gelu"
    taken.clear()
    call(gm)
    assert taken == ["gelu"]
    assert "forward" not in gm.__dict__


def test_a_graph_module_with_an_example(times, taken):
    model = fx.symbolic_trace(ffn())
    gm = fxfuse.optimize(model, randn(0, 4, K))
    (told,) = fxfuse.report(gm).measured
    assert fxfuse.report(fxfuse.optimize(ffn(), randn(0, 5, K))).measured == [replace(told, when="before")]
    taken.clear()
    torch.testing.assert_close(call(gm), call(model))
    assert taken == ["gelu"]


def test_an_exported_program(times):
    """Its arguments are nested and given by name; its graph is flat."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ffn()

        def forward(self, given):
            return {"y": self.inner(given["x"])}

    given = {"x": randn(0, 4, K)}
    gm = torch.export.export(Nested().eval(), (given,)).module()
    optimized = fxfuse.optimize(gm, example_kwargs={"given": given})
    (told,) = fxfuse.report(optimized).measured
    assert (told.op, told.rows) == ("linear_act gelu", "4-7")
    torch.testing.assert_close(optimized(given), gm(given))
    torch.testing.assert_close(fxfuse.restore(optimized)(given), gm(given))


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"pack": True}, "no weights are packed: the graph of a GraphModule has no place to keep copies of them"),
        ({"example_inputs": randn(0, 4, K + 1)}, "nothing was measured: the run for it raised RuntimeError: "),
        ({"example_inputs": (1, 2)}, "The example inputs were not used: "),
        ({"example_kwargs": {"other": 1}}, "The example inputs were not used: "),
    ],
    ids=["pack", "size", "count", "name"],
)
@pytest.mark.filterwarnings("ignore::fxfuse.errors.ExampleWarning")
def test_what_a_graph_module_does_without(options, note, times):
    report = fxfuse.report(fxfuse.optimize(fx.symbolic_trace(ffn()), **options))
    assert [n[: len(note)] for n in report.notes] == [note]
    assert not report.measured
    assert [e.rule for e in report.fused] == ["linear_act"]


def test_several_arguments(times):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(K, N)

        def forward(self, x, y):
            return torch.tanh(self.fc(x)) + y

    model = fxfuse.optimize(Two().eval())
    (told,) = fxfuse.tune(model, [(randn(0, 4, K), randn(1, 4, N))])
    assert told.op == "linear_act tanh"


def test_a_model_that_runs_plain_has_nothing_to_measure(times):
    model = fxfuse.optimize(ffn())
    with torch.autocast("cpu"):
        assert fxfuse.tune(model, [(4, K)]) == []
    assert (fxfuse.report(model).calls[""].fused, fxfuse.report(model).calls[""].plain) == (0, 1)


@pytest.mark.parametrize("shapes", [(4, K), [4], 3, None, "ab", randn(0, 4, K), [[4, K]], [randn(0, 4, K)]])
def test_shapes_of_another_kind(shapes):
    with pytest.raises(TypeError, match="takes an iterable of tuples"):
        fxfuse.tune(fxfuse.optimize(ffn()), shapes)


def test_what_the_model_raises(times, taken):
    model = fxfuse.optimize(ffn())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fxfuse.tune(model, [(4, K + 1)])
    torch.testing.assert_close(call(model), call(ffn()))
    assert fxfuse.report(model).calls[""].fused >= 1


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), lambda x: x, 3])
def test_only_optimized_things_can_be_tuned(thing):
    with pytest.raises(fxfuse.errors.NotOptimized):
        fxfuse.tune(thing, [(4, K)])
    with pytest.raises(fxfuse.errors.NotOptimized):
        fxfuse.refresh(thing)


def test_operators_know_what_they_may_choose():
    call = ops.linear, (randn(0, 4, K), randn(1, N, K), None), ()
    assert ops.implementations(*call, pack=False) == ("plain", "onednn")
    assert ops.implementations(*call, pack=True) == ("plain", "onednn", "onednn-packed")


def test_each_size_has_its_own_choice_of_copies(times, taken):
    model = fxfuse.optimize(ffn(), randn(0, 4, K), pack=True)
    times.of["onednn-packed"] = (1.0,) * 5
    fxfuse.tune(model, [(1, K)])
    assert [m.taken for m in fxfuse.report(model).measured] == ["onednn-packed", "onednn"]
    call(model, rows=1)
    assert fxfuse.report(model).packed.count == 0
    call(model)
    assert fxfuse.report(model).packed.count == 1


@pytest.mark.parametrize("function", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("plain", [0.5, 2.0])
def test_what_only_lowers_stays_where_eager_is_measured_to_be_as_fast(times, plain, function):
    """It would cost its checks and bring nothing. What fuses stays installed: at other sizes it may win."""
    times.of["plain"] = (plain,) * 5
    weight, bias = randn(0, 1024, 1024), randn(1, 1024)
    model = (lambda x: F.linear(x, weight, bias)) if function else nn.Linear(1024, 1024).eval()
    report = fxfuse.report(fxfuse.optimize(model, randn(0, 4, 1024)))
    (event,), (info,) = report.events, report.regions
    if plain < 1:
        assert (event.kind, event.reason) == ("kept", "measured: eager is as fast at the example's size")
        assert (info.installed, info.note) == (False, event.reason)
    else:
        assert (event.kind, info.installed) == ("lowered", True)
    assert fxfuse.report(fxfuse.optimize(ffn(), randn(0, 4, K))).regions[0].installed
