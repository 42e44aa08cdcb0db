"""Training on a simulated device: a loader that makes batches, a host that queues work, a device that works it off.

The truth is taken from the time line itself, not from marks: the time in which the host was blocked in the loader while
the device had nothing queued.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulated.device import MS, Event, SimulatedDevice, Span, outside
from simulated.training import Production

from lightning_feed.measure.stats import StarvationStats
from lightning_feed.measure.step_meter import StepTimes
from lightning_feed.measure.windows import Sums


@dataclass(kw_only=True)
class Step:
    """One training step, in milliseconds."""

    fetch: float | None = None
    """Time in the loader; None: as long as the timeline's loader takes."""
    before: float = 0.0
    """The host between the steps."""
    copy: float = 0.0
    pinned: bool = True
    """False: the host waits for the copy, and the copy for what is queued."""
    launch: float = 1.0
    """The host, while it queues ``work``."""
    work: float = 20.0
    synchronize: bool = False
    """At the end of the step."""


class Timeline:
    """A training loop that marks what the callback would mark, in simulated time.

    Args:
        loader: gives the batches.
        look_ahead: the next batch is fetched and copied aside in the step before, as PrefetchCallback does.
        ahead: steps that the host may be ahead of the device before queueing blocks; None: no end.
    """

    def __init__(self, loader: Production | None = None, *, look_ahead: bool = False, ahead: int | None = None) -> None:
        self.device = SimulatedDevice()
        self._side = self.device.Stream()
        self.steps: list[StepTimes] = []
        self.meter = self.device.meter(self.steps.append, size=1 << 13)
        self._loader, self._look_ahead, self._ahead = loader, look_ahead, ahead
        self._fetches: list[list[Span]] = [[]]
        self._done_at: list[int] = []
        self._staged: Event | None = None
        self.began = self.ended = self.device.now
        if loader is not None:
            loader.began = self.began

    def run(self, steps: Sequence[Step], between: Callable[[int], None] | None = None) -> None:
        """Run ``steps``; after the step with number k ``between(k)``. Then all that is queued is worked off."""
        for number, step in enumerate(steps):
            self._run(step, steps[number + 1] if number + 1 < len(steps) else None)
            if between is not None:
                between(number)
        self.meter.end()

    def validate(self, batches: int, *, load: float, work: float) -> None:
        """A validation: its fetches have other names, its batches pass the same transfer."""
        self.meter.leave_out_step()
        for _ in range(batches):
            self.device.host(load)
            self.meter.arrived()
            self.device.launch(work)
        self.device.synchronize()

    # --- what is true -------------------------------------------------------------------------------------------------

    def idle_ns(self) -> list[int]:
        """Of each step: the host blocked in the loader, the device with nothing to do."""
        busy = self.device.compute.busy
        return [sum(outside(span, busy) for span in spans) for spans in self._fetches[: len(self.steps)]]

    def device_idle_pct(self, first: int) -> float:
        """Share of the time in which the device did nothing, or waited for a copy, from the end of step ``first``."""
        began, ended = self._done_at[first], self._done_at[-1]
        busy = sum(end - start for start, end in self.device.compute.busy if start >= began)
        return 100 * (1 - busy / (ended - began))

    def stats(self, first: int) -> StarvationStats:
        """What a window over the steps after ``first`` would say."""
        sums = Sums()
        for step in self.steps[first + 1 :]:
            if step.counted:
                sums.add(step)
        return sums.stats(settled=True, trusted_clock=True, prefetch_active=None)

    # --- one step -----------------------------------------------------------------------------------------------------

    def _run(self, step: Step, following: Step | None) -> None:
        device, meter = self.device, self.meter
        device.host(step.before)
        meter.fetch_began()
        if self._staged is None:
            self._wait_for_batch(step)
        meter.fetch_ended()
        if self._staged is not None:
            device.compute.wait_event(self._staged)
            self._staged = None
        elif step.copy and not step.pinned:
            device.synchronize()
            device.launch(step.copy)
            device.synchronize()
        elif step.copy:
            device.launch(step.copy)
        meter.arrived()
        meter.step_began()
        if self._ahead is not None and len(self._done_at) >= self._ahead:
            device.now = max(device.now, self._done_at[-self._ahead])
        device.launch(step.work)
        device.host(step.launch)
        if step.synchronize:
            device.synchronize()
        self._done_at.append(device.compute.free_at)
        meter.step_ended()
        self.ended = max(device.now, device.compute.free_at)
        self._fetches.append([])
        if self._look_ahead and following is not None:
            meter.look_ahead_began()
            meter.fetch_began()
            self._wait_for_batch(following)
            meter.fetch_ended()
            self._side.run(round(following.copy * MS))
            self._staged = self._side.record_event()
            meter.look_ahead_ended()

    def _wait_for_batch(self, step: Step) -> None:
        began = self.device.now
        if step.fetch is not None:
            self.device.host(step.fetch)
        else:
            assert self._loader is not None
            self.device.now = self._loader.next_ready_at(began)
        self._fetches[-1].append((began, self.device.now))
