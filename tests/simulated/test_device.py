"""The simulated device itself: what it calls a race, what waits, what memory is handed out again, and when."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated.device import DEVICE, LAUNCH_QUEUE, MS, POOL, SimulatedDevice, simulated
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
    made = zeros()
    side = device.Stream()
    wait(side, device.compute)
    with device.stream(side):
        _ = made + 1


def write_after_read(device: SimulatedDevice, wait: Callable[[Any, Any], None]) -> None:
    made = zeros()
    side = device.Stream()
    side.wait_stream(device.compute)
    with device.stream(side):
        _ = made + 1
    wait(device.compute, side)
    made.add_(1)


def write_after_write(device: SimulatedDevice, wait: Callable[[Any, Any], None]) -> None:
    made = zeros()
    side = device.Stream()
    wait(side, device.compute)
    with device.stream(side):
        made.zero_()


def memory_handed_out_again(device: SimulatedDevice, wait: Callable[[Any, Any], None]) -> None:
    made = zeros()
    side = device.Stream()
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
def test_a_race_is_found_only_where_no_wait_orders_the_streams(
    device: SimulatedDevice, hazard: Any, wait: Any, found: int
) -> None:
    hazard(device, wait)
    assert len(device.races) == found


def test_waiting_for_an_event_does_not_cover_work_queued_after_it(device: SimulatedDevice) -> None:
    side = device.Stream()
    early = device.compute.record_event()
    made = zeros()
    side.wait_event(early)
    with device.stream(side):
        _ = made + 1
    assert "without waiting for compute" in device.races[0]


def test_memory_under_record_stream_is_reused_only_after_its_use_ends(device: SimulatedDevice) -> None:
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


def test_freed_memory_is_reused_by_its_own_stream_at_once(device: SimulatedDevice) -> None:
    for _ in range(5):
        device.launch(10, reads=zeros(64))
    assert device.memory_bytes() == 64


def test_concurrent_reads_and_views_are_not_races(device: SimulatedDevice) -> None:
    made = zeros()
    side = device.Stream()
    side.wait_stream(device.compute)
    for _ in range(3):
        with device.stream(side):
            _ = made[:4].view(2, 2) + 1
        _ = made * 2
    assert device.races == []


def test_writes_to_out_arguments_are_checked_for_races(device: SimulatedDevice) -> None:
    made = zeros()
    side = device.Stream()
    with device.stream(side):
        torch.add(torch.ones(8, dtype=torch.uint8, device=DEVICE), 1, out=made)
    assert any(race.startswith("aten.add.out") for race in device.races)


def test_streams_come_from_a_pool(device: SimulatedDevice) -> None:
    first = device.Stream()
    others = [device.Stream() for _ in range(POOL - 1)]
    assert first not in others
    assert device.Stream() is first


def test_an_unordered_decoder_is_found_only_if_it_gets_reused_memory(device: SimulatedDevice) -> None:
    device.launch(10, reads=zeros(12))
    device.decode([(3, 2, 2)])
    assert "decode on decoder" in device.races[0]
    device.races.clear()
    with device.stream(device.Stream()):
        device.decode([(3, 2, 2)])
    assert device.races == []


# --- time -------------------------------------------------------------------------------------------------------------


def test_kernels_queue_up_while_the_host_continues(device: SimulatedDevice) -> None:
    began = device.now
    device.launch(10)
    device.launch(5)
    assert device.now == began
    assert device.compute.free_at == began + 15 * MS
    device.synchronize()
    assert device.now == began + 15 * MS


def test_a_launch_takes_launch_ns_and_waits_when_the_queue_is_full() -> None:
    with simulated(SimulatedDevice(launch_ns=1000)) as device:
        began = device.now
        for _ in range(LAUNCH_QUEUE):
            device.launch(10)
        assert device.now == began + 1000 * LAUNCH_QUEUE
        device.launch(10)
        assert device.now == began + 1000 + 10 * MS  # the first kernel is over


@pytest.mark.parametrize(("pinned", "non_blocking", "blocked"), [(True, True, 0), (True, False, 18), (False, True, 18)])
def test_a_copy_blocks_the_host_unless_pinned_and_non_blocking(
    device: SimulatedDevice, pinned: bool, non_blocking: bool, blocked: int
) -> None:
    began = device.now
    device.launch(10)
    batch = host(device) if pinned else torch.zeros(8, dtype=torch.uint8)
    batch.to(DEVICE, non_blocking=non_blocking)
    assert device.now - began == blocked * MS
    assert device.compute.free_at - began == 18 * MS
    assert bool(device.waits) == bool(blocked)


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
def test_reading_values_on_the_host_waits_for_the_device(
    device: SimulatedDevice, look: Callable[[Tensor], Any]
) -> None:
    made = torch.zeros((), device=DEVICE)
    device.launch(10, writes=made)
    began = device.now
    if look is Tensor.numpy:
        made = made.cpu()
    look(made)
    assert device.now - began == 10 * MS
    assert device.waits[0].blocked_ns == 10 * MS
    assert "test_device.py" in device.waits[0].where


def test_elapsed_time_is_known_only_after_both_events_have_passed(device: SimulatedDevice) -> None:
    first = device.event()
    last = device.event()
    first.record()
    device.launch(10)
    last.record()
    assert (first.query(), last.query()) == (True, False)
    with pytest.raises(RuntimeError, match="completed"):
        first.elapsed_time(last)
    device.host(10)
    assert first.elapsed_time(last) == 10


def test_the_values_of_a_copy_are_known_for_its_views(device: SimulatedDevice) -> None:
    batch = device.pin(torch.arange(12, dtype=torch.int32))
    there = batch.to(DEVICE, non_blocking=True)
    batch.zero_()
    assert device.content(there).tolist() == list(range(12))
    assert device.content(there[3:9].view(2, 3)[1]).tolist() == [6, 7, 8]


# --- refusals, as torch has them --------------------------------------------------------------------------------------


def test_record_stream_on_host_tensors_fails_with_the_error_of_torch(device: SimulatedDevice) -> None:
    made: Any = torch.zeros(8)
    with pytest.raises(NotImplementedError) as ours:
        made.record_stream(device.compute)
    on_host: Any = torch.Stream(device="cpu")
    with pytest.raises(NotImplementedError) as torchs:
        torch._C.TensorBase.record_stream(made, on_host)
    assert str(torchs.value).startswith(str(ours.value))


def test_events_without_timing_refuse_elapsed_time(device: SimulatedDevice) -> None:
    events: list[Any] = [device.Event(), device.Event(), device.event()]
    for event in events:
        event.record()
    for first, last in ((0, 1), (0, 2), (2, 1)):
        with pytest.raises(ValueError, match="enable_timing=True"):
            events[first].elapsed_time(events[last])


# --- two devices ------------------------------------------------------------------------------------------------------

SECOND = torch.device("meta", 1)


def test_each_device_has_its_own_streams(device: SimulatedDevice) -> None:
    there = device.current_stream(SECOND)
    assert there is not device.current_stream()
    assert [device.Stream().index, device.Stream(DEVICE).index, device.Stream(device=SECOND).index] == [0, 0, 1]
    with device.device(1):
        assert device.current_device() == 1
        assert device.current_stream() is there
        assert device.Stream().index == 1
    assert device.current_device() == 0


def test_entering_a_stream_makes_its_device_the_current_one(device: SimulatedDevice) -> None:
    here = device.Stream()
    there = device.Stream(SECOND)
    with device.stream(here):
        with device.stream(there):
            assert (device.current_device(), device.current_stream()) == (1, there)
            assert device.current_stream(0) is here
        assert (device.current_device(), device.current_stream()) == (0, here)
        assert device.current_stream(SECOND) is not there


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


def test_events_belong_to_the_device_that_they_were_first_recorded_on(device: SimulatedDevice) -> None:
    here = device.event()
    there = device.event()
    here.record()
    there.record(device.current_stream(SECOND))
    with pytest.raises(RuntimeError, match="Event device 1 does not match recording stream's device 0"):
        there.record()
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        here.elapsed_time(there)
    device.launch(10)
    device.current_stream(SECOND).wait_event(device.compute.record_event())  # that is allowed
    assert device.current_stream(SECOND).free_at == device.compute.free_at
