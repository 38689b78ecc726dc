"""What a call of one of fxfuse's own operators does under the implementation that is chosen for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxfuse import choose, ops
from fxfuse.bench.kernel_names import FUSED_GEMM, GEMM
from fxfuse.bench.work import Pass, Work, moved, name_of, work_of
from fxfuse.ops import onednn
from fxfuse.ops.activations import activation
from fxfuse.ops.gated_linear import gated_linear, gated_linear_packed, plain

_POINTWISE = "mkldnn::_linear_pointwise"


def fused(work: Work, node: fx.Node, tensors: Sequence[Tensor | None]) -> Work | None:
    """``work`` as the chosen implementation does it; None where that is eager's own sequence.

    ``tensors`` are those that ``node`` is called with, on their device.
    """
    target: Any = node.target
    rest = node.args[len(tensors) :]
    name = implementation(target, tensors, rest)
    call = _Product(target, tensors, rest)
    if name == choose.PLAIN and call.x.is_cuda and call.act == "relu" and not call.gated and call.biases:
        return replace(call.by_cublaslt(work), op=f"{work.op} (cuBLASLt)")
    if name == choose.PLAIN:
        # On a GPU the halves of a packed weight are looked at before anything is chosen.
        looked_at = call.x.is_cuda and call.layout in plain.BLOCKS
        return replace(work, host=work.host + call.kept()) if looked_at else None
    done = call.by_onednn(work) if name == choose.ONEDNN else call.by_one_kernel(work)
    return replace(done, op=f"{work.op} ({name})")


def implementation(target: Any, tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> str:
    """The name of the implementation that this call takes: the one measured fastest, else the one expected to be."""
    key = ops.key(target, tensors, rest)
    if key is None:
        return choose.PLAIN
    measured = choose.CHOICES.get(key)
    if measured is None:
        return ops.expected(target, tensors, rest)
    return measured.among((choose.PLAIN, *ops.implementations(target, tensors, rest, pack=False)))


def _done(work: Work, host: Counter[str], passes: list[Pass], products: int) -> Work:
    return replace(work, host=host, passes=passes, products=products, unknown_kernels="")


class _Product:
    """The operands of linear, linear_act, gated_linear or gated_linear_packed by their part in it."""

    def __init__(self, target: Any, tensors: Sequence[Tensor | None], rest: Sequence[Any]):
        x, weight, bias = tensors[:3]
        assert x is not None
        assert weight is not None
        self.x, self.weight, self.operands = x, weight, [t for t in tensors if t is not None]
        self.biases = sum(t is not None for t in (bias, tensors[4] if target is gated_linear else None))
        self.act: str = rest[0] if rest else ""
        self.act_args: Sequence[float] = rest[1] if rest else ()
        self.layout = rest[2] if target is gated_linear_packed else ""
        self.gated = target in (gated_linear, gated_linear_packed)
        features = weight.shape[0] * (2 if target is gated_linear else 1)
        self.columns = weight.shape[0] // (2 if self.layout else 1)
        self.flops = 2 * x.numel() * features

    @property
    def out(self) -> int:
        """Bytes of the output."""
        rows = self.x.numel() // self.x.shape[-1]
        return rows * self.columns * self.x.element_size()

    def by_one_kernel(self, work: Work) -> Work:
        passes = [self._pass(self.flops, moved(self.operands) + self.out)]
        return _done(work, Counter({"aten::empty": 1}) + self.kept(), passes, 0)

    def by_cublaslt(self, work: Work) -> Work:
        host = Counter({"aten::reshape": 1, "aten::t": 1, "aten::_addmm_activation": 1, "aten::view": 1})
        return _done(work, host, [Pass(GEMM, self.flops, moved(self.operands) + self.out, name_of(self.x.dtype))], 0)

    def by_onednn(self, work: Work) -> Work:
        if self.layout and not (self.layout in plain.BLOCKS and self.weight.is_contiguous()):
            return self._whole_then_halves(work)
        traffic, flops = moved(self.operands), self.flops
        if not self.gated:
            return self._finished(work, Counter({_POINTWISE: 1}), [self._pass(flops, traffic + self.out)])
        # x is read by both products, and the gate is written by the first and read by the second.
        each = (traffic - moved(self.x)) // 2 + moved(self.x) + self.out
        passes = [self._pass(flops // 2, each), self._pass(flops // 2, each + self.out)]
        return self._finished(work, Counter({_POINTWISE: 2}) + self.kept(), passes)

    def _whole_then_halves(self, work: Work) -> Work:
        """One product, and eager's operators on the halves of its columns."""
        h = torch.empty(*self.x.shape[:-1], 2 * self.columns, dtype=self.x.dtype, device="meta")

        def rest() -> None:
            gate, up = plain.unpack(h, self.layout, -1)
            activation(self.act).function(gate, *self.act_args) * up

        first = self._pass(self.flops, moved(self.operands) + 2 * self.out)
        after = work_of(rest)
        return _done(work, Counter({_POINTWISE: 1}) + after.host, [first, *after.passes], 1)

    def _finished(self, work: Work, host: Counter[str], passes: list[Pass]) -> Work:
        """With the activation written over the product, where oneDNN does not compute it with the product."""
        rows = self.x.numel() // self.x.shape[-1]
        row_kernel = rows == 1 and self.x.dtype is torch.float32 and self.weight.is_contiguous()
        if not self.act or onednn.post_op(self.act, self.act_args, row_kernel=row_kernel) is not onednn.NO_POST_OP:
            return _done(work, host, passes, len(passes))
        h = torch.empty(*self.x.shape[:-1], self.columns, dtype=self.x.dtype, device="meta")
        after = work_of(lambda: activation(self.act).over(self.act_args)(h))
        return _done(work, host + after.host, [*passes, *after.passes], len(passes))

    def kept(self) -> Counter[str]:
        """Of a packed weight the halves are kept as views; each call asks whether they are still those."""
        return Counter({"aten::is_set_to": 1 + self.biases}) if self.layout else Counter()

    def _pass(self, flops: int, traffic: int) -> Pass:
        return Pass(FUSED_GEMM, flops, traffic, name_of(self.x.dtype))
