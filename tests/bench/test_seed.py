import json
from collections import Counter

import pytest
import torch

from benchmarks import gpu, run, seed
from fxfuse.bench import machine_rates, schema
from fxfuse.bench.machine_rates import Rates
from fxfuse.bench.targets import Target
from fxfuse.ops import onednn

EAGER = Counter({"linear": 3, "addmm": 3, "gelu": 1})


@pytest.mark.parametrize(
    ("before", "after", "changed", "stayed"),
    [
        (EAGER, EAGER, "nothing", "3 linear\n  3 addmm\n  gelu"),
        (EAGER, Counter(), "- 3 linear\n  3 addmm\n  gelu", "nothing"),
        (EAGER, Counter({"addmm": 4}), "- 3 linear\n  gelu\n+ addmm", "3 addmm"),
        (Counter(), EAGER, "+ 3 linear\n  3 addmm\n  gelu", "nothing"),
    ],
)
def test_what_changed_and_what_stayed(before, after, changed, stayed):
    assert seed.compared(before, after) == (changed, stayed)


@pytest.mark.skipif(torch.cuda.is_available() or not onednn.AVAILABLE, reason="is about oneDNN's operators")
def test_the_suite_on_the_cpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine_rates, "rates", lambda device, dtypes: Rates(1e10, {"float32": 1e12}, "nowhere"))
    monkeypatch.setattr(seed, "SIZES", (gpu.Size(64, 512, 1024),))
    monkeypatch.setattr(seed, "ROWS", tuple(row for row in seed.ROWS if row[1] != "compile"))  # takes a minute
    assert run.main(["--suite", "seed", "--json", str(tmp_path / "seed.json")]) == 0
    out = capsys.readouterr().out
    assert "64, 512, 1024" in out
    assert "3 mkldnn::_linear_pointwise" in out
    assert "left out: measured on cuda only" in out
    assert "broken" not in out
    assert '"fxfuse.seed/1"' in (tmp_path / "seed.json").read_text()


def test_rows_that_were_finished_survive(monkeypatch, capsys, tmp_path):
    def rows(size):
        yield seed.Row(str(size), "GeGLU, eager", {"linear": 3}, {}, [], "", "")
        raise KeyboardInterrupt

    monkeypatch.setattr(seed, "rows", rows)
    file = tmp_path / "seed.json"
    assert run.main(["--suite", "seed", "--json", str(file)]) == 130
    assert [row["set_up"] for row in json.loads(file.read_text())["rows"]] == ["GeGLU, eager"]
    out, err = capsys.readouterr()
    assert "GeGLU, eager" in out
    assert err == "run: interrupted\n"


def test_targets_of_a_suite_that_were_finished_survive(monkeypatch, capsys, tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    first = Target("one", torch.nn.Linear(4, 4).eval(), (torch.randn(2, 4),), {})
    monkeypatch.setitem(run.SUITES, "cases", lambda: [("one", lambda: first, ()), ("two", interrupted, ())])
    file = tmp_path / "cases.json"
    assert run.main(["--suite", "cases", "--quick", "--json", str(file)]) == 130
    document = schema.read(file, schema.BENCH)
    assert ([result["target"] for result in document["results"]], document["unfinished"]) == (["one"], ["two"])
    assert "one" in capsys.readouterr().out
