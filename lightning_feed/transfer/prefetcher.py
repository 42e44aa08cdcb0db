"""Prepares a batch on the host, copies it on a side stream, and hands it over to the stream that computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_feed.load.trace import traced
from lightning_feed.transfer.nested import off_host
from lightning_feed.transfer.streams import SideStream


@dataclass(frozen=True)
class Staged:
    """A batch on its way to the device, or what went wrong on the way."""

    batch: Any = None
    mark: Any = None
    error: Exception | None = None


class Prefetcher:
    """Stages batches on a side stream.

    Args:
        stream: where the copies are issued.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream

    def stage(self, batch: Any, *, prepare: Callable[[Any], Any], copy: Callable[[Any], Any]) -> Staged:
        """Issue the copy of ``batch`` without waiting for it.

        Args:
            batch: a host batch of any type.
            prepare: host work before the copy; runs in program order.
            copy: host batch -> device batch; every kernel and copy that it launches goes to the side stream.

        Returns:
            What :meth:`take` needs. An ``Exception`` is kept for it, so that it is raised in the step that the batch
            belongs to; ``KeyboardInterrupt`` and its like go through at once.
        """
        try:
            ready = prepare(batch)
            if off_host(ready):
                self._stream.follow_compute(ready)  # `prepare` worked on the compute stream; `copy` reads what it made
            self._stream.limit_run_ahead()
            return self._issue(ready, copy)
        except Exception as error:  # noqa: BLE001  # raised by `take`, with its traceback
            return Staged(error=error)

    def pass_on(self, batch: Any, copy: Callable[[Any], Any]) -> Any:
        """Copy a batch that was not staged, in program order: after all that was queued, before all that comes.

        It goes over the side stream like every other batch, because what ``copy`` keeps from one batch to the next (a
        constant for a new shape, a running statistic) is then made, read and freed on one stream.
        """
        self._stream.follow_compute(batch)
        self._stream.limit_run_ahead()
        return self.take(self._issue(batch, copy))

    def take(self, staged: Staged) -> Any:
        """The device batch, safe to use on the current stream from here on. The host does not wait for the copy."""
        if staged.error is not None:
            raise staged.error
        with traced("hand_over"):
            self._stream.hand_over(staged.batch, staged.mark)
        return staged.batch

    def _issue(self, batch: Any, copy: Callable[[Any], Any]) -> Staged:
        with self._stream.issue(), traced("transfer"):
            ready = copy(batch)
        return Staged(batch=ready, mark=self._stream.mark())
