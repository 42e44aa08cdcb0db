"""One run of a Trainer, measured from its start to its end."""

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Stage
from lightning_feed.callbacks.loader_place import loader_location, users_line
from lightning_feed.callbacks.prefetch import HAND_OUT, LOOK_AHEAD, PrefetchCallback
from lightning_feed.load.fork_safety import growing, kept_items, plain_values
from lightning_feed.load.kinds import AnyDataset
from lightning_feed.load.machine import read_machine
from lightning_feed.measure.cpu_time import CpuShare, own_clock
from lightning_feed.measure.facts import batches_ahead, is_instance, loader_facts, training_loader_facts
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.hook_times import Calls, HookTimes, tap_profiler
from lightning_feed.measure.loader_state import loaders_in
from lightning_feed.measure.loop import LoopSums, MeasuredLoop
from lightning_feed.measure.measurements import (
    DataModuleFacts,
    HookCode,
    HookTime,
    LoopFacts,
    Measurements,
    TrainerFacts,
)
from lightning_feed.measure.nvml import NvmlSampler
from lightning_feed.measure.ranks import open_rank_exchange
from lightning_feed.measure.repeats import RepeatedBatches
from lightning_feed.measure.stats import RankStats, StarvationStats, loop_tags, to_tags
from lightning_feed.measure.step_meter import BACKWARD, FORWARD, OPTIMIZER, host_clock, open_ring
from lightning_feed.measure.wall import Part, WallClock

_PART: dict[Stage, Part] = {"fit": "epoch starts", "validate": "validation", "test": "test", "predict": "predict"}
"""The part of wall time in which each stage's loop begins."""


class StarvationRun:
    """The clocks and taps of one run, and its measurements so far.

    Args:
        trainer: the Trainer that fits, validates, tests or predicts.
        every: steps between two windows.
        guard: the callback's guard, around the functions that the loop calls.
        wall: the clock of the whole run, which may have started earlier.
        stage: the stage whose loop is measured. A fit also measures its validation's loop.

    Attributes:
        last: the last window that was closed.
        logged_step: the number of the step at which that window was closed.
        nvml: reads the GPU's figures until the run ends; None for no GPU figures.
        main: the loop of the stage.
    """

    def __init__(
        self, trainer: AnyTrainer, *, every: int, guard: Guard, wall: WallClock | None = None, stage: Stage = "fit"
    ) -> None:
        self._trainer = trainer
        self.every = every
        self._guard = guard
        self.stage = stage
        self.last: StarvationStats | None = None
        self.logged_step = -1
        self.nvml: NvmlSampler | None = None
        self._wall = wall or WallClock()
        self.main = self._now = self._make_loop(stage)
        self._validation: MeasuredLoop | None = None
        self._validation_since: int | None = None
        self._hooks = HookTimes(lambda: self._now.meter.between_steps, own_clock, measure=guard.measure)
        self._ranks = open_rank_exchange(warm_up=self.main.warm_up) if stage == "fit" else None
        self._rank_total: RankStats | None = None
        self._cpus = CpuShare() if trainer.world_size == 1 else None
        self._final: Measurements | None = None
        self._cut_short: tuple[int, int] | None = None
        """Batches of an epoch that ended before its length, and that length."""
        self._repeats: RepeatedBatches | None = None
        self._values: list[dict[str, object]] | None = None
        """Numbers and strings of the datasets when the epoch began."""
        self._is_changed = False
        self._kept: list[dict[str, int]] = []
        """Lengths of the datasets' containers when the epoch began."""
        self._undo = ExitStack()  # calls all of them, even if one fails
        self.also_undo = self._undo.callback
        self.also_undo(lambda: self.nvml.stop() if self.nvml is not None else None)
        self.also_undo(self.main.loaders.close)
        self.also_undo(self._tap())
        self.also_undo(_host.Wrap(trainer, "save_checkpoint", self._save_checkpoint).undo)
        self._wall.go_on(_PART[stage])
        if stage != "fit":
            self._begin(self.main, stage)

    def _make_loop(self, stage: Stage) -> MeasuredLoop:
        device = self._trainer.strategy.root_device
        ring = open_ring(device)
        self.sees_device = ring is not None or device.type == "cpu"
        """True if times come from the clock of the device that computes; False if from the host's clock instead."""
        return MeasuredLoop(
            facts_of(self._trainer, self._guard, stage),
            partial(_host.loop_iterators, self._trainer, stage),
            queue=batches_ahead(_loaders(self._trainer, stage)),
            ring=ring,
            names=_host.loader_names(self._trainer, stage) if stage != "fit" else (),
        )

    def _begin(self, loop: MeasuredLoop, stage: Stage, since: int | None = None) -> None:
        loop.begins(facts_of(self._trainer, self._guard, stage, before=loop.facts), since)

    @property
    def finished(self) -> int:
        """Number of steps that ended."""
        return self.main.meter.finished

    # --- what the loop does -------------------------------------------------------------------------------------------

    def epoch_began(self) -> None:
        """Begin an epoch, whose first batch is measured separately."""
        self._wall.go_on("epoch starts")
        self._fold(self.main)
        self._begin(self.main, self.stage)
        self._hooks.leave_out_step()
        if self._repeats is None:
            self._watch_for_repeats()
        self._guard.attempt("compare its dataset with that of the last epoch", self._note_changes)

    def _note_changes(self) -> None:
        """See if the program changes its dataset between epochs, which workers that live on would miss."""
        values = [plain_values(dataset) for dataset in self._datasets()]
        self._is_changed |= self._values not in (None, values)
        self._values = values
        self._kept = [kept_items(dataset) for dataset in self._datasets()]

    def _datasets(self) -> list[AnyDataset]:
        return [getattr(loader, "dataset", None) for loader in _loaders(self._trainer, self.stage)]

    def growing(self) -> str:
        """The attribute in which a dataset without workers keeps what it reads, if it grew in this epoch; or empty."""
        if self.main.facts.loader.num_workers != 0:
            return ""
        return next(filter(None, map(growing, self._kept, self._datasets())), "")

    def _watch_for_repeats(self) -> None:
        """Look at the first batches of a stream with several workers, before they are sent to the device."""
        loader = self.main.facts.loader
        workers = loader.num_workers or 0
        undivided = loader.map_style is False and not loader.shards_by_worker and loader.count == 1
        if workers < 2 or not undivided or loader.in_order is False or loader.workers != "process":
            return
        repeats = self._repeats = RepeatedBatches(workers)

        def see(original: Callable[..., Any], batch: object, *arguments: object, **named: object) -> Any:
            if self._now is self.main:
                self._guard.measure(repeats.see, batch)
            return original(batch, *arguments, **named)

        self.also_undo(_host.Wrap(self._trainer.strategy, "batch_to_device", see).undo)

    def leave_out_step(self) -> None:
        """Do not count the current training step: it contains work other than training."""
        self.main.meter.leave_out_step()
        self._hooks.leave_out_step()

    def restart(self) -> None:
        """Measure the main loop afresh: its loader has changed."""
        self.main.loaders.close()
        self.main = self._now = self._make_loop(self.stage)
        self.also_undo(self.main.loaders.close)
        self._hooks.restart()

    def _validation_comes(self) -> None:
        """Note that the validation's loaders are iterated next."""
        if self._now is self.main:
            self.main.meter.close_step()
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
            self.also_undo(self._validation.loaders.close)
        self._now = self._validation
        self._begin(self._now, "validate", self._validation_since)

    def _validation_ended(self) -> None:
        """End a validation. One without batches never began."""
        if self._validation_since is not None:
            self._wall.leave()
            self.main.cpu.go_on()
            self._now = self.main
            self._validation_since = None

    def batch_came(self, batch: object, dataloader_idx: int = 0) -> None:
        """Note the loader of a batch, and the parts of the first one."""
        loop = self._now
        loop.meter.source = dataloader_idx
        if not loop.batch_seen:
            self._guard.attempt("inspect a batch", loop.look_at, batch)

    def step_ended(self) -> None:
        """Limit the memory used, detect the end of the warm-up, and time the hooks now and then."""
        loop = self._now
        if loop is self.main:
            self._hooks.step_ended(loop.meter.finished)
        if loop.step_ended():
            self._fold(loop)

    def _fold(self, loop: MeasuredLoop) -> None:
        """Replace single steps by their sums, after keeping training steps for the other ranks."""
        loop.meter.catch_up()
        if self._ranks is not None and loop is self.main:
            self._ranks.add(loop.ledger.fresh)
        loop.ledger.fold()

    def _save_checkpoint(self, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        self._guard.measure(self._wall.enter, "checkpoints")
        try:
            return original(*args, **kwargs)
        finally:
            self._guard.measure(self._wall.leave)

    # --- what the loop announces --------------------------------------------------------------------------------------

    def _tap(self) -> Callable[[], None]:
        """Hook into the actions of :func:`_host.actions`, and into those that a PrefetchCallback announces."""
        tap = self._guard.tap
        begins: Calls = {
            "fetch": self._fetch_began,
            "step": lambda: self._now.meter.step_began(),
            "forward": lambda: self.main.meter.part_began(FORWARD),
            "backward": lambda: self.main.meter.part_began(BACKWARD),
            "optimizer": lambda: self.main.meter.part_began(OPTIMIZER),
            "validation": self._validation_comes,
            "epoch_end": lambda: self._now.meter.close_step(),
        }
        ends: Calls = {
            "fetch": self._fetch_ended,
            "to_device": lambda: self._now.meter.arrived(),
            "step": lambda: self._now.meter.step_ended(),
            **dict.fromkeys(("forward", "backward", "optimizer"), lambda: self.main.meter.part_ended()),
            "validation_end": self._validation_ended,
            "epoch": self._epoch_ended,
        }
        starts: Calls = {LOOK_AHEAD: tap(lambda: self._now.meter.look_ahead_began())}
        stops: Calls = {
            LOOK_AHEAD: tap(lambda: self._now.meter.look_ahead_ended()),
            HAND_OUT: tap(lambda: self._now.handed_out()),
        }
        for stage in ("validate", self.stage):
            for part, name in _host.actions(self._trainer, stage).items():
                starts |= {name: tap(begins[part])} if part in begins else {}
                stops |= {name: tap(ends[part])} if part in ends else {}
        nothing = _host.profiler_does_nothing(self._trainer)
        return tap_profiler(self._trainer.profiler, starts, stops, does_nothing=nothing, hooks=self._hooks)

    def _epoch_ended(self) -> None:
        self.main.meter.close_step()
        self._wall.go_on("rest")
        if self.stage == "fit" and sys.exc_info()[0] is None:  # not if Ctrl-C or an error ends the epoch
            self._cut_short = _host.epoch_cut_short(self._trainer) or self._cut_short

    def _fetch_began(self) -> None:
        if self._validation_since is not None and self._now is self.main:
            self._validation_ended()
        self._now.fetch_began()

    def _fetch_ended(self) -> None:
        self._now.fetch_ended()
        if self._wall.part == "epoch starts":
            self._wall.go_on("train")

    # --- figures ------------------------------------------------------------------------------------------------------

    def close_window(self) -> dict[str, float]:
        """Return the figures since the last window, by tag, and begin a new window. All ranks do so together."""
        loop = self.main
        loop.meter.catch_up()  # also ends the step: logging, which follows, belongs to the next one
        ranks = None
        if self._ranks is not None:
            self._ranks.send(loop.ledger.fresh)
            ranks = self._ranks.take()
        self.last = loop.ledger.close_window(lost=loop.meter.lost, prefetch_active=prefetch_active(self._trainer))
        loop.facts = replace(loop.facts, syncs=self._syncs())
        return to_tags(self.last, self.nvml.take() if self.nvml is not None else None, loop.loaders.take(), ranks)

    def loop_tags(self) -> dict[str, float]:
        """Figures of the validation, test or prediction so far, by tag."""
        loop, stage = (self._validation, "validate") if self.stage == "fit" else (self.main, self.stage)
        if loop is None:
            return {}
        loop.meter.catch_up()
        stats = loop.ledger.total(prefetch_active=None, lost=loop.meter.lost)
        return loop_tags(stage, stats, loop.by_loader())

    def settled(self) -> LoopSums | None:
        """Sums since the warm-up; None during the warm-up."""
        self._fold(self.main)
        return self.main.settled()

    def measurements(self) -> Measurements:
        """All measurements so far, without the warm-up; fixed once the run is over."""
        if self._final is not None:
            return self._final
        validation = self._validation
        cpus = self._cpus
        self._fold(self.main)
        if validation is not None:
            self._fold(validation)
        found = self.main.measurements(prefetch_active=prefetch_active(self._trainer))
        others_cpu_pct = cpus.others_pct(found.facts.usable_cpus) if cpus is not None else None
        return Measurements(
            stats=found.stats,
            facts=replace(self._with_observations(found.facts), others_cpu_pct=others_cpu_pct),
            loaders=found.loaders,
            hooks=self._guard.attempt("tell the slowest hooks", self._slow_hooks) or (),
            ranks=self._rank_total or (self._ranks.total() if self._ranks is not None else None),
            by_loader=found.by_loader,
            wall=self._wall.stats(),
            validation=validation.measurements(prefetch_active=None) if validation is not None else None,
        )

    def _with_observations(self, facts: LoopFacts) -> LoopFacts:
        """Add the facts that show only while the loop runs."""
        loader = replace(
            facts.loader,
            repeated=None if self._repeats is None else self._repeats.repeated,
            keeps=self._guard.attempt("see what its dataset keeps", self.growing) or "",
        )
        if self._is_changed:
            loader = replace(loader, may_persist=False)
        return replace(facts, loader=loader, syncs=self._syncs(), cut_short=self._cut_short)

    def _slow_hooks(self) -> tuple[HookTime, ...]:
        return tuple(one for one in self._hooks.result() if not _host.is_empty_hook(self._trainer, one.name))

    def _syncs(self) -> tuple[str, ...]:
        """All synchronisations found so far. Those caused by a metric appear only after the metric was first logged to
        the progress bar."""
        return tuple(sorted({*self.main.facts.syncs, *_host.known_syncs(self._trainer)}))

    # --- its end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Read the last times of the device and of the other ranks."""
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
        """Time the calls of a logger between the steps, by name."""
        for name in ("log_metrics", "save"):
            if callable(getattr(logger, name, None)):
                around = partial(self._hooks.call, f"logger {type(logger).__name__}.{name}")
                self.also_undo(_host.Wrap(logger, name, around).undo)

    def close(self) -> None:
        """Remove everything from the Trainer. The measurements stay."""
        self._undo.close()


# --- facts of a run ---------------------------------------------------------------------------------------------------

_INTERVALS = ("every_n_steps", "log_every_n_steps", "every_n_train_steps", "refresh_rate")
"""Names of callbacks' constructor parameters that make them work only every N steps."""
_STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end")
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def facts_of(trainer: AnyTrainer, guard: Guard, stage: Stage = "fit", *, before: LoopFacts | None = None) -> LoopFacts:
    """The facts about a stage's loop. Takes lines of the user's code from ``before``, the loop's earlier facts."""
    machine = read_machine()
    loaders = _loaders(trainer, stage)
    facts = LoopFacts(
        stage=stage,
        device_type=trainer.strategy.root_device.type,
        world_size=trainer.world_size,
        usable_cpus=max(1, machine.usable_cpus // trainer.num_devices),
        torch_threads=torch.get_num_threads(),
        free_shm_bytes=machine.free_shm_bytes,
        batches_per_epoch=_host.batches_of(trainer, stage),
        batch_hooks=any(
            _host.is_overridden(owner, hook)
            for owner in (trainer.lightning_module, trainer.datamodule)
            for hook in _BATCH_HOOKS
        ),
        datamodule=_datamodule_facts(trainer),
        trainer=_trainer_facts(trainer, stage),
    )
    if stage != "fit":
        return replace(facts, loader=loader_facts(loaders))
    code = before.loader_code if before is not None else None
    # This reads the user's source, objects and settings, which may be anything.
    code = code or guard.attempt("find where the training loader is made", loader_location, trainer, loaders)
    hooks = before.hook_code if before is not None else guard.attempt("find the hooks", _hook_code, trainer)
    return replace(
        facts,
        loader=training_loader_facts(loaders, reloaded=bool(trainer.reload_dataloaders_every_n_epochs)),
        loader_code=code,
        hook_code=hooks or (),
    )


def _datamodule_facts(trainer: AnyTrainer) -> DataModuleFacts:
    read_facts: Callable[[], DataModuleFacts] = getattr(trainer.datamodule, "_feed_facts", DataModuleFacts)
    return read_facts()


def _hook_code(trainer: AnyTrainer) -> tuple[HookCode, ...]:
    module = trainer.lightning_module
    owners = {f"[Callback]{type(callback).__qualname__}": callback for callback in trainer.callbacks}
    owners[f"[LightningModule]{type(module).__name__}"] = module
    hooks = []
    for name, owner in owners.items():
        parameters = inspect.signature(type(owner)).parameters if owner is not module else {}
        intervals = {setting: getattr(owner, setting, None) for setting in _INTERVALS if setting in parameters}
        interval = next((setting for setting, steps in intervals.items() if type(steps) is int and steps == 1), "")
        lines = {hook: users_line(getattr(owner, hook, None)) for hook in _STEP_HOOKS}
        hooks += [HookCode(name=f"{name}.{hook}", at=line, interval=interval) for hook, line in lines.items() if line]
    return tuple(hooks)


_AUTOTUNE = "lightning_feed.callbacks.autotune", "AutotuneCallback"


def _trainer_facts(trainer: AnyTrainer, stage: Stage) -> TrainerFacts:
    packages = [kind.__module__.partition(".")[0] for kind in type(trainer).__mro__]
    package = next((name for name in packages if name in _host.PACKAGES), None)
    facts = TrainerFacts(
        package="pytorch_lightning" if package == "pytorch_lightning" else "lightning.pytorch",
        lightning=None if package is None else str(sys.modules[package].__version__),
        log_every_n_steps=trainer.log_every_n_steps,
    )
    if stage != "fit":
        return facts
    every, between = _validation_schedule(trainer)
    savers = [_host.steps_between_checkpoints(callback) for callback in trainer.checkpoint_callbacks]
    return replace(
        facts,
        max_epochs=trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None,
        breaks_off=trainer.limit_train_batches != 1.0,
        check_val_every_n_epoch=every,
        val_check_batches=between,
        checkpoint_steps=savers[0] or None if len(savers) == 1 else None,
        bar_refresh_rate=_host.bar_refresh_rate(trainer),
        tuned=any(is_instance(callback, *_AUTOTUNE) for callback in trainer.callbacks),
    )


def _validation_schedule(trainer: AnyTrainer) -> tuple[int | None, int | None]:
    """Epochs, and batches, between two validations. Both are None if they must not grow, or go by time."""
    every = trainer.check_val_every_n_epoch
    between = trainer.val_check_batch
    if between is None:
        every = None  # validation goes by time
    elif every is not None and between in (float("inf"), trainer.num_training_batches):
        between = None  # at the end of an epoch
    needed = _host.needs_metrics_every(trainer)
    if "step" in needed or ("epoch" in needed and None in (every, between)):
        return None, None  # with longer intervals a scheduler would miss its metric, and the fit would fail
    return every, between


def _loaders(trainer: object, stage: str) -> list[Any]:
    """The loaders of a stage, without their wrappers."""
    return [inner for loader in _host.loop_loaders(trainer, stage) for inner in loaders_in(loader)]


def prefetch_active(trainer: AnyTrainer) -> bool | None:
    """True if a PrefetchCallback of this Trainer is active; None without one."""
    found = [callback.active for callback in trainer.callbacks if isinstance(callback, PrefetchCallback)]
    return any(found) if found else None
