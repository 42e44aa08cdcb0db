"""The order of events on a device, written down by a backend that only pretends to be one."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_feed.transfer import streams
from lightning_feed.transfer.prefetcher import Prefetcher, Staged
from lightning_feed.transfer.streams import DeviceStream, NullStream, open_stream


class Event:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self, stream: "Stream") -> None:
        self._log.append(f"record on {stream.name}")

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait")


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for the event")

    def wait_stream(self, stream: "Stream") -> None:
        self._log.append(f"{self.name} waits for {stream.name}")

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait")


class Backend:
    """The part of ``torch.cuda`` that is used, and a log of what was done to it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current = Stream("compute", self.log)
        self.made = 0

    def Stream(self, device: torch.device) -> Stream:  # torch's name
        self.made += 1
        return Stream("side", self.log)

    def Event(self, enable_timing: bool = False) -> Event:  # torch's name
        self.timed = enable_timing
        return Event(self.log)

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self._current = self._current, stream
        yield
        self._current = before

    def current_stream(self, device: torch.device) -> Stream:
        return self._current

    def work(self, name: str) -> None:
        self.log.append(f"{name} on {self._current.name}")


class Batch:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record_stream(self, stream: Stream) -> None:
        self._log.append(f"memory recorded on {stream.name}")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    made = Backend()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def test_order_of_events(backend: Backend) -> None:
    prefetcher = Prefetcher(DeviceStream(torch.device("cuda")))

    def prepare(batch: Any) -> Any:
        backend.work("prepare")
        return batch

    def copy(batch: Any) -> Any:
        backend.work("copy")
        return Batch(backend.log)

    staged = prefetcher.stage("host batch", prepare=prepare, copy=copy)
    backend.work("step")
    batch = prefetcher.take(staged)
    assert isinstance(batch, Batch)
    assert backend.log == [
        "prepare on compute",
        "copy on side",
        "record on side",
        "step on compute",
        "compute waits for the event",
        "memory recorded on compute",
    ]


def test_one_stream_for_all_batches(backend: Backend) -> None:
    prefetcher = Prefetcher(DeviceStream(torch.device("cuda")))
    for _ in range(5):
        prefetcher.take(prefetcher.stage(Batch(backend.log), prepare=lambda x: x, copy=lambda x: x))
    assert backend.made == 1


def test_an_exception_leaves_the_side_stream_and_waits_for_its_step() -> None:
    prefetcher = Prefetcher(NullStream())

    def fails(batch: Any) -> Any:
        raise ValueError("odd batch")

    staged = prefetcher.stage(1, prepare=lambda x: x, copy=fails)
    with pytest.raises(ValueError, match="odd batch") as caught:
        prefetcher.take(staged)
    assert any(entry.name == "fails" for entry in caught.traceback)


def test_interrupts_go_through_at_once() -> None:
    def interrupted(batch: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Prefetcher(NullStream()).stage(1, prepare=interrupted, copy=lambda x: x)


def test_none_is_a_batch() -> None:
    prefetcher = Prefetcher(NullStream())
    assert prefetcher.take(prefetcher.stage(None, prepare=lambda x: x, copy=lambda x: x)) is None
    assert prefetcher.take(Staged(batch=None)) is None


def test_open_stream(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_stream(torch.device("cpu")) is None
    assert isinstance(open_stream(torch.device("cuda")), DeviceStream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())  # as torch.mps: no streams
    assert open_stream(torch.device("mps")) is None
    assert streams.open_stream is open_stream


def test_a_copy_waits_for_what_was_prepared_on_the_device(backend: Backend) -> None:
    """A hook may put tensors on the device itself; the side stream must not read them before they are written."""
    prefetcher = Prefetcher(DeviceStream(torch.device("cuda")))

    def prepare(batch: Any) -> Any:
        backend.work("prepare")
        return torch.empty(1, device="meta")

    prefetcher.stage("host batch", prepare=prepare, copy=lambda batch: backend.work("transform"))
    assert backend.log[:3] == ["prepare on compute", "side waits for compute", "transform on side"]


def test_a_stamp_is_a_timing_event_on_the_side_stream(backend: Backend) -> None:
    assert DeviceStream(torch.device("cuda")).stamp() is not None
    assert (backend.timed, backend.log) == (True, ["record on side"])
    assert NullStream().stamp() is None
