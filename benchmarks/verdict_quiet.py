"""Other programs: how much of the CPUs they took meanwhile."""

import gc
import os
import time

from lightning_feed.measure.cpu_time import OtherPrograms

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
        self._share = OtherPrograms()

    def took_pct(self) -> float:
        """Share of the CPUs that we may use which others took, 0 to 100. Our children must have ended."""
        gc.collect()
        return self._share.others_pct(len(os.sched_getaffinity(0))) or 0.0
