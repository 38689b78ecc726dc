"""What importing fxfuse loads, what optimize() keeps, and that nothing is kept of a model that is gone."""

from __future__ import annotations

import copy
import gc
import linecache
import pickle
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxfuse
from fxfuse.capture.region import Region
from tests.models.answers import right
from tests.optimize.model import MLP, WIDTH, PlusOne, Stack

KEPT = (torch.Tensor, nn.Module, fx.Graph, fx.Node, Region)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """What there was before is left out of account, which makes a collection quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _alive() -> Counter[type]:
    """How many objects there are of each kind that costs memory."""
    gc.collect()
    # isinstance() would ask objects that pretend to be others, such as mocks and dead proxies.
    types = Counter(map(type, gc.get_objects()))
    return Counter({kind: sum(n for cls, n in types.items() if issubclass(cls, kind)) for kind in KEPT})


def test_import_brings_little_with_it():
    """A tenth of a second beside torch's own: nothing of another package but tabulate, none of torch's compilers."""
    script = "import sys, torch; before = set(sys.modules); import fxfuse; print(*set(sys.modules) - before)"
    new = set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split())
    packages = {name.partition(".")[0].lstrip("_") for name in new} - {n.lstrip("_") for n in sys.stdlib_module_names}
    # torch's counter of operations imports Triton where there is one.
    assert {name for name in packages if not name.startswith("sysconfigdata")} - {"triton"} == {
        "fxfuse",
        "tabulate",
        "torch",
    }
    assert sum(name.startswith("torch.") for name in new) < 10
    assert not {name for name in new if name.startswith(("torch._dynamo", "torch._inductor", "torch._export"))}


def _restored(optimized: nn.Module, x: torch.Tensor) -> Any:
    return fxfuse.restore(optimized)


def _taken_out(optimized: nn.Module, x: torch.Tensor) -> None:
    optimized.blocks[0].scale = 3.0
    for _ in range(100):
        optimized(x)


def _copied(optimized: nn.Module, x: torch.Tensor) -> None:
    for one in (copy.deepcopy(optimized), copy.copy(optimized), pickle.loads(pickle.dumps(optimized))):
        one(x)


ENDS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "dropped": lambda optimized, x: None,
    "restored": _restored,
    "regions taken out": _taken_out,
    "copied": _copied,
    "graphs": lambda optimized, x: fxfuse.graphs(optimized)[""](x),
    "report": lambda optimized, x: str(fxfuse.report(optimized)),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_kept_of_a_model_that_is_gone(x, end, example, inplace):
    def once() -> None:
        model = Stack().eval()
        optimized = fxfuse.optimize(model, x if example else None, inplace=inplace)
        with torch.no_grad():
            optimized(x)
            ENDS[end](optimized, x)

    once()  # what is made once and for all
    before, sources = _alive(), _sources()
    once()
    assert _alive() == before
    assert _sources() == sources


def _sources() -> int:
    return sum(name.startswith("<fxfuse") for name in linecache.cache)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("example", [False, True])
def test_what_an_optimized_model_keeps(x, example, inplace):
    """One copy of the module objects, no other tensor, and nothing of the example."""
    model = Stack().eval()
    before = _alive()
    given = x.clone()
    gone = weakref.ref(given)
    optimized = fxfuse.optimize(model, given if example else None, inplace=inplace)
    with torch.no_grad():
        optimized(given)
    del given
    after = _alive()
    assert gone() is None
    assert after[torch.Tensor] == before[torch.Tensor]
    assert after[nn.Module] - before[nn.Module] == (0 if inplace else len([*optimized.modules()]))
    # Restored in place, nothing is left even of that.
    fxfuse.restore(optimized)
    if inplace:
        assert _alive() == before


@pytest.mark.parametrize("example", [False, True])
def test_replaced_parameters_are_let_go(x, example):
    """A model loaded anew does not hold its old weights."""
    optimized = fxfuse.optimize(Stack().eval(), x if example else None)
    with torch.no_grad():
        optimized(x)
    fxfuse.graphs(optimized)
    before = _alive()
    new = {name: torch.randn_like(value) for name, value in optimized.state_dict().items()}
    optimized.load_state_dict(new, assign=True)
    del new
    assert _alive() == before
    with torch.no_grad():
        optimized(x)
    assert _alive() == before


def test_no_weak_references_to_tensors(x):
    """``.to()`` refuses to swap a Parameter that has one."""
    model = Stack().eval()
    for example in (None, x):
        optimized = fxfuse.optimize(model, example)
        with torch.no_grad():
            optimized(x)
        optimized(x).sum().backward()
        for tensor in (*optimized.parameters(), *optimized.buffers()):
            assert weakref.getweakrefcount(tensor) == 0


class Made(TorchDispatchMode):
    """Every tensor that an operator made, and the most bytes that those alive at one time had beside ``there``."""

    def __init__(self, there: nn.Module) -> None:
        super().__init__()
        self.there = {t.untyped_storage().data_ptr() for t in (*there.parameters(), *there.buffers())}
        self.alive: dict[int, tuple[int, int]] = {}
        """id of a tensor -> where its memory lies, and how much that is."""
        self.count, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and id(value) not in self.alive:
                self.count += 1
                memory = value.untyped_storage()
                self.alive[id(value)] = (
                    (0, 0) if isinstance(value, FakeTensor) else (memory.data_ptr(), memory.nbytes())
                )
                weakref.finalize(value, self.alive.pop, id(value))
        self.peak = max(self.peak, sum(n for at, n in set(self.alive.values()) if at not in self.there))
        return result


class Looks(Stack):
    """One region a block, as it looks at a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.isnan().any():
                return x
        return x


def _optimized_in_sight(kind: type[Stack], depth: int, x: torch.Tensor) -> tuple[Made, nn.Module]:
    model = kind()
    model.blocks = nn.ModuleList(MLP() for _ in range(depth))
    with Made(model) as made:
        optimized = fxfuse.optimize(model.eval(), x, tune="off")
    return made, optimized


@pytest.mark.parametrize("kind", [Stack, Looks])
def test_nothing_that_was_made_on_the_way_lives_on(x, kind):
    """Neither activations of the example run, nor tensors without data, nor float64 copies of the check."""
    made, optimized = _optimized_in_sight(kind, 3, x)
    assert len(fxfuse.graphs(optimized)) == (1 if kind is Stack else 3)
    gc.collect()
    assert made.count > 100
    assert not made.alive


@pytest.mark.parametrize("kind", [Stack, Looks])
def test_memory_on_the_way_does_not_grow_with_depth(x, kind):
    shallow, deep = (_optimized_in_sight(kind, depth, x)[0].peak for depth in (3, 12))
    assert 0 < deep < 1.5 * shallow


def test_a_failed_optimize_keeps_nothing(x):
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

    def once() -> None:
        with pytest.warns(fxfuse.errors.ExampleWarning):
            fxfuse.optimize(Fails().eval(), x)
        with pytest.raises(fxfuse.errors.NothingFused):
            fxfuse.optimize(PlusOne(), strict={"fuse"})

    once()
    before = _alive()
    once()
    assert _alive() == before


def test_functions_and_graph_modules_are_not_kept(x):
    weight = torch.randn(WIDTH, WIDTH)

    def once() -> None:
        def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ w + b)

        optimized = fxfuse.optimize(function)
        with torch.no_grad():
            assert right(optimized(x, weight, weight[0]), function, x, weight, weight[0])
        gm = fxfuse.optimize(fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())))
        fxfuse.restore(gm)

    once()
    before, sources = _alive(), _sources()
    once()
    assert _alive() == before
    assert _sources() == sources
