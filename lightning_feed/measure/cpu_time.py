"""CPU time of the training thread per step, its wait for a CPU, and the CPU use of other programs."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lightning_feed.machine.killed import killed_ticks
from lightning_feed.machine.limits import read_text
from lightning_feed.measure.measurements import HostTimes

# --- other programs ---------------------------------------------------------------------------------------------------

_USER = 0
_NICE = 1
_SYSTEM = 2
_STEAL = 7
"""Columns of a CPU's line in ``/proc/stat`` (proc(5)), counted after the CPU's name."""
_FIRST = 11
_LAST = 14
"""First and last of the columns ``utime`` to ``cstime`` of ``/proc/PID/stat``, counted after the program's name."""
NOW_S = 0.5
"""Seconds over which :func:`others_pct_now` measures."""


class CpuTicks(NamedTuple):
    """Clock ticks since the machine started, summed over the CPUs that this process may use."""

    cpus: int
    whole: int
    """Ticks in all, idle time included."""
    busy: int
    """Ticks spent running programs, or taken by other guests of a virtual machine's host."""
    own: int
    """Ticks of this process and its descendants."""


class OtherPrograms:
    """Share of the CPUs that other programs have used since this object was made.

    The time of this process and all its descendants is the run's own. The rest went to other programs, and on a virtual
    machine to other guests of the host. Interrupts are not counted.

    Args:
        root: the file system to read ``proc`` from.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._began = self._read()

    def others_pct(self, usable_cpus: int | None) -> float | None:
        """Return the mean percentage of ``usable_cpus`` that other programs used; None if unknown.

        Excludes CPUs that this run may not use, since it could not have used their time anyway.
        """
        return _others_pct(self._began, self._read(), usable_cpus)

    def _read(self) -> CpuTicks | None:
        cpus = _read_cpus(self._proc / "stat")
        if not cpus:
            return None
        whole = sum(sum(ticks[: _STEAL + 1]) for ticks in cpus)  # `user` already includes guests
        busy = sum(ticks[column] for ticks in cpus for column in (_USER, _NICE, _SYSTEM, _STEAL))
        return CpuTicks(len(cpus), whole, busy, self._own())

    def _own(self) -> int:
        """Return the ticks of this process and its descendants, with those that were waited for or killed."""
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for folder in self._proc.iterdir():
            if folder.name.isdigit():
                # After the name, which may hold anything: state, parent, ... utime, stime, cutime, cstime.
                fields = read_text(folder / "stat").rpartition(")")[2].split()
                if len(fields) > _LAST:
                    parents[int(folder.name)] = int(fields[1])
                    ticks[int(folder.name)] = sum(map(int, fields[_FIRST : _LAST + 1]))
        family = set[int]()
        generation = {os.getpid()}
        while generation:
            family |= generation
            generation = {pid for pid, parent in parents.items() if parent in family} - family
        return killed_ticks() + sum(ticks.get(pid, 0) for pid in family)


def _read_cpus(file: Path) -> list[list[int]]:
    """Return the columns of ``/proc/stat`` for each CPU that this process may use; empty if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in read_text(file).splitlines()]
    cpus = [list(map(int, line[1:])) for line in lines if line and line[0] in allowed]
    return [ticks for ticks in cpus if len(ticks) > _STEAL]


def others_pct_now(
    usable_cpus: int | None, root: Path = Path("/"), wait: Callable[[float], object] = time.sleep
) -> float | None:
    """Return the percentage of ``usable_cpus`` that other programs use now; None if unknown. Takes half a second."""
    share = OtherPrograms(root)
    wait(NOW_S)
    return share.others_pct(usable_cpus)


def _others_pct(before: CpuTicks | None, after: CpuTicks | None, usable_cpus: int | None) -> float | None:
    if before is None or after is None or not usable_cpus or after.whole <= before.whole:
        return None
    busy = after.busy - before.busy
    own = after.own - before.own
    others = after.cpus * max(0, busy - own) / (after.whole - before.whole)
    return 100 * min(1.0, max(0.0, others - max(0, after.cpus - usable_cpus)) / usable_cpus)


# --- the training thread ----------------------------------------------------------------------------------------------

# not looked up later: programs patch `time`
thread_clock = time.thread_time_ns
process_clock = time.process_time_ns


class _ThreadStatistics(threading.local):
    """The kernel's scheduling statistics of the calling thread.

    The file stays open: a reading then takes 0.7 us, and 3 us if the file is opened each time.
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
    """Return the nanoseconds this thread was ready to run but had no CPU; None if the kernel does not count them."""
    numbers = _statistics.read().split()  # proc(5): time on a CPU, time ready to run without a CPU, time slices
    if len(numbers) > 1 and numbers[0] != b"0":
        return int(numbers[1])
    return None


def own_clock(clock: Callable[[], int] = time.perf_counter_ns) -> int:
    """Return the host's clock in nanoseconds, minus the time this thread waited for a CPU."""
    return clock() - (run_queue_clock() or 0)


class CpuTimes:
    """CPU time since the first batch, or since the warm-up ended, without the time from :meth:`pause` to :meth:`go_on`.

    Args:
        loads_here: True if the training process itself makes the batches, False if workers do. None if unknown: the
            batches may come from a generator, which runs in the training thread.
        thread: returns the CPU time of this thread, in nanoseconds.
        process: returns the CPU time of all threads of the process, in nanoseconds.
        run_queue: returns the time that this thread waited for a CPU, in nanoseconds, or None if unknown.
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
        self._fetch_began: tuple[int, int | None] | None = None
        self._at_epoch = 0, 0, 0, 0
        """Values at the start of the epoch: steps, CPU time, CPU time of loading, and the wait for a CPU in loading."""
        self._restart()

    def _restart(self) -> None:
        self._spent_ns = 0
        self._loaded_ns = 0
        self._load_queued_ns = 0
        self._began_ns = self._thread()

    def settle(self, steps: int) -> None:
        """Start over: leave out the first ``steps`` steps."""
        self._steps_before = steps
        self._counting = True
        self._restart()

    def epoch_begins(self, steps: int) -> None:
        """Note that an epoch begins after ``steps`` steps."""
        if not self._paused:
            self._add()
        self._at_epoch = steps, self._spent_ns, self._loaded_ns, self._load_queued_ns

    def leave_out_earlier_epochs(self) -> None:
        """Leave out all steps before the present epoch."""
        steps, spent_ns, loaded_ns, queued_ns = self._at_epoch
        self._steps_before = steps
        self._spent_ns -= spent_ns
        self._loaded_ns -= loaded_ns
        self._load_queued_ns -= queued_ns
        self._at_epoch = steps, 0, 0, 0

    def pause(self) -> None:
        """Stop counting, because training stops for a while."""
        if not self._paused:
            self._add()
            self._paused = True

    def go_on(self) -> None:
        """Count again, because training continues."""
        if self._paused:
            self._paused = False
            self._began_ns = self._thread()

    def fetch_began(self) -> None:
        """Note that the loop requests a batch."""
        loaded_ns = self._load_clock() if self._load_clock else 0
        self._fetch_began = (loaded_ns, self._run_queue())

    def fetch_ended(self) -> None:
        """Note that the batch has arrived."""
        if self._fetch_began is None:
            return
        loaded_ns, queued_ns = self._fetch_began
        queued_now_ns = self._run_queue()
        self._fetch_began = None
        if not self._counting:  # set-up and starting workers do not belong to a step
            self._counting = True
            self._began_ns = self._thread()
            return
        if self._load_clock is not None:
            self._loaded_ns += self._load_clock() - loaded_ns
        if queued_ns is not None and queued_now_ns is not None:
            self._load_queued_ns += queued_now_ns - queued_ns

    def per_step(self, steps: int) -> HostTimes:
        """Return the mean milliseconds per finished step; all figures are None before the first counted step ends."""
        counted = steps - self._steps_before
        if counted <= 0:
            return HostTimes()
        if not self._paused:
            self._add()
        knows_loading = self._load_clock is not None
        knows_queue = self._run_queue() is not None
        return HostTimes(
            cpu_ms=1e-6 * self._spent_ns / counted,
            load_cpu_ms=1e-6 * self._loaded_ns / counted if knows_loading else None,
            load_queue_ms=1e-6 * self._load_queued_ns / counted if knows_queue else None,
        )

    def _add(self) -> None:
        now_ns = self._thread()
        self._spent_ns += now_ns - self._began_ns
        self._began_ns = now_ns
