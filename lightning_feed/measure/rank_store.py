"""All-gather over torch's default store, for the comparison of ranks and for trials on several ranks."""

import itertools
import pickle
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

_gathered = itertools.count()
"""Counts calls of :func:`gather`. The same on all ranks."""
_PATIENCE = timedelta(minutes=30)
"""Longest wait of :func:`gather` for the slowest rank: torch's default for process groups."""
_GRACE = timedelta(seconds=5)
"""Longest wait of rank 0 for the other ranks to read all values."""


def default_store() -> Any:
    """Return the ranks' default store. Returns None without process groups, or with the MPI backend."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    get_store = getattr(distributed_c10d, "_get_default_store", None)  # private in torch 2.6 to 2.15
    return None if get_store is None else get_store()


def connected() -> bool:
    """Check that the ranks of this run can exchange values."""
    return default_store() is not None


def read_all(store: Any, keys: list[str]) -> list[bytes]:
    """Read the values of existing ``keys``, in one request if the store supports it."""
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]


def gather(trainer: Any, mine: Any) -> list[Any]:
    """Gather one value per rank, in rank order. All ranks must call this function, and wait for each other.

    Does not use NCCL, because it keeps a CPU busy while a rank waits, and another rank's trials need that CPU. Does not
    use a new gloo group, because its destruction can hang up to torch 2.7
    (https://github.com/pytorch/pytorch/pull/154976).

    Args:
        trainer: the run's Trainer.
        mine: this rank's value, to be pickled.

    Raises:
        RuntimeError: from torch, if a rank does not answer for 30 minutes, or the store's process is gone.
    """
    store = default_store()
    if trainer.world_size == 1 or store is None:
        return [mine]
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    prefix = f"lightning_feed/gather/{next(_gathered)}"
    keys = [f"{prefix}/{number}" for number in range(world_size)]
    readers = f"{prefix}/readers"
    read_by_all = f"{prefix}/read"
    store.set(keys[rank], pickle.dumps(mine))
    store.wait(keys, _PATIENCE)
    values = [pickle.loads(value) for value in read_all(store, keys)]
    if store.add(readers, 1) == world_size:
        store.set(read_by_all, b"yes")
    if rank == 0:
        # The store is often in this process: ending now would cause a network error in ranks that are still reading.
        with suppress(RuntimeError):  # another rank is gone
            store.wait([read_by_all], _GRACE)
        for key in (*keys, readers, read_by_all):
            store.delete_key(key)
    return values
