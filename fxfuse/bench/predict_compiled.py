"""What torch.compile, and Liger in a gated MLP, make of eager's kernels: pointwise ones become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from fxfuse.bench.kernel_names import ELEMENTWISE, GEMM
from fxfuse.bench.work import Pass, Work


class NotPredicted(Exception):
    """The text says why."""


def compiled(graph: fx.Graph, works: Sequence[Work]) -> list[Work]:
    """The work of a region as Inductor compiles it on a GPU: products as they are, pointwise chains one kernel each.

    ``works`` are eager's. Host operators are not predicted: compiled code has its own. Raises NotPredicted for what
    Inductor decides by rules that are not written down here: reductions, copies, additions that it may fold into a
    product, chains that read one tensor.
    """
    named = {work.node: work for work in works}
    by_node = {node: named[node.name] for node in graph.nodes if node.name in named}
    _refuse(by_node)
    readers: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        if node not in by_node or by_node[node].passes:
            for source in _producers(node, by_node):
                readers.setdefault(source, set()).add(node)
    chains = _chains(by_node)
    _refuse_shared(chains, readers)
    products = [work for work in works if GEMM in work.kernels]
    merged = [_merged(chain, by_node, readers) for chain in chains]
    return [replace(w, host=Counter(), products=None) for w in products] + merged


def _refuse(by_node: dict[fx.Node, Work]) -> None:
    for node, work in by_node.items():
        if work.unknown or work.unknown_kernels:
            raise NotPredicted(work.unknown or work.unknown_kernels)
        other = work.kernels.keys() - {GEMM, ELEMENTWISE}
        if other or len(work.kernels) > 1:
            raise NotPredicted(f"{work.node}: what torch.compile does with a {min(other or work.kernels)} kernel")
        fed = [by_node[p] for p in _producers(node, by_node) if p in by_node]
        if "aten::add" in work.host and any("aten::mm" in w.host for w in fed):
            raise NotPredicted(f"{work.node}: torch.compile may compute this addition with the product")


def _producers(node: fx.Node, by_node: dict[fx.Node, Work]) -> Iterator[fx.Node]:
    """The nodes whose memory a node reads: views are looked through."""
    for source in node.all_input_nodes:
        if source in by_node and not by_node[source].passes:
            yield from _producers(source, by_node)
        else:
            yield source


def _chains(by_node: dict[fx.Node, Work]) -> list[list[fx.Node]]:
    """Pointwise nodes that feed each other, together."""
    chains: list[list[fx.Node]] = []
    for node, work in by_node.items():
        if ELEMENTWISE in work.kernels:
            before = set(_producers(node, by_node))
            joined = [chain for chain in chains if before.intersection(chain)]
            chains = [chain for chain in chains if chain not in joined]
            chains.append([*(n for chain in joined for n in chain), node])
    return chains


def _refuse_shared(chains: list[list[fx.Node]], readers: dict[fx.Node, set[fx.Node]]) -> None:
    for source, read_by in readers.items():
        if sum(not read_by.isdisjoint(chain) for chain in chains) > 1:
            raise NotPredicted(f"{source.name}: torch.compile may join the pointwise chains that read it")


def _merged(chain: list[fx.Node], by_node: dict[fx.Node, Work], readers: dict[fx.Node, set[fx.Node]]) -> Work:
    """One pass that reads what comes from outside once, and writes what is read outside."""
    works = [by_node[node] for node in chain]
    moved = sum(work.moved for work in works)
    for source, read_by in readers.items():
        reads, size = len(read_by.intersection(chain)), by_node[source].out if source in by_node else 0
        if source in chain:
            moved -= size * (reads + read_by.issubset(chain))
        elif reads:
            moved -= size * (reads - 1)
    dtype = works[-1].passes[0].dtype
    names = " ".join(work.op for work in works)
    return Work(chain[-1].name, names, Counter(), [Pass(ELEMENTWISE, 0, moved, dtype)], products=None)
