"""The measurement of one loop: its clock, its loaders, its CPU time, and when its reports are due."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_feed.load.kinds import Batch
from lightning_feed.measure.cpu_time import CpuTimes
from lightning_feed.measure.facts import batch_facts
from lightning_feed.measure.loader_watch import LoaderSums, LoaderWatch
from lightning_feed.measure.measurements import LoopFacts, LoopMeasurements
from lightning_feed.measure.stats import Additive, LoaderSteps
from lightning_feed.measure.step_meter import Clock, EventRing, StepMeter, StepTimes, host_clock, is_one_in
from lightning_feed.measure.windows import UNFOLDED_STEPS, WARM_UP_STEPS, Ledger, Sums

if TYPE_CHECKING:
    from lightning_feed.measure.device_waits import WaitFinder

READ_EVERY_NS = 250_000_000
"""Shortest time between readings of the workers' kernel counters, however often windows are logged."""
SAMPLE_EVERY = 4
"""On average, one step of this many is watched for waits for the device, until enough were."""
FIRST_STEPS = 200
FIRST_S = 60.0
"""Steps and seconds to the first report, whichever is sooner."""
EVERY_S = 600.0
"""Seconds from one report to the next."""
clock = time.monotonic


@dataclass
class LoopSums(Additive):
    """Sums of one loop: over its steps, and over its loaders."""

    steps: Sums
    loaders: LoaderSums


class MeasuredLoop:
    """The clock and the loaders of one loop, with their sums so far.

    Args:
        facts: facts about the loop before its first batch.
        find: returns the live iterators of its loaders.
        queue: largest number of batches that the loaders hold ready.
        ring: device events that time the steps; None for the host's clock, which is trusted only for a model on the
            CPU.
        names: names of the loaders, if there are several that are read one after the other.
        clock: the host's clock.
    """

    def __init__(
        self,
        facts: LoopFacts,
        find: Callable[[], list[Any]],
        *,
        queue: int,
        ring: EventRing | None,
        names: Sequence[str] = (),
        clock: Clock = host_clock,
    ) -> None:
        self.facts = facts
        self.names = names
        self.batch_seen = False
        """True if the facts include the number of tensors in a batch and their size."""
        workers = facts.loader.num_workers
        trusted = ring is not None or facts.device_type == "cpu"
        self.ledger = Ledger(queue=queue, trusted_clock=trusted, period=max(1, workers or 0))
        self.warm_up = WARM_UP_STEPS + queue
        self._settled = False
        self.cpu = CpuTimes(loads_here=None if workers is None else workers == 0)
        self.meter = StepMeter(self._keep, clock=clock, ring=ring)
        self.meter.on_epoch_start = self.ledger.epoch_started
        self.loaders = LoaderWatch(find, clock=clock, read_every_ns=READ_EVERY_NS)
        self._waits = None if ring is None else _wait_finder(facts)
        self._by_loader: dict[int, Sums] = {}
        self._waited_ns = 0.0
        self._waited_ms: tuple[float, float] | None = None
        self._began_at = 0  # steps that were finished when the loop last began

    # --- what the loop does -------------------------------------------------------------------------------------------

    def begins(self, facts: LoopFacts, since: int | None = None) -> None:
        """Begin the loop again, at ``since`` by the host's clock, or now if None. Its loaders may have changed."""
        self.drop_sample()
        ran = self.meter.finished - self._began_at
        self._began_at = self.meter.finished
        # An iterable dataset may have no length: assume that an epoch is as long as the epoch before.
        batches = facts.batches_per_epoch or ran or None
        self.facts = replace(facts, batch=self.facts.batch, syncs=self.facts.syncs, batches_per_epoch=batches)
        self._leave_out_earlier_epochs()
        self.ledger.epoch_begins()
        self.cpu.epoch_begins(self.meter.finished)
        self.meter.begin(epoch=True, since=since)
        self.loaders.epoch_began()

    def _leave_out_earlier_epochs(self) -> None:
        """Leave out what was measured before the present epoch, if the wait for data has changed since.

        With several ranks nothing is left out, because each rank would decide by itself.
        """
        if not self._settled or self.facts.world_size > 1:
            return
        waited_ms = self.ledger.changed_wait_ms()
        if waited_ms is not None:
            self._waited_ms = waited_ms
            self.ledger.leave_out_earlier_epochs()
            self.cpu.leave_out_earlier_epochs()
            self.loaders.leave_out_earlier_epochs()

    @property
    def is_settled(self) -> bool:
        """True once the warm-up has ended."""
        return self._settled

    def leave_out_step(self) -> None:
        """Do not count the current step: it contains work other than the loop's."""
        self.meter.leave_out_step()
        self.drop_sample()

    def drop_sample(self) -> None:
        """Stop watching the current step for waits for the device."""
        if self._waits is not None:
            self._waits.drop()

    def look_at(self, batch: Batch) -> None:
        """Add the number of tensors in a batch, and their size, to the facts."""
        self.batch_seen = True
        self.facts = replace(self.facts, batch=batch_facts(batch))

    def step_ended(self) -> bool:
        """Detect the end of the warm-up. Returns True if so many steps are kept that they have to be summed up."""
        if not self._settled and self.meter.finished >= self.warm_up:
            self._settled = True
            self.cpu.settle(self.meter.finished)
            self.loaders.settle()
        return len(self.ledger.fresh) >= UNFOLDED_STEPS

    def _sample_waits(self, waits: "WaitFinder") -> None:
        """End the sample of the step that has ended, and begin one if the step that follows is to be sampled."""
        waits.end()
        if self._settled and waits.wants_more and is_one_in(self.meter.finished + 1, SAMPLE_EVERY):
            waits.begin()

    def step_began(self) -> None:
        """Note that the step begins, after the hooks that come before it."""
        self.meter.step_began()
        if self._waits is not None:
            self._waits.check()

    def fetch_began(self) -> None:
        """Note that the loop requests a batch from the loaders.

        A sample of waits begins and ends here, because in a hook a callback of the user may be within a
        ``warnings.catch_warnings``, which lasts until the next hook.
        """
        if self._waits is not None:
            self._sample_waits(self._waits)
        self.loaders.fetch_began()  # before the clock of the fetch starts
        self.cpu.fetch_began()
        self.meter.fetch_began()

    def fetch_ended(self) -> None:
        """Note that the batch has arrived."""
        self.meter.fetch_ended()
        self.cpu.fetch_ended()
        self.loaders.fetch_ended()

    def handed_out(self) -> None:
        """Note that the loop takes a batch drawn earlier."""
        self.meter.handed_out()

    def _keep(self, step: StepTimes) -> None:
        self.ledger.fresh.append(step)
        self._waited_ns += step.data_ns
        if len(self.names) > 1 and step.counted:
            self._by_loader.setdefault(step.source, Sums()).add(step)

    # --- figures ------------------------------------------------------------------------------------------------------

    def settled(self) -> LoopSums | None:
        """Return the sums over the steps and the loaders since the warm-up ended; None during the warm-up."""
        if not self._settled:
            return None
        return LoopSums(self.ledger.settled(), self.loaders.settled())

    def by_loader(self) -> tuple[LoaderSteps, ...]:
        """Return the steps of each of several loaders that are read one after the other; empty for a single loader."""
        loaders = []
        for source, sums in sorted(self._by_loader.items()):
            if source < len(self.names):
                to_ms = 1e-6 / sums.steps
                name = self.names[source]
                loaders.append(LoaderSteps(name, sums.steps, sums.step_ns * to_ms, sums.data_ns * to_ms))
        return tuple(loaders)

    def measurements(self, *, prefetch_active: bool | None) -> LoopMeasurements:
        """Return all measurements so far, without the warm-up, nor earlier epochs if the wait for data has changed."""
        self.ledger.fold()
        self._leave_out_earlier_epochs()
        return LoopMeasurements(
            stats=self.ledger.total(prefetch_active=prefetch_active, lost=self.meter.lost),
            facts=replace(
                self.facts,
                waited_ms=self._waited_ms,
                waits=None if self._waits is None else self._waits.waits(),
                host=self.cpu.per_step(self.meter.finished),
            ),
            loaders=self.loaders.total(),
            by_loader=self.by_loader(),
            waited_s=self._waited_ns * 1e-9,
        )


def _wait_finder(facts: LoopFacts) -> "WaitFinder":
    from lightning_feed.measure.device_waits import WaitFinder  # here: a loop on the CPU waits for no device

    return WaitFinder(facts.device_type, in_users_loop=facts.loop == "plain")


def _seconds() -> float:
    return clock()  # looked up at each call: tests replace it


class Schedule:
    """Due times of reports.

    Args:
        seconds: returns the time of a clock in seconds.
    """

    def __init__(self, seconds: Callable[[], float] = _seconds) -> None:
        self._seconds = seconds
        self._next_step: float = FIRST_STEPS
        self._next_s = seconds() + FIRST_S
        self.first = True
        """True until the first report."""

    def due(self, steps: int) -> bool:
        """Return True if a report is due after this many steps."""
        return steps >= self._next_step or self._seconds() >= self._next_s

    def came(self, *, early: bool = False) -> None:
        """Note that a report was made. If it was ``early``, it had no verdict yet, so the next report is due soon."""
        self._next_step = math.inf
        self._next_s = self._seconds() + (FIRST_S if early else EVERY_S)
        self.first &= early
