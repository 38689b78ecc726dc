import dataclasses
import sys
import types

import pytest
import torch
from torch import nn

from fxfuse.bench import libraries, targets
from fxfuse.bench.libraries import HF, Model, UnknownModel
from fxfuse.bench.targets import BadTarget
from fxfuse.errors import MissingPackage

SMALL = {
    "GPT2Config": {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 99},
    "BertConfig": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64},
    "RobertaConfig": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64},
    "DistilBertConfig": {"dim": 32, "n_heads": 2, "n_layers": 1, "hidden_dim": 64},
    "T5Config": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
    "ViTConfig": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64},
    "WhisperConfig": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 50,
    },
}
DECODER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("name", HF)
def test_every_name_builds_a_model_and_inputs_that_it_takes(name, transformers, monkeypatch):
    small = SMALL.get(HF[name].config) or {**DECODER, **({"head_dim": 16} if "head_dim" in HF[name].settings else {})}
    monkeypatch.setitem(HF, name, dataclasses.replace(HF[name], settings={**HF[name].settings, **small}))
    target = targets.load(f"hf:{name}", device="cpu")
    args, kwargs = target.example()
    assert not target.model.training
    with torch.inference_mode():
        first, again = (target.model(*args, **kwargs)[0] for _ in range(2))
    assert torch.equal(first, again)
    rebuilt = targets.load(f"hf:{name}", device="cpu")
    for ours, theirs in zip(target.tensors, rebuilt.tensors, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", HF)
def test_sizes_are_settings_that_the_configuration_knows(name, transformers):
    known = HF[name]
    config = getattr(transformers, known.config)(**known.settings)
    for setting, value in known.settings.items():
        assert getattr(config, setting) == value
    assert set(known.settings) <= set(config.to_dict()) | set(config.attribute_map) | {"head_dim"}


def test_a_checkpoint_in_a_folder(transformers, tmp_path):
    config = transformers.GPT2Config(**SMALL["GPT2Config"], bos_token_id=1, eos_token_id=1)
    saved = transformers.GPT2LMHeadModel(config)
    saved.save_pretrained(tmp_path)
    target = targets.load(f"hf:{tmp_path}", device="cpu")
    assert type(target.model) is transformers.GPT2LMHeadModel
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, target.model.state_dict()[name])


def test_a_folder_that_is_no_checkpoint(transformers, tmp_path):
    with pytest.raises(BadTarget, match=f"building hf:{tmp_path} raised "):
        targets.load(f"hf:{tmp_path}")


@pytest.mark.parametrize("name", ["", "nothing", "gpt2"])
def test_an_unknown_name_lists_those_that_there_are(name):
    with pytest.raises(UnknownModel, match=r"gpt2-small, .*llama-1b-layer"):
        targets.load(f"hf:{name}")


def test_inputs_that_are_not_known(monkeypatch):
    model = nn.Linear(2, 2)
    model.config, model.main_input_name = types.SimpleNamespace(), "point_cloud"
    with pytest.raises(UnknownModel, match="Linear takes point_cloud"):
        libraries._inputs(model)


@pytest.mark.parametrize(("library", "package"), [("hf", "transformers"), ("timm", "timm")])
def test_a_missing_package_is_named(library, package, monkeypatch):
    monkeypatch.setitem(HF, "vit", Model("ViTModel", "ViTConfig"))

    def absent(name, *args):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(libraries.importlib, "import_module", absent)
    says = f"{library}:vit needs {package}, which is not installed: pip install {package}"
    with pytest.raises(MissingPackage, match=says):
        targets.load(f"{library}:vit")


def test_a_package_that_lacks_another_is_not_called_missing(monkeypatch):
    def broken(name, *args):
        raise ModuleNotFoundError("No module named 'regex'", name="regex")

    monkeypatch.setattr(libraries.importlib, "import_module", broken)
    with pytest.raises(BadTarget, match="building timm:vit raised ModuleNotFoundError: No module named 'regex'"):
        targets.load("timm:vit")


def test_timm_is_asked_for_random_weights_and_its_own_input_size(monkeypatch):
    net = nn.Linear(8, 8)
    net.default_cfg = {"input_size": (3, 8, 8)}
    timm = types.ModuleType("timm")
    timm.is_model = lambda name: name == "tiny"
    timm.create_model = lambda name, pretrained: net if not pretrained else pytest.fail("downloads")
    monkeypatch.setitem(sys.modules, "timm", timm)
    target = targets.load("timm:tiny", device="cpu")
    ((x,), _) = target.example()
    assert x.shape == (libraries.BATCH, 3, 8, 8)
    with pytest.raises(UnknownModel, match="timm has no model 'huge'"):
        targets.load("timm:huge")
