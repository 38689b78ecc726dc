"""Models of transformers in the hands of those who use them: generate, save_pretrained, PEFT."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxfuse
from tests.models.answers import right
from tests.optimize.model import entries

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, **SIZES)
    )


def _llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            **SIZES,
        )
    )


@pytest.fixture(params=[_gpt2, _llama], ids=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param().eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 64, (2, 7))


@pytest.fixture
def optimized(model: Any, ids: torch.Tensor) -> Any:
    return _optimized(model, ids)


def _optimized(model: Any, ids: torch.Tensor, example: bool = True) -> Any:
    result = fxfuse.optimize(model, example_kwargs={"input_ids": ids, "use_cache": False} if example else None)
    assert fxfuse.report(result).fused
    return result


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "no cache": {"do_sample": False, "use_cache": False},
    "beams": {"num_beams": 2, "do_sample": False},
    "sampled": {"do_sample": True, "top_k": 5},
    "with scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("example", [False, True])
def test_generate(model, ids, example):
    """The same tokens, each step counted, and after restore again."""
    wanted = {setting: _generated(model, ids, setting) for setting in SETTINGS}
    optimized = _optimized(model, ids, example)
    for setting, tokens in wanted.items():
        before = entries(optimized)
        assert torch.equal(_generated(optimized, ids, setting), tokens)
        assert entries(optimized) > before
    assert sum(c.fused for c in fxfuse.report(optimized).calls.values()) > 0
    fxfuse.restore(optimized)
    assert torch.equal(_generated(optimized, ids, "greedy"), wanted["greedy"])


def _generated(model: Any, ids: torch.Tensor, setting: str) -> torch.Tensor:
    torch.manual_seed(3)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3}
    result = model.generate(ids, **given, **SETTINGS[setting])
    return result if isinstance(result, torch.Tensor) else result.sequences


def test_what_generate_and_trainer_read(model, optimized):
    for path, module in model.named_modules():
        ours = optimized.get_submodule(path)
        assert type(ours) is type(module)
        assert inspect.signature(ours.forward) == inspect.signature(module.forward), path
    assert optimized.config is model.config
    assert optimized.generation_config is model.generation_config
    assert (optimized.device, optimized.dtype) == (model.device, model.dtype)
    assert optimized.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert optimized.get_output_embeddings().weight is model.get_output_embeddings().weight
    assert optimized.num_parameters() == model.num_parameters()


def test_hidden_states_at_any_time(model, optimized, ids):
    """transformers installs hooks at the first call that asks for them, and leaves them there."""
    with torch.no_grad():
        for asked in (False, True, False, True):
            ours, theirs = (m(ids, output_hidden_states=asked, use_cache=False) for m in (optimized, model))
            assert ours.keys() == theirs.keys()
            assert len(ours.hidden_states or ()) == len(theirs.hidden_states or ())
            assert right(ours.logits, _Logits(model), ids)


@pytest.mark.parametrize("given", [True, False], ids=["a mask", "none"])
def test_attention_is_causal_where_nothing_is_masked(model, ids, given):
    """As in eager, where it then needs no mask: that is decided by values, and a padded batch is answered as well."""
    whole, padded = torch.ones_like(ids), torch.ones_like(ids)
    padded[0, :3] = 0
    kwargs = {"input_ids": ids, "use_cache": False, **({"attention_mask": whole} if given else {})}
    optimized = fxfuse.optimize(model, example_kwargs=kwargs, tune="off")
    nodes = fxfuse.graphs(optimized)[""].graph.nodes
    attention = [n.kwargs for n in nodes if "scaled_dot_product_attention" in str(n.target)]
    assert [(a["attn_mask"], a["is_causal"]) for a in attention] == [(None, True)] * 2
    for mask in (whole, padded) * 8:
        kwargs |= {"attention_mask": mask} if given else {}
        with torch.no_grad():
            assert right(optimized(**kwargs), model, **kwargs)
    calls = fxfuse.report(optimized).calls[""]
    # A second graph serves the padded ones from the fourth on.
    assert (calls.fused, calls.fallback) == ((13, 3) if given else (16, 0))


def test_the_second_graph_goes_when_the_model_changes(model, ids):
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    optimized = fxfuse.optimize(model, example_kwargs=kwargs, tune="off")
    kwargs["attention_mask"] = padded
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(5):
            optimized(**kwargs)
        for m in (optimized, changed):
            next(n for p, n in m.named_modules() if p.endswith(".mlp")).register_forward_hook(lambda m, a, y: y * 0)
        for _ in range(16):
            assert right(optimized(**kwargs), changed, **kwargs)
    calls = fxfuse.report(optimized).calls
    assert calls[""].fallback < 16, "traced again"
    assert sum(c.fused for path, c in calls.items() if path) > 8, "what lies around the hook serves"


class _Logits(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def test_saved_and_loaded(model, optimized, ids, tmp_path):
    optimized.save_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    names = [sorted(p.name for p in (tmp_path / who).iterdir()) for who in ("ours", "theirs")]
    assert names[0] == names[1]
    for name in names[0]:
        ours, theirs = ((tmp_path / who / name).read_bytes() for who in ("ours", "theirs"))
        assert ours == theirs, name
    loaded = type(model).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert "forward" not in {name for m in loaded.modules() for name in m.__dict__}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "resized embeddings": lambda m: m.resize_token_embeddings(70, mean_resizing=False),
    "gradient checkpointing": lambda m: m.gradient_checkpointing_enable(),
    "attention implementation": lambda m: m.set_attn_implementation("eager"),
    "cast": lambda m: m.bfloat16(),
    "requires_grad": lambda m: m.enable_input_require_grads(),
    "tied weights": lambda m: m.tie_weights(),
    "new weights": lambda m: m.load_state_dict({name: v * 1.5 for name, v in m.state_dict().items()}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_by_the_methods_of_transformers(model, optimized, ids, change):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        optimized(ids, use_cache=False)
        for m in (optimized, twin):
            torch.manual_seed(4)
            CHANGES[change](m)
        before = entries(optimized)
        assert right(optimized(ids, use_cache=False).logits, _Logits(twin), ids)
        assert entries(optimized) > before


@pytest.mark.parametrize("when", ["before", "after"])
def test_peft(model, ids, when):
    """Adapters added, trained, merged, taken out and removed again."""
    peft = pytest.importorskip("peft")
    names = ["c_fc", "c_proj"] if hasattr(model, "transformer") else ["gate_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, fan_in_fan_out=hasattr(model, "transformer"))
    twin = copy.deepcopy(model)

    def adapted(m: Any) -> Any:
        torch.manual_seed(0)
        m = peft.get_peft_model(m, config).eval()
        for name, parameter in m.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
        return m

    def same() -> bool:
        with torch.no_grad():
            return right(ours(ids, use_cache=False).logits, _Logits(theirs), ids)

    theirs = twin
    if when == "before":
        theirs = adapted(twin)
        ours = fxfuse.optimize(adapted(model), example_kwargs={"input_ids": ids, "use_cache": False})
    else:
        ours = fxfuse.optimize(model, example_kwargs={"input_ids": ids, "use_cache": False})
        assert same()
        ours, theirs = adapted(ours), adapted(theirs)
    assert same()
    for m in (ours, theirs):
        m(ids, labels=ids, use_cache=False).loss.backward()
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1).step()
    assert same()
    for step in ("merge_adapter", "unmerge_adapter"):
        for m in (ours, theirs):
            getattr(m, step)()
        assert same(), step
    with ours.disable_adapter(), theirs.disable_adapter():
        assert same()
    assert same()
    ours, theirs = (m.merge_and_unload() for m in (ours, theirs))
    assert same()
