"""The rehearsal passes datasets whose samples depend on their index alone, and refuses all others."""

import csv
import ctypes
import functools
import gzip
import io
import itertools
import multiprocessing
import os
import random
import sqlite3
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import in_gate
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from lightning_feed.load import rehearsal as module
from lightning_feed.load.collate import BadSamples
from lightning_feed.load.rehearsal import Rehearsal, rehearse

SAMPLES = 40
RECORD = 100_000
"""Bytes of a record in a file: more than Python's buffer of a file."""
PAIRS: Any = [[(1, 2), (3, 4)], [(5, 6)]]


class Rows(Dataset[Any]):
    """Makes its samples with a function of the index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def rehearsed(make: Callable[[int], Any], **options: Any) -> Rehearsal:
    return rehearse(DataLoader(Rows(make), batch_size=4, shuffle=True, **options))


def reason(make: Callable[[int], Any], **options: Any) -> str:
    refusal = rehearsed(make, **options).refusal
    return refusal.reason if refusal is not None else ""


# --- samples that stay the same ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda index: torch.tensor([index, 2.0 * index]), marks=pytest.mark.nightly),
        lambda index: {"image": np.full((3, 4), index), "name": f"{index}.jpg", "size": (index, 2.5)},
        pytest.param(lambda index: torch.rand(3), marks=pytest.mark.nightly),
        lambda index: (random.random(), float(np.random.rand())),
        pytest.param(lambda index: os.urandom(4), marks=pytest.mark.nightly),
        lambda index: (index, time.monotonic_ns()),
    ],
    ids=["tensors", "a dict", "torch's numbers", "default generators", "the system's numbers", "the time"],
)
def test_samples_that_depend_on_their_index_alone_or_are_random_by_themselves_pass(make: Any) -> None:
    assert reason(make) == ""


class Keyed(Dataset[str]):
    def __init__(self) -> None:
        self.names = ["a", "b", "c", "d"]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: str) -> int:
        return self.names.index(key)

    def __getitems__(self, keys: list[str]) -> list[int]:
        return [self[key] for key in keys]


def test_indices_come_from_the_loaders_own_sampler() -> None:
    keyed = Keyed()
    assert rehearse(DataLoader(keyed, batch_size=2, sampler=keyed.names)).refusal is None
    assert rehearse(DataLoader(keyed, batch_size=None, sampler=["a", "b", "c"])).refusal is None
    assert rehearse(DataLoader(Rows(lambda index: index[1]), batch_sampler=PAIRS)).refusal is None


def test_nothing_is_read_and_nothing_changes_in_the_training_process() -> None:
    read: list[int] = []

    def make(index: int) -> float:
        read.append(index)
        return random.random() + float(torch.rand(()))

    states = torch.get_rng_state(), random.getstate()
    loader = DataLoader(Rows(make), batch_size=4, shuffle=True)
    assert rehearse(loader).refusal is None
    assert read == []
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert multiprocessing.active_children() == []


def test_what_samples_print_and_unreadable_samples_leave_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    bad = BadSamples("skip")

    def make(index: int) -> int:
        print("reading", index)  # noqa: T201
        bad._count("broken")
        return index

    assert reason(make) == ""
    assert capfd.readouterr().out == ""
    assert bad.failures == 0


def test_datasets_of_the_same_class_and_length_have_different_fingerprints() -> None:
    first = rehearsed(lambda index: torch.tensor([index]))
    again = rehearsed(lambda index: torch.tensor([index]))
    assert first.fingerprint == again.fingerprint
    assert rehearsed(lambda index: torch.tensor([index + 1])).fingerprint != first.fingerprint


class Buckets:
    """Batches of samples of one length, as a bucketing sampler makes them."""

    def __iter__(self) -> Any:
        return iter([[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]])

    def __len__(self) -> int:
        return 3


def test_a_collate_function_that_takes_only_the_loaders_own_batches_is_rehearsed_with_one() -> None:
    buckets: Any = Buckets()
    assert rehearse(DataLoader(Rows(lambda index: torch.rand(index)), batch_sampler=buckets)).refusal is None

    rng = random.Random(0)

    def picky(samples: list[Any]) -> Any:
        return torch.stack(samples).view(4, 3) * rng.random()

    pairs: Any = [[0, 1, 2, 3]] * 9
    refusal = rehearse(DataLoader(Rows(lambda _: torch.ones(3)), batch_sampler=pairs, collate_fn=picky)).refusal
    assert refusal is not None
    assert refusal.reason == "collate"


def test_a_collate_function_that_fails_for_the_loaders_own_batch_is_refused() -> None:
    assert reason(lambda index: torch.ones(1 + index % 7)) == "error"


# --- state anywhere ---------------------------------------------------------------------------------------------------


class Holder:
    """Holds a generator in a slot, which no dict of attributes shows."""

    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, index: int) -> float:
        return index + self.rng.random()


GENERATOR = np.random.default_rng(0)


def _deeper(levels: int) -> Any:
    make: Any = functools.partial(lambda rng, index: index + rng.random(), random.Random(0))
    for _ in range(levels):
        make = functools.partial(lambda inner, index: inner(index), make)
    return make


def _replayed() -> Any:
    patches = deque(range(10_000))
    return lambda _: patches.popleft()


def _csv_rows() -> Any:
    rows = csv.reader(io.StringIO("\n".join(map(str, range(10_000)))))
    return lambda _: next(rows)[0]


def _c_state() -> Any:
    library = ctypes.CDLL(None)
    library.srand(7)
    return lambda index: index + library.rand()


STATES: dict[str, Callable[[], Any]] = {
    "closure": lambda: (lambda rng: lambda index: index + rng.random())(random.Random(0)),
    "default argument": lambda: lambda index, rng=random.Random(0): index + rng.random(),  # noqa: B008
    "slots": Holder,
    "bound method": lambda: Holder().__call__,
    "seven partials": lambda: _deeper(7),
    "global": lambda: lambda index: index + GENERATOR.random(),
    "torch generator": lambda: (lambda g: lambda index: index + torch.rand((), generator=g))(torch.Generator()),
    "coin": lambda: (lambda rng: lambda index: (index, rng.random() < 0.5))(random.Random(0)),
    "cycle": lambda: (lambda numbers: lambda _: next(numbers))(itertools.cycle(range(7))),
    "counter": lambda: (lambda count: lambda index: (index, next(count) // 5))(itertools.count()),
    "queue of patches": _replayed,
    "iterator of a C library": _csv_rows,
    "state of a C library": _c_state,
}


@pytest.mark.parametrize(
    "name", in_gate(list(STATES), ["slots", "global", "torch generator", "counter", "state of a C library"])
)
def test_a_sample_that_depends_on_what_was_read_before_it_is_refused(name: str) -> None:
    refusal = rehearsed(STATES[name]()).refusal
    assert refusal is not None
    assert refusal.reason == "past"
    assert str(refusal).startswith(f"sample {refusal.detail} depends on what was read before it")
    assert int(refusal.detail) < SAMPLES


class Draws(Dataset[Any]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, int(self.rng.integers(1 << 40))])


def test_a_refusal_names_the_attribute_that_changes() -> None:
    refusal = rehearse(DataLoader(Subset(Draws(), range(20)), batch_size=4)).refusal
    assert refusal is not None
    assert refusal.name == "dataset.dataset.rng"
    assert "(dataset.dataset.rng)" in str(refusal)


class Mixes:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, samples: list[Any]) -> Any:
        return torch.stack(samples) * self.rng.random()


def test_a_collate_function_that_draws_from_a_generator_of_its_own_is_refused() -> None:
    refusal = rehearsed(lambda index: torch.tensor([index + 1.0]), collate_fn=Mixes()).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.name) == ("collate", "collate_fn.rng")


# --- worker_init_fn ---------------------------------------------------------------------------------------------------


def reseeds(_: int) -> None:
    worker: Any = get_worker_info()
    worker.dataset.rng = np.random.default_rng(torch.initial_seed())


def seeds_alike(_: int) -> None:
    worker: Any = get_worker_info()
    worker.dataset.rng = np.random.default_rng(5)


def seeds_numpy_alike(_: int) -> None:
    np.random.seed(5)


def test_a_worker_init_fn_that_reseeds_counts() -> None:
    assert rehearse(DataLoader(Draws(), batch_size=4, worker_init_fn=reseeds)).refusal is None


def test_workers_that_would_draw_the_same_numbers_are_refused() -> None:
    refusal = rehearse(DataLoader(Draws(), batch_size=4, worker_init_fn=seeds_alike)).refusal
    assert refusal is not None
    assert refusal.reason == "past"
    assert reason(lambda index: float(np.random.rand()), worker_init_fn=seeds_numpy_alike) == "alike"


# --- what does not survive a fork -------------------------------------------------------------------------------------


@pytest.fixture
def numbered_file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    path.write_bytes(b"".join(number.to_bytes(RECORD, "big") for number in range(SAMPLES)))
    return path


def test_workers_that_share_the_position_of_a_file_are_refused_and_it_stays(numbered_file: Path) -> None:
    with numbered_file.open("rb") as file:
        file.read(RECORD)
        position = os.lseek(file.fileno(), 0, os.SEEK_CUR)

        def seek_and_read(index: int) -> int:
            file.seek(RECORD * index)
            return int.from_bytes(file.read(RECORD), "big")

        refusal = rehearsed(seek_and_read).refusal
        assert refusal is not None
        assert (refusal.reason, refusal.detail) == ("file", str(numbered_file))
        assert reason(lambda _: file.read(RECORD)) == "past"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == position
        assert int.from_bytes(file.read(RECORD), "big") == 1


def test_a_compressed_file_is_not_reopened(tmp_path: Path) -> None:
    path = tmp_path / "numbers.gz"
    path.write_bytes(gzip.compress(random.Random(0).randbytes(SAMPLES * RECORD)))
    with gzip.open(path) as file:

        def seek_and_read(index: int) -> int:
            file.seek(RECORD * index)
            return int(file.read(1)[0])

        assert reason(seek_and_read) == "file"


def test_a_dataset_that_starts_processes_is_refused() -> None:
    def make(index: int) -> int:
        process = torch.multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        return index

    refusal = rehearsed(make).refusal
    assert refusal is not None
    assert refusal.reason == "workers"
    assert "daemonic processes are not allowed to have children" in str(refusal)


def test_threads_and_locks_that_do_not_survive_a_fork_are_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 2.0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert reason(lambda index: pool.submit(abs, index).result()) == "time"
    lock = threading.Lock()

    def locked(index: int) -> int:
        with lock:
            return index

    assert reason(locked) == ""
    with lock:
        assert reason(locked) == "time"


def test_an_error_of_the_dataset_is_told() -> None:
    refusal = rehearsed(lambda index: [][index]).refusal
    assert refusal is not None
    assert refusal.reason == "error"
    assert "IndexError: list index out of range" in str(refusal)


def test_a_refusal_of_a_worker_process_has_its_error() -> None:
    def make(index: int) -> int:
        if get_worker_info() is not None:
            raise OSError("no connection")
        return index

    assert "OSError: no connection" in str(rehearsed(make).refusal)


def test_samples_that_differ_in_worker_processes_are_refused() -> None:
    assert reason(lambda index: (index, get_worker_info() is None)) == "workers"


# --- objects that processes share -------------------------------------------------------------------------------------


def ended_program() -> Any:
    program = subprocess.Popen(["true"])
    program.wait()
    return program


def _in_a_closure(shared: Any) -> Any:
    return lambda index: (index, shared)[0]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (multiprocessing.Queue, "Queue"),
        (multiprocessing.SimpleQueue, "SimpleQueue"),
        (multiprocessing.Pipe, "Connection"),
        (multiprocessing.Lock, "Lock"),
        (lambda: multiprocessing.Value("i", 0), "Synchronized"),
        (lambda: multiprocessing.RawArray("i", 3), "c_int_Array_3"),
        (lambda: torch.zeros(2).share_memory_(), "Tensor"),
        (lambda: sqlite3.connect(":memory:"), "Connection"),
        (ended_program, "Popen"),
    ],
)
@pytest.mark.parametrize(
    "put",
    [
        _in_a_closure,
        lambda shared: functools.partial(lambda shared, index: index, shared),
        lambda shared: lambda index, shared=shared: index,
        lambda shared: functools.partial(lambda deep, index: index, [{"a": [{"b": ([[[shared]]],)}]}]),
    ],
    ids=["closure", "partial", "default", "deep"],
)
def test_a_dataset_that_refers_to_what_processes_share_is_never_read(make: Any, name: str, put: Any) -> None:
    shared = make()
    refusal = rehearsed(put(shared)).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.detail) == ("shared", name)


class Odd:
    """Runs code when it is asked for its class, as numpy's lazy files do."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


def test_looking_for_shared_objects_runs_no_code_of_the_user() -> None:
    odd = Odd()
    assert reason(lambda index: index if odd is not None else 0) == ""


# --- datasets that keep what they read --------------------------------------------------------------------------------


def test_a_dataset_that_keeps_what_it_reads_is_told_by_its_speed() -> None:
    @functools.cache
    def slow(index: int) -> int:
        time.sleep(0.005)
        return index

    assert rehearsed(slow).keeps
    assert not rehearsed(slow.__wrapped__).keeps


@pytest.mark.parametrize("read_before", in_gate([0.5, 0.7], [0.7]))
def test_a_dataset_of_which_training_has_read_a_part_still_keeps_the_rest(read_before: float) -> None:
    """The part is fast in each process that is forked from now on."""

    @functools.cache
    def slow(index: int) -> int:
        time.sleep(0.005)
        return index

    for index in range(int(SAMPLES * read_before)):
        slow(index)
    assert rehearsed(slow).keeps


def test_slow_samples_are_read_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_S", 0.03)
    counts = multiprocessing.get_context("fork").RawArray("i", 1)
    monkeypatch.setattr(module, "refers_to_shared", lambda _: "")

    def slow(index: int) -> int:
        counts[0] += 1
        time.sleep(0.02)
        return index

    assert reason(slow) == ""
    assert counts[0] <= 2 * 9  # two samples


def test_large_samples_are_few_and_fill_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 4096)
    monkeypatch.setattr(module, "refers_to_shared", lambda _: "")
    counts = multiprocessing.get_context("fork").RawArray("i", 1)

    def large(index: int) -> torch.Tensor:
        counts[0] += 1
        return torch.full((1024,), float(index))

    assert reason(large) == ""
    assert counts[0] <= 2 * 9  # two samples


def test_batches_that_cannot_be_sent_from_a_worker_are_refused() -> None:
    refusal = rehearsed(lambda _: 1, collate_fn=lambda samples: [lambda: samples]).refusal
    assert refusal is not None
    assert refusal.reason == "workers"
    assert "pickle" in refusal.detail
