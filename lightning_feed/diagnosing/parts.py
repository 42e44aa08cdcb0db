"""The user's loaders, their samples made in this process, and the sizes of the parts of a batch."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, FeedError, LoaderError
from lightning_feed.load.collate import named_parts
from lightning_feed.load.kinds import Batch, Index, Sample
from lightning_feed.load.loader_tree import walk_loaders
from lightning_feed.load.processes import end_pass
from lightning_feed.load.random_state import preserve_state
from lightning_feed.transfer.batch_tree import tensors
from lightning_feed.trials.cloning import Changes
from lightning_feed.trials.loader_rate import Heartbeat, watchdog

SILENT_S = 60.0
"""Seconds after which a batch counts as hanging."""
WHOLE = "batch"
"""The name of a batch without parts."""
_NUMBER_BYTES = 8
T = TypeVar("T")


class NotMeasurable(Exception):
    """Raised if an experiment cannot be run. The message is the reason."""


# --- the loaders --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoaderPart:
    """One of the user's training loaders."""

    name: str
    """The loader's key or number among several loaders (``real``, ``0``); empty for a single loader."""
    loader: DataLoader[Batch]

    @property
    def stream(self) -> bool:
        """True if the dataset is iterable, False if it is map-style."""
        return isinstance(self.loader.dataset, IterableDataset)

    @property
    def batch_size(self) -> int:
        """Samples per batch; of the first batch if the batch sampler decides."""
        if self.loader.batch_size is not None:
            return self.loader.batch_size
        if self.loader.batch_sampler is None or self.stream:
            return 1
        first = self.first_batches(1)
        return len(first[0]) if first else 1

    def changes(self) -> Changes:
        """Return the changes for measuring the loader for any length of time: its sampler begins again at its end."""
        return Changes(endless=not self.stream)

    def first_batches(self, count: int) -> list[Batch]:
        """Return the sampler's first batches of indices: lists, or single indices if the loader does not batch.

        Returns fewer than ``count`` if the pass is shorter.
        """
        source: Any = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        with preserve_state(self.loader):
            return list(islice(source, count))

    def indices(self, batch: Batch) -> list[Index]:
        """Return the indices of the samples in one of the sampler's batches."""
        if self.loader.batch_sampler is None:
            return [batch]
        return list(batch)

    def first_samples(self, count: int) -> list[Sample]:
        """Return the indices of the first samples of a pass."""
        batches = self.first_batches(math.ceil(count / (self.loader.batch_size or 1)))
        return list(chain.from_iterable(map(self.indices, batches)))[:count]


def parts_of(loader: object) -> tuple[LoaderPart, ...]:
    """Return the DataLoaders in the result of ``train_dataloader``: a DataLoader, a dict or list of them, or a
    CombinedLoader.

    Raises:
        LoaderError: the result contains no DataLoader, or anything else.
    """
    parts = []
    for path, part in walk_loaders(loader):
        stages = getattr(part, "pipeline", None)
        inner = stages[0] if isinstance(stages, list) and len(stages) == 1 else part  # a WebLoader that adds nothing
        if not isinstance(inner, DataLoader):
            name = type(inner).__name__
            raise LoaderError(
                f"an object of class {name} is not a torch DataLoader, so it cannot be rebuilt with changes"
            )
        parts.append(LoaderPart(".".join(map(str, path)), inner))
    if not parts:
        raise LoaderError("It contains no loader.")
    return tuple(parts)


class Together(Iterator[list[Batch]]):
    """Iterates over several loaders side by side: one batch from each of them counts as one batch.

    Attributes:
        iterators: the loaders' iterators.
        first: the first batch of each loader.
        received: number of batches so far.
    """

    def __init__(self, iterators: list[Iterator[Batch]]) -> None:
        self.iterators = iterators
        self.first: list[Batch] = []
        self.received = 0

    def __next__(self) -> list[Batch]:
        batch = [next(iterator) for iterator in self.iterators]
        self.first = self.first or batch
        self.received += 1
        return batch

    def close(self) -> None:
        """End all passes."""
        for iterator in self.iterators:
            end_pass(iterator)


# --- samples made in this process ---------------------------------------------------------------------------------


@contextmanager
def naming(dataset: object, index: object) -> Iterator[None]:
    """Convert an error of the dataset to one that names the sample, as a context manager.

    Raises:
        DatasetError: in place of the dataset's own error.
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
                f"The dataset ({kind}) works only in the thread that made it ({why}). Experiments load in a separate "
                "thread, so that a hanging one can be abandoned. Your fit is not affected. To run experiments, open "
                "resources that are bound to a thread, such as database connections, in each thread that uses them."
            ) from error
        raise DatasetError(
            f"The dataset ({kind}) failed to return sample {index}: {why}. Fix or exclude this sample."
        ) from error


def not_hanging(work: Callable[[Heartbeat], T], silent_s: float, what: str) -> T:
    """Call ``work`` and return its result, unless the call hangs.

    Args:
        work: calls ``beat()`` at least every ``silent_s`` seconds.
        silent_s: longest time between two beats.
        what: subject of the error message ("... took longer than 60 s").

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
    """Context manager to give torch one thread, as in a worker, if the loader has workers."""
    threads = torch.get_num_threads()
    try:
        if part.loader.num_workers:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def make_sample(part: LoaderPart, max_s: float = 60.0) -> Sample:
    """Return the loader's first sample, made in this process as a worker would.

    Raises:
        DatasetError: the sample cannot be made, or the loader has no sample.
        LoaderError: the sample takes longer than ``max_s``.
    """
    dataset = part.loader.dataset
    indices: list[Any] = ["the first"] if part.stream else part.first_samples(1)
    if not indices:
        raise DatasetError("The sampler gives no batch. Check the length of the dataset, and drop_last.")

    def make(_: Heartbeat) -> list[Sample]:
        if part.stream:
            return list(islice(iter(dataset), 1))
        return [dataset[indices[0]]]

    with naming(dataset, indices[0]):
        samples = not_hanging(make, max_s, f"Sample {indices[0]} of the dataset ({type(dataset).__name__})")
    if not samples:
        raise DatasetError("The iterable dataset gives no sample. Check its source.")
    return samples[0]


def fresh(sample: object) -> Sample:
    """Return a shallow copy of a sample that is a dict or list, because collate functions may remove entries from
    it."""
    if isinstance(sample, (Mapping, list)):
        return copy.copy(sample)
    return sample


# --- the parts of a batch -----------------------------------------------------------------------------------------


def key_bytes(batch: object, name: str = "") -> dict[str, int]:
    """Return the bytes of each leaf of a batch by the leaf's name, in order.

    Leaves are found inside mappings, lists, tuples, named tuples and dataclasses. Any other object is one leaf, with
    the tensors inside it. A list of plain values, such as paths, is one leaf, too.

    Args:
        batch: a loader's batch.
        name: name of the batch itself, if it is a part of another batch.

    Returns:
        ``{"image": 602112, "meta.path": 1830}``, ``{"0": 602112, "1": 32}`` for a tuple, ``{"batch": 602112}`` for a
        batch without parts. Tensors and arrays count their elements, text and bytes their length, numbers 8.

    Example:
        >>> key_bytes({"image": Tensor(2, 3), "meta": {"path": ["a.jpg", "b.jpg"]}})
        {'image': 24, 'meta.path': 10}
    """
    return {key: size_of_leaf(leaf) for key, leaf in key_leaves(batch, name)}


def key_leaves(batch: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch in order, with the names that :func:`key_bytes` uses."""
    parts = named_parts(batch)
    if parts is None or _is_list_of_values(batch):
        yield name or WHOLE, batch
        return
    for key, value in parts.items():
        yield from key_leaves(value, f"{name}.{key}" if name else str(key))


def _is_list_of_values(part: Any) -> bool:
    """Return True for a list of plain values, such as paths."""
    if not isinstance(part, (list, tuple)) or hasattr(part, "_fields"):
        return False
    return not any(isinstance(item, (Tensor, np.ndarray)) or named_parts(item) is not None for item in part)


def size_of_leaf(leaf: Any) -> int:
    """Return the size in bytes of a leaf, or of a whole sample or batch."""
    if isinstance(leaf, np.ndarray):
        return int(leaf.nbytes)
    if isinstance(leaf, str):
        return len(leaf.encode("utf-8", "surrogatepass"))
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        return len(leaf)
    if isinstance(leaf, (int, float, complex, np.generic)):
        return _NUMBER_BYTES
    if isinstance(leaf, Mapping):
        return sum(map(size_of_leaf, leaf.values()))
    if isinstance(leaf, (list, tuple, set, frozenset)):
        return sum(map(size_of_leaf, leaf))
    if hasattr(leaf, "getbands"):
        return int(leaf.width * leaf.height * len(leaf.getbands()))  # a PIL image
    return sum(tensor.nbytes for tensor in tensors(leaf))
