"""Divides the time of a training step: every mark closes an interval and books it under what was going on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_feed.watch.clocks import Clock, EventRing, host_clock

OTHER, DATA, H2D, COMPUTE, FORWARD, BACKWARD, OPTIMIZER = range(7)
"""The last three are parts of computing, where they are marked."""
READS_PER_STEP = 4
"""Finished steps read from the device at the end of one step: enough to catch up, few enough not to be felt."""


class StepTimes(NamedTuple):
    """One training step from the end of the one before to its own end. The four parts add up to it.

    Nanoseconds: by the device's events where there are any, else by the host's clock.
    """

    other_ns: float
    data_ns: float
    h2d_ns: float
    compute_ns: float
    host_wait_ns: int
    """Time the host was blocked in the loader."""
    counted: bool
    """Whether windows count the step: not the first of an epoch, nor one after a validation."""
    number: int = 0
    """Of the step in its fit, from 1. Steps of several ranks are matched by it, since some may not be measured."""
    source: int = 0
    """Which of several loaders, drawn from one after the other, the batch came from."""
    forward_ns: float = 0.0
    """Of ``compute_ns``: ``training_step``. All three are 0 where they were not marked."""
    backward_ns: float = 0.0
    optimizer_ns: float = 0.0


class StepMeter:
    """Switches between categories at each mark, so that nothing is counted twice and nothing is left out.

    A step is ``other`` until its fetch, ``data`` during the fetch, ``h2d`` until the batch is on the device, and
    ``compute`` until it ends, with ``forward``, ``backward`` and ``optimizer`` inside it. What lies inside another
    category (a look-ahead, or a ``training_step`` that fetches for itself) returns to that category afterwards.

    Args:
        keep: takes each measured step, in order; on a device some steps after it was queued.
        clock: the host's clock.
        ring: events of the device; None: the host's clock is the truth.
    """

    def __init__(
        self, keep: Callable[[StepTimes], object], *, clock: Clock = host_clock, ring: EventRing | None = None
    ) -> None:
        self._keep, self._clock, self._ring = keep, clock, ring
        self._spent = [0] * 7
        self._category = OTHER
        self._last = clock()
        self._stack: list[int] = []
        """Categories to return to, outermost first."""
        self._looking_ahead = self._running = False
        self._counted = False
        self._epoch_began: int | None = None
        self.finished = 0
        """Steps that ended, measured or not yet."""
        self.source = 0
        """As in :class:`StepTimes`, of the batch in hand. Set it before the step ends."""
        self.on_epoch_start: Callable[[float], object] | None = None
        """Takes the seconds from the start of an epoch to its first batch."""

    @property
    def lost(self) -> int:
        """Steps that the device clock had no event for."""
        return self._ring.lost if self._ring is not None else 0

    @property
    def between_steps(self) -> bool:
        """Whether time passes as ``other`` now."""
        return self._category == OTHER

    # --- the run around the steps -------------------------------------------------------------------------------------

    def begin(self, *, epoch: bool, since: int | None = None) -> None:
        """Start over: an epoch begins, or training (``epoch=False``). An unfinished step is dropped.

        Args:
            epoch: the time to the first batch is told.
            since: when the epoch began, by the host's clock; None: now.
        """
        self._last = self._clock()
        self._spent = [0] * 7
        self._category = OTHER
        self._stack.clear()
        self._looking_ahead = self._running = self._counted = False
        self._epoch_began = (self._last if since is None else since) if epoch else None
        if self._ring is not None:
            self._ring.begin()

    def leave_out_step(self) -> None:
        """Do not count the present step: something that is not training, as a validation, lies in it."""
        self._counted = False

    def end(self, *, wait: bool = True) -> None:
        """Training is over: read what the device has finished; with ``wait`` all, for which the host waits once."""
        if self._ring is not None:
            if wait:
                self._ring.wait()
            self._read(self.finished)

    # --- marks --------------------------------------------------------------------------------------------------------

    def fetch_began(self) -> None:
        """The loop asks for a batch."""
        self._stack.append(self._category)
        self._switch(DATA)

    def fetch_ended(self) -> None:
        """It has it. Outside of a look-ahead, what follows is the transfer to the device."""
        if not self._stack:
            return  # began before the meter did
        interrupted = self._stack.pop()
        self._switch(interrupted if self._looking_ahead or self._running else H2D)
        if self._epoch_began is not None and self.on_epoch_start is not None:
            self.on_epoch_start((self._last - self._epoch_began) * 1e-9)
        self._epoch_began = None

    def arrived(self) -> None:
        """It is on the device. Batches of a validation come here too, while the category is another."""
        if self._category == H2D and not self._looking_ahead:
            self._switch(COMPUTE)

    def step_began(self) -> None:
        """The step runs; where the batch did not pass E2 (``dataloader_iter``), compute begins here."""
        self._running = True
        if self._category != COMPUTE:
            self._switch(COMPUTE)

    def part_began(self, category: int) -> None:
        """``FORWARD``, ``BACKWARD`` or ``OPTIMIZER`` begins: inside the step, or inside each other."""
        if self._running:
            self._stack.append(self._category)
            self._switch(category)

    def part_ended(self) -> None:
        """Back to what it lay in."""
        if self._running and self._stack:
            self._switch(self._stack.pop())

    def step_ended(self) -> None:
        """The step is over."""
        self._switch(OTHER)
        self._running = False
        spent, self._spent = self._spent, [0] * 7
        counted, self._counted = self._counted, True
        self.finished += 1
        note = (spent[DATA], counted, self.finished, self.source)
        if self._ring is None:
            self._keep(_times(spent, *note))
        else:
            self._ring.end_step(note)
            self._read(READS_PER_STEP)

    def look_ahead_began(self) -> None:
        """A prefetcher fetches and stages the next batch."""
        self._stack.append(self._category)
        self._looking_ahead = True
        self._switch(H2D)

    def look_ahead_ended(self) -> None:
        """Back to what it interrupted."""
        if self._looking_ahead:
            self._looking_ahead = False
            self._switch(self._stack.pop())

    def _switch(self, category: int) -> None:
        now = self._clock()
        self._spent[self._category] += now - self._last
        self._last = now
        if self._ring is not None:
            self._ring.mark(self._category)
        self._category = category

    def _read(self, at_most: int) -> None:
        assert self._ring is not None
        for _ in range(at_most):
            step = self._ring.read()
            if step is None:
                return
            if step.intervals is None:
                continue
            parts = [0.0] * 7
            for category, ns in step.intervals:
                parts[category] += ns
            self._keep(_times(parts, *step.note))


def _times(parts: Sequence[float], host_wait_ns: int, counted: bool, number: int, source: int) -> StepTimes:  # noqa: FBT001  # as the meter notes it
    other, data, h2d, compute, forward, backward, optimizer = parts
    whole = compute + forward + backward + optimizer
    return StepTimes(other, data, h2d, whole, host_wait_ns, counted, number, source, forward, backward, optimizer)
