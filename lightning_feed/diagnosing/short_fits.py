"""Short fits on the user's objects: the unchanged training, and replays of its batches. Signals, and restored state."""

import copy
import gc
import io
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from lightning_feed import _host
from lightning_feed._host import AnyDataModule, AnyModule, AnyTrainer, Original
from lightning_feed.callbacks.loader_place import place_of
from lightning_feed.callbacks.prefetch import PrefetchCallback
from lightning_feed.diagnosing.batches import KeyWatch, Pace, Replay, Sample, copy_of, is_opaque, own_loaders
from lightning_feed.diagnosing.failures import loading_failed
from lightning_feed.diagnosing.session import parts_of
from lightning_feed.errors import FeedError, SettingsError
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.facts import batches_ahead
from lightning_feed.measure.measurements import Measurements, Place
from lightning_feed.measure.windows import WARM_UP_STEPS

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "device_transform")
STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end")
OWN_HOOKS = ("[Callback]ShortFit.", "[Callback]GPUStarvationCallback.")
"""Hooks that a diagnosis adds to a fit. They are not reported."""
ENDS = ("on_fit_end", "on_train_end", "teardown", "on_exception", "on_save_checkpoint")
"""The user's hooks that are not called: they may upload the short fit as if it were the result of a training."""
AS_IT_IS = "training as it is failed"
LATEST = 3
"""A fit ends after this many times its seconds, even with too few steps."""
PRECISIONS_BY_NAME = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
"""Classes of the precision plugins that ``Trainer(precision=...)`` makes from a name."""


# --- signals ------------------------------------------------------------------------------------------------------


class StopSignals:
    """Context manager that raises KeyboardInterrupt on Ctrl-C and SIGTERM, and remembers the signal.

    Python drops a KeyboardInterrupt raised in a ``__del__`` or in a weak reference's callback ("Exception ignored in"),
    and torch's loaders and ``logging`` have both. So :meth:`check` raises it again.

    SIGTERM is handled if it would end the process, Ctrl-C if it is not ignored. The user's own handler is called first,
    and decides if the signal interrupts. Outside the main thread no signal is handled.

    Attributes:
        number: number of the first signal received; None: none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._held, self._pid = False, os.getpid()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            if callable(signal.getsignal(signal.SIGINT)):  # neither ignored nor set by C code
                self._before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self._before[signal.SIGTERM] = signal.SIG_DFL
            for number in self._before:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def hold_back(self) -> None:
        """From now on, note signals without raising: the code that follows must not be interrupted."""
        self._held = True

    def note(self, number: int) -> None:
        """Note a signal. Only the first counts."""
        self.number = self.number or number

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self.number is not None:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if os.getpid() != self._pid and before is signal.SIG_DFL:  # a newly forked worker
            signal.signal(number, before)
            os.kill(os.getpid(), number)
        elif self._held:
            self.note(number)
        else:
            try:
                (before if callable(before) else signal.default_int_handler)(number, frame)
            except KeyboardInterrupt:
                self.note(number)
                raise


# --- the state of a module ----------------------------------------------------------------------------------------


class ModelState:
    """Saved state of a module, of the optimizers and schedulers in its attributes, and of callbacks.

    Holds the ``state_dict`` of each of them, the mode (``train()`` or ``eval()``) of each submodule, and
    ``requires_grad`` of each parameter. Tensors are kept in host memory.

    Args:
        model: the module, or None.
        callbacks: the user's callbacks.
    """

    def __init__(self, model: nn.Module | None, callbacks: Sequence[Any] = ()) -> None:
        self._model = nn.Module() if model is None else model
        modules = list(self._model.modules())
        self._modes = [(one, one.training) for one in modules]
        self._learning = [(one, one.requires_grad) for one in self._model.parameters() if not is_lazy(one)]
        held = [value for one in modules for value in vars(one).values() if isinstance(value, (Optimizer, LRScheduler))]
        self._states = [(one, tree_map(_on_host, copy.deepcopy(one.state_dict()))) for one in [*held, *callbacks]]
        # The base class's state_dict: the user's may leave parameters out.
        self._values = {
            name: _on_host(value)
            for name, value in nn.Module.state_dict(self._model).items()
            if not (is_lazy(value) or getattr(value, "is_meta", False))
        }

    def restore(self) -> None:
        """Restore the state, and drop gradients. May be called more than once."""
        for module, mode in self._modes:
            module.training = mode
        for parameter, learns in self._learning:
            parameter.requires_grad_(learns)
            parameter.grad = None
        nn.Module.load_state_dict(self._model, self._values, strict=False)
        for one, state in self._states:
            one.load_state_dict(copy.deepcopy(state))


@contextmanager
def _preserve_attributes(datamodule: AnyDataModule | None) -> Iterator[None]:
    """Restore the attributes of a data module at the end of a ``with`` block. Objects in them may have changed."""
    if datamodule is None:
        yield
        return
    attributes = dict(datamodule.__dict__)
    try:
        yield
    finally:
        datamodule.__dict__.clear()
        datamodule.__dict__.update(attributes)


def _on_host(value: object) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


# --- the session --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The length of a fit: at most ``most`` steps, or ``seconds`` with at least ``least`` steps."""

    least: int
    most: int
    seconds: float


@dataclass
class DiagnosisSession:
    """The user's objects that experiments train on, and the measurements of the unchanged training.

    Attributes:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        trainer: the user's Trainer, never changed.
        model: the user's module, or None.
        datamodule: the user's data module, or None.
        loaders: the user's training loaders; None if the data module or the module has them.
        compiled: the user's module from ``torch.compile``, if ``model`` was compiled.
        callbacks: the user's callbacks that run in the unchanged training.
        stops: signals that end the fits.
        train_loaders: the data module's loaders, or dicts or lists of them. Fits and experiments get copies.
        measured: measurements of the unchanged training.
        host_batches: batches of that training, from the loader.
        device_batches: the same batches, as passed to the step.
        uses: for each part of the batch, True if the first step read it, None if unknown.
    """

    package: ModuleType
    trainer: AnyTrainer
    model: AnyModule
    datamodule: AnyDataModule = None
    loaders: AnyLoader = None
    compiled: Any = None
    callbacks: list[Any] = field(default_factory=list)
    stops: StopSignals = field(default_factory=StopSignals)
    train_loaders: AnyLoader = None
    measured: Measurements | None = None
    host_batches: Sample = field(default_factory=Sample)
    device_batches: Sample = field(default_factory=Sample)
    uses: dict[str, bool | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        device: torch.device = self.trainer.strategy.root_device
        return device

    @property
    def loader_owner(self) -> Any:
        """The object with ``train_dataloader``; None if the loaders were passed."""
        return None if self.loaders is not None else self.model if self.datamodule is None else self.datamodule

    @contextmanager
    def restoring(self) -> Iterator[ModelState]:
        """Context manager to handle signals, and to restore what the fits change. Yields the module's state."""
        if self.device.type == "cuda":
            torch.cuda.init()  # so that its generators are restored, too
        with self.stops, preserve_state(self.loaders), _preserve_attributes(self.datamodule):
            state = ModelState(self.model, self.callbacks)
            try:
                yield state
            finally:
                self.stops.hold_back()
                state.restore()

    def set_up(self) -> None:
        """Get the training loaders as Lightning would, without fitting.

        Raises:
            SettingsError: there are none.
        """
        self.train_loaders = self.loaders
        owner = self.loader_owner
        if owner is None:
            return
        if owner is self.model or owner.trainer is None:  # a module without a Trainer raises
            owner.trainer = self.trainer
        owner.prepare_data()
        owner.setup("fit")
        self.train_loaders = owner.train_dataloader()
        if self.train_loaders is None:
            raise SettingsError(
                f"{type(owner).__name__}.train_dataloader() returned None, so there is nothing to load. Make it return "
                "the training loader, such as a DataLoader."
            )

    def tear_down(self) -> None:
        """Call the data module's ``teardown``, which the fits leave out."""
        if self.datamodule is not None and _host.is_overridden(self.datamodule, "teardown"):
            self.datamodule.teardown("fit")

    def place(self) -> Place | None:
        """The place in the user's code that sets up the training loader, or None if it cannot be found.

        Looks at the user's own Trainer, which knows the keys of the command line.
        """
        try:
            loaders = [part.loader for part in parts_of(self.train_loaders)]
            return place_of(self.loader_owner, self.trainer, self.datamodule, loaders)
        except Exception:  # noqa: BLE001  # loaders of another kind, or sources that cannot be read
            return None

    def run_as_it_is(self, limits: Limits) -> None:
        """Run a fit with the user's loaders. Records measurements, batches, and the parts that a step reads."""
        feed = import_module("lightning_feed" if self.package.__name__ == "lightning.pytorch" else "lightning_feed.pl")
        meter = feed.GPUStarvationCallback(nvml=False, report=False)

        def on_start(trainer: object) -> None:
            queue = batches_ahead(_host.train_loaders(trainer))  # a full queue hides a slow loader for so many steps
            short_fit.limits = replace(limits, most=limits.most + queue + WARM_UP_STEPS)
            short_fit.wraps += self._watch_batches(trainer, queue + WARM_UP_STEPS)

        def give(loaders: object) -> Any:
            before.enter_context(preserve_state(loaders))
            return own_loaders(loaders)

        short_fit = self._short_fit(limits, on_start)
        try:
            with ExitStack() as before:
                self._fit(short_fit, [*self.callbacks, meter, short_fit], give)
        except FeedError:
            raise
        except Exception as error:
            first_pass = short_fit.epochs <= 1
            failed = loading_failed(AS_IT_IS, error, self.model, self.train_loaders, first_pass=first_pass)
            if failed is None:
                raise
            raise failed from error
        finally:
            measured = meter.report().measurements
            theirs = tuple(hook for hook in measured.hooks if not hook.name.startswith(OWN_HOOKS))
            facts = replace(measured.facts, place=self.place() or measured.facts.place)
            # The wall time is this short fit's, which is of no interest.
            self.measured = replace(measured, hooks=theirs, facts=facts, wall=None)

    def replay(self, batches: Sequence[Batch], limits: Limits, *, on_device: bool) -> float | None:
        """Batches per second of a fit whose steps get ``batches`` repeatedly; None: too few steps.

        Args:
            batches: batches as passed to the step, if on the device, else from the loader.
            limits: length of the fit.
            on_device: leave out the transfer to the device, with its hooks.
        """
        pace = Pace(self.device)

        def on_start(trainer: object) -> None:
            if on_device:
                short_fit.wraps += _host.wrap_transfer(
                    trainer, lambda _, batch: batch, lambda _original, _name, batch, *_: batch
                )

        known = self.measured.facts.batches_per_epoch if self.measured is not None else None
        endless = Replay(batches, max(limits.most + 1, known or 0))
        short_fit = self._short_fit(limits, on_start, pace.stamp)
        self._fit(short_fit, [short_fit], lambda _: endless, set_up=False, prefetch=not on_device)
        return pace.per_s(self.trainer.accumulate_grad_batches, len(batches))

    def _short_fit(
        self, limits: Limits, on_start: Callable[[AnyTrainer], None], on_step: Callable[[], object] = lambda: None
    ) -> "ShortFit":
        """The callback that ends a fit. Lightning recognizes callbacks by their class."""
        made: ShortFit = type("ShortFit", (ShortFit, self.package.Callback), {})(limits, self.stops, on_start, on_step)
        return made

    def _fit(
        self,
        short_fit: "ShortFit",
        callbacks: list[Any],
        give: Callable[[Any], Any],
        *,
        set_up: bool = True,
        prefetch: bool = True,
    ) -> None:
        """Run a short fit on ``give(loaders)``; with ``set_up=False``, the data module is already set up."""

        def given(original: Callable[[], Any]) -> Any:
            self.train_loaders = original() if set_up else self.train_loaders
            return give(self.train_loaders)

        data: dict[str, Any] = {"datamodule": self.datamodule}
        if self.loaders is not None:
            data = {"train_dataloaders": given(lambda: self.loaders)}
        stdin = sys.stdin
        wraps = self._wraps(given, set_up=set_up)
        before = None
        with suppress(RuntimeError):  # it has no Trainer
            before = self.model.trainer
        try:
            with tempfile.TemporaryDirectory(prefix="feed_diagnose_") as folder:
                trainer = short_trainer(self.package, self.trainer, callbacks, folder, prefetch=prefetch)
                self._run_fit(trainer, short_fit, data)
        finally:
            for wrap in reversed([*wraps, *short_fit.wraps]):
                wrap.undo()
            sys.stdin = stdin
            self.model.trainer = before
            trainer = None
            gc.collect()  # a Trainer is part of reference cycles; this also ends the workers of this fit

    def _wraps(self, given: Callable[[Any], Any], *, set_up: bool) -> list[_host.Wrap]:
        """The user's methods to replace for a fit."""
        owner = self.loader_owner
        parts = [self.model, self.datamodule, *self.callbacks]
        silenced = [(one, name) for one in parts for name in ENDS if _host.is_overridden(one, name)]
        if owner is not None and owner is self.datamodule and not set_up:
            silenced += [(owner, "prepare_data"), (owner, "setup")]
        wraps = [_host.Wrap(self.model, "configure_callbacks", lambda _: [])]
        wraps += [] if owner is None else [_host.Wrap(owner, "train_dataloader", given)]
        return wraps + [_host.Wrap(one, name, nothing) for one, name in silenced]

    def _run_fit(self, trainer: AnyTrainer, short_fit: "ShortFit", data: dict[str, Any]) -> None:
        """Call ``trainer.fit``; raise KeyboardInterrupt for Ctrl-C and SIGTERM, and other exits unchanged."""
        try:
            trainer.fit(self.model if self.compiled is None else self.compiled, **data)
        except SystemExit as end:
            # Lightning raises this for a SIGTERM if the user has a handler for it.
            if isinstance(end, import_module(f"{self.package.__name__}.utilities.exceptions").SIGTERMException):
                self.stops.note(signal.SIGTERM)
            elif not short_fit.interrupted and self.stops.number is None:  # Lightning turns Ctrl-C into an exit
                raise
            raise KeyboardInterrupt from end

    def _watch_batches(self, trainer: AnyTrainer, warm_up: int) -> list[_host.Wrap]:
        """Keep batches of a fit, before and after the transfer to the device, and watch the first step read one."""
        if _host.takes_iterator(self.model):
            return []
        self.host_batches = Sample(warm_up)
        self.device_batches = Sample(warm_up)

        def on_host(original: Original, batch: object) -> Any:
            self.host_batches.offer(batch)
            return original(batch)

        def step(original: Original, batch: object, *rest: Any, **named: object) -> Any:
            self.device_batches.offer(batch)
            if self.device_batches.came > 1 or self.compiled is not None or is_opaque(self.model):
                return original(batch, *rest, **named)
            try:
                with KeyWatch(batch) as watch:
                    output = original(watch.batch, *rest, **named)
            except Exception:  # noqa: BLE001  # the step may not accept watched dicts: give it an ordinary batch
                first = self.device_batches.first
                return original(batch if first is None else copy_of(first), *rest, **named)
            sure = not self._read_elsewhere()
            self.uses = {name: used if sure else used or None for name, used in watch.uses().items()}
            return output

        return [
            _host.Wrap(trainer.precision_plugin, "convert_input", on_host),
            _host.Wrap(self.model, "training_step", step),
        ]

    def _read_elsewhere(self) -> bool:
        """True if other hooks of the user get the batch, or change it before the step."""
        seers = [(one, hook) for one in (self.model, self.datamodule) for hook in TRANSFER_HOOKS]
        seers += [(one, hook) for one in (self.model, *self.trainer.callbacks) for hook in STEP_HOOKS]
        return any(_host.is_overridden(one, hook) for one, hook in seers)


def open_session(
    trainer: AnyTrainer, model: object, datamodule: AnyDataModule = None, loaders: object = None
) -> DiagnosisSession:
    """Open a session for the arguments of ``Trainer.fit``. Without a Trainer, Lightning chooses the device.

    Raises:
        SettingsError: the objects come from both packages or from neither, the Trainer is training now, this process is
            one of several ranks, or the model is sharded.
    """
    plain = getattr(model, "_orig_mod", model)
    known = [one for one in (trainer, plain, datamodule) if one is not None]
    package = _host.package_of(*known) if known else import_module("lightning.pytorch")
    if trainer is None:
        trainer = plain_trainer(package)
    elif _host.is_training(trainer):
        raise SettingsError("This Trainer is running. Call diagnose() before or after fit(), not from within.")
    elif _host.shards_the_model(trainer):
        raise SettingsError(
            f"{type(trainer.strategy).__name__} divides the model among devices, but diagnose() trains on one. "
            "Diagnose only the data module, with diagnose(None, None, datamodule), and add GPUStarvationCallback() to "
            "the run."
        )
    elif torch.distributed.is_available() and torch.distributed.is_initialized():
        raise SettingsError(
            "This process is one of several ranks. Run diagnose() in a separate process, on one device. To compare "
            "ranks, use GPUStarvationCallback() in the run itself."
        )
    return DiagnosisSession(package, trainer, plain, datamodule, loaders, model if plain is not model else None)


# --- the Trainer of a short fit, and its end ----------------------------------------------------------------------


def plain_trainer(package: Any, accelerator: str = "auto") -> AnyTrainer:
    """A Trainer on one device that writes no files."""
    with quiet():
        return package.Trainer(accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False)


def short_trainer(package: Any, like: AnyTrainer, callbacks: list[Any], folder: str, *, prefetch: bool) -> AnyTrainer:
    """A new Trainer on one device, with the settings of ``like`` that change what a step does.

    Kept: accelerator, the first of the devices, precision, accumulation, clipping, ``max_epochs`` and ``max_steps``
    (which schedulers read), ``limit_train_batches``, ``log_every_n_steps``, anomaly detection, and PrefetchCallback. If
    there was a logger, there is one that drops everything.
    Left out: loggers, checkpoints, validation, progress bar, profiler, all other callbacks.
    """
    device = like.strategy.root_device
    kept = [callback for callback in like.callbacks if prefetch and isinstance(callback, PrefetchCallback)]
    mine = [*copy.deepcopy(kept), *callbacks]
    dummy = import_module(f"{package.__name__}.loggers.logger").DummyLogger  # accepts any call
    same = ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    trainer = package.Trainer(
        **{name: getattr(like, name) for name in same},
        **_precision(like),
        accelerator=device.type if device.type in ("cpu", "cuda", "mps") else like.accelerator,
        devices=[device.index] if device.index is not None and device.type == "cuda" else 1,
        logger=type("SilentLogger", (dummy,), {"log_dir": None})() if like.loggers else False,
        callbacks=list(mine),
        limit_train_batches=1.0 if like.fast_dev_run else like.limit_train_batches,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=max(1, like.log_every_n_steps),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        detect_anomaly=_host.detects_anomalies(like),
        default_root_dir=folder,
    )
    # Other packages may have added callbacks to every Trainer.
    wanted = set(map(id, mine))
    trainer.callbacks = [callback for callback in trainer.callbacks if id(callback) in wanted]
    return trainer


def _precision(like: AnyTrainer) -> dict[str, Any]:
    """Return the precision's name, or a copy of the user's own plugin, whose GradScaler is stateful."""
    kind = type(like.precision_plugin)
    if kind.__name__ in PRECISIONS_BY_NAME and _host.defined_by_lightning(kind):
        return {"precision": like.precision}
    return {"plugins": [copy.deepcopy(like.precision_plugin)]}


class ShortFit:
    """Ends a fit in time, and calls ``on_step`` after each step. Mixed into the Callback of either package."""

    def __init__(
        self, limits: Limits, stops: StopSignals, on_start: Callable[[AnyTrainer], None], on_step: Callable[[], object]
    ) -> None:
        self.limits = limits
        self.stops = stops
        self.on_start = on_start
        self.on_step = on_step
        self.steps = self.epochs = 0
        self.interrupted = False
        self.wraps: list[_host.Wrap] = []
        """Replaced methods, to be restored after the fit."""
        self._planned = math.inf
        self._began = 0.0

    def on_train_start(self, trainer: AnyTrainer, pl_module: object) -> None:
        """Start the clock, and let the fit continue past the user's ``max_epochs`` and ``max_steps``."""
        self.stops.check()
        planned = trainer.estimated_stepping_batches
        self._planned = math.inf if planned == -1 else planned
        _host.go_on_past_the_end(trainer)
        _host.keep_plateaus(trainer)
        self._began = time.perf_counter()
        self.on_start(trainer)

    def on_train_epoch_start(self, trainer: object, pl_module: object) -> None:
        """Count the passes through the loaders."""
        self.epochs += 1
        self.stops.check()  # a Ctrl-C may have been dropped with the last epoch's loader

    def on_train_batch_end(self, trainer: AnyTrainer, *args: object) -> None:
        """End the fit after its time."""
        self.stops.check()
        self.steps += 1
        self.on_step()
        took = time.perf_counter() - self._began
        late = took >= self.limits.seconds and self.steps >= self.limits.least
        if self.steps >= self.limits.most or late or took >= LATEST * self.limits.seconds:
            trainer.should_stop = True
        if trainer.global_step + 1 >= self._planned:
            # A schedule of fixed length raises if it is stepped past its end.
            self._planned = math.inf
            self.wraps += [_host.Wrap(one.scheduler, "step", nothing) for one in trainer.lr_scheduler_configs]

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """Note a Ctrl-C, which Lightning turns into an exit."""
        if isinstance(exception, KeyboardInterrupt):
            self.interrupted = True
            sys.stdin = io.StringIO()  # Lightning 2.4 calls exit(), which closes it


def nothing(*_: object, **__: object) -> None:
    """Stand in for a method that must not run."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, and Lightning's messages about our short fits, as a context manager."""
    names = (*_host.PACKAGES, *_host.PACKAGES.values(), "lightning.fabric", "lightning_fabric", "lightning_feed")
    levels = {each: each.level for each in map(logging.getLogger, names)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for each in levels:
                each.setLevel(logging.ERROR)
            yield
        finally:
            for each, level in levels.items():
                each.setLevel(level)
