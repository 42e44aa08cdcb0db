"""Detects an iterable dataset that does not divide its samples among workers, so that each worker gives all samples."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_feed.load.kinds import Batch

_TENSORS = 8
_NUMBERS = 1024
"""Largest number of tensors of a batch that are compared, and of elements of each tensor."""


class RepeatedBatches:
    """Compares the first batches of a loader, one from each worker, and the batch after those.

    Args:
        workers: number of workers, which give batches in turn.

    Attributes:
        repeated: True if the first batches of all workers are equal, and the next batch differs from them. (If it did
            not differ, all samples might be equal, which proves nothing.) None as long as this is not known.
    """

    def __init__(self, workers: int) -> None:
        self.repeated: bool | None = None
        self._workers = workers
        self._seen = 0
        self._first: Sequence[Tensor] = ()

    def see(self, batch: Batch) -> None:
        """Compare the next batch of the loader. Call this before a step can change the batch."""
        if self.repeated is not None:
            return
        parts = _parts(batch)
        if self._seen == 0:
            self._first = parts
        same = _are_equal(parts, self._first)
        if not parts or (self._seen < self._workers and not same):
            self.repeated = False
        elif self._seen == self._workers:
            self.repeated = not same
        self._seen += 1


def _parts(batch: Batch) -> list[Tensor]:
    """Copies of the first elements of the first tensors of a batch."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    return [tensor.detach().reshape(-1)[:_NUMBERS].clone() for tensor in tensors[:_TENSORS]]


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
