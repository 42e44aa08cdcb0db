"""The simulated device itself: what it calls a race, what waits, what memory is handed out again, and when."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated.device import DEVICE, MS, SimulatedDevice, simulated
from torch import Tensor


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated(SimulatedDevice(copy_bytes_per_ms=1)) as made:
        yield made


def zeros(size: int = 8) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=DEVICE)


def host(device: SimulatedDevice, size: int = 8) -> Tensor:
    return device.pin(torch.zeros(size, dtype=torch.uint8))


# --- order ------------------------------------------------------------------------------------------------------------


def read_after_write(device: SimulatedDevice, wait: Callable[[Any, Any], None]) -> None:
    made, side = zeros(), device.Stream()
    wait(side, device.compute)
    with device.stream(side):
        _ = made + 1


def write_after_read(device: SimulatedDevice, wait: Callable[[Any, Any], None]) -> None:
    made, side = zeros(), device.Stream()
    side.wait_stream(device.compute)
    with device.stream(side):
        _ = made + 1
    wait(device.compute, side)
    made.add_(1)


def write_after_write(device: SimulatedDevice, wait: Callable[[Any, Any], None]) -> None:
    made, side = zeros(), device.Stream()
    wait(side, device.compute)
    with device.stream(side):
        made.zero_()


def memory_handed_out_again(device: SimulatedDevice, wait: Callable[[Any, Any], None]) -> None:
    made, side = zeros(), device.Stream()
    side.wait_stream(device.compute)
    with device.stream(side):
        _ = made + 1
    del made
    wait(device.compute, side)
    zeros()


def by_event(late: Any, early: Any) -> None:
    late.wait_event(early.record_event())


def by_host(late: Any, early: Any) -> None:
    early.synchronize()


HAZARDS = [read_after_write, write_after_read, write_after_write, memory_handed_out_again]


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.parametrize(
    ("wait", "found"),
    [(by_event, 0), (by_host, 0), (lambda late, early: late.wait_stream(early), 0), (lambda late, early: None, 1)],
    ids=["by event", "by host", "by stream", "not at all"],
)
def test_a_race_is_found_and_waiting_for_it_is_none(
    device: SimulatedDevice, hazard: Any, wait: Any, found: int
) -> None:
    hazard(device, wait)
    assert len(device.races) == found


def test_an_event_knows_only_what_was_queued_before_it(device: SimulatedDevice) -> None:
    side, early = device.Stream(), device.compute.record_event()
    made = zeros()
    side.wait_event(early)
    with device.stream(side):
        _ = made + 1
    assert "without waiting for compute" in device.races[0]


def test_recorded_memory_is_not_handed_out_again_before_its_time(device: SimulatedDevice) -> None:
    side = device.Stream()
    with device.stream(side):
        made = zeros(64)
    device.compute.wait_stream(side)
    device.launch(10, reads=made)
    made.record_stream(device.compute)  # type: ignore[arg-type]
    del made
    with device.stream(side):
        again = zeros(64)
        assert device.memory_bytes(side) == 128
        device.host(11)
        del again
        zeros(64)
    assert device.memory_bytes(side) == 128
    assert device.races == []


def test_a_decoder_that_ignores_order_is_found_unless_its_memory_was_never_used(device: SimulatedDevice) -> None:
    device.launch(10, reads=zeros(12))
    device.decode([(3, 2, 2)])
    assert "decode on decoder" in device.races[0]
    device.races.clear()
    with device.stream(device.Stream()):
        device.decode([(3, 2, 2)])
    assert device.races == []


# --- time -------------------------------------------------------------------------------------------------------------


def test_copies_share_one_engine_and_run_beside_kernels(device: SimulatedDevice) -> None:
    began = device.now
    device.launch(10)
    sides = [device.Stream(), device.Stream()]
    for side in sides:
        with device.stream(side):
            host(device).to(DEVICE, non_blocking=True)
    assert [side.free_at - began for side in sides] == [8 * MS, 16 * MS]


@pytest.mark.parametrize(
    "look",
    [Tensor.item, bool, Tensor.tolist, Tensor.cpu, Tensor.nonzero, lambda made: torch.equal(made, made), Tensor.numpy],
)
def test_looking_at_values_waits(device: SimulatedDevice, look: Callable[[Tensor], Any]) -> None:
    made = torch.zeros((), device=DEVICE)
    device.launch(10, writes=made)
    began = device.now
    if look is Tensor.numpy:
        made = made.cpu()
    look(made)
    assert device.now - began == 10 * MS
    assert device.waits[0].blocked_ns == 10 * MS
    assert "test_device.py" in device.waits[0].where


# --- two devices ------------------------------------------------------------------------------------------------------

SECOND = torch.device("meta", 1)


def test_each_device_has_streams_of_its_own(device: SimulatedDevice) -> None:
    there = device.current_stream(SECOND)
    assert there is not device.current_stream()
    assert [device.Stream().index, device.Stream(DEVICE).index, device.Stream(device=SECOND).index] == [0, 0, 1]
    with device.device(1):
        assert device.current_device() == 1
        assert device.current_stream() is there
        assert device.Stream().index == 1
    assert device.current_device() == 0


def test_work_goes_to_the_device_of_its_tensors(device: SimulatedDevice) -> None:
    began = device.now
    batch = host(device).to(SECOND, non_blocking=True)
    device.launch(10)
    assert batch.device == DEVICE
    with device.device(1):
        again = zeros()
    _ = (batch + 1) * again
    assert [stream.free_at - began for stream in device.defaults] == [10 * MS, 8 * MS]
    assert device.memory_bytes(device.compute) == 0
    assert device.races == []
    with pytest.raises(RuntimeError, match="same device"):
        _ = batch + zeros()
