"""The wall time of a run: each moment belongs to one part, so that the parts add up to the whole."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Part = Literal[
    "train", "trials", "validation", "test", "predict", "checkpoints", "epoch starts", "sanity check", "set-up", "rest"
]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts of a run's wall time, in the order of reports.

train: from the first batch of each epoch to the end of its last step, with hooks and loggers between the steps.
trials: AutotuneCallback tries settings, and training pauses.
validation, test, predict: the whole loop, including the start of its workers. checkpoints: saving them at any time.
epoch starts: until the first batch of each training epoch arrives. set-up: from the call of ``trainer.fit`` (or
``trainer.validate``, and so on) to the loop, without the sanity check. rest: between and after the epochs.
"""


@dataclass(frozen=True, kw_only=True)
class WallPart:
    """One part of a run."""

    name: Part
    """See :data:`PARTS`."""
    seconds: float
    """Total wall time."""
    times: int
    """Number of times that the part occurred."""


@dataclass(frozen=True, kw_only=True)
class WallStats:
    """Wall time of a run from its beginning until now."""

    wall_s: float
    """Total in seconds: the sum of the parts."""
    parts: tuple[WallPart, ...]
    """Parts that occurred, in the order of :data:`PARTS`."""

    @property
    def run_s(self) -> float:
        """Total in seconds, without trials, which are not the user's run."""
        return self.wall_s - self.seconds("trials")

    def seconds(self, *names: Part) -> float:
        """Return the total seconds of these parts; 0.0 for parts that did not occur."""
        return sum(part.seconds for part in self.parts if part.name in names)

    def times(self, name: Part) -> int:
        """Return the number of times that this part occurred."""
        return sum(part.times for part in self.parts if part.name == name)


class WallClock:
    """Adds the time since the last change to the part that was active.

    Args:
        clock: the host's clock.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._last = clock()
        self._part: Part = "set-up"
        self._outer: list[Part] = []
        """The parts to return to, the innermost last."""
        self._spent: Counter[Part] = Counter()
        self._times: Counter[Part] = Counter({"set-up": 1})
        self.changes = 0
        """Number of times that another part began."""

    @property
    def part(self) -> Part:
        """The current part."""
        return self._part

    def go_on(self, part: Part) -> None:
        """Switch to ``part``, and forget the parts to return to."""
        self._outer.clear()
        self._times[part] += part != self._part
        self._switch(part)

    def enter(self, part: Part) -> None:
        """Switch to ``part`` until :meth:`leave`."""
        self._outer.append(self._part)
        self._times[part] += 1
        self._switch(part)

    def leave(self) -> None:
        """Return to the part that was active before the last :meth:`enter`. Does nothing if no part was entered."""
        if self._outer:
            self._switch(self._outer.pop())

    def stats(self) -> WallStats:
        """Return the parts of the time so far."""
        self._switch(self._part)
        parts = [
            WallPart(name=part, seconds=self._spent[part] * 1e-9, times=self._times[part])
            for part in PARTS
            if self._spent[part]
        ]
        return WallStats(wall_s=self._spent.total() * 1e-9, parts=tuple(parts))

    def _switch(self, part: Part) -> None:
        now = self._clock()
        self.changes += part != self._part
        self._spent[self._part] += now - self._last
        self._last = now
        self._part = part
