"""The check on the example runs what calls will run, and takes out what is wrong there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
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
