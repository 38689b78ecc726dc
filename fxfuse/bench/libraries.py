"""Targets by name from libraries of models: ``hf:`` of transformers, ``timm:`` of timm.

Built from configurations with random weights, on the CPU: nothing is downloaded. ``hf:FOLDER`` loads a checkpoint that
lies on this machine.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fxfuse.bench.models import Example
from fxfuse.errors import FxfuseError, missing_package

BATCH, LENGTH, VOCABULARY = 4, 128, 8192


class UnknownModel(FxfuseError, ValueError):
    """The library has no model of this name."""


@dataclass(frozen=True)
class Model:
    """A model of transformers: the names of its classes, and what its configuration has that is not the default."""

    cls: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)


def _llama_like(cls: str, config: str, hidden: int, inner: int, heads: int, kv_heads: int, **more: Any) -> Model:
    """One layer, with a small vocabulary: in a language model of billions of parameters all layers are alike."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
    }
    return Model(cls, config, {**sizes, **_NO_TOKENS, **more})


#: Special tokens of the real vocabulary, which the small one does not have.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

#: Sizes as their makers published them.
HF: dict[str, Model] = {
    "gpt2-small": Model("GPT2LMHeadModel", "GPT2Config"),
    "gpt2-medium": Model("GPT2LMHeadModel", "GPT2Config", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "bert-base": Model("BertModel", "BertConfig"),
    "roberta-base": Model("RobertaModel", "RobertaConfig"),
    "distilbert-base": Model("DistilBertModel", "DistilBertConfig"),
    "t5-small": Model("T5Model", "T5Config", {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}),
    "vit-base": Model("ViTModel", "ViTConfig"),
    "whisper-tiny": Model("WhisperModel", "WhisperConfig"),
    "llama-1b-layer": _llama_like("LlamaModel", "LlamaConfig", 2048, 8192, 32, 8),
    "llama-8b-layer": _llama_like("LlamaModel", "LlamaConfig", 4096, 14336, 32, 8),
    "qwen2-0.5b-layer": _llama_like("Qwen2Model", "Qwen2Config", 896, 4864, 14, 2),
    "mistral-7b-layer": _llama_like("MistralModel", "MistralConfig", 4096, 14336, 32, 8),
    "gemma-2b-layer": _llama_like("GemmaModel", "GemmaConfig", 2048, 16384, 8, 1, head_dim=256),
}


def hf(name: str) -> Example:
    """``hf:NAME`` or ``hf:FOLDER``.

    Raises UnknownModel for what is neither, and ``errors.MissingPackage`` without transformers.
    """
    folder = Path(name).expanduser()
    if name not in HF and not (name and folder.is_dir()):
        raise UnknownModel(f"hf:{name} is neither a folder nor a model that is known by name: {', '.join(HF)}")
    # Nothing is to be looked for on the net, not even by a library that thinks it lacks a file.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = _library("transformers", f"hf:{name}")
    torch.manual_seed(0)
    if name in HF:
        known = HF[name]
        model = getattr(transformers, known.cls)(getattr(transformers, known.config)(**known.settings))
    else:
        model = _checkpoint(transformers, folder)
    model.config.use_cache = False  # what is timed is one forward, and a cache is no part of its answer
    return model.eval(), (), _inputs(model)


def _checkpoint(transformers: ModuleType, folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    names = getattr(config, "architectures", None) or ["AutoModel"]
    return getattr(transformers, names[0]).from_pretrained(folder, local_files_only=True)


def _inputs(model: Any) -> dict[str, Any]:
    """Random inputs of the kind that the model's configuration tells of."""
    config, main = model.config, model.main_input_name
    tokens = torch.randint(2, config.vocab_size, (BATCH, LENGTH)) if hasattr(config, "vocab_size") else None
    if main == "pixel_values":
        return {main: torch.randn(BATCH, config.num_channels, config.image_size, config.image_size)}
    if main == "input_features":
        inputs = {main: torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)}
        return {**inputs, "decoder_input_ids": tokens[:1]} if tokens is not None else inputs
    if main != "input_ids" or tokens is None:
        raise UnknownModel(f"{type(model).__name__} takes {main}, and it is not known what that looks like")
    return {main: tokens, "decoder_input_ids": tokens} if config.is_encoder_decoder else {main: tokens}


def timm(name: str) -> Example:
    """``timm:NAME``. Raises UnknownModel for a name that timm does not have, ``errors.MissingPackage`` without timm."""
    library = _library("timm", f"timm:{name}")
    if not library.is_model(name):
        raise UnknownModel(f"timm has no model {name!r}; timm.list_models() names them")
    torch.manual_seed(0)
    model = library.create_model(name, pretrained=False)
    return model.eval(), (torch.randn(BATCH, *model.default_cfg["input_size"]),), {}


def _library(package: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as missing:
        if missing.name != package:
            raise
        raise missing_package(target, package, package) from None


#: What stands before the colon of a target.
LIBRARIES: dict[str, Callable[[str], Example]] = {"hf": hf, "timm": timm}
