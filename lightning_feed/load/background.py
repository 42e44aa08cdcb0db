"""Threads beside a loader: one that draws ahead of its consumer, and one that warns of a batch that does not come.

The first is ``prefetch_generator`` with what it lacks: ``BackgroundGenerator`` alone ends an epoch silently on
KeyboardInterrupt and SystemExit, and its thread blocks for ever on a full queue once the consumer has gone, which keeps
the source and its worker processes alive. So its queue has no bound, and the thread asks for a permit to draw.
"""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prefetch_generator import BackgroundGenerator

from lightning_feed.errors import LoaderError, plural
from lightning_feed.load.threads import Ending, OwnPass, shortened, stack_here
from lightning_feed.load.trace import traced
from lightning_feed.load.worker import on_this_device, stack_of

logger = logging.getLogger(__name__)

SOON_S = 0.5
"""How long Ctrl-C waits for the batch that the source is at."""
_ALIVE_CHECK_S = 1.0
"""How often a waiting consumer looks whether the thread still lives."""
_LOOKS = 10
"""How often the watchdog looks within the time after which it warns."""
_AGAIN = 10
"""After a warning the pass may wait as many times longer before the next one."""


@dataclass
class _Drawn:
    """What the source gave, or the error that ended it; StopIteration is one of these."""

    value: Any = None
    error: BaseException | None = None


class BackgroundIterator(Iterator[Any]):
    """Iterates over ``source`` in a thread of its own, ``depth`` items ahead.

    Items come in the order of the source, each once. What the source raises, KeyboardInterrupt included, is raised to
    the consumer after the items before it, with its traceback. The thread ends with the source, on :meth:`close`, on an
    exception, and when this object is no longer referenced; it then lets go of the source.

    Args:
        source: drawn from in the thread only, which becomes its owner: keep no other reference to it.
        depth: items kept ready, 1 or more. One more is drawn beside them.

    Attributes:
        thread: the thread that draws.
    """

    def __init__(self, source: Iterator[Any], depth: int) -> None:
        self._closed = self._ended = False
        self.depth = depth
        self._permits = permits = _Permits(depth + 1)
        self.thread = BackgroundGenerator(_draws(source, permits, on_this_device()), max_prefetch=0)
        # The thread knows nothing of this object, so an iterator that is abandoned is collected, and the thread ends.
        self._ending = Ending(self, [self.thread], permits.refuse)

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._closed:
            raise LoaderError(
                "This BackgroundIterator was closed before its end. Make a new one to go through the data."
            )
        try:
            with traced("background_wait"):
                drawn = self._take()
        except BaseException as error:
            self.close(SOON_S if isinstance(error, KeyboardInterrupt) else None)
            raise
        if drawn.error is None:
            self._permits.give()
            value, drawn.value = drawn.value, None  # the thread holds this object while it waits for the next one
            return value
        self.close()
        self._ended = isinstance(drawn.error, StopIteration)
        try:
            raise drawn.error
        finally:
            del drawn  # the error's traceback holds this frame: without it they would keep each other alive

    @property
    def ready(self) -> int:
        """Items that are waiting to be taken."""
        return min(self.depth, int(self.thread.queue.qsize()))

    def close(self, patience_s: float | None = None) -> None:
        """End the thread and let go of the source, see :meth:`Ending.end`."""
        self._closed = True
        self._ending.end(patience_s)

    def _take(self) -> _Drawn:
        while True:
            alive = self.thread.is_alive()  # asked first: what a dead thread has put is all there by then
            try:
                _, drawn = self.thread.queue.get(timeout=_ALIVE_CHECK_S if alive else 0)
            except queue.Empty:
                if not alive:
                    raise LoaderError(
                        "The background thread is gone, as in a forked copy of its process. Batches are missing: this "
                        "is not the end of the epoch. Begin a new pass."
                    ) from None
            else:
                return drawn  # type: ignore[no-any-return]


class _Permits:
    """Permits to draw an item, given by the consumer. All of it may be called from a finalizer, in any thread."""

    def __init__(self, items: int) -> None:
        self.refused = False
        self._given: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(items):
            self.give()

    def give(self) -> None:
        self._given.put(None)

    def refuse(self) -> None:
        self.refused = True
        self.give()

    def take(self) -> bool:
        """Wait for a permit. Returns whether one more item may be drawn."""
        self._given.get()
        return not self.refused


def _draws(source: Iterator[Any], permits: _Permits, set_device: Callable[[], None]) -> Iterator[_Drawn]:
    """The source as the thread sees it: never raises, and ends when told to."""
    try:
        drawn = _Drawn()
        while drawn.error is None and permits.take():
            drawn = _draw(source, set_device)
            yield drawn
    finally:
        del source  # here, so that worker processes and the source's own `finally` blocks end in this thread


def _draw(source: Iterator[Any], set_device: Callable[[], None]) -> _Drawn:
    try:
        set_device()
        with traced("background_load"):
            return _Drawn(next(source))
    except StopIteration as end:
        # A new one: the traceback holds torch's iterator, which garbage collection would then take apart in any order.
        return _Drawn(error=StopIteration(*end.args))
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt and SystemExit too: raised by the consumer
        return _Drawn(error=error)
    finally:
        del source  # the error's traceback holds this frame


# --- a warning when no batch comes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watch:
    """When to warn of a batch that does not come, and what the loader is called."""

    name: str
    after_s: float


class LateBatch:
    """A watchdog for the batches of one pass: one warning that says where loading hangs, if none comes for long.

    One thread for each pass, which sleeps nearly always. The loop sets a time stamp before it waits for a batch and
    takes it away afterwards; samples cost nothing. The thread ends with the pass.

    Args:
        batches: the pass, a ``LoaderPass``. Not kept alive.
        watch: when to warn, and of what.
        clock: seconds.
    """

    def __init__(self, batches: Any, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self._batches, self._watch, self._clock = weakref.ref(batches), watch, clock
        self._since: float | None = None
        self._quiet_until = clock()
        self._consumer = 0
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put() may be called from a finalizer
        self._thread = threading.Thread(target=self._look_often, name="late-batch", daemon=True)
        weakref.finalize(batches, self._wake.put, None).atexit = False

    def begin(self) -> None:
        """The loop begins to wait for a batch."""
        self._since = self._clock()
        if not self._consumer:
            self._consumer = threading.get_ident()
            self._thread.start()

    def came(self) -> None:
        """The loop has its batch, or will not get it."""
        self._since = None

    def close(self) -> None:
        """End the thread."""
        self._since = None
        self._wake.put(None)

    def _look_often(self) -> None:
        while True:
            try:
                return self._wake.get(timeout=self._watch.after_s / _LOOKS)
            except queue.Empty:
                self.look()

    def look(self) -> None:
        """Warn, if it is time to."""
        since, now, batches = self._since, self._clock(), self._batches()
        if since is None or batches is None or now - since < self._watch.after_s or now < self._quiet_until:
            return
        self._quiet_until = now + _AGAIN * self._watch.after_s
        try:
            where = _where(batches, self._consumer)
        except Exception as error:  # noqa: BLE001  # the pass goes on meanwhile; what only observes never ends a run
            where = f"Where it hangs cannot be told ({type(error).__name__}: {error})."
        if self._since == since:  # it did not come while that was looked up
            logger.warning(
                "No batch of %s has come for %.0f s. %s\nThe run waits on; LoaderSettings(timeout_s=...) ends it when "
                "workers take longer than that, and warn_after_s says when to warn.",
                self._watch.name,
                now - since,
                where,
            )


def _where(batches: Any, consumer: int) -> str:
    """Who is at which samples, and the stack."""
    source, position = batches.source, batches.position
    if isinstance(source, OwnPass):
        return source.where()
    if getattr(source, "_workers", None):
        return _in_processes(source, position)
    loading = batches.background.thread.ident if batches.background is not None else consumer
    newest = position.newest()
    at = "" if newest is None else f", at {shortened(newest)}"
    return f"The training process loads it itself{at}. Its stack:\n{stack_here(loading)}"


def _in_processes(iterator: Any, position: Any) -> str:
    """Torch's list of open tasks: a worker does its own in their order. Read in torch 2.6 and 2.15 (``_task_info``).

    A thread of the worker sends what is ready, so the worker may be at a later task than the first that did not come.
    """
    unsent: dict[int, list[int]] = {}
    for number, info in sorted(dict(iterator._task_info).items()):
        if len(info) == 1:  # no data yet
            unsent.setdefault(info[0], []).append(number)
    if not unsent:
        return "The worker processes have nothing to do: what comes after them hangs, as decoding or pinning memory."
    worker = min(unsent, key=lambda one: unsent[one])
    pid = iterator._workers[worker].pid
    first, *more = unsent[worker]
    index = position.index_of(first)
    what = f"task {first} of this pass" if index is None else f"the samples {shortened(index)}"
    later = f", nor {plural(len(more), 'batch', 'batches')} after that. It may be at any of these" if more else ""
    others = f" {len(unsent) - 1} other workers have work, too." if len(unsent) > 1 else ""
    return f"Worker {worker} (process {pid}) has not sent {what}{later}.{others} Its stack:\n{stack_of(pid)}"
