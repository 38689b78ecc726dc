import io
import sys

import pytest

from fxfuse.bench.progress import Progress, bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_one_line_that_is_wiped(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("ffn") as progress:
        progress("preparing eager")
        progress("round 1 of 3")
    text = sys.stderr.getvalue()
    assert "\n" not in text
    assert [part.removeprefix("\x1b[2K") for part in text.split("\r")] == [
        "",
        "ffn: preparing eager",
        "ffn: round 1 of 3",
        "",
    ]


def test_a_pipe_sees_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress("ffn") as progress:
        progress("preparing eager")
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize(("done", "total", "full"), [(0, 3, 0), (1, 3, 6), (3, 3, 20), (1, 1000, 0)])
def test_a_bar_is_as_full_as_what_is_done(done, total, full):
    text = bar(done, total)
    assert (text.count("#"), len(text)) == (full, 22)
