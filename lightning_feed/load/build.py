"""One dataset -> one tuned loader."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.batch_decoder import BatchDecoder
from lightning_feed.load.datasets import size_of
from lightning_feed.load.epoch_order import EpochOrder
from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.load.late_batch import Watch
from lightning_feed.load.machine import Machine, read_machine
from lightning_feed.load.picklable import why_not_picklable
from lightning_feed.load.recommend import Recommendation, Workload, recommend
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.load.worker_init import WorkerInit


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the loaders have to know of the run. The defaults are those of a loader that is used by itself."""

    device_type: str = "cpu"
    """The type of the device that the batches go to."""
    local_ranks: int = 1
    """Training processes on this machine."""
    sharing_ranks: int = 1
    """Training processes that the samples of a map-style dataset are divided among."""
    reserved_bytes: int = 0
    """Memory, and room in /dev/shm, that caches have still to fill: workers must leave it alone."""
    reload_every_n_epochs: int = 0
    overfit: bool = False
    """Whether a few batches are trained again and again, for which the order must stay."""
    worker_init: WorkerInit = field(default_factory=WorkerInit)
    """What workers do first."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One loader among those of a split."""

    name: str
    """What reports and errors call it."""
    split: str
    batch_size: int
    together: int
    """Loaders that run at the same time, this one included."""
    sampler: Callable[[Any], Any]
    """Gives the user's sampler for a map-style dataset, or None."""
    collate_fn: Callable[[list[Any]], Any] | None
    order: EpochOrder
    decode: BatchDecoder | None = None
    """What decodes its batches after the workers; None: nothing does."""


def build_loader(dataset: Any, part: Part, settings: LoaderSettings, job: Job) -> tuple[FeedLoader, Recommendation]:
    """Build the loader of one dataset, and tell what was chosen for it.

    Raises:
        SettingsError: when no batch would be left, workers were to outlive their loader, or threads were to serve an
            iterable dataset.
        LoaderError: when the dataset or the collate function cannot be sent to the workers.
    """
    training, stream = part.split == "train", isinstance(dataset, IterableDataset)
    drop_last = training and settings.drop_last
    machine = _without(read_machine(), job.reserved_bytes)
    found = recommend(
        machine,
        settings,
        Workload(
            split=part.split,
            batch_size=part.batch_size,
            batches=_batches(dataset, part, job, drop_last=drop_last),
            loaders=part.together,
            iterable=stream,
            device_type=job.device_type,
            local_ranks=job.local_ranks,
            reload_every_n_epochs=job.reload_every_n_epochs,
        ),
    )
    sampler = None if stream else part.sampler(dataset)
    if sampler is None and training and settings.shuffle and not stream and not job.overfit:
        sampler = RandomSampler(dataset)
    workers = found.num_workers > 0
    processes = workers and found.workers == "process"
    if processes and (settings.start_method or machine.start_method) != "fork":
        # Not left to torch: Lightning covers an error at the start of a loader with one of its own.
        _check_picklable({"dataset": dataset, "collate function": part.collate_fn}, part.name)
    loader = FeedLoader(
        dataset,
        batch_size=part.batch_size,
        sampler=sampler,
        num_workers=found.num_workers,
        collate_fn=part.collate_fn,
        pin_memory=found.pin_memory,
        drop_last=drop_last,
        timeout=settings.timeout_s if workers else 0,
        worker_init_fn=job.worker_init if processes else None,
        multiprocessing_context=settings.start_method if processes else None,
        prefetch_factor=found.prefetch_factor,
        persistent_workers=found.persistent_workers,
        in_order=settings.in_order,
        background=settings.background,
        order=part.order,
        workers=found.workers,
        decode=part.decode,
        watch=Watch(part.name, settings.warn_after_s) if settings.warn_after_s else None,
    )
    return loader, found


def _without(machine: Machine, reserved_bytes: int) -> Machine:
    memory, shm = machine.available_memory_bytes, machine.free_shm_bytes
    return replace(
        machine,
        available_memory_bytes=None if memory is None else max(0, memory - reserved_bytes),
        free_shm_bytes=None if shm is None else max(0, shm - reserved_bytes),
    )


def _check_picklable(things: dict[str, Any], name: str) -> None:
    for what, thing in things.items():
        problem = why_not_picklable(thing)
        if problem is not None:
            raise LoaderError(
                f"The {what} of {name} cannot be sent to worker processes, which pickles it: {problem}. Define "
                "functions and classes at the top level of a module, and open files and connections in the first "
                "__getitem__. Or set LoaderSettings(start_method='fork'), which does not pickle, or num_workers=0."
            )


def _batches(dataset: Any, part: Part, job: Job, *, drop_last: bool) -> int | None:
    """Batches of an epoch on one rank; None where the dataset has no length."""
    samples = size_of(dataset)
    if samples is None:
        return None
    ranks = 1 if isinstance(dataset, IterableDataset) else job.sharing_ranks
    share = math.ceil(samples / ranks)
    if drop_last and share < part.batch_size:
        on_ranks = f" ({share} on each of {ranks} ranks)" if ranks > 1 else ""
        raise SettingsError(
            f"drop_last=True with batch_size={part.batch_size} leaves no batch of the {samples} samples{on_ranks} of "
            f"{part.name}. Make batch_size {share} or less, or leave drop_last out."
        )
    return share // part.batch_size if drop_last else math.ceil(share / part.batch_size)
