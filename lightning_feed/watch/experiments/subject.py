"""What the experiments on data are made on: the loaders of a training, each taken as it is configured."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, FeedError, LoaderError
from lightning_feed.load.blame import blamed
from lightning_feed.load.machine import Machine
from lightning_feed.load.recommend import MEMORY_SHARE, SHM_SHARE, TORCH_PREFETCH
from lightning_feed.load.rounds import LoaderRate, RoundLimits, time_loader
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import Changes, burst_of, with_changes
from lightning_feed.load.watched import watched
from lightning_feed.load.worker_end import end_pass


@dataclass(frozen=True)
class Part:
    """One loader."""

    name: str
    """Its place among several: ``real``, ``0``; empty for a single one."""
    loader: DataLoader[Any]

    @property
    def stream(self) -> bool:
        """Whether its data set is iterable, not map-style."""
        return isinstance(self.loader.dataset, IterableDataset)

    def first_batches(self, count: int) -> list[Any]:
        """What its sampler gives for the first batches of a pass: lists of indices, or indices where the loader does
        not batch. Fewer where the pass is shorter."""
        with untouched(self.loader):
            variant = with_changes(self.loader)
            source = variant.batch_sampler if variant.batch_sampler is not None else variant.sampler
            return [batch for batch, _ in zip(source, range(count), strict=False)]

    def first_samples(self, count: int) -> list[Any]:
        """Indices of the first samples of a pass."""
        if self.loader.batch_sampler is None:
            return self.first_batches(count)
        indices: list[Any] = []
        per_batch = max(1, self.loader.batch_size or 1)
        for batch in self.first_batches(-(-count // per_batch)):
            indices += batch
        return indices[:count]

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        if self.loader.batch_size is not None:
            return self.loader.batch_size
        if self.stream or self.loader.batch_sampler is None:
            return 1
        batches = self.first_batches(1)
        return len(batches[0]) if batches else 1


def parts_of(loader: Any) -> tuple[Part, ...]:
    """The DataLoaders in what a ``train_dataloader`` returned: one, a dict or list of them, or a CombinedLoader.

    Raises:
        LoaderError: when there is anything else in it.
    """
    found = list(_found(loader, ""))
    if not found:
        raise LoaderError("There is no loader in it.")
    return tuple(found)


def _found(loader: Any, place: str) -> Iterator[Part]:
    inner = getattr(loader, "iterables", None)
    stages = getattr(loader, "pipeline", None)
    if isinstance(loader, DataLoader):
        yield Part(place, loader)
    elif isinstance(stages, list) and len(stages) == 1 and isinstance(stages[0], DataLoader):
        yield Part(place, stages[0])  # a WebLoader that gives the batches as they come
    elif inner is not None:
        yield from _found(inner, place)
    elif isinstance(loader, dict):
        for key, one in loader.items():
            yield from _found(one, f"{place}.{key}" if place else str(key))
    elif isinstance(loader, (list, tuple)) and loader and all(_is_loader(one) for one in loader):
        for number, one in enumerate(loader):
            yield from _found(one, f"{place}.{number}" if place else str(number))
    else:
        raise LoaderError(f"a {type(loader).__name__} is no torch DataLoader, so it cannot be built anew with changes")


def _is_loader(value: Any) -> bool:
    known = isinstance(value, (DataLoader, dict, list, tuple))
    return known or hasattr(value, "iterables") or isinstance(getattr(value, "pipeline", None), list)


class Together(Iterator[Any]):
    """Passes side by side: a batch of each is one batch. Keeps the first one, and tells of every one.

    Attributes:
        iterators: of the loaders.
        first: a batch of each.
        came: how many batches came.
    """

    def __init__(self, iterators: list[Iterator[Any]], on_batch: Callable[["Together"], object] | None = None) -> None:
        self.iterators = iterators
        self.first: list[Any] | None = None
        self.came = 0
        self._on_batch = on_batch

    def __next__(self) -> list[Any]:
        batch = [next(one) for one in self.iterators]
        self.came += 1
        if self.first is None:
            self.first = batch
        if self._on_batch is not None:
            self._on_batch(self)
        return batch

    def close(self) -> None:
        """End all of them."""
        for one in self.iterators:
            end_pass(one)


def rate_of(
    parts: Sequence[Part],
    change: Callable[[Part], Changes],
    limits: RoundLimits,
    *,
    prepare: Callable[[], object] | None = None,
    on_batch: Callable[[Together], object] | None = None,
) -> tuple[LoaderRate, list[Any]]:
    """Drain the loaders together, each with its changes; (rate, first batch of each).

    The user's loaders are as before afterwards, whatever happens.

    Args:
        parts: the loaders.
        change: what to change in each.
        limits: how long.
        prepare: called before each pass, its time not counted.
        on_batch: called after each batch with all passes.

    Raises:
        DatasetError: when loading fails, with the worker and the sample as far as they can be told.
        LoaderError: when a loader hangs, is empty or cannot be built anew.
    """
    passes: list[Together] = []
    try:
        with untouched([part.loader for part in parts]), warnings.catch_warnings():
            # As with_changes does: torch warns once more when a pass begins. The user's own run has told both.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
            variants = [with_changes(part.loader, change(part)) for part in parts]

            def begin() -> Together:
                passes.append(Together([iter(variant) for variant in variants], on_batch))
                return passes[-1]

            burst = max(burst_of(variant) for variant in variants)
            rate = time_loader(begin, burst=burst, limits=limits, prepare=prepare)
    except FeedError as error:
        if isinstance(error, DatasetError):
            raise blamed(parts, error, passes[-1].came if len(passes) == 1 else None) from error
        raise
    except Exception as error:
        raise blamed(parts, error, passes[-1].came if len(passes) == 1 else None) from error
    return rate, passes[0].first or []


def record_sample(part: Part, max_s: float = 60.0) -> Any:
    """One sample of the part, made in this process, as a worker would.

    Raises:
        DatasetError: when it cannot be made, or there is none.
        LoaderError: when it takes longer than ``max_s``.
    """
    dataset = part.loader.dataset
    with untouched(part.loader):
        if part.stream:
            index: Any = "the first"
        else:
            indices = part.first_samples(1)
            if not indices:
                raise DatasetError(
                    "The sampler gives no batch at all. Check the length of the data set, and drop_last."
                )
            index = indices[0]
        try:
            return watched(
                lambda _: next(iter(dataset)) if part.stream else dataset[index],
                silent_s=max_s,
                unblock=lambda: False,
                what=lambda seconds: (
                    f"Sample {index} of the data set ({type(dataset).__name__}) was not there after "
                    f"{seconds:g} s. See what it waits for: a lock, a connection, a file system that does not answer."
                ),
            )
        except StopIteration:
            raise DatasetError("The iterable data set gives nothing at all. Check where it reads from.") from None
        except FeedError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).rstrip('.')}"
            if "thread" in str(error):  # of sqlite3 and others that are bound to the thread that made them
                raise DatasetError(
                    f"The data set ({type(dataset).__name__}) works only in the thread that made it ({why}). "
                    "Experiments load in a thread of their own, so that one that hangs can be given up. Your fit is "
                    "not concerned. To experiment, open what is bound to a thread in each thread that uses it."
                ) from error
            raise DatasetError(
                f"The data set ({type(dataset).__name__}) cannot give sample {index}: {why}. Mend it, or leave the "
                "sample out."
            ) from error


def too_large(
    parts: Sequence[Part], sample_bytes: Sequence[int], machine: Machine, num_workers: int | None = None
) -> str | None:
    """Why the loaders would take too much memory with so many workers; None when they would not.

    Args:
        parts: the loaders.
        sample_bytes: of a sample of each.
        machine: its limits.
        num_workers: instead of those that are configured.
    """
    shared = private = 0
    for part, size in zip(parts, sample_bytes, strict=True):
        workers = part.loader.num_workers if num_workers is None else num_workers
        prefetch = part.loader.prefetch_factor or TORCH_PREFETCH
        batches = (workers * prefetch if workers else 0) + getattr(part.loader, "background", 0) + 1
        taken = batches * part.batch_size * size
        private += taken
        if workers and getattr(part.loader, "workers", "process") == "process":
            shared += taken
    memory, shm = machine.available_memory_bytes, machine.free_shm_bytes
    if shm is not None and shared > SHM_SHARE * shm:
        return f"its queue would take {_mib(shared)} of the {_mib(shm)} that are free in /dev/shm"
    if memory is not None and private > MEMORY_SHARE * memory:
        return f"its queue would take {_mib(private)} of the {_mib(memory)} of free memory"
    return None


def _mib(size: float) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
