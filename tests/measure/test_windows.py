"""Figures of windows: sums over sums, what is left out, and how far they are to be trusted."""

import pytest

from lightning_feed.measure.loop import MeasuredLoop
from lightning_feed.measure.measurements import LoopFacts
from lightning_feed.measure.stats import grade_confidence
from lightning_feed.measure.step_meter import StepTimes
from lightning_feed.measure.windows import FEW_STEPS, WARM_UP_STEPS, Ledger

MS = 1_000_000


def _step(
    other: float = 1,
    data: float = 2,
    copy: float = 3,
    compute: float = 4,
    wait: float | None = None,
    counted: bool = True,
) -> StepTimes:
    return StepTimes(
        other * MS, data * MS, copy * MS, compute * MS, round((data if wait is None else wait) * MS), counted
    )


def test_window_figures_are_computed_from_its_steps() -> None:
    ledger = Ledger()
    ledger.fresh += [_step(), _step(other=2, data=8, copy=0, compute=5, wait=10)]
    ledger.epoch_started(0.5)
    ledger.epoch_started(1.5)
    stats = ledger.close_window(lost=0, prefetch_active=True)
    assert stats.steps == 2
    assert (stats.step_ms, stats.other_ms, stats.data_ms) == pytest.approx((12.5, 1.5, 5))
    assert (stats.copy_ms, stats.compute_ms) == pytest.approx((1.5, 4.5))
    assert stats.step_ms == stats.other_ms + stats.data_ms + stats.copy_ms + stats.compute_ms  # type: ignore[operator]
    assert stats.starved_pct == pytest.approx(100 * 10 / 25)  # not the mean of 20 % and 53 %
    assert stats.input_pct == pytest.approx(100 * 13 / 25)
    assert stats.speedup_if_free == pytest.approx(25 / 15)
    assert (stats.next_wait_ms, stats.hidden_wait_ms) == pytest.approx((6, 1))
    assert stats.epoch_start_s == pytest.approx(1.0)
    assert stats.prefetch_active is True


def test_each_window_holds_only_the_steps_since_the_last() -> None:
    ledger = Ledger()
    ledger.fresh += [_step(data=0, copy=0), _step(data=0, copy=0)]
    assert ledger.close_window(lost=0, prefetch_active=None).starved_pct == 0.0
    ledger.fresh.append(_step(data=5, other=0, copy=0, compute=5))
    stats = ledger.close_window(lost=3, prefetch_active=None)
    assert (stats.steps, stats.starved_pct, stats.lost_steps) == (1, 50.0, 3)
    assert stats.epoch_start_s is None


def test_unmeasured_figures_are_none_and_not_zero() -> None:
    stats = Ledger().close_window(lost=0, prefetch_active=None)
    assert stats.steps == 0
    assert {stats.starved_pct, stats.step_ms, stats.speedup_if_free, stats.hidden_wait_ms, stats.epoch_start_s} == {
        None
    }
    assert stats.confidence == "low"


def test_uncounted_steps_are_in_no_window() -> None:
    ledger = Ledger()
    ledger.fresh += [_step(other=9000, counted=False), _step()]
    assert ledger.close_window(lost=0, prefetch_active=None).steps == 1
    assert ledger.total(prefetch_active=None).step_ms == pytest.approx(10)


def test_a_step_that_is_all_waiting_has_no_speed_up() -> None:
    ledger = Ledger()
    ledger.fresh.append(_step(other=0, copy=0, compute=0))
    stats = ledger.total(prefetch_active=None)
    assert (stats.starved_pct, stats.speedup_if_free) == (100.0, None)


def test_hidden_wait_is_never_negative_when_clocks_differ() -> None:
    ledger = Ledger()
    ledger.fresh.append(_step(data=2.001, wait=2))
    assert ledger.total(prefetch_active=None).hidden_wait_ms == 0.0


def test_the_total_leaves_the_warm_up_out() -> None:
    """A full queue hides a slow loader for as long as it lasts."""
    ledger = Ledger(queue=8)
    ledger.fresh += [_step(data=0) for _ in range(WARM_UP_STEPS + 8)]
    ledger.close_window(lost=0, prefetch_active=None)
    ledger.fresh += [_step(data=8) for _ in range(FEW_STEPS)]
    stats = ledger.total(prefetch_active=None)
    assert (stats.steps, stats.data_ms) == (FEW_STEPS, pytest.approx(8))


def test_settled_returns_none_until_the_warm_up_is_over() -> None:
    loop = MeasuredLoop(LoopFacts(), list, queue=4, ring=None)
    for _ in range(WARM_UP_STEPS + 4):
        assert loop.settled() is None
        loop.fetch_began()
        loop.fetch_ended()
        loop.meter.arrived()
        loop.meter.step_began()
        loop.meter.step_ended()
        loop.step_ended()
    sums = loop.settled()
    assert sums is not None
    assert sums.steps.steps == 0


def test_a_short_run_is_reported_whole_with_low_confidence() -> None:
    ledger = Ledger()
    ledger.fresh += [_step(data=0) for _ in range(WARM_UP_STEPS)] + [_step(data=8) for _ in range(FEW_STEPS - 1)]
    stats = ledger.total(prefetch_active=None)
    assert (stats.steps, stats.confidence) == (WARM_UP_STEPS + FEW_STEPS - 1, "low")
    assert stats.data_ms == pytest.approx(8 * 19 / 39)


def test_a_window_in_the_warm_up_has_low_confidence() -> None:
    ledger = Ledger()
    ledger.fresh += [_step() for _ in range(300)]
    assert ledger.close_window(lost=0, prefetch_active=None).confidence == "low"
    ledger.fresh += [_step() for _ in range(300)]
    assert ledger.close_window(lost=0, prefetch_active=None).confidence == "high"


def test_total_is_the_same_when_read_twice() -> None:
    ledger = Ledger()
    ledger.fresh += [_step() for _ in range(30)]
    assert ledger.total(prefetch_active=None) == ledger.total(prefetch_active=None)


@pytest.mark.parametrize(
    ("steps", "lost", "settled", "trusted_clock", "grade"),
    [
        (200, 0, True, True, "high"),
        (199, 0, True, True, "medium"),
        (50, 0, True, True, "medium"),
        (49, 0, True, True, "low"),
        (1000, 0, False, True, "low"),
        (1000, 0, True, False, "low"),
        (900, 100, True, True, "high"),
        (900, 101, True, True, "low"),
    ],
)
def test_confidence_depends_on_steps_losses_warm_up_and_clock(
    steps: int, lost: int, settled: bool, trusted_clock: bool, grade: str
) -> None:
    assert grade_confidence(steps=steps, lost=lost, settled=settled, trusted_clock=trusted_clock) == grade


def _two_epochs(first: StepTimes, second: StepTimes, steps: int = 60) -> Ledger:
    ledger = Ledger()
    ledger.fresh += [first] * (WARM_UP_STEPS + steps)
    ledger.epoch_begins()
    ledger.fresh += [second] * steps
    ledger.fold()
    return ledger


def test_epochs_with_a_changed_loading_time_are_not_averaged() -> None:
    ledger = _two_epochs(_step(data=20), _step(data=1))
    assert ledger.changed_wait_ms() == pytest.approx((20, 1))
    ledger.leave_out_earlier_epochs()
    stats = ledger.total(prefetch_active=None)
    assert (stats.steps, stats.data_ms) == (60, 1)
    assert stats.starved_high_pct == pytest.approx(100 / 9)
    assert ledger.changed_wait_ms() is None


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        (_step(data=20), _step(data=11), 60),  # less than twice as long
        (_step(data=1, compute=50), _step(data=4, compute=50), 60),  # little of a step
        (_step(data=20), _step(data=1), 49),
    ],
)
def test_epochs_with_similar_loading_times_are_averaged(first: StepTimes, second: StepTimes, steps: int) -> None:
    assert _two_epochs(first, second, steps).changed_wait_ms() is None
