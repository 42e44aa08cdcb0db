"""Batches that come again and again, and a loader that is not the user's own object."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_feed.errors import SettingsError
from lightning_feed.transfer.tree import map_tensors, tensors

MOST_KEPT, MOST_BYTES = 32, 256 * 2**20
"""Batches that a sample of a run holds at most, and their memory."""
_Shapes = tuple[tuple[int, ...], ...]


class Replay:
    """A loader that yields the same batches again and again, ``length`` in all.

    The containers are new each time, since a step may take parts out of its batch. The tensors are the same, unless the
    first step wrote into them: then each step gets copies.

    Args:
        batches: what the loop is to get, one after the other. Kept as they are.
        length: batches per epoch.
    """

    def __init__(self, batches: Sequence[Any], length: int) -> None:
        self._batches = batches
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        first = fresh_containers(self._batches[0], clone)
        given = [(tensor, _version(tensor)) for tensor in tensors(first)]
        yield first
        written = any(_version(tensor) != version for tensor, version in given)
        del first, given
        for number in range(1, self._length):
            batch = self._batches[number % len(self._batches)]
            yield fresh_containers(batch, clone if written else _same)


class Sample:
    """Batches of a run, to be replayed: taken evenly over it where their shapes differ, else only the first.

    Of batches with equal shapes one is kept for all.

    Args:
        skip: so many batches come before those that are measured; of them only the first is kept.
    """

    def __init__(self, skip: int = 0) -> None:
        self.first: Any = None
        self._kept: list[_Shapes] = []
        self._batches: dict[_Shapes, Any] = {}
        self._skip, self._every, self._came = skip, 1, 0

    def offer(self, batch: Any) -> None:
        """A batch of the run has come. What is kept is a copy."""
        number, self._came = self._came, self._came + 1
        if number and (number < self._skip or (number - self._skip) % self._every):
            return
        shapes = _shapes(batch)
        if shapes not in self._batches:
            try:
                self._batches[shapes] = fresh_containers(batch, clone)
            except Exception:  # noqa: BLE001  # of a class of the user's, which cannot be copied: it is not replayed
                return
        if number == 0:
            self.first = self._batches[shapes]
        self._kept.append(shapes)
        while len(self._kept) > MOST_KEPT or (len(self._kept) > 1 and self._bytes() > MOST_BYTES):
            self._kept = self._kept[::2]
            self._every *= 2
            self._batches = {one: self._batches[one] for one in self._kept}

    def take(self, count: int) -> list[Any]:
        """So many batches, as large as those of the run were; one where all are alike, and where there is time for one.

        There must be a ``first``.
        """
        measured = self._kept[1:] or self._kept
        if len(set(measured)) == 1:
            return [self._batches[measured[0]]]
        by_size = sorted(measured, key=_elements)
        return [self._batches[by_size[(2 * place + 1) * len(by_size) // (2 * count)]] for place in range(count)]

    def _bytes(self) -> int:
        return sum(tensor.nbytes for batch in self._batches.values() for tensor in tensors(batch))


def _shapes(batch: Any) -> _Shapes:
    try:
        return tuple(tuple(tensor.shape) for tensor in tensors(batch))
    except Exception:  # noqa: BLE001  # a class of the user's that cannot be looked into: taken to be always alike
        return ()


def _elements(shapes: _Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def clone(tensor: Tensor) -> Tensor:
    """A copy in the same kind of memory: from pinned memory a batch goes to the device in another way."""
    copied = tensor.clone()
    return copied.pin_memory() if tensor.is_pinned() else copied


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count no versions


def fresh_containers(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``batch`` with new dicts and lists, and ``change(tensor)`` for each tensor in them."""
    if type(batch) is dict:
        return {key: fresh_containers(value, change) for key, value in batch.items()}
    if type(batch) is list:
        return [fresh_containers(value, change) for value in batch]
    if type(batch) is tuple:
        return tuple(fresh_containers(value, change) for value in batch)
    if isinstance(batch, Tensor):
        return change(batch)
    if hasattr(batch, "to"):
        return copy.copy(batch)  # some move themselves to the device in place
    return map_tensors(batch, change)


def own_loaders(loaders: Any, make: Callable[[DataLoader[Any]], Any] | None = None) -> Any:
    """``loaders`` with a copy of every DataLoader, without the workers that the user's own may have running.

    Dicts, lists and tuples of loaders, and ``CombinedLoader``, are rebuilt around the copies; datasets, samplers and
    other iterables are the user's own objects.

    Args:
        loaders: as the data module gives them.
        make: makes each copy in another way.

    Raises:
        SettingsError: for an iterator, which can be read only once.
    """
    if isinstance(loaders, DataLoader):
        return _idle_copy(loaders) if make is None else make(loaders)
    if isinstance(loaders, dict):
        return {name: own_loaders(loader, make) for name, loader in loaders.items()}
    if type(loaders) in (list, tuple):
        return type(loaders)(own_loaders(loader, make) for loader in loaders)
    if hasattr(loaders, "flattened") and hasattr(loaders, "limits"):
        mine = copy.copy(loaders)
        mine.flattened = [own_loaders(loader, make) for loader in loaders.flattened]
        return mine
    if hasattr(loaders, "__next__"):
        raise SettingsError(
            f"The training loader is a {type(loaders).__name__}, an iterator that can be read only once: diagnosing it "
            "would use it up. Give an object whose __iter__ begins anew, such as a DataLoader."
        )
    return loaders


def _idle_copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    mine = copy.copy(loader)
    mine._iterator = None
    return mine
