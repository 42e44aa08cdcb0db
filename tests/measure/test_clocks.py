"""The ring of events: fixed, never waited for, and honest about what it could not measure."""

import logging
from typing import Any

import pytest
import torch
from measure.failing_device import FailingDevice
from simulated.device import MS, Event, SimulatedDevice

from lightning_feed.measure.step_meter import EventRing, open_ring


def _step(device: SimulatedDevice, ring: EventRing, note: Any, work_ms: float = 5) -> None:
    ring.mark(0)
    device.launch(work_ms)
    ring.mark(1)
    ring.end_step(note)


def test_event_ring_reads_a_step_once_the_device_has_finished_it() -> None:
    device = SimulatedDevice()
    ring = EventRing(device.event, 8)
    ring.begin()
    _step(device, ring, "first")
    assert ring.read() is None
    device.host(5)
    step = ring.read()
    assert step is not None
    assert step.note == "first"
    assert step.intervals == [(0, pytest.approx(0)), (1, pytest.approx(5e6))]
    assert ring.read() is None
    assert device.waited == 0


def test_a_full_ring_loses_steps_and_recovers() -> None:
    device = SimulatedDevice()
    ring = EventRing(device.event, 7)  # the first mark and three steps of two
    ring.begin()
    for number in range(5):
        _step(device, ring, number)
    assert ring.lost == 2
    device.host(100)
    assert [step.note for step in iter(ring.read, None)] == [0, 1, 2]
    _step(device, ring, "no start")  # its start was not marked
    assert ring.lost == 3
    _step(device, ring, "measured")
    device.host(100)
    step = ring.read()
    assert step is not None
    assert step.note == "measured"
    assert step.intervals == [(0, pytest.approx(95e6 - 95e6)), (1, pytest.approx(5e6))]


def test_an_abandoned_step_is_not_part_of_the_next() -> None:
    device = SimulatedDevice()
    ring = EventRing(device.event, 8)
    ring.begin()
    ring.mark(0)
    device.launch(70)
    device.host(100)
    ring.begin()
    _step(device, ring, "next")
    device.host(100)
    step = ring.read()
    assert step is not None
    assert step.intervals == [(0, pytest.approx(0)), (1, pytest.approx(5e6))]


def test_events_that_cannot_be_compared_lose_the_step_without_raising() -> None:
    device = SimulatedDevice()

    class OtherStream(Event):
        def elapsed_time(self, end_event: Event) -> float:
            raise RuntimeError("device not ready")

    ring = EventRing(lambda: OtherStream(device), 8)
    ring.begin()
    _step(device, ring, "note")
    device.host(100)
    assert ring.read() == ("note", None)
    assert ring.lost == 1


@pytest.mark.parametrize("behind", [0, 1, 3, 40])
def test_catching_up_queries_few_events(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the steps that the device has finished, up to a quarter as many as it has not may be left for later."""
    device = SimulatedDevice()
    ring = EventRing(device.event, 512)
    ring.begin()
    asked: list[Event] = []
    query = Event.query

    def counted(event: Event) -> bool:
        asked.append(event)
        return query(event)

    monkeypatch.setattr(Event, "query", counted)
    read = 0
    for window in range(1, 6):
        for number in range(50):
            _step(device, ring, number)
        device.now = max(device.now, device.compute.free_at - 5 * MS * behind)
        asked.clear()
        ring.catch_up()
        assert window == 1 or len(asked) <= 4
        assert 0 <= 50 * window - behind - read - ring.passed <= behind // 4
        while ring.passed:
            assert ring.read() is not None
            read += 1


# --- a device that fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["record", "query", "elapsed_time", "synchronize"])
def test_a_failing_device_stops_the_clock_without_raising(call: str, caplog: pytest.LogCaptureFixture) -> None:
    device = FailingDevice()
    ring = EventRing(device.event, 64)
    ring.begin()
    for number in range(4):
        _step(device, ring, number)
    device.host(100)
    assert ring.read() is not None
    device.fails_at = call
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        _step(device, ring, 4)
        read = 1 + (ring.read() is not None)
        ring.wait()
        assert device.broken
        asked = device.reached
        _step(device, ring, 5)
        ring.begin()
        _step(device, ring, 6)
        assert ring.read() is None
        ring.wait()
    assert device.reached == asked, "a device that has failed is asked again"
    assert ring.lost == 7 - read
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "The device clock stopped: CUDA error: an illegal memory access was encountered"


# --- devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "mps", "hpu", "xla", "mtia", "meta"])
def test_devices_without_timing_events_get_no_event_ring(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For some of them ``torch.get_device_module`` raises; those of MPS make the host wait."""
    monkeypatch.setattr(torch, "get_device_module", lambda _: _Backend(_Event))
    assert open_ring(torch.device(kind)) is None


class _Backend:
    def __init__(self, event: Any) -> None:
        self.Event = event


class _Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


class _Unreadable(_Event):
    def elapsed_time(self, end_event: Any) -> float:
        return float("nan")


class _Missing(_Event):
    def record(self) -> None:
        raise NotImplementedError


class _Busy(_Event):
    def query(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("backend", "works"),
    [
        (_Backend(_Event), True),
        (_Backend(_Busy), True),
        (_Backend(_Unreadable), False),
        (_Backend(_Missing), False),
        (object(), False),
    ],
    ids=["works", "busy", "nan", "not implemented", "no events"],
)
def test_event_ring_opens_only_if_timing_events_work(
    backend: Any, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: backend)
    ring = open_ring(torch.device("xpu"), size=4)
    assert (ring is not None) is works
