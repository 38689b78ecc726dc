"""Whatever rewrites, casts or replaces parameters and buffers: the next call computes with the new ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fxfuse
from tests.models.answers import right
from tests.optimize.model import HIDDEN, MLP, WIDTH, Change, assert_answers, assert_follows, same_bits, same_weights


def _loaded(**kwargs: Any) -> Change:
    def change(m: MLP) -> None:
        torch.manual_seed(1)
        m.load_state_dict({name: torch.randn_like(v) for name, v in m.state_dict().items()}, **kwargs)

    return change


def _loaded_in_part(m: MLP) -> None:
    result = m.load_state_dict({"up.weight": torch.full((HIDDEN, WIDTH), 0.1), "other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["other"]


def _each(write: Callable[[torch.Tensor], Any]) -> Change:
    def change(m: MLP) -> None:
        for parameter in m.parameters():
            write(parameter)

    return change


def _numpy(parameter: torch.Tensor) -> None:
    parameter.detach().numpy()[...] *= 2


def _data(value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(m: MLP) -> None:
        m.up.weight.data = value(m.up.weight.data)

    return change


def _merged(m: MLP) -> None:
    torch.manual_seed(2)
    m.up.weight.data += torch.randn(HIDDEN, 4) @ torch.randn(4, WIDTH)


def _tied(m: MLP) -> None:
    m.down.weight = nn.Parameter(m.down.weight.detach() * 2)
    m.up.weight.data = m.down.weight.data.t()


def _buffer(m: MLP) -> None:
    m.offset = torch.ones(WIDTH)


WRITES: dict[str, Change] = {
    "load_state_dict": _loaded(),
    "load_state_dict assign": _loaded(assign=True),
    "load_state_dict strict=False": _loaded_in_part,
    "in place": lambda m: torch._foreach_mul_([p.detach() for p in m.parameters()], 2.0),
    "write to data": _each(lambda p: p.data.mul_(2)),
    "write through numpy": _each(_numpy),
    "write through a view": _each(lambda p: p.detach().view(-1)[: p.numel() // 2].fill_(0.5)),
    "init": _each(lambda p: nn.init.constant_(p, 0.1)),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()).detach() * 2, m.parameters()
    ),
    "merge of a low-rank update": _merged,
    "other memory": _data(lambda w: w.clone() * 2),
    "other strides": _data(lambda w: (w * 2).t().contiguous().t()),
    "a view with gaps": _data(lambda w: torch.cat([w, w], 1)[:, ::2]),
    "no strides": _data(lambda w: torch.full((1, 1), 0.01).expand(w.shape)),
    "one memory": _tied,
    "another buffer": _buffer,
    "buffer in place": lambda m: m.offset.fill_(2.0),
    "clamp": lambda m: m.up.weight.data.clamp_(-0.01, 0.01),
}


@pytest.mark.parametrize("write", WRITES)
def test_new_values(pair, x, write):
    assert_follows(pair, WRITES[write], x, runs="fused")


def test_a_low_rank_update_merged_and_taken_out_again(pair, x):
    model, optimized = pair
    before, delta = model.up.weight.detach().clone(), torch.randn(HIDDEN, 4) @ torch.randn(4, WIDTH)
    with torch.no_grad():
        for sign in (1, -1, 1):
            optimized.up.weight.data += sign * delta
            assert_answers(optimized, model, x, runs="fused")
        assert not torch.equal(model.up.weight, before)


OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


def _steps() -> Iterator[Any]:
    for name, cls in sorted(OPTIMIZERS.items()):
        takes = inspect.signature(cls).parameters
        yield pytest.param(cls, {}, id=name)
        for way in ("foreach", "fused"):
            # Some take fused and refuse it on the CPU.
            if way in takes and (way == "foreach" or name in ("Adagrad", "Adam", "AdamW", "SGD")):
                yield pytest.param(cls, {way: True}, id=f"{name}-{way}")


@pytest.mark.parametrize(("cls", "way"), [*_steps()])
def test_a_step_of_an_optimizer(pair, x, cls, way):
    model, optimized = pair
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert_answers(optimized, model, x, runs="fused")
    for m in (optimized, twin):
        # Muon takes matrices alone.
        parameters = [p for p in m.parameters() if p.ndim == 2 or cls.__name__ != "Muon"]
        optimizer = cls(parameters, lr=0.1, **way)

        def loss(m: nn.Module = m) -> torch.Tensor:
            m.zero_grad()
            value = m(x).square().sum()
            value.backward()
            return value

        for _ in range(2):
            loss()
            if cls is torch.optim.SparseAdam:
                for parameter in parameters:
                    parameter.grad = parameter.grad.to_sparse()
            optimizer.step(loss if cls is torch.optim.LBFGS else None)
    assert fxfuse.report(optimized).calls[""].reasons.keys() == {"gradients are needed"}
    assert same_weights(optimized, twin)
    with torch.no_grad():
        assert_answers(optimized, twin, x, runs="fused")


@pytest.mark.parametrize("averaged", [torch.optim.swa_utils.AveragedModel, copy.deepcopy])
def test_averages_of_models(pair, x, averaged):
    model, optimized = pair
    ours, theirs = averaged(optimized), averaged(model)
    for average in (ours, theirs):
        for parameter in average.parameters():
            parameter.data.lerp_(torch.ones_like(parameter), 0.1)
    with torch.no_grad():
        assert right(ours(x), theirs, x)
        assert_answers(optimized, model, x, runs="fused")


class Double(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * 2


def _eager_weight_norm(m: MLP) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(m.up)
    m.up.weight_g.data.mul_(2)


def _parametrized(register: Callable[[nn.Module], Any]) -> Change:
    def change(m: MLP) -> None:
        torch.manual_seed(3)
        register(m.up)

    return change


def _weight_norm(module: nn.Module) -> None:
    parametrizations.weight_norm(module)
    module.parametrizations.weight.original0.data.mul_(2)


PARAMETRIZATIONS: dict[str, Change] = {
    "weight_norm of old": _eager_weight_norm,
    "weight_norm": _parametrized(_weight_norm),
    "spectral_norm of old": _parametrized(lambda up: nn.utils.spectral_norm(up)),
    "spectral_norm": _parametrized(lambda up: parametrizations.spectral_norm(up)),
    "orthogonal": _parametrized(lambda up: parametrizations.orthogonal(up)),
    "one's own": _parametrized(lambda up: nn.utils.parametrize.register_parametrization(up, "weight", Double())),
    "of the bias": _parametrized(lambda up: nn.utils.parametrize.register_parametrization(up, "bias", Double())),
    "pruning": _parametrized(lambda up: prune.random_unstructured(up, "weight", 0.5)),
    "pruning of rows": _parametrized(lambda up: prune.ln_structured(up, "weight", 0.5, n=2, dim=0)),
}


@pytest.mark.parametrize("how", PARAMETRIZATIONS)
def test_parametrized_after(pair, x, how):
    assert_follows(pair, PARAMETRIZATIONS[how], x, runs="")
    assert type(pair[0].up) is nn.Linear


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("how", PARAMETRIZATIONS)
def test_parametrized_before(x, how, example):
    """The answers follow the parametrization, also after a step and after it is removed."""
    plain, model, twin = _twins(3)
    for m in (model, twin):
        PARAMETRIZATIONS[how](m)
    optimized = fxfuse.optimize(model, x if example else None)

    def same() -> bool:
        with torch.no_grad():
            return right(optimized(x), twin, x)

    assert same()
    with torch.no_grad():
        assert not same_bits(twin(x), plain(x))
    for m in (optimized, twin):
        m(x).square().mean().backward()
        torch.optim.SGD(m.parameters(), lr=1.0).step()
    assert same()
    for m in (optimized, twin):
        _remove(m.up)
        assert {*m.up.state_dict()} == {*plain.up.state_dict()}
    assert same()


def _twins(count: int) -> list[MLP]:
    models = []
    for _ in range(count):
        torch.manual_seed(0)
        models.append(MLP().eval())
    return models


def _remove(up: nn.Module) -> None:
    for name in ("weight", "bias"):
        if nn.utils.parametrize.is_parametrized(up, name):
            nn.utils.parametrize.remove_parametrizations(up, name)
        if any(isinstance(h, prune.BasePruningMethod) and h._tensor_name == name for h in _pre_hooks(up)):
            prune.remove(up, name)
    kinds = {type(h).__name__ for h in _pre_hooks(up)}
    if "WeightNorm" in kinds:
        nn.utils.remove_weight_norm(up)
    if "SpectralNorm" in kinds:
        nn.utils.remove_spectral_norm(up)


def _pre_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values()]
