"""Divides a step's time by marks: on the host's clock, or by device events that are read once they have passed."""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch

from lightning_feed.machine.limits import STREAM_BACKENDS

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

Clock = Callable[[], int]
"""Current time in whole nanoseconds."""

host_clock: Clock = time.perf_counter_ns  # not looked up later: programs, and Lightning's tests, patch `time`

RING_SIZE = 1024
"""Events per loop. A training step takes 2, and one whose parts are marked up to 9: the host can be some 300 steps
ahead of the device before a step is lost."""
PROBE_SPINS = 10_000


class DeviceEvent(Protocol):
    """The methods used here of ``torch.cuda.Event(enable_timing=True)``, or of another device's event.

    ``synchronize`` is never called while steps run.
    """

    def record(self) -> Any:
        """Record the event after all work queued on the current stream."""

    def query(self) -> bool:
        """Return True once the device has reached the event."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to ``end_event``."""

    def synchronize(self) -> Any:
        """Wait for the event."""


class Note(NamedTuple):
    """Fields of :class:`StepTimes` that a step's events do not contain."""

    host_wait_ns: int
    counted: bool
    number: int
    source: int


class EventStep(NamedTuple):
    """One step between two events."""

    note: Note
    intervals: list[tuple[int, float]] | None
    """(category, nanoseconds on the device) in order; None if the events could not be compared."""


class EventRing:
    """Events from a fixed ring: nothing is allocated in a step, and nothing waits.

    Marks are numbered; mark ``n`` uses event ``n % size``. Neighbouring steps share the mark between them, so that the
    intervals leave no gap. If the host is so far ahead that the ring is full, the step is counted in :attr:`lost`.

    A device error can appear in any later call. If it appears here, it stops the ring for good, but is not raised:
    training's next call raises it, so that the traceback names the training step, and not this class.

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
        self._pending: deque[tuple[Note, int, list[int]]] = deque()
        """Steps that have ended and were not read yet, each with its note, first mark and categories."""
        self.passed = 0
        """Number of unread steps that the device is known to have finished: :meth:`read` returns them without asking
        the device."""
        self._behind = 0
        """Number of steps that the device had not finished when it was last asked."""
        self.lost = 0
        """Steps not measured: no event was free, their events could not be compared, or the device failed."""
        self._stopped = False

    def begin(self) -> None:
        """Set the first mark of a chain of steps. An open step is dropped; finished steps are still read."""
        self._open = []
        self._start = self._record()

    def mark(self, category: int) -> None:
        """Assign the interval since the last mark to ``category``."""
        if self._start is None:
            return
        if self._record() is None:
            self._start = None
        else:
            self._open.append(category)

    def end_step(self, note: Note) -> None:
        """End a step: the last mark is its end and the start of the next step."""
        if self._start is None:
            self.lost += 1
            self.begin()
            return
        self._pending.append((note, self._start, self._open))
        self._start = self._next - 1
        self._open = []

    def read(self) -> EventStep | None:
        """Return the oldest step that the device has finished, or None. The host does not wait."""
        if not self._pending or not (self.passed or self._has_passed(1)):
            return None
        note, start, categories = self._pending[0]
        marks = [self._events[number % self._size] for number in range(start, start + len(categories) + 1)]
        intervals = self._try(_intervals, marks, categories)
        if self._stopped:
            return None
        self._pending.popleft()
        self.passed = max(0, self.passed - 1)
        self.lost += intervals is None
        return EventStep(note, intervals)

    def catch_up(self) -> None:
        """Find the newest step that the device has finished, and so all finished steps. The host does not wait.

        Each question to the device costs a call. So the search begins as many steps behind the host as the device was
        the last time, and it may miss some finished steps while many others are unfinished.
        """
        lower = self.passed
        upper = len(self._pending)
        asked = max(lower + 1, upper - self._behind)
        stride = 1
        while upper - lower > (len(self._pending) - upper) // 4 and not self._stopped:
            if self._has_passed(asked):
                lower = asked
                asked = min(upper, lower + stride)
            else:
                upper = asked - 1
                asked = max(lower + 1, upper + 1 - stride)
            stride *= 2
        self.passed = min(lower, len(self._pending))
        self._behind = len(self._pending) - self.passed

    @property
    def is_half_full(self) -> bool:
        """True if half of the events belong to steps that were not read yet."""
        return bool(self._pending) and self._next - self._pending[0][1] > self._size // 2

    def _has_passed(self, steps: int) -> bool:
        """Return True if the device has finished this number of unread steps."""
        return bool(self._try(self._end_of(self._pending[steps - 1]).query))

    def wait(self) -> None:
        """Wait until the device has finished the last ended step. Called once, after training."""
        if self._pending:
            self._try(self._end_of(self._pending[-1]).synchronize)

    def _end_of(self, step: tuple[Note, int, list[int]]) -> DeviceEvent:
        _, start, categories = step
        return self._events[(start + len(categories)) % self._size]

    def _try(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of a call of the device. If the device has failed, stop using it, and return None."""
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            self._stop(error)
            return None

    def _stop(self, error: RuntimeError) -> None:
        logger.warning("The device clock stopped: %s", str(error).partition("\n")[0])
        self._stopped = True
        self._start = None
        self.lost += len(self._pending)
        self._pending.clear()
        self.passed = 0

    def _record(self) -> int | None:
        if self._stopped:
            return None
        number = self._next
        oldest = self._pending[0][1] if self._pending else self._start
        if oldest is not None and number - oldest >= self._size:
            return None
        self._try(self._events[number % self._size].record)
        if self._stopped:
            return None
        self._next = number + 1
        return number


def _intervals(marks: list[DeviceEvent], categories: list[int]) -> list[tuple[int, float]] | None:
    """(category, nanoseconds) of each interval between neighbouring events; None if events cannot be compared."""
    try:
        return [
            (category, before.elapsed_time(after) * 1e6)
            for category, (before, after) in zip(categories, itertools.pairwise(marks), strict=True)
        ]
    except RuntimeError:  # marks on different streams: an earlier one may not have passed yet
        marks[-1].query()  # raises once more if it is the device that has failed
        return None


def open_ring(device: torch.device, size: int = RING_SIZE) -> EventRing | None:
    """Return a ring of events for ``device``, or None without an :func:`event_maker`."""
    make_event = event_maker(device)
    return EventRing(make_event, size) if make_event is not None else None


def event_maker(device: torch.device) -> Callable[[], DeviceEvent] | None:
    """Return the maker of timing events for ``device``, or None if its events do not work.

    The events are tested first, without waiting for the device. MPS events are not used: their ``elapsed_time`` waits
    for all queued work, and ``record`` ends the command buffer (torch, ``aten/src/ATen/mps/MPSEvent.mm``).
    """
    if device.type not in STREAM_BACKENDS:
        return None
    backend: Any = torch.get_device_module(device)

    def make_event() -> DeviceEvent:
        return cast(DeviceEvent, backend.Event(enable_timing=True))

    return make_event if events_work(make_event) else None


def events_work(make_event: Callable[[], DeviceEvent]) -> bool:
    """Return True if two events can be recorded and compared, or if the device is too busy to answer."""
    try:
        first = make_event()
        last = make_event()
        first.record()
        last.record()
        for _ in range(PROBE_SPINS):
            if last.query():
                elapsed = first.elapsed_time(last)
                return math.isfinite(elapsed) and elapsed >= 0
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return True


# --- the parts of a step ----------------------------------------------------------------------------------------------

OTHER, DATA, H2D, COMPUTE, FORWARD, BACKWARD, OPTIMIZER, UNDIVIDED = range(8)
"""Categories of time. ``FORWARD``, ``BACKWARD`` and ``OPTIMIZER`` are parts of ``COMPUTE``, and have no time unless
they are marked. ``UNDIVIDED`` is all time except ``DATA`` in steps whose parts are not marked on the device."""
READS_PER_STEP = 4
"""Largest number of finished steps read from the device at the end of one step: enough to catch up, at little cost."""
ASK_EVERY = 64
"""Number of steps after which the device is asked how far it is, unless the end of a window came first."""
DIVIDE_EVERY = 8
"""On average, one step of this many is divided into all its parts on the device."""
FIRST_DIVIDED = 16
"""Number of steps at the beginning that are all divided into their parts, so that the first windows have parts."""
_GOLDEN = 2654435769
"""2**32 divided by the golden ratio."""


def is_divided(number: int) -> bool:
    """Return True if all parts of the step with this number are marked on the device; False if only its wait for data
    is.

    The fractional parts of the golden ratio's multiples are spread evenly, and so are those of every n-th step, for any
    n. So work that is done in every n-th step (the optimizer's step with gradient accumulation, logging) is measured as
    often as it occurs. If every 8th step were chosen, such work might be measured always or never. The choice depends
    only on the number, so that all ranks make the same.
    """
    return number <= FIRST_DIVIDED or is_one_in(number, DIVIDE_EVERY)


def is_one_in(number: int, every: int) -> bool:
    """Return True for one number in ``every``, spread evenly over all numbers and over the multiples of any number."""
    return number * _GOLDEN % 2**32 < 2**32 // every


class StepTimes(NamedTuple):
    """Times of one training step, in nanoseconds. The four parts, or the wait for data and ``undivided_ns``, add up to
    the step.

    The times are measured by device events if there are any, else by the host's clock. By the host's clock, a step
    lasts from the end of the step before to its own end. On a device, a step lasts from the beginning of its fetch to
    the beginning of the next fetch, so that one mark serves both steps; it ends earlier if work other than training
    follows.
    """

    other_ns: float
    data_ns: float
    copy_ns: float
    compute_ns: float
    host_wait_ns: int
    """Time the host was blocked in the loader."""
    counted: bool
    """True if windows count the step. The first step of an epoch, or after a validation, does not count."""
    number: int = 0
    """Number of the step in its fit, from 1. Steps of several ranks are matched by it, because some steps may not be
    measured on every rank."""
    source: int = 0
    """Index of the loader that the batch came from, if several are read one after the other."""
    forward_ns: float = 0.0
    """Part of ``compute_ns``: ``training_step``. Forward, backward and optimizer are 0 if they are not marked."""
    backward_ns: float = 0.0
    optimizer_ns: float = 0.0
    undivided_ns: float = 0.0
    """All time except ``data_ns``, for a step that was not divided into its parts. The parts are then 0."""

    @property
    def step_ns(self) -> float:
        """Duration of the step in nanoseconds."""
        return self.other_ns + self.data_ns + self.copy_ns + self.compute_ns + self.undivided_ns


class _Steps:
    """The ended steps of a meter, timed by the host's clock.

    Args:
        keep: called with each measured step, in order.
    """

    def __init__(self, keep: Callable[[StepTimes], object]) -> None:
        self._keep = keep

    @property
    def lost(self) -> int:
        """Steps that could not be measured."""
        return 0

    def begin(self, number: int) -> None:
        """Begin a chain of steps, whose first one has this number."""

    def mark(self, category: int) -> None:
        """Note that a category begins."""

    def end(self, spent: Sequence[int], note: Note) -> None:
        """End a step, in which the host spent these times."""
        self._keep(_times(spent, note))

    def close(self) -> None:
        """End the last step now: work other than training follows, or its times are needed."""

    def catch_up(self, *, wait: bool) -> None:
        """Pass on all steps whose times are known, or all steps if ``wait``."""


class _DeviceSteps(_Steps):
    """The device's side of a meter: sets the marks that a step needs on the device, and reads the steps that passed.

    A step that has ended on the host is still open on the device: its last mark is that of the next fetch, or of
    :meth:`close` if that comes before. So until then no other mark is set.

    Args:
        ring: events of the device.
        keep: called with each measured step, in order, some steps later.
    """

    def __init__(self, ring: EventRing, keep: Callable[[StepTimes], object]) -> None:
        super().__init__(keep)
        self._ring = ring
        self._since_mark = UNDIVIDED
        """Category of the time since the last mark on the device."""
        self._divides = False
        """True if all parts of the current step are marked on the device."""
        self._ended: Note | None = None
        """The step that has ended on the host, until the mark of its end is set on the device."""
        self._ended_since_asked = 0
        """Number of steps that have ended since the device was last asked how far it is."""

    @property
    def lost(self) -> int:
        """Steps that the device clock could not measure: :attr:`EventRing.lost`."""
        return self._ring.lost

    def begin(self, number: int) -> None:
        """Set the first mark of a chain of steps."""
        self._ring.begin()
        self._begin_step(number)

    def mark(self, category: int) -> None:
        """Set a mark, if this step needs one before ``category``.

        If the step has ended on the host, end it on the device, unless ``category`` is ``OTHER``.
        """
        if self._ended is not None:
            if category != OTHER:  # a look-ahead that ended without a fetch is not the next step
                self.close()
                self._since_mark = self._category_on_device(category)
            return
        if self._divides or DATA in (category, self._since_mark):
            self._ring.mark(self._since_mark)
            self._since_mark = self._category_on_device(category)

    def end(self, spent: Sequence[int], note: Note) -> None:
        """End a step on the host, and read some of the steps that the device has finished."""
        self._ended = note
        self._ended_since_asked += 1
        if self._ended_since_asked >= ASK_EVERY or self._ring.is_half_full:
            self._ended_since_asked = 0
            self._ring.catch_up()
        self._read(min(READS_PER_STEP, self._ring.passed))

    def close(self) -> None:
        """End the last step on the device, if it is open."""
        if self._ended is None:
            return
        note = self._ended
        self._ended = None
        self._ring.mark(self._since_mark)
        self._ring.end_step(note)
        self._begin_step(note.number + 1)

    def catch_up(self, *, wait: bool) -> None:
        """Read all steps that the device has finished, or all steps if ``wait``, blocking the host."""
        if wait:
            self._ring.wait()
        self._ended_since_asked = 0
        self._ring.catch_up()
        self._read(self._ring.passed)

    def _begin_step(self, number: int) -> None:
        """Choose whether the parts of the step that begins now are marked."""
        self._divides = is_divided(number)
        self._since_mark = self._category_on_device(OTHER)

    def _category_on_device(self, category: int) -> int:
        """Return the category under which the device's time is counted in the current step."""
        return category if self._divides or category == DATA else UNDIVIDED

    def _read(self, steps: int) -> None:
        """Read this many steps, which the device has finished, and pass on those that were measured."""
        for _ in range(steps):
            step = self._ring.read()
            if step is None:
                return
            note, intervals = step
            if intervals is not None:
                parts = [0.0] * 8
                for category, ns in intervals:
                    parts[category] += ns
                self._keep(_times(parts, note))


class StepMeter:
    """Divides time into categories: each mark begins a category, so that all time is counted once.

    A step is ``other`` until its fetch, ``data`` during the fetch, ``copy`` until the batch is on the device, and
    ``compute`` until it ends, with ``forward``, ``backward`` and ``optimizer`` inside it. After a nested category (a
    look-ahead, or a ``training_step`` that fetches for itself) the outer one continues.

    With a device, each mark costs a call when it is set and another call when it is read. So only ``data`` is marked in
    every step, and all categories only in the steps that :func:`is_divided` chooses. Nothing is marked if another mark
    is set at nearly the same time:

    - The end of a step is the beginning of the next fetch, unless :meth:`close_step` is called before.
    - A look-ahead begins with its fetch.
    - ``forward`` lasts until ``backward`` begins, and ``optimizer`` from the end of ``backward`` to the step's end.

    Args:
        keep: called with each measured step, in order; with a device, some steps later.
        clock: the host's clock.
        ring: events of the device; None to use the host's clock.
    """

    def __init__(
        self, keep: Callable[[StepTimes], object], *, clock: Clock = host_clock, ring: EventRing | None = None
    ) -> None:
        self._steps = _Steps(keep) if ring is None else _DeviceSteps(ring, keep)
        self._clock = clock
        self.finished = 0
        """Number of steps that have ended, whether or not they are measured yet."""
        self.source = 0
        """As in :class:`StepTimes`, for the current batch. Set it before the step ends."""
        self.on_epoch_start: Callable[[float], object] | None = None
        """Called with the seconds from the start of an epoch to its first batch."""
        self.begin(epoch=False)

    @property
    def lost(self) -> int:
        """Steps that the device clock could not measure: :attr:`EventRing.lost`."""
        return self._steps.lost

    @property
    def between_steps(self) -> bool:
        """True while time passes as ``other``."""
        return self._categories[-1] == OTHER

    # --- the run around the steps -------------------------------------------------------------------------------------

    def begin(self, *, epoch: bool, since: int | None = None) -> None:
        """Start over at the beginning of an epoch, or of training (``epoch=False``). Drops an unfinished step.

        Args:
            epoch: True to report the time to the first batch.
            since: start of the epoch by the host's clock; None for now.
        """
        self.close_step()
        self._last = self._clock()
        self._spent = [0] * 8
        self._categories = [OTHER]
        """The current category, after those to return to, outermost first."""
        self._looking_ahead = False
        self._running = False
        self._counted = False
        self._epoch_began: int | None = None
        """The host's clock at the start of an epoch, until its first batch comes."""
        if epoch:
            self._epoch_began = self._last if since is None else since
        self._steps.begin(self.finished + 1)

    def leave_out_step(self) -> None:
        """Do not count the current step: it contains work other than training, such as a validation."""
        self.close_step()
        self._counted = False

    def close_step(self) -> None:
        """End the last step now, also on the device: work other than training follows, or its times are needed."""
        self._steps.close()

    def catch_up(self) -> None:
        """End the last step, and read all steps that the device has finished. The host does not wait."""
        self.close_step()
        self._steps.catch_up(wait=False)

    def end(self, *, wait: bool = True) -> None:
        """Finish training: read what the device has completed, or everything if ``wait``, blocking the host once."""
        self.close_step()
        self._steps.catch_up(wait=wait)

    # --- marks --------------------------------------------------------------------------------------------------------

    def fetch_began(self) -> None:
        """Note that the loop requests a batch."""
        self._switch(DATA, inside=True)

    def fetch_ended(self) -> None:
        """Note that the batch has arrived. Outside a look-ahead, the transfer to the device follows."""
        if len(self._categories) == 1:
            return  # the fetch began before this object was made
        interrupted = self._categories.pop(-2)
        self._switch(interrupted if self._looking_ahead or self._running else H2D)
        self._first_batch_came()

    def handed_out(self) -> None:
        """Note that the loop takes a batch that was fetched earlier. Its transfer follows."""
        if not self._looking_ahead and not self._running:
            self._switch(H2D)
        self._first_batch_came()

    def _first_batch_came(self) -> None:
        if self._epoch_began is not None and self.on_epoch_start is not None:
            self.on_epoch_start((self._last - self._epoch_began) * 1e-9)
        self._epoch_began = None

    def arrived(self) -> None:
        """Note that the batch is on the device. Does nothing in a look-ahead, or outside ``copy``, as in validation."""
        if self._categories[-1] == H2D and not self._looking_ahead:
            self._switch(COMPUTE)

    def step_began(self) -> None:
        """Note that the step runs. ``compute`` begins here if no arrival was noted, as with ``dataloader_iter``."""
        self._running = True
        if self._categories[-1] != COMPUTE:
            self._switch(COMPUTE)

    def part_began(self, category: int) -> None:
        """Begin ``FORWARD``, ``BACKWARD`` or ``OPTIMIZER``, inside the step or inside another such part."""
        if self._running:
            self._switch(category, inside=True, marks=category != OPTIMIZER)

    def part_ended(self) -> None:
        """Return to the category around the part."""
        if self._running and len(self._categories) > 1:
            marks = self._categories[-1] == BACKWARD
            self._switch(self._categories.pop(-2), marks=marks)

    def step_ended(self) -> None:
        """End the step."""
        self.close_step()  # still open if this step fetched nothing
        self._switch(OTHER)
        self._running = False
        spent = self._spent
        self._spent = [0] * 8
        self.finished += 1
        note = Note(spent[DATA], self._counted, self.finished, self.source)
        self._counted = True
        self._steps.end(spent, note)

    def look_ahead_began(self) -> None:
        """Note that a prefetcher starts to fetch the next batch and to copy it to the device."""
        self._looking_ahead = True
        self._switch(H2D, inside=True, marks=False)

    def look_ahead_ended(self) -> None:
        """Return to the interrupted category."""
        if self._looking_ahead:
            self._looking_ahead = False
            self._switch(self._categories.pop(-2))

    def _switch(self, category: int, *, inside: bool = False, marks: bool = True) -> None:
        """Begin a category in place of the current one, or ``inside`` it.

        With ``marks=False`` no mark is set: on the device, the last category continues.
        """
        now = self._clock()
        self._spent[self._categories[-1]] += now - self._last
        self._last = now
        if marks:
            self._steps.mark(category)
        if inside:
            self._categories.append(category)
        else:
            self._categories[-1] = category


def _times(parts: Sequence[float], note: Note) -> StepTimes:
    other, data, copy, compute, forward, backward, optimizer, undivided = parts
    whole = compute + forward + backward + optimizer
    return StepTimes(other, data, copy, whole, *note, forward, backward, optimizer, undivided)
