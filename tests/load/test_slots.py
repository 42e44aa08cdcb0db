"""Batches in slots equal those that torch sends, whatever they are made of, and whatever the user keeps."""

import array
import collections
import copy
import gc
import os
import pickle
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import covering
from PIL import Image
from slot_memory import FakeDevice, memory_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torchvision import tv_tensors

from lightning_feed.load import slot_batches, slots
from lightning_feed.load.copy_fence import CopyFence
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.slot_loaders import in_slots
from lightning_feed.load.slots import SlotMemory

Pair = collections.namedtuple("Pair", "left right")
SHARED = torch.arange(6.0).share_memory_()
BIG = torch.arange(64.0)


@dataclass
class Holder:
    """A batch class of a user."""

    pixels: torch.Tensor
    note: str


class Numbers(Dataset):
    """Sample ``i`` is made of ``i``."""

    def __init__(self, length=24, shape=(3, 4)):
        self.length = length
        self.shape = shape

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": torch.full(self.shape, float(index)), "i": index, "name": f"sample {index}"}


class Numbered(IterableDataset):
    """A stream of numbers."""

    def __iter__(self):
        return iter(torch.arange(10.0))


def transposed(samples):
    return default_collate(samples)["x"].transpose(1, 2)


def part_of_a_storage(samples):
    return {"whole": BIG + samples[0]["i"], "part": (BIG + samples[0]["i"])[8:16].view(2, 4)}


def same_storage_twice(samples):
    whole = torch.stack([sample["x"] for sample in samples])
    return [whole, whole[1:], whole]


def many_kinds(samples):
    first = samples[0]["i"]
    return (
        Pair(torch.tensor([first]), torch.tensor(first, dtype=torch.int64)),
        [torch.empty(0, 3), torch.ones(2, 1).expand(2, 5), torch.tensor([True, False])],
        {"half": torch.full((3,), 1.5).half(), "complex": torch.tensor([1 + 2j]).conj(), "array": np.arange(3)},
        torch.eye(3).to_sparse(),
        Holder(torch.full((2, 2), float(first)), "held"),
        torch.nn.Parameter(torch.ones(2)),
        None,
        "text",
        SHARED,
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    )


COLLATE = {
    "default": None,
    "transposed": transposed,
    "part of a storage": part_of_a_storage,
    "same storage twice": same_storage_twice,
    "many kinds": many_kinds,
}


def described(value):
    """All that a user can see of a batch."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return str(value.layout), described(value.to_dense())
        kind = type(value), value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
        bits = value.requires_grad, value.is_conj(), value.untyped_storage().nbytes()
        return *kind, *bits, value.resolve_conj().tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: described(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [described(part) for part in value]
    return (type(value), described(vars(value))) if isinstance(value, Holder) else value


def batches(hand_over, dataset=None, **options):
    options = {"batch_size": 4, "num_workers": 2, **options}
    return FeedLoader(Numbers() if dataset is None else dataset, hand_over=hand_over, **options)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch, as it opens sparse tensors
@pytest.mark.parametrize("name", COLLATE)
def test_batches_in_slots_equal_those_of_torch(name):
    collate = COLLATE[name]
    ours, torchs = ([described(batch) for batch in batches(way, collate_fn=collate)] for way in ("slots", "torch"))
    assert ours == torchs


@pytest.mark.parametrize("dataset", [Numbered(), [torch.ones(2, 2)] * 6], ids=["stream", "list"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_streams_and_single_samples_in_slots_equal_those_of_torch(dataset, batch_size):
    options = {"dataset": dataset, "batch_size": batch_size, "num_workers": 1}
    ours, torchs = ([described(batch) for batch in batches(way, **options)] for way in ("slots", "torch"))
    assert ours == torchs


def read_only(values):
    values.flags.writeable = False
    return values


ARRAYS = {
    "from a buffer": lambda: np.frombuffer(bytes(range(16)), np.uint8),
    "of an image": lambda: np.asarray(Image.new("RGB", (4, 4), (1, 2, 3))),
    "read-only": lambda: read_only(np.arange(4.0)),
    "writable": lambda: np.arange(4.0),
    "transposed": lambda: np.arange(6).reshape(2, 3).T,
    "view of a read-only one": lambda: read_only(np.arange(6))[::2],
    "of objects": lambda: np.array([1, "two", [3.0]], dtype=object),
    "of records": lambda: read_only(np.array([(1, 2.0)], dtype=[("a", int), ("b", float)])),
    "scalar": lambda: np.float64(1.5),
    "buffers": lambda: [b"bytes", bytearray(b"array"), array.array("d", [1.0])],
    "nested": lambda: {"a": [np.frombuffer(b"abcd", np.uint8), {"b": (read_only(np.ones(2)),)}], "x": torch.ones(2)},
    "twice": lambda: [np.frombuffer(b"abcd", np.uint8)] * 2,
}


class Made(Dataset):
    """Samples that are made in the worker."""

    def __len__(self):
        return len(ARRAYS)

    def __getitem__(self, index):
        return [*ARRAYS.values()][index]()


def with_flags(value):
    """What a user can see of a sample with arrays."""
    if isinstance(value, np.ndarray):
        flags = value.flags
        return value.dtype, value.tolist(), flags.writeable, flags.owndata, flags.c_contiguous, flags.f_contiguous
    if isinstance(value, dict):
        return {key: with_flags(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        same = [value[0] is part for part in value]
        return type(value), same, [with_flags(part) for part in value]
    return type(value), described(value)


def test_arrays_arrive_as_those_of_a_plain_dataloader():
    """Each kind is a batch of its own."""
    options = {"batch_size": 1, "num_workers": 1, "collate_fn": list}
    plain = DataLoader(Made(), **options)
    ours = DataLoader(Made(), **options)
    ours.__class__ = in_slots(DataLoader)
    expected = dict(zip(ARRAYS, map(with_flags, plain), strict=True))
    for loader in (ours, FeedLoader(Made(), **options)):
        assert dict(zip(ARRAYS, map(with_flags, loader), strict=True)) == expected


class Scan(torch.Tensor):
    """A subclass with attributes, such as MONAI's MetaTensor."""


def scans(samples):
    scan = default_collate([sample["x"].as_subclass(Scan) for sample in samples])
    scan.spacing = 0.5
    return scan, scan[1:], scan[:0]


SUBCLASSES = {
    "torchvision's images": ([tv_tensors.Image(torch.full((3, 5, 5), float(i))) for i in range(8)], None),
    "with attributes": (Numbers(8), scans),
}


@covering(name=list(SUBCLASSES), kind=["TVTensor", "Tensor"])
def test_subclasses_of_tensor_in_slots_equal_those_of_torch(name, kind):
    dataset, collate = SUBCLASSES[name]
    with tv_tensors.set_return_type(kind):
        ways = [list(batches(way, dataset, collate_fn=collate)) for way in ("slots", "torch")]
    ours, torchs = ([described(batch) for batch in way] for way in ways)
    assert ours == torchs
    if name == "with attributes":
        assert [part.spacing for part, *_ in ways[0]] == [0.5, 0.5]


@covering(name=list(SUBCLASSES), kind=["TVTensor", "Tensor"])
def test_subclasses_of_tensor_lie_in_slots(name, kind):
    dataset, collate = SUBCLASSES[name]
    with tv_tensors.set_return_type(kind):
        for batch in batches("slots", dataset, collate_fn=collate):
            pixels = batch[0] if isinstance(batch, tuple) else batch
            assert not pixels.is_shared()  # as it is if torch hands it over


@dataclass
class Pinning(Holder):
    """A batch class that pins itself."""

    def pin_memory(self):
        return Pinning(self.pixels, "pinned")


LEFT_OUT = {
    "images": ([tv_tensors.Image(torch.ones(3, 4, 4))] * 2, None),
    "shared": ([torch.ones(3)] * 2, lambda samples: SHARED),
    "nothing in a slot": ([torch.ones(3)] * 2, lambda samples: torch.empty(0)),
    "a class that pins": ([torch.ones(3)] * 2, lambda samples: Pinning(torch.ones(3), "as made")),
}


@pytest.mark.parametrize(("name", "pins"), [(name, name != "images") for name in LEFT_OUT])
def test_what_is_not_in_a_registered_slot_is_pinned_by_torch(name, pins, monkeypatch):
    pinned = []
    monkeypatch.setattr(SlotMemory, "registers", True)
    monkeypatch.setattr(slot_batches.torch_pinning, "pin_memory", lambda batch: pinned.append(batch) or "pinned")
    dataset, collate = LEFT_OUT[name]
    (batch,) = batches("slots", dataset, batch_size=2, num_workers=1, collate_fn=collate)
    assert (batch == "pinned") is pins
    assert len(pinned) == pins


def test_a_batch_that_finds_no_free_slot_is_pinned_by_torch(monkeypatch):
    monkeypatch.setattr(SlotMemory, "registers", True)
    monkeypatch.setattr(SlotMemory, "take", lambda _: None)
    monkeypatch.setattr(slot_batches.torch_pinning, "pin_memory", lambda batch: "pinned")
    assert list(batches("slots", batch_size=12, num_workers=1)) == ["pinned", "pinned"]


def test_tensors_that_share_a_storage_still_share_it_after_hand_over():
    for whole, part, again in batches("slots", collate_fn=same_storage_twice):
        assert whole is again
        part[0] = -1
        assert (whole[1] == -1).all()


def test_batches_reuse_the_memory_of_a_few_slots():
    loader = batches("slots", num_workers=1, persistent_workers=True)
    places = [batch["x"].data_ptr() for _ in range(3) for batch in loader]
    assert len(set(places)) <= 4  # prefetch_factor + 2


def test_kept_batches_and_views_are_not_overwritten():
    loader = batches("slots", Numbers(200), num_workers=1, persistent_workers=True)
    kept = [batch for number, batch in enumerate(loader) if number % 10 == 0]
    views = [batch["x"][1:, :2] for batch in loader]  # all of them: more than there are slots
    for _ in loader:
        pass
    assert [batch["i"][0].item() for batch in kept] == list(range(0, 200, 40))
    assert all((batch["x"][:, 0, 0] == batch["i"]).all() for batch in kept)
    assert [view[0, 0, 0].item() for view in views] == [first + 1.0 for first in range(0, 200, 4)]


def test_a_kept_batch_outlives_its_loader():
    loader = batches("slots")
    kept = [next(iter(loader)) for _ in range(2)]
    del loader
    gc.collect()
    assert all((batch["x"][:, 0, 0] == torch.arange(4.0)).all() for batch in kept)


def test_batches_kept_by_threads_are_not_overwritten():
    seen = []

    def look(kept):
        seen.append((kept["x"][:, 0, 0] == kept["i"]).all())

    threads = [threading.Thread(target=look, args=[batch]) for batch in batches("slots", Numbers(40), num_workers=1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 10
    assert all(seen)


def test_batches_of_varying_size_arrive_intact():
    class Growing(Numbers):
        def __getitem__(self, index):
            return torch.full((1 << (index if index < 12 else 24 - index), 256), float(index))

    loader = batches("slots", Growing(), batch_size=1, persistent_workers=True)
    for _ in range(2):
        assert [batch.mean().item() for batch in loader] == list(map(float, range(24)))


def test_batches_arrive_intact_when_slots_cannot_grow(monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(SlotMemory, "reserve", full)  # before the fork
    ours = [described(batch) for batch in batches("slots")]
    monkeypatch.undo()
    assert ours == [described(batch) for batch in batches("torch")]


def test_loader_falls_back_to_torch_hand_over_without_memfd(monkeypatch):
    def nothing(_):
        raise OSError("this system has no memfd_create")

    monkeypatch.setattr(slots, "_new_file", nothing)
    loader = batches("slots")
    passed = iter(loader)
    assert memory_of(passed.source) is None
    assert len(list(passed)) == 6


def failing(samples):
    if samples[0]["i"] == 8:
        raise KeyError("broken collate")
    return default_collate(samples)


def test_collate_error_reaches_the_loop_and_frees_the_slot():
    loader = batches("slots", num_workers=1, persistent_workers=True, collate_fn=failing)
    for _ in range(8):  # more often than there are slots
        with pytest.raises(KeyError, match="broken collate"):
            list(loader)
    assert memory_of(loader._iterator) is not None


class Killed(Numbers):
    """A worker ends while it writes a batch."""

    def __getitem__(self, index):
        if index == 13 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_killed_worker_delivers_no_stale_batch():
    seen = []

    def train():
        seen.extend(batch["i"].tolist() for batch in batches("slots", Killed(), num_workers=1))

    with pytest.raises(RuntimeError, match="worker"):
        train()
    assert seen in [[list(range(first, first + 4)) for first in range(0, 12, 4)][:length] for length in range(4)]


def test_early_breaks_free_the_slots():
    loader = batches("slots", num_workers=1, persistent_workers=True)
    for _ in range(10):
        next(iter(loader))
    memory = memory_of(loader._iterator)
    list(loader)
    assert bytes(memory._map[:4]) == bytes(4)


def test_two_simultaneous_passes_do_not_share_memory():
    loader = batches("slots", Numbers(40), num_workers=1)
    for first, second in zip(loader, loader, strict=True):
        assert first["i"].tolist() == second["i"].tolist()
        assert (first["x"] == second["x"]).all()
        first["x"].zero_()
        assert (second["x"][:, 0, 0] == second["i"]).all()


@pytest.mark.parametrize(
    "method",
    [pytest.param("spawn", marks=pytest.mark.nightly), pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_spawned_workers_have_slots(method):
    loader = batches("slots", multiprocessing_context=method, num_workers=1)
    passed = iter(loader)
    assert memory_of(passed.source) is not None
    assert [batch["i"][0].item() for batch in passed] == list(range(0, 24, 4))


def test_slot_batches_support_in_place_changes_copies_and_pickling(tmp_path):
    for batch in batches("slots", num_workers=1):
        x = batch["x"]
        x += 1
        twin = copy.deepcopy(batch)
        torch.save(x, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").stat().st_size < 4096  # this tensor alone
        assert torch.equal(torch.load(tmp_path / "x.pt"), x)
        assert torch.equal(pickle.loads(pickle.dumps(batch))["x"], twin["x"])
        x.share_memory_()
        assert x.is_shared()
        assert torch.equal(twin["x"], x)


def test_slot_batches_can_be_sent_to_another_process():
    context = torch.multiprocessing.get_context("fork")
    queue, answers = context.Queue(), context.Queue()

    def double():
        for _ in range(6):
            answers.put((queue.get() * 2).tolist())

    process = context.Process(target=double, daemon=True)
    process.start()
    for batch in batches("slots", num_workers=1):
        expected = (batch["x"] * 2).tolist()
        queue.put(batch["x"])
        assert answers.get(timeout=30) == expected
    process.join()


def test_a_forked_copy_of_a_batch_frees_no_slot():
    loader = batches("slots", Numbers(40), num_workers=1, persistent_workers=True)
    passed = iter(loader)
    kept = next(passed)
    memory = memory_of(loader._iterator)
    child = os.fork()
    if child == 0:
        del kept, passed
        gc.collect()
        os._exit(0 if memory._map[0] else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    list(passed)
    assert (kept["x"][:, 0, 0] == kept["i"]).all()


def test_many_passes_leak_no_open_files_or_memory_maps():
    def resources():
        gc.collect()
        files = len(list(Path("/proc/self/fd").iterdir()))
        return files, Path("/proc/self/maps").read_text().count("lightning_feed (deleted)")

    loader = batches("slots", Numbers(8), num_workers=1)
    list(loader)
    files, maps = resources()
    passes = 10
    for _ in range(passes):
        list(loader)
    files_after, maps_after = resources()
    assert files_after - files < passes / 2  # other threads of the process may open a few meanwhile
    assert maps_after <= maps


def test_dataloader_subclass_of_the_user_gets_slots():
    class Mine(DataLoader):
        pass

    loader = Mine(Numbers(), batch_size=4, num_workers=1)
    loader.__class__ = in_slots(Mine)
    assert type(loader).__qualname__ == Mine.__qualname__
    passed = iter(loader)
    assert memory_of(passed) is not None
    assert [batch["i"][0].item() for batch in passed] == list(range(0, 24, 4))
    assert loader.collate_fn is default_collate
    assert copy.copy(loader).batch_size == 4


# --- copies to a device -----------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    return FakeDevice(monkeypatch)


def test_slot_is_freed_only_when_every_stream_has_finished_its_copies(device):
    memory = SlotMemory(2, CopyFence(device))
    assert (memory.take(), memory.take(), memory.take()) == (0, 1, None)
    leased = memory.lease(0, 4096)
    memory.poll()
    assert memory.take() is None
    del leased
    for stream in ("main", "copies"):
        memory.poll()
        assert memory.take() is None
        device.reached[stream] += 1
    memory.poll()
    assert memory.take() == 0


def test_no_event_is_recorded_during_cuda_graph_capture(device):
    memory = SlotMemory(1, CopyFence(device))
    memory.take()
    leased = memory.lease(0, 4096)
    device.capturing = True
    del leased
    memory.poll()
    assert memory.take() is None
    device.capturing = False
    memory.poll()
    assert memory.take() is None
    device.reached.update(main=1, copies=1)
    memory.poll()
    assert memory.take() == 0


def test_slot_that_grows_is_registered_again(device, monkeypatch):
    registered = []
    monkeypatch.setattr(slots, "_register", lambda _, size: registered.append(size) or True)
    monkeypatch.setattr(slots, "_unregister", lambda _: registered.append("ended"))
    memory = SlotMemory(1, CopyFence(device))
    for used in (4096, 4096, 100, 8192, 9000):
        memory.lease(0, used)
    assert registered == [4096, "ended", 12288]
    del memory
    gc.collect()
    assert registered[3:] == ["ended"]


def test_slot_memory_is_unregistered_only_after_pending_copies(device, monkeypatch):
    reached_then = []
    monkeypatch.setattr(slots, "_unregister", lambda _: reached_then.append(dict(device.reached)))
    memory = SlotMemory(1, CopyFence(device))
    memory.lease(0, 4096)  # and dropped, while the device copies
    assert not any(device.reached.values())
    del memory
    gc.collect()
    assert reached_then == [{"main": 1, "copies": 1}]


def test_failed_registration_is_logged_and_leaves_the_slot_usable(device, monkeypatch, caplog):
    monkeypatch.setattr(slots, "_register", lambda *_: False)
    memory = SlotMemory(1, CopyFence(device))
    memory.take()
    memory.lease(0, 4096)
    assert "could not be registered" in caplog.text
    assert memory.take() == 0  # such a copy is over when it returns


# --- memory -----------------------------------------------------------------------------------------------------------


def test_collate_waits_for_a_used_slot_before_taking_a_new_one(monkeypatch):
    memory = SlotMemory(4)
    collate = slot_batches.SlotCollate(default_collate, memory, usual=2)
    collate._touched[0] = 2**20  # batches are large enough to wait for
    assert [collate._take(), collate._take()] == [0, 1]
    monkeypatch.setattr(slot_batches.time, "sleep", lambda _: memory.give_back(0))  # the loop drops a batch meanwhile
    assert collate._take() == 0
    monkeypatch.setattr(slot_batches.time, "sleep", lambda _: None)  # the loop keeps its batches
    assert [collate._take(), collate._take(), collate._take()] == [2, 3, None]
