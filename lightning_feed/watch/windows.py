"""Sums step times over windows, and over the whole run without its warm-up."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_feed.watch.bootstrap import PairSums
from lightning_feed.watch.stats import StarvationStats, grade_confidence
from lightning_feed.watch.step_meter import StepTimes

WARM_UP_STEPS = 20
"""Steps left out of a report besides those that a full queue can serve."""
FEW_STEPS = 20
"""With fewer steps than this behind the warm-up, a report takes the warm-up in, and is not to be trusted far."""
UNFOLDED_STEPS = 1024
"""Steps kept one by one at most, where no window is ever closed."""


@dataclass
class Sums:
    """Sums over counted steps, in nanoseconds."""

    steps: int = 0
    other_ns: float = 0
    data_ns: float = 0
    h2d_ns: float = 0
    compute_ns: float = 0
    forward_ns: float = 0
    backward_ns: float = 0
    optimizer_ns: float = 0
    host_wait_ns: int = 0
    lost: int = 0
    epoch_starts: int = 0
    epoch_start_s: float = 0.0

    def add(self, step: StepTimes) -> None:
        """Count one step in."""
        self.steps += 1
        self.other_ns += step.other_ns
        self.data_ns += step.data_ns
        self.h2d_ns += step.h2d_ns
        self.compute_ns += step.compute_ns
        self.forward_ns += step.forward_ns
        self.backward_ns += step.backward_ns
        self.optimizer_ns += step.optimizer_ns
        self.host_wait_ns += step.host_wait_ns

    def merge(self, others: "Sums") -> None:
        """Count in what was summed elsewhere."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(others, one.name))

    def stats(self, *, settled: bool, trusted_clock: bool, prefetch_active: bool | None) -> StarvationStats:
        """The figures, by the formulas of :class:`StarvationStats`."""
        measured: dict[str, Any] = {
            "steps": self.steps,
            "lost_steps": self.lost,
            "prefetch_active": prefetch_active,
            "epoch_start_s": self.epoch_start_s / self.epoch_starts if self.epoch_starts else None,
            "confidence": grade_confidence(
                steps=self.steps, lost=self.lost, settled=settled, trusted_clock=trusted_clock
            ),
        }
        step_ns = self.other_ns + self.data_ns + self.h2d_ns + self.compute_ns
        if self.steps:
            to_ms = 1e-6 / self.steps
            measured |= {
                "step_ms": step_ns * to_ms,
                "other_ms": self.other_ns * to_ms,
                "data_idle_ms": self.data_ns * to_ms,
                "h2d_ms": self.h2d_ns * to_ms,
                "compute_ms": self.compute_ns * to_ms,
                "next_wait_ms": self.host_wait_ns * to_ms,
                # Two clocks that read the same wait differ by microseconds.
                "hidden_wait_ms": max(0.0, (self.host_wait_ns - self.data_ns) * to_ms),
            }
            if self.forward_ns:
                measured |= {
                    "forward_ms": self.forward_ns * to_ms,
                    "backward_ms": self.backward_ns * to_ms,
                    "optimizer_ms": self.optimizer_ns * to_ms,
                }
        if step_ns > 0:
            measured["starved_pct"] = 100 * self.data_ns / step_ns
            measured["input_pct"] = 100 * (self.data_ns + self.h2d_ns) / step_ns
        if step_ns > self.data_ns:
            measured["speedup_if_free"] = step_ns / (step_ns - self.data_ns)
        return StarvationStats(**measured)


@dataclass
class Ledger:
    """Books the steps of one run: the present window, the warm-up, and what came after it.

    Args:
        queue: batches that the loader may hold ready. For so many steps a full queue hides a slow loader.
        trusted_clock: whether the times come from a clock that sees the device.
        period: steps after which waits repeat: the workers of the loader.
    """

    queue: int = 0
    trusted_clock: bool = True
    period: int = 1
    fresh: list[StepTimes] = field(default_factory=list)
    """Steps not summed yet. The meter appends here."""
    _warm_up_left: int = field(init=False)
    _window: Sums = field(default_factory=Sums)
    _window_settled: bool = True
    _warm_up: Sums = field(default_factory=Sums)
    _settled: Sums = field(default_factory=Sums)
    _pairs: PairSums = field(default_factory=PairSums)

    def __post_init__(self) -> None:
        self._warm_up_left = WARM_UP_STEPS + self.queue

    def epoch_started(self, seconds: float) -> None:
        """Book the time from the start of an epoch to its first batch."""
        for sums in (self._window, self._settled):
            sums.epoch_starts += 1
            sums.epoch_start_s += seconds

    def fold(self) -> None:
        """Sum the fresh steps up."""
        for step in self.fresh:
            warming = self._warm_up_left > 0
            self._warm_up_left -= warming
            if step.counted:
                self._window.add(step)
                self._window_settled &= not warming
                (self._warm_up if warming else self._settled).add(step)
                if not warming:
                    whole_ns = step.other_ns + step.data_ns + step.h2d_ns + step.compute_ns
                    self._pairs.add(step.data_ns, whole_ns)
        self.fresh.clear()

    def close_window(self, *, lost: int, prefetch_active: bool | None) -> StarvationStats:
        """The figures since the last window was closed, the warm-up included; then a new window begins.

        Args:
            lost: steps of the window that were not measured.
            prefetch_active: whether batches are copied ahead; None: nothing is there to do it.
        """
        self.fold()
        self._window.lost = lost
        stats = self._window.stats(
            settled=self._window_settled, trusted_clock=self.trusted_clock, prefetch_active=prefetch_active
        )
        self._window, self._window_settled = Sums(), True
        return stats

    def total(self, *, prefetch_active: bool | None, lost: int = 0) -> StarvationStats:
        """The figures of the run so far without its warm-up; with it, where hardly anything else is left.

        Without the warm-up, and with enough steps, they have the 95 % interval of ``starved_pct``.

        Args:
            prefetch_active: whether batches are copied ahead; None: nothing is there to do it.
            lost: steps of the run that were not measured.
        """
        self.fold()
        sums, settled = self._settled, self._settled.steps >= FEW_STEPS
        if not settled:
            sums = Sums()
            sums.merge(self._settled)
            sums.merge(self._warm_up)
        sums.lost = lost
        stats = sums.stats(settled=settled, trusted_clock=self.trusted_clock, prefetch_active=prefetch_active)
        interval = self._pairs.interval_pct(self.period) if settled else None
        if interval is None or stats.starved_pct is None:
            return stats
        return replace(stats, starved_low_pct=interval[0], starved_high_pct=interval[1])
