"""Counts in memory that worker processes share."""

import os
import threading
from typing import Final

import torch

_ROWS: Final = 512
_count_lock = threading.Lock()
os.register_at_fork(before=_count_lock.acquire, after_in_parent=_count_lock.release, after_in_child=_count_lock.release)


class SharedCounts:
    """Counts by name, in memory that workers share with the process that reads them.

    Each process counts in a row of its own, chosen by its process id, since adding to shared memory is not atomic.
    Pickled to a worker process, it stays the same memory.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._counts = torch.zeros((_ROWS, len(names)), dtype=torch.int64, device="cpu")
        self._counts.share_memory_()

    def add(self, name: str) -> bool:
        """Count one. True for the first of this name, of all workers (two may be first at once)."""
        column = self._names.index(name)
        with _count_lock:
            first = not self._counts[:, column].any()
            self._counts[os.getpid() % _ROWS, column] += 1
        return first

    def as_dict(self) -> dict[str, int]:
        """The counts by name, without zeros."""
        totals = self._counts.sum(0).tolist()
        return {name: total for name, total in zip(self._names, totals, strict=True) if total}
