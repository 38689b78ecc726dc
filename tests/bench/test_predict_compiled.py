import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse.bench import models
from fxfuse.bench.predict import predict
from fxfuse.bench.predict_compiled import NotPredicted, compiled
from fxfuse.facts import Fact

X = torch.randn(16, 32)
OUT = 4 * 16 * 64
"""Bytes of the hidden tensor in float32."""


def of(model):
    gm = fx.symbolic_trace(model.eval())
    return compiled(gm.graph, predict(gm, {"x": Fact.of(X), "input": Fact.of(X)}))


class Two(nn.Module):
    def __init__(self, row, bias=True):
        super().__init__()
        self.row, self.a, self.b = row, nn.Linear(32, 64, bias=bias), nn.Linear(32, 64)

    def forward(self, x):
        return self.row(self.a(x), self.b(x))


MERGED = {
    # bytes of each pointwise kernel: what comes from outside once, and what is read outside
    "GeGLU": (models.GegluMLP(32, 64), 3, [3 * OUT]),
    "gelu alone": (models.FeedForward(32, 64), 2, [2 * OUT]),
    "gelu by hand reads its input once": (models.GPT2MLP(32, 64), 2, [2 * OUT]),
    "through views": (Two(lambda a, b: F.relu(a).view(4, 4, 64) * b.view(4, 4, 64)), 2, [3 * OUT]),
    "what is returned, too, is written": (Two(lambda a, b: ((h := F.relu(a)), h * b)), 2, [4 * OUT]),
    "two chains": (Two(lambda a, b: (F.relu(a), F.gelu(b))), 2, [2 * OUT, 2 * OUT]),
    "a sum with a product that has its bias": (Two(lambda a, b: a + b), 2, [3 * OUT]),
    "no pointwise kernel": (nn.Linear(32, 64), 1, []),
}


@pytest.mark.parametrize("name", MERGED)
def test_pointwise_kernels_that_feed_each_other_are_one(name):
    model, products, moved = MERGED[name]
    works = of(model)
    assert sum(work.kernels["gemm"] for work in works) == products
    assert [work.moved for work in works if work.kernels["elementwise"]] == moved
    assert all(work.kernels.total() == 1 and not work.host for work in works)


class Row(nn.Module):
    def __init__(self, row):
        super().__init__()
        self.row, self.linear = row, nn.Linear(32, 64)

    def forward(self, x):
        return self.row(self.linear(x))


REFUSED = {
    "a reduction": (Row(lambda h: h.sum(-1)), "sum_1: what torch.compile does with a reduce kernel"),
    "a copy": (Row(lambda h: torch.cat((h, h))), "cat: what torch.compile does with a copy kernel"),
    "an addition to a bare product": (
        Two(lambda a, b: a + b, bias=False),
        "add: torch.compile may compute this addition with the product",
    ),
    "two chains that read one tensor": (
        Row(lambda h: (F.relu(h), F.gelu(h))),
        "linear: torch.compile may join the pointwise chains that read it",
    ),
    "a scan": (Row(lambda h: h.cumsum(-1)), "aten::cumsum: how many kernels it takes is not known"),
    "what hangs on values": (Row(lambda h: h[h > 0]), "getitem hangs on values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_predicted_is_said(name):
    model, reason = REFUSED[name]
    with pytest.raises(NotPredicted) as refusal:
        of(model)
    assert str(refusal.value) == reason
