"""One run of a Trainer, measured from its start to its end."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original, Stage
from lightning_feed.callbacks.prefetch import HAND_OUT, LOOK_AHEAD
from lightning_feed.callbacks.starvation_facts import facts_of, inner_loaders, prefetch_active, time_left, was_tuned
from lightning_feed.load.streams import RepeatedBatches
from lightning_feed.measure.cpu_time import CpuShare, own_clock
from lightning_feed.measure.facts import batches_ahead
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.hook_times import Calls, HookTimes, tap_profiler
from lightning_feed.measure.loop import MeasuredLoop
from lightning_feed.measure.measurements import HookTime, LoopFacts, Measurements, TrainerFacts
from lightning_feed.measure.nvml import NvmlSampler
from lightning_feed.measure.ranks import RankExchange, open_rank_exchange
from lightning_feed.measure.stats import GpuStats, RankStats, StarvationStats, loop_tags, to_tags
from lightning_feed.measure.step_meter import BACKWARD, FORWARD, OPTIMIZER, host_clock, open_ring
from lightning_feed.measure.wall import Part, WallClock, WallStats

_PART: dict[Stage, Part] = {"fit": "epoch starts", "validate": "validation", "test": "test", "predict": "predict"}
"""The part of wall time in which each stage's loop begins."""


class StarvationRun:
    """The clocks and taps of one run, and its measurements so far. :meth:`start` installs the taps in the Trainer.

    Args:
        trainer: the Trainer that fits, validates, tests or predicts.
        window_steps: steps in a window, over which figures are logged; 0 for no windows.
        guard: the callback's guard, around the functions that the loop calls.
        wall: the clock of the whole run, which may have started earlier; None for a new clock.
        stage: the stage whose loop is measured. A fit also measures its validation's loop.

    Attributes:
        last: the figures of the last closed window; None before one was closed.
        logged_step: the number of the step at which that window was closed.
        nvml: reads the GPU's figures until the run ends; None if they are not read.
        main: the measured loop of ``stage``.
    """

    def __init__(
        self,
        trainer: AnyTrainer,
        *,
        window_steps: int,
        guard: Guard,
        wall: WallClock | None = None,
        stage: Stage = "fit",
    ) -> None:
        self._trainer = trainer
        self.window_steps = window_steps
        self._guard = guard
        self.stage = stage
        self.last: StarvationStats | None = None
        self.logged_step = -1
        self.nvml: NvmlSampler | None = None
        self._wall = wall or WallClock()
        self._undo = ExitStack()  # calls all its callbacks, even if one fails
        self.also_undo = self._undo.callback
        self.main = self._make_loop(stage)
        self._current = self.main
        """The loop that runs now: the main loop, or a fit's validation."""
        self._validation: MeasuredLoop | None = None
        self._validation_since: int | None = None
        """The host's clock when the current validation began; None outside a validation."""
        self._hooks = HookTimes(lambda: self._current.meter.between_steps, own_clock, measure=guard.measure)
        self._ranks: RankExchange | None = None
        self._rank_total: RankStats | None = None
        self._cpus = CpuShare() if trainer.world_size == 1 else None
        self._final: Measurements | None = None
        self._cut_short: tuple[int, int] | None = None
        """(batches received, batches expected) of an epoch that ended before its length; None if none did."""
        self._repeats: RepeatedBatches | None = None

    def start(self) -> None:
        """Start measuring."""
        if self.stage == "fit":
            self._ranks = open_rank_exchange(warm_up=self.main.warm_up)
        self.also_undo(self._stop_nvml)
        self.also_undo(self._tap())
        self.also_undo(_host.Wrap(self._trainer, "save_checkpoint", self._save_checkpoint).undo)
        self._wall.go_on(_PART[self.stage])
        if self.stage != "fit":
            self._begin(self.main, self.stage)

    @property
    def sees_device(self) -> bool:
        """True if times come from the clock of the device that computes; False if from the host's clock instead."""
        return self.main.ledger.trusted_clock

    @property
    def stretch_of_steps(self) -> int | None:
        """Number of the present stretch of steps without a break; None outside of them, and in the warm-up.

        Read by the thread of :attr:`nvml`.
        """
        return self._wall.changes if self._wall.part == "train" and self.main.is_settled else None

    def _stop_nvml(self) -> None:
        if self.nvml is not None:
            self.nvml.stop()

    def _make_loop(self, stage: Stage) -> MeasuredLoop:
        loop = MeasuredLoop(
            facts_of(self._trainer, self._guard, stage),
            partial(_host.loop_iterators, self._trainer, stage),
            queue=batches_ahead(inner_loaders(self._trainer, stage)),
            ring=open_ring(self._trainer.strategy.root_device),
            names=_host.loader_names(self._trainer, stage) if stage != "fit" else (),
        )
        self.also_undo(loop.loaders.close)
        self.also_undo(loop.drop_sample)
        return loop

    def _begin(self, loop: MeasuredLoop, stage: Stage, since: int | None = None) -> None:
        loop.begins(facts_of(self._trainer, self._guard, stage, before=loop.facts), since)

    @property
    def finished(self) -> int:
        """Number of steps that ended."""
        return self.main.meter.finished

    @property
    def wall(self) -> WallStats:
        """The parts of the wall time so far."""
        return self._wall.stats()

    # --- what the loop does -------------------------------------------------------------------------------------------

    def epoch_began(self) -> None:
        """Begin an epoch, whose first batch is measured separately."""
        self._wall.go_on("epoch starts")
        self._fold(self.main)
        self._begin(self.main, self.stage)
        self._hooks.leave_out_step()
        if self._repeats is None:
            self._watch_for_repeats()

    def _watch_for_repeats(self) -> None:
        """Compare a stream's first batches before their transfer: all workers may yield the same samples."""
        loader = self.main.facts.loader
        workers = loader.num_workers or 0
        undivided = loader.map_style is False and not loader.shards_by_worker and loader.count == 1
        if workers < 2 or not undivided or loader.in_order is False or loader.workers != "process":
            return
        repeats = RepeatedBatches(workers)
        self._repeats = repeats

        def see(original: Original, batch: object, *arguments: object, **named: object) -> object:
            if self._current is self.main:
                self._guard.measure(repeats.see, batch)
            return original(batch, *arguments, **named)

        self.also_undo(_host.Wrap(self._trainer.strategy, "batch_to_device", see).undo)

    def leave_out_step(self) -> None:
        """Do not count the current training step: it contains work other than training."""
        self.main.leave_out_step()
        self._hooks.leave_out_step()

    @contextmanager
    def trials(self) -> Iterator[None]:
        """Count the time of trials, for which training pauses, neither as training nor in any step."""
        self.leave_out_step()  # ends the step before, also on the device
        self._wall.enter("trials")
        self.main.cpu.pause()
        self.main.loaders.pause()
        try:
            yield
        finally:
            self._wall.leave()
            self.main.cpu.go_on()
            self.main.loaders.go_on()
            if self.nvml is not None:
                self.nvml.take()  # the device was idle
            self.leave_out_step()  # the main loop may be another one since then

    def restart(self) -> None:
        """Measure the main loop afresh: its loader has changed."""
        self.main.drop_sample()
        self.main.loaders.close()
        self.main = self._make_loop(self.stage)
        if self.nvml is not None:
            self.nvml.forget_steps()
        self._current = self.main
        self._hooks.restart()

    def _validation_comes(self) -> None:
        """Note that Lightning iterates the validation loaders next."""
        if self._current is self.main:
            self.main.meter.close_step()
            self.main.drop_sample()
            self._wall.enter("validation")
            self.main.cpu.pause()
            self._validation_since = host_clock()

    def validation_began(self) -> None:
        """Begin a validation within a fit: measure its own steps, and leave out the training step around it."""
        if self._validation_since is None:
            self._validation_comes()
        self.leave_out_step()
        if self._validation is None:
            self._validation = self._make_loop("validate")
        self._current = self._validation
        self._begin(self._current, "validate", self._validation_since)

    def _validation_ended(self) -> None:
        """End a validation. Does nothing after a validation without batches, which never began."""
        if self._validation_since is not None:
            self._wall.leave()
            self.main.cpu.go_on()
            self._current = self.main
            self._validation_since = None

    def batch_came(self, batch: object, dataloader_idx: int = 0) -> None:
        """Note which loader a batch comes from, and record number and size of the first batch's tensors."""
        loop = self._current
        loop.meter.source = dataloader_idx
        if not loop.batch_seen:
            self._guard.attempt("inspect a batch", loop.look_at, batch)

    def step_ended(self) -> None:
        """Limit the memory used, detect the end of the warm-up, and time the hooks now and then."""
        loop = self._current
        if loop is self.main:
            self._hooks.step_ended(loop.meter.finished)
        if loop.step_ended():
            self._fold(loop)

    def _fold(self, loop: MeasuredLoop) -> None:
        """Replace the records of single steps by sums, after giving training steps to the exchange between ranks."""
        loop.meter.catch_up()
        if self._ranks is not None and loop is self.main:
            self._ranks.add(loop.ledger.fresh)
        loop.ledger.fold()

    def _save_checkpoint(self, original: Original, *args: object, **kwargs: object) -> object:
        self._guard.measure(self._wall.enter, "checkpoints")
        try:
            return original(*args, **kwargs)
        finally:
            self._guard.measure(self._wall.leave)

    # --- what the loop announces --------------------------------------------------------------------------------------

    def _tap(self) -> Callable[[], None]:
        """Tap the profiler actions of :func:`_host.actions` and of PrefetchCallback. Returns a function to undo it."""
        tap = self._guard.tap
        begins: Calls = {
            "fetch": self._fetch_began,
            "step": lambda: self._current.meter.step_began(),
            "forward": lambda: self.main.meter.part_began(FORWARD),
            "backward": lambda: self.main.meter.part_began(BACKWARD),
            "optimizer": lambda: self.main.meter.part_began(OPTIMIZER),
            "validation": self._validation_comes,
            "epoch_end": lambda: self._current.meter.close_step(),
        }
        ends: Calls = {
            "fetch": self._fetch_ended,
            "to_device": lambda: self._current.meter.arrived(),
            "step": lambda: self._current.meter.step_ended(),
            "forward": self._part_ended,
            "backward": self._part_ended,
            "optimizer": self._part_ended,
            "validation_end": self._validation_ended,
            "epoch": self._epoch_ended,
        }
        starts: Calls = {LOOK_AHEAD: tap(lambda: self._current.meter.look_ahead_began())}
        stops: Calls = {
            LOOK_AHEAD: tap(lambda: self._current.meter.look_ahead_ended()),
            HAND_OUT: tap(lambda: self._current.handed_out()),
        }
        stages: tuple[Stage, ...] = ("validate", self.stage)
        for stage in stages:
            for part, name in _host.actions(self._trainer, stage).items():
                if part in begins:
                    starts[name] = tap(begins[part])
                if part in ends:
                    stops[name] = tap(ends[part])
        nothing = _host.profiler_does_nothing(self._trainer)
        return tap_profiler(_host.profiler_of(self._trainer), starts, stops, does_nothing=nothing, hooks=self._hooks)

    def _part_ended(self) -> None:
        self.main.meter.part_ended()

    def _epoch_ended(self) -> None:
        self.main.meter.close_step()
        self.main.drop_sample()
        self._wall.go_on("rest")
        if self.stage == "fit" and sys.exc_info()[0] is None:  # not if Ctrl-C or an error ends the epoch
            self._cut_short = _host.epoch_cut_short(self._trainer) or self._cut_short

    def _fetch_began(self) -> None:
        if self._validation_since is not None and self._current is self.main:
            self._validation_ended()
        self._current.fetch_began()

    def _fetch_ended(self) -> None:
        self._current.fetch_ended()
        if self._wall.part == "epoch starts":
            self._wall.go_on("train")

    # --- figures ------------------------------------------------------------------------------------------------------

    def close_window(self) -> dict[str, float]:
        """Return the figures since the last window, by tag, and begin a new window. Call this on all ranks together."""
        loop = self.main
        loop.meter.catch_up()  # also ends the step: logging, which follows, belongs to the next one
        ranks = None
        if self._ranks is not None:
            self._ranks.send(loop.ledger.fresh)
            ranks = self._ranks.take()
        self.last = loop.ledger.close_window(lost=loop.meter.lost, prefetch_active=prefetch_active(self._trainer))
        loop.facts = replace(loop.facts, syncs=self._syncs(loop.facts))
        gpu: GpuStats | None = None
        if self.nvml is not None:
            gpu = self.nvml.take()
        return to_tags(self.last, gpu, loop.loaders.take(), ranks)

    def loop_tags(self) -> dict[str, float]:
        """Figures of the validation, test or prediction so far, by tag. For a fit, those of its validation."""
        if self.stage != "fit":
            return _tags_of(self.main, self.stage)
        if self._validation is None:
            return {}
        return _tags_of(self._validation, "validate")

    def measurements(self) -> Measurements:
        """All measurements so far, without the warm-up. They no longer change once the run is over."""
        if self._final is not None:
            return self._final
        validation = self._validation
        self._fold(self.main)
        if validation is not None:
            self._fold(validation)
        measured = self.main.measurements(prefetch_active=prefetch_active(self._trainer))
        return Measurements(
            stats=measured.stats,
            facts=self._with_facts_of_the_run(measured.facts, measured.stats),
            loaders=measured.loaders,
            hooks=self._guard.attempt("tell the slowest hooks", self._slow_hooks) or (),
            ranks=self._ranks_so_far(),
            by_loader=measured.by_loader,
            wall=self._wall.stats(),
            device_busy_pct=self._device_busy_pct(measured.facts),
            timeline=self.main.ledger.timeline.timeline(),
            validation=validation.measurements(prefetch_active=None) if validation is not None else None,
        )

    def _device_busy_pct(self, facts: LoopFacts) -> float | None:
        """The device's utilization in the measured steps; None if these are only some of the epochs."""
        if self.nvml is None or facts.waited_ms is not None:
            return None
        return self.nvml.steady_util_pct()

    def _with_facts_of_the_run(self, facts: LoopFacts, stats: StarvationStats) -> LoopFacts:
        """Add the facts that become known only while the loop runs."""
        repeated = None if self._repeats is None else self._repeats.repeated
        return replace(
            facts,
            loader=replace(facts.loader, repeated=repeated),
            trainer=self._trainer_facts(facts.trainer, stats),
            others_cpu_pct=None if self._cpus is None else self._cpus.others_pct(facts.usable_cpus),
            syncs=self._syncs(self.main.facts),
            cut_short=self._cut_short,
        )

    def _trainer_facts(self, facts: TrainerFacts, stats: StarvationStats) -> TrainerFacts:
        """The facts about the Trainer, with those that change while it runs."""
        if self.stage != "fit":
            return facts
        left_s = time_left(self._trainer, stats, self.wall).seconds
        return replace(
            facts,
            tuned=self._guard.attempt("read results of trials", was_tuned, self._trainer),
            left_s=left_s if math.isfinite(left_s) else None,
        )

    def _ranks_so_far(self) -> RankStats | None:
        if self._rank_total is None and self._ranks is not None:
            return self._ranks.total()
        return self._rank_total

    def _slow_hooks(self) -> tuple[HookTime, ...]:
        return tuple(hook for hook in self._hooks.result() if not _host.is_empty_hook(self._trainer, hook.name))

    def _syncs(self, facts: LoopFacts) -> tuple[str, ...]:
        """Names of all synchronisations found so far.

        A synchronisation by a metric is found only after the metric was first logged to the progress bar.
        """
        return tuple(sorted({*facts.syncs, *_host.known_syncs(self._trainer)}))

    # --- its end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Stop measuring: read the device timings that are still outstanding, and the last figures of other ranks."""
        self.main.meter.end()
        if self._validation is not None:
            self._validation.meter.end()
        if self.last is None:
            self.close_window()
        if self._ranks is not None:
            self._rank_total = self._ranks.finish(self.main.ledger.fresh)
            self._ranks = None
        self._final = self.measurements()

    def time_logger(self, logger: object) -> None:
        """Measure the time of a logger's calls between the steps. Reports list these calls by the logger's class."""
        for name in ("log_metrics", "save"):
            if callable(getattr(logger, name, None)):
                around = partial(self._hooks.call, f"logger {type(logger).__name__}.{name}")
                self.also_undo(_host.Wrap(logger, name, around).undo)

    def close(self) -> None:
        """Remove everything from the Trainer. The measurements stay."""
        self._undo.close()


def _tags_of(loop: MeasuredLoop, stage: Stage) -> dict[str, float]:
    loop.meter.catch_up()
    stats = loop.ledger.total(prefetch_active=None, lost=loop.meter.lost)
    return loop_tags(stage, stats, loop.by_loader())
