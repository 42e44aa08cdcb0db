"""Batches in slots on a CUDA device: page-locked, and never changed while they are copied."""

import gc
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch
from slot_memory import memory_of
from torch import Tensor
from torch.utils.data import Dataset

from lightning_feed.load import copy_fence, slot_loaders
from lightning_feed.load.copy_fence import CopiesBatches, CopyFence
from lightning_feed.load.loader import FeedLoader

SIDE = (1024, 1024)
CYCLES = 40_000_000
"""About 20 ms of a device's clock: many batches are made meanwhile."""


class Numbered(Dataset[Tensor]):
    """Sample ``i`` is full of ``i``."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        return torch.full(SIDE, float(index))


@dataclass(eq=False)
class Copier:
    """Copies batches on a stream of its own."""

    stream: Any


def loader() -> FeedLoader:
    return FeedLoader(Numbered(), batch_size=2, num_workers=1, pin_memory=True, persistent_workers=True)


@pytest.fixture(autouse=True)
def copying(monkeypatch: pytest.MonkeyPatch) -> WeakSet[CopiesBatches]:
    """A device that is in use, and no copiers of other tests: what is left of those may be collected at any moment."""
    torch.zeros(1, device="cuda")
    copiers: WeakSet[CopiesBatches] = WeakSet()
    monkeypatch.setattr(copy_fence, "copying", copiers)
    return copiers


def copied(stream: Any) -> int:
    """All batches, copied behind long work of the device, and dropped at once."""
    wrong = 0
    results: list[tuple[float, Tensor]] = []
    for _ in range(2):
        for number, batch in enumerate(loader()):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
                results.append((2.0 * number, batch.to("cuda", non_blocking=True)))
            del batch
            if len(results) == 16:
                torch.cuda.synchronize()
                wrong += sum(copy[0].mean().item() != expected for expected, copy in results)
                results.clear()
    return wrong


@pytest.mark.gpu(twin="load/test_slots_faults.py::test_slot_batches_are_locked_by_registering_and_not_by_a_pin_thread")
def test_slot_batches_are_pinned_by_registering_and_not_by_a_pin_thread() -> None:
    passed = iter(loader())
    memory = memory_of(passed.source)
    assert memory is not None
    assert memory.registers
    assert passed.source._pin_memory is False
    assert all(batch.is_pinned() for batch in passed)


@pytest.mark.gpu(twin="load/test_slots.py::test_slot_is_freed_only_when_every_stream_has_finished_its_copies")
@pytest.mark.parametrize("where", ["the current stream", "a stream of ours"])
def test_a_batch_is_not_changed_while_it_is_copied(where: str, copying: WeakSet[CopiesBatches]) -> None:
    copier = Copier(torch.cuda.current_stream())
    if where == "a stream of ours":
        copier.stream = torch.cuda.Stream()
        copying.add(copier)
    assert copied(copier.stream) == 0


@pytest.mark.gpu(twin="simulated/test_prefetch_order.py::test_copy_fence_records_no_event_on_a_deleted_stream")
def test_copy_fence_records_no_event_on_a_deleted_stream(copying: WeakSet[CopiesBatches]) -> None:
    copiers = [Copier(torch.cuda.Stream()) for _ in range(8)]
    copying.update(copiers)
    assert len(CopyFence().events()) == 1 + 8
    copiers.clear()
    gc.collect()
    torch.zeros(8).tolist()  # takes memory that was freed
    assert len(CopyFence().events()) == 1


@pytest.mark.gpu(no_twin="the simulated device takes the values of a copy when it is queued")
def test_batches_change_during_their_copy_if_a_slot_is_freed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyFence, "passed", lambda *_: True)
    assert copied(torch.cuda.current_stream()) > 0


@pytest.mark.gpu(twin="load/test_slots_faults.py::test_pinning_thread_is_kept_where_memory_cannot_be_registered")
def test_batches_are_pinned_by_torch_if_the_driver_refuses_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_loaders, "can_register", lambda: False)
    passed = iter(loader())
    assert passed.source._pin_memory is True
    assert all(batch.is_pinned() for batch in passed)


@pytest.mark.gpu(no_twin="torch's allocator of page-locked memory needs a device")
def test_worker_threads_collate_into_pinned_memory() -> None:
    threads = FeedLoader(Numbered(), batch_size=2, num_workers=2, workers="thread", pin_memory=True)
    for number, batch in enumerate(threads):
        assert batch.is_pinned()
        assert batch[0, 0, 0] == 2 * number
