"""Device events that mark the end of copies from host memory that torch's allocator does not manage."""

import threading
from typing import Any, Protocol
from weakref import WeakSet

import torch


class CopiesBatches(Protocol):
    """An object that copies batches on its own stream."""

    stream: Any


copying: WeakSet[CopiesBatches] = WeakSet()
"""All objects that copy batches on a stream other than the current stream.

The set holds these objects, not their streams: torch 2.11 frees a stream without clearing the weak references to it,
which then point to other memory.
"""
_lock = threading.RLock()
"""Held while ``copying`` is added to or iterated: batches are dropped in several threads. A thread may take it twice,
because a garbage collection that begins meanwhile may drop a batch, too."""


def register(copier: CopiesBatches) -> None:
    """Add an object to ``copying``."""
    with _lock:
        copying.add(copier)


class CopyFence:
    """Records events after all copies issued so far, and checks if the device has passed these events.

    Torch's allocator for page-locked memory records such events for its own memory. For our memory, events on the
    current stream and on the stream of each of ``copying`` are enough, because batches are copied only on these.

    Args:
        backend: module of the device, like ``torch.cuda``.
    """

    def __init__(self, backend: Any = torch.cuda) -> None:
        self._backend = backend
        self._device = backend.current_device()

    def events(self) -> list[Any]:
        """Record and return the events. Called in the thread that drops a batch."""
        if self._backend.is_current_stream_capturing():
            return [None]  # the CUDA graph would contain the event; passed() records the events later
        with _lock:
            streams = {copier.stream for copier in copying}
        events = []
        for stream in {self._backend.current_stream(self._device), *streams}:
            event = self._backend.Event()
            event.record(stream)
            events.append(event)
        return events

    def wait(self, events: list[Any]) -> None:
        """Wait until the device has passed all ``events``."""
        for event in events:
            if event is not None:
                event.synchronize()

    def passed(self, events: list[Any]) -> bool:
        """Return True if the device has passed all ``events``. Does not wait."""
        if events == [None]:
            if self._backend.is_current_stream_capturing():
                return False
            events[:] = self.events()
        while events and events[-1].query():
            events.pop()
        return not events
