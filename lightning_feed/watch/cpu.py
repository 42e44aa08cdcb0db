"""CPU counters: pressure and throttling of the kernel, what other programs take, CPU time per step."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightning_feed.archive.system import cgroup_folders, read_text
from lightning_feed.watch.worker_time import read_small

T = TypeVar("T")

RESOURCES = ("cpu", "io", "memory")


@dataclass
class PressureTime:
    """Sums over intervals."""

    waited_us: dict[str, int] = field(default_factory=dict)
    """Microseconds in which some task waited for the resource (PSI "some"), by resource."""
    span_us: dict[str, float] = field(default_factory=dict)
    """Microseconds in which that was measured."""
    periods: dict[str, int] = field(default_factory=dict)
    """Scheduler periods of each cgroup that may have a quota."""
    throttled: dict[str, int] = field(default_factory=dict)
    """Those in which it had used up its quota."""

    def add(self, other: "PressureTime") -> None:
        """Add what another interval gave."""
        for name in self.__dataclass_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            for key, value in others.items():
                mine[key] = mine.get(key, 0) + value

    def pressure_pct(self, resource: str) -> float | None:
        """Share of time in which some task waited for ``"cpu"``, ``"io"`` or ``"memory"``, 0 to 100."""
        span = self.span_us.get(resource)
        return min(100.0, 100 * self.waited_us[resource] / span) if span else None

    @property
    def throttled_pct(self) -> float | None:
        """Share of periods without quota left, 0 to 100, of the cgroup worst off; None where none has a quota."""
        shares = [100 * self.throttled[key] / periods for key, periods in self.periods.items() if periods]
        return max(shares, default=None)


class PressureClock:
    """Reads the kernel's totals, and gives the differences.

    Sources: Documentation/accounting/psi.rst and admin-guide/cgroup-v2.rst of Linux. The files are looked for once,
    when this is made.

    Args:
        root: the file system to read ``proc`` and ``sys`` from.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        own = list(cgroup_folders(root, ""))
        self._pressure = {}
        for resource in RESOURCES:
            # A process outside of any container is in the root cgroup, or in its session's: the nearest is meant.
            files = [*(folder / f"{resource}.pressure" for folder in own), root / "proc/pressure" / resource]
            found = next((path for path in files if _some_total(path) is not None), None)
            if found is not None:
                self._pressure[resource] = found
        # The quota that binds may be that of a cgroup further out.
        folders = [*own, *cgroup_folders(root, "cpu")]
        self._quotas = [path for path in (folder / "cpu.stat" for folder in folders) if _periods(path) is not None]
        self._last: dict[str, int] = {}
        self._last_periods: dict[str, tuple[int, int]] = {}
        self._at_ns: int | None = None

    def take(self, now_ns: int) -> PressureTime:
        """What happened since the last time; nothing at the first. ``now_ns``: the time now."""
        time = PressureTime()
        span = None if self._at_ns is None else (now_ns - self._at_ns) * 1e-3
        self._at_ns = now_ns
        totals = _read_all(self._pressure.items(), _some_total)
        for resource, total in totals.items():
            then = self._last.get(resource)
            if span and then is not None and total >= then:
                time.waited_us[resource], time.span_us[resource] = total - then, span
        self._last = totals
        counts = _read_all(((str(path), path) for path in self._quotas), _periods)
        for folder, now in counts.items():
            before = self._last_periods.get(folder)
            if before is not None and now[0] >= before[0] and now[1] >= before[1]:
                time.periods[folder], time.throttled[folder] = now[0] - before[0], now[1] - before[1]
        self._last_periods = counts
        return time


def _read_all(paths: Iterable[tuple[str, Path]], read: Callable[[Path], T | None]) -> dict[str, T]:
    found = ((name, read(path)) for name, path in paths)
    return {name: value for name, value in found if value is not None}


def _some_total(path: Path) -> int | None:
    """Microseconds of ``some avg10=0.00 avg60=0.00 avg300=0.00 total=123``."""
    for line in read_text(path).splitlines():
        kind, *values = line.split()
        if kind == "some":
            for value in values:
                name, _, number = value.partition("=")
                if name == "total" and number.isdigit():
                    return int(number)
    return None


def _periods(path: Path) -> tuple[int, int] | None:
    """``nr_periods`` and ``nr_throttled`` of a ``cpu.stat``, which v1 and v2 call the same."""
    values = {}
    for line in read_text(path).splitlines():
        name, _, number = line.partition(" ")
        if number.isdigit():
            values[name] = int(number)
    if "nr_periods" in values and "nr_throttled" in values:
        return values["nr_periods"], values["nr_throttled"]
    return None


_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
"""Columns of ``/proc/stat``, see proc(5); of ``/proc/PID/stat``, counted behind the name, ``utime`` to ``cstime``:"""
_FIRST, _LAST = 11, 14


class CpuShare:
    """Counts from when it is made.

    The time of this process counts as the run's own, and that of all that it started: workers, and what those start.
    The rest is what other programs took, and what the host of a virtual machine gave to others. Interrupts are
    nobody's. Reading takes some 20 microseconds for each process of the machine: it is for reports, and not for steps.

    Args:
        root: the file system to read ``proc`` from.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._began = self._read()

    def others_pct(self, usable_cpus: int | None) -> float | None:
        """Share of ``usable_cpus`` that others took, 0 to 100; None where the kernel does not tell.

        What others take of CPUs beyond those that this run may use is not counted: they were not to be had anyway.
        """
        now, before = self._read(), self._began
        if now is None or before is None or not usable_cpus:
            return None
        cpus, whole, busy, own = now[0], now[1] - before[1], now[2] - before[2], now[3] - before[3]
        if whole <= 0:
            return None
        others = cpus * max(0, busy - own) / whole
        return 100 * min(1.0, max(0.0, others - max(0, cpus - usable_cpus)) / usable_cpus)

    def _read(self) -> tuple[int, int, int, int] | None:
        """CPUs, and ticks since the machine started: all, those in which programs ran, and those of this run."""
        lines = [line.split() for line in read_text(self._proc / "stat").splitlines()]
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
        cpus = [[int(each) for each in line[1:]] for line in lines if line and line[0] in allowed]
        if not cpus or len(cpus[0]) <= _STEAL:
            return None
        programs = (_USER, _NICE, _SYSTEM, _STEAL)
        whole = sum(sum(line[: _STEAL + 1]) for line in cpus)  # what guests take is in `user` already
        return len(cpus), whole, sum(line[at] for line in cpus for at in programs), self._own()

    def _own(self) -> int:
        """Ticks of this process and its descendants, and of those that ended and were waited for."""
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for folder in self._proc.iterdir():
            if folder.name.isdigit():
                # After the name, which may hold anything: state, parent, ... utime, stime, cutime, cstime.
                fields = read_text(folder / "stat").rpartition(")")[2].split()
                if len(fields) > _LAST:
                    parents[int(folder.name)] = int(fields[1])
                    ticks[int(folder.name)] = sum(map(int, fields[_FIRST : _LAST + 1]))
        own, more = {os.getpid()}, True
        while more:
            found = {pid for pid, parent in parents.items() if parent in own} - own
            own, more = own | found, bool(found)
        return sum(ticks.get(pid, 0) for pid in own)


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
