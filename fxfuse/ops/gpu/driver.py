"""The CUDA driver and its run-time compiler, as far as launching a kernel of our own takes: thin ctypes calls.

Both libraries come with CUDA builds of torch, so nothing is to be installed. A launch through here costs 3 us of host
time (6 on a shared one); Triton's launcher takes 25, most of which binds arguments and builds descriptors that stay the
same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fxfuse import choose

_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLES = {64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_64B, _128B
_L2_PROMOTION = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B

empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""An empty tensor on the current device by shape, strides and dtype, for a sixth of what torch.empty takes of the host:
what the code that torch.compile generates calls."""
empty_strided = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


class CudaError(RuntimeError):
    """A call of the driver or of the compiler failed."""


@functools.cache
def _libcuda() -> ctypes.PyDLL:
    # PyDLL keeps the interpreter lock: these calls only enqueue, and giving it up costs more than they do.
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def _libnvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}")


def _check(result: int, what: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _libcuda().cuGetErrorName(result, ctypes.byref(name))
        raise CudaError(f"{what} failed: {(name.value or b'').decode() or result}")


def _call(function: Any, *arguments: Any) -> None:
    """Call a function of the driver that needs the context of the current device."""
    result = function(*arguments)
    if result == _NO_CONTEXT:
        _bind()
        result = function(*arguments)
    if result:
        _check(result, function.__name__)


def built(source: str, name: str, architecture: str, threads: int, shared_memory: int = 0) -> Kernel:
    """The kernel ``name`` of CUDA C++ ``source`` on the current device; ``architecture`` is "sm_90a", say.

    Compiling takes most of a second, so the machine code is kept on disk beside the table of choices, if it can be.
    CudaError, with the compiler's log, where it fails.
    """
    identity = hashlib.sha256(f"{torch.version.cuda} {architecture} {source}".encode()).hexdigest()
    with contextlib.suppress(OSError, RuntimeError, CudaError):  # not there yet, no home folder, or damaged
        return Kernel(_file(identity).read_bytes(), name, threads, shared_memory)
    code = _compile(source, architecture)
    with contextlib.suppress(OSError, RuntimeError):
        _file(identity).parent.mkdir(parents=True, exist_ok=True)
        choose.write_whole(_file(identity), code)
    return Kernel(code, name, threads, shared_memory)


def forget_kernels() -> None:
    """Delete the machine code that is kept on disk."""
    with contextlib.suppress(OSError, RuntimeError):
        for file in _file("").parent.glob("*.cubin"):
            file.unlink(missing_ok=True)


def _bind() -> None:
    """Make the current device's context the calling thread's, which it is not before its first real call."""
    torch.cuda.mem_get_info()


def _file(identity: str) -> Path:
    return choose.folder() / "kernels" / f"{identity}.cubin"


def _compile(source: str, architecture: str) -> bytes:
    nvrtc, program, size = _libnvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fxfuse.cu", 0, None, None):
        raise CudaError("nvrtcCreateProgram failed")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-default-device"]
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"nvrtc refused a kernel: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Kernel:
    """A function of a module loaded on the current device, with its shared memory."""

    def __init__(self, code: bytes, name: str, threads: int, shared_memory: int):
        _bind()
        cuda, module, function = _libcuda(), ctypes.c_void_p(), ctypes.c_void_p()
        _check(cuda.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
        _check(cuda.cuFuncSetAttribute(function, _DYNAMIC_SHARED_MEMORY, shared_memory), "cuFuncSetAttribute")
        self.function, self.threads, self.shared_memory = function, threads, shared_memory


class Launcher:
    """Launches one kernel with the arguments at the same addresses, again and again. Not for two threads at once."""

    def __init__(self, kernel: Kernel, addresses: Sequence[int]):
        """``addresses``: of each argument. They are read by the time a launch returns."""
        self._arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        self._configuration = _Configuration((1, 1, 1), (kernel.threads, 1, 1), kernel.shared_memory)
        self._grid, self._function = self._configuration.grid, kernel.function
        self._where = ctypes.byref(self._configuration)
        self._launch = _libcuda().cuLaunchKernelEx

    def launch(self, blocks: int, stream: int) -> None:
        self._grid[0] = blocks
        self._configuration.stream = stream
        _call(self._launch, self._where, self._function, self._arguments, None)

    def capture(self, blocks: int, stream: int) -> Node:
        """Launch it on a stream that is captured: a node of the graph."""
        self.launch(blocks, stream)
        return Node(self._function, self._configuration, self._arguments, _last_node(stream))


class _NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, as of CUDA 12."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Node:
    """A kernel in a CUDA graph, whose arguments may change between launches of the graph."""

    def __init__(self, function: ctypes.c_void_p, configuration: _Configuration, arguments: Any, node: int):
        self._held = arguments
        self._parameters = _NodeParameters(
            function.value,
            configuration.grid,
            configuration.block,
            configuration.shared_memory,
            ctypes.addressof(arguments),
        )
        self._where, self._node = ctypes.addressof(self._parameters), node
        self._set = _taking_pointers("cuGraphExecKernelNodeSetParams_v2", 3)

    def update(self, executable: int) -> None:
        """Read its arguments anew, for the launches of an instantiated graph that follow."""
        _call(self._set, executable, self._node, self._where)


@functools.cache
def _taking_pointers(name: str, count: int) -> Any:
    """A function of the driver that takes so many, which may be given as numbers."""
    function = getattr(_libcuda(), name)
    function.argtypes = (ctypes.c_void_p,) * count
    return function


def edits_graphs() -> bool:
    """Whether the driver can tell the nodes of a graph and change their arguments: from CUDA 12 on."""
    return all(hasattr(_libcuda(), name) for name in ("cuStreamGetCaptureInfo_v2", "cuGraphExecKernelNodeSetParams_v2"))


def launch_graph(executable: int, stream: int) -> None:
    """Launch an instantiated graph that draws no random numbers, of which torch would have to know."""
    _call(_taking_pointers("cuGraphLaunch", 2), executable, stream)


def _last_node(stream: int) -> int:
    """What the next work on a stream that is captured would wait for, where that is one thing."""
    state, capture, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    found = [ctypes.byref(place) for place in (state, capture, graph, nodes, count)]
    _call(_taking_pointers("cuStreamGetCaptureInfo_v2", 6), stream, *found)
    if count.value != 1:
        raise CudaError(f"a kernel on a stream that is captured is {count.value} nodes")
    return int(nodes[0] or 0)


class TensorMap:
    """A CUtensorMap, which tells the copy engine of a matrix in device memory: 128 bytes, aligned to 64."""

    def __init__(self, dtype: torch.dtype, columns: int, step: int, box: tuple[int, int], swizzle: int = 128):
        """Of rows that are ``step`` elements apart, taken in boxes (rows, columns); ``swizzle`` in bytes."""
        self._memory = ctypes.create_string_buffer(128 + 64)
        self.address = (ctypes.addressof(self._memory) + 63) & ~63
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        self._shape = (u64 * 2)(columns, 0)
        steps, boxes, dense = (u64 * 1)(step * dtype.itemsize), (u32 * 2)(box[1], box[0]), (u32 * 2)(1, 1)
        self._before = (ctypes.c_void_p(self.address), _TYPES[dtype], 2)
        self._after = (self._shape, steps, boxes, dense, 0, _SWIZZLES[swizzle], _L2_PROMOTION, 0)
        self._pointer, self._rows = 0, 0
        self._encode = _libcuda().cuTensorMapEncodeTiled

    def encode(self, pointer: int, rows: int) -> None:
        """The matrix of so many rows that begins at ``pointer``."""
        if pointer == self._pointer and rows == self._rows:
            return
        self._shape[1] = rows
        _check(self._encode(*self._before, ctypes.c_void_p(pointer), *self._after), "cuTensorMapEncodeTiled")
        self._pointer, self._rows = pointer, rows
