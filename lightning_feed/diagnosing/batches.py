"""Batches of a short fit: keeping, replaying and timing them."""

import copy
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from lightning_feed.errors import SettingsError
from lightning_feed.load.kinds import Batch
from lightning_feed.load.loader_tree import rebuild_loaders, walk_loaders
from lightning_feed.measure.step_meter import event_maker
from lightning_feed.transfer.batch_tree import tensors

MOST_KEPT = 8
MOST_BYTES = 256 * 2**20
"""Largest number of batches kept as a sample of a run, and their largest size in bytes."""
WINDOWS = 5
FEWEST_CYCLES = 3
"""Fewest optimizer steps after the warm-up for a rate."""
FEWEST_PASSES = 2
"""Fewest times that each of several batches must have been repeated after the warm-up."""
STEPS_AHEAD = 8
"""Largest number of steps that the device may be behind the host: enough to keep the device always busy."""
_Shapes = tuple[tuple[int, ...], ...]
_Make = Callable[[DataLoader[Batch]], Any]

# --- copies -------------------------------------------------------------------------------------------------------


def copy_of(batch: object) -> Batch:
    """Return a copy of a batch with its tensors. Pinned tensors stay pinned, so copies to the device are as fast."""
    return tree_map(_copy_of_leaf, batch)


def _copy_of_leaf(leaf: object) -> Any:
    if not isinstance(leaf, Tensor):
        return copy.copy(leaf)
    copied = leaf.clone()
    if leaf.is_pinned():
        return copied.pin_memory()
    return copied


def _with_new_containers(batch: object) -> Batch:
    """Return a batch with the same tensors in new containers, and shallow copies of all other objects."""
    return tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else copy.copy(leaf), batch)


def idle_clone(loader: DataLoader[Batch]) -> DataLoader[Batch]:
    """Return a copy of a loader without its running workers."""
    idle = copy.copy(loader)
    idle._iterator = None
    return idle


def own_loaders(loaders: object, make: _Make = idle_clone) -> Any:
    """Return ``loaders`` with a copy, without running workers, in place of each DataLoader.

    Dicts, lists and tuples of loaders, and ``CombinedLoader``, are rebuilt around the copies; datasets, samplers and
    other iterables are not copied.

    Args:
        loaders: the result of ``train_dataloader``, or loaders passed to ``Trainer.fit``.
        make: makes a copy of a DataLoader.

    Raises:
        SettingsError: a loader is an iterator, which can be read only once.
    """

    own: list[Any] = []
    for _, loader in walk_loaders(loaders):
        if hasattr(loader, "__next__") and not isinstance(loader, DataLoader):
            raise SettingsError(
                f"The training loader is a {type(loader).__name__}, an iterator that can be read only once, and "
                "diagnosing would exhaust it. Pass an object that can be iterated again, such as a DataLoader."
            )
        own.append(make(loader) if isinstance(loader, DataLoader) else loader)
    return rebuild_loaders(loaders, own)


# --- replay -------------------------------------------------------------------------------------------------------


class Replay:
    """A loader that yields the same batches again and again, ``length`` batches in all.

    Each step gets new containers, because it may take parts out of its batch. The tensors in them are the same, unless
    the first step wrote into its tensors: then each step gets copies.

    Args:
        batches: the batches to repeat, in this order. They stay unchanged.
        length: batches per epoch.
    """

    def __init__(self, batches: Sequence[Batch], length: int) -> None:
        self._batches = batches
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        first = copy_of(self._batches[0])
        versions = [(tensor, _version(tensor)) for tensor in tensors(first)]
        yield first
        again = _with_new_containers
        if any(_version(tensor) != version for tensor, version in versions):
            again = copy_of
        del first, versions
        for number in range(1, self._length):
            yield again(self._batches[number % len(self._batches)])


def _version(tensor: Tensor) -> int:
    if tensor.is_inference():  # inference tensors count no versions
        return 0
    return tensor._version


class KeptBatches:
    """Copies of a run's batches, to replay: spread evenly over the run if their shapes differ, else only the first.

    Args:
        skip: number of batches at the start of the run, before the measured ones, that are not kept.
    """

    def __init__(self, skip: int = 0) -> None:
        self.batches: list[Batch] = []
        self._shapes: list[_Shapes] = []
        """Shapes of the kept batches, in the order of the run."""
        self._seen = -skip
        """Batches of the run so far, without the skipped ones."""
        self._every = 1
        """Number of batches from one kept batch to the next."""

    def offer(self, batch: object) -> None:
        """Keep a copy of a batch of the run, if it is one of those to keep."""
        number = self._seen
        self._seen += 1
        if number < 0 or number % self._every:
            return
        try:
            shapes = tuple(tuple(tensor.shape) for tensor in tensors(batch))
            if self._shapes == [shapes]:  # the same shapes as the only kept batch
                return
            self.batches.append(copy_of(batch))
        except Exception:  # noqa: BLE001  # a batch of the user's own class that cannot be copied is not replayed
            return
        self._shapes.append(shapes)
        while len(self.batches) > MOST_KEPT or (len(self.batches) > 1 and self._bytes() > MOST_BYTES):
            self.batches = self.batches[::2]
            self._shapes = self._shapes[::2]
            self._every *= 2

    def _bytes(self) -> int:
        return sum(tensor.nbytes for batch in self.batches for tensor in tensors(batch))


class Pace:
    """Records when steps end: with a device, when the device has finished them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._make_event = event_maker(device)
        self._events: deque[Any] = deque()
        self._stamps: list[float] = []

    def stamp(self) -> None:
        """Record that a step has ended on the host, and wait until the device has finished an earlier step.

        Without this wait, the host could queue far more steps in the experiment's time than the device can run, as with
        CUDA graphs.
        """
        if self._make_event is None:
            self._wait()
        else:
            event = self._make_event()
            event.record()
            self._events.append(event)
            if len(self._events) <= STEPS_AHEAD:
                return
            self._events.popleft().synchronize()
        self._stamps.append(time.perf_counter())

    def per_s(self, accumulate: int, batches: int = 1) -> float | None:
        """Return the batches per second over whole optimizer steps of ``accumulate`` batches, without the first
        quarter.

        The result is the median rate of several windows. A window is long enough to include work that is done only
        every few steps, and short enough that a program that takes the CPUs for a while affects only a few windows. If
        several ``batches`` are repeated in turn, each window includes every batch equally often. Returns None after too
        few steps.
        """
        self._wait()
        period = math.lcm(accumulate, batches)
        marks = self._stamps[::period]
        counted = marks[max(1, len(marks) // 4) :]
        fewest = FEWEST_PASSES if batches > 1 else FEWEST_CYCLES
        if len(counted) <= fewest:
            return None
        windows = min(WINDOWS, len(counted) - 1)
        edges = [index * (len(counted) - 1) // windows for index in range(windows + 1)]
        middle = statistics.median(
            (counted[last] - counted[first]) / (last - first) for first, last in itertools.pairwise(edges)
        )
        if middle <= 0:
            return None
        return period / middle

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()
