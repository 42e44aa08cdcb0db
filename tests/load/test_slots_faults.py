"""Slots when something goes wrong: processes that are killed, memory that is not there, users who keep things."""

import collections
import gc
import logging
import mmap
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from slot_memory import memory_of
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.load import copy_fence, slot_loaders, slots
from lightning_feed.load.copy_fence import CopyFence
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.slots import SlotMemory

MB = 1_000_000


class Filled(Dataset):
    """Sample ``i`` is full of ``i``; its length in bytes may depend on ``i``."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((self.lengths[index],), index, dtype=torch.uint8)


def loader_of(lengths, **options):
    options = {"batch_size": None, "num_workers": 1, "collate_fn": alone, **options}
    return FeedLoader(Filled(lengths), **options)


def alone(sample):
    """A batch of one sample, which torch stacks into the slot."""
    return default_collate([sample])


def value_of(batch):
    """The number that a batch is full of. None if it is full of several."""
    low, high = batch.aminmax()
    return low.item() if low == high else None


def program(code, *before, **options):
    """Run a program in a process of its own."""
    command = [*before, sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def holders_of(inode):
    """Processes that have a file open or mapped."""
    holders = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            files = [link.stat().st_ino for link in (process / "fd").iterdir() if link.exists()]
            maps = [int(line.split()[4]) for line in (process / "maps").read_text().splitlines()]
        except OSError:
            continue  # it has ended, or belongs to someone else
        if inode in files or inode in maps:
            holders.add(int(process.name))
    return holders


# --- processes that are killed ----------------------------------------------------------------------------------------


class KilledWhileWriting:
    """The worker dies when half of the batch is in the slot."""

    def __call__(self, samples):
        first = default_collate(samples[:2])
        if samples[0][0] == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return first, default_collate(samples[2:])


def test_worker_killed_while_writing_a_slot_delivers_no_stale_batch():
    seen = []

    def train():
        loader = loader_of([1000] * 40, batch_size=4, num_workers=2, collate_fn=KilledWhileWriting())
        for batch in loader:
            seen.append([int(number) for half in batch for number in half[:, 0]])

    with pytest.raises(RuntimeError, match="worker"):
        train()
    expected = [list(range(first, first + 4)) for first in range(0, 40, 4)]
    assert seen == expected[: len(seen)]
    assert len(seen) <= 5
    assert [value_of(batch) for batch in loader_of([1000] * 3)] == [0, 1, 2]


def _die_with_batches(answers):
    torch.set_num_threads(1)
    worker.MP_STATUS_CHECK_INTERVAL = 0.1  # seconds after which a worker looks whether its parent is there
    batches = iter(FeedLoader(torch.ones(64, MB), batch_size=8, num_workers=2))
    kept = [next(batches), next(batches)]
    file = os.fstat(memory_of(batches.source)._file)
    answers.send((file.st_ino, file.st_blocks * 512, sum(batch.nbytes for batch in kept)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_program_leaves_no_memory_behind():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_die_with_batches, args=(there,))
    process.start()
    there.close()
    inode, size, kept_size = here.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert size >= kept_size == 64 * MB
    pause = threading.Event()
    for _ in range(100):
        if not holders_of(inode):
            break
        pause.wait(0.1)
    assert holders_of(inode) == set()


# --- memory that is not there -----------------------------------------------------------------------------------------


def test_batches_that_grow_sixtyfold_and_shrink_arrive_intact():
    lengths = [MB, MB, 60 * MB, MB, 20 * MB, 60 * MB, MB, MB]
    loader = loader_of(lengths, persistent_workers=True)
    for _ in range(2):
        seen = [(value_of(batch), batch.nbytes) for batch in loader]
        assert seen == list(enumerate(lengths))


def test_batches_arrive_intact_when_slots_cannot_grow_mid_epoch(monkeypatch):
    def little(self, start, end):
        if end - start > MB:
            raise OSError("no space left on device")
        reserve(self, start, end)

    reserve = SlotMemory.reserve
    monkeypatch.setattr(SlotMemory, "reserve", little)  # before the fork
    lengths = [1000, 5 * MB, 1000, 5 * MB, 5 * MB, 1000]
    loader = loader_of(lengths)
    assert [(value_of(batch), batch.nbytes) for batch in loader] == list(enumerate(lengths))


def test_batch_larger_than_a_slot_arrives_intact(monkeypatch):
    monkeypatch.setattr(slots, "SLOT_BYTES", 1 << 20)  # before the fork
    lengths = [1000, 5 * MB, 1000, 1 << 20, (1 << 20) + 1]
    loader = loader_of(lengths)
    assert [(value_of(batch), batch.nbytes) for batch in loader] == list(enumerate(lengths))


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def _train_limited(answers, limit, value, workers):
    torch.set_num_threads(1)
    messages = Messages()
    slot_loaders.logger.addHandler(messages)
    slot_loaders.logger.setLevel(logging.INFO)
    slot_loaders._say_once.cache_clear()
    if limit == resource.RLIMIT_AS:  # besides what this process has already, as a copy of one that ran other tests
        value += int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(limit, (value, value))
    in_slots = []
    for _ in range(2):
        batches = iter(FeedLoader(torch.arange(40.0), batch_size=4, num_workers=workers))
        in_slots.append(memory_of(batches.source) is not None)
        assert torch.equal(torch.cat(list(batches)), torch.arange(40.0))
    answers.send((in_slots, messages.texts))


def trained_limited(limit, value, workers=1):
    """Whether batches are in slots in a process with a limit, in two passes, and what is logged."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_train_limited, args=(there, limit, value, workers))
    process.start()
    there.close()
    answer = here.recv()
    process.join()
    return answer


@pytest.mark.parametrize("workers", [1, 2])
def test_address_space_limit_falls_back_to_torch_hand_over(workers):
    in_slots, said = trained_limited(resource.RLIMIT_AS, 20 << 30, workers)
    assert in_slots == [False, False]
    (message,) = said
    assert "as torch does it" in message
    assert "more than half of what `ulimit -v` leaves" in message


def test_file_size_limit_falls_back_to_torch_hand_over():
    in_slots, said = trained_limited(resource.RLIMIT_FSIZE, 1 << 30)
    assert in_slots == [False, False]
    (message,) = said
    assert "as torch does it" in message


def test_locked_memory_limit_does_not_matter_on_the_cpu():
    assert trained_limited(resource.RLIMIT_MEMLOCK, 64 << 10) == ([True, True], [])


def many_tensors(sample):
    return [alone(sample + number) for number in range(64)]


def _keep_two_batches(answers, hand_over):
    torch.set_num_threads(1)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 40, open_files + 40))
    try:
        batches = iter(loader_of([1000] * 4, collate_fn=many_tensors, hand_over=hand_over))
        kept = [next(batches), next(batches)]
        answers.send([value_of(batch[63]) for batch in kept])
    except (OSError, RuntimeError) as error:
        answers.send(str(error))
    os._exit(0)  # torch's own end of a pass would need files, too


@pytest.mark.parametrize("hand_over", ["slots", "torch"])
def test_slots_need_few_open_files_for_many_tensors(hand_over):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_keep_two_batches, args=(there, hand_over))
    process.start()
    there.close()
    answer = here.recv()
    process.join()
    assert answer == [63, 64] if hand_over == "slots" else "open files" in answer


IN_A_TINY_SHM = """
import torch
from lightning_feed.load.loader import FeedLoader

batches = FeedLoader(torch.ones(16, 4_000_000), batch_size=2, num_workers=1, hand_over="{way}")
assert sum(int(batch.sum()) for batch in batches) == 64_000_000
"""


@pytest.mark.slow  # starts two programs
def test_slots_work_with_a_tiny_dev_shm():
    unshare = shutil.which("unshare")
    inside = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if unshare is None or subprocess.run([*inside, mount], capture_output=True, check=False).returncode:
        pytest.skip("a namespace for a /dev/shm of its own needs unshare, and a system that allows it")
    inside += [f'{mount} && exec "$0" "$@"']
    assert program(IN_A_TINY_SHM.format(way="torch"), *inside).returncode != 0
    done = program(IN_A_TINY_SHM.format(way="slots"), *inside)
    assert done.returncode == 0, done.stderr


# --- what users keep, and where they stop -----------------------------------------------------------------------------


class History:
    """A collate function that keeps its latest batches, and returns the oldest of them, too."""

    def __init__(self):
        self.batches = collections.deque(maxlen=5)

    def __call__(self, samples):
        self.batches.append(default_collate(samples))
        return self.batches[-1], self.batches[0].clone()


def test_batches_kept_by_collate_are_not_overwritten():
    loader = loader_of([1000] * 200, batch_size=2, collate_fn=History(), num_workers=2, persistent_workers=True)
    seen = collections.defaultdict(list)
    batches = iter(loader)
    for number in range(100):  # drops each batch before it asks for the next one
        newest, oldest = next(batches)
        seen[number % 2].append((newest[0, 0].item(), oldest[:, ::7].unique().tolist()))
        del newest, oldest
    for of_worker in seen.values():
        for number, (_, oldest) in enumerate(of_worker):
            first = of_worker[max(0, number - 4)][0]
            assert oldest == [first, first + 1]


def stack_in_threads(samples):
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(alone, samples))


def test_collate_can_stack_batches_in_threads():
    loader = loader_of([300_000] * 256, batch_size=32, collate_fn=stack_in_threads)
    for first, batch in zip(range(0, 256, 32), loader, strict=True):
        assert [value_of(part) for part in batch] == list(range(first, first + 32))


def test_rows_of_a_tensor_are_sent_without_the_whole_storage():
    loader = FeedLoader(
        TensorDataset(torch.arange(100.0).expand(50_000, 100).T.contiguous()), batch_size=None, num_workers=1
    )
    batches = iter(loader)
    file = os.dup(memory_of(batches.source)._file)
    for number, (row,) in enumerate(batches):
        assert (row == number).all()
    assert os.fstat(file).st_blocks * 512 < MB
    os.close(file)


def test_batches_read_late_by_threads_are_not_overwritten():
    kept = collections.deque()
    seen = []

    def check():
        number, batch = kept.popleft()
        seen.append(value_of(batch) == number)

    for number, batch in enumerate(loader_of([50_000] * 200, num_workers=2)):
        kept.append((number, batch))
        if len(kept) > 12:  # more than there are slots
            thread = threading.Thread(target=check)
            thread.start()
            thread.join()
    assert len(seen) == 188
    assert all(seen)
    assert all(value_of(batch) == number for number, batch in kept)


def test_two_loaders_used_in_parallel_do_not_share_memory():
    small = loader_of([1000] * 60, num_workers=2, persistent_workers=True)
    large = loader_of([2 * MB] * 60, persistent_workers=True)
    for _ in range(2):
        for number, (first, second) in enumerate(zip(small, large, strict=True)):
            assert (value_of(first), value_of(second)) == (number, number)
            first.fill_(255)
            assert value_of(second) == number


class FailingHalfway:
    """Raises when half of the batch is in the slot, and keeps what it has stacked."""

    def __init__(self):
        self.kept = []

    def __call__(self, samples):
        self.kept.append(default_collate(samples[:1]))
        if samples[0][0] % 3 == 2:
            raise KeyError("broken collate")
        return default_collate(samples)


def test_collate_errors_and_early_breaks_leave_the_next_pass_intact():
    loader = loader_of([1000] * 30, batch_size=1, collate_fn=FailingHalfway(), persistent_workers=True)
    for _ in range(5):
        batches = iter(loader)
        assert [value_of(next(batches)), value_of(next(batches))] == [0, 1]
        with pytest.raises(KeyError, match="broken collate"):
            next(batches)
        assert value_of(next(iter(loader))) == 0


# --- many epochs ------------------------------------------------------------------------------------------------------


def resources_of(pid):
    """Number of files, number of maps, and resident megabytes without shared memory."""
    process = Path(f"/proc/{pid}")
    files = len(list((process / "fd").iterdir()))
    maps = len((process / "maps").read_text().splitlines())
    lines = dict(line.split(":") for line in (process / "status").read_text().splitlines())
    return files, maps, int(lines["RssAnon"].split()[0]) / 1000


def test_many_short_epochs_leak_no_files_or_memory():
    loader = loader_of([1000] * 4, persistent_workers=True)

    def run(count):
        for _ in range(count):
            assert len(list(loader)) == 4
        gc.collect()
        return [resources_of(pid) for pid in (os.getpid(), loader._iterator._workers[0].pid)]

    before = run(100)
    after = run(300)
    for (files, maps, own_mb), (files_after, maps_after, own_mb_after) in zip(before, after, strict=True):
        assert files_after <= files
        assert maps_after <= maps + 8  # of the allocator
        assert own_mb_after <= own_mb + 8


# --- training ---------------------------------------------------------------------------------------------------------


class Regression(LightningModule):
    """Learns from what it is given, to the bit."""

    def __init__(self, hand_over):
        super().__init__()
        self.hand_over = hand_over
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        assert batch["x"].is_shared() == (self.hand_over == "torch")
        batch["x"].mul_(0.5)  # in place, as some steps do
        return (self.layer(batch["x"]) - batch["y"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Noise(Dataset):
    """Samples that differ, and random numbers in each."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return {"x": torch.full((8,), index / 64) + torch.rand(8), "y": torch.rand(1)}


class Data(FastDataModule):
    """Noise."""

    def make_dataset(self, split):
        return Noise() if split == "train" else None


def weights_after_training(hand_over):
    seed_everything(3, workers=True, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression(hand_over)
    before = model.layer.weight.clone()
    loader = LoaderSettings(num_workers=1, hand_over=hand_over)
    trainer.fit(model, datamodule=Data(batch_size=4, loader=loader))
    assert not torch.equal(model.layer.weight, before)
    return model.state_dict()


@pytest.mark.filterwarnings("ignore:.*using the device under current context")
def test_ddp_training_gives_the_same_weights_with_slots_and_torch():
    ours, torchs = (weights_after_training(way) for way in ("slots", "torch"))
    assert all(torch.equal(ours[name], torchs[name]) for name in torchs)


# --- a driver that refuses --------------------------------------------------------------------------------------------


class RefusingRuntime:
    """The CUDA runtime of a process that may lock little memory."""

    def __init__(self, allowed_bytes):
        self.allowed_bytes = allowed_bytes
        self.asked = []

    def cudaHostRegister(self, address, size, flags):
        self.asked.append(size)
        return 0 if size <= self.allowed_bytes else 2

    def cudaHostUnregister(self, address):
        return 0


@pytest.fixture
def runtime(monkeypatch):
    """A refusing runtime, with the errors that were cleared."""
    fake = RefusingRuntime(allowed_bytes=0)
    fake.cleared = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(slots, "_clear_error", lambda: fake.cleared.append(True))
    return fake


def test_pinning_thread_is_kept_where_memory_cannot_be_registered(runtime):
    loader = torch.utils.data.DataLoader(torch.ones(4), num_workers=1, pin_memory=True)
    slot_loaders.use_slots(loader)
    assert loader.pin_memory
    assert not loader.collate_fn.memory.registers
    assert runtime.cleared == [True]


class Backend:
    """A device that does everything at once."""

    def current_device(self):
        return 0

    def current_stream(self, _device):
        return "main"

    def is_current_stream_capturing(self):
        return False

    class Event:
        """Has always passed."""

        def record(self, stream):
            pass

        def query(self):
            return True

        synchronize = query


def test_refused_registration_is_logged_once_and_not_retried(runtime, caplog):
    runtime.allowed_bytes = 8192
    memory = SlotMemory(2, CopyFence(Backend()))
    with caplog.at_level(logging.WARNING):
        for used in (100_000, 100_000, 200_000, 4096):
            slot = memory.take()
            memory._register(slot, used)
            memory.give_back(slot)
    assert caplog.text.count("could not be registered") == 1
    assert len(runtime.asked) == 2  # the first of the large ones, and the small one
    assert runtime.cleared == [True]


class WillingRuntime:
    """The CUDA runtime of a process that may lock all memory. Knows which is locked."""

    def __init__(self):
        self.locked = {}

    def cudaHostRegister(self, address, size, flags):
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0

    def holds(self, tensor):
        """True if all bytes of a tensor are in one locked range, which a copy to the device must not leave."""
        first = tensor.data_ptr()
        return any(start <= first and first + tensor.nbytes <= start + size for start, size in self.locked.items())


@pytest.mark.parametrize("made_by", ["torch", "us"])
def test_slot_batches_are_locked_by_registering_and_not_by_a_pin_thread(made_by, monkeypatch):
    runtime = WillingRuntime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for module in (torch.cuda, torch.accelerator):  # else torch never pins
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(copy_fence, "CopyFence", lambda: CopyFence(Backend()))
    options = {"batch_size": 2, "num_workers": 1, "pin_memory": True}
    data = torch.arange(64.0).repeat(5000, 1).T.contiguous()
    if made_by == "us":
        loader = FeedLoader(data, **options)
    else:
        loader = torch.utils.data.DataLoader(data, **options)
        loader.__class__ = slot_loaders.in_slots(type(loader))
    batches = iter(loader)
    source = getattr(batches, "source", batches)
    assert memory_of(source).registers
    assert not source._pin_memory
    for number, batch in enumerate(batches):
        assert batch[0, 0] == 2 * number
        assert runtime.holds(batch)
        assert not runtime.holds(batch.clone())


def test_pending_cuda_error_is_cleared_after_a_refused_call(monkeypatch):
    launched = []

    def ones(*_, device):
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", ones)
    slots._clear_error()
    assert launched == ["cuda"]
