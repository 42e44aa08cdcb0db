"""The session: the user's objects, the loaders under experiment, and the results so far."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_feed import _host
from lightning_feed._host import AnyModule, AnyTrainer
from lightning_feed.diagnosing.batches import KeptBatches, own_loaders
from lightning_feed.diagnosing.parts import LoaderPart, NotMeasurable, Together, make_sample, parts_of, size_of_leaf
from lightning_feed.diagnosing.restoring import ModelState, quiet
from lightning_feed.errors import DatasetError, FeedError, LoaderError, SettingsError
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import Setting
from lightning_feed.load.slot_loaders import uses_slots
from lightning_feed.machine.limits import Footprint, Machine, exceeded_limit, read_machine
from lightning_feed.measure.experiment_results import ExperimentResults
from lightning_feed.measure.loader_code import code_of
from lightning_feed.measure.measurements import LoaderCode, Measurements
from lightning_feed.trials.cloning import Changes, background_of, burst_of, clone_loader, locate_failure
from lightning_feed.trials.loader_rate import LoaderRate, RoundLimits, time_loader
from lightning_feed.trials.tune_loader import Tuned
from lightning_feed.wording import plural

START_S = 60.0
"""Extra seconds for the user's loader to start, as configured: other experiments need its rate, and spawned workers may
take long to import."""
_LEAST_S = 2.0
"""Shortest time to measure a loader. Twice the start-up time of the user's loader is added."""


@dataclass
class Session:
    """The user's objects, which are restored after fits and experiments, and the results so far.

    Attributes:
        trainer: the user's Trainer, or a new one; None if only loaders are measured.
        model: the user's module, or None.
        datamodule: the user's data module, or None.
        loaders: the user's training loaders; None if the data module or the module makes them.
        compiled: the result of ``torch.compile`` for ``model``; None if the module was not compiled.
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        train_loaders: the result of ``train_dataloader``. Fits and experiments get copies of these loaders.
        measured: measurements of the unchanged training; None before it has run.
        device_batches: batches of the unchanged training, as passed to the step.
        results: the results of the experiments so far.
        clock: returns the time in seconds.
        machine: the limits of this machine.
        parts: the DataLoaders in ``train_loaders``; empty if ``train_loaders`` is another kind of iterable.
        samples: a sample from each of ``parts``.
        first_batch: the first batch of each loader.
        alone: the rate of the loaders as configured; None before it is measured.
        share_s: seconds for the current experiment.
        tuned: the result of trying numbers of workers; None if they were not tried.
    """

    trainer: Any = None
    model: Any = None
    datamodule: Any = None
    loaders: AnyLoader = None
    compiled: AnyModule | None = None
    package: ModuleType | None = None
    train_loaders: AnyLoader = None
    measured: Measurements | None = None
    device_batches: KeptBatches = field(default_factory=KeptBatches)
    results: ExperimentResults = field(default_factory=ExperimentResults)
    clock: Callable[[], float] = time.monotonic
    machine: Machine = field(default_factory=read_machine)
    parts: tuple[LoaderPart, ...] = ()
    samples: list[Batch] = field(default_factory=list)
    first_batch: list[Batch] = field(default_factory=list)
    alone: LoaderRate | None = None
    share_s: float = 1.0
    tuned: Tuned | None = None

    # --- the user's objects ---------------------------------------------------------------------------------------

    @property
    def lightning(self) -> ModuleType:
        """The package of the user's Trainer."""
        assert self.package is not None, "there is a Trainer"
        return self.package

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        device: torch.device = self.trainer.strategy.root_device
        return device

    @property
    def loader_owner(self) -> Any:
        """The data module or module whose ``train_dataloader`` is used; None if loaders were passed."""
        if self.loaders is not None:
            return None
        if self.datamodule is not None:
            return self.datamodule
        return self.model

    @contextmanager
    def restoring(self) -> Iterator[ModelState]:
        """Context manager that restores the module and the random states at its end. Yields the module's state."""
        if self.device.type == "cuda":
            torch.cuda.init()  # so that its generators are restored, too
        with preserve_state():
            state = ModelState(self.model)
            trainer = getattr(self.datamodule, "trainer", None)
            try:
                yield state
            finally:
                state.restore()
                if self.datamodule is not None:
                    self.datamodule.trainer = trainer

    def set_up(self) -> None:
        """Make the training loaders as Lightning would, without a fit.

        Raises:
            SettingsError: ``train_dataloader`` returned None.
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

    def take_loaders(self, loaders: AnyLoader) -> AnyLoader:
        """Keep the user's training loaders, and return copies of them for a fit."""
        self.train_loaders = loaders
        return own_loaders(loaders)

    def tear_down(self) -> None:
        """Call the data module's ``teardown``, which the fits leave out."""
        if self.datamodule is not None and _host.is_overridden(self.datamodule, "teardown"):
            self.datamodule.teardown("fit")

    def loader_code(self) -> LoaderCode | None:
        """Return the user's code that sets up the training loader, or None if it cannot be found.

        Looks at the user's own Trainer, since its LightningCLI has the keys of the command line.
        """
        try:
            loaders = [part.loader for part in parts_of(self.train_loaders)]
            return code_of(self.loader_owner, self.datamodule, loaders, config=_host.cli_config(self.trainer))
        except Exception:  # noqa: BLE001  # loaders of another kind, or sources that cannot be read
            return None

    # --- results --------------------------------------------------------------------------------------------------

    def note(self, **figures: Any) -> None:
        """Add figures to the results."""
        self.results = replace(self.results, **figures)

    def note_refusal(self, why: str) -> None:
        """Record for the report why a rehearsal has refused workers."""
        if self.measured is not None:
            facts = self.measured.facts
            loader = replace(facts.loader, why_no_workers=why)
            self.measured = replace(self.measured, facts=replace(facts, loader=loader))

    def leave_out(self, experiment: str, why: str) -> None:
        """Record that an experiment was not run, with the reason."""
        self.note(left_out=(*self.results.left_out, (experiment, why)))

    # --- the loaders under experiment -----------------------------------------------------------------------------

    def find_parts(self) -> str | None:
        """Find the DataLoaders, and make a sample of each.

        Returns:
            The reason why the loaders cannot be rebuilt with changes; None if they can.

        Raises:
            DatasetError: a sample cannot be made.
            LoaderError: a sample takes very long.
        """
        with preserve_state(self.train_loaders):
            try:
                parts = parts_of(self.train_loaders)
                for part in parts:
                    clone_loader(part.loader)
            except LoaderError as error:
                return str(error)
            self.parts = parts
            self.samples = [make_sample(part) for part in parts]
        self.note(batch_size=sum(part.batch_size for part in parts))
        return None

    def counted_s(self, share: float = 1.0) -> float:
        """Return the seconds to measure, in a share of the experiment's time. The rest of it is for start-up and
        warm-up."""
        return max(0.1, min(3.0, 0.4 * share * self.share_s))

    def rate(self, change: Callable[[LoaderPart], Changes] = LoaderPart.changes, **options: Any) -> float:
        """Measure the batches per second of the loaders with changes. The options are those of :meth:`drain`."""
        rate, _ = self.drain(change, **options)
        return rate.batches_per_s

    def drain(
        self,
        change: Callable[[LoaderPart], Changes] = LoaderPart.changes,
        *,
        share: float = 1.0,
        warm_rounds: int = 2,
    ) -> tuple[LoaderRate, list[Batch]]:
        """Iterate the loaders together, each with its changes. Returns (rate, first batch of each loader).

        Args:
            change: returns the changes to make to the given loader.
            share: share of the experiment's time.
            warm_rounds: rounds at the start of each pass that are not counted.

        Raises:
            DatasetError: loading fails. The message names worker and sample, if known.
            LoaderError: a loader hangs, is empty or cannot be rebuilt.
        """
        start_s = START_S if self.alone is None else 2 * self.alone.start_s
        max_s = max(share * self.share_s, _LEAST_S) + start_s
        limits = RoundLimits(min_s=self.counted_s(share), max_s=max_s, warm_rounds=warm_rounds)
        passes: list[Together] = []
        try:
            with preserve_state([part.loader for part in self.parts] or self.train_loaders), warnings.catch_warnings():
                # As in clone_loader: torch warns again when a pass begins. The user's own run has shown both warnings.
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
                clones: list[DataLoader[Batch]] = [clone_loader(part.loader, change(part)) for part in self.parts]

                def begin() -> Together:
                    passes.append(Together([iter(loader) for loader in clones or [self.train_loaders]]))
                    return passes[-1]

                burst = max(map(burst_of, clones), default=1)
                rate = time_loader(begin, burst=burst, limits=limits)
        except Exception as error:
            if not self.parts or (isinstance(error, FeedError) and not isinstance(error, DatasetError)):
                raise
            received = passes[0].received if len(passes) == 1 else None
            raise locate_failure(self.parts, error, received) from error
        return rate, passes[0].first

    def check_memory(self) -> None:
        """Check that the loaders' queues fit into memory.

        Raises:
            NotMeasurable: the queues would take too much memory.
        """
        for part, sample in zip(self.parts, self.samples, strict=True):
            setting = Setting.of(part.loader)
            batches = setting.batches_ahead + background_of(part.loader) + 1
            footprint = Footprint(
                workers=setting.num_workers,
                batches=batches,
                batch_bytes=part.batch_size * size_of_leaf(sample),
                size=plural(batches, "batch", "batches"),
                worker_bytes=0,
                in_shm=setting.num_workers > 0 and setting.workers == "process" and not uses_slots(part.loader),
                sharers=len(self.parts),
            )
            exceeded = exceeded_limit(self.machine, footprint)
            if exceeded:
                raise NotMeasurable(exceeded)


def open_session(trainer: Any, model: object, datamodule: Any = None, loaders: object = None) -> Session:
    """Open a session for the arguments of ``Trainer.fit``. Without a Trainer, Lightning chooses the device.

    Raises:
        SettingsError: the objects come from both packages or from neither, the Trainer is training now, this process is
            one of several ranks, or the model is sharded.
    """
    if isinstance(datamodule, DataLoader) and loaders is None:  # trainer.fit takes loaders as this argument, too
        loaders = datamodule
        datamodule = None
    plain = getattr(model, "_orig_mod", model)
    known = [part for part in (trainer, plain, datamodule) if part is not None]
    package = _host.package_of(*known) if known else import_module("lightning.pytorch")
    if trainer is None:
        trainer = _plain_trainer(package)
    else:
        _refuse(trainer)
    compiled: Any = None if plain is model else model
    return Session(trainer, plain, datamodule, loaders, compiled, package)


def _refuse(trainer: AnyTrainer) -> None:
    """Raise a SettingsError for a Trainer, or a process, in which no short fit can run."""
    if _host.is_running(trainer):
        raise SettingsError("This Trainer is running. Call diagnose() before or after fit(), not from within.")
    if _host.shards_the_model(trainer):
        raise SettingsError(
            f"{type(trainer.strategy).__name__} divides the model among devices, but diagnose() trains on one. "
            "Diagnose only the data module, with diagnose(None, None, datamodule), and add GPUStarvationCallback() to "
            "the run."
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise SettingsError(
            "This process is one of several ranks. Run diagnose() in a separate process, on one device. To compare "
            "ranks, use GPUStarvationCallback() in the run itself."
        )


def _plain_trainer(package: ModuleType) -> AnyTrainer:
    """Return a Trainer on one device that writes no files."""
    with quiet():
        trainer: AnyTrainer = package.Trainer(accelerator="auto", devices=1, logger=False, enable_checkpointing=False)
        return trainer
