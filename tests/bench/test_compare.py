import json
import subprocess
import sys
import textwrap

import pytest

from benchmarks import compare as command
from fxfuse.bench import compare, revisions
from fxfuse.bench.revisions import BenchFailed
from fxfuse.bench.schema import BENCH


def document(*rows, **machine):
    """One run of ``fxfuse bench`` that found these ratios of fxfuse: (target, (p20, median, p80) or None, ...)."""
    return {
        "schema": BENCH,
        "machine": {"cpu": "a CPU", "threads": 2, "gpu": None, **machine},
        "versions": {"torch": "2.13"},
        "settings": {},
        "results": [_result(*row) for row in rows],
        "unfinished": [],
    }


def _result(target, ratio, had_core=1.0, device="cpu"):
    variants = [_variant("eager", (1.0, 1.0, 1.0))] + ([_variant("fxfuse", ratio)] if ratio else [])
    rest = {"fused": 1, "lowered": 0, "kernels_saved": 1, "ops": {}, "weaker_gate": "", "left_out": [], "report": None}
    return {
        "target": target,
        "device": device,
        "dtype": "float32",
        "had_core": had_core,
        "variants": variants,
        **rest,
    }


def _variant(name, ratio):
    p20, median, p80 = ratio
    rest = {"rounds": 7, "calls": 1, "setup_s": 0.0, "fxfuse_speedup": None, "submit_s": None, "kernels": None}
    rest |= {"end_to_end_s": None, "extra_bytes": None}
    return {
        "name": name,
        "median_s": 1 / median,
        "p20_s": 1 / p80,
        "p80_s": 1 / p20,
        **rest,
        "speedup_over_eager": {"p20": p20, "median": median, "p80": p80, "rankable": True},
    }


STEADY, FASTER, SLOWER = (1.48, 1.50, 1.52), (1.68, 1.70, 1.72), (1.28, 1.30, 1.32)


@pytest.mark.parametrize(
    ("before", "after", "word", "regression"),
    [
        (STEADY, STEADY, "same", False),
        (STEADY, SLOWER, "slower", True),
        (STEADY, FASTER, "faster", False),
        (STEADY, (1.28, 1.30, 1.49), "same", False),  # the spreads touch
        ((1.25, 1.50, 1.75), SLOWER, "same", False),  # it was as noisy before
        (STEADY, (1.46, 1.465, 1.47), "same", False),  # apart, but by less than two processes differ
        (STEADY, (1.53, 1.54, 1.55), "same", False),
        (STEADY, None, "no answer", True),
        (None, STEADY, "answers now", False),
        (None, None, "same", False),
    ],
)
def test_verdicts(before, after, word, regression):
    (verdict,) = compare.compare([document(("ffn", before))], [document(("ffn", after))])
    assert (verdict.word, verdict.regression) == (word, regression)


def test_the_margin():
    before, after = [document(("ffn", STEADY))], [document(("ffn", (1.46, 1.465, 1.47)))]
    (verdict,) = compare.compare(before, after, margin=0.01)
    assert verdict.word == "slower"


@pytest.mark.parametrize("busy", ["before", "after"])
def test_a_busy_machine_ranks_nothing(busy):
    quiet, loaded = document(("ffn", STEADY)), document(("ffn", SLOWER, 0.5))
    sides = ([loaded, loaded], [quiet]) if busy == "before" else ([quiet], [quiet, loaded])
    (verdict,) = compare.compare(*sides)
    assert (verdict.word, verdict.ranked, verdict.regression) == ("too busy", False, False)
    (verdict,) = compare.compare([document(("ffn", STEADY))], [document(("ffn", None, 0.5))])
    assert verdict.word == "no answer"


def test_a_gpu_is_not_busy_because_its_host_waits():
    (verdict,) = compare.compare([document(("ffn", STEADY, 0.5, "cuda"))], [document(("ffn", SLOWER, 0.5, "cuda"))])
    assert verdict.word == "slower"


def test_rows_of_one_side_rank_nothing():
    verdicts = compare.compare([document(("a", STEADY), ("b", STEADY))], [document(("b", STEADY), ("c", SLOWER))])
    assert [(v.row[0], v.word, v.regression) for v in verdicts] == [
        ("a", "only before", False),
        ("b", "same", False),
        ("c", "only after", False),
    ]


def test_several_runs_of_a_side_are_as_wide_as_all_of_them():
    runs = [document(("ffn", ratio)) for ratio in (STEADY, SLOWER, STEADY)]
    (verdict,) = compare.compare(runs, [document(("ffn", SLOWER))])
    assert (verdict.before.p20, verdict.before.median, verdict.before.p80) == (1.28, 1.50, 1.52)
    assert verdict.word == "same"
    (verdict,) = compare.compare([document(("ffn", STEADY))], [document(("ffn", STEADY)), document(("ffn", None))])
    assert verdict.word == "no answer"


def test_another_machine_is_said():
    lines = compare.differences(document(), document(threads=4, gpu="a GPU"))
    assert lines == ["threads is 4, was 2", "gpu is a GPU, was None"]


@pytest.mark.parametrize(
    ("after", "code", "says"),
    [
        ([("ffn", STEADY)], 0, "same"),
        ([("ffn", SLOWER)], 1, "-13.3%"),
        ([("ffn", None)], 1, "no answer"),
        ([("mlp", STEADY)], 2, "no row that stands in both"),
    ],
)
def test_exit_codes(after, code, says, tmp_path, capsys):
    for name, rows in (("a", [("ffn", STEADY)]), ("b", after)):
        (tmp_path / name).write_text(json.dumps(document(*rows)))
    assert command.main([str(tmp_path / "a"), str(tmp_path / "b")]) == code
    out, err = capsys.readouterr()
    assert says in out + err


def test_files_that_cannot_be_compared(tmp_path, capsys):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(json.dumps(document(("ffn", STEADY))))
    bad.write_text("{}")
    for files in ([good, bad], [good, tmp_path / "absent"]):
        assert command.main([str(file) for file in files]) == 2
        assert capsys.readouterr().err.startswith("compare: ")


@pytest.mark.parametrize("runs", ["0", "-1"])
def test_no_runs_are_refused(runs, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--base", "HEAD", f"--runs={runs}", "--", "ffn"])
    assert exit_.value.code == 2
    assert f"--runs {runs}: there is nothing to compare" in capsys.readouterr().err


BENCH_OF_A_REVISION = """
import json, os, pathlib, sys
from fxfuse import passes
out = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
log = pathlib.Path(os.environ["LOG"])
log.write_text(log.read_text() + f"{{passes.RATIO}} {{' '.join(sys.argv[1:-2])}} {{os.environ['FXFUSE_CACHE']}}\\n")
document = json.loads({document!r})
ratio = dict(p20=passes.RATIO - 0.1, median=passes.RATIO, p80=passes.RATIO + 0.1, rankable=True)
document["results"][0]["variants"][1]["speedup_over_eager"] = ratio
out.write_text(json.dumps(document))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository whose first revision is one that reports 2.0, and whose files now report 1.5."""
    root = tmp_path / "checkout"
    (root / "fxfuse").mkdir(parents=True)
    (root / "passes").mkdir()
    (root / "fxfuse" / "__init__.py").touch()
    program = BENCH_OF_A_REVISION.format(document=json.dumps(document(("ffn", STEADY))))
    (root / "fxfuse" / "__main__.py").write_text(textwrap.dedent(program))
    (root / "passes" / "__init__.py").write_text("RATIO = 2.0\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    (root / "passes" / "__init__.py").write_text("RATIO = 1.5\n")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    (tmp_path / "log").touch()
    return root


def test_revisions_take_turns_each_with_its_own_code_and_choices(checkout, tmp_path):
    before, after = revisions.bench(checkout, "HEAD", ["ffn", "--quick"], runs=2)
    ours = [run["results"][0]["variants"][1]["speedup_over_eager"]["median"] for run in before + after]
    assert ours == [2.0, 2.0, 1.5, 1.5]
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [line[0] for line in lines] == ["2.0", "1.5", "1.5", "2.0"]
    assert {tuple(line[1:4]) for line in lines} == {("bench", "ffn", "--quick")}
    assert len({line[4] for line in lines}) == 2
    assert [verdict.word for verdict in compare.compare(before, after)] == ["slower"]


def test_nothing_is_left_in_the_repository(checkout):
    revisions.bench(checkout, "HEAD", ["ffn"], runs=1)
    shown = subprocess.run(["git", "worktree", "list"], cwd=checkout, capture_output=True, text=True, check=True)
    assert len(shown.stdout.splitlines()) == 1
    status = subprocess.run(["git", "status", "--short"], cwd=checkout, capture_output=True, text=True, check=True)
    assert status.stdout.split() == ["M", "passes/__init__.py"]


def test_a_revision_that_there_is_not(checkout):
    with pytest.raises(BenchFailed, match=r"git archive nowhere: fatal: not a valid object name"):
        revisions.bench(checkout, "nowhere", ["ffn"], runs=1)


def test_a_benchmark_that_fails(checkout):
    (checkout / "fxfuse" / "__main__.py").write_text("import sys\nsys.exit('no such target')\n")
    with pytest.raises(BenchFailed, match="fxfuse bench ffn failed: no such target"):
        revisions.bench(checkout, "HEAD", ["ffn"], runs=1)


def test_python_m_benchmarks_compare():
    done = subprocess.run([sys.executable, "-m", "benchmarks.compare"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "FILE" in done.stderr
