"""Clones of a user's loader for trials and experiments, and the search for the sample that failed to load."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.load.kinds import AnyDataset, Batch, Index
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import drawing_device
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import TORCH_PREFETCH, Setting
from lightning_feed.load.slot_loaders import put_in_slots, take_out_of_slots
from lightning_feed.load.worker import original_error

_KNOWN = ("_iterator", "dataset", "sampler", "batch_sampler")
_WORKER = re.compile(r"in DataLoader worker process (\d+)")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to a loader. A field that is None changes nothing."""

    dataset: AnyDataset = None
    """The new dataset, of the same kind and length."""
    setting: Setting | None = None
    """The number of workers and their options. The kind of workers changes only in a FeedLoader."""
    batches: Sequence[Any] | None = None
    """Items for the sampler to yield: a list of indices per batch, or indices if the loader does not batch."""
    endless: bool = False
    """True to restart the sampler at its end. Has no effect on iterable datasets."""


class GivenOrder:
    """A sampler that yields the items of ``source``, repeatedly if ``endless``.

    Args:
        source: a sampler, or a list.
        endless: restart at the end. An empty source still ends.
    """

    def __init__(self, source: Any, *, endless: bool) -> None:
        self.source = source
        self.endless = endless

    def __iter__(self) -> Iterator[Batch]:
        while True:
            empty = True
            for item in self.source:
                empty = False
                yield item
            if empty or not self.endless:
                return

    def __len__(self) -> int:
        return len(self.source)


def clone_with(loader: DataLoader[Batch], **values: object) -> DataLoader[Batch]:
    """Copy a loader, with other ``values`` and no running workers. Class, dataset, samplers and functions stay.

    The constructor is not called: its arguments may differ from the attributes, and its side effects must not be
    repeated. Without workers, options that need workers are dropped.

    Args:
        loader: a DataLoader, which may be of a derived class, such as FeedLoader. It stays unchanged.
        **values: attributes of the copy. ``prefetch_factor=None`` with workers means torch's default.
    """
    context = loader.multiprocessing_context
    if not values.get("num_workers", loader.num_workers):
        context = None
        values |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    elif values.get("prefetch_factor", loader.prefetch_factor) is None:
        values["prefetch_factor"] = TORCH_PREFETCH
    clone = object.__new__(type(loader))
    clone.__dict__.update(vars(loader), **values, _iterator=None)
    clone.multiprocessing_context = None if has_threads(clone) else context
    if isinstance(clone, FeedLoader):
        clone.forget()
    return clone


def clone_loader(loader: DataLoader[Batch], changes: Changes | None = None) -> DataLoader[Batch]:
    """Clone a loader for trials, with changes. Everything else stays the same: class, samplers, collate function etc.

    The clone shares the loader's dataset, samplers and generator, so it draws the same order. Iterate the clone within
    :func:`preserve_state`, which restores their state. A FeedLoader's clone has no ``order``.

    Args:
        loader: a DataLoader, which may be of a derived class, such as FeedLoader. It is not iterated, and its workers
            are left alone.
        changes: the changes in the clone; None for none.

    Raises:
        LoaderError: the loader cannot be cloned, because its sampler can be iterated only once, or it keeps its own
            iterator.
    """
    changes = changes or Changes()
    _refuse_kept_iterator(loader)
    values: dict[str, Any] = _order(loader, changes)
    if changes.dataset is not None:
        values["dataset"] = changes.dataset
    if "next_iter_state" in vars(loader):  # the position at which torchdata's StatefulDataLoader resumes
        values["next_iter_state"] = None
    if isinstance(loader, FeedLoader):
        values |= {"order": None, "watch": None}
    if changes.setting is None:
        return clone_with(loader, **values)
    values |= vars(changes.setting)
    del values["in_place"]
    if not isinstance(loader, FeedLoader) or not changes.setting.num_workers:
        del values["workers"]
    clone = clone_with(loader, **values)
    set_hand_over(clone, changes.setting)
    return clone


def set_hand_over(loader: DataLoader[Batch], setting: Setting) -> None:
    """Let the worker processes of torch's DataLoader hand batches over as a setting says. A FeedLoader stays as it
    is."""
    if isinstance(loader, FeedLoader) or not setting.num_workers:
        return
    if setting.in_place:
        put_in_slots(loader)
    else:
        take_out_of_slots(loader)


def burst_of(loader: DataLoader[Batch]) -> int:
    """Return the number of batches that arrive together: one per worker process.

    Returns 1 without workers, and with threads, which make one batch together.
    """
    return 1 if has_threads(loader) else max(1, loader.num_workers)


def has_threads(loader: object) -> bool:
    """Check for a loader whose workers are threads."""
    return isinstance(loader, FeedLoader) and loader.workers == "thread"


def background_of(loader: object) -> int:
    """Return the number of batches that the loader's background thread keeps ready; 0 if it has no such thread."""
    return loader.background if isinstance(loader, FeedLoader) else 0


def iter_is_itself(source: object) -> bool:
    """Check if ``source`` can be iterated only once: an iterator, such as a generator."""
    return hasattr(source, "__next__") and isinstance(source, Iterator)


def _order(loader: DataLoader[Batch], changes: Changes) -> dict[str, Any]:
    """Return the sampler or batch sampler of the clone, by attribute name. Empty if it stays as it is."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    source = changes.batches
    if source is None:
        source = getattr(loader, name)
    if iter_is_itself(source):
        raise LoaderError(
            f"The sampler ({type(source).__name__}) is an iterator, which can be iterated only once, so the loader "
            "cannot be tried without using it up. Use an object whose __iter__ starts again."
        )
    if changes.batches is None and not changes.endless:
        return {}
    return {name: GivenOrder(source, endless=changes.endless)}


def _refuse_kept_iterator(loader: DataLoader[Batch]) -> None:
    for name, value in vars(loader).items():
        if name not in _KNOWN and hasattr(value, "__next__") and not isinstance(value, type):
            raise LoaderError(
                f"The loader ({type(loader).__name__}) keeps an iterator in its attribute {name!r}, so it cannot be "
                "tried without taking batches from it. Use a plain DataLoader for the trials."
            )


# --- locating failures ------------------------------------------------------------------------------------------------


def locate_failure(parts: Sequence[Any], error: BaseException, received: int | None) -> DatasetError:
    """Return the error to raise for a loader's error. It names the worker and the sample, if known.

    Repeats the sampler's draws up to the failed batch, and makes its samples in this process. Names the sample that
    raises the same kind of error.

    Args:
        parts: the loaders, in their state before the pass.
        error: the loader's error.
        received: batches received before the error, in the first pass; None if unknown.
    """
    kind, text = original_error(error)
    where = []
    worker = _WORKER.search(str(error))
    if worker is not None:
        where.append(f"worker {worker.group(1)}")
    if received is not None and len(parts) == 1 and not parts[0].stream:
        sample = _failing_sample(parts[0].loader, kind, received)
        if sample is not None:
            where.append(f"sample {sample}")
    datasets = ", ".join(sorted({type(part.loader.dataset).__name__ for part in parts}))
    message = f"Loading from the dataset ({datasets}) failed"
    if where:
        message += f" in {', '.join(where)}"
    end = "" if text.endswith((".", "!", "?")) else "."
    return DatasetError(f"{message}: {kind}: {text}{end} Fix or exclude this sample.")


def _failing_sample(loader: DataLoader[Batch], kind: str, received: int) -> Any:
    """Find the index of the failed sample; None if it is not found."""
    with preserve_state(loader):
        for index in _indices_of_batch(loader, received):
            try:
                loader.dataset[index]
            except Exception as error:  # noqa: BLE001  # compared with the error to be explained
                if type(error).__name__ == kind:
                    return index
    return None


def _indices_of_batch(loader: DataLoader[Batch], number: int) -> list[Index]:
    """Draw the sample indices of a batch; empty if there is no such batch, or if drawing would use up the sampler."""
    is_batched = loader.batch_sampler is not None
    source: Any = loader.batch_sampler if is_batched else loader.sampler
    with drawing_device(loader.generator):
        # Torch draws a seed, too, before it draws from the sampler.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if iter_is_itself(source):
            return []
        for index in islice(source, number, number + 1):
            return list(index) if is_batched else [index]
    return []
