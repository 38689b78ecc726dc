"""Random small programs of the ops that rules know, with in-place ops and views: in float64, optimized as in eager."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fxfuse
from fxfuse import numerics
from tests.conftest import randn, traced

SEEDS = 220
ROWS, WIDTH = 4, 6

# Each makes a new value {v} from values {a} and {b} of shape [4, 6]; {w} is a [6, 6] weight, {p} a [12, 6] one.
MAKES = [
    "{v} = {a} @ {w}",
    "{v} = {a} @ {w} + self.bias",
    "{v} = self.bias + torch.matmul({a}, {w}.t())",
    "{v} = torch.mm({a}, {w}).add_(self.bias)",
    "{v} = torch.add({a} @ {w}, self.bias, alpha=2)",
    "{v} = torch.add(self.bias, torch.mm({a}, {w}), alpha=0.5)",
    "{v} = torch.addmm(self.bias, {a}, {w}, beta=0.5)",
    "{v} = F.linear({a}, {w}, self.bias)",
    "{v} = F.linear({a}, {w})",
    "{v} = self.fc({a})",
    "{v} = {a} @ {w} + {b}",
    "{v} = F.linear({a}, {w}) + {b}",
    "{v} = torch.einsum('mk,kn->mn', {a}, {w})",
    "{v} = torch.relu({a})",
    "{v} = F.gelu({a})",
    "{v} = torch.tanh({a})",
    "{v} = {a} * torch.sigmoid({a})",
    "{v} = F.silu({a})",
    "{v} = F.silu({a}) * {b}",
    "{v} = {a} * torch.sigmoid({b})",
    "{v} = 0.5 * {a} * (1 + torch.erf({a} / 2**0.5))",
    "{v} = F.relu({a}) ** 2",
    "{v} = F.silu(F.linear({a}, {w})) * F.linear({a}, {w2}, self.bias)",
    "{v} = F.glu(F.linear({a}, {p}, self.wide))",
    "{v} = {a} + {b}",
    "{v} = {a} * {b}",
    "{v} = {a} / 1.0",
    "{v} = {a} * 1",
    "{v} = F.dropout({a}, 0.0)",
    "{v} = F.dropout({a}, 0.5, training=False)",
    "{v} = {a}.transpose(0, 1).transpose(0, 1)",
    "{v} = {a}.view({a}.shape)",
    "{v} = {a}.reshape(-1, 6)",
    "{v} = {a}.clone()",
    "{v} = {a}.contiguous()",
    "{v} = {a}[:, :]",
    "{v} = torch.cat(F.linear({a}, {p}).chunk(2, -1)[:1], 0)",
]
PACKED = [
    "{p1}, {p2} = F.linear({a}, {p}, self.wide).chunk(2, -1)",
    "{p1}, {p2} = (({a} @ {p}.t()) + self.wide).split(6, dim=-1)",
    "h = F.linear({a}, {p}); {p1} = h[:, :6]; {p2} = h[:, 6:]",
    "h = F.linear({a}, {p}); {p1} = h[..., ::2]; {p2} = h[..., 1::2]",
]
WRITES = [
    "{a}.relu_()",
    "{a}.mul_(0.5)",
    "{a}.add_(self.bias)",
    "{a}.add_({b})",
    "{a} = F.relu({a}, inplace=True)",
    "{a} = F.silu({a}, inplace=True)",
    "{a} = {a}.sigmoid_()",
    "{a}[0].zero_()",
    "{a}[:, :3].fill_(0.25)",
    "{a}.t()[1].mul_(2.0)",
    "{a}.view(-1)[5:7].zero_()",
    "torch.tanh({a}, out={a})",
    "x.mul_(0.75)",
    "x[1].zero_()",
]
_NAMES = {"torch": torch, "F": F}


class Program(nn.Module):
    """A random straight-line program over one input [4, 6]."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.w0, self.w1 = (nn.Parameter(randn(seed + i, WIDTH, WIDTH) / 2) for i in (1, 2))
        self.packed = nn.Parameter(randn(seed + 3, 2 * WIDTH, WIDTH) / 2)
        self.bias, self.wide = nn.Parameter(randn(seed + 4, WIDTH)), nn.Parameter(randn(seed + 5, 2 * WIDTH))
        self.source = _source(random.Random(seed))
        scope: dict = {}
        exec(compile(self.source, f"program {seed}", "exec"), _NAMES, scope)
        self.program = scope["program"]
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.program(self, x)


def _source(choose: random.Random) -> str:
    lines, values = [], ["x"]

    def recent():
        return choose.choice(values[-3:])  # near values, so that patterns come about

    for i in range(choose.randint(4, 10)):
        template = choose.choice(choose.choices([MAKES, PACKED, WRITES], [12, 2, 4])[0])
        names = {"v": f"v{i}", "p1": f"v{i}", "p2": f"u{i}", "p": "self.packed"}
        w, w2 = choose.sample(["self.w0", "self.w1", "self.fc.weight"], 2)
        a = recent() if template in WRITES or len(values) < 2 else choose.choice([values[-1], values[-1], recent()])
        lines.append(template.format(a=a, b=choose.choice(values), w=w, w2=w2, **names))
        values += [
            name
            for name in (names["v"], names["p2"])
            if f"{name}" in lines[-1].split(" = ")[0] or f"; {name} =" in lines[-1]
        ]
        values = list(dict.fromkeys(values))
    outputs = [values[-1], *choose.sample(values, min(len(values), choose.choice([0, 0, 1, 2])))]
    body = "".join(f"    {line}\n" for line in lines)
    return f"def program(self, x):\n{body}    return ({', '.join(outputs)},)\n"


def aliases(outputs: tuple[Tensor, ...], x: Tensor) -> list[list[bool]]:
    tensors = [*outputs, x]
    return [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in tensors] for a in tensors]


def rounded(tree):
    """In float32: a long program's rounding in float64 is far below that, so what is left is no rounding."""
    return tree_map(lambda t: t.float(), tree)


FUSED: list[int] = []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_program(seed):
    model = Program(seed)
    x = randn(seed, ROWS, WIDTH, dtype=torch.float64)
    try:
        with torch.no_grad():
            theirs = x.clone()
            expected = (model(theirs), theirs)
    except RuntimeError as refusal:
        pytest.skip(f"eager refuses it: {refusal}")
    _, magnitude = numerics.reference(traced(model), [x])
    exact = (expected, (magnitude, theirs.abs()))
    for example in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The region's own check is off: in float64 it allows a long program less than its rounding.
            optimized = fxfuse.optimize(model, (x.clone(),), check=False) if example else fxfuse.optimize(model)
        report = fxfuse.report(optimized)
        assert not [r for r in report.regions if r.note.startswith("taken out")], f"{report}\n{model.source}"
        assert not report.uncaptured, f"{report}\n{model.source}"
        FUSED.append(len(report.fused))
        for graph in fxfuse.graphs(optimized).values():  # in float64 the model itself runs its own forward
            with torch.no_grad():
                ours = x.clone()
                outputs = graph(ours)
            verdict = numerics.judge(*rounded([(outputs, ours), expected]), *exact)
            shown = f"{graph.code}\n{model.source}\n{report}"
            assert verdict, f"{verdict.reason}\n{shown}"
            assert aliases(outputs, ours) == aliases(*expected), f"outputs share other memory\n{shown}"


def test_the_programs_are_of_use():
    if len(FUSED) < SEEDS:
        pytest.skip("only some programs were run")
    assert sum(FUSED) > SEEDS, "hardly anything is fused in them"
