"""A device as a queue: work runs in order behind what was queued before it, while the host's clock goes its own way."""

from collections.abc import Callable
from typing import Any

from lightning_feed.watch.clocks import EventRing
from lightning_feed.watch.step_meter import StepMeter, StepTimes

MS = 1_000_000


class FakeDevice:
    """Host and device on one time line, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 1_000 * MS
        self.free_at = 0
        self.events = 0
        self.waited = 0

    def clock(self) -> int:
        return self.now

    def host(self, ms: float) -> None:
        """The host is busy or blocked."""
        self.now += round(ms * MS)

    def launch(self, ms: float) -> None:
        """Queue work for the device; the host goes on at once."""
        self.free_at = max(self.free_at, self.now) + round(ms * MS)

    def event(self) -> "FakeEvent":
        self.events += 1
        return FakeEvent(self)

    def meter(self, keep: Callable[[StepTimes], Any], *, size: int = 512) -> StepMeter:
        return StepMeter(keep, clock=self.clock, ring=EventRing(self.event, size))


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at: int | None = None

    def record(self) -> None:
        self.at = max(self._device.now, self._device.free_at)

    def query(self) -> bool:
        assert self.at is not None, "asked for an event that was never recorded"
        return self._device.now >= self.at

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        assert self.at is not None
        assert end_event.at is not None
        return (end_event.at - self.at) / MS

    def synchronize(self) -> None:
        assert self.at is not None
        self._device.waited += 1
        self._device.now = max(self._device.now, self.at)
