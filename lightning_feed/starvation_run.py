"""What measures one fit, from its start to its end."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_feed import _host
from lightning_feed.archive.shared_cache import CacheStats
from lightning_feed.prefetch_callback import LOOK_AHEAD
from lightning_feed.starvation_facts import facts_of, prefetch_active, queue_of, with_batch
from lightning_feed.watch.clocks import open_ring
from lightning_feed.watch.guard import Guard
from lightning_feed.watch.hook_times import HookTimes
from lightning_feed.watch.loader_watch import LoaderWatch
from lightning_feed.watch.nvml import NvmlSampler
from lightning_feed.watch.profiler_tap import tap_profiler
from lightning_feed.watch.rank_exchange import open_rank_exchange
from lightning_feed.watch.stats import LoaderStats, RankStats, StarvationStats
from lightning_feed.watch.step_meter import StepMeter
from lightning_feed.watch.tags import to_tags
from lightning_feed.watch.verdict.diagnosis import Measurements
from lightning_feed.watch.windows import UNFOLDED_STEPS, WARM_UP_STEPS, Ledger

READ_EVERY_NS = 250_000_000
"""The kernel's counters of the workers are read four times a second at most, however often windows are logged."""

thread_clock = time.thread_time_ns  # bound here: programs, and Lightning's tests, patch `time`


class StarvationRun:
    """The clocks and taps of one fit, and what they have given so far.

    Args:
        trainer: that fits.
        every: steps between two windows.
        guard: of the callback, around what the loop calls here by itself.
    """

    def __init__(self, trainer: Any, *, every: int, guard: Guard) -> None:
        device = trainer.strategy.root_device
        ring = open_ring(device)
        self.sees_device = ring is not None or device.type == "cpu"
        """Whether the clock is that of what computes; else it is the host's beside a device."""
        queue = queue_of(trainer)
        self.every = every
        self.last: StarvationStats | None = None
        """The last window that was closed."""
        self.logged_step = -1
        self._trainer, self._guard = trainer, guard
        self.nvml: NvmlSampler | None = None
        """Reads the GPU beside it, and is stopped with it; None for no GPU figures."""
        self._facts, self._batch_seen = facts_of(trainer), False
        self._ledger = Ledger(
            queue=queue,
            trusted_clock=self.sees_device,
            period=max(1, self._facts.num_workers or 0),
        )
        self._warm_up, self._settled = WARM_UP_STEPS + queue, False
        self._host_began = (0, thread_clock())
        self._meter = StepMeter(self._ledger.fresh.append, ring=ring)
        self._meter.on_epoch_start = self._ledger.epoch_started
        self._meter.begin(epoch=False)
        self._hooks = HookTimes(lambda: self._meter.between_steps, measure=guard.measure)
        self._loaders = LoaderWatch(partial(_host.train_iterators, trainer), read_every_ns=READ_EVERY_NS)
        self._ranks = open_rank_exchange(warm_up=self._warm_up)
        self._rank_total: RankStats | None = None
        self._final: Measurements | None = None
        self._lost_before = 0
        self._cache_began = self._cache_before = _cache_stats(trainer)
        self._undo = ExitStack()  # calls each, and the others where one fails
        self._undo.callback(self._stop_nvml)
        self._undo.callback(self._loaders.close)
        self._undo.callback(self._tap())

    @property
    def finished(self) -> int:
        """Steps that ended."""
        return self._meter.finished

    # --- what the loop does -------------------------------------------------------------------------------------------

    def epoch_began(self) -> None:
        """The first batch of an epoch has a figure of its own. Loaders may have got other settings between two."""
        seen = self._facts
        self._facts = replace(
            facts_of(self._trainer),
            batch_bytes=seen.batch_bytes,
            batch_tensors=seen.batch_tensors,
            pictures=seen.pictures,
            syncs=seen.syncs,
        )
        self._meter.begin(epoch=True)
        self._hooks.leave_out_step()
        self._loaders.epoch_began()

    def validation_began(self) -> None:
        """Leave out the step in which a validation lies."""
        self._meter.leave_out_step()
        self._hooks.leave_out_step()

    def batch_came(self, batch: Any) -> None:
        """Look at the first batch."""
        if not self._batch_seen:
            self._batch_seen = True
            seen = self._guard.attempt("tell what a batch is made of", with_batch, self._facts, batch)
            self._facts = seen or self._facts

    def step_ended(self) -> None:
        """Keep what is held in memory bounded, notice the end of the warm-up, and now and then time the hooks."""
        if self._meter.finished >= self._hooks.next_look:
            self._hooks.step(self._meter.finished)
        if not self._settled and self._meter.finished >= self._warm_up:
            self._settled = True
            self._host_began = (self._meter.finished, thread_clock())
            self._loaders.settle()
        if len(self._ledger.fresh) >= UNFOLDED_STEPS:
            self._fold()

    def _fold(self) -> None:
        """Sum up the steps held one by one; the other ranks are still to be told of them."""
        if self._ranks is not None:
            self._ranks.add(self._ledger.fresh)
        self._ledger.fold()

    def _tap(self) -> Callable[[], None]:
        meter, loaders = self._meter, self._loaders

        def fetch_began() -> None:
            loaders.fetch_began()  # before the clock of the fetch starts
            meter.fetch_began()

        def fetch_ended() -> None:
            meter.fetch_ended()
            loaders.fetch_ended()

        fetch, to_device, step = _host.step_actions(self._trainer)
        tap = self._guard.tap
        return tap_profiler(
            self._trainer.profiler,
            {fetch: tap(fetch_began), step: tap(meter.step_began), LOOK_AHEAD: tap(meter.look_ahead_began)},
            {
                fetch: tap(fetch_ended),
                to_device: tap(meter.arrived),
                step: tap(meter.step_ended),
                LOOK_AHEAD: tap(meter.look_ahead_ended),
            },
            does_nothing=_host.profiler_does_nothing(self._trainer),
            hooks=self._hooks,
        )

    # --- figures ------------------------------------------------------------------------------------------------------

    def close_window(self) -> dict[str, float]:
        """The figures since the last window by their tags, then a new window begins. All ranks do so together."""
        ranks = None
        if self._ranks is not None:
            self._ranks.send(self._ledger.fresh)
            ranks = self._ranks.take()
        lost = self._meter.lost
        self.last = self._ledger.close_window(
            lost=lost - self._lost_before, prefetch_active=prefetch_active(self._trainer)
        )
        self._lost_before = lost
        self._facts = replace(self._facts, syncs=self._syncs())
        cache, self._cache_before = self._cache_before, _cache_stats(self._trainer)
        loaders = replace(self._loaders.take(), cache_hit_pct=_hit_pct(cache, self._cache_before))
        return to_tags(self.last, self.nvml.take() if self.nvml is not None else None, loaders, ranks)

    def measurements(self) -> Measurements:
        """All that was measured so far, without the warm-up; once training is over, always the same."""
        if self._final is not None:
            return self._final
        self._fold()
        loaders: LoaderStats = replace(
            self._loaders.total(), cache_hit_pct=_hit_pct(self._cache_began, _cache_stats(self._trainer))
        )
        return Measurements(
            stats=self._ledger.total(prefetch_active=prefetch_active(self._trainer), lost=self._meter.lost),
            facts=replace(self._facts, syncs=self._syncs(), host_cpu_ms=self._host_cpu_ms()),
            loaders=loaders,
            hooks=self._hooks.result(),
            ranks=self._rank_total or (self._ranks.total() if self._ranks is not None else None),
        )

    def _syncs(self) -> tuple[str, ...]:
        """Those that were seen at any time: a metric in the progress bar shows only once it was logged."""
        return tuple(sorted({*self._facts.syncs, *_host.known_syncs(self._trainer)}))

    def _host_cpu_ms(self) -> float | None:
        steps, began = self._host_began
        steps = self._meter.finished - steps
        return (thread_clock() - began) * 1e-6 / steps if steps else None

    # --- its end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Training is over: read what the device and the other ranks have not told yet."""
        self._meter.end()
        if self.last is None:
            self.close_window()
        elif self._ranks is not None:
            self._ranks.add(self._ledger.fresh)
        if self._ranks is not None:
            self._rank_total = self._ranks.finish()
            self._ranks = None
        self._final = self.measurements()

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
