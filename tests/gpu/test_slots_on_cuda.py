"""Batches in slots on a CUDA device: page-locked, and never changed while they are copied."""

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from slot_memory import memory_of
from torch.utils.data import Dataset

from lightning_feed.load import slot_loaders
from lightning_feed.load.copy_fence import CopyFence, copying
from lightning_feed.load.loader import FeedLoader

pytestmark = pytest.mark.gpu
SIDE = (1024, 1024)
CYCLES = 40_000_000
"""About 20 ms of a device's clock: many batches are made meanwhile."""


class Numbered(Dataset):
    """Sample ``i`` is full of ``i``."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full(SIDE, float(index))


@dataclass(eq=False)
class Copier:
    """Copies batches on a stream of its own."""

    stream: Any


def loader(**options):
    return FeedLoader(Numbered(), batch_size=2, num_workers=1, pin_memory=True, persistent_workers=True, **options)


@pytest.fixture(autouse=True)
def _started():
    torch.cuda.init()
    torch.zeros(1, device="cuda")


def copied(stream):
    """All batches, copied behind long work of the device, and dropped at once."""
    wrong = 0
    results = []
    for _ in range(2):
        for number, batch in enumerate(loader()):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
                results.append((2.0 * number, batch.to("cuda", non_blocking=True)))
            del batch
            if len(results) == 16:
                torch.cuda.synchronize()
                wrong += sum(batch[0].mean().item() != number for number, batch in results)
                results.clear()
    return wrong


def test_slot_batches_are_pinned_by_registering_and_not_by_a_pin_thread():
    passed = iter(loader())
    assert memory_of(passed.source).registers
    assert passed.source._pin_memory is False
    assert all(batch.is_pinned() for batch in passed)


@pytest.mark.parametrize("where", ["the current stream", "a stream of ours"])
def test_a_batch_is_not_changed_while_it_is_copied(where):
    copier = Copier(torch.cuda.current_stream())
    if where == "a stream of ours":
        copier.stream = torch.cuda.Stream()
        copying.add(copier)
    assert copied(copier.stream) == 0


def test_copy_fence_records_no_event_on_a_deleted_stream():
    copiers = [Copier(torch.cuda.Stream()) for _ in range(8)]
    copying.update(copiers)
    before = len(CopyFence().events())
    copiers.clear()
    gc.collect()
    torch.zeros(8).tolist()  # takes memory that was freed
    assert len(CopyFence().events()) == before - 8


def test_batches_change_during_their_copy_if_a_slot_is_freed_too_early(monkeypatch):
    monkeypatch.setattr(CopyFence, "passed", lambda *_: True)
    assert copied(torch.cuda.current_stream()) > 0


def test_batches_are_pinned_by_torch_if_the_driver_refuses_to_register(monkeypatch):
    monkeypatch.setattr(slot_loaders, "can_register", lambda: False)
    passed = iter(loader())
    assert passed.source._pin_memory is True
    assert all(batch.is_pinned() for batch in passed)


def test_worker_threads_collate_into_pinned_memory():
    threads = FeedLoader(Numbered(), batch_size=2, num_workers=2, workers="thread", pin_memory=True)
    for number, batch in enumerate(threads):
        assert batch.is_pinned()
        assert batch[0, 0, 0] == 2 * number
