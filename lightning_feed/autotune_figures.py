"""What was measured since the last decision, from totals that only grow."""

from dataclasses import dataclass

from lightning_feed.load.tuning.online import FEWEST_STEPS, EpochFigures
from lightning_feed.watch.verdict.diagnosis import Measurements
from lightning_feed.watch.windows import FEW_STEPS, WARM_UP_STEPS


@dataclass
class _Totals:
    """Means of a run times what they are means of, so that two of them can be subtracted."""

    steps: int = 0
    step_ms: float = 0.0
    data_idle_ms: float = 0.0
    ready: float = 0.0
    capacity: float = 0.0
    worker_ms: float = 0.0
    """Step time times workers."""
    on_cpu_ms: float = 0.0
    run_queue_ms: float = 0.0


class Figures:
    """Takes differences of the totals of a run. Short epochs are put together until there are enough steps.

    ``queue_ready`` and ``queue_capacity`` are means over fetches, taken for steps; the workers' shares are means over
    worker time, taken for step time times workers. So they are a little off where validation lies in the epoch.
    """

    def __init__(self) -> None:
        self._before = _Totals()
        self._now = _Totals()

    def since(self, measured: Measurements, *, workers: int) -> EpochFigures | None:
        """The figures since :meth:`close` was called, or since the warm-up; None while there are too few steps.

        Args:
            measured: of the run so far.
            workers: of the loader, since then.
        """
        stats, loaders = measured.stats, measured.loaders
        if stats.step_ms is None or stats.data_idle_ms is None:
            return None
        if not self._before.steps and stats.steps < _settled_from(measured):
            return None
        before = self._before
        now = _Totals(
            steps=stats.steps, step_ms=stats.steps * stats.step_ms, data_idle_ms=stats.steps * stats.data_idle_ms
        )
        now.worker_ms = before.worker_ms + workers * (now.step_ms - before.step_ms)
        now.ready = now.steps * (loaders.queue_ready or 0.0)
        now.capacity = now.steps * (loaders.queue_capacity or 0.0)
        now.on_cpu_ms = now.worker_ms * (loaders.workers_on_cpu_pct or 0.0)
        now.run_queue_ms = now.worker_ms * (loaders.workers_run_queue_pct or 0.0)
        steps = now.steps - before.steps
        if steps < FEWEST_STEPS:
            return None
        self._now = now
        queue = loaders.queue_ready is not None and loaders.queue_capacity is not None
        watched = loaders.workers_on_cpu_pct is not None and now.worker_ms > before.worker_ms
        worked = now.worker_ms - before.worker_ms
        return EpochFigures(
            steps=steps,
            step_ms=(now.step_ms - before.step_ms) / steps,
            data_idle_ms=max(0.0, now.data_idle_ms - before.data_idle_ms) / steps,
            queue_ready=max(0.0, now.ready - before.ready) / steps if queue else None,
            queue_capacity=max(0.0, now.capacity - before.capacity) / steps if queue else None,
            on_cpu_pct=_share(now.on_cpu_ms - before.on_cpu_ms, worked) if watched else None,
            run_queue_pct=_share(now.run_queue_ms - before.run_queue_ms, worked) if watched else None,
        )

    def close(self) -> None:
        """What comes after is measured anew."""
        self._before = self._now


def _share(part: float, whole: float) -> float:
    return min(100.0, max(0.0, part / whole))


def _settled_from(measured: Measurements) -> int:
    """Steps from which the totals surely have left the warm-up out. With fewer, they may still take it in, and would
    shrink when they no longer do."""
    if measured.stats.starved_low_pct is not None:
        return FEW_STEPS  # it is told of settled figures only
    queue = (measured.facts.num_workers or 0) * (measured.facts.prefetch_factor or 0)
    return WARM_UP_STEPS + FEW_STEPS + max(queue, round(measured.loaders.queue_capacity or 0))
