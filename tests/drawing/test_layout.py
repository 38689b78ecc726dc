import itertools

import networkx as nx
import pytest

from fxfuse.drawing.layout import layered

GRAPHS = {
    "nothing": nx.DiGraph(),
    "one": nx.DiGraph([("a", "b")]),
    "diamond": nx.DiGraph([("x", "l"), ("x", "r"), ("l", "y"), ("r", "y")]),
    "skip": nx.DiGraph([("x", "a"), ("a", "b"), ("b", "c"), ("x", "c")]),
    "late input": nx.DiGraph([("x", "a"), ("a", "b"), ("w", "b")]),
    "two pieces": nx.DiGraph([("a", "b"), ("c", "d")]),
    "wide": nx.DiGraph([("x", i) for i in range(9)] + [(i, "y") for i in range(9)]),
    "crossed": nx.DiGraph([("a", "d"), ("b", "c"), ("r", "a"), ("r", "b")]),
}


def laid_out(graph):
    return layered(graph, {node: (40.0 + 5 * (i % 3), 20.0) for i, node in enumerate(graph)})


@pytest.mark.parametrize("name", GRAPHS)
def test_nodes_do_not_touch_and_lie_within(name):
    graph = GRAPHS[name]
    layout = laid_out(graph)
    assert set(layout.centres) == set(graph)
    for (_, (x, y)), (_, (u, v)) in itertools.combinations(layout.centres.items(), 2):
        assert abs(x - u) > 40 or abs(y - v) > 20
    for x, y in layout.centres.values():
        assert 20 <= x <= layout.width - 20
        assert 10 <= y <= layout.height - 10


@pytest.mark.parametrize("name", GRAPHS)
def test_every_edge_goes_down_from_its_node_to_its_reader(name):
    layout = laid_out(GRAPHS[name])
    assert set(layout.edges) == set(GRAPHS[name].edges)
    for (a, b), points in layout.edges.items():
        assert points[0] == (layout.centres[a][0], layout.centres[a][1] + 10)
        assert points[-1] == (layout.centres[b][0], layout.centres[b][1] - 10)
        assert all(lower > upper for (_, upper), (_, lower) in itertools.pairwise(points))


def test_an_edge_over_layers_passes_beside_what_stands_there():
    layout = laid_out(GRAPHS["skip"])
    _, *bends, _ = layout.edges["x", "c"]
    for (x, _), node in zip(bends, "ab", strict=True):
        assert abs(x - layout.centres[node][0]) > 20


def test_what_nothing_feeds_stands_just_above_its_reader():
    layout = laid_out(GRAPHS["late input"])
    assert layout.centres["w"][1] == layout.centres["a"][1]


def test_siblings_stand_over_their_readers():
    centres = laid_out(GRAPHS["crossed"]).centres
    assert (centres["a"][0] < centres["b"][0]) == (centres["d"][0] < centres["c"][0])
