"""Other workers for a loader that lives on: its next pass has them, and the order of its samples stays.

``num_workers`` and ``prefetch_factor`` may be set on a DataLoader, ``persistent_workers`` may not (torch 2.6 and 2.15,
``DataLoader.__setattr__``). They are read when a pass begins; of persistent workers, when they start.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.load.rounds import RoundLimits, time_loader
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import Changes, with_changes


def why_fixed(loader: Any) -> str:
    """Why the workers of a loader cannot be changed between epochs; empty where they can."""
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"the training loader ({name}) is no DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable: what each worker gives depends on how many there are"
    known = getattr(type(loader), "__iter__", None) in (DataLoader.__iter__, FeedLoader.__iter__)
    if not known or getattr(type(loader), "_get_iterator", None) is not getattr(DataLoader, "_get_iterator", None):
        return f"the training loader ({name}) iterates in its own way"
    if getattr(loader, "workers", "process") == "thread" and not loader.num_workers:
        return "a loader made for threads, without any, cannot be given some"
    return ""


def why_no_workers(loader: DataLoader[Any], *, most_s: float = 60.0) -> str:
    """Why a loader that has no worker processes cannot have them: one is tried. Empty where it can.

    A data set may hold what no other process can use: an open file, a CUDA tensor, a lambda.

    Args:
        loader: is not iterated; its data set is sent to a process, or forked with it.
        most_s: that it may take until a batch comes. Workers that are spawned import everything first.
    """
    limits = RoundLimits(min_s=0, min_rounds=1, warm_rounds=0, max_s=most_s)
    with untouched(loader), warnings.catch_warnings():
        # Python's, of a fork beside threads; the run will say it itself, should it fork.
        warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
        tried = with_changes(loader, Changes(num_workers=1, prefetch_factor=1, persistent_workers=False))
        try:
            time_loader(lambda: iter(tried), burst=1, limits=limits)
        except Exception as error:  # noqa: BLE001  # whatever it is, it would end the training
            return f"a worker process cannot load from the data set ({type(error).__name__}: {error})"
    return ""


def resettle(loader: DataLoader[Any], num_workers: int, prefetch_factor: int | None) -> Callable[[], None]:
    """Give a loader other workers from its next pass on. Those it keeps between passes are ended.

    Without the change, torch would not draw a seed for persistent workers, which are there already. For new ones it
    draws one, from ``loader.generator`` or from the global generator, and what is drawn from that afterwards, samples'
    order included, would be other than without the change. So it draws from a generator of ours, this once.

    Args:
        loader: of which :func:`why_fixed` has nothing to say.
        num_workers: 1 or more, or as many as it has.
        prefetch_factor: batches per worker.

    Returns:
        To be called when the next pass has begun: puts the loader's own generator back.
    """
    kept = loader.persistent_workers and loader.num_workers > 0 and getattr(loader, "_iterator", None) is not None
    if isinstance(loader, FeedLoader):
        loader.close()  # a thread that reads ahead would go on with the old workers
    if kept:
        _end_kept(loader)
    if not isinstance(loader, FeedLoader) or loader.workers != "thread":
        # More workers than CPUs is what was decided, because they wait for something else.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
    loader.num_workers = num_workers
    loader.prefetch_factor = prefetch_factor
    if not kept:
        return lambda: None
    own = loader.generator
    loader.generator = torch.Generator()
    loader.generator.manual_seed(num_workers)

    def put_back() -> None:
        loader.generator = own

    return put_back


def _end_kept(loader: DataLoader[Any]) -> None:
    """End the workers that a loader keeps: torch's, or our threads."""
    iterator: Any = loader._iterator
    end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "close", None)
    if end is not None:
        end()
    loader._iterator = None
