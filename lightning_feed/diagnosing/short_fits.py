"""Short fits on the user's objects: the training as it is, and on the same batches again and again."""

import gc
import itertools
import math
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from lightning_feed import _host
from lightning_feed._host.loops import package_of
from lightning_feed.callbacks.loader_place import place_of
from lightning_feed.diagnosing.batches import KeyWatch, Replay, Sample, copy_of, is_opaque, own_loaders
from lightning_feed.diagnosing.failure import loading_failed, raised_by_loader
from lightning_feed.diagnosing.restore import ModelState, StopSignals
from lightning_feed.diagnosing.trainer import Limits, ShortFit, check_trainer, nothing, quiet, short_trainer
from lightning_feed.errors import FeedError, SettingsError
from lightning_feed.load.random_state import preserve_state
from lightning_feed.watch.clocks import event_maker
from lightning_feed.watch.experiments.session import parts_of
from lightning_feed.watch.facts import batches_ahead
from lightning_feed.watch.verdict.diagnosis import Measurements, Place
from lightning_feed.watch.windows import WARM_UP_STEPS

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "device_transform")
STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end")
OWN_HOOKS = ("[Callback]ShortFit.", "[Callback]GPUStarvationCallback.")
"""What a diagnosis adds to a fit is not of the user's run."""
ENDS = ("on_fit_end", "on_train_end", "teardown", "on_exception", "on_save_checkpoint")
"""Hooks of the user's that are not called: they may upload what they take for the result of a training."""
AS_IT_IS = "training as it is failed"
WINDOWS = 5
FEWEST_CYCLES = WINDOWS
"""Optimizer steps behind the warm-up with which a rate is given."""
FEWEST_PASSES = 2
"""Times that several batches must have come behind the warm-up."""
STEPS_AHEAD = 8
"""Steps that the device may be behind the host: enough that it never runs out of work."""


@dataclass
class DiagnosisSession:
    """What the experiments share: the user's objects, and what the first of them found.

    Attributes:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        trainer: the user's; read only.
        model: the user's, or None.
        datamodule: the user's, or None.
        loaders: the user's training loaders; None where the data module or the module has them.
        compiled: what ``torch.compile`` made of ``model``, if that is what the user has.
        callbacks: the user's that run in the training as it is.
        stops: signals that end the fits.
        train_loaders: what the data module gave: loaders, dicts or lists of them. Fits and experiments get copies.
        measured: of the training as it is.
        host_batches: of it, as the loader gave them.
        device_batches: the same as the step got them.
        uses: whether its first step read each part of the batch.
    """

    package: ModuleType
    trainer: Any
    model: Any
    datamodule: Any = None
    loaders: Any = None
    compiled: Any = None
    callbacks: list[Any] = field(default_factory=list)
    stops: StopSignals = field(default_factory=StopSignals)
    train_loaders: Any = None
    measured: Measurements | None = None
    host_batches: Sample = field(default_factory=Sample)
    device_batches: Sample = field(default_factory=Sample)
    uses: dict[str, bool | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self.trainer.strategy.root_device
        return device

    @property
    def loader_owner(self) -> Any:
        """What has the ``train_dataloader``; None where the loaders were given."""
        return None if self.loaders is not None else self.model if self.datamodule is None else self.datamodule

    @contextmanager
    def restoring(self) -> Iterator[ModelState]:
        """A context that hears signals, and after which what the fits change is as before. Gives the module's state."""
        if self.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # its generators are kept too
        with StopSignals() as self.stops, preserve_state(self.datamodule, self.loaders, self.callbacks):
            state = ModelState(self.model)
            try:
                yield state
            finally:
                self.stops.hold_back()
                state.restore()

    def set_up(self) -> None:
        """Get the training loaders without a fit, as Lightning would.

        Raises:
            SettingsError: when there are none.
        """
        self.train_loaders, owner = self.loaders, self.loader_owner
        if owner is None:
            return
        if owner is self.model or owner.trainer is None:  # a module raises where it has none
            owner.trainer = self.trainer
        owner.prepare_data()
        owner.setup("fit")
        self.train_loaders = owner.train_dataloader()
        if self.train_loaders is None:
            raise SettingsError(
                f"{type(owner).__name__}.train_dataloader() gives None, so there is nothing to load from. Have "
                "it return the training loader, such as a DataLoader."
            )

    def tear_down(self) -> None:
        """Call the data module's ``teardown``, which the fits leave out."""
        if self.datamodule is not None and _host.is_overridden(self.datamodule, "teardown"):
            self.datamodule.teardown("fit")

    def place(self) -> Place | None:
        """Where the user sets the training loader up; their own Trainer knows the keys of the command line."""
        try:
            loaders = [part.loader for part in parts_of(self.train_loaders)]
            return place_of(self.loader_owner, self.trainer, self.datamodule, loaders)
        except Exception:  # noqa: BLE001  # loaders of another kind, or sources that cannot be read
            return None

    def run_as_it_is(self, limits: Limits) -> None:
        """A fit with the user's loaders: the measurements, batches, which parts of them are read."""
        feed = import_module("lightning_feed" if self.package.__name__ == "lightning.pytorch" else "lightning_feed.pl")
        meter = feed.GPUStarvationCallback(nvml=False, report=False)
        watch = _BatchWatch(self)

        def on_start(trainer: Any) -> None:
            queue = batches_ahead(_host.train_loaders(trainer))  # for so many steps a full queue hides a slow loader
            short_fit.limits = replace(limits, most=limits.most + queue + WARM_UP_STEPS)
            watch.begin(trainer, queue + WARM_UP_STEPS)

        def give(loaders: Any) -> Any:
            before.enter_context(preserve_state(loaders))
            return own_loaders(loaders)

        short_fit = self._short_fit(limits, on_start)
        try:
            with ExitStack() as before:
                self._fit(short_fit, [*self.callbacks, meter, short_fit], give)
        except Exception as error:
            if isinstance(error, FeedError) or not raised_by_loader(error, self.model):
                raise
            raise loading_failed(AS_IT_IS, error, self.train_loaders, first_pass=short_fit.epochs <= 1) from error
        finally:
            watch.end()
            measured = meter.report().measurements
            theirs = tuple(hook for hook in measured.hooks if not hook.name.startswith(OWN_HOOKS))
            facts = replace(measured.facts, place=self.place() or measured.facts.place)
            # The wall time is that of this short fit, and nobody's.
            self.measured = replace(measured, hooks=theirs, facts=facts, wall=None)

    def replay(self, batches: Sequence[Any], limits: Limits, *, on_device: bool) -> float | None:
        """Batches per second of a fit whose steps get ``batches`` again and again. None: too few steps.

        Args:
            batches: as the step gets them, if they are on the device, else as the loader gives them.
            limits: how long.
            on_device: leave the transfer to the device out, with its hooks.
        """
        pace = _Pace(self.device)

        def on_start(trainer: Any) -> None:
            if on_device:
                _host.wrap_transfer(trainer, lambda _, batch: batch, lambda _original, _name, batch, *_: batch)

        known = self.measured.facts.batches_per_epoch if self.measured is not None else None
        endless = Replay(batches, max(limits.most + 1, known or 0))
        short_fit = self._short_fit(limits, on_start, pace.stamp)
        self._fit(short_fit, [short_fit], lambda _: endless, set_up=False, prefetch=not on_device)
        return pace.per_s(self.trainer.accumulate_grad_batches, len(batches))

    def _short_fit(
        self, limits: Limits, on_start: Callable[[Any], None], on_step: Callable[[], object] = nothing
    ) -> Any:
        """The callback that ends a fit. Lightning tells callbacks by their class."""
        return type("ShortFit", (ShortFit, self.package.Callback), {})(limits, self.stops, on_start, on_step)

    def _fit(
        self,
        short_fit: Any,
        callbacks: list[Any],
        give: Callable[[Any], Any],
        *,
        set_up: bool = True,
        prefetch: bool = True,
    ) -> None:
        """A short fit on ``give(loaders)``. ``set_up=False``: the data module was set up by one before."""

        def given(original: Callable[[], Any]) -> Any:
            self.train_loaders = original() if set_up else self.train_loaders
            return give(self.train_loaders)

        data: dict[str, Any] = {"datamodule": self.datamodule}
        if self.loaders is not None:
            data = {"train_dataloaders": given(lambda: self.loaders)}
        stdin, wraps = sys.stdin, self._wraps(given, set_up=set_up)
        try:
            with tempfile.TemporaryDirectory(prefix="feed_diagnose_") as folder:
                trainer = short_trainer(self.package, self.trainer, callbacks, folder, prefetch=prefetch)
                self._run_fit(trainer, short_fit, data)
        finally:
            for wrap in reversed([*wraps, *short_fit.wraps]):
                wrap.undo()
            sys.stdin = stdin
            trainer = None
            gc.collect()  # a Trainer is a ring of objects; with it go the workers of this fit

    def _wraps(self, given: Callable[[Any], Any], *, set_up: bool) -> list[_host.Wrap]:
        """The methods of the user's that are replaced for a fit."""
        owner, callbacks = self.loader_owner, self.callbacks
        wraps = [_host.Wrap(self.model, "configure_callbacks", lambda _: [])]
        wraps += [] if owner is None else [_host.Wrap(owner, "train_dataloader", given)]
        if owner is self.datamodule and owner is not None and not set_up:
            wraps += [_host.Wrap(owner, name, nothing) for name in ("prepare_data", "setup")]
        owners = [one for one in (self.model, self.datamodule, *callbacks) if one is not None]
        ends = [(one, name) for one in owners for name in ENDS if _host.is_overridden(one, name)]
        return wraps + [_host.Wrap(one, name, nothing) for one, name in ends]

    def _run_fit(self, trainer: Any, short_fit: Any, data: dict[str, Any]) -> None:
        """``trainer.fit``, from which Ctrl-C and SIGTERM come as KeyboardInterrupt, other exits as they are."""
        try:
            trainer.fit(self.model if self.compiled is None else self.compiled, **data)
        except SystemExit as end:
            # Lightning's own, for a SIGTERM in a process where the user has a handler for it.
            if isinstance(end, import_module(f"{self.package.__name__}.utilities.exceptions").SIGTERMException):
                self.stops.note(signal.SIGTERM)
            elif not short_fit.interrupted and self.stops.number is None:  # Lightning makes an exit of Ctrl-C
                raise
            raise KeyboardInterrupt from end


def open_session(trainer: Any, model: Any, datamodule: Any = None, loaders: Any = None) -> DiagnosisSession:
    """A session on what would be given to ``Trainer.fit``; without a Trainer on the device that Lightning chooses.

    Raises:
        SettingsError: when they come from both packages or from neither, when the Trainer is training now, when this
            process is one of several ranks, or when the model is sharded.
    """
    plain = getattr(model, "_orig_mod", model)
    known = [one for one in (trainer, plain, datamodule) if one is not None]
    package = package_of(*known) if known else import_module("lightning.pytorch")
    if trainer is None:
        with quiet():
            trainer = package.Trainer(logger=False, enable_checkpointing=False, devices=1, enable_progress_bar=False)
    else:
        check_trainer(trainer)
    return DiagnosisSession(package, trainer, plain, datamodule, loaders, model if plain is not model else None)


class _BatchWatch:
    """Keeps batches of a fit, before and after the transfer to the device, and watches the first step read its own."""

    def __init__(self, session: DiagnosisSession) -> None:
        self._session = session
        self._wraps: list[_host.Wrap] = []
        self._first = True

    def begin(self, trainer: Any, warm_up: int) -> None:
        """At the start of the training."""
        session = self._session
        if _host.takes_iterator(session.model):
            return
        session.host_batches, session.device_batches = Sample(warm_up), Sample(warm_up)

        def on_host(original: Any, batch: Any) -> Any:
            session.host_batches.offer(batch)
            return original(batch)

        self._wraps = [
            _host.Wrap(trainer.precision_plugin, "convert_input", on_host),
            _host.Wrap(session.model, "training_step", self._step),
        ]

    def end(self) -> None:
        """After the fit."""
        for wrap in reversed(self._wraps):
            wrap.undo()

    def _step(self, original: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        session = self._session
        session.device_batches.offer(batch)
        if not self._first or session.compiled is not None or is_opaque(session.model):
            return original(batch, *rest, **named)
        self._first = False
        try:
            watch = KeyWatch(batch)
            with watch:
                output = original(watch.batch, *rest, **named)
        except Exception:  # noqa: BLE001  # a step that minds the containers minds nothing else: it gets its own batch
            first = session.device_batches.first
            return original(batch if first is None else copy_of(first), *rest, **named)
        uses = watch.uses()
        session.uses = {name: used or None for name, used in uses.items()} if self._read_elsewhere() else uses
        return output

    def _read_elsewhere(self) -> bool:
        """Whether hooks of the user's get the batch too, or change it before the step sees it."""
        session = self._session
        model, data, callbacks = session.model, session.datamodule, session.trainer.callbacks
        seers = [(one, hook) for one in (model, data) for hook in BATCH_HOOKS]
        seers += [(one, hook) for one in (model, *callbacks) for hook in STEP_HOOKS]
        return any(_host.is_overridden(one, hook) for one, hook in seers)


class _Pace:
    """The times at which steps end; on a device they are those at which it has finished them."""

    def __init__(self, device: torch.device) -> None:
        self._make = event_maker(device)
        self._wait = nothing if device.type == "cpu" else torch.get_device_module(device).synchronize
        self._ahead: deque[Any] = deque()
        self._stamps: list[float] = []

    def stamp(self) -> None:
        """A step has ended on the host.

        It waits for an earlier one: a host that never waits (CUDA graphs) may queue all of its steps within the time of
        the experiment, and they take many times as long.
        """
        if self._make is None:
            self._wait()
        else:
            event = self._make()
            event.record()
            self._ahead.append(event)
            if len(self._ahead) <= STEPS_AHEAD:
                return
            self._ahead.popleft().synchronize()
        self._stamps.append(time.perf_counter())

    def per_s(self, accumulate: int, batches: int = 1) -> float | None:
        """Batches per second over whole optimizer steps of ``accumulate`` batches, the first quarter of them left out.

        The rest is divided into windows, whose median rate counts: work that comes only every few steps is in each of
        them, and another program that takes the CPUs for a while is in few. Of several ``batches`` that come again and
        again, each window has all of them equally often.
        """
        self._wait()
        period = math.lcm(accumulate, batches)
        marks = self._stamps[::period]
        settled = marks[max(1, len(marks) // 4) :]
        if len(settled) <= (FEWEST_CYCLES if batches == 1 else FEWEST_PASSES):
            return None
        windows = min(WINDOWS, len(settled) - 1)
        edges = [index * (len(settled) - 1) // windows for index in range(windows + 1)]
        middle = statistics.median(
            (settled[last] - settled[first]) / (last - first) for first, last in itertools.pairwise(edges)
        )
        return period / middle if middle > 0 else None
