"""Finds out whether packing pays, by timing the first batches both ways."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

WARM_UP = 2
"""Batches of each way that are not counted: the first ones allocate the buffers."""
ROUNDS = 5
"""Batches of each way that are."""


@dataclass(frozen=True)
class _Timed:
    host_ns: int
    first: Any
    last: Any

    def passed(self) -> bool:
        return self.last is None or bool(self.last.query())

    def device_ns(self) -> float:
        return 0.0 if self.last is None else float(self.first.elapsed_time(self.last)) * 1e6


class PackTrial:
    """Takes turns between the two ways until each was timed often enough, then stays with the cheaper one.

    A way's price is the time of the host plus that of the copying stream, medians over its batches. The device's time
    is read from events that have passed already; until they have, batches go unpacked, and nothing waits.

    Args:
        clock: the host's time in nanoseconds.
        stamp: puts a timing event on the copying stream; gives None where there is no device clock.
    """

    def __init__(self, clock: Callable[[], int], stamp: Callable[[], Any]) -> None:
        self._clock, self._stamp = clock, stamp
        self._timed: dict[bool, list[_Timed]] = {False: [], True: []}
        self.packs: bool | None = None
        """Whether packing pays; None as long as that is not known."""
        self.figures = ""
        """What was measured, for people."""

    def run(self, ways: dict[bool, Callable[[], Any]]) -> Any:
        """Send one batch, in the way whose turn it is.

        Args:
            ways: what sends the batch packed (True), and what sends it as it is (False).
        """
        if self.packs is None:
            self._settle()
        if self.packs is not None:
            return ways[self.packs]()
        packed = len(self._timed[True]) < len(self._timed[False])
        if not packed and len(self._timed[False]) >= WARM_UP + ROUNDS:
            return ways[False]()  # the device has not come to the last one yet
        first, began = self._stamp(), self._clock()
        sent = ways[packed]()
        self._timed[packed].append(_Timed(self._clock() - began, first, self._stamp()))
        return sent

    def _settle(self) -> None:
        plain, packed = (self._timed[way][WARM_UP:] for way in (False, True))
        if len(packed) < ROUNDS or not all(one.passed() for one in plain + packed):
            return
        prices = []
        said = []
        for way, timed in (("packed", packed), ("one by one", plain)):
            host, device = median(one.host_ns for one in timed), median(one.device_ns() for one in timed)
            prices.append(host + device)
            on_device = "" if timed[0].last is None else f" + {device / 1e3:.0f} us of copying"
            said.append(f"{way} {host / 1e3:.0f} us of the host{on_device}")
        self.packs = prices[0] < prices[1]
        self.figures = f"{', '.join(said)} (medians of {ROUNDS} batches)"
        self._timed = {False: [], True: []}
