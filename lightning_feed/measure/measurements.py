"""Measurements of a run and the facts beside its times: the basis of a verdict. None: not known."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_feed.measure.experiment_results import ExperimentResults
from lightning_feed.measure.stats import LoaderStats, LoaderSteps, RankStats, StarvationStats
from lightning_feed.measure.wall import WallStats


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place in the user's program that sets up the training loader."""

    words: str
    """The call to change: ``your training DataLoader (Data.train_dataloader, data.py:41)``."""
    form: Literal["arguments", "settings", "callback"] = "arguments"
    """It takes a loader's keyword arguments, or those of LoaderSettings. ``callback``: a package makes the loader and
    has no parameter for the workers, so AutotuneCallback sets them."""
    inner: str = ""
    """Of a wrapped data module: the loader inside it, for the settings that ``wrap`` does not change."""
    names: tuple[tuple[str, str], ...] = ()
    """(setting, what it is called there), where a function of another package makes the loader."""
    overrides: tuple[tuple[str, str], ...] = ()
    """(setting, its key on the command line), where LightningCLI or Hydra gave the value."""
    datamodule: str = ""
    """The class of the data module. Empty: there is none."""
    trainer_key: str = ""
    """Prefix of the Trainer's arguments on the command line (``--trainer.``), where LightningCLI makes it."""
    argument: str = ""
    """The argument that takes the settings as a dict (``dataloader_kwargs``), where a package makes the loader."""

    def code(self, **settings: object) -> str:
        """Settings as they are written there: ``num_workers=2``, or ``dataloader_kwargs={"num_workers": 2}``."""
        if self.argument:
            entries = ", ".join(f'"{name}": {value!r}' for name, value in settings.items())
            return f"{self.argument}={{{entries}}}"
        names = dict(self.names)
        return ", ".join(f"{names.get(name, name)}={value!r}" for name, value in settings.items())


@dataclass(frozen=True, kw_only=True)
class HookPlace:
    """A hook of the user's, and the setting to run it less often."""

    name: str
    """As Lightning names it to its profiler, without a callback's settings."""
    at: str
    """``train.py:12``."""
    interval: str = ""
    """The argument of the callback's constructor that seems to say every how many steps it does its work, if that is
    1."""


OTHERS_PCT = 20.0
"""Share of the CPUs that other programs take, from which the figures are theirs as much as this run's."""


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """Facts of the run besides its times. None: not known."""

    loop: Literal["trainer", "plain"] = "trainer"
    """Whose loop this is: Lightning's Trainer, or the user's own, which has no callbacks, hooks or data modules."""
    stage: Literal["fit", "validate", "test", "predict"] = "fit"
    """Whose loop this is: the loaders, the batches and the steps are those of this stage."""
    device_type: str = "cpu"
    """``cpu``, ``cuda``, ...: where the steps run."""
    num_workers: int | None = None
    """Of the training loader; the smallest where there are several."""
    every_num_workers: tuple[int, ...] = ()
    """Of each of the training loaders. Empty: not known."""
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    in_order: bool | None = None
    workers: Literal["process", "thread"] | None = None
    map_style: bool | None = None
    """All training data sets are map-style."""
    decodes_whole: bool | None = None
    """One of them is torchvision's ImageFolder whose transform begins with a RandomResizedCrop: each image is decoded
    whole, and cropped then."""
    ours: bool | None = None
    """A FastDataModule made the training loaders."""
    batch_size: int | None = None
    batch_bytes: int | None = None
    """Of all tensors of a training batch on the host."""
    batch_tensors: int | None = None
    """Number of tensors of a training batch."""
    batch_hooks: bool | None = None
    """A hook of the user's can change a batch in its transfer, other than ``device_transform``."""
    batches_per_epoch: int | None = None
    breaks_off: bool | None = None
    """The Trainer has a limit that may end an epoch before its loaders do."""
    decoder: str | None = None
    """Of an ImageFolderDataModule."""
    quality: str | None = None
    """Of an ImageFolderDataModule."""
    backend: str | None = None
    """Of an ImageFolderDataModule: ``torch``, ``nvjpeg``, ``dali-cpu`` or ``dali-gpu``, whichever decodes."""
    own_transforms: bool | None = None
    """Of an ImageFolderDataModule: transforms, a ``collate`` of the user's, or ``drop_keys`` follow decoding in the
    workers."""
    cache: str | None = None
    """Of a FastDataModule: ``bytes``, ``decoded``, ``device`` or ``off``."""
    remote: bool | None = None
    """A FastDataModule reads its data from a URL."""
    staged: bool | None = None
    """A FastDataModule reads from a copy."""
    device_transform: bool | None = None
    """A FastDataModule transforms batches on the device."""
    max_epochs: int | None = None
    """Of the fit; None: without bound."""
    log_every_n_steps: int | None = None
    """Of the Trainer."""
    check_val_every_n_epoch: int | None = None
    """Of the Trainer. None: validation goes by steps, and not by epochs."""
    val_check_batches: int | None = None
    """Training batches between two validations, where there are several in an epoch or they go by steps."""
    checkpoint_steps: int | None = None
    """Training steps between two checkpoints. None: not one ModelCheckpoint saves by steps."""
    others_cpu_pct: float | None = None
    """Share of the CPUs that this run may use which other programs took meanwhile, 0 to 100. From 20 the figures are
    theirs as much as this run's. Linux, one process training; elsewhere None."""
    others_cpu_median_pct: float | None = None
    """The same share as a median of samples, for predictions: a program that ran for a while does not change it."""
    usable_cpus: int | None = None
    """CPUs that this rank may use."""
    world_size: int = 1
    package: Literal["lightning.pytorch", "pytorch_lightning"] = "lightning.pytorch"
    """Package of the Trainer and its callbacks."""
    lightning: str | None = None
    """Version of that."""
    host_cpu_ms: float | None = None
    """CPU time of the training thread per step (``time.thread_time``), over all steps that were measured."""
    process_cpu_ms: float | None = None
    """CPU time of the training process per step, of all of its threads but without its workers."""
    load_cpu_ms: float | None = None
    """CPU time in ``next(loader)`` per step: of the training process without workers, of the training thread if the
    loader is not a DataLoader. None with workers."""
    load_queue_ms: float | None = None
    """Time in ``next(loader)`` per step for which the training thread was ready to run and other threads or programs
    had the CPUs. Linux; elsewhere None."""
    host_queue_ms: float | None = None
    """The same time over the whole step."""
    generator: str = ""
    """The loader, if it is not a DataLoader: ``generator batches (train.py:12)``."""
    shards_by_worker: bool | None = None
    """Of an iterable data set: it was seen to divide its samples among workers."""
    may_leave_process: bool | None = None
    """Of an iterable data set: it may live in one worker process. Not where it counts from epoch to epoch, or has a
    state that this process may ask for."""
    may_persist: bool | None = None
    """Workers may live on between epochs: no ``set_epoch`` of the data set has to reach them."""
    free_shm_bytes: int | None = None
    """Free space of /dev/shm before training. None: there is no limit."""
    bar_refresh_rate: int | None = None
    """Batches between two drawings of the progress bar; 0: it is off."""
    place: Place | None = None
    """The place that makes the training loader."""
    hook_places: tuple[HookPlace, ...] = ()
    """Hooks of the user's that are called around each training step."""
    syncs: tuple[str, ...] = ()
    """Sources of a wait of the host for the device in each step: of :data:`SYNCS`."""

    @property
    def crowded(self) -> bool:
        """Other programs take so many of the CPUs that the figures are theirs as much as this run's."""
        return (self.others_cpu_pct or 0.0) >= OTHERS_PCT

    @property
    def copies_nothing(self) -> bool:
        """Batches stay on the CPU as they are: nothing of the user's is in their transfer."""
        return self.device_type == "cpu" and self.batch_hooks is False and not self.device_transform

    @property
    def others_share(self) -> float:
        """Share of the CPUs that other programs usually take, 0 to 1; 0 if not known."""
        pct = self.others_cpu_pct if self.others_cpu_median_pct is None else self.others_cpu_median_pct
        return (pct or 0.0) / 100

    @property
    def loaders_beside(self) -> int:
        """Number of training loaders that give a part of each batch."""
        return max(1, len(self.every_num_workers))


SYNCS = {
    "prog_bar": "metrics in the progress bar are read from the device",
    "grad_scaler": "the GradScaler of precision 16-mixed reads back whether gradients overflowed",
    "sigterm_broadcast": "with several ranks Lightning broadcasts in each step whether SIGTERM came",
    "throughput_monitor": "ThroughputMonitor synchronises to measure",
}
"""Known synchronisations of Lightning: name -> reason of the wait."""


@dataclass(frozen=True, kw_only=True)
class HookTime:
    """The time of one hook in a step."""

    name: str
    """As Lightning names it to its profiler, for example ``[Callback]ModelCheckpoint.on_train_batch_end``."""
    ms_per_step: float
    """Mean over the steps in which hooks were timed."""


@dataclass(frozen=True, kw_only=True)
class LoopMeasurements:
    """Measurements of the validation within a fit."""

    stats: StarvationStats
    """The parts of its steps: those of ``validation_step``."""
    facts: LoopFacts
    """Of its loaders."""
    loaders: LoaderStats = field(default_factory=LoaderStats)
    by_loader: tuple[LoaderSteps, ...] = ()
    """Each of several loaders; empty for a single one."""
    waited_s: float
    """Seconds of waiting for data, with that for the first batch of each validation."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The basis of a verdict."""

    stats: StarvationStats
    facts: LoopFacts = field(default_factory=LoopFacts)
    loaders: LoaderStats = field(default_factory=LoaderStats)
    """Over all of the run that counts, not of the last window."""
    ranks: RankStats | None = None
    hooks: tuple[HookTime, ...] = ()
    """The most expensive between the steps first."""
    by_loader: tuple[LoaderSteps, ...] = ()
    """Of a validation, test or prediction: each of several loaders."""
    wall: WallStats | None = None
    """The parts of the whole run. None: not measured."""
    validation: LoopMeasurements | None = None
    """The validation within a fit."""
    experiments: ExperimentResults | None = None

    @property
    def found(self) -> ExperimentResults:
        """The results of experiments; without them, empty ones."""
        return self.experiments or ExperimentResults()
