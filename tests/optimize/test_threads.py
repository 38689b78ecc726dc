"""An optimized model in many threads, while others are optimized and modes toggle; soak.py runs it for longer."""

from __future__ import annotations

import threading
from typing import Any

import torch

import fxfuse
from tests.optimize.model import calls_of
from tests.optimize.soak import SERVERS, Model, Soak


def test_served_while_others_are_optimized():
    soak = Soak()
    soak.run(1.0)
    assert not soak.wrong, soak.wrong[:3]
    assert len(soak.calls) == len(SERVERS) + 3, f"some never ran: {soak.calls}"
    calls = calls_of(soak.served)
    assert calls.fused > 0
    assert "gradients are needed" in calls.reasons
    assert calls.fallback == 0


def test_a_soak_finds_a_wrong_answer():
    soak = Soak()
    wrong = soak.served.head.forward
    soak.served.head.forward = lambda x: wrong(x) * 2
    soak.run(1.0)
    assert any("a wrong answer" in text for text in soak.wrong)


def test_other_threads_go_on_while_one_traces(x):
    """A forward that waits for another thread, in the middle of being traced, gets what it waits for."""
    asked, answered = threading.Event(), threading.Event()
    served = Model().eval()
    optimized = fxfuse.optimize(served)
    waited: list[bool] = []

    class Waits(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.set()
            waited.append(answered.wait(20))
            return super().forward(x)

    answers: list[Any] = []

    def serve() -> None:
        assert asked.wait(20)
        with torch.no_grad():
            answers.extend((optimized(x), served(x)))
        optimized(x).sum().backward()
        answered.set()

    thread = threading.Thread(target=serve)
    thread.start()
    fxfuse.optimize(Waits().eval())
    thread.join()
    assert waited
    assert all(waited)
    assert len(answers) == 2
    assert calls_of(optimized).fused == calls_of(optimized).plain == 1


def test_taken_out_and_restored_while_it_is_called(x):
    """Regions that come and go under the feet of those who call them."""
    model = Model().eval()
    with torch.no_grad():
        plain = model(x)
        fused = fxfuse.optimize(model, x)(x)
    stop, wrong = threading.Event(), []

    def ask() -> None:
        with torch.no_grad():
            while not stop.is_set():
                try:
                    answer = model(x)
                    if not (torch.equal(answer, plain) or torch.equal(answer, fused)):
                        wrong.append("a wrong answer")
                except Exception as error:
                    wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(8):
            fxfuse.optimize(model, x if turn % 2 else None, inplace=True)
            fxfuse.restore(model)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:3]
