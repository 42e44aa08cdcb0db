"""How much of the CPUs others took meanwhile: workers that lack a CPU are oversubscribed, whoever has it."""

import gc
import os
import time
from pathlib import Path

QUIET_PCT = 12.0
"""Share of the CPUs used here that others may take in a fit that counts."""


def wait_until_quiet(at_most_s: float) -> None:
    """Return once others have left the CPUs alone for half a second."""
    until = time.monotonic() + at_most_s
    while time.monotonic() < until:
        others = Others()
        time.sleep(0.5)
        if others.took_pct() <= QUIET_PCT:
            return


class Others:
    """Counts from when it is made. Linux; elsewhere nobody else is seen."""

    def __init__(self) -> None:
        self._at, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()

    def took_pct(self) -> float:
        """Share of the CPUs that we may use which others took, 0 to 100. Our children must have ended."""
        gc.collect()
        others = _busy_s() - self._busy - (_own_s() - self._own)
        return max(0.0, 100 * others / ((time.monotonic() - self._at) * len(os.sched_getaffinity(0))))


def _busy_s() -> float:
    """CPU time of everybody on the CPUs that we may use, since the machine started: ``/proc/stat``, see proc(5)."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in mine:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks[:8])
            busy += user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU time of this process, its ended children, and live ones (a fork server) with their ended children."""
    ticks = 0
    for pid in ("self", *Path("/proc/thread-self/children").read_text().split()):
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
