"""The folders keep to their layout: one stem a pass, every package in the wheel, no import by the wrong name."""

from __future__ import annotations

import configparser
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import fxfuse.passes
import pytest

from fxfuse.rule import Rule

ROOT = Path(__file__).parents[1]


def stems(folder: str, prefix: str = "") -> set[str]:
    return {
        p.stem.removeprefix(prefix)
        for p in (ROOT / folder).glob(f"{prefix}*.py")
        if p.stem not in ("__init__", "conftest")
    }


def test_one_stem_everywhere():
    passes = stems("passes")
    assert stems("tests/passes", "test_") == passes
    assert stems("benchmarks/cases") == passes


@pytest.mark.parametrize("stem", sorted(stems("passes")))
def test_default_has_every_rule_of_every_pass(stem):
    module = importlib.import_module(f"fxfuse.passes.{stem}")
    rules = {type(r) for name in ("RULES", "HOIST") for r in getattr(module, name, ())}
    written = {
        c
        for c in vars(module).values()
        if isinstance(c, type)
        and issubclass(c, Rule)
        and c.__module__ == module.__name__
        and not c.__name__.startswith("_")
    }
    assert rules == written, "a rule that is in no tuple of its module never runs"
    assert rules <= {type(r) for r in fxfuse.passes.DEFAULT}
    assert "->" in (module.__doc__ or ""), "a pass says what becomes of what"


@pytest.mark.parametrize("stem", sorted(stems("benchmarks/cases")))
def test_every_benchmark_case_can_be_built(stem):
    cases = importlib.import_module(f"benchmarks.cases.{stem}").CASES
    assert cases
    assert all(callable(build) for build in cases.values())


@pytest.mark.parametrize("folder", ["fxfuse", "passes", "tests", "benchmarks"])
def test_no_module_is_long(folder):
    long = {
        str(p.relative_to(ROOT)): n
        for p in (ROOT / folder).rglob("*.py")
        if folder != "tests" and (n := len(p.read_text().splitlines())) > 400
    }
    assert not long


def test_passes_is_no_package_of_its_own():
    done = subprocess.run([sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        "ImportError: this folder is imported as fxfuse.passes; run `pip install -e .` in the checkout once"
        in done.stderr
    )


def test_every_package_is_listed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "fxfuse").rglob("__init__.py")} | {
        "fxfuse.passes"
    }
    assert listed == found


def test_every_file_that_is_no_python_is_package_data():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for file in (p for p in (ROOT / "fxfuse").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")):
        patterns = setup["options.package_data"][".".join(file.parent.relative_to(ROOT).parts)].split(", ")
        assert any(file.match(pattern) for pattern in patterns), file


def test_wheel(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    source = tmp_path / "source"
    for name in ("fxfuse", "passes", "setup.cfg", "pyproject.toml", "README.md"):
        _copy(ROOT / name, source / name)
    pytest.importorskip("setuptools")
    done = subprocess.run([*build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("fxfuse-*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / "fxfuse").rglob("*.py")} | {"fxfuse/py.typed"}
    expected |= {f"fxfuse/{p.relative_to(ROOT)}" for p in (ROOT / "passes").glob("*.py")}
    assert names == expected


def _copy(source: Path, target: Path) -> None:
    """A file, or the Python of a folder; what the checkout built beside it stays out."""
    files = [source] if source.is_file() else [*source.rglob("*.py"), *source.rglob("py.typed")]
    for file in files:
        place = target if source.is_file() else target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
