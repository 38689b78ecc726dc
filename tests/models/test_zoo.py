"""Every model of the zoo: right answers, nothing about it changed, its MLPs fused, the rest accounted for."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import fxfuse
from tests.models.answers import assert_right
from tests.models.zoo import BATCH, HAS_TRANSFORMERS, ZOO, at_batch

SERVED = "torch's own fused inference path serves it"


class Expected(NamedTuple):
    """What is fused, by rule, with and without an example; how many Linears lie in regions."""

    fused: dict[str, int]
    captured: int = 0


EXPECTED = {
    "hand/sequential": Expected({"linear_act": 1}, 2),
    "hand/swiglu": Expected({"gated_linear": 1}, 3),
    "hand/packed-geglu": Expected({"gated_linear": 1}, 2),
    "hand/gpt-block": Expected({"linear_act": 1}, 4),
    "hand/raw-matmul": Expected({"matmul_add": 2, "linear_act": 1}),
    "hand/lora": Expected({}, 1),
    "hand/recommender": Expected({"linear_act": 4}, 4),
    "torch/lstm-head": Expected({"linear_act": 1}, 1),
    "torch/encoder-layer-relu": Expected({"linear_act": 1}, 2),
    "torch/encoder-layer-gelu-prenorm": Expected({"linear_act": 1}, 2),
    "torch/encoder": Expected({"linear_act": 2}, 4),
    "torch/attention": Expected({}),
    "torch/decoder-layer": Expected({"linear_act": 1}, 2),
    "torch/transformer": Expected({"linear_act": 2}, 4),
    "transformers/gpt2": Expected({"matmul_add": 8, "linear_act": 2}, 1),
    "transformers/bert": Expected({"linear_act": 3}, 14),
    "transformers/llama": Expected({"gated_linear": 2}, 15),
    "transformers/phi3": Expected({"gated_linear": 2}, 9),
    "transformers/t5-gated": Expected({"gated_linear": 4}, 37),
}


def _entries() -> list[object]:
    missing = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
    return [pytest.param(name, marks=missing if name.startswith("transformers/") else ()) for name in ZOO]


def test_every_entry_has_its_expectation():
    assert set(EXPECTED) == set(ZOO)


@pytest.mark.parametrize("with_example", [False, True], ids=["plain", "example"])
@pytest.mark.parametrize("name", _entries())
def test_model(name: str, with_example: bool) -> None:
    model, args, kwargs = ZOO[name]()
    tensors = {key: (value, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    attributes = {path: set(m.__dict__) for path, m in model.named_modules()}

    optimized = fxfuse.optimize(model, args, kwargs) if with_example else fxfuse.optimize(model)

    report = fxfuse.report(optimized)
    assert Counter(e.rule for e in report.fused) == EXPECTED[name].fused, str(report)
    assert (report.coverage.captured, report.coverage.seen) == (EXPECTED[name].captured, _linears(model))
    assert not report.notes
    _assert_accounted_for(model, report)

    after = optimized.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    assert all(after[key] is value and torch.equal(value, before) for key, (value, before) in tensors.items())
    assert {path: set(m.__dict__) for path, m in model.named_modules()} == attributes

    for batch in (BATCH, BATCH + 1):
        more_args, more_kwargs = tree_map(lambda value, batch=batch: at_batch(value, batch), (args, kwargs))
        assert_right(model, optimized, more_args, more_kwargs)
    if EXPECTED[name].fused:
        assert sum(calls.fused for calls in report.calls.values()) > 0
    assert sum(calls.fallback for calls in report.calls.values()) == 0, report.calls


@pytest.mark.parametrize("name", ["torch/encoder", "torch/attention", "torch/transformer"])
def test_attention_stays_torchs_own(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    optimized = fxfuse.optimize(model, args, kwargs)
    served = {u.path for u in fxfuse.report(optimized).uncaptured if u.reason == SERVED}
    assert served >= {path for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention) and path}
    # The fused operator is what still runs: an instance's own forward below it would not be called, and is not there.
    assert not any("forward" in m.__dict__ for p in served for m in optimized.get_submodule(p).modules())


@pytest.mark.parametrize("example", [False, True], ids=["bare", "example"])
def test_masks_and_nested_tensors_of_an_encoder(example: bool) -> None:
    model, (x,), _ = ZOO["torch/encoder"]()
    optimized = fxfuse.optimize(model, (x,) if example else None)
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[0, -2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    with torch.inference_mode():
        for kwargs in ({}, {"mask": causal}, {"mask": causal, "is_causal": True}):
            assert_right(model, optimized, (x,), kwargs)
        # The encoder hands nested tensors on then, and takes them apart at its end; there is no such thing in float64.
        padded = {"src_key_padding_mask": padding}
        torch.testing.assert_close(optimized(x, **padded), model(x, **padded))
    calls = fxfuse.report(optimized).calls["layers.0"]
    assert calls.fused > 0
    assert calls.fallback > 0
    assert set(calls.reasons) == {"argument src_mask: expected None, found a Tensor"}


def test_where_parameters_train_the_plain_path_runs():
    model, args, kwargs = ZOO["hand/gpt-block"]()
    optimized = fxfuse.optimize(model, args, kwargs)
    optimized(*args, **kwargs).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    calls = fxfuse.report(optimized).calls.values()
    assert sum(c.fused for c in calls) == 0
    assert {why for c in calls for why in c.reasons} == {"gradients are needed"}


def _linears(model: nn.Module) -> int:
    return sum(isinstance(m, nn.Linear) for m in model.modules())


def _assert_accounted_for(model: nn.Module, report: fxfuse.report) -> None:
    """Each Linear lies in a region, or below something that the report says is not captured, and why."""
    assert all(u.reason for u in report.uncaptured)
    served = [u.path for u in report.uncaptured if u.reason == SERVED]
    below = sum(
        isinstance(m, nn.Linear) and any(not p or path.startswith(p + ".") for p in served)
        for path, m in model.named_modules()
    )
    assert report.coverage.seen - report.coverage.captured == below
