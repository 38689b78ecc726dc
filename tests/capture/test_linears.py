"""Why each Linear of a model is in no fused operator, as the report tells it."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from tests.conftest import Written

WIDTH = 6


class Attention(nn.Module):
    """Not to be traced: it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.inner = nn.Linear(WIDTH, WIDTH), Written(_gelu_of, up=nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.q(x))
        return y if y.sum() < 1e9 else x


def _gelu_of(x, up):
    return F.gelu(up(x))


def linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width)


def why(row, options=None, *, example=True, **parts) -> dict[str, str]:
    model = Written(row, **parts).eval()
    given = torch.randn(2, 3, WIDTH) if example else None
    return fxfuse.report(fxfuse.optimize(model, given, tune="off", **(options or {}))).linears


def test_fused_ones_have_no_reason():
    assert why(_gelu_of, up=linear()) == {"up": ""}
    assert why(_gelu_of, example=False, up=linear()) == {"up": ""}
    gated = why(lambda x, gate, up: F.silu(gate(x)) * up(x), gate=linear(), up=linear())
    assert gated == {"gate": "", "up": ""}
    assert why(lambda x, up: F.gelu(F.linear(x, up.weight, up.bias)), up=linear()) == {"up": ""}
    assert why(lambda x, up: F.gelu(x @ up.weight.t() + up.bias), up=linear()) == {"up": ""}


def test_what_follows_is_named():
    assert why(lambda x, fc: x + fc(x), fc=linear()) == {"fc": "no pass fuses it with the add that follows"}
    assert why(lambda x, fc: fc(x).softmax(-1), fc=linear()) == {"fc": "no pass fuses it with the softmax that follows"}
    both = why(lambda x, fc: (h := fc(x)).softmax(-1) + h, fc=linear())
    assert both == {"fc": "no pass fuses it with the softmax and add that follows"}
    assert why(lambda x, fc: fc(x), fc=linear()) == {"fc": "nothing follows it in its region"}
    assert why(lambda x, fc: {"y": fc(x)}, fc=linear()) == {"fc": "nothing follows it in its region"}


def test_a_refusal_is_the_reason():
    twice = why(lambda x, fc: F.gelu(h := fc(x)) + h.sum(), fc=linear())
    assert twice == {"fc": "linear_act: fc is read by sum_1 as well"}
    gate = why(lambda x, gate, up: (g := F.silu(gate(x))) * up(x) + g.sum(), gate=linear(), up=linear())
    assert gate == {"gate": "", "up": "gated_linear: silu is read by sum_1 as well"}
    halves = why(lambda x, fc: F.gelu((h := fc(x)).chunk(2, -1)[0]) * h.sum(), fc=linear(8))
    assert "no pass fuses it with the" in halves["fc"]
    exact = why(_gelu_of, options={"numerics": "exact"}, up=linear())
    assert exact == {"up": "linear_act: numerics='exact' forbids rounding at other places"}


def test_what_lies_in_no_region_is_told_by_what_is_around_it():
    found = why(lambda x, attention, fc: attention(x) + fc(x), attention=Attention(), fc=linear())
    q = found.pop("attention.q")
    assert q.startswith("in attention (Attention): decides by a value or size that is not known before the call")
    assert found == {
        "attention.inner.up": "",
        "fc": "no pass fuses it with the add that follows",
    }
    excluded = why(lambda x, up, mlp: mlp(up(x)), {"exclude": "mlp"}, up=linear(), mlp=Written(_gelu_of, up=linear()))
    assert excluded == {
        "up": "no pass fuses it with the mlp that follows",
        "mlp.up": "in mlp (Written): excluded by Options.exclude",
    }
    for name in ("up", "Linear"):
        assert why(_gelu_of, {"exclude": name}, up=linear()) == {"up": "it is left alone, and is called as a module"}
    served = why(lambda x, mha: mha(x, x, x)[0], mha=nn.MultiheadAttention(WIDTH, 2, batch_first=True))
    assert served == {
        "mha.out_proj": "in mha (MultiheadAttention): torch's own fused inference path serves it",
    }


def test_what_is_not_called():
    assert why(lambda x, fc, other: F.gelu(fc(x)), fc=linear(), other=linear()) == {
        "fc": "",
        "other": "the forward of its region does not call it",
    }


def test_a_linear_that_is_more_than_its_product():
    own = linear()
    own.forward = functools.partial(nn.Linear.forward, own)
    found = why(lambda x, fc, other: F.gelu(fc(x)) + F.gelu(other(x)), fc=own, other=linear())
    assert found == {"fc": "it has a forward of its own, and is called as a module", "other": ""}
    hooked = linear()
    hooked.register_forward_hook(lambda module, args, y: y + 1)
    found = why(lambda x, fc, other: F.gelu(fc(x)) + F.gelu(other(x)), fc=hooked, other=linear())
    assert found == {"fc": "it has a forward hook, and is called as a module", "other": ""}


def test_a_shared_one_is_told_of_once():
    fc = linear()
    assert why(lambda x, a, b: F.gelu(a(x)) + b(x * 2).sum(), a=fc, b=fc) == {"a": ""}


def test_a_graph_module():
    model = nn.Sequential(linear(), nn.GELU(), linear()).eval()
    _, report = fxfuse.rewrite(fx.symbolic_trace(model))
    assert report.linears == {"0": "", "2": "nothing follows it in its region"}


def test_a_region_traced_again_is_told_of_anew():
    model = Written(_gelu_of, up=linear()).eval()
    optimized = fxfuse.optimize(model, torch.randn(2, WIDTH), tune="off", inplace=True)
    assert fxfuse.report(optimized).linears == {"up": ""}
    optimized.up.register_forward_hook(lambda module, args, y: y + 1)
    with torch.no_grad():
        for _ in range(5):
            optimized(torch.randn(2, WIDTH))
    assert fxfuse.report(optimized).linears == {"up": "it has a forward hook, and is called as a module"}
