"""Batches staged ahead: errors wait for their step, and the order of events on a simulated device."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated.device import DEVICE, Event, SimulatedDevice, simulated

from lightning_feed.transfer import prefetcher as streams
from lightning_feed.transfer.prefetcher import RUN_AHEAD, CopiedBatch, DeviceStream, Prefetcher, SideStream, open_stream


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated(SimulatedDevice(copy_bytes_per_ms=1)) as made:
        yield made


def pinned(device: SimulatedDevice, size: int = 8) -> torch.Tensor:
    return device.pin(torch.zeros(size, dtype=torch.uint8))


def to_device(batch: torch.Tensor) -> torch.Tensor:
    return batch.to(DEVICE, non_blocking=True)


def test_an_exception_while_copying_ahead_is_raised_when_the_batch_is_taken() -> None:
    prefetcher = Prefetcher(SideStream())

    def fails(batch: Any) -> Any:
        raise ValueError("odd batch")

    staged = prefetcher.stage(1, prepare=lambda x: x, copy=fails)
    with pytest.raises(ValueError, match="odd batch") as caught:
        prefetcher.take(staged)
    assert any(entry.name == "fails" for entry in caught.traceback)


def test_an_error_of_earlier_device_work_is_noted_as_such(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports what a kernel did wrong at whatever call is next, and that may be ours."""

    def fails(event: Event) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(streams, "RUN_AHEAD_BYTES", 0)
    prefetcher = Prefetcher(DeviceStream(DEVICE))
    for _ in range(RUN_AHEAD + 1):
        device.launch(10, reads=prefetcher.pass_on(pinned(device), to_device))
    monkeypatch.setattr(Event, "synchronize", fails)
    staged = prefetcher.stage(pinned(device), prepare=lambda x: x, copy=to_device)
    with pytest.raises(RuntimeError, match="CUDA error: device-side assert triggered") as caught:
        prefetcher.take(staged)
    if sys.version_info >= (3, 11):
        assert "work that was queued earlier" in "".join(caught.value.__notes__)


def test_a_keyboard_interrupt_while_copying_ahead_is_raised_at_once() -> None:
    def interrupted(batch: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Prefetcher(SideStream()).stage(1, prepare=interrupted, copy=lambda x: x)


def test_none_is_a_valid_batch() -> None:
    prefetcher = Prefetcher(SideStream())
    assert prefetcher.take(prefetcher.stage(None, prepare=lambda x: x, copy=lambda x: x)) is None
    assert prefetcher.take(CopiedBatch(batch=None)) is None


@pytest.mark.usefixtures("device")
def test_open_stream_returns_none_for_unsupported_devices() -> None:
    assert open_stream(torch.device("cpu")) is None
    assert isinstance(open_stream(DEVICE), DeviceStream)
    for other in ("mps", "hpu", "xla"):  # whatever their modules have
        assert open_stream(torch.device(other)) is None


def test_a_copy_waits_for_tensors_prepared_on_the_device(device: SimulatedDevice) -> None:
    """A hook may put tensors on the device itself; the side stream must not read them before they are written."""
    prefetcher = Prefetcher(DeviceStream(DEVICE))

    def prepare(batch: Any) -> Any:
        noise = torch.empty(8, device=DEVICE)
        device.launch(5, writes=noise)
        return batch, noise

    def copy(batch: Any) -> Any:
        return to_device(batch[0]) + batch[1]

    staged = prefetcher.stage(pinned(device), prepare=prepare, copy=copy)
    torch.ones(8, device=DEVICE)  # may get the memory of what was prepared
    device.launch(reads=prefetcher.take(staged))
    assert device.races == []
