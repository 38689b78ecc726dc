import networkx as nx
import pytest

from fxfuse.drawing.fold import folded


def chain(text, *, skip=()):
    """A node a letter, each fed by the one before; ``skip``: further edges by position."""
    graph = nx.DiGraph()
    for i, letter in enumerate(text):
        graph.add_node(i, alike=letter)
    graph.add_edges_from((i, i + 1) for i in range(len(text) - 1))
    graph.add_edges_from(skip)
    return graph


@pytest.mark.parametrize(
    ("text", "left", "times"),
    [
        ("", "", []),
        ("abc", "abc", []),
        ("abcabc", "abcabc", []),  # the first reads nothing
        ("xabcabc", "xabc", [2]),
        ("xabcabcabcy", "xabcy", [3]),
        ("abab", "abab", []),  # blocks of two nodes are no layers
        ("xabcabcydefgdefgdefg", "xabcydefg", [2, 3]),
        ("xabcabcab", "xabcab", [2]),
        ("abcdabcabc", "abcdabc", [2]),
        ("x" + 12 * "abcdef", "xabcdef", [12]),
    ],
)
def test_runs_become_their_first_block(text, left, times):
    graph = folded(chain(text))
    assert "".join(a["alike"] for _, a in graph.nodes(data=True)) == left
    assert graph.graph["times"] == times
    assert nx.is_directed_acyclic_graph(graph)


def test_blocks_are_numbered_and_the_rest_has_none():
    graph = folded(chain("xabcabcy"))
    assert [block for _, block in graph.nodes(data="block")] == [None, 0, 0, 0, None]


def test_what_follows_a_run_is_fed_by_its_block_and_no_edge_goes_back():
    graph = folded(chain("xabcabcy"))
    assert set(graph.edges) == {(0, 1), (1, 2), (2, 3), (3, 7)}


def test_blocks_that_read_from_other_places_are_not_the_same():
    # The second block's c reads its a as well, the first one's does not.
    assert folded(chain("xabcabc", skip=[(4, 6)])).graph["times"] == []
    assert folded(chain("xabcabc", skip=[(1, 3), (4, 6)])).graph["times"] == [2]


def test_a_value_that_every_block_reads_stands_before_them():
    blocks = folded(chain("xabcabcabc", skip=[(0, 3), (0, 6), (0, 9)]))
    assert blocks.graph["times"] == [2]  # the first block is nearer to x than the others to theirs
