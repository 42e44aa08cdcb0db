"""The loaders under experiment, and the state and results that all experiments share."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, FeedError, LoaderError, plural
from lightning_feed.load.collate import named_parts
from lightning_feed.load.kinds import AnyLoader, Batch, Index, Sample
from lightning_feed.load.machine import Footprint, Machine, exceeded_limit, read_machine
from lightning_feed.load.processes import end_pass
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import TORCH_PREFETCH
from lightning_feed.measure.experiment_results import ExperimentResults
from lightning_feed.transfer.batch_tree import tensors
from lightning_feed.trials.cloning import (
    Changes,
    Heartbeat,
    LoaderRate,
    RoundLimits,
    background_of,
    burst_of,
    clone_loader,
    has_threads,
    locate_failure,
    map_loaders,
    time_loader,
    watchdog,
)

SILENT_S = 60.0
"""Seconds after which a batch counts as hanging."""
T = TypeVar("T")

WHOLE = "batch"
"""The name of a batch without parts."""
START_S = 60.0
"""Extra seconds for the loader as configured to start: all other experiments need its result, and spawned workers may
take long to import."""
_LEAST_S = 2.0
"""Shortest time for a loader, to which twice the start-up time of the user's loader is added."""
_NUMBER_BYTES = 8


class NotMeasurable(Exception):
    """Raised if an experiment cannot be run. The message is the reason."""


# --- the loaders --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoaderPart:
    """One loader."""

    name: str
    """Its key or number among several loaders: ``real``, ``0``; empty for a single one."""
    loader: DataLoader[Batch]

    @property
    def stream(self) -> bool:
        """True for an iterable data set, False for a map-style one."""
        return isinstance(self.loader.dataset, IterableDataset)

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        if self.loader.batch_size is None and self.loader.batch_sampler is not None and not self.stream:
            return len(next(iter(self.first_batches(1)), [None]))
        return self.loader.batch_size or 1

    def changes(self, **changed: Any) -> Changes:
        """Changes to the loader: those given, and a sampler that begins again at its end."""
        return Changes(endless=not self.stream, **changed)

    def first_batches(self, count: int) -> list[Batch]:
        """The sampler's first batches of indices: lists, or indices if the loader does not batch.

        Fewer if the pass is shorter.
        """
        with preserve_state(self.loader):
            source = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
            return list(islice(source, count))

    def indices(self, batch: Batch) -> list[Index]:
        """Indices of the samples in one of the sampler's batches."""
        return [batch] if self.loader.batch_sampler is None else list(batch)

    def first_samples(self, count: int) -> list[Sample]:
        """Indices of the first samples of a pass."""
        batches = self.first_batches(math.ceil(count / (self.loader.batch_size or 1)))
        return list(chain.from_iterable(map(self.indices, batches)))[:count]


def parts_of(loader: object) -> tuple[LoaderPart, ...]:
    """The DataLoaders in the result of ``train_dataloader``: one, a dict or list of them, or a CombinedLoader.

    Raises:
        LoaderError: it contains anything else.
    """
    found: list[LoaderPart] = []

    def add(loader: object, path: tuple[object, ...]) -> None:
        stages = getattr(loader, "pipeline", None)
        if isinstance(stages, list) and len(stages) == 1:
            loader = stages[0]  # a WebLoader that adds nothing to its DataLoader
        if not isinstance(loader, DataLoader):
            name = type(loader).__name__
            raise LoaderError(f"a {name} is not a torch DataLoader, so it cannot be rebuilt with changes")
        found.append(LoaderPart(".".join(map(str, path)), loader))

    map_loaders(loader, add)
    if not found:
        raise LoaderError("It contains no loader.")
    return tuple(found)


class Together(Iterator[list[Batch]]):
    """Passes side by side: a batch from each loader counts as one. Keeps the first one, and counts them.

    Attributes:
        iterators: the loaders' iterators.
        first: the first batch of each loader.
        came: number of batches so far.
    """

    def __init__(self, iterators: list[Iterator[Batch]]) -> None:
        self.iterators = iterators
        self.first: list[Batch] = []
        self.came = 0

    def __next__(self) -> list[Batch]:
        batch = [next(one) for one in self.iterators]
        self.first = self.first or batch
        self.came = self.came + 1
        return batch

    def close(self) -> None:
        """End all passes."""
        for one in self.iterators:
            end_pass(one)


# --- samples made in this process ---------------------------------------------------------------------------------


@contextmanager
def naming(dataset: object, index: object) -> Iterator[None]:
    """Convert an error of the data set to one that names the sample, as a context manager.

    Raises:
        DatasetError: in place of the data set's own error.
    """
    try:
        yield
    except FeedError:
        raise
    except Exception as error:
        kind = type(dataset).__name__
        why = f"{type(error).__name__}: {str(error).rstrip('.')}"
        if "thread" in str(error):  # sqlite3 and others are bound to the thread that made them
            raise DatasetError(
                f"The data set ({kind}) works only in the thread that made it ({why}). Experiments load in a separate "
                "thread, so that a hanging one can be abandoned. Your fit is not affected. To run experiments, open "
                "resources that are bound to a thread, such as database connections, in each thread that uses them."
            ) from error
        raise DatasetError(
            f"The data set ({kind}) failed to return sample {index}: {why}. Fix or exclude this sample."
        ) from error


def not_hanging(work: Callable[[Heartbeat], T], silent_s: float, what: str) -> T:
    """The result of ``work``, unless it hangs.

    Args:
        work: calls ``beat()`` at least every ``silent_s`` seconds.
        silent_s: longest time between two beats.
        what: subject of the message.

    Raises:
        LoaderError: no beat for longer than ``silent_s``.
    """
    message = (
        f"{what} took longer than {silent_s:g} s. See what it waits for: a lock, a connection, a file system that does "
        "not answer."
    )
    return watchdog(work, silent_s=silent_s, unblock=lambda: False, what=lambda _: message)


@contextmanager
def threads_of_a_worker(part: LoaderPart) -> Iterator[None]:
    """Context manager to give torch as many threads as a worker has: one, if the loader has workers."""
    threads = torch.get_num_threads()
    try:
        if part.loader.num_workers:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def make_sample(part: LoaderPart, max_s: float = 60.0) -> Sample:
    """The loader's first sample, made in this process as a worker would.

    Raises:
        DatasetError: the sample cannot be made, or there is none.
        LoaderError: the sample takes longer than ``max_s``.
    """
    dataset = part.loader.dataset
    indices = ["the first"] if part.stream else part.first_samples(1)
    if not indices:
        raise DatasetError("The sampler gives no batch. Check the length of the data set, and drop_last.")

    def make(_: Heartbeat) -> list[Sample]:
        return list(islice(iter(dataset), 1)) if part.stream else [dataset[indices[0]]]

    with naming(dataset, indices[0]):
        samples = not_hanging(make, max_s, f"Sample {indices[0]} of the data set ({type(dataset).__name__})")
    if not samples:
        raise DatasetError("The iterable data set gives no sample. Check its source.")
    return samples[0]


def fresh(sample: object) -> Sample:
    """The sample with shallow copies of its dicts and lists: collate functions may remove entries."""
    return copy.copy(sample) if isinstance(sample, (Mapping, list)) else sample


# --- the session --------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """The loaders under experiment, and the results so far.

    Args:
        loader: the result of ``train_dataloader``.
        device: device that batches go to; None: none.
        clock: seconds.
    """

    loader: AnyLoader
    device: torch.device | None = None
    clock: Callable[[], float] = time.monotonic
    machine: Machine = field(default_factory=read_machine)
    results: ExperimentResults = field(default_factory=ExperimentResults)
    parts: tuple[LoaderPart, ...] = ()
    """Empty if the loader is not a DataLoader."""
    samples: list[Sample] = field(default_factory=list)
    """A sample of each loader."""
    first: list[Batch] = field(default_factory=list)
    """The first batch of each loader."""
    alone: LoaderRate | None = None
    """The rate of the loaders as configured."""
    share_s: float = 1.0
    """Seconds for the present experiment."""
    subset: Any = None
    """The first batches and their files; chosen once, so that experiments can be compared."""

    def prepare(self) -> str | None:
        """Find the DataLoaders, and draw a sample of each.

        Returns:
            The reason why they cannot be rebuilt with changes; None if they can.

        Raises:
            DatasetError: a sample cannot be made.
            LoaderError: a sample takes very long.
        """
        with preserve_state(self.loader):
            try:
                parts = parts_of(self.loader)
                for part in parts:
                    clone_loader(part.loader)
            except LoaderError as error:
                return str(error)
            self.parts = parts
            self.samples = [make_sample(part) for part in parts]
        self.note(batch_size=sum(part.batch_size for part in parts))
        return None

    def note(self, **figures: Any) -> None:
        """Add figures to the results."""
        self.results = replace(self.results, **figures)

    def counted_s(self, share: float = 1.0) -> float:
        """Seconds that are counted, of a share of the experiment's time; the rest is start-up and warm-up."""
        return max(0.1, min(3.0, 0.4 * share * self.share_s))

    def rate(self, change: Callable[[LoaderPart], Changes] = LoaderPart.changes, **options: Any) -> float:
        """Batches per second of the loaders with changes. Options as for :meth:`drain`."""
        return self.drain(change, **options)[0].batches_per_s

    def drain(
        self,
        change: Callable[[LoaderPart], Changes] = LoaderPart.changes,
        *,
        share: float = 1.0,
        warm_rounds: int = 2,
        prepare: Callable[[], object] | None = None,
    ) -> tuple[LoaderRate, list[Batch]]:
        """Drain the loaders together, each with its changes. Returns (rate, first batch of each).

        The user's loaders are always restored afterwards.

        Args:
            change: called with a loader, returns the changes to make to it.
            share: share of the experiment's time.
            warm_rounds: rounds at the start of each pass that are not counted.
            prepare: called before each pass; its time is not counted.

        Raises:
            DatasetError: loading fails; the message names worker and sample, if known.
            LoaderError: a loader hangs, is empty or cannot be rebuilt.
        """
        start_s = START_S if self.alone is None else 2 * self.alone.start_s
        max_s = max(share * self.share_s, _LEAST_S) + start_s
        limits = RoundLimits(min_s=self.counted_s(share), max_s=max_s, warm_rounds=warm_rounds)
        passes: list[Together] = []
        try:
            with preserve_state([part.loader for part in self.parts] or self.loader), warnings.catch_warnings():
                # As in clone_loader: torch warns again when a pass begins. The user's own run has shown both warnings.
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
                clones = [clone_loader(part.loader, change(part)) for part in self.parts]

                def begin() -> Together:
                    passes.append(Together([iter(one) for one in clones or [self.loader]]))
                    return passes[-1]

                burst = max(map(burst_of, clones), default=1)
                rate = time_loader(begin, burst=burst, limits=limits, prepare=prepare)
        except Exception as error:
            if not self.parts or (isinstance(error, FeedError) and not isinstance(error, DatasetError)):
                raise
            raise locate_failure(self.parts, error, passes[-1].came if len(passes) == 1 else None) from error
        return rate, passes[0].first

    def check_memory(self, num_workers: int | None = None) -> None:
        """Check that the loaders' queues fit into memory.

        Args:
            num_workers: number of workers in place of the configured one.

        Raises:
            NotMeasurable: the queues would take too much.
        """
        for part, sample in zip(self.parts, self.samples, strict=True):
            workers = part.loader.num_workers if num_workers is None else num_workers
            prefetch = part.loader.prefetch_factor or TORCH_PREFETCH
            batches = workers * prefetch + background_of(part.loader) + 1
            taken = Footprint(
                workers=workers,
                batches=batches,
                batch_bytes=part.batch_size * size_of_leaf(sample),
                size=plural(batches, "batch", "batches"),
                worker_bytes=0,
                threads=not workers or has_threads(part.loader),
                sharers=len(self.parts),
            )
            if said := exceeded_limit(self.machine, taken):
                raise NotMeasurable(said)


# --- the parts of a batch -----------------------------------------------------------------------------------------


def key_bytes(batch: object, place: str = "") -> dict[str, int]:
    """The bytes of each leaf of a batch by its name, in order.

    Leaves are found inside mappings, lists, tuples, named tuples and dataclasses. Any other object is one leaf, with
    the tensors inside it. A list of plain values, such as paths, is one leaf, too.

    Args:
        batch: a loader's batch.
        place: name of the batch itself, if it is part of another.

    Returns:
        ``{"image": 602112, "meta.path": 1830}``, ``{"0": 602112, "1": 32}`` for a tuple, ``{"batch": 602112}`` for a
        batch without parts. Tensors and arrays count their elements, text and bytes their length, numbers 8.

    Example:
        >>> key_bytes({"image": Tensor(2, 3), "meta": {"path": ["a.jpg", "b.jpg"]}})
        {'image': 24, 'meta.path': 10}
    """
    return {place: size_of_leaf(leaf) for place, leaf in key_leaves(batch, place)}


def key_leaves(batch: object, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a batch in order, with the names that :func:`key_bytes` uses."""
    parts = named_parts(batch)
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        holds_parts = any(isinstance(part, (Tensor, np.ndarray)) or named_parts(part) is not None for part in batch)
        parts = parts if holds_parts else None  # a list of plain values is a leaf
    if parts is None:
        yield place or WHOLE, batch
        return
    for key, value in parts.items():
        yield from key_leaves(value, f"{place}.{key}" if place else str(key))


def size_of_leaf(leaf: Any) -> int:
    """Size in bytes of a leaf, or of a whole sample or batch."""
    if isinstance(leaf, np.ndarray):
        return int(leaf.nbytes)
    if isinstance(leaf, str):
        return len(leaf.encode("utf-8", "surrogatepass"))
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        return len(leaf)
    if isinstance(leaf, (int, float, complex, np.generic)):
        return _NUMBER_BYTES
    if isinstance(leaf, (Mapping, list, tuple, set, frozenset)):
        return sum(map(size_of_leaf, leaf.values() if isinstance(leaf, Mapping) else leaf))
    if hasattr(leaf, "getbands"):
        return int(leaf.width * leaf.height * len(leaf.getbands()))  # a PIL image
    return sum(tensor.nbytes for tensor in tensors(leaf))
