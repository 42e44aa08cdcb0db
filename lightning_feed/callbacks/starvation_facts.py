"""Facts about a Trainer's run other than its measured times."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, RunStage
from lightning_feed.callbacks.prefetch import PrefetchCallback
from lightning_feed.load.kinds import AnyLoader
from lightning_feed.load.loader_tree import loaders_in
from lightning_feed.machine.limits import read_machine
from lightning_feed.measure.facts import is_instance, loader_facts, training_loader_facts
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.loader_code import code_of, users_line
from lightning_feed.measure.measurements import DataModuleFacts, HookCode, LoaderCode, LoopFacts, TrainerFacts
from lightning_feed.measure.stats import StarvationStats
from lightning_feed.measure.wall import WallStats
from lightning_feed.trials.time_left import TimeLeft

_INTERVALS = ("every_n_steps", "log_every_n_steps", "every_n_train_steps", "refresh_rate")
"""Names of callbacks' constructor parameters that make them work only every N steps."""
_STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end")
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def facts_of(
    trainer: AnyTrainer, guard: Guard, stage: RunStage = "fit", *, before: LoopFacts | None = None
) -> LoopFacts:
    """Collect the facts about a stage's loop. Copies lines of the user's code from ``before``, its earlier facts."""
    machine = read_machine()
    loaders = inner_loaders(trainer, stage)
    datamodule = _host.datamodule_of(trainer)
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
            for owner in (trainer.lightning_module, datamodule)
            for hook in _BATCH_HOOKS
        ),
        datamodule=_datamodule_facts(datamodule),
        trainer=_trainer_facts(trainer, stage),
    )
    if stage != "fit":
        return replace(facts, loader=loader_facts(loaders))
    code = before.loader_code if before is not None else None
    # This reads the user's source, objects and settings, which may be anything, so it may fail.
    code = code or guard.attempt("find where the training loader is made", loader_location, trainer, loaders)
    hooks = before.hook_code if before is not None else guard.attempt("find the hooks", _hook_code, trainer)
    return replace(
        facts,
        loader=training_loader_facts(loaders, reloaded=_host.reload_interval(trainer) > 0),
        loader_code=code,
        hook_code=hooks or (),
    )


def loader_location(trainer: AnyTrainer, loaders: Sequence[AnyLoader]) -> LoaderCode:
    """Return the user's code that sets up the training loaders of a running fit."""
    source = _host.train_loader_source(trainer)
    return code_of(source, _host.datamodule_of(trainer), loaders, config=_host.cli_config(trainer))


def _datamodule_facts(datamodule: object) -> DataModuleFacts:
    read_facts: Callable[[], DataModuleFacts] = getattr(datamodule, "_feed_facts", DataModuleFacts)
    return read_facts()


def _hook_code(trainer: AnyTrainer) -> tuple[HookCode, ...]:
    module = trainer.lightning_module
    owners: dict[str, object] = {
        f"[Callback]{type(callback).__qualname__}": callback for callback in _host.callbacks_of(trainer)
    }
    owners[f"[LightningModule]{type(module).__name__}"] = module
    hooks = []
    for name, owner in owners.items():
        interval = "" if owner is module else _interval_of_one(owner)
        for hook in _STEP_HOOKS:
            line = users_line(getattr(owner, hook, None))
            if line:
                hooks.append(HookCode(name=f"{name}.{hook}", at=line, interval=interval))
    return tuple(hooks)


def _interval_of_one(callback: object) -> str:
    """Name of the interval parameter that is 1, so that the callback works in every step; empty if there is none."""
    parameters = inspect.signature(type(callback)).parameters
    for name in _INTERVALS:
        steps = getattr(callback, name, None)
        if name in parameters and type(steps) is int and steps == 1:
            return name
    return ""


_STARVATION = "lightning_feed.callbacks.starvation", "GPUStarvationCallback"
_AUTOTUNE = "lightning_feed.callbacks.autotune", "AutotuneCallback"


def time_left(trainer: AnyTrainer, stats: StarvationStats, wall: WallStats) -> TimeLeft:
    """Return the rest of a fit, by what was measured in it so far."""
    steps, epochs = _host.steps_left(trainer)
    return TimeLeft(
        steps=steps,
        step_s=1e-3 * (stats.step_ms or 0.0),
        epochs=epochs,
        epoch_start_s=stats.epoch_start_s or 0.0,
        validation_s=wall.seconds("validation") / max(1, wall.times("epoch starts")),
        limit_s=_host.seconds_left(trainer),
    )


def with_search(facts: TrainerFacts, trainer: AnyTrainer) -> TrainerFacts:
    """Add the trials that have decided the number of workers of this fit, in this run or in an earlier one."""
    autotune: list[Any] = [each for each in _host.callbacks_of(trainer) if is_instance(each, *_AUTOTUNE)]
    if autotune and autotune[0].decided:
        return replace(facts, tuned=True, tuned_outside=False)
    from lightning_feed.in_fit.goal import earlier_search  # what only some runs need

    earlier = earlier_search(trainer, _host.train_loaders(trainer))
    outside = earlier.by_the_command and not earlier.in_a_fit
    return replace(facts, tuned=earlier.in_a_fit or outside, tuned_outside=outside)


def measures(trainer: AnyTrainer) -> bool:
    """Return True if the program itself has a GPUStarvationCallback."""
    observers: list[Any] = [each for each in _host.callbacks_of(trainer) if is_instance(each, *_STARVATION)]
    return any(observer.was_asked_for for observer in observers)


def _trainer_facts(trainer: AnyTrainer, stage: RunStage) -> TrainerFacts:
    package = _package_of(trainer)
    facts = TrainerFacts(
        package="pytorch_lightning" if package == "pytorch_lightning" else "lightning.pytorch",
        lightning=None if package is None else str(sys.modules[package].__version__),
        log_every_n_steps=_host.log_interval(trainer),
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
        measures=measures(trainer),
    )


def _package_of(trainer: AnyTrainer) -> str | None:
    """Return the package of Lightning whose Trainer this is, also by inheritance; None if it is another Trainer."""
    packages = [kind.__module__.partition(".")[0] for kind in type(trainer).__mro__]
    return next((name for name in packages if name in _host.PACKAGES), None)


def _validation_schedule(trainer: AnyTrainer) -> tuple[int | None, int | None]:
    """Return (epochs, batches) between two validations. Both None if the interval must not grow, or is a time."""
    every = trainer.check_val_every_n_epoch
    between = trainer.val_check_batch
    if between is None:
        every = None  # time decides when to validate
    elif every is not None and between in (float("inf"), trainer.num_training_batches):
        between = None  # at the end of an epoch
    needed = _host.needs_metrics_every(trainer)
    if "step" in needed or ("epoch" in needed and None in (every, between)):
        return None, None  # with longer intervals a scheduler would miss its metric, and the fit would fail
    return every, None if between is None else int(between)


def inner_loaders(trainer: AnyTrainer, stage: RunStage) -> list[Any]:
    """Return the loaders of a stage, each without the wrappers around it."""
    return [inner for loader in _host.loop_loaders(trainer, stage) for inner in loaders_in(loader)]


def prefetch_active(trainer: AnyTrainer) -> bool | None:
    """Return True if a PrefetchCallback of this Trainer is active. None without one, and on a CPU, where nothing is
    copied."""
    prefetchers = [callback for callback in _host.callbacks_of(trainer) if isinstance(callback, PrefetchCallback)]
    if any(prefetcher.active for prefetcher in prefetchers):
        return True
    return None if not prefetchers or trainer.strategy.root_device.type == "cpu" else False
