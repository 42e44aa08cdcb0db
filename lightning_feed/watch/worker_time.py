"""What the loader's workers did between two readings, seen from outside: on a CPU, ready to run, blocked; bytes read.

Read from ``/proc``, which is Linux only. Elsewhere, and in sandboxes without these files, nothing is known.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

MOST_THREADS = 16
"""Threads looked at in one worker, the oldest first. Each costs a file; torch gives its workers two."""
SLACK_PER_READ = 4096
"""Bytes that a disk gives beyond what one call of read() asked for: it gives whole pages."""


class Workers(NamedTuple):
    """Those who make the batches."""

    pids: tuple[int, ...] = ()
    """Processes."""
    thread_ids: tuple[int, ...] = ()
    """Threads of this process, as the kernel numbers them."""


class Bytes(NamedTuple):
    """What one worker has read since it began (``/proc/PID/io``)."""

    asked: int
    """By calls of read(), from files and pipes. Pages of a mapped file (mmap) are not among them."""
    calls: int
    from_disk: int
    """Fetched from storage for this worker, whichever way it asked."""


class WorkerReading(NamedTuple):
    """The counters of one worker at one time."""

    at_ns: int
    threads: dict[int, tuple[int, int]]
    """By thread: nanoseconds on a CPU, and nanoseconds ready to run without one."""
    io: Bytes | None


@dataclass
class WorkerTime:
    """Sums over workers and intervals. Nanoseconds and bytes."""

    wall_ns: float = 0.0
    """Time that the workers could have used, all of them together."""
    on_cpu_ns: float = 0.0
    run_queue_ns: float = 0.0
    span_ns: float = 0.0
    """Length of the intervals in which bytes of some worker are known."""
    asked: int = 0
    calls: int = 0
    from_disk: int = 0

    def add(self, other: "WorkerTime") -> None:
        """Add what another interval gave."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def share_pct(self, part_ns: float) -> float | None:
        """What part of the workers' time ``part_ns`` is, 0 to 100; None where no worker was seen twice."""
        return 100 * part_ns / self.wall_ns if self.wall_ns else None

    @property
    def blocked_ns(self) -> float:
        """Neither on a CPU nor ready for one."""
        return self.wall_ns - self.on_cpu_ns - self.run_queue_ns

    @property
    def read_mb_per_s(self) -> float | None:
        """Megabytes per second that all workers took in. Of mapped files only what came from storage is seen."""
        return max(self.asked, self.from_disk) / 1e6 / (self.span_ns * 1e-9) if self.span_ns else None

    @property
    def disk_mb_per_s(self) -> float | None:
        """Megabytes per second that storage gave to all workers."""
        return self.from_disk / 1e6 / (self.span_ns * 1e-9) if self.span_ns else None

    @property
    def page_cache_pct(self) -> float | None:
        """Share of the bytes asked for that no disk had to give, 0 to 100.

        Storage gives whole pages, so it may give somewhat more than was asked for; that is 0. None where it gave more
        than whole pages explain: then files are mapped, and what the page cache gave of those nobody counts. None, too,
        where nothing was read.
        """
        if not self.asked or self.from_disk > self.asked + SLACK_PER_READ * self.calls:
            return None
        return 100 * max(0.0, 1 - self.from_disk / self.asked)


@dataclass
class WorkerClock:
    """Reads the workers' counters, and gives the differences of those that were there the last time.

    A worker's time is the wall clock between two readings, once, however many threads it has. On a CPU and in the run
    queue are sums over its threads: a queue's feeder thread, which mostly sleeps, takes nothing from the decoding
    beside it. Where several threads work at once the sums can exceed the wall clock; they are then scaled down together
    to fill it, so that blocked, the rest, is never negative. A thread that ended between two readings is not seen.

    Attributes:
        root: the file system to read ``proc`` from.
    """

    root: Path = Path("/")
    _last: dict[tuple[str, int], WorkerReading] = field(default_factory=dict)

    def take(self, workers: Workers, now_ns: int) -> WorkerTime:
        """What happened since the last time, of workers that were there then. ``now_ns``: the time now."""
        readings = self._read(workers, now_ns)
        total, span = WorkerTime(), 0.0
        for key, after in readings.items():
            before = self._last.get(key)
            if before is not None:
                time = _between(before, after)
                span = max(span, time.span_ns)
                total.add(time)
        total.span_ns = span  # workers read side by side: the interval counts once
        self._last = readings
        return total

    def meet(self, workers: Workers, now_ns: int) -> None:
        """Read those not met before, so that the next :meth:`take` counts them."""
        fresh = Workers(
            tuple(pid for pid in workers.pids if ("process", pid) not in self._last),
            tuple(tid for tid in workers.thread_ids if ("thread", tid) not in self._last),
        )
        self._last.update(self._read(fresh, now_ns))

    def _read(self, workers: Workers, now_ns: int) -> dict[tuple[str, int], WorkerReading]:
        folders = {("process", pid): f"{self.root}/proc/{pid}" for pid in workers.pids}
        found = {}
        for key, folder in folders.items():
            threads = _thread_times(f"{folder}/task", _thread_ids(f"{folder}/task"))
            if threads:
                found[key] = WorkerReading(now_ns, threads, _io(f"{folder}/io"))
        tasks = f"{self.root}/proc/self/task"
        for tid in workers.thread_ids:
            threads = _thread_times(tasks, [tid])
            if threads:
                found["thread", tid] = WorkerReading(now_ns, threads, _io(f"{tasks}/{tid}/io"))
        return found


def _between(before: WorkerReading, after: WorkerReading) -> WorkerTime:
    """The difference of two readings of one worker; nothing where a counter went backwards: it is another worker."""
    wall = after.at_ns - before.at_ns
    on_cpu = run_queue = 0
    for thread, now in after.threads.items():
        then = before.threads.get(thread, (0, 0))  # a thread that is new began with nothing
        if now[0] < then[0] or now[1] < then[1]:
            return WorkerTime()
        on_cpu += now[0] - then[0]
        run_queue += now[1] - then[1]
    # A kernel without these statistics writes zeros: nothing is known then, rather than that everything is blocked.
    if wall <= 0 or not any(any(times) for times in after.threads.values()):
        return WorkerTime()
    scale = min(1.0, wall / (on_cpu + run_queue)) if on_cpu + run_queue else 1.0
    time = WorkerTime(wall_ns=wall, on_cpu_ns=on_cpu * scale, run_queue_ns=run_queue * scale)
    if before.io is not None and after.io is not None:
        asked, calls, from_disk = (now - then for now, then in zip(after.io, before.io, strict=True))
        if min(asked, calls, from_disk) >= 0:
            time.span_ns, time.asked, time.calls, time.from_disk = wall, asked, calls, from_disk
    return time


def _thread_ids(folder: str) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdigit())[:MOST_THREADS]  # noqa: PTH208
    except OSError:
        return []


def _thread_times(folder: str, threads: Iterable[int]) -> dict[int, tuple[int, int]]:
    """By thread, the first two numbers of ``schedstat`` (proc(5)); threads that are gone are left out."""
    found = {}
    for thread in threads:
        numbers = read_small(f"{folder}/{thread}/schedstat").split()
        if len(numbers) >= 2 and numbers[0].isdigit() and numbers[1].isdigit():
            found[thread] = (int(numbers[0]), int(numbers[1]))
    return found


def _io(path: str) -> Bytes | None:
    values = {}
    for line in read_small(path).splitlines():
        name, _, value = line.partition(b":")
        if value.strip().isdigit():
            values[name] = int(value)
    try:
        return Bytes(values[b"rchar"], values[b"syscr"], values[b"read_bytes"])
    except KeyError:
        return None


def read_small(path: str) -> bytes:
    """The content of a file of ``proc``, or nothing. Unbuffered: this runs beside training, some dozen times a log."""
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
