"""Faults put into the code of streams, events and their ring, one at a time: each makes a check fail."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from made_samples import jpegs
from simulated.device import DEVICE, SimulatedDevice, simulated
from simulated.image_decoders import image_decoders
from torch import Tensor

from lightning_feed.images.nvjpeg import NvJpeg
from lightning_feed.measure import step_meter
from lightning_feed.measure.step_meter import EventRing
from lightning_feed.transfer import prefetcher as streams
from lightning_feed.transfer.prefetcher import DeviceStream, Prefetcher

pytestmark = pytest.mark.nightly

SECOND = torch.device("meta", 1)
"""Not the current device."""
STEPS = 8


def batches_are_ordered() -> None:
    """Batches with a tensor that is on the device before the transfer, some of them staged and some not."""
    with simulated(SimulatedDevice(copy_bytes_per_ms=1)) as device:
        prefetcher = Prefetcher(DeviceStream(SECOND))

        def prepare(host: Tensor) -> Any:
            noise = torch.empty(8, dtype=torch.uint8, device=SECOND)
            with device.device(SECOND):
                device.launch(5, writes=noise)
            return host, noise

        def copy(pair: Any) -> Tensor:
            return pair[0].to(SECOND, non_blocking=True) + pair[1]

        for number in range(STEPS):
            host = device.pin(torch.zeros(8, dtype=torch.uint8))
            if number % 4 == 3:
                batch = prefetcher.pass_on(prepare(host), copy)
            else:
                staged = prefetcher.stage(host, prepare=prepare, copy=copy)
                torch.ones(8, dtype=torch.uint8, device=SECOND)  # may be given the memory of what was prepared
                batch = prefetcher.take(staged)
            with device.device(SECOND):
                device.launch(10, what="step", reads=batch)
        assert device.races == []


def copies_run_beside_the_steps() -> None:
    """Nothing is prepared on the device, so nothing but the copies themselves is waited for."""
    with simulated(SimulatedDevice(copy_bytes_per_ms=1)) as device:
        prefetcher = Prefetcher(DeviceStream(SECOND))
        for _ in range(STEPS):
            host = device.pin(torch.zeros(8, dtype=torch.uint8))
            staged = prefetcher.stage(host, prepare=lambda x: x, copy=lambda x: x.to(SECOND, non_blocking=True))
            batch = prefetcher.take(staged)
            with device.device(SECOND):
                device.launch(10, what="step", reads=batch)
            del batch, staged
        assert device.races == []
        assert {stream.index for stream, _ in device.copied} == {1}
        assert not {stream for stream, _ in device.copied} & set(device.defaults), "copied on the compute stream"


def the_host_is_not_far_ahead() -> None:
    with simulated(SimulatedDevice()) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "RUN_AHEAD_BYTES", 0)
        prefetcher = Prefetcher(DeviceStream(DEVICE))
        for _ in range(STEPS):
            staged = prefetcher.stage(torch.zeros(8), prepare=lambda x: x, copy=lambda x: x.to(DEVICE))
            batch = prefetcher.take(staged)
            device.launch(10, reads=batch)
            del batch, staged
        assert device.memory_bytes() <= 32 * (streams.RUN_AHEAD + 2), "memory for every step"


def nothing_is_issued_in_a_capture() -> None:
    with simulated(SimulatedDevice()) as device:
        stream = DeviceStream(DEVICE)
        assert not stream.is_capturing()
        with device.graph():
            assert stream.is_capturing(), "a capture goes unseen"


def images_are_decoded_into_free_memory() -> None:
    """By a decoder whose stream was handed out again to another part of the program."""
    device = SimulatedDevice()
    file = torch.frombuffer(bytearray(jpegs(1)[0]), dtype=torch.uint8)
    with simulated(device), image_decoders(device):
        decode = NvJpeg(SECOND)
        for _ in range(STEPS):
            with device.stream(decode._stream):
                device.launch(10, reads=torch.empty(12, dtype=torch.uint8, device=SECOND))
            [image] = decode([file])
            assert device._block(image).pool.stream.index == 1, "decoded on another device"
            with device.device(SECOND):
                device.launch(10, what="step", reads=image)
            del image
        assert device.races == []


def steps_are_timed(size: int = 7) -> None:
    """A host that is further ahead than the ring has events: those that are still to be read are not used again."""
    with simulated(SimulatedDevice()) as device:
        ring = step_meter.open_ring(DEVICE, size)
        assert ring is not None
        ring.begin()
        for number in range(2 * size):
            ring.mark(step_meter.DATA)
            device.launch(5)
            ring.mark(step_meter.COMPUTE)
            ring.end_step(number)
        device.host(1000)
        measured = list(iter(ring.read, None))
        assert [step.note for step in measured] == list(range(size // 2))
        assert {tuple(step.intervals or ()) for step in measured} == {((step_meter.DATA, 0), (step_meter.COMPUTE, 5e6))}


CHECKS = [
    batches_are_ordered,
    copies_run_beside_the_steps,
    the_host_is_not_far_ahead,
    nothing_is_issued_in_a_capture,
    images_are_decoded_into_free_memory,
    steps_are_timed,
]


class Mutant(NamedTuple):
    """A text in the source of a function, what takes its place, the check that fails then, and what that says."""

    owner: Any
    name: str
    text: str
    becomes: str
    check: Callable[[], None]
    said: str


WITH_DEVICE = "current_stream(self._device)"
WITHOUT = "current_stream()"
UNORDERED = "without waiting for"
MUTANTS = {
    "no wait for the copy": Mutant(
        DeviceStream, "hand_over", "compute.wait_event(mark)", "pass", copies_run_beside_the_steps, "step on compute"
    ),
    "a batch is not recorded": Mutant(
        DeviceStream, "hand_over", "record_stream(batch, compute)", "pass", copies_run_beside_the_steps, "handed out"
    ),
    "handed over to the current device": Mutant(
        DeviceStream, "hand_over", WITH_DEVICE, WITHOUT, copies_run_beside_the_steps, "step on compute of device 1"
    ),
    "a mark on another stream": Mutant(
        DeviceStream, "mark", "record(self.stream)", "record()", copies_run_beside_the_steps, "step on compute"
    ),
    "a stream of the current device": Mutant(
        DeviceStream, "__init__", "Stream(device=device)", "Stream()", copies_run_beside_the_steps, "compute stream"
    ),
    "no stream is entered": Mutant(
        DeviceStream,
        "issue",
        "self._backend.stream(self.stream)",
        "nullcontext()",
        copies_run_beside_the_steps,
        "compute stream",
    ),
    "the side stream does not follow": Mutant(
        DeviceStream,
        "follow_compute",
        f"self.stream.wait_stream(self._backend.{WITH_DEVICE})",
        "pass",
        batches_are_ordered,
        UNORDERED,
    ),
    "what was prepared is not recorded": Mutant(
        DeviceStream, "follow_compute", "record_stream(batch, self.stream)", "pass", batches_are_ordered, "handed out"
    ),
    "the side stream follows the current device": Mutant(
        DeviceStream, "follow_compute", WITH_DEVICE, WITHOUT, batches_are_ordered, UNORDERED
    ),
    "a batch that was not staged does not follow": Mutant(
        Prefetcher, "pass_on", "self._stream.follow_compute(batch)", "pass", batches_are_ordered, UNORDERED
    ),
    "a host that does not wait": Mutant(
        DeviceStream, "limit_run_ahead", ".event.synchronize()", "", the_host_is_not_far_ahead, "memory for every step"
    ),
    "a capture is not asked for": Mutant(
        DeviceStream,
        "is_capturing",
        "bool(is_capturing())",
        "False",
        nothing_is_issued_in_a_capture,
        "a capture goes unseen",
    ),
    "the decoder's stream is not empty": Mutant(
        NvJpeg,
        "__call__",
        "self._stream.record_event().synchronize()\n    current =",
        "current =",
        images_are_decoded_into_free_memory,
        "decode on",
    ),
    "images are not recorded": Mutant(
        NvJpeg, "__call__", "image.record_stream(current)", "pass", images_are_decoded_into_free_memory, "handed out"
    ),
    "images are recorded on the current device": Mutant(
        NvJpeg, "__call__", WITH_DEVICE, WITHOUT, images_are_decoded_into_free_memory, "handed out"
    ),
    "a decoder of the current device": Mutant(
        NvJpeg, "__init__", "Stream(device, ", "Stream(", images_are_decoded_into_free_memory, "on another device"
    ),
    "a ring that is one event too long": Mutant(
        EventRing, "_record", ">= self._size", "> self._size", steps_are_timed, "assert"
    ),
    "a ring of events without timing": Mutant(
        step_meter, "event_maker", "enable_timing=True", "", steps_are_timed, "enable_timing=True"
    ),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_check_passes_on_the_unchanged_code(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_makes_its_check_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    original = getattr(mutant.owner, mutant.name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutant.text) == 1, "the code has changed: say where the fault is now"
    made: dict[str, Any] = {}
    exec(source.replace(mutant.text, mutant.becomes), original.__globals__, made)
    monkeypatch.setattr(mutant.owner, mutant.name, made[mutant.name])
    with pytest.raises((AssertionError, ValueError), match=mutant.said):
        mutant.check()
