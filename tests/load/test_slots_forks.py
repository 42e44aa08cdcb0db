"""Batches in slots that the program holds while it forks: they stay as they are in the child, and slots come back."""

import gc
import os
import signal
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from slot_memory import FakeDevice, memory_of
from torch.utils.data import DataLoader, Dataset

from lightning_feed.load import slots
from lightning_feed.load.copy_fence import CopyFence
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.slot_loaders import in_slots
from lightning_feed.load.slots import SlotMemory, own_forks


class Filled(Dataset):
    """Sample ``i`` is full of ``i``."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((1000,), float(index))


def loader_of(kind):
    options = {"batch_size": 4, "num_workers": 1, "persistent_workers": True}
    if kind == "FeedLoader":
        return FeedLoader(Filled(), **options)
    loader = DataLoader(Filled(), **options)
    loader.__class__ = in_slots(DataLoader)
    return loader


def is_batch(batch, number):
    """True if this is the batch of that number."""
    return bool((batch == torch.arange(4.0 * number, 4.0 * number + 4)[:, None]).all())


class Child:
    """A forked process that works when it is told to, and then ends."""

    def __init__(self, work=lambda: True):
        told, self._tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            signal.alarm(60)  # should the test fail
            status = 2
            try:
                os.read(told, 1)
                status = 0 if work() else 1
            finally:
                os._exit(status)
        os.close(told)

    def end(self):
        """Let the process work and end. Returns True if the work did."""
        os.write(self._tell, b".")
        os.close(self._tell)
        _, status = os.waitpid(self._pid, 0)
        return status == 0


class Held:
    """The only slot of a memory, with a batch."""

    def __init__(self, fence=None):
        self.memory = SlotMemory(1, fence)
        assert self.memory.take() == 0
        self.batch = self.memory.lease(0, 4096)

    def drop(self):
        """Drop the batch."""
        self.batch = None

    def is_free(self):
        """True if the slot may have another batch. It is taken for that batch."""
        self.memory.poll()
        return self.memory.take() == 0


@pytest.fixture(autouse=True)
def no_other_batches():
    """No batch of another test that is not collected yet."""
    gc.collect()


@pytest.fixture
def device(monkeypatch):
    yield FakeDevice(monkeypatch)
    gc.collect()  # memories must end before there is no such device any more


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


# --- in the child -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FeedLoader", "DataLoader in slots"])
def test_held_batches_stay_as_they_are_in_forked_children(kind):
    loader = loader_of(kind)
    children = []
    for number, batch in enumerate(loader):
        if number % 10 == 0:
            children.append(Child(lambda held=batch, number=number: is_batch(held, number)))
    del batch
    for _ in loader:  # every free slot is written several times
        pass
    assert [child.end() for child in children] == [True] * 5


def test_another_loader_of_kept_batches_yields_them_unchanged():
    loader = loader_of("FeedLoader")
    kept = [batch for number, batch in enumerate(loader) if number < 3]
    again = iter(DataLoader(kept, batch_size=None, sampler=[0, 1, 2], num_workers=1, prefetch_factor=1))
    kept.clear()  # the worker of the other loader still has its copy
    for _ in loader:
        pass
    assert [is_batch(batch, number) for number, batch in enumerate(again)] == [True] * 3


def test_what_a_child_of_ours_forks_is_not_ours():
    held = Held()
    with own_forks():
        child = Child(lambda: slots._fork.is_ours is False)
    held.drop()
    assert held.is_free()
    assert child.end()


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_child_that_drops_a_batch_frees_no_slot(ours, on_device, device):
    held = Held(CopyFence(device) if on_device else None)

    def drop():
        held.drop()
        gc.collect()
        held.memory.poll()
        return held.memory._map[0] == 1

    with own_forks() if ours else nullcontext():
        child = Child(drop)
    assert child.end()
    assert not held.is_free()


def test_a_child_that_drops_all_of_a_memory_unregisters_nothing(device, monkeypatch):
    held = Held(CopyFence(device))

    def drop_all():
        monkeypatch.setattr(slots, "_unregister", lambda _: os._exit(3))
        held.__dict__.clear()
        gc.collect()
        return True

    assert Child(drop_all).end()


# --- in the parent ----------------------------------------------------------------------------------------------------


def test_a_slot_is_free_again_when_the_batch_is_dropped_and_all_children_have_ended():
    held = Held()
    children = [Child(), Child()]
    held.drop()
    for child in children:
        assert not held.is_free()
        child.end()
    assert held.is_free()


def test_a_slot_is_free_again_if_the_batch_outlives_the_child():
    held = Held()
    Child().end()
    assert not held.is_free()
    held.drop()
    assert held.is_free()


def test_a_child_holds_only_the_batches_of_its_fork():
    held = Held()
    held.drop()
    child = Child()
    assert held.is_free()
    held.batch = held.memory.lease(0, 4096)
    held.drop()
    assert held.is_free()
    child.end()


def test_a_slot_is_not_free_while_a_grandchild_may_read_it():
    held = Held()
    wait, go = os.pipe()

    def fork_again():
        if os.fork() == 0:
            signal.alarm(60)
            os.read(wait, 1)
            os._exit(0)
        return True

    assert Child(fork_again).end()
    held.drop()
    assert not held.is_free()
    os.write(go, b".")
    _wait_until(held.is_free)


def _wait_until(check):
    pause = threading.Event()
    for _ in range(200):
        if check():
            return
        pause.wait(0.05)
    raise AssertionError("never true")


def test_another_program_that_a_child_starts_does_not_hold_slots():
    held = Held()
    output, write_end = os.pipe()

    def start_program():
        program = subprocess.Popen(["sleep", "60"])
        return os.write(write_end, str(program.pid).encode()) > 0

    assert Child(start_program).end()
    held.drop()
    _wait_until(held.is_free)
    os.kill(int(os.read(output, 100)), signal.SIGKILL)


def test_a_slot_waits_for_both_the_device_and_a_child(device):
    first, second = Held(CopyFence(device)), Held(CopyFence(device))
    child = Child()
    first.drop()
    device.reached.update(main=1, copies=1)
    assert not first.is_free()  # the child reads it
    child.end()
    assert first.is_free()
    second.drop()
    assert not second.is_free()  # the device copies it
    device.reached.update(main=1, copies=1)
    assert second.is_free()


def test_a_child_does_not_hold_up_slots_that_only_the_device_reads(device):
    memory = SlotMemory(2, CopyFence(device))
    before = memory.lease(memory.take(), 4096)
    child = Child()
    after = memory.lease(memory.take(), 4096)
    del before
    del after
    device.reached.update(main=9, copies=9)
    memory.poll()
    assert memory.take() == 1
    child.end()


def test_many_forks_leave_no_open_files_and_no_lost_slots():
    loader = loader_of("FeedLoader")
    passed = iter(loader)
    kept = next(passed)  # by all children
    memory = memory_of(loader._iterator)
    Child().end()
    files = open_files()
    for batch in passed:
        Child().end()
        assert batch[0, 0] == batch[0, 999]
    assert open_files() <= files + 1
    assert len(memory._leases[0].readers) <= 1
    del kept, batch
    places = {batch.data_ptr() for batch in loader}
    assert len(places) <= 4  # prefetch_factor + 2: they are used again
    list(loader)
    assert bytes(memory._map[: memory.count]) == bytes(memory.count)


def test_forks_without_held_batches_open_no_files():
    held = Held()
    held.drop()
    files = open_files()
    child = Child()
    assert not slots._children
    child.end()
    assert open_files() == files


def test_our_own_workers_hold_no_slots():
    passed = iter(loader_of("FeedLoader"))
    batch = next(passed)
    memory = memory_of(passed.source)
    others = [iter(loader_of(kind)) for kind in ("FeedLoader", "DataLoader in slots")]
    assert [is_batch(next(other), 0) for other in others] == [True, True]
    assert not slots._children
    place = batch.data_ptr()
    del batch
    assert place in {batch.data_ptr() for batch in passed}
    memory.poll()


def test_a_slot_is_kept_for_good_if_no_file_is_left_to_watch_the_child(monkeypatch):
    held = Held()

    def none_left():
        raise OSError("too many open files")

    told = os.pipe()
    monkeypatch.setattr(slots.os, "pipe", none_left)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    monkeypatch.undo()
    os.waitpid(pid, 0)
    held.drop()
    assert not held.is_free()
    for end in told:
        os.close(end)
    assert is_batch(next(iter(loader_of("FeedLoader"))), 0)


def test_a_batch_that_another_thread_receives_during_a_fork_is_held(monkeypatch):
    memory = SlotMemory(2)
    batches = [memory.lease(memory.take(), 4096)]
    keep = slots._keep_leases
    late = []

    def keep_then_receive():
        keep()
        if not late:  # before the fork
            late.append(memory.lease(memory.take(), 4096))

    monkeypatch.setattr(slots, "_keep_leases", keep_then_receive)
    child = Child()
    monkeypatch.undo()
    batches.clear()
    late.clear()
    memory.poll()
    assert memory.take() is None
    child.end()
    memory.poll()
    assert memory.take() == 0
