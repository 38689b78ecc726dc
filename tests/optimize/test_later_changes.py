"""What people change after optimize() takes effect: each of these was once answered as if nothing had changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from tests.conftest import Written, randn

X = randn(0, 3, 4, 8)


def optimized(model, example):
    return fxfuse.optimize(model, (X,)) if example else fxfuse.optimize(model)


def same_after(model, example, change, why):
    """The same change to a model and to its optimized copy, then equal answers, and the ledger's reason."""
    ours = optimized(model.eval(), example)
    with torch.no_grad():
        ours(X)
        assert fxfuse.report(ours).calls[""].fused == 1
        change(ours)
        change(model)
        torch.testing.assert_close(ours(X), model(X), rtol=0, atol=0)
    assert list(fxfuse.report(ours).calls[""].reasons) == [why]


class Loop(nn.Module):
    def __init__(self, container):
        super().__init__()
        self.layers = container

    def forward(self, x):
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = torch.relu(layer(x))
        return x


def test_a_module_appended_to_a_sequential(example):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    same_after(model, example, lambda m: m.append(nn.Tanh()), "container .: expected 2 modules, found 3")


@pytest.mark.parametrize(
    ("container", "add"),
    [
        (lambda: nn.ModuleList([nn.Linear(8, 8)]), lambda m: m.layers.append(nn.Identity())),
        (lambda: nn.ModuleDict({"a": nn.Linear(8, 8)}), lambda m: m.layers.update({"b": nn.Identity()})),
    ],
    ids=["ModuleList", "ModuleDict"],
)
def test_a_module_added_to_a_container_that_is_iterated(container, add, example):
    same_after(Loop(container()), example, add, "container layers: expected 1 modules, found 2")


@pytest.mark.parametrize(
    ("act", "name", "value"),
    [
        (lambda: nn.LeakyReLU(0.1), "negative_slope", 0.9),
        (nn.GELU, "approximate", "tanh"),
        (nn.ELU, "alpha", 3.0),
        (nn.Softplus, "beta", 4.0),
    ],
    ids=["negative_slope", "approximate", "alpha", "beta"],
)
def test_an_attribute_of_an_activation_module(act, name, value, example):
    model = nn.Sequential(nn.Linear(8, 8), act())
    why = f"attribute 1.{name}: expected {getattr(model[1], name)!r}, found {value!r}"
    same_after(model, example, lambda m: setattr(m[1], name, value), why)


def test_a_bias_of_another_dtype(example):
    model = Written(lambda x, w, b: torch.relu(x @ w + b), w=randn(1, 8, 8), b=randn(2, 8))
    wider = nn.Parameter(randn(3, 8).double())
    same_after(model, example, lambda m: setattr(m, "b", wider), "b is torch.float64 beside torch.float32")


def test_a_weight_of_another_shape(example):
    model = Written(lambda x, w, b: torch.relu(x @ w + b), w=randn(1, 8, 8), b=randn(2, 8))
    stacked = nn.Parameter(randn(3, 3, 8, 8))
    why = "w: expected shape (8, 8), found (3, 8, 8)"
    same_after(model, example, lambda m: setattr(m, "w", stacked), why)


def test_the_example_run_leaves_the_model_as_it_was():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.b = nn.Parameter(torch.ones(8))

        def forward(self, x):
            self.b.data = self.b.data * 2
            return F.relu(self.fc(self.norm(x))) + self.b

    model = Counts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fxfuse.optimize(model, (randn(0, 4, 8),))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
