"""A region's body as CUDA graphs, one for each kind of call: the host then launches one thing in place of every kernel.

A graph reads and writes memory at fixed addresses. So a call copies its tensors in, replays, and clones what comes out;
weights are read where they lie, and where one has moved, the graph is captured anew.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxfuse.dependence import OUTSIDE, Dependence
from fxfuse.ops.gpu.driver import copy

MOST = 8
"""Graphs that a region keeps; the one used least recently goes."""
MOST_CAPTURES = 64
"""More kinds than this take turns, or weights keep moving: a capture takes as long as thousands of calls."""

CALLED_ONCE, REFUSED = "called once", "refused"

Kind = tuple[Any, ...]
"""What a graph is captured for: of tensors all but their values, other arguments as they are, and settings."""
Places = tuple[Any, ...]

_CAPTURING = threading.Lock()
"""Captures wait for the whole device, which is an error while another thread captures."""


class Refused(Exception):
    """A call cannot be captured; the text says why."""


class Held(NamedTuple):
    """Memory of a graph that calls copy to or from."""

    tensor: Tensor
    address: int
    size: int
    """Bytes, where both sides are dense and lie alike; else 0."""


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    device: int
    inputs: list[Held]
    """Of each argument that is a tensor."""
    weights: Places
    """Where what is read from the model lies."""
    outputs: list[Any]
    """``Held`` in place of tensors."""
    structure: pytree.TreeSpec


class Replayed:
    """``body(owner, *arguments, *reads)``, run at the first call of a kind, captured at the second, then replayed."""

    def __init__(
        self,
        body: Callable[..., Any],
        arguments: int,
        refusal: Callable[[], str],
        counted: Callable[[], None],
        say: Callable[[str], None],
    ):
        """
        Args:
            body: the region's graph as a function.
            arguments: how many of its values are arguments of the call; those that follow are read from the model.
            refusal: tells why no call is to be captured, or "". It is asked at the first call, when the model is whole.
            counted: called at each replay.
            say: takes the reason where there is no graph for a kind of call.
        """
        self.body, self.count, self.counted, self.say = body, arguments, counted, say
        self.graphs: OrderedDict[Kind, Captured | str] = OrderedDict()
        """Kind of call -> its graph, or how far it has come."""
        self.lock = threading.Lock()
        self.captures = 0
        self.last: tuple[int, int] | None = None
        """Device and stream of the last replay."""
        self.side: torch.cuda.Stream | None = None
        """The stream that is captured."""
        self.pool: Any = None
        self.refusal: Callable[[], str] | None = refusal
        self.never = False

    def __call__(self, owner: Any, *values: Any) -> Any:
        if self.never or not self._asked() or torch.cuda.is_current_stream_capturing():
            return self.body(owner, *values)
        arguments, reads = values[: self.count], values[self.count :]
        try:
            kind = kind_of(arguments)
        except Refused as why:
            self.say(str(why))
            return self.body(owner, *values)
        with self.lock:
            captured = self._graph_for(kind, owner, arguments, reads)
            if captured is not None:
                return self._replay(captured, arguments)
        return self.body(owner, *values)

    def _asked(self) -> bool:
        """Whether calls may be captured at all."""
        refusal = self.refusal
        if refusal is not None:
            why = refusal() if torch.cuda.is_available() else "torch finds no CUDA device"
            if why:
                self.never = True
                self.say(why)
            self.refusal = None
        return not self.never

    def _graph_for(self, kind: Kind, owner: Any, arguments: Sequence[Any], reads: Sequence[Any]) -> Captured | None:
        """The graph for a call, captured now if need be; None where the call is to run by itself."""
        known, weights = self.graphs.get(kind), _places_of(reads)
        if isinstance(known, Captured) and known.weights == weights:
            self.graphs.move_to_end(kind)
            return known
        if known == REFUSED or self.captures >= MOST_CAPTURES:
            return None
        if known != CALLED_ONCE:
            # What is found out or compiled at a first call, or at one with weights elsewhere, is found out then.
            self._keep(kind, CALLED_ONCE)
            return None
        try:
            captured = self._capture(owner, arguments, reads, weights)
        except Exception as error:
            cause = error.__context__ or error  # the end of a capture that was given up raises over the reason
            self._keep(kind, REFUSED)
            self.say(str(cause) if isinstance(cause, Refused) else f"{type(cause).__name__}: {_first_line(cause)}")
            return None
        self._keep(kind, captured)
        self.captures += 1
        if self.captures == MOST_CAPTURES:
            self.say(f"{MOST_CAPTURES} were captured, and no more will be")
        return captured

    def _keep(self, kind: Kind, what: Captured | str) -> None:
        self.graphs[kind] = what
        self.graphs.move_to_end(kind)
        for group, most in ((Captured, MOST), (str, MOST_CAPTURES)):
            for old in [k for k, v in self.graphs.items() if isinstance(v, group)][:-most]:
                del self.graphs[old]

    def _capture(self, owner: Any, arguments: Sequence[Any], reads: Sequence[Any], weights: Places) -> Captured:
        device = next(a.device for a in arguments if isinstance(a, Tensor))
        for t in reads:
            if isinstance(t, Tensor) and t.device != device:
                raise Refused(f"it reads a tensor on {t.device}, and an argument is on {device}")
        # Made outside inference mode: calls in any mode write to them.
        with torch.inference_mode(False), torch.no_grad():
            own = [torch.empty_like(a) if isinstance(a, Tensor) else a for a in arguments]
        with _CAPTURING, torch.cuda.device(device):
            self.side = self.side or torch.cuda.Stream(device)
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            # cuBLAS keeps a workspace for each stream; one that a graph has must be nobody else's.
            torch._C._cuda_clearCublasWorkspaces()
            try:
                # Other threads may go on; a wait of their own is no part of this.
                with torch.cuda.graph(graph, self.pool, self.side, capture_error_mode="thread_local"):
                    result = self.body(owner, *own, *reads)
            except Exception:
                pool, self.pool, self.side = self.pool, None, None
                _mend(stream, pool)
                raise
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        outputs, structure = pytree.tree_flatten(result)
        _check(outputs, [t for t in (*own, *reads) if isinstance(t, Tensor)], device)
        inputs = [_held(t, like=given) for t, given in zip(own, arguments, strict=True) if isinstance(t, Tensor)]
        outputs = [_held(t, like=torch.empty_like(t)) if isinstance(t, Tensor) else t for t in outputs]
        return Captured(graph, device.index, inputs, weights, outputs, structure)

    def _replay(self, captured: Captured, arguments: Sequence[Any]) -> Any:
        device = captured.device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self._replay(captured, arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
        if (device, stream) != self.last:
            self._take_turns(device, stream)
        tensors = (a for a in arguments if isinstance(a, Tensor))
        for (own, address, size), given in zip(captured.inputs, tensors, strict=True):
            if size:
                copy(address, given.data_ptr(), size, stream)
            else:
                own.copy_(given)
        captured.graph.replay()
        self.counted()
        outputs = [_taken_out(o, stream) if isinstance(o, Held) else o for o in captured.outputs]
        if captured.structure.is_leaf():
            return outputs[0]
        return pytree.tree_unflatten(outputs, captured.structure)

    def _take_turns(self, device: int, stream: int) -> None:
        """Calls on another stream use the same memory: this one comes after them, and nobody gets it before."""
        now = torch.cuda.current_stream(device)
        if self.last is not None and self.last[0] == device:
            now.wait_stream(torch.cuda.ExternalStream(self.last[1], device))
        for graph in self.graphs.values():
            for held in graph.inputs if isinstance(graph, Captured) and graph.device == device else ():
                held.tensor.record_stream(now)
        self.last = device, stream


def _held(tensor: Tensor, *, like: Tensor) -> Held:
    alike = tensor.stride() == like.stride() and not (tensor.is_neg() or like.is_neg() or like.is_complex())
    # What has the strides that empty_like gave has no holes.
    return Held(tensor, tensor.data_ptr(), tensor.numel() * tensor.element_size() if alike else 0)


def _taken_out(held: Held, stream: int) -> Tensor:
    tensor, address, size = held
    if not size:
        return tensor.clone()
    own = torch.empty_like(tensor)
    copy(own.data_ptr(), address, size, stream)
    return own


def refusal(gm: fx.GraphModule) -> str:
    """Why calls of a graph cannot be captured, as far as the graph tells; "" where they may be."""
    called = next((n for n in gm.graph.nodes if n.op == "call_module"), None)
    if called is not None:
        return f"it calls {called.target}, whose weights may move"
    dependence = Dependence(gm)
    writer = next((n for n, written in dependence.writes.items() if OUTSIDE in written), None)
    return "" if writer is None else f"{writer.name} may write to memory of the caller or of the model"


def kind_of(arguments: Sequence[Any]) -> Kind:
    """What two calls have to share for one graph to serve both."""
    kind: list[Any] = [*_settings()]
    device = -1
    for a in arguments:
        if isinstance(a, Tensor):
            if a.layout is not torch.strided:
                raise Refused(f"an argument is {str(a.layout).removeprefix('torch.')}")
            if not a.is_cuda:
                raise Refused(f"an argument is on {a.device}")
            if device not in (-1, a.get_device()):
                raise Refused("its arguments are on several devices")
            device = a.get_device()
            kind.append((a.shape, a.stride(), a.dtype, device, a.is_neg()))
        elif a is None or isinstance(a, (bool, int, float, str, torch.dtype, torch.device)):
            kind.append((type(a), a))
        else:
            raise Refused(f"an argument is a {type(a).__name__}")
    if device == -1:
        raise Refused("no argument is a tensor")
    return tuple(kind)


def _settings() -> tuple[Any, ...]:
    """What decides, beside the arguments, which kernels run."""
    return (
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.get_default_dtype(),
    )


def _places_of(reads: Sequence[Any]) -> Places:
    return tuple([(t.data_ptr(), t.stride(), t.dtype) for t in reads if isinstance(t, Tensor)])


def _mend(stream: torch.cuda.Stream, pool: Any) -> None:
    """Where the driver gave a capture up, torch leaves its own end of it undone: stream, pool, random generators."""
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):  # it was ended after all
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    # The random generators wait for an end of a capture, whichever.
    scratch = torch.empty(1, device=stream.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        scratch.zero_()


def _check(outputs: Sequence[Any], inputs: Sequence[Tensor], device: torch.device) -> None:
    """Refuse results for which clones cannot stand: nobody may reach their memory through something else."""
    seen = {t.untyped_storage().data_ptr() for t in inputs}
    for output in outputs:
        if isinstance(output, Tensor):
            if output.device != device:
                raise Refused(f"a result is on {output.device}")
            memory = output.untyped_storage().data_ptr()
            if memory in seen:
                raise Refused("a result shares memory with an argument, a weight or another result")
            seen.add(memory)
        elif output is not None and not isinstance(output, (bool, int, float, str)):
            raise Refused(f"a result is a {type(output).__name__}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
