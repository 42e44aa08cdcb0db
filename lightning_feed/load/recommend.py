"""The choice of each ``"auto"`` setting of a loader, with a reason."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_feed.errors import SettingsError
from lightning_feed.load.settings import PINNING_DEVICES, TORCH_PREFETCH, LoaderSettings, Setting
from lightning_feed.machine.limits import HAS_SLOTS, THREAD_BYTES, WORKER_BYTES, Footprint, Machine, exceeded_limit

ASSUMED_SAMPLE_BYTES = 3 * 224 * 224 * 4
"""Assumed bytes of a sample of unknown size: a float32 image of 3 x 224 x 224. Most samples are no larger."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Properties of the run that loaders depend on. The defaults fit a loader outside a run."""

    device_type: str = "cpu"
    """Type of the training device, as in ``torch.device.type``."""
    local_ranks: int = 1
    """Number of training processes on this machine, including this one."""
    sharing_ranks: int = 1
    """Number of training processes that share the samples of a map-style dataset."""
    reload_every_n_epochs: int = 0
    """The Trainer's ``reload_dataloaders_every_n_epochs``."""
    overfit: bool = False
    """True if the Trainer's ``overfit_batches`` repeats the same few batches in a fixed order."""
    worker_init: Callable[[int], None] | None = None
    """Function that sets up each worker process. None for :class:`~lightning_feed.load.worker.WorkerInit`."""


@dataclass(frozen=True, kw_only=True)
class Workload(RunFacts):
    """Properties of one loader that the settings depend on."""

    split: str
    """``"train"``, ``"val"``, ``"test"`` or ``"predict"``."""
    batch_size: int
    batches: int | None
    """Batches of an epoch on one rank. None if the dataset has no length."""
    loaders: int = 1
    """Number of loaders that run at the same time, including this one."""
    iterable: bool = False
    """True if the dataset is a stream, from which workers cannot pick samples."""
    has_set_epoch: bool = False
    """True if the program tells the dataset the epoch, which persistent workers would not hear."""
    why_no_workers: str = ""
    """The reason why a rehearsal has refused worker processes. Empty if it has not."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The chosen settings for a loader, with reasons."""

    setting: Setting
    reasons: dict[str, str]
    """Reason for each value, by the name of the setting. ``workers`` is included only if it is not the default."""
    warnings: tuple[str, ...] = ()
    """Warnings: risks of the user's values, and limits that no choice could satisfy."""

    def describe(self) -> str:
        """Return one line for each setting, with its value and the reason for the value."""
        return "\n".join(f"{name}={getattr(self.setting, name)}: {reason}" for name, reason in self.reasons.items())


def recommend(machine: Machine, settings: LoaderSettings, workload: Workload) -> Recommendation:
    """Choose the ``"auto"`` settings. The user's values are kept, with a warning if they may hurt.

    Raises:
        SettingsError: persistent workers are requested, but the Trainer reloads the loaders every few epochs.
    """
    limits = _MemoryLimits(machine, settings, workload)
    wanted_workers, why_workers = _wanted_workers(machine, settings, workload)
    wanted_prefetch, why_prefetch = _wanted_prefetch(settings)
    workers, prefetch = limits.largest_within(wanted_workers, wanted_prefetch)
    warnings: list[str] = []
    exceeded = limits.exceeded_by(workers, prefetch)
    if exceeded:
        warnings.append(f"num_workers={workers}, prefetch_factor={prefetch}: {exceeded}")
        why_workers += f"; WARNING: {exceeded}"
        why_prefetch += f"; WARNING: {exceeded}"
    if workers < wanted_workers:
        why_workers += f"; {wanted_workers} would be too many: {limits.exceeded_by(wanted_workers, prefetch)}"
    if prefetch < wanted_prefetch:
        why_prefetch += f"; {wanted_prefetch} would be too many: {limits.exceeded_by(wanted_workers, wanted_prefetch)}"
    if workers == 0:
        why_prefetch = "there are no workers to load ahead"
        if wanted_workers > 0 or workload.why_no_workers:
            warnings.append(f"num_workers=0: {why_workers}")
    pin_memory, why_pin = _pin(settings, workload)
    persistent, why_persistent = _persistent(settings, workload, workers)
    reasons: dict[str, str] = {}
    if settings.workers != "process":
        reasons["workers"] = "as given"
    reasons["num_workers"] = why_workers
    reasons["prefetch_factor"] = why_prefetch
    reasons["pin_memory"] = why_pin
    reasons["persistent_workers"] = why_persistent
    setting = Setting(
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=pin_memory,
        persistent_workers=persistent,
        workers=settings.workers,
        in_order=settings.in_order,
    )
    return Recommendation(setting=setting, reasons=reasons, warnings=tuple(warnings))


# --- workers, and the batches that they load ahead --------------------------------------------------------------------


def _wanted_workers(machine: Machine, settings: LoaderSettings, workload: Workload) -> tuple[int, str]:
    """Return the number of workers, with the reason, before memory is taken into account."""
    if isinstance(settings.num_workers, int):  # without a trial, "tune" means "auto"
        return settings.num_workers, "as given"
    why_none = _why_none(settings, workload)
    if why_none:
        return 0, why_none
    if workload.iterable:
        return 1, (
            "each worker of an IterableDataset reads the whole stream, unless the dataset divides it by "
            "torch.utils.data.get_worker_info(); if yours does, set num_workers"
        )
    workers, why = _share_of_cpus(machine, workload)
    if settings.workers == "thread":
        why += "; threads work on a batch together, in parallel while C code such as a decoder releases the GIL"
    elif workload.batches is not None and workers > workload.batches:
        workers = workload.batches
        why += f", and no more than the {workload.batches} batches"
    if workers >= 1:
        return workers, why
    why += "; at least one"
    asking = ", ".join(settings.asking_for_workers())
    if asking:
        why += f", since {asking} asks for workers"
    return 1, why


def _why_none(settings: LoaderSettings, workload: Workload) -> str:
    """Return the reason for loading in the training process. Empty if workers are better, or if settings need them."""
    if settings.asking_for_workers():
        return ""
    if workload.why_no_workers:
        return workload.why_no_workers
    if workload.batches is not None and workload.batches <= 1:
        return "a single batch leaves nothing to load in parallel"
    return ""


def _share_of_cpus(machine: Machine, workload: Workload) -> tuple[int, str]:
    """Return the number of CPUs for the workers of one loader on one rank, with the reason."""
    share = machine.usable_cpus // workload.local_ranks
    why = f"{machine.usable_cpus} {machine.cpu_reason}"
    if workload.local_ranks > 1:
        why += f" for {workload.local_ranks} ranks"
    if share >= 4:
        share -= 1
        why += ", less one for the training process"
    if workload.loaders > 1:
        share //= workload.loaders
        why += f", shared by {workload.loaders} loaders"
    return share, why


def _wanted_prefetch(settings: LoaderSettings) -> tuple[int, str]:
    if settings.prefetch_factor == "auto":
        return TORCH_PREFETCH, "torch's default; more helps only if samples differ much in cost"
    return settings.prefetch_factor, "as given"


class _MemoryLimits:
    """The memory of a machine, as a limit on the number of workers and of batches that they load ahead."""

    def __init__(self, machine: Machine, settings: LoaderSettings, workload: Workload) -> None:
        self._machine = machine
        self._settings = settings
        self._workload = workload

    def largest_within(self, workers: int, prefetch: int) -> tuple[int, int]:
        """Reduce ``prefetch``, then ``workers``, until both are within the limits. The user's values are not reduced.

        Args:
            workers: number of workers.
            prefetch: number of batches that each worker loads ahead.

        Returns:
            The reduced ``workers`` and ``prefetch``.
        """
        fewest_workers = 1 if self._settings.asking_for_workers() else 0
        while self.exceeded_by(workers, prefetch):
            if self._settings.prefetch_factor == "auto" and prefetch > 1:
                prefetch -= 1
            elif not isinstance(self._settings.num_workers, int) and workers > fewest_workers:
                workers -= 1
            else:
                break
        return workers, prefetch

    def exceeded_by(self, workers: int, prefetch: int) -> str:
        """Describe the limit that these workers would exceed. Empty if they would exceed none."""
        settings = self._settings
        if workers == 0 or settings.workers == "ray":  # only the cluster limits Ray's workers
            return ""
        # Batches of the workers and of the background thread, and the batch in training.
        batches = workers * prefetch + settings.background + 1
        description = (
            f"{batches} batches of {self._workload.batch_size} samples (assumed: float32 images of 3 x 224 x 224, "
            f"{ASSUMED_SAMPLE_BYTES} bytes each)"
        )
        footprint = Footprint(
            workers=workers,
            batches=batches,
            batch_bytes=self._workload.batch_size * ASSUMED_SAMPLE_BYTES,
            size=description,
            worker_bytes=self._worker_bytes(),
            in_shm=settings.workers == "process" and not (settings.hand_over == "slots" and HAS_SLOTS),
            sharers=self._workload.local_ranks * self._workload.loaders,
        )
        return exceeded_limit(self._machine, footprint)

    def _worker_bytes(self) -> int:
        if self._settings.workers == "thread":
            return THREAD_BYTES
        return WORKER_BYTES[self._settings.start_method or self._machine.start_method]


# --- pinned memory, and workers that stay alive -----------------------------------------------------------------------


def _pin(settings: LoaderSettings, workload: Workload) -> tuple[bool, str]:
    helps = workload.device_type in PINNING_DEVICES
    if settings.pin_memory == "auto":
        why = "nothing is copied to a device"
        if helps:
            why = "a copy from page-locked memory overlaps with computing"
        return helps, f"device '{workload.device_type}': {why}"
    if settings.pin_memory and not helps:
        return False, f"True was requested, but is not used: it does not help a device of type '{workload.device_type}'"
    return settings.pin_memory, "as given"


def _persistent(settings: LoaderSettings, workload: Workload, workers: int) -> tuple[bool, str]:
    is_repeated = workload.split in ("train", "val")
    epochs_until_reload = workload.reload_every_n_epochs if is_repeated else 0
    _check_reload(settings, epochs_until_reload)
    if settings.workers == "thread" and workers:
        why = "threads start in less than a millisecond"
        if settings.persistent_workers is True:
            why = f"True was requested, but is not used: {why}"
        return False, why
    if settings.persistent_workers != "auto":
        return settings.persistent_workers, "as given"
    if workers == 0:
        return False, "there are no workers"
    if epochs_until_reload:
        return False, f"the Trainer makes new loaders every {epochs_until_reload} epochs"
    if workload.has_set_epoch:
        return False, "the program tells the dataset the epoch (set_epoch), which workers hear only when they start"
    if not is_repeated:
        return False, f"'{workload.split}' is iterated once"
    return True, "avoids starting the workers again in each epoch"


def _check_reload(settings: LoaderSettings, epochs_until_reload: int) -> None:
    if epochs_until_reload and settings.persistent_workers is True:
        raise SettingsError(
            f"persistent_workers=True with Trainer(reload_dataloaders_every_n_epochs={epochs_until_reload}) would keep "
            "workers for loaders that are replaced. Leave one of the two out."
        )
