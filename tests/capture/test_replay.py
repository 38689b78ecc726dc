"""What can be said of CUDA graphs without a GPU: which calls share one, and what is never captured."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.capture import replay
from fxfuse.capture.captured import Captured
from fxfuse.capture.replay import MOST, Refused, Replayed, kind_of, refusal


class Model(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.linear, self.step = nn.Linear(8, 8), step
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        return self.step(self, F.relu(self.linear(x)), x)


def count(model, y, x):
    model.count.add_(1)
    return y + model.count


def write(model, y, x):
    x.add_(y)
    return y


def scratch(model, y, x):
    return y.add_(1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda model, y, x: y + x, ""),
        (scratch, ""),
        (count, "add_ may write to memory of the caller or of the model"),
        (write, "add_ may write to memory of the caller or of the model"),
    ],
)
def test_what_writes_to_memory_of_others_is_not_captured(step, expected):
    optimized = fxfuse.optimize(Model(step).eval())
    assert refusal(fxfuse.graphs(optimized)[""]) == expected


def test_what_calls_a_module_is_not_captured():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8)

        def forward(self, x):
            return self.lstm(F.relu(self.linear(x)))[0]

    optimized = fxfuse.optimize(Calls().eval())
    assert refusal(fxfuse.graphs(optimized)[""]) == "it calls lstm, whose weights may move"


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (torch.zeros(2), "an argument is on cpu"),
        ([1, 2], "an argument is a list"),
        (torch.zeros(2, 2).to_sparse_csr(), "an argument is sparse_csr"),
        (1, "no argument is a tensor"),
    ],
)
def test_arguments_that_no_graph_takes(argument, why):
    with pytest.raises(Refused, match=f"^{why}$"):
        kind_of([None, argument])


def test_on_the_cpu_calls_run_and_the_report_says_so():
    model = Model(lambda model, y, x: y + x).eval()
    optimized = fxfuse.optimize(model, cuda_graphs=True)
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert all(torch.equal(optimized(x), fxfuse.optimize(model)(x)) for _ in range(3))
    report = fxfuse.report(optimized)
    why = "an argument is on cpu" if torch.cuda.is_available() else "torch finds no CUDA device"
    assert report.notes == [f"region .: calls without a CUDA graph: {why}"]
    assert (report.calls[""].fused, report.calls[""].replayed) == (3, 0)


def test_a_graph_module_says_that_it_has_none():
    graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert "no CUDA graphs are captured" in str(fxfuse.report(fxfuse.optimize(graph_module, cuda_graphs=True)))


def test_copies_ask_by_themselves():
    optimized = fxfuse.optimize(Model(count).eval(), cuda_graphs=True)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(optimized)(torch.ones(1, 8)), optimized(torch.ones(1, 8)))


class Stands(Captured):
    """For what is captured of a call with one argument."""

    def __init__(self, kind, argument, weights):
        self.kind, self.graph, self.weights = kind, argument, weights


@pytest.fixture
def replayed(monkeypatch):
    """One whose captures are not on a GPU: what is captured is the call's first argument, and a replay returns it."""

    def capture(self, kind, owner, arguments, reads, weights):
        if arguments[0] == "refused":
            raise Refused("it waits")
        if arguments[0] == "given up":
            try:
                raise ValueError("the cause")
            finally:
                raise RuntimeError("the end of it")
        return Stands(kind, arguments[0], weights)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(replay, "kind_of", tuple)
    monkeypatch.setattr(Replayed, "_capture", capture)
    monkeypatch.setattr(Replayed, "_replay", lambda self, captured, arguments: ("replayed", captured.graph))
    said = []
    made = Replayed(lambda owner, *values: ("run", values[0]), 1, lambda: "", lambda: None, said.append)
    made.said = said
    return made


def ways(replayed, *arguments, weight):
    return [replayed(None, argument, weight)[0] for argument in arguments]


WEIGHT = torch.zeros(2, 2)


def test_the_second_call_of_a_kind_is_captured(replayed):
    expected = ["run", "replayed", "replayed", "run", "replayed", "replayed"]
    assert ways(replayed, 1, 1, 1, 2, 1, 2, weight=WEIGHT) == expected


def test_a_weight_that_moved_or_lies_otherwise_is_met_by_a_call_first(replayed):
    assert ways(replayed, 1, 1, weight=WEIGHT) == ["run", "replayed"]
    for other in (WEIGHT.t(), WEIGHT.view(torch.int32), torch.ones(2, 2)):
        assert ways(replayed, 1, 1, 1, weight=other) == ["run", "replayed", "replayed"]


def test_the_graph_used_least_recently_goes(replayed):
    for kind in range(MOST):
        ways(replayed, kind, kind, weight=WEIGHT)
    ways(replayed, 0, MOST, MOST, weight=WEIGHT)
    assert len(replayed.graphs) == MOST
    assert ways(replayed, 0, 1, weight=WEIGHT) == ["replayed", "run"]


def test_kinds_that_come_once_are_forgotten_in_the_end(replayed):
    ways(replayed, *range(1000), weight=WEIGHT)
    assert len(replayed.graphs) <= replay.MOST_CAPTURES


@pytest.mark.parametrize(("kind", "why"), [("refused", "it waits"), ("given up", "ValueError: the cause")])
def test_what_cannot_be_captured_is_tried_once_and_told_by_its_cause(replayed, kind, why):
    assert ways(replayed, *[kind] * 4, weight=WEIGHT) == ["run"] * 4
    assert replayed.said == [why]


def test_captures_come_to_an_end(replayed):
    for _ in range(20):
        for kind in range(MOST + 2):
            ways(replayed, kind, kind, weight=WEIGHT)
    assert replayed.captures == replay.MOST_CAPTURES
    assert replayed.said == [f"{replay.MOST_CAPTURES} were captured, and no more will be"]
