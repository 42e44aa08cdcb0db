"""CPU time of the training thread and its process per step, their wait for a CPU, and the CPU use of other programs."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lightning_feed.storage.system import read_text

# --- other programs ---------------------------------------------------------------------------------------------------

_USER = 0
_NICE = 1
_SYSTEM = 2
_STEAL = 7
"""Columns of ``/proc/stat`` (proc(5))."""
_FIRST = 11
_LAST = 14
"""Columns ``utime`` and ``cstime`` of ``/proc/PID/stat``, counted after the program's name."""
SAMPLE_S = 2.0
"""Seconds between two samples of CPU use."""
NOW_S = 0.5
"""Seconds over which :func:`others_pct_now` measures."""
MOST_SAMPLES = 1800
"""Number of samples kept: one hour."""


class CpuTicks(NamedTuple):
    """Ticks since the machine started, over the CPUs that this process may use."""

    cpus: int
    whole: int
    busy: int
    """Ticks spent running programs."""
    own: int
    """Ticks of this process and its descendants."""


class CpuShare:
    """Share of the CPUs that other programs have used since this object was made.

    The time of this process and all its descendants is the run's own. The rest went to other programs, and on a virtual
    machine to other guests of the host. Interrupts are not counted. A reading takes about 20 microseconds for each
    process of the machine, so :meth:`sample` reads at most every 2 seconds, and for at most 0.3 % of the time.

    Args:
        root: the file system to read ``proc`` from.
        clock: seconds.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = root / "proc"
        self._clock = clock
        self._began = self._last = self._read()
        self._next_s = clock() + SAMPLE_S
        self._samples: deque[tuple[CpuTicks, CpuTicks]] = deque(maxlen=MOST_SAMPLES)

    def others_pct(self, usable_cpus: int | None) -> float | None:
        """Mean percentage of ``usable_cpus`` that other programs used; None if unknown.

        Excludes CPUs that this run may not use, since it could not have used their time anyway.
        """
        return _others_pct(self._began, self._read(), usable_cpus)

    def sample(self) -> None:
        """Sample the CPU usage if a sample is due."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        before = self._last
        self._last = self._read()
        if before is not None and self._last is not None:
            self._samples.append((before, self._last))
        took_s = self._clock() - now_s
        self._next_s = now_s + max(SAMPLE_S, 300 * took_s)

    def median_others_pct(self, usable_cpus: int | None) -> float | None:
        """Median of the samples; None without a sample. Unlike the mean, it ignores a program that ran for a while."""
        known = [_others_pct(before, after, usable_cpus) for before, after in self._samples]
        found = [pct for pct in known if pct is not None]
        return median(found) if found else None

    def others(self, usable_cpus: int | None) -> dict[str, Any]:
        """Fields of ``LoopFacts``: the mean and the median."""
        mean = self.others_pct(usable_cpus)
        middle = self.median_others_pct(usable_cpus)
        return {"others_cpu_pct": mean, "others_cpu_median_pct": middle}

    def _read(self) -> CpuTicks | None:
        lines = [line.split() for line in read_text(self._proc / "stat").splitlines()]
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
        cpus = [[int(each) for each in line[1:]] for line in lines if line and line[0] in allowed]
        if not cpus or len(cpus[0]) <= _STEAL:
            return None
        programs = (_USER, _NICE, _SYSTEM, _STEAL)
        whole = sum(sum(line[: _STEAL + 1]) for line in cpus)  # `user` already includes guests
        return CpuTicks(len(cpus), whole, sum(line[at] for line in cpus for at in programs), self._own())

    def _own(self) -> int:
        """Ticks of this process and its descendants, including descendants that ended and were waited for."""
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for folder in self._proc.iterdir():
            if folder.name.isdigit():
                # After the name, which may hold anything: state, parent, ... utime, stime, cutime, cstime.
                fields = read_text(folder / "stat").rpartition(")")[2].split()
                if len(fields) > _LAST:
                    parents[int(folder.name)] = int(fields[1])
                    ticks[int(folder.name)] = sum(map(int, fields[_FIRST : _LAST + 1]))
        own = set[int]()
        found = {os.getpid()}
        while found:
            own |= found
            found = {pid for pid, parent in parents.items() if parent in own} - own
        return sum(ticks.get(pid, 0) for pid in own)


def others_pct_now(
    usable_cpus: int | None, root: Path = Path("/"), wait: Callable[[float], object] = time.sleep
) -> float | None:
    """Percentage of ``usable_cpus`` that other programs use now; None if unknown. Takes half a second."""
    share = CpuShare(root)
    wait(NOW_S)
    return share.others_pct(usable_cpus)


def _others_pct(before: CpuTicks | None, now: CpuTicks | None, usable_cpus: int | None) -> float | None:
    if now is None or before is None or not usable_cpus or now.whole <= before.whole:
        return None
    busy = now.busy - before.busy
    own = now.own - before.own
    others = now.cpus * max(0, busy - own) / (now.whole - before.whole)
    return 100 * min(1.0, max(0.0, others - max(0, now.cpus - usable_cpus)) / usable_cpus)


# --- the training thread ----------------------------------------------------------------------------------------------

# bound here: programs patch `time`
thread_clock = time.thread_time_ns
process_clock = time.process_time_ns


class _ThreadStatistics(threading.local):
    """The kernel's scheduling statistics of the calling thread.

    The file stays open: a reading takes 0.7 us, but 3 if the file is opened each time.
    """

    thread = 0
    handle = -1

    def read(self) -> bytes:
        thread = threading.get_native_id()
        try:
            if thread != self.thread:  # the first reading, or the first after a fork
                self.thread = thread
                self.handle = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            return os.pread(self.handle, 64, 0)
        except OSError:  # not Linux, or a sandbox
            return b""


_statistics = _ThreadStatistics()


def run_queue_clock() -> int | None:
    """Nanoseconds this thread was ready to run but had no CPU; None if the kernel does not count them."""
    numbers = _statistics.read().split()  # proc(5): on a CPU, ready for one, time slices
    return int(numbers[1]) if len(numbers) > 1 and numbers[0] != b"0" else None


def own_clock(now: Callable[[], int] = time.perf_counter_ns) -> int:
    """The host's clock in nanoseconds, minus the time this thread waited for a CPU."""
    return now() - (run_queue_clock() or 0)


class CpuTimes:
    """CPU time since the first batch, or since the warm-up ended, without the time from :meth:`pause` to :meth:`go_on`.

    Args:
        loads_here: True if the process itself makes the batches. None: unknown; they may come from a generator, which
            runs in this thread.
        thread: the CPU time of this thread in nanoseconds.
        process: the CPU time of all threads of the process.
        run_queue: the time this thread waited for a CPU, in nanoseconds; None: unknown.
    """

    def __init__(
        self,
        *,
        loads_here: bool | None,
        thread: Callable[[], int] = thread_clock,
        process: Callable[[], int] = process_clock,
        run_queue: Callable[[], int | None] = run_queue_clock,
    ) -> None:
        self._thread = thread
        self._process = process
        self._run_queue = run_queue
        self._load_clock = {True: process, None: thread, False: None}[loads_here]
        self._steps_before = 0
        self._paused = False
        self._counting = False
        self._spent = CpuSums()
        self._began = self._now()
        self._loaded = self._load_queued = 0
        self._fetch_began: tuple[int, int | None] | None = None

    def settle(self, steps: int) -> None:
        """Start over after ``steps`` steps."""
        self._steps_before = steps
        self._spent = CpuSums()
        self._counting = True
        self._loaded = self._load_queued = 0
        self._began = self._now()

    def pause(self) -> None:
        """Pause: training stops for a while."""
        if not self._paused:
            self._add()
            self._paused = True

    def go_on(self) -> None:
        """Resume: training continues."""
        if self._paused:
            self._paused, self._began = False, self._now()

    def fetch_began(self) -> None:
        """Note that the loop requests a batch."""
        self._fetch_began = (self._load_clock() if self._load_clock else 0), self._run_queue()

    def fetch_ended(self) -> None:
        """Note that the batch has arrived."""
        if self._fetch_began is None:
            return
        load, queue = self._fetch_began
        self._fetch_began, queue_now = None, self._run_queue()
        if not self._counting:  # set-up and starting workers do not belong to a step
            self._counting, self._began = True, self._now()
            return
        if self._load_clock is not None:
            self._loaded += self._load_clock() - load
        if queue is not None and queue_now is not None:
            self._load_queued += queue_now - queue

    def per_step(self, steps: int) -> dict[str, Any]:
        """Fields of ``LoopFacts``: mean milliseconds per finished step; empty before the first step ends."""
        counted = steps - self._steps_before
        if counted <= 0:
            return {}
        if not self._paused:
            self._add()
        known = {"host_cpu_ms": self._spent.thread, "process_cpu_ms": self._spent.process}
        if self._load_clock is not None:
            known["load_cpu_ms"] = self._loaded
        if self._run_queue() is not None:
            known |= {"host_queue_ms": self._spent.run_queue, "load_queue_ms": self._load_queued}
        return {name: 1e-6 * ns / counted for name, ns in known.items()}

    def _now(self) -> "CpuSums":
        return CpuSums(self._thread(), self._process(), self._run_queue() or 0)

    def _add(self) -> None:
        now = self._now()
        passed = (spent + at - began for spent, at, began in zip(self._spent, now, self._began, strict=True))
        self._spent = CpuSums(*passed)
        self._began = now


class CpuSums(NamedTuple):
    """CPU time of the training thread and of its process, and the thread's wait for a CPU, in nanoseconds."""

    thread: int = 0
    process: int = 0
    run_queue: int = 0
