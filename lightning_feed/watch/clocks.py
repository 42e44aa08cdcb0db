"""The two clocks: the host's, and events on the device's compute stream, read only once they have passed."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

Clock = Callable[[], int]
"""The present time in whole nanoseconds."""

host_clock: Clock = time.perf_counter_ns  # bound here: programs, and Lightning's tests, patch `time`

RING_SIZE = 512
"""Events per run. A step takes 4, with a prefetcher 8: the host may be 64 steps ahead before one is not measured."""
PROBE_SPINS = 10_000


class DeviceEvent(Protocol):
    """What is used of ``torch.cuda.Event(enable_timing=True)`` and its like. Never ``synchronize`` while steps run."""

    def record(self) -> Any:
        """Put the event behind all work queued on the current stream."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to ``end_event``."""

    def synchronize(self) -> Any:
        """Wait for it."""


class EventSteps(NamedTuple):
    """One step between two events: how long each of its intervals took on the device."""

    note: Any
    """What was given to :meth:`EventRing.end_step`."""
    intervals: list[tuple[int, float]] | None
    """(category, nanoseconds) in order; None: the events could not be compared."""


class _Pending(NamedTuple):
    note: Any
    start: int
    categories: list[int]


class EventRing:
    """Events from a fixed ring: nothing is allocated in a step, and nothing waits.

    Marks carry running numbers; mark ``n`` uses event ``n % size``. Neighbouring steps share the mark between them, so
    that the intervals telescope. When the ring is full because the host is that far ahead, the step is given up and
    counted in :attr:`lost`.

    Args:
        make_event: makes one timing event.
        size: number of events.
    """

    def __init__(self, make_event: Callable[[], DeviceEvent], size: int = RING_SIZE) -> None:
        self._events = [make_event() for _ in range(size)]
        self._size = size
        self._next = 0
        self._start: int | None = None
        self._open: list[int] = []
        self._pending: deque[_Pending] = deque()
        self.lost = 0
        """Steps that were not measured because no event was free, or because theirs could not be compared."""

    def begin(self) -> None:
        """Set the first mark of a chain of steps. What was open is dropped; finished steps are still read."""
        self._open = []
        self._start = self._record()

    def mark(self, category: int) -> None:
        """Close the interval since the last mark, and book it under ``category``."""
        if self._start is None:
            return
        if self._record() is None:
            self._start = None
        else:
            self._open.append(category)

    def end_step(self, note: Any) -> None:
        """The last mark was the end of a step and is the start of the next."""
        if self._start is None:
            self.lost += 1
            self.begin()
            return
        self._pending.append(_Pending(note, self._start, self._open))
        self._start, self._open = self._next - 1, []

    def read(self) -> EventSteps | None:
        """The oldest step that the device has finished, or None. The host does not wait."""
        if not self._pending:
            return None
        note, start, categories = self._pending[0]
        events, size = self._events, self._size
        if not events[(start + len(categories)) % size].query():
            return None
        self._pending.popleft()
        intervals = []
        before = events[start % size]
        try:
            for number, category in enumerate(categories, start + 1):
                after = events[number % size]
                intervals.append((category, before.elapsed_time(after) * 1e6))
                before = after
        except RuntimeError:  # marks on different streams: an earlier one may not have passed yet
            self.lost += 1
            return EventSteps(note, None)
        return EventSteps(note, intervals)

    def wait(self) -> None:
        """Wait for the last finished step. Once, when training is over."""
        if self._pending:
            _, start, categories = self._pending[-1]
            self._events[(start + len(categories)) % self._size].synchronize()

    def _record(self) -> int | None:
        number = self._next
        oldest = self._pending[0].start if self._pending else self._start
        if oldest is not None and number - oldest >= self._size:
            return None
        self._events[number % self._size].record()
        self._next = number + 1
        return number


def open_ring(device: torch.device, size: int = RING_SIZE) -> EventRing | None:
    """A ring of events for ``device``, or None where it has none that work.

    The events of every backend are tried out first, without waiting for the device.
    """
    if device.type == "cpu":
        return None
    try:
        backend: Any = torch.get_device_module(device)
    except RuntimeError:
        return None
    if not hasattr(backend, "Event"):
        return None

    def make_event() -> DeviceEvent:
        event: DeviceEvent = backend.Event(enable_timing=True)
        return event

    return EventRing(make_event, size) if events_work(make_event) else None


def events_work(make_event: Callable[[], DeviceEvent]) -> bool:
    """Whether two events can be recorded and compared. A device too busy to answer is believed."""
    try:
        first, last = make_event(), make_event()
        first.record()
        last.record()
        for _ in range(PROBE_SPINS):
            if last.query():
                elapsed = first.elapsed_time(last)
                return math.isfinite(elapsed) and elapsed >= 0
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return True
