"""Measurements of a run and facts about it, from which the verdict is made. Unknown values are None."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_feed.measure.experiment_results import ExperimentResults
from lightning_feed.measure.stats import LoaderStats, LoaderSteps, RankStats, StarvationStats, Timeline
from lightning_feed.measure.wall import WallStats


@dataclass(frozen=True, kw_only=True)
class LoaderCode:
    """The code in the user's program that sets up the training loader, where its settings are changed."""

    words: str
    """Description of the call to change: ``your training DataLoader (Data.train_dataloader, data.py:41)``."""
    form: Literal["arguments", "settings", "callback"] = "arguments"
    """``arguments``: the call takes a DataLoader's arguments. ``settings``: the call takes the arguments of
    LoaderSettings. ``callback``: a package makes the loader, so AutotuneCallback has to change the settings."""
    inner: str = ""
    """Description of a wrapped data module's own loader, which takes the settings that ``FastDataModule.wrap`` does not
    change."""
    overrides: tuple[tuple[str, str], ...] = ()
    """(setting, command-line key of the setting), for settings whose value comes from LightningCLI."""
    datamodule: str = ""
    """Class of the data module; empty without one."""
    trainer_key: str = ""
    """Prefix of the Trainer's arguments on the command line (``--trainer.``), if LightningCLI makes it."""


@dataclass(frozen=True, kw_only=True)
class HookCode:
    """One of the user's hooks around the training steps, with its line and the setting to run it less often."""

    name: str
    """The name that Lightning's profiler uses for this hook, without the callback's settings."""
    at: str
    """File and line of the hook, such as ``train.py:12``."""
    interval: str = ""
    """The callback's constructor argument that seems to set the number of steps between two actions, if its value is 1;
    else empty."""


@dataclass(frozen=True, kw_only=True)
class LoaderFacts:
    """Facts about the training loaders and their datasets.

    With several loaders, the settings are those of the loader with the fewest workers.
    """

    num_workers: int | None = None
    """Workers of the training loader; with several loaders, the smallest number."""
    every_num_workers: tuple[int, ...] = ()
    """Workers of each training loader; empty if unknown."""
    prefetch_factor: int | None = None
    """Batches that each worker loads ahead."""
    pin_memory: bool | None = None
    """True if batches are put into pinned memory."""
    persistent_workers: bool | None = None
    """True if workers stay alive between epochs."""
    in_order: bool | None = None
    """True if batches come in the order of the sampler."""
    workers: Literal["process", "thread"] | None = None
    """Kind of workers."""
    in_place: bool | None = None
    """True if the worker processes of all training loaders leave their batches in slots, where they stay; None without
    worker processes."""
    may_use_slots: bool | None = None
    """True if worker processes of a training loader send their batches as torch does, and could leave them in slots;
    None without worker processes."""
    batch_size: int | None = None
    """Samples in a batch, on one rank."""
    map_style: bool | None = None
    """True if all training datasets are map-style."""
    decodes_whole: bool | None = None
    """True for a torchvision ImageFolder whose transform begins with a RandomResizedCrop: each image is decoded whole,
    then cropped."""
    ours: bool | None = None
    """True if a FastDataModule made the training loaders."""
    generator: str = ""
    """Name and line of the loader, if it is not a DataLoader: ``batches (train.py:12)``; else empty."""
    why_no_workers: str = ""
    """The reason why the dataset of a loader without workers would not survive a fork into workers; empty if none was
    found."""
    shards_by_worker: bool | None = None
    """True if the iterable datasets come from packages known to divide their samples among workers."""
    repeated: bool | None = None
    """True if the workers of an iterable dataset were seen to give the same batches; None if this was not checked."""
    may_persist: bool | None = None
    """True if workers could persist between epochs: the loaders are not replaced, and no dataset is iterable or has a
    ``set_epoch``. Other changes that the program makes to a dataset are not seen."""

    @property
    def count(self) -> int:
        """Number of training loaders that each provide a part of a batch."""
        return max(1, len(self.every_num_workers))


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """The first training batch on the host. Other batches may have other sizes."""

    size_bytes: int | None = None
    """Bytes of all tensors of a training batch on the host."""
    tensors: int | None = None
    """Number of tensors of a training batch."""
    pinned: bool | None = None
    """True if the batch's largest tensor is in pinned memory; None if it is not on the host, or without CUDA."""


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """CPU time of the training process per step, over all measured steps."""

    cpu_ms: float | None = None
    """CPU time of the training thread per step (``time.thread_time``)."""
    load_cpu_ms: float | None = None
    """CPU time of the training process in ``next(loader)`` per step; None with workers. If the loader is not a
    DataLoader: CPU time of the training thread only."""
    load_queue_ms: float | None = None
    """Time in ``next(loader)`` per step in which the training thread was ready to run, but other threads or programs
    had the CPUs. Only on Linux; else None."""


@dataclass(frozen=True, kw_only=True)
class DataModuleFacts:
    """Settings of a FastDataModule; all of them None for any other source of loaders."""

    staged: bool | None = None
    """True if the FastDataModule reads from a staged copy."""
    device_transform: bool | None = None
    """True if the FastDataModule transforms batches on the device."""
    normalizes: bool | None = None
    """True if this is the normalisation of an ImageFolderDataModule, and the user has no hook of the transfer."""
    decoder: str | None = None
    """``decoder`` of an ImageFolderDataModule."""
    quality: str | None = None
    """``quality`` of an ImageFolderDataModule."""
    backend: str | None = None
    """Backend of an ImageFolderDataModule: ``torch``, ``nvjpeg``, ``dali-cpu`` or ``dali-gpu``."""
    own_transforms: bool | None = None
    """True if an ImageFolderDataModule's workers, after decoding, run transforms, the user's ``collate``, or
    ``drop_keys``."""


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """Settings of the Trainer, and of its callbacks."""

    package: Literal["lightning.pytorch", "pytorch_lightning"] = "lightning.pytorch"
    """Package of the Trainer and its callbacks."""
    lightning: str | None = None
    """Version of the package named in ``package``."""
    max_epochs: int | None = None
    """Epochs of the fit; None if unbounded."""
    breaks_off: bool | None = None
    """True if the Trainer has a limit that may end an epoch before its loaders do."""
    log_every_n_steps: int | None = None
    """The Trainer's ``log_every_n_steps``."""
    check_val_every_n_epoch: int | None = None
    """The Trainer's ``check_val_every_n_epoch``; None if validation is scheduled by steps instead of epochs."""
    val_check_batches: int | None = None
    """Training batches between two validations, if an epoch has several, or if validation is scheduled by steps."""
    checkpoint_steps: int | None = None
    """Training steps between checkpoints; None unless exactly one ModelCheckpoint saves by steps."""
    bar_refresh_rate: int | None = None
    """Batches between updates of the progress bar; 0 if it is off."""
    left_s: float | None = None
    """Seconds until the fit ends, as far as its own steps tell; None if it has no end, or if that is not known."""
    tuned: bool | None = None
    """True if the loader's number of workers was decided by trials, in this run or in an earlier one."""
    tuned_outside: bool | None = None
    """True if these were the trials of ``lightning-feed tune``, which do not try batches in place with any loader."""
    measures: bool | None = None
    """True if the program itself has a GPUStarvationCallback, so that each of its runs is measured."""


OTHERS_PCT = 20.0
"""Smallest CPU use of other programs, in %, that affects the figures."""


@dataclass(frozen=True, kw_only=True)
class DeviceWait:
    """A line at which the host waits for the device, such as ``loss.item()``, seen in some sampled steps."""

    file: str
    """The line's file."""
    line: int
    """Number of the line in its file, from 1."""
    code: str = ""
    """The source line without indentation; empty if unknown."""
    is_users: bool = True
    """True for a line of the user's program; False for one of a library that the user's step did not call."""
    steps: int
    """Number of sampled steps in which the host waited here."""
    sampled_steps: int
    """Number of sampled steps."""

    @property
    def in_most_steps(self) -> bool:
        """True if the host waits here in most steps, rather than now and then."""
        return 2 * self.steps > self.sampled_steps


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """Facts about the run, other than its times. Unknown facts are None."""

    loop: Literal["trainer", "plain"] = "trainer"
    """Lightning's Trainer, or a plain loop of the user, which has no callbacks, hooks or data modules."""
    stage: Literal["fit", "validate", "test", "predict"] = "fit"
    """Stage that the loaders, batches and steps belong to."""
    device_type: str = "cpu"
    """Type of the device on which the steps run: ``cpu``, ``cuda``, ..."""
    world_size: int = 1
    """Number of ranks."""
    usable_cpus: int | None = None
    """CPUs that this rank may use."""
    torch_threads: int | None = None
    """Threads that torch uses for one operation in the training process."""
    free_shm_bytes: int | None = None
    """Free space of /dev/shm before training; None without a limit."""
    others_cpu_pct: float | None = None
    """Share of this run's CPUs that other programs used, 0 to 100. From 20, they affect the figures. Known only on
    Linux, with a single training process; else None."""
    batches_per_epoch: int | None = None
    """Batches of the training loader in an epoch, on one rank."""
    cut_short: tuple[int, int] | None = None
    """Number of batches in an epoch that ended too early, and the length of its loader; None if no epoch did."""
    waited_ms: tuple[float, float] | None = None
    """Mean wait for data in a step, in earlier epochs and since then, if the wait has changed: the figures then leave
    the earlier epochs out. None if it has not changed."""
    batch_hooks: bool | None = None
    """True if a hook of the user other than ``device_transform`` can change a batch during its transfer."""
    syncs: tuple[str, ...] = ()
    """Reasons why the host waits for the device in each step: names in :data:`SYNCS`."""
    waits: tuple[DeviceWait, ...] | None = None
    """Lines at which the host was seen to wait for the device, those of most steps first; None if no step was sampled,
    as on the CPU."""
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    batch: BatchFacts = field(default_factory=BatchFacts)
    host: HostTimes = field(default_factory=HostTimes)
    datamodule: DataModuleFacts = field(default_factory=DataModuleFacts)
    trainer: TrainerFacts = field(default_factory=TrainerFacts)
    loader_code: LoaderCode | None = None
    hook_code: tuple[HookCode, ...] = ()

    @property
    def crowded(self) -> bool:
        """True if other programs use enough CPU time to affect the figures."""
        return (self.others_cpu_pct or 0.0) >= OTHERS_PCT

    @property
    def copies_nothing(self) -> bool:
        """True if batches stay on the CPU unchanged, without a hook or transform of the user in their transfer."""
        return self.device_type == "cpu" and self.batch_hooks is False and not self.datamodule.device_transform


SYNCS = ("prog_bar", "grad_scaler", "sigterm_broadcast", "throughput_monitor")
"""Known synchronisations of Lightning."""


@dataclass(frozen=True, kw_only=True)
class HookTime:
    """The time of one hook in a step."""

    name: str
    """The hook's name in Lightning's profiler, for example ``[Callback]ModelCheckpoint.on_train_batch_end``."""
    ms_per_step: float
    """Mean time per step, over the steps in which the hook was timed."""


@dataclass(frozen=True, kw_only=True)
class LoopMeasurements:
    """Measurements of the validation within a fit."""

    stats: StarvationStats
    """The parts of the validation steps."""
    facts: LoopFacts
    """Facts about the validation and its loaders."""
    loaders: LoaderStats = field(default_factory=LoaderStats)
    by_loader: tuple[LoaderSteps, ...] = ()
    """Steps of each loader, if there are several; empty for a single loader."""
    waited_s: float
    """Seconds of waiting for data, including the first batch of each validation."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements from which a verdict is made."""

    stats: StarvationStats
    facts: LoopFacts = field(default_factory=LoopFacts)
    loaders: LoaderStats = field(default_factory=LoaderStats)
    """Figures of the whole run without its warm-up (not only of the last window)."""
    ranks: RankStats | None = None
    hooks: tuple[HookTime, ...] = ()
    """Hooks between the steps, the slowest first."""
    by_loader: tuple[LoaderSteps, ...] = ()
    """Figures of each loader, for a validation, test or prediction with several loaders; else empty."""
    wall: WallStats | None = None
    """Wall-time parts of the whole run; None if not measured."""
    device_busy_pct: float | None = None
    """Share of the training steps' time in which the GPU ran any kernel, in percent, as NVML measures it, after the
    warm-up; None if unknown."""
    timeline: Timeline | None = None
    """The waiting over the run, and the histogram of its step times; None without steps."""
    validation: LoopMeasurements | None = None
    """Measurements of the validation within a fit."""
    experiments: ExperimentResults = field(default_factory=ExperimentResults)
    """The results of a diagnosis; empty after a plain fit."""
    diagnosed: bool = False
    """True if ``diagnose`` ran. A plain fit can still be diagnosed to learn more."""

    @property
    def between_ms(self) -> float:
        """Mean time between the steps, in milliseconds. Where nothing is copied, the time of the transfer is part of
        it, since that is only Lightning's own."""
        between_ms = self.stats.other_ms or 0.0
        if self.facts.copies_nothing:
            between_ms += self.stats.copy_ms or 0.0
        return between_ms
