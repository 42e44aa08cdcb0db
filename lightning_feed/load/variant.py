"""A loader like another one, with changes, that can be iterated without the other one noticing."""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.load.recommend import TORCH_PREFETCH

_ORDER = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}
_OPTIONS = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in _ORDER]
_PASSES = ("__iter__", "_get_iterator")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What to change in a loader; None leaves a thing as it is.

    Raises:
        SettingsError: for changes that contradict each other.
    """

    dataset: Any = None
    """In place of its data set, of the same kind and length."""
    num_workers: int | None = None
    workers: Literal["process", "thread"] | None = None
    """What they are; only a FeedLoader has the choice."""
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    in_order: bool | None = None
    batches: Sequence[Any] | None = None
    """What the sampler is to give, batch for batch: lists of indices, or indices where the loader does not batch."""
    endless: bool = False
    """Whether the sampler begins again at its end. Iterable data sets end when they end."""
    timeout: float | None = None
    """Seconds that torch waits for a batch of its workers."""

    def __post_init__(self) -> None:
        if self.num_workers == 0 and (self.prefetch_factor is not None or self.persistent_workers):
            raise SettingsError("num_workers=0 loads in this process: there is nothing to prefetch or to keep alive.")
        if self.batches is not None and not self.batches:
            raise SettingsError("batches is empty, so the loader would give nothing.")


class GivenOrder:
    """A sampler that gives what it was given, over and over if it is to be endless.

    Args:
        source: a sampler, or a list.
        endless: begin again at its end; a source that gives nothing ends all the same.
    """

    def __init__(self, source: Any, *, endless: bool) -> None:
        self.source = source
        self.endless = endless

    def __iter__(self) -> Iterator[Any]:
        while True:
            empty = True
            for item in self.source:
                empty = False
                yield item
            if empty or not self.endless:
                return

    def __len__(self) -> int:
        return len(self.source)


def with_changes(loader: DataLoader[Any], changes: Changes | None = None) -> DataLoader[Any]:
    """Build a loader of the same data set, samplers, collate function and settings, but for the changes.

    Its data set, samplers and generator are the loader's own objects, so it draws the same order: iterate it within
    :func:`lightning_feed.load.untouched.untouched`, which puts back what they draw and change. A class that iterates in
    its own way is copied as it is; all others become torch's DataLoader, or a FeedLoader without an order of its own.

    Args:
        loader: of torch, of a class derived from it, or ours. It is not iterated, and its workers are left alone.
        changes: what is to differ.

    Raises:
        LoaderError: when no such loader can be built: its sampler can be gone through only once, or it keeps an
            iterator of its own.
        SettingsError: when batches are given for an iterable data set.
    """
    changes = changes or Changes()
    stream = isinstance(loader.dataset, IterableDataset)
    if stream and changes.batches is not None:
        raise SettingsError("An iterable data set decides itself what comes: batches cannot be given for it.")
    options = _options(loader, changes)
    if isinstance(loader, FeedLoader):
        options |= {
            "background": loader.background,
            "workers": changes.workers or loader.workers,
            "decode": loader.decode,
        }
        if changes.workers == "thread":
            options["multiprocessing_context"] = None
    dataset = loader.dataset if changes.dataset is None else changes.dataset
    order = _order(loader, changes, stream=stream)
    if not isinstance(loader, FeedLoader) and _own_way(loader):
        return _twin(loader, {**options, **order, "dataset": dataset})
    kind: Any = FeedLoader if isinstance(loader, FeedLoader) else DataLoader
    with warnings.catch_warnings():
        # More workers than CPUs: tried on purpose, or the user was told when the loader was made.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        made: DataLoader[Any] = kind(dataset, generator=loader.generator, **order, **options)
    return made


def burst_of(loader: DataLoader[Any]) -> int:
    """Batches that come together: one for each worker process; 1 without, and with threads, which share a batch."""
    threaded = getattr(loader, "workers", "process") == "thread"
    return 1 if threaded else max(1, loader.num_workers)


def _options(loader: DataLoader[Any], changes: Changes) -> dict[str, Any]:
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    if not options.get("pin_memory_device"):
        options.pop("pin_memory_device", None)  # newer versions of torch warn of it
    for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order", "timeout"):
        value = getattr(changes, name)
        if value is not None:
            options[name] = value
    if options["num_workers"] == 0:
        options |= {
            "prefetch_factor": None,
            "persistent_workers": False,
            "timeout": 0,
            "multiprocessing_context": None,
        }
    elif options.get("prefetch_factor") is None:
        options["prefetch_factor"] = TORCH_PREFETCH
    return options


def _order(loader: DataLoader[Any], changes: Changes, *, stream: bool) -> dict[str, Any]:
    """What decides the order and the batches."""
    if stream:
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    batched = loader.batch_sampler is not None
    source = loader.batch_sampler if batched else loader.sampler
    if changes.batches is not None:
        source = changes.batches
    elif iter_is_itself(source):
        raise LoaderError(
            f"The sampler ({type(source).__name__}) is an iterator, which can be gone through only once, so the loader "
            "cannot be tried without using it up. Give an object whose __iter__ begins anew."
        )
    if changes.batches is not None or changes.endless:
        source = GivenOrder(source, endless=changes.endless)
    return {"batch_sampler": source} if batched else {"batch_size": None, "sampler": source}


def iter_is_itself(source: Any) -> bool:
    """Whether iterating uses ``source`` up: it is an iterator, such as a generator."""
    return hasattr(source, "__next__") and isinstance(source, Iterator)


def _own_way(loader: DataLoader[Any]) -> bool:
    return any(getattr(type(loader), name, None) is not getattr(DataLoader, name, None) for name in _PASSES)


def _twin(loader: DataLoader[Any], values: dict[str, Any]) -> DataLoader[Any]:
    """The same class with the same attributes, but for ``values``. Its constructor is not called: it may take other
    arguments, and it may do more than once what must be done once."""
    kept = [
        name
        for name, value in vars(loader).items()
        if name != "_iterator" and hasattr(value, "__next__") and not isinstance(value, type)
    ]
    if kept:
        raise LoaderError(
            f"The loader ({type(loader).__name__}) keeps an iterator in its attribute {kept[0]!r}, so it cannot be "
            "tried without taking batches from it. Try it with a plain DataLoader."
        )
    twin = object.__new__(type(loader))
    context = values.pop("multiprocessing_context", None)
    twin.__dict__.update(vars(loader))
    twin.__dict__.update({name: value for name, value in values.items() if name in vars(loader)})
    twin.__dict__.update({name: None for name in ("_iterator", "next_iter_state") if name in vars(loader)})
    twin.multiprocessing_context = context
    return twin
