"""A thread that draws from an iterator ahead of its consumer: ``prefetch_generator``, with what it lacks.

``BackgroundGenerator`` alone ends an epoch silently on KeyboardInterrupt and SystemExit, and its thread blocks for ever
on a full queue once the consumer has gone, which keeps the source and its worker processes alive.
"""

import logging
import os
import queue
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from prefetch_generator import BackgroundGenerator

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.trace import traced

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long closing waits for the source to give the batch that it is at. It can only be waited for, not stopped."""
SOON_S = 0.5
"""And how long Ctrl-C waits for it."""
LOOK_S = 1.0
"""How often a waiting consumer looks whether the thread still lives."""
UNBOUNDED = 1 << 60
_AGAIN_S = 0.05


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
    """What StopIteration came with: a worker's traceback, where a data set raised it."""


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class BackgroundIterator(Iterator[Any]):
    """Iterates over ``source`` in a thread of its own, ``depth`` items ahead.

    Items come in the order of the source, each once. What the source raises, KeyboardInterrupt included, is raised to
    the consumer after the items before it, with its traceback. The thread ends with the source, on :meth:`close`, on
    leaving a ``with`` block, on an exception, and when this object is no longer referenced; it then lets go of the
    source.

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
        self._thread = BackgroundGenerator(_Guarded(source, stop, device), max_prefetch=depth)
        # The thread knows nothing of this object, so an iterator that is abandoned is collected, and the thread ends.
        self._finalizer = weakref.finalize(self, _abandon, self._thread, stop, os.getpid(), threading.get_ident())

    def __next__(self) -> Any:
        if self._closed:
            if self._ended:
                raise StopIteration
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
    def thread_id(self) -> int | None:
        """The thread, as the kernel numbers it."""
        ident: int | None = self._thread.native_id
        return ident

    def close(self, patience_s: float | None = None) -> None:
        """End the thread and let go of the source; wait so long for the batch that it is at, PATIENCE_S if not given.
        A second call does nothing."""
        self._closed = True
        left = self._finalizer.detach()
        if left is not None:
            thread, stop, pid, consumer = left[2]
            _end_thread(thread, stop, pid, consumer, patience_s)

    def __enter__(self) -> "BackgroundIterator":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self) -> _Batch | _End | _Failure:
        items = self._thread.queue
        while True:
            alive = self._thread.is_alive()  # asked first: what a dead thread has put is all there by then
            try:
                _, item = items.get(timeout=LOOK_S if alive else 0)
            except queue.Empty:
                item = None
            if isinstance(item, (_Batch, _End, _Failure)):
                return item
            if item is not None or not alive:
                raise LoaderError(
                    "The background thread ended without saying that the data was at its end. Batches are missing: "
                    "this is not the end of the epoch. Use LoaderSettings(background=0) to load without the thread."
                )


class _Guarded:
    """The source as ``BackgroundGenerator`` sees it: it never raises, and it ends when told to stop."""

    def __init__(self, source: Iterator[Any], stop: threading.Event, device: int | None) -> None:
        self._source: Iterator[Any] | None = source
        self._stop, self._device = stop, device

    def __iter__(self) -> Iterator[_Batch | _End | _Failure]:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            while not self._stop.is_set():
                item = _draw(self._source)
                if self._stop.is_set():
                    return
                yield item
                if not isinstance(item, _Batch):
                    return
        finally:
            # Dropped here, so that worker processes and the source's own `finally` blocks end in this thread.
            self._source = None


def _draw(source: Any) -> _Batch | _End | _Failure:
    try:
        with traced("background_load"):
            return _Batch(next(source))
    except StopIteration as end:
        return _End(end.args)
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt and SystemExit too: raised by the consumer
        return _Failure(error)
    finally:
        del source  # the error's traceback holds this frame


@contextmanager
def ctrl_c_again() -> Iterator[None]:
    """Ctrl-C that comes in here comes again a moment later: Python drops what a finalizer or a ``__del__`` raises."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(RuntimeError):  # there are no new threads while Python ends
            main = threading.main_thread().ident
            threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)).start()


def _abandon(thread: Any, stop: threading.Event, pid: int, consumer: int) -> None:
    with ctrl_c_again():
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
        items.maxsize = UNBOUNDED
        items.not_full.notify_all()
