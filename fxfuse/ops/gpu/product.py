"""A fused product at one place of a region on a CUDA device: which kernel computes it, and its launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from fxfuse import choose, errors
from fxfuse.ops.gpu import decode, hopper, portable, stream
from fxfuse.ops.gpu.driver import CudaError, empty_strided
from fxfuse.ops.gpu.source import DTYPES, Epilogue, Run, lies

Known = tuple[torch.dtype | None, int, bool, tuple[int, ...], int, int, dict[int, Run | None]]
"""Dtype, device, whether there are biases, strides of weights, N, K; by rows.bit_length() what computes so many rows,
None for eager."""


class Product:
    """act(linear(x, w0, bias0)), if gated times linear(x, w1, bias1): right for any tensors, quick for the last."""

    __slots__ = ("act", "act_args", "gated", "known", "only", "vouched")

    def __init__(
        self, act: str, act_args: Sequence[float], *, gated: bool, only: str | None = None, vouched: bool = False
    ):
        """
        Args:
            only: the implementation to take, whatever was measured or is expected.
            vouched: weights and biases are parameters of a region, which asks at each call for their types and shapes,
                and that their dtypes are alike.
        """
        self.act, self.act_args, self.gated, self.only = act, tuple(map(float, act_args)), gated, only
        self.vouched = vouched
        self.known: Known = (None, -1, False, (), 0, 1, {})

    def run(self, x: Tensor, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None) -> Tensor | None:
        """None where eager is to compute it."""
        dtype, device, has_bias, strides, n, k, runs = self.known
        if not (
            x.dtype is dtype
            and w0.dtype is dtype
            and x.get_device() == device == w0.get_device() == w1.get_device()
            and x.shape[-1] == k
            and x.is_contiguous()
            and w0.stride() == strides == w1.stride()
            and (bias0 is not None) == has_bias
            and (bias1 is not None) == (has_bias and self.gated)
            and (bias0 is None or (bias0.is_contiguous() and bias0.get_device() == device))
            and (bias1 is None or (bias1.is_contiguous() and bias1.get_device() == device))
            and (dtype is not torch.float32 or portable.allows_tf32())
            and (
                self.vouched
                or (
                    w0.shape == w1.shape == (n, k)
                    and w1.dtype is dtype
                    and all(b is None or (b.dtype is dtype and b.shape == (n,)) for b in (bias0, bias1))
                )
            )
        ):
            return self._found_out(x, w0, w1, bias0, bias1)
        rows = x.numel() // k
        try:
            run = runs[rows.bit_length()]
        except KeyError:
            return self._found_out(x, w0, w1, bias0, bias1)
        if run is None:
            return None
        if torch._C._cuda_getDevice() != device:
            # A launch goes to the current device, whatever its stream says.
            with torch.cuda.device(device):
                return self.run(x, w0, w1, bias0, bias1)
        out = empty_strided(*_dense(x.shape, n), dtype)
        return out if run(x, rows, w0, w1, bias0, bias1, out) else None

    def _found_out(
        self, x: Tensor, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None
    ) -> Tensor | None:
        if not self.fits(x, w0, w1, bias0, bias1):
            return None
        (n, k), device = w0.shape, x.get_device()
        rows = x.numel() // k
        # Compiling and loading a kernel is nothing to do while a stream is captured.
        if rows == 0 or torch.cuda.is_current_stream_capturing():
            return None
        before = self.known
        kind = (x.dtype, device, bias0 is not None, w0.stride(), n, k)
        runs = before[6] if before[:6] == kind else {}
        run = self._choose(x, w0, bias0)
        self.known = (*kind, {**runs, rows.bit_length(): run})
        return None if run is None else self.run(x, w0, w1, bias0, bias1)

    def key(self, x: Tensor, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None) -> choose.Key | None:
        """What a choice for this call is kept by; None where there is nothing to choose."""
        return self._key(x, w0, bias0) if self.implementations(x, w0, w1, bias0, bias1) else None

    def implementations(
        self, x: Tensor, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None
    ) -> tuple[str, ...]:
        """Names of the kernels that may compute this call."""
        if not self.fits(x, w0, w1, bias0, bias1) or x.numel() == 0:
            return ()
        return implementations(x.get_device(), (x.numel() // w0.shape[1]).bit_length(), w0)

    def expected(self, x: Tensor, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None) -> str:
        """The implementation that is taken for a call that `fits` until something is measured."""
        (n, k), rows = w0.shape, x.numel() // w0.shape[1]
        epilogue = Epilogue(self.act, self.act_args, self.gated, bias0 is not None, x.dtype)
        return expected(self.implementations(x, w0, w1, bias0, bias1), rows, n, k, epilogue, x.get_device())

    def fits(self, x: Tensor, w0: Tensor, w1: Tensor, bias0: Tensor | None, bias1: Tensor | None) -> bool:
        """Whether kernels read the operands as the operator means them: what a region vouches for `run` counts on."""
        if not self.gated:
            return can(x, w0, bias0)
        # Kernels have both biases or none.
        fit = w1.shape == w0.shape and w1.stride() == w0.stride() and (bias0 is None) == (bias1 is None)
        return fit and can(x, w0, bias0) and can(x, w1, bias1)

    def _key(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> choose.Key:
        (n, k), device = weight.shape, choose.device_name(f"cuda:{x.get_device()}")
        op = f"{'gated_linear' if self.gated else 'linear_act'} {self.act}" if self.act else "linear"
        transposed = weight.stride(1) != 1
        return choose.Key(device, op, x.dtype, n, k, transposed, bias is not None, (x.numel() // k).bit_length())

    def _choose(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Run | None:
        (n, k), device = weight.shape, x.get_device()
        rows = x.numel() // k
        bucket = rows.bit_length()
        names = implementations(device, bucket, weight)
        if self.only in portable.TILES:
            names = _portable(device, bucket, weight)
        epilogue = Epilogue(self.act, self.act_args, self.gated, bias is not None, x.dtype)
        measured = choose.CHOICES.get(self._key(x, weight, bias)) if choose.CHOICES.any() else None
        if self.only is not None:
            name = self.only
        elif measured is not None:
            name = measured.among((choose.PLAIN, *names))
        else:
            name = expected(names, rows, n, k, epilogue, device)
        weight_lies = lies(weight)
        if name not in names or weight_lies is None:
            return None
        least, most = choose.least_rows(bucket), (1 << bucket) - 1
        try:
            if name == "stream":
                return stream.launch(epilogue, least, most, weight_lies, n, k, device)
            if name == "decode":
                return decode.Launch(epilogue, most, n, k, device)
            if name in portable.TILES:
                return portable.Launch(epilogue, name, weight_lies, n, k, f"cuda:{device}")
            return hopper.Launch(epilogue, int(name.removeprefix("hopper")), weight_lies, n, k, device)
        except (CudaError, OSError) as error:  # no compiler beside this torch, say
            if self.only is not None:
                raise
            errors.warn_of_kernel(name, error)
            return None


@functools.lru_cache(maxsize=256)
def _dense(shape: torch.Size, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the answer to an x of ``shape``."""
    size = (*shape[:-1], n)
    return size, tuple(accumulate(size[:0:-1], mul, initial=1))[::-1]


def can(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels read these operands as linear(x, weight, bias) means them."""
    return (
        x.is_cuda
        and portable.computes(x.dtype)
        and weight.dtype is x.dtype
        and weight.device == x.device
        and weight.dim() == 2
        and weight.numel() > 0
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.is_contiguous()
        and lies(weight) is not None
        and (
            bias is None
            or (
                bias.dtype is x.dtype
                and bias.device == x.device
                and bias.shape == weight.shape[:1]
                and bias.is_contiguous()
            )
        )
    )


def unserved(dtype: torch.dtype, device: torch.device, *, relu_and_bias: bool = False) -> str:
    """Why nothing of ours is faster than eager for a weight of this dtype on this device; "" where something may be.

    ``relu_and_bias``: these follow the product, and nothing else: cuBLASLt has that epilogue.
    """
    if dtype in (torch.float64, torch.complex64, torch.complex128):
        return f"there are no kernels for {str(dtype).removeprefix('torch.')}"
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"there are no kernels for {device.type} devices"
    if relu_and_bias and (dtype in DTYPES or dtype is torch.float32):
        return ""
    if dtype is torch.float32 and not portable.allows_tf32():
        return "there are no kernels for float32 on CUDA devices, unless TF32 may stand for it"
    if not portable.computes(dtype):
        return f"there are no kernels for {str(dtype).removeprefix('torch.')} on CUDA devices"
    if not _serves(decode.serves, device.index or 0):
        return "there are no kernels for this GPU"
    return ""


def implementations(device: int, bucket: int, weight: Tensor) -> tuple[str, ...]:
    """Names of the kernels that compute all row counts of a bucket: Triton's only where there is none of our own."""
    return _own(device, bucket, weight) or _portable(device, bucket, weight)


def _own(device: int, bucket: int, weight: Tensor) -> tuple[str, ...]:
    (n, k), weight_lies, most = weight.shape, lies(weight), (1 << bucket) - 1
    if weight_lies is None or weight_lies.step % 8 or weight.dtype not in DTYPES:  # rows of 16 bytes
        return ()
    names: list[str] = []
    if _serves(stream.serves, device) and stream.takes(most, n, k):
        names.append("stream")
    if _serves(decode.serves, device) and decode.takes(most, n, k) and weight.is_contiguous():
        names.append("decode")
    if _serves(hopper.serves, device) and hopper.takes(choose.least_rows(bucket), n, k):
        names += [f"hopper{wn}" for wn in hopper.tiles(weight_lies)]
    return tuple(names)


def _portable(device: int, bucket: int, weight: Tensor) -> tuple[str, ...]:
    can = lies(weight) is not None and choose.least_rows(bucket) >= portable.LEAST_ROWS
    return tuple(portable.TILES) if can and _serves(portable.serves, device) else ()


@functools.cache
def _serves(asked: Callable[[int], bool], device: int) -> bool:
    return torch.version.hip is None and asked(device)


def expected(names: Sequence[str], rows: int, n: int, k: int, epilogue: Epilogue, device: int) -> str:
    """The implementation that is expected to be fastest, where none was measured; "plain" where in doubt."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if "stream" in names and stream.gains(rows, n, epilogue=epilogue, processors=processors):
        return "stream"
    if "decode" in names and _serves(stream.serves, device):  # measured on such a GPU
        return "decode"
    times = {
        name: hopper.microseconds(
            rows, n, k, int(name.removeprefix("hopper")), gated=epilogue.gated, processors=processors
        )
        for name in names
        if name.startswith("hopper")
    }
    best = min(times, key=times.__getitem__, default=choose.PLAIN)
    return best if times and times[best] < 0.97 * eager_microseconds(rows, n, k, epilogue) else choose.PLAIN


def eager_microseconds(rows: int, n: int, k: int, epilogue: Epilogue) -> float:
    """What eager is expected to take on an H200: 620 TFLOP/s a product, 3.5 TB/s a pass over its output."""
    products = 2 if epilogue.gated else 1
    passes = (2 if epilogue.act else 0) + (3 if epilogue.gated else 0)  # reads and writes
    kernels = products + bool(epilogue.act) + epilogue.gated
    return 2 * kernels + products * 2 * rows * n * k / 620e6 + passes * rows * n * 2 / 3.5e6
