import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxfuse.bench import models, peers, render, schema, targets
from fxfuse.bench.gate import Gate
from fxfuse.bench.measure import dispatched_ops, extra_bytes, measure, measure_shapes
from fxfuse.bench.peers import TargetRaised
from fxfuse.bench.targets import BadTarget, Target
from fxfuse.bench.timer import Effort, Timing

BRIEF = Effort(rounds=3, warmup_s=0.0, block_s=0.0)


def small(model, *args):
    return Target("small", model.eval(), args, {})


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return small(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), torch.randn(8, 64))


def test_a_wrong_answer_is_not_timed(mlp, monkeypatch):
    calls = []

    def off(*args):
        calls.append(args)
        return mlp.model(*args) * 1.001

    monkeypatch.setitem(peers.PEERS, "compile", lambda _target: off)
    result = measure(mlp, ["compile"], effort=BRIEF)
    assert list(result.timings) == ["eager", "fxfuse"]
    assert len(calls) == 1
    (gone,) = result.left_out
    assert gone.name == "compile"
    assert gone.reason.startswith("wrong answer: ")


def test_what_is_missing_is_named_with_its_reason(mlp, monkeypatch):
    def breaks(_target):
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setitem(peers.PEERS, "compile", breaks)
    result = measure(mlp, ["compile", "onednn"], effort=BRIEF)
    assert [(gone.name, gone.reason) for gone in result.left_out] == [
        ("compile", "raised RuntimeError: no compiler"),
        ("onednn", "written by hand for the built-in MLPs only"),
    ]
    assert "left out: compile: raised RuntimeError: no compiler" in render.table(result)


def test_a_failing_fxfuse_is_said(mlp, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fxfuse", lambda target: lambda x: target.model(x) + 1)
    result = measure(mlp, [], effort=BRIEF)
    assert result.fxfuse_failed
    assert "left out: fxfuse: wrong answer" in render.table(result)
    assert "—" in render.summary([result])


def test_a_forward_that_writes_to_its_input_is_given_the_same_each_time():
    class Shifts(nn.Module):
        def forward(self, x):
            return x.add_(1.0)

    x = torch.zeros(3)
    target = small(Shifts(), x)
    for _ in range(2):
        assert peers.build("eager", target).output.eq(1).all()
    assert x.eq(0).all()


def test_a_model_that_raises():
    with pytest.raises(TargetRaised, match="small: the model's forward raised RuntimeError: mat1 and mat2"):
        measure(small(nn.Linear(4, 4), torch.randn(2, 5)), [], effort=BRIEF)


def test_a_model_without_tensors_in_its_output():
    class Length(nn.Module):
        def forward(self, x):
            return x.shape[0]

    with pytest.raises(BadTarget, match="returned no tensor"):
        measure(small(Length(), torch.randn(2, 5)), [], effort=BRIEF)


def test_json(mlp):
    result = measure(mlp, [], label="one", effort=BRIEF)
    document = json.loads(render.as_json([result], {"rows": 8}))
    assert set(document) == {"schema", "machine", "versions", "settings", "results", "unfinished"}
    schema.check(document, schema.BENCH)
    assert set(document["machine"]) == {"system", "cpu", "cores", "threads", "gpu"}
    assert set(document["versions"]) == {"python", "torch", "fxfuse"}
    (one,) = document["results"]
    assert (one["target"], one["device"], one["dtype"]) == ("one", "cpu", "float32")
    assert [variant["name"] for variant in one["variants"]] == ["eager", "fxfuse"]
    for variant in one["variants"]:
        assert variant["rounds"] == 3
        assert 0 < variant["p20_s"] <= variant["median_s"] <= variant["p80_s"]
    eager, ours = one["variants"]
    assert eager["speedup_over_eager"]["median"] == 1
    assert ours["fxfuse_speedup"] == {"median": 1, "p20": 1, "p80": 1, "rankable": False}


def test_ops_are_those_that_the_model_itself_dispatches():
    gate, up, down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
    x = torch.randn(2, 8)
    assert dispatched_ops(lambda: down(F.gelu(gate(x), approximate="tanh") * up(x))) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", peers.BY_HAND)
def test_the_onednn_column_computes_the_same(cls, dtype):
    torch.manual_seed(0)
    target = small(cls(64, 128).to(dtype), torch.randn(5, 64, dtype=dtype))
    with torch.inference_mode():
        eager = target.model(*target.args)
        by_hand = peers.PEERS["onednn"](target)(*target.args)
    gate = Gate(target, eager)
    assert not gate.weaker
    assert not gate.wrong(by_hand)
    assert gate.wrong(by_hand * 1.5)


def test_the_onednn_column_knows_every_built_in_mlp():
    built = [built_in.build(1)[0] for built_in in models.BUILT_IN.values() if built_in.takes_rows]
    assert {type(model) for model in built} == set(peers.BY_HAND)


class Unexportable(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x) if x.sum().item() > 0 else self.linear(-x)


def test_the_gate_says_when_it_is_weaker():
    torch.manual_seed(0)
    target = small(Unexportable(), torch.randn(5, 64))
    with torch.inference_mode():
        eager = target.model(*target.args)
    gate = Gate(target, eager)
    assert "x.sum" in gate.weaker or "data-dependent" in gate.weaker
    assert not gate.wrong(eager)
    assert gate.wrong(eager * 1.001)


def test_language_models_pass_the_whole_gate():
    target = targets.load("gpt2-like", device="cpu")
    with torch.inference_mode():
        eager = target.model(*target.args)
    gate = Gate(target, eager)
    assert not gate.weaker
    assert not gate.wrong(eager)
    assert gate.wrong(eager * 1.01)


def test_shapes_are_measured_with_variants_that_are_built_once(mlp, monkeypatch):
    built, sizes = [], []

    def peer(target):
        built.append(target)
        return lambda x: sizes.append(len(x)) or target.model(x)

    monkeypatch.setitem(peers.PEERS, "compile", peer)
    results = list(measure_shapes(mlp, [4, 2], ["compile"], effort=BRIEF))
    assert [result.label for result in results] == ["small M=4", "small M=2"]
    assert len(built) == 1
    assert set(sizes) == {4, 2}
    assert all(set(result.timings) == {"eager", "fxfuse", "compile"} for result in results)
    assert all(result.first_call_s["compile"] > 0 for result in results)


def test_a_wrong_answer_at_one_size_is_not_timed_there(mlp, monkeypatch):
    monkeypatch.setitem(
        peers.PEERS, "compile", lambda target: lambda x: target.model(x) * (1.0 if len(x) == 4 else 1.1)
    )
    results = list(measure_shapes(mlp, [4, 2, 4], ["compile"], effort=BRIEF))
    assert ["compile" in result.timings for result in results] == [True, False, True]
    assert results[1].left_out[0].reason.startswith("wrong answer: ")


def test_shapes_are_for_models_of_one_tensor():
    target = small(nn.Bilinear(4, 4, 4), torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(BadTarget, match=r"^small: --shapes is for models of one floating-point tensor"):
        next(measure_shapes(target, [1], [], effort=BRIEF))


def test_training_steps_are_timed(mlp):
    result = measure(mlp, [], train=True, effort=BRIEF)
    assert result.label == "small, forward and backward"
    assert set(result.timings) == {"eager", "fxfuse"}
    assert result.report.calls[""].reasons["gradients are needed"] > 0
    assert all(p.grad is None for p in mlp.model.parameters())


def test_wrong_gradients_are_not_timed(mlp, monkeypatch):
    monkeypatch.setitem(
        peers.PEERS, "compile", lambda target: lambda x: target.model(x) + (y := target.model(x)) - y.detach()
    )
    monkeypatch.setitem(peers.PEERS, "onednn", lambda target: lambda x: target.model(x).detach())
    result = measure(mlp, ["compile", "onednn"], train=True, effort=BRIEF)
    assert set(result.timings) == {"eager", "fxfuse"}
    reasons = {gone.name: gone.reason for gone in result.left_out}
    assert reasons["compile"].startswith("wrong gradients: of parameter 0 the norm of the error is ")
    assert reasons["onednn"] == "wrong gradients: parameter 0 has none, eager one"


def test_a_model_that_does_not_learn_cannot_train(mlp):
    mlp.model.requires_grad_(False)
    with pytest.raises(BadTarget, match=r"^small: its backward raised "):
        measure(mlp, [], train=True, effort=BRIEF)


def test_the_memory_of_a_call_is_what_the_allocator_gave_at_its_peak():
    x = torch.randn(1000)
    whole = 4 * x.numel()

    def two_at_once():
        a = x.neg()
        b = a.neg()
        del a
        return b.neg()

    assert extra_bytes(two_at_once, x.device) == 2 * whole
    assert extra_bytes(lambda: x.neg_(), x.device) == 0
    assert extra_bytes(lambda: x[1:], x.device) == 0


def test_weights_and_inputs_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(2, 4)[0])

        def forward(self, i):
            return self.head(self.embed(i) * self.scale)

    result = measure(small(Tied(), torch.tensor([1, 2, 3])), [], effort=BRIEF)
    assert result.held_bytes == 4 * 10 * 4 + 4 * 2 * 4 + 8 * 3
    head, (eager, _) = render.head(result), render.rows(result)
    peak, extra = (float(eager[head.index(name)]) for name in ("peak MiB", "extra MiB"))
    assert peak - extra == pytest.approx(result.held_bytes / 2**20, abs=0.1)


def test_set_up_is_told_apart_from_the_first_call(mlp, monkeypatch):
    now = iter([0.0, 2.0, 2.5])
    monkeypatch.setattr(peers.time, "perf_counter", lambda: next(now))
    built = peers.build("eager", mlp)
    assert (built.prepare_s, built.first_call_s) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5.12e-6, "5.1 µs"),
        (99.99e-6, "100 µs"),
        (250e-6, "250 µs"),
        (9.9e-3, "9900 µs"),
        (12.34e-3, "12.3 ms"),
        (0.1214, "121 ms"),
        (3.0, "3000 ms"),
    ],
)
def test_times_have_as_many_digits_as_they_are_worth(seconds, text):
    assert render.time(seconds) == text


def test_one_table_has_one_unit(mlp):
    result = measure(mlp, [], effort=BRIEF)
    slow = {"eager": Timing((0.02,) * 3, 1), "fxfuse": Timing((0.005,) * 3, 1)}
    slow = type(result)(**{**vars(result), "timings": slow})
    assert "median ms" in render.head(slow)
    assert [row[1] for row in render.rows(slow)] == ["20.0", "5.0"]


def test_calls_that_did_not_run_fused_are_said(mlp):
    text = render.table(measure(mlp, [], train=True, effort=BRIEF))
    assert "did not run fused: gradients are needed" in text


def test_on_a_gpu_the_hosts_time_stays_in_microseconds(mlp):
    """However long the GPU takes, the host is done after some of them."""
    result = measure(mlp, [], effort=BRIEF)
    slow, brief = Timing((0.02,) * 3, 1), Timing((45e-6,) * 3, 1)
    names = ("eager", "fxfuse")
    seen = {"timings": dict.fromkeys(names, slow), "end_to_end": dict.fromkeys(names, slow)}
    seen |= {"submit": dict.fromkeys(names, brief), "kernels": {"eager": 5, "fxfuse": 2}}
    on_gpu = type(result)(**{**vars(result), **seen})
    row = dict(zip(render.head(on_gpu), render.rows(on_gpu)[0], strict=True))
    assert (row["host µs"], row["waiting ms"], row["kernels"]) == ("45.0", "20.0", 5)
    assert "GPU kernels a call: 5 → 2" in render.table(on_gpu)
