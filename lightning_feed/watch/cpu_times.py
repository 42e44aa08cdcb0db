"""CPU time per step: of the training process, of its training thread, and of loading where the process itself loads."""

import time
from collections.abc import Callable
from typing import Any

from lightning_feed.watch.worker_time import read_small

thread_clock, process_clock = time.thread_time_ns, time.process_time_ns  # bound here: programs patch `time`


def run_queue_clock() -> int | None:
    """Nanoseconds for which this thread was ready to run and had no CPU; None where the kernel does not count them."""
    on_cpu, ready, *_ = (*read_small("/proc/thread-self/schedstat").split(), b"", b"")
    return int(ready) if on_cpu.isdigit() and ready.isdigit() and int(on_cpu) else None


class CpuTimes:
    """Counts from when it is made, or settled, without what lies between :meth:`pause` and :meth:`go_on`.

    Args:
        loads_here: whether the process itself makes the batches; only then is fetching one timed, for 20 microseconds.
        thread: the CPU time of this thread in nanoseconds.
        process: that of all threads of the process.
        run_queue: the time for which this thread waited for a CPU, in nanoseconds; None where that is not known.
    """

    def __init__(
        self,
        *,
        loads_here: bool,
        thread: Callable[[], int] = thread_clock,
        process: Callable[[], int] = process_clock,
        run_queue: Callable[[], int | None] = run_queue_clock,
    ) -> None:
        self._loads_here, self._thread, self._process, self._run_queue = loads_here, thread, process, run_queue
        self._steps_before, self._paused = 0, False
        self._spent = [0, 0]
        self._began = self._now()
        self._loading = self._fetch_began = 0
        self._queued: int | None = 0
        self._queue_began: int | None = None

    def settle(self, steps: int) -> None:
        """Begin anew after so many steps."""
        self._steps_before, self._spent, self._loading, self._queued = steps, [0, 0], 0, 0
        self._began = self._now()

    def pause(self) -> None:
        """What comes now is not training."""
        if not self._paused:
            self._add()
            self._paused = True

    def go_on(self) -> None:
        """Training goes on."""
        if self._paused:
            self._paused, self._began = False, self._now()

    def fetch_began(self) -> None:
        """A batch is drawn from the loader."""
        if self._loads_here:
            self._fetch_began, self._queue_began = self._process(), self._run_queue()

    def fetch_ended(self) -> None:
        """It is there."""
        if self._loads_here and self._fetch_began:
            self._loading += self._process() - self._fetch_began
            self._fetch_began, queue = 0, self._run_queue()
            if queue is None or self._queue_began is None or self._queued is None:
                self._queued = None
            else:
                self._queued += queue - self._queue_began

    def per_step(self, steps: int) -> dict[str, Any]:
        """Fields of ``LoopFacts`` in milliseconds, by all steps that ended; empty before the first."""
        counted = steps - self._steps_before
        if counted <= 0:
            return {}
        if not self._paused:
            self._add()
        host, whole = (1e-6 * spent / counted for spent in self._spent)
        known = {"host_cpu_ms": host, "process_cpu_ms": whole}
        if self._loads_here:
            known["load_cpu_ms"] = 1e-6 * self._loading / counted
            if self._queued is not None:
                known["load_queue_ms"] = 1e-6 * self._queued / counted
        return known

    def _now(self) -> tuple[int, int]:
        return self._thread(), self._process()

    def _add(self) -> None:
        now = self._now()
        self._spent = [spent + at - began for spent, at, began in zip(self._spent, now, self._began, strict=True)]
        self._began = now
