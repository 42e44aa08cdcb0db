"""What is known of a run besides its times: settings of the loaders, the batch, what makes the host wait."""

import sys
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import IterableDataset

from lightning_feed import _host
from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.load.machine import read_machine
from lightning_feed.prefetch_callback import PrefetchCallback
from lightning_feed.transfer.nested import tensors
from lightning_feed.watch.verdict.diagnosis import LoopFacts


def facts_of(trainer: Any) -> LoopFacts:
    """All that can be told before the first batch. Of several loaders, the one with the fewest workers counts."""
    loaders = [
        loader for loader in _host.train_loaders(trainer) if isinstance(getattr(loader, "num_workers", None), int)
    ]
    known: dict[str, Any] = {}
    if loaders:
        slowest = min(loaders, key=lambda loader: loader.num_workers)
        for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order"):
            known[name] = getattr(slowest, name, None)
        known["batch_size"] = getattr(slowest, "batch_size", None) or getattr(
            getattr(slowest, "batch_sampler", None), "batch_size", None
        )
        known["workers"] = _kind_of_workers(slowest)
        known["ours"] = all(isinstance(loader, FeedLoader) for loader in loaders)
        # Loaders that are not torch's need have no dataset at all.
        known["map_style"] = not any(
            isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders
        )
    batches = trainer.num_training_batches
    return LoopFacts(
        device_type=trainer.strategy.root_device.type,
        usable_cpus=max(1, read_machine().usable_cpus // trainer.num_devices),
        world_size=trainer.world_size,
        batches_per_epoch=int(batches) if batches != float("inf") else None,
        log_every_n_steps=trainer.log_every_n_steps,
        **(tell() if (tell := getattr(trainer.datamodule, "_feed_facts", None)) is not None else {}),
        lightning=_version(trainer),
        **known,
    )


def with_batch(facts: LoopFacts, batch: Any) -> LoopFacts:
    """The facts, and what a batch tells."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors(batch)]
    return replace(facts, batch_bytes=sum(sizes), batch_tensors=len(sizes))


def queue_of(trainer: Any) -> int:
    """Batches that the training loaders may hold ready: workers x prefetch_factor, and the background queue."""
    ready = [
        (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        + (getattr(loader, "background", 0) or 0)
        for loader in _host.train_loaders(trainer)
    ]
    return max(ready, default=0)


def prefetch_active(trainer: Any) -> bool | None:
    """Whether a PrefetchCallback of this Trainer is at work; None: it has none."""
    found = [callback.active for callback in trainer.callbacks if isinstance(callback, PrefetchCallback)]
    return any(found) if found else None


def _version(trainer: Any) -> str | None:
    """Of the package that trains: a user's subclass of Trainer lives elsewhere."""
    modules = (kind.__module__.partition(".")[0] for kind in type(trainer).__mro__)
    found = next((name for name in modules if name in ("lightning", "pytorch_lightning")), None)
    return None if found is None else str(sys.modules[found].__version__)


def _kind_of_workers(loader: Any) -> Literal["process", "thread"] | None:
    if not loader.num_workers:
        return None
    return "thread" if getattr(loader, "workers", None) == "thread" else "process"
