"""Positions of workers in an iterable dataset, sent with each batch, so that a pass can be resumed.

The path of a sample in a worker: the dataset's iterator -> ``ResumableDataset`` counts it -> torch gathers a batch ->
``StampingCollate`` collates it and adds a stamp, the count and the dataset's state -> the main process removes the
stamp (``IterablePass.hand_out``). A stamp holds its worker's position when the batch was drawn, however far the worker
has read ahead since. The contract for datasets with state is that of torchdata's StatefulDataLoader (read in 0.11).
"""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lightning_feed.load.kinds import AnyDataset, AnyIterator, AnyLoader, Batch, Sample, SavedState, State
from lightning_feed.load.order import EpochOrder, Pass
from lightning_feed.load.processes import TorchBatches


class Stamped(NamedTuple):
    """A batch, and its worker's position after that batch.

    A named tuple, because torch pins each of its members: the batch is pinned as without the stamp.
    """

    batch: Batch
    worker: int
    drawn: int
    """Samples drawn by this worker in this pass so far."""
    ended: bool
    """True for the worker's last batch: the dataset had no more samples."""
    place: bytes | None
    """States of dataset and iterator, pickled at once because the objects keep changing. None: no state."""
    lost: bool
    """True if there is a state that cannot be pickled."""
    skip: bool
    """True for a placeholder that keeps the worker's turn in the first round of a resumed pass. Never yielded."""


_beginnings: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
"""Initial states of Hugging Face datasets into which a state was loaded. Without them, every later pass would begin at
the loaded state, until ``set_epoch`` (datasets 5.2.0, iterable_dataset.py)."""
_MARKER = object()
"""Marks a skipped turn of a worker. Not a sample."""


def _has_state(thing: object) -> bool:
    """Check that a dataset, or its iterator, has a state to save."""
    tell = getattr(thing, "state_dict", None)
    if not callable(tell) or not callable(getattr(thing, "load_state_dict", None)):
        return False
    try:
        with suppress(ValueError):  # compiled: its arguments are not known
            inspect.signature(tell).bind()
    except TypeError:  # LitData and MosaicML require arguments from their own loader
        return False
    return True


class ResumableDataset(IterableDataset[Sample]):
    """A wrapper of the user's iterable dataset that counts samples, and resumes from a saved position when first
    iterated.

    Attributes are read from and set on the user's dataset, because a ``worker_init_fn`` works on
    ``get_worker_info().dataset``.

    Args:
        dataset: the user's dataset.
        batch_size: samples per batch. None if torch does not batch.
        workers: saved position by worker number, as in :meth:`IterablePass.state`. Empty: start from the beginning.
        next_worker: the worker with the next turn. Workers before it skip their first turn.
    """

    def __init__(
        self, dataset: AnyDataset, *, batch_size: int | None, workers: Mapping[int, SavedState], next_worker: int
    ) -> None:
        own = {"user": dataset, "markers": batch_size or 1, "workers": dict(workers), "next_worker": next_worker}
        object.__setattr__(self, "_feed", {**own, "draws": None})

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        feed = self._feed
        saved = feed["workers"].pop(worker, None)  # used once: persistent workers iterate again for the next epoch
        markers = feed["markers"] if worker < feed["next_worker"] else 0
        feed["next_worker"] = 0
        feed["draws"] = _Draws(feed["user"], worker, saved, markers)
        return feed["draws"]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name == "_feed" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # while being unpickled there is nothing to forward to
        return getattr(self._feed["user"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._feed["user"], name, value)


class _Draws:
    """The iterator over a user's dataset in one worker."""

    def __init__(self, dataset: AnyDataset, worker: int, saved: SavedState | None, markers: int) -> None:
        self.worker = worker
        self.markers = markers
        self.drawn: int = saved["drawn"] if saved is not None else 0
        self.ended = False
        self.iterator = iterator = _open(dataset, saved)
        self._stateful: dict[str, Any] = {"iterator": iterator} if _has_state(iterator) else {}
        if _has_state(dataset) and iterator is not dataset:
            self._stateful["dataset"] = dataset

    def __iter__(self) -> "_Draws":
        return self

    def __next__(self) -> Batch:
        if self.markers > 0:
            self.markers -= 1
            return _MARKER
        try:
            sample = next(self.iterator)
        except StopIteration:
            self.ended = True
            raise
        self.drawn += 1
        return sample

    def stamp(self) -> Stamped:
        """Return the worker's current position, without a batch."""
        place = None
        lost = False
        if self._stateful:
            states = {name: thing.state_dict() for name, thing in self._stateful.items()}
            try:
                place = pickle.dumps(states)
            except (pickle.PicklingError, TypeError, AttributeError):
                lost = True  # the run goes on; its checkpoint cannot be resumed exactly
        return Stamped(None, self.worker, self.drawn, self.ended, place, lost, skip=False)


def _open(dataset: AnyDataset, saved: SavedState | None) -> Iterator[Sample]:
    """Open the dataset's iterator at the saved position. Loads states in torchdata's order: dataset, ``iter``,
    iterator. Without any state, samples are drawn and discarded."""
    saved = saved or {"dataset": None, "iterator": None, "ended": False, "drawn": 0}
    of_dataset = saved["dataset"] is not None and _has_state(dataset)
    of_hugging_face = type(dataset).__module__.partition(".")[0] == "datasets"
    if of_dataset:
        if of_hugging_face:
            _beginnings.setdefault(dataset, dataset.state_dict())
        dataset.load_state_dict(saved["dataset"])
    elif of_hugging_face and dataset in _beginnings:
        dataset.load_state_dict(_beginnings[dataset])
    if saved["ended"]:
        return iter(())  # its state may already belong to the next pass
    iterator: AnyIterator = iter(dataset)
    if saved["iterator"] is not None and _has_state(iterator):
        iterator.load_state_dict(saved["iterator"])
    elif not of_dataset:
        next(islice(iterator, saved["drawn"], saved["drawn"]), None)
    return iterator  # type: ignore[no-any-return]


class StampingCollate:
    """Collates with the user's function and adds a stamp. Runs in the process that draws the samples.

    Args:
        collate: the loader's collate function.
        dataset: the same object that torch iterates. It stays the same in a worker: fork shares it, and spawn pickles
            all arguments of a worker together.
    """

    def __init__(self, collate: Callable[[Sample], Batch], dataset: ResumableDataset) -> None:
        self.collate = collate
        self.dataset = dataset

    def __call__(self, samples: Sample) -> Stamped:
        """Collate and stamp ``samples``: a list, or one sample if torch does not batch."""
        draws: _Draws = self.dataset._feed["draws"]
        first = samples[0] if type(samples) is list and samples else samples
        if first is _MARKER:
            return Stamped(None, draws.worker, draws.drawn, ended=False, place=None, lost=False, skip=True)
        stamp = draws.stamp()  # before collating: a collate function may keep or change the samples
        return stamp._replace(batch=self.collate(samples))


class IterablePass(Pass):
    """One pass over an iterable dataset: the number of batches, and each worker's position after its last batch.

    Args:
        order: see :class:`Pass`.
        num_workers: number of workers of the loader.
        **begun: see :class:`Pass`.
    """

    def __init__(self, order: EpochOrder | None, *, num_workers: int, **begun: Any) -> None:
        super().__init__(order, **begun)
        self.num_workers = num_workers
        self.base_state: Tensor | None = None
        """State of the user's ``DataLoader(generator=...)`` at the start, from which the workers' seeds are drawn."""
        start: SavedState = self.origin or {"next_worker": 0, "workers": {}}
        self.next_worker: int = start["next_worker"]
        self._saved: dict[int, SavedState] = dict(start["workers"])
        self._stamps: dict[int, Stamped] = {}

    def dataset(self, dataset: AnyDataset, batch_size: int | None) -> ResumableDataset:
        """The user's dataset in the form sent to the workers."""
        return ResumableDataset(
            dataset, batch_size=batch_size, workers=copy.deepcopy(self._saved), next_worker=self.next_worker
        )

    def hand_out(self, item: Batch) -> Batch:
        """Count a yielded batch, and remove its stamp."""
        self.batches += 1
        if not isinstance(item, Stamped):  # a DataPipe: torch must see it unwrapped
            self.exact = False
            return item
        self.exact = self.exact and not item.lost
        self.next_worker = (item.worker + 1) % max(1, self.num_workers)
        self._stamps[item.worker] = item._replace(batch=None)  # do not keep the batch alive
        return item.batch

    def state(self) -> State:
        """Return the positions of the workers whose batches were trained. Other workers start from the beginning."""
        workers = copy.deepcopy(self._saved)
        for worker, stamp in self._stamps.items():
            states = {} if stamp.place is None else pickle.loads(stamp.place)
            workers[worker] = {
                "drawn": stamp.drawn,
                "ended": stamp.ended,
                "iterator": states.get("iterator"),
                "dataset": states.get("dataset"),
            }
        return {
            "num_workers": self.num_workers,
            "workers": workers,
            "next_worker": self.next_worker,
            "base_state": self.base_state,
            **self.facts,
        }


class StreamBatches(TorchBatches):
    """Batches of an iterable dataset, without placeholders for a worker's turn."""

    def __next__(self) -> Batch:
        item = super().__next__()
        while isinstance(item, Stamped) and item.skip:
            item = super().__next__()
        return item


# --- streams that divide themselves among workers ---------------------------------------------------------------------

_SHARDING_PACKAGES = ("litdata", "streaming")
"""Packages whose streams divide themselves among workers."""


def divides_among_workers(loader: AnyLoader) -> bool | None:
    """Check that a loader's stream divides itself among workers. None if the dataset is not a stream.

    True if the loader already has several workers, the dataset's code calls ``get_worker_info``, or the dataset comes
    from a package whose streams divide themselves.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset):
        return None
    return (getattr(loader, "num_workers", None) or 0) > 1 or _divides_itself(dataset)


def _divides_itself(dataset: AnyDataset) -> bool:
    package = type(dataset).__module__.partition(".")[0]
    if package == "datasets":  # Hugging Face's: at most one worker per shard gets samples
        return int(getattr(dataset, "num_shards", getattr(dataset, "n_shards", 1))) > 1
    if package in _SHARDING_PACKAGES:
        return True
    stages = getattr(dataset, "pipeline", None)  # WebDataset's
    if isinstance(stages, list):
        return any(getattr(stage, "__name__", "") == "split_by_worker" for stage in stages)
    inside = [value for value in vars(dataset).values() if isinstance(value, IterableDataset)]
    return any(_asks(code) for one in (dataset, *inside) for _, code in methods_of(one))


def methods_of(dataset: AnyDataset) -> Iterator[tuple[str, CodeType]]:
    """Return all methods by name, except those defined by torch."""
    for kind in type(dataset).__mro__:
        if kind.__module__.partition(".")[0] not in ("torch", "typing", "builtins"):
            yield from ((name, value.__code__) for name, value in vars(kind).items() if hasattr(value, "__code__"))


def _asks(code: CodeType) -> bool:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return "get_worker_info" in code.co_names or any(_asks(one) for one in inner)
