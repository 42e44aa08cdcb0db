"""A batch that comes again and again, and a loader that is not the user's own object."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_feed.errors import SettingsError
from lightning_feed.transfer.nested import map_tensors, tensors


class Replay:
    """A loader that yields the same batch ``length`` times.

    The containers are new each time, since a step may take parts out of its batch. The tensors are the same, unless the
    first step wrote into them: then each step gets copies.

    Args:
        batch: what the loop is to get. Kept as it is.
        length: batches per epoch.
    """

    def __init__(self, batch: Any, length: int) -> None:
        self._batch = batch
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        first = fresh_containers(self._batch, clone)
        given = [(tensor, _version(tensor)) for tensor in tensors(first)]
        yield first
        written = any(_version(tensor) != version for tensor, version in given)
        del first, given
        for _ in range(self._length - 1):
            yield fresh_containers(self._batch, clone if written else _same)


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


def own_loaders(loaders: Any) -> Any:
    """``loaders`` with a copy of every DataLoader, without the workers that the user's own may have running.

    Dicts, lists and tuples of loaders, and ``CombinedLoader``, are rebuilt around the copies; datasets, samplers and
    other iterables are the user's own objects.

    Raises:
        SettingsError: for an iterator, which can be read only once.
    """
    if isinstance(loaders, DataLoader):
        mine = copy.copy(loaders)
        mine._iterator = None
        return mine
    if isinstance(loaders, dict):
        return {name: own_loaders(loader) for name, loader in loaders.items()}
    if type(loaders) in (list, tuple):
        return type(loaders)(own_loaders(loader) for loader in loaders)
    if hasattr(loaders, "flattened") and hasattr(loaders, "limits"):
        mine = copy.copy(loaders)
        mine.flattened = [own_loaders(loader) for loader in loaders.flattened]
        return mine
    if hasattr(loaders, "__next__"):
        raise SettingsError(
            f"The training loader is a {type(loaders).__name__}, an iterator that can be read only once: diagnosing it "
            "would use it up. Give an object whose __iter__ begins anew, such as a DataLoader."
        )
    return loaders
