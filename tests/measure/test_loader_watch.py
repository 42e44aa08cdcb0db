"""LoaderWatch on imitated iterators, a fake clock and trees that look like /proc."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_feed.measure.loader_watch import LoaderWatch
from lightning_feed.measure.stats import LoaderStats

MS = 1_000_000


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


class Counted:
    """A queue of which only the length is asked."""

    def __init__(self) -> None:
        self.held = 0

    def qsize(self) -> int:
        return self.held


class Imitated:
    """What is read of torch's iterator over worker processes."""

    def __init__(self, *, pins: bool = False) -> None:
        self._worker_result_queue = Counted()
        self._data_queue = Counted() if pins else self._worker_result_queue
        self._pin_memory_thread = object() if pins else None
        self._task_info: dict[int, Any] = {0: (0,), 1: (1,), 2: (0,), 3: (1,)}
        self._num_yielded = 0
        self._num_workers, self._prefetch_factor = 2, 2
        self._workers: list[Any] = []


class Loop:
    """Draws batches as a training loop does."""

    read_every_ns = 0

    def __init__(self, root: Path, *iterators: Any) -> None:
        self.clock, self.iterators = Clock(), list(iterators)
        self.watch = LoaderWatch(
            lambda: list(self.iterators), clock=self.clock, root=root, read_every_ns=self.read_every_ns
        )
        self.watch.epoch_began()

    def fetch(self, wait_ms: float = 0, *, draw: bool = True) -> None:
        self.watch.fetch_began()
        self.clock.now += int(wait_ms * MS)
        for each in self.iterators if draw else ():
            each._num_yielded += 1
        self.watch.fetch_ended()

    def step(self, ms: float) -> None:
        self.clock.now += int(ms * MS)


def test_queue_ready_is_the_mean_over_the_fetches_of_the_loop(tmp_path: Path) -> None:
    iterator = Imitated()
    loop = Loop(tmp_path, iterator)
    for held in (0, 4, 3, 2, 0):  # the first of the epoch does not count, the last has not ended
        iterator._data_queue.held = held
        loop.fetch()
        loop.step(10)
    stats = loop.watch.take()
    assert stats.queue_ready == pytest.approx(3)
    assert stats.queue_capacity == 4


def test_epoch_starts_and_gaps_do_not_lower_the_production_rate(tmp_path: Path) -> None:
    iterator = Imitated()
    loop = Loop(tmp_path, iterator)
    for _ in range(3):
        iterator._num_yielded = 0
        loop.watch.epoch_began()
        loop.fetch(wait_ms=900)
        for _ in range(5):
            loop.step(10)
            loop.fetch()
        loop.step(5000)  # validation
    stats = loop.watch.take()
    assert stats.produced_per_s == pytest.approx(100)


def test_a_pause_of_training_does_not_lower_the_production_rate(tmp_path: Path) -> None:
    iterator = Imitated()
    loop = Loop(tmp_path, iterator)
    loop.fetch()
    for steps in (3, 4):
        for _ in range(steps):
            loop.step(10)
            loop.fetch()
        loop.watch.pause()
        loop.step(5000)
        loop.watch.go_on()
    assert loop.watch.take().produced_per_s == pytest.approx(100)


def test_head_of_line_pct_is_the_share_of_waiting_lost_to_batch_order(tmp_path: Path) -> None:
    iterator = Imitated()
    loop = Loop(tmp_path, iterator)
    loop.fetch(wait_ms=100)  # the first, not counted
    iterator._task_info |= {1: (1, "kept")}  # torch has given the newest task to the worker that was idle
    loop.fetch(wait_ms=80)
    iterator._task_info |= {1: (1,)}
    loop.fetch(wait_ms=20)
    loop.fetch()
    assert loop.watch.take().head_of_line_pct == pytest.approx(100 * 80 / 2 / (80 + 20))


def test_pin_lag_is_the_wait_for_loaded_but_unpinned_batches(tmp_path: Path) -> None:
    iterator = Imitated(pins=True)
    loop = Loop(tmp_path, iterator)
    loop.fetch()
    for unpinned, pinned, wait in ((2, 0, 30), (2, 1, 7), (0, 0, 50), (0, 0, 0)):
        iterator._worker_result_queue.held, iterator._data_queue.held = unpinned, pinned
        loop.fetch(wait_ms=wait)
    stats = loop.watch.take()
    assert stats.pin_lag_ms == pytest.approx(30 / 3)
    assert stats.queue_ready == pytest.approx(1 / 3)


def test_a_prefetched_batch_is_not_counted_as_a_fetch(tmp_path: Path) -> None:
    iterator = Imitated()
    loop = Loop(tmp_path, iterator)
    for _ in range(6):  # a prefetcher: it draws within the step, and the loop's own fetch finds it done
        iterator._data_queue.held = 4
        loop.fetch(wait_ms=4)
        loop.step(5)
        iterator._data_queue.held = 0
        loop.fetch(wait_ms=1, draw=False)
    stats = loop.watch.take()
    assert stats.queue_ready == 4
    assert stats.produced_per_s == pytest.approx(100)


def test_parallel_loaders_report_the_emptiest_queue_and_a_joint_rate(tmp_path: Path) -> None:
    one, other = Imitated(), Imitated()
    loop = Loop(tmp_path, one, other)
    one._data_queue.held, other._data_queue.held = 1, 2
    for _ in range(5):
        loop.fetch(wait_ms=10)
        loop.step(10)
    stats = loop.watch.take()
    assert (stats.queue_ready, stats.queue_capacity) == (1, 4)  # of the one with less
    assert stats.produced_per_s == pytest.approx(50)  # as the loop takes them, one of each


@pytest.mark.parametrize("place", [0, 1])
def test_only_the_rate_is_known_beside_an_iterator_of_another_kind(place: int, tmp_path: Path) -> None:
    class Other:
        _num_yielded = 0

    one = Imitated(pins=True)
    one._worker_result_queue.held = 1
    one._workers = [SimpleNamespace(pid=7)]
    (tmp_path / "proc/7/task/7").mkdir(parents=True)
    (tmp_path / "proc/7/task/7/schedstat").write_text("500 0 0")
    loop = Loop(tmp_path, *(Other(), one)[:: 1 - 2 * place])
    for held in (3, 3, 3, 0, 0, 0):
        one._data_queue.held = held
        loop.fetch(wait_ms=30)
        loop.step(10)
    for stats in (loop.watch.take(), loop.watch.total()):
        assert stats == LoaderStats(produced_per_s=stats.produced_per_s)
        assert stats.produced_per_s == pytest.approx(1000 / 40 * (4 - 3) / 4)


@pytest.mark.parametrize("iterators", [[], [object()]])
def test_unknown_iterators_give_empty_loader_stats(tmp_path: Path, iterators: list[Any]) -> None:
    loop = Loop(tmp_path, *iterators)
    for _ in range(4):
        loop.fetch(wait_ms=5, draw=False)
    assert loop.watch.take() == LoaderStats()
    assert loop.watch.total() == LoaderStats()


def test_a_new_iterator_within_an_epoch_restarts_the_counts(tmp_path: Path) -> None:
    first, second = Imitated(), Imitated()
    loop = Loop(tmp_path, first)
    for _ in range(4):
        loop.fetch()
        loop.step(10)
    loop.iterators = [second]  # sequential loaders
    first._data_queue.held = 99
    loop.step(2000)
    for _ in range(4):
        loop.fetch()
        loop.step(10)
    stats = loop.watch.take()
    assert stats.produced_per_s == pytest.approx(100)
    assert stats.queue_ready == 0
    assert "_try_get_data" not in vars(first)


def test_take_covers_the_window_and_total_all_since_the_warm_up(tmp_path: Path) -> None:
    iterator = Imitated()
    loop = Loop(tmp_path, iterator)

    def fetches(held: int, count: int) -> None:
        iterator._data_queue.held = held
        for _ in range(count):
            loop.fetch()
            loop.step(10)

    fetches(2, 3)
    loop.watch.take()  # of the three, the first does not count, and the third is still open
    fetches(4, 3)
    loop.watch.settle()
    fetches(4, 1)
    fetches(1, 2)
    assert loop.watch.take().queue_ready == pytest.approx((2 + 4 + 4 + 4 + 4 + 1) / 6)
    in_total = loop.watch.total().queue_ready
    assert in_total == pytest.approx((4 + 4 + 1) / 3)
    assert loop.watch.total().queue_ready == in_total
    fetches(1, 2)
    assert loop.watch.take().queue_ready == 1
    assert loop.watch.total().queue_ready == pytest.approx((4 + 4 + 1 + 1 + 1) / 5)


def test_worker_times_count_from_the_first_fetch_of_an_epoch(tmp_path: Path) -> None:
    class Worker:
        pid = 7

    def write(on_cpu_ms: int) -> None:
        folder = tmp_path / "proc/7/task/7"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{on_cpu_ms * MS} 0 0")

    iterator = Imitated()
    iterator._workers = [Worker()]
    write(500)  # starting
    loop = Loop(tmp_path, iterator)
    loop.fetch()
    write(600)
    loop.step(400)
    loop.fetch()
    stats = loop.watch.take()
    assert (stats.workers_on_cpu_pct, stats.workers_blocked_pct) == pytest.approx((25, 75))
    loop.step(100)
    write(700)
    assert loop.watch.total().workers_on_cpu_pct == pytest.approx(40)
    assert loop.watch.take().workers_on_cpu_pct == pytest.approx(100)  # the total did not take it away


def test_io_pressure_is_measured_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/pressure/io").write_text("some avg10=0 total=0")
    loop = Loop(tmp_path)
    (tmp_path / "proc/pressure/io").write_text("some avg10=0 total=300000")
    loop.step(1000)
    assert loop.watch.take().io_pressure_pct == pytest.approx(30)


def test_waiting_with_a_batch_ready_counts_as_handover(tmp_path: Path) -> None:
    iterator = Imitated()
    loop = Loop(tmp_path, iterator)
    for held, wait_ms in ((0, 900), (2, 30), (0, 10), (1, 0), (0, 0)):
        iterator._data_queue.held = held
        loop.fetch(wait_ms)
        loop.step(10)
    assert loop.watch.take().handover_pct == pytest.approx(75)


def test_handover_of_parallel_loaders_is_that_from_the_emptiest_queue(tmp_path: Path) -> None:
    one, other = Imitated(), Imitated()
    loop = Loop(tmp_path, one, other)
    one._data_queue.held, other._data_queue.held = 0, 4
    for _ in range(5):
        loop.fetch(wait_ms=10)
        loop.step(10)
    stats = loop.watch.take()
    assert (stats.queue_ready, stats.queue_capacity, stats.handover_pct) == (0, 4, 0)
