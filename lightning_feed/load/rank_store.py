"""All-gather over torch's default store."""

import itertools
import pickle
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

_gathered = itertools.count()
"""Numbers :func:`gather`'s calls, as many on each rank."""
_PATIENCE = timedelta(minutes=30)
"""Longest wait of :func:`gather` for the slowest rank: torch's default for groups."""
_GRACE = timedelta(seconds=5)
"""Longest wait of rank 0 until the others have read all values."""


def default_store() -> Any:
    """The default store of the ranks; None without process groups, or with the MPI backend."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)  # private in torch 2.6 to 2.15
    return find() if find is not None else None


def connected() -> bool:
    """Check that the ranks of this run can exchange values."""
    return default_store() is not None


def read_all(store: Any, keys: list[str]) -> list[bytes]:
    """The values of existing ``keys``, in one request where the store can do that."""
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]


def gather(trainer: Any, mine: Any) -> list[Any]:
    """A value from each rank, by rank. All ranks take part, and wait for each other.

    Not over NCCL: a rank that waits in it keeps a CPU busy, which the trials of another would lack. Nor over a new gloo
    group: up to torch 2.7 it can hang as it ends (https://github.com/pytorch/pytorch/pull/154976).

    Args:
        trainer: of the run.
        mine: the value of this rank; it is pickled.

    Raises:
        RuntimeError: from torch, when a rank does not answer for 30 minutes, or the process with the store is gone.
    """
    store = default_store()
    if trainer.world_size == 1 or store is None:
        return [mine]
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    prefix = f"lightning_feed/gather/{next(_gathered)}"
    keys = [f"{prefix}/{each}" for each in range(world_size)]
    readers, read_by_all = f"{prefix}/readers", f"{prefix}/read"
    store.set(keys[rank], pickle.dumps(mine))
    store.wait(keys, _PATIENCE)
    every = [pickle.loads(value) for value in read_all(store, keys)]
    if store.add(readers, 1) == world_size:
        store.set(read_by_all, b"yes")
    if rank == 0:
        # The store is often in this process: if it ended now, ranks that are still reading would get a network error.
        with suppress(RuntimeError):  # one of them is gone
            store.wait([read_by_all], _GRACE)
        for key in (*keys, readers, read_by_all):
            store.delete_key(key)
    return every
