import json

import pytest
import torch

from fxfuse import choose
from fxfuse.bench import machine_rates
from fxfuse.bench.machine_rates import Rates

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch):
    """What was measured, in the place of measuring."""
    asked = []

    def bandwidth(device, clock):
        asked.append("bandwidth")
        return 1e10

    def flops(device, dtype, clock):
        asked.append(str(dtype))
        return 1e12

    monkeypatch.setattr(machine_rates, "_bandwidth", bandwidth)
    monkeypatch.setattr(machine_rates, "_flops", flops)
    return asked


def the_file():
    (file,) = (choose.folder() / "rates").iterdir()
    return file


def test_each_rate_is_measured_once_and_kept(measured):
    first = machine_rates.rates(CPU, [torch.float32])
    assert measured == ["bandwidth", "torch.float32"]
    assert machine_rates.rates(CPU, [torch.float32, torch.bfloat16]).flops == {"float32": 1e12, "bfloat16": 1e12}
    assert measured == ["bandwidth", "torch.float32", "torch.bfloat16"]
    assert first.kept == str(the_file())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"rates": {"bandwidth": 1}}',
        '{"of": "another device", "rates": {"bandwidth": 1.0}}',
        '{"of": "OURS", "rates": {"bandwidth": 0}}',
        '{"of": "OURS", "rates": {"bandwidth": NaN}}',
        '{"of": "OURS", "rates": ["bandwidth"]}',
        '{"of": "OURS", "rates": {"bandwidth": "fast"}}',
    ],
)
def test_a_spoilt_file_is_measured_anew(measured, text):
    machine_rates.rates(CPU, [])
    ours = json.loads(the_file().read_text())["of"]
    the_file().write_text(text.replace('"OURS"', json.dumps(ours)))
    machine_rates.rates(CPU, [])
    assert measured == ["bandwidth", "bandwidth"]
    assert json.loads(the_file().read_text())["rates"] == {"bandwidth": 1e10}


def test_forgotten(measured):
    machine_rates.clear()
    machine_rates.rates(CPU, [])
    machine_rates.clear()
    machine_rates.rates(CPU, [])
    assert measured == ["bandwidth", "bandwidth"]


def test_a_folder_that_cannot_be_written_is_said(measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXFUSE_CACHE", str(tmp_path / "file"))
    assert machine_rates.rates(CPU, []).kept.startswith("for this run only: ")


@pytest.mark.parametrize(
    ("flops", "moved", "dtype", "seconds"),
    [
        (0, 100, "float32", 1.0),
        (5000, 100, "float32", 5.0),
        (500, 100, "float32", 1.0),
        (5000, 100, "int8", 1.0),
        (0, 0, "float32", 0.0),
    ],
)
def test_the_floor_is_whichever_takes_longer(flops, moved, dtype, seconds):
    assert Rates(100.0, {"float32": 1000.0}, "").floor_s(flops, moved, dtype) == seconds


def test_real_rates_are_positive(monkeypatch):
    monkeypatch.setattr(machine_rates, "_COPIED", 1 << 20)
    monkeypatch.setattr(machine_rates, "_LARGEST", 256)
    found = machine_rates.rates(CPU, [torch.float32])
    assert found.bandwidth > 0
    assert found.flops["float32"] > 0
