"""What the ranks tell each other before an epoch, so that all of them decide the same."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_feed.load.bounds import MEMORY_SHARE, SHM_SHARE, WORKER_BYTES
from lightning_feed.load.machine import read_machine
from lightning_feed.load.tuning.online import EpochFigures, Room
from lightning_feed.watch.verdict.diagnosis import LoopFacts

_NONE = Room(usable_cpus=1)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one rank tells."""

    aside: str
    """Why its loader cannot be changed; empty where it can."""
    num_workers: int = 0
    prefetch_factor: int | None = None
    room: Room = _NONE
    figures: EpochFigures | None = None
    """None while there are too few steps."""


def of_all_ranks(trainer: Any, mine: Told) -> list[Told]:
    """What each rank tells. All take part, and wait for each other, so only between epochs."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return [mine]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return every


def narrowest(rooms: list[Room]) -> Room:
    """What all of them leave."""
    in_flight = [room.most_in_flight for room in rooms if room.most_in_flight is not None]
    workers = [room.most_workers for room in rooms if room.most_workers is not None]
    return Room(
        usable_cpus=min(room.usable_cpus for room in rooms),
        most_in_flight=min(in_flight, default=None),
        most_workers=min(workers, default=None),
    )


def room_of(trainer: Any, loader: Any, facts: LoopFacts, *, most: int | None) -> Room:
    """What the machine leaves to this rank's loader, its present workers included.

    Args:
        trainer: that fits.
        loader: that loads for it.
        facts: of the run. An epoch's batches are as many workers as can be used.
        most: workers that the user allows; None for any number.
    """
    machine, ranks = read_machine(), max(1, trainer.num_devices)
    limits, in_flight = [most], None
    if getattr(loader, "workers", "process") != "thread":
        limits.append(facts.batches_per_epoch)
        if machine.available_memory_bytes is not None:
            more = MEMORY_SHARE * machine.available_memory_bytes / (WORKER_BYTES[machine.start_method] * ranks)
            limits.append(loader.num_workers + int(more))
        if machine.free_shm_bytes is not None and facts.batch_bytes:
            in_flight = int(SHM_SHARE * machine.free_shm_bytes / (facts.batch_bytes * ranks))
    return Room(
        usable_cpus=max(1, machine.usable_cpus // ranks),
        most_in_flight=in_flight,
        most_workers=min((one for one in limits if one is not None), default=None),
    )
