"""Small models with random weights, of the kinds that people bring: hand-written, torch's own, transformers'.

``ZOO[name]()`` gives (module in eval mode, args, kwargs), the same each time. Nothing is downloaded. Widths are 64 and
256, so that a hidden projection is large enough for the fused kernels and not only for the plain sequence.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Entry = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
ZOO: dict[str, Callable[[], Entry]] = {}
WIDTH, HIDDEN, HEADS, BATCH, LENGTH, VOCABULARY = 64, 256, 4, 2, 8, 101
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def entry(name: str) -> Callable[[Callable[[], Entry]], Callable[[], Entry]]:
    def register(build: Callable[[], Entry]) -> Callable[[], Entry]:
        @functools.wraps(build)
        def seeded() -> Entry:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model, args, kwargs = build()
                # A weight that starts at zero would hide a wrong rewrite.
                with torch.no_grad():
                    for p in model.parameters():
                        if p.is_floating_point() and not p.any():
                            p.normal_(0.0, 0.1)
            return model.eval(), args, kwargs

        ZOO[name] = seeded
        return seeded

    return register


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def hidden() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


class SwiGLU(nn.Module):
    """Gated MLP with the projection names of the first Llama release."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PackedGEGLU(nn.Module):
    """Gate and value out of one projection, the activated half last, as diffusers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return self.out(value * F.gelu(gate))


class SelfAttention(nn.Module):
    """Packed projection taken apart by sizes that only the call tells."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).split(width, dim=-1)
        q, k, v = (h.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for h in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    """Pre-norm block with its MLP written into the block's own forward, around an attention that has no plain graph."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.fc, self.out, self.drop = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.ln1(x)))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh")))


class RawMatmulMLP(nn.Module):
    """Parameters used with ``@`` and ``+``, as in code written from formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 8), nn.Parameter(torch.randn(HIDDEN))
        self.w2, self.b2 = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 16), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.tanh(x @ self.w1 + self.b1), self.w2) + self.b2


class LoRALinear(nn.Module):
    """A linear with a low-rank update ``x @ A @ B * scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, HIDDEN)
        self.A, self.B = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4, HIDDEN))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.A @ self.B) * self.scale


class Recommender(nn.Module):
    """Dense and sparse towers with pairwise interactions, in the manner of click-rate models."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(13, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1), nn.Sigmoid())
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x] + [e(sparse[:, i]) for i, e in enumerate(self.embeddings)], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1))


class LSTMHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.head(self.rnn(x)[0][:, -1]))


def _encoder_layer(**changes: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True, **changes)


def _decoder_layer(**changes: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True, **changes)


_OF_ONE_INPUT: dict[str, Callable[[], nn.Module]] = {
    "hand/sequential": lambda: nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDTH)
    ),
    "hand/swiglu": SwiGLU,
    "hand/packed-geglu": PackedGEGLU,
    "hand/gpt-block": GPTBlock,
    "hand/raw-matmul": RawMatmulMLP,
    "hand/lora": LoRALinear,
    "torch/lstm-head": LSTMHead,
    "torch/encoder-layer-relu": _encoder_layer,
    "torch/encoder-layer-gelu-prenorm": lambda: _encoder_layer(activation="gelu", norm_first=True),
    "torch/encoder": lambda: nn.TransformerEncoder(_encoder_layer(), 2),
}
for _name, _make in _OF_ONE_INPUT.items():
    entry(_name)(functools.partial(lambda make: (make(), (hidden(),), {}), _make))


@entry("hand/recommender")
def _recommender() -> Entry:
    return Recommender(), (torch.randn(BATCH, 13), torch.randint(0, 50, (BATCH, 3, 4))), {}


@entry("torch/attention")
def _attention() -> Entry:
    x = hidden()
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), (x, x, x), {"need_weights": False}


@entry("torch/decoder-layer")
def _decoder() -> Entry:
    return _decoder_layer(activation="gelu"), (hidden(), hidden()), {}


@entry("torch/transformer")
def _transformer() -> Entry:
    return nn.Transformer(WIDTH, HEADS, 1, 1, HIDDEN, batch_first=True), (hidden(), hidden()), {}


def _of_transformers(name: str, model: str, config: str, inputs: Callable[[], dict[str, Any]], **sizes: Any) -> None:
    @entry("transformers/" + name)
    def build() -> Entry:
        import transformers

        configuration = getattr(transformers, config)(vocab_size=VOCABULARY, pad_token_id=0, use_cache=False, **sizes)
        return getattr(transformers, model)(configuration), (), inputs()


def _text() -> dict[str, Any]:
    return {"input_ids": tokens()}


def _masked() -> dict[str, Any]:
    return {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


def _pair() -> dict[str, Any]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(5)}


_DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
}
_of_transformers("gpt2", "GPT2LMHeadModel", "GPT2Config", _text, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=64)
_of_transformers("bert", "BertForMaskedLM", "BertConfig", _masked, **_DECODER)
_of_transformers("llama", "LlamaForCausalLM", "LlamaConfig", _text, num_key_value_heads=2, **_DECODER)
_of_transformers("phi3", "Phi3ForCausalLM", "Phi3Config", _text, num_key_value_heads=2, **_DECODER)
_of_transformers(
    "t5-gated",
    "T5ForConditionalGeneration",
    "T5Config",
    _pair,
    feed_forward_proj="gated-gelu",
    d_model=WIDTH,
    d_ff=HIDDEN,
    d_kv=WIDTH // HEADS,
    num_heads=HEADS,
    num_layers=2,
    decoder_start_token_id=1,
)


def at_batch(value: Any, batch: int) -> Any:
    """The same tensor with ``batch`` rows, made by repeating what it has."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.repeat(math.ceil(batch / value.shape[0]), *[1] * (value.ndim - 1))[:batch].contiguous()
