"""The waiting over a run and the histogram of its step times, in bounded memory."""

import math
from dataclasses import dataclass

MOST_STRETCHES = 64
"""Number of stretches at which neighbours are merged, which halves the number."""
MOST_BINS = 40
"""Largest number of bins in a histogram."""
_BINS_PER_OCTAVE = 32
"""Bins between a step time and twice that time: each bin is about 2 % wide."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps of a run."""

    steps: int
    """Number of steps."""
    step_ms: float
    """Mean time of a step."""
    starved_pct: float
    """Share of the stretch's time in which the device waited for data, 0 to 100."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The steps of a run whose times lie in one range."""

    from_ms: float
    """Lower end of the range."""
    to_ms: float
    """Upper end of the range."""
    steps: int
    """Number of steps."""
    starved_pct: float
    """Share of these steps' time in which the device waited for data, 0 to 100."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The counted steps of a run in order, and by their times. The warm-up is included."""

    stretches: tuple[Stretch, ...]
    """The run in up to 64 stretches of as many steps each; the last may be shorter."""
    bins: tuple[Bin, ...]
    """Histogram of the step times, in up to 40 ranges from the shortest step to the longest. The ends of each range are
    in the same ratio. Ranges without steps are left out."""


class TimelineSums:
    """Sums for a :class:`Timeline`. There are at most 64 stretches, and a bin for each 2 % of step time that occurs."""

    def __init__(self) -> None:
        self._length = 1
        """Steps in a stretch."""
        self._open = _no_steps()
        """The stretch that is not full yet, as [steps, waiting time, step time]."""
        self._stretches: list[list[float]] = []
        self._bins: dict[int, list[float]] = {}

    def add(self, data_ns: float, step_ns: float) -> None:
        """Add the wait and the time of one step."""
        index = math.floor(_BINS_PER_OCTAVE * math.log2(max(step_ns, 1.0)))
        for sums in (self._open, self._bins.setdefault(index, _no_steps())):
            sums[0] += 1
            sums[1] += data_ns
            sums[2] += step_ns
        if self._open[0] >= self._length:
            self._close_stretch()

    def _close_stretch(self) -> None:
        self._stretches.append(self._open)
        self._open = _no_steps()
        if len(self._stretches) >= MOST_STRETCHES:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [_merged(first, second) for first, second in pairs]
            self._length *= 2

    def timeline(self) -> Timeline | None:
        """The timeline so far; None before the first step."""
        if not self._bins:
            return None
        stretches = [*self._stretches, self._open] if self._open[0] else self._stretches
        return Timeline(stretches=tuple(map(_stretch, stretches)), bins=tuple(self._few_bins()))

    def _few_bins(self) -> list[Bin]:
        bins = self._bins
        octaves = 1 / _BINS_PER_OCTAVE
        while max(bins) - min(bins) >= MOST_BINS:
            halved: dict[int, list[float]] = {}
            for index, sums in bins.items():
                halved[index // 2] = _merged(halved.get(index // 2, _no_steps()), sums)
            bins = halved
            octaves *= 2
        return [
            Bin(
                from_ms=1e-6 * 2 ** (index * octaves),
                to_ms=1e-6 * 2 ** ((index + 1) * octaves),
                steps=int(sums[0]),
                starved_pct=_starved_pct(sums),
            )
            for index, sums in sorted(bins.items())
        ]


def _no_steps() -> list[float]:
    return [0, 0.0, 0.0]


def _merged(first: list[float], second: list[float]) -> list[float]:
    return [one + other for one, other in zip(first, second, strict=True)]


def _stretch(sums: list[float]) -> Stretch:
    return Stretch(steps=int(sums[0]), step_ms=sums[2] * 1e-6 / sums[0], starved_pct=_starved_pct(sums))


def _starved_pct(sums: list[float]) -> float:
    return 100 * sums[1] / (sums[2] or 1.0)
