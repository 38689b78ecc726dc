"""What the report says of options, of modules in no region, and of calls; and what strict={"run"} makes of these."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse.capture.installed import GIVE_UP
from tests.models.answers import right
from tests.optimize.model import MLP, WIDTH, Stack, calls_of


def test_strict_run_raises_at_a_fallback(x, example):
    model = MLP().eval()
    optimized = fxfuse.optimize(model, x if example else None, strict={"run"})
    with torch.no_grad():
        assert right(optimized(x), model, x)
        with pytest.raises(fxfuse.errors.FellBack, match="argument residual: expected None, found a Tensor") as raised:
            optimized(x, x)
        assert "region '.'" in str(raised.value)
        optimized.scale = 2.0
        with pytest.raises(fxfuse.errors.FellBack, match=r"attribute scale: expected 1\.0, found 2\.0"):
            optimized(x)
        optimized.scale = 1.0
        assert right(optimized(x), model, x)
    counts = calls_of(optimized)
    assert (counts.fused, counts.plain, counts.fallback) == (2, 0, 2)


def test_strict_run_names_an_inner_region(x):
    class Looks(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else x * 2)

    optimized = fxfuse.optimize(Looks().eval(), strict={"run", "fuse"})
    optimized.blocks[1].scale = 3.0
    with torch.no_grad(), pytest.raises(fxfuse.errors.FellBack, match=r"region 'blocks\.1'"):
        optimized(x)


def test_strict_run_lets_plain_calls_pass(x):
    model = MLP().eval()
    optimized = fxfuse.optimize(model, strict="run")
    assert right(optimized(x), model, x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        optimized(x)
    with torch.no_grad():
        optimized.train()(x)
    assert (calls_of(optimized).plain, calls_of(optimized).fallback) == (3, 0)


def test_strict_run_of_a_function(x):
    optimized = fxfuse.optimize(lambda x, b=None: torch.relu(F.linear(x, W)) if b is None else b, strict={"run"})
    with torch.no_grad():
        optimized(x)
        with pytest.raises(fxfuse.errors.FellBack, match="argument b"):
            optimized(x, x)


W = torch.randn(WIDTH, WIDTH)


def test_strict_run_goes_with_a_copy(x):
    copied = copy.deepcopy(fxfuse.optimize(MLP().eval(), strict={"run"}))
    with torch.no_grad(), pytest.raises(fxfuse.errors.FellBack):
        copied(x, x)


def test_strict_fuse_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(512, 512)).eval()
    before = set(model.__dict__)
    with pytest.raises(fxfuse.errors.NothingFused):
        fxfuse.optimize(model, strict={"fuse"}, inplace=True)
    assert set(model.__dict__) == before
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_options_are_explained(x):
    model = Stack().eval()
    report = fxfuse.report(
        fxfuse.optimize(model, x, exclude=("blocks.0", "linear_act"), strict={"run"}, numerics="exact")
    )
    assert [line.split(":")[0] for line in report.options] == ["numerics='exact'", "exclude", "strict={'run'}"]
    for text in (str(report), report.to_markdown()):
        assert "blocks.0, linear_act left alone" in text
        assert "a call that breaks an assumption of its region raises" in text
    assert json.loads(report.to_json())["options"] == report.options
    assert fxfuse.report(fxfuse.optimize(model)).options == []


def test_an_excluded_pass_is_the_reason_of_what_it_would_have_fused(x, example):
    report = fxfuse.report(fxfuse.optimize(MLP().eval(), x if example else None, exclude="linear_act"))
    assert not report.fused
    assert ("linear_act", "excluded by Options.exclude") in [(e.rule, e.reason) for e in report.kept]


class Packed(nn.Module):
    """A Linear as weight-only quantisation writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            raise ValueError("too large")
        return F.linear(x, self.qweight.float() * self.scale[:, None])


def test_quantised_modules_have_a_reason(x, example):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Packed()).eval()
    optimized = fxfuse.optimize(model, x if example else None)
    reasons = {u.path: u.reason for u in fxfuse.report(optimized).uncaptured}
    assert reasons["2"] == "is quantised, and left as it is"
    with torch.no_grad():
        assert right(optimized(x), model, x)
    assert len(fxfuse.report(optimized).fused) == 1, "what stands beside it is fused"


def test_dynamically_quantised_modules_have_a_reason(x, example):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).eval())
        optimized = fxfuse.optimize(model, x if example else None)
    reasons = {u.path: u.reason for u in fxfuse.report(optimized).uncaptured}
    assert reasons == {"0": "is quantised, and left as it is"}
    with torch.no_grad():
        assert torch.equal(optimized(x), model(x))


def test_calls_in_every_form(x):
    optimized = fxfuse.optimize(MLP().eval())
    with torch.no_grad():
        optimized(x)
        optimized(x, x)
    optimized(x)
    report = fxfuse.report(optimized)
    residual = "argument residual: expected None, found a Tensor"
    assert json.loads(report.to_json())["calls"] == {
        "": {"fused": 1, "replayed": 0, "plain": 1, "fallback": 1, "reasons": {residual: 1, "gradients are needed": 1}}
    }
    for text in (str(report), report.to_markdown()):
        row = next(line for line in text.splitlines() if residual in line)
        assert [cell for cell in row.replace("|", " ").split() if cell.isdigit()] == ["1", "1", "1"]
        assert "gradients are needed (1)" in row


def test_a_region_taken_out_is_listed(x):
    optimized = fxfuse.optimize(MLP().eval())
    optimized.scale = 2.0
    with torch.no_grad():
        for _ in range(GIVE_UP):
            optimized(x)
    report = fxfuse.report(optimized)
    (region,) = [r for r in report.regions if r.path == ""]
    assert (region.installed, region.note) == (False, "taken out: attribute scale: expected 1.0, found 2.0")
    assert calls_of(optimized).fallback == GIVE_UP
    assert fxfuse.graphs(optimized).keys() <= {"up", "down"}
    assert "regions left as they were" in str(report)
