"""What ``fxfuse bench`` and ``fxfuse graph`` write: each file whole, after each target, and as its schema says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fxfuse
from fxfuse import cli
from fxfuse.bench import html, machine_rates, schema
from fxfuse.bench.machine_rates import Rates

MODELS = """
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))  # a | b

def mlp():
    return MLP(), (torch.randn(4, 32),)

def other():
    return mlp()

def raises():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def bench(file, out, *names):
    """The exit code of a bench of these models into all three kinds of file."""
    specs = [f"{file}:{name}" for name in names]
    files = [f"--{kind}={out / kind}" for kind in ("json", "markdown", "html")]
    return cli.main(["bench", *specs, "--vs", "eager", "--repeats", "2", "--quick", *files])


def test_three_files(file, out, capsys):
    assert bench(file, out, "mlp", "other") == 0
    document = schema.read(out / "json", schema.BENCH)
    assert [result["target"] for result in document["results"]] == [f"{file}:mlp", f"{file}:other"]
    assert document["unfinished"] == []
    for kind in ("markdown", "html"):
        text = (out / kind).read_text()
        assert text.count(f"{file}:mlp") >= 1
        assert "Not finished" not in text
    assert sorted(os.listdir(out)) == ["html", "json", "markdown"]


def test_a_target_that_is_named_twice_is_one(file, out):
    assert bench(file, out, "mlp", "mlp") == 0
    assert len(schema.read(out / "json", schema.BENCH)["results"]) == 1


def test_markdown_shows_code_as_code(file, out):
    bench(file, out, "mlp")
    (row,) = [line for line in (out / "markdown").read_text().splitlines() if "linear_act" in line]
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert cells[:3] == ["1 ×", "linear_act", "is now linear_act"]
    assert re.fullmatch(r"`models\.py:\d+: return self\.down\(torch\.relu\(self\.up\(x\)\)\)  # a \\\| b`", cells[3])


def test_the_report_goes_along_without_folders(file, out):
    bench(file, out, "mlp")
    (result,) = schema.read(out / "json", schema.BENCH)["results"]
    kinds = {event["kind"] for event in result["report"]["events"]}
    assert "fused" in kinds
    assert not [event for event in result["report"]["events"] if "/" in event["source"].partition(":")[0]]


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt, 130), (RuntimeError("out of memory"), 2), (SystemExit(3), 2)], ids=str
)
def test_what_was_finished_survives(error, code, file, out, second_target_raises, capsys):
    second_target_raises(error() if isinstance(error, type) else error)
    assert bench(file, out, "mlp", "other", "raises") == code
    document = schema.read(out / "json", schema.BENCH)
    assert [result["target"] for result in document["results"]] == [f"{file}:mlp"]
    assert document["unfinished"] == [f"{file}:other", f"{file}:raises"]
    for kind in ("markdown", "html"):
        assert "Not finished:" in (out / kind).read_text()


def test_what_was_finished_survives_a_kill(file, out):
    program = "import os, signal\n\ndef build():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    (file.parent / "killed.py").write_text(program)
    argv = ["bench", f"{file}:mlp", f"{file.parent / 'killed.py'}:build", "--vs", "eager", "--repeats", "2", "--quick"]
    done = subprocess.run(
        [sys.executable, "-m", "fxfuse", *argv, "--json", str(out / "json")], capture_output=True, check=False
    )
    assert done.returncode == -9
    document = schema.read(out / "json", schema.BENCH)
    assert len(document["results"]) == len(document["unfinished"]) == 1


def test_json_on_stdout_of_an_interrupted_run_is_valid(file, monkeypatch, capsys):
    real = cli.measure

    def measure(target, *args, **kwargs):
        if target.name.endswith("other"):
            raise KeyboardInterrupt
        return real(target, *args, **kwargs)

    monkeypatch.setattr(cli, "measure", measure)
    argv = ["bench", f"{file}:mlp", f"{file}:other", "--vs", "eager", "--repeats", "2", "--quick", "--json", "-"]
    assert cli.main(argv) == 130
    document = json.loads(capsys.readouterr().out)
    schema.check(document, schema.BENCH)
    assert document["unfinished"] == [f"{file}:other"]


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_files_are_as_readable_as_others(file, out):
    bench(file, out, "mlp")
    (out / "plain").touch()
    assert {path.stat().st_mode for path in out.iterdir()} == {(out / "plain").stat().st_mode}


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="there is no such device")
def test_a_device_is_written_to_and_not_replaced(file):
    argv = ["bench", f"{file}:mlp", "--vs", "eager", "--repeats", "2", "--quick", "--json", "/dev/stdout"]
    done = subprocess.run([sys.executable, "-m", "fxfuse", *argv], capture_output=True, text=True, check=True)
    assert '"schema": "fxfuse.bench/1"' in done.stdout
    assert Path("/dev/stdout").is_symlink()


@pytest.mark.parametrize("kind", ["json", "markdown", "html"])
def test_folders_are_looked_for_before_measuring(kind, file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure", lambda *_args, **_kwargs: pytest.fail("measured"))
    assert cli.main(["bench", f"{file}:mlp", f"--{kind}", str(tmp_path / "absent" / "out")]) == 2
    assert f"--{kind} {tmp_path / 'absent' / 'out'}: there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--json={out}"], "--json {out}: this is a folder, and no file"),
        (["--html="], "--html : this is a folder, and no file"),
        (["--markdown={out}/a", "--html={out}/../out/a"], "--markdown and --html name one file: {out}/../out/a"),
        (["--profile={out}/a"], "--profile is for the HTML report: --html FILE says where that goes"),
    ],
)
def test_outputs_that_cannot_be_are_refused_before_measuring(options, says, file, out, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure", lambda *_args, **_kwargs: pytest.fail("measured"))
    assert cli.main(["bench", f"{file}:mlp", *(option.format(out=out) for option in options)]) == 2
    assert capsys.readouterr().err == f"fxfuse: {says.format(out=out)}\n"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_refused_before_measuring(file, out, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure", lambda *_args, **_kwargs: pytest.fail("measured"))
    out.chmod(0o500)
    assert cli.main(["bench", f"{file}:mlp", f"--json={out / 'a'}"]) == 2
    assert "there is no right to write there" in capsys.readouterr().err


def test_html_without_jinja2_is_refused_before_measuring(file, out, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure", lambda *_args, **_kwargs: pytest.fail("measured"))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert cli.main(["bench", f"{file}:mlp", "--html", str(out / "a.html")]) == 2
    assert "--html needs jinja2, which is not installed: pip install 'fxfuse[report]'" in capsys.readouterr().err


def test_a_profile_that_is_none_is_refused_before_measuring(file, out, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure", lambda *_args, **_kwargs: pytest.fail("measured"))
    (out / "profile").write_text('{"schema": "fxfuse.bench/1"}')
    assert cli.main(["bench", f"{file}:mlp", "--html", str(out / "a"), "--profile", str(out / "profile")]) == 2
    assert "its schema is 'fxfuse.bench/1', not 'fxfuse.profile/1'" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["svg", "dot", "json", "html"])
def test_graph(ending, file, out, capsys):
    target = out / f"a.{ending}"
    assert cli.main(["graph", f"{file}:mlp", "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert "linear_act" in target.read_text()
    if ending == "svg":
        ElementTree.parse(target)


def test_graph_looks_at_the_ending_first(file, out, capsys, monkeypatch):
    monkeypatch.setattr(fxfuse, "optimize", lambda *_args, **_kwargs: pytest.fail("optimized"))
    assert cli.main(["graph", f"{file}:mlp", "-o", str(out / "a.png")]) == 2
    assert "none of .svg, .dot, .json, .html" in capsys.readouterr().err


def test_graph_looks_at_the_folder_first(file, out, capsys, monkeypatch):
    monkeypatch.setattr(fxfuse, "optimize", lambda *_args, **_kwargs: pytest.fail("optimized"))
    assert cli.main(["graph", f"{file}:mlp", "-o", str(out / "absent" / "a.svg")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_jinja2_is_asked_for_only_where_it_is_needed():
    program = "import sys; sys.modules['jinja2'] = None; from fxfuse.bench import publish; publish.Outputs().check()"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert html.environment().autoescape


def bench_html(file, out):
    argv = ["bench", f"{file}:mlp", "--vs", "eager", "--repeats", "2", "--quick", "--html", str(out / "a.html")]
    return cli.main(argv), (out / "a.html").read_text()


def test_the_html_report_shows_what_ran_by_itself(file, out, monkeypatch):
    monkeypatch.setattr(machine_rates, "rates", lambda device, dtypes: Rates(1e10, {"float32": 1e12}, "nowhere"))
    code, text = bench_html(file, out)
    assert code == 0
    assert all(title in text for title in ("What ran, on one time scale", "Regions under the roofline", "confirmed"))
    assert "a target that has no times on this page" not in text


def test_a_profile_that_fails_costs_no_times_and_is_said(file, out, monkeypatch):
    def fails(*_args):
        raise RuntimeError("no rates here")

    monkeypatch.setattr(machine_rates, "rates", fails)
    code, text = bench_html(file, out)
    assert code == 0
    assert "what ran is not shown: profiling raised RuntimeError: no rates here" in text
    assert "times as fast" in text


def test_times_are_written_before_anything_else_can_go_wrong(file, out, monkeypatch):
    def killed(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(machine_rates, "rates", killed)
    code, text = bench_html(file, out)
    assert code == 130
    assert "times as fast" in text
