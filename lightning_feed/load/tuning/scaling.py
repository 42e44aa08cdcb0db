"""How a loader's rate may grow with its workers: several hundred curves, weighed by what trials gave.

A curve has a time per batch in a worker, a roof that more workers do not lift (CPUs, a disk, the process that receives
the batches), and a loss for each worker beyond the roof. The first trial, without workers, says where such curves
lie; each further one says which of them are likely. One curve through the first trial alone was up to 217 % high past
the CPU roof.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_feed.load.tuning.values import Trial

Floats = NDArray[np.float64]
NOISE = 0.05
"""Spread of a trial's rate around its curve, as a share: noise of the measurement, and what no curve has."""
UNEVEN_NOISE = 0.12
"""The same where some batches take far longer than others: a trial meets more or fewer of them."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the trial without workers says of one batch."""

    wall_s: float
    cpu_s: float
    """Above ``wall_s`` where one batch is made by several threads, which workers do not start."""
    slow_s: float
    """A slow batch: the 99th percentile of their times."""

    @classmethod
    def of(cls, trial: Trial) -> "Probe":
        """From a trial without workers that ran."""
        if trial.batches_per_s is None:
            raise ValueError("a trial that could not run says nothing of a batch")
        wall = 1 / trial.batches_per_s
        cpu = wall if trial.cpu_s_per_batch is None else trial.cpu_s_per_batch
        return cls(wall_s=wall, cpu_s=min(max(cpu, 1e-3 * wall), 64 * wall), slow_s=max(wall, trial.gap_p99_s or wall))

    @property
    def worker_s(self) -> float:
        """What one worker alone needs for a batch."""
        return max(self.wall_s, self.cpu_s)


class Scaling:
    """The curves of workers of one kind, at the numbers of workers that may be tried.

    Attributes:
        workers: those numbers, ascending.
    """

    def __init__(
        self, probe: Probe, cpus: float, workers: list[int], kind: Literal["process", "thread"] = "process"
    ) -> None:
        self.workers = workers
        roofs, roof_weights = _roofs(probe, cpus, max(workers))
        if kind == "process":
            slower, slower_weights = np.geomspace(0.6, 2.6, 9), _around(np.geomspace(0.6, 2.6, 9), 1.05, 0.2)
            serial, serial_weights = np.zeros(1), np.ones(1)
        else:
            slower, slower_weights = np.array([0.8, 1.0, 1.3]), np.array([0.25, 0.5, 0.25])
            serial = np.array([0.02, 0.1, 0.25, 0.45, 0.7, 1.0])  # of a batch's work, done by one thread at a time
            serial_weights = np.full(6, 1 / 6)
        loss, loss_weights = np.array([0.0, 0.05, 0.15, 0.3, 0.6]), np.array([0.2, 0.25, 0.25, 0.2, 0.1])
        bend, bend_weights = np.array([1.5, 3.0, 12.0]), np.array([0.2, 0.3, 0.5])
        axes = np.meshgrid(slower, roofs, serial, loss, bend, indexing="ij")
        of_curve: list[Floats] = [axis.reshape(-1, 1) for axis in axes]
        count = np.asarray(workers, dtype=np.float64).reshape(1, -1)
        slow, roof, one, lost, bent = of_curve
        free = 1 / (probe.worker_s * slow * (one + (1 - one) / count))
        met = (free**-bent + roof**-bent) ** (-1 / bent)
        beyond = np.maximum(0.0, free / roof - 1)
        self.rates: Floats = met / (1 + lost * beyond)
        """(curves, workers), batches per second."""
        weights = np.ones(())
        for axis in (slower_weights, roof_weights, serial_weights, loss_weights, bend_weights):
            weights = np.multiply.outer(weights, axis)
        self.weights: Floats = (weights / weights.sum()).reshape(-1)

    def learn(self, workers: int, batches_per_s: float, noise: float = NOISE) -> None:
        """Weigh the curves by a trial's rate. One that is far from all of them leaves the nearest."""
        off = np.log(self.rates[:, self.workers.index(workers)] / batches_per_s) / noise
        # Student's t with 3 degrees of freedom: a stray trial must not settle it.
        self.weights = self.weights / (1 + off**2 / 3) ** 2
        self.weights = self.weights / self.weights.sum()

    def expected(self, workers: int) -> float:
        """Batches per second that so many workers give, by the curves as they are weighed now."""
        return float(np.exp(self.weights @ np.log(self.rates[:, self.workers.index(workers)])))


def _roofs(probe: Probe, cpus: float, most: int) -> tuple[Floats, Floats]:
    """Roofs in batches per second, with their weights: that of the CPUs, more or less, and any other below it."""
    by_cpus = cpus / probe.cpu_s
    near = np.array([0.35, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25])
    lowest = 0.1 / probe.worker_s
    highest = max(2 * lowest, min(1.25 * by_cpus, 1.5 * most / probe.worker_s))
    other = np.geomspace(lowest, highest, 18)
    weights = np.concatenate([0.6 * _around(near, 1.0, 0.12), np.full(18, 0.4 / 18)])
    roofs: Floats = np.concatenate([near * by_cpus, other])
    return roofs, weights


def _around(values: Floats, middle: float, spread: float) -> Floats:
    """Weights that sum to 1, normal in the logarithm."""
    off: Floats = np.log(values / middle) / spread
    weights: Floats = np.exp(-0.5 * off**2)
    total: float = weights.sum()
    return np.divide(weights, total)
