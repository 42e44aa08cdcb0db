"""Other programs: how much of the CPUs they took meanwhile, and programs that compute beside a fit on purpose."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_feed.measure.cpu_time import CpuShare

QUIET_PCT = 12.0
"""Share of the CPUs used here that others may take in a fit that counts."""


BESIDE = {"nothing": (0, False), "1 program": (1, False), "3 programs": (3, False), "comes and goes": (1, True)}
"""Name -> programs that compute beside a fit, and whether they pause for 3 s after every 3 s."""
_COMPUTE = """
import sys, time
began = time.monotonic()
while True:
    sum(range(20_000))
    if sys.argv[1] == "pauses" and time.monotonic() - began > 3:
        time.sleep(3)
        began = time.monotonic()
"""


@contextmanager
def programs_beside(name: str) -> Iterator[None]:
    """Programs that compute on the same CPUs meanwhile: see :data:`BESIDE`."""
    count, pauses = BESIDE[name]
    arguments = [sys.executable, "-c", _COMPUTE, "pauses" if pauses else "goes on"]
    # In a session of their own, so that they are no children of the run: its own time is that of its descendants.
    started = [_start_detached(arguments) for _ in range(count)]
    try:
        yield
    finally:
        for pid in started:
            os.kill(pid, 9)


def _start_detached(arguments: list[str]) -> int:
    """Start a program whose parent is not this process. Returns its number."""
    code = "from subprocess import *; import sys; print(Popen(sys.argv[1:], stdout=DEVNULL, stderr=DEVNULL).pid)"
    made = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return int(made.stdout)


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
        self._share = CpuShare()

    def took_pct(self) -> float:
        """Share of the CPUs that we may use which others took, 0 to 100. Our children must have ended."""
        gc.collect()
        return self._share.others_pct(len(os.sched_getaffinity(0))) or 0.0
