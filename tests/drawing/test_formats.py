import json
import re
from xml.etree import ElementTree

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.bench.models import GPT2Like, LlamaLike
from fxfuse.drawing.markup import SVG
from fxfuse.drawing.view import view
from fxfuse.errors import NotOptimized, UnknownFormat
from tests.page import Page

NODES = ".//{*}g[@role='img']"


class Kept(nn.Module):
    """One product that is fused, and one that is returned bare and so stays."""

    def __init__(self):
        super().__init__()
        self.up, self.w, self.b = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        h = F.relu(self.up(x)) @ self.w
        return h + self.b, h


class Blocks(nn.Module):
    """Layers whose MLP alone can be traced: how they go on depends on a value."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x):
            return x + self.mlp(x) if x.sum() < 1e9 else x

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def optimized(model, *args):
    torch.manual_seed(0)
    return fxfuse.optimize(model.eval(), args)


@pytest.fixture(scope="module")
def models():
    tokens = torch.randint(64, (1, 8))
    return {
        "kept": optimized(Kept(), torch.randn(2, 8)),
        "blocks": optimized(Blocks(3), torch.randn(2, 8)),
        "gpt2": optimized(GPT2Like(vocab=64, dim=32, heads=2, layers=12), tokens),
        "llama": optimized(LlamaLike(vocab=64, dim=32, heads=2, layers=12), tokens),
        "nothing": optimized(nn.Softmax(dim=-1), torch.randn(2, 8)),
    }


def marks(graph):
    return {name: (a["mark"], a["letter"]) for name, a in graph.nodes(data=True) if a["mark"]}


def test_a_letter_joins_what_became_what(models):
    shown = view(models["kept"])
    (part,) = shown.parts
    fused = next(change for change in shown.changes if change.kind == "fused")
    assert fused.after == "linear_act relu"
    assert fused.source.startswith("test_formats.py:")
    before = [n for n, (mark, letter) in marks(part.before).items() if letter == fused.letter]
    after = [n for n, (mark, letter) in marks(part.after).items() if letter == fused.letter]
    assert before == ["up", "relu"]
    assert len(after) == 1


def test_what_stays_is_marked_with_its_reason(models):
    (part,) = view(models["kept"]).parts
    for graph in (part.before, part.after):
        (stays,) = [a for _, a in graph.nodes(data=True) if a["mark"] == "kept"]
        assert stays["note"] == "stays: matmul is returned as well"


def test_a_spelled_out_activation_is_part_of_what_it_was_fused_into(models):
    shown = view(models["gpt2"])
    fused = next(change for change in shown.changes if change.kind == "fused")
    assert fused.count == 12
    assert "tanh" in fused.before
    assert "pow" in fused.before


def test_views_sizes_and_parameters_are_counted_and_not_drawn(models):
    (part,) = view(models["gpt2"]).parts
    labels = {a["label"] for _, a in part.before.nodes(data=True)}
    assert not labels & {"view", "transpose", "getitem", "getattr", "split", "reshape", "floordiv"}
    assert part.before.graph["hidden"] > 12


def test_data_flows_through_what_is_not_drawn(models):
    (part,) = view(models["gpt2"]).parts
    attention = [n for n, a in part.before.nodes(data=True) if a["label"] == "scaled_dot_product_attention"]
    assert [set(part.before.predecessors(n)) for n in attention] == [{f"h_{i}_attn_qkv"} for i in range(12)]


def test_regions_of_equal_structure_are_one_part(models):
    (part,) = [part for part in view(models["blocks"]).parts if part.kind == "Sequential"]
    assert part.paths == ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_twelve_layers_are_drawn_as_one(name, models, tmp_path):
    root = ElementTree.parse(fxfuse.draw(models[name], tmp_path / "a.svg")).getroot()
    times = [text.text for text in root.iterfind(".//{*}text") if text.text.startswith("× ")]
    assert times == ["× 12", "× 12"]
    drawn = len(root.findall(NODES))
    (part,) = view(models[name]).parts
    assert drawn < (len(part.before) + len(part.after)) / 6


def test_svg_stands_alone_and_speaks(models, tmp_path):
    root = ElementTree.parse(fxfuse.draw(models["gpt2"], tmp_path / "a.svg")).getroot()
    assert root.tag == f"{{{SVG}}}svg"
    ids = {e.get("id"): e for e in root.iter() if e.get("id")}
    for svg in root.iter(f"{{{SVG}}}svg"):
        title, desc = (ids[i] for i in svg.get("aria-labelledby").split())
        assert title.text
        assert desc.text
    assert all(node.find("{*}title").text for node in root.iterfind(NODES))
    fused = [node for node in root.iterfind(NODES) if "fused" in node.get("class").split()]
    assert fused
    assert all(node.get("tabindex") == "0" for node in fused)
    style = root.find("{*}style").text
    assert "prefers-color-scheme: dark" in style


def test_boxes_lie_within_their_drawing(models, tmp_path):
    root = ElementTree.parse(fxfuse.draw(models["llama"], tmp_path / "a.svg")).getroot()
    for drawing in root.findall("{*}svg"):
        width, height = (float(part) for part in drawing.get("viewBox").split()[2:])
        (group,) = drawing.findall("{*}g")
        across, down = (float(n) for n in re.findall(r"[\d.]+", group.get("transform")))
        for rect in drawing.iter(f"{{{SVG}}}rect"):
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            assert x + across >= 0
            assert y + down >= 0
            assert x + w + across <= width
            assert y + h + down <= height


@pytest.mark.parametrize(("name", "details"), [("gpt2", 1), ("blocks", 1), ("kept", 0), ("nothing", 0)])
def test_html_unfolds_what_the_svg_folds(name, details, models, tmp_path):
    page = Page(fxfuse.draw(models[name], tmp_path / "a.html").read_text())
    assert len(page.of("details")) == details
    assert len(page.of("html")) == len(page.of("main")) == 1
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_html_loads_nothing(models, tmp_path):
    page = Page(fxfuse.draw(models["llama"], tmp_path / "a.html").read_text())
    assert page.of("script") == page.of("link") == page.of("img") == []
    assert not [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href")]


def test_names_of_the_model_are_text_and_no_markup(tmp_path):
    class Model(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    Model.__name__ = "<script>alert(1)</script>"
    model = optimized(Model(), torch.randn(2))
    assert Page(fxfuse.draw(model, tmp_path / "a.html").read_text()).of("script") == []
    ElementTree.parse(fxfuse.draw(model, tmp_path / "a.svg"))


def test_json_is_read_back_as_the_same_graphs(models, tmp_path):
    document = json.loads(fxfuse.draw(models["kept"], tmp_path / "a.json").read_text())
    assert document["schema"] == "fxfuse.graph/1"
    (part,), (shown,) = document["parts"], view(models["kept"]).parts
    for when in ("before", "after"):
        graph = nx.node_link_graph(part[when], edges="edges")
        assert list(graph) == list(getattr(shown, when))
        assert set(graph.edges) == set(getattr(shown, when).edges)
        assert marks(graph) == marks(getattr(shown, when))


def test_dot_has_a_line_for_each_node_and_edge(models, tmp_path):
    lines = fxfuse.draw(models["gpt2"], tmp_path / "a.dot").read_text().splitlines()
    (part,) = view(models["gpt2"]).parts
    graphs = (part.before, part.after)
    assert sum(" -> " in line for line in lines) == sum(len(graph.edges) for graph in graphs)
    assert sum("[label=" in line for line in lines) == sum(map(len, graphs))
    assert sum("bold" in line for line in lines) == 12 * (1 + 9)


def test_a_function_and_a_graph_module(tmp_path):
    def function(x, w):
        return torch.relu(x @ w)

    args = (torch.randn(2, 8), torch.randn(8, 8))
    fast = fxfuse.optimize(function, args)
    assert "relu" in fxfuse.draw(fast, tmp_path / "f.dot").read_text()
    module = fxfuse.optimize(torch.fx.symbolic_trace(Kept().eval()))
    assert view(module).parts[0].paths == ("",)


def test_an_ending_in_capitals(models, tmp_path):
    ElementTree.parse(fxfuse.draw(models["kept"], tmp_path / "A.SVG"))


def test_another_ending_and_another_model_are_refused(models, tmp_path):
    with pytest.raises(UnknownFormat, match=r"a\.png: the ending .* none of \.svg, \.dot, \.json, \.html"):
        fxfuse.draw(models["kept"], tmp_path / "a.png")
    with pytest.raises(NotOptimized):
        fxfuse.draw(nn.Linear(2, 2), tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())
