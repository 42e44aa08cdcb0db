"""Looking at live iterators: imitated ones for the corners, and each real kind."""

import gc
import os
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.load.loader import FeedLoader
from lightning_feed.measure.kernel import Workers
from lightning_feed.measure.loader_state import (
    Probe,
    QueueState,
    TorchProbe,
    probe_loader,
)

pytestmark = pytest.mark.filterwarnings(
    # Torch compares num_workers with the CPUs of this machine, whatever the test is about.
    "ignore:This DataLoader will create:UserWarning",
    # Forking a process that has threads, which Python 3.12 warns of; torch forks its workers.
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
)


class Worker:
    def __init__(self, pid: int | None) -> None:
        self.pid = pid


class Imitated:
    """What is read of torch's iterator."""

    def __init__(self, *, pins: bool = False) -> None:
        self._task_info: dict[int, tuple[Any, ...]] = {0: (0,), 1: (1,), 2: (0,)}
        self._worker_result_queue: Any = queue.Queue()
        self._data_queue: Any = queue.Queue() if pins else self._worker_result_queue
        if pins:
            self._pin_memory_thread = threading.current_thread()
        self._num_yielded = 5
        self._num_workers, self._prefetch_factor = 2, 3
        self._task_info |= {3: (1,), 4: (0,), 5: (1,)}
        self._workers = [Worker(11), Worker(None), Worker(12)]


def test_ready_counts_queued_batches_and_those_kept_out_of_order() -> None:
    iterator = Imitated()
    probe: Any = probe_loader(iterator)
    assert isinstance(probe, TorchProbe)
    assert probe.read() == QueueState(ready=0, unpinned=None, taken=5)
    iterator._data_queue.put("a")
    iterator._task_info[2] += ("kept",)
    assert probe.read() == QueueState(ready=2, unpinned=None, taken=5)
    assert probe.held == 6
    assert probe.workers() == Workers(pids=(11, 12))


def test_batches_not_yet_pinned_are_counted_separately() -> None:
    iterator = Imitated(pins=True)
    probe = TorchProbe(iterator)
    iterator._worker_result_queue.put("a")
    iterator._worker_result_queue.put("b")
    iterator._data_queue.put("c")
    assert probe.read() == QueueState(ready=1, unpinned=2, taken=5)


def keep(iterator: Imitated, *numbers: int) -> None:
    """The worker of odd numbers has done these, before the one that is waited for."""
    for number in numbers:
        iterator._task_info[number] += ("kept",)


def test_head_of_line_ns_is_the_wait_times_the_share_of_idle_workers() -> None:
    iterator = Imitated()
    probe = TorchProbe(iterator)
    probe.waited(10)
    keep(iterator, 1)
    probe.waited(10)
    assert probe.head_of_line_ns() == 0  # a later one is there, but nobody was idle
    keep(iterator, 3)  # and torch has given the newest task, number 5, to the idle worker
    probe.waited(10)
    assert probe.head_of_line_ns() == pytest.approx(10 / 2)  # one of two workers


def test_head_of_line_ns_does_not_grow_at_the_end_of_the_data() -> None:
    iterator = Imitated()
    probe = TorchProbe(iterator)
    keep(iterator, 1, 3, 5)
    del iterator._task_info[4]
    probe.waited(10)
    assert probe.head_of_line_ns() == 0


def test_probes_keep_no_iterator_alive() -> None:
    iterator = Imitated()
    probe, gone = TorchProbe(iterator), weakref.ref(iterator)
    gc.disable()
    try:
        del iterator
        assert gone() is None  # at once: torch ends its worker processes then
    finally:
        gc.enable()
    assert (probe.iterator(), probe.read(), probe.held, probe.workers()) == (None, None, None, Workers())


@pytest.mark.parametrize("tasks", [None, [1, 2], {0: 1}], ids=str)
def test_unexpected_iterator_attributes_give_no_queue_state(tasks: Any) -> None:
    iterator = Imitated()
    iterator._task_info = tasks
    probe = TorchProbe(iterator)
    probe.waited(10)
    assert (probe.read(), probe.head_of_line_ns()) == (None, 0)


@pytest.mark.parametrize("other", [iter([1]), (x for x in [1]), object(), None, zip([1], [2], strict=True)])
def test_probe_loader_returns_none_for_other_iterators(other: Any) -> None:
    assert probe_loader(other) is None


# --- real iterators ---------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def look(probe: Any) -> QueueState:
    state: QueueState | None = probe.read()
    assert state is not None
    return state


def until_ready(probe: Any, ready: int) -> None:
    """Wait for workers to fill the queue; ends by itself if they never do."""
    given_up = threading.Event()
    for _ in range(1000):
        if look(probe).ready == ready:
            return
        given_up.wait(0.01)
    pytest.fail(f"{look(probe)} after 10 s, {ready} ready expected")


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_probe_reads_a_torch_loader_with_workers(persistent: bool, in_order: bool) -> None:
    loader: DataLoader[Any] = DataLoader(
        range(40),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=persistent,
        in_order=in_order,
    )
    for _ in range(2):
        iterator = iter(loader)
        probe: Any = probe_loader(iterator)
        assert isinstance(probe, TorchProbe)
        until_ready(probe, 6)
        assert probe.held == 6
        assert probe.head_of_line_ns() == 0
        assert len(probe.workers().pids) == 2
        assert os.getpid() not in probe.workers().pids
        next(iterator)
        assert look(probe).taken == 1
        assert sum(1 for _ in iterator) == 19
        assert look(probe).ready == 0


def test_probe_reads_a_torch_loader_without_workers() -> None:
    iterator = iter(DataLoader(range(4)))  # type: ignore[arg-type]
    probe: Any = probe_loader(iterator)
    assert type(probe) is Probe
    next(iterator)
    assert (look(probe), probe.held, probe.workers(), probe.head_of_line_ns()) == (
        QueueState(0, None, 1),
        0,
        Workers(),
        0,
    )


# torchdata 0.11 calls what torch 2.15 has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_probe_reads_a_torchdata_stateful_loader() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    iterator = iter(stateful.StatefulDataLoader(range(40), num_workers=2, prefetch_factor=2))
    probe: Any = probe_loader(iterator)
    assert isinstance(probe, TorchProbe)
    until_ready(probe, 4)
    next(iterator)
    assert look(probe).taken == 1
    assert len(probe.workers().pids) == 2
    assert probe.head_of_line_ns() is not None
    assert sum(1 for _ in iterator) == 39


def test_probe_reads_a_feed_loader_with_threads() -> None:
    iterator = iter(FeedLoader(range(40), num_workers=2, prefetch_factor=2, workers="thread"))
    probe: Any = probe_loader(iterator)
    until_ready(probe, 4)
    next(iterator)
    threads = probe.workers().thread_ids
    assert (look(probe).taken, probe.held, len(threads), probe.head_of_line_ns()) == (1, 4, 2, 0)
    assert threading.get_native_id() not in threads
    assert probe.workers().pids == ()
    iterator.close()
    assert (probe.read(), probe.head_of_line_ns()) == (None, None)


@pytest.mark.parametrize("workers", [0, 2])
def test_probe_reads_a_feed_loader_with_background_loading(workers: int) -> None:
    options: dict[str, Any] = {"prefetch_factor": 2} if workers else {}
    iterator = iter(FeedLoader(range(40), num_workers=workers, background=3, **options))
    probe: Any = probe_loader(iterator)
    until_ready(probe, 3 + 2 * workers)
    assert probe.held == 3 + 2 * workers
    next(iterator)
    assert look(probe).taken == 1
    seen = probe.workers()
    assert (len(seen.pids), len(seen.thread_ids)) == ((2, 0) if workers else (0, 1))
    iterator.close()
    assert probe.read() is None


def test_threads_waiting_for_one_slow_sample_count_as_head_of_line() -> None:
    let_go = threading.Event()
    later_done = threading.Event()

    class OneSlow(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == 1:  # the first is loaded before all others, to see what it draws from
                let_go.wait(10)
            elif index == 3:
                later_done.set()
            return index

    iterator = iter(FeedLoader(OneSlow(), batch_size=None, num_workers=2, prefetch_factor=2, workers="thread"))
    probe: Any = probe_loader(iterator)

    def release() -> None:
        later_done.wait(10)
        let_go.wait(0.05)
        let_go.set()

    helper = threading.Thread(target=release)
    assert next(iterator) == 0
    helper.start()
    assert next(iterator) == 1
    helper.join()
    assert probe is not None
    assert (probe.head_of_line_ns() or 0) > 20_000_000  # one thread of two, for at least 50 ms
    assert list(iterator) == [2, 3, 4, 5]
