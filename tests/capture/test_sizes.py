"""What a forward decides by sizes: taken as in the example, checked as what it is, refused where nothing tells it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from tests.models.answers import right

WIDTH, HEADS = 128, 4
GIVEN = (2, 6, WIDTH)


class Model(nn.Module):
    """``forward(x)`` is an MLP of ``run(self, x)``."""

    run: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(type(self).run(self, x))))


def model_of(run: Callable[..., Any]) -> Model:
    torch.manual_seed(0)
    return type("Model", (Model,), {"run": staticmethod(run)})().eval()


def attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    shape = (*x.shape[:-1], -1, WIDTH // HEADS)
    q, k, v = (x.view(shape).transpose(1, 2) for _ in range(3))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=bool(q.shape[2] > 1))
    return y.transpose(1, 2).reshape(*x.shape[:-1], -1)


def unpacked(m: Any, x: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.size()
    assert x.dim() == x.ndim == len(x.shape) == 3
    y = torch.reshape(x, (batch, length, HEADS, -1)).flatten(2)
    return y + m.table[:length] + torch.zeros((batch, length, 1)) + torch.arange(length)[:, None]


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    for i in range(x.shape[1]):
        x = x + i
    return x


def split_in_pieces(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([2 * piece for piece in x.split(4, dim=1)], dim=1)


def squeezed(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.mean(1, keepdim=True).squeeze(1)
    return x + y.view(y.shape[0], 1, -1)


# Every size of another call that must run fused, and of one that must not, with the reason.
Case = tuple[Callable[..., Any], list[tuple[int, ...]], dict[tuple[int, ...], str]]
DECIDED: dict[str, Case] = {
    "attention": (
        attention,
        [(1, 6, WIDTH), (3, 6, WIDTH), (2, 9, WIDTH)],
        {(2, 1, WIDTH): "x.shape[1] > 1: expected True, found False"},
    ),
    "unpacked": (unpacked, [(1, 6, WIDTH), (5, 2, WIDTH)], {(6, WIDTH): "argument x: expected 3 dimensions, found 2"}),
    "range": (counted, [(5, 6, WIDTH)], {(2, 7, WIDTH): "x.shape[1]: expected 6, found 7"}),
    "pieces": (split_in_pieces, [(5, 6, WIDTH)], {(2, 9, WIDTH): "x.shape[1]: expected 6, found 9"}),
    "tensor of a size": (lambda m, x: x * torch.tensor(x.shape[1]), [(3, 9, WIDTH)], {}),
    "full of a size": (lambda m, x: x + torch.full((x.size(0), 1, 1), 0.5), [(3, 9, WIDTH)], {}),
    "root of a size": (lambda m, x: x / math.sqrt(x.shape[1]), [(3, 9, WIDTH)], {}),
    "squeezed": (squeezed, [(1, 6, WIDTH), (3, 1, WIDTH)], {}),
    "arithmetic": (
        lambda m, x: x * 2 if x.shape[0] * x.shape[1] % 4 == 0 else x,
        [(1, 8, WIDTH), (4, 3, WIDTH)],
        {(1, 3, WIDTH): "((x.shape[0] * x.shape[1]) % 4) == 0: expected True, found another"},
    ),
    "by another size": (
        lambda m, x: x * 2 if x.shape[0] % x.shape[1] == 2 else x,
        [(8, 6, WIDTH)],
        {(2, 0, WIDTH): "(x.shape[0] % x.shape[1]) == 2: expected True, found another"},
    ),
    "of two shapes": (
        lambda m, x: x * 2 if x.shape[:2] == x.transpose(0, 1).shape[:2] else x,
        [(4, 5, WIDTH)],
        {(3, 3, WIDTH): "x.shape[0] == x.shape[1]: expected False, found True"},
    ),
    "of a product": (
        lambda m, x: x * 2 if m.up(x).unsqueeze(1).expand(-1, 3, -1, -1).flatten(0, 1).shape[0] > 5 else x,
        [(3, 9, WIDTH), (2, 1, WIDTH)],
        {(1, 6, WIDTH): "(x.shape[0] * 3) > 5: expected True, found False"},
    ),
    "of a slice": (
        lambda m, x: x * 2 if x[:, 1:-1].size(1) >= 2 else x,
        [(3, 4, WIDTH)],
        {(2, 3, WIDTH): "slice_length(x.shape[1], 1, -1, None) >= 2: expected True, found False"},
    ),
    "truth of a size": (lambda m, x: x if x.numel() else x * 2, [(3, 9, WIDTH)], {}),
    "float": (lambda m, x: x * float(x.shape[1]), [(5, 6, WIDTH)], {(2, 7, WIDTH): "x.shape[1]: expected 6, found 7"}),
    "limits of a dtype": (lambda m, x: x.clamp(min=torch.finfo((x + 1).dtype).min), [(3, 9, WIDTH)], {}),
    "int is int": (lambda m, x: x if isinstance(x.shape[0], int) else x * 2, [(3, 9, WIDTH)], {}),
}


@pytest.mark.parametrize("name", DECIDED)
def test_decisions_are_checked_as_what_they_are(name):
    run, alike, others = DECIDED[name]
    model = model_of(run)
    optimized = fxfuse.optimize(model, torch.randn(GIVEN), tune="off")
    assert "" in fxfuse.graphs(optimized), fxfuse.report(optimized).uncaptured
    calls = fxfuse.report(optimized).calls[""]
    with torch.no_grad():
        for shape in (GIVEN, *alike):
            given = torch.randn(shape)
            assert right(optimized(given), model, given)
        assert (calls.fused, calls.fallback) == (1 + len(alike), 0), calls.reasons
        for shape in others:
            given = torch.randn(shape)
            try:
                expected = model(given)
            except Exception as error:  # then it raises the same
                with pytest.raises(type(error)):
                    optimized(given)
            else:
                assert torch.equal(optimized(given), expected)
    assert calls.fallback == len(others)
    for reason, expected_reason in zip(calls.reasons, others.values(), strict=True):
        assert reason.startswith(expected_reason)
        assert "dimensions" in reason or "(by test_sizes.py:" in reason


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "value": (lambda m, x: x if x.sum() > 0 else x * 2, "decides by a value or size"),
    "size by value": (lambda m, x: x if x[x > 0].shape[0] > 3 else x * 2, "decides by a value or size"),
    "item": (lambda m, x: x * int(x.max().item() > 0), ""),
    "layout": (lambda m, x: x if x.is_contiguous() else x * 2, "decides by a value or size"),
    "no rule": (lambda m, x: x if F.unfold(x[None], 2).shape[-1] > 3 else x * 2, "decides by a value or size"),
    "in place": (lambda m, x: x if x.clone().unsqueeze_(0).shape[1] > 1 else x * 2, "decides by a value or size"),
    "key": (lambda m, x: x * {2: 3.0}.get(x.shape[0], 1.0), "looks something up by a number"),
    "all that is one": (lambda m, x: x if x.squeeze().shape[0] > 1 else x * 2, "decides by a value or size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_guessed(name):
    run, why = REFUSED[name]
    model = model_of(run)
    optimized = fxfuse.optimize(model, torch.randn(GIVEN), tune="off")
    assert "" not in fxfuse.graphs(optimized)
    assert next(u.reason for u in fxfuse.report(optimized).uncaptured if not u.path).startswith(why)
    with torch.no_grad():
        for given in (torch.ones(GIVEN), -torch.ones(3, 4, WIDTH)):
            assert torch.equal(optimized(given), model(given))


def test_without_an_example_nothing_is_decided():
    optimized = fxfuse.optimize(model_of(attention))
    assert "" not in fxfuse.graphs(optimized)


def test_a_function_decides_by_sizes():
    weight = torch.randn(WIDTH, WIDTH)

    def function(x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        return F.gelu(F.linear(x if length > 3 else x * 2, weight)).view(batch, -1)

    optimized = fxfuse.optimize(function, torch.randn(GIVEN), tune="off")
    with torch.no_grad():
        for shape in (GIVEN, (3, 4, WIDTH), (2, 3, WIDTH)):
            given = torch.randn(shape)
            assert right(optimized(given), function, given)
    calls = fxfuse.report(optimized).calls[""]
    assert (calls.fused, calls.fallback) == (2, 1)


def test_a_weight_of_another_shape_is_noticed():
    """Its shape was taken from it, and nothing else: the graph does not read it."""
    model = model_of(lambda m, x: x * 2 if m.table.shape[0] > 8 else x)
    optimized = fxfuse.optimize(model, torch.randn(GIVEN), tune="off")
    model.table = optimized.table = torch.randn(4, WIDTH)
    given = torch.randn(GIVEN)
    with torch.no_grad():
        assert torch.equal(optimized(given), model(given))
    reasons = fxfuse.report(optimized).calls[""].reasons
    assert list(reasons) == [f"table: expected shape (16, {WIDTH}), found torch.Size([4, {WIDTH}])"]


def test_elements_of_a_tuple_are_arguments():
    class Rotating(Model):
        def forward(self, x: torch.Tensor, by: Any = None) -> torch.Tensor:
            cos, sin, scale = by
            return self.down(F.gelu(self.up(x * cos + x.flip(-1) * sin * scale)))

    torch.manual_seed(0)
    model = Rotating().eval()
    by = (torch.randn(6, WIDTH), torch.randn(6, WIDTH), 2.0)
    optimized = fxfuse.optimize(model, torch.randn(GIVEN), {"by": by}, tune="off")
    x, calls = torch.randn(3, 6, WIDTH), fxfuse.report(optimized).calls[""]
    with torch.no_grad():
        assert right(optimized(x, by), model, x, by)
        assert (calls.fused, calls.fallback) == (1, 0)
        for other in ((*by[:2], 3.0), [*by], (by[0], 1.0, 2.0)):
            assert torch.equal(optimized(x, other), model(x, other))
    assert list(calls.reasons) == [
        "argument by[2]: expected 2.0, found 3.0",
        "argument by: expected a tuple of 3, found a list",
        "argument by[1]: expected a plain tensor, found 1.0",
    ]


def test_what_is_left_behind():
    """Nothing of torch's stays replaced, whether a trace succeeds or not."""
    before = {name: getattr(torch, name) for name in ("arange", "finfo", "full", "is_tensor", "tensor", "zeros")}
    for run in (unpacked, REFUSED["key"][0]):
        fxfuse.optimize(model_of(run), torch.randn(GIVEN), tune="off")
    assert all(getattr(torch, name) is function for name, function in before.items())
