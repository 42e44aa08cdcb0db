"""A simulated accelerator in real time: it works its queue off while the host goes on, and has events to record."""

import time
from unittest import mock

from lightning_feed.callbacks import starvation_run
from lightning_feed.measure.step_meter import RING_SIZE, EventRing

MS = 1_000_000


class QueuedDevice:
    """Its queue is known by when it will be empty; nothing runs.

    Args:
        ahead: steps of work that may be queued before the host blocks.
    """

    def __init__(self, ahead: int = 2) -> None:
        self.free_at = time.perf_counter_ns()
        self._ahead = ahead

    def launch(self, ms: float) -> None:
        """Queue work. The host goes on at once, unless the queue is full."""
        self._sleep_until(self.free_at - round((self._ahead - 1) * ms * MS))
        self.free_at = max(self.free_at, time.perf_counter_ns()) + round(ms * MS)

    def synchronize(self) -> None:
        """Wait for all that is queued, as ``.item()`` does."""
        self._sleep_until(self.free_at)

    def event(self) -> "QueuedEvent":
        """An event to record behind what is queued."""
        return QueuedEvent(self)

    def measured(self) -> "mock._patch[object]":
        """While entered, GPUStarvationCallback measures by this device's events."""
        return mock.patch.object(starvation_run, "open_ring", return_value=EventRing(self.event, RING_SIZE))

    def _sleep_until(self, moment: int) -> None:
        time.sleep(max(0.0, (moment - time.perf_counter_ns()) * 1e-9))


class QueuedEvent:
    """Passes when the device has come to it."""

    def __init__(self, device: QueuedDevice) -> None:
        self._device, self._at = device, 0

    def record(self) -> None:
        """Behind what is queued now."""
        self._at = max(time.perf_counter_ns(), self._device.free_at)

    def query(self) -> bool:
        """Whether the device has come to it."""
        return time.perf_counter_ns() >= self._at

    def elapsed_time(self, end_event: "QueuedEvent") -> float:
        """Milliseconds."""
        return (end_event._at - self._at) / MS

    def synchronize(self) -> None:
        """Wait for it."""
        self._device._sleep_until(self._at)
