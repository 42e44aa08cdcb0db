"""The charts of a page: the waiting over the run, and the histogram of its step times. The template draws them."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_feed.measure.stats import Bin, Stretch, Timeline
from lightning_feed.wording import plural

FEWEST_STEPS = 10
"""Fewest steps for charts."""
_MOST_TICKS = 5
_SHORTEST_MS = 1e-6
_LONGEST_MS = 1e12
"""Step times outside this range are not drawn."""
_NARROW = 5.0
"""Ratio of the longest step to the shortest up to which ticks are evenly spaced times, not 1, 2, 5, 10 and so on."""


class Tick(NamedTuple):
    """A labelled place on an axis."""

    at: float
    """From 0, the beginning of the axis, to 1, its end."""
    text: str


class Column(NamedTuple):
    """A column of a chart. Its coordinates are shares of the axes."""

    left: float
    width: float
    waiting: float
    """Height of the lower part, which stands for waiting."""
    other: float
    """Height of the part above it."""
    words: str
    """The figures, shown under the pointer."""


class Chart(NamedTuple):
    """A chart of neighbouring columns, with an axis across and one up."""

    title: str
    columns: Sequence[Column]
    across: Sequence[Tick]
    across_label: str
    up: Sequence[Tick]
    up_label: str
    words: str
    """The content of the chart in a sentence."""


def charts(timeline: Timeline | None) -> list[Chart]:
    """Return the charts of a run; none for a run of few steps."""
    if timeline is None:
        return []
    stretches = [stretch for stretch in timeline.stretches if stretch.steps > 0 and _is_share(stretch.starved_pct)]
    bins = [bucket for bucket in timeline.bins if bucket.steps > 0 and _is_drawable(bucket)]
    if min(_steps(stretches), _steps(bins)) < FEWEST_STEPS:
        return []
    return [_waiting_chart(stretches), _histogram(bins)]


def _is_share(pct: float) -> bool:
    return 0 <= pct <= 100


def _is_drawable(bucket: Bin) -> bool:
    return _is_share(bucket.starved_pct) and _SHORTEST_MS <= bucket.from_ms < bucket.to_ms <= _LONGEST_MS


def _steps(groups: Iterable[Stretch | Bin]) -> int:
    return sum(group.steps for group in groups)


def _waiting_chart(stretches: Sequence[Stretch]) -> Chart:
    total = _steps(stretches)
    columns = []
    first = 0
    for stretch in stretches:
        share = stretch.starved_pct / 100
        words = f"steps {first + 1} to {first + stretch.steps}: {stretch.starved_pct:.0f} % waiting for data"
        words += f", {_ms(stretch.step_ms)} ms a step"
        columns.append(Column(first / total, stretch.steps / total, share, 0.0, words))
        first += stretch.steps
    shares = [stretch.starved_pct for stretch in stretches]
    return Chart(
        title="Waiting for data over the run",
        columns=columns,
        across=[Tick(value / total, f"{value:,.0f}".replace(",", " ")) for value in _round_values(0, total)],
        across_label="step",
        up=[Tick(0.0, "0"), Tick(0.5, "50"), Tick(1.0, "100")],
        up_label="% of the time",
        words=f"{plural(stretches[0].steps, 'step')} in each column. Training waits {min(shares):.0f} % to "
        f"{max(shares):.0f} % of their time: {shares[0]:.0f} % at first, {shares[-1]:.0f} % at last.",
    )


def _histogram(bins: Sequence[Bin]) -> Chart:
    bins = sorted(bins, key=lambda bucket: bucket.from_ms)
    shortest_ms = bins[0].from_ms
    longest_ms = max(bucket.to_ms for bucket in bins)
    octaves = math.log2(longest_ms) - math.log2(shortest_ms) or 1.0
    most = max(bucket.steps for bucket in bins)
    columns = []
    for bucket in bins:
        height = bucket.steps / most
        waiting = height * bucket.starved_pct / 100
        words = f"{_ms(bucket.from_ms)} to {_ms(bucket.to_ms)} ms: {plural(bucket.steps, 'step')}"
        words += f", {bucket.starved_pct:.0f} % of their time waiting for data"
        left = (math.log2(bucket.from_ms) - math.log2(shortest_ms)) / octaves
        width = math.log2(bucket.to_ms / bucket.from_ms) / octaves
        columns.append(Column(left, width, waiting, height - waiting, words))
    return Chart(
        title="Step times",
        columns=columns,
        across=[
            Tick((math.log2(value) - math.log2(shortest_ms)) / octaves, f"{value:g}")
            for value in _times(shortest_ms, longest_ms)
        ],
        across_label="ms a step, log scale",
        up=[Tick(value / most, f"{value:,.0f}".replace(",", " ")) for value in _round_values(0, most, 3)],
        up_label="steps",
        words=f"Half of the steps take up to {_ms(_quantile(bins, 0.5))} ms, 95 % up to {_ms(_quantile(bins, 0.95))} "
        f"ms, the longest {_ms(longest_ms)} ms.",
    )


def _quantile(bins: Sequence[Bin], share: float) -> float:
    """Return the upper end of the bin in which this share of the steps is reached."""
    wanted = share * _steps(bins)
    counts = accumulate(bucket.steps for bucket in bins)
    return next(bucket.to_ms for bucket, count in zip(bins, counts, strict=True) if count >= wanted)


def _ms(value: float) -> str:
    """Return the milliseconds with three digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


# --- round values for axes ----------------------------------------------------------------------------------------


def _round_values(lowest: float, highest: float, most: int = _MOST_TICKS) -> list[float]:
    """At most ``most`` + 1 values from ``lowest`` to ``highest``: multiples of 1, 2 or 5 times a power of ten."""
    length = highest - lowest
    power = 10.0 ** math.floor(math.log10(length))
    unit = next(part * power for part in (0.1, 0.2, 0.5, 1, 2, 5) if length / (part * power) <= most)
    return [unit * number for number in range(math.ceil(lowest / unit), math.floor(highest / unit) + 1)]


def _times(shortest_ms: float, longest_ms: float) -> list[float]:
    """Round times for a logarithmic axis."""
    if longest_ms <= _NARROW * shortest_ms:
        return _round_values(shortest_ms, longest_ms)
    powers = range(math.floor(math.log10(shortest_ms)), math.ceil(math.log10(longest_ms)))
    times = [first * 10.0**power for power in powers for first in (1, 2, 5)]
    shown = [time for time in times if shortest_ms <= time <= longest_ms]
    decades = [time for time in shown if f"{time:e}".startswith("1.")]
    if len(shown) <= _MOST_TICKS + 1:
        return shown
    return decades[:: math.ceil(len(decades) / _MOST_TICKS)]
