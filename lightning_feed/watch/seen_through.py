"""DataLoaders, and their live iterators, inside what wraps them: WebLoader, Fabric's loaders, generators."""

import gc
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_feed.load.loader_pass import LoaderPass

_HOLDERS = ("_dataloader", "base_dataloader", "dataloader", "loader")
"""Attributes under which wrappers hold a loader: Fabric's, accelerate's, and those of users."""
_DEEPEST = 8
_MOST = 64
"""Objects that are looked at for one iterator."""


def loaders_in(loader: Any) -> list[Any]:
    """The loaders that batches come from: those in a CombinedLoader, dict or list, or inside a wrapper; else itself."""
    return list(_loaders(loader, _DEEPEST))


def _loaders(loader: Any, deeper: int) -> Iterator[Any]:
    held = None
    if deeper and not isinstance(loader, DataLoader):
        held = _held(loader)
    if held is None:
        yield loader
        return
    for one in held:
        yield from _loaders(one, deeper - 1)


def _held(loader: Any) -> list[Any] | None:
    """What a wrapper draws from; None for what is no wrapper."""
    inner = getattr(loader, "iterables", None)  # a CombinedLoader
    inner = loader if isinstance(loader, (dict, list, tuple)) else inner
    if isinstance(inner, dict):
        inner = list(inner.values())
    if isinstance(inner, (list, tuple)) and inner and all(hasattr(one, "__iter__") for one in inner):
        return list(inner)
    stages = getattr(loader, "pipeline", None)  # a WebLoader: a DataLoader, then what is done with its batches
    if isinstance(stages, list) and stages and isinstance(stages[0], DataLoader):
        return [stages[0]]
    found = (getattr(loader, name, None) for name in _HOLDERS)
    return next(([one] for one in found if isinstance(one, DataLoader) or _is_wrapper(one)), None)


def _is_wrapper(value: Any) -> bool:
    return isinstance(getattr(value, "pipeline", None), list) or hasattr(value, "_dataloader")


def iterator_in(iterator: Any) -> Any:
    """The iterator of a DataLoader that another one, such as a generator, draws from; None: there is none, or several.

    A generator tells nobody what its ``for`` goes through, but the garbage collector.
    """
    found: list[Any] = []
    seen: set[int] = {id(iterator)}
    ahead = [iterator]
    while ahead and len(seen) < _MOST:
        one = ahead.pop()
        if one is not iterator and is_known(one):
            found.append(one)
            continue
        for held in _references(one):
            if id(held) not in seen and hasattr(type(held), "__next__"):
                seen.add(id(held))
                ahead.append(held)
    return found[0] if len(found) == 1 else None


def is_known(iterator: Any) -> bool:
    """Whether it is a pass of ours, or torch's iterator: over workers (and torchdata's, which is alike), or without."""
    if isinstance(iterator, LoaderPass) or hasattr(iterator, "_task_info"):
        return True
    return getattr(iterator, "_num_workers", None) == 0 and hasattr(iterator, "_num_yielded")


def _references(one: Any) -> list[Any]:
    attributes = getattr(one, "__dict__", None)
    return gc.get_referents(one) + (list(attributes.values()) if isinstance(attributes, dict) else [])
