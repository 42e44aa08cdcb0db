"""Streams (iterable datasets): those that are known to divide their samples among worker processes, and those that are
seen not to."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, IterDataPipe

from lightning_feed.load.collate import named_parts
from lightning_feed.load.kinds import AnyDataset, AnyLoader, Batch

logger = logging.getLogger(__name__)

_DIVIDING_PACKAGES = ("litdata", "streaming")
"""Packages whose streams always divide themselves among workers."""
_ROUNDS = 2
"""Number of batches of each worker that are compared."""
_PARTS = 8
_NUMBERS = 1024
"""Largest number of parts of a batch that are compared, and of elements of each part."""


def divides_among_workers(loader: AnyLoader) -> bool | None:
    """Return True if a loader's stream is known to divide its samples among workers, and False if this is unknown.
    Returns None if the dataset is not a stream.

    If this is unknown, each worker may yield all samples. Only running the user's code could answer the question.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset):
        return None
    return _divides_itself(dataset)


def _divides_itself(dataset: AnyDataset) -> bool:
    package = type(dataset).__module__.partition(".")[0]
    if package == "datasets":  # Hugging Face's: at most one worker per shard gets samples
        shards: Any = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 1))
        return int(shards) > 1
    if package in _DIVIDING_PACKAGES:
        return True
    stages = getattr(dataset, "pipeline", None)  # WebDataset's
    return isinstance(stages, list) and any(getattr(stage, "__name__", "") == "split_by_worker" for stage in stages)


def may_repeat(loader: AnyLoader) -> bool:
    """Return True if the worker processes of a loader give the batches of a stream in turn, and may not divide the
    stream."""
    is_known = isinstance(getattr(loader, "dataset", None), IterDataPipe) or divides_among_workers(loader) is not False
    in_turn = getattr(loader, "num_workers", 0) > 1 and getattr(loader, "in_order", True)
    return in_turn and not is_known


# --- streams that are seen to give all samples in each worker ---------------------------------------------------------


class RepeatedBatches:
    """Compares the first batches of a loader, which its workers give in turn.

    Args:
        workers: number of workers.

    Attributes:
        repeated: True if the first batches of all workers are equal, and their second batches are equal to each other,
            but not to the first. (If all were equal, all samples might be equal, which proves nothing.) None as long as
            this is not known.
    """

    def __init__(self, workers: int) -> None:
        self.repeated: bool | None = None
        self._workers = workers
        self._seen = 0
        self._first: list[str] = []

    def see(self, batch: Batch) -> None:
        """Compare the next batch of the loader. Call this before a step can change the batch."""
        if self.repeated is not None:
            return
        parts = _described(batch)
        opens_round = self._seen % self._workers == 0
        should_be_equal = not opens_round
        if not parts or (self._seen and (parts == self._first) != should_be_equal):
            self.repeated = False
            return
        self._first = parts
        self._seen += 1
        if self._seen == _ROUNDS * self._workers:
            self.repeated = True


class RepeatsWarning:
    """Warns once if all workers of a loader are seen to give the same samples.

    Args:
        name: name of the loader.
        workers: number of workers.
    """

    def __init__(self, name: str, workers: int) -> None:
        self._name = name
        self._workers = workers
        self._repeats = RepeatedBatches(workers)

    @property
    def is_settled(self) -> bool:
        """True if no more batches are needed."""
        return self._repeats.repeated is not None

    def see(self, batch: Batch) -> None:
        """Compare the next batch of the loader. Never raises."""
        if self.is_settled:
            return
        try:
            self._repeats.see(batch)
        except Exception:  # noqa: BLE001  # observing must never end a run; a batch may hold objects of any class
            self._repeats.repeated = False
        if self._repeats.repeated:
            logger.warning(
                "%s: each of the %d workers reads the same samples, so each sample comes %d times in an epoch. Divide "
                "the stream in its __iter__ by torch.utils.data.get_worker_info(), or use one worker.",
                self._name,
                self._workers,
                self._workers,
            )


def _described(batch: Batch) -> list[str]:
    """Describe the first parts of a batch by their values."""
    return [_values(part) for part in islice(_comparable(batch), _PARTS)]


def _comparable(batch: Batch) -> Iterator[Any]:
    """Yield the parts of a batch that can be compared: tensors, NumPy's arrays, numbers and strings."""
    parts = named_parts(batch)
    if parts is not None:
        for part in parts.values():
            yield from _comparable(part)
    elif isinstance(batch, Tensor):
        if batch.layout == torch.strided:
            yield batch
    elif isinstance(batch, (str, bytes, int, float)) or type(batch).__module__ == "numpy":
        yield batch


def _values(part: Any) -> str:
    """Return values from all over a tensor or array as text, in which also NaN equals NaN."""
    if isinstance(part, (str, bytes)):
        return repr(part[:_NUMBERS])
    if isinstance(part, (int, float)):
        return repr(part)
    flat = part.reshape(-1)
    step = len(flat) // _NUMBERS | 1  # odd: no step over whole rows, whose first pixels may all be black
    return repr(flat[::step].tolist())
