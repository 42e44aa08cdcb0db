"""The slots behind a loader's iterator, and a device that copies from slots."""

import collections
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_feed.load.slot_batches import SlotCollate
from lightning_feed.load.slots import SlotMemory


def memory_of(iterator: Any) -> SlotMemory | None:
    """The slots of torch's iterator. None if it has none."""
    collate = getattr(iterator, "_collate_fn", None)
    return collate.memory if isinstance(collate, SlotCollate) else None


class FakeDevice:
    """Streams whose work ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        self.reached: collections.Counter[str] = collections.Counter()
        monkeypatch.setattr("lightning_feed.load.copy_fence.copying", [SimpleNamespace(stream="copies")])
        monkeypatch.setattr("lightning_feed.load.slots._register", lambda *_: True)
        monkeypatch.setattr("lightning_feed.load.slots._unregister", lambda _: None)

    def current_device(self) -> int:
        """See :mod:`torch.cuda`."""
        return 0

    def current_stream(self, _device: int) -> str:
        """See :mod:`torch.cuda`."""
        return "main"

    def is_current_stream_capturing(self) -> bool:
        """See :mod:`torch.cuda`."""
        return self.capturing

    def Event(self) -> "FakeEvent":
        """See :mod:`torch.cuda`."""
        return FakeEvent(self)


class FakeEvent:
    """An event of a :class:`FakeDevice`."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._stream = ""
        self._at = 0

    def record(self, stream: str) -> None:
        """See :class:`torch.cuda.Event`."""
        assert not self._device.capturing
        self._stream = stream
        self._at = self._device.reached[stream] + 1

    def query(self) -> bool:
        """See :class:`torch.cuda.Event`."""
        return self._device.reached[self._stream] >= self._at

    def synchronize(self) -> None:
        """See :class:`torch.cuda.Event`."""
        self._device.reached[self._stream] = max(self._at, self._device.reached[self._stream])
