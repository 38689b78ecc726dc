"""Copies, replicas and files: none answers with the original's parameters, none needs fxfuse to load."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import fx, nn

import fxfuse
from fxfuse.report import Calls
from tests.models.answers import right
from tests.optimize.model import HIDDEN, MLP, WIDTH, Stack, assert_answers, calls_of


def test_deepcopy_is_optimized_and_independent(pair, x):
    model, optimized = pair
    copied = copy.deepcopy(optimized)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
        assert not any(a is b for a, b in zip(copied.parameters(), model.parameters(), strict=True))
        twin = copy.deepcopy(model)
        twin.load_state_dict(copied.state_dict())
        assert_answers(copied, twin, x, runs="fused")
        copied.scale = twin.scale = 2.0
        assert_answers(copied, twin, x, runs="fallback")
        assert calls_of(optimized) == Calls()
        assert_answers(optimized, model, x, runs="fused")
    fxfuse.restore(copied)
    assert set(copied.__dict__) == set(model.__dict__)


def test_shallow_copy_answers_with_its_own_parameters(pair, x):
    model, optimized = pair
    copied = copy.copy(optimized)
    copied._modules = dict(optimized._modules)
    copied.up = nn.Linear(WIDTH, HIDDEN)
    twin = copy.copy(model)
    twin._modules = dict(copied._modules)
    with torch.no_grad():
        assert torch.equal(copied(x), twin(x))
        assert_answers(optimized, model, x, runs="fused")
    assert set(copied.__dict__) == set(model.__dict__)


def test_replicas_answer_with_their_own_parameters(x):
    stack = Stack().eval()
    optimized = fxfuse.optimize(stack, x)
    replica = optimized._replicate_for_data_parallel()
    replica.blocks = nn.ModuleList()
    for block in optimized.blocks:
        inner = block._replicate_for_data_parallel()
        for name, child in block._modules.items():
            twin = child._replicate_for_data_parallel()
            for key, parameter in child._parameters.items():
                setattr(twin, key, parameter.detach() * 2)
            setattr(inner, name, twin)
        replica.blocks.append(inner)
    doubled = copy.deepcopy(stack)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
        assert torch.equal(replica(x), doubled(x))
        assert right(optimized(x), stack, x)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_saved_it_is_the_plain_model(pair, x, how):
    model, optimized = pair
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(optimized))
    else:
        file = io.BytesIO()
        torch.save(optimized, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert set(loaded.__dict__) == set(model.__dict__)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
        assert_answers(fxfuse.optimize(loaded), model, x, runs="fused")
        assert_answers(optimized, model, x, runs="fused")


def test_saved_it_loads_without_fxfuse(tmp_path):
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).eval()
    torch.save(fxfuse.optimize(model), tmp_path / "model.pt")
    script = f"""
        import sys
        sys.modules["fxfuse"] = None  # importing it raises
        import torch
        model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        assert model(torch.ones(2, {WIDTH})).shape == (2, {WIDTH})
        assert "forward" not in model.__dict__
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_state_dicts_are_the_models(pair, x, tmp_path):
    """Files of tensors alone, by each way of writing them, go into a plain model and back."""
    model, optimized = pair
    safetensors = pytest.importorskip("safetensors.torch")
    torch.save(optimized.state_dict(), tmp_path / "state.pt")
    safetensors.save_model(optimized, tmp_path / "state.safetensors")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded.keys() == safetensors.load_file(tmp_path / "state.safetensors").keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    new, expected = {name: value + 1 for name, value in loaded.items()}, copy.deepcopy(model)
    expected.load_state_dict(new)
    safetensors.save_file(new, tmp_path / "new.safetensors")
    safetensors.load_model(optimized, tmp_path / "new.safetensors")
    with torch.no_grad():
        assert_answers(optimized, expected, x, runs="fused")


def test_inner_modules_are_copied_alone(x):
    stack = Stack().eval()
    stack.blocks[1].register_forward_hook(lambda m, a, y: None)  # so that it has a region of its own
    optimized = fxfuse.optimize(stack, x)
    block = optimized.blocks[1]
    assert "blocks.1" in fxfuse.report(optimized).calls
    with torch.no_grad():
        for copied in (copy.copy(block), block._replicate_for_data_parallel()):
            assert "forward" not in copied.__dict__
        copied = copy.deepcopy(block)
        for parameter in copied.parameters():
            parameter.mul_(2)
        twin = copy.deepcopy(stack.blocks[1])
        twin.load_state_dict(copied.state_dict())
        assert right(copied(x), twin, x)
        assert right(block(x), stack.blocks[1], x)
    assert calls_of(optimized, "blocks.1").fused == 1


def test_an_inner_module_copied_alone_has_no_say_in_the_model(x):
    stack = Stack().eval()
    stack.blocks[1].register_forward_hook(lambda m, a, y: None)
    optimized = fxfuse.optimize(stack, x)
    copied, twin = copy.deepcopy(optimized.blocks[1]), copy.deepcopy(stack.blocks[1])
    copied.scale = twin.scale = 3.0
    with torch.no_grad():
        for _ in range(100):
            assert torch.equal(copied(x), twin(x))
        assert not fxfuse.report(optimized).notes
        assert right(optimized(x), stack, x)
    assert calls_of(optimized, "blocks.1") == Calls(fused=1)


class Careful(nn.Module):
    """Has answers of its own to being copied, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.lock = open  # stands for what no pickle takes along

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class WithState(Careful):
    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = open


class WithReduce(Careful):
    def __reduce__(self):
        return _rebuilt, (self.state_dict(),)


def _rebuilt(state):
    module = WithReduce().eval()
    module.load_state_dict(state)
    return module


class WithDeepcopy(Careful):
    def __deepcopy__(self, memo):
        new = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new


class WithCopy(Careful):
    def __copy__(self):
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("cls", [WithState, WithReduce, WithDeepcopy, WithCopy])
def test_classes_with_copies_of_their_own(x, cls, example):
    model = cls().eval()
    optimized = fxfuse.optimize(model, x if example else None)
    for copied in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        copied.up.weight = nn.Parameter(torch.ones(HIDDEN, WIDTH))
        twin = copy.deepcopy(model)
        twin.load_state_dict(copied.state_dict())
        with torch.no_grad():
            assert right(copied(x), twin, x)
    copied = copy.copy(optimized)
    copied._modules = dict(optimized._modules, up=nn.Linear(WIDTH, HIDDEN))
    twin = copy.copy(model)
    twin._modules = dict(copied._modules)
    with torch.no_grad():
        assert right(copied(x), twin, x)
        if cls is WithCopy:
            assert right(optimized(x), model, x)
            assert [(u.path, "__copy__" in u.reason) for u in fxfuse.report(optimized).uncaptured] == [("", True)]
        else:
            assert_answers(optimized, model, x, runs="fused")


@pytest.mark.parametrize("example", [False, True])
def test_copies_of_a_graph_module(x, example):
    """It has no other forward than the rewritten graph, which it takes along."""
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).eval())
    optimized = fxfuse.optimize(gm, x if example else None)
    copies = (copy.deepcopy(optimized), copy.copy(optimized), pickle.loads(pickle.dumps(optimized)))
    for copied in copies:
        assert "linear_act" in copied.code
        with torch.no_grad():
            assert right(copied(x), gm, x)
            assert right(fxfuse.optimize(copied)(x), gm, x)


def _answer(model: nn.Module, given: torch.Tensor, answers) -> None:
    with torch.no_grad():
        answers.put((model(given).numpy(), "forward" in model.__dict__, fxfuse.optimize(model)(given).numpy()))


def test_sent_to_another_process(x):
    """A spawned worker gets the plain model, with the weights in shared memory, and may optimize it again."""
    model = MLP().eval()
    optimized = fxfuse.optimize(model, x)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    optimized.share_memory()
    worker = context.Process(target=_answer, args=(optimized, x, answers))
    worker.start()
    plain, is_optimized, again = answers.get()
    worker.join()
    assert worker.exitcode == 0
    assert not is_optimized
    with torch.no_grad():
        assert right(torch.from_numpy(plain), model, x)
        assert right(torch.from_numpy(again), model, x)
        assert_answers(optimized, model, x, runs="fused")
