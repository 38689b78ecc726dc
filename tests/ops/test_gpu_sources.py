"""What can be said of the CUDA kernels without a GPU: their sources, sizes and expectations."""

import re
import shutil
import subprocess

import pytest
import torch

from fxfuse.ops.activations import ACTIVATIONS
from fxfuse.ops.gpu import decode, hopper, stream
from fxfuse.ops.gpu.product import eager_microseconds
from fxfuse.ops.gpu.source import _C_NAMES, Epilogue, Lies, lies

ACTS = ["", *ACTIVATIONS]


def epilogue(act: str, *, gated: bool = False, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> Epilogue:
    return Epilogue(act, ACTIVATIONS[act].defaults if act else (), gated, bias, dtype)


@pytest.mark.parametrize("act", ACTS)
def test_every_activation_has_a_device_function_of_its_parameters(act):
    text = hopper.kernel_source(epilogue(act), 128, False)
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


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 64, 65, 127])
@pytest.mark.parametrize("n", [1, 512, 768, 2048, 4096, 14336, 128256])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_of_the_streaming_kernel_fit_a_processor(rows, n, gated, transposed):
    shape = stream.shape(rows, n, gated=gated, transposed=transposed, processors=132)
    assert rows <= shape.tokens
    assert shape.stages >= 3
    assert (shape.memory + 1024) * shape.blocks <= 228 * 1024
    # What the blocks of a tile found takes the place of the stages.
    assert shape.tokens * (64 * shape.groups + 4) * 4 <= shape.memory - 1024 - 16 * shape.stages


@pytest.mark.parametrize(
    ("rows", "n", "gated", "expected"),
    [
        (1, 14336, True, (8, 2, 1, 3)),
        (100, 14336, True, (128, 4, 1, 1)),
        (16, 4096, False, (16, 1, 2, 1)),
        (64, 2048, False, (64, 1, 4, 3)),
        (2, 768, False, (8, 1, 8, 3)),
        (9, 3072, True, (16, 1, 1, 1)),
    ],
)
def test_the_streaming_kernel_is_cut_as_was_fastest(rows, n, gated, expected):
    assert stream.shape(rows, n, gated=gated, transposed=False, processors=132) == expected


def sources(gated: bool) -> dict[str, str]:
    made = {"decode": decode.kernel_source(epilogue("gelu", gated=gated), decode._shape(15, gated))}
    for transposed in (False, True):
        form = "transposed" * transposed
        wn = hopper.tiles(Lies(transposed, 4096))[0]
        made[f"hopper {form}"] = hopper.kernel_source(epilogue("gelu", gated=gated), wn, transposed)
        for rows in (1, 64, 127):
            shape = stream.shape(
                rows, 14336 if rows == 127 else 768, gated=gated, transposed=transposed, processors=132
            )
            made[f"stream {rows} {form}"] = stream.kernel_source(epilogue("gelu", gated=gated), shape, transposed)
    return made


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", sources(False))
def test_kernels_compile_without_spilling_much(name, gated, tmp_path):
    file = tmp_path / "kernel.cu"
    file.write_text(sources(gated)[name])
    command = ["nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]
    done = subprocess.run([*command, "-o", str(tmp_path / "out"), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", done.stdout + done.stderr)
    assert int(spilled) <= 64


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (torch.empty(6, 4), Lies(False, 4)),
        (torch.empty(6, 8)[:, 4:], Lies(False, 8)),
        (torch.empty(12, 4)[::2], Lies(False, 8)),
        (torch.empty(4, 6).t(), Lies(True, 6)),
        (torch.empty(4, 12)[:, 6:].t(), Lies(True, 12)),
        (torch.empty(4).expand(6, 4), None),
        (torch.empty(6, 8)[:, ::2], None),
    ],
)
def test_how_a_weight_lies(weight, expected):
    assert lies(weight) == expected


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
