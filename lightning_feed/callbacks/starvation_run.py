"""One run of a Trainer, measured from its start to its end."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original, RunStage
from lightning_feed.callbacks.prefetch import HAND_OUT, LOOK_AHEAD
from lightning_feed.callbacks.starvation_facts import facts_of, inner_loaders, prefetch_active, time_left, with_search
from lightning_feed.load.streams import RepeatedBatches
from lightning_feed.measure.cpu_time import OtherPrograms, own_clock
from lightning_feed.measure.facts import batches_ahead
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.hook_times import Calls, HookTimes, tap_profiler
from lightning_feed.measure.loop import MeasuredLoop
from lightning_feed.measure.measurements import HookTime, LoopFacts, Measurements, TrainerFacts
from lightning_feed.measure.nvml import NvmlSampler
from lightning_feed.measure.ranks import RankExchange, open_rank_exchange
from lightning_feed.measure.stats import GpuStats, StarvationStats, loop_tags, to_tags
from lightning_feed.measure.step_meter import BACKWARD, FORWARD, OPTIMIZER, host_clock, open_ring
from lightning_feed.measure.wall import Part, WallClock, WallStats

_PART: dict[RunStage, Part] = {"fit": "epoch starts", "validate": "validation", "test": "test", "predict": "predict"}
"""The part of wall time in which each stage's loop begins."""


class _Loops:
    """The measured loops of a run, which also drive its wall clock: the main loop, and the validation within a fit.

    One of them is :attr:`now`. While a validation runs, the main loop is paused, but its training step stays open.

    Args:
        trainer: the Trainer.
        guard: the callback's guard.
        stage: the stage whose loop is the main loop.
        wall: the clock of the whole run.
        also_undo: called with each function to call at the end of the run.

    Attributes:
        wall: as above.
        main: the measured loop of ``stage``.
        now: the loop that runs now: the main loop, or a fit's validation.
        validation: the loop of a fit's validation; None before the first one.
    """

    def __init__(
        self,
        trainer: AnyTrainer,
        guard: Guard,
        stage: RunStage,
        wall: WallClock,
        also_undo: Callable[[Callable[[], object]], object],
    ) -> None:
        self._trainer = trainer
        self._guard = guard
        self._stage = stage
        self._also_undo = also_undo
        self.wall = wall
        self.main = self._make(stage)
        self.now = self.main
        self.validation: MeasuredLoop | None = None
        self._validation_since: int | None = None
        """The host's clock when the current validation began; None outside a validation."""

    def _make(self, stage: RunStage) -> MeasuredLoop:
        loop = MeasuredLoop(
            facts_of(self._trainer, self._guard, stage),
            partial(_host.loop_iterators, self._trainer, stage),
            queue=batches_ahead(inner_loaders(self._trainer, stage)),
            ring=open_ring(self._trainer.strategy.root_device),
            names=_host.loader_names(self._trainer, stage) if stage != "fit" else (),
        )
        self._also_undo(loop.loaders.close)
        self._also_undo(loop.drop_sample)
        return loop

    def begin(self, loop: MeasuredLoop, stage: RunStage, since: int | None = None) -> None:
        """Begin a loop, at ``since`` by the host's clock, or now if None."""
        loop.begins(facts_of(self._trainer, self._guard, stage, before=loop.facts), since)

    def restart(self) -> None:
        """Measure the main loop afresh: its loader has changed."""
        self.main.drop_sample()
        self.main.loaders.close()
        self.main = self._make(self._stage)
        self.now = self.main

    def validation_comes(self) -> None:
        """Note that Lightning iterates the validation loaders next."""
        if self.now is self.main:
            self.main.meter.close_step()
            self.main.drop_sample()
            self.wall.enter("validation")
            self.main.cpu.pause()
            self._validation_since = host_clock()

    def validation_began(self) -> None:
        """Begin a validation within a fit: measure its own steps, and leave out the training step around it."""
        if self._validation_since is None:
            self.validation_comes()
        self.main.leave_out_step()
        if self.validation is None:
            self.validation = self._make("validate")
        self.now = self.validation
        self.begin(self.now, "validate", self._validation_since)

    def validation_ended(self) -> None:
        """End a validation. Does nothing after a validation without batches, which never began."""
        if self._validation_since is not None:
            self.wall.leave()
            self.now.drop_sample()
            self.main.cpu.go_on()
            self.now = self.main
            self._validation_since = None

    def fetch_began(self) -> None:
        """Note that a loop requests a batch. If it is the main loop, a validation has ended."""
        if self.now is self.main:
            self.validation_ended()
        self.now.fetch_began()

    def fetch_ended(self) -> None:
        """Note that the batch has arrived."""
        self.now.fetch_ended()
        if self.wall.part == "epoch starts":
            self.wall.go_on("train")


class StarvationRun:
    """The clocks and taps of one run. :meth:`start` installs the taps in the Trainer.

    Args:
        trainer: the Trainer that fits, validates, tests or predicts.
        guard: the callback's guard, around the functions that the loop calls.
        wall: the clock of the whole run, which may have started earlier; None for a new clock.
        stage: the stage whose loop is measured. A fit also measures its validation's loop.

    Attributes:
        loops: the loops that are measured.
        hooks: the times of hooks between the steps.
        ranks: the exchange of step times between ranks; None if there is none.
        nvml: reads the GPU's figures until the run ends; None if they are not read.
        repeats: compares the first batches of a stream's workers; None if they need no comparison.
        cut_short: (batches received, batches expected) of an epoch that ended before its length; None if none did.
    """

    def __init__(
        self, trainer: AnyTrainer, *, guard: Guard, wall: WallClock | None = None, stage: RunStage = "fit"
    ) -> None:
        self.trainer = trainer
        self.guard = guard
        self.stage = stage
        self._undo = ExitStack()  # calls all its callbacks, even if one fails
        self.also_undo = self._undo.callback
        self.loops = _Loops(trainer, guard, stage, wall or WallClock(), self.also_undo)
        self.hooks = HookTimes(lambda: self.loops.now.meter.between_steps, own_clock, measure=guard.measure)
        self.ranks: RankExchange | None = None
        self.nvml: NvmlSampler | None = None
        self.repeats: RepeatedBatches | None = None
        self.cut_short: tuple[int, int] | None = None

    def start(self) -> None:
        """Start measuring."""
        if self.stage == "fit":
            self.ranks = open_rank_exchange(warm_up=self.main.warm_up)
        self.also_undo(self._tap())
        self.also_undo(_host.Wrap(self.trainer, "save_checkpoint", self._save_checkpoint).undo)
        self.loops.wall.go_on(_PART[self.stage])
        if self.stage != "fit":
            self.loops.begin(self.main, self.stage)

    @property
    def main(self) -> MeasuredLoop:
        """The measured loop of :attr:`stage`."""
        return self.loops.main

    @property
    def stretch_of_steps(self) -> int | None:
        """Number of the present stretch of steps without a break; None outside of them, and in the warm-up.

        Read by the thread of :attr:`nvml`.
        """
        return self.loops.wall.changes if self.loops.wall.part == "train" and self.main.is_settled else None

    @property
    def finished(self) -> int:
        """Number of steps that ended."""
        return self.main.meter.finished

    @property
    def wall(self) -> WallStats:
        """The parts of the wall time so far."""
        return self.loops.wall.stats()

    # --- what the loop does -------------------------------------------------------------------------------------------

    def epoch_began(self) -> None:
        """Begin an epoch, whose first batch is measured separately."""
        self.loops.wall.go_on("epoch starts")
        self.fold(self.main)
        self.loops.begin(self.main, self.stage)
        self.hooks.leave_out_step()
        if self.repeats is None:
            self._watch_for_repeats()

    def _watch_for_repeats(self) -> None:
        """Compare a stream's first batches before their transfer: all workers may yield the same samples."""
        loader = self.main.facts.loader
        workers = loader.num_workers or 0
        undivided = loader.map_style is False and not loader.shards_by_worker and loader.count == 1
        if workers < 2 or not undivided or loader.in_order is False or loader.workers != "process":
            return
        repeats = RepeatedBatches(workers)
        self.repeats = repeats

        def see(original: Original, batch: object, *arguments: object, **named: object) -> object:
            if self.loops.now is self.main:
                self.guard.measure(repeats.see, batch)
            return original(batch, *arguments, **named)

        self.also_undo(_host.Wrap(self.trainer.strategy, "batch_to_device", see).undo)

    def leave_out_step(self) -> None:
        """Do not count the current training step: it contains work other than training."""
        self.main.leave_out_step()
        self.hooks.leave_out_step()

    @contextmanager
    def trials(self) -> Iterator[None]:
        """Count the time of trials, for which training pauses, neither as training nor in any step."""
        self.leave_out_step()  # ends the step before, also on the device
        self.loops.wall.enter("trials")
        self.main.cpu.pause()
        self.main.loaders.pause()
        try:
            yield
        finally:
            self.loops.wall.leave()
            self.main.cpu.go_on()
            self.main.loaders.go_on()
            if self.nvml is not None:
                self.nvml.take()  # the device was idle
            self.leave_out_step()  # the main loop may be another one since then

    def restart(self) -> None:
        """Measure the main loop afresh: its loader has changed."""
        self.loops.restart()
        if self.nvml is not None:
            self.nvml.forget_steps()
        self.hooks.restart()

    def validation_began(self) -> None:
        """Begin a validation within a fit: measure its own steps, and leave out the training step around it."""
        self.loops.validation_began()
        self.hooks.leave_out_step()

    def batch_came(self, batch: object, dataloader_idx: int = 0) -> None:
        """Note which loader a batch comes from, and record number and size of the first batch's tensors."""
        loop = self.loops.now
        loop.meter.source = dataloader_idx
        if not loop.batch_seen:
            self.guard.attempt("inspect a batch", loop.look_at, batch)

    def step_ended(self) -> None:
        """Limit the memory used, detect the end of the warm-up, and time the hooks now and then."""
        loop = self.loops.now
        if loop is self.main:
            self.hooks.step_ended(loop.meter.finished)
        if loop.step_ended():
            self.fold(loop)

    def fold(self, loop: MeasuredLoop) -> None:
        """Replace the records of single steps by sums, after giving training steps to the exchange between ranks."""
        loop.meter.catch_up()
        if self.ranks is not None and loop is self.main:
            self.ranks.add(loop.ledger.fresh)
        loop.ledger.fold()

    def _save_checkpoint(self, original: Original, *args: object, **kwargs: object) -> object:
        self.guard.measure(self.loops.wall.enter, "checkpoints")
        try:
            return original(*args, **kwargs)
        finally:
            self.guard.measure(self.loops.wall.leave)

    # --- what the loop announces --------------------------------------------------------------------------------------

    def _tap(self) -> Callable[[], None]:
        """Tap the profiler actions of :func:`_host.actions` and of PrefetchCallback. Returns a function to undo it."""
        tap = self.guard.tap
        begins: Calls = {
            "fetch": self.loops.fetch_began,
            "step": lambda: self.loops.now.step_began(),
            "forward": lambda: self.main.meter.part_began(FORWARD),
            "backward": lambda: self.main.meter.part_began(BACKWARD),
            "optimizer": lambda: self.main.meter.part_began(OPTIMIZER),
            "validation": self.loops.validation_comes,
            "epoch_end": lambda: self.loops.now.meter.close_step(),
        }
        ends: Calls = {
            "fetch": self.loops.fetch_ended,
            "to_device": lambda: self.loops.now.meter.arrived(),
            "step": lambda: self.loops.now.meter.step_ended(),
            "forward": lambda: self.main.meter.part_ended(),
            "backward": lambda: self.main.meter.part_ended(),
            "optimizer": lambda: self.main.meter.part_ended(),
            "validation_end": self.loops.validation_ended,
            "epoch": self._epoch_ended,
        }
        starts: Calls = {LOOK_AHEAD: tap(lambda: self.loops.now.meter.look_ahead_began())}
        stops: Calls = {
            LOOK_AHEAD: tap(lambda: self.loops.now.meter.look_ahead_ended()),
            HAND_OUT: tap(lambda: self.loops.now.handed_out()),
        }
        stages: tuple[RunStage, ...] = ("validate", self.stage)
        for stage in stages:
            for part, name in _host.actions(self.trainer, stage).items():
                if part in begins:
                    starts[name] = tap(begins[part])
                if part in ends:
                    stops[name] = tap(ends[part])
        nothing = _host.profiler_does_nothing(self.trainer)
        return tap_profiler(_host.profiler_of(self.trainer), starts, stops, does_nothing=nothing, hooks=self.hooks)

    def _epoch_ended(self) -> None:
        self.main.meter.close_step()
        self.main.drop_sample()
        self.loops.wall.go_on("rest")
        if self.stage == "fit" and sys.exc_info()[0] is None:  # not if Ctrl-C or an error ends the epoch
            self.cut_short = _host.epoch_cut_short(self.trainer) or self.cut_short

    # --- its end ------------------------------------------------------------------------------------------------------

    def time_logger(self, logger: object) -> None:
        """Measure the time of a logger's calls between the steps. Reports list these calls by the logger's class."""
        for name in ("log_metrics", "save"):
            if callable(getattr(logger, name, None)):
                around = partial(self.hooks.call, f"logger {type(logger).__name__}.{name}")
                self.also_undo(_host.Wrap(logger, name, around).undo)

    def close(self) -> None:
        """Remove everything from the Trainer. The measurements stay."""
        if self.nvml is not None:
            self.also_undo(self.nvml.stop)
        self._undo.close()


class RunFigures:
    """The figures of a run, read from its clocks.

    Args:
        run: the run.

    Attributes:
        last: the figures of the last closed window; None before one was closed.
    """

    def __init__(self, run: StarvationRun) -> None:
        self.run = run
        self.last: StarvationStats | None = None
        self._cpus = OtherPrograms() if run.trainer.world_size == 1 else None
        self._final: Measurements | None = None

    def close_window(self) -> dict[str, float]:
        """Return the figures since the last window, by tag, and begin a new window. Call this on all ranks together."""
        loop = self.run.main
        loop.meter.catch_up()  # also ends the step: logging, which follows, belongs to the next one
        ranks = None
        if self.run.ranks is not None:
            self.run.ranks.send(loop.ledger.fresh)
            ranks = self.run.ranks.take()
        self.last = loop.ledger.close_window(lost=loop.meter.lost, prefetch_active=prefetch_active(self.run.trainer))
        loop.facts = replace(loop.facts, syncs=self._syncs(loop.facts))
        gpu: GpuStats | None = None
        if self.run.nvml is not None:
            gpu = self.run.nvml.take()
        return to_tags(self.last, gpu, loop.loaders.take(), ranks)

    def loop_tags(self) -> dict[str, float]:
        """Return the figures of the validation, test or prediction so far, by tag. For a fit, those of its
        validation."""
        if self.run.stage != "fit":
            return _tags_of(self.run.main, self.run.stage)
        if self.run.loops.validation is None:
            return {}
        return _tags_of(self.run.loops.validation, "validate")

    def measurements(self) -> Measurements:
        """Return all measurements so far, without the warm-up. They no longer change once the run is over."""
        if self._final is not None:
            return self._final
        validation = self.run.loops.validation
        self.run.fold(self.run.main)
        if validation is not None:
            self.run.fold(validation)
        measured = self.run.main.measurements(prefetch_active=prefetch_active(self.run.trainer))
        return Measurements(
            stats=measured.stats,
            facts=self._with_facts_of_the_run(measured.facts, measured.stats),
            loaders=measured.loaders,
            hooks=self.run.guard.attempt("tell the slowest hooks", self._slow_hooks) or (),
            ranks=None if self.run.ranks is None else self.run.ranks.total(),
            by_loader=measured.by_loader,
            wall=self.run.wall,
            device_busy_pct=self._device_busy_pct(measured.facts),
            timeline=self.run.main.ledger.timeline.timeline(),
            validation=validation.measurements(prefetch_active=None) if validation is not None else None,
        )

    def _device_busy_pct(self, facts: LoopFacts) -> float | None:
        """Return the device's utilization in the measured steps; None if these are only some of the epochs."""
        if self.run.nvml is None or facts.waited_ms is not None:
            return None
        return self.run.nvml.steady_util_pct()

    def _with_facts_of_the_run(self, facts: LoopFacts, stats: StarvationStats) -> LoopFacts:
        """Add the facts that become known only while the loop runs."""
        repeated = None if self.run.repeats is None else self.run.repeats.repeated
        return replace(
            facts,
            loader=replace(facts.loader, repeated=repeated),
            trainer=self._trainer_facts(facts.trainer, stats),
            others_cpu_pct=None if self._cpus is None else self._cpus.others_pct(facts.usable_cpus),
            syncs=self._syncs(self.run.main.facts),
            cut_short=self.run.cut_short,
        )

    def _trainer_facts(self, facts: TrainerFacts, stats: StarvationStats) -> TrainerFacts:
        """Return the facts about the Trainer, with those that change while it runs."""
        if self.run.stage != "fit":
            return facts
        left_s = time_left(self.run.trainer, stats, self.run.wall).seconds
        facts = self.run.guard.attempt("read results of trials", with_search, facts, self.run.trainer) or facts
        return replace(facts, left_s=left_s if math.isfinite(left_s) else None)

    def _slow_hooks(self) -> tuple[HookTime, ...]:
        return tuple(hook for hook in self.run.hooks.result() if not _host.is_empty_hook(self.run.trainer, hook.name))

    def _syncs(self, facts: LoopFacts) -> tuple[str, ...]:
        """Return the names of all synchronisations found so far.

        A synchronisation by a metric is found only after the metric was first logged to the progress bar.
        """
        return tuple(sorted({*facts.syncs, *_host.known_syncs(self.run.trainer)}))

    def end(self) -> None:
        """Stop measuring: read the device timings that are still outstanding, and the last figures of other ranks."""
        self.run.main.meter.end()
        if self.run.loops.validation is not None:
            self.run.loops.validation.meter.end()
        if self.last is None:
            self.close_window()
        self.run.fold(self.run.main)
        if self.run.ranks is not None:
            self.run.ranks.finish()
        self._final = self.measurements()


def _tags_of(loop: MeasuredLoop, stage: RunStage) -> dict[str, float]:
    loop.meter.catch_up()
    stats = loop.ledger.total(prefetch_active=None, lost=loop.meter.lost)
    return loop_tags(stage, stats, loop.by_loader())
