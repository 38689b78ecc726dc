"""What can be said of the CUDA kernels without a GPU: their sources, sizes and expectations."""

import re
import shutil
import subprocess

import pytest
import torch

from fxfuse.ops.activations import ACTIVATIONS
from fxfuse.ops.gpu import decode, hopper
from fxfuse.ops.gpu.product import eager_microseconds
from fxfuse.ops.gpu.source import _C_NAMES, Epilogue

ACTS = ["", *ACTIVATIONS]


def epilogue(act: str, *, gated: bool = False, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> Epilogue:
    return Epilogue(act, ACTIVATIONS[act].defaults if act else (), gated, bias, dtype)


@pytest.mark.parametrize("act", ACTS)
def test_every_activation_has_a_device_function_of_its_parameters(act):
    text = hopper.kernel_source(epilogue(act), 128)
    name = _C_NAMES.get(act, act)
    (parameters,) = re.findall(rf"__forceinline__ float {name}\(([^)]*)\)", text)
    assert parameters.count("float") == 1 + len(epilogue(act).act_args)


@pytest.mark.parametrize("wn", hopper.TILES)
@pytest.mark.parametrize("gated", [False, True])
def test_shared_memory_fits(wn, gated):
    stages, sets, total = hopper._memory(wn, gated)
    assert stages >= 4
    assert sets in (1, 2)
    assert total <= 227 * 1024
    # Biases of a tile wait for the tile two before, which must have more steps than there are stages.
    assert stages < 2 * (256 // 64)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_compile_without_spilling_much(gated, tmp_path):
    for name, text in {
        "hopper": hopper.kernel_source(epilogue("gelu", gated=gated), 192),
        "decode": decode.kernel_source(epilogue("gelu", gated=gated), decode._shape(15, gated)),
    }.items():
        file = tmp_path / f"{name}.cu"
        file.write_text(text)
        command = ["nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]
        done = subprocess.run([*command, "-o", str(tmp_path / "out"), str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (spilled,) = re.findall(r"(\d+) bytes spill stores", done.stdout + done.stderr)
        assert int(spilled) <= 64


def test_expectations_agree_with_what_was_measured():
    """Microseconds on an H200, bfloat16, tanh-gelu and biases; within a fifth."""
    measured = {
        (8192, 3072, 768, 192, True): 110,
        (2048, 4096, 1024, 128, True): 52,
        (4096, 14336, 4096, 192, True): 1209,
        (8192, 3072, 768, 192, False): 61,
        (2048, 4096, 1024, 128, False): 32,
        (512, 14336, 4096, 128, False): 109,
    }
    for (rows, n, k, wn, gated), microseconds in measured.items():
        expected = hopper.microseconds(rows, n, k, wn, gated=gated, processors=132)
        assert 0.8 <= expected / microseconds <= 1.2, (rows, n, k, wn, gated, expected)
    assert 0.8 <= eager_microseconds(8192, 3072, 768, epilogue("gelu_tanh")) / 95 <= 1.2
    assert 0.8 <= eager_microseconds(8192, 3072, 768, epilogue("gelu_tanh", gated=True)) / 190 <= 1.2
