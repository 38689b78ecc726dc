"""``generate()`` of small decoders: the same tokens as eager, however it searches and whatever cache it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxfuse

transformers = pytest.importorskip("transformers")

VOCABULARY, WIDTH = 64, 32
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **SIZES,
}
PAIR = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 0,
    **SIZES,
}


def _model(family: str, head: str = "ForCausalLM", **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(transformers, f"{family}Config")(**sizes)
        return getattr(transformers, family + head)(config)

    return build


MODELS = {
    "gpt2": _model("GPT2", "LMHeadModel", n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, **SIZES),
    "llama": _model("Llama", **DECODER),
    "qwen2": _model("Qwen2", **DECODER),
    "gemma": _model("Gemma", head_dim=8, **DECODER),
    "phi3": _model("Phi3", **DECODER),
    "mixtral": _model("Mixtral", num_local_experts=4, **DECODER),
    "t5": _model(
        "T5",
        "ForConditionalGeneration",
        d_model=WIDTH,
        d_ff=64,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        decoder_start_token_id=0,
        **SIZES,
    ),
    "bart": _model("Bart", "ForConditionalGeneration", max_position_embeddings=64, forced_eos_token_id=1, **PAIR),
    "whisper": _model(
        "Whisper",
        "ForConditionalGeneration",
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **PAIR,
    ),
}
NOT_FUSED = {"mixtral"}
"""Its experts are grouped products of 3-D weights, which no pass knows."""
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "greedy, static cache": {"cache_implementation": "static"},
    "beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> tuple[str, Any, dict[str, Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[request.param]().eval()
        if request.param == "whisper":
            return request.param, model, {"input_features": torch.randn(2, 8, 32)}
        ids = torch.randint(3, VOCABULARY, (2, 7))
        ids[1, :2] = 2
        return request.param, model, {"input_ids": ids, "attention_mask": (ids != 2).long()}


@pytest.fixture(scope="module", params=[False, True], ids=["bare", "example"])
def optimized(family: Any, request: pytest.FixtureRequest) -> Any:
    name, model, inputs = family
    pair = {"decoder_input_ids": torch.zeros(2, 3, dtype=torch.long)} if model.config.is_encoder_decoder else {}
    example = {**inputs, **pair} if request.param else None
    result = fxfuse.optimize(model, example_kwargs=example, tune="off")
    report = fxfuse.report(result)
    assert not report.notes
    if request.param and name not in NOT_FUSED:
        assert report.fused
    return result


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_the_same_tokens(family: Any, optimized: Any, setting: str) -> None:
    _, model, inputs = family
    tokens = []
    for m in (copy.deepcopy(model), optimized):
        tokens.append(m.generate(**inputs, **SETTINGS[setting], do_sample=False, max_new_tokens=5))
    assert torch.equal(*tokens)
    calls = fxfuse.report(optimized).calls
    assert sum(c.fused for c in calls.values()) > 0 or not calls
