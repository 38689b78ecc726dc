"""Regions whose assumptions keep failing are traced again, smaller; what lies inside serves; others go on meanwhile."""

from __future__ import annotations

import copy
import threading
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.capture.installed import GIVE_UP, MOST_TRACES, PATIENCE
from fxfuse.capture.tracer import LOCK
from tests.models.answers import right
from tests.optimize.model import HIDDEN, WIDTH, Stack, calls_of


def run(optimized: nn.Module, model: nn.Module, x: torch.Tensor, times: int, **kwargs: Any) -> None:
    with torch.no_grad():
        for _ in range(times):
            assert right(optimized(x, **kwargs), model, x, **kwargs)


def fused(optimized: nn.Module) -> dict[str, int]:
    return {path: calls.fused for path, calls in fxfuse.report(optimized).calls.items() if calls.fused}


class LoRA(nn.Module):
    """A Linear wrapped as adapters do it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.scale = base, 0.5
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x)) * self.scale


def add_hook(m: Any) -> None:
    m.down.register_forward_hook(lambda module, args, y: y + 1)


def wrap(m: Any) -> None:
    torch.manual_seed(5)
    m.down = LoRA(m.down)


def own_forward(m: Any) -> None:
    m.down.forward = types.MethodType(lambda self, x: F.linear(x, self.weight, self.bias) * 2, m.down)


@pytest.mark.parametrize("change", [add_hook, wrap, own_forward])
def test_a_module_that_changed_is_called_from_one_new_trace(pair, x, change):
    model, optimized = pair
    change(model)
    change(optimized)
    run(optimized, model, x, PATIENCE)
    assert calls_of(optimized).fallback == PATIENCE
    run(optimized, model, x, 4)
    calls = calls_of(optimized)
    assert (calls.fused, calls.fallback) == (4, PATIENCE)
    report = fxfuse.report(optimized)
    assert [e.rule for e in report.fused] == ["linear_act"], "still once"
    assert [r.path for r in report.regions if r.installed and r.path == ""] == [""]
    assert "traced again with down as a call" in report.notes[0]
    assert "down" in [n.target for n in fxfuse.graphs(optimized)[""].graph.nodes]


def test_a_hook_that_goes_again(pair, x):
    model, optimized = pair
    handles = [m.down.register_forward_hook(lambda module, args, y: y + 1) for m in pair]
    run(optimized, model, x, PATIENCE + 1)
    for handle in handles:
        handle.remove()
    run(optimized, model, x, 2)
    assert calls_of(optimized).fused == 3


def test_hooks_before_and_restore(pair, x):
    """After a new trace restore puts back what there was before the first."""
    model, optimized = pair
    plain = {path: set(m.__dict__) for path, m in model.named_modules()}
    add_hook(model), add_hook(optimized)
    run(optimized, model, x, PATIENCE + 1)
    fxfuse.restore(optimized)
    assert {path: set(m.__dict__) for path, m in optimized.named_modules()} == plain
    run(optimized, model, x, 1)


def test_traces_are_few(pair, x):
    """Whoever changes the model at every turn gets right answers, and no trace at every turn."""
    model, optimized = pair
    for turn in range(MOST_TRACES + 3):
        for m in pair:
            m.scale = float(turn + 2)
            m.act = nn.ReLU() if turn % 2 else nn.Tanh()
        run(optimized, model, x, PATIENCE + 1)
    notes = [note for note in fxfuse.report(optimized).notes if "traced again" in note]
    assert 1 <= len(notes) <= MOST_TRACES


def test_what_lies_inside_serves_calls_that_take_turns(x):
    """As a decoder is called with a mask in one step and without in the next."""

    class Masked(Stack):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x if mask is None else x * mask)

    torch.manual_seed(0)
    model = Masked().eval()
    optimized = fxfuse.optimize(model, x)
    for _ in range(PATIENCE + 2):
        run(optimized, model, x, 1, mask=torch.ones(1))
        run(optimized, model, x, 1)
    assert fused(optimized) == {"": PATIENCE + 2, "blocks.0": 3, "blocks.1": 3}


@pytest.mark.parametrize("with_example", [False, True])
def test_what_lies_inside_serves(x, with_example):
    """The stack is called in a way that its trace did not foresee; its blocks are not concerned."""

    class Scaled(Stack):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(x) * factor

    torch.manual_seed(0)
    model = Scaled().eval()
    optimized = fxfuse.optimize(model, x if with_example else None)
    before = len(fxfuse.report(optimized).fused)
    run(optimized, model, x, PATIENCE - 1, factor=2.0)
    assert fused(optimized) == {}
    run(optimized, model, x, 2, factor=2.0)
    assert fused(optimized) == {"blocks.0": 2, "blocks.1": 2}
    run(optimized, model, x, 1)
    assert fused(optimized) == {"": 1, "blocks.0": 2, "blocks.1": 2}, "the outer region serves whenever it can"
    report = fxfuse.report(optimized)
    assert len(report.fused) == before, "events are counted once"
    assert "traced again inside, regions now: blocks.0, blocks.1" in report.notes[0]
    run(optimized, model, x, GIVE_UP, factor=2.0)
    assert "was taken out" in report.notes[-1]
    assert set(fxfuse.graphs(optimized)) == {"blocks.0", "blocks.1"}
    run(optimized, model, x, 2)
    assert fused(optimized) == {"": 1, "blocks.0": GIVE_UP + 2 + 2, "blocks.1": GIVE_UP + 2 + 2}
    fxfuse.restore(optimized)
    assert all("forward" not in m.__dict__ for m in optimized.modules())


def test_a_copy_traces_again_by_itself(pair, x):
    model, optimized = pair
    copied, twin = copy.deepcopy(optimized), copy.deepcopy(model)
    add_hook(copied), add_hook(twin)
    run(copied, twin, x, PATIENCE + 2)
    assert calls_of(copied).fused == 2
    assert fxfuse.report(optimized).notes == []
    run(optimized, model, x, 1)
    assert calls_of(optimized).fused == 1


def test_a_part_that_was_copied_by_itself_is_left_to_itself(x):
    """It belongs to no optimized model: its calls are right, and change nothing of the original's."""
    model = Stack().eval()
    model.blocks[0].register_forward_hook(lambda module, args, y: y)  # so that each block is a region
    optimized = fxfuse.optimize(model)
    copied, twin = copy.deepcopy(optimized.blocks[0]), copy.deepcopy(model.blocks[0])
    add_hook(copied), add_hook(twin)
    before = fxfuse.graphs(optimized).keys()
    run(copied, twin, x, PATIENCE + 1)
    assert fxfuse.graphs(optimized).keys() == before
    run(optimized, model, x, 1)
    assert fused(optimized)["blocks.0"] == 1


def test_a_trace_that_fails_costs_the_call_nothing(pair, x, monkeypatch):
    model, optimized = pair
    add_hook(model), add_hook(optimized)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("fxfuse.capture.installed.build_regions", fail)
    run(optimized, model, x, PATIENCE + 2)
    assert fxfuse.report(optimized).notes == ["region . could not be traced again (RuntimeError: out of luck)"]
    assert calls_of(optimized).fallback == PATIENCE + 2
    fxfuse.restore(optimized)


def test_nobody_waits_for_a_trace(pair, x):
    """While another thread traces, the original forward runs; the region is traced again at a later call."""
    model, optimized = pair
    add_hook(model), add_hook(optimized)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    run(optimized, model, x, PATIENCE + 2)
    assert calls_of(optimized).fallback == PATIENCE + 2
    done.set()
    thread.join()
    run(optimized, model, x, 2)
    assert calls_of(optimized).fused == 1


def test_many_threads_while_a_region_is_traced_again(x):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(x)))

    torch.manual_seed(0)
    model = Block().eval()
    optimized = fxfuse.optimize(model)
    hook = lambda module, args, y: y * 2  # noqa: E731
    model.down.register_forward_hook(hook), optimized.down.register_forward_hook(hook)
    wrong: list[str] = []

    def serve() -> None:
        with torch.no_grad():
            for _ in range(30):
                try:
                    if not right(optimized(x), model, x):
                        wrong.append("another answer")
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    assert calls_of(optimized).fused
