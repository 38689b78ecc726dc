"""Questions about PyTorch's state that a forward asks while it is traced.

The answer becomes an assumption, checked at each call, or there is no graph. Random states belong here as well: what
is drawn or seeded by other means than an operator would happen in the trace, and never again.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fxfuse.capture.value import Untraceable

ANSWERED = (
    "is_grad_enabled",
    "get_default_dtype",
    "get_default_device",
    "are_deterministic_algorithms_enabled",
    "get_float32_matmul_precision",
    "get_num_threads",
)
"""Functions of torch whose answer a region can check. Autocast is off in every trace and in every fused call."""
_REFUSED = {
    "is_inference_mode_enabled": "asks whether inference mode is on, which may be so or not",
    **dict.fromkeys(
        ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state"), "handles the state of random numbers"
    ),
}
_NOT_A_FORWARD = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def patches(answers: dict[str, Any]) -> dict[int, Callable[..., Any]]:
    """id of each such function -> what to put in its place during a trace by this thread. ``answers`` gets the answers.

    PyTorch's own Python code, and other threads, are answered as ever.
    """
    thread = threading.get_ident()

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            by_forward = not sys._getframe(1).f_code.co_filename.startswith(_NOT_A_FORWARD)
            if by_forward and threading.get_ident() == thread:
                if name in _REFUSED:
                    raise Untraceable(_REFUSED[name])
                answers[name] = answer
            return answer

        return asked

    def is_autocast_enabled(*args: Any, **kwargs: Any) -> bool:
        # Of a device that is a value of the graph, torch's parser would refuse the name.
        named = any(isinstance(v, fx.Proxy) for v in (*args, *kwargs.values()))
        return False if named else torch_is_autocast_enabled(*args, **kwargs)

    # As they are now: Dynamo replaces some of them when it is imported.
    torch_is_autocast_enabled = vars(torch)["is_autocast_enabled"]
    answering = {id(torch_is_autocast_enabled): is_autocast_enabled}
    return answering | {id(vars(torch)[name]): wrap(name, vars(torch)[name]) for name in (*ANSWERED, *_REFUSED)}


class RandomStates:
    """The states of Python's and NumPy's random numbers, and torch's on the CPU."""

    def __init__(self) -> None:
        self.python, self.torch = random.getstate(), torch.get_rng_state()
        self.numpy = sys.modules.get("numpy.random")  # where it was not imported, nobody draws from it
        self.of_numpy = self.numpy.get_state(legacy=False) if self.numpy else None

    def moved(self) -> str | None:
        """Whose numbers were drawn or seeded since."""
        if random.getstate() != self.python:
            return "Python's"
        if self.numpy and pickle.dumps(self.numpy.get_state(legacy=False)) != pickle.dumps(self.of_numpy):
            return "NumPy's"
        if threading.active_count() > 1:
            # Other threads may draw from torch's as they serve. Operators that draw are in the graph; and seeding is
            # seen as it is called.
            return None
        with _disable_current_modes():
            return None if torch.equal(torch.get_rng_state(), self.torch) else "torch's"

    def put_back(self) -> None:
        """Undo draws of Python's and NumPy's; torch's are undone by ``fork_rng``."""
        random.setstate(self.python)
        if self.numpy:
            self.numpy.set_state(self.of_numpy)
