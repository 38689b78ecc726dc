"""Decisions of a forward by values of its arguments, ``if mask.all(): ...``, taken under an assumption that is kept.

A region asks the same again at each call, as the forward does: it runs what the truth was computed from, so far as that
is masks, positions and sizes alone. What decides by a weight, as the routing of experts does, or by floating-point
arguments may go one way now and another then: nothing is decided by these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxfuse.capture import shapes
from fxfuse.capture.assumed import Question, place_of
from fxfuse.capture.assumptions import Check, quoted
from fxfuse.capture.sizes import Sizes
from fxfuse.dependence import Memory
from fxfuse.facts import Fact

DECIDED = "what is decided by values"
"""How the reason begins where a call's answer is another."""
_MOST = 64
"""Nodes that an answer may take: more than asking about a mask does."""
_DRAWING = re.compile(r"rand|bernoulli|multinomial|normal|dropout|poisson|seed")


class ByValue:
    """Answers questions about the example's own tensors; ``asked`` collects them."""

    def __init__(self, example: Mapping[str, Any], free: Mapping[str, str], sizes: Sizes, asked: list[Question]):
        """
        Args:
            example: placeholder name -> the argument, or the Fact of one that nothing is decided by.
            free: placeholder name of a tensor -> Python expression for it.
        """
        self.example, self.free, self.sizes, self.asked = example, free, sizes, asked
        self.decided: dict[fx.Node, bool] = {}

    def decide(self, node: fx.Node) -> bool | None:
        """The truth of a value; None where its arguments do not tell."""
        found = self._question(node)
        if found is None or node in self.decided:
            return None if found is None else self.decided[node]
        module, given = found
        answer = _truth(fx.Interpreter(module).run, [value for _, value in given])
        if answer is not None:
            expressions = tuple(expression for expression, _ in given)
            example = tuple(Fact.of(value) if isinstance(value, torch.Tensor) else value for _, value in given)
            self.asked.append(Question(module, expressions, example, answer, str(node.meta.get("source", ""))))
            self.decided[node] = answer
        return answer

    def drop(self) -> None:
        """Take out of the graph what nothing but a decision was computed from."""
        pending = list(self.decided)
        while pending:
            node = pending.pop()
            if node.op != "placeholder" and not node.users and not node._erased:
                pending += node.all_input_nodes
                node.graph.erase_node(node)

    def _question(self, node: fx.Node) -> tuple[fx.GraphModule, list[tuple[str, Any]]] | None:
        """A module that gives the value of a node, and its arguments: how a call tells each, and what the example told.

        None where it takes more than the arguments, or other than what may be run again.
        """
        given: dict[fx.Node, tuple[str, Any]] = {}
        inside: set[fx.Node] = set()
        pending = [node]
        while pending:
            n = pending.pop()
            if n in inside or n in given:
                continue
            told = self._told(n)
            if told is not None:
                given[n] = told
            elif len(inside) < _MOST and _may_run_again(n):
                inside.add(n)
                pending += n.all_input_nodes
            else:
                return None
        if not self._unwritten(inside | given.keys(), node.graph):
            return None
        graph = fx.Graph()
        new = {n: graph.placeholder(f"given_{i}") for i, n in enumerate(given)}
        for n in node.graph.nodes:
            if n in inside:
                new[n] = graph.node_copy(n, new.__getitem__)
        graph.output(new[node])
        return fx.GraphModule(nn.Module(), graph), list(given.values())

    def _unwritten(self, nodes: Collection[fx.Node], graph: fx.Graph) -> bool:
        """Whether nobody may have written, or writes now, to the tensors among ``nodes``."""
        memory = Memory(dict(self.sizes.values.root.named_modules()))
        for n in graph.nodes:
            memory.note(n)
        written = frozenset().union(*memory.writes.values())
        return not any(written & memory.memory[n] for n in nodes if self.sizes.term(n) is None)

    def _told(self, node: fx.Node) -> tuple[str, Any] | None:
        """How a call tells a value: an argument, a number that follows from sizes, or the device where they lie."""
        if node.op == "placeholder":
            given = self.example[str(node.target)]
            return (self.free[str(node.target)], given) if isinstance(given, torch.Tensor) else None
        term = self.sizes.term(node)
        if term is not None:
            return term.text, term.value
        known = self.sizes.values.get(node)
        if isinstance(known, torch.device):
            beside = next((n for n in self.free if self.example[n].device == known), None)
            return None if beside is None else (f"{self.free[beside]}.device", known)
        return None


def _may_run_again(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_torchs = node.op in ("call_function", "call_method") and shapes.is_torchs(node.target)
    # What is a dtype or a device in the example may be another in a call.
    return is_torchs and node.target is not getattr and not _DRAWING.search(name)


def check_of(question: Question, scope: dict[str, Any]) -> Check:
    """What a region checks at each call; what asks is put into ``scope``."""
    name = f"fx_ask_{len(scope)}"
    scope[name] = _asking(question)
    call = f"{name}({', '.join(question.arguments)})"
    place = quoted(place_of(question.source))
    why = f"'{DECIDED} ({place}): expected {question.answer}'"  # to say what was found would be to ask again
    return Check(f"{call} is {question.answer}", "fallback", why)


def _asking(question: Question) -> Callable[..., bool | None]:
    """What asks at a call; it answers None where a call has other tensors than any that may be asked."""
    forward = question.module.forward

    def ask(*values: Any) -> bool | None:
        # Asking waits for the GPU, which no capture allows; PyTorch's forwards do not ask then.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        return _truth(forward, values)

    return ask


def _truth(function: Callable[..., Any], values: Any) -> bool | None:
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return bool(function(*values))
    except Exception:  # whatever a forward may raise on other tensors: its own is to raise it
        return None
