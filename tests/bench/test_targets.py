import sys

import pytest
import torch
from torch import nn

from fxfuse.bench import targets
from fxfuse.bench.models import BUILT_IN
from fxfuse.bench.targets import BadTarget

FILE = """
import torch
from torch import nn

import fxfuse
from neighbour import WIDTH

linear = nn.Linear(WIDTH, WIDTH)
number = 3

class Build:
    @staticmethod
    def nested():
        return nn.Linear(WIDTH, WIDTH), (torch.randn(2, WIDTH), ), {}

def alone():
    return nn.Linear(WIDTH, WIDTH)

def with_args():
    return nn.Dropout(), (torch.randn(2, WIDTH),)

def with_tensor():
    return nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)

def with_kwargs():
    return nn.Linear(WIDTH, WIDTH), (), {"input": torch.randn(2, WIDTH)}

def with_tokens():
    return nn.Embedding(9, WIDTH), (torch.tensor([1, 2]),)

def no_model():
    return 3

def too_many():
    return nn.Linear(2, 2), (), {}, 1

def keywords_second():
    return nn.Linear(WIDTH, WIDTH), {"input": torch.randn(2, WIDTH)}

def exported():
    model, args = with_tensor()[0], (torch.randn(2, WIDTH),)
    return torch.export.export(model.eval(), args).module(), args

def compiled():
    return torch.compile(nn.Linear(WIDTH, WIDTH)), (torch.randn(2, WIDTH),)

def optimized():
    return fxfuse.optimize(nn.Linear(WIDTH, WIDTH).eval()), (torch.randn(2, WIDTH),)

def raises():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "builders.py"
    path.write_text(FILE)
    yield path
    sys.modules.pop("neighbour", None)


@pytest.mark.parametrize("name", ["with_args", "with_tensor", "with_kwargs", "with_tokens", "Build.nested"])
def test_what_a_callable_may_return(file, name):
    target = targets.load(f"{file}:{name}")
    args, kwargs = target.example()
    assert isinstance(target.model(*args, **kwargs), torch.Tensor)
    assert not target.model.training


def test_an_exported_program_stays_in_the_mode_that_it_was_exported_in(file):
    target = targets.load(f"{file}:exported")
    assert target.model(*target.args).shape == (2, 4)


def test_the_dtype_of_complex_numbers():
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    assert targets.Target("complex", model, (), {}).dtype is torch.complex64


def test_module_and_attribute(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    try:
        assert isinstance(targets.load("builders:alone").model, nn.Linear)
    finally:
        sys.modules.pop("builders", None)


def test_a_model_alone_has_no_example(file):
    target = targets.load(f"{file}:alone")
    with pytest.raises(BadTarget, match="returned a model without example inputs"):
        target.example()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("gelu-mlp", "'gelu-mlp' is neither a built-in target"),
        (":build", "neither a built-in target"),
        ("no.such.module:build", "importing no.such.module raised ModuleNotFoundError"),
        ("missing.py:build", "there is no file missing.py"),
        ("torch.nn:Lineaar", "torch.nn has no 'Lineaar'"),
        ("{file}:absent", "has no 'absent'"),
        ("{file}:number", "is a int; a target is a callable"),
        ("{file}:linear", "is a Linear; a target is a callable"),
        ("{file}:raises", r"raises\(\) raised RuntimeError: no weights here"),
        ("{file}:no_model", r"no_model\(\) returned int; it returns an nn.Module"),
        ("{file}:too_many", r"returned \(Linear, tuple, dict, int\); it returns an nn.Module"),
        ("{file}:compiled", r"compiled\(\) returned what torch.compile made of a model, and eager would be no eager"),
        ("{file}:optimized", r"optimized\(\) returned what fxfuse.optimize made of a model"),
        ("{file}:keywords_second", "returned args of type dict; args is a tuple, and keywords come third"),
    ],
)
def test_bad_targets_say_what_is_missing(file, spec, why):
    with pytest.raises(BadTarget, match=why):
        targets.load(spec.format(file=file))


def test_a_file_that_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(BadTarget, match=r"running .*broken\.py raised ZeroDivisionError"):
        targets.load(f"{tmp_path / 'broken.py'}:build")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(BadTarget, match="no CUDA device is available"):
        targets.load("ffn", device="cuda")


def test_dtype_leaves_tokens_alone(file):
    target = targets.load(f"{file}:with_tokens", dtype="bfloat16")
    assert target.model.weight.dtype == torch.bfloat16
    assert target.args[0].dtype == torch.int64


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_built_ins_run(name, dtype):
    target = targets.load(name, device="cpu", dtype=dtype, rows=3)
    args, kwargs = target.example()
    with torch.inference_mode():
        out = target.model(*args, **kwargs)
    assert out.dtype == getattr(torch, dtype)
    assert out.isfinite().all()
    if BUILT_IN[name].takes_rows:
        assert out.shape == (3, 768)
