import json
import os
import re
import subprocess
import sys

import pytest
import torch

import fxfuse
from fxfuse import choose, cli, tuning
from fxfuse.bench.libraries import HF
from fxfuse.bench.models import BUILT_IN
from fxfuse.ops import onednn

MODELS = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), (torch.randn(4, 32),)

def alone():
    return mlp()[0]

def keywords():
    return mlp()[0], (), {"input": torch.randn(4, 32)}

def misfit():
    return nn.Linear(8, 8), (torch.randn(4, 9),)

def raises():
    raise RuntimeError("no weights here\\nand a long story")

def layers():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    return nn.Sequential(*(Layer() for _ in range(12))), (torch.randn(4, 8),)

def talks():
    print("here I am")
    return mlp()
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def asked_wrongly(capsys, *argv):
    """The one line on stderr of a command that must exit with 2 and print nothing."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("fxfuse: ")
    return line


def refused_by_the_parser(capsys, *argv):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_list_names_every_target_that_has_a_name(capsys):
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*BUILT_IN, *(f"hf:{name}" for name in HF)]
    assert all(len(line.split()) > 3 for line in lines)


def test_python_m_fxfuse():
    done = subprocess.run([sys.executable, "-m", "fxfuse", "list"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("geglu-mlp")


@pytest.mark.parametrize("command", ["explain", "bench", "tune"])
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing", "'nothing' is neither a built-in target"),
        ("no.such:thing", "importing no.such raised ModuleNotFoundError"),
        ("{file}:absent", "has no 'absent'"),
        ("{file}:raises", "raised RuntimeError: no weights here"),
        ("{file}:misfit", "misfit: the model's forward raised RuntimeError: mat1 and mat2"),
    ],
)
def test_one_clear_line(command, target, says, file, capsys):
    assert says in asked_wrongly(capsys, command, target.format(file=file))


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_without_inputs_there_is_nothing_to_time(command, file, capsys):
    line = asked_wrongly(capsys, command, f"{file}:alone")
    assert "returned a model without example inputs" in line
    assert "Return (model, args)" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["explain", "bench", "tune"])
def test_no_gpu(command, capsys):
    assert "no CUDA device is available" in asked_wrongly(capsys, command, "ffn", "--device", "cuda")


def test_traceback_on_request(file, capsys):
    assert cli.main(["explain", f"{file}:raises", "--traceback"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "and a long story" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["bench", "ffn", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["bench", "ffn", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["bench", "ffn", "--vs", "eager,tvm"], "no column 'tvm'; there are eager, fxfuse, compile"),
        (["bench", "ffn", "--repeats", "0"], "'0' is not a positive whole number"),
        (["bench", "ffn", "--rows", "-3"], "is not a positive whole number"),
        (["bench"], "required: TARGET"),
        (["tune"], "required: TARGET"),
        (["tune", "ffn", "--rows", "1,0"], "'0' is not a positive whole number"),
        (["tune", "ffn", "--rows", "16,"], "'' is not a positive whole number"),
        (["train", "ffn"], "invalid choice: 'train'"),
        ([], "required: COMMAND"),
    ],
)
def test_the_parser_refuses(argv, says, capsys):
    assert says in refused_by_the_parser(capsys, *argv)


def test_explain(capsys):
    assert cli.main(["explain", "geglu-mlp", "--device", "cpu", "--rows", "4"]) == 0
    out = capsys.readouterr().out
    assert "GegluMLP" in out
    assert "gated_linear" in out


def test_explain_says_why_of_each_linear_that_is_not_fused(file, capsys):
    assert cli.main(["explain", f"{file}:layers"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 40, "twelve layers alike are one"
    table = out.partition("Linears in no fused operator\n")[2]
    assert [re.split("  +", line) for line in table.splitlines()[2:]] == [
        ["12", "{0..11}.down", "no pass fuses it with the add that follows"]
    ]
    assert cli.main(["explain", f"{file}:layers", "--json"]) == 0
    linears = json.loads(capsys.readouterr().out)["linears"]
    assert len(linears) == 24
    assert {path: not why for path, why in linears.items()} == {
        f"{i}.{name}": name == "up" for i in range(12) for name in ("up", "down")
    }


def test_explain_json_is_the_report(capsys):
    assert cli.main(["explain", "geglu-mlp", "--device", "cpu", "--rows", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "gated_linear" in {event["rule"] for event in document["events"] if event["kind"] == "fused"}


def test_explain_verbose_shows_the_rewritten_code(capsys):
    assert cli.main(["explain", "ffn", "--device", "cpu", "--rows", "4", "--verbose"]) == 0
    assert "def forward(self" in capsys.readouterr().out


def test_explain_needs_no_inputs(file, capsys):
    assert cli.main(["explain", f"{file}:alone"]) == 0
    assert "linear_act" in capsys.readouterr().out


def test_bench_prints_a_table_for_each_target_and_one_over_all(file, capsys):
    assert cli.main(["bench", f"{file}:mlp", "ffn", "--vs", "eager", "--rows", "2", "--device", "cpu", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.count("fxfuse vs it") == 3  # two tables and the legend
    (over_all,) = re.findall(r"^ +dtype +eager +fxfuse +vs eager", out, re.MULTILINE)
    assert out.index(f"{file}:mlp  (cpu, float32)") < out.index("ffn  (cpu, float32)") < out.index(over_all)


def test_json_on_stdout_is_alone(file, capsys):
    assert cli.main(["bench", f"{file}:mlp", "--vs", "eager", "--repeats", "2", "--quick", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["rounds"] == 2
    assert [result["target"] for result in document["results"]] == [f"{file}:mlp"]


@pytest.mark.parametrize(
    "argv",
    [
        ["explain", "--json"],
        ["bench", "--vs", "eager", "--repeats", "2", "--quick", "--json", "-"],
        ["profile", "--json", "-"],
    ],
    ids=lambda argv: argv[0],
)
def test_json_on_stdout_is_alone_whatever_the_target_prints(argv, file, capsys):
    assert cli.main([argv[0], f"{file}:talks", *argv[1:]]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert err.count("here I am") == 1


def test_json_in_a_file(file, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert cli.main(["bench", f"{file}:mlp", "--vs", "eager", "--quick", "--json", str(out)]) == 0
    assert "vs eager" in capsys.readouterr().out
    assert json.loads(out.read_text())["schema"] == "fxfuse.bench/1"


def test_the_json_folder_is_looked_for_before_measuring(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure", lambda *_args, **_kwargs: pytest.fail("measured"))
    line = asked_wrongly(capsys, "bench", f"{file}:mlp", "--json", str(tmp_path / "absent" / "out.json"))
    assert "there is no such folder" in line


def test_interrupted_prints_what_was_finished(file, capsys, second_target_raises):
    second_target_raises(KeyboardInterrupt())
    assert cli.main(["bench", f"{file}:mlp", "ffn", "--vs", "eager", "--quick"]) == 130
    out, err = capsys.readouterr()
    assert err == "fxfuse: interrupted\n"
    assert f"{file}:mlp  (cpu, float32)" in out
    assert "vs eager" in out


def test_threads_are_put_back(file):
    before = torch.get_num_threads()
    assert cli.main(["bench", f"{file}:mlp", "--vs", "eager", "--quick", "--threads", str(before + 1)]) == 0
    assert torch.get_num_threads() == before


def test_a_wrong_answer_is_an_exit_code(file, monkeypatch, capsys):
    monkeypatch.setattr(fxfuse, "optimize", lambda _model, **_kwargs: lambda x: x)
    assert cli.main(["bench", f"{file}:mlp", "--vs", "eager", "--quick"]) == 1
    assert "left out: fxfuse: wrong answer" in capsys.readouterr().out


def test_a_target_that_leaves(tmp_path, capsys):
    path = tmp_path / "leaves.py"
    path.write_text("import sys\n\ndef build():\n    sys.exit(3)\n")
    assert asked_wrongly(capsys, "explain", f"{path}:build") == "fxfuse: the target called sys.exit(3)"


def test_a_reader_that_has_seen_enough():
    shown = f"{sys.executable} -m fxfuse explain gpt2-like | head -n 1"
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "argv", [["bench", "--vs", "eager", "--repeats", "2", "--quick"], ["profile"]], ids=lambda a: a[0]
)
def test_a_terminal_without_the_signs_of_our_tables(argv, file, tmp_path):
    command = [sys.executable, "-m", "fxfuse", argv[0], f"{file}:mlp", *argv[1:], "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\xb5" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())


# tune and cache


@pytest.fixture
def quiet(measuring, monkeypatch):
    """A machine that nobody else uses, as far as measuring is concerned."""
    monkeypatch.setattr(tuning, "HAD_CORE", 0.0)


@pytest.mark.skipif(not onednn.AVAILABLE, reason="there is nothing to choose from")
def test_tune_prints_what_was_measured(quiet, file, capsys):
    assert cli.main(["tune", f"{file}:mlp", "--rows", "1,16"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["operator", "dtype", "weight", "rows", "taken", "us", "a", "call", "when"]
    assert [row.split()[:5] for row in rows] == [
        ["linear_act", "relu", "float32", "64x32", "1"],
        ["linear_act", "relu", "float32", "64x32", "16-31"],
    ]
    assert all("plain " in row and "onednn " in row and "packed" not in row for row in rows)
    assert cli.main(["cache"]) == 0
    file_, ours, others = capsys.readouterr().out.splitlines()
    assert file_ == str(choose.file())
    assert ours.startswith("2 choices for fxfuse ")
    assert others == "0 for other devices and versions"


@pytest.mark.skipif(not onednn.AVAILABLE, reason="there is nothing to choose from")
@pytest.mark.parametrize("target", ["mlp", "keywords"])
def test_tune_measures_the_targets_own_example(target, quiet, file, capsys):
    assert cli.main(["tune", f"{file}:{target}", "--pack"]) == 0
    (row,) = capsys.readouterr().out.splitlines()[2:]
    assert "4-7" in row
    assert "onednn-packed " in row


def test_tune_with_nothing_to_measure(quiet, tmp_path, capsys):
    path = tmp_path / "bare.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.ReLU(), torch.randn(2, 2)\n")
    assert cli.main(["tune", f"{path}:build"]) == 0
    assert capsys.readouterr().out == "no fused operator was called\n"


def test_tune_says_why_nothing_was_called(quiet, tmp_path, capsys):
    path = tmp_path / "wide.py"
    path.write_text(
        "import torch\nclass Marked(torch.Tensor): ...\ndef build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())\n"
        "    return model, torch.randn(2, 8).as_subclass(Marked)\n"
    )
    assert cli.main(["tune", f"{path}:build"]) == 0
    first, why = capsys.readouterr().out.splitlines()
    assert first == "no fused operator was called"
    assert why == "1 call of the model did not run fused: argument input: expected a plain tensor, found a Marked"


@pytest.mark.parametrize("target", ["gpt2-like", "{file}:keywords"])
def test_rows_are_for_one_floating_point_tensor(target, file, capsys):
    line = asked_wrongly(capsys, "tune", target.format(file=file), "--rows", "3")
    assert "--rows is for models of one floating-point tensor" in line


def test_clear(capsys):
    key = choose.Key(choose.device_name("cpu"), "linear", torch.float32, 1, 1, False, True, 1)
    choose.CHOICES.put({key: choose.Choice(("plain",), {"plain": 1.0})})
    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(choose.file()), "cleared"]
    assert not choose.file().exists()
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("0 choices for ")


def test_a_table_that_cannot_be_read(capsys):
    choose.folder().mkdir(parents=True)
    choose.file().write_text("no json")
    assert cli.main(["cache"]) == 2
    assert capsys.readouterr().err.startswith("fxfuse: JSONDecodeError: ")
