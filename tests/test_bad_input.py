"""Whatever optimize is given: a clear error or a refusal in the report, and the thing as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import errors
from tests.models.answers import right

WIDTH, HIDDEN = 64, 256


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).eval()


class Around(nn.Module):
    """An MLP behind a part that is not for fxfuse."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.mlp = part, mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.part(x))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, WIDTH)


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Attributes, values in them, parameters, buffers and random state."""
    attributes = {path: dict(m.__dict__) for path, m in model.named_modules()}
    tables = {path: (dict(m._parameters), dict(m._buffers), dict(m._modules)) for path, m in model.named_modules()}
    state = copy.deepcopy({key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)})
    random = torch.random.get_rng_state()
    yield
    assert torch.equal(torch.random.get_rng_state(), random)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == attributes[path].keys()
        assert all(module.__dict__[name] is value for name, value in attributes[path].items())
        now = (module._parameters, module._buffers, module._modules)
        assert all([*a.items()] == [*b.items()] or a.keys() == b.keys() for a, b in zip(now, tables[path], strict=True))
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and not value.is_meta:
            assert torch.equal(value.nan_to_num(), state[key].nan_to_num())


@pytest.mark.parametrize(
    "thing",
    [None, 3, "model", nn.Linear, [nn.Linear(2, 2)], mlp().state_dict(), torch.ones(2), torch.relu, F.gelu, len],
    ids=lambda thing: type(thing).__name__,
)
def test_nothing_that_can_be_optimized(thing):
    with pytest.raises(
        TypeError, match=r"optimize\(\) takes an nn.Module, a torch.fx.GraphModule or a Python function"
    ) as e:
        fxfuse.optimize(thing)
    assert type(thing).__name__ in str(e.value)
    for ask in (fxfuse.report, fxfuse.graphs, fxfuse.restore):
        with pytest.raises(errors.NotOptimized, match=r"did not come from fxfuse.optimize\(\)"):
            ask(thing)


@pytest.mark.parametrize(
    "model", [nn.Module(), nn.ModuleList(), nn.Identity(), nn.ReLU()], ids=lambda m: type(m).__name__
)
def test_nothing_to_fuse(model):
    with as_it_was(model):
        optimized = fxfuse.optimize(model)
    report = fxfuse.report(optimized)
    assert not report.fused
    assert report.uncaptured or report.regions[0].note == "nothing in it is made faster"
    assert "forward" not in optimized.__dict__


def test_no_tensors():
    class Size(nn.Module):
        def forward(self, n: int) -> int:
            return n + 1

    optimized = fxfuse.optimize(Size(), 3)
    assert optimized(3) == 4
    assert optimized(5) == 6
    assert not fxfuse.report(optimized).fused


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        (torch.randn(3, 5), None, "RuntimeError"),
        ("text", None, "TypeError"),
        ((), {"x": torch.randn(3, WIDTH)}, "TypeError"),
        ((torch.randn(3, WIDTH), 1), None, "TypeError"),
        ((), None, "TypeError"),
    ],
)
def test_inputs_that_do_not_fit(x, args, kwargs, why):
    model = mlp()
    with as_it_was(model), pytest.warns(errors.ExampleWarning, match=f"Sequential raised {why} on them"):
        optimized = fxfuse.optimize(model, args, kwargs)
    report = fxfuse.report(optimized)
    assert len(report.notes) == 1
    assert "example_inputs=(...)" in report.notes[0]
    assert len(report.fused) == 1
    with torch.no_grad():
        optimized(x)
    assert report.calls[""].fused == 1


def test_a_function_with_inputs_that_do_not_fit(x):
    w = torch.randn(WIDTH, 8)

    def act(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    with pytest.warns(errors.ExampleWarning, match="act raised RuntimeError on them"):
        optimized = fxfuse.optimize(act, torch.randn(3, 5))
    assert torch.equal(optimized(x), act(x))


def test_a_forward_that_raises(x):
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.count, self.seen = mlp(), 0, []
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.seen.append(x)
            self.total.add_(torch.rand(1))
            raise ValueError("not today")

    model = Raising().eval()
    with (
        as_it_was(model),
        pytest.warns(errors.ExampleWarning, match=r"Raising raised ValueError on them \(not today\)"),
    ):
        optimized = fxfuse.optimize(model, x)
    assert (model.count, model.seen, model.total.item()) == (0, [], 0)
    report = fxfuse.report(optimized)
    place = f"test_bad_input.py:{Raising.forward.__code__.co_firstlineno + 4}"
    assert [(u.path, u.reason) for u in report.uncaptured] == [("", f"not today (ValueError, {place})")]
    assert [e.region for e in report.fused] == ["mlp"]
    with pytest.raises(ValueError, match="not today"):
        optimized(x)


def test_on_meta():
    with torch.device("meta"):
        model = mlp()
    with as_it_was(model):
        optimized = fxfuse.optimize(model)
    assert all(p.is_meta for p in optimized.parameters())
    with torch.no_grad():
        assert optimized(torch.empty(5, WIDTH, device="meta")).shape == (5, WIDTH)
        optimized.to_empty(device="cpu")
        optimized.load_state_dict(mlp().state_dict())
        given = torch.randn(3, WIDTH)
        twin = mlp()
        twin.load_state_dict(optimized.state_dict())
        assert right(optimized(given), twin, given)
    assert fxfuse.report(optimized).calls[""].fused == 2


@pytest.mark.parametrize("with_example", [False, True])
def test_half_of_it_elsewhere(x, with_example):
    model = mlp()
    model[2].to("meta")
    with as_it_was(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.ExampleWarning)
        optimized = fxfuse.optimize(model, x if with_example else None)
    assert [p.device.type for p in optimized.parameters()] == ["cpu", "cpu", "meta", "meta"]
    with torch.no_grad():
        with pytest.raises(RuntimeError) as expected:
            model(x)
        with pytest.raises(RuntimeError) as got:
            optimized(x)
    assert str(got.value) == str(expected.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("with_example", [False, True])
def test_quantized(x, with_example):
    quantized = torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear})
    for model in (quantized, Around(quantized).eval()):
        with as_it_was(model):
            optimized = fxfuse.optimize(model, x if with_example else None)
        report = fxfuse.report(optimized)
        assert len(report.fused) == (0 if model is quantized else 1)
        assert report.uncaptured or any(r.note or r.installed for r in report.regions)
        with torch.no_grad():
            if model is quantized:
                assert torch.equal(optimized(x), model(x))
            else:
                assert right(optimized(x), model.mlp, quantized(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted(x):
    for scripted in (torch.jit.script(mlp()), torch.jit.trace(mlp(), x)):
        with pytest.raises(errors.UnsupportedModel, match="is scripted"):
            fxfuse.optimize(scripted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("with_example", [False, True])
def test_a_scripted_part(x, with_example):
    model = Around(torch.jit.script(mlp())).eval()
    optimized = fxfuse.optimize(model, x if with_example else None)
    assert optimized.part is model.part
    report = fxfuse.report(optimized)
    assert len(report.fused) == 1
    assert [(u.path, u.reason) for u in report.uncaptured if u.path == "part"] == [("part", "it is scripted")]
    with torch.no_grad():
        assert right(optimized(x), model.mlp, model.part(x))


@pytest.mark.parametrize("with_example", [False, True])
def test_weights_that_are_not_finite(x, with_example):
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[1, 0], model[2].bias[3] = float("nan"), float("inf"), float("-inf")
        optimized = fxfuse.optimize(model, x if with_example else None)
        assert len(fxfuse.report(optimized).fused) == 1
        assert right(optimized(x), model, x)
        assert optimized(x).isnan().any()


def test_already_optimized(x):
    optimized = fxfuse.optimize(mlp())
    report = fxfuse.report(optimized)
    assert fxfuse.optimize(optimized, x) is optimized
    assert fxfuse.report(optimized) is report


def test_a_module_that_holds_itself(x):
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp()
            self.__dict__["owner"] = self
            self.mlp.add_module("parent", nn.Identity())
            self.parts = [self.mlp, self]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.owner.parts[0](x)

    model = Loop().eval()
    optimized = fxfuse.optimize(model)
    assert optimized.owner is optimized
    assert optimized.parts[1] is optimized
    with torch.no_grad():
        assert right(optimized(x), model.mlp, x)
