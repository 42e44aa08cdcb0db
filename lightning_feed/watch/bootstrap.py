"""A 95 % interval of the share of waiting, from one run: circular block bootstrap over its steps.

Waits are periodic in the number of workers, and one stall is felt in several steps. So steps are drawn in blocks, whose
length is a multiple of that number, and not one by one: Kuensch, "The jackknife and the bootstrap for general
stationary observations", Annals of Statistics 17 (1989), in the circular form of Politis and Romano, "A circular
block-resampling procedure for stationary data", in: Exploring the Limits of Bootstrap (1992), which draws each step
equally often. Percentiles of few blocks are too narrow; they are taken further out as Student's t is, as Hesterberg,
"What teachers should know about the bootstrap", The American Statistician 69 (2015), section 4.3, expands them.
"""

import math
from dataclasses import dataclass, field

import torch

REPLICATES = 500
Z = 1.959964
"""Of the normal distribution, for 95 %."""
MOST_CHUNKS = 1024
"""Pairs of sums that are kept at most; then neighbours are merged."""
FEWEST_BLOCKS = 8
"""With fewer blocks the spread between them says nothing."""
_SEED = 1


@dataclass
class PairSums:
    """Sums of waiting and of step time over chunks of consecutive steps, in bounded memory.

    The chunks are single steps first; whenever there are ``MOST_CHUNKS``, each is merged with its neighbour.
    """

    chunk: int = 1
    """Steps in each chunk."""
    data: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    _open: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Of the chunk that is not full yet: steps, data, step."""

    def add(self, data_ns: float, step_ns: float) -> None:
        """Count in one step."""
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
        count = len(self.data)
        length = block_length(count, self.chunk, period)
        if count < FEWEST_BLOCKS * length or sum(self.step) <= 0:
            return None
        return ratio_interval_pct(self.data, self.step, length)


def block_length(count: int, chunk: int, period: int) -> int:
    """Chunks in a block: whole periods, two at least, and the cube root of how many there are (Kuensch's order).

    A block begins anywhere in a period. So one of a single period would hold parts of two, which vary less.

    Args:
        count: chunks in all.
        chunk: steps in a chunk.
        period: steps after which waits repeat.
    """
    whole = max(1, period) // math.gcd(max(1, period), chunk)
    fewest = 2 * whole if period > chunk else 1
    return whole * math.ceil(max(fewest, round(math.pow(count, 1 / 3))) / whole)


def ratio_interval_pct(data: list[float], step: list[float], length: int) -> tuple[float, float]:
    """Interval of ``100 * sum(data) / sum(step)`` from blocks of ``length`` neighbours, by a generator of its own."""
    pairs = torch.tensor([data, step], dtype=torch.float64, device="cpu")  # whatever the default device is
    count = pairs.shape[1]
    circle = torch.cat([torch.zeros(2, 1, dtype=torch.float64, device="cpu"), pairs, pairs[:, :length]], dim=1).cumsum(
        dim=1
    )
    of_block = circle[:, length : length + count] - circle[:, :count]
    generator = torch.Generator("cpu").manual_seed(_SEED)
    blocks = max(1, round(count / length))
    drawn = torch.randint(count, (REPLICATES * blocks,), generator=generator, device="cpu")
    waited, took = (sums.index_select(0, drawn).view(REPLICATES, blocks).sum(dim=1) for sums in of_block)
    shares = 100 * waited / took.clamp(min=torch.finfo(torch.float64).tiny)
    tail = _tail(blocks)
    low, high = shares.quantile(pairs.new_tensor((tail, 1 - tail))).tolist()
    return max(0.0, low), min(100.0, high)


def _tail(blocks: int) -> float:
    """``Phi(-sqrt(n / (n - 1)) * t(n - 1))``, the expanded 2.5 %, for n blocks.

    Student's t from the normal quantile by the first two terms of its expansion (Abramowitz and Stegun 26.7.5).
    """
    free = max(1, blocks - 1)
    student = Z + (Z**3 + Z) / (4 * free) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
    return 0.5 * math.erfc(math.sqrt(blocks / free) * student / math.sqrt(2))
