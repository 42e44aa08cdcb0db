"""The DataLoaders that a FeedLoader iterates: one for each pass, around the same dataset."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pickle import PicklingError
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_feed.load.kinds import Batch, State
from lightning_feed.load.order import PassGenerator, drawing_device
from lightning_feed.load.position import IndexSource
from lightning_feed.load.worker import refuse_unsendable

_OURS = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator"}
# All other arguments of the installed torch's DataLoader are passed to the inner loader unchanged.
_PASSED_ON = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in _OURS]


def map_loader(loader: DataLoader[Batch], index: IndexSource) -> DataLoader[Batch]:
    """Return a DataLoader of the same map-style dataset, with the indices of a pass.

    Args:
        loader: the FeedLoader.
        index: source of the indices.
    """
    options = _passed_on(loader) | {"collate_fn": loader.collate_fn, "generator": loader.generator}
    if loader.batch_sampler is not None:
        return DataLoader(loader.dataset, batch_sampler=index, **options)
    return DataLoader(loader.dataset, batch_size=None, sampler=index, **options)


def stream_loader(loader: DataLoader[Batch], seed: int | None) -> DataLoader[Batch]:
    """Return a DataLoader of the same iterable dataset.

    Args:
        loader: the FeedLoader.
        seed: seed of the pass, for a loader without a generator; None to draw from torch's global generator.
    """
    generator = loader.generator
    if generator is None and seed is not None:
        # Torch draws the workers' base seed from this generator, so a dataset that shuffles by the base seed repeats
        # the order of an epoch.
        generator = PassGenerator().manual_seed(seed)
    options = _passed_on(loader) | {"collate_fn": loader.collate_fn, "generator": generator}
    return DataLoader(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **options)


def iterator_of(
    loader: DataLoader[Batch], inner: DataLoader[Batch], workers_start: Callable[[DataLoader[Batch]], None]
) -> Iterator[Batch]:
    """Return the inner loader's iterator, with the FeedLoader's persistent workers if they are alive.

    Args:
        loader: the FeedLoader, which keeps the workers.
        inner: result of :func:`map_loader` or :func:`stream_loader`.
        workers_start: called with the inner loader if its workers are about to start.
    """
    if not getattr(loader._iterator, "_shutdown", False):  # if True, the workers ended in a failed pass, or just now
        inner._iterator = loader._iterator
    if inner._iterator is None and inner.num_workers:
        workers_start(inner)
    try:
        with _as_default(drawing_device(inner.generator)):
            iterator = iter(inner)
    except (TypeError, AttributeError, PicklingError):
        context: Any = inner.multiprocessing_context or torch.multiprocessing
        refuse_unsendable(loader, "This loader", context.get_start_method())
        raise
    # Kept only in the FeedLoader, where Lightning looks for it to end the workers, and not in the inner loader too.
    loader._iterator = inner._iterator
    inner._iterator = None
    return iterator


def _passed_on(loader: DataLoader[Batch]) -> State:
    return {name: getattr(loader, name) for name in _PASSED_ON if hasattr(loader, name)}


def _as_default(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is the default device.

    Does nothing if ``device`` is the default already: a device context slows each call of torch, and forked workers
    inherit it.
    """
    # Read from a tensor: torch 2.6's get_default_device() raises after set_default_device(None).
    if torch.empty(0).device == device:
        return nullcontext()
    return device
