"""What a Product takes for the kind of the call before. On the CPU: what writes its output stands for the kernel."""

import pytest
import torch
from torch._C._dynamo.guards import _empty_strided_cpu

import fxfuse
from fxfuse import ops
from fxfuse.ops.gpu import product
from fxfuse.ops.gpu.product import Product

N, K = 6, 8
FOUND_OUT = "found out anew"


@pytest.fixture(params=[False, True], ids=["unvouched", "vouched"])
def gated(request, monkeypatch):
    """A gated product that has seen a call of three rows, with biases."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(product, "empty_strided", _empty_strided_cpu)
    monkeypatch.setattr(Product, "_found_out", lambda self, *tensors: FOUND_OUT)
    made = Product("silu", (), gated=True, vouched=request.param)

    def launch(x, rows, w0, w1, bias0, bias1, out):
        out.fill_(rows)
        return True

    made.known = (torch.bfloat16, -1, True, (K, 1), N, K, {rows.bit_length(): launch for rows in (1, 3, 4)})
    return made


def operands(rows=3, n=N, k=K):
    shapes = ((rows, k), (n, k), (n, k), (n,), (n,))
    return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]


def test_the_same_kind_of_call_is_launched(gated):
    for rows in (2, 3, 4, 7):
        y = gated.run(*operands(rows))
        assert y.shape == (rows, N)
        assert torch.equal(y, torch.full_like(y, rows))


@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (3, 1), (2, 2, 1)])
def test_the_answer_has_the_rows_of_x_and_is_dense(gated, shape):
    x, *weights = operands()
    y = gated.run(x.new_zeros((*shape, K)), *weights)
    assert y.shape == (*shape, N)
    assert y.stride() == torch.empty(y.shape).stride()


OTHERS = {
    "more rows": lambda t: operands(rows=8),
    "other columns": lambda t: operands(k=16),
    "x in float16": lambda t: [t[0].half(), *t[1:]],
    "w0 in float16": lambda t: [t[0], t[1].half(), *t[2:]],
    "strided x": lambda t: [torch.zeros(3, 16, dtype=torch.bfloat16)[:, ::2], *t[1:]],
    "transposed w1": lambda t: [*t[:2], torch.zeros(K, N, dtype=torch.bfloat16).t(), *t[3:]],
    "no bias1": lambda t: [*t[:4], None],
    "strided bias0": lambda t: [*t[:3], torch.zeros(2 * N, dtype=torch.bfloat16)[::2], t[4]],
}
UNVOUCHED = {
    "fewer weight rows": lambda t: operands(n=2),
    "another w1": lambda t: [*t[:2], t[2][:2], *t[3:]],
    "w1 in float16": lambda t: [*t[:2], t[2].half(), *t[3:]],
    "bias1 in float32": lambda t: [*t[:4], t[4].float()],
    "a short bias0": lambda t: [*t[:3], t[3][:1], t[4]],
    "a bias1 of two dimensions": lambda t: [*t[:4], t[4][None]],
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_kind_is_found_out_anew(gated, change):
    assert gated.run(*OTHERS[change](operands())) is FOUND_OUT


@pytest.mark.parametrize("change", UNVOUCHED)
def test_what_no_region_asks_is_asked_here(gated, change):
    if gated.vouched:
        pytest.skip("a region asks")
    assert gated.run(*UNVOUCHED[change](operands())) is FOUND_OUT


def test_which_sites_a_region_vouches_for(monkeypatch):
    """Parameters, transposed or not; not what is an argument, or was computed."""
    seen = []
    site = ops.site

    def noted(node, store=None, *, vouched=False):
        if node.target in ops.SITES:
            seen.append(vouched)
        return site(node, store, vouched=vouched)

    monkeypatch.setattr(ops, "site", noted)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.w = torch.nn.Linear(256, 256), torch.nn.Parameter(torch.randn(256, 256))

        def forward(self, x, w):
            x = torch.relu(self.linear(x))
            x = torch.relu(torch.nn.functional.linear(x, w))
            return torch.relu(x @ self.w)

    fxfuse.optimize(Model().eval())
    assert seen[:3] == [True, False, True]
