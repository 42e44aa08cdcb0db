"""A Trainer of the user's own kind for one short fit, with nothing in it that writes, validates or draws."""

import copy
import io
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from lightning_feed import _host
from lightning_feed._host.loops import PACKAGES
from lightning_feed.callbacks.prefetch import PrefetchCallback
from lightning_feed.diagnosing.restore import StopSignals
from lightning_feed.errors import SettingsError

QUIET_LOGGERS = (*PACKAGES, *PACKAGES.values(), "lightning.fabric", "lightning_fabric", "lightning_feed")
PRECISIONS_BY_NAME = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
"""Classes of precision plugins that ``Trainer(precision=...)`` makes anew from the name."""
LATEST = 3
"""A fit ends after so many times its seconds, however few its steps."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a fit goes on: to ``most`` steps, or until ``seconds`` are over, then to ``least`` steps."""

    least: int
    most: int
    seconds: float


def check_trainer(trainer: Any) -> None:
    """Refuse Trainers beside which no short fit can be made.

    Raises:
        SettingsError: when it is training now, when this process is one of several ranks, or when the model is sharded.
    """
    if _host.is_training(trainer):
        raise SettingsError("This Trainer is running. Call diagnose() before or after fit(), not from within.")
    if _host.shards_the_model(trainer):
        raise SettingsError(
            f"{type(trainer.strategy).__name__} divides the model among devices, and diagnose() trains on one. "
            "Diagnose the data module alone, diagnose(None, None, datamodule), and add GPUStarvationCallback() to "
            "the run."
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise SettingsError(
            "This process is one of several ranks. Run diagnose() in a process of its own, on one device; "
            "GPUStarvationCallback() measures what ranks cost each other in the run itself."
        )


def short_trainer(package: Any, like: Any, callbacks: list[Any], folder: str, *, prefetch: bool) -> Any:
    """A new Trainer on one device, with the settings of ``like`` that change what a step does.

    Kept: accelerator, the first of the devices, precision, accumulation, clipping, ``max_epochs`` and ``max_steps`` (as
    the optimizers are told of them), ``limit_train_batches``, ``log_every_n_steps``, anomaly detection, and
    PrefetchCallback. A module that had a logger finds one, which drops everything.
    Left out: loggers, checkpoints, validation, progress bar, profiler, all other callbacks.
    """
    device = like.strategy.root_device
    kept = [callback for callback in like.callbacks if prefetch and isinstance(callback, PrefetchCallback)]
    mine = [*copy.deepcopy(kept), *callbacks]
    trainer = package.Trainer(
        accelerator=device.type if device.type in ("cpu", "cuda", "mps") else like.accelerator,
        devices=[device.index] if device.index is not None and device.type == "cuda" else 1,
        logger=_silent_logger(package) if like.loggers else False,
        callbacks=list(mine),
        max_epochs=like.max_epochs,
        max_steps=like.max_steps,
        limit_train_batches=1.0 if like.fast_dev_run else like.limit_train_batches,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=max(1, like.log_every_n_steps),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=like.accumulate_grad_batches,
        gradient_clip_val=like.gradient_clip_val,
        gradient_clip_algorithm=like.gradient_clip_algorithm,
        detect_anomaly=_host.detects_anomalies(like),
        default_root_dir=folder,
        **_precision(like),
    )
    # Other packages may have added callbacks to every Trainer. None of ours is dropped by that.
    trainer.callbacks = [callback for callback in trainer.callbacks if any(callback is one for one in mine)]
    return trainer


def _precision(like: Any) -> dict[str, Any]:
    """The precision by its name; a plugin of the user's own as a copy, since a GradScaler in it has a state."""
    kind = type(like.precision_plugin)
    if kind.__name__ in PRECISIONS_BY_NAME and _host.defined_by_lightning(kind):
        return {"precision": like.precision}
    return {"plugins": [copy.deepcopy(like.precision_plugin)]}


def _silent_logger(package: Any) -> Any:
    """A logger on which everything can be called, and which writes nothing: that of ``fast_dev_run``."""
    dummy = import_module(f"{package.__name__}.loggers.logger").DummyLogger
    return type("SilentLogger", (dummy,), {"log_dir": None})()  # it has methods under all other names


class ShortFit:
    """Ends a fit in time, and tells each step to ``on_step``. Mixed into the Callback of either package."""

    def __init__(
        self, limits: Limits, stops: StopSignals, on_start: Callable[[Any], None], on_step: Callable[[], object]
    ) -> None:
        self.limits, self.stops, self.on_start, self.on_step = limits, stops, on_start, on_step
        self.steps = self.epochs = 0
        self.interrupted = False
        self.wraps: list[_host.Wrap] = []
        self._planned = math.inf
        self._began = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the clock, and let the fit go on past the end of the training."""
        self.stops.look()
        planned = trainer.estimated_stepping_batches
        self._planned = math.inf if planned == -1 else planned
        _host.go_on_past_the_end(trainer)
        _host.keep_plateaus(trainer)
        self._began = time.perf_counter()
        self.on_start(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the passes through the loaders."""
        self.epochs += 1
        self.stops.look()  # the loader of the epoch before is gone, and with it, perhaps, a Ctrl-C

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """End the fit when its time is over."""
        self.stops.look()
        self.steps += 1
        self.on_step()
        took = time.perf_counter() - self._began
        late = took >= self.limits.seconds and self.steps >= self.limits.least
        if self.steps >= self.limits.most or late or took >= LATEST * self.limits.seconds:
            trainer.should_stop = True
        if trainer.global_step + 1 >= self._planned and not self.wraps:
            # A schedule of fixed length raises when it is stepped past its end.
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            self.wraps = [_host.Wrap(scheduler, "step", nothing) for scheduler in schedulers]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Note a Ctrl-C, which Lightning makes an exit of."""
        if isinstance(exception, KeyboardInterrupt):
            self.interrupted = True
            sys.stdin = io.StringIO()  # Lightning 2.4 calls exit(), which closes it


def nothing(*_: Any, **__: Any) -> None:
    """In the place of a method that is not to run."""


@contextmanager
def quiet() -> Iterator[None]:
    """A context without warnings and without Lightning's messages, which speak of our short fits."""
    loggers = [logging.getLogger(name) for name in QUIET_LOGGERS]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)
