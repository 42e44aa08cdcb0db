"""A run of any length is kept in bounded memory, and no step is lost."""

import random

import pytest

from lightning_feed.measure.stats import Timeline
from lightning_feed.measure.step_meter import StepTimes
from lightning_feed.measure.windows import MOST_BINS, MOST_STRETCHES, Ledger, TimelineSums

MS = 1e6
"""Nanoseconds in a millisecond."""


def _timeline(*steps_ms: tuple[float, float]) -> Timeline:
    sums = TimelineSums()
    for wait_ms, step_ms in steps_ms:
        sums.add(wait_ms * MS, step_ms * MS)
    timeline = sums.timeline()
    assert timeline is not None
    return timeline


def test_a_timeline_before_the_first_step_is_none() -> None:
    assert TimelineSums().timeline() is None


def test_each_of_the_first_steps_is_a_stretch() -> None:
    timeline = _timeline((1, 10), (9, 10))
    assert [stretch.starved_pct for stretch in timeline.stretches] == pytest.approx([10, 90])
    assert [stretch.step_ms for stretch in timeline.stretches] == pytest.approx([10, 10])


@pytest.mark.parametrize("steps", [63, 64, 65, 1000, 20_001])
def test_stretches_and_bins_hold_all_steps_in_bounded_memory(steps: int) -> None:
    dice = random.Random(steps)
    times_ms = [dice.lognormvariate(3, 1.5) for _ in range(steps)]
    timeline = _timeline(*((0.25 * ms, ms) for ms in times_ms))
    assert len(timeline.stretches) <= MOST_STRETCHES
    assert len(timeline.bins) <= MOST_BINS
    for groups in (timeline.stretches, timeline.bins):
        assert sum(group.steps for group in groups) == steps
        assert {round(group.starved_pct, 6) for group in groups} == {25}
    total_ms = sum(stretch.steps * stretch.step_ms for stretch in timeline.stretches)
    assert total_ms == pytest.approx(sum(times_ms))
    for one in timeline.bins:
        assert one.steps == sum(one.from_ms <= ms < one.to_ms for ms in times_ms)


def test_waits_of_one_part_of_the_run_stay_in_that_part() -> None:
    timeline = _timeline(*[(0, 10)] * 500, *[(5, 10)] * 500)
    starved_pct = [stretch.starved_pct for stretch in timeline.stretches]
    assert starved_pct[0] == 0
    assert starved_pct[-1] == pytest.approx(50)
    assert starved_pct == sorted(starved_pct)


def test_steps_without_time_are_counted() -> None:
    assert _timeline((0, 0)).bins[0].steps == 1


def test_the_timeline_keeps_the_epochs_that_the_figures_leave_out() -> None:
    ledger = Ledger()
    step = StepTimes(0, 2 * MS, 0, 8 * MS, 0, counted=True)
    ledger.fresh += [step] * 60 + [step._replace(counted=False)]
    ledger.epoch_begins()
    ledger.fresh += [step._replace(data_ns=12 * MS)] * 60
    ledger.fold()
    ledger.leave_out_earlier_epochs()
    assert ledger.settled().steps == 60
    timeline = ledger.timeline.timeline()
    assert timeline is not None
    assert sum(stretch.steps for stretch in timeline.stretches) == 120
    assert [one.steps for one in timeline.bins] == [60, 60]
