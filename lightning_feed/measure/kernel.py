"""Counters of the kernel: times of workers, pressure and throttling.

Read from Linux's ``/proc`` and ``/sys``. Elsewhere, and in sandboxes without these files, all values are unknown.
"""

import os
import re
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lightning_feed.machine.limits import cgroup_folders, read_text
from lightning_feed.measure.stats import Additive, ratio

MOST_THREADS = 16
"""Largest number of threads read per worker, the oldest first. Each needs reading a file; torch's workers have two."""
SLACK_PER_READ = 4096
"""Largest number of bytes that a disk returns beyond those requested by one read(), because it returns whole pages."""


class Workers(NamedTuple):
    """Processes and threads that make the batches."""

    pids: tuple[int, ...] = ()
    """Process IDs of the workers."""
    thread_ids: tuple[int, ...] = ()
    """Threads of this process, by the kernel's thread IDs."""


class WorkerReading(NamedTuple):
    """Counters of one worker at one moment."""

    at_ns: int
    threads: dict[str, tuple[int, int]]
    """By thread folder: nanoseconds on a CPU, and nanoseconds ready to run without a CPU."""
    io: tuple[int, int, int] | None
    """``asked``, ``calls`` and ``from_disk`` of :class:`WorkerTime` since the worker's start; None if unknown."""


@dataclass
class WorkerTime(Additive):
    """Sums over workers and intervals, in nanoseconds and bytes."""

    wall_ns: float = 0.0
    """Wall time between two readings, summed over workers."""
    on_cpu_ns: float = 0.0
    run_queue_ns: float = 0.0
    """Time ready to run without a CPU."""
    span_ns: float = 0.0
    """Length of the intervals in which bytes are known for at least one worker."""
    asked: int = 0
    """Bytes requested by read() calls, from files and pipes. Excludes pages of mapped files (mmap)."""
    calls: int = 0
    from_disk: int = 0
    """Bytes fetched from storage, by read() or through mapped files."""

    def share_pct(self, part_ns: float) -> float | None:
        """``part_ns`` as a percentage of the workers' time, 0 to 100; None without two readings of the same worker."""
        return ratio(100 * part_ns, self.wall_ns)

    @property
    def blocked_ns(self) -> float:
        """Time for which the workers were blocked: the wall time, less the times on a CPU and ready to run.

        A difference below 0 counts as 0: the kernel's clock and the wall clock differ a little.
        """
        return max(0.0, self.wall_ns - self.on_cpu_ns - self.run_queue_ns)

    @property
    def read_mb_per_s(self) -> float | None:
        """Megabytes per second read by all workers. For mapped files, counts only bytes from storage."""
        return ratio(max(self.asked, self.from_disk) / 1e6, self.span_ns * 1e-9)

    @property
    def disk_mb_per_s(self) -> float | None:
        """Megabytes per second that all workers read from storage."""
        return ratio(self.from_disk / 1e6, self.span_ns * 1e-9)

    @property
    def page_cache_pct(self) -> float | None:
        """Share of the requested bytes that did not come from storage, 0 to 100; None if nothing was read.

        Storage returns whole pages, so it may return slightly more than requested; that counts as 0. If it returned
        even more, files are mapped. Then the result is None, because reads of mapped files from the page cache are not
        counted.
        """
        if not self.asked or self.from_disk > self.asked + SLACK_PER_READ * self.calls:
            return None
        return 100 * max(0.0, 1 - self.from_disk / self.asked)


@dataclass
class WorkerClock:
    """Reads the workers' counters, and returns their growth since the last reading.

    A worker's time is the wall time between two readings, however many threads it has. Its time on a CPU and in the run
    queue is summed over its threads, so a thread that mostly sleeps does not hide a thread that decodes. If several
    threads work at once, the sums can exceed the wall time. They are then scaled down to the wall time, so that the
    rest, the blocked time, is never negative. A thread that ended between two readings is not seen.

    Attributes:
        root: the file system to read ``proc`` from.
    """

    root: Path = Path("/")
    _last: dict[str, WorkerReading] = field(default_factory=dict)

    def take(self, workers: Workers, now_ns: int) -> WorkerTime:
        """Return the times since the last reading, of workers that were read then. ``now_ns``: the current time."""
        before = self._last
        self._last = self._read(workers, now_ns)
        times = [_between(before[folder], after) for folder, after in self._last.items() if folder in before]
        total = sum(times, WorkerTime())
        total.span_ns = max((time.span_ns for time in times), default=0.0)  # workers run side by side: count it once
        return total

    def meet(self, workers: Workers, now_ns: int) -> None:
        """Read new workers, so that the next :meth:`take` counts them."""
        self._last |= self._read(workers, now_ns, known=self._last)

    def _read(self, workers: Workers, now_ns: int, known: Container[str] = ()) -> dict[str, WorkerReading]:
        """Return the readings by folder in ``proc``, without the ``known`` folders."""
        processes = [f"{self.root}/proc/{pid}" for pid in workers.pids]
        own_threads = [f"{self.root}/proc/self/task/{tid}" for tid in workers.thread_ids]
        threads = {folder: _threads_in(f"{folder}/task") for folder in processes if folder not in known}
        threads |= {folder: [folder] for folder in own_threads if folder not in known}
        readings = {}
        for folder, own in threads.items():
            times = _times_of(own)
            if times:
                readings[folder] = WorkerReading(now_ns, times, _io(f"{folder}/io"))
        return readings


def _between(before: WorkerReading, after: WorkerReading) -> WorkerTime:
    """Return the difference of two readings of one worker; empty if a counter went backwards, because the worker is
    new."""
    wall = after.at_ns - before.at_ns
    # A new thread began at zero.
    passed = []
    for thread, (on_cpu_after, queue_after) in after.threads.items():
        on_cpu_before, queue_before = before.threads.get(thread, (0, 0))
        passed.append((on_cpu_after - on_cpu_before, queue_after - queue_before))
    # A kernel without these statistics writes zeros: the times are then unknown, and do not count as blocked.
    if wall <= 0 or min(map(min, passed)) < 0 or not any(map(any, after.threads.values())):
        return WorkerTime()
    on_cpu, run_queue = map(sum, zip(*passed, strict=True))
    scale = wall / max(wall, on_cpu + run_queue)
    spent = WorkerTime(wall_ns=wall, on_cpu_ns=on_cpu * scale, run_queue_ns=run_queue * scale)
    if before.io is not None and after.io is not None:
        read = [total - earlier for total, earlier in zip(after.io, before.io, strict=True)]
        if min(read) >= 0:
            spent.span_ns = wall
            spent.asked, spent.calls, spent.from_disk = read
    return spent


def _threads_in(folder: str) -> list[str]:
    """Return the folders of the oldest threads of a process."""
    try:
        numbers = sorted(int(name) for name in os.listdir(folder) if name.isdigit())  # noqa: PTH208
    except OSError:
        return []
    return [f"{folder}/{number}" for number in numbers[:MOST_THREADS]]


def _times_of(folders: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the times by thread folder, without threads that have ended."""
    times = {folder: _schedstat(f"{folder}/schedstat") for folder in folders}
    return {folder: known for folder, known in times.items() if known is not None}


def _schedstat(path: str) -> tuple[int, int] | None:
    """Return the first two numbers of ``schedstat`` (proc(5)): nanoseconds on a CPU, and ready to run without a CPU."""
    numbers = read_small(path).split()[:2]
    if len(numbers) < 2 or not all(map(bytes.isdigit, numbers)):
        return None
    return int(numbers[0]), int(numbers[1])


def _io(path: str) -> tuple[int, int, int] | None:
    values = _numbers(read_small(path).decode("ascii", "replace"), ":")
    if not {"rchar", "syscr", "read_bytes"} <= set(values):
        return None
    return values["rchar"], values["syscr"], values["read_bytes"]


def _numbers(text: str, separator: str) -> dict[str, int]:
    """Return the numbers by name, from the lines of a file that consist of a name and a number."""
    pairs = (line.partition(separator) for line in text.splitlines())
    return {name: int(value) for name, _, value in pairs if value.strip().isdigit()}


def read_small(path: str) -> bytes:
    """Return the content of a ``proc`` file, or nothing. Unbuffered, because some dozen files are read per log during
    training."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(handle, 4096)
    except OSError:  # the worker ended in between (ESRCH)
        return b""
    finally:
        os.close(handle)


# --- pressure and throttling ------------------------------------------------------------------------------------------

RESOURCES = ("cpu", "io", "memory")


@dataclass
class PressureTime(Additive):
    """Sums over intervals: nanoseconds by resource, and scheduler periods of each cgroup with a CPU quota."""

    part: Counter[str] = field(default_factory=Counter)
    """Time or periods in which some task waited for the resource (PSI "some"), or the quota was used up."""
    whole: Counter[str] = field(default_factory=Counter)
    """All time or periods."""

    def pressure_pct(self, resource: str) -> float | None:
        """Return the percentage of time in which some task waited for ``"cpu"``, ``"io"`` or ``"memory"``, 0 to 100."""
        whole = self.whole[resource]
        if not whole:
            return None
        return min(100.0, 100 * self.part[resource] / whole)

    @property
    def throttled_pct(self) -> float | None:
        """Percentage of periods without quota left, 0 to 100, in the worst cgroup; None if no cgroup has a quota."""
        quotas = {name: whole for name, whole in self.whole.items() if name not in RESOURCES}
        return max((100 * self.part[name] / whole for name, whole in quotas.items()), default=None)


class PressureClock:
    """Reads the kernel's totals of pressure and throttling, and returns their growth since the last reading.

    Sources: Documentation/accounting/psi.rst and admin-guide/cgroup-v2.rst of Linux. The constructor looks for the
    files once.

    Args:
        root: the file system to read ``proc`` and ``sys`` from.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        own = list(cgroup_folders(root, ""))
        self._pressure: dict[str, Path] = {}
        for resource in RESOURCES:
            # The nearest file counts: of the process's own cgroup, else of a parent cgroup, else of the whole machine.
            files = [*(folder / f"{resource}.pressure" for folder in own), root / "proc/pressure" / resource]
            nearest = next((path for path in files if _waited_ns(path) is not None), None)
            if nearest is not None:
                self._pressure[resource] = nearest
        # The effective quota may belong to an outer cgroup.
        folders = [*own, *cgroup_folders(root, "cpu")]
        self._quotas = [folder / "cpu.stat" for folder in folders if _periods(folder / "cpu.stat") is not None]
        self._last: dict[str, tuple[int, int]] = {}

    def take(self, now_ns: int) -> PressureTime:
        """Return the times since the last call; empty on the first call. ``now_ns``: the current time."""
        taken = PressureTime()
        before = self._last
        waited = {name: _waited_ns(path) for name, path in self._pressure.items()}
        periods = {str(path): _periods(path) for path in self._quotas}
        self._last = {name: (part, now_ns) for name, part in waited.items() if part is not None}
        self._last |= {name: counts for name, counts in periods.items() if counts is not None}
        for name, (part, whole) in self._last.items():
            part_before, whole_before = before.get(name, (part, whole))
            if part >= part_before and whole > whole_before:
                taken.part[name] = part - part_before
                taken.whole[name] = whole - whole_before
        return taken


def _waited_ns(path: Path) -> int | None:
    """Return ``total`` of the line ``some avg10=0.00 avg60=0.00 avg300=0.00 total=123``; None without it.

    In nanoseconds; the file has microseconds.
    """
    total_us = re.search(r"^some .*total=(\d+)$", read_text(path), re.MULTILINE)
    if not total_us:
        return None
    return 1000 * int(total_us[1])


def _periods(path: Path) -> tuple[int, int] | None:
    """``nr_throttled`` and ``nr_periods`` of a ``cpu.stat``; the names are the same in v1 and v2."""
    values = _numbers(read_text(path), " ")
    if "nr_throttled" not in values or "nr_periods" not in values:
        return None
    return values["nr_throttled"], values["nr_periods"]
