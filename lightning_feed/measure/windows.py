"""Sums of step times over windows, over the whole run without its warm-up, and over the stretches of a run."""

import math
from dataclasses import dataclass, field, replace

import torch

from lightning_feed.measure.stats import (
    SOME_STEPS,
    Additive,
    Bin,
    StarvationStats,
    Stretch,
    Timeline,
    grade_confidence,
    ratio,
)
from lightning_feed.measure.step_meter import StepTimes

REPLICATES = 500
Z = 1.959964
"""Quantile of the normal distribution for 95 %."""
MOST_CHUNKS = 1024
"""Number of pairs of sums at which neighbouring pairs are merged, which halves the number."""
FEWEST_BLOCKS = 8
"""Fewest blocks for an interval: the spread between fewer blocks means little."""
_SEED = 1


@dataclass
class PairSums:
    """Sums of waiting and step time over chunks of consecutive steps, in bounded memory.

    A chunk is a single step at first; at ``MOST_CHUNKS`` chunks, each is merged with its neighbour.
    """

    chunk: int = 1
    """Steps in each chunk."""
    data: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    _open: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Number of steps, waiting time and step time of the chunk that is not full yet."""

    def add(self, data_ns: float, step_ns: float) -> None:
        """Add the wait and the time of one step."""
        steps, data, step = self._open
        self._open = [steps + 1, data + data_ns, step + step_ns]
        if steps + 1 < self.chunk:
            return
        self.data.append(data + data_ns)
        self.step.append(step + step_ns)
        self._open = [0.0, 0.0, 0.0]
        if len(self.data) >= MOST_CHUNKS:
            self.data = [a + b for a, b in zip(self.data[::2], self.data[1::2], strict=True)]
            self.step = [a + b for a, b in zip(self.step[::2], self.step[1::2], strict=True)]
            self.chunk *= 2

    def interval_pct(self, period: int = 1) -> tuple[float, float] | None:
        """95 % percentile interval of ``100 * sum(data) / sum(step)``; None for too few steps.

        Args:
            period: steps after which waits repeat: the number of workers.
        """
        length = self._block_length(period)
        if length is None:
            return None
        low, high = ratio_interval(self.data, self.step, length)
        return max(0.0, 100 * low), min(100.0, 100 * high)

    def step_interval_ns(self, period: int = 1) -> tuple[float, float] | None:
        """95 % percentile interval of the mean step; None for too few steps.

        The blocks are longer than for shares, because other programs disturb the run for seconds. About ten blocks are
        used, the fewest that Schmeiser recommends (1982, "Batch size effects in the analysis of simulation output",
        Operations Research 30).

        Args:
            period: steps after which waits repeat: the number of workers.
        """
        length = self._block_length(period)
        if length is None:
            return None
        return ratio_interval(self.step, [float(self.chunk)] * len(self.step), max(length, len(self.step) // 10))

    def _block_length(self, period: int) -> int | None:
        """Return the chunks in a block; None for too few steps."""
        count = len(self.data)
        length = block_length(count, self.chunk, period)
        if count < FEWEST_BLOCKS * length or sum(self.step) <= 0:
            return None
        return length


def block_length(count: int, chunk: int, period: int) -> int:
    """Return the chunks in a block: about the cube root of the number of chunks (Kuensch's order), as whole periods.

    A block has at least two periods, unless a period fits into a chunk. A block may begin anywhere in a period, so a
    block as long as one period would consist of parts of two periods, and such blocks vary too little.

    Args:
        count: chunks in all.
        chunk: steps in a chunk.
        period: steps after which waits repeat.
    """
    whole = max(1, period) // math.gcd(max(1, period), chunk)
    fewest = 2 * whole if period > chunk else 1
    return whole * math.ceil(max(fewest, round(math.pow(count, 1 / 3))) / whole)


def ratio_interval(above: list[float], below: list[float], length: int) -> tuple[float, float]:
    """95 % interval of ``sum(above) / sum(below)`` by a bootstrap of blocks of ``length`` neighbours."""
    pairs = torch.tensor([above, below], dtype=torch.float64, device="cpu")  # whatever the default device is
    count = pairs.shape[1]
    start = torch.zeros(2, 1, dtype=torch.float64, device="cpu")
    circle = torch.cat([start, pairs, pairs[:, :length]], dim=1).cumsum(dim=1)
    of_block = circle[:, length : length + count] - circle[:, :count]
    generator = torch.Generator("cpu").manual_seed(_SEED)
    blocks = max(1, round(count / length))
    drawn = torch.randint(count, (REPLICATES * blocks,), generator=generator, device="cpu")
    upper, lower = (sums.index_select(0, drawn).view(REPLICATES, blocks).sum(dim=1) for sums in of_block)
    ratios = upper / lower.clamp(min=torch.finfo(torch.float64).tiny)
    tail = _tail(blocks)
    low, high = ratios.quantile(pairs.new_tensor((tail, 1 - tail))).tolist()
    return low, high


def _tail(blocks: int) -> float:
    """Tail of the expanded percentile interval, to use instead of 2.5 %: ``Phi(-sqrt(n / (n - 1)) * t(n - 1))``.

    ``n`` is the number of blocks: with few blocks, a tail of 2.5 % would give too short an interval.

    Student's t is computed from the normal quantile, by the first two terms of its expansion (Abramowitz and Stegun
    26.7.5).
    """
    free = max(1, blocks - 1)
    student = Z + (Z**3 + Z) / (4 * free) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
    return 0.5 * math.erfc(math.sqrt(blocks / free) * student / math.sqrt(2))


MOST_STRETCHES = 64
"""Number of stretches at which neighbours are merged, which halves the number."""
MOST_BINS = 40
"""Largest number of bins in a histogram."""
_BINS_PER_OCTAVE = 32
"""Bins between a step time and twice that time: each bin is about 2 % wide."""


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
        """Return the timeline so far; None before the first step."""
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


WARM_UP_STEPS = 20
"""Warm-up steps in addition to those that a full queue can serve."""
FEW_STEPS = 20
"""With fewer steps after the warm-up, a report includes the warm-up and has low confidence."""
CHANGED = 2.0
"""Epochs are not averaged if the wait in one is at least this many times the wait in the other: the dataset, or the
page cache, may keep what was read, or a disk may have become slow."""
CHANGED_SHARE = 0.1
"""Epochs are averaged if their waits differ by less than this share of a step."""
UNFOLDED_STEPS = 1024
"""Largest number of steps kept individually if no window is ever closed."""


@dataclass
class Sums(Additive):
    """Sums over steps.

    On a device, only some steps are divided into all their parts. The means of the parts come from these steps. They
    are scaled so that, with the wait for data, which is known for every step, they add up to the mean step.
    """

    steps: int = 0
    other_ns: float = 0
    data_ns: float = 0
    copy_ns: float = 0
    compute_ns: float = 0
    forward_ns: float = 0
    backward_ns: float = 0
    optimizer_ns: float = 0
    undivided_ns: float = 0
    """Step time without the wait for data, over the steps that are not divided into their parts."""
    host_wait_ns: int = 0
    lost: int = 0
    """Number of steps not measured."""
    epoch_starts: int = 0
    epoch_start_s: float = 0.0

    @property
    def step_ns(self) -> float:
        """Time of all steps."""
        return self.data_ns + self.divided_ns + self.undivided_ns

    def add(self, step: StepTimes) -> None:
        """Add one step."""
        self.steps += 1
        self.other_ns += step.other_ns
        self.data_ns += step.data_ns
        self.copy_ns += step.copy_ns
        self.compute_ns += step.compute_ns
        self.forward_ns += step.forward_ns
        self.backward_ns += step.backward_ns
        self.optimizer_ns += step.optimizer_ns
        self.undivided_ns += step.undivided_ns
        self.host_wait_ns += step.host_wait_ns

    @property
    def divided_ns(self) -> float:
        """Step time without the wait for data, over the steps that are divided into their parts."""
        return self.other_ns + self.copy_ns + self.compute_ns

    def stats(
        self, *, settled: bool, trusted_clock: bool, prefetch_active: bool | None, whole: "Sums | None" = None
    ) -> StarvationStats:
        """Return the figures, by the formulas of :class:`StarvationStats`.

        Args:
            settled: True if the warm-up is not among the steps.
            trusted_clock: True if the times come from a clock that sees the device.
            prefetch_active: True if batches are copied ahead; None: there is no PrefetchCallback.
            whole: sums of the whole run: its parts are used if none of these steps is divided.
        """
        stats = StarvationStats(
            steps=self.steps,
            lost_steps=self.lost,
            confidence=grade_confidence(steps=self.steps, lost=self.lost, settled=settled, trusted_clock=trusted_clock),
            prefetch_active=prefetch_active,
            epoch_start_s=ratio(self.epoch_start_s, self.epoch_starts),
        )
        if not self.steps:
            return stats
        to_ms = 1e-6 / self.steps
        divided = self if self.divided_ns or whole is None else whole
        stats = divided.with_parts(stats, (self.divided_ns + self.undivided_ns) * to_ms)
        step_ms = self.step_ns * to_ms
        idle_ms = self.data_ns * to_ms
        stats = replace(
            stats,
            step_ms=step_ms,
            data_ms=idle_ms,
            next_wait_ms=self.host_wait_ns * to_ms,
            # Two clocks that read the same wait differ by microseconds.
            hidden_wait_ms=max(0.0, (self.host_wait_ns - self.data_ns) * to_ms),
        )
        if self.step_ns > 0:
            stats = replace(stats, starved_pct=100 * self.data_ns / self.step_ns)
        if self.step_ns > 0 and stats.copy_ms is not None:
            stats = replace(stats, input_pct=100 * (idle_ms + stats.copy_ms) / step_ms)
        if self.step_ns > self.data_ns:
            stats = replace(stats, speedup_if_free=self.step_ns / (self.step_ns - self.data_ns))
        return stats

    def with_parts(self, stats: StarvationStats, rest_ms: float) -> StarvationStats:
        """Add the parts of a step to ``stats``: ``rest_ms``, divided in the ratio of the parts in these steps.

        Args:
            stats: the figures without parts.
            rest_ms: the mean step time without the wait for data.
        """
        if not self.divided_ns:
            if rest_ms:
                return stats
            return replace(stats, other_ms=0.0, copy_ms=0.0, compute_ms=0.0)
        stats = replace(
            stats,
            other_ms=rest_ms * self.other_ns / self.divided_ns,
            copy_ms=rest_ms * self.copy_ns / self.divided_ns,
            compute_ms=rest_ms * self.compute_ns / self.divided_ns,
        )
        if not self.forward_ns:
            return stats
        return replace(
            stats,
            forward_ms=rest_ms * self.forward_ns / self.divided_ns,
            backward_ms=rest_ms * self.backward_ns / self.divided_ns,
            optimizer_ms=rest_ms * self.optimizer_ns / self.divided_ns,
        )


@dataclass
class Ledger:
    """Sums the steps of one run: the whole run, its warm-up, and the current window.

    Args:
        queue: number of batches that the loader may hold ready. A full queue hides a slow loader for as many steps.
        trusted_clock: True if the times come from a clock that sees the device.
        period: steps after which waits repeat: the loader's number of workers.
    """

    queue: int = 0
    trusted_clock: bool = True
    period: int = 1
    fresh: list[StepTimes] = field(default_factory=list)
    """Steps not summed yet, appended by the meter."""
    timeline: TimelineSums = field(default_factory=TimelineSums)
    """The course of the whole run."""
    _warm_up_left: int = field(init=False)
    _sums: Sums = field(default_factory=Sums)
    _warm_up: Sums = field(default_factory=Sums)
    """Sums over the warm-up's steps. Epoch starts and lost steps during the warm-up are not among them."""
    _before: Sums = field(default_factory=Sums)
    """Sums at the start of the current window."""
    _window_settled: bool = False
    _pairs: PairSums = field(default_factory=PairSums)
    _at_epoch: Sums = field(default_factory=Sums)
    """Sums at the start of the present epoch."""
    _pairs_of_epoch: PairSums = field(default_factory=PairSums)

    def __post_init__(self) -> None:
        self._warm_up_left = WARM_UP_STEPS + self.queue

    def epoch_started(self, seconds: float) -> None:
        """Add the time from the start of an epoch to its first batch."""
        self._sums.epoch_starts += 1
        self._sums.epoch_start_s += seconds

    def fold(self) -> None:
        """Sum up the new steps."""
        for step in self.fresh:
            warming = self._warm_up_left > 0
            self._warm_up_left -= warming
            if step.counted:
                self._sums.add(step)
                self.timeline.add(step.data_ns, step.step_ns)
                if warming:
                    self._warm_up.add(step)
                else:
                    self._pairs.add(step.data_ns, step.step_ns)
                    self._pairs_of_epoch.add(step.data_ns, step.step_ns)
        self.fresh.clear()

    def epoch_begins(self) -> None:
        """Note that the next steps belong to a new epoch."""
        self.fold()
        self._at_epoch = replace(self._sums)
        self._pairs_of_epoch = PairSums()

    def changed_wait_ms(self) -> tuple[float, float] | None:
        """Return the mean waits in a step, before and in the present epoch; None if they do not differ, or if there are
        few steps.

        The waits differ if one is at least twice as long as the other, and the difference is a tenth of a step or more.
        """
        earlier = self._at_epoch - self._warm_up
        present = self._sums - self._at_epoch
        if min(earlier.steps, present.steps) < SOME_STEPS:
            return None
        before_ns = earlier.data_ns / earlier.steps
        since_ns = present.data_ns / present.steps
        step_ns = max(earlier.step_ns / earlier.steps, present.step_ns / present.steps)
        is_alike = max(before_ns, since_ns) < CHANGED * min(before_ns, since_ns)
        if is_alike or abs(before_ns - since_ns) < CHANGED_SHARE * step_ns:
            return None
        return before_ns * 1e-6, since_ns * 1e-6

    def leave_out_earlier_epochs(self) -> None:
        """Count the steps before the present epoch as warm-up."""
        self._warm_up = replace(self._at_epoch)
        self._pairs = self._pairs_of_epoch

    def settled(self) -> Sums:
        """Return the run so far without its warm-up."""
        self.fold()
        return self._sums - self._warm_up

    def close_window(self, *, lost: int, prefetch_active: bool | None) -> StarvationStats:
        """Return the figures since the last window, including the warm-up, and begin a new window.

        Args:
            lost: steps of the run that were not measured.
            prefetch_active: True if batches are copied ahead; None: there is no PrefetchCallback.
        """
        self.fold()
        self._sums.lost = lost
        stats = (self._sums - self._before).stats(
            settled=self._window_settled,
            trusted_clock=self.trusted_clock,
            prefetch_active=prefetch_active,
            whole=self._sums,
        )
        self._before = replace(self._sums)
        self._window_settled = not self._warm_up_left
        return stats

    def total(self, *, prefetch_active: bool | None, lost: int = 0) -> StarvationStats:
        """Return the figures of the run so far without its warm-up; with the warm-up if too few steps would remain.

        Without the warm-up, and with enough steps, they include 95 % intervals of ``starved_pct`` and ``step_ms``.
        """
        sums = self.settled()
        settled = sums.steps >= FEW_STEPS
        sums = replace(sums if settled else self._sums, lost=lost)
        stats = sums.stats(
            settled=settled, trusted_clock=self.trusted_clock, prefetch_active=prefetch_active, whole=self._sums
        )
        if settled:
            stats = replace(stats, warm_up_steps=self._warm_up.steps)
        if not settled or stats.starved_pct is None:
            return stats
        starved_pct = self._pairs.interval_pct(self.period)
        step_ns = self._pairs.step_interval_ns(self.period)
        if starved_pct is None or step_ns is None:
            return stats
        return replace(
            stats,
            starved_low_pct=starved_pct[0],
            starved_high_pct=starved_pct[1],
            step_low_ms=step_ns[0] * 1e-6,
            step_high_ms=step_ns[1] * 1e-6,
        )
