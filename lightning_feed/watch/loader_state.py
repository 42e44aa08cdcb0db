"""How a live iterator over a loader stands: what is ready, what waits to be pinned, who works for it.

Known of torch's iterator over worker processes and torchdata's, which has the same parts (private; read in torch 2.6
and 2.15, torchdata 0.11), of the one without workers, and of our own; and of a generator or the like that draws from
one of these. Of any other iterator nothing is known. A part that is not there, or is not what it was, makes the figure
unknown, never an error in training.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader

from lightning_feed.load.background import BackgroundIterator
from lightning_feed.load.loader import LoaderPass
from lightning_feed.load.threads import OwnPass
from lightning_feed.watch.clocks import Clock, host_clock
from lightning_feed.watch.worker_time import Workers

_HOLDERS = ("_dataloader", "base_dataloader", "dataloader", "loader")
"""Attributes under which wrappers hold a loader: Fabric's, accelerate's, and those of users."""
_DEEPEST = 8
_MOST = 64
"""Objects that are looked at for one iterator."""


def loaders_in(loader: Any) -> list[Any]:
    """The loaders that batches come from: those in a CombinedLoader, dict or list, or inside a wrapper; else itself."""
    return list(_loaders(loader, _DEEPEST))


def _loaders(loader: Any, deeper: int) -> Iterator[Any]:
    held = None
    if deeper and not isinstance(loader, DataLoader):
        held = _held(loader)
    if held is None:
        yield loader
        return
    for one in held:
        yield from _loaders(one, deeper - 1)


def _held(loader: Any) -> list[Any] | None:
    """What a wrapper draws from; None for what is no wrapper."""
    inner = getattr(loader, "iterables", None)  # a CombinedLoader
    inner = loader if isinstance(loader, (dict, list, tuple)) else inner
    if isinstance(inner, dict):
        inner = list(inner.values())
    if isinstance(inner, (list, tuple)) and inner and all(hasattr(one, "__iter__") for one in inner):
        return list(inner)
    stages = getattr(loader, "pipeline", None)  # a WebLoader: a DataLoader, then what is done with its batches
    if isinstance(stages, list) and stages and isinstance(stages[0], DataLoader):
        return [stages[0]]
    found = (getattr(loader, name, None) for name in _HOLDERS)
    return next(([one] for one in found if isinstance(one, DataLoader) or _is_wrapper(one)), None)


def _is_wrapper(value: Any) -> bool:
    return isinstance(getattr(value, "pipeline", None), list) or hasattr(value, "_dataloader")


def iterator_in(iterator: Any) -> Any:
    """The iterator of a DataLoader that another one, such as a generator, draws from; None: there is none, or several.

    A generator tells nobody what its ``for`` goes through, but the garbage collector.
    """
    found: list[Any] = []
    seen: set[int] = {id(iterator)}
    ahead = [iterator]
    while ahead and len(seen) < _MOST:
        one = ahead.pop()
        if one is not iterator and is_known(one):
            found.append(one)
            continue
        for held in _references(one):
            if id(held) not in seen and hasattr(type(held), "__next__"):
                seen.add(id(held))
                ahead.append(held)
    return found[0] if len(found) == 1 else None


def is_known(iterator: Any) -> bool:
    """Whether it is a pass of ours, or torch's iterator: over workers (and torchdata's, which is alike), or without."""
    if isinstance(iterator, LoaderPass) or hasattr(iterator, "_task_info"):
        return True
    return getattr(iterator, "_num_workers", None) == 0 and hasattr(iterator, "_num_yielded")


def _references(one: Any) -> list[Any]:
    attributes = getattr(one, "__dict__", None)
    return gc.get_referents(one) + (list(attributes.values()) if isinstance(attributes, dict) else [])


# What reading a private part can meet: it is absent, another thing, closed, has no length (queues on macOS), or another
# thread changes it meanwhile.
_UNREADABLE = (AttributeError, TypeError, ValueError, OSError, NotImplementedError, RuntimeError, LookupError)


class QueueState(NamedTuple):
    """Batches of one iterator at one time."""

    ready: int
    """Made, and pinned where they are to be, but not handed out. In any order, so the next may not be among them."""
    unpinned: int | None
    """Made, and waiting for the pin thread; the one that it is at is not seen. None: there is no pin thread."""
    taken: int
    """Handed out by this iterator, or since it was last started over."""


class Probe(Protocol):
    """Looks at one iterator, without keeping it alive."""

    def iterator(self) -> Any:
        """The iterator, or None when it is gone."""

    def read(self) -> QueueState | None:
        """How it stands; None where that cannot be told. Takes about a microsecond."""

    def capacity(self) -> int | None:
        """Batches that it may hold ready."""

    def head_of_line_ns(self) -> float | None:
        """Nanoseconds it has waited, so far, with a later batch ready, times the share of workers idle for that."""

    def workers(self) -> Workers:
        """Who makes its batches, beside the thread that asks for them."""

    def close(self) -> None:
        """Leave the iterator as it was."""


def probe_loader(iterator: Any, clock: Clock = host_clock) -> Probe | None:
    """What can look at ``iterator``; None for a kind that is not known.

    Args:
        iterator: what ``iter(loader)`` gave.
        clock: by which waiting is measured.
    """
    if not is_known(iterator):
        inner = iterator_in(iterator)
        probe = None if inner is None else probe_loader(inner, clock)
        return None if probe is None else WrappedProbe.around(probe, iterator)
    if isinstance(iterator, LoaderPass):
        return PassProbe(iterator, clock)
    if hasattr(iterator, "_task_info"):
        return TorchProbe(iterator, clock)
    return DirectProbe(iterator)


class WrappedProbe:
    """Looks at the iterator of a DataLoader that a generator or another wrapper draws from."""

    def __init__(self, inner: Probe, wrapper: "weakref.ref[Any]") -> None:
        self._inner, self._wrapper = inner, wrapper
        self.read, self.capacity, self.workers = inner.read, inner.capacity, inner.workers
        self.head_of_line_ns, self.close = inner.head_of_line_ns, inner.close

    @classmethod
    def around(cls, inner: Probe, wrapper: Any) -> "WrappedProbe | None":
        """One for ``wrapper``; None where nobody can tell when that is gone."""
        try:
            return cls(inner, weakref.ref(wrapper))
        except TypeError:
            return None

    def iterator(self) -> Any:
        """The wrapper; None once it is gone, or what it draws from."""
        return None if self._inner.iterator() is None else self._wrapper()


class TorchProbe:
    """Looks at torch's ``_MultiProcessingDataLoaderIter``, or at one with the same parts.

    Batches that arrive out of order are kept in ``_task_info``, as tuples of two. Torch draws from its queue, by
    ``_try_get_data``, only while the next batch in order is not there. Time inside of it counts as head of line where a
    later batch was kept when it began, as far as workers had nothing to do for it: times the share of workers whose
    tasks are all done. Where all are busy the order costs nothing: workers alike that are half a batch out of phase
    have a later batch ready half of the time, and would make no more in any order. At the end of the data workers have
    nothing to do in any case, so nothing counts there. A batch that came is seen when torch, which waits for it, has
    unpacked it. ``_try_get_data`` is replaced on this one object, which costs some microseconds for each batch.
    """

    def __init__(self, iterator: Any, clock: Clock = host_clock) -> None:
        self._iterator = weakref.ref(iterator)
        self._pins = getattr(iterator, "_pin_memory_thread", None) is not None
        self._tap = _Tap.put(iterator, clock)

    def iterator(self) -> Any:
        """The iterator, or None when it is gone."""
        return self._iterator()

    def read(self) -> QueueState | None:
        """How it stands."""
        it: Any = self._iterator()
        try:
            ready = it._data_queue.qsize() + _kept(it)
            unpinned = it._worker_result_queue.qsize() if self._pins else None
            return QueueState(ready, unpinned, it._num_yielded)
        except _UNREADABLE:
            return None

    def capacity(self) -> int | None:
        """Batches asked for ahead."""
        it: Any = self._iterator()
        try:
            return int(it._num_workers * it._prefetch_factor)
        except _UNREADABLE:
            return None

    def head_of_line_ns(self) -> float | None:
        """Time inside ``_try_get_data`` that began with a later batch at hand, as above."""
        return self._tap.head_of_line_ns if self._tap is not None else None

    def workers(self) -> Workers:
        """The worker processes."""
        it: Any = self._iterator()
        try:
            return Workers(pids=tuple(worker.pid for worker in it._workers if worker.pid is not None))
        except _UNREADABLE:
            return Workers()

    def close(self) -> None:
        """Put ``_try_get_data`` back."""
        it: Any = self._iterator()
        if it is not None and vars(it).get("_try_get_data") is self._tap is not None:
            del it._try_get_data


class _Tap:
    """Stands in for ``_try_get_data`` of one iterator. It must not hold it: torch ends workers when that is garbage."""

    def __init__(self, iterator: Any, clock: Clock) -> None:
        self._iterator, self._clock = weakref.ref(iterator), clock
        self._head_of_line_ns = 0.0
        self._failure: Exception | None = None

    @property
    def head_of_line_ns(self) -> float:
        """As :meth:`TorchProbe.head_of_line_ns`. What failed in a call of the loader is raised here."""
        if self._failure is not None:
            raise self._failure
        return self._head_of_line_ns

    @classmethod
    def put(cls, iterator: Any, clock: Clock) -> "_Tap | None":
        """Put one into ``iterator``; None where there is no such method, or somebody has replaced it already."""
        try:
            if not callable(type(iterator)._try_get_data) or "_try_get_data" in vars(iterator):
                return None
            _idle_share(iterator)
            tap = iterator._try_get_data = cls(iterator, clock)
        except _UNREADABLE:
            return None
        return tap

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        iterator: Any = self._iterator()
        try:
            idle = _idle_share(iterator)
        except _UNREADABLE:
            idle = 0.0
        except Exception as error:  # noqa: BLE001  # here it would be an error of the loader, maybe in another thread
            idle, self._failure = 0.0, error
        began = self._clock()
        try:
            return type(iterator)._try_get_data(iterator, *args, **kwargs)
        finally:
            if idle:
                self._head_of_line_ns += idle * (self._clock() - began)


def _kept(iterator: Any) -> int:
    """Batches that came before those in front of them. Tasks are ``(worker,)``, and ``(worker, batch)`` once kept."""
    tasks = iterator._task_info
    return sum(map(len, tasks.values())) - len(tasks)


def _idle_share(iterator: Any) -> float:
    """Of the workers, those that have done all that they may before the next batch comes, 0 to 1."""
    tasks, count = iterator._task_info, iterator._num_workers
    if not _kept(iterator) or len(tasks) < count * iterator._prefetch_factor:
        return 0.0
    return float(1 - len({task[0] for task in tasks.values() if len(task) == 1}) / count)


class DirectProbe:
    """Looks at torch's iterator without workers: nothing is ever ready, and nobody works for it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)

    def iterator(self) -> Any:
        """The iterator, or None when it is gone."""
        return self._iterator()

    def read(self) -> QueueState | None:
        """How it stands."""
        it: Any = self._iterator()
        taken = getattr(it, "_num_yielded", None)
        return QueueState(0, None, taken) if isinstance(taken, int) else None

    def capacity(self) -> int | None:
        """None are held."""
        return 0

    def head_of_line_ns(self) -> float | None:
        """There are no later batches."""
        return 0

    def workers(self) -> Workers:
        """Nobody."""
        return Workers()

    def close(self) -> None:
        """Nothing was changed."""


class PassProbe:
    """Looks at our own pass: worker processes, worker threads or neither, and the thread that reads ahead.

    With ``background``, batches ready for it count as ready: they are made. The one that the thread has in its hands
    while its queue is full is not seen. Without workers, that thread is the worker.
    """

    def __init__(self, iterator: LoaderPass, clock: Clock = host_clock) -> None:
        self._iterator = weakref.ref(iterator)
        source = iterator.source
        self._source = None if isinstance(source, OwnPass) else probe_loader(source, clock)

    def iterator(self) -> Any:
        """The iterator, or None when it is gone."""
        return self._iterator()

    def _parts(self) -> tuple[LoaderPass | None, OwnPass | None, BackgroundIterator | None]:
        batches = self._iterator()
        if batches is None:
            return None, None, None
        source = batches.source  # another thread may close the pass at any time
        return batches, source if isinstance(source, OwnPass) else None, batches.background

    def read(self) -> QueueState | None:
        """How it stands."""
        batches, threads, background = self._parts()
        if batches is None:
            return None
        if threads is not None:
            ready, unpinned = threads.ready, None
        else:
            state = self._source.read() if self._source is not None else None
            if state is None:
                return None
            ready, unpinned = state.ready, state.unpinned
        if background is not None:
            ready += background.ready
        return QueueState(ready, unpinned, batches.taken)

    def capacity(self) -> int | None:
        """Batches asked for ahead, and those of the background queue."""
        _, threads, background = self._parts()
        if threads is not None:
            held: int | None = threads.capacity
        else:
            held = self._source.capacity() if self._source is not None else None
        return held + background.depth if held is not None and background is not None else held

    def head_of_line_ns(self) -> float | None:
        """Of worker threads as they count it, else of torch's iterator."""
        _, threads, _ = self._parts()
        if threads is not None:
            return threads.head_of_line_ns
        return self._source.head_of_line_ns() if self._source is not None else None

    def workers(self) -> Workers:
        """Worker processes or threads; without any, the background thread."""
        _, threads, background = self._parts()
        workers = self._source.workers() if self._source is not None else Workers()
        if threads is not None:
            return Workers(thread_ids=threads.thread_ids)
        if not workers.pids and background is not None and background.thread.native_id is not None:
            return Workers(thread_ids=(background.thread.native_id,))
        return workers

    def close(self) -> None:
        """Leave the iterator underneath as it was."""
        if self._source is not None:
            self._source.close()
