"""CPU time per step counts training, without the warm-up and without validation."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_feed.measure.cpu_time import CpuTimes, _statistics, own_clock, run_queue_clock
from lightning_feed.measure.measurements import HostTimes

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now * MS


def _times(*, loads_here: bool | None) -> tuple[CpuTimes, Clock, Clock]:
    thread, process = Clock(), Clock()
    thread.now, process.now = 7, 9
    made = CpuTimes(loads_here=loads_here, thread=thread, process=process, run_queue=lambda: None)
    made.fetch_began()
    made.fetch_ended()  # the first batch, with which counting begins
    return made, thread, process


def test_cpu_and_loading_times_are_averaged_per_step() -> None:
    times, thread, process = _times(loads_here=True)
    assert times.per_step(0) == HostTimes()
    thread.now += 1000  # the warm-up
    times.settle(20)
    for _ in range(4):
        times.fetch_began()
        thread.now, process.now = thread.now + 3, process.now + 3
        times.fetch_ended()
        thread.now, process.now = thread.now + 5, process.now + 10
    expected = {"cpu_ms": 8.0, "load_cpu_ms": 3.0, "load_queue_ms": None}
    assert vars(times.per_step(24)) == pytest.approx(expected)
    assert vars(times.per_step(24)) == pytest.approx(expected)  # asked again


def test_cpu_time_while_paused_is_not_counted() -> None:
    times, thread, process = _times(loads_here=False)
    thread.now, process.now = 17, 29
    times.pause()
    times.pause()
    thread.now, process.now = 517, 929
    assert times.per_step(1) == HostTimes(cpu_ms=10.0)
    times.go_on()
    thread.now, process.now = 527, 949
    assert times.per_step(2) == HostTimes(cpu_ms=10.0)


def test_fetching_with_workers_counts_no_loading_cpu_time() -> None:
    times, thread, _ = _times(loads_here=False)
    times.fetch_began()
    thread.now += 5
    times.fetch_ended()
    assert times.per_step(1).load_cpu_ms is None


def test_loading_time_of_an_unknown_loader_is_that_thread_cpu_time() -> None:
    times, thread, process = _times(loads_here=None)
    times.fetch_began()
    thread.now, process.now = thread.now + 5, process.now + 50  # other threads of the process compute meanwhile
    times.fetch_ended()
    assert times.per_step(1).load_cpu_ms == 5.0


@pytest.mark.parametrize("loads_here", [True, False, None])
def test_run_queue_wait_counts_in_fetches_after_the_first(*, loads_here: bool | None) -> None:
    queue = Clock()
    times = CpuTimes(loads_here=loads_here, thread=Clock(), process=Clock(), run_queue=queue)
    for began, ended in ((0, 5), (5, 7), (20, 21)):  # set-up comes before the first batch, and does not count
        queue.now = began
        times.fetch_began()
        queue.now = ended
        times.fetch_ended()
    assert times.per_step(1).load_queue_ms == pytest.approx(3.0)
    times.settle(1)
    assert times.per_step(2).load_queue_ms == 0.0


def test_run_queue_wait_is_none_without_a_run_queue_clock() -> None:
    times, _, _ = _times(loads_here=True)
    assert times.per_step(1).load_queue_ms is None


def test_run_queue_clock_reads_schedstat_or_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for line, expected in [(b"12 34 5\n", 34), (b"0 0 0\n", None), (b"", None)]:  # none: not Linux, or a sandbox
        monkeypatch.setattr("lightning_feed.measure.cpu_time._statistics.read", lambda line=line: line)
        assert run_queue_clock() == expected
        assert own_clock(lambda: 100) == 100 - (expected or 0)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count")
def test_each_thread_and_forked_process_reads_its_own_schedstat() -> None:
    def own() -> tuple[bytes, bytes]:
        kept, thread = _statistics.read(), f"/proc/self/task/{threading.get_native_id()}/schedstat"
        return kept.split()[0], Path(thread).read_bytes().split()[0]

    def close(kept: bytes, now: bytes) -> bool:
        return 0 <= int(now) - int(kept) < 1_000_000_000

    assert close(*own())
    with ThreadPoolExecutor(1) as pool:
        assert close(*pool.submit(own).result())
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"yes" if close(*own()) else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 9) == b"yes"
    os.close(reading)
    os.close(writing)
