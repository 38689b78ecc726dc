"""A region's body as CUDA graphs, one for each kind of call: the host then launches one thing in place of every kernel.

A graph reads and writes memory at fixed addresses. So a call copies its tensors in, replays, and clones what comes out;
weights are read where they lie, and where one has moved, the graph is captured anew.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxfuse.capture.captured import Captured, Input, Kind, Output, Places, copied
from fxfuse.dependence import OUTSIDE, Dependence
from fxfuse.ops.gpu import copy

MOST = 8
"""Graphs that a region keeps; the one used least recently goes."""
MOST_CAPTURES = 64
"""More kinds than this take turns, or weights keep moving: a capture takes as long as thousands of calls."""

CALLED_ONCE, REFUSED = "called once", "refused"

_CAPTURING = threading.Lock()
"""Captures wait for the whole device, which is an error while another thread captures."""


class Refused(Exception):
    """A call cannot be captured; the text says why."""


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
        self.latest: Captured | None = None
        """Of the last call that was replayed."""
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
        if self.never or not self._asked() or torch._C._cuda_isCurrentStreamCapturing():
            return self.body(owner, *values)
        arguments, reads = values[: self.count], values[self.count :]
        try:
            kind = kind_of(arguments)
        except Refused as why:
            self.say(str(why))
            return self.body(owner, *values)
        with self.lock:
            captured = self.latest
            if captured is None or captured.kind != kind or captured.weights != _places_of(reads):
                captured = self.latest = self._graph_for(kind, owner, arguments, reads)
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
            captured = self._capture(kind, owner, arguments, reads, weights)
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

    def _capture(
        self, kind: Kind, owner: Any, arguments: Sequence[Any], reads: Sequence[Any], weights: Places
    ) -> Captured:
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
            graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream()
            copies = copy.serves(device.index)
            # cuBLAS keeps a workspace for each stream; one that a graph has must be nobody else's.
            torch._C._cuda_clearCublasWorkspaces()
            try:
                # Other threads may go on; a wait of their own is no part of this.
                with torch.cuda.graph(graph, self.pool, self.side, capture_error_mode="thread_local"):
                    inputs = [
                        Input(i, t, copied(to=t, source=given) if copies else None)
                        for i, (t, given) in enumerate(zip(own, arguments, strict=True))
                        if isinstance(t, Tensor)
                    ]
                    results, structure = pytree.tree_flatten(self.body(owner, *own, *reads))
                    outputs = [
                        Output.of(r, copied(to=torch.empty_like(r), source=r) if copies else None)
                        if isinstance(r, Tensor)
                        else r
                        for r in results
                    ]
            except Exception:
                pool, self.pool, self.side = self.pool, None, None
                _mend(stream, pool)
                raise
            finally:
                torch._C._cuda_clearCublasWorkspaces()
            graph.instantiate()
        _check(results, [t for t in (*own, *reads) if isinstance(t, Tensor)], device)
        return Captured(kind, graph, device.index, inputs, weights, outputs, structure)

    def _replay(self, captured: Captured, arguments: Sequence[Any]) -> Any:
        device = captured.device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self._replay(captured, arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
        if (device, stream) != self.last:
            self._take_turns(device, stream)
        result = captured.replay(arguments, stream)
        self.counted()
        return result

    def _take_turns(self, device: int, stream: int) -> None:
        """Calls on another stream use the same memory: this one comes after them, and nobody gets it before."""
        now = torch.cuda.current_stream(device)
        if self.last is not None and self.last[0] == device:
            now.wait_stream(torch.cuda.ExternalStream(self.last[1], device))
        for graph in self.graphs.values():
            for read in graph.inputs if isinstance(graph, Captured) and graph.device == device else ():
                read.tensor.record_stream(now)
        self.last = device, stream


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
