"""What the workers of a loader take of the machine, and the limit that this would break."""

from dataclasses import dataclass

from lightning_feed.errors import plural
from lightning_feed.load.machine import Machine

MIB = 2**20
WORKER_BYTES = {"fork": 256 * MIB, "forkserver": 512 * MIB, "spawn": 512 * MIB}
"""Memory reckoned for one worker, its batches apart. Measured: a spawned worker with torch, torchvision and Lightning
imported has 382 MiB to itself; a forked one begins with 2 MiB, and makes its own copy of what it touches."""
THREAD_BYTES = 8 * MIB
"""The same for a worker thread: its stack. It copies nothing."""
MEMORY_SHARE = 0.5
"""Workers and the batches in flight take at most this share of the free memory: the model needs some too."""
SHM_SHARE = 0.8
"""Batches in flight take at most this share of the free /dev/shm. A process that exceeds it dies of a bus error."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one loader takes while it runs."""

    workers: int
    batches: int
    """That are in memory at once."""
    batch_bytes: int
    size: str
    """The batches, in words."""
    worker_bytes: int
    """Of one worker, its batches apart."""
    threads: bool = False
    """Whether the workers are threads, which hand over what they have made as it is."""
    sharers: int = 1
    """Loaders like this one on the machine, itself included."""


def broken_bound(machine: Machine, taken: Footprint) -> str:
    """The bound that it would break, as a sentence; empty when all hold."""
    batches_bytes = taken.batches * taken.batch_bytes
    for_all = f" for each of {taken.sharers} loaders on this machine" if taken.sharers > 1 else ""
    shm = None if taken.threads else machine.free_shm_bytes
    if shm is not None and batches_bytes > SHM_SHARE * shm / taken.sharers:
        return (
            f"{taken.size} need {mib(batches_bytes)}{for_all}, more than {SHM_SHARE:.0%} of the {mib(shm)} free in "
            "/dev/shm; a container gets more by `docker run --shm-size`"
        )
    memory = machine.available_memory_bytes
    total = batches_bytes + taken.workers * taken.worker_bytes
    if memory is not None and total > MEMORY_SHARE * memory / taken.sharers:
        return (
            f"{plural(taken.workers, 'worker')} at {mib(taken.worker_bytes)} and {taken.size} need {mib(total)}"
            f"{for_all}, more than {MEMORY_SHARE:.0%} of the {mib(memory)} of free memory"
        )
    return ""


def mib(size: float) -> str:
    """Bytes, for people."""
    return f"{size / MIB:,.0f} MiB"
