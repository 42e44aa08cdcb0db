"""Clones of a user's loader for trials and experiments: with changes, without traces, their failures located."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, LoaderError, SettingsError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import drawing_device
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.recommend import TORCH_PREFETCH

_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order")
_PASSES = ("__iter__", "_get_iterator")
_WORKER = re.compile(r"in DataLoader worker process (\d+)")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What to change in a loader; None leaves a thing as it is.

    Raises:
        SettingsError: for changes that contradict each other.
    """

    dataset: Any = None
    """In place of its dataset, of the same kind and length."""
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
    """Whether the sampler begins again at its end. Iterable datasets end when they end."""

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


def clone_loader(loader: DataLoader[Any], changes: Changes | None = None) -> DataLoader[Any]:
    """A loader of the same class, dataset, samplers, collate function and settings, but for the changes.

    Its dataset, samplers and generator are the loader's own objects, so it draws the same order: iterate it within
    :func:`preserve_state`, which puts back what they draw and change. A FeedLoader's clone has no order of its own. The
    constructor is not called: it may take other arguments, and may do more than once what must be done once.

    Args:
        loader: of torch, of a class derived from it, or ours. It is not iterated, and its workers are left alone.
        changes: what is to differ.

    Raises:
        LoaderError: when it cannot be cloned: its sampler can be gone through only once, or it keeps an iterator of its
            own.
        SettingsError: when batches are given for an iterable dataset.
    """
    changes = changes or Changes()
    if isinstance(loader.dataset, IterableDataset) and changes.batches is not None:
        raise SettingsError("An iterable dataset decides itself what comes: batches cannot be given for it.")
    own_way = any(getattr(type(loader), name, None) is not getattr(DataLoader, name, None) for name in _PASSES)
    if own_way and not isinstance(loader, FeedLoader):
        _refuse_kept_iterator(loader)
    values: dict[str, Any] = {**_order(loader, changes), "_iterator": None}
    values |= {name: value for name in _SETTINGS if (value := getattr(changes, name)) is not None}
    if changes.dataset is not None:
        values["dataset"] = changes.dataset
    context = loader.multiprocessing_context
    workers = values.get("num_workers", loader.num_workers)
    if not workers:
        values |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    elif values.get("prefetch_factor", loader.prefetch_factor) is None:
        values["prefetch_factor"] = TORCH_PREFETCH
    clone = object.__new__(type(loader))
    clone.__dict__.update(vars(loader), **values)
    if "next_iter_state" in vars(loader):  # torchdata's: where a StatefulDataLoader is to go on
        clone.__dict__["next_iter_state"] = None
    threads = isinstance(loader, FeedLoader) and (changes.workers or loader.workers) == "thread"
    clone.multiprocessing_context = None if threads or not workers else context
    if isinstance(clone, FeedLoader):
        clone.order, clone.watch, clone.workers = None, None, changes.workers or clone.workers
        clone.forget()
    return clone


def burst_of(loader: DataLoader[Any]) -> int:
    """Batches that come together: one for each worker process; 1 without, and with threads, which share a batch."""
    threaded = getattr(loader, "workers", "process") == "thread"
    return 1 if threaded else max(1, loader.num_workers)


def iter_is_itself(source: Any) -> bool:
    """Whether iterating uses ``source`` up: it is an iterator, such as a generator."""
    return hasattr(source, "__next__") and isinstance(source, Iterator)


def _order(loader: DataLoader[Any], changes: Changes) -> dict[str, Any]:
    """What gives the indices, where that is to change."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    source = getattr(loader, name) if changes.batches is None else changes.batches
    if iter_is_itself(source):
        raise LoaderError(
            f"The sampler ({type(source).__name__}) is an iterator, which can be gone through only once, so the loader "
            "cannot be tried without using it up. Give an object whose __iter__ begins anew."
        )
    if changes.batches is None and not changes.endless:
        return {}
    return {name: GivenOrder(source, endless=changes.endless)}


def _refuse_kept_iterator(loader: DataLoader[Any]) -> None:
    for name, value in vars(loader).items():
        if name != "_iterator" and hasattr(value, "__next__") and not isinstance(value, type):
            raise LoaderError(
                f"The loader ({type(loader).__name__}) keeps an iterator in its attribute {name!r}, so it cannot be "
                "tried without taking batches from it. Try it with a plain DataLoader."
            )


# --- with their failures located ------------------------------------------------------------------------------------


def locate_failure(parts: Sequence[Any], error: BaseException, came: int | None) -> DatasetError:
    """The error to raise for one that a loader raised, with the worker and the sample as far as they can be told.

    The sampler's draws are repeated up to the batch that failed, and its samples are made in this process: the one that
    raises the same kind of error is named.

    Args:
        parts: the loaders, as before the pass.
        error: what was raised.
        came: batches that came before, in the first pass; None: not known.
    """
    worker = _WORKER.search(str(error))
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    kind, text = type(error).__name__, str(error).strip()
    if lines and _WORKER.search(lines[0]):  # torch made one text of a worker's traceback
        kind, _, text = (part.strip() for part in lines[-1].partition(":"))
        kind = kind.rpartition(".")[2]
    where = [f"worker {worker.group(1)}"] if worker else []
    if came is not None and len(parts) == 1 and not parts[0].stream:
        sample = _failing_sample(parts[0].loader, kind, came)
        where += [] if sample is None else [f"sample {sample}"]
    data = ", ".join(sorted({type(part.loader.dataset).__name__ for part in parts}))
    place = f" in {', '.join(where)}" if where else ""
    end = "" if text.endswith((".", "!", "?")) else "."
    return DatasetError(
        f"Loading from the data set ({data}) failed{place}: {kind}: {text}{end} Mend it, or leave it out."
    )


def _failing_sample(loader: DataLoader[Any], kind: str, came: int) -> Any:
    """The sample that failed; None where it cannot be told."""
    with preserve_state(loader):
        # As torch does before it asks the sampler for anything.
        with drawing_device(loader.generator):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            batched = loader.batch_sampler is not None
            source = loader.batch_sampler if batched else loader.sampler
            if iter_is_itself(source):
                return None
            failed = next((batch for number, batch in enumerate(source or ()) if number == came), None)
        if failed is None:
            return None
        for index in failed if batched else [failed]:
            try:
                loader.dataset[index]
            except Exception as error:  # noqa: BLE001  # compared with the one that is being explained
                if type(error).__name__ == kind:
                    return index
    return None
