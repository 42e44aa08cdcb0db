"""One run of a Trainer, measured from its start to its end."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_feed import _host
from lightning_feed.archive.shared_cache import CacheStats
from lightning_feed.callbacks.prefetch import HAND_OUT, LOOK_AHEAD, Stage
from lightning_feed.callbacks.starvation_report import facts_of, prefetch_active, queue_of
from lightning_feed.watch.clocks import host_clock, open_ring
from lightning_feed.watch.cpu import CpuShare
from lightning_feed.watch.facts import with_batch
from lightning_feed.watch.guard import Guard
from lightning_feed.watch.hook_times import Calls, HookTimes, tap_profiler
from lightning_feed.watch.loop import MeasuredLoop
from lightning_feed.watch.nvml import NvmlSampler
from lightning_feed.watch.ranks import open_rank_exchange
from lightning_feed.watch.stats import LoaderStats, RankStats, StarvationStats, loop_tags, to_tags
from lightning_feed.watch.step_meter import BACKWARD, FORWARD, OPTIMIZER
from lightning_feed.watch.verdict.diagnosis import Measurements
from lightning_feed.watch.wall import Part, WallClock

_PART: dict[Stage, Part] = {"fit": "epoch starts", "validate": "validation", "test": "test", "predict": "predict"}
"""What of the wall time the loop of a stage begins with."""


class StarvationRun:
    """The clocks and taps of one run, and what they have given so far.

    Args:
        trainer: that fits, validates, tests or predicts.
        every: steps between two windows.
        guard: of the callback, around what the loop calls here by itself.
        wall: the clock of the whole run, which may have begun before.
        stage: whose loop is measured. A fit has that of its validation beside it.
    """

    def __init__(
        self, trainer: Any, *, every: int, guard: Guard, wall: WallClock | None = None, stage: Stage = "fit"
    ) -> None:
        self.every = every
        self.last: StarvationStats | None = None
        """The last window that was closed."""
        self.logged_step = -1
        self._trainer, self._guard, self.stage = trainer, guard, stage
        self.nvml: NvmlSampler | None = None
        """Reads the GPU beside it, and is stopped with it; None for no GPU figures."""
        self._wall = wall or WallClock()
        self._main = self._now = self._make_loop(stage)
        self._validation: MeasuredLoop | None = None
        self._validation_since: int | None = None
        self._hooks = HookTimes(lambda: self._now.meter.between_steps, measure=guard.measure)
        self._ranks = open_rank_exchange(warm_up=self._main.warm_up) if stage == "fit" else None
        self._rank_total: RankStats | None = None
        self._cpus = CpuShare() if trainer.world_size == 1 else None
        self._final: Measurements | None = None
        self._lost_before = 0
        self._cache_began = self._cache_before = _cache_stats(trainer)
        self._undo = ExitStack()  # calls each, and the others where one fails
        self._undo.callback(self._stop_nvml)
        self._undo.callback(self._main.loaders.close)
        self._undo.callback(self._tap())
        self._undo.callback(_host.Wrap(trainer, "save_checkpoint", self._save_checkpoint).undo)
        self._wall.go_on(_PART[stage])
        if stage != "fit":
            self._begin(self._main, stage)

    def _make_loop(self, stage: Stage) -> MeasuredLoop:
        device = self._trainer.strategy.root_device
        ring = open_ring(device)
        self.sees_device = ring is not None or device.type == "cpu"
        """Whether the clock is that of what computes; else it is the host's beside a device."""
        return MeasuredLoop(
            facts_of(self._trainer, self._guard, stage),
            partial(_host.loop_iterators, self._trainer, stage),
            queue=queue_of(self._trainer, stage),
            ring=ring,
            names=_host.loader_names(self._trainer, stage) if stage != "fit" else (),
        )

    def _begin(self, loop: MeasuredLoop, stage: Stage, since: int | None = None) -> None:
        loop.begins(facts_of(self._trainer, self._guard, stage, before=loop.facts), since)

    @property
    def finished(self) -> int:
        """Steps that ended."""
        return self._main.meter.finished

    # --- what the loop does -------------------------------------------------------------------------------------------

    def epoch_began(self) -> None:
        """The first batch of an epoch has a figure of its own."""
        self._wall.go_on("epoch starts")
        self._begin(self._main, self.stage)
        self._hooks.leave_out_step()

    def leave_out_step(self) -> None:
        """Do not count the present training step: something that is not training lies in it."""
        self._main.meter.leave_out_step()
        self._hooks.leave_out_step()

    def _validation_comes(self) -> None:
        """Its loaders are iterated next."""
        if self._now is self._main:
            self._wall.enter("validation")
            self._main.cpu.pause()
            self._validation_since = host_clock()

    def validation_began(self) -> None:
        """A validation within a fit: leave out the training step in which it lies, and measure its own."""
        if self._validation_since is None:
            self._validation_comes()
        self.leave_out_step()
        if self._validation is None:
            self._validation = self._make_loop("validate")
            self._undo.callback(self._validation.loaders.close)
        self._now = self._validation
        self._begin(self._now, "validate", self._validation_since)

    def _validation_ended(self) -> None:
        """Or, without batches, never began."""
        if self._validation_since is not None:
            self._wall.leave()
            self._main.cpu.go_on()
            self._now, self._validation_since = self._main, None

    def batch_came(self, batch: Any, dataloader_idx: int = 0) -> None:
        """Note whose batch it is, and look at the first."""
        loop = self._now
        loop.meter.source = dataloader_idx
        if not loop.batch_seen:
            loop.batch_seen = True
            seen = self._guard.attempt("tell what a batch is made of", with_batch, loop.facts, batch)
            loop.facts = seen or loop.facts

    def step_ended(self) -> None:
        """Keep what is held in memory bounded, notice the end of the warm-up, and now and then time the hooks."""
        loop = self._now
        if loop is self._main and loop.meter.finished >= self._hooks.next_look:
            self._hooks.step(loop.meter.finished)
        if loop is self._main:
            self._hooks.count_step()
        if loop.step_ended():
            self._fold(loop)

    def _fold(self, loop: MeasuredLoop) -> None:
        """Sum up the steps held one by one; the other ranks are still to be told of those of training."""
        if self._ranks is not None and loop is self._main:
            self._ranks.add(loop.ledger.fresh)
        loop.ledger.fold()

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._guard.measure(self._wall.enter, "checkpoints")
        try:
            return original(*args, **kwargs)
        finally:
            self._guard.measure(self._wall.leave)

    def _tap(self) -> Callable[[], None]:
        def fetch_began() -> None:
            if self._now is self._main and self._validation_since is not None:
                self._validation_ended()
            self._now.fetch_began()

        def fetch_ended() -> None:
            self._now.fetch_ended()
            if self._wall.part == "epoch starts":
                self._wall.go_on("train")

        on_start: Calls = {LOOK_AHEAD: lambda: self._now.meter.look_ahead_began()}
        on_stop: Calls = {
            LOOK_AHEAD: lambda: self._now.meter.look_ahead_ended(),
            HAND_OUT: lambda: self._now.handed_out(),
        }
        for stage in (self.stage, "validate"):
            actions = _host.step_actions(self._trainer, stage)
            on_start |= {
                actions.fetch: fetch_began,
                actions.step: lambda: self._now.meter.step_began(),
            }
            on_stop |= {
                actions.fetch: fetch_ended,
                actions.to_device: lambda: self._now.meter.arrived(),
                actions.step: lambda: self._now.meter.step_ended(),
            }
        if self.stage == "fit":
            meter = self._main.meter
            parts = _host.step_actions(self._trainer, "fit").parts  # forward, backward, optimizer, where announced
            began: Calls = {
                name: partial(meter.part_began, part)
                for name, part in zip(parts, (FORWARD, BACKWARD, OPTIMIZER), strict=False)
            }
            ended: Calls = dict.fromkeys(parts, meter.part_ended)
            around = _host.run_actions(self._trainer)
            on_start |= began | {around.validation_begins: self._validation_comes}
            on_stop |= ended | {
                around.validation_ends: self._validation_ended,
                around.epoch: lambda: self._wall.go_on("rest"),
            }
        tap = self._guard.tap
        return tap_profiler(
            self._trainer.profiler,
            {name: tap(call) for name, call in on_start.items()},
            {name: tap(call) for name, call in on_stop.items()},
            does_nothing=_host.profiler_does_nothing(self._trainer),
            hooks=self._hooks,
        )

    # --- figures ------------------------------------------------------------------------------------------------------

    def close_window(self) -> dict[str, float]:
        """The figures since the last window by their tags, then a new window begins. All ranks do so together."""
        ranks = None
        if self._ranks is not None:
            self._ranks.send(self._main.ledger.fresh)
            ranks = self._ranks.take()
        loop = self._main
        lost = loop.meter.lost
        self.last = loop.ledger.close_window(
            lost=lost - self._lost_before, prefetch_active=prefetch_active(self._trainer)
        )
        self._lost_before = lost
        loop.facts = replace(loop.facts, syncs=self._syncs())
        cache, self._cache_before = self._cache_before, _cache_stats(self._trainer)
        loaders = replace(loop.loaders.take(), cache_hit_pct=_hit_pct(cache, self._cache_before))
        return to_tags(self.last, self.nvml.take() if self.nvml is not None else None, loaders, ranks)

    def loop_tags(self) -> dict[str, float]:
        """The figures of the validation, test or prediction so far, by their tags."""
        loop, stage = (self._validation, "validate") if self.stage == "fit" else (self._main, self.stage)
        if loop is None:
            return {}
        stats = loop.ledger.total(prefetch_active=None, lost=loop.meter.lost)
        return loop_tags(stage, stats, loop.by_loader())

    def measurements(self) -> Measurements:
        """All that was measured so far, without the warm-up; once the run is over, always the same."""
        if self._final is not None:
            return self._final
        main, validation = self._main, self._validation
        self._fold(main)
        found = main.measurements(prefetch_active=prefetch_active(self._trainer))
        loaders: LoaderStats = replace(
            found.loaders, cache_hit_pct=_hit_pct(self._cache_began, _cache_stats(self._trainer))
        )
        return Measurements(
            stats=found.stats,
            facts=replace(
                found.facts,
                syncs=self._syncs(),
                others_cpu_pct=self._cpus.others_pct(found.facts.usable_cpus) if self._cpus is not None else None,
            ),
            loaders=loaders,
            hooks=self._hooks.result(),
            ranks=self._rank_total or (self._ranks.total() if self._ranks is not None else None),
            by_loader=found.by_loader,
            wall=self._wall.stats(),
            validation=validation.measurements(prefetch_active=None) if validation is not None else None,
        )

    def _syncs(self) -> tuple[str, ...]:
        """Those that were seen at any time: a metric in the progress bar shows only once it was logged."""
        return tuple(sorted({*self._main.facts.syncs, *_host.known_syncs(self._trainer)}))

    # --- its end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The loop is over: read what the device and the other ranks have not told yet."""
        self._main.meter.end()
        if self._validation is not None:
            self._validation.meter.end()
        if self.last is None:
            self.close_window()
        elif self._ranks is not None:
            self._ranks.add(self._main.ledger.fresh)
        if self._ranks is not None:
            self._rank_total = self._ranks.finish()
            self._ranks = None
        self._final = self.measurements()

    def time_logger(self, logger: Any) -> None:
        """What its calls take between the steps is told by its name."""
        for name in ("log_metrics", "save"):
            if callable(getattr(logger, name, None)):
                wrap = _host.Wrap(logger, name, partial(self._hooks.call, f"logger {type(logger).__name__}.{name}"))
                self._undo.callback(wrap.undo)

    def also_undo(self, undo: Callable[[], object]) -> None:
        """Call this, too, when the run is closed."""
        self._undo.callback(undo)

    def close(self) -> None:
        """Take out what was put in. Figures can still be asked for, where they were before."""
        self._undo.close()

    def _stop_nvml(self) -> None:
        if self.nvml is not None:
            self.nvml.stop()


def _cache_stats(trainer: Any) -> CacheStats | None:
    """What our data module's caches have done. A user's own may mean anything by that name."""
    ours = getattr(trainer.datamodule, "_feed_facts", None) is not None
    return trainer.datamodule.cache_stats() if ours else None


def _hit_pct(before: CacheStats | None, after: CacheStats | None) -> float | None:
    if after is None:
        return None
    hits = after.hits - (before.hits if before is not None else 0)
    misses = after.misses - (before.misses if before is not None else 0)
    return 100 * hits / (hits + misses) if hits + misses else None
