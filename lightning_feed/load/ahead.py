"""A stage that reads ahead in a thread.

Built on ``prefetch_generator``, with two fixes. Its ``BackgroundGenerator`` ends an epoch silently on KeyboardInterrupt
and SystemExit. Its thread also blocks for ever on a full queue once the consumer is gone, which keeps the source and
its worker processes alive. So the queue here has no bound, and the thread waits for a permit before each item.
"""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prefetch_generator import BackgroundGenerator

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import Batch
from lightning_feed.load.stage import PATIENCE_S, SOON_S, Stage, ThreadShutdown, traced
from lightning_feed.load.worker import on_this_device

_ALIVE_CHECK_S = 1.0
"""Seconds between a waiting consumer's checks that the thread is alive."""


@dataclass
class Outcome:
    """An item of the source, or the error that ended the source (StopIteration included)."""

    value: Any = None
    error: BaseException | None = None


class BackgroundIterator(Stage):
    """Iterates over ``source`` in its own thread, ``depth`` items ahead.

    Yields each item of the source once, in order. Exceptions from the source, including KeyboardInterrupt, reach the
    consumer after the preceding items, with their traceback. The thread ends with the source, on :meth:`close`, on an
    exception, or when this object is garbage-collected; it then drops the source.

    Args:
        source: iterated only in the thread.
        depth: items kept ready, 1 or more. The thread may hold one more.

    Attributes:
        thread: the reading thread.
    """

    def __init__(self, source: Iterator[Batch], depth: int) -> None:
        self._closed = False
        self._ended = False
        self.depth = depth
        permits = _Permits(depth + 1)
        self._permits = permits
        # The thread holds no reference to this object, so an abandoned iterator is collected and its thread ends.
        self.thread = BackgroundGenerator(_outcomes(source, permits, on_this_device()), max_prefetch=0)
        self._shutdown = ThreadShutdown(self, [self.thread], permits.refuse)

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        if self._closed:
            raise LoaderError("This BackgroundIterator was closed before its end. Make a new one to iterate the data.")
        try:
            with traced("background_wait"):
                outcome = self._take()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self.close(SOON_S)
            else:
                self.close()
            raise
        if outcome.error is None:
            self._permits.give()
            # the thread keeps a reference to the outcome until it draws the next item
            value = outcome.value
            outcome.value = None
            return value
        self.close()
        self._ended = isinstance(outcome.error, StopIteration)
        try:
            raise outcome.error
        finally:
            del outcome  # breaks a reference cycle: the error's traceback holds this frame

    @property
    def ready(self) -> int:
        """Number of items ready for the consumer."""
        return min(self.depth, int(self.thread.queue.qsize()))

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """End the thread and drop the source, see :meth:`ThreadShutdown.end`."""
        self._closed = True
        self._shutdown.end(patience_s)

    def _take(self) -> Outcome:
        while True:
            is_alive = self.thread.is_alive()  # checked first: a dead thread can add no more items
            try:
                outcome: Outcome
                _, outcome = self.thread.queue.get(timeout=_ALIVE_CHECK_S if is_alive else 0)
                return outcome
            except queue.Empty:
                if not is_alive:
                    raise LoaderError(
                        "The background thread is gone, as after a fork of its process. The epoch is incomplete: "
                        "batches are missing. Begin a new pass."
                    ) from None


class _Permits:
    """Permits to draw one item each, given to the thread by the consumer.

    Methods may be called from any thread, and from finalizers.
    """

    def __init__(self, items: int) -> None:
        self.refused = False
        self._issued: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(items):
            self.give()

    def give(self) -> None:
        self._issued.put(None)

    def refuse(self) -> None:
        self.refused = True
        self.give()

    def take(self) -> bool:
        """Wait for a permit. Returns False if no more will be issued."""
        self._issued.get()
        return not self.refused


def _outcomes(source: Iterator[Batch], permits: _Permits, set_device: Callable[[], None]) -> Iterator[Outcome]:
    """Draw one item for each permit, until the source ends or fails. Never raises."""
    try:
        outcome = Outcome()
        while outcome.error is None and permits.take():
            outcome = _draw(source, set_device)
            yield outcome
    finally:
        del source  # here, so that the source's own `finally` blocks run in this thread


def _draw(source: Iterator[Batch], set_device: Callable[[], None]) -> Outcome:
    try:
        set_device()
        with traced("background_load"):
            return Outcome(next(source))
    except StopIteration as end:
        # A new error, because the traceback of the old one keeps torch's iterator alive. The parts of this iterator
        # would then be collected in any order.
        return Outcome(error=StopIteration(*end.args))
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt and SystemExit too: raised by the consumer
        return Outcome(error=error)
    finally:
        del source  # the error's traceback holds this frame
