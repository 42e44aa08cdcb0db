"""CPU time per step counts training, without the warm-up and without validation."""

import pytest

from lightning_feed.measure.kernel import CpuTimes, run_queue_clock

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now * MS


def _times(*, loads_here: bool) -> tuple[CpuTimes, Clock, Clock]:
    thread, process = Clock(), Clock()
    thread.now, process.now = 7, 9
    made = CpuTimes(loads_here=loads_here, thread=thread, process=process, run_queue=lambda: None)
    return made, thread, process


def test_by_step() -> None:
    times, thread, process = _times(loads_here=True)
    assert times.per_step(0) == {}
    thread.now += 1000  # the warm-up
    times.settle(20)
    for _ in range(4):
        times.fetch_began()
        thread.now, process.now = thread.now + 3, process.now + 3
        times.fetch_ended()
        thread.now, process.now = thread.now + 5, process.now + 10
    expected = {"host_cpu_ms": 8.0, "process_cpu_ms": 13.0, "load_cpu_ms": 3.0}
    assert times.per_step(24) == pytest.approx(expected)
    assert times.per_step(24) == pytest.approx(expected)  # asked again


def test_what_is_not_training_does_not_count() -> None:
    times, thread, process = _times(loads_here=False)
    thread.now, process.now = 17, 29
    times.pause()
    times.pause()
    thread.now, process.now = 517, 929
    assert times.per_step(1) == {"host_cpu_ms": 10.0, "process_cpu_ms": 20.0}
    times.go_on()
    thread.now, process.now = 527, 949
    assert times.per_step(2) == {"host_cpu_ms": 10.0, "process_cpu_ms": 20.0}


def test_with_workers_fetching_is_not_timed() -> None:
    times, thread, _ = _times(loads_here=False)
    times.fetch_began()
    thread.now += 5
    times.fetch_ended()
    assert "load_cpu_ms" not in times.per_step(1)


def test_waiting_for_a_cpu_counts_while_a_batch_is_made() -> None:
    queue = Clock()
    times = CpuTimes(loads_here=True, thread=Clock(), process=queue, run_queue=queue)
    for now in (5, 7, 20, 21):
        queue.now = now
        (times.fetch_began if now in (5, 20) else times.fetch_ended)()
    assert times.per_step(1)["load_queue_ms"] == pytest.approx(3.0)
    times.settle(1)
    assert times.per_step(2)["load_queue_ms"] == 0.0


def test_what_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for line, expected in [(b"12 34 5\n", 34), (b"0 0 0\n", None), (b"", None)]:  # none: not Linux, or a sandbox
        monkeypatch.setattr("lightning_feed.measure.kernel.read_small", lambda _, line=line: line)
        assert run_queue_clock() == expected
