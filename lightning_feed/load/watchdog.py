"""A watchdog for one pass. If no batch arrives for a long time, its warning names the place where loading hangs."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

_CHECKS = 10
"""Number of checks within the waiting time before a warning."""
_REPEAT = 10
"""Time without another warning after a warning, in multiples of the waiting time."""
WARN_AFTER_S = 60.0
"""Seconds without a batch before a warning."""


class Watched(Protocol):
    """Interface of a pass over a loader."""

    def where(self) -> str:
        """Describe the work that the consumer is waiting for."""


@dataclass(frozen=True)
class Watch:
    """The time after which to warn of a missing batch, and the name of the loader."""

    name: str
    after_s: float = WARN_AFTER_S


class LateBatch:
    """Warns when a batch is late.

    Runs one thread per pass, which sleeps nearly all the time. The training loop sets a time stamp before it waits for
    a batch and clears it afterwards, so there is no cost per sample. The thread ends with the pass.

    Args:
        batches: the pass; only a weak reference to it is kept.
        watch: waiting time and name of the loader.
        clock: returns the time in seconds.
    """

    def __init__(self, batches: Watched, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self._batches = weakref.ref(batches)
        self._watch = watch
        self._clock = clock
        self._since: float | None = None
        self._quiet_until = clock()
        self._started = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # put() may be called from a finalizer
        self._thread = threading.Thread(target=self._check_often, name="late-batch", daemon=True)
        weakref.finalize(batches, self._wake.put, None).atexit = False

    def begin(self) -> None:
        """Note that the loop starts to wait for a batch."""
        self._since = self._clock()
        if not self._started:
            self._started = True
            self._thread.start()

    def arrived(self) -> None:
        """Note that the loop has its batch."""
        self._since = None

    def close(self) -> None:
        """End the thread."""
        self._since = None
        self._wake.put(None)

    def _check_often(self) -> None:
        while True:
            try:
                return self._wake.get(timeout=self._watch.after_s / _CHECKS)
            except queue.Empty:
                self.check()

    def check(self) -> None:
        """Warn if the batch is overdue."""
        since = self._since
        now = self._clock()
        batches = self._batches()
        if since is None or batches is None or now - since < self._watch.after_s or now < self._quiet_until:
            return
        self._quiet_until = now + _REPEAT * self._watch.after_s
        try:
            where = batches.where()
        except Exception as error:  # noqa: BLE001  # observing must never end a run; the pass goes on
            where = f"The place where it hangs could not be found ({type(error).__name__}: {error})."
        if self._since == since:  # still the same wait
            logger.warning(
                "No batch of %s has arrived for %.0f s. %s\nThe run keeps waiting. LoaderSettings(timeout_s=...) "
                "ends the run if workers take longer.",
                self._watch.name,
                now - since,
                where,
            )
