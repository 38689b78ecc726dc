"""The two commands of the README are what CI runs, and the report that it shows is what its program prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fxfuse import cli
from fxfuse.bench.models import BUILT_IN
from fxfuse.ops import onednn

ROOT = Path(__file__).parents[1]
COMMANDS = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
CI = (ROOT / ".ci" / "run").read_text()


def test_there_are_two_commands_and_both_begin_alike():
    bench, tests = COMMANDS
    set_up = "python3 -m venv .venv && .venv/bin/pip install -q torch==2.13.0 && .venv/bin/pip install -q -e "
    assert bench.startswith(set_up)
    assert tests.startswith(set_up)


def test_ci_runs_the_readmes_test_command_and_has_none_of_its_own():
    extraction = re.search(r"grep -E '(.*)' README.md", CI)
    assert extraction
    assert [line for line in COMMANDS if re.search(extraction[1], line)] == [COMMANDS[1]]
    assert "pytest" not in CI.replace(extraction[1], "")


def test_ci_runs_the_readmes_main_job_quickly():
    main_job = COMMANDS[0].rpartition(" && ")[2]
    assert main_job.split()[:2] == [".venv/bin/fxfuse", "bench"]
    assert set(main_job.split()[2:]) <= set(BUILT_IN)
    assert f"\n{main_job} --quick\n" in CI


@pytest.mark.skipif(
    not onednn.AVAILABLE, reason="without oneDNN plain linears are not lowered, and the report is another"
)
def test_the_report_shown_is_the_programs_output(tmp_path):
    program, shown = re.search(
        r"`model.py`:\n\n```python\n(.*?)```\n.*?```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    ).groups()
    (tmp_path / "model.py").write_text(program)
    run = subprocess.run([sys.executable, "model.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert _comparable(run.stdout) == _comparable(shown)


def test_the_table_of_options_is_the_parsers():
    (commands,) = [action.choices for action in cli._parser()._actions if isinstance(action.choices, dict)]
    taken = [
        (option.option_strings[0], name)
        for name, parser in commands.items()
        for option in parser._actions
        if option.option_strings and option.dest != "help"
    ]
    rows = re.findall(r"^\| (`-.*?`) \| (\S.*?) \| ", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = [
        (option, command)
        for options, of in rows
        for option in re.findall(r"`(--?[a-z]+)", options)
        for command in (commands if of == "all" else of.split(", "))
    ]
    assert sorted(shown) == sorted(taken)


def test_every_command_is_shown():
    (commands,) = [action.choices for action in cli._parser()._actions if isinstance(action.choices, dict)]
    assert set(re.findall(r"^fxfuse (\w+) ", (ROOT / "README.md").read_text(), re.MULTILINE)) == set(commands)


def _comparable(report):
    """The parts of a report that are the same on every machine: not what was measured, or why nothing was."""
    parts = ["\n".join(line.rstrip() for line in part.splitlines()) for part in report.strip().split("\n\n")]
    varying = ("implementations, measured\n", "notes\nnothing was measured", "time taken, ms\n")
    return [p for p in parts if not p.startswith(varying)]
