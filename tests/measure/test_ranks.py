"""What ranks cost each other, and how their figures come together: pure, and over a store in this process."""

import logging
from array import array
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_feed.measure.ranks import (
    PATIENCE_S,
    RankExchange,
    RankSums,
    align,
    open_rank_exchange,
)
from lightning_feed.measure.stats import RankStats
from lightning_feed.measure.step_meter import StepTimes

MS = 1e6


def rows(*idle_and_step_ms: tuple[float, float], first: int = 1) -> torch.Tensor:
    """Steps of one rank from (data idle, step) in ms, numbered from ``first``."""
    flat = [(number, idle * MS, step * MS) for number, (idle, step) in enumerate(idle_and_step_ms, first)]
    return torch.tensor(flat, dtype=torch.float64).view(-1, 3)


def rank_stats(ranks: list[torch.Tensor]) -> RankStats:
    return RankSums.of(align(ranks)).stats()


def step(number: int, idle_ms: float = 0.0, step_ms: float = 10.0, *, counted: bool = True) -> StepTimes:
    return StepTimes(1 * MS, idle_ms * MS, 2 * MS, (step_ms - 3 - idle_ms) * MS, 0, counted, number)


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits_ms", "slow"),
    [
        ([0, 10], 1),
        ([10, 0], 0),
        ([0, 9.9], None),
        ([0, 0], None),
        ([50, 50], None),
        ([40, 50], 1),
        ([0, 0, 10], 2),
        ([0, 10, 10], None),  # two of three wait: what is usual there is waiting
        ([0, 10, 20], 2),
        ([0, 0, 12, 11], 2),
        ([5, 5, 5, 14.9], None),
        ([5, 5, 5, 15], 3),
    ],
)
def test_a_rank_is_slow_if_it_waits_a_tenth_of_a_step_above_the_median(waits_ms: list[float], slow: int | None) -> None:
    assert rank_stats([rows((wait, 100), (wait, 100)) for wait in waits_ms]).slow_rank == slow


def test_starved_share_counts_the_longest_wait_of_each_step() -> None:
    in_turn = rank_stats([rows((30, 100), (0, 100)), rows((0, 100), (30, 100))])
    assert in_turn.max_data_ms == pytest.approx(30)
    assert in_turn.starved_pct == pytest.approx(30)
    assert in_turn.amplification == pytest.approx(2)
    assert in_turn.data_ms_by_rank == pytest.approx((15, 15))
    assert in_turn.slow_rank is None
    together = rank_stats([rows((30, 100), (0, 100)), rows((30, 100), (0, 100))])
    assert together.starved_pct == pytest.approx(15)
    assert together.amplification == pytest.approx(1)


def test_rank_stats_are_zero_without_waits_and_none_without_steps() -> None:
    fed = rank_stats([rows((0, 10)), rows((0, 10))])
    assert (fed.steps, fed.starved_pct, fed.max_data_ms, fed.amplification) == (1, 0.0, 0.0, None)
    assert rank_stats([rows((0, 10)), rows()]) == RankStats(world_size=2, steps=0)
    assert rank_stats([rows((0, 0)), rows((0, 0))]).starved_pct is None


def test_only_steps_that_all_ranks_measured_count() -> None:
    short = rows((0, 100), (0, 100), first=3)
    long = rows((90, 100), (90, 100), (10, 100), (20, 100), (90, 100), first=1)
    gap = torch.cat([rows((0, 100), first=2), rows((0, 100), first=4)])
    stats = rank_stats([short, long, gap])
    assert stats.steps == 1
    assert stats.data_ms_by_rank == pytest.approx((0, 20, 0))
    assert align([short, long])[0].tolist() == [[3, 4], [3, 4]]


waits = st.floats(0, 1, allow_subnormal=False)
times = st.floats(1e-3, 1e3)


@settings(deadline=None)  # a busy machine is no error
@given(
    st.integers(1, 5).flatmap(
        lambda ranks: st.lists(
            st.lists(st.tuples(waits, times), min_size=ranks, max_size=ranks), min_size=1, max_size=12
        )
    )
)
def test_starved_share_of_all_ranks_is_at_least_that_of_any_rank(steps: list[list[tuple[float, float]]]) -> None:
    ranks = [rows(*[(share * ms, ms) for share, ms in (each[rank] for each in steps)]) for rank in range(len(steps[0]))]
    stats = rank_stats(ranks)
    assert stats.starved_pct is not None
    assert stats.max_data_ms is not None
    mean_step = sum(max(ms for _, ms in each) for each in steps) / len(steps)
    assert stats.starved_pct >= max(stats.data_ms_by_rank) / mean_step * 100 * (1 - 1e-9)
    assert stats.starved_pct <= 100 * (1 + 1e-9)
    if stats.amplification is not None:
        assert 1 - 1e-9 <= stats.amplification <= len(ranks) * (1 + 1e-9)
    if stats.slow_rank is not None:
        assert stats.data_ms_by_rank[stats.slow_rank] == max(stats.data_ms_by_rank)


# --- the exchange -----------------------------------------------------------------------------------------------------


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.on_sleep = 0.0, lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


def exchanges(world_size: int, store: Any = None, *, session: int = 0) -> list[RankExchange]:
    store, time = store or torch.distributed.HashStore(), Time()
    return [RankExchange(store, rank, world_size, session=session, sleep=time.sleep) for rank in range(world_size)]


def test_rank_figures_come_one_window_later_and_the_last_at_finish() -> None:
    zero, one = exchanges(2)
    one.send([step(1, 4), step(2, 2)])
    zero.send([step(1), step(2)])
    assert zero.take() is None  # it has no steps of a window before
    assert (one.take(), one.total()) == (None, None)
    zero.send([step(3)])
    stats = zero.take()
    assert stats is not None
    assert (stats.steps, stats.slow_rank, stats.starved_pct) == (2, 1, pytest.approx(30))
    one.send([step(3, 1)])
    one.finish([step(4, 1)])
    total = zero.finish([step(4)])
    assert total is not None
    assert (total.steps, total.data_ms_by_rank) == (4, (0, pytest.approx(2)))
    assert zero.total() == total


@pytest.mark.parametrize(("steps", "counted"), [(29, 29), (30, 20), (35, 25)])
def test_the_total_leaves_out_the_warm_up_if_enough_steps_remain(steps: int, counted: int) -> None:
    store = torch.distributed.HashStore()
    zero, one = (RankExchange(store, rank, 2, session=0, warm_up=10) for rank in (0, 1))
    one.finish([step(number, 5) for number in range(1, steps + 1)])
    assert zero.finish([step(number) for number in range(1, steps + 1)]).steps == counted  # type: ignore[union-attr]


def test_steps_that_one_rank_measures_late_are_matched_in_a_later_window() -> None:
    zero, one, two = exchanges(3)
    zero.send([step(1), step(2), step(3)])
    one.send([step(1), step(2)])
    two.send([step(1), step(2), step(3)])
    for each in (zero, one, two):
        each.send([step(3), step(4)] if each is one else [step(4)])
    first = zero.take()
    one.finish()
    two.finish()
    total = zero.finish()
    assert first is not None
    assert total is not None
    assert (first.steps, total.steps) == (2, 4)


def test_steps_kept_before_the_window_ends_are_sent_with_it() -> None:
    zero, one = exchanges(2)
    one.add([step(1)])
    one.send([step(2)])
    zero.add([step(1), step(2)])
    zero.send()
    one.finish()
    assert zero.finish().steps == 2  # type: ignore[union-attr]


def test_a_silent_rank_is_logged_once_and_never_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    zero, one, _ = exchanges(3)
    time = Time()
    zero._sleep = time.sleep
    with caplog.at_level(logging.INFO):
        for number in range(1, 8):
            one.send([step(number)])
            zero.send([step(number)])
            assert zero.take() is None
        assert zero.finish() is None
    assert [record.getMessage() for record in caplog.records if "not compared" in record.getMessage()] == [
        "The ranks are not compared: GPUStarvationCallback must be on all ranks, with the same interval."
    ]
    assert time.now == 0.0


def test_ranks_that_log_at_different_steps_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    zero, one = exchanges(2)
    with caplog.at_level(logging.INFO):
        for number in range(1, 9):
            zero.send([step(number)])
            for part in range(3):
                one.send([step(number * 3 + part, 9)])
            assert zero.take() is None
    assert "not compared" in caplog.text


def test_rank_0_waits_briefly_for_the_last_steps() -> None:
    zero, one = exchanges(2)
    time = Time()
    zero._sleep = time.sleep
    sleeps: list[int] = []

    def come() -> None:
        sleeps.append(1)
        if len(sleeps) == 3:
            one.finish([step(1, 5)])

    time.on_sleep = come
    assert zero.finish([step(1)]).steps == 1  # type: ignore[union-attr]
    assert len(sleeps) == 3


def test_rank_0_does_not_wait_for_ever() -> None:
    zero, _ = exchanges(2)
    time = Time()
    zero._sleep = time.sleep
    assert zero.finish([step(1)]) is None
    assert time.now == pytest.approx(PATIENCE_S, abs=0.1)


def test_a_second_fit_reads_no_steps_of_the_first() -> None:
    store = torch.distributed.HashStore()
    _, one = exchanges(2, store, session=0)
    for number in (1, 2):
        one.send([step(number, 9)])  # an exception ended this fit
    zero, one = exchanges(2, store, session=1)
    for number in (1, 2, 3):
        zero.send([step(number)])
        assert zero.take() is None


class Broken:
    """A store whose process is gone after some operations."""

    def __init__(self, works: int) -> None:
        self.inner, self.works = torch.distributed.HashStore(), works

    def __getattr__(self, name: str) -> Any:
        def operate(*arguments: Any) -> Any:
            self.works -= 1
            if self.works < 0:
                raise torch.distributed.DistNetworkError("Broken pipe")
            return getattr(self.inner, name)(*arguments)

        return operate


@pytest.mark.parametrize("works", range(12))
def test_a_failing_store_is_logged_once_and_training_continues(works: int, caplog: pytest.LogCaptureFixture) -> None:
    zero, one = exchanges(2, Broken(works))
    with caplog.at_level(logging.INFO):
        for number in range(1, 6):
            one.send([step(number)])
            zero.send([step(number)])
            zero.take()
        one.finish()
        zero.finish()
    told = [record for record in caplog.records if "store failed (Broken pipe)" in record.getMessage()]
    assert 1 <= len(told) <= 2
    assert sum(record.levelno == logging.WARNING for record in told) <= 1
    assert all(record.levelno in (logging.INFO, logging.WARNING) for record in told)


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"x" * 7, b"x" * 8, b"x" * 48, bytes(24)),
        *(array("d", numbers).tobytes() for numbers in ([1.0, 0, 2, 1, 5, 9], [2.0, 0, 1, 1, 5, 9])),
        array("d", [1.0, 0, 1, 1, 5, 9]).tobytes() + b"x",
    ],
)
def test_malformed_store_values_are_ignored(value: bytes) -> None:
    zero, _ = exchanges(2)
    zero._store.set(zero._key(1, "0"), value)
    zero.send([step(1)])
    zero.send([step(2)])
    assert zero.take() is None


def test_a_store_without_multi_get_is_read_key_by_key() -> None:
    class Old:
        def __init__(self) -> None:
            self.inner = torch.distributed.HashStore()

        def __getattr__(self, name: str) -> Any:
            assert name != "multi_get"
            return (lambda: False) if name == "has_extended_api" else getattr(self.inner, name)

    zero, one = exchanges(2, Old())
    one.finish([step(1)])
    assert zero.finish([step(1)]).steps == 1  # type: ignore[union-attr]


def test_a_single_process_opens_no_rank_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_rank_exchange() is None
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert open_rank_exchange() is None
