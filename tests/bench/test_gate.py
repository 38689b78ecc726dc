"""Models whose answers are hard to compare: the gate judges all that there is, or says why it cannot."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxfuse.bench.gate import Gate, admit
from fxfuse.bench.targets import BadTarget, Target


class Cache:
    """Like those of transformers: no node of pytree, and equal to itself only."""

    def __init__(self, keys):
        self.keys = keys
        self.owner = self


class Cached(nn.Module):
    """Decides by a value, so that it cannot be exported, and the gate is the weaker one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x) if x.sum().item() > 0 else self.linear(-x)
        return y, Cache(y * 2)


class Random(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


class Narrow(nn.Module):
    """Decides by a value, and is for float32 alone."""

    def forward(self, x):
        if x.dtype != torch.float32 or x.sum().item() != x.sum().item():
            raise TypeError("float32 alone")
        return x


def gate(model, *args):
    target = Target("small", model.eval(), args, {})
    with torch.inference_mode():
        eager = model(*args)
    return Gate(target, eager), eager


def test_a_weaker_gate_judges_what_an_unknown_object_holds():
    torch.manual_seed(0)
    found, (y, cache) = gate(Cached(), torch.randn(5, 64))
    assert found.weaker
    assert not found.wrong((y.clone(), Cache(cache.keys.clone())))
    assert "output 2" in found.wrong((y.clone(), Cache(cache.keys * 1.5)))
    assert found.wrong((y.clone(), None))


def test_an_element_that_a_weaker_gate_lets_pass_hides_nothing_after_it():
    torch.manual_seed(0)
    found, (y, cache) = gate(Cached(), torch.randn(5, 64))
    moved = y.clone()
    moved.view(-1)[y.abs().argmin()] *= 1 + 2**-10  # nothing in the norm, and much for the element
    assert not found.wrong((moved, Cache(cache.keys)))
    assert "output 2" in found.wrong((moved, Cache(cache.keys * 1.5)))


def test_a_model_that_answers_differently_each_time_is_no_fault_of_fxfuse():
    target = Target("small", Random().eval(), (torch.randn(16, 16),), {})
    with pytest.raises(BadTarget, match="small: the model answers the same call differently each time"):
        admit(("eager", "fxfuse"), target, lambda _text: None)


def test_a_model_that_cannot_run_in_float64():
    with pytest.raises(BadTarget, match=r"small: in float64, .*, the model raises TypeError: float32 alone"):
        gate(Narrow(), torch.randn(4))


def test_tensors_without_values():
    with pytest.raises(BadTarget, match="small: tensors on the meta device hold no values"):
        gate(nn.Linear(4, 4, device="meta"), torch.empty(2, 4, device="meta"))


def test_what_export_prints_of_a_model_that_it_cannot_trace_is_not_passed_on(capfd):
    found, _ = gate(Cached(), torch.randn(5, 64))
    assert found.weaker
    assert capfd.readouterr() == ("", "")
