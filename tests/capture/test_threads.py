"""While one thread optimizes, others run the model: each gets its own answers."""

from __future__ import annotations

import sys
import threading

import torch
import torch.nn.functional as F
from torch import nn

import fxfuse

WIDTH = 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if isinstance(x, torch.Tensor) else torch.as_tensor(x)
        return self.down(F.gelu(self.up(x)))


def test_the_model_runs_while_it_is_traced():
    model, given = Model().eval(), torch.randn(4, WIDTH)
    with torch.no_grad():
        expected = model(given)
    stop, wrong, rounds = threading.Event(), [], []

    def run() -> None:
        with torch.no_grad():
            while not stop.is_set():
                try:
                    if not torch.equal(model(given), expected):
                        wrong.append("another answer")
                except Exception as error:
                    wrong.append(repr(error))
                rounds.append(1)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(20):
            optimized = fxfuse.optimize(model, given if turn % 2 else None)
            with torch.no_grad():
                assert torch.equal(optimized(given), expected)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert rounds
    assert not wrong, wrong[:3]


def test_two_threads_optimize_at_once():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that they meet everywhere
    try:
        for _ in range(5):
            _optimize_at_once()
    finally:
        sys.setswitchinterval(interval)


def _optimize_at_once() -> None:
    models = [Model().eval() for _ in range(4)]
    optimized: dict[int, nn.Module] = {}
    threads = [
        threading.Thread(target=lambda i=i, m=m: optimized.update({i: fxfuse.optimize(m, torch.randn(2, WIDTH))}))
        for i, m in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given = torch.randn(3, WIDTH)
    with torch.no_grad():
        for i, model in enumerate(models):
            assert torch.equal(optimized[i](given), model(given))
            assert fxfuse.report(optimized[i]).calls[""].fused == 1


def test_an_optimized_model_runs_in_many_threads():
    model, given = Model().eval(), torch.randn(4, WIDTH)
    optimized = fxfuse.optimize(model)
    optimized.up.register_forward_hook(lambda m, a, y: None)  # so that the region is taken out while all call it
    wrong = []

    def run() -> None:
        with torch.no_grad():
            for _ in range(100):
                try:
                    if not torch.equal(optimized(given), model(given)):
                        wrong.append("another answer")
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    assert "forward" not in optimized.__dict__


def test_a_thread_that_draws_random_numbers_spoils_no_trace():
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(10):
            assert fxfuse.report(fxfuse.optimize(Model().eval(), torch.randn(2, WIDTH))).fused
    finally:
        stop.set()
        thread.join()
