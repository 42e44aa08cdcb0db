"""What loaders and batches tell of a run besides its times."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import IterableDataset

from lightning_feed.load.dali.reader_loader import ReaderLoader
from lightning_feed.load.loader import FeedLoader
from lightning_feed.transfer.tree import tensors
from lightning_feed.watch.verdict.diagnosis import LoopFacts


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
    return replace(facts, batch_bytes=sum(sizes), batch_tensors=len(sizes))


def batches_ahead(loaders: Sequence[Any]) -> int:
    """Batches that the training loaders may hold ready: workers x prefetch_factor, and the background queue."""
    ready = [
        (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        + (getattr(loader, "background", 0) or 0)
        for loader in loaders
    ]
    return max(ready, default=0)


def _kind_of_workers(loader: Any) -> Literal["process", "thread"] | None:
    if not loader.num_workers:
        return None
    return "thread" if getattr(loader, "workers", None) == "thread" else "process"
