"""The stream beside the compute stream on which the next batch is copied."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from lightning_feed.transfer.nested import record_stream


class SideStream(Protocol):
    """Where a copy is issued, and how its result becomes safe to use on the stream that computes."""

    def issue(self) -> AbstractContextManager[Any]:
        """While entered, work goes to the side stream."""
        ...

    def mark(self) -> Any:
        """An event after all work issued so far."""
        ...

    def hand_over(self, batch: Any, mark: Any) -> None:
        """Make the compute stream wait for ``mark`` and own ``batch``. The host does not wait."""
        ...

    def follow_compute(self) -> None:
        """Let what is issued from here on begin after what the compute stream was given so far."""
        ...

    def stamp(self) -> Any:
        """An event with the device's time after all work issued so far; None where there is no such clock."""
        ...


class DeviceStream:
    """A real stream of any backend whose module has streams and events: ``torch.cuda``, ``torch.xpu``.

    One object serves a whole run. A new stream for each epoch would leave its memory pool behind every time, because
    the caching allocator keeps one pool per stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream = self._backend.Stream(device=device)

    def issue(self) -> AbstractContextManager[Any]:
        """While entered, work goes to the side stream."""
        context: AbstractContextManager[Any] = self._backend.stream(self._stream)
        return context

    def mark(self) -> Any:
        """An event after all work issued so far."""
        event = self._backend.Event()
        event.record(self._stream)
        return event

    def hand_over(self, batch: Any, mark: Any) -> None:
        """Make the compute stream wait for ``mark`` and own ``batch``. The host does not wait."""
        compute = self._backend.current_stream(self._device)
        # 1. The compute stream waits for the copy. 2. Only then may a kernel of the step read the batch.
        # 3. The allocator learns that the compute stream uses memory which came from the side stream's pool.
        compute.wait_event(mark)
        record_stream(batch, compute)

    def follow_compute(self) -> None:
        """Let what is issued from here on begin after what the compute stream was given so far."""
        self._stream.wait_stream(self._backend.current_stream(self._device))

    def stamp(self) -> Any:
        """An event with the device's time after all work issued so far."""
        event = self._backend.Event(enable_timing=True)
        event.record(self._stream)
        return event


class NullStream:
    """No stream at all: everything happens in program order. The same code runs on it where there is no accelerator."""

    def issue(self) -> AbstractContextManager[Any]:
        """Do nothing special."""
        return nullcontext()

    def mark(self) -> None:
        """No event: the work is done when the call returns."""

    def hand_over(self, batch: Any, mark: Any) -> None:
        """The batch is ready already."""

    def follow_compute(self) -> None:
        """Program order does."""

    def stamp(self) -> None:
        """There is no clock but the host's."""


def open_stream(device: torch.device) -> SideStream | None:
    """A side stream for ``device``, or None where the device has none (the CPU, MPS)."""
    if device.type == "cpu":
        return None
    backend = torch.get_device_module(device)
    if not all(hasattr(backend, name) for name in ("Stream", "Event", "stream", "current_stream")):
        return None
    return DeviceStream(device)
