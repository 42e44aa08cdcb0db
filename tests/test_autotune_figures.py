"""Figures of an epoch, out of totals of a run."""

from typing import Any

import pytest

from lightning_feed.autotune_callback import Figures
from lightning_feed.watch.stats import LoaderStats, StarvationStats
from lightning_feed.watch.verdict.diagnosis import LoopFacts, Measurements


def total(*epochs: tuple[int, float, float, float, float, int], settled: bool = True, **facts: Any) -> Measurements:
    """What a run tells that had such epochs: (steps, step_ms, data_idle_ms, queue_ready, on_cpu_pct, workers)."""
    steps = sum(one[0] for one in epochs)
    worked = sum(n * step * workers for n, step, _, _, _, workers in epochs)
    return Measurements(
        stats=StarvationStats(
            steps=steps,
            confidence="high",
            step_ms=sum(n * step for n, step, *_ in epochs) / steps,
            data_idle_ms=sum(n * idle for n, _, idle, *_ in epochs) / steps,
            starved_low_pct=0.0 if settled else None,
        ),
        facts=LoopFacts(**facts),
        loaders=LoaderStats(
            queue_ready=sum(n * ready for n, _, _, ready, *_ in epochs) / steps,
            queue_capacity=8.0,
            workers_on_cpu_pct=sum(n * step * cpu * workers for n, step, _, _, cpu, workers in epochs) / worked,
            workers_run_queue_pct=sum(n * step * cpu / 2 * workers for n, step, _, _, cpu, workers in epochs) / worked,
        ),
    )


FIRST, SECOND = (100, 50.0, 20.0, 1.0, 90.0, 2), (60, 30.0, 3.0, 6.0, 40.0, 4)


def test_each_epoch_has_its_own_figures() -> None:
    figures = Figures()
    first = figures.since(total(FIRST), workers=2)
    figures.close()
    second = figures.since(total(FIRST, SECOND), workers=4)
    for found, (steps, step_ms, idle_ms, ready, cpu, _) in ((first, FIRST), (second, SECOND)):
        assert found is not None
        assert found.steps == steps
        assert found.step_ms == pytest.approx(step_ms)
        assert found.data_idle_ms == pytest.approx(idle_ms)
        assert found.queue_ready == pytest.approx(ready)
        assert found.queue_capacity == pytest.approx(8)
        assert found.on_cpu_pct == pytest.approx(cpu)
        assert found.run_queue_pct == pytest.approx(cpu / 2)


def test_short_epochs_are_put_together() -> None:
    figures, short = Figures(), (15, 50.0, 20.0, 1.0, 90.0, 2)
    assert figures.since(total(FIRST), workers=2) is not None
    figures.close()
    assert figures.since(total(FIRST, short), workers=2) is None
    both = figures.since(total(FIRST, short, short), workers=2)
    assert both is not None
    assert both.steps == 30


def test_what_is_not_closed_is_measured_on() -> None:
    figures = Figures()
    figures.since(total(FIRST), workers=2)  # another rank had too few steps
    both = figures.since(total(FIRST, FIRST), workers=2)
    assert both is not None
    assert both.steps == 200


@pytest.mark.parametrize(("steps", "known"), [(47, False), (48, True)])
def test_totals_that_may_hold_the_warm_up_are_not_used(steps: int, known: bool) -> None:
    """20 steps of warm-up, 8 that a full queue serves, and 20 that figures rest on."""
    measured = total((steps, 50.0, 20.0, 1.0, 90.0, 2), settled=False, num_workers=4, prefetch_factor=2)
    assert (Figures().since(measured, workers=4) is not None) == known


def test_what_is_not_known_is_none() -> None:
    stats = StarvationStats(steps=100, confidence="high", step_ms=5.0, data_idle_ms=1.0, starved_low_pct=0.0)
    found = Figures().since(Measurements(stats=stats), workers=0)
    assert found is not None
    assert (found.queue_ready, found.queue_capacity, found.on_cpu_pct, found.run_queue_pct) == (None,) * 4
    assert Figures().since(Measurements(stats=StarvationStats(steps=0, confidence="low")), workers=1) is None
