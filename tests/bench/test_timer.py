import time

import pytest

from fxfuse.bench.timer import (
    LEAST_ROUNDS,
    Effort,
    Spread,
    Timing,
    WallClock,
    interleaved,
    percentile,
    rankable,
    speedup,
)


class Script:
    """A clock that runs nothing slower than it says, and writes down who was called."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.log = []

    def block(self, call, calls):
        name = call()
        self.log.append((name, calls))
        return self.seconds[name]


def test_each_round_has_every_variant_once_and_an_order_of_its_own():
    clock = Script({"a": 0.1, "b": 0.2, "c": 0.4})
    effort = Effort(rounds=20, warmup_s=0.3, block_s=0.2)
    race = interleaved({name: lambda name=name: name for name in "abc"}, clock=clock, effort=effort)
    warm_up, rounds = clock.log[:-60], clock.log[-60:]
    orders = ["".join(name for name, _ in rounds[i : i + 3]) for i in range(0, 60, 3)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) == 6
    assert [name for name, _ in warm_up] == ["a"] * 3 + ["b"] * 2 + ["c"]
    assert dict(rounds) == {"a": 2, "b": 1, "c": 1}
    assert race.timings["b"].samples == (0.2,) * 20
    assert {name: timing.calls for name, timing in race.timings.items()} == {"a": 2, "b": 1, "c": 1}


def test_a_slow_target_gets_fewer_rounds_but_never_under_the_least():
    for budget, rounds in ((7.5, 8), (0.5, LEAST_ROUNDS), (None, 10)):
        clock = Script({"a": 1.0})
        effort = Effort(rounds=10, warmup_s=0.0, block_s=1.0, budget_s=budget)
        assert len(interleaved({"a": lambda: "a"}, clock=clock, effort=effort).timings["a"].samples) == rounds


def test_a_clock_that_waits_between_calls_gets_fewer_of_them():
    class Waiting(Script):
        def block(self, call, calls):
            time.sleep(0.005)
            return super().block(call, calls)

    clock = Waiting({"a": 1e-6})
    effort = Effort(rounds=5, warmup_s=0.02, block_s=0.0005)
    race = interleaved({"a": lambda: "a"}, clock=clock, effort=effort)
    assert race.timings["a"].calls <= 2  # 500 would last a block's time
    assert 0 < len(clock.log) - 5 <= 4


def test_a_block_is_timed_per_call_and_without_its_first_call():
    ticks = iter([10.0, 16.0])
    called = []
    clock = WallClock(now=lambda: next(ticks))
    assert clock.block(lambda: called.append(None), 3) == 2.0
    assert len(called) == 4


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (20, 1.8), (50, 3), (80, 4.2), (100, 5)])
def test_percentile_interpolates(percent, expected):
    assert percentile([5, 3, 1, 4, 2], percent) == pytest.approx(expected)


def test_percentile_of_one_value():
    assert percentile([7.0], 80) == 7.0


def test_speedup_is_taken_round_by_round():
    ours = Timing((1.0, 2.0, 4.0), calls=1)
    theirs = Timing((2.0, 4.0, 8.0), calls=1)
    assert speedup(ours, theirs) == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("ratio", "ranked"),
    [(Spread(1.1, 1.05, 1.2), True), (Spread(0.9, 0.8, 0.95), True), (Spread(1.1, 0.99, 1.2), False)],
)
def test_no_ranking_where_the_rounds_disagree(ratio, ranked):
    assert rankable(ratio) is ranked
