"""A watchdog for the batches of one pass: one warning that says where loading hangs, if no batch comes for long."""

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
"""Checks within the time after which the watchdog warns."""
_REPEAT = 10
"""After a warning the next one comes only after this many times the waiting time."""


class Watched(Protocol):
    """A pass over a loader."""

    def where(self) -> str:
        """The work that its consumer is waiting for, in words."""


@dataclass(frozen=True)
class Watch:
    """The time after which to warn of a missing batch, and the name of the loader."""

    name: str
    after_s: float


class LateBatch:
    """Warns when a batch does not come.

    One thread for each pass, which sleeps nearly always. The loop sets a time stamp before it waits for a batch and
    removes it afterwards; samples cost nothing. The thread ends with the pass.

    Args:
        batches: the pass. Not kept alive.
        watch: when to warn, and of what.
        clock: seconds.
    """

    def __init__(self, batches: Watched, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self._batches, self._watch, self._clock = weakref.ref(batches), watch, clock
        self._since: float | None = None
        self._quiet_until = clock()
        self._started = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put() may be called from a finalizer
        self._thread = threading.Thread(target=self._check_often, name="late-batch", daemon=True)
        weakref.finalize(batches, self._wake.put, None).atexit = False

    def begin(self) -> None:
        """The loop begins to wait for a batch."""
        self._since = self._clock()
        if not self._started:
            self._started = True
            self._thread.start()

    def came(self) -> None:
        """The loop has its batch, or will not get it."""
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
        """Warn, if it is time to."""
        since, now, batches = self._since, self._clock(), self._batches()
        if since is None or batches is None or now - since < self._watch.after_s or now < self._quiet_until:
            return
        self._quiet_until = now + _REPEAT * self._watch.after_s
        try:
            where = batches.where()
        except Exception as error:  # noqa: BLE001  # the pass goes on meanwhile; what only observes never ends a run
            where = f"Where it hangs is not known ({type(error).__name__}: {error})."
        if self._since == since:  # the batch did not come meanwhile
            logger.warning(
                "No batch of %s has come for %.0f s. %s\nThe run waits on; LoaderSettings(timeout_s=...) ends it when "
                "workers take longer than that, and warn_after_s says when to warn.",
                self._watch.name,
                now - since,
                where,
            )
