"""What the tests of operators share: oneDNN at every size, how often it ran, and the acceptance rule."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxfuse import numerics
from fxfuse.ops import onednn


@pytest.fixture
def onednn_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Takes oneDNN whatever the size, and collects the post-operation of each call of it."""
    if not onednn.AVAILABLE:
        pytest.skip("this build of torch has no oneDNN linear")
    monkeypatch.setattr(onednn, "_LEAST_WORK", dict.fromkeys(onednn._LEAST_WORK, (1, 1)))
    calls: list[str] = []
    pointwise, binary = onednn.pointwise, onednn.binary

    def counting_pointwise(x: Any, weight: Any, bias: Any, attr: str, *rest: Any) -> Tensor:
        y = pointwise(x, weight, bias, attr, *rest)
        calls.append(attr)
        return y

    def counting_binary(x: Any, other: Any, weight: Any, bias: Any, attr: str) -> Tensor:
        y = binary(x, other, weight, bias, attr)
        calls.append(attr)
        return y

    monkeypatch.setattr(onednn, "pointwise", counting_pointwise)
    monkeypatch.setattr(onednn, "binary", counting_binary)
    return calls


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if request.param not in onednn._LEAST_WORK:
        pytest.skip(f"oneDNN has no {request.param} here")
    return request.param


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def assert_right() -> Callable[..., None]:
    """assert_right(y, plain, *tensors): y is what plain(*tensors) computes, by the rule of fxfuse.numerics."""

    def check(y: Tensor, plain: Callable[..., Tensor], *tensors: Tensor | None) -> None:
        with torch.no_grad():
            e = plain(*tensors)
        r, magnitude = numerics.reference(_traced(plain, tensors), [t for t in tensors if t is not None])
        verdict = numerics.judge(y, e, r, magnitude)
        assert verdict, verdict.reason
        assert y.stride() == e.stride()

    return check


def _traced(plain: Callable[..., Tensor], tensors: tuple[Tensor | None, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = [
        None if tensor is None else fx.Proxy(graph.placeholder(f"tensor_{i}"), tracer)
        for i, tensor in enumerate(tensors)
    ]
    graph.output(plain(*proxies).node)
    return fx.GraphModule({}, graph)
