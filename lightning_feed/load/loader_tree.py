"""The loaders in dicts, lists and CombinedLoaders, and the tasks of torch's iterators."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

from torch.utils._pytree import tree_flatten_with_path, tree_map
from torch.utils.data import DataLoader

from lightning_feed.load.kinds import AnyIterator, AnyLoader

LoaderPath: TypeAlias = tuple[Any, ...]
"""The keys and positions that lead to a loader, from the outside in."""

_HOLDERS = ("_dataloader", "base_dataloader", "dataloader", "loader")
"""Attributes in which wrappers of Fabric, of accelerate and of users keep their loader."""
_DEEPEST = 8
"""Largest number of nested wrappers that are looked into."""


def walk_loaders(
    structure: object, is_loader: Callable[[Any], bool] = lambda _: False
) -> list[tuple[LoaderPath, AnyLoader]]:
    """List the loaders in a structure with their paths.

    Args:
        structure: the result of a hook such as ``train_dataloader``.
        is_loader: returns True for a dict, list or tuple that is itself a loader, and so is not searched for loaders.

    Example:
        >>> walk_loaders({"real": "first loader", "synthetic": ["second loader"]})
        [(('real',), 'first loader'), (('synthetic', 0), 'second loader')]
    """
    loaders: list[tuple[LoaderPath, AnyLoader]] = []
    leaves, _ = tree_flatten_with_path(structure, is_loader)
    for keys, leaf in leaves:
        path = tuple(map(_key_of, keys))
        if _is_combined(leaf):
            inner = walk_loaders(leaf.iterables, partial(_is_one_of, leaf.flattened))
            loaders += [((*path, *rest), loader) for rest, loader in inner]
        else:
            loaders.append((path, leaf))
    return loaders


def rebuild_loaders(structure: object, loaders: Iterable[AnyLoader]) -> Any:
    """Copy a structure, with its loaders replaced by ``loaders``, in the order of :func:`walk_loaders`."""
    remaining = iter(loaders)

    def replacement(leaf: Any) -> Any:
        if not _is_combined(leaf):
            return next(remaining)
        combined = copy.copy(leaf)
        combined.flattened = [replacement(inner) for inner in leaf.flattened]
        return combined

    return tree_map(replacement, structure)


def name_in_split(split: str, path: LoaderPath) -> str:
    """Return the name of a loader in reports and errors: ``train``, ``train['real']``, ``train[0]``."""
    return split + "".join(f"[{key!r}]" for key in path)


def loaders_in(structure: object) -> list[AnyLoader]:
    """List the loaders that make the batches of a structure. If a loader is a wrapper of another package, lists the
    loader inside the wrapper instead."""
    return list(_without_wrappers(structure, _DEEPEST))


def _without_wrappers(structure: object, deeper: int) -> Iterator[AnyLoader]:
    for _, loader in walk_loaders(structure, _is_list_of_batches):
        inner = _wrapped(loader)
        if inner is None or not deeper:
            yield loader
        else:
            yield from _without_wrappers(inner, deeper - 1)


def _key_of(entry: Any) -> Any:
    """Return the key or position from one entry of a path of ``torch.utils._pytree``."""
    return entry.key if hasattr(entry, "key") else entry.idx


def _is_combined(leaf: object) -> bool:
    return hasattr(leaf, "flattened") and hasattr(leaf, "limits")


def _is_one_of(loaders: list[AnyLoader], node: object) -> bool:
    return any(node is loader for loader in loaders)


def _is_list_of_batches(node: object) -> bool:
    """Return True for a list or tuple that is itself a loader, since not all of its items can be iterated."""
    return isinstance(node, (list, tuple)) and not (node and all(hasattr(part, "__iter__") for part in node))


def _wrapped(loader: object) -> AnyLoader | None:
    """Return the loader inside a WebLoader or another wrapper (``_HOLDERS``). Returns None for anything else."""
    if isinstance(loader, DataLoader):
        return None
    stages = getattr(loader, "pipeline", None)  # of a WebLoader: a DataLoader, then functions applied to its batches
    if isinstance(stages, list) and stages and isinstance(stages[0], DataLoader):
        return stages[0]
    for name in _HOLDERS:
        held = getattr(loader, name, None)
        if isinstance(held, DataLoader) or _is_wrapper(held):
            return held
    return None


def _is_wrapper(value: object) -> bool:
    return isinstance(getattr(value, "pipeline", None), list) or hasattr(value, "_dataloader")


def kept_batches(iterator: AnyIterator) -> int:
    """Count the batches that torch's iterator keeps because an earlier batch is missing.

    A task is ``(worker,)``, or ``(worker, batch)`` if its batch is kept (``_task_info`` in torch 2.6 and 2.15).
    """
    tasks = iterator._task_info
    return sum(map(len, tasks.values())) - len(tasks)


def idle_share(iterator: AnyIterator) -> float:
    """Return the share of the workers that had no task while torch waited for the batch that it has just returned.

    These workers had finished later batches, which torch keeps. The newest task does not count, because torch gave it
    to a worker only after the wait. Returns 0 at the end of the data, where workers are idle in any case, and if
    torch's private attributes have changed.
    """
    try:
        tasks = iterator._task_info
        count = iterator._num_workers
        if not kept_batches(iterator) or len(tasks) < count * iterator._prefetch_factor:
            return 0.0
        newest = max(tasks)
        busy = {task[0] for number, task in tasks.items() if len(task) == 1 and number != newest}
    except (AttributeError, TypeError, ValueError, LookupError):
        return 0.0
    return float(min(count - len(busy), count - 1) / count)
