"""Facts about a run besides its times, read from its loaders and batches."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, Subset

from lightning_feed.load.fork_safety import why_no_workers
from lightning_feed.load.kinds import AnyDataset, AnyLoader, Batch
from lightning_feed.load.streams import divides_among_workers
from lightning_feed.measure.measurements import LoopFacts
from lightning_feed.transfer.batch_tree import tensors
from lightning_feed.wording import source_line

_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order")
_DEEPEST = 4


def with_loaders(facts: LoopFacts, every: Sequence[AnyLoader], *, reloaded: bool | None = None) -> LoopFacts:
    """Add facts about the training loaders; if there are several, about the one with the fewest workers.

    If any loader has no ``num_workers``, training may be waiting for that loader, so all settings are left out.

    Args:
        facts: facts about the run so far.
        every: all loaders of a stage, without their wrappers.
        reloaded: True if new loaders are made every few epochs. None: leave out facts that only remedies need.
    """
    loaders = [loader for loader in every if isinstance(getattr(loader, "num_workers", None), int)]
    known: dict[str, Any] = {"generator": _name_of(every[0]) if every else ""}
    if loaders:
        slowest = min(loaders, key=lambda loader: loader.num_workers)
        known = _batches_of(slowest, loaders)
        known["ours"] = all(is_instance(loader, "lightning_feed.load.loader", "FeedLoader") for loader in every)
        if len(loaders) == len(every):
            known |= {name: getattr(slowest, name, None) for name in _SETTINGS}
            kind = "thread" if getattr(slowest, "workers", None) == "thread" else "process"
            known["workers"] = kind if slowest.num_workers else None
    if reloaded is not None:
        known |= _for_remedies(every, reloaded=reloaded)
    return replace(facts, **known)


def with_batch(facts: LoopFacts, batch: Batch) -> LoopFacts:
    """Add the number of tensors in a batch, and their size in bytes."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors(batch)]
    return replace(facts, batch_bytes=sum(sizes), batch_tensors=len(sizes))


def batches_ahead(loaders: Sequence[AnyLoader]) -> int:
    """Largest number of batches that any one of the training loaders may hold ready.

    A loader may hold ``num_workers`` x ``prefetch_factor`` batches, plus those in its background queue.
    """
    ready = [
        (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        + (getattr(loader, "background", 0) or 0)
        for loader in loaders
    ]
    return max(ready, default=0)


def is_instance(value: object, module: str, name: str) -> bool:
    """``isinstance`` without importing the class: a class that was never imported has no objects."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _name_of(loader: AnyLoader) -> str:
    """``batches (train.py:12)``: a generator, or the class of another iterable, with the line of its code."""
    code = getattr(loader, "gi_code", None)
    name = type(loader).__name__
    if code is None:
        code = getattr(getattr(type(loader), "__iter__", None), "__code__", None)
    else:
        name = code.co_name
    return name if code is None else f"{name} ({source_line(code.co_filename, code.co_firstlineno)})"


def _batches_of(slowest: Any, loaders: Sequence[AnyLoader]) -> dict[str, Any]:
    sampler = getattr(slowest, "batch_sampler", None)
    # Loaders other than torch's may have no dataset.
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    return {
        "batch_size": getattr(slowest, "batch_size", None) or getattr(sampler, "batch_size", None),
        "map_style": not any(isinstance(dataset, IterableDataset) for dataset in datasets),
        "decodes_whole": any(map(_decodes_whole, datasets)),
    }


def _for_remedies(every: Sequence[AnyLoader], *, reloaded: bool) -> dict[str, Any]:
    datasets = [getattr(loader, "dataset", None) for loader in every]
    known: dict[str, Any] = {
        "every_num_workers": tuple(loader.num_workers for loader in every if hasattr(loader, "num_workers")),
        "may_persist": not reloaded and bool(every) and not any(map(_needs_each_epoch, datasets)),
    }
    if not any(known["every_num_workers"]):
        known["why_no_workers"] = next(filter(None, map(why_no_workers, datasets)), "")
    if any(isinstance(dataset, IterableDataset) for dataset in datasets):
        known["shards_by_worker"] = all(divides_among_workers(loader) is not False for loader in every)
    return known


def _decodes_whole(dataset: AnyDataset) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if not is_instance(dataset, "torchvision.datasets", "ImageFolder"):
        return False
    from lightning_feed.images.crop import cropping_step  # here, as it imports the decoders

    unchanged = type(dataset).__getitem__ is sys.modules["torchvision.datasets"].DatasetFolder.__getitem__
    return unchanged and cropping_step(dataset.transform) is not None


def _needs_each_epoch(dataset: AnyDataset) -> bool:
    """True if workers must be notified of each epoch: a stream or a ``set_epoch``, in the dataset or inside it."""
    for _ in range(_DEEPEST):
        if dataset is None or isinstance(dataset, IterableDataset) or hasattr(dataset, "set_epoch"):
            return True
        if not hasattr(dataset, "dataset"):
            return False
        dataset = dataset.dataset
    return True
