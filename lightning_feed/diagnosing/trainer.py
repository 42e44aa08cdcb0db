"""A Trainer of the user's own kind for one short fit, with nothing in it that writes, validates or draws."""

import copy
import io
import logging
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_feed import _host
from lightning_feed.diagnosing.globals import QUIET_LOGGERS
from lightning_feed.diagnosing.stopping import StopSignals
from lightning_feed.errors import SettingsError
from lightning_feed.prefetch_callback import PrefetchCallback

BY_NAME = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
"""Classes of precision plugins that ``Trainer(precision=...)`` makes anew from the name."""
LATEST = 3
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


@dataclass(frozen=True)
class Package:
    """One of the two trees of classes: ``lightning.pytorch`` or ``pytorch_lightning``."""

    name: str

    @property
    def root(self) -> Any:
        """The package: has ``Trainer``, ``Callback``, ``LightningModule``, ``LightningDataModule``."""
        return import_module(self.name)

    @property
    def feed(self) -> Any:
        """Where its GPUStarvationCallback is."""
        return import_module("lightning_feed" if self.name == "lightning.pytorch" else "lightning_feed.pl")

    def silent_logger(self) -> Any:
        """A logger on which everything can be called, and which writes nothing: that of ``fast_dev_run``."""
        dummy = import_module(f"{self.name}.loggers.logger").DummyLogger
        return type("SilentLogger", (dummy,), {"log_dir": None})()  # it has methods under all other names


def package_of(thing: Any) -> Package:
    """The tree that a Trainer, a module or a data module comes from.

    Raises:
        SettingsError: when it comes from neither.
    """
    for base in type(thing).__mro__:
        name = PACKAGES.get(base.__module__.partition(".")[0])
        if name is not None:
            return Package(name)
    raise SettingsError(
        f"{type(thing).__module__}.{type(thing).__qualname__} comes from neither lightning.pytorch nor "
        "pytorch_lightning. Give a Trainer, a LightningModule and a LightningDataModule of one of them."
    )


def package_of_all(things: list[Any]) -> Package:
    """The one tree that all of them come from.

    Raises:
        SettingsError: when they come from both, since a Trainer of one takes nothing of the other, or from neither.
    """
    first, *others = things
    for other in others:
        if package_of(other) != package_of(first):
            raise SettingsError(
                f"{type(first).__name__} comes from {package_of(first).name} and {type(other).__name__} from "
                f"{package_of(other).name}, and neither package takes what is of the other. Import both from one."
            )
    return package_of(first)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a fit goes on: to ``most`` steps, or until ``seconds`` are over, then to ``least`` steps.

    After ``LATEST`` times the seconds it ends all the same.
    """

    least: int
    most: int
    seconds: float


def short_trainer(package: Package, like: Any, callbacks: list[Any], folder: str, *, prefetch: bool) -> Any:
    """A new Trainer on one device, with the settings of ``like`` that change what a step does.

    Kept: accelerator, the first of the devices, precision, accumulation, clipping, ``max_epochs`` and ``max_steps`` (as
    the optimizers are told of them), ``limit_train_batches``, ``log_every_n_steps``, anomaly detection, and
    PrefetchCallback. A module that had a logger finds one, which drops everything.
    Left out: loggers, checkpoints, validation, progress bar, profiler, all other callbacks.

    Args:
        package: the tree of ``like``.
        like: the user's Trainer. It is only read.
        callbacks: the only callbacks besides PrefetchCallback, in this order after it.
        folder: ``default_root_dir``.
        prefetch: keep PrefetchCallback.
    """
    device = like.strategy.root_device
    kept = [callback for callback in like.callbacks if prefetch and isinstance(callback, PrefetchCallback)]
    mine = [*copy.deepcopy(kept), *callbacks]
    trainer = package.root.Trainer(
        accelerator=device.type if device.type in ("cpu", "cuda", "mps") else like.accelerator,
        devices=[device.index] if device.index is not None and device.type == "cuda" else 1,
        logger=package.silent_logger() if like.loggers else False,
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
    if type(like.precision_plugin).__name__ in BY_NAME and _host.defined_by_lightning(type(like.precision_plugin)):
        return {"precision": like.precision}
    return {"plugins": [copy.deepcopy(like.precision_plugin)]}


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
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise SettingsError(
            "This process is one of several ranks. Run diagnose() in a process of its own, on one device; "
            "GPUStarvationCallback() measures what ranks cost each other in the run itself."
        )


class _Hooks:
    """Ends a fit in time, and tells each step to ``on_step``. Mixed into the Callback of either package."""

    def __init__(
        self, limits: Limits, stops: StopSignals, on_start: Callable[[Any], None], on_step: Callable[[int], None]
    ) -> None:
        self.limits, self.stops, self.on_start, self.on_step = limits, stops, on_start, on_step
        self.steps = self.epochs = 0
        self.interrupted = False
        self._planned = float("inf")
        self._began = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.stops.look()
        planned = trainer.estimated_stepping_batches
        self._planned = float("inf") if planned in (-1, float("inf")) else planned
        _host.go_on_past_the_end(trainer)
        _host.keep_plateaus(trainer)
        self._began = time.perf_counter()
        self.on_start(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1
        self.stops.look()  # the loader of the epoch before is gone, and with it, perhaps, a Ctrl-C

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.stops.look()
        self.steps += 1
        self.on_step(self.steps)
        took = time.perf_counter() - self._began
        late = took >= self.limits.seconds and self.steps >= self.limits.least
        if self.steps >= self.limits.most or late or took >= LATEST * self.limits.seconds:
            trainer.should_stop = True
        if trainer.global_step + 1 >= self._planned:
            _host.stop_schedulers(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            self.interrupted = True
            sys.stdin = io.StringIO()  # Lightning 2.4 calls exit(), which closes it


def make_hooks(
    package: Package,
    limits: Limits,
    stops: StopSignals,
    on_start: Callable[[Any], None],
    on_step: Callable[[int], None],
) -> Any:
    """The callback that ends a fit in time, and calls ``on_start(trainer)`` and ``on_step(steps so far)``.

    A signal that ``stops`` has noted ends the fit as Ctrl-C does, at the next step at the latest.
    """
    return type("ShortFit", (_Hooks, package.root.Callback), {})(limits, stops, on_start, on_step)


def run_fit(trainer: Any, hooks: Any, model: Any, data: dict[str, Any]) -> None:
    """``trainer.fit``, from which a Ctrl-C comes as the KeyboardInterrupt that it was, and so does a SIGTERM.

    An exit that the user's code asks for comes as it is.

    Args:
        trainer: made by :func:`short_trainer`.
        hooks: made by :func:`make_hooks`, among its callbacks.
        model: the module.
        data: ``datamodule`` or ``train_dataloaders``, by name.
    """
    try:
        trainer.fit(model, **data)
    except SystemExit as end:
        if _told_to_end(trainer, end):
            hooks.stops.note(signal.SIGTERM)
        elif not hooks.interrupted and hooks.stops.number is None:  # Lightning makes an exit of Ctrl-C
            raise
        raise KeyboardInterrupt from end


def _told_to_end(trainer: Any, end: SystemExit) -> bool:
    """Whether a fit ended because Lightning got a SIGTERM: of a process with a handler of the user's own for it."""
    exceptions = import_module(f"{package_of(trainer).name}.utilities.exceptions")
    return isinstance(end, exceptions.SIGTERMException)


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice and messages, which speak of the user's Trainer, not of ours."""
    loggers = [logging.getLogger(name) for name in QUIET_LOGGERS]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings():
        # The last is where torch's warnings about a watched step come up.
        warnings.filterwarnings("ignore", module=r"(pytorch_)?lightning(_fabric|_feed\.diagnosing\.keys)?(\.|$)")
        for package in PACKAGES.values():
            warnings.filterwarnings("ignore", message=".*", category=_advice(package))
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


def _advice(package: str) -> type[Warning]:
    """Lightning's category for what it thinks could be done better; of a package that is not loaded, none."""
    rank_zero = sys.modules.get(f"{package.replace('.pytorch', '.fabric')}.utilities.warnings") or sys.modules.get(
        "lightning_fabric.utilities.warnings"
    )
    category: type[Warning] = getattr(rank_zero, "PossibleUserWarning", ImportWarning)
    return category
