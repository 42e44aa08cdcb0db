"""What measures one loop of a run: its steps, its loaders, and what is known of them."""

from dataclasses import replace
from functools import partial
from typing import Any

from lightning_feed import _host
from lightning_feed.prefetch_callback import Stage
from lightning_feed.starvation_facts import facts_of, queue_of
from lightning_feed.watch.clocks import EventRing
from lightning_feed.watch.cpu_times import CpuTimes
from lightning_feed.watch.guard import Guard
from lightning_feed.watch.loader_watch import LoaderWatch
from lightning_feed.watch.profiler_tap import Calls
from lightning_feed.watch.stats import LoaderSteps
from lightning_feed.watch.step_meter import BACKWARD, FORWARD, OPTIMIZER, StepMeter, StepTimes
from lightning_feed.watch.verdict.diagnosis import LoopMeasurements
from lightning_feed.watch.windows import WARM_UP_STEPS, Ledger, Sums

READ_EVERY_NS = 250_000_000
"""The kernel's counters of the workers are read four times a second at most, however often windows are logged."""


class MeasuredLoop:
    """The clock and the loaders of one loop, and what they have given so far.

    Args:
        trainer: that runs it.
        guard: of the callback.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        ring: events of the device; None: the host's clock.
        trusted_clock: whether the clock is that of what computes; else it is the host's beside a device.
    """

    def __init__(
        self, trainer: Any, guard: Guard, stage: Stage, *, ring: EventRing | None, trusted_clock: bool
    ) -> None:
        self._trainer, self._guard, self.stage = trainer, guard, stage
        self.facts = facts_of(trainer, guard, stage)
        self.batch_seen = False
        """Whether the facts hold what a batch tells."""
        queue = queue_of(trainer, stage)
        self.ledger = Ledger(queue=queue, trusted_clock=trusted_clock, period=max(1, self.facts.num_workers or 0))
        self.warm_up, self._settled = WARM_UP_STEPS + queue, False
        self.cpu = CpuTimes(loads_here=self.facts.num_workers == 0)
        self.meter = StepMeter(self._keep, ring=ring)
        self.meter.on_epoch_start = self.ledger.epoch_started
        self.meter.begin(epoch=False)
        self.loaders = LoaderWatch(partial(_host.loop_iterators, trainer, stage), read_every_ns=READ_EVERY_NS)
        self.names = _host.loader_names(trainer, stage) if stage != "fit" else []
        self._by_loader: dict[int, Sums] = {}
        self._waited_ns = 0.0

    # --- what the loop does -------------------------------------------------------------------------------------------

    def begins(self, since: int | None = None) -> None:
        """The loop begins, once more: ``since`` then, by the host's clock. Its loaders may have got other settings."""
        self.facts = facts_of(self._trainer, self._guard, self.stage, before=self.facts)
        self.meter.begin(epoch=True, since=since)
        self.loaders.epoch_began()

    def step_ended(self) -> None:
        """Notice the end of the warm-up."""
        if not self._settled and self.meter.finished >= self.warm_up:
            self._settled = True
            self.cpu.settle(self.meter.finished)
            self.loaders.settle()

    def fetch_began(self) -> None:
        """A batch is drawn from the loaders."""
        self.loaders.fetch_began()  # before the clock of the fetch starts
        self.cpu.fetch_began()
        self.meter.fetch_began()

    def fetch_ended(self) -> None:
        """It is there."""
        self.meter.fetch_ended()
        self.cpu.fetch_ended()
        self.loaders.fetch_ended()

    def handed_out(self) -> None:
        """The loop takes a batch that was drawn before."""
        self.meter.fetch_began()
        self.meter.fetch_ended()

    def parts(self) -> tuple[Calls, Calls]:
        """What to call when forward, backward and optimizer start and stop; nothing where they are not announced."""
        actions = _host.step_actions(self._trainer, self.stage).parts
        began = [partial(self.meter.part_began, part) for part in (FORWARD, BACKWARD, OPTIMIZER)]
        return dict(zip(actions, began, strict=False)), dict.fromkeys(actions, self.meter.part_ended)

    def _keep(self, step: StepTimes) -> None:
        self.ledger.fresh.append(step)
        self._waited_ns += step.data_ns
        if len(self.names) > 1 and step.counted:
            self._by_loader.setdefault(step.source, Sums()).add(step)

    # --- figures ------------------------------------------------------------------------------------------------------

    def by_loader(self) -> tuple[LoaderSteps, ...]:
        """Each of several loaders that are drawn from one after the other; empty for a single one."""
        told = []
        for source, sums in sorted(self._by_loader.items()):
            stats = sums.stats(settled=True, trusted_clock=True, prefetch_active=None)
            if source < len(self.names) and stats.step_ms is not None and stats.data_idle_ms is not None:
                name = self.names[source]
                told.append(LoaderSteps(name, sums.steps, step_ms=stats.step_ms, data_idle_ms=stats.data_idle_ms))
        return tuple(told)

    def measurements(self, *, prefetch_active: bool | None) -> LoopMeasurements:
        """All that was measured so far, without the warm-up."""
        return LoopMeasurements(
            stats=self.ledger.total(prefetch_active=prefetch_active, lost=self.meter.lost),
            facts=replace(self.facts, **self.cpu.per_step(self.meter.finished)),
            loaders=self.loaders.total(),
            by_loader=self.by_loader(),
            waited_s=self._waited_ns * 1e-9,
        )
