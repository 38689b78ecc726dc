"""Places for the nodes of a small directed acyclic graph, in layers from top to bottom.

The method of Sugiyama, Tagawa and Toda (1981): layers by longest path, an order within layers by barycentres, and then
coordinates that pull each node towards its neighbours. networkx has layouts, but none for layers with edges between
that must not run through nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

GAP_X, GAP_Y = 18.0, 26.0
_BEND_WIDTH = 8.0
_SWEEPS = 8


@dataclass(frozen=True)
class Layout:
    """Where everything is: centres of nodes, points of edges; all within (0, 0) and (width, height)."""

    centres: dict[Any, tuple[float, float]]
    edges: dict[tuple[Any, Any], list[tuple[float, float]]]
    """From the bottom of the one node to the top of the other, with a point in each layer between."""
    width: float
    height: float


def layered(graph: nx.DiGraph, sizes: Mapping[Any, tuple[float, float]]) -> Layout:
    """Lay ``graph`` out. ``sizes``: node -> (width, height)."""
    rank = _ranks(graph)
    paths, layers = _with_bends(graph, rank)
    above: dict[Any, list[Any]] = {}
    below: dict[Any, list[Any]] = {}
    for path in paths.values():
        for upper, lower in itertools.pairwise(path):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    _order(layers, above, below)
    width = {node: sizes[node][0] if node in graph else _BEND_WIDTH for layer in layers for node in layer}
    x = _coordinates(layers, above, below, width)
    left = min(x[n] - width[n] / 2 for n in x) if x else 0.0
    heights = [max((sizes[n][1] for n in layer if n in graph), default=0.0) for layer in layers]
    y, top = {}, 0.0
    for layer, height in zip(layers, heights, strict=True):
        y.update(dict.fromkeys(layer, top + height / 2))
        top += height + GAP_Y
    centre = {n: (x[n] - left, y[n]) for n in x}
    edges = {}
    for (a, b), path in paths.items():
        (ax, ay), (bx, by) = centre[a], centre[b]
        edges[a, b] = [(ax, ay + sizes[a][1] / 2), *(centre[n] for n in path[1:-1]), (bx, by - sizes[b][1] / 2)]
    right = max((x[n] - left + width[n] / 2 for n in x), default=0.0)
    return Layout({n: centre[n] for n in graph}, edges, right, max(top - GAP_Y, 0.0))


def _ranks(graph: nx.DiGraph) -> dict[Any, int]:
    """Layer of each node: one below the lowest that feeds it; what nothing feeds stands just above its first reader."""
    rank: dict[Any, int] = {}
    order = list(nx.topological_sort(graph))
    for node in order:
        rank[node] = max((rank[p] + 1 for p in graph.predecessors(node)), default=0)
    for node in order:
        if not graph.in_degree(node) and graph.out_degree(node):
            rank[node] = min(rank[s] for s in graph.successors(node)) - 1
    least = min(rank.values(), default=0)
    return {node: r - least for node, r in rank.items()}


def _with_bends(graph: nx.DiGraph, rank: Mapping[Any, int]) -> tuple[dict[tuple[Any, Any], list[Any]], list[list[Any]]]:
    """Edges as paths with a node of their own in each layer that they pass, and the layers with all of these.

    Edges from one node share their bends, so that a value which many read is one line.
    """
    layers: list[list[Any]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for node in graph:
        layers[rank[node]].append(node)
    paths = {}
    made = set()
    for a, b in graph.edges:
        bends = [("bend", a, r) for r in range(rank[a] + 1, rank[b])]
        for bend in bends:
            if bend not in made:
                made.add(bend)
                layers[bend[2]].append(bend)
        paths[a, b] = [a, *bends, b]
    return paths, layers


def _order(layers: list[list[Any]], above: Mapping[Any, list[Any]], below: Mapping[Any, list[Any]]) -> None:
    """Sort each layer by where the neighbours in the layer before are, down and up in turns."""
    place = {node: float(i) for layer in layers for i, node in enumerate(layer)}
    for sweep in range(_SWEEPS):
        neighbours = above if sweep % 2 == 0 else below
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = {n: _mean([place[m] for m in neighbours.get(n, ())], place[n]) for n in layer}
            layer.sort(key=wanted.__getitem__)
            place.update((node, float(i)) for i, node in enumerate(layer))


def _coordinates(
    layers: Sequence[Sequence[Any]],
    above: Mapping[Any, list[Any]],
    below: Mapping[Any, list[Any]],
    width: Mapping[Any, float],
) -> dict[Any, float]:
    x: dict[Any, float] = {}
    for layer in layers:
        x.update(_apart(layer, dict.fromkeys(layer, 0.0), width))
    for sweep in range(2 * _SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = {n: _mean([x[m] for m in (*above.get(n, ()), *below.get(n, ()))], x[n]) for n in layer}
            x.update(_apart(layer, wanted, width))
    return x


def _apart(layer: Sequence[Any], wanted: Mapping[Any, float], width: Mapping[Any, float]) -> dict[Any, float]:
    """The places nearest to those wanted at which nothing overlaps, by merging neighbours that do into groups."""
    groups: list[tuple[list[Any], list[float], float]] = []
    """(nodes, offset of each from the first, the place of the first)"""
    for node in layer:
        nodes, offsets, first = [node], [0.0], wanted[node]
        while groups:
            before, their_offsets, theirs = groups[-1]
            gap = their_offsets[-1] + (width[before[-1]] + width[nodes[0]]) / 2 + GAP_X
            if theirs + gap <= first:
                break
            groups.pop()
            nodes, offsets = before + nodes, their_offsets + [gap + o for o in offsets]
            first = _mean([wanted[n] - o for n, o in zip(nodes, offsets, strict=True)], 0.0)
        groups.append((nodes, offsets, first))
    return {n: first + o for nodes, offsets, first in groups for n, o in zip(nodes, offsets, strict=True)}


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
