"""The state of a live iterator over a loader: batches ready, batches that wait to be pinned, and its workers.

Known iterators: torch's with worker processes, and torchdata's, which has the same private parts (checked against torch
2.6, torch 2.15 and torchdata 0.11); torch's without workers; and this package's ``LoaderPass``. The state of any other
iterator is unknown. If a private part is missing or has changed, the figure is unknown; training never fails.
"""

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lightning_feed.load.kinds import AnyIterator
from lightning_feed.load.loader_tree import idle_share, kept_batches
from lightning_feed.measure.facts import is_instance
from lightning_feed.measure.kernel import Workers

if TYPE_CHECKING:
    from lightning_feed.load.loader_pass import LoaderPass
    from lightning_feed.load.stage import OwnPass

T = TypeVar("T")


def _is_ours(iterator: object) -> bool:
    return is_instance(iterator, "lightning_feed.load.loader_pass", "LoaderPass")


# Reading a private part can fail, if the part is missing, of another type, closed, without a length (queues on macOS),
# or changed by another thread meanwhile.
_UNREADABLE = (AttributeError, TypeError, ValueError, OSError, NotImplementedError, RuntimeError, LookupError)


class QueueState(NamedTuple):
    """Batches of one iterator at one moment."""

    ready: int
    """Batches ready (pinned, if requested) but not returned yet. The next batch in order may not be among them."""
    unpinned: int | None
    """Batches waiting for the pin thread, without the one being pinned; None without a pin thread."""
    taken: int
    """Batches returned by this iterator since its start or reset."""


class Probe:
    """Reads the state of one iterator without keeping it alive. This base class reads torch's iterator without workers.

    Args:
        iterator: an iterator of a known kind, or this package's own workers (``OwnPass``) inside a ``LoaderPass``.
    """

    def __init__(self, iterator: AnyIterator) -> None:
        self._iterator = weakref.ref(iterator)
        self.taken = 0
        """Batches returned up to the last reading."""

    @cached_property
    def held(self) -> int | None:
        """Largest number of batches that the iterator may hold ready, read once."""
        return self._ask(self._capacity, None)

    def iterator(self) -> Any:
        """Return the iterator; None if it no longer exists."""
        return self._iterator()

    def read(self) -> QueueState | None:
        """Return the iterator's state; None if unknown. Takes about a microsecond."""
        return self._ask(self._state, None)

    def workers(self) -> Workers:
        """Return the workers that make the batches, without the thread that requests them."""
        return self._ask(self._workers, Workers())

    def waited(self, wait_ns: int) -> None:
        """Note that the loop has waited this long for the batch that it just got."""

    def head_of_line_ns(self) -> float | None:
        """Return the nanoseconds waited so far while a later batch was ready, times the share of workers that were idle
        then.

        None if unknown.
        """
        return 0.0

    def _ask(self, question: Callable[[Any], T], unknown: T) -> T:
        try:
            return question(self._iterator())
        except _UNREADABLE:
            return unknown

    def _state(self, it: AnyIterator) -> QueueState:
        return QueueState(0, None, it._num_yielded)

    def _capacity(self, it: AnyIterator) -> int:
        return 0

    def _workers(self, it: AnyIterator) -> Workers:
        return Workers()


def probe_loader(iterator: AnyIterator) -> Probe | None:
    """Return a probe of ``iterator``, the result of ``iter(loader)``; None for an unknown kind."""
    if _is_ours(iterator):
        return PassProbe(iterator)
    if hasattr(iterator, "_task_info"):
        return TorchProbe(iterator)
    if getattr(iterator, "_num_workers", None) == 0 and hasattr(iterator, "_num_yielded"):
        return Probe(iterator)
    return None


class TorchProbe(Probe):
    """Reads torch's ``_MultiProcessingDataLoaderIter``, or an iterator with the same parts.

    Torch keeps batches that arrive out of order in ``_task_info``, as tuples (worker, batch).
    """

    def __init__(self, iterator: AnyIterator) -> None:
        super().__init__(iterator)
        self._pins = getattr(iterator, "_pin_memory_thread", None) is not None
        self._head_of_line_ns = 0.0

    def waited(self, wait_ns: int) -> None:
        """Add a wait, weighted by the share of workers that were idle then because an earlier batch was missing."""
        self._head_of_line_ns += wait_ns * self._ask(idle_share, 0.0)

    def head_of_line_ns(self) -> float | None:
        """Return the sum of the weighted waits, in nanoseconds: see :meth:`waited`."""
        return self._head_of_line_ns

    def _state(self, it: AnyIterator) -> QueueState:
        unpinned = it._worker_result_queue.qsize() if self._pins else None
        return QueueState(it._data_queue.qsize() + kept_batches(it), unpinned, it._num_yielded)

    def _capacity(self, it: AnyIterator) -> int:
        return int(it._num_workers * it._prefetch_factor)

    def _workers(self, it: AnyIterator) -> Workers:
        return Workers(pids=tuple(worker.pid for worker in it._workers if worker.pid is not None))


class OwnProbe(Probe):
    """Reads this package's own workers (``OwnPass``) inside a ``LoaderPass``."""

    def _state(self, it: "OwnPass") -> QueueState:
        return QueueState(it.ready, None, 0)

    def _capacity(self, it: "OwnPass") -> int:
        return it.capacity

    def _workers(self, it: "OwnPass") -> Workers:
        return Workers(thread_ids=it.thread_ids)


class PassProbe(Probe):
    """Reads this package's iterator, ``LoaderPass``: its worker processes or threads, and the thread that reads ahead.

    With ``background``, batches that the thread reading ahead has not fetched yet also count as ready. A batch that the
    thread holds while its queue is full is not seen. Without workers, the thread counts as the worker. If another
    thread closes the pass, which may happen at any time, the state is unknown.
    """

    def __init__(self, iterator: "LoaderPass") -> None:
        super().__init__(iterator)
        source = iterator.source
        own = is_instance(source, "lightning_feed.load.stage", "OwnPass")
        self._source = OwnProbe(source) if own else probe_loader(source)

    def head_of_line_ns(self) -> float | None:
        """Return the nanoseconds that the pass itself has counted; None once it has ended."""
        return self._ask(lambda it: float(it.head_of_line_ns), None)

    def _inner(self, it: "LoaderPass") -> Probe:
        if it.source is None or self._source is None:
            raise LookupError("closed")
        return self._source

    def _state(self, it: "LoaderPass") -> QueueState:
        state = self._inner(it).read()
        if state is None:
            raise LookupError("unknown")
        fetched = it.background.ready if it.background is not None else 0
        return QueueState(state.ready + fetched, state.unpinned, it.taken)

    def _capacity(self, it: "LoaderPass") -> int:
        held = self._inner(it).held
        if held is None:
            raise LookupError("unknown")
        return held + (it.background.depth if it.background is not None else 0)

    def _workers(self, it: "LoaderPass") -> Workers:
        workers = self._inner(it).workers()
        if isinstance(self._source, OwnProbe) or workers.pids or it.background is None:
            return workers
        thread_id = it.background.thread.native_id
        return Workers(thread_ids=(thread_id,) if thread_id is not None else ())
