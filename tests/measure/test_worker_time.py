"""Counters of workers, on trees that look like /proc."""

import shutil
from pathlib import Path

import pytest

from lightning_feed.measure.kernel import WorkerClock, Workers, WorkerTime

SECOND = 1_000_000_000


def write_worker(
    root: Path, pid: int, threads: dict[int, tuple[int, int]], io: tuple[int, int, int] | None = (0, 0, 0)
) -> None:
    """A process with threads (on CPU ms, run queue ms), and bytes (rchar, syscr, read_bytes)."""
    for thread, (on_cpu, queue) in threads.items():
        folder = root / f"proc/{pid}/task/{thread}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{on_cpu * 1_000_000} {queue * 1_000_000} 7\n")
    if io is not None:
        (root / f"proc/{pid}/io").write_text(
            f"rchar: {io[0]}\nwchar: 5\nsyscr: {io[1]}\nsyscw: 1\nread_bytes: {io[2]}\nwrite_bytes: 9\n"
        )


def shares(time: WorkerTime) -> list[float | None]:
    return [time.share_pct(part) for part in (time.on_cpu_ns, time.run_queue_ns, time.blocked_ns)]


def test_shares_of_one_worker_add_up(tmp_path: Path) -> None:
    clock, workers = WorkerClock(tmp_path), Workers(pids=(7,))
    write_worker(tmp_path, 7, {7: (100, 50)})
    clock.take(workers, 0)
    write_worker(tmp_path, 7, {7: (700, 150)})
    assert shares(clock.take(workers, SECOND)) == pytest.approx([60, 10, 30])


def test_a_sleeping_helper_thread_takes_nothing_from_the_worker(tmp_path: Path) -> None:
    clock, workers = WorkerClock(tmp_path), Workers(pids=(7,))
    write_worker(tmp_path, 7, {7: (0, 0), 8: (0, 0)})
    clock.take(workers, 0)
    write_worker(tmp_path, 7, {7: (900, 0), 8: (50, 0)})
    assert shares(clock.take(workers, SECOND)) == pytest.approx([95, 0, 5])


def test_only_workers_present_at_both_readings_count(tmp_path: Path) -> None:
    clock = WorkerClock(tmp_path)
    write_worker(tmp_path, 1, {1: (0, 0)})
    write_worker(tmp_path, 2, {2: (0, 0)})
    clock.take(Workers(pids=(1, 2)), 0)
    shutil.rmtree(tmp_path / "proc/2")
    write_worker(tmp_path, 1, {1: (500, 0)})
    write_worker(tmp_path, 3, {3: (9000, 0)})
    time = clock.take(Workers(pids=(1, 2, 3)), SECOND)
    assert time.wall_ns == SECOND
    assert shares(time) == pytest.approx([50, 0, 50])


@pytest.mark.parametrize("later", [(5, 60), (60, 5)])
def test_worker_counters_that_go_backwards_give_no_shares(tmp_path: Path, later: tuple[int, int]) -> None:
    clock, workers = WorkerClock(tmp_path), Workers(pids=(7,))
    write_worker(tmp_path, 7, {7: (50, 50)})
    clock.take(workers, 0)
    write_worker(tmp_path, 7, {7: later})
    assert shares(clock.take(workers, SECOND)) == [None, None, None]


def test_worker_times_are_none_without_proc(tmp_path: Path) -> None:
    clock, workers = WorkerClock(tmp_path), Workers(pids=(7,), thread_ids=(8,))
    clock.take(workers, 0)
    time = clock.take(workers, SECOND)
    assert shares(time) == [None, None, None]
    assert (time.read_mb_per_s, time.disk_mb_per_s, time.page_cache_pct) == (None, None, None)


def test_zero_kernel_counters_are_not_read_as_blocked_workers(tmp_path: Path) -> None:
    clock, workers = WorkerClock(tmp_path), Workers(pids=(7,))
    write_worker(tmp_path, 7, {7: (0, 0)})
    clock.take(workers, 0)
    assert shares(clock.take(workers, SECOND)) == [None, None, None]


def test_worker_times_are_known_without_io_counters(tmp_path: Path) -> None:
    clock, workers = WorkerClock(tmp_path), Workers(pids=(7,))
    write_worker(tmp_path, 7, {7: (0, 0)}, io=None)
    clock.take(workers, 0)
    write_worker(tmp_path, 7, {7: (500, 0)}, io=None)
    time = clock.take(workers, SECOND)
    assert time.share_pct(time.on_cpu_ns) == 50
    assert time.read_mb_per_s is None


def test_worker_threads_of_this_process_are_measured(tmp_path: Path) -> None:
    clock, workers = WorkerClock(tmp_path), Workers(thread_ids=(31,))
    folder = tmp_path / "proc/self/task/31"
    folder.mkdir(parents=True)
    (folder / "schedstat").write_text("1 0 0")
    (folder / "io").write_text("rchar: 0\nsyscr: 0\nread_bytes: 0\n")
    clock.take(workers, 0)
    (folder / "schedstat").write_text("250000001 0 0")
    (folder / "io").write_text("rchar: 8000000\nsyscr: 9\nread_bytes: 2000000\n")
    time = clock.take(workers, SECOND)
    assert shares(time) == pytest.approx([25, 0, 75])
    assert (time.read_mb_per_s, time.disk_mb_per_s) == pytest.approx((8, 2))
    assert time.page_cache_pct == pytest.approx(75)


def read_bytes(root: Path, after: tuple[int, int, int]) -> WorkerTime:
    clock, workers = WorkerClock(root), Workers(pids=(7,))
    write_worker(root, 7, {7: (0, 0)})
    clock.take(workers, 0)
    write_worker(root, 7, {7: (1, 0)}, io=after)
    return clock.take(workers, SECOND)


def test_page_cache_share_is_none_if_disk_reads_exceed_requested_bytes(tmp_path: Path) -> None:
    time = read_bytes(tmp_path, (2000, 20, 50_000_000))
    assert time.page_cache_pct is None
    assert (time.read_mb_per_s, time.disk_mb_per_s) == pytest.approx((50, 50))


def test_meet_reads_the_counters_of_new_workers_only(tmp_path: Path) -> None:
    clock = WorkerClock(tmp_path)
    write_worker(tmp_path, 1, {1: (0, 0)})
    clock.meet(Workers(pids=(1,)), 0)
    write_worker(tmp_path, 1, {1: (1000, 0)})
    write_worker(tmp_path, 2, {2: (0, 0)})
    clock.meet(Workers(pids=(1, 2)), SECOND)
    write_worker(tmp_path, 2, {2: (1000, 0)})
    time = clock.take(Workers(pids=(1, 2)), 2 * SECOND)
    assert time.wall_ns == 3 * SECOND  # the first was met a second earlier, and is not read anew
    assert shares(time) == pytest.approx([200 / 3, 0, 100 / 3])
