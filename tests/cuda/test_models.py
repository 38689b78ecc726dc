"""Optimized models on a GPU: eager's answers, fewer kernels, and a reason for whatever is left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import choose
from fxfuse.bench import models
from fxfuse.bench.gate import Gate
from fxfuse.bench.targets import Target
from fxfuse.ops.gpu import hopper, product

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


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float32, "there are no kernels for float32 on CUDA devices, unless TF32 may stand for it"),
        (torch.float64, "there are no kernels for float64"),
    ],
)
def test_what_has_no_kernel_is_kept_with_its_reason(dtype, reason):
    optimized = fxfuse.optimize(models.FeedForward(64, 128).cuda().to(dtype).eval())
    (kept,) = fxfuse.report(optimized).kept
    assert kept.reason == reason


@pytest.mark.parametrize("how", ["allow_tf32", "high"])
def test_tf32_is_the_users_to_allow(how, monkeypatch):
    before = torch.get_float32_matmul_precision()
    if how == "high":
        torch.set_float32_matmul_precision("high")
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
    try:
        model = models.GegluMLP(256, 512).cuda().eval()
        x = torch.randn(300, 256, device="cuda")
        optimized = fxfuse.optimize(model)
        assert len(fxfuse.report(optimized).fused) == 1
        choices = choose.Choices()
        monkeypatch.setattr(choose, "CHOICES", choices)
        monkeypatch.setattr(product, "expected", lambda names, *args: names[0])
        with torch.inference_mode():
            assert not Gate(Target("", model, (x,), {}), eager=model(x)).wrong(optimized(x))
            assert "aten::gelu" not in operators(lambda: optimized(x))
            torch.set_float32_matmul_precision("highest")
            assert torch.equal(optimized(x), model(x))
    finally:
        torch.set_float32_matmul_precision(before)


class ReluLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x))


@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 256), (0, 256), (256,)])
def test_relu_in_float32_is_the_librarys_epilogue(shape):
    model = ReluLinear(256, 96).cuda().eval()
    x = torch.randn(shape, device="cuda")
    optimized = fxfuse.optimize(model)
    assert len(fxfuse.report(optimized).fused) == 1
    with torch.inference_mode():
        assert not Gate(Target("", model, (x,), {}), eager=model(x)).wrong(optimized(x))
        if x.numel():
            assert "aten::relu" not in operators(lambda: optimized(x))


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
