"""watch_loader: measures how long a loop in plain PyTorch, Fabric or accelerate waits for its data."""

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from lightning_feed.load.kinds import AnyLoader
from lightning_feed.load.loader_tree import loaders_in
from lightning_feed.machine.limits import STREAM_BACKENDS, read_machine
from lightning_feed.measure.cpu_time import OtherPrograms
from lightning_feed.measure.facts import batches_ahead, training_loader_facts
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.loop import READ_EVERY_NS, MeasuredLoop, Schedule
from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.measure.stats import MIN_STEPS, StarvationStats
from lightning_feed.measure.step_meter import Clock, host_clock, open_ring

if TYPE_CHECKING:
    from lightning_feed.report.report import RunIdentity
    from lightning_feed.verdict.diagnosis import Diagnosis

T = TypeVar("T")

_runs: "weakref.WeakKeyDictionary[Any, PlainRun]" = weakref.WeakKeyDictionary()
"""The run of each live loader, since a program may call watch_loader again in each epoch."""
_open: "dict[PlainRun, int]" = {}
"""Runs in the middle of an epoch, each with the thread of its loop."""


def watch_loader(
    loader: Iterable[T],
    *,
    device: torch.device | str | None = None,
    folder: str | Path | None = None,
    report: bool = True,
) -> "WatchedLoader[T]":
    """Measure how long each step of a loop waits for its batch, why, and what to change.

    The batches and their order stay the same. Waiting for data is the time inside ``next(loader)``; on a GPU, only the
    part in which the GPU had nothing to do. This part is read from events on the compute stream, without synchronising.
    All other time counts as computing. A report is printed after 200 steps or a minute, every 10 minutes, and when the
    program ends or :meth:`WatchedLoader.close` is called. With several ranks, each measures itself, and rank 0 reports.

    A second call with the same loader continues the measurement with the new options. Pass the loader that the loop
    iterates over, after ``fabric.setup_dataloaders`` or ``accelerator.prepare``. Wrap the validation loader, too: the
    training step that contains a validation is then left out.

    Args:
        loader: a DataLoader, or anything else that can be iterated.
        device: the model's device. By default the loader's device, else the GPU if one is in use, else the CPU.
        folder: folder for ``feed_report.json``, ``.md`` and ``.html``, written with each report; None for no files.
        report: True to print reports.

    Example:
        >>> from lightning_feed import watch_loader
        >>> loader = watch_loader([1, 2, 3], report=False)
        >>> for batch in loader:
        ...     pass  # the training step
        >>> loader.summary().steps  # an epoch's first step is counted separately
        2
    """
    try:
        run = _runs.get(loader)
        if run is None:
            run = _runs[loader] = PlainRun()
            weakref.finalize(loader, run.close, wait=False)
        watched = WatchedLoader(loader, run)
    except TypeError:  # a list, or another type without weak references
        run = PlainRun()
        watched = WatchedLoader(loader, run)
        weakref.finalize(watched, run.close, wait=False)
    run.device = None if device is None else torch.device(device)
    run.folder = None if folder is None else Path(folder)
    run.shows = report
    return watched


class WatchedLoader(Generic[T]):
    """The loader that :func:`watch_loader` returns, with all attributes of the wrapped loader."""

    def __init__(self, loader: Iterable[T], run: "PlainRun") -> None:
        self._loader = loader
        self._run = run

    def __iter__(self) -> Iterator[T]:
        run = self._run
        began = run.clock()
        batches = iter(self._loader)  # now, as without the wrapper: this draws a random number and starts the workers
        return batches if run.closed else self._measured(batches, run.clock() - began)

    def _measured(self, batches: Iterator[T], started_ns: int) -> Iterator[T]:
        run = self._run
        measure = run.guard.measure
        measure(run.epoch_began, self._loader, started_ns)
        run.live = [batches]
        try:
            while True:
                measure(run.fetch_began)
                try:
                    batch = [next(batches)]
                except StopIteration:
                    return
                measure(run.fetch_ended)
                measure(run.batch_came, batch[0])
                yield batch.pop()  # do not keep the batch alive while the step runs
                measure(run.step_ended)
        finally:
            run.live = []
            measure(run.epoch_ended)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length says so itself

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_loader", "_run"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __enter__(self) -> "WatchedLoader[T]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def summary(self) -> StarvationStats:
        """Return the parts of the steps so far, without the first ones, in which queues still fill."""
        return self._run.measurements().stats

    def report(self) -> "Diagnosis":
        """Return the verdict on what limits training, from all steps so far, and what to change."""
        from lightning_feed.verdict.decide import decide  # here: a loop that is only measured needs no verdict

        return decide(self._run.measurements())

    def close(self) -> None:
        """Stop measuring, and report the steps since the last report. The loader can still be iterated."""
        self._run.close()
        with contextlib.suppress(TypeError):
            _runs.pop(self._loader, None)


class PlainRun:
    """The clocks of one loop, over all its epochs. They do not keep the loader alive.

    Attributes:
        device: the model's device that the user gave; None to find it from the loader when an epoch begins.
        folder: the folder for report files, or None.
        shows: True to print reports without being asked.
        live: the iterator that the loop goes through now, in a list; empty between epochs.
        clock: the host's clock, in nanoseconds.
        guard: calls this run's methods within the user's loop, so that their failures do not end the loop.
        closed: True once measuring has ended.
    """

    def __init__(self, *, clock: Clock = host_clock) -> None:
        self.device: torch.device | None = None
        self.folder: Path | None = None
        self.shows = True
        self.live: list[Any] = []
        self.clock = clock
        self.closed = False
        self.guard = Guard("watch_loader", self._stop)
        self._process = os.getpid()
        self._identity: RunIdentity | None = None
        self._loop: MeasuredLoop | None = None
        """The loop's clocks; None before the first epoch."""
        self._cpus: OtherPrograms | None = None
        """Use of the CPUs by other programs; None before the first epoch, and with several ranks."""
        self._schedule = Schedule(self._seconds)
        self._reported_steps = 0
        self._next_read_ns = 0
        """Time on ``clock`` from which the workers' counters are read again."""

    def _seconds(self) -> float:
        return self.clock() * 1e-9

    # --- what the loop does -------------------------------------------------------------------------------------------

    def epoch_began(self, loader: object, started_ns: int = 0) -> None:
        """Begin an epoch on the loader, whose iterator took ``started_ns`` to make."""
        thread = threading.get_ident()
        for other, its_thread in list(_open.items()):  # a copy: loops in other threads begin and end meanwhile
            if its_thread == thread:
                other.leave_out_step()
        loaders = loaders_in(loader)
        device = self.device or _device_of(loader)
        facts = _facts_of(loader, loaders, device)
        if self._loop is None:
            ring = open_ring(device)
            queue = batches_ahead(loaders)
            self._loop = MeasuredLoop(facts, lambda: self.live, queue=queue, ring=ring, clock=self.clock)
            self._cpus = OtherPrograms() if facts.world_size == 1 else None
            self._schedule = Schedule(self._seconds)
        self._loop.cpu.go_on()
        self._loop.batch_seen = False
        self._loop.begins(facts, self.clock() - started_ns)
        _open[self] = thread

    @property
    def loop(self) -> MeasuredLoop:
        """The loop's clocks."""
        assert self._loop is not None, "an epoch has begun"
        return self._loop

    def fetch_began(self) -> None:
        """Note that the loop requests a batch."""
        self.loop.fetch_began()

    def fetch_ended(self) -> None:
        """Note that the batch has arrived."""
        self.loop.fetch_ended()
        self.loop.meter.arrived()  # the user copies the batch to the device, which is not seen here

    def batch_came(self, batch: object) -> None:
        """Record number and size of the tensors in each epoch's first batch."""
        if not self.loop.batch_seen:
            self.loop.look_at(batch)

    def step_ended(self) -> None:
        """End a step, and report if a report is due."""
        loop = self.loop
        loop.meter.step_ended()
        if loop.step_ended():
            loop.ledger.fold()
        now_ns = self.clock()
        if now_ns >= self._next_read_ns:  # workers take their counters with them when an epoch ends
            self._next_read_ns = now_ns + READ_EVERY_NS
            loop.loaders.take()
        steps = loop.meter.finished
        if steps >= MIN_STEPS and self._schedule.due(steps):
            loop.leave_out_step()  # the step that begins now contains the report
            self._report(steps)

    def epoch_ended(self) -> None:
        """End an epoch, which may have been left early."""
        _open.pop(self, None)
        self.loop.meter.close_step()
        self.loop.drop_sample()
        self.loop.cpu.pause()

    def leave_out_step(self) -> None:
        """Do not count the current step: it contains another loop."""
        self.loop.leave_out_step()

    def measurements(self) -> Measurements:
        """Return all measurements so far, without the warm-up."""
        if self._loop is None:
            return Measurements(stats=StarvationStats(steps=0, confidence="low"), facts=LoopFacts(loop="plain"))
        self._loop.meter.catch_up()
        measured = self._loop.measurements(prefetch_active=None)
        others_cpu_pct = None if self._cpus is None else self._cpus.others_pct(measured.facts.usable_cpus)
        return Measurements(
            # Neither the copy to the device nor the time between steps is seen from the step itself.
            stats=replace(measured.stats, copy_ms=None, other_ms=None),
            facts=replace(measured.facts, others_cpu_pct=others_cpu_pct),
            loaders=measured.loaders,
            timeline=self._loop.ledger.timeline.timeline(),
        )

    # --- reports ------------------------------------------------------------------------------------------------------

    def close(self, *, wait: bool = True) -> None:
        """Stop measuring: read the device timings that are still outstanding, and report steps not yet reported.

        Args:
            wait: True to wait for steps that the device still works on; False to leave them out.
        """
        if self.closed or self._process != os.getpid():  # a forked process does not train
            return
        self.closed = True
        if self._loop is not None and self.guard.measures:
            meter = self._loop.meter
            self.guard.measure(meter.end, wait=wait)
            if meter.finished > self._reported_steps and meter.finished >= MIN_STEPS:
                self._report(meter.finished)
        self._stop()

    def _report(self, steps: int) -> None:
        self._schedule.came()
        self._reported_steps = steps
        if _number("RANK", 0) == 0:
            self.guard.attempt("show its report", self._show)

    def _show(self) -> None:
        # Imported only when a report is due.
        from lightning_feed.report.document import make_report
        from lightning_feed.report.files import show_report, write_report
        from lightning_feed.report.report import read_identity
        from lightning_feed.verdict.decide import decide

        if self._identity is None:
            self._identity = read_identity("" if self.folder is None else self.folder.name)
        report = make_report(decide(self.measurements()), run=self._identity)
        files = []
        if self.folder is not None:
            files = self.guard.attempt("write its report", write_report, report, self.folder) or []
        if self.shows:
            bar: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
            show_report(report, bar.write if bar is not None else None, files)

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.drop_sample()
            self._loop.loaders.close()
        _open.pop(self, None)


def _facts_of(loader: AnyLoader, loaders: list[AnyLoader], device: torch.device) -> LoopFacts:
    batches: int | None = None
    with contextlib.suppress(Exception):  # a user's __len__ may raise anything
        batches = len(loader)
    machine = read_machine()
    return LoopFacts(
        loop="plain",
        device_type=device.type,
        usable_cpus=max(1, machine.usable_cpus // _number("LOCAL_WORLD_SIZE", 1)),
        torch_threads=torch.get_num_threads(),
        free_shm_bytes=machine.free_shm_bytes,
        world_size=_number("WORLD_SIZE", 1),
        batches_per_epoch=batches,
        loader=training_loader_facts(loaders, reloaded=False),
    )


def _device_of(loader: object) -> torch.device:
    """Return the device on which the loader puts batches, else the accelerator in use, else the CPU."""
    device = getattr(loader, "device", None)
    if isinstance(device, torch.device):
        return device
    for kind in STREAM_BACKENDS:
        backend: Any = getattr(torch, kind, None)
        if backend is not None and backend.is_initialized():
            return torch.device(kind, backend.current_device())
    return torch.device("cpu")


def _number(variable: str, otherwise: int) -> int:
    """Return the rank, the ranks of the run, or the ranks of this machine, as ``variable`` says.

    Read from torch.distributed, or else from the launcher's environment variable; ``otherwise`` if neither has it.
    """
    distributed: Any = torch.distributed
    if variable != "LOCAL_WORLD_SIZE" and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank() if variable == "RANK" else distributed.get_world_size())
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else otherwise
