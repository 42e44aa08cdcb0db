"""Short fits on the user's objects: the unchanged training, fits with other loaders, and replays of batches."""

import copy
import gc
import io
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original
from lightning_feed.callbacks.prefetch import PrefetchCallback
from lightning_feed.callbacks.starvation_facts import measures
from lightning_feed.diagnosing.batches import KeptBatches, Pace, Replay
from lightning_feed.diagnosing.session import Session
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.facts import batches_ahead
from lightning_feed.measure.windows import WARM_UP_STEPS

OWN_HOOKS = ("[Callback]ShortFit.", "[Callback]GPUStarvationCallback.")
"""Hooks that a diagnosis adds to a fit. They are not reported."""
ENDS = ("on_fit_end", "on_train_end", "teardown", "on_exception", "on_save_checkpoint")
"""The user's hooks that are not called, because they may upload the short fit as the result of a training."""
AS_IT_IS = "training as it is failed"
LATEST = 3
"""A fit ends after this many times ``FitLength.seconds``, even with too few steps."""
PRECISIONS_BY_NAME = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
"""Classes of the precision plugins that ``Trainer(precision=...)`` makes from a name."""


@dataclass(frozen=True, kw_only=True)
class FitLength:
    """The length of a fit, which ends after ``max_steps``, or after ``seconds`` and at least ``min_steps``."""

    min_steps: int
    max_steps: int
    seconds: float


# --- the callback of a short fit ----------------------------------------------------------------------------------


class ShortFit:
    """Ends a fit when its time is over.

    Mixed into the ``Callback`` of the Trainer's package, as Lightning requires of callbacks.
    """

    def __init__(self, session: Session, fit_length: FitLength) -> None:
        self.session = session
        self.fit_length = fit_length
        self.steps = 0
        self.interrupted = False
        self.wraps: list[_host.Wrap] = []
        """Replaced methods, to be restored after the fit."""
        self._planned = math.inf
        self._began_s = 0.0

    def on_train_start(self, trainer: AnyTrainer, pl_module: object) -> None:
        """Start the clock, and let the fit continue past the user's ``max_epochs`` and ``max_steps``."""
        if trainer.estimated_stepping_batches != -1:
            self._planned = trainer.estimated_stepping_batches
        _host.go_on_past_the_end(trainer)
        _host.keep_plateaus(trainer)
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: AnyTrainer, *args: object) -> None:
        """End the fit after its time."""
        self.steps += 1
        elapsed_s = time.perf_counter() - self._began_s
        is_enough = elapsed_s >= self.fit_length.seconds and self.steps >= self.fit_length.min_steps
        if is_enough or self.steps >= self.fit_length.max_steps or elapsed_s >= LATEST * self.fit_length.seconds:
            trainer.should_stop = True
        if trainer.global_step + 1 >= self._planned:
            # A schedule of fixed length raises if it is stepped past its end.
            self._planned = math.inf
            self.wraps += [_host.Wrap(config.scheduler, "step", nothing) for config in trainer.lr_scheduler_configs]

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """Note a Ctrl-C, which Lightning turns into a SystemExit."""
        if isinstance(exception, KeyboardInterrupt):
            self.interrupted = True
            sys.stdin = io.StringIO()  # Lightning 2.4 calls exit(), which closes stdin


class UnchangedFit(ShortFit):
    """The unchanged fit. Keeps some of its batches for the replay."""

    def on_train_start(self, trainer: AnyTrainer, pl_module: object) -> None:
        """Train for more steps if the loader works ahead: its full queue hides a slow loader at first."""
        super().on_train_start(trainer, pl_module)
        warm_up = batches_ahead(_host.train_loaders(trainer)) + WARM_UP_STEPS
        self.fit_length = replace(self.fit_length, max_steps=self.fit_length.max_steps + warm_up)
        if not _host.takes_iterator(self.session.model):
            self.session.device_batches = KeptBatches(warm_up)
            self.wraps.append(_host.Wrap(self.session.model, "training_step", self._step))

    def _step(self, original: Original, batch: object, *rest: Any, **named: object) -> Any:
        self.session.device_batches.offer(batch)
        return original(batch, *rest, **named)


class ReplayFit(ShortFit):
    """A fit whose steps get the same batches again and again, to measure the model without loading."""

    def __init__(self, session: Session, fit_length: FitLength, *, on_device: bool) -> None:
        super().__init__(session, fit_length)
        self.pace = Pace(session.device)
        self._on_device = on_device

    def on_train_start(self, trainer: AnyTrainer, pl_module: object) -> None:
        """Leave out the transfer to the device, with its hooks, if the batches are on the device already."""
        super().on_train_start(trainer, pl_module)
        if self._on_device:
            self.wraps += _host.wrap_transfer(
                trainer, lambda _, batch: batch, lambda _original, _name, batch, *_: batch
            )

    def on_train_batch_end(self, trainer: AnyTrainer, *args: object) -> None:
        """Note the time at which the step ended, and end the fit when its time is over."""
        self.pace.stamp()
        super().on_train_batch_end(trainer, *args)


def nothing(*_: object, **__: object) -> None:
    """Stand in for a method that must not run."""


def _as_callback(session: Session, kind: type[ShortFit]) -> Any:
    return type("ShortFit", (kind, session.lightning.Callback), {})


# --- the fits -----------------------------------------------------------------------------------------------------


def run_as_it_is(session: Session, fit_length: FitLength) -> None:
    """Run a fit with the user's loaders. Records measurements and batches in the session."""
    meter = _meter(session)
    meter.reads_gpu = True
    short_fit = _as_callback(session, UnchangedFit)(session, fit_length)

    loaders = None
    wraps = []
    if session.loader_owner is None:
        loaders = session.take_loaders(session.loaders)
    else:
        wraps.append(
            _host.Wrap(session.loader_owner, "train_dataloader", lambda original: session.take_loaders(original()))
        )
    try:
        with preserve_state(session.loaders):
            _fit(session, short_fit, [meter, short_fit], loaders, wraps)
    finally:
        measured = meter.report().measurements
        hooks = tuple(hook for hook in measured.hooks if not hook.name.startswith(OWN_HOOKS))
        facts = replace(
            measured.facts,
            loader_code=session.loader_code() or measured.facts.loader_code,
            trainer=replace(measured.facts.trainer, measures=measures(session.trainer)),
        )
        # The wall time is left out: it is that of this short fit, not of a training.
        session.measured = replace(measured, hooks=hooks, facts=facts, wall=None)


def _meter(session: Session) -> Any:
    """Return a GPUStarvationCallback for the Trainer's package."""
    is_unified = session.lightning.__name__ == "lightning.pytorch"
    feed = import_module("lightning_feed" if is_unified else "lightning_feed.pl")
    meter = feed.GPUStarvationCallback(report=False)
    meter.reads_gpu = False
    return meter


def time_fit(session: Session, fit_length: FitLength, loaders: AnyLoader) -> float | None:
    """Train with other loaders. Returns the milliseconds of a step; None if the fit had too few steps.

    Args:
        session: the session, whose data module is set up already.
        fit_length: length of the fit.
        loaders: the training loaders.
    """
    meter = _meter(session)
    short_fit = _as_callback(session, ShortFit)(session, fit_length)
    _fit(session, short_fit, [meter, short_fit], loaders, _instead_of_the_users(session, loaders))
    step_ms: float | None = meter.report().stats.step_ms
    return step_ms


def _instead_of_the_users(session: Session, loaders: AnyLoader) -> list[_host.Wrap]:
    """Let a fit take other loaders, without setting up the data module again."""
    owner = session.loader_owner
    if owner is None:
        return []
    wraps = [_host.Wrap(owner, "train_dataloader", lambda _: loaders)]
    if owner is session.datamodule:
        wraps += [_host.Wrap(owner, name, nothing) for name in ("prepare_data", "setup")]
    return wraps


def replay(session: Session, batches: Sequence[Batch], fit_length: FitLength, *, on_device: bool) -> float | None:
    """Train on ``batches`` again and again. Returns the batches per second; None if the fit had too few steps.

    Args:
        session: the session, whose data module is set up already.
        batches: batches as passed to the step if ``on_device``, else as they come from the loader.
        fit_length: length of the fit.
        on_device: True if the batches are on the device, to leave out the transfer with its hooks.
    """
    length = fit_length.max_steps + 1
    if session.measured is not None:
        length = max(length, session.measured.facts.batches_per_epoch or 0)
    endless = Replay(batches, length)
    short_fit = _as_callback(session, ReplayFit)(session, fit_length, on_device=on_device)
    wraps = _instead_of_the_users(session, endless)
    _fit(session, short_fit, [short_fit], endless, wraps, prefetch=not on_device)
    rate: float | None = short_fit.pace.per_s(session.trainer.accumulate_grad_batches, len(batches))
    return rate


def _fit(
    session: Session,
    short_fit: ShortFit,
    callbacks: list[object],
    loaders: AnyLoader,
    wraps: list[_host.Wrap],
    *,
    prefetch: bool = True,
) -> None:
    """Run a short fit.

    Args:
        session: the session.
        short_fit: the callback that ends the fit.
        callbacks: all callbacks of the fit.
        loaders: the loaders, if neither the data module nor the module has them.
        wraps: the replacements of methods for this fit, to be undone at its end.
        prefetch: True to keep the user's PrefetchCallback.
    """
    data = {"datamodule": session.datamodule} if session.loaders is None else {"train_dataloaders": loaders}
    stdin = sys.stdin
    users_trainer = None
    with suppress(RuntimeError):  # the module has no Trainer
        users_trainer = session.model.trainer
    wraps.append(_host.Wrap(session.model, "configure_callbacks", lambda _: []))
    for owner in (session.model, session.datamodule):
        wraps += [_host.Wrap(owner, name, nothing) for name in ENDS if _host.is_overridden(owner, name)]
    trainer: AnyTrainer | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="feed_diagnose_") as folder:
            trainer = short_trainer(session.lightning, session.trainer, callbacks, folder, prefetch=prefetch)
            _run_fit(session, trainer, short_fit, data)
    finally:
        for wrap in reversed([*wraps, *short_fit.wraps]):
            wrap.undo()
        sys.stdin = stdin
        session.model.trainer = users_trainer
        trainer = None
        gc.collect()  # a Trainer is part of reference cycles; this also ends the workers of this fit


def _run_fit(session: Session, trainer: AnyTrainer, short_fit: ShortFit, data: dict[str, Any]) -> None:
    """Call ``trainer.fit``. Raises KeyboardInterrupt on Ctrl-C, which Lightning turns into a SystemExit."""
    model = session.model if session.compiled is None else session.compiled
    try:
        trainer.fit(model, **data)
    except SystemExit as end:
        if short_fit.interrupted:
            raise KeyboardInterrupt from end
        raise


# --- the Trainer of a short fit -----------------------------------------------------------------------------------


def short_trainer(
    package: ModuleType, like: AnyTrainer, callbacks: list[object], folder: str, *, prefetch: bool
) -> AnyTrainer:
    """Return a new Trainer on one device, with the settings of ``like`` that change what a step does.

    These settings are accelerator, the first of the devices, precision, gradient accumulation and clipping,
    ``max_epochs`` and ``max_steps`` (which schedulers read), ``limit_train_batches``, ``log_every_n_steps``, anomaly
    detection, and with ``prefetch`` the PrefetchCallback. In place of loggers, one logger drops everything.
    Checkpoints, validation, progress bar, profiler and all other callbacks are left out.
    """
    kept = [callback for callback in _host.callbacks_of(like) if prefetch and isinstance(callback, PrefetchCallback)]
    wanted = [*copy.deepcopy(kept), *callbacks]
    trainer: AnyTrainer = package.Trainer(
        **_device(like),
        **_precision(like),
        max_epochs=like.max_epochs,
        max_steps=like.max_steps,
        accumulate_grad_batches=like.accumulate_grad_batches,
        gradient_clip_val=like.gradient_clip_val,
        gradient_clip_algorithm=like.gradient_clip_algorithm,
        logger=_silent_logger(package) if like.loggers else False,
        callbacks=list(wanted),
        limit_train_batches=1.0 if _host.is_fast_dev_run(like) else like.limit_train_batches,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=max(1, _host.log_interval(like)),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        detect_anomaly=_host.detects_anomalies(like),
        default_root_dir=folder,
    )
    # Other packages may have added callbacks to every Trainer.
    added = _host.callbacks_of(trainer)
    added[:] = [callback for callback in added if any(callback is known for known in wanted)]
    return trainer


def _device(like: AnyTrainer) -> dict[str, Any]:
    """Return the Trainer arguments for one device: the first device of the Trainer ``like``."""
    device = like.strategy.root_device
    accelerator = device.type if device.type in ("cpu", "cuda", "mps") else like.accelerator
    devices = [device.index] if device.type == "cuda" and device.index is not None else 1
    return {"accelerator": accelerator, "devices": devices}


def _silent_logger(package: ModuleType) -> Any:
    """Return a logger that accepts any call, and drops everything."""
    dummy = import_module(f"{package.__name__}.loggers.logger").DummyLogger
    return type("SilentLogger", (dummy,), {"log_dir": None})()


def _precision(like: AnyTrainer) -> dict[str, Any]:
    """Return the Trainer arguments for the precision: its name, or a copy of the user's plugin, whose GradScaler has
    state."""
    kind = type(like.precision_plugin)
    if kind.__name__ in PRECISIONS_BY_NAME and _host.defined_by_lightning(kind):
        return {"precision": like.precision}
    return {"plugins": [copy.deepcopy(like.precision_plugin)]}
