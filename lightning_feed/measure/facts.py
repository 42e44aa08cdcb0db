"""What loaders and batches tell of a run besides its times."""

import dis
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

from torch.utils.data import IterableDataset, Subset

from lightning_feed.images.crop import cropping_step
from lightning_feed.load.iterable import divides_among_workers, methods_of
from lightning_feed.load.loader import FeedLoader
from lightning_feed.measure.measurements import LoopFacts
from lightning_feed.transfer.batch_tree import tensors


def with_loaders(facts: LoopFacts, every: Sequence[Any], *, reloaded: bool | None = None) -> LoopFacts:
    """The facts, and what the training loaders tell. Of several, the one with the fewest workers counts.

    With a loader among them that has no workers to tell of, it may be that one which is waited for: then those of the
    others are not told.

    Args:
        facts: of the run.
        every: all loaders of a stage, without their wrappers.
        reloaded: whether new ones are made every few epochs. None: what only remedies go by is not told.
    """
    loaders = [loader for loader in every if isinstance(getattr(loader, "num_workers", None), int)]
    known: dict[str, Any] = {}
    if loaders:
        slowest = min(loaders, key=lambda loader: loader.num_workers)
        known = _told_by(slowest, loaders)
        known["ours"] = all(isinstance(loader, FeedLoader) for loader in every)
        if len(loaders) == len(every):
            known |= {name: getattr(slowest, name, None) for name in _SETTINGS}
            kind = "thread" if getattr(slowest, "workers", None) == "thread" else "process"
            known["workers"] = kind if slowest.num_workers else None
    if reloaded is not None:
        known |= _for_remedies(every, reloaded=reloaded)
    return replace(facts, **known)


_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order")


def _told_by(slowest: Any, loaders: Sequence[Any]) -> dict[str, Any]:
    sampler = getattr(slowest, "batch_sampler", None)
    # Loaders that are not torch's need have no dataset at all.
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    return {
        "batch_size": getattr(slowest, "batch_size", None) or getattr(sampler, "batch_size", None),
        "map_style": not any(isinstance(dataset, IterableDataset) for dataset in datasets),
        "decodes_whole": any(map(_decodes_whole, datasets)),
    }


def _for_remedies(every: Sequence[Any], *, reloaded: bool) -> dict[str, Any]:
    divided = [told for loader in every if (told := divides_among_workers(loader)) is not None]
    return {
        "every_num_workers": tuple(loader.num_workers for loader in every if hasattr(loader, "num_workers")),
        "shards_by_worker": all(divided) if divided else None,
        "may_leave_process": all(may_leave_process(each) is not False for each in every) if divided else None,
        "may_persist": may_persist(every, reloaded=reloaded),
    }


def with_batch(facts: LoopFacts, batch: Any) -> LoopFacts:
    """The facts, and what a batch tells."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors(batch)]
    return replace(facts, batch_bytes=sum(sizes), batch_tensors=len(sizes))


def batches_ahead(loaders: Sequence[Any]) -> int:
    """Batches that the training loaders may hold ready: workers x prefetch_factor, and the background queue."""
    ready = [
        (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        + (getattr(loader, "background", 0) or 0)
        for loader in loaders
    ]
    return max(ready, default=0)


def _decodes_whole(dataset: Any) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    torchvision: Any = sys.modules.get("torchvision.datasets")  # not imported: then nobody has a data set of it
    if torchvision is None or not isinstance(dataset, torchvision.ImageFolder):
        return False
    unchanged = type(dataset).__getitem__ is torchvision.DatasetFolder.__getitem__
    return unchanged and cropping_step(dataset.transform) is not None


_DEEPEST = 4


def may_leave_process(loader: Any) -> bool | None:
    """Whether the stream of a loader may live in a worker process; None for a data set that is no stream.

    A worker has a copy of it. Not where a method other than ``__init__`` sets an attribute, which may be a count that
    goes on from epoch to epoch, nor where there is a ``state_dict`` that somebody may ask for.
    """
    dataset = getattr(loader, "dataset", None)
    return _keeps_nothing(dataset, _DEEPEST) if isinstance(dataset, IterableDataset) else None


def _keeps_nothing(stream: Any, deeper: int) -> bool:
    codes = [code for name, code in methods_of(stream) if name != "__init__"]
    if hasattr(stream, "state_dict") or any(_sets(code) for code in codes) or not deeper:
        return False
    inside = [value for value in vars(stream).values() if isinstance(value, IterableDataset)]
    return all(_keeps_nothing(one, deeper - 1) for one in inside)


def _sets(code: CodeType) -> bool:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return any(one.opname == "STORE_ATTR" for one in dis.get_instructions(code)) or any(_sets(one) for one in inner)


def may_persist(loaders: Sequence[Any], *, reloaded: bool) -> bool:
    """Whether nothing was seen that has to reach the workers of these loaders anew in each epoch.

    Args:
        loaders: all of training.
        reloaded: whether the Trainer asks for new loaders every few epochs.
    """
    return not reloaded and bool(loaders) and not any(_is_told(getattr(loader, "dataset", None)) for loader in loaders)


def _is_told(dataset: Any) -> bool:
    """Whether a data set, or one inside it, is a stream or has a ``set_epoch``."""
    for _ in range(_DEEPEST):
        if dataset is None or isinstance(dataset, IterableDataset) or hasattr(dataset, "set_epoch"):
            return True
        if not hasattr(dataset, "dataset"):
            return False
        dataset = dataset.dataset
    return True
