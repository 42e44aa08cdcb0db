"""The two clocks: the host's, and events on the device's compute stream, read only once they have passed."""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from lightning_feed.transfer.prefetcher import STREAM_BACKENDS

logger = logging.getLogger(__name__)

Clock = Callable[[], int]
"""The present time in whole nanoseconds."""

host_clock: Clock = time.perf_counter_ns  # bound here: programs, and Lightning's tests, patch `time`

RING_SIZE = 1024
"""Events per loop. A training step takes 10, with a prefetcher 14: the host may be 73 steps ahead before one is not
measured."""
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

    An error of the device, which comes up at whatever call is next, stops the ring for good and is not raised here: the
    training's own next call meets it, and its traceback names the step and not the meter.

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
        """Steps that were not measured: no event was free, theirs could not be compared, or the device failed."""
        self._stopped = False

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
        marks = [self._events[number % self._size] for number in range(start, start + len(categories) + 1)]
        try:
            if not marks[-1].query():
                return None
            intervals = _intervals(marks, categories)
        except RuntimeError as error:
            self._stop(error)
            return None
        self._pending.popleft()
        self.lost += intervals is None
        return EventSteps(note, intervals)

    def wait(self) -> None:
        """Wait for the last finished step. Once, when training is over."""
        if not self._pending:
            return
        _, start, categories = self._pending[-1]
        try:
            self._events[(start + len(categories)) % self._size].synchronize()
        except RuntimeError as error:
            self._stop(error)

    def _stop(self, error: RuntimeError) -> None:
        """Ask nothing more of a device that has failed."""
        logger.warning("The device clock stopped: %s", str(error).partition("\n")[0])
        self._stopped, self._start = True, None
        self.lost += len(self._pending)
        self._pending.clear()

    def _record(self) -> int | None:
        if self._stopped:
            return None
        number = self._next
        oldest = self._pending[0].start if self._pending else self._start
        if oldest is not None and number - oldest >= self._size:
            return None
        try:
            self._events[number % self._size].record()
        except RuntimeError as error:
            self._stop(error)
            return None
        self._next = number + 1
        return number


def _intervals(marks: list[DeviceEvent], categories: list[int]) -> list[tuple[int, float]] | None:
    """(category, nanoseconds) between neighbouring marks, the last of which has passed; None: not to be compared."""
    try:
        return [
            (category, before.elapsed_time(after) * 1e6)
            for category, (before, after) in zip(categories, itertools.pairwise(marks), strict=True)
        ]
    except RuntimeError:  # marks on different streams: an earlier one may not have passed yet
        marks[-1].query()  # raises once more if it is the device that has failed
        return None


def open_ring(device: torch.device, size: int = RING_SIZE) -> EventRing | None:
    """A ring of events for ``device``, or None where there is no :func:`event_maker`."""
    make_event = event_maker(device)
    return EventRing(make_event, size) if make_event is not None else None


def event_maker(device: torch.device) -> Callable[[], DeviceEvent] | None:
    """What makes the timing events of ``device``, or None where it has none that work.

    They are tried out first, without waiting for the device. The events of MPS are not used: there ``elapsed_time``
    waits for all queued work, and ``record`` ends the command buffer (torch, ``aten/src/ATen/mps/MPSEvent.mm``).
    """
    if device.type not in STREAM_BACKENDS:
        return None
    backend: Any = torch.get_device_module(device)

    def make_event() -> DeviceEvent:
        event: DeviceEvent = backend.Event(enable_timing=True)
        return event

    return make_event if events_work(make_event) else None


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
