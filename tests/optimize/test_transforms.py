"""Compilers, exporters, tracers, function transforms, modes and subclasses: the fused kernels stay out of their way."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fxfuse
from tests.models.answers import right
from tests.optimize.model import HIDDEN, MLP, WIDTH, assert_answers, calls_of


def _frozen(pair: tuple[MLP, MLP]) -> tuple[MLP, MLP]:
    pair[0].requires_grad_(False)
    return pair


# compilers and exporters


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compile_fullgraph(pair, x, dynamic, grad):
    model, optimized = pair
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(gm: Any, example: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(optimized, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        for given in (x, torch.randn(7, WIDTH), torch.randn(9, WIDTH)):
            got = compiled(given)
            assert right(got, model, given)
            assert got.requires_grad == grad
    assert len(graphs) >= 1
    assert calls_of(optimized).fused == calls_of(optimized).fallback == 0
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


def test_compile_of_what_calls_it(pair, x):
    """The model in the middle of a compiled function, whose weights change afterwards."""
    model, optimized = pair
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return optimized(x * 2) + 1

    with torch.no_grad():
        for _ in range(2):
            assert right(step(x) - 1, nn.Sequential(_Times(2), model), x)
            optimized.load_state_dict({name: value * 1.5 for name, value in optimized.state_dict().items()})


class _Times(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(pair, x, strict, dynamic):
    """An exported program is of ATen operators alone, so that it is loaded without fxfuse."""
    model, optimized = pair
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}} if dynamic else None
    with torch.no_grad():
        exported = torch.export.export(optimized, (x,), dynamic_shapes=shapes, strict=strict)
        assert "fxfuse" not in exported.graph_module.code
        assert exported.state_dict.keys() == model.state_dict().keys()
        given = torch.randn(5, WIDTH) if dynamic else x
        assert right(exported.module()(given), model, given)
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        assert right(torch.export.load(file).module()(given), model, given)
        assert_answers(optimized, model, x, runs="fused")
    assert calls_of(optimized).fallback == 0


def test_jit(pair, x):
    model, optimized = pair
    with torch.no_grad():
        traced = torch.jit.trace(optimized, (x,))
        assert "fxfuse" not in str(traced.inlined_graph)
        assert right(traced(torch.randn_like(x)), model, x) is False  # another argument, another answer
        assert right(traced(x), model, x)
        again = torch.jit.trace_module(optimized, {"forward": (x,)})
        assert right(again(x), model, x)
        assert_answers(optimized, model, x, runs="fused")


# function transforms

func = torch.func


def _functional(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda state, x: func.functional_call(model, state, (x,))


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "vmap": lambda m, x: func.vmap(m)(x),
    "vmap of vmap": lambda m, x: func.vmap(func.vmap(m))(x[None]),
    "vmap over weights": lambda m, x: func.vmap(_functional(m), (0, None))(
        {name: torch.stack([p, p * 2]) for name, p in m.named_parameters()}, x
    ),
    "grad": lambda m, x: func.grad(lambda x: m(x).sum())(x),
    "grad of weights": lambda m, x: func.grad(lambda s: _functional(m)(s, x).square().sum())(
        dict(m.named_parameters())
    ),
    "per-sample gradients": lambda m, x: func.vmap(
        func.grad(lambda s, x: _functional(m)(s, x).square().sum()), (None, 0)
    )(dict(m.named_parameters()), x),
    "jacrev": lambda m, x: func.jacrev(m)(x),
    "jacfwd": lambda m, x: func.jacfwd(m)(x),
    "hessian": lambda m, x: func.hessian(lambda x: m(x).square().sum())(x[:1]),
    "jvp": lambda m, x: func.jvp(m, (x,), (torch.ones_like(x),)),
    "vjp": lambda m, x: func.vjp(m, x)[1](torch.ones_like(x)),
    "linearize": lambda m, x: func.linearize(m, x)[1](torch.ones_like(x)),
    "functional_call": lambda m, x: _functional(m)({name: p * 2 for name, p in m.named_parameters()}, x),
    "functionalize": lambda m, x: func.functionalize(m)(x),
    "forward-mode": lambda m, x: _dual(m, x),
}


def _dual(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        out = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return tuple(torch.autograd.forward_ad.unpack_dual(out))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(pair, x, name, grad):
    """The plain forward runs under a transform: what it gives is equal to the last bit."""
    model, optimized = _frozen(pair)
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
    calls = calls_of(optimized)
    before = calls.fused
    with torch.set_grad_enabled(grad):
        ours, theirs = (TRANSFORMS[name](m, x) for m in (optimized, model))
        # These call it once where no transform is active.
        assert calls.fused == before + (name in ("functional_call", "linearize"))
        assert calls.fallback == 0
        if name == "functional_call":
            twin = copy.deepcopy(model)
            twin.load_state_dict({n: p * 2 for n, p in model.named_parameters()}, strict=False)
            assert right(ours, twin, x)
        else:
            assert calls.plain > 0
            tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), ours, theirs)
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


# modes


class Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Names, Operators])
def test_modes_see_the_models_own_operations(pair, x, mode):
    model, optimized = pair
    with torch.no_grad():
        with mode() as theirs:
            model(x)
        with mode() as ours:
            assert_answers(optimized, model, x, runs="plain", why=_why(mode))
    assert theirs.seen
    assert ours.seen[: len(theirs.seen)] == theirs.seen


def _why(mode: type) -> str:
    return f"a torch {'function' if mode is Names else 'dispatch'} mode is active"


def test_flops(pair, x):
    model, optimized = pair
    with torch.no_grad():
        counts = []
        for m in (model, optimized):
            with FlopCounterMode(display=False) as counter:
                m(x)
            counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * 2 * 3 * WIDTH * HIDDEN


def test_fake_tensors(pair):
    """A fake forward has the model's own shapes and dtypes, with fake and with real weights."""
    model, optimized = pair
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for m in (optimized, model):
            got = m(torch.empty(5, WIDTH))
            assert (type(got).__name__, got.shape, got.dtype) == ("FakeTensor", (5, WIDTH), torch.float32)
        fake = {name: mode.from_tensor(p) for name, p in model.state_dict().items()}
        got = func.functional_call(optimized, fake, (torch.empty(2, 5, WIDTH),))
        assert got.shape == (2, 5, WIDTH)
    with torch.no_grad():
        # Outside of the mode its tensors carry it along, as a subclass.
        assert type(optimized(mode.from_tensor(torch.ones(3, WIDTH)))).__name__ == "FakeTensor"
        real = torch.randn(3, WIDTH)
        assert_answers(optimized, model, real, runs="fused")


@pytest.mark.parametrize("example", [False, True])
def test_optimized_under_fake_tensors(x, example):
    """A model of fake tensors may be optimized; it stays one."""
    with FakeTensorMode():
        model = MLP().eval()
        given = torch.empty(3, WIDTH)
        optimized = fxfuse.optimize(model, given if example else None)
        with torch.no_grad():
            assert optimized(given).shape == (3, WIDTH)
        assert all(a is b for a, b in zip(optimized.parameters(), model.parameters(), strict=True))


def test_saved_tensors_hooks(pair, x):
    model, optimized = pair
    packed: list[tuple[int, ...]] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(t.shape))
        return t * 2

    seen = []
    for m in (optimized, model):
        given = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t / 2):
            y = m(given)
        y.sum().backward()
        seen.append((packed[:], given.grad))
        del packed[:]
    assert seen[0][0] == seen[1][0] != []
    assert torch.equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(pair, x, reentrant):
    model, optimized = pair
    gradients = []
    for m in (optimized, model):
        given = x.clone().requires_grad_()
        m.zero_grad()
        checkpoint(m, given, use_reentrant=reentrant).square().sum().backward()
        gradients.append([given.grad, *(p.grad.clone() for p in m.parameters())])
    assert all(map(torch.equal, *gradients))
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")


def test_anomaly_mode(pair, x):
    model, optimized = pair
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_answers(optimized, model, x, runs="plain", why="gradients are needed")
        optimized(x).sum().backward()
        with torch.no_grad():
            assert_answers(optimized, model, x, runs="fused")


def test_deterministic_algorithms(pair, x):
    model, optimized = pair
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            assert_answers(optimized, model, x, runs="fused")
            assert torch.equal(optimized(x), optimized(x))
    finally:
        torch.use_deterministic_algorithms(False)


def test_profilers(pair, x):
    model, optimized = pair
    with torch.no_grad(), torch.profiler.profile(with_stack=True, with_modules=True, record_shapes=True) as profile:
        assert_answers(optimized, model, x, runs="fused")
    assert profile.events()
    with torch.no_grad(), torch.autograd.profiler.profile():
        assert_answers(optimized, model, x, runs="fused")


# tensor subclasses


class Marked(torch.Tensor):
    """A subclass that does nothing."""


class Logged(torch.Tensor):
    """A wrapper whose operators are seen by its __torch_dispatch__."""

    seen: list[str] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs or {}))
        return tree_map(lambda v: cls(v) if isinstance(v, torch.Tensor) else v, out)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Logged) else value


@pytest.mark.parametrize("where", ["argument", "weight", "buffer"])
@pytest.mark.parametrize("kind", [Marked, Logged])
def test_subclasses(pair, x, kind, where):
    model, optimized = _frozen(pair)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
        wrap = (lambda t: t.as_subclass(Marked)) if kind is Marked else Logged
        given = wrap(x) if where == "argument" else x
        for m in (optimized, twin):
            if where == "weight":
                m.up.weight = nn.Parameter(wrap(m.up.weight.detach().clone()), requires_grad=False)
            elif where == "buffer":
                m._buffers["offset"] = wrap(m.offset)
        calls = calls_of(optimized)
        before, went = calls.fused, calls.plain + calls.fallback
        del Logged.seen[:]
        got = optimized(given)
        ours = Logged.seen[:]
        del Logged.seen[:]
        expected = twin(given)
        assert type(got) is type(expected)
        assert ours == Logged.seen
        assert torch.equal(_inner(got), _inner(expected))
        assert (calls.fused, calls.plain + calls.fallback) == (before, went + 1)


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_parameters_of_data_parallel_wrappers(pair, x, context):
    """torch's own wrapper, which on the CPU calls the module itself."""
    model, optimized = pair
    wrapped = nn.DataParallel(optimized)
    with context():
        assert right(wrapped(x), model, x)
