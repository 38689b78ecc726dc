"""The built-in targets: small models, each written the way people write it.

Every builder returns ``(model, args, kwargs)`` in float32 on the CPU, from a fixed seed. The MLPs are
768 -> 3072 -> 768 and take the number of rows of their input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HIDDEN = 768, 3072

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class GegluMLP(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class SwigluMLP(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class FeedForward(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class MatmulAddMLP(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(dim, hidden) / math.sqrt(dim))
        self.b1 = nn.Parameter(torch.randn(hidden) / math.sqrt(dim))
        self.w2 = nn.Parameter(torch.randn(hidden, dim) / math.sqrt(hidden))
        self.b2 = nn.Parameter(torch.randn(dim) / math.sqrt(hidden))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(torch.add(torch.matmul(x, self.w1), self.b1))
        return h @ self.w2 + self.b2


class Conv1D(nn.Module):
    """GPT-2's projection: addmm on a weight that is stored as [in, out]."""

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.n_out = n_out
        self.weight = nn.Parameter(torch.randn(n_in, n_out) / math.sqrt(n_in))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.n_out)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Conv1dMLP(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.c_fc = Conv1D(hidden, dim)
        self.c_proj = Conv1D(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(new_gelu(self.c_fc(x)))


class PackedGluMLP(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class GPT2Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(dim)
        self.attn_qkv = nn.Linear(dim, 3 * dim)
        self.attn_out = nn.Linear(dim, dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = GPT2MLP(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.attn_qkv(self.ln_1(x)).split(dim, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.ln_2(x))


class GPT2MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(dim, hidden)
        self.c_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(new_gelu(self.c_fc(x)))


class GPT2Like(nn.Module):
    def __init__(self, vocab: int = 4096, dim: int = 256, heads: int = 4, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(length, dim)
        self.h = nn.ModuleList(GPT2Block(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(position)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_norm = RMSNorm(dim)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.post_norm = RMSNorm(dim)
        self.mlp = SwigluMLP(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        h = self.input_norm(x)
        q, k, v = (
            proj(h).view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.post_norm(x))


class LlamaLike(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, vocab: int = 4096, dim: int = 256, heads: int = 4, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, hidden=3 * dim) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        head = dim // heads
        angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.lm_head(self.norm(x))


@dataclass(frozen=True)
class BuiltIn:
    """A target that comes with fxfuse: what ``fxfuse list`` says of it, and how it is built."""

    line: str
    build: Callable[[int], Example]
    takes_rows: bool = True
    """Whether the argument of ``build`` (the rows of the input) has a meaning for it."""


def _mlp(cls: type[nn.Module], line: str) -> BuiltIn:
    def build(rows: int) -> Example:
        torch.manual_seed(0)
        return cls().eval(), (torch.randn(rows, DIM),), {}

    return BuiltIn(f"{line}; {DIM} -> {HIDDEN} -> {DIM}", build)


def _language_model(cls: type[nn.Module], line: str) -> BuiltIn:
    batch, length, vocab = 4, 128, 4096

    def build(_rows: int) -> Example:
        torch.manual_seed(0)
        return cls(vocab=vocab, length=length).eval(), (torch.randint(vocab, (batch, length)),), {}

    return BuiltIn(f"{line}; {batch} x {length} tokens", build, takes_rows=False)


BUILT_IN: dict[str, BuiltIn] = {
    "geglu-mlp": _mlp(GegluMLP, "down(gelu_tanh(gate(x)) * up(x)), nn.Linear with bias"),
    "swiglu-mlp": _mlp(SwigluMLP, "down(silu(gate(x)) * up(x)), nn.Linear without bias"),
    "ffn": _mlp(FeedForward, "nn.Sequential(Linear, GELU, Linear)"),
    "matmul-add": _mlp(MatmulAddMLP, "gelu(matmul(x, w1) + b1) @ w2 + b2 on raw parameters"),
    "conv1d-mlp": _mlp(Conv1dMLP, "GPT-2's addmm on an [in, out] weight, tanh-GELU by hand"),
    "packed-glu": _mlp(PackedGluMLP, "one projection, chunked into silu(gate) * up"),
    "gpt2-like": _language_model(GPT2Like, "4 blocks: packed QKV, SDPA, MLP with tanh-GELU by hand; d 256"),
    "llama-like": _language_model(LlamaLike, "4 blocks: RMSNorm, rotary, SDPA, SwiGLU MLP; d 256"),
}
