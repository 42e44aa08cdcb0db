"""Limits of the machine that a setting would break, known before it runs: memory, /dev/shm, open files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import multiprocessing

from lightning_feed.errors import plural
from lightning_feed.load.machine import THREAD_BYTES, WORKER_BYTES, Footprint, Machine, exceeded_limit
from lightning_feed.load.recommend import TORCH_PREFETCH
from lightning_feed.load.tuning.trial import Setting, Trial

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

WORKER_FILES = 4
"""Files that one worker process keeps open in this one: both ends of its index queue, its sentinel, and one to spare.
Counted in /proc/self/fd with torch 2.15: 3."""
SPARE_FILES = 64
"""Left to training: checkpoints, logs, connections."""


def free_files() -> float:
    """Files that this process may still open, apart from what training needs; infinite where there is no limit."""
    if resource is None:
        return math.inf
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        now = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        now = 0
    return math.inf if most == resource.RLIM_INFINITY else most - now - SPARE_FILES


@dataclass(frozen=True, kw_only=True)
class Feasible:
    """The limits of the machine, for each of its local ranks."""

    machine: Machine
    free_files: float = math.inf
    """Files that this process may still open."""
    local_ranks: int = 1
    background: int = 0
    """Batches that the loader's own thread keeps ready."""
    start_method: str | None = None
    """How the loader's workers start; None for the machine's way."""

    def broken(self, setting: Setting, trials: Sequence[Trial] = ()) -> str:
        """The limit that a setting would break, as a sentence; empty when all hold.

        Args:
            setting: what would be run.
            trials: so far. The first tells the size of a batch, those with workers what a worker takes.
        """
        workers, threads = setting.num_workers, setting.workers == "thread"
        if workers == 0:
            return ""
        batch_bytes = max((trial.batch_bytes or 0 for trial in trials), default=0)
        # What the workers have loaded, what the background thread keeps, and the batch that is being trained.
        batches = workers * (setting.prefetch_factor or TORCH_PREFETCH) + self.background + 1
        taken = Footprint(
            workers=workers,
            batches=batches,
            batch_bytes=batch_bytes,
            size=f"{plural(batches, 'batch', 'batches')} of {batch_bytes / 1e6:.3g} MB",
            worker_bytes=THREAD_BYTES if threads else self._worker_bytes(trials),
            threads=threads,
            sharers=self.local_ranks,
        )
        return exceeded_limit(self.machine, taken) or (
            "" if threads else self._too_many_files(workers, batches, trials)
        )

    def _worker_bytes(self, trials: Sequence[Trial]) -> int:
        """As measured, where it was."""
        measured = [
            trial.memory_bytes // trial.setting.num_workers
            for trial in trials
            if trial.memory_bytes and trial.setting.num_workers and trial.setting.workers == "process"
        ]
        return max(measured) if measured else WORKER_BYTES[self.start_method or self.machine.start_method]

    def _too_many_files(self, workers: int, batches: int, trials: Sequence[Trial]) -> str:
        kept = multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
        tensors = max((trial.batch_tensors or 0 for trial in trials), default=0) if kept else 0
        needed = workers * WORKER_FILES + batches * tensors
        if needed <= self.free_files:
            return ""
        return (
            f"{plural(workers, 'worker')} and {plural(batches, 'batch', 'batches')} of {plural(tensors, 'tensor')} "
            f"would keep up to {needed} files open in this process, which may open {self.free_files:.0f} more "
            "(RLIMIT_NOFILE); `ulimit -n` raises that, and tensors keep none open with "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
