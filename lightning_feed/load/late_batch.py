"""A watchdog for batches: one warning that says where loading hangs, when no batch comes for a long time.

One thread for each pass, which sleeps nearly always. The loop sets a time stamp before it waits for a batch and takes
it away afterwards; samples cost nothing. Which samples a worker is at comes from torch's own list of open tasks.
"""

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from lightning_feed.load.thread_pass import ThreadPass
from lightning_feed.load.worker_stack import stack_of

logger = logging.getLogger(__name__)

_LOOKS = 10
"""How often the thread looks within the time after which it warns."""
_AGAIN = 10
"""After a warning the pass may wait as many times longer before the next one."""


@dataclass(frozen=True)
class Watch:
    """When to warn of a batch that does not come, and what the loader is called."""

    name: str
    after_s: float


class Watched(Protocol):
    """A pass, as the watchdog sees it."""

    source: Iterator[Any] | None
    position: Any
    background: Any


class LateBatch:
    """Watches one pass. It ends with the pass, and when it is garbage.

    Args:
        batches: the pass. Not kept alive.
        watch: when to warn, and of what.
        clock: seconds.
    """

    def __init__(self, batches: Watched, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self._batches, self._watch, self._clock = weakref.ref(batches), watch, clock
        self._since: float | None = None
        self._quiet_until = clock()
        self._consumer = 0
        self._wake: SimpleQueue[None] = SimpleQueue()  # its put() may be called from a finalizer
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._wake.put, None).atexit = False

    def begin(self) -> None:
        """The loop begins to wait for a batch."""
        self._since = self._clock()
        if self._thread is None:
            self._consumer = threading.get_ident()
            every = self._watch.after_s / _LOOKS
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._wake, every), name="late-batch", daemon=True
            )
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


def _run(watch: "weakref.ref[LateBatch]", wake: "SimpleQueue[None]", every_s: float) -> None:
    while True:
        try:
            wake.get(timeout=every_s)
        except Empty:
            watching = watch()
            if watching is None:
                return
            watching.look()
            del watching
        else:
            return


def _where(batches: Watched, consumer: int) -> str:
    source = batches.source
    if isinstance(source, ThreadPass):
        return _in_threads(source)
    workers = getattr(source, "_workers", None)
    if workers:
        return _in_processes(source, batches.position)
    loading = batches.background._thread.ident if batches.background is not None else consumer
    newest = batches.position.newest() if hasattr(batches.position, "newest") else None
    at = "" if newest is None else f", at {_short(newest)}"
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
    at = f"task {first[worker]} of this pass" if index is None else f"the samples {_short(index)}"
    others = f" {len(first) - 1} other workers have work, too." if len(first) > 1 else ""
    return f"Worker {worker} (process {pid}) is at {at}.{others} Its stack:\n{stack_of(pid)}"


def _in_threads(source: ThreadPass) -> str:
    told = []
    for job in list(source._jobs.values()):
        for thread, place in dict(job.at).items():
            ident = source.crew.threads[thread].ident or 0
            told.append(f"Thread worker {thread} is {job.describe(place)}. Its stack:\n{_stack_here(ident)}")
        if told:
            break  # the first batch that is not complete
    return "\n".join(told) or "The worker threads have nothing to do."


def _stack_here(ident: int) -> str:
    frame = sys._current_frames().get(ident)
    return "(the thread has ended)" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


def _short(index: Any, most: int = 200) -> str:
    text = repr(index)
    return text if len(text) <= most else f"{text[:most]}..."
