"""Facts about a run, other than its times, read from its loaders and batches."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch.utils.data import IterableDataset, Subset

from lightning_feed.load.kinds import AnyDataset, AnyLoader, Batch
from lightning_feed.load.streams import divides_among_workers
from lightning_feed.measure.measurements import BatchFacts, LoaderFacts
from lightning_feed.transfer.batch_tree import tensors
from lightning_feed.wording import source_line

_DEEPEST = 4


def loader_facts(loaders: Sequence[AnyLoader]) -> LoaderFacts:
    """Return the facts about the loaders of a stage; with several loaders, about the loader with the fewest workers.

    If any loader has no ``num_workers``, training may be waiting for that loader, so ``num_workers`` and the settings
    that depend on workers or pinning are left out.

    Args:
        loaders: all loaders of a stage, without their wrappers.
    """
    with_workers = [loader for loader in loaders if isinstance(getattr(loader, "num_workers", None), int)]
    if not loaders:
        return LoaderFacts()
    if not with_workers:
        return LoaderFacts(generator=_name_of(loaders[0]))
    slowest = min(with_workers, key=lambda loader: loader.num_workers)
    sampler = getattr(slowest, "batch_sampler", None)
    datasets = _datasets(with_workers)
    facts = LoaderFacts(
        batch_size=getattr(slowest, "batch_size", None) or getattr(sampler, "batch_size", None),
        map_style=not any(isinstance(dataset, IterableDataset) for dataset in datasets),
        decodes_whole=any(map(_decodes_whole, datasets)),
        ours=all(is_instance(loader, "lightning_feed.load.loader", "FeedLoader") for loader in loaders),
    )
    if len(with_workers) < len(loaders):
        return facts
    in_place, may_use_slots = _hand_over(loaders)
    return replace(
        facts,
        num_workers=slowest.num_workers,
        prefetch_factor=getattr(slowest, "prefetch_factor", None),
        pin_memory=getattr(slowest, "pin_memory", None),
        persistent_workers=getattr(slowest, "persistent_workers", None),
        in_order=getattr(slowest, "in_order", None),
        workers=_kind_of_workers(slowest),
        in_place=in_place,
        may_use_slots=may_use_slots,
    )


def training_loader_facts(loaders: Sequence[AnyLoader], *, reloaded: bool) -> LoaderFacts:
    """Return the facts of :func:`loader_facts`, and further facts that only remedies for the training loaders need.

    Args:
        loaders: all training loaders, without their wrappers.
        reloaded: True if new loaders are made every few epochs (``reload_dataloaders_every_n_epochs``).
    """
    datasets = _datasets(loaders)
    numbers = tuple(loader.num_workers for loader in loaders if hasattr(loader, "num_workers"))
    facts = replace(
        loader_facts(loaders),
        every_num_workers=numbers,
        may_persist=not reloaded and bool(loaders) and not any(map(_needs_each_epoch, datasets)),
    )
    if any(isinstance(dataset, IterableDataset) for dataset in datasets):
        divided = all(divides_among_workers(loader) is not False for loader in loaders)
        facts = replace(facts, shards_by_worker=divided)
    return facts


def batch_facts(batch: Batch) -> BatchFacts:
    """Return the number of tensors in a batch, their size in bytes, and where the largest one is."""
    leaves = list(tensors(batch))
    sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
    pinned = None
    if leaves and torch.cuda.is_initialized():
        largest = leaves[sizes.index(max(sizes))]
        pinned = largest.is_pinned() if largest.device.type == "cpu" else None
    return BatchFacts(size_bytes=sum(sizes), tensors=len(sizes), pinned=pinned)


def batches_ahead(loaders: Sequence[AnyLoader]) -> int:
    """Return the largest number of batches that any one of the training loaders may hold ready.

    A loader may hold ``num_workers`` x ``prefetch_factor`` batches, plus those in its background queue.
    """
    ready = [
        (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        + (getattr(loader, "background", 0) or 0)
        for loader in loaders
    ]
    return max(ready, default=0)


def is_instance(value: object, module: str, name: str) -> bool:
    """``isinstance`` without importing the class: a class that was never imported has no instances."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _name_of(loader: AnyLoader) -> str:
    """Return a generator or the class of another iterable, with the line of its code: ``batches (train.py:12)``."""
    name = type(loader).__name__
    code = getattr(loader, "gi_code", None)
    if code is not None:
        name = code.co_name
    else:
        code = getattr(getattr(type(loader), "__iter__", None), "__code__", None)
    if code is None:
        return name
    return f"{name} ({source_line(code.co_filename, code.co_firstlineno)})"


def _datasets(loaders: Sequence[AnyLoader]) -> list[AnyDataset]:
    """Return the dataset of each loader; None for a loader without a ``dataset``, which need not be torch's."""
    return [getattr(loader, "dataset", None) for loader in loaders]


def _kind_of_workers(loader: AnyLoader) -> Literal["process", "thread"] | None:
    """``process`` or ``thread``; None without workers."""
    if not loader.num_workers:
        return None
    return "thread" if getattr(loader, "workers", None) == "thread" else "process"


def _hand_over(loaders: Sequence[AnyLoader]) -> tuple[bool | None, bool | None]:
    """Return the fields ``in_place`` and ``may_use_slots`` of LoaderFacts."""
    with_processes = [loader for loader in loaders if _kind_of_workers(loader) == "process"]
    if not with_processes:
        return None, None
    from lightning_feed.load.slot_loaders import may_use_slots, uses_slots  # here: without workers they are not needed

    return all(map(uses_slots, with_processes)), any(map(may_use_slots, with_processes))


def _decodes_whole(dataset: AnyDataset) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if not is_instance(dataset, "torchvision.datasets", "ImageFolder"):
        return False
    from lightning_feed.images.crop import cropping_step  # here, because this module imports the decoders

    unchanged = type(dataset).__getitem__ is sys.modules["torchvision.datasets"].DatasetFolder.__getitem__
    return unchanged and cropping_step(dataset.transform) is not None


def _needs_each_epoch(dataset: AnyDataset) -> bool:
    """Return True if workers must be notified of each epoch: the dataset, or a dataset inside it, is an IterableDataset
    or has ``set_epoch``. Also True if datasets are nested too deep to look at."""
    for _ in range(_DEEPEST):
        if dataset is None or isinstance(dataset, IterableDataset) or hasattr(dataset, "set_epoch"):
            return True
        if not hasattr(dataset, "dataset"):
            return False
        dataset = dataset.dataset
    return True
