"""Prepares a batch on the host, copies it on a side stream, and hands it over to the compute stream."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from lightning_feed.load.copy_fence import register
from lightning_feed.load.stage import traced
from lightning_feed.machine.limits import STREAM_BACKENDS as STREAM_BACKENDS
from lightning_feed.transfer.batch_tree import bytes_off_host, off_host, record_stream

RUN_AHEAD: Final = 2
RUN_AHEAD_BYTES: Final = 64 * 2**20
MOST_AHEAD: Final = 60
"""Limit on how far the host may run ahead of the device: 2 batches that the device has not reached, or up to 60 if
together they fit into ``RUN_AHEAD_BYTES``.

Because of ``record_stream``, a batch's memory is freed only after the device has used the batch, so a host that runs M
steps ahead holds M batches. Running ahead helps while the loader stalls: the device works off the queue. Steps on large
batches are long, so two are enough; small batches cost little memory. 60 steps fit into the event ring in
``measure.step_meter``, which has room for some 300.
"""


_OF_EARLIER_WORK: Final = (
    "The error comes from work that was queued earlier, usually by the training step. PrefetchCallback only waited "
    "for the device. Set CUDA_LAUNCH_BLOCKING=1 in the environment to see which work failed."
)


class Reached(NamedTuple):
    """An event that the device reaches just before its step on a batch. Small batches share the event of the last one,
    to save calls."""

    event: Any
    batches: int
    nbytes: int


class SideStream:
    """Stream for copies, and the handover of their results to the compute stream.

    This base class has no stream: everything runs in program order, for machines without an accelerator.
    """

    def issue(self) -> AbstractContextManager[object]:
        """Return a context manager that sends work to the side stream."""
        return nullcontext()

    def mark(self) -> Any:
        """Return an event after all work issued so far."""

    def hand_over(self, batch: object, mark: object) -> None:
        """Make the compute stream wait for ``mark``, so that it may use ``batch``. The host does not wait."""

    def follow_compute(self, batch: object = None) -> None:
        """Make later work on this stream wait for all work queued on the compute stream so far. ``batch`` may then be
        read on this stream."""

    def limit_run_ahead(self) -> None:
        """Wait while the device is too far behind the last batch handed over: see ``RUN_AHEAD``."""

    def is_capturing(self) -> bool:
        """Return True while a graph is captured on the compute stream: no other work may be issued then."""
        return False


class DeviceStream(SideStream):
    """Real stream of any backend whose module has streams and events: ``torch.cuda``, ``torch.xpu``.

    One object serves a whole run: the caching allocator keeps one pool per stream, so a new stream per epoch would
    leave a memory pool behind each time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self.stream = self._backend.Stream(device=device)
        register(self)
        self._handed_over: deque[Reached] = deque()
        """Events of batches that the device is not known to have reached, oldest first."""
        self._batches = 0
        """Number of batches handed over since the last of these events."""
        self._nbytes = 0
        """Bytes on the device of the batches counted in ``_batches``."""
        self._spare_marks: list[Any] = []
        """Used events for :meth:`mark` to record again, which costs less than making new events."""

    def issue(self) -> AbstractContextManager[object]:
        """Return a context manager that sends work to the side stream."""
        context: AbstractContextManager[object] = self._backend.stream(self.stream)
        return context

    def mark(self) -> Any:
        """Return an event after all work issued so far."""
        event = self._spare_marks.pop() if self._spare_marks else self._backend.Event()
        event.record(self.stream)
        return event

    def hand_over(self, batch: object, mark: object) -> None:
        """Make the compute stream wait for ``mark``, so that it may use ``batch``. The host does not wait."""
        compute = self._backend.current_stream(self._device)
        # 1. The compute stream waits for the copy. 2. Only then may a kernel of the step read the batch.
        # 3. The allocator learns that the compute stream uses memory from the side stream's pool.
        compute.wait_event(mark)
        self._spare_marks.append(mark)
        record_stream(batch, compute)
        self._batches += 1
        self._nbytes += bytes_off_host(batch)
        if self._batches >= MOST_AHEAD // 2 or self._nbytes >= RUN_AHEAD_BYTES // 4:
            self._mark_reached(compute)

    def _mark_reached(self, compute: Any) -> None:
        # With blocking=True, the host sleeps while it waits for the event. By default, the wait would keep a CPU busy
        # that the loader's workers need.
        reached = self._backend.Event(blocking=True) if self._device.type == "cuda" else self._backend.Event()
        reached.record(compute)
        self._handed_over.append(Reached(reached, self._batches, self._nbytes))
        self._batches = 0
        self._nbytes = 0

    def follow_compute(self, batch: object = None) -> None:
        """Make later work on this stream wait for all work queued on the compute stream so far. ``batch`` may then be
        read on this stream."""
        self.stream.wait_stream(self._backend.current_stream(self._device))
        if off_host(batch):
            record_stream(batch, self.stream)

    def limit_run_ahead(self) -> None:
        """Wait while the device is too far behind the last batch handed over: see ``RUN_AHEAD``."""
        ahead = self._handed_over
        try:
            while ahead and self._is_far_ahead():
                ahead.popleft().event.synchronize()  # returns at once if the device has reached the event
        except RuntimeError as error:  # from earlier work: querying and waiting do not fail on their own
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(_OF_EARLIER_WORK)
            raise

    def _is_far_ahead(self) -> bool:
        batches = self._batches + sum(reached.batches for reached in self._handed_over)
        nbytes = self._nbytes + sum(reached.nbytes for reached in self._handed_over)
        return batches > MOST_AHEAD or (batches > RUN_AHEAD and nbytes > RUN_AHEAD_BYTES)

    def is_capturing(self) -> bool:
        """Return True while a graph is captured on the compute stream: no other work may be issued then."""
        is_capturing = getattr(self._backend, "is_current_stream_capturing", None)  # torch.xpu got graphs only recently
        return is_capturing is not None and bool(is_capturing())


def open_stream(device: torch.device) -> SideStream | None:
    """Return a side stream for ``device``, or None if its type is not in ``STREAM_BACKENDS``."""
    return DeviceStream(device) if device.type in STREAM_BACKENDS else None


@dataclass(frozen=True)
class CopiedBatch:
    """A batch on its way to the device, or the error that stopped it."""

    batch: object = None
    mark: object = None
    error: Exception | None = None


class Prefetcher:
    """Copies batches to the device ahead of their steps, on a side stream.

    Args:
        stream: the side stream for the copies.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream

    def stage(
        self, batch: object, *, prepare: Callable[[object], object], copy: Callable[[object], object]
    ) -> CopiedBatch:
        """Issue the copy of ``batch`` without waiting for it.

        Args:
            batch: a host batch of any type.
            prepare: host work before the copy; runs in program order.
            copy: host batch -> device batch; every kernel and copy that it launches goes to the side stream.

        Returns:
            The argument of :meth:`take`. An ``Exception`` is stored, and raised in the step of its batch;
            ``KeyboardInterrupt`` and the like are raised at once.
        """
        try:
            ready = prepare(batch)
            if off_host(ready):
                self._stream.follow_compute(ready)  # `prepare` ran on the compute stream; `copy` reads its result
            self._stream.limit_run_ahead()
            return self._issue(ready, copy)
        except Exception as error:  # noqa: BLE001  # raised by `take`, with its traceback
            return CopiedBatch(error=error)

    def pass_on(self, batch: object, copy: Callable[[object], object]) -> Any:
        """Copy a batch that was not copied ahead, in program order: after all queued work, before all later work.

        The copy uses the side stream, like all others: state that ``copy`` keeps between batches (a constant for a new
        shape, a running statistic) is then made, read and freed on one stream.
        """
        self._stream.follow_compute(batch)
        self._stream.limit_run_ahead()
        return self.take(self._issue(batch, copy))

    def take(self, staged: CopiedBatch) -> Any:
        """Return the device batch, safe to use on the current stream. The host does not wait for the copy."""
        if staged.error is not None:
            raise staged.error
        with traced("hand_over"):
            self._stream.hand_over(staged.batch, staged.mark)
        return staged.batch

    def _issue(self, batch: object, copy: Callable[[object], object]) -> CopiedBatch:
        with self._stream.issue(), traced("transfer"):
            ready = copy(batch)
        return CopiedBatch(batch=ready, mark=self._stream.mark())
