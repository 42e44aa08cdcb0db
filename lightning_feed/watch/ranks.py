"""What the ranks cost each other: the longest wait of each step, whose it is, and how it multiplies."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_feed.watch.stats import RankStats
from lightning_feed.watch.step_meter import StepTimes

SLOW_SHARE = 0.1
"""Share of a step by which a rank waits longer than the median before it is called slow."""
NUMBER, DATA_IDLE, STEP = range(3)
"""Columns of what a rank measured: number of the step, nanoseconds of waiting for data, nanoseconds in all."""


def step_rows(steps: Iterable[StepTimes]) -> list[float]:
    """The counted ones of ``steps`` as one flat list of (number, data_idle_ns, step_ns)."""
    rows: list[float] = []
    for step in steps:
        if step.counted:
            step_ns = step.other_ns + step.data_ns + step.h2d_ns + step.compute_ns
            rows += (step.number, step.data_ns, step_ns)
    return rows


def align(ranks: Sequence[Tensor]) -> Tensor:
    """The steps that all ranks measured. A rank may lack steps: its device clock lost them, or has not come to them.

    Args:
        ranks: of each rank its steps as (steps, 3) float64, columns as in :func:`step_rows`.

    Returns:
        (3, ranks, common steps) float64, in the order of the steps' numbers.
    """
    every = torch.cat(list(ranks))
    of_rank = torch.repeat_interleave(
        torch.arange(len(ranks), device="cpu"), torch.tensor([len(rows) for rows in ranks], device="cpu")
    )
    numbers, place = torch.unique(every[:, NUMBER], return_inverse=True)
    grid = torch.full((3, len(ranks), len(numbers)), torch.nan, dtype=torch.float64, device="cpu")
    grid[:, of_rank, place] = every.T
    return grid[:, :, ~grid[NUMBER].isnan().any(dim=0)]


def rank_stats(ranks: Sequence[Tensor]) -> RankStats:
    """The figures of one window; see :class:`RankSums`.

    Args:
        ranks: as for :func:`align`.
    """
    sums = RankSums(len(ranks))
    sums.add(align(ranks))
    return sums.stats()


class RankSums:
    """Sums over the steps that all ranks measured. With ``idle[k, r]`` and ``step[k, r]`` of step k on rank r:

    - ``starved_pct = 100 * sum_k max_r idle[k, r] / sum_k max_r step[k, r]``. A rank that waits for data makes the
      others wait for its gradients, in what is ``compute`` to them: the longest wait of each step is what all of them
      pay, whoever has it. A mean over ranks would hide one starved rank among many.
    - ``amplification = sum_k max_r idle[k, r] / (1 / ranks * sum_r sum_k idle[k, r])``: what all pay over what a rank
      waits itself, in the mean; from 1 (all wait in the same steps, equally long) to the number of ranks (in each step
      one waits alone). As steps are equally long on ranks that exchange gradients, that is starved_pct over the mean of
      the ranks' own starved_pct. None where nobody waits.
    - ``slow_rank``: the one with the greatest mean wait, where that is 10 % of the mean of ``max_r step[k, r]`` above
      the median of the ranks' mean waits. Of an even number of ranks the lower of the two in the middle is taken:
      between two ranks a mean of both would halve what sets them apart.

    Args:
        world_size: ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.steps = 0
        self._longest_idle_ns = self._longest_step_ns = 0.0
        self._idle_ns = torch.zeros(world_size, dtype=torch.float64, device="cpu")

    def add(self, common: Tensor) -> None:
        """Count in what :func:`align` gave."""
        idle, step = common[DATA_IDLE], common[STEP]
        if not idle.shape[1]:
            return
        self.steps += idle.shape[1]
        self._longest_idle_ns += float(idle.amax(dim=0).sum())
        self._longest_step_ns += float(step.amax(dim=0).sum())
        self._idle_ns += idle.sum(dim=1)

    def stats(self) -> RankStats:
        """The figures of all that was added."""
        world_size = len(self._idle_ns)
        if not self.steps:
            return RankStats(world_size=world_size, steps=0)
        by_rank = [ns / self.steps for ns in self._idle_ns.tolist()]
        mean_step = self._longest_step_ns / self.steps
        slow = max(range(world_size), key=by_rank.__getitem__)
        median = sorted(by_rank)[(world_size - 1) // 2]
        idle_ns = sum(self._idle_ns.tolist())
        return RankStats(
            world_size=world_size,
            steps=self.steps,
            max_data_idle_ms=self._longest_idle_ns / self.steps * 1e-6,
            slow_rank=slow if by_rank[slow] - median >= SLOW_SHARE * mean_step > 0 else None,
            starved_pct=100 * self._longest_idle_ns / self._longest_step_ns if self._longest_step_ns > 0 else None,
            amplification=self._longest_idle_ns * world_size / idle_ns if idle_ns > 0 else None,
            data_idle_ms_by_rank=tuple(ns * 1e-6 for ns in by_rank),
        )
