"""Threads beside a loader: one that draws ahead of its consumer, and one that warns of a batch that does not come.

The first is ``prefetch_generator`` with what it lacks: ``BackgroundGenerator`` alone ends an epoch silently on
KeyboardInterrupt and SystemExit, and its thread blocks for ever on a full queue once the consumer has gone, which keeps
the source and its worker processes alive.
"""

import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from prefetch_generator import BackgroundGenerator

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.threads import ThreadPass, shortened
from lightning_feed.load.trace import traced
from lightning_feed.load.worker import resend_ctrl_c, stack_of

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long closing waits for the source to give the batch that it is at. It can only be waited for, not stopped."""
SOON_S = 0.5
"""How long Ctrl-C waits for it."""
_ALIVE_CHECK_S = 1.0
"""How often a waiting consumer looks whether the thread still lives."""
_UNBOUNDED = 1 << 60
_LOOKS = 10
"""How often the watchdog looks within the time after which it warns."""
_AGAIN = 10
"""After a warning the pass may wait as many times longer before the next one."""


@dataclass
class _Batch:
    value: Any

    def empty(self) -> Any:
        """Take the value out: the thread still holds this object while it waits for the next one."""
        value, self.value = self.value, None
        return value


@dataclass(frozen=True)
class _End:
    told: tuple[Any, ...]
    """What StopIteration came with: a worker's traceback, where a dataset raised it."""


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class BackgroundIterator(Iterator[Any]):
    """Iterates over ``source`` in a thread of its own, ``depth`` items ahead.

    Items come in the order of the source, each once. What the source raises, KeyboardInterrupt included, is raised to
    the consumer after the items before it, with its traceback. The thread ends with the source, on :meth:`close`, on an
    exception, and when this object is no longer referenced; it then lets go of the source.

    Args:
        source: drawn from in the thread only, which becomes its owner: keep no other reference to it.
        depth: items kept ready, 1 or more. One more is held by the thread while the queue is full.

    Raises:
        SettingsError: when ``depth`` is not positive.
    """

    def __init__(self, source: Iterator[Any], depth: int) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise SettingsError(f"depth={depth!r}: give the number of items to keep ready, 1 or more.")
        self._closed = self._ended = False
        self.depth = depth
        stop = threading.Event()
        # A new thread starts on device 0, whatever the consumer's is; pinned memory would be registered with that one.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._thread = BackgroundGenerator(_draws(source, stop, device), max_prefetch=depth)
        # The thread knows nothing of this object, so an iterator that is abandoned is collected, and the thread ends.
        self._finalizer = weakref.finalize(self, _abandon, self._thread, stop, os.getpid(), threading.get_ident())

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._closed:
            raise LoaderError(
                "This BackgroundIterator was closed before its end. Make a new one to go through the data."
            )
        try:
            with traced("background_wait"):
                item = self._take()
        except BaseException as error:
            self.close(SOON_S if isinstance(error, KeyboardInterrupt) else None)
            raise
        if isinstance(item, _Batch):
            return item.empty()
        self.close()
        if isinstance(item, _End):
            self._ended = True
            raise StopIteration(*item.told)
        try:
            raise item.error
        finally:
            del item  # the error's traceback holds this frame: without it they would keep each other alive

    @property
    def ready(self) -> int:
        """Items that are waiting to be taken."""
        return int(self._thread.queue.qsize())

    @property
    def thread(self) -> threading.Thread:
        """The thread that draws."""
        thread: threading.Thread = self._thread
        return thread

    def close(self, patience_s: float | None = None) -> None:
        """End the thread and let go of the source; wait so long for the batch that it is at, PATIENCE_S if not given.
        A second call does nothing."""
        self._closed = True
        left = self._finalizer.detach()
        if left is not None:
            thread, stop, pid, consumer = left[2]
            _end_thread(thread, stop, pid, consumer, patience_s)

    def _take(self) -> _Batch | _End | _Failure:
        while True:
            alive = self._thread.is_alive()  # asked first: what a dead thread has put is all there by then
            try:
                _, item = self._thread.queue.get(timeout=_ALIVE_CHECK_S if alive else 0)
            except queue.Empty:
                item = None
            if isinstance(item, (_Batch, _End, _Failure)):
                return item
            if item is not None or not alive:
                raise LoaderError(
                    "The background thread ended without saying that the data was at its end. Batches are missing: "
                    "this is not the end of the epoch. Use LoaderSettings(background=0) to load without the thread."
                )


def _draws(source: Iterator[Any], stop: threading.Event, device: int | None) -> Iterator[_Batch | _End | _Failure]:
    """The source as the thread sees it: never raises, and ends when told to."""
    try:
        if device is not None:
            torch.cuda.set_device(device)
        while not stop.is_set():
            item = _draw(source)
            if stop.is_set():
                return
            yield item
            if not isinstance(item, _Batch):
                return
    finally:
        del source  # here, so that worker processes and the source's own `finally` blocks end in this thread


def _draw(source: Iterator[Any]) -> _Batch | _End | _Failure:
    try:
        with traced("background_load"):
            return _Batch(next(source))
    except StopIteration as end:
        return _End(end.args)
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt and SystemExit too: raised by the consumer
        return _Failure(error)
    finally:
        del source  # the error's traceback holds this frame


def _abandon(thread: Any, stop: threading.Event, pid: int, consumer: int) -> None:
    with resend_ctrl_c():
        _end_thread(thread, stop, pid, consumer)


def _end_thread(thread: Any, stop: threading.Event, pid: int, consumer: int, patience_s: float | None = None) -> None:
    """Tell the thread to end, let it past a full queue, and wait for it."""
    stop.set()
    if os.getpid() != pid:
        return  # a forked copy: the thread is the parent's
    if threading.get_ident() == thread.ident:
        # Garbage was collected in the thread itself, perhaps inside its own put(), whose lock it then holds.
        threading.Thread(target=_let_through, args=(thread.queue,), daemon=True).start()
        return
    _let_through(thread.queue)
    if threading.get_ident() != consumer:
        return  # garbage was collected in a thread that the source may depend on: it must not be kept waiting
    patience_s = PATIENCE_S if patience_s is None else patience_s
    thread.join(patience_s)
    if thread.is_alive():
        logger.warning(
            "The background thread is still waiting for a batch after %g s and was left behind. It ends when the "
            "batch comes. A dataset that never returns needs a timeout of its own, or LoaderSettings(timeout_s=...).",
            patience_s,
        )


def _let_through(items: "queue.Queue[Any]") -> None:
    """Empty the queue and open it, so that no put() waits any more."""
    with items.mutex:
        items.queue.clear()
        items.maxsize = _UNBOUNDED
        items.not_full.notify_all()


# --- a warning when no batch comes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watch:
    """When to warn of a batch that does not come, and what the loader is called."""

    name: str
    after_s: float


class LateBatch:
    """A watchdog for the batches of one pass: one warning that says where loading hangs, if none comes for long.

    One thread for each pass, which sleeps nearly always. The loop sets a time stamp before it waits for a batch and
    takes it away afterwards; samples cost nothing. The thread ends with the pass, and when this object is garbage.

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
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._wake.put, None).atexit = False

    def begin(self) -> None:
        """The loop begins to wait for a batch."""
        self._since = self._clock()
        if self._thread is None:
            self._consumer = threading.get_ident()
            arguments = (weakref.ref(self), self._wake, self._watch.after_s / _LOOKS)
            self._thread = threading.Thread(target=_look_often, args=arguments, name="late-batch", daemon=True)
            self._thread.start()

    def came(self) -> None:
        """The loop has its batch, or will not get it."""
        self._since = None

    def close(self) -> None:
        """End the thread."""
        self._since = None
        self._wake.put(None)

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


def _look_often(watch: "weakref.ref[LateBatch]", wake: "queue.SimpleQueue[None]", every_s: float) -> None:
    while True:
        try:
            return wake.get(timeout=every_s)
        except queue.Empty:
            watching = watch()
            if watching is None:
                return None
            watching.look()
            del watching


def _where(batches: Any, consumer: int) -> str:
    """Who is at which samples, and the stack."""
    source, position = batches.source, batches.position
    if isinstance(source, ThreadPass):
        told = (
            f"Thread worker {thread} is {doing}. Its stack:\n{_stack_here(source.threads[thread].ident)}"
            for thread, doing in source.at_work()
        )
        return "\n".join(told) or "The worker threads have nothing to do."
    if getattr(source, "_workers", None):
        return _in_processes(source, position)
    loading = batches.background.thread.ident if batches.background is not None else consumer
    newest = position.newest() if hasattr(position, "newest") else None
    at = "" if newest is None else f", at {shortened(newest)}"
    return f"The training process loads it itself{at}. Its stack:\n{_stack_here(loading)}"


def _in_processes(iterator: Any, position: Any) -> str:
    """Torch's list of open tasks: a worker does its own in their order. Read in torch 2.6 and 2.15 (``_task_info``)."""
    first: dict[int, int] = {}
    for number, info in sorted(dict(iterator._task_info).items()):
        if len(info) == 1:  # no data yet
            first.setdefault(info[0], number)
    if not first:
        return "The worker processes have nothing to do: what comes after them hangs, as decoding or pinning memory."
    worker = min(first, key=lambda one: first[one])
    pid = iterator._workers[worker].pid
    index = position.index_of(first[worker]) if hasattr(position, "index_of") else None
    at = f"task {first[worker]} of this pass" if index is None else f"the samples {shortened(index)}"
    others = f" {len(first) - 1} other workers have work, too." if len(first) > 1 else ""
    return f"Worker {worker} (process {pid}) is at {at}.{others} Its stack:\n{stack_of(pid)}"


def _stack_here(ident: int | None) -> str:
    frame = sys._current_frames().get(ident or 0)
    return "(the thread has ended)" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
