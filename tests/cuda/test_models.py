"""Optimized models on a GPU: eager's answers, fewer kernels, and a reason for whatever is left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.bench import models
from fxfuse.bench.gate import Gate
from fxfuse.bench.targets import Target
from fxfuse.ops.gpu import hopper

FUSED = (models.GegluMLP, models.SwigluMLP, models.PackedGluMLP, models.FeedForward)


ASKED = {"aten::is_set_to"}
POISON = {"aten::fill_"}  # of fresh memory, in tests


def operators(call) -> set[str]:
    """The operators of torch that a call dispatches and that may do something."""
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events() if event.name.startswith("aten::")} - ASKED - POISON


@pytest.mark.parametrize("example", [False, True], ids=["bare", "example"])
@pytest.mark.parametrize("cls", [*FUSED, models.MatmulAddMLP])
@pytest.mark.parametrize("rows", [3, 2048])
def test_the_same_answer(cls, rows, example, dtype):
    model = cls(256, 1024).cuda().to(dtype).eval()
    x = torch.randn(rows, 256, device="cuda", dtype=dtype)
    optimized = fxfuse.optimize(model, (x,), tune="off") if example else fxfuse.optimize(model)
    with torch.inference_mode():
        assert not Gate(Target("", model, (x,), {}), eager=model(x)).wrong(optimized(x))
    assert fxfuse.report(optimized).calls[""].fused == 1


@pytest.mark.parametrize("cls", FUSED)
def test_two_launches_and_nothing_else(cls, dtype, launches):
    optimized = fxfuse.optimize(cls(256, 1024).cuda().to(dtype).eval())
    x = torch.randn(3, 256, device="cuda", dtype=dtype)
    with torch.inference_mode():
        optimized(x)
        launches.clear()
        assert operators(lambda: optimized(x)) == {"aten::empty"}
    assert len(launches) == 2


def test_geglu_of_many_rows_is_one_launch_and_a_product(launches):
    if not hopper.serves(0):
        pytest.skip("not a Hopper GPU")
    model = models.GegluMLP().cuda().bfloat16().eval()
    x = torch.randn(8192, 768, device="cuda", dtype=torch.bfloat16)
    optimized = fxfuse.optimize(model, exclude="lower_linear")
    with torch.inference_mode():
        optimized(x)
        launches.clear()
        assert not {"aten::gelu", "aten::mul"} & operators(lambda: optimized(x))
    assert len(launches) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_no_kernel_is_kept_with_its_reason(dtype):
    optimized = fxfuse.optimize(models.FeedForward(64, 128).cuda().to(dtype).eval())
    (kept,) = fxfuse.report(optimized).kept
    assert kept.reason == f"there are no kernels for {str(dtype).removeprefix('torch.')} on CUDA devices"


def test_a_model_that_moves(launches):
    model = models.FeedForward(256, 1024).bfloat16().eval()
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    optimized = fxfuse.optimize(model)
    with torch.inference_mode():
        on_cpu = optimized(x)
        optimized.cuda()
        assert not Gate(Target("", model, (x.cuda(),), {}), eager=model(x.cuda())).wrong(optimized(x.cuda()))
        assert len(launches) == 2
        optimized.cpu()
        assert torch.equal(optimized(x), on_cpu)


def test_gradients_take_the_plain_path():
    model = models.GegluMLP(256, 1024).cuda().bfloat16()
    optimized = fxfuse.optimize(model.eval())
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    optimized(x).sum().backward()
    ours, x.grad = x.grad, None
    model(x).sum().backward()
    assert torch.equal(ours, x.grad)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.proj(x)) * F.linear(x, self.proj.weight)


def test_gate_and_up_may_be_one_weight():
    model = Tied().cuda().bfloat16().eval()
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        optimized = fxfuse.optimize(model, (x,))
        assert not Gate(Target("", model, (x,), {}), eager=model(x)).wrong(optimized(x))
