"""The experiments with the model: the run as it is, and with the same batches again and again."""

import gc
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_feed import _host
from lightning_feed.diagnosing.failure import loading_failed, raised_by_loader
from lightning_feed.diagnosing.keys import KeyWatch, is_opaque
from lightning_feed.diagnosing.replay import Replay, Sample, clone, fresh_containers, own_loaders
from lightning_feed.diagnosing.stopping import StopSignals
from lightning_feed.diagnosing.trainer import Limits, Package, make_hooks, run_fit, short_trainer
from lightning_feed.errors import FeedError
from lightning_feed.load.cloning import preserve_state
from lightning_feed.loader_place import place_of
from lightning_feed.watch.clocks import event_maker
from lightning_feed.watch.experiments.session import parts_of
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

Progress = Callable[[int, int], object]
"""(steps done, steps to do at most)."""


@dataclass
class Bench:
    """What the experiments share: the user's objects, and what the first of them found.

    Attributes:
        package: which Lightning.
        trainer: the user's; read only.
        model: the user's; trained, and put back by whoever made the bench.
        datamodule: the user's, or None.
        loaders: the user's training loaders; None where the data module or the module has them.
        compiled: what ``torch.compile`` made of ``model``, if that is what the user has.
        stops: signals that end the fits.
    """

    package: Package
    trainer: Any
    model: Any
    datamodule: Any = None
    loaders: Any = None
    compiled: Any = None
    stops: StopSignals = field(default_factory=StopSignals)
    measured: Measurements | None = None
    """[X0]"""
    host_batches: Sample = field(default_factory=Sample)
    """[X0] Batches as the loader gave them."""
    device_batches: Sample = field(default_factory=Sample)
    """[X0] The same as the step got them."""
    callbacks: list[Any] = field(default_factory=list)
    """The user's, that are to run in X0."""
    uses: dict[str, bool | None] = field(default_factory=dict)
    """[X0] Whether the step read each part of its batch."""
    train_loaders: Any = None
    """[X0] What the data module gave: loaders, dicts or lists of them. Fits and experiments get copies of loaders."""

    def run_as_it_is(self, limits: Limits, progress: Progress) -> None:
        """[X0] A fit with the user's loaders: the measurements, a batch, which parts of it are read."""
        meter = self.package.feed.GPUStarvationCallback(nvml=False, report=False)
        batches = _Watch(self)

        def on_step(steps: int) -> None:
            progress(steps, hooks.limits.most)

        def on_start(trainer: Any) -> None:
            queue = _ready_batches(_host.train_loaders(trainer))
            hooks.limits = Limits(least=limits.least, most=limits.most + queue + WARM_UP_STEPS, seconds=limits.seconds)
            batches.watch(trainer, queue + WARM_UP_STEPS)

        def give(loaders: Any) -> Any:
            before.enter_context(preserve_state(loaders))
            return own_loaders(loaders)

        hooks = make_hooks(self.package, limits, self.stops, on_start, on_step)
        before = ExitStack()
        try:
            with before:
                self._fit(hooks, [*self.callbacks, meter, hooks], give)
        except Exception as error:
            if isinstance(error, FeedError) or not raised_by_loader(error, self.model):
                raise
            first = hooks.epochs <= 1
            raise loading_failed(AS_IT_IS, error, self.train_loaders, first_pass=first) from error
        finally:
            batches.forget()
            measured = meter.report().measurements
            theirs = tuple(hook for hook in measured.hooks if not hook.name.startswith(OWN_HOOKS))
            place = self.place() or measured.facts.place
            facts = replace(measured.facts, place=place)
            # The wall time is that of this short fit, and nobody's.
            self.measured = replace(measured, hooks=theirs, facts=facts, wall=None)

    def place(self) -> Place | None:
        """Where the user sets the training loader up; their own Trainer knows the keys of the command line."""
        owner = None if self.loaders is not None else self.model if self.datamodule is None else self.datamodule
        try:
            loaders = [part.loader for part in parts_of(self.train_loaders)]
            return place_of(owner, self.trainer, self.datamodule, loaders)
        except Exception:  # noqa: BLE001  # loaders of another kind, or sources that cannot be read
            return None

    def tear_down(self) -> None:
        """What the user's data module has set up is not needed any more."""
        if self.datamodule is not None and _host.is_overridden(self.datamodule, "teardown"):
            self.datamodule.teardown("fit")

    def replay(self, batches: Sequence[Any], limits: Limits, progress: Progress, *, on_device: bool) -> float | None:
        """[X1, X2] Batches per second of a fit whose steps get ``batches`` again and again. None: too few steps.

        Args:
            batches: as the step gets them, if they are on the device, else as the loader gives them.
            limits: how long.
            progress: told after each step.
            on_device: leave the way to the device out, with its hooks.
        """
        pace = _Pace()

        def on_start(trainer: Any) -> None:
            pace.begin(trainer.strategy.root_device)
            if on_device:
                _host.wrap_transfer(trainer, _untouched, _untouched_by_hook)

        def on_step(steps: int) -> None:
            pace.stamp()
            progress(steps, limits.most)

        hooks = make_hooks(self.package, limits, self.stops, on_start, on_step)
        known = self.measured.facts.batches_per_epoch if self.measured is not None else None
        endless = Replay(batches, max(limits.most + 1, known or 0))
        self._fit(hooks, [hooks], lambda _: endless, set_up=False, prefetch=not on_device)
        return pace.per_s(self.trainer.accumulate_grad_batches, len(batches))

    def _fit(
        self,
        hooks: Any,
        callbacks: list[Any],
        give: Callable[[Any], Any],
        *,
        set_up: bool = True,
        prefetch: bool = True,
    ) -> None:
        """A short fit on ``give(loaders)``. ``set_up=False``: the data module was set up by one before."""
        wraps: list[_host.Wrap] = []

        def given(original: Callable[[], Any]) -> Any:
            self.train_loaders = original() if set_up else self.train_loaders
            return give(self.train_loaders)

        if self.loaders is not None:
            data = {"train_dataloaders": given(lambda: self.loaders)}
        elif self.datamodule is not None:
            data = {"datamodule": self.datamodule}
            wraps.append(_host.Wrap(self.datamodule, "train_dataloader", given))
            for name in () if set_up else ("prepare_data", "setup"):
                wraps.append(_host.Wrap(self.datamodule, name, _nothing))
        else:
            data = {}
            wraps.append(_host.Wrap(self.model, "train_dataloader", given))
        wraps.append(_host.Wrap(self.model, "configure_callbacks", _no_callbacks))
        owners = [self.model, *self.callbacks, *([self.datamodule] if self.datamodule is not None else [])]
        wraps += [_host.Wrap(one, name, _nothing) for one in owners for name in ENDS if _host.is_overridden(one, name)]
        try:
            with tempfile.TemporaryDirectory(prefix="feed_diagnose_") as folder:
                trainer = short_trainer(self.package, self.trainer, callbacks, folder, prefetch=prefetch)
                run_fit(trainer, hooks, self.model if self.compiled is None else self.compiled, data)
        finally:
            for wrap in reversed(wraps):
                wrap.undo()
            trainer = None
            gc.collect()  # a Trainer is a ring of objects; with it go the workers of this fit


class _Watch:
    """Takes batches of a fit down, before and after the way to the device, and watches the first step read its own."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._wraps: list[_host.Wrap] = []
        self._first = True

    def watch(self, trainer: Any, warm_up: int) -> None:
        """Begin, at the start of the training."""
        bench = self._bench
        if _host.takes_iterator(bench.model):
            return
        bench.host_batches, bench.device_batches = Sample(warm_up), Sample(warm_up)

        def on_host(original: Any, batch: Any) -> Any:
            bench.host_batches.offer(batch)
            return original(batch)

        self._wraps = [
            _host.Wrap(trainer.precision_plugin, "convert_input", on_host),
            _host.Wrap(bench.model, "training_step", self._step),
        ]

    def forget(self) -> None:
        """After the fit."""
        for wrap in reversed(self._wraps):
            wrap.undo()
        self._wraps = []

    def _step(self, original: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        bench = self._bench
        bench.device_batches.offer(batch)
        if not self._first or bench.compiled is not None or is_opaque(bench.model):
            return original(batch, *rest, **named)
        self._first = False
        try:
            watch = KeyWatch(batch)
            with watch.seeing_torch():
                output = original(watch.batch, *rest, **named)
        except Exception:  # noqa: BLE001  # a step that minds the containers minds nothing else: it gets its own batch
            first = bench.device_batches.first
            return original(batch if first is None else fresh_containers(first, clone), *rest, **named)
        uses = watch.uses()
        if self._read_elsewhere():
            uses = {name: used or None for name, used in uses.items()}
        bench.uses = uses
        return output

    def _read_elsewhere(self) -> bool:
        """Whether hooks of the user's get the batch too, or change it before the step sees it."""
        bench = self._bench
        owners = [bench.model, *([bench.datamodule] if bench.datamodule is not None else [])]
        if any(_host.is_overridden(owner, hook) for owner in owners for hook in BATCH_HOOKS):
            return True
        seers = [bench.model, *bench.trainer.callbacks]
        return any(_host.is_overridden(one, hook) for one in seers for hook in STEP_HOOKS)


class _Pace:
    """Stamps at the end of each step, on the device's clock where it has one."""

    def __init__(self) -> None:
        self._make: Callable[[], Any] | None = None
        self._wait: Callable[[], object] = lambda: None
        self._stamps: list[Any] = []

    def begin(self, device: torch.device) -> None:
        """Find the clock of ``device``."""
        if device.type == "cpu":
            return
        self._make = event_maker(device)
        self._wait = torch.get_device_module(device).synchronize

    def stamp(self) -> None:
        """A step has ended."""
        if self._make is None:
            self._wait()
            self._stamps.append(time.perf_counter())
        else:
            event = self._make()
            event.record()
            self._stamps.append(event)
            # The experiment ends on the host's clock, and by then a host that does not wait (CUDA graphs) may have
            # queued all of its steps, which take many times as long.
            if len(self._stamps) > STEPS_AHEAD:
                self._stamps[-1 - STEPS_AHEAD].synchronize()

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
        means = [
            self._seconds(settled[first], settled[last]) / (last - first) for first, last in itertools.pairwise(edges)
        ]
        middle = statistics.median(means)
        return period / middle if middle > 0 else None

    def _seconds(self, before: Any, after: Any) -> float:
        return float(after - before if self._make is None else before.elapsed_time(after) / 1e3)


def _untouched(_: Any, batch: Any) -> Any:
    return batch


def _untouched_by_hook(_original: Any, _name: str, batch: Any, *_rest: Any) -> Any:
    return batch


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of ``prepare_data`` and ``setup`` when they have run."""


def _no_callbacks(_: Any) -> list[Any]:
    return []


def _ready_batches(loaders: list[Any]) -> int:
    """Batches that the loaders may hold ready: for so many steps a full queue hides a slow loader."""
    held = [(getattr(each, "num_workers", 0) or 0) * (getattr(each, "prefetch_factor", 0) or 0) for each in loaders]
    return max(held, default=0)
