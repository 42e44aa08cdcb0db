"""Counts in memory shared with worker processes."""

import os
import threading
from typing import Final

import torch

_ROWS: Final = 512
_count_lock = threading.Lock()
os.register_at_fork(before=_count_lock.acquire, after_in_parent=_count_lock.release, after_in_child=_count_lock.release)


class SharedCounts:
    """Counts by name, in memory shared by the workers and the process that reads the counts.

    Adding to shared memory is not atomic, so each process counts in its own row, chosen by process id. An object
    pickled to a worker process keeps the same memory.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._counts = torch.zeros((_ROWS, len(names)), dtype=torch.int64, device="cpu")
        self._counts.share_memory_()

    def add(self, name: str) -> bool:
        """Add one to the count of a name. Return True if the count, summed over all processes, was zero before.

        Rarely, two processes may both get True.
        """
        column = self._names.index(name)
        with _count_lock:
            first = not self._counts[:, column].any()
            self._counts[os.getpid() % _ROWS, column] += 1
        return first

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name, without zeros."""
        totals = self._counts.sum(0).tolist()
        return {name: total for name, total in zip(self._names, totals, strict=True) if total}


class SharedNumber:
    """A number in memory shared with worker processes, which they may read while it is changed."""

    def __init__(self, value: float) -> None:
        self._value = torch.tensor([value], dtype=torch.float64, device="cpu").share_memory_()

    @property
    def value(self) -> float:
        """The number. May be set in one process."""
        return float(self._value[0])

    @value.setter
    def value(self, value: float) -> None:
        self._value[0] = value
