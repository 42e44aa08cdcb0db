"""The order of an epoch: its seeds, and the random draws of a loader that is replaced by another one."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from lightning_feed.load.kinds import AnyDataset, AnyLoader, Index


class PassGenerator(torch.Generator):
    """A generator that we put into a sampler that the user did not seed."""

    def __reduce__(self) -> tuple[type["PassGenerator"], tuple[()]]:  # type: ignore[override]
        # Torch's own pickling would restore a plain Generator. The state is not needed: each pass makes a new
        # generator.
        return (PassGenerator, ())


def no_epoch(_: int) -> int | None:
    """Return None: there is no next epoch, or it is not known."""
    return None


def has_set_epoch(dataset: AnyDataset) -> bool:
    """Return True if a dataset, or the dataset inside a Subset, has a ``set_epoch``, which the program calls in each
    epoch."""
    return hasattr(dataset, "set_epoch") or hasattr(getattr(dataset, "dataset", None), "set_epoch")


class EpochOrder:
    """The source of a loader's order: one seed for the run, and the number of the current epoch.

    A loader shares this object with Lightning's copies of the loader, so they count the same epochs. All ranks need the
    same seed: a DistributedSampler divides one common order among them.

    Args:
        seed: any integer. Loading a state replaces it with the seed of the interrupted run.
        epoch: returns the number of the current epoch, from 0. Called once at the start of each pass, in the thread
            that begins the pass. Never sent to a worker, so it need not be picklable.
        next_epoch: takes the number of an epoch, and returns the number of the next epoch. Returns None if there is no
            next epoch, or if its batches must not be made before it begins. Called when all indices of a pass have been
            given out.

    Example:
        >>> order = EpochOrder(seed=7, epoch=lambda: 3)
        >>> order.seed, order.epoch()
        (7, 3)
    """

    def __init__(
        self, *, seed: int, epoch: Callable[[], int], next_epoch: Callable[[int], int | None] = no_epoch
    ) -> None:
        self.seed = seed
        self.epoch = epoch
        self.next_epoch = next_epoch


def mix_seed(seed: int, epoch: int, cycle: int, stream: str) -> int:
    """Derive a seed in [0, 2**63) for one use of randomness in one pass.

    Hashed, because neighbouring seeds of torch's Mersenne Twister yield related first numbers, and ``seed + epoch``
    would make epoch 1 of run 0 the same as epoch 0 of run 1.

    Example:
        >>> mix_seed(0, 1, 0, "a") != mix_seed(1, 0, 0, "a")
        True
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}/{cycle}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def drawing_device(generator: object) -> torch.device:
    """Return the device of a loader's generator, or the CPU if the loader has no generator.

    Used as a context, this device overrides ``torch.set_default_device``, under which torch's loaders and samplers fail
    with a CPU generator.
    """
    return generator.device if isinstance(generator, torch.Generator) else torch.device("cpu")


class DrawsOf:
    """The random draws of a loader and its samplers, to be repeated by a clone with other worker settings.

    When a pass begins, torch draws a seed for the workers, unless the workers are alive already. With workers, torch
    draws from the sampler until the sampler ends, and at its end torch's RandomSampler draws once more from the user's
    generator. Without workers, a loop that knows the loader's length stops before this last draw (torch 2.6 to 2.15).

    Args:
        loader: a DataLoader.
    """

    def __init__(self, loader: AnyLoader) -> None:
        self.generator: torch.Generator | None = loader.generator
        self.processes = loader.num_workers > 0 and getattr(loader, "workers", "process") == "process"
        self._ahead = loader.num_workers * (loader.prefetch_factor or 1) + getattr(loader, "background", 0)
        self._once = self.processes and loader.persistent_workers
        self._drawn = False
        self.is_unused = False
        """True in a pass that is dropped before its first batch: it draws nothing."""

    def follow(self, other: "DrawsOf") -> None:
        """Go on after the passes of another clone of the same loader."""
        self._drawn = other._drawn

    @property
    def is_ahead(self) -> bool:
        """True if the loader draws indices before they are needed."""
        return bool(self._ahead)

    def draw_seed(self) -> bool:
        """Draw the workers' seed for a pass. Returns False if the workers are alive already."""
        if self._once and self._drawn:
            return False
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self._drawn = True
        return True

    def walk(self, indices: Iterator[Index], length: int | None) -> Iterator[Index]:
        """Yield ``indices``, drawn as far ahead as the loader draws them. A loader that draws none ahead stops at
        ``length``."""
        if not self._ahead:
            yield from islice(indices, length)
            return
        waiting = deque(islice(indices, self._ahead))
        while waiting:
            waiting.extend(islice(indices, 1))
            yield waiting.popleft()


def ranks_of_run() -> int:
    """Return the number of training processes of this run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank_of_run() -> int:
    """Return the rank of this training process."""
    return torch.distributed.get_rank() if ranks_of_run() > 1 else 0


def size_of(dataset: AnyDataset) -> int | None:
    """Return the number of samples in the dataset. Returns None if the dataset has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch's own wrappers have __len__ and raise TypeError in it
        return None
