import json
import re
from collections import Counter

import pytest
import torch
from torch import nn

from fxfuse import cli
from fxfuse.bench import machine_rates, models, peers, profile_render, schema, trace
from fxfuse.bench import profile as profiles
from fxfuse.bench.kernel_names import describe
from fxfuse.bench.machine_rates import Rates
from fxfuse.bench.profile import OUTSIDE, WHOLE, Line, profile
from fxfuse.bench.targets import Target
from fxfuse.bench.work import Pass, Work
from fxfuse.ops import onednn

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    monkeypatch.setattr(machine_rates, "rates", lambda device, dtypes: Rates(1e10, {"float32": 1e12}, "nowhere"))


def ffn():
    torch.manual_seed(0)
    return Target("ffn", models.FeedForward(256, 512).eval(), (torch.randn(64, 256),), {})


class Stops(nn.Module):
    """One part that is a region, and a forward that none can be made of."""

    def __init__(self):
        super().__init__()
        self.mlp = models.FeedForward(256, 512)

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        return self.mlp(x).neg()


def lines(found, name):
    return {(line.region, line.what): line for s in found.set_ups if s.name == name for line in s.lines}


def test_what_is_predicted_is_confirmed(tmp_path):
    found = profile(ffn(), traces=tmp_path / "t.json")
    assert [set_up.name for set_up in found.set_ups] == ["eager", "fxfuse"]
    assert {line.verdict for set_up in found.set_ups for line in set_up.lines} == {"confirmed"}
    assert lines(found, "eager")["", "host op aten::addmm"].observed == 2
    (eager,) = found.set_ups[0].costs
    flops, moved = 2 * 2 * 64 * 256 * 512, 4 * (2 * (64 * 256 + 256 * 512 + 64 * 512) + 512 + 256 + 2 * 64 * 512)
    assert (eager.region, eager.flops, eager.moved) == ("", flops, moved)
    assert eager.observed_us > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t-eager.json", "t-fxfuse.json"]
    assert found.set_ups[0].trace_file == str(tmp_path / "t-eager.json")


def test_floors_are_sums_over_kernels():
    found = profile(ffn(), [])
    cost, works = found.set_ups[0].costs[0], found.set_ups[0].works[""]
    each = [max(p.flops / 1e12, p.moved / 1e10) for work in works for p in work.passes]
    assert cost.floor_us == pytest.approx(sum(each) * 1e6)


def test_a_wrong_prediction_is_broken(monkeypatch):
    right = profiles.predict

    def wrong(*args):
        return [*right(*args), Work("neg", "neg", Counter({"aten::neg": 1}))]

    monkeypatch.setattr(profiles, "predict", wrong)
    found = profile(ffn())
    assert [(line.what, line.predicted, line.observed) for line in found.broken] == [("host op aten::neg", 1, 0)] * 2
    assert "2 broken" in profile_render.table(found)


def test_what_lies_outside_of_regions_is_named_and_not_predicted():
    found = profile(Target("stops", Stops().eval(), (torch.randn(64, 256),), {}))
    for name in ("eager", "fxfuse"):
        seen = lines(found, name)
        outside = seen[OUTSIDE, "host ops"]
        assert (outside.predicted, outside.verdict) == (None, "not predicted")
        assert outside.why.startswith("it lies in no region; ")
        assert "aten::neg 1" in outside.why
        assert outside.observed == found.set_ups[0].call.host_ops(None).total()
        assert all(line.verdict == "confirmed" for (region, _), line in seen.items() if region == "mlp")
        assert seen[WHOLE, "oneDNN products"].verdict == "not predicted"
    assert found.notes
    assert found.notes[0].startswith("in no region: the model (Stops): ")


def test_a_part_in_which_nothing_is_gained_is_predicted_all_the_same():
    found = profile(Target("tiny", nn.Linear(4, 4).eval(), (torch.randn(2, 4),), {}))
    for name in ("eager", "fxfuse"):
        assert lines(found, name)["", "host op aten::addmm"] == Line("", "host op aten::addmm", 1, 1, "confirmed", "")
    assert found.notes == ["not installed: the model: nothing in it is made faster"]


class Mixes(nn.Module):
    """A part that no trace goes through, with a projection of its own, and something that it keeps."""

    def __init__(self):
        super().__init__()
        self.proj, self.last = nn.Linear(256, 256), None

    def forward(self, x, pair):
        for _ in range(x.shape[0] // 32):
            x = x + 1
        self.last = x
        return self.proj(x) * pair[0] + pair[1]


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.mlp = Mixes(), models.FeedForward(256, 512)

    def forward(self, x, pair):
        return self.mlp(x + self.mix(x, pair))


@pytest.mark.filterwarnings("ignore:The tensor attribute self.mix.last was assigned during export")
def test_a_module_that_is_only_called_is_predicted_beside_the_parts_inside_it():
    model, pair = Around().eval(), (torch.randn(256), torch.randn(256))
    found = profile(Target("around", model, (torch.randn(64, 256), pair), {}))
    assert type(model.mix.last) is torch.Tensor, "no prediction has left anything in it"
    for name in ("eager", "fxfuse"):
        seen = lines(found, name)
        assert {region for region, _ in seen} == {"mix.proj", "", WHOLE}
        assert {line.verdict for line in seen.values()} == {"confirmed"}
        assert seen["", "host op aten::add"].observed == 2 + 1 + 1


def test_a_graph_module_has_no_regions():
    graph_module = torch.fx.symbolic_trace(models.FeedForward(256, 512).eval())
    found = profile(Target("graph", graph_module, (torch.randn(64, 256),), {}))
    assert [set_up.name for set_up in found.set_ups] == ["eager", "fxfuse"]
    assert {line.verdict for set_up in found.set_ups for line in set_up.lines} == {"not predicted"}
    assert found.notes == ["nothing is predicted: a torch.fx.GraphModule has no regions"]


def test_a_wrong_answer_is_left_out(monkeypatch):
    target = ffn()
    monkeypatch.setitem(peers.PEERS, "fxfuse", lambda _target: lambda x: target.model(x) + 1)
    found = profile(target)
    assert [set_up.name for set_up in found.set_ups] == ["eager"]
    assert found.left_out[0].reason.startswith("wrong answer: ")
    assert lines(found, "eager")[OUTSIDE, "host ops"].verdict == "not predicted"


@pytest.mark.parametrize(
    ("predicted", "observed", "why", "verdict"),
    [
        (2, 2, "", "confirmed"),
        (0, 0, "", "confirmed"),
        (2, 3, "", "broken"),
        (2, 1, "", "broken"),
        (2, 3, "a reason", "not predicted"),
        (2, 2, "a reason", "not predicted"),
        (2, 1, "a reason", "broken"),
    ],
)
def test_verdicts(predicted, observed, why, verdict):
    assert profiles._line("", "kernels", predicted, observed, why, "").verdict == verdict


NVJET, GELU = "nvjet_tst_192x192_64x4_1x2_h_bz_bias_TNT", "vectorized_elementwise_kernel<Gelu>"
OURS = "fxfuse_linear_gelu_bf16_128x192x64"


def on_gpu(*names):
    call = trace.Call(100.0)
    call.kernels = [trace.Kernel(name, 10.0 * i, 5.0, "", describe(name)) for i, name in enumerate(names)]
    call.launches = Counter({"cudaLaunchKernelExC": len(names)})
    return call


GEMM, POINTWISE = Pass("gemm", 1, 1, "bfloat16"), Pass("elementwise", 0, 1, "bfloat16")


@pytest.mark.parametrize(
    ("passes", "kernels", "expected"),
    [
        (
            [GEMM, POINTWISE],
            [NVJET, "void at::vectorized_elementwise_kernel<4, at::GeluCUDAKernelImpl()>(int)"],
            [
                Line("", "kernels", 2, 2, "confirmed", f"{NVJET}, {GELU}"),
                Line("", "kernels: elementwise", 1, 1, "confirmed", GELU),
                Line("", "kernels: gemm", 1, 1, "confirmed", NVJET),
            ],
        ),
        (
            [GEMM],
            [NVJET, "void cublasLt::splitKreduce_kernel<32>(int)"],
            [
                Line("", "kernels", 1, 2, "broken", f"{NVJET}, splitKreduce_kernel"),
                Line("", "kernels: gemm", 1, 1, "confirmed", NVJET),
                Line("", "kernels: reduce", 0, 1, "broken", "splitKreduce_kernel"),
            ],
        ),
        (
            [GEMM],
            [OURS],
            [
                Line("", "kernels", 1, 1, "confirmed", OURS),
                Line("", "kernels: fused gemm", 0, 1, "broken", OURS),
                Line("", "kernels: gemm", 1, 0, "broken", ""),
            ],
        ),
    ],
    ids=["as predicted", "split k", "another implementation"],
)
def test_kernels_by_kind(passes, kernels, expected):
    works = [Work("node", "op", passes=passes)]
    assert list(profiles._lines("", works, on_gpu(*kernels), "", CUDA, host=False)) == expected


def test_an_operator_of_unknown_kernels_leaves_a_lower_bound():
    works = [
        Work("a", "linear", passes=[GEMM]),
        Work("b", "sdpa", passes=[Pass("other", 1, 1, "")], unknown_kernels="sdpa: ?"),
    ]
    found = list(profiles._lines("", works, on_gpu(NVJET, "flash_fwd_kernel"), "", CUDA, host=False))
    assert [(line.what, line.predicted, line.observed, line.verdict) for line in found] == [
        ("kernels", 1, 2, "not predicted"),
        ("kernels: attention", None, 1, "not predicted"),
        ("kernels: gemm", 1, 1, "not predicted"),
    ]
    assert all(line.why.startswith("sdpa: ?") for line in found)


def test_json_is_of_the_schema_and_has_every_line():
    found = profile(ffn())
    document = json.loads(profile_render.as_json(found))
    schema.check(document, schema.PROFILE)
    assert [setup["name"] for setup in document["setups"]] == ["eager", "fxfuse"]
    for setup, set_up in zip(document["setups"], found.set_ups, strict=True):
        assert setup["lines"] == [vars(line) for line in set_up.lines]
        assert sum(node["flops"] for node in setup["nodes"]) == setup["regions"][0]["flops"]
        assert [op["name"] for op in setup["ops"]] == [op.name for op in set_up.call.operators]
    assert document["rates"] == {"bandwidth": 1e10, "flops": {"float32": 1e12}}


def test_tables_show_kernels_with_what_their_names_say():
    found = profile(ffn())
    found.device = "cuda"
    found.set_ups[0].call = on_gpu(NVJET, OURS)
    text = profile_render.table(found)
    assert "eager: 2 kernels in 10.0 µs, 5.0 µs between them; 2 launches, 0 memsets, 0 occupancy queries" in text
    (row,) = [line for line in text.splitlines() if line.endswith(NVJET)]
    assert row.split() == ["0.0", "5.0", "gemm", "192x192_64x4", "tn", "bfloat16", NVJET]


@pytest.mark.skipif(not onednn.AVAILABLE, reason="needs oneDNN")
def test_the_command(capsys, tmp_path):
    argv = ["profile", "ffn", "--device", "cpu", "--rows", "64"]
    assert cli.main([*argv, "--json", str(tmp_path / "p.json"), "--trace", str(tmp_path / "t.json")]) == 0
    out = capsys.readouterr().out
    assert "ffn  (cpu, float32): " in out
    assert ", 0 broken, " in out
    assert "eltwise_gelu_erf" in out
    schema.read(tmp_path / "p.json", schema.PROFILE)
    assert (tmp_path / "t-fxfuse.json").exists()
    assert cli.main([*argv, "--verbose"]) == 0
    assert "linear_act (onednn)" in capsys.readouterr().out
    assert cli.main([*argv, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == schema.PROFILE


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nothing"], "'nothing' is neither a built-in target"),
        (["ffn", "--json", "{tmp}/absent/p.json"], "there is no such folder"),
        (["ffn", "--trace", "{tmp}/absent/t.json"], "there is no such folder"),
        (["ffn", "--json", "{tmp}"], "this is a folder, and no file"),
    ],
)
def test_one_clear_line(argv, says, capsys, tmp_path):
    assert cli.main(["profile", *(arg.format(tmp=tmp_path) for arg in argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("out of memory"), 2)], ids=str)
def test_what_was_traced_survives(error, code, monkeypatch, capsys, tmp_path):
    real, file = profiles._traced, tmp_path / "p.json"

    def traced(name, *args):
        if name == "fxfuse":
            raise error
        return real(name, *args)

    monkeypatch.setattr(profiles, "_traced", traced)
    argv = ["profile", "ffn", "--device", "cpu", "--rows", "64", "--json", str(file)]
    assert cli.main(argv) == code
    assert "not finished: fxfuse" in capsys.readouterr().out
    document = schema.read(file, schema.PROFILE)
    assert ([setup["name"] for setup in document["setups"]], document["unfinished"]) == (["eager"], ["fxfuse"])


def test_units_go_with_the_size():
    text = profile_render.table(profile(ffn()))
    assert re.search(r"^\. +33\.6 MFLOP +1\.71 MB +\d+ µs +[\d.]+ [µm]s$", text, re.MULTILINE)
