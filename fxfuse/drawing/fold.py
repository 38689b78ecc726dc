"""Repeated blocks of a graph (the layers of a model) folded into one, which says how often it comes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

LEAST = 3
"""Nodes of the smallest block that is worth folding."""


@dataclass(frozen=True)
class Repeat:
    """``times`` blocks of ``period`` nodes each, one after the other from ``start``."""

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.times


def folded(graph: nx.DiGraph) -> nx.DiGraph:
    """A graph in which each run of equal blocks is its first block.

    Nodes come in program order and have an attribute ``alike``, equal where two nodes do the same in two blocks. In
    what comes back each has ``block``, the number of its fold or None, and ``graph["times"]`` tells how often each
    comes. Edges from one block of a run to the next are left out; what reads or feeds any of them is at the first.
    """
    nodes = list(graph)
    position = {node: i for i, node in enumerate(nodes)}
    inputs = [sorted(position[p] for p in graph.predecessors(node)) for node in nodes]
    repeats = list(_repeats([graph.nodes[n]["alike"] for n in nodes], inputs, 0, len(nodes)))
    stands_for = list(range(len(nodes)))
    block: list[int | None] = [None] * len(nodes)
    for number, repeat in enumerate(repeats):
        for i in range(repeat.start, repeat.stop):
            stands_for[i] = repeat.start + (i - repeat.start) % repeat.period
            block[i] = number
    new = nx.DiGraph(times=[repeat.times for repeat in repeats])
    for i, node in enumerate(nodes):
        if stands_for[i] == i:
            new.add_node(node, **graph.nodes[node], block=block[i])
    for source, target in graph.edges:
        a, b = stands_for[position[source]], stands_for[position[target]]
        if a < b:
            new.add_edge(nodes[a], nodes[b])
    return new


def _repeats(alike: Sequence[Hashable], inputs: Sequence[Sequence[int]], start: int, stop: int) -> Iterator[Repeat]:
    """The runs within ``start`` and ``stop``, the one that covers most first found, then those left and right of it."""
    best = max(
        (run for period in range(LEAST, (stop - start) // 2 + 1) for run in _runs(alike, inputs, period, start, stop)),
        key=lambda run: (run.stop - run.start, run.times),
        default=None,
    )
    if best is None:
        return
    yield from _repeats(alike, inputs, start, best.start)
    yield best
    yield from _repeats(alike, inputs, best.stop, stop)


def _runs(
    alike: Sequence[Hashable], inputs: Sequence[Sequence[int]], period: int, start: int, stop: int
) -> Iterator[Repeat]:
    """Runs of blocks of ``period`` nodes whose nodes do the same and read from the same places of their block."""
    equal = 0
    for i in range(start, stop - period + 1):
        if (
            i + period < stop
            and alike[i] == alike[i + period]
            and _reads(inputs, i, period) == _reads(inputs, i + period, period)
        ):
            equal += 1
            continue
        if equal >= period:
            yield Repeat(i - equal, period, equal // period + 1)
        equal = 0


def _reads(inputs: Sequence[Sequence[int]], i: int, period: int) -> list[int]:
    """How far back the inputs of node ``i`` lie; 0 for those before its own block and the one before."""
    return [i - j if i - j <= period else 0 for j in inputs[i]]
