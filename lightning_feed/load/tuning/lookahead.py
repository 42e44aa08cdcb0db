"""How much workers must load ahead: as much as lasts while one of them makes a slow batch."""

import math
from collections.abc import Sequence

from lightning_feed.load.recommend import TORCH_PREFETCH
from lightning_feed.load.tuning.scaling import Probe
from lightning_feed.load.tuning.values import Kind, Setting, Trial

MOST_PREFETCH = 8
EVEN = 2.0
"""A slow batch that takes up to so many times as long as a usual one is covered by torch's default."""
_LONG_GAP = 2.0


def unevenness(probe: Probe, trials: Sequence[Trial], kind: Kind, cpus: float) -> float:
    """How long a slow batch takes, in usual ones: 1 where all are alike.

    From 99th percentiles, not from means: in order, all workers wait for the one that makes a slow batch.

    Args:
        probe: the trial without workers.
        trials: so far. What it did not meet, longer ones with workers may.
        kind: of the workers. Threads make a slow batch together.
        cpus: for one rank.
    """
    if kind == "thread":
        return 1.0
    uneven = probe.slow_s / probe.wall_s
    for trial in trials:
        tried = trial.setting.num_workers
        if not tried or trial.setting.workers != kind or not trial.gap_p99_s or not trial.batches_per_s:
            continue
        # Even batches of workers in step come all at once, after the time of one: longer gaps are of slow ones.
        if trial.gap_p99_s * trial.batches_per_s / tried > _LONG_GAP:
            usual_s = probe.worker_s * max(1.0, tried * probe.cpu_s / probe.worker_s / cpus)
            uneven = max(uneven, trial.gap_p99_s / usual_s)
    return uneven


def prefetch_for(uneven: float) -> int:
    """Batches that each worker loads ahead. Twice the slow one: the next may come before the queue is full again."""
    return TORCH_PREFETCH if uneven <= EVEN else min(MOST_PREFETCH, math.ceil(2 * uneven))


def far_enough(tried: Setting, wanted: Setting) -> bool:
    """Whether as much was loaded ahead as is wanted, or at least more than by default: the rest is worth no trial."""
    return (tried.prefetch_factor or 0) >= min(wanted.prefetch_factor or 0, TORCH_PREFETCH + 1)
