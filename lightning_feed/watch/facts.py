"""What loaders and batches tell of a run besides its times."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_feed.load.dali.reader_loader import ReaderLoader
from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.transfer.nested import tensors
from lightning_feed.watch.verdict.diagnosis import Container, LoopFacts, Picture

_PICTURE_DIMS = 3
"""Of a batch of pictures at least: grey ones may have no dimension for their channel."""
_MOST_PICTURES = 8


def with_loaders(facts: LoopFacts, every: Sequence[Any]) -> LoopFacts:
    """The facts, and what the training loaders tell. Of several, the one with the fewest workers counts.

    With a loader among them that has no workers to tell of, it may be that one which is waited for: then those of the
    others are not told.
    """
    loaders = [loader for loader in every if isinstance(getattr(loader, "num_workers", None), int)]
    known: dict[str, Any] = {}
    if loaders:
        slowest = min(loaders, key=lambda loader: loader.num_workers)
        all_known = len(loaders) == len(every)
        for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order"):
            known[name] = getattr(slowest, name, None) if all_known else None
        known["batch_size"] = getattr(slowest, "batch_size", None) or getattr(
            getattr(slowest, "batch_sampler", None), "batch_size", None
        )
        known["workers"] = _kind_of_workers(slowest) if all_known else None
        known["ours"] = all(isinstance(loader, FeedLoader) for loader in every)
        # Loaders that are not torch's need have no dataset at all.
        known["map_style"] = not any(
            isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders
        )
    for loader in every:
        if isinstance(loader, ReaderLoader):
            known |= loader.facts()
    return replace(facts, **known)


def with_batch(facts: LoopFacts, batch: Any) -> LoopFacts:
    """The facts, and what a batch tells."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors(batch)]
    hidden = facts.batch_hooks or facts.device_transform  # they have made of it what they would
    pictures = None if hidden else _pictures(batch)
    return replace(facts, batch_bytes=sum(sizes), batch_tensors=len(sizes), pictures=pictures)


def batches_ahead(loaders: Sequence[Any]) -> int:
    """Batches that the training loaders may hold ready: workers x prefetch_factor, and the background queue."""
    ready = [
        (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        + (getattr(loader, "background", 0) or 0)
        for loader in loaders
    ]
    return max(ready, default=0)


def _pictures(batch: Any) -> tuple[Picture, ...] | None:
    """As ``LoopFacts.pictures`` says; None where part of the batch lies in what cannot be rebuilt in a line."""
    leaves = list(_leaves(batch, ()))
    found = {id(leaf): leaf for leaf, _ in leaves if isinstance(leaf, Tensor)}
    if any(id(tensor) not in found for tensor in tensors(batch)):
        return None
    some = [one for one in found.values() if one.dim() >= _PICTURE_DIMS and _may_be_pictures(one.dtype)]
    if not some:
        return ()
    largest = max(some, key=Tensor.numel)
    alike = tuple(
        Picture(dtype=str(leaf.dtype).removeprefix("torch."), inside=inside)
        for leaf, inside in leaves
        if isinstance(leaf, Tensor) and _kind(leaf) == _kind(largest)
    )
    return alike if len(alike) <= _MOST_PICTURES else None


def _kind(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """What crops of different sizes have in common, and pictures and their masks have not."""
    return tensor.dtype, tuple(tensor.shape[:-2])


def _may_be_pictures(dtype: torch.dtype) -> bool:
    return dtype == torch.uint8 or dtype.is_floating_point


def _leaves(value: Any, inside: tuple[Container, ...]) -> Iterator[tuple[Any, tuple[Container, ...]]]:
    """What the plain containers of a batch hold, each with the way there."""
    if type(value) is dict:
        kind: Literal["dict", "list", "tuple", "named tuple"] = "dict"
        parts = [(_as_code(key), part) for key, part in value.items()]
    elif type(value) in (list, tuple):
        kind = "list" if type(value) is list else "tuple"
        parts = [(str(place), part) for place, part in enumerate(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        kind, parts = "named tuple", list(zip(value._fields, value, strict=True))
    else:
        yield value, inside
        return
    for key, part in parts:
        if key is not None:
            yield from _leaves(part, (*inside, Container(kind=kind, key=key, parts=len(parts))))


def _as_code(key: Any) -> str | None:
    """A key of a dict as code; None for one that is neither text nor a number."""
    if type(key) is str and key.isprintable() and not set(key) & set('"\\'):
        return f'"{key}"'
    return repr(key) if type(key) in (str, int) else None


def _kind_of_workers(loader: Any) -> Literal["process", "thread"] | None:
    if not loader.num_workers:
        return None
    return "thread" if getattr(loader, "workers", None) == "thread" else "process"
