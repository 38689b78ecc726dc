"""Copies, replicas and files: none answers with the original's parameters, none needs fxfuse to load."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import fxfuse
from fxfuse.report import Calls
from tests.models.answers import right
from tests.optimize.model import HIDDEN, WIDTH, Stack, assert_answers, calls_of


def test_deepcopy_is_optimized_and_independent(pair, x):
    model, optimized = pair
    copied = copy.deepcopy(optimized)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
        assert not any(a is b for a, b in zip(copied.parameters(), model.parameters(), strict=True))
        twin = copy.deepcopy(model)
        twin.load_state_dict(copied.state_dict())
        assert_answers(copied, twin, x, runs="fused")
        copied.scale = twin.scale = 2.0
        assert_answers(copied, twin, x, runs="fallback")
        assert calls_of(optimized) == Calls()
        assert_answers(optimized, model, x, runs="fused")
    fxfuse.restore(copied)
    assert set(copied.__dict__) == set(model.__dict__)


def test_shallow_copy_answers_with_its_own_parameters(pair, x):
    model, optimized = pair
    copied = copy.copy(optimized)
    copied._modules = dict(optimized._modules)
    copied.up = nn.Linear(WIDTH, HIDDEN)
    twin = copy.copy(model)
    twin._modules = dict(copied._modules)
    with torch.no_grad():
        assert torch.equal(copied(x), twin(x))
        assert_answers(optimized, model, x, runs="fused")
    assert set(copied.__dict__) == set(model.__dict__)


def test_replicas_answer_with_their_own_parameters(x):
    stack = Stack().eval()
    optimized = fxfuse.optimize(stack, x)
    replica = optimized._replicate_for_data_parallel()
    replica.blocks = nn.ModuleList()
    for block in optimized.blocks:
        inner = block._replicate_for_data_parallel()
        for name, child in block._modules.items():
            twin = child._replicate_for_data_parallel()
            for key, parameter in child._parameters.items():
                setattr(twin, key, parameter.detach() * 2)
            setattr(inner, name, twin)
        replica.blocks.append(inner)
    doubled = copy.deepcopy(stack)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
        assert torch.equal(replica(x), doubled(x))
        assert right(optimized(x), stack, x)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_saved_it_is_the_plain_model(pair, x, how):
    model, optimized = pair
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(optimized))
    else:
        file = io.BytesIO()
        torch.save(optimized, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert set(loaded.__dict__) == set(model.__dict__)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
        assert_answers(fxfuse.optimize(loaded), model, x, runs="fused")
        assert_answers(optimized, model, x, runs="fused")


def test_saved_it_loads_without_fxfuse(tmp_path):
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).eval()
    torch.save(fxfuse.optimize(model), tmp_path / "model.pt")
    script = f"""
        import sys
        sys.modules["fxfuse"] = None  # importing it raises
        import torch
        model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        assert model(torch.ones(2, {WIDTH})).shape == (2, {WIDTH})
        assert "forward" not in model.__dict__
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
