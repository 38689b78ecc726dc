"""Small models with traps: each was a fault of some optimizer that rewrites matmul and linear patterns.

A numeric case is a function that returns (model, calls[, expectations]); a behaviour case is a function of ``optimize``
that asserts something. ``source`` names the public report in which the symptom was seen, or "own". A call is a tuple of
arguments, or a ``Call``. A numeric case is built afresh for each use, from seeded generators.

Expectations, all optional:

``train``       put the model in training mode, and compare gradients
``grad``        compare gradients, in eval mode
``fused``       at least this many fusions
``not_fused``   nothing that could be fused means the same
``context``     makes a context manager for every call
``raises``      indexes of the calls that eager itself refuses
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import math
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class Case:
    """One case; ``kind`` groups them."""

    id: str
    kind: str
    source: tuple[str, ...]
    title: str
    build: Callable


class Call:
    """One call of the model, with keyword arguments."""

    def __init__(self, *args, **kwargs):
        self.args = args
        self.kwargs = kwargs


NUMERIC: dict[str, Case] = {}
BEHAVIOUR: dict[str, Case] = {}


def _register(table, id, kind, source, title):
    def decorate(build):
        assert id not in {**NUMERIC, **BEHAVIOUR}, f"case {id} is there twice"
        table[id] = Case(id, kind, (source,) if isinstance(source, str) else tuple(source), title, build)
        return build

    return decorate


def numeric(id, kind, source, title):
    return _register(NUMERIC, id, kind, source, title)


def behaviour(id, kind, source, title):
    return _register(BEHAVIOUR, id, kind, source, title)


def T(seed, *shape, dtype=torch.float32, scale=1.0):
    """A seeded normal tensor."""
    g = torch.Generator().manual_seed(1000 + seed)
    if dtype.is_complex:
        re = torch.randn(shape, generator=g, dtype=torch.float64)
        im = torch.randn(shape, generator=g, dtype=torch.float64)
        return (torch.complex(re, im) * scale).to(dtype)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(dtype)


def Z(seed, *shape, lo=-5, hi=6, dtype=torch.int64):
    """A seeded integer tensor."""
    g = torch.Generator().manual_seed(5000 + seed)
    return torch.randint(lo, hi, shape, generator=g).to(dtype)


class Mod(nn.Module):
    """Keyword arguments become parameters (floating), buffers (integer) or plain attributes."""

    def __init__(self, **kw):
        super().__init__()
        for name, value in kw.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                if value.is_floating_point() or value.is_complex():
                    value = nn.Parameter(value)
                else:
                    self.register_buffer(name, value)
                    continue
            setattr(self, name, value)


NAN = float("nan")
INF = float("inf")


# module-level models: they can be pickled and deep-copied


class Mlp(nn.Module):
    """matmul + add + relu, then matmul + add, with raw parameters."""

    def __init__(self, k=4, h=6, n=3):
        super().__init__()
        self.w1 = nn.Parameter(T(1, k, h))
        self.b1 = nn.Parameter(T(2, h))
        self.w2 = nn.Parameter(T(3, h, n))
        self.b2 = nn.Parameter(T(4, n))

    def forward(self, x):
        h = torch.relu(x @ self.w1 + self.b1)
        return h @ self.w2 + self.b2


class LinearMlp(nn.Module):
    """The nn.Linear spelling."""

    def __init__(self, k=4, h=6, n=3):
        super().__init__()
        self.fc1 = nn.Linear(k, h)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(h, n)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class SwiGlu(nn.Module):
    def __init__(self, k=4, h=6, bias=False, act=F.silu):
        super().__init__()
        self.gate = nn.Linear(k, h, bias=bias)
        self.up = nn.Linear(k, h, bias=bias)
        self.down = nn.Linear(h, k, bias=bias)
        self.act = act

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class DropMlp(nn.Module):
    """Functional dropout that follows self.training."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(T(11, 4, 8))
        self.b = nn.Parameter(T(12, 8))

    def forward(self, x):
        h = torch.relu(x @ self.w + self.b)
        return F.dropout(h, 0.5, training=self.training)


class BranchMlp(nn.Module):
    """Python branch on self.training."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(T(13, 4, 5))
        self.b = nn.Parameter(T(14, 5))

    def forward(self, x):
        y = x @ self.w + self.b
        if self.training:
            return y * 3.0
        return y


class Stepper(nn.Module):
    """Counts its calls in a buffer, in place."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(T(15, 4, 5))
        self.b = nn.Parameter(T(16, 5))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return x @ self.w + self.b * self.steps


class TiedLm(nn.Module):
    """An embedding whose weight is also the output projection."""

    def __init__(self, vocab=7, dim=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.body = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(torch.relu(self.body(self.emb(ids))))


class LoraLinear(nn.Linear):
    """A subclass of nn.Linear whose forward adds a low-rank term."""

    def __init__(self, k, n, r=2):
        super().__init__(k, n)
        self.a = nn.Parameter(T(21, r, k))
        self.bb = nn.Parameter(T(22, n, r))

    def forward(self, x):
        return super().forward(x) + (x @ self.a.t()) @ self.bb.t()


class FanInOut(nn.Linear):
    """A subclass of nn.Linear that stores its weight the other way round."""

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


@dataclasses.dataclass
class OutPair:
    logits: torch.Tensor
    hidden: torch.Tensor
    loss: torch.Tensor | None = None


Pair = collections.namedtuple("Pair", "first second")


# bias-broadcast: which shapes may be taken for a bias, and along which axis


@numeric(
    "bb01",
    "bias-broadcast",
    ("openxla/xla#46897", "robertknight/rten#526"),
    "column bias (M,1) on a square result must run down the rows, not along them",
)
def bb01():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b

    return M(w=T(1, 4, 4), b=T(2, 4, 1)), [(T(3, 4, 4),), (T(4, 4, 4),)], {"grad": True}


@numeric(
    "bb03",
    "bias-broadcast",
    "microsoft/onnxruntime#3764",
    "the added term is wider than the (3,1) product and widens the result to (3,4)",
)
def bb03():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.s * self.b

    m = M(w=T(1, 3, 1), b=T(2, 1, 4), s=T(5))
    return m, [(T(3, 3, 3),)], {"not_fused": True}


@numeric(
    "bb05", "bias-broadcast", "pytorch/executorch#13632", "a rank-3 term added to a 2-D product makes the result rank 3"
)
def bb05():
    class M(Mod):
        def forward(self, x):
            return torch.mm(x, self.w) + self.b

    return M(w=T(1, 4, 3), b=T(2, 2, 1, 3)), [(T(3, 5, 4),)], {"not_fused": True}


@numeric("bb07", "bias-broadcast", "tenstorrent/tt-mlir#5525", "a bias of one element is not a bias of N elements")
def bb07():
    class M(Mod):
        def forward(self, x):
            return F.gelu(x @ self.w + self.b)

    return M(w=T(1, 4, 3), b=T(2, 1)), [(T(3, 5, 4),), (T(4, 2, 5, 4),)], {"grad": True}


@numeric(
    "bb09",
    "bias-broadcast",
    "pytorch/pytorch#121231",
    "three linears on one input whose biases are (5,), (1,5) and (5,) must not be concatenated blindly",
)
def bb09():
    class M(Mod):
        def forward(self, x):
            return (F.linear(x, self.w1, self.b1), F.linear(x, self.w2, self.b2), F.linear(x, self.w3, self.b3))

    m = M(w1=T(1, 5, 4), b1=T(2, 5), w2=T(3, 5, 4), b2=T(4, 1, 5), w3=T(5, 5, 4), b3=T(6, 5))
    return m, [(T(7, 6, 4),)]


@numeric(
    "bb10",
    "bias-broadcast",
    ("intel/intel-extension-for-pytorch#48", "tenstorrent/tt-metal#42430"),
    "batched product with a per-batch bias (B,1,N)",
)
def bb10():
    class M(Mod):
        def forward(self, x):
            return torch.bmm(x, self.w) + self.b

    return M(w=T(1, 2, 4, 3), b=T(2, 2, 1, 3)), [(T(3, 2, 5, 4),)], {"grad": True}


@numeric(
    "bb12",
    "bias-broadcast",
    "inisis/OnnxSlim#210",
    "the linear already has a bias; the next add has another shape and must not be summed into it",
)
def bb12():
    class M(Mod):
        def forward(self, x):
            return F.linear(x, self.w, self.b).unsqueeze(0) + self.c

    return M(w=T(1, 3, 4), b=T(2, 3), c=T(5, 2, 5, 3)), [(T(3, 5, 4),)]


# operand-order: sub is not add, and matmul does not commute


@numeric("oo01", "operand-order", "apple/coremltools#2801", "bias - x@w: the product has the minus sign")
def oo01():
    class M(Mod):
        def forward(self, x):
            return self.b - x @ self.w

    return M(w=T(1, 3, 3), b=T(2, 3)), [(T(3, 2, 3),)], {"grad": True}


@numeric(
    "oo03",
    "operand-order",
    ("NervanaSystems/ngraph#713", "pytorch/pytorch#195907", "onnx/optimizer#111"),
    "bias + x@w is the same pattern as x@w + bias",
)
def oo03():
    class M(Mod):
        def forward(self, x):
            return self.b + x @ self.w

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)], {"grad": True, "fused": 1}


@numeric(
    "oo05",
    "operand-order",
    "pytorch/pytorch#100679",
    "sum of two products where the first, (1,N), is broadcast over the second, (M,N)",
)
def oo05():
    class M(Mod):
        def forward(self, a, c):
            return torch.mm(a, self.w) + torch.mm(c, self.v)

    return M(w=T(1, 4, 3), v=T(2, 4, 3)), [(T(3, 1, 4), T(4, 5, 4)), (T(5, 5, 4), T(6, 5, 4))]


@numeric("oo07", "operand-order", "own", "torch.rsub, torch.sub with alpha, and the negated product")
def oo07():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w
            return torch.rsub(h, self.b), torch.sub(self.b, x @ self.v, alpha=2), -(x @ self.v) + self.b

    return M(w=T(1, 3, 3), v=T(4, 3, 3), b=T(2, 3)), [(T(3, 2, 3),)]


@numeric("oo09", "operand-order", "own", "one product added to itself: both operands of the add are the same node")
def oo09():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w
            return h + h

    return M(w=T(1, 4, 3)), [(T(3, 5, 4),)], {"grad": True}


# scale-factors: alpha, beta and what they switch off


@numeric(
    "sf01",
    "scale-factors",
    ("pytorch/pytorch#121253", "pytorch/pytorch#121953"),
    "torch.add(product, bias, alpha=2) scales the bias",
)
def sf01():
    class M(Mod):
        def forward(self, x):
            return torch.add(x @ self.w, self.b, alpha=2)

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)], {"grad": True}


@numeric(
    "sf03",
    "scale-factors",
    "pytorch/pytorch#167313",
    "relu(addmm(...)) with both factors set: they must survive the activation rewrite",
)
def sf03():
    class M(Mod):
        def forward(self, x):
            return torch.relu(torch.addmm(self.b, x, self.w, beta=-1.5, alpha=0.25))

    return M(w=T(1, 5, 4), b=T(2, 4)), [(T(3, 6, 5),)], {"grad": True}


@numeric(
    "sf04",
    "scale-factors",
    ("pytorch/pytorch#196596", "flagos-ai/FlagGems#5755", "pytorch/pytorch#94534"),
    "addmm with beta=0 ignores a bias full of NaN",
)
def sf04():
    class M(Mod):
        def forward(self, x):
            return torch.addmm(self.b, x, self.w, beta=0)

    return M(w=T(1, 5, 3), b=torch.full((3,), NAN)), [(T(3, 2, 5),)]


@numeric(
    "sf07",
    "scale-factors",
    "pytorch/pytorch#183899",
    "addmm with beta=0 and a bias that cannot be broadcast: do as eager does, be it an error",
)
def sf07():
    class M(Mod):
        def forward(self, x):
            return torch.addmm(self.b, x, self.w, beta=0)

    return M(w=T(1, 3, 3), b=T(2, 5, 7)), [(T(3, 2, 3),)], {"raises": [0]}


@numeric("sf08", "scale-factors", "tenstorrent/tt-metal#49185", "the factors written out: (x@w)*alpha + b*beta")
def sf08():
    class M(Mod):
        def forward(self, x):
            return (x @ self.w) * 0.25 + self.b * -3.0

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)], {"grad": True}


@numeric(
    "sf10",
    "scale-factors",
    "microsoft/onnxruntime#4669",
    "scale before the matmul, after it, and after the bias are three different things",
)
def sf10():
    class M(Mod):
        def forward(self, x):
            return (x * 0.5) @ self.w + self.b, (x @ self.w) / 4.0 + self.b, (x @ self.w + self.b) / 4.0

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


# dtype-promotion


@numeric(
    "dp01", "dtype-promotion", "pytorch/pytorch#159492", "bfloat16 product plus float32 term: the result is float32"
)
def dp01():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b

    m = M(w=T(1, 4, 3, dtype=torch.bfloat16), b=T(2, 5, 3))
    return m, [(T(3, 5, 4, dtype=torch.bfloat16),)], {"not_fused": True}


@numeric("dp03", "dtype-promotion", "own", "integer product plus a float bias is float")
def dp03():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b

    return M(w=Z(1, 4, 3), b=T(2, 3)), [(Z(3, 5, 4),)], {"not_fused": True}


@numeric(
    "dp06",
    "dtype-promotion",
    ("pytorch/pytorch#177630", "pytorch/pytorch#165718"),
    "float16 @ float32 is an error in eager and must stay one",
)
def dp06():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b

    return M(w=T(1, 2, 4, 3), b=T(2, 3)), [(T(3, 2, 5, 4, dtype=torch.float16),), (T(3, 2, 5, 4),)], {"raises": [0]}


@numeric(
    "dp07",
    "dtype-promotion",
    "XPU-Forces/xpu_graph#33",
    "a 0-d float64 term does not promote a float32 product; a 1-D one does",
)
def dp07():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.s, x @ self.w + self.b

    m = M(w=T(1, 4, 3), s=T(2, dtype=torch.float64), b=T(4, 3, dtype=torch.float64))
    return m, [(T(3, 5, 4),)]


@numeric(
    "dp08",
    "dtype-promotion",
    "pytorch/pytorch#194474",
    "complex product, complex bias, complex scale: no imaginary part may be dropped",
)
def dp08():
    class M(Mod):
        def forward(self, x):
            return torch.addmm(self.b, x, self.w, alpha=0.5 + 2j), x @ self.w.conj() + self.b

    c = torch.complex64
    return M(w=T(1, 4, 3, dtype=c), b=T(2, 3, dtype=c)), [(T(3, 5, 4, dtype=c),)]


@numeric(
    "dp10",
    "dtype-promotion",
    "pytorch/pytorch#127296",
    "the model is rewritten once and called in float64: nothing may be done in float32",
)
def dp10():
    class M(Mod):
        def forward(self, x):
            return torch.tanh(x @ self.w + self.b)

    d = torch.float64
    return M(w=T(1, 4, 3, dtype=d), b=T(2, 3, dtype=d)), [(T(3, 5, 4, dtype=d),)], {"grad": True}


# rank-shape: 1-D operands, batched weights, empty and strided tensors, changing batch


@numeric(
    "rs01",
    "rank-shape",
    ("microsoft/onnxruntime#22512", "microsoft/onnxruntime#22762"),
    "the left operand is 1-D, then 2-D, then 4-D, on the same model",
)
def rs01():
    class M(Mod):
        def forward(self, x):
            return torch.matmul(x, self.w) + self.b

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 4),), (T(4, 5, 4),), (T(5, 2, 3, 5, 4),)], {"grad": True}


@numeric(
    "rs03", "rank-shape", "pytorch/pytorch#40549", "the weight is 3-D (one matrix a batch entry): not a linear layer"
)
def rs03():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b

    return M(w=T(1, 2, 4, 3), b=T(2, 3)), [(T(3, 2, 5, 4),), (T(4, 1, 5, 4),)], {"grad": True}


@numeric(
    "rs05",
    "rank-shape",
    ("onnx/optimizer#66", "pytorch/pytorch#39661", "pytorch/pytorch#106433"),
    "a 3-D input with an ordinary weight and bias should still be rewritten",
)
def rs05():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 2, 5, 4),)], {"grad": True, "fused": 1}


@numeric("rs07", "rank-shape", "pytorch/pytorch#27619", "no rows at all, and one output feature")
def rs07():
    class M(Mod):
        def forward(self, x):
            return torch.relu(x @ self.w + self.b)

    return M(w=T(1, 4, 1), b=T(2, 1)), [(T(3, 5, 4),), (T(3, 0, 4),), (T(3, 2, 0, 4),)], {"grad": True}


@numeric(
    "rs08",
    "rank-shape",
    ("robertknight/rten#526", "robertknight/rten#462"),
    "inner size 0: the product is zero but the (column) bias is still added",
)
def rs08():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b

    return M(w=T(1, 0, 4), b=T(2, 4, 1)), [(T(3, 4, 0),)], {"grad": True}


@numeric(
    "rs10",
    "rank-shape",
    ("pytorch/pytorch#104439", "pytorch/pytorch#139055"),
    "transposed (non-contiguous) input, 2-D and 3-D",
)
def rs10():
    class M(Mod):
        def forward(self, x):
            return F.gelu(x.transpose(-1, -2) @ self.w + self.b)

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 4, 5),), (T(4, 2, 4, 5),), (T(5, 5, 4).t(),)], {"grad": True}


@numeric(
    "rs12",
    "rank-shape",
    "pytorch/pytorch#111312",
    "the batch size of the example must not be baked in (reshape by x.shape)",
)
def rs12():
    class M(Mod):
        def forward(self, x):
            b, s = x.shape[0], x.shape[1]
            h = x.reshape(b * s, -1) @ self.w + self.b
            return torch.relu(h).reshape(b, s, -1)

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 1, 2, 4),), (T(4, 3, 5, 4),), (T(5, 2, 1, 4),)], {"grad": True}


@numeric(
    "rs14", "rank-shape", "microsoft/onnxruntime#10950", "a 0-d input is raised to one dimension before the matmul"
)
def rs14():
    class M(Mod):
        def forward(self, x):
            return (x * self.one) @ self.w + self.b

    return M(one=torch.ones(1), w=T(1, 1, 6), b=T(2, 6)), [(T(3),), (T(4, 1),)]


# transpose-layout: square weights hide a wrong transpose


@numeric(
    "tl01",
    "transpose-layout",
    ("meta-pytorch/tritonbench#887", "microsoft/onnxruntime#32228"),
    "square, non-symmetric weight: x@w is not x@w.T",
)
def tl01():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b, x @ self.w.t() + self.b

    return M(w=T(1, 4, 4), b=T(2, 4)), [(T(3, 4, 4),)], {"grad": True}


@numeric("tl04", "transpose-layout", "apple/coremltools#2801", "the transpose is on the input, or on both operands")
def tl04():
    class M(Mod):
        def forward(self, x):
            return x.t() @ self.w + self.b, x.t() @ self.w.t() + self.b, (self.w @ x).t() + self.b

    return M(w=T(1, 4, 4), b=T(2, 4)), [(T(3, 4, 4),)]


@numeric(
    "tl06",
    "transpose-layout",
    ("AutoGPTQ/AutoGPTQ#139", "huggingface/transformers#311"),
    "GPT-2 style Conv1D: addmm on a flattened input, weight stored as (in, out), square",
)
def tl06():
    class InOut(Mod):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1])
            return torch.addmm(self.b, rows, self.w).unflatten(0, x.shape[:-1])

    class M(Mod):
        def forward(self, x):
            return self.second(F.gelu(self.first(x), approximate="tanh"))

    m = M(first=InOut(w=T(1, 4, 4), b=T(2, 4)), second=InOut(w=T(4, 4, 4), b=T(5, 4)))
    return m, [(T(3, 2, 5, 4),), (T(6, 3, 1, 4),)], {"grad": True}


@numeric(
    "tl08",
    "transpose-layout",
    "pytorch/TensorRT#1444",
    "one permuted input shared by two linears, each with its own non-zero bias",
)
def tl08():
    class M(Mod):
        def forward(self, x):
            p = x.permute(0, 2, 1)
            return self.l1(p) + self.l2(p), p

    return M(l1=nn.Linear(4, 3), l2=nn.Linear(4, 3)), [(T(3, 2, 4, 5),)], {"grad": True}


@numeric("tl09", "transpose-layout", "own", "linear in disguise: tensordot, 1x1 convolution, nn.Bilinear, outer")
def tl09():
    class M(Mod):
        def forward(self, x):
            a = torch.tensordot(x, self.w, dims=([1], [1])) + self.b
            c = self.conv(x.t().unsqueeze(0)) + self.b.view(1, -1, 1)
            return a, c, torch.outer(self.b, self.b) @ self.w + self.b

    return M(w=T(1, 4, 4), b=T(2, 4), conv=nn.Conv1d(4, 4, 1)), [(T(3, 4, 4),)]


# multi-user: an intermediate result is needed elsewhere


@numeric("mu01", "multi-user", "microsoft/onnxruntime#4110", "the bare product is also an output of the model")
def mu01():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w
            return h, h + self.b

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)], {"grad": True}


@numeric(
    "mu02",
    "multi-user",
    ("pytorch/executorch#6894", "microsoft/onnxruntime#15109"),
    "the value before the activation is also returned",
)
def mu02():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w + self.b
            return F.gelu(h), h

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)], {"grad": True}


@numeric("mu05", "multi-user", "own", "the product is also read for its shape, its mean and its sign")
def mu05():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w
            y = torch.relu(h + self.b)
            return y / h.shape[-1], h.mean(), (h > 0).sum()

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


@numeric(
    "mu07",
    "multi-user",
    "pytorch/pytorch#142446",
    "the weight is used by the linear and by something else, under two names",
)
def mu07():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 3)
            self.alias = self.proj.weight

        def forward(self, x):
            return torch.relu(self.proj(x)), self.alias.square().sum(), x @ self.alias.t() + self.proj.bias

    return M(), [(T(3, 5, 4),)], {"grad": True}


# inplace-alias: writes between, before and after


@numeric("ia01", "inplace-alias", "pytorch/executorch#11700", "relu(h, inplace=True) changes h, which is read again")
def ia01():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w + self.b
            y = F.relu(h, inplace=True)
            return h + y

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


@numeric(
    "ia02",
    "inplace-alias",
    ("pytorch/pytorch#68301", "pytorch/pytorch#164273"),
    "the product is scaled in place between the matmul and the add; the result of mul_ is not used",
)
def ia02():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w
            h.mul_(2.0)
            return h + self.b

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


@numeric(
    "ia03",
    "inplace-alias",
    "pytorch/TensorRT#444",
    "the bias is a parameter used twice: adding the product into it in place would spoil the second use",
)
def ia03():
    class M(Mod):
        def forward(self, x):
            a = self.b + x @ self.w
            c = self.b + x @ self.v
            return a, c, self.b * 1.0

    return M(w=T(1, 5, 3), v=T(4, 5, 3), b=T(2, 5, 3)), [(T(3, 5, 5),), (T(6, 5, 5),)]


@numeric(
    "ia05",
    "inplace-alias",
    "pytorch/pytorch#198077",
    "x += ... on an input: the caller's tensor must change, as in eager",
)
def ia05():
    class M(Mod):
        def forward(self, x):
            x += 1.0
            return x @ self.w + self.b

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


@numeric(
    "ia07",
    "inplace-alias",
    "pytorch/pytorch#164273",
    "the input is overwritten after the matmul and before the add: the matmul may not be moved",
)
def ia07():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w
            x.zero_()
            return h + self.b

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


@numeric(
    "ia09",
    "inplace-alias",
    "pytorch/pytorch#198077",
    "a buffer is stepped in place on every call; tracing must neither run the step nor drop it",
)
def ia09():
    return Stepper(), [(T(3, 5, 4),), (T(4, 5, 4),), (T(5, 5, 4),)]


@numeric("ia12", "inplace-alias", "own", "a row of the result is assigned to: h[0] = 0 after matmul + add")
def ia12():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w + self.b
            h[0] = 0.0
            return h * 2.0

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


@numeric("ia14", "inplace-alias", "own", "relu_ and += on a fresh product, which is safe to rewrite")
def ia14():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w
            h += self.b
            return h.relu_()

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


# activation-variant: near misses


@numeric(
    "av01",
    "activation-variant",
    ("tenstorrent/tt-metal#29322", "microsoft/onnxruntime#2270", "pytorch/pytorch#191431"),
    "exact (erf) gelu must not become the tanh approximation",
)
def av01():
    class M(Mod):
        def forward(self, x):
            return F.gelu(x @ self.w + self.b)

    m = M(w=T(1, 4, 16, scale=1.5), b=T(2, 16))
    return m, [(T(3, 16, 4),)], {"grad": True, "fused": 1}


@numeric("av03", "activation-variant", "pytorch/pytorch#189976", "both kinds of gelu in one model")
def av03():
    class M(Mod):
        def forward(self, x):
            h = F.gelu(x @ self.w + self.b, approximate="none")
            g = F.gelu(x @ self.w + self.b, approximate="tanh")
            return h, g, h - g

    return M(w=T(1, 4, 16, scale=1.5), b=T(2, 16)), [(T(3, 16, 4),)]


@numeric(
    "av04",
    "activation-variant",
    "microsoft/onnxruntime#32421",
    "x * sigmoid(1.702 x) in float64 is neither gelu nor silu",
)
def av04():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w + self.b
            return h * torch.sigmoid(h * 1.702)

    d = torch.float64
    return M(w=T(1, 4, 8, dtype=d), b=T(2, 8, dtype=d)), [(T(3, 8, 4, dtype=d),)], {"grad": True}


@numeric(
    "av06",
    "activation-variant",
    ("facebookresearch/fairseq#2235", "microsoft/onnxruntime#3009"),
    "gelu written out by hand, tanh form and erf form, at large magnitudes",
)
def av06():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w + self.b
            t = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3))))
            e = h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))
            return t, e

    return M(w=T(1, 4, 8), b=T(2, 8)), [(T(3, 8, 4),), (T(4, 8, 4, scale=40.0),)]


@numeric(
    "av08",
    "activation-variant",
    "pytorch/pytorch#107719",
    "no activation in the model means none in the result (all outputs negative)",
)
def av08():
    class M(Mod):
        def forward(self, x):
            return x.abs() @ -self.w.abs() + -self.b.abs()

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)], {"fused": 1}


@numeric(
    "av09",
    "activation-variant",
    "tensorflow/tensorflow#61334",
    "a * sigmoid(b) where a and b are two outputs of the same chunk: not silu",
)
def av09():
    class M(Mod):
        def forward(self, x):
            a, b = (x @ self.w + self.b).chunk(2, dim=-1)
            return a * torch.sigmoid(b)

    return M(w=T(1, 4, 6), b=T(2, 6)), [(T(3, 5, 4),)], {"grad": True}


# gated-mlp


@numeric("gm01", "gated-mlp", "unslothai/unsloth#3314", "llama-style SwiGLU: outputs and all gradients")
def gm01():
    return SwiGlu(4, 6), [(T(3, 2, 5, 4),)], {"grad": True, "fused": 1}


@numeric("gm03", "gated-mlp", "Nijikadesu/breakdown-minimind#3", "silu(gate * up) is not silu(gate) * up")
def gm03():
    class M(SwiGlu):
        def forward(self, x):
            return self.down(F.silu(self.gate(x) * self.up(x)))

    return M(4, 6), [(T(3, 5, 4),)], {"grad": True}


@numeric(
    "gm05",
    "gated-mlp",
    ("nntrainer/nntrainer#4194", "ooples/AiDotNet.Tensors#46", "tgo-app-dev/vpipe#2"),
    "one packed projection: which half is the gate differs from model to model",
)
def gm05():
    class M(Mod):
        def forward(self, x):
            a, b = self.fc(x).chunk(2, dim=-1)
            c, d = (x @ self.w + self.b).chunk(2, dim=-1)
            return F.silu(a) * b, c * F.silu(d)

    return M(fc=nn.Linear(4, 12), w=T(1, 4, 12), b=T(2, 12)), [(T(3, 5, 4),)], {"grad": True}


@numeric(
    "gm09",
    "gated-mlp",
    ("linkedin/Liger-Kernel#121", "vllm-project/vllm#3337"),
    "GeGLU with tanh gelu and GeGLU with exact gelu are different layers",
)
def gm09():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = SwiGlu(4, 16, act=nn.GELU(approximate="tanh"))
            self.b = SwiGlu(4, 16, act=nn.GELU())

        def forward(self, x):
            return self.a(x), self.b(x)

    return M(), [(T(3, 8, 4, scale=3.0),)], {"grad": True}


@numeric("gm11", "gated-mlp", "EricLBuehler/mistral.rs#1867", "SwiGLU in bfloat16")
def gm11():
    return SwiGlu(8, 8).bfloat16(), [(T(3, 5, 8, dtype=torch.bfloat16),)]


@numeric("gm14", "gated-mlp", "own", "gate and up are the very same module: the product is silu(h) * h")
def gm14():
    class M(SwiGlu):
        def __init__(self):
            super().__init__(4, 6)
            self.up = self.gate

    return M(), [(T(3, 5, 4),)], {"grad": True}


# train-mode


@behaviour(
    "tm01",
    "train-mode",
    ("pytorch/pytorch#68190", "pyg-team/pytorch_geometric#7745"),
    "functional dropout(training=self.training): eval() after optimizing must switch it off",
)
def tm01(optimize):
    x = T(3, 5, 4)
    ref = DropMlp()
    ref.eval()
    want = ref(x)
    m = DropMlp()
    m.train()
    opt = optimize(m, example_inputs=(x,))
    assert opt.training, "the optimized module lost its training flag"
    opt.eval()
    torch.testing.assert_close(opt(x), want)
    opt.train()
    ref.train()
    torch.manual_seed(7)
    want = ref(x)
    torch.manual_seed(7)
    torch.testing.assert_close(opt(x), want)


@numeric(
    "tm04",
    "train-mode",
    "fla-org/flash-linear-attention#921",
    "gradients of broadcast biases: (N,), (1,N), (M,1), (M,N) and 0-d",
)
def tm04():
    class M(Mod):
        def forward(self, x):
            w = self.w
            return (
                x @ w + self.b1,
                torch.relu(x @ w + self.b2),
                x @ w + self.b3,
                F.gelu(x @ w + self.b4),
                x @ w + self.b5,
            )

    m = M(w=T(1, 4, 3), b1=T(2, 3), b2=T(4, 1, 3), b3=T(5, 5, 1), b4=T(6, 5, 3), b5=T(7))
    return m, [(T(3, 5, 4),)], {"train": True}


@behaviour("tm05", "train-mode", "own", "frozen parameters stay frozen, and only the others get gradients")
def tm05(optimize):
    m = Mlp()
    m.w1.requires_grad_(False)
    m.b2.requires_grad_(False)
    x = T(3, 5, 4)
    want = {n: p.requires_grad for n, p in m.named_parameters()}
    opt = optimize(m, example_inputs=(x,))
    got = {n: p.requires_grad for n, p in opt.named_parameters()}
    assert got == want, f"requires_grad changed: {got}"
    opt(x).sum().backward()
    for n, p in opt.named_parameters():
        assert (p.grad is not None) == want[n], f"gradient of {n}: {p.grad}"


@numeric(
    "tm08",
    "train-mode",
    "pytorch/pytorch#62043",
    "a no_grad block inside forward cuts the gradient, in the optimized module as well",
)
def tm08():
    class M(Mod):
        def forward(self, x):
            with torch.no_grad():
                shift = x @ self.v + self.c
            return x @ self.w + self.b - shift

    return M(w=T(1, 4, 3), b=T(2, 3), v=T(4, 4, 3), c=T(5, 3)), [(T(3, 5, 4),)], {"train": True}


# state


@behaviour(
    "st01",
    "state",
    ("pytorch/pytorch#99407", "huggingface/optimum#676", "huggingface/diffusers#9279"),
    "state_dict has the same keys, shapes, dtypes and values, in the same order, counters included",
)
def st01(optimize):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 3, bias=False))

    want = make().eval().state_dict()
    got = optimize(make().eval(), example_inputs=(T(3, 5, 4),)).state_dict()
    assert list(got) == list(want), f"keys differ: {sorted(set(want) ^ set(got))}"
    for k in want:
        assert got[k].dtype == want[k].dtype, k
        assert torch.equal(got[k], want[k]), k


@behaviour(
    "st03",
    "state",
    ("pytorch/pytorch#191708", "pytorch/pytorch#131756"),
    "a non-persistent buffer stays out of state_dict but is still a buffer that follows .to()",
)
def st03(optimize):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(T(1, 4, 3))
            self.register_buffer("b", T(2, 3), persistent=False)

        def forward(self, x):
            return x @ self.w + self.b

    x = T(3, 5, 4)
    opt = optimize(M(), example_inputs=(x,))
    assert set(opt.state_dict()) == {"w"}, set(opt.state_dict())
    assert "b" in dict(opt.named_buffers())
    opt = opt.double()
    torch.testing.assert_close(opt(x.double()), M().double()(x.double()))


@behaviour(
    "st04",
    "state",
    ("pytorch/pytorch#142176", "pytorch/xla#2719"),
    "tied weights stay tied: both keys present, one tensor, one gradient",
)
def st04(optimize):
    torch.manual_seed(0)
    m = TiedLm()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    keys = list(m.state_dict())
    n_params = len(list(m.parameters()))
    opt = optimize(m, example_inputs=(ids,))
    assert list(opt.state_dict()) == keys
    assert len(list(opt.parameters())) == n_params, "a tied parameter was split in two"
    sd = opt.state_dict(keep_vars=True)
    assert sd["emb.weight"] is sd["head.weight"], "no longer the same tensor"
    with torch.no_grad():
        sd["emb.weight"].mul_(2.0)
    torch.manual_seed(0)
    ref = TiedLm()
    with torch.no_grad():
        ref.emb.weight.mul_(2.0)
    torch.testing.assert_close(opt(ids), ref(ids))


@behaviour("st05", "state", "chengzeyi/stable-fast#27", "load_state_dict after optimizing changes the output")
def st05(optimize):
    x = T(3, 5, 4)
    opt = optimize(Mlp(), example_inputs=(x,))
    opt(x)
    new = {k: v * -0.5 + 0.1 for k, v in Mlp().state_dict().items()}
    missing = opt.load_state_dict(new)
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    ref = Mlp()
    ref.load_state_dict(new)
    torch.testing.assert_close(opt(x), ref(x))


@behaviour(
    "st07", "state", "pytorch/pytorch#57569", "dtype changes after optimizing reach everything that forward uses"
)
def st07(optimize):
    x = T(3, 5, 4)
    for dtype in (torch.float64, torch.bfloat16):
        opt = optimize(Mlp(), example_inputs=(x,)).to(dtype)
        ref = Mlp().to(dtype)
        got, want = opt(x.to(dtype)), ref(x.to(dtype))
        assert got.dtype == dtype
        torch.testing.assert_close(got, want)
        assert {p.dtype for p in opt.parameters()} == {dtype}


@behaviour(
    "st09",
    "state",
    ("jingyaogong/minimind#598", "Haoming02/sd-webui-forge-classic#795"),
    "a low-rank update merged into the weights after optimizing takes effect, and can be taken out again",
)
def st09(optimize):
    torch.manual_seed(0)
    x = T(3, 5, 4)
    m = LinearMlp()
    base = copy.deepcopy(m)
    opt = optimize(m, example_inputs=(x,))
    y0 = opt(x)
    delta = T(7, 6, 2) @ T(8, 2, 4)
    params, refp = dict(opt.named_parameters()), dict(base.named_parameters())
    for p in (params["fc1.weight"], refp["fc1.weight"]):
        p.data += delta
    torch.testing.assert_close(opt(x), base(x))
    params["fc1.weight"].data -= delta
    torch.testing.assert_close(opt(x), y0)


@behaviour("st11", "state", "own", "weights are either all shared with the original or all copied, never half and half")
def st11(optimize):
    torch.manual_seed(0)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(T(1, 4, 4))
            self.b = nn.Parameter(T(2, 4))
            self.fc = nn.Linear(4, 4)
            self.register_buffer("s", T(5, 4))

        def forward(self, x):
            return torch.relu(self.fc(x @ self.w + self.b)) + self.s

    m = M()
    opt = optimize(m, example_inputs=(T(3, 5, 4),))
    theirs = {k: v.data_ptr() for k, v in m.state_dict().items()}
    ours = {k: v.data_ptr() for k, v in opt.state_dict().items()}
    same = {k: ours[k] == theirs[k] for k in theirs}
    assert len(set(same.values())) == 1, f"shared: {same}"


@behaviour("st14", "state", "own", "parameters() comes in the same order: optimizer state is loaded by position")
def st14(optimize):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.z = nn.Parameter(T(1, 3))
            self.a = nn.Parameter(T(2, 4, 6))
            self.m = nn.Linear(6, 3)
            self.b = nn.Parameter(T(4, 6))

        def forward(self, x):
            return torch.relu(self.m(F.gelu(x @ self.a + self.b))) + self.z

    m = M()
    want = [n for n, _ in m.named_parameters()]
    got = [n for n, _ in optimize(m, example_inputs=(T(3, 5, 4),)).named_parameters()]
    assert got == want, f"{got} != {want}"


# hooks, parametrizations


@numeric(
    "hk01",
    "hooks",
    ("pytorch/pytorch#105445", "pytorch/pytorch#22285"),
    "a forward hook on a Linear changes its output",
)
def hk01():
    m = LinearMlp()
    m.fc1.register_forward_hook(lambda mod, inp, out: out * 2.0 + 1.0)
    return m, [(T(3, 5, 4),)], {"grad": True}


@behaviour(
    "hk02",
    "hooks",
    ("pytorch/pytorch#128413", "state-spaces/mamba#59"),
    "a recording hook on a layer in the middle of a pattern runs on every call",
)
def hk02(optimize):
    torch.manual_seed(0)
    m = LinearMlp()
    seen = []
    m.fc1.register_forward_hook(lambda mod, inp, out: seen.append(out.detach().clone()))
    x = T(3, 5, 4)
    want = m.fc1(x)
    opt = optimize(m, example_inputs=(x,))
    seen.clear()
    opt(x)
    opt(x)
    assert len(seen) == 2, f"hook ran {len(seen)} times for 2 calls"
    torch.testing.assert_close(seen[0], want.detach())


@numeric(
    "hk06",
    "hooks",
    ("pytorch/pytorch#121304", "pytorch/pytorch#118742"),
    "weight_norm parametrization: the weight is computed anew on every call",
)
def hk06():
    m = LinearMlp()
    torch.nn.utils.parametrizations.weight_norm(m.fc1)
    with torch.no_grad():
        m.fc1.parametrizations.weight.original0.mul_(3.0)
    return m, [(T(3, 5, 4),)], {"train": True}


@behaviour(
    "hk07",
    "hooks",
    "pytorch/vision#5193",
    "a recording hook on a container (traced through, not a leaf) runs on every call",
)
def hk07(optimize):
    torch.manual_seed(0)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.block(x))

    m = M()
    seen = {}
    m.block.register_forward_hook(lambda mod, inp, out: seen.setdefault("n", []).append(float(out.sum())))
    x = T(3, 5, 4)
    want = float(m.block(x).sum())
    opt = optimize(m, example_inputs=(x,))
    seen.clear()
    opt(x)
    opt(x)
    assert len(seen.get("n", [])) == 2, f"hook ran {len(seen.get('n', []))} times for 2 calls"
    assert abs(seen["n"][0] - want) < 1e-4


@behaviour("hk09", "hooks", "own", "a gradient hook on a parameter still doubles that gradient, once")
def hk09(optimize):
    ref, m = Mlp(), Mlp()
    for mod in (ref, m):
        mod.w1.register_hook(lambda g: g * 2.0)
    x = T(3, 5, 4)
    opt = optimize(m, example_inputs=(x,))
    ref(x).sum().backward()
    opt(x).sum().backward()
    torch.testing.assert_close(dict(opt.named_parameters())["w1"].grad, ref.w1.grad)


# module-structure


@numeric(
    "ms01",
    "module-structure",
    ("pytorch/pytorch#104593", "pytorch/pytorch#197539"),
    "one Linear called twice, activated on one path only",
)
def ms01():
    class M(Mod):
        def forward(self, x, y):
            return torch.relu(self.fc(x)), self.fc(y)

    return M(fc=nn.Linear(4, 4)), [(T(3, 5, 4), T(4, 5, 4))], {"grad": True}


@numeric(
    "ms03",
    "module-structure",
    "huggingface/peft#1178",
    "a subclass of nn.Linear with a forward of its own is not an nn.Linear",
)
def ms03():
    m = nn.Sequential(LoraLinear(4, 6), nn.ReLU(), LoraLinear(6, 3))
    return m, [(T(3, 5, 4),)], {"grad": True}


@numeric(
    "ms05",
    "module-structure",
    ("pytorch/pytorch#151123", "pytorch/pytorch#141169", "pytorch/pytorch#43653"),
    "attribute names that an optimizer likes to use itself",
)
def ms05():
    class M(Mod):
        def forward(self, x):
            y = self.linear(x @ self.matmul + self.add)
            y = y + self._tensor_constant0 + torch.tensor([0.5, -0.5, 0.25])
            return torch.relu(y) @ self.fused_0 + self.linear_1 + self.getattr_1 + self._param_constant0

    m = M(
        matmul=T(1, 4, 3),
        add=T(2, 3),
        linear=nn.Linear(3, 3),
        fused_0=T(4, 3, 3),
        linear_1=T(5, 3),
        _tensor_constant0=T(6, 3),
        getattr_1=T(7, 3),
        _param_constant0=T(8, 3),
    )
    return m, [(T(3, 5, 4),)], {"grad": True}


@numeric(
    "ms06",
    "module-structure",
    ("pytorch/pytorch#62436", "pytorch/TensorRT#4612"),
    "the input is already a GraphModule, and holds another one that is called twice",
)
def ms06():
    inner = torch.fx.symbolic_trace(Mlp(4, 6, 4))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner
            self.b = nn.Parameter(T(9, 4))

        def forward(self, x):
            return self.inner(torch.relu(self.inner(x))) + self.b

    return torch.fx.symbolic_trace(M()), [(T(3, 5, 4),)], {"grad": True}


@numeric("ms10", "module-structure", "own", "forward replaced on the instance, as offloading and adapter libraries do")
def ms10():
    m = LinearMlp()
    old = m.fc1.forward
    m.fc1.forward = types.MethodType(lambda self, x: old(x) * 3.0 - 1.0, m.fc1)
    return m, [(T(3, 5, 4),)], {"grad": True}


@numeric(
    "ms11",
    "module-structure",
    "pytorch/TensorRT#1619",
    "nested blocks three deep, each with an optional bias that is None in some",
)
def ms11():
    class Leaf(nn.Module):
        def __init__(self, seed, bias):
            super().__init__()
            self.w = nn.Parameter(T(seed, 4, 4))
            self.b = nn.Parameter(T(seed + 1, 4)) if bias else None

        def forward(self, x):
            y = x @ self.w
            if self.b is not None:
                y = y + self.b
            return torch.relu(y)

    class Mid(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.one, self.two = Leaf(seed, True), Leaf(seed + 10, False)

        def forward(self, x):
            return self.two(self.one(x)) + x

    m = nn.Sequential(Mid(30), nn.Sequential(Mid(60), Mid(90)))
    return m, [(T(3, 5, 4),)], {"grad": True}


# tracing-limits: what a symbolic trace gets wrong or cannot do


@numeric(
    "tr01", "tracing-limits", "pytorch/pytorch#54602", "control flow that depends on the data: both branches are used"
)
def tr01():
    class M(Mod):
        def forward(self, x):
            y = x @ self.w + self.b
            if y.sum() > 0:
                return torch.relu(y)
            return F.gelu(y) - 1.0

    x = T(3, 5, 4)
    return M(w=T(1, 4, 3).abs(), b=T(2, 3)), [(x.abs(),), (-x.abs() * 3,), (x.abs(),)], {"grad": True}


@numeric("tr02", "tracing-limits", "pytorch/pytorch#50178", "an optional argument: called with and without it")
def tr02():
    class M(Mod):
        def forward(self, x, bias=None):
            y = x @ self.w
            if bias is None:
                bias = self.b
            return torch.relu(y + bias)

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),), (T(3, 5, 4), T(4, 3)), Call(T(3, 5, 4), bias=T(5, 5, 1))]


@numeric(
    "tr05",
    "tracing-limits",
    ("pytorch/pytorch#99576", "pytorch/pytorch#54913"),
    "forward returns a dataclass with a None in it",
)
def tr05():
    class M(Mod):
        def forward(self, x):
            h = torch.relu(x @ self.w + self.b)
            return OutPair(logits=h @ self.v, hidden=h)

    return M(w=T(1, 4, 3), b=T(2, 3), v=T(4, 3, 2)), [(T(3, 5, 4),)]


@numeric(
    "tr07",
    "tracing-limits",
    "pytorch/pytorch#65144",
    "forward returns a namedtuple; another output is None, another an int",
)
def tr07():
    class M(Mod):
        def forward(self, x):
            y = x @ self.w + self.b
            return Pair(y, None), [y * 2, 3], None

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


@numeric("tr08", "tracing-limits", "own", "forward(*args, **kwargs), called in several ways")
def tr08():
    class M(Mod):
        def forward(self, *args, **kwargs):
            y = args[0] @ self.w + self.b
            if len(args) > 1:
                y = y + args[1]
            if "mask" in kwargs:
                y = y * kwargs["mask"]
            return y

    x = T(3, 5, 4)
    return M(w=T(1, 4, 3), b=T(2, 3)), [(x,), (x, T(4, 3)), Call(x, mask=T(5, 5, 1))]


@numeric(
    "tr10",
    "tracing-limits",
    "page: docs/source/fx.rst (Limitations of Symbolic Tracing)",
    "control flow on the shape: small and large batches take different paths",
)
def tr10():
    class M(Mod):
        def forward(self, x):
            y = x @ self.w + self.b
            if x.shape[0] > 3:
                return torch.relu(y)
            return y.mean(0, keepdim=True).expand(x.shape[0], -1) + y

    return M(w=T(1, 4, 3), b=T(2, 3)), [(T(3, 2, 4),), (T(4, 5, 4),), (T(5, 3, 4),)]


@behaviour("tr13", "tracing-limits", "own", "Python state changed in forward: a call counter counts calls, not traces")
def tr13(optimize):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(T(1, 4, 3))
            self.b = nn.Parameter(T(2, 3))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return (x @ self.w + self.b) * self.calls

    x = T(3, 5, 4)
    ref, opt = M(), optimize(M(), example_inputs=(x,))
    for _ in range(3):
        torch.testing.assert_close(opt(x), ref(x))


@numeric(
    "tr15",
    "tracing-limits",
    "pytorch/pytorch#195594",
    "operands that do not fit are refused, as in eager, and the module works afterwards",
)
def tr15():
    class M(Mod):
        def forward(self, x, b):
            return torch.relu(torch.addmm(b, x, self.w))

    calls = [(T(3, 5, 4), T(2, 1)), (T(3, 5, 4), T(4, 6)), (T(3, 5, 3), T(2, 1)), (T(3, 5, 4), T(2, 1))]
    return M(w=T(1, 4, 1)), calls, {"raises": [1, 2]}


# nan-inf


@numeric("ni01", "nan-inf", "own", "NaN and infinities in input, weight and bias land in the same places")
def ni01():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b, torch.relu(x @ self.w + self.b)

    w, b, x = T(1, 4, 4), T(2, 4), T(3, 5, 4)
    w[1, 2], b[3], x[0, 0], x[2, 3], x[4, 1] = INF, -INF, NAN, INF, 0.0
    return M(w=w, b=b), [(x,)]


@numeric(
    "ni04",
    "nan-inf",
    "tenstorrent/tt-metal#56517",
    "the negative tail of gelu and silu fades smoothly: relative, not only absolute, error",
)
def ni04():
    class M(Mod):
        def forward(self, x):
            h = x @ self.eye + self.z
            return F.gelu(h), F.silu(h), h * torch.sigmoid(h)

    d = torch.float64
    x = torch.diag(torch.tensor([-4.0, -5.0, -6.0, -7.0, -8.0], dtype=d))
    return M(eye=torch.eye(5, dtype=d), z=torch.zeros(5, dtype=d)), [(x,)]


# graph-order


@numeric(
    "go01",
    "graph-order",
    ("pytorch/pytorch#159613", "pytorch/pytorch#99039"),
    "three patterns back to back, each feeding the next",
)
def go01():
    class M(Mod):
        def forward(self, x):
            x = x @ self.w1 + self.b1
            x = x @ self.w2 + self.b2
            return x @ self.w3 + self.b3

    m = M(w1=T(1, 4, 5), b1=T(2, 5), w2=T(4, 5, 6), b2=T(5, 6), w3=T(6, 6, 3), b3=T(7, 3))
    return m, [(T(3, 5, 4),)], {"grad": True, "fused": 3}


@numeric(
    "go02",
    "graph-order",
    ("pytorch/pytorch#148751", "pytorch/pytorch#162019"),
    "the bias is computed from the product itself, or after it",
)
def go02():
    class M(Mod):
        def forward(self, x):
            h = x @ self.w
            y = h + h.mean(0)
            k = x @ self.v
            late = torch.sqrt(x.abs().sum(0))[:3] * 2
            return torch.relu(y), k + late

    return M(w=T(1, 4, 3), v=T(2, 4, 3)), [(T(3, 5, 4),)], {"grad": True}


@numeric("go05", "graph-order", "pytorch/pytorch#143841", "the matched value is computed and thrown away")
def go05():
    class M(Mod):
        def forward(self, x):
            torch.relu(x @ self.w + self.b)
            unused = x @ self.v + self.b  # noqa: F841
            return x * 2.0

    return M(w=T(1, 4, 3), v=T(4, 4, 3), b=T(2, 3)), [(T(3, 5, 4),)]


@numeric(
    "go07",
    "graph-order",
    ("XPU-Forces/xpu_graph#349", "pytorch/pytorch#143147"),
    "Python numbers where a pattern expects tensors: x@w + 1, 2 + x@w, (x@w).add(True)",
)
def go07():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + 1, 2 + x @ self.w, (x @ self.w).add(True), x @ self.w + float("nan")

    return M(w=T(1, 4, 3)), [(T(3, 5, 4),)]


@numeric("go09", "graph-order", "own", "x@w + b + c, x@w + (b + c), and a bias added twice")
def go09():
    class M(Mod):
        def forward(self, x):
            return (
                x @ self.w + self.b + self.c,
                x @ self.w + (self.b + self.c),
                x @ self.w + self.b + self.b,
                self.c + (self.b + x @ self.w),
            )

    return M(w=T(1, 4, 3), b=T(2, 3), c=T(4, 5, 1)), [(T(3, 5, 4),)], {"grad": True}


# serialization


@behaviour(
    "se01",
    "serialization",
    "pytorch/pytorch#44806",
    "deepcopy gives an independent module with the same outputs and the same class of behaviour",
)
def se01(optimize):
    x = T(3, 5, 4)
    opt = optimize(Mlp(), example_inputs=(x,))
    twin = copy.deepcopy(opt)
    want = opt(x)
    torch.testing.assert_close(twin(x), want)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    torch.testing.assert_close(opt(x), want)
    assert float(twin(x).abs().sum()) == 0.0


@behaviour(
    "se04",
    "serialization",
    "huggingface/optimum#676",
    "weights trained in the optimized module load into the original class, strictly",
)
def se04(optimize):
    torch.manual_seed(0)
    x = T(3, 2, 4)
    opt = optimize(SwiGlu(4, 6, bias=True), example_inputs=(x,))
    opt(x).square().sum().backward()
    with torch.no_grad():
        for p in opt.parameters():
            p -= 0.1 * p.grad
    f = io.BytesIO()
    torch.save(opt.state_dict(), f)
    f.seek(0)
    plain = SwiGlu(4, 6, bias=True)
    plain.load_state_dict(torch.load(f, weights_only=True), strict=True)
    torch.testing.assert_close(plain(x), opt(x))


# compose: what people do with the result


@behaviour("cp01", "compose", "own", "torch.compile(optimized, backend='eager') gives the same numbers, twice")
def cp01(optimize):
    torch._dynamo.reset()
    opt = optimize(Mlp(), example_inputs=(T(3, 5, 4),))
    comp = torch.compile(opt, backend="eager")
    for n in (5, 3):
        x = T(3, n, 4)
        torch.testing.assert_close(comp(x), Mlp()(x))


@behaviour(
    "cp03", "compose", "pytorch/pytorch#100105", "torch.func.functional_call with other parameters, and grad through it"
)
def cp03(optimize):
    x = T(3, 5, 4)
    opt, ref = optimize(Mlp(), example_inputs=(x,)), Mlp()
    new = {n: p.detach() * 0.5 + 0.2 for n, p in ref.named_parameters()}
    got = torch.func.functional_call(opt, new, (x,))
    want = torch.func.functional_call(ref, new, (x,))
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, opt(x))
    g1 = torch.func.grad(lambda p: torch.func.functional_call(opt, p, (x,)).sum())(new)
    g2 = torch.func.grad(lambda p: torch.func.functional_call(ref, p, (x,)).sum())(new)
    for n in g2:
        torch.testing.assert_close(g1[n], g2[n])


@behaviour(
    "cp05",
    "compose",
    "pytorch/pytorch#110235",
    "optimizing the optimized module again changes nothing and loses nothing",
)
def cp05(optimize):
    torch.manual_seed(0)
    x = T(3, 2, 4)
    m = SwiGlu(4, 6, bias=True)
    want, keys = m(x), list(m.state_dict())
    opt = optimize(m, example_inputs=(x,))
    for _ in range(2):
        opt = optimize(opt, example_inputs=(x,))
        torch.testing.assert_close(opt(x), want)
        assert list(opt.state_dict()) == keys


@behaviour(
    "cp07",
    "compose",
    ("intel/intel-extension-for-pytorch#211", "flagos-ai/FlagGems#5617"),
    "second derivatives through linear + silu and through a gated MLP",
)
def cp07(optimize):
    torch.manual_seed(0)
    for make in (lambda: SwiGlu(4, 6, bias=True), lambda: nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 1))):
        torch.manual_seed(1)
        ref = make().double()
        torch.manual_seed(1)
        opt = optimize(make().double(), example_inputs=(T(3, 3, 4, dtype=torch.float64),))
        grads = []
        for mod in (ref, opt):
            x = T(3, 3, 4, dtype=torch.float64).requires_grad_()
            (g,) = torch.autograd.grad(mod(x).sum(), x, create_graph=True)
            g.square().sum().backward()
            grads.append([x.grad] + [p.grad for _, p in sorted(mod.named_parameters())])
        for a, b in zip(*grads, strict=True):
            if b is None:
                assert a is None or float(a.abs().sum()) == 0.0
            else:
                torch.testing.assert_close(a, b)


@numeric(
    "cp09",
    "compose",
    ("pytorch/pytorch#129138", "huggingface/diffusers#14104"),
    "called under autocast: matmul + float32 bias gives float32 there, and linear gives bfloat16",
)
def cp09():
    class M(Mod):
        def forward(self, x):
            return x @ self.w + self.b, self.fc(x), torch.relu(x @ self.w + self.b)

    m = M(w=T(1, 4, 3), b=T(2, 3), fc=nn.Linear(4, 3))
    return m, [(T(3, 5, 4),)], {"context": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}


@behaviour(
    "cp12",
    "compose",
    ("pytorch/pytorch#43483", "page: docs/source/fx.rst (What is an FX transform)"),
    "the result can go through another torch.fx transform and be traced again",
)
def cp12(optimize):
    x = T(3, 5, 4)
    opt = optimize(Mlp(), example_inputs=(x,))
    again = torch.fx.symbolic_trace(opt)
    torch.testing.assert_close(again(x), Mlp()(x))
    torch.testing.assert_close(torch.fx.Transformer(again).transform()(x), Mlp()(x))


# bad-input: a clear error, or eager's own error


@behaviour("bi01", "bad-input", "own", "things that are not modules are refused with TypeError")
def bi01(optimize):
    for bad in (None, 3, "model", [nn.Linear(2, 2)], torch.ones(2)):
        with pytest.raises(TypeError, match=r"\S"):
            optimize(bad)


@behaviour("bi04", "bad-input", "own", "missing, surplus and misspelt arguments raise TypeError as eager does")
def bi04(optimize):
    x = T(3, 5, 4)
    opt = optimize(Mlp(), example_inputs=(x,))
    for args, kwargs in (((), {}), ((x, x), {}), ((x,), {"y": x})):
        try:
            opt(*args, **kwargs)
        except TypeError:
            continue
        raise AssertionError(f"{len(args)} args and {list(kwargs)} were accepted")
    torch.testing.assert_close(opt(x=x), Mlp()(x))


@behaviour(
    "bi06",
    "bad-input",
    "pytorch/pytorch#195594",
    "shapes that eager refuses are refused, with an exception and not with a crash or an answer",
)
def bi06(optimize):
    opt = optimize(Mlp(), example_inputs=(T(3, 5, 4),))
    for bad in (T(1, 5, 3), T(1, 5, 4).long(), T(1)):
        with pytest.raises(RuntimeError):
            Mlp()(bad)
        with pytest.raises(RuntimeError):
            opt(bad)
    torch.testing.assert_close(opt(T(3, 5, 4)), Mlp()(T(3, 5, 4)))
