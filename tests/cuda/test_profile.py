"""The golden cases of DESIGN 1: what is predicted of each set-up, and what a trace on the GPU has."""

from collections import Counter

import pytest
import torch
from torch import nn

from benchmarks import gpu
from fxfuse.bench import models
from fxfuse.bench.profile import Profile, SetUp, profile
from fxfuse.bench.targets import Target
from fxfuse.ops.gpu import decode, hopper

SMALL, DECODE = gpu.Size(1024, 32, 64), gpu.Size(3, 256, 1024)


@pytest.fixture(autouse=True)
def unpoisoned(poison):
    """Filling fresh memory would be kernels of its own."""
    torch.use_deterministic_algorithms(False)


def profiled(build: gpu.Build, size: gpu.Size, *columns: str) -> Profile:
    return profile(gpu.target("golden", build, size), columns)


def set_up(found: Profile, name: str) -> SetUp:
    reasons = [gone.reason for gone in found.left_out if gone.name == name]
    if reasons and name != "fxfuse":
        pytest.skip(f"{name}: {reasons[0]}")
    assert not reasons
    return next(made for made in found.set_ups if made.name == name)


def assert_kernels(made: SetUp, expected: int, **kinds: int) -> None:
    """So many are predicted, by kind, and so many are observed."""
    predicted = sum((work.kernels for works in made.works.values() for work in works), Counter())
    assert predicted == {kind.replace("_", " "): count for kind, count in kinds.items()}
    assert len(made.call.kernels) == expected == predicted.total(), [kernel.name for kernel in made.call.kernels]
    wrong = [line for line in made.lines if line.what.startswith("kernels") and line.verdict != "confirmed"]
    assert not wrong


@pytest.mark.parametrize("size", [SMALL, gpu.SEED], ids=str)
def test_matmul_then_add_is_two(size):
    made = set_up(profiled(gpu.MatmulThenAdd, size), "eager")
    assert_kernels(made, 2, gemm=1, elementwise=1)


@pytest.mark.parametrize("size", [SMALL, gpu.SEED], ids=str)
def test_a_linear_with_its_bias_is_one(size):
    made = set_up(profiled(nn.Linear, size), "eager")
    assert_kernels(made, 1, gemm=1)
    assert made.call.host_ops("") == {"aten::linear": 1, "aten::t": 1, "aten::addmm": 1}


def test_eager_geglu_is_five():
    assert_kernels(set_up(profiled(models.GegluMLP, gpu.SEED), "eager"), 5, gemm=3, elementwise=2)


@pytest.mark.parametrize("name", ["compile", "liger"])
def test_compiled_geglu_is_four(name):
    assert_kernels(set_up(profiled(models.GegluMLP, gpu.SEED, name), name), 4, gemm=3, elementwise=1)


def test_our_geglu_is_two():
    if not hopper.serves(0):
        pytest.skip("not a Hopper GPU")
    made = set_up(profiled(models.GegluMLP, gpu.SEED), "fxfuse")
    kernels = sum((work.kernels for work in made.works[""]), Counter())
    # The down projection is whichever is expected to be faster, cuBLAS's or ours.
    assert kernels in ({"fused gemm": 1, "gemm": 1}, {"fused gemm": 2})
    assert_kernels(made, 2, **{kind.replace(" ", "_"): count for kind, count in kernels.items()})
    assert made.call.kernels[0].name.startswith("fxfuse_gated_linear_gelu_")


def test_our_geglu_of_few_rows_is_two():
    if not decode.serves(0):
        pytest.skip("the decode kernel does not run on this GPU")
    assert_kernels(set_up(profiled(models.GegluMLP, DECODE), "fxfuse"), 2, fused_gemm=2)


def test_every_kernel_belongs_to_its_region_and_was_launched():
    found = profiled(models.GegluMLP, gpu.SEED)
    for made in found.set_ups:
        assert all(kernel.part == "" for kernel in made.call.kernels)
        assert made.call.launches.total() >= len(made.call.kernels)
        assert made.costs[0].observed_us == pytest.approx(made.region_us[""])
        assert made.costs[0].floor_us > 0
    assert found.rates.bandwidth > 0
    assert found.rates.flops["bfloat16"] > 0


def test_two_regions_and_what_lies_between_them():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = models.GegluMLP(768, 3072), models.GegluMLP(768, 3072)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            if h.shape[0] < 1 or h.isnan().any():  # no trace goes through this
                return h
            return self.second(h)

    model = Two().eval().to("cuda", torch.bfloat16)
    x = torch.randn(2048, 768, device="cuda", dtype=torch.bfloat16)
    found = profile(Target("two", model, (x,), {}), [])
    for made in found.set_ups:
        by_part = Counter(kernel.part for kernel in made.call.kernels)
        assert set(made.works) == {"first", "second"}
        assert by_part["first"] == by_part["second"]
        assert by_part[None] > 0
        assert all(line.verdict != "broken" for line in made.lines if line.what.startswith("kernels"))
