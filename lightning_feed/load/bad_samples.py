"""Samples that cannot be read: raise, skip or substitute, counted over all workers, up to a limit."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import get_worker_info

from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.settings import MOST

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "skip", "substitute"]
_STEP = 7919
"""How far away a substitute is looked for: files beside a broken one are often broken too. A prime, so that the steps
go through all samples, unless there are a multiple of it."""


@dataclass(frozen=True)
class Skipped:
    """Stands for a sample that was left out, until its batch is put together."""

    index: int


class BadSamples:
    """What to do about a sample that cannot be read, and how many there have been.

    Args:
        on_error: ``"raise"`` ends the run at the first. ``"skip"`` gives the place in the batch to another sample of
            the same batch; ``"substitute"`` gives it to another sample of the dataset. Both keep the batch size.
        max_failures: with ``"skip"`` and ``"substitute"``, how many are too many, over all workers and epochs of this
            rank.

    Raises:
        SettingsError: for values that are no choice.
    """

    def __init__(self, on_error: OnError = "raise", max_failures: int = 100) -> None:
        if on_error not in ("raise", "skip", "substitute"):
            raise SettingsError(f"on_error={on_error!r} is not a choice. Give 'raise', 'skip' or 'substitute'.")
        if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 0:
            raise SettingsError(f"max_failures={max_failures!r} is not possible. Give a whole number, 0 or more.")
        self.on_error, self.max_failures = on_error, max_failures
        # One slot for each worker, in memory that all of them share: each is written by one process, so no lock is
        # needed between processes.
        self._slots = torch.zeros(MOST + 1, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    @property
    def failures(self) -> int:
        """Samples that could not be read so far; one that fails in two epochs counts twice."""
        return int(self._slots.sum())

    def instead(self, index: int, error: DatasetError, size: int, read: Callable[[int], Any]) -> Any:
        """What takes the place of sample ``index``, or the error.

        Args:
            index: of the sample that failed.
            error: why.
            size: samples in the dataset.
            read: reads one sample, or raises a DatasetError.

        Raises:
            DatasetError: ``error`` itself, or that there have been too many.
        """
        if self.on_error == "raise":
            raise error
        self._count(error)
        if self.on_error == "skip":
            return Skipped(index)
        for step in range(1, size):
            other = (index + step * _STEP) % size
            if other == index:
                break
            try:
                return read(other)
            except DatasetError as next_error:
                self._count(next_error)
        raise error

    def _count(self, error: DatasetError) -> None:
        worker = get_worker_info()
        with self._lock:
            self._slots[0 if worker is None else worker.id + 1] += 1
        failures = self.failures
        logger.warning("%s on_error=%r: the run goes on. (%d so far)", error, self.on_error, failures)
        if failures > self.max_failures:
            raise DatasetError(
                f"{failures} samples could not be read, and max_failures={self.max_failures}. The last one: {error} "
                "Mend the data, or raise max_failures."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def fill_skipped(samples: list[Any]) -> list[Any]:
    """The samples of a batch, with those that were skipped replaced by others of the same batch, in turn.

    Raises:
        DatasetError: when all of them were skipped.
    """
    good = [sample for sample in samples if not isinstance(sample, Skipped)]
    if len(good) == len(samples):
        return samples
    if not good:
        skipped = ", ".join(str(sample.index) for sample in samples[:10]) + (", ..." if len(samples) > 10 else "")
        raise DatasetError(
            f"No sample of a batch of {len(samples)} could be read (samples {skipped}), so "
            "nothing is left to fill it with. Mend the data, use larger batches, or on_error='substitute'."
        )
    places = iter(range(len(samples)))
    return [good[next(places) % len(good)] if isinstance(sample, Skipped) else sample for sample in samples]
