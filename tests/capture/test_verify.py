"""The check on the example runs what calls will run, and takes out what is wrong there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import numerics
from fxfuse.capture import verify
from fxfuse.ops import onednn


def gelu_of(x, weight):
    return F.gelu(F.linear(x, weight))


@pytest.mark.skipif(not onednn.AVAILABLE, reason="this build of torch has no oneDNN linear")
@pytest.mark.parametrize("function", [False, True], ids=["module", "function"])
def test_an_implementation_that_errs_is_found(function, monkeypatch):
    right = onednn.pointwise
    monkeypatch.setattr(onednn, "pointwise", lambda *args: right(*args) + 1)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU()).eval()
    x, weight = torch.randn(64, 1024), torch.randn(1024, 1024)
    optimized = fxfuse.optimize(gelu_of, (x, weight)) if function else fxfuse.optimize(model, (x,))
    report = fxfuse.report(optimized)
    assert not report.fused
    assert any(u.reason.startswith("was wrong on the example: output 0") for u in report.uncaptured)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.fc, self.proj = nn.Linear(16, 48), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(F.gelu(self.fc(x)))


def test_attention_without_dropout_draws_nothing():
    for seed in range(10):
        torch.manual_seed(seed)
        report = fxfuse.report(fxfuse.optimize(Attention().eval(), (torch.randn(2, 5, 16),)))
        assert [e.rule for e in report.fused] == ["linear_act"], report


def test_what_draws_random_numbers():
    q = torch.randn(1, 2, 4, 8)
    for call, draws in (
        (lambda: F.scaled_dot_product_attention(q, q, q), False),
        (lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), True),
        (lambda: F.dropout(q, 0.5), True),
        (lambda: torch.rand(3), True),
        (lambda: torch.relu(q), False),
    ):
        with verify._Draws() as seen:
            call()
        assert seen.seen == draws


@pytest.mark.parametrize(
    ("got", "expected", "identical"),
    [
        (torch.ones(2), torch.ones(2), True),
        ((torch.ones(2), 3, None), (torch.ones(2), 3, None), True),
        (torch.ones(2), torch.ones(2) + 1e-7, False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), False),
        (torch.ones(2), nn.Parameter(torch.ones(2)), False),
        ((torch.ones(2), 1), (torch.ones(2), True), False),
        ((torch.ones(2),), [torch.ones(2)], False),
        (object(), object(), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), False),
    ],
)
def test_what_is_known_to_be_identical(got, expected, identical):
    assert verify._identical(got, expected) is identical


@pytest.mark.parametrize("width", [16, 1024], ids=["identical", "rounded otherwise"])
def test_the_float64_run_is_for_answers_that_differ(width, monkeypatch):
    judged = []
    reference = numerics.reference
    monkeypatch.setattr(numerics, "reference", lambda *args: judged.append(1) or reference(*args))
    right = onednn.pointwise
    monkeypatch.setattr(onednn, "pointwise", lambda *args: right(*args) * (1 + 1e-7))
    model = nn.Sequential(nn.Linear(width, width), nn.GELU()).eval()
    report = fxfuse.report(fxfuse.optimize(model, (torch.randn(64, width),), tune="off"))
    assert len(report.fused) == 1
    assert bool(judged) == (width == 1024 and onednn.AVAILABLE)
