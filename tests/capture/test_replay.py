"""What can be said of CUDA graphs without a GPU: which calls share one, and what is never captured."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.capture.replay import Refused, kind_of, refusal


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
    ],
)
def test_arguments_that_no_graph_takes(argument, why):
    with pytest.raises(Refused, match=f"^{why}$"):
        kind_of([None, argument])


def test_values_of_other_types_are_another_kind():
    assert kind_of([1, None]) == kind_of([1, None])
    assert len({kind_of([value]) for value in (1, True, 1.0, "1", None)}) == 5


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
