"""The table of measured choices: what it answers, and what a disk may do to it."""

import errno
import fcntl
import json
import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

import fxfuse
from fxfuse import choose
from fxfuse.choose import Choice, Choices, Key
from fxfuse.errors import ChoicesWarning
from tests.conftest import randn

CHOICE = Choice(("onednn", "plain"), {"plain": 2e-3, "onednn": 1e-3})


def key(n=8, **changes):
    here = Key(choose.device_name("cpu"), "linear_act gelu", torch.float32, n, 16, False, True, 5)
    return here._replace(**changes)


def write(text):
    choose.file().parent.mkdir(parents=True, exist_ok=True)
    choose.file().write_text(text)


def test_a_choice_is_there_for_the_next_process():
    Choices().put({key(): CHOICE, key(transposed=True, bias=False, dtype=torch.bfloat16): CHOICE})
    later = Choices()
    assert later.get(key()) == CHOICE
    assert later.get(key(transposed=True, bias=False, dtype=torch.bfloat16)) == CHOICE


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another CPU"},
        {"op": "linear"},
        {"dtype": torch.bfloat16},
        {"n": 9},
        {"k": 17},
        {"transposed": True},
        {"bias": False},
        {"bucket": 6},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_choice_is_for_its_key_alone(change):
    Choices().put({key(): CHOICE})
    assert Choices().get(key(**change)) is None
    Choices().put({key(**change): Choice(("plain",), {"plain": 1.0})})
    later = Choices()
    assert later.get(key()) == CHOICE
    assert later.get(key(**change)).order == ("plain",)


def test_other_versions_have_their_own(monkeypatch):
    Choices().put({key(): CHOICE})
    monkeypatch.setattr(fxfuse, "__version__", "99.0")
    assert Choices().get(key()) is None
    Choices().put({key(n=1): CHOICE})
    assert choose.count() == (1, 1)
    monkeypatch.undo()
    # undo() put the folder back, too
    assert "99.0" not in choose.versions()


def test_the_number_of_threads_is_part_of_the_device(monkeypatch):
    before = choose.device_name("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert choose.device_name("cpu") != before


@pytest.mark.parametrize(
    ("order", "allowed", "taken"),
    [
        (("onednn-packed", "onednn", "plain"), ("plain", "onednn", "onednn-packed"), "onednn-packed"),
        (("onednn-packed", "onednn", "plain"), ("plain", "onednn"), "onednn"),
        (("onednn-packed", "plain"), ("plain", "onednn"), "plain"),
        (("plain",), ("plain", "onednn"), "plain"),
        (("triton", "plain"), ("plain", "onednn"), "plain"),
    ],
)
def test_the_best_of_those_that_are_allowed(order, allowed, taken):
    assert Choice(order, {}).among(allowed) == taken


@pytest.mark.parametrize(
    ("bucket", "rows"), [(0, "0"), (1, "1"), (2, "2-3"), (5, "16-31"), (10, "512-1023")], ids=lambda value: str(value)
)
def test_rows_of_a_bucket(bucket, rows):
    assert key(bucket=bucket).rows == rows
    if bucket:
        assert {int(row).bit_length() for row in rows.split("-")} == {bucket}


def test_where_the_table_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FXFUSE_CACHE", str(tmp_path / "own"))
    assert choose.folder() == tmp_path / "own"
    monkeypatch.delenv("FXFUSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert choose.folder() == tmp_path / "xdg" / "fxfuse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert choose.folder() == tmp_path / "home" / ".cache" / "fxfuse"


def test_clear():
    table = Choices()
    table.put({key(): CHOICE})
    table.clear()
    assert table.get(key()) is None
    assert Choices().get(key()) is None
    table.clear()  # nothing there is no error


def raising(code):
    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def full_disk(monkeypatch):
    real = tempfile.mkstemp

    def mkstemp(*args, **kwargs):
        handle, name = real(*args, **kwargs)
        os.close(handle)
        # Opens like a file, and every write to it says that there is no space left.
        return os.open("/dev/full", os.O_WRONLY), name

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)


def no_home(monkeypatch):
    monkeypatch.delenv("FXFUSE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def expanduser(_path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)


def locked(monkeypatch):
    monkeypatch.setattr(choose, "_ATTEMPTS", 2)
    choose.folder().mkdir(parents=True)
    held = choose.file().with_suffix(".lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


FAULTS = {
    "corrupt": lambda _: write("no json"),
    "half of it": lambda _: write('{"format": 1, "versions": {"fxf'),
    "empty": lambda _: write(""),
    "binary": lambda _: (write(""), choose.file().write_bytes(b"\xff\xfe\x00")),
    "another format": lambda _: write(json.dumps({"format": 99, "versions": {}})),
    "a list": lambda _: write("[]"),
    "versions of another kind": lambda _: write(json.dumps({"format": 1, "versions": []})),
    "lists in lists": lambda _: write("[" * 200_000),
    "a folder in its place": lambda _: choose.file().mkdir(parents=True),
    "a file in the folder's place": lambda _: (choose.folder().parent.mkdir(exist_ok=True), choose.folder().touch()),
    "no right to read": lambda patch: patch.setattr(Path, "read_text", raising(errno.EACCES)),
    "no right to make the folder": lambda patch: patch.setattr(Path, "mkdir", raising(errno.EACCES)),
    "a read-only disk": lambda patch: patch.setattr(tempfile, "mkstemp", raising(errno.EROFS)),
    "read-only at the end": lambda patch: patch.setattr(os, "replace", raising(errno.EROFS)),
    "a full disk": full_disk,
    "no file locks there": lambda patch: patch.setattr(fcntl, "flock", raising(errno.ENOLCK)),
    "another writer that hangs": locked,
    "no home": no_home,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_leaves_a_working_table_and_one_warning(fault, monkeypatch):
    kept = FAULTS[fault](monkeypatch)
    table = Choices()

    def use():
        assert table.get(key()) is None
        table.put({key(): CHOICE})
        table.put({key(n=9): CHOICE})
        assert table.get(key()) == table.get(key(n=9)) == CHOICE

    with pytest.warns(ChoicesWarning, match="could not be (read|written)") as caught:
        use()
    assert len(caught) == 1
    del kept


@pytest.mark.parametrize("fault", ["corrupt", "another format", "lists in lists", "binary"])
def test_what_is_no_table_is_begun_anew(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    with pytest.warns(ChoicesWarning):
        Choices().put({key(): CHOICE})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Choices().get(key()) == CHOICE


@pytest.mark.parametrize("fault", ["read-only at the end", "a full disk"])
def test_a_write_that_fails_leaves_what_was_there(fault, monkeypatch):
    Choices().put({key(): CHOICE})
    before = choose.file().read_text()
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        with pytest.warns(ChoicesWarning):
            Choices().put({key(n=9): CHOICE})
    assert choose.file().read_text() == before
    assert {p.name for p in choose.folder().iterdir()} == {choose.file().name, choose.file().with_suffix(".lock").name}


@pytest.mark.parametrize("fault", ["corrupt", "a read-only disk", "no home"])
def test_a_model_works_all_the_same(fault, monkeypatch, measuring, assert_the_same):
    FAULTS[fault](monkeypatch)
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.GELU()).eval(), randn(0, 4, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimized = fxfuse.optimize(model, x)
        assert_the_same(model, optimized, x)
        fxfuse.tune(optimized, [(4, 16)])
        assert_the_same(model, optimized, x)
    assert sum(w.category is ChoicesWarning for w in caught) <= 1


@pytest.fixture
def assert_the_same():
    def check(model, optimized, x):
        with torch.inference_mode():
            torch.testing.assert_close(optimized(x), model(x))

    return check


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"key": {}, "order": ["plain"], "seconds": {"plain": 1}},
        {
            "key": {**choose._entry(key(), CHOICE)["key"], "dtype": "Tensor"},
            "order": ["plain"],
            "seconds": {"plain": 1},
        },
        {"key": choose._entry(key(), CHOICE)["key"], "order": ["onednn"], "seconds": {"onednn": 1}},
        {"key": choose._entry(key(), CHOICE)["key"], "order": ["plain", "onednn"], "seconds": {"plain": 1}},
        {"key": choose._entry(key(), CHOICE)["key"], "order": ["plain"], "seconds": {"plain": "fast"}},
        {"key": {**choose._entry(key(), CHOICE)["key"], "more": 1}, "order": ["plain"], "seconds": {"plain": 1}},
    ],
    ids=["none", "empty", "no key", "no dtype", "no plain", "not measured", "no number", "more fields"],
)
def test_a_spoilt_entry_is_left_out_and_the_others_are_not(entry):
    good = choose._entry(key(n=9), CHOICE)
    write(json.dumps({"format": choose.FORMAT, "versions": {choose.versions(): {"a": entry, "b": good}}}))
    table = Choices()
    assert table.get(key()) is None
    assert table.get(key(n=9)) == CHOICE


def put_many(first):
    for n in range(first, first + 20):
        Choices().put({key(n=n): CHOICE})


def test_writers_at_once_lose_nothing():
    choose.folder().mkdir(parents=True)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=put_many, args=(first,)) for first in (0, 100, 200, 300)]
    with warnings.catch_warnings():
        # Forked beside threads, which these children have nothing to do with.
        warnings.simplefilter("ignore", DeprecationWarning)
        for writer in writers:
            writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        # Whole at every moment, and never fewer than before.
        now = sum(choose.count())
        assert now >= seen
        seen = now
    assert [writer.exitcode for writer in writers] == [0] * 4
    table = Choices()
    assert all(table.get(key(n=first + n)) == CHOICE for first in (0, 100, 200, 300) for n in range(20))
