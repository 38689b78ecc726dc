"""One optimized model served from eight threads while others are optimized and restored, and modes toggle.

``python -m tests.optimize.soak --seconds 600`` prints what ran and ends with status 1 at the first wrong answer or
exception; the suite runs the same for a second.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

import fxfuse
from tests.models.answers import right

WIDTH, HIDDEN, ROWS = 64, 256, 3


class Block(nn.Module):
    """Its answer says in which mode it ran, so that any mixture of flags has answers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.act(self.up(x)))
        return x - y if self.training else x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.relu(self.head(x))


Serve = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _no_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def _inference(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(x)


def _gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    torch.autograd.grad(y.sum(), next(model.parameters()))
    return y.detach()


def _autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def _vmap(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.func.vmap(model)(x)


def _toggling(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Calls in three modes, of which the last is handed back."""
    _gradients(model, x)
    _inference(model, x)
    return _no_grad(model, x)


SERVERS: tuple[Serve, ...] = (_no_grad, _no_grad, _inference, _gradients, _toggling, _toggling, _autocast, _vmap)


class Soak:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model().eval()
        self.x = torch.randn(ROWS, WIDTH)
        self.served = fxfuse.optimize(self.model, self.x)
        # Twins of each mixture of flags, to be asked whether an answer is right.
        self.twins = []
        for flags in itertools.product((False, True), repeat=2):
            twin = copy.deepcopy(self.model)
            for block, flag in zip(twin.blocks, flags, strict=True):
                block.train(flag)
            self.twins.append(twin)
        self.stop = threading.Event()
        self.wrong: list[str] = []
        self.calls: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        jobs: list[tuple[str, Callable[[], None]]] = []
        for i, serve in enumerate(SERVERS):
            known = {self.key(serve(twin, self.x)) for twin in self.twins}
            jobs.append((f"{i} {serve.__name__.strip('_')}", lambda serve=serve, known=known: self.ask(serve, known)))
        jobs += [
            ("optimize", self.optimize_others),
            ("optimize shared", self.optimize_shared),
            ("flags", self.toggle_flags),
        ]
        threads = [threading.Thread(target=self.repeat, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.join()

    def repeat(self, name: str, job: Callable[[], None]) -> None:
        while not self.stop.is_set():
            try:
                job()
                self.calls[name] += 1
            except Exception as error:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}")
                self.stop.set()

    @staticmethod
    def key(answer: torch.Tensor) -> bytes:
        return answer.detach().float().numpy().tobytes()

    def ask(self, serve: Serve, known: set[bytes]) -> None:
        """An answer that no twin gives to the last bit is judged against float64, once."""
        for model in (self.served, self.model):
            answer = serve(model, self.x)
            if self.key(answer) not in known:
                with torch.no_grad():
                    assert any(right(answer.clone(), twin, self.x) for twin in self.twins), "a wrong answer"
                known.add(self.key(answer))

    def optimize_others(self) -> None:
        """A model of its own: optimized, copied, sent, restored."""
        model = Model().eval()
        expected = _no_grad(model, self.x)
        for example in (None, self.x):
            ours = fxfuse.optimize(model, example, inplace=example is None)
            for one in (ours, copy.deepcopy(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours))):
                assert right(_no_grad(one, self.x), model, self.x), "a wrong answer of a copy"
            fxfuse.restore(ours)
            assert torch.equal(_no_grad(ours, self.x), expected), "restored, it answers otherwise"

    def optimize_shared(self) -> None:
        """The model whose parameters are served, optimized again beside it; hooks come and go meanwhile."""
        ours = fxfuse.optimize(self.model, self.x)
        handle = ours.blocks[0].register_forward_hook(lambda m, a, y: None)
        _no_grad(ours, self.x)
        handle.remove()
        fxfuse.restore(ours)

    def toggle_flags(self) -> None:
        for model in (self.served, self.model):
            for block in (*model.blocks, model):
                block.train(not block.training)
                time.sleep(0.001)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    soak = Soak()
    soak.run(parser.parse_args().seconds)
    for name, count in sorted(soak.calls.items()):
        print(f"{name:16} {count} rounds")
    print(fxfuse.report(soak.served).calls)
    print("\n".join(soak.wrong) or "no wrong answer, no exception")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
