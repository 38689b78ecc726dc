"""Rows of a report that say the same of each layer are one row."""

from __future__ import annotations

import pytest

from fxfuse.folding import folded


def alone(*cells: str, paths: tuple[int, ...] = ()) -> list[str]:
    """What becomes of cells that stand below each other in one column."""
    return [f"{times} {row[0]}" for times, row in folded([[cell] for cell in cells], paths=paths)]


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        (("h.0.fc", "h.1.fc", "h.2.fc"), ["3 h.{0..2}.fc"]),
        (("h.1.fc", "h.0.fc"), ["2 h.{0,1}.fc"]),
        (("h.0.fc", "h.0.fc"), ["2 h.0.fc"]),
        (("h.0.fc", "h.0.proj", "h.1.fc", "h.1.proj"), ["2 h.{0,1}.fc", "2 h.{0,1}.proj"]),
        (("a.0.b.1", "a.2.b.3"), ["2 a.{0,2}.b.{1,3}"]),
        (("mul_5", "mul_11", "mul_17", "mul_23", "mul_137"), ["5 mul_{5,11,..,137}"]),
        (("gelu", "gelu_1"), ["2 gelu*"]),
        (("gelu", "silu"), ["1 gelu", "1 silu"]),
        (("mul_1, h_0_fc", "mul_7, h_1_fc"), ["2 mul_{1,7}, h_{0,1}_fc"]),
        (("fc1", "fc2"), ["1 fc1", "1 fc2"]),
        (("is float8_e4m3fn", "is float8_e5m2"), ["1 is float8_e4m3fn", "1 is float8_e5m2"]),
        # what is no name has to be equal
        (("gate has 8 features", "gate has 16 features"), ["1 gate has 8 features", "1 gate has 16 features"]),
        (("is 0.5, not 0.7", "is 0.5, not 0.8"), ["1 is 0.5, not 0.7", "1 is 0.5, not 0.8"]),
        (("shape (3, 4)", "shape (3, 5)"), ["1 shape (3, 4)", "1 shape (3, 5)"]),
        (("m.py:12: h = f(x_1)", "m.py:13: h = f(x_1)"), ["1 m.py:12: h = f(x_1)", "1 m.py:13: h = f(x_1)"]),
        ((), []),
    ],
)
def test_one_column(cells, shown):
    assert alone(*cells) == shown


def test_a_column_of_paths_may_begin_with_a_number():
    assert alone("0", "1", "2", paths=(0,)) == ["3 {0..2}"]
    assert alone("0.fc", "7.fc", "fc", paths=(0,)) == ["2 {0,7}.fc", "1 fc"]
    assert alone("0", "1") == ["1 0", "1 1"]


def test_rows_are_equal_in_all_columns_and_keep_their_order():
    rows = [["b", "h.0", "x"], ["a", "h.0", "y"], ["b", "h.1", "x"], ["b", "h.2", "y"]]
    assert folded(rows, paths=[1]) == [(2, ["b", "h.{0,1}", "x"]), (1, ["a", "h.0", "y"]), (1, ["b", "h.2", "y"])]
