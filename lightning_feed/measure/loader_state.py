"""The state of a live iterator over a loader: batches ready, batches that wait to be pinned, and its workers.

Known iterators: torch's with worker processes, and torchdata's, which has the same private parts (checked against torch
2.6, torch 2.15 and torchdata 0.11); torch's without workers; our own; and a generator that draws from one of these. The
state of any other iterator is unknown. If a private part is missing or has changed, the figure is unknown; training
never fails.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch.utils.data import DataLoader

from lightning_feed.load.kinds import AnyIterator
from lightning_feed.measure.facts import is_instance
from lightning_feed.measure.kernel import Workers
from lightning_feed.measure.step_meter import Clock, host_clock

if TYPE_CHECKING:
    from lightning_feed.load.loader_pass import LoaderPass
    from lightning_feed.load.stage import OwnPass

T = TypeVar("T")

_HOLDERS = ("_dataloader", "base_dataloader", "dataloader", "loader")
"""Attributes under which wrappers hold a loader: Fabric's, accelerate's, and those of users."""
_DEEPEST = 8
_MOST = 64
"""Objects that are examined for one iterator."""


def loaders_in(loader: object, deeper: int = _DEEPEST) -> list[Any]:
    """The loaders that yield the batches: those in a CombinedLoader, dict, list or wrapper; else the loader itself."""
    held = _held(loader) if deeper and not isinstance(loader, DataLoader) else None
    return [loader] if held is None else [one for inner in held for one in loaders_in(inner, deeper - 1)]


def _held(loader: object) -> list[Any] | None:
    """The loaders that a wrapper draws from; None if it is not a wrapper."""
    if is_instance(loader, "lightning_feed.trials.background", "BackgroundLoader"):
        return [loader.source]  # type: ignore[attr-defined]
    # `iterables` of a CombinedLoader
    inner = loader if isinstance(loader, (dict, list, tuple)) else getattr(loader, "iterables", None)
    if isinstance(inner, dict):
        inner = list(inner.values())
    if isinstance(inner, (list, tuple)) and inner and all(hasattr(one, "__iter__") for one in inner):
        return list(inner)
    stages = getattr(loader, "pipeline", None)  # a WebLoader: a DataLoader, then what is done with its batches
    if isinstance(stages, list) and isinstance(next(iter(stages), None), DataLoader):
        return stages[:1]
    found = (getattr(loader, name, None) for name in _HOLDERS)
    return next(([one] for one in found if isinstance(one, DataLoader) or _is_wrapper(one)), None)


def _is_wrapper(value: object) -> bool:
    return isinstance(getattr(value, "pipeline", None), list) or hasattr(value, "_dataloader")


def iterator_in(iterator: object) -> Any:
    """The DataLoader iterator that another iterator, such as a generator, draws from; None for none, or several.

    Uses the garbage collector, because nothing else knows the iterator of a ``for`` loop inside a generator.
    """
    found: list[object] = []
    seen = {id(iterator)}
    ahead = [iterator]
    while ahead and len(seen) < _MOST:
        one = ahead.pop()
        if one is not iterator and is_known(one):
            found.append(one)
            continue
        fresh = {id(held): held for held in _references(one) if hasattr(type(held), "__next__")}
        ahead += [held for number, held in fresh.items() if number not in seen]
        seen |= fresh.keys()
    return found[0] if len(found) == 1 else None


def is_known(iterator: object) -> bool:
    """True for our own pass, and for the iterators of torch (with or without workers) and torchdata."""
    without_workers = getattr(iterator, "_num_workers", None) == 0 and hasattr(iterator, "_num_yielded")
    return _is_ours(iterator) or hasattr(iterator, "_task_info") or without_workers


def _is_ours(iterator: object) -> bool:
    return is_instance(iterator, "lightning_feed.load.loader_pass", "LoaderPass")


def _references(one: object) -> list[Any]:
    attributes = getattr(one, "__dict__", None)
    held = gc.get_referents(one) + (list(attributes.values()) if isinstance(attributes, dict) else [])
    # In Python 3.10 a generator's frame holds the iterator.
    return held + [deeper for frame in held if isinstance(frame, FrameType) for deeper in gc.get_referents(frame)]


# Reading a private part can fail: it is missing, of another type, closed, without a length (queues on macOS), or
# changed meanwhile by another thread.
_UNREADABLE = (AttributeError, TypeError, ValueError, OSError, NotImplementedError, RuntimeError, LookupError)


class QueueState(NamedTuple):
    """Batches of one iterator at one moment."""

    ready: int
    """Batches ready (pinned, if requested) but not returned yet. The next one in order may not be among them."""
    unpinned: int | None
    """Batches waiting for the pin thread, without the one being pinned; None without a pin thread."""
    taken: int
    """Batches returned by this iterator since its start or reset."""


class Probe:
    """Reads the state of one iterator without keeping it alive. This base class reads torch's iterator without workers.

    Args:
        iterator: an iterator that :func:`is_known`, or our own workers (``OwnPass``) inside our own pass.
        clock: measures waiting.
    """

    def __init__(self, iterator: AnyIterator, clock: Clock = host_clock) -> None:
        self._iterator = self._outer = weakref.ref(iterator)
        self._clock = clock
        self.taken = 0
        """Batches returned up to the last reading."""

    @cached_property
    def held(self) -> int | None:
        """Largest number of batches that the iterator may hold ready, read once."""
        return self._ask(self._capacity, None)

    def inside(self, wrapper: object) -> "Probe | None":
        """This probe, tied to the life of a wrapper such as a generator; None if there is no weak reference to it."""
        with suppress(TypeError):
            self._outer = weakref.ref(wrapper)
            return self
        return None

    def iterator(self) -> Any:
        """The iterator, or its wrapper; None if either no longer exists."""
        return None if self._iterator() is None else self._outer()

    def read(self) -> QueueState | None:
        """The iterator's state; None if unknown. Takes about a microsecond."""
        return self._ask(self._state, None)

    def workers(self) -> Workers:
        """The workers that make the batches, without the thread that requests them."""
        return self._ask(self._workers, Workers())

    def _ask(self, question: Callable[[Any], T], unknown: T) -> T:
        try:
            return question(self._iterator())
        except _UNREADABLE:
            return unknown

    def head_of_line_ns(self) -> float | None:
        """Nanoseconds waited so far with a later batch ready, times the share of workers that this left idle."""
        return 0

    def close(self) -> None:
        """Undo all changes to the iterator."""

    def _state(self, it: AnyIterator) -> QueueState:
        return QueueState(0, None, it._num_yielded)

    def _capacity(self, it: AnyIterator) -> int:
        return 0

    def _workers(self, it: AnyIterator) -> Workers:
        return Workers()


def probe_loader(iterator: AnyIterator, clock: Clock = host_clock) -> Probe | None:
    """A probe of ``iterator``, the result of ``iter(loader)``; None for an unknown kind."""
    if _is_ours(iterator):
        return PassProbe(iterator, clock)
    if is_known(iterator):
        return (TorchProbe if hasattr(iterator, "_task_info") else Probe)(iterator, clock)
    inner = iterator_in(iterator)
    probe = None if inner is None else probe_loader(inner, clock)
    return None if probe is None else probe.inside(iterator)


class TorchProbe(Probe):
    """Reads torch's ``_MultiProcessingDataLoaderIter``, or an iterator with the same parts.

    Torch keeps batches that arrive out of order in ``_task_info``, as tuples of two. It reads its queue, with
    ``_try_get_data``, only while the next batch in order is missing. If a later batch is ready when such a call begins,
    the call's duration, times the share of workers without tasks, counts as head-of-line time. If all workers are busy,
    the order costs nothing: they would not make more batches in any other order. At the end of the data, workers are
    idle in any case, so nothing counts then. A batch is seen only once torch has unpacked it.

    ``_try_get_data`` is replaced on this one object, unless somebody has already replaced it; that costs some
    microseconds per batch. The replacement does not keep the iterator alive, because torch ends the workers when their
    iterator is garbage.
    """

    def __init__(self, iterator: AnyIterator, clock: Clock = host_clock) -> None:
        super().__init__(iterator, clock)
        self._pins = getattr(iterator, "_pin_memory_thread", None) is not None
        self._head_of_line_ns: float | None = None
        self._failure: Exception | None = None
        with suppress(*_UNREADABLE):
            if callable(type(iterator)._try_get_data) and "_try_get_data" not in vars(iterator):
                _idle_share(iterator)
                iterator._try_get_data = self._try_get_data
                self._head_of_line_ns = 0.0

    def head_of_line_ns(self) -> float | None:
        """Head-of-line time in nanoseconds, as described above; None if ``_try_get_data`` was not replaced.

        Raises an error of ours that happened inside a call of the loader: raised in that call, it would look like the
        loader's.
        """
        if self._failure is not None:
            raise self._failure
        return self._head_of_line_ns

    def close(self) -> None:
        """Restore ``_try_get_data``."""
        it: AnyIterator = self._iterator()
        if it is not None and vars(it).get("_try_get_data") == self._try_get_data:
            del it._try_get_data

    def _try_get_data(self, *args: Any, **kwargs: Any) -> Any:
        iterator: AnyIterator = self._iterator()
        idle = 0.0
        try:
            idle = _idle_share(iterator)
        except _UNREADABLE:
            pass
        except Exception as error:  # noqa: BLE001  # raised where the figure is asked for
            self._failure = error
        began = self._clock()
        try:
            return type(iterator)._try_get_data(iterator, *args, **kwargs)
        finally:
            if idle and self._head_of_line_ns is not None:
                self._head_of_line_ns += idle * (self._clock() - began)

    def _state(self, it: AnyIterator) -> QueueState:
        unpinned = it._worker_result_queue.qsize() if self._pins else None
        return QueueState(it._data_queue.qsize() + _kept(it), unpinned, it._num_yielded)

    def _capacity(self, it: AnyIterator) -> int:
        return int(it._num_workers * it._prefetch_factor)

    def _workers(self, it: AnyIterator) -> Workers:
        return Workers(pids=tuple(worker.pid for worker in it._workers if worker.pid is not None))


def _kept(iterator: AnyIterator) -> int:
    """Batches kept because an earlier one is missing. A task is ``(worker,)``, or ``(worker, batch)`` if kept."""
    tasks = iterator._task_info
    return sum(map(len, tasks.values())) - len(tasks)


def _idle_share(iterator: AnyIterator) -> float:
    """Share of the workers with no task left until the next batch arrives, 0 to 1."""
    tasks = iterator._task_info
    count = iterator._num_workers
    if not _kept(iterator) or len(tasks) < count * iterator._prefetch_factor:
        return 0.0
    return float(1 - len({task[0] for task in tasks.values() if len(task) == 1}) / count)


class OwnProbe(Probe):
    """Reads our own workers in our own pass: they count head-of-line time themselves."""

    def head_of_line_ns(self) -> float | None:
        """The nanoseconds counted by the workers."""
        it: OwnPass | None = self._iterator()
        return None if it is None else float(it.head_of_line_ns)

    def _state(self, it: "OwnPass") -> QueueState:
        return QueueState(it.ready, None, 0)

    def _capacity(self, it: "OwnPass") -> int:
        return it.capacity

    def _workers(self, it: "OwnPass") -> Workers:
        return Workers(thread_ids=it.thread_ids)


class PassProbe(Probe):
    """Reads our own pass: worker processes, worker threads or neither, and the thread that reads ahead.

    With ``background``, batches that the thread reading ahead has not fetched yet also count as ready. A batch that the
    thread holds while its queue is full is not seen. Without workers, the thread counts as the worker. If another
    thread closes the pass, which may happen at any time, the state is unknown.
    """

    def __init__(self, iterator: "LoaderPass", clock: Clock = host_clock) -> None:
        super().__init__(iterator, clock)
        source = iterator.source
        own = is_instance(source, "lightning_feed.load.stage", "OwnPass")
        self._source: Any = OwnProbe(source) if own else probe_loader(source, clock)

    def head_of_line_ns(self) -> float | None:
        """The nanoseconds counted by the pass's workers."""
        return self._ask(lambda it: float(self._inner(it).head_of_line_ns()), None)

    def close(self) -> None:
        """Undo all changes to the iterator inside."""
        if self._source is not None:
            self._source.close()

    def _inner(self, it: "LoaderPass") -> Any:
        if it.source is None:
            raise LookupError("closed")
        return self._source

    def _state(self, it: "LoaderPass") -> QueueState:
        state = self._inner(it).read()
        background = it.background
        more = background.ready if background is not None else 0
        return QueueState(state.ready + more, state.unpinned, it.taken)

    def _capacity(self, it: "LoaderPass") -> int:
        return int(self._inner(it).held + (it.background.depth if it.background is not None else 0))

    def _workers(self, it: "LoaderPass") -> Workers:
        workers: Workers = self._inner(it).workers()
        if isinstance(self._source, OwnProbe) or workers.pids or it.background is None:
            return workers
        own = it.background.thread.native_id
        return Workers(thread_ids=(own,) if own is not None else ())
