"""The report: what is said of a model, as text, as JSON and as data."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from fxfuse.report import SCHEMA, Event, Report
from tests.conftest import Written, randn


@pytest.fixture
def model():
    def row(x, gate, up, down, w, b):
        h = down(F.silu(gate(x)) * up(x))
        product = h @ w
        return product + b, product

    return Written(row, gate=nn.Linear(6, 8), up=nn.Linear(6, 8), down=nn.Linear(8, 6), w=randn(1, 6, 6), b=randn(2, 6))


@pytest.fixture
def report(model):
    return fxfuse.report(fxfuse.optimize(model, (randn(3, 4, 6),)))


def test_events_as_data(report):
    assert [(e.rule, e.form) for e in report.fused] == [("gated_linear", "GatedLinear")]
    assert [(e.rule, e.reason) for e in report.kept] == [("matmul_add", "matmul is returned as well")]
    for event in report.events:
        assert re.fullmatch(re.escape(__file__) + r":\d+: \S.*", event.source), event


def test_one_launch_is_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    text = str(fxfuse.report(fxfuse.optimize(model, randn(2, 4), tune="off")))
    assert "0 kept, 1 kernel launch saved per call" in text


def test_lowered_events():
    report = fxfuse.report(fxfuse.optimize(Written(lambda x, down: down(x) * 2, down=nn.Linear(128, 128))))
    assert [(e.kind, e.rule, e.nodes, e.reason) for e in report.events] == [
        ("lowered", "lower_linear", ("down",), "is now linear")
    ]
    assert not report.fused


def test_nodes_are_those_of_the_original_graph(model):
    optimized = fxfuse.optimize(model)
    (original,) = fxfuse.graphs(optimized, original=True).values()
    known = {n.name for n in original.graph.nodes}
    (fused,) = fxfuse.report(optimized).fused
    assert fused.nodes == ("mul", "silu", "gate", "up")
    assert set(fused.nodes) <= known


def test_coverage_and_regions(report):
    assert (report.coverage.seen, report.coverage.captured) == (3, 3)
    (region,) = report.regions
    assert (region.path, region.kind, region.installed) == ("", "Written", True)
    assert (region.nodes_before, region.nodes_after) == (11, 14), "three modules are six parameters now"


def test_text_has_every_event(report):
    text = str(report)
    assert "1 fused, 1 kept" in text
    for event in report.events:
        if event.kind in ("fused", "kept", "lowered"):
            assert event.rule in text
            assert event.reason in text
            assert event.nodes[0] in text


def test_json_is_the_same(report):
    data = json.loads(report.to_json())
    assert data["schema"] == SCHEMA
    assert data["model"] == "Written"
    assert [Event(**{**e, "nodes": tuple(e["nodes"])}) for e in data["events"]] == report.events
    assert data["coverage"] == {"seen": 3, "captured": 3}
    assert data["kernels_saved"] == report.kernels_saved
    assert data["bytes_saved"] == report.bytes_saved


def test_markdown_has_tables(report):
    assert "## fused" in report.to_markdown()
    assert "|" in report.to_markdown()


def test_calls_are_counted(model):
    optimized = fxfuse.optimize(model)
    report = fxfuse.report(optimized)
    with torch.no_grad():
        optimized(randn(3, 4, 6))
    optimized(randn(3, 4, 6))
    counts = report.calls[""]
    assert (counts.fused, counts.plain, counts.fallback) == (1, 1, 0)
    assert dict(counts.reasons) == {"gradients are needed": 1}
    assert "calls since" in str(report)
    assert "gradients are needed (1)" in str(report)


def test_what_is_not_captured_has_a_reason():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return self.fc(x) if x.sum() > 0 else x

    report = fxfuse.report(fxfuse.optimize(Looks()))
    (uncaptured,) = report.uncaptured
    assert uncaptured.kind == "Looks"
    assert "not known before the call" in uncaptured.reason
    assert "not captured" in str(report)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.side = nn.Linear(6, 6)

    def forward(self, x):
        h = self.up(self.norm(x))
        return x + self.down(F.gelu(h)) + h.mean() + F.relu(self.side(x))


class Layers(nn.Module):
    def __init__(self, looks):
        super().__init__()
        self.looks, self.layers, self.head = looks, nn.ModuleList(Block() for _ in range(12)), nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if not self.looks or x.sum() < 1e9 else x


def row_of(text, *cells):
    """The cells of the one line in which these stand."""
    (line,) = [line for line in text.splitlines() if all(cell in line for cell in cells)]
    return re.split(r"  +", line.strip().strip("|").strip())


@pytest.mark.parametrize("looks", [False, True], ids=["one region", "a region a layer"])
def test_equal_rows_of_layers_are_one(looks):
    optimized = fxfuse.optimize(Layers(looks).eval(), randn(1, 2, 6), tune="off")
    report = fxfuse.report(optimized)
    with torch.no_grad():
        optimized(randn(1, 2, 6))
    text = str(report)
    assert (len(report.kept), len(report.fused)) == (12, 12), "as data they are all there"
    assert len(json.loads(report.to_json())["events"]) == len(report.events)
    region, node, read = ("layers.{0..11}", "gelu", "mean") if looks else (".", "gelu*", "mean*")
    reason = f"{'up' if looks else 'layers_{0..11}_up'} is read by {read} as well"
    source = f"test_report.py:{Block.forward.__code__.co_firstlineno + 1}: h = self.up(self.norm(x))"
    assert row_of(text, "is read by") == ["12", "linear_act", region, node, source, reason]
    assert "layers.3" not in text
    assert "layers.3" not in report.to_markdown()
    calls = text.partition("calls since")[2]
    assert row_of(calls, region) == (["12", region, "1", "0", "0"] if looks else [region, "1", "0", "0"])


def test_without_equal_rows_there_is_no_count(report):
    assert "times " not in str(report)


def test_stages_have_their_times(model):
    start = time.perf_counter()
    report = fxfuse.report(fxfuse.optimize(model, (randn(3, 4, 6),), tune="off"))
    whole = time.perf_counter() - start
    assert [*report.seconds] == ["copy", "example", "trace", "rewrite", "check", "install"]
    assert all(seconds > 0 for seconds in report.seconds.values())
    assert sum(report.seconds.values()) <= whole
    shown = str(report).partition("time taken, ms\n")[2]
    assert [stage.split()[0] for stage in shown.split(", ")] == [*report.seconds]
    assert "## time taken, ms\ncopy" in report.to_markdown()
    assert json.loads(report.to_json())["seconds"] == report.seconds
    assert [*fxfuse.report(fxfuse.optimize(model)).seconds] == ["copy", "trace", "rewrite", "install"]


def test_stages_of_a_function_and_of_a_graph():
    def function(x, w, b):
        return torch.relu(x @ w + b)

    given = (randn(1, 2, 4), randn(2, 4, 4), randn(3, 4))
    stages = [*fxfuse.report(fxfuse.optimize(function, given, tune="off")).seconds]
    assert stages == ["example", "trace", "rewrite", "check", "install"]
    assert [*fxfuse.rewrite(fx.symbolic_trace(function))[1].seconds] == ["rewrite"]


def test_an_empty_report_prints():
    assert "0 fused, 0 kept" in str(Report("Nothing"))
    assert Report("Nothing").bytes_saved is None


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), lambda x: x, 3, None])
def test_only_optimized_things_have_one(thing):
    with pytest.raises(ValueError, match=r"did not come from fxfuse\.optimize"):
        fxfuse.report(thing)


def test_residuals_are_no_candidates():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
            self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x, mask):
            h = self.norm(x)
            scores = self.q(h) @ self.k(h).transpose(-2, -1) / 6**0.5 + mask
            x = x + self.o(torch.softmax(scores, -1) @ self.v(h))
            return x + self.down(F.gelu(self.up(self.norm(x))))

    for example in (None, (randn(1, 2, 4, 6), randn(2, 4, 4))):
        report = fxfuse.report(fxfuse.optimize(Block(), example))
        assert [e.rule for e in report.fused] == ["linear_act"]
        assert not report.kept, str(report)
