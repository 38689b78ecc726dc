"""matmul_add: every spelling of a product with a matrix and a bias, and what must not be taken for one."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxfuse
from tests.conftest import Written, assert_fuses, assert_kept, randn

PRODUCTS = ["matmul", "mm", "add", "addmm", "einsum", "tensordot"]
DTYPES = (torch.float32, torch.bfloat16)

# x [..., 6], w [6, 6] (square, so that a wrong transpose gives numbers and not an error), b [6]
MATRIX_FIRST: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x @ w + b": lambda x, w, b: x @ w + b,
    "b + x @ w": lambda x, w, b: b + x @ w,
    "torch.matmul": lambda x, w, b: torch.matmul(x, w) + b,
    "torch.matmul, keywords": lambda x, w, b: torch.matmul(input=x, other=w) + b,
    ".matmul": lambda x, w, b: x.matmul(w) + b,
    ".matmul, keyword": lambda x, w, b: x.matmul(other=w) + b,
    ".__matmul__": lambda x, w, b: x.__matmul__(w) + b,
    "torch.add": lambda x, w, b: torch.add(x @ w, b),
    "torch.add, keywords": lambda x, w, b: torch.add(input=x @ w, other=b),
    "torch.add, swapped": lambda x, w, b: torch.add(b, x @ w),
    "torch.add, alpha": lambda x, w, b: torch.add(x @ w, b, alpha=2),
    "torch.add, alpha a fraction": lambda x, w, b: torch.add(x @ w, b, alpha=-0.25),
    "torch.add, alpha 1": lambda x, w, b: torch.add(x @ w, b, alpha=1),
    "torch.add, alpha 1, swapped": lambda x, w, b: torch.add(b, x @ w, alpha=1),
    ".add": lambda x, w, b: (x @ w).add(b),
    ".add, alpha": lambda x, w, b: (x @ w).add(b, alpha=3),
    ".add of the bias": lambda x, w, b: b.add(x @ w),
    ".__add__": lambda x, w, b: (x @ w).__add__(b),
    ".add_": lambda x, w, b: (x @ w).add_(b),
    ".add_, alpha": lambda x, w, b: (x @ w).add_(b, alpha=2),
    "w.t()": lambda x, w, b: x @ w.t() + b,
    "torch.t": lambda x, w, b: x @ torch.t(w) + b,
    "w.T": lambda x, w, b: x @ w.T + b,
    "b + x @ w.T": lambda x, w, b: b + x @ w.T,
    "w.mT": lambda x, w, b: x @ w.mT + b,
    "w.H": lambda x, w, b: x @ w.H + b,
    "w.transpose(0, 1)": lambda x, w, b: x @ w.transpose(0, 1) + b,
    "w.transpose(-1, -2)": lambda x, w, b: x @ w.transpose(-1, -2) + b,
    "torch.transpose, keywords": lambda x, w, b: x @ torch.transpose(w, dim0=1, dim1=0) + b,
    "w.permute(1, 0)": lambda x, w, b: x @ w.permute(1, 0) + b,
    "w.permute((1, 0))": lambda x, w, b: x @ w.permute((1, 0)) + b,
    "torch.permute": lambda x, w, b: x @ torch.permute(w, (-1, -2)) + b,
    "w.swapaxes(0, 1)": lambda x, w, b: x @ w.swapaxes(0, 1) + b,
    "torch.swapaxes": lambda x, w, b: x @ torch.swapaxes(w, 0, 1) + b,
    "torch.swapdims": lambda x, w, b: x @ torch.swapdims(w, 1, 0) + b,
    "w.T.T": lambda x, w, b: x @ w.T.T + b,
    "w.t().contiguous()": lambda x, w, b: x @ w.t().contiguous() + b,
    "w[:]": lambda x, w, b: x @ w[:] + b,
    "bias as a row": lambda x, w, b: x @ w + b.view(-1),
    "twice the same weight": lambda x, w, b: torch.relu(x @ w + b) @ w + b,
    "F.linear, then a bias": lambda x, w, b: F.linear(x, w) + b,
    "bias, then F.linear": lambda x, w, b: b + F.linear(x, w),
    "F.linear, bias None": lambda x, w, b: F.linear(x, w, None) + b,
    "F.linear, bias=None": lambda x, w, b: F.linear(input=x, weight=w, bias=None) + b,
    "F.linear of w.t()": lambda x, w, b: F.linear(x, w.t()) + b,
    "F.linear, then alpha": lambda x, w, b: torch.add(F.linear(x, w), b, alpha=2),
    "F.linear, then add_": lambda x, w, b: F.linear(x, w).add_(b),
    "einsum ...k,kn->...n": lambda x, w, b: torch.einsum("...k,kn->...n", x, w) + b,
    "einsum ...k,nk->...n": lambda x, w, b: torch.einsum("...k,nk->...n", x, w) + b,
    "einsum ... d, e d -> ... e": lambda x, w, b: torch.einsum("... d, e d -> ... e", x, w) + b,
    "einsum, weight first": lambda x, w, b: torch.einsum("kn,...k->...n", w, x) + b,
    "einsum, operands in a list": lambda x, w, b: torch.einsum("...k,kn->...n", [x, w]) + b,
    "tensordot 1": lambda x, w, b: torch.tensordot(x, w, 1) + b,
    "tensordot dims=1": lambda x, w, b: torch.tensordot(x, w, dims=1) + b,
    "tensordot ([-1], [0])": lambda x, w, b: torch.tensordot(x, w, dims=([-1], [0])) + b,
    "tensordot ([-1], [1])": lambda x, w, b: torch.tensordot(x, w, dims=([-1], [1])) + b,
    "tensordot (-1, 0)": lambda x, w, b: torch.tensordot(x, w, ((-1,), (-2,))) + b,
    "aten": lambda x, w, b: torch.ops.aten.add.Tensor(torch.ops.aten.matmul.default(x, w), b),
    "aten.linear": lambda x, w, b: torch.ops.aten.add.Tensor(torch.ops.aten.linear.default(x, w), b),
}


def _iadd(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x @ w
    h += b
    return h


def _add_in_a_statement(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = torch.matmul(x, w.t())
    return h.add_(b)


MATRIX_FIRST |= {"+=": _iadd, "add_ on a transposed view": _add_in_a_statement}

# The same where the input must be a matrix: fused there, by an assumption on its rank.
MATRICES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch.mm": lambda x, w, b: torch.mm(x, w) + b,
    "torch.mm, keywords": lambda x, w, b: torch.mm(input=x, mat2=w) + b,
    ".mm": lambda x, w, b: x.mm(w) + b,
    ".mm, keyword": lambda x, w, b: x.mm(mat2=w) + b,
    "b + mm": lambda x, w, b: b + torch.mm(x, w.t()),
    "mm, alpha": lambda x, w, b: torch.add(torch.mm(x, w), b, alpha=2),
    "torch.addmm": lambda x, w, b: torch.addmm(b, x, w),
    "torch.addmm, keywords": lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w),
    "torch.addmm, w.t()": lambda x, w, b: torch.addmm(b, x, w.t()),
    "torch.addmm, beta": lambda x, w, b: torch.addmm(b, x, w, beta=2),
    "torch.addmm, beta a fraction": lambda x, w, b: torch.addmm(b, x, w, beta=-0.5, alpha=1),
    "torch.addmm, beta 0": lambda x, w, b: torch.addmm(b, x, w, beta=0),
    ".addmm": lambda x, w, b: b.addmm(x, w),
    ".addmm, beta": lambda x, w, b: b.addmm(x, w, beta=3),
    "addmm of a view": lambda x, w, b: torch.addmm(b, x.view(-1, x.size(-1)), w),
    "addmm of a reshape": lambda x, w, b: torch.addmm(b, x.reshape(-1, x.shape[-1]), w).unflatten(0, x.shape[:-1]),
    "aten.addmm": lambda x, w, b: torch.ops.aten.addmm.default(b, x, w),
    "aten.mm": lambda x, w, b: torch.ops.aten.add.Tensor(torch.ops.aten.mm.default(x, w), b),
    "einsum mk,kn->mn": lambda x, w, b: torch.einsum("mk,kn->mn", x, w) + b,
    "einsum ij,jk": lambda x, w, b: torch.einsum("ij,jk", x, w) + b,
    "einsum bd,ed->be": lambda x, w, b: torch.einsum("bd,ed->be", x, w) + b,
    "tensordot ([1], [0])": lambda x, w, b: torch.tensordot(x, w, dims=([1], [0])) + b,
    "tensordot ([1], [1])": lambda x, w, b: torch.tensordot(x, w, dims=([1], [1])) + b,
}
RANK_3: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "einsum bsk,kn->bsn": lambda x, w, b: torch.einsum("bsk,kn->bsn", x, w) + b,
    "einsum bsk,nk->bsn": lambda x, w, b: torch.einsum("bsk,nk->bsn", x, w) + b,
    "einsum, weight first": lambda x, w, b: torch.einsum("nk,bsk->bsn", w, x) + b,
    "tensordot ([2], [0])": lambda x, w, b: torch.tensordot(x, w, dims=([2], [0])) + b,
    "tensordot (2, 1)": lambda x, w, b: torch.tensordot(x, w, dims=[[2], [1]]) + b,
}
# addmm scales the product by itself.
SCALED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch.add of the product": lambda x, w, b: torch.add(b, torch.mm(x, w), alpha=2),
    ".add of the product": lambda x, w, b: b.add(torch.mm(x, w), alpha=-0.5),
}
TABLE = [
    *[
        pytest.param(row, shape, id=f"{name} ({len(shape)}-D)")
        for name, row in MATRIX_FIRST.items()
        for shape in ((4, 6), (2, 3, 6))
    ],
    *[pytest.param(row, (4, 6), id=name) for name, row in MATRICES.items()],
    *[pytest.param(row, (2, 3, 6), id=name) for name, row in RANK_3.items()],
]


@pytest.mark.parametrize(("row", "shape"), TABLE)
def test_spelling(row, shape, example):
    model = Written(row, w=randn(1, 6, 6), b=randn(2, 6))
    dtypes = DTYPES if example else DTYPES[:1]
    assert_fuses("matmul_add", model, [randn(3, *shape)], gone=PRODUCTS, new=["linear"], example=example, dtypes=dtypes)


@pytest.mark.parametrize(("row", "shape"), TABLE)
def test_spelling_with_weights_as_arguments(row, shape):
    assert_fuses("matmul_add", row, [randn(3, *shape), randn(1, 6, 6), randn(2, 6)], gone=PRODUCTS, new=["linear"])


MODULES = {
    "nn.Linear without a bias, then one": lambda x, fc, b: fc(x) + b,
    "bias, then nn.Linear": lambda x, fc, b: b + fc(x),
    "nn.Linear, +=": lambda x, fc, b: operator.iadd(fc(x), b),
    "its weight with F.linear": lambda x, fc, b: F.linear(x, fc.weight) + b,
    "its weight transposed": lambda x, fc, b: x @ fc.weight.T + b,
    "nn.Linear called with a keyword": lambda x, fc, b: fc(input=x) + b,
}


@pytest.mark.parametrize("row", MODULES.values(), ids=MODULES)
def test_linear_without_bias(row, example):
    model = Written(row, fc=nn.Linear(6, 6, bias=False), b=randn(2, 6))
    assert_fuses("matmul_add", model, [randn(3, 2, 3, 6)], gone=["add", "matmul"], new=["linear"], example=example)


class Conv1D(nn.Module):
    """GPT-2's projection: addmm on a [K, N] weight."""

    def __init__(self, features: int, inputs: int):
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(randn(5, inputs, features))
        self.bias = nn.Parameter(randn(6, features))

    def forward(self, x):
        shape = x.size()[:-1] + (self.features,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(shape)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)])
def test_conv1d(shape, example):
    assert_fuses("matmul_add", Conv1D(8, 6), [randn(3, *shape)], gone=["addmm"], new=["linear"], example=example)


@pytest.mark.parametrize("row", SCALED.values(), ids=SCALED)
def test_scaled_product_becomes_addmm(row, example):
    model = Written(row, w=randn(1, 6, 6), b=randn(2, 6))
    assert_fuses("matmul_add", model, [randn(3, 4, 6)], gone=["mm", "matmul", "add"], new=["addmm"], example=example)


def test_scaled_matmul_of_a_matrix():
    def row(x, w, b):
        return torch.add(b, x @ w, alpha=2)

    assert_fuses(
        "matmul_add", row, [randn(3, 4, 6), randn(1, 6, 6), randn(2, 6)], gone=["matmul", "add"], new=["addmm"]
    )


def test_three_in_a_row(example):
    def row(x, u, v, w, b):
        return ((x @ u + b) @ v + b) @ w + b

    model = Written(row, u=randn(1, 6, 6), v=randn(2, 6, 6), w=randn(3, 6, 6), b=randn(4, 6))
    report = assert_fuses("matmul_add", model, [randn(5, 4, 6)], gone=["matmul", "add"], example=example)
    assert len(report.fused) == 3


def test_rows_may_be_none(example):
    model = Written(lambda x, w, b: x @ w + b, w=randn(1, 6, 6), b=randn(2, 6))
    assert_fuses("matmul_add", model, [randn(3, 0, 6)], new=["linear"], example=example)


def test_weight_of_other_strides(example):
    model = Written(lambda x, w, b: x @ w + b, w=randn(1, 6, 12)[:, ::2], b=randn(2, 12)[::2])
    assert_fuses("matmul_add", model, [randn(3, 6, 4).transpose(0, 1)], new=["linear"], example=example)


def test_weights_as_arguments_pin_their_shapes():
    optimized = fxfuse.optimize(lambda x, w, b: x @ w + b, (randn(3, 4, 6), randn(1, 6, 6), randn(2, 6)))
    column = randn(2, 4, 1)
    assert torch.equal(optimized(randn(3, 4, 6), randn(1, 6, 6), column), randn(3, 4, 6) @ randn(1, 6, 6) + column)
    (reason,) = fxfuse.report(optimized).calls[""].reasons
    assert reason == "argument b: expected shape (6,), found (4, 1)"


def test_rank_taken_for_granted_is_checked():
    optimized = fxfuse.optimize(Written(lambda x, w, b: torch.mm(x, w) + b, w=randn(1, 6, 6), b=randn(2, 6)))
    with torch.no_grad(), pytest.raises(RuntimeError, match="self must be a matrix"):
        optimized(randn(3, 2, 4, 6))
    (reason,) = fxfuse.report(optimized).calls[""].reasons
    assert reason == "argument x: expected 2 dimensions, found 3"


def _returned(x, w, b):
    h = x @ w
    return h, h + b


def _read_by_mean(x, w, b):
    h = x @ w
    return (h + b) / h.mean()


def _read_by_shape(x, w, b):
    h = x @ w
    return (h + b) / h.shape[-1]


def _read_twice(x, w, b):
    h = x @ w
    return h + b, h + 2 * b


def _scaled_in_place(x, w, b):
    h = x @ w
    h.mul_(2.0)
    return h + b


def _input_overwritten(x, w, b):
    h = x @ w
    x.zero_()
    return h + b


def _view_of_input_overwritten(x, w, b):
    row = x[0]
    h = x @ w
    row.zero_()
    return h + b


def _transposed_view_overwritten(x, w, b):
    h = x.t() @ w
    x.t()[0].fill_(1.0)
    return h + b


def _view_of_product_overwritten(x, w, b):
    h = x @ w
    h[0].zero_()
    return h + b


def _view_of_product_read(x, w, b):
    h = x @ w
    first = h[0]
    return h.add_(b), first


def _product_read_after_in_place(x, w, b):
    h = x @ w
    y = h.add_(b)
    return y, h


def _input_added_to(x, w, b):
    return x.add_(x @ w)


def _out_is_product(x, w, b):
    h = torch.matmul(x, w)
    return torch.add(h, b, out=h)


def _out_is_input(x, w, b):
    return torch.add(torch.matmul(x, w), b, out=x)


def _product_into_input(x, w, b):
    return torch.matmul(x.clone(), w, out=x) + b


def _bias_depends_on_product(x, w, b):
    h = x @ w
    return h + h.mean(0)


W, B, X = randn(1, 6, 6), randn(2, 6), randn(3, 4, 6)
ADD = MATRIX_FIRST["x @ w + b"]


def ones(*shape):
    return torch.ones(shape, dtype=torch.int64)


# id -> (row, w, b, x, reason); None: no candidate, nothing is said
KEPT = {
    "product is returned": (_returned, W, B, X, "matmul is returned as well"),
    "product is read": (_read_by_mean, W, B, X, "matmul is read by mean as well"),
    "product is added to twice": (_read_twice, W, B, X, "matmul is read by add_1 as well"),
    "product is scaled in place": (_scaled_in_place, W, B, X, "matmul is written by mul_"),
    "input is overwritten": (_input_overwritten, W, B, X, "zero_ writes, before add, what the match reads"),
    "view of input": (_view_of_input_overwritten, W, B, X, "zero_ writes, before add, what the match reads"),
    "transposed view of input": (
        _transposed_view_overwritten,
        W,
        B,
        randn(3, 6, 6),
        "fill_ writes, before add, what the match reads",
    ),
    "view of product is written": (_view_of_product_overwritten, W, B, X, "matmul is read by getitem as well"),
    "view of product is read": (_view_of_product_read, W, B, X, "matmul is read by getitem as well"),
    "product is read after +=": (_product_read_after_in_place, W, B, X, "matmul is returned as well"),
    "out= the product": (_out_is_product, W, B, X, "add writes matmul in place"),
    "out= the input": (_out_is_input, W, B, X, "add writes x in place"),
    "product out= the input": (_product_into_input, W, B, X, "matmul writes x in place"),
    "+= on the input": (_input_added_to, W, B, X, None),
    "bias computed from the product": (_bias_depends_on_product, W, B, X, None),
    "bias [M, 1]": (ADD, W, randn(2, 4, 1), X, "bias has shape (4, 1), not (6,)"),
    "bias [M, 1], square": (ADD, W, randn(2, 6, 1), randn(3, 6, 6), "bias has shape (6, 1), not (6,)"),
    "bias [1]": (ADD, W, randn(2, 1), X, "bias has shape (1,), not (6,)"),
    "bias [1, N]": (ADD, W, randn(2, 1, 6), X, "bias has shape (1, 6), not (6,)"),
    "bias 0-d": (ADD, W, randn(2), X, "bias has shape (), not (6,)"),
    "bias [M, N]": (ADD, W, randn(2, 4, 6), X, "bias has shape (4, 6), not (6,)"),
    "bias [B, 1, N]": (ADD, W, randn(2, 2, 1, 6), X, "bias has shape (2, 1, 6), not (6,)"),
    "bias wider than the product": (ADD, randn(1, 6, 1), B, X, "bias has shape (6,), not (1,)"),
    "bias float64": (ADD, W, B.double(), X, "bias is float64, weight float32"),
    "bias bfloat16": (ADD, W, B.bfloat16(), X, "bias is bfloat16, weight float32"),
    "bias integer": (ADD, W, ones(6), X, "bias is int64, weight float32"),
    "weight bfloat16": (ADD, W.bfloat16(), B, X.bfloat16(), "bias is float32, weight bfloat16"),
    "all integer": (ADD, ones(6, 6), ones(6), ones(4, 6), "weight is int64, not floating point"),
    "weight complex": (
        ADD,
        torch.complex(W, W),
        torch.complex(B, B),
        torch.complex(X, X),
        "weight is complex64, not floating point",
    ),
    "weight 3-D": (ADD, randn(1, 2, 6, 6), B, randn(3, 2, 4, 6), "weight has shape (2, 6, 6), not two dimensions"),
    "weight an activation": (lambda x, w, b: x @ (x.t() @ x) + b, W, B, X, "weight is an activation (matmul)"),
    "weight the input": (lambda x, w, b: w @ x.t() + b[:4], W, B, X, "weight is an activation (t)"),
    "weight the input, squared": (lambda x, w, b: x @ x.t() + b[:4], W, B, X, "weight is an activation (t)"),
    "weight on the left": (
        lambda x, w, b: torch.mm(w, torch.relu(x)) + b,
        W,
        B,
        randn(3, 6, 6),
        "weight is an activation (relu)",
    ),
    "weight of one dimension": (lambda x, w, b: x @ b + w[0, 0], W, B, X, "weight has shape (6,), not two dimensions"),
    "bias an activation": (lambda x, w, b: x @ w + x.mean(0), W, B, X, None),
    "residual": (lambda x, w, b: x @ w + x, W, B, X, None),
    "residual after a linear": (lambda x, w, b: F.linear(x, w) + x, W, B, X, None),
    "sum of two products": (lambda x, w, b: x @ w + x @ w.t(), W, B, X, None),
    "attention scores": (lambda x, w, b: torch.softmax(x @ x.t() + x.mean(), -1), W, B, X, None),
    "a number": (lambda x, w, b: x @ w + 1, W, B, X, "the added term is the number 1, not a bias"),
    "a number first": (lambda x, w, b: 2.5 + x @ w, W, B, X, "the added term is the number 2.5, not a bias"),
    "a truth value": (lambda x, w, b: (x @ w).add(True), W, B, X, "the added term is the number True, not a bias"),
    "a number after a linear": (
        lambda x, w, b: F.linear(x, w) + 1,
        W,
        B,
        X,
        "the added term is the number 1, not a bias",
    ),
    "difference": (lambda x, w, b: x @ w - b, W, B, X, None),
    "bias minus product": (lambda x, w, b: b - x @ w, W, B, X, None),
    "rsub": (lambda x, w, b: torch.rsub(x @ w, b), W, B, X, None),
    "product with the bias": (lambda x, w, b: (x @ w) * b, W, B, X, None),
    "alpha on the product, rank unknown": (
        lambda x, w, b: torch.add(b, x[:2] @ w, alpha=2),
        W,
        B,
        X,
        "alpha scales the product, which only addmm on two dimensions does (its rank is not known)",
    ),
    "addmm alpha": (lambda x, w, b: torch.addmm(b, x, w, alpha=0.5), W, B, X, "alpha=0.5 scales the product"),
    "addmm alpha and beta": (
        lambda x, w, b: torch.addmm(b, x, w, beta=2, alpha=-1),
        W,
        B,
        X,
        "alpha=-1 scales the product",
    ),
    "addmm [M, N]": (lambda x, w, b: torch.addmm(b, x, w), W, randn(2, 4, 6), X, "bias has shape (4, 6), not (6,)"),
    "addmm [M, 1]": (lambda x, w, b: torch.addmm(b, x, w), W, randn(2, 4, 1), X, "bias has shape (4, 1), not (6,)"),
    "addmm of an activation": (lambda x, w, b: torch.addmm(x, x, w), W, B, X, "bias is an activation (x)"),
    "addmm_ on a buffer": (lambda x, w, b: x.clone().addmm_(x, w), W, B, X, "bias is an activation (clone)"),
    "addmm beta 0 on [1]": (
        lambda x, w, b: torch.addmm(b, x, w, beta=0),
        W,
        randn(2, 1),
        X,
        "bias has shape (1,), not (6,)",
    ),
    "mm, rank unknown": (
        lambda x, w, b: torch.mm(x[0:2], w) + b,
        W,
        B,
        X,
        "torch.mm takes two dimensions only (its rank is not known)",
    ),
    "second bias": (lambda x, w, b: F.linear(x, w, b) + b, W, B, X, "the projection has a bias already"),
    "linear, bias [M, 1]": (
        lambda x, w, b: F.linear(x, w) + b,
        W,
        randn(2, 4, 1),
        X,
        "bias has shape (4, 1), not (6,)",
    ),
    "linear, bias float64": (lambda x, w, b: F.linear(x, w) + b, W, B.double(), X, "bias is float64, weight float32"),
    "einsum transposed": (lambda x, w, b: torch.einsum("mk,kn->nm", x, w) + b[:4], W, B, X, None),
    "einsum of three": (lambda x, w, b: torch.einsum("mk,kn,n->mn", x, w, b), W, B, X, None),
    "einsum of a diagonal": (lambda x, w, b: torch.einsum("mk,kk->mk", x, w) + b, W, B, X, None),
    "einsum over another dimension": (lambda x, w, b: torch.einsum("km,kn->mn", x, w) + b, W, B, randn(3, 6, 6), None),
    "einsum that sums": (lambda x, w, b: torch.einsum("mk,kn->m", x, w) + b[:4], W, B, X, None),
    "einsum, implicit, transposed": (lambda x, w, b: torch.einsum("bk,ka", x, w) + b[:4], W, B, X, None),
    "tensordot over another dimension": (
        lambda x, w, b: torch.tensordot(x, w, dims=([0], [0])) + b,
        W,
        B,
        randn(3, 6, 6),
        None,
    ),
    "tensordot over both": (lambda x, w, b: torch.tensordot(x, w, dims=2) + b, W, B, randn(3, 6, 6), None),
    "bmm": (lambda x, w, b: torch.bmm(x, w) + b, randn(1, 2, 6, 6), B, randn(3, 2, 4, 6), None),
    "product alone": (lambda x, w, b: x @ w, W, B, X, None),
}


@pytest.mark.parametrize(("row", "w", "b", "x", "why"), KEPT.values(), ids=KEPT)
def test_kept(row, w, b, x, why, example):
    assert_kept("matmul_add", Written(row, w=w, b=b), [x], why=why, example=example)


def test_a_product_that_is_read_for_its_shape(example):
    """With an example its shape is so many sizes."""
    why = f"matmul is read by {'size_1' if example else 'getattr_1'} as well"
    assert_kept("matmul_add", Written(_read_by_shape, w=W, b=B), [X], why=why, example=example)


def test_weights_of_unknown_shape():
    why = "weight is an argument of unknown shape; example inputs would tell"
    assert_kept("matmul_add", ADD, [X, W, B], why=why, example=False)


def test_two_biases_fuse_once(example):
    model = Written(lambda x, w, b: x @ w + b + b, w=W, b=B)
    report = assert_fuses("matmul_add", model, [X], gone=["matmul"], new=["add", "linear"], example=example)
    assert [e.reason for e in report.kept] == ["the projection has a bias already"]


def test_exact_numerics(example):
    why = "numerics='exact' forbids rounding at other places"
    assert_kept("matmul_add", Written(ADD, w=W, b=B), [X], why=why, example=example, numerics="exact")


def test_excluded(example):
    why = "excluded by Options.exclude"
    assert_kept("matmul_add", Written(ADD, w=W, b=B), [X], why=why, example=example, exclude="matmul_add")


def test_bias_that_needs_an_argument_first(example):
    # the bias is computed after the product; the linear takes the place of the addition, where both are there
    def row(x, w, b):
        return torch.add(x @ w, torch.relu(b))

    assert_fuses("matmul_add", Written(row, w=W, b=B), [X], gone=["matmul", "add"], new=["linear"], example=example)


def test_nan_and_infinity_stay_where_they_are(example):
    w, b, x = W.clone(), B.clone(), X.clone()
    w[1, 2], b[3], x[0, 0], x[2, 3] = float("inf"), float("-inf"), float("nan"), float("inf")
    assert_fuses("matmul_add", Written(ADD, w=w, b=b), [x], new=["linear"], example=example)


def test_beta_zero_drops_a_bias_of_nan(example):
    def row(x, w, b):
        return torch.addmm(b, x, w, beta=0)

    model = Written(row, w=W, b=torch.full((6,), float("nan")))
    assert_fuses("matmul_add", model, [X], gone=["addmm"], new=["linear"], example=example)


def test_alpha_of_zero_keeps_the_nan_of_the_product(example):
    model = Written(lambda x, w, b: torch.relu(torch.add(b, torch.mm(x, w), alpha=0)), w=randn(1, 6, 6), b=randn(2, 6))
    why = "alpha=0 would leave the product out, its NaN and inf with it"
    assert_kept("matmul_add", model, [randn(3, 4, 6)], why=why, example=example)
