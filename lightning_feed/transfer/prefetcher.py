"""Prepares a batch on the host, copies it on a side stream, and hands it over to the stream that computes."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from lightning_feed.load.machine import STREAM_BACKENDS as STREAM_BACKENDS
from lightning_feed.load.trace import traced
from lightning_feed.transfer.batch_tree import bytes_off_host, off_host, record_stream

RUN_AHEAD: Final = 2
RUN_AHEAD_BYTES: Final = 64 * 2**20
MOST_AHEAD: Final = 60
"""Lead of the host over the device, at most, when it copies the next batch: 2 batches that the device has not come to,
or as many more as fit into these bytes, up to 60.

``record_stream`` gives memory back only once the device is past it, so a host that runs M steps ahead holds M batches.
Running ahead is worth something, too: while the loader stalls, the device works off what is queued. Steps of large
batches are long, and two of them are enough; small batches cost little memory. 60 steps are about what the ring of
``watch.step_meter`` can measure.
"""


_OF_EARLIER_WORK: Final = (
    "PrefetchCallback only met this error, while it waited for the device. It is of work that was queued before, as a "
    "rule by the training step. CUDA_LAUNCH_BLOCKING=1 in the environment shows where."
)


class SideStream:
    """A stream for copies, and the hand-over of their results to the stream that computes.

    This one is no stream at all: everything happens in program order. The same code runs on it where there is no
    accelerator.
    """

    def issue(self) -> AbstractContextManager[object]:
        """While entered, work goes to the side stream."""
        return nullcontext()

    def mark(self) -> Any:
        """An event after all work issued so far."""

    def hand_over(self, batch: object, mark: object) -> None:
        """Make the compute stream wait for ``mark`` and own ``batch``. The host does not wait."""

    def follow_compute(self, batch: object = None) -> None:
        """Let what is issued from here on begin after what the compute stream was given so far, and read ``batch``."""

    def limit_run_ahead(self) -> None:
        """Wait while the device is too far behind the batch that was handed over last: see ``RUN_AHEAD``."""

    def is_capturing(self) -> bool:
        """True while a graph is being captured on the compute stream: nothing else may be issued then."""
        return False


class DeviceStream(SideStream):
    """A real stream of any backend whose module has streams and events: ``torch.cuda``, ``torch.xpu``.

    One object serves a whole run. A new stream for each epoch would leave its memory pool behind every time, because
    the caching allocator keeps one pool per stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream = self._backend.Stream(device=device)
        self._handed_over: deque[tuple[Any, int]] = deque()
        """An event before the step on each batch, and the batch's bytes."""

    def issue(self) -> AbstractContextManager[object]:
        """While entered, work goes to the side stream."""
        context: AbstractContextManager[object] = self._backend.stream(self._stream)
        return context

    def mark(self) -> Any:
        """An event after all work issued so far."""
        event = self._backend.Event()
        event.record(self._stream)
        return event

    def hand_over(self, batch: object, mark: object) -> None:
        """Make the compute stream wait for ``mark`` and own ``batch``. The host does not wait."""
        compute = self._backend.current_stream(self._device)
        # 1. The compute stream waits for the copy. 2. Only then may a kernel of the step read the batch.
        # 3. The allocator learns that the compute stream uses memory which came from the side stream's pool.
        compute.wait_event(mark)
        record_stream(batch, compute)
        # An event that lets the host sleep: torch's default would spin on a CPU that the loader's workers need.
        reached = self._backend.Event(blocking=True) if self._device.type == "cuda" else self._backend.Event()
        reached.record(compute)
        self._handed_over.append((reached, bytes_off_host(batch)))

    def follow_compute(self, batch: object = None) -> None:
        """Order later work after everything given to the compute stream so far, and let it read ``batch``."""
        self._stream.wait_stream(self._backend.current_stream(self._device))
        if off_host(batch):
            record_stream(batch, self._stream)

    def limit_run_ahead(self) -> None:
        """Wait while the device is too far behind the batch that was handed over last: see ``RUN_AHEAD``."""
        ahead = self._handed_over
        try:
            while ahead and ahead[0][0].query():
                ahead.popleft()
            while len(ahead) > MOST_AHEAD or (
                len(ahead) > RUN_AHEAD and sum(size for _, size in ahead) > RUN_AHEAD_BYTES
            ):
                ahead.popleft()[0].synchronize()
        except RuntimeError as error:  # asking and waiting do not fail by themselves
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(_OF_EARLIER_WORK)
            raise

    def is_capturing(self) -> bool:
        """True while a graph is being captured on the compute stream: nothing else may be issued then."""
        asks = getattr(self._backend, "is_current_stream_capturing", None)  # torch.xpu has had graphs for short
        return asks is not None and bool(asks())


def open_stream(device: torch.device) -> SideStream | None:
    """A side stream for ``device``, or None for a device that is not one of ``STREAM_BACKENDS``."""
    return DeviceStream(device) if device.type in STREAM_BACKENDS else None


@dataclass(frozen=True)
class Staged:
    """A batch in its transfer to the device, or what went wrong on the way."""

    batch: object = None
    mark: object = None
    error: Exception | None = None


class Prefetcher:
    """Stages batches on a side stream.

    Args:
        stream: where the copies are issued.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream

    def stage(self, batch: object, *, prepare: Callable[[object], object], copy: Callable[[object], object]) -> Staged:
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

    def pass_on(self, batch: object, copy: Callable[[object], object]) -> Any:
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

    def _issue(self, batch: object, copy: Callable[[object], object]) -> Staged:
        with self._stream.issue(), traced("transfer"):
            ready = copy(batch)
        return Staged(batch=ready, mark=self._stream.mark())
