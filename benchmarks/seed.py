"""The five set-ups that fxfuse is measured against, profiled: what each one changes, what it leaves, which kernels run.

``torch.add(torch.matmul(x, w), b)``; nn.Linear; a GeGLU MLP; the same under torch.compile and with Liger; and as fxfuse
rewrites it. In bfloat16 on a GPU, else in float32 on the CPU, with operators in the place of kernels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from tabulate import tabulate
from torch import nn

from benchmarks import gpu
from fxfuse.bench import models, render
from fxfuse.bench.kernel_names import short
from fxfuse.bench.profile import Profile, SetUp, profile
from fxfuse.bench.progress import Progress
from fxfuse.bench.targets import Target

SIZES = (gpu.Size(1024, 32, 64), gpu.SEED)

_ADD, _LINEAR, _GEGLU = "matmul then add", "nn.Linear", "GeGLU"
MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    _ADD: gpu.MatmulThenAdd,
    _LINEAR: nn.Linear,
    _GEGLU: models.GegluMLP,
}
ROWS = (
    (_ADD, "eager", None),
    (_ADD, "fxfuse", (_ADD, "eager")),
    (_LINEAR, "eager", (_ADD, "eager")),
    (_LINEAR, "compile", (_LINEAR, "eager")),
    (_GEGLU, "eager", None),
    (_GEGLU, "compile", (_GEGLU, "eager")),
    (_GEGLU, "liger", (_GEGLU, "eager")),
    (_GEGLU, "fxfuse", (_GEGLU, "eager")),
)
"""Model, column, and the row that it is compared with."""


@dataclass(frozen=True)
class Row:
    """One set-up at one size."""

    size: str
    set_up: str
    ran: dict[str, int]
    """Kernels by name; on the CPU operators."""
    verdicts: dict[str, int]
    """Of the lines that set prediction against trace."""
    broken: list[str]
    """The lines that the trace does not bear out."""
    changed: str
    stayed: str
    left_out: str = ""
    """Why there is nothing to show."""


def rows(size: gpu.Size) -> Iterator[Row]:
    """The rows of one size, on the GPU if there is one."""
    profiles: dict[str, Profile] = {}
    for label, column, against in ROWS:
        if label not in profiles:
            profiles[label] = _profiled(label, size)
        found = _set_up(profiles[label], column)
        name = f"{label}, {column}"
        if found is None:
            reason = next(gone.reason for gone in profiles[label].left_out if gone.name == column)
            yield Row(str(size), name, {}, {}, [], "", "", reason)
            continue
        ran, verdicts = what_ran(found), Counter(line.verdict for line in found.lines)
        before = None if against is None else _set_up(profiles[against[0]], against[1])
        changed, stayed = compared(what_ran(before), ran) if before else ("", "")
        broken = [
            f"{line.what}: predicted {line.predicted}, observed {line.observed} {line.why}".rstrip()
            for line in found.lines
            if line.verdict == "broken"
        ]
        yield Row(str(size), name, dict(ran), dict(verdicts), broken, changed, stayed)


def _profiled(label: str, size: gpu.Size) -> Profile:
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    model = MODELS[label](size.dim, size.hidden).eval().to(device, dtype)
    x = torch.randn(size.rows, size.dim).to(device, dtype)
    columns = [column for of, column, _ in ROWS if of == label]
    with Progress(f"{label} {size}") as progress:
        return profile(Target(label, model, (x,), {}), columns, progress=progress)


def _set_up(found: Profile, column: str) -> SetUp | None:
    return next((set_up for set_up in found.set_ups if set_up.name == column), None)


def what_ran(found: SetUp) -> Counter[str]:
    """Kernels by their short names, in the order of their first starts; where there are none, operators."""
    if found.call.kernels:
        return Counter(short(kernel.name) for kernel in found.call.kernels)
    return Counter(op.name for op in found.call.operators)


def compared(before: Counter[str], after: Counter[str]) -> tuple[str, str]:
    """What went and came, and what is in both."""
    gone, new, both = before - after, after - before, before & after
    changed = [f"- {counted(gone)}"] * bool(gone) + [f"+ {counted(new)}"] * bool(new)
    return "\n".join(changed) or "nothing", counted(both) or "nothing"


def counted(names: Counter[str]) -> str:
    """Names with how often, one in each line."""
    return "\n  ".join(name if count == 1 else f"{count} {name}" for name, count in names.items())


def table(found: list[Row]) -> str:
    """A row for each set-up."""
    head = ["set-up", "kernels" if torch.cuda.is_available() else "operators", "which", "what changed", "what stayed"]
    parts = []
    for size in dict.fromkeys(row.size for row in found):
        cells = [_cells(row) for row in found if row.size == size]
        parts.append(
            f"{size} (rows, features, hidden features)\n\n"
            + tabulate(cells, head, tablefmt="grid", disable_numparse=True)
        )
    verdicts = sum((Counter(row.verdicts) for row in found), Counter[str]())
    parts.append("lines: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    parts += [f"{row.size}: {row.set_up}: {line}" for row in found for line in row.broken]
    return "\n\n".join(parts)


def _cells(row: Row) -> tuple[object, ...]:
    if row.left_out:
        return row.set_up, "", f"left out: {row.left_out}", "", ""
    return row.set_up, sum(row.ran.values()), counted(Counter(row.ran)), row.changed, row.stayed


def as_json(found: list[Row]) -> str:
    """``fxfuse.seed/1``."""
    document = {"schema": "fxfuse.seed/1", "machine": render.machine(), "versions": render.versions()}
    return json.dumps({**document, "rows": [asdict(row) for row in found]}, indent=1, ensure_ascii=False)
