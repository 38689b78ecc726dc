"""The printed graphs and reports of two small models, compared with tests/golden/*.txt letter by letter.

``pytest tests/test_golden.py --update-golden`` writes the files anew; the diff is then for people to read.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.ops import onednn
from tests.conftest import randn

GOLDEN = Path(__file__).parent / "golden"


class GeGlu(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 16):
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Conv1D(nn.Module):
    def __init__(self, features: int, inputs: int):
        super().__init__()
        self.features = features
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, features)), nn.Parameter(torch.zeros(features))

    def forward(self, x):
        shape = x.size()[:-1] + (self.features,)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class Gpt2Block(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = Conv1D(3 * dim, dim), Conv1D(dim, dim)
        self.c_fc, self.c_proj_mlp = Conv1D(4 * dim, dim), Conv1D(dim, 4 * dim)
        self.dropout = nn.Dropout(0.1)

    def attention(self, x):
        q, k, v = self.c_attn(x).split(self.dim, dim=2)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.c_proj(out.transpose(1, 2).flatten(2)))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        h = self.c_fc(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.dropout(self.c_proj_mlp(h))


MODELS = {"geglu-mlp": (GeGlu, (2, 3, 8)), "gpt2-block": (Gpt2Block, (2, 3, 8))}


def printed(name: str) -> str:
    build, shape = MODELS[name]
    model = fxfuse.optimize(build().eval(), (randn(1, *shape),))
    with torch.no_grad():
        model(randn(1, *shape))
    parts = [f"region {path or '.'}\n{gm.code.strip()}" for path, gm in fxfuse.graphs(model).items()]
    text = "\n\n".join([*parts, str(fxfuse.report(model))])
    # lines of this file move; what they say does not. Times differ, and which stages there are is told elsewhere.
    text = re.sub(r"\n\ntime taken, ms\n.*", "", text)
    return re.sub(r"(test_golden\.py):\d+", r"\1:N", text) + "\n"


@pytest.mark.skipif(
    not onednn.AVAILABLE, reason="without oneDNN plain linears are not lowered, and the graph is another"
)
@pytest.mark.parametrize("name", MODELS)
def test_as_before(name, request):
    file = GOLDEN / f"{name}.txt"
    text = printed(name)
    if request.config.getoption("--update-golden"):
        file.write_text(text)
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    assert "\n".join(line.rstrip() for line in file.read_text().splitlines()) == lines
