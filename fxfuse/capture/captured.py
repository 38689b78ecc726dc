"""One CUDA graph of a region: the memory that it reads and writes, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxfuse.ops.gpu.copy import Copy
from fxfuse.ops.gpu.driver import empty_strided, launch_graph

Kind = tuple[Any, ...]
"""What a graph is captured for: of tensors all but their values, other arguments as they are, and settings."""
Places = tuple[Any, ...]


class Input(NamedTuple):
    """Memory that a graph reads an argument from."""

    position: int
    """Of the argument."""
    tensor: Tensor
    copy: Copy | None
    """The graph's own copy to it; None where a call has to copy before."""


class Output(NamedTuple):
    """Memory that a graph leaves a result in."""

    tensor: Tensor
    copy: Copy | None
    """The graph's own copy from it; None where a call has to copy after."""
    lies: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    """Shape, strides and dtype."""

    @classmethod
    def of(cls, tensor: Tensor, copy: Copy | None) -> Output:
        return cls(tensor, copy, (tuple(tensor.shape), tensor.stride(), tensor.dtype))


class Captured:
    """A graph with the memory that it reads and writes."""

    def __init__(
        self,
        kind: Kind,
        graph: torch.cuda.CUDAGraph,
        device: int,
        inputs: list[Input],
        weights: Places,
        outputs: list[Any],
        structure: pytree.TreeSpec,
    ):
        """
        Args:
            weights: where what is read from the model lies.
            outputs: ``Output`` in place of tensors.
            structure: how a call returns them.
        """
        self.kind, self.graph, self.device, self.weights = kind, graph, device, weights
        self.inputs, self.outputs = inputs, outputs
        self.structure = None if structure.is_leaf() else structure
        self.executable: int = graph.raw_cuda_graph_exec()
        self.draws: bool | None = None
        """Whether it draws random numbers; its first launch tells."""

    def replay(self, arguments: Sequence[Any], stream: int) -> Any:
        """Launch it for a call of its kind, its device being the current one."""
        executable = self.executable
        for position, own, copy in self.inputs:
            if copy is None:
                own.copy_(arguments[position])
            else:
                copy.read_from(arguments[position].data_ptr(), executable)
        results = [self._begun(o) if isinstance(o, Output) else o for o in self.outputs]
        self._launch(stream)
        for i, output in enumerate(self.outputs):
            if isinstance(output, Output) and output.copy is None:
                results[i] = output.tensor.clone()
        return results[0] if self.structure is None else pytree.tree_unflatten(results, self.structure)

    def _begun(self, output: Output) -> Tensor | None:
        """Where the graph is to leave a result; None where a call copies it after."""
        _, copy, lies = output
        if copy is None:
            return None
        result = empty_strided(*lies)
        copy.write_to(result.data_ptr(), self.executable)
        return result

    def _launch(self, stream: int) -> None:
        if self.draws is None:
            generator = torch.cuda.default_generators[self.device]
            before = generator.get_offset()
            self.graph.replay()
            self.draws = generator.get_offset() != before
        elif self.draws:  # torch tells the graph which numbers come next
            self.graph.replay()
        else:
            launch_graph(self.executable, stream)


def copied(*, to: Tensor, source: Tensor) -> Copy | None:
    """A copy of all bytes as a part of what is captured; None where both sides do not lie alike, or have none.

    One of them comes from empty_like, and whatever has such strides has no holes.
    """
    size, device = to.numel() * to.element_size(), to.get_device()
    if to.stride() != source.stride() or source.is_neg() or to.is_complex() or not size or not to.is_cuda:
        return None
    return Copy(to.data_ptr(), source.data_ptr(), size, device, torch._C._cuda_getCurrentRawStream(device))
