"""The rules for sizes: what they say over the sizes of the argument is what torch returns, at other sizes too."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from fxfuse.capture import shapes, terms
from fxfuse.capture.assumed import Assumed
from fxfuse.capture.sizes import Sizes
from fxfuse.capture.values import Values
from fxfuse.facts import Fact
from tests.models.answers import right

GIVEN, OTHERS = (2, 6, 8), ((3, 4, 8), (1, 1, 8), (5, 7, 8))

CALLS: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: F.gelu((x + 1) * x.sigmoid()).pow(2) / 3,
    "in place": lambda x: (x * 2).add_(x).clamp_(0),
    "broadcast": lambda x: x[:, :1] + x[:1] * x.mean(-1, keepdim=True),
    "broadcast of ranks": lambda x: x[0] + x,
    "same": lambda x: F.softmax(F.dropout(x.contiguous().float(), 0.0, False), -1).cumsum(1),
    "transposed": lambda x: x.transpose(0, 1).permute(2, 0, 1).swapaxes(-1, 0),
    "view": lambda x: x.view(x.size(0), x.size(1), 2, -1),
    "view of one": lambda x: x.reshape(-1, 4),
    "view of all": lambda x: torch.reshape(x, (-1,)),
    "view apart": lambda x: x.view(-1, x.size(1), 8),
    "flatten": lambda x: x.flatten(1),
    "flatten the first": lambda x: torch.flatten(x, 0, 1),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "unsqueezed": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "squeezed": lambda x: x.sum(1, keepdim=True).squeeze(1),
    "expanded": lambda x: x[:, None].expand(-1, 3, -1, x.size(2)),
    "repeated": lambda x: x.repeat(2, 1, 1, x.size(1)),
    "interleaved": lambda x: x.repeat_interleave(3, dim=1),
    "reduced": lambda x: x.mean((0, 2)) + x.amax(dim=2).sum(0),
    "largest": lambda x: x.max(-1)[0].min(dim=1, keepdim=True)[1],
    "largest few": lambda x: x.topk(3, dim=-1)[0] + torch.topk(x, 3)[1],
    "sorted": lambda x: x.sort(1)[0] + torch.argsort(x),
    "larger": lambda x: torch.max(x, x.flip(0)),
    "chunks": lambda x: x.new_zeros(x.size(1), 8).chunk(2, dim=-1)[1],
    "split": lambda x: x.new_zeros(x.size(1), 8).split(3, dim=-1)[2],
    "sections": lambda x: torch.split(x, [2, 6], -1)[1],
    "unbound": lambda x: x.unbind(0)[0],
    "sliced": lambda x: x[..., 1:-1, ::2][:, None, :5],
    "indexed": lambda x: x[torch.argmax(x, 0) % x.size(0)],
    "indexed in the middle": lambda x: x[:, torch.argmax(x, -1) % x.size(1), None],
    "indexed by two": lambda x: x[torch.argmax(x, 0)[:, :1] % x.size(0), torch.argmax(x, 1)[0] % x.size(1)],
    "indexed apart": lambda x: x[torch.argmax(x, 0) % x.size(0), :, torch.argmax(x, 0)],
    "indexed by one as well": lambda x: x[:, None, x.size(0) - x.size(0), torch.argmax(x, 0)],
    "a number, then indices": lambda x: x[0, :, x[0, 0, :3].long() * 0],
    "indices, then a number": lambda x: x[:, None][:, x[0, 0, :3].long() * 0, :, 0],
    "a number between indices": lambda x: x[:, None][x[0, 0, :3].long() * 0, :, 0, x[0, 0, :3].long() * 0],
    "indexed by a size": lambda x: x[..., x.size(0) - x.size(0), : x.size(1)],
    "unfolded": lambda x: F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 2).unfold(2, 8, 8),
    "narrowed": lambda x: x.narrow(2, 1, 3).select(1, 0),
    "stacked": lambda x: torch.stack([x, x], dim=-2),
    "joined": lambda x: torch.cat([x, x[:, :1], x], dim=1),
    "gathered": lambda x: x.gather(1, torch.argmax(x, 1, keepdim=True)),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "bmm": lambda x: torch.bmm(x, x.mT),
    "einsum": lambda x: torch.einsum("b i d, b j d -> b i j", x, x),
    "einsum of dots": lambda x: torch.einsum("...qd, ...kd -> ...qk", x.unflatten(-1, (2, 4)), x.unflatten(-1, (2, 4))),
    "einsum of more dots": lambda x: torch.einsum("...d, k...d -> k...", x[0], x[:, None]),
    "gated": lambda x: F.glu(x) + F.glu(x.repeat(1, 2, 1)[..., :4], dim=1),
    "smaller than a number": lambda x: torch.min(x, x.sum()),
    "sliced by nothing": lambda x: x[0:, ::1, 0:],
    "attention": lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1, :4]),
    "padded": lambda x: F.pad(x, (1, 2, 0, 3)),
    "arange": lambda x: torch.arange(x.size(1)) + torch.arange(1, x.size(1) + 1),
    "made": lambda x: x.new_zeros(x.size(1), 3) + x.new_full((x.size(1), 1), 2.0),
    "made by name": lambda x: x.new_ones(size=(x.size(1), 3)),
    "conv": lambda x: F.conv1d(x.mT, x.new_ones(4, 8, 3), stride=2, padding=2),
    "conv of patches": lambda x: F.conv2d(x[:, None].repeat(1, 1, 4, 1), x.new_ones(5, 1, 4, 4), None, 4),
    "conv, dilated": lambda x: F.conv2d(x[:, None], x.new_ones(5, 1, 2, 3), None, (1, 2), (1, 2), (2, 1)),
    "conv, same": lambda x: F.conv1d(x.mT, x.new_ones(4, 8, 5), padding="same", dilation=2),
    "conv, valid": lambda x: F.conv1d(x, x.new_ones(4, x.size(1), 3), padding="valid"),
    "conv of one": lambda x: F.conv1d(x[0].mT, x.new_ones(4, 8, 1)),
    "conv, transposed": lambda x: F.conv_transpose1d(x.mT, x.new_ones(8, 3, 4), None, 3, 1, 2, 2, 2),
    "max pool": lambda x: F.max_pool2d(x[:, None], (1, 3), 2, (0, 1)),
    "average pool": lambda x: F.avg_pool1d(x, 3, padding=1),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (None, 3)),
    "resampled": lambda x: F.interpolate(x[:, None], scale_factor=(2, 1.3)),
    "resampled to a size": lambda x: F.interpolate(x, size=x.size(1), mode="linear"),
    "shuffled": lambda x: F.pixel_shuffle(x.view(1, 8, -1, 1), 2),
    "made alike": lambda x: torch.zeros_like(x.float()) * torch.full((x.size(1), 1), 1.0),
}


def known(call: Callable[[Any], Any], given: torch.Tensor) -> Any:
    graph = fx.Tracer().trace(call)
    sizes = Sizes(Values(nn.Module(), {}, {"x": Fact.of(given)}), Assumed())
    for node in list(graph.nodes)[:-1]:
        sizes.note(node)
    return sizes.known[graph.output_node().args[0]]


@pytest.mark.parametrize("name", CALLS)
def test_a_rule_says_what_torch_returns(name):
    found = known(CALLS[name], torch.randn(GIVEN))
    assert None not in found
    for shape in (GIVEN, *OTHERS):
        scope = {**terms.SCOPE, f"{terms.SHAPE}x": torch.Size(shape)}
        assert [eval(term.text, scope) for term in found] == list(CALLS[name](torch.randn(shape)).shape)


MODULES: dict[str, tuple[nn.Module, Callable[[Any], Any]]] = {
    "linear": (
        nn.Linear(8, 3),
        lambda m: (setattr(m, "weight", nn.Parameter(torch.ones(5, 8))), setattr(m, "bias", None)),
    ),
    "conv": (nn.Conv1d(6, 3, 2, padding=1), lambda m: setattr(m, "stride", (2,))),
    "pool": (nn.MaxPool1d(3), lambda m: setattr(m, "stride", 1)),
    "resampling": (nn.Upsample(scale_factor=2.0), lambda m: setattr(m, "scale_factor", 3.0)),
    "adaptive pool": (nn.AdaptiveAvgPool1d(4), lambda m: setattr(m, "output_size", 2)),
    "gated": (nn.GLU(1), lambda m: setattr(m, "dim", 2)),
    "relu6": (nn.ReLU6(), None),
    "batch norm": (nn.BatchNorm1d(6), None),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_what_their_sizes_follow_from(name):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.fc = MODULES[name][0], nn.Linear(1, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.part(x)
            return F.relu(self.fc(y.sum(-1, keepdim=True))) * (2 if y.shape[-1] > 3 else 3)

    model = copy.deepcopy(Model()).eval()
    given = torch.randn(GIVEN)
    optimized = fxfuse.optimize(model, given, tune="off")
    change = MODULES[name][1]
    with torch.no_grad():
        for x in (given, torch.randn(3, 6, 8)):
            assert right(optimized(x), model, x)
        assert (fxfuse.report(optimized).calls[""].fused, fxfuse.report(optimized).calls[""].fallback) == (2, 0)
        if change is not None:
            for m in (model, optimized):
                change(m.part)
            assert right(optimized(given), model, given)
            assert fxfuse.report(optimized).calls[""].fallback == 1


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "no rule": lambda x: F.unfold(x, 2),
    "by value": lambda x: x[x > 0],
    "up to what is its size here": lambda x: x[:, : F.unfold(x[:, None], 3).size(-1) // 4],
    "pieces of a size": lambda x: x.chunk(2, dim=1)[0],
    "a last window": lambda x: F.max_pool1d(x, 3, ceil_mode=True),
    "another dtype": lambda x: x.view(torch.int16),
    "times a tensor": lambda x: x.repeat_interleave(torch.tensor([1, 2]), dim=0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_rule_tells(name):
    try:
        found = known(UNKNOWN[name], torch.randn(GIVEN))
    except KeyError:  # not even its value
        return
    assert None in found


def test_a_rule_that_is_wrong_in_the_example_tells_nothing(monkeypatch):
    monkeypatch.setitem(shapes._RULES, "transpose", lambda input, *_: input)
    assert known(lambda x: x.transpose(0, 1), torch.randn(GIVEN)) == (None,) * 3


def test_terms():
    a, b = terms.size("x", 0, 6), terms.size("x", 1, 4)
    six = terms.product([a, b, terms.constant(6)])
    assert terms.quotient(six, terms.product([b, terms.constant(2)])) == terms.product([a, terms.constant(3)])
    assert terms.quotient(a, a) == terms.constant(1)
    assert terms.apply(math.sqrt, b).text == "fx_math.sqrt(fx_shape_x[1])"
    assert terms.apply(operator.add, a, None) is None
    assert terms.apply(print, a) is None
    assert terms.broadcast(terms.constant(1), b) == b
    assert terms.quotient(a, terms.constant(1)) == a
    assert terms.apply(operator.add, a, terms.constant(0)) == terms.apply(operator.sub, a, terms.constant(0)) == a
    both = terms.broadcast(a, b)
    assert terms.broadcast(both, a) == terms.broadcast(b, both) == terms.broadcast(both, both) == both
    assert terms.apply(operator.eq, both, terms.broadcast(both, b)) == terms.constant(True)
    assert terms.apply(operator.gt, both, both) == terms.constant(False)
    deep = a
    while deep is not None and len(deep.text) < 2000:
        deep = terms.apply(operator.add, deep, b)
    assert deep is None
