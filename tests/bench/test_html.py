"""The HTML report, read as a browser would: its tags, its text, and the geometry of its charts."""

import itertools
import re

import pytest
import torch
from torch import nn

from fxfuse.bench import charts, peers
from fxfuse.bench import html as report
from fxfuse.bench.measure import measure
from fxfuse.bench.roofline import roofline
from fxfuse.bench.targets import Target
from fxfuse.bench.timer import Effort, Timing
from tests.page import Page


class Model(nn.Module):
    """Something that is fused, something that is kept."""

    def __init__(self):
        super().__init__()
        self.up, self.w, self.b = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        h = torch.relu(self.up(x)) @ self.w
        return h + self.b, h


def measured(name="a <model>"):
    torch.manual_seed(0)
    target = Target(name, Model().eval(), (torch.randn(2, 8),), {})
    return measure(target, ["onednn"], effort=Effort(rounds=5, warmup_s=0.0, block_s=0.0))


@pytest.fixture(scope="module")
def result():
    return measured()


@pytest.fixture(scope="module")
def page(result):
    return Page(report.report([result]))


PROFILE = {
    "target": "a <model>",
    "rates": {"bandwidth": 4e12, "flops": {"bfloat16": 8e14}},
    "setups": [
        {
            "name": "eager",
            "kernels": [
                {"name": "nvjet<1>", "kind": "gemm", "start_us": 100.0, "us": 60.0},
                {"name": "add", "kind": "elementwise", "start_us": 170.0, "us": 30.0},
            ],
            "regions": [{"region": "", "flops": 4e9, "bytes": 8e7, "floor_us": 20.0, "observed_us": 100.0}],
            "lines": [{"region": "", "what": "kernels", "predicted": 2, "observed": 2, "verdict": "confirmed"}],
        },
        {
            "name": "fxfuse",
            "kernels": [{"name": "linear", "kind": "fused gemm", "start_us": 7.0, "us": 50.0}],
            "regions": [
                {"region": "", "flops": 4e9, "bytes": 4e7, "floor_us": 10.0, "observed_us": 50.0},
                {"region": "unknown", "flops": None, "bytes": 4e7, "floor_us": 10.0, "observed_us": 50.0},
            ],
            "lines": [{"region": "", "what": "kernels", "predicted": 1, "observed": 2, "verdict": "broken"}],
        },
    ],
}


def test_it_says_what_was_done_and_what_it_brought(page, result):
    assert "What did fxfuse do, and what did it bring?" in page.text
    assert report.headline(result) in page.text
    assert "is now linear_act" in page.text
    assert "matmul is returned as well" in page.text
    assert re.search(r"test_html\.py:\d+: return h \+ self\.b, h|test_html\.py:\d+: h = torch\.relu", page.text)
    assert "onednn: written by hand for the built-in MLPs only" in page.text


def test_it_stands_alone(page):
    assert not page.of("script") + page.of("link") + page.of("img") + page.of("iframe")
    assert not [href for attrs in page.of("a") if not (href := attrs["href"]).startswith("#")]


def test_names_are_text_and_no_markup(page):
    assert not page.of("model")
    assert "a <model>" in page.text


def test_it_can_be_read_without_seeing_and_moved_through_by_keys(page):
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for svg in page.of("svg"):
        assert set(svg["aria-labelledby"].split()) <= set(ids)
    for scrolling in [attrs for attrs in page.of("div") if attrs.get("class") == "scroll"]:
        assert scrolling["tabindex"] == "0"
        assert scrolling["aria-label"]
    assert all(attrs.get("scope") in ("col", "row") for attrs in page.of("th"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert page.of("html")[0]["lang"] == "en"


def test_several_targets_are_linked_at_the_top():
    page = Page(report.report([measured("one"), measured("two")], unfinished=["three"]))
    targets = {attrs["id"] for attrs in page.of("article")}
    assert {attrs["href"].removeprefix("#") for attrs in page.of("a")} == targets
    assert "Not finished: three" in page.text


def test_a_failed_fxfuse_is_said(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fxfuse", lambda target: lambda x: (target.model(x)[0] + 1, target.model(x)[1]))
    page = Page(report.report([measured()]))
    assert "fxfuse gave no answer that could be timed" in page.text
    assert "fxfuse: wrong answer" in page.text


def timed(result, **times):
    """A result whose variants always take so long."""
    return type(result)(**{**vars(result), "timings": {name: Timing((t,) * 5, 1) for name, t in times.items()}})


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (
            {"eager": 3.0, "fxfuse": 2.0},
            "3000 ms → 2000 ms a call: 1.50 times as fast as eager (1.50–1.50 in most rounds).",
        ),
        (
            {"eager": 12e-3, "fxfuse": 8e-3},
            "12.0 ms → 8.0 ms a call: 1.50 times as fast as eager (1.50–1.50 in most rounds).",
        ),
        ({"eager": 3.0, "fxfuse": 4.0}, "fxfuse is slower than eager here: 0.75 times as fast."),
        (
            {"eager": 3.0, "fxfuse": 3.0},
            "The rounds do not agree whether fxfuse or eager is faster (median: 1.00 times as fast).",
        ),
        ({"eager": 3.0}, "fxfuse gave no answer that could be timed; what is left out below says why."),
        (
            {"eager": 4.0, "fxfuse": 2.0, "compile": 3.0, "gemms": 1.0},
            "4000 ms → 2000 ms a call: 2.00 times as fast as eager (2.00–2.00 in most rounds), 1.50 times as fast as "
            "torch.compile.",
        ),
    ],
)
def test_headlines(times, says, result):
    assert report.headline(timed(result, **times)) == says


def test_the_top_says_in_short_what_was_done(result):
    short = report.in_short(result)
    assert ("fused", "once: Linear, relu → one linear_act relu") in short
    assert ("kept", "once: matmul is returned as well") in short


def test_the_top_says_which_call_was_made_of_how_much(result):
    text = Page(report.report([result])).text
    ops = result.ops
    assert f"operators dispatched a call: {ops['eager']} → {ops['fxfuse']}" in text


def rects(drawing, kind):
    return [e for e in drawing.iter("rect") if kind in e.get("class", "").split()]


def test_bars_are_as_long_as_the_ratios(result):
    drawing = charts.speedups(timed(result, eager=4.0, fxfuse=2.0, compile=3.0))
    eager, ours, theirs = (float(e.get("width")) for e in rects(drawing, "bar"))
    assert ours / eager == pytest.approx(2.0, rel=0.01)
    assert theirs / eager == pytest.approx(4 / 3, rel=0.01)
    assert len(rects(drawing, "ours")) == 1
    assert [e.text for e in drawing.iter("text") if e.text.endswith("×")] == ["1.00 ×", "2.00 ×", "1.33 ×"]


def test_the_timeline_has_one_scale_and_begins_with_the_first_kernel():
    drawing = charts.timeline(PROFILE["setups"])
    boxes = [(float(e.get("x")), float(e.get("width"))) for e in rects(drawing, "kernel")]
    assert boxes[0][0] == boxes[2][0]
    assert boxes[1][0] - boxes[0][0] == pytest.approx(boxes[0][1] * 70 / 60, rel=0.01)
    assert boxes[2][1] / boxes[1][1] == pytest.approx(50 / 30, rel=0.01)
    assert "nvjet<1>" in [e.text.splitlines()[0] for e in drawing.iter("title")]


def test_the_timeline_says_its_units_and_colours():
    said = [e.text for e in charts.timeline(PROFILE["setups"]).iter("text")]
    assert "eager: 2 kernels in 100 µs" in said
    assert {"0", "20.0 µs"} <= set(said)
    assert {"product", "product, something fused", "anything else"} <= set(said)
    assert "product, something fused" not in [e.text for e in charts.timeline(PROFILE["setups"][:1]).iter("text")]


def test_the_timeline_has_one_unit():
    one = {"name": "k", "kind": "gemm", "start_us": 0.0, "us": 15e3}
    drawing = charts.timeline(
        [{"name": "eager", "kernels": [one]}, {"name": "fxfuse", "kernels": [{**one, "us": 5e3}]}]
    )
    assert {e.text.split()[-1] for e in drawing.iter("text") if e.text.endswith("s")} == {"ms"}


def test_on_a_cpu_the_operators_are_the_timeline():
    ops = [
        {"name": "aten::linear", "start_us": 0.0, "us": 5.0, "called": True},
        {"name": "aten::addmm", "start_us": 1.0, "us": 3.0, "called": False},
    ]
    assert [one["kind"] for one in charts.ran({"kernels": [], "ops": ops})] == ["linear"]
    assert charts.timeline([{"name": "eager", "kernels": []}]) is None


def points(drawing):
    """Centres of the marks of regions; the last ones are those of the key."""
    found = [re.match(r"M([\d.]+) ([\d.]+)", e.get("d")) for e in drawing.iter("path") if "point" in e.get("class")]
    return [(float(m[1]), float(m[2])) for m in found]


def test_the_roofline_places_regions_by_their_figures():
    drawing = roofline(PROFILE["setups"], PROFILE["rates"])
    (eager_x, eager_y), (ours_x, ours_y), *key = points(drawing)
    assert len(key) == 2  # the region without operations is no point
    assert ours_x > eager_x  # more operations a byte
    assert ours_y < eager_y  # and more a second, which is further up
    assert len([e for e in drawing.iter("path") if e.get("class") == "to-roof"]) == 2
    assert len([e for e in drawing.iter("path") if e.get("class") == "roof"]) == 1


def test_a_roofline_without_figures_is_none():
    assert roofline([{"name": "eager", "regions": []}], None) is None
    assert len([e for e in roofline(PROFILE["setups"]).iter("path") if e.get("class") == "roof"]) == 0


@pytest.mark.parametrize(("suffix", "another"), [("", False), (" M=16", False), ("-2", True)])
def test_a_profile_of_another_target_is_said(suffix, another, result):
    of = type(result)(**{**vars(result), "label": f"{PROFILE['target']}{suffix}"})
    text = Page(report.report([of], profiles=[PROFILE])).text
    assert ("a profile of a target that has no times on this page" in text) == another


def test_the_profile_is_shown(result):
    page = Page(report.report([result], profiles=[PROFILE]))
    assert "1 confirmed, 1 broken." in page.text
    assert "broken" in page.text
    assert "nvjet<1>" in page.text


@pytest.mark.parametrize(("longest", "step"), [(1.0, 0.2), (242.0, 50.0), (21000.0, 5000.0), (9.9, 1.0)])
def test_ticks_are_round(longest, step):
    found = charts.ticks(longest)
    assert 4 <= len(found) <= 10
    assert found[1] == pytest.approx(step)
