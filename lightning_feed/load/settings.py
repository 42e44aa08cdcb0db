"""LoaderSettings, and the choice of each ``"auto"`` setting, with a reason."""

import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from lightning_feed.errors import SettingsError
from lightning_feed.load.machine import HAS_SLOTS, THREAD_BYTES, WORKER_BYTES, Footprint, Machine, exceeded_limit

MOST = 1024
"""Upper limit for workers and batches ahead. A larger number is a typing error."""
SEEDS = 2**32
"""Number of possible seeds, from 0 on, as in NumPy and Lightning."""
_NONE = range(0)
_ALLOWED: dict[str, tuple[range, tuple[object, ...]]] = {
    "num_workers": (range(MOST + 1), ("auto", "tune")),
    "workers": (_NONE, ("process", "thread", "ray")),
    "prefetch_factor": (range(1, MOST + 1), ("auto",)),
    "pin_memory": (_NONE, (True, False, "auto")),
    "persistent_workers": (_NONE, (True, False, "auto")),
    "hand_over": (_NONE, ("slots", "torch")),
    "background": (range(MOST + 1), ()),
    "in_order": (_NONE, (True, False)),
    "drop_last": (_NONE, (True, False)),
    "shuffle": (_NONE, (True, False)),
    "start_method": (_NONE, (*multiprocessing.get_all_start_methods(), None)),
    "seed": (range(SEEDS), (None,)),
    "sample_bytes": (range(1, 2**50 + 1), (None,)),
}
"""Valid whole numbers and other values of each setting."""


@dataclass(frozen=True)
class RayCluster:
    """Value of a FeedLoader's ``workers``: its batches are made on a Ray cluster."""

    address: str | None = None
    """Address of the cluster, as in ``ray.init``. None: the Ray already used by this process, or a new one."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of ``FastDataModule``'s loaders. ``"auto"`` is replaced by a value for the machine, with a reason.

    Raises:
        SettingsError: a value is invalid, or would have no effect with the other settings.

    Example:
        >>> LoaderSettings(num_workers=4, prefetch_factor=2).pin_memory
        'auto'
    """

    num_workers: int | Literal["auto", "tune"] = "auto"
    """Workers of each loader; 0 loads in the training process. ``"auto"``: about one for each CPU of this rank, 1 for
    an iterable dataset. ``"tune"`` tries a few numbers, and other settings that are left to ``"auto"``, when a fit
    begins, and remembers the result."""
    workers: Literal["process", "thread", "ray"] = "process"
    """Kind of workers. Threads start at once and share memory with training, but only code that releases the GIL runs
    in parallel: decoders in C, reading files, torch. ``"ray"``: tasks on the machines of a Ray cluster. See
    docs/how-to/threads.md."""
    ray_address: str | None = None
    """Address of the Ray cluster: ``"auto"`` for this machine's cluster, or ``"host:port"`` of the head node. None: the
    Ray already used by this process, or a new one on this machine."""
    prefetch_factor: int | Literal["auto"] = "auto"
    """Batches that each worker loads ahead."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Put batches into page-locked memory, so that the copy to the device can overlap with computing."""
    persistent_workers: bool | Literal["auto"] = "auto"
    """Keep the workers from epoch to epoch. They make the first batches of the next epoch before it begins."""
    hand_over: Literal["slots", "torch"] = "slots"
    """Way in which worker processes hand over their batches. ``"slots"``: in memory that is used again and again.
    ``"torch"``: as a DataLoader does it, each tensor in new shared memory. See docs/how-to/batches_in_place.md."""
    background: int = 0
    """Batches that a thread of the training process keeps ready. 0: no thread."""
    in_order: bool = True
    """Yield batches in sampler order. If False, a slow batch can be overtaken, so the order is not reproducible."""
    drop_last: bool = False
    """Drop an incomplete last training batch. Evaluation always sees every sample."""
    shuffle: bool = True
    """Shuffle training samples (map-style datasets). Evaluation is never shuffled."""
    timeout_s: float = 0
    """Seconds to wait for a batch from the workers before an error. 0: wait for ever."""
    warn_after_s: float = 60
    """Seconds without a batch before a warning names the hanging worker and its position. 0: never. The run
    continues."""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """Start method of worker processes. None: Python's default."""
    seed: int | None = None
    """Seed of the training order. None: the seed of ``seed_everything``, or a random one."""
    sample_bytes: int | None = None
    """Bytes of one sample from the dataset, if known. Lets ``"auto"`` calculate the number of batches that fit into
    memory and shared memory."""

    def __post_init__(self) -> None:
        for name, (numbers, others) in _ALLOWED.items():
            self._check(name, numbers, others)
        for name, zero in (("timeout_s", "to wait for ever"), ("warn_after_s", "to say nothing")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise SettingsError(f"{name}={value!r} is not possible. Use seconds, or 0 {zero}.")
        self._refuse_without_effect()
        self._check_ray()

    def _check(self, name: str, numbers: range, others: tuple[object, ...]) -> None:
        value = getattr(self, name)
        # Compares types too: 1 is not True.
        known = any(type(value) is type(other) and value == other for other in others)
        if known or (type(value) is int and value in numbers):
            return
        allowed = [f"a whole number from {numbers[0]} to {numbers[-1]}"] if numbers else []
        allowed += map(repr, others)
        raise SettingsError(f"{name}={value!r} is not possible. Use {' or '.join(allowed)}.")

    def asking_for_workers(self) -> dict[str, Any]:
        """Return the user's settings that need workers, by name."""
        idle: dict[str, tuple[object, ...]] = {
            "workers": ("process",),
            "prefetch_factor": ("auto",),
            "persistent_workers": ("auto", False),
            "in_order": (True,),
            "timeout_s": (0,),
            "start_method": (None,),
        }
        return {name: getattr(self, name) for name, values in idle.items() if getattr(self, name) not in values}

    def _refuse_without_effect(self) -> None:
        idle = self.asking_for_workers()
        if self.num_workers == 0 and idle:
            name, value = next(iter(idle.items()))
            raise SettingsError(
                f"num_workers=0 loads in the training process, so {name}={value!r} would have no effect. "
                f"Set num_workers to 1 or more, or leave {name} out."
            )
        if self.num_workers == 1 and not self.in_order:
            raise SettingsError(
                "in_order=False needs at least two workers. Set num_workers to 2 or more, or leave in_order out."
            )
        if self.workers != "process" and self.start_method is not None:
            raise SettingsError(
                f"workers={self.workers!r} does not start torch's worker processes, so "
                f"start_method={self.start_method!r} would have no effect. Leave it out."
            )

    def _check_ray(self) -> None:
        address = self.ray_address
        if address is not None and (not isinstance(address, str) or not address or "://" in address):
            raise SettingsError(
                f"ray_address={address!r} is not possible. Give 'auto', or 'host:port' of the head node. Ray Client "
                "(ray://) is not supported: run the training on a node of the cluster."
            )
        if self.workers != "ray" and address is not None:
            raise SettingsError(
                f"workers={self.workers!r} does not use Ray, so ray_address={address!r} would have no effect. Set "
                "workers='ray', or leave it out."
            )
        if self.workers == "ray" and not isinstance(self.num_workers, int):
            raise SettingsError(
                f"workers='ray' with num_workers={self.num_workers!r}: the size of the cluster is not known here. Set "
                "the number of workers, one for each CPU that you want to use."
            )


def workers_of(settings: LoaderSettings) -> Literal["process", "thread"] | RayCluster:
    """Return the ``workers`` argument for a FeedLoader."""
    return RayCluster(settings.ray_address) if settings.workers == "ray" else settings.workers


TORCH_PREFETCH = 2
"""Batches that each worker loads ahead by default in torch."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The values of one loader, without any ``"auto"``: what is decided, tried, set and reported."""

    num_workers: int
    prefetch_factor: int | None = None
    """Batches that each worker loads ahead; None without workers."""
    pin_memory: bool = False
    persistent_workers: bool = False
    workers: Literal["process", "thread", "ray"] = "process"
    """Kind of the workers."""
    in_order: bool = True

    def __str__(self) -> str:
        kind = "" if self.workers == "process" else f", workers={self.workers!r}"
        ahead = f", prefetch_factor={self.prefetch_factor}" if self.prefetch_factor else ""
        return f"num_workers={self.num_workers}{kind}{ahead}"

    def with_workers(self, number: int, *, persistent: bool = False) -> "Setting":
        """The same values with another number of workers.

        Args:
            number: the number of workers.
            persistent: True to keep the workers from epoch to epoch, if there are any.
        """
        if number == 0:
            return Setting(num_workers=0, pin_memory=self.pin_memory)
        return replace(
            self,
            num_workers=number,
            prefetch_factor=self.prefetch_factor or TORCH_PREFETCH,
            persistent_workers=self.persistent_workers or persistent,
            in_order=self.in_order or number == 1,
        )


ASSUMED_SAMPLE_BYTES = 3 * 224 * 224 * 4
"""Assumed bytes of a sample of unknown size: a float32 image of 3 x 224 x 224. Most samples are no larger."""
PINNING_DEVICES = ("cuda", "xpu")
"""Device types whose copies from page-locked memory can overlap with computing."""


@dataclass(frozen=True, kw_only=True)
class Job:
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
    """Function that sets up each worker."""


@dataclass(frozen=True, kw_only=True)
class Workload(Job):
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
    why_no_workers: str = ""
    """The reason why the dataset must not be given worker processes. Empty: none is known."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The chosen settings for a loader, with reasons."""

    setting: Setting
    reasons: dict[str, str]
    """Reason for each value, by name. ``workers`` is included only if it is not the default."""
    warnings: tuple[str, ...] = ()
    """Warnings: risks of the user's values, and limits that no choice could satisfy."""

    def describe(self) -> str:
        """Return one line per value, with the reason."""
        return "\n".join(f"{name}={getattr(self.setting, name)}: {reason}" for name, reason in self.reasons.items())


def recommend(machine: Machine, settings: LoaderSettings, workload: Workload) -> Recommendation:
    """Choose the ``"auto"`` settings. The user's values are kept, with a warning if they may hurt.

    Raises:
        SettingsError: persistent workers, but the Trainer reloads the loaders every few epochs.
    """
    workers, why_workers = _workers(machine, settings, workload)
    prefetch = TORCH_PREFETCH
    why_prefetch = "torch's default; more helps only if samples differ much in cost"
    if settings.prefetch_factor != "auto":
        prefetch = settings.prefetch_factor
        why_prefetch = "as given"
    exceeded = partial(_exceeded_limit, machine, settings, workload)
    wanted = workers, prefetch
    while exceeded(workers, prefetch) and (fewer := _fewer(settings, workers, prefetch)):
        workers, prefetch = fewer
    warnings: tuple[str, ...] = ()
    still_exceeded = exceeded(workers, prefetch)
    if still_exceeded:
        warnings = (f"num_workers={workers}, prefetch_factor={prefetch}: {still_exceeded}",)
        why_workers += f"; WARNING: {still_exceeded}"
        why_prefetch += f"; WARNING: {still_exceeded}"
    if workers < wanted[0]:
        why_workers += f"; {wanted[0]} would be too many: {exceeded(wanted[0], prefetch)}"
    if prefetch < wanted[1]:
        why_prefetch += f"; {wanted[1]} would be too many: {exceeded(*wanted)}"
    if workers == 0:
        why_prefetch = "there are no workers to load ahead"
    if workers == 0 < wanted[0]:
        warnings += (f"num_workers=0: {why_workers}",)
    pin, why_pin = _pin(settings, workload)
    persistent, why_persistent = _persistent(settings, workload, workers)
    reasons = {
        "num_workers": why_workers,
        "prefetch_factor": why_prefetch,
        "pin_memory": why_pin,
        "persistent_workers": why_persistent,
    }
    setting = Setting(
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=pin,
        persistent_workers=persistent,
        workers=settings.workers,
        in_order=settings.in_order,
    )
    return Recommendation(
        setting=setting,
        reasons=reasons if settings.workers == "process" else {"workers": "as given", **reasons},
        warnings=warnings,
    )


def _workers(machine: Machine, settings: LoaderSettings, workload: Workload) -> tuple[int, str]:
    if isinstance(settings.num_workers, int):  # without a trial, "tune" means "auto"
        return settings.num_workers, "as given"
    needed = ", ".join(settings.asking_for_workers())
    if workload.why_no_workers and settings.workers == "process" and not needed:
        return 0, workload.why_no_workers
    if workload.batches is not None and workload.batches <= 1 and not needed:
        return 0, "a single batch leaves nothing to load in parallel"
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
    if workers < 1:
        why += f"; at least one{f', since {needed} asks for workers' if needed else ''}"
    return max(1, workers), why


def _share_of_cpus(machine: Machine, workload: Workload) -> tuple[int, str]:
    """Return the number of CPUs for the workers of one loader on one rank."""
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


def _fewer(settings: LoaderSettings, workers: int, prefetch: int) -> tuple[int, int] | None:
    """Reduce prefetched batches or workers by one. None if neither may be reduced."""
    if settings.prefetch_factor == "auto" and prefetch > 1:
        return workers, prefetch - 1
    fewest = 1 if settings.asking_for_workers() else 0
    may_be_fewer = not isinstance(settings.num_workers, int) and workers > fewest
    return (workers - 1, prefetch) if may_be_fewer else None


def _exceeded_limit(machine: Machine, settings: LoaderSettings, workload: Workload, workers: int, prefetch: int) -> str:
    """Describe the limit that this number of workers would exceed. Empty if there is no such limit."""
    if workers == 0 or settings.workers == "ray":  # only the cluster limits them
        return ""
    # Batches of the workers and of the background thread, and the batch in training.
    batches = workers * prefetch + settings.background + 1
    size = f"{batches} batches of {workload.batch_size} samples"
    if settings.sample_bytes is None:
        size += (
            f" (assumed: float32 images of 3 x 224 x 224, {ASSUMED_SAMPLE_BYTES} bytes each; set the true size with "
            "LoaderSettings(sample_bytes=...))"
        )
    threads = settings.workers == "thread"
    footprint = Footprint(
        workers=workers,
        batches=batches,
        batch_bytes=workload.batch_size * (settings.sample_bytes or ASSUMED_SAMPLE_BYTES),
        size=size,
        worker_bytes=THREAD_BYTES if threads else WORKER_BYTES[settings.start_method or machine.start_method],
        in_shm=settings.workers == "process" and not (settings.hand_over == "slots" and HAS_SLOTS),
        sharers=workload.local_ranks * workload.loaders,
    )
    return exceeded_limit(machine, footprint)


def _pin(settings: LoaderSettings, workload: Workload) -> tuple[bool, str]:
    helps = workload.device_type in PINNING_DEVICES
    if settings.pin_memory == "auto":
        why = "a copy from page-locked memory overlaps with computing" if helps else "nothing is copied to a device"
        return helps, f"device '{workload.device_type}': {why}"
    if settings.pin_memory and not helps:
        return False, f"True was requested, but is not used: it does not help a device of type '{workload.device_type}'"
    return settings.pin_memory, "as given"


def _persistent(settings: LoaderSettings, workload: Workload, workers: int) -> tuple[bool, str]:
    repeated = workload.split in ("train", "val")
    reload = workload.reload_every_n_epochs if repeated else 0
    if settings.persistent_workers is True and reload:
        raise SettingsError(
            f"persistent_workers=True with Trainer(reload_dataloaders_every_n_epochs={reload}) would keep workers for "
            "loaders that are replaced. Leave one of the two out."
        )
    if settings.workers == "thread" and workers:
        given = "True was requested, but is not used: " if settings.persistent_workers is True else ""
        return False, f"{given}threads start in less than a millisecond"
    if settings.persistent_workers != "auto":
        return settings.persistent_workers, "as given"
    if workers == 0:
        return False, "there are no workers"
    if reload:
        return False, f"the Trainer makes new loaders every {reload} epochs"
    if not repeated:
        return False, f"'{workload.split}' is iterated once"
    return True, "avoids starting the workers again in each epoch"
