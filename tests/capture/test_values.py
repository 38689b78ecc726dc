"""Values worked out without data."""

from __future__ import annotations

import logging
import threading

import torch
from torch import fx, nn

from fxfuse.capture.values import Values
from fxfuse.facts import Fact, Unknown, quietly

LOG = logging.getLogger("torch._subclasses.fake_tensor")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


def test_what_does_not_run_without_data_is_unknown_and_no_news(monkeypatch):
    kept = Kept()
    monkeypatch.setattr(LOG, "handlers", [kept])
    facts = {"x": Fact((4, 8), torch.float32, torch.device("cpu"))}
    values, graph = Values(nn.Module(), {}, facts), fx.Graph()
    x = graph.placeholder("x")
    values.note(x)
    assert values.note(graph.call_function(torch.mm, (x, x))) is Unknown
    assert not kept.records


def test_what_others_log_meanwhile_is_logged(monkeypatch):
    kept = Kept()
    monkeypatch.setattr(LOG, "handlers", [kept])
    with quietly():
        LOG.error("ours")
        other = threading.Thread(target=LOG.error, args=("theirs",))
        other.start()
        other.join()
    LOG.error("after")
    assert kept.records == ["theirs", "after"]
