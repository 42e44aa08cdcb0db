"""What other programs took of the CPUs that this run may use, by the kernel's count."""

import os
from pathlib import Path

from lightning_feed.archive.memory import read_text

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
