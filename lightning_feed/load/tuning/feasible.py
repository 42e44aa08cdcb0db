"""Limits of the machine that a setting would break, known before it runs: memory, /dev/shm, open files."""

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
IMPORT_S = 2.5
"""CPU time in which a process imports torch: 2.2 to 2.9 s with torch 2.15 on an AMD EPYC."""
SPARE_FILES = 64
"""Left to training: checkpoints, logs, connections."""


@dataclass(frozen=True, kw_only=True)
class OpenFiles:
    """Files that this process has open, and may have."""

    now: int
    most: int | None
    """``RLIMIT_NOFILE``; None for no limit, or not known."""
    kept: bool
    """Whether tensors from workers keep a file open each (torch's sharing strategy ``file_descriptor``)."""


def read_open_files(root: Path = Path("/")) -> OpenFiles:
    """Of this process, now."""
    most = None
    if resource is not None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = None if soft == resource.RLIM_INFINITY else soft
    try:
        now = sum(1 for _ in (root / "proc/self/fd").iterdir())
    except OSError:
        now = 0
    kept = multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    return OpenFiles(now=now, most=most, kept=kept)


@dataclass(frozen=True, kw_only=True)
class Feasible:
    """The limits of the machine, for each of its local ranks."""

    machine: Machine
    files: OpenFiles
    local_ranks: int = 1
    background: int = 0
    """Batches that the loader's own thread keeps ready."""
    start_method: str | None = None
    """How the loader's workers start; None for the machine's way."""
    most_started: int | None = None
    """Worker processes that can be started in the time there is; None: any number."""

    def broken(self, setting: Setting, trials: Sequence[Trial] = ()) -> str:
        """The limit that a setting would break, as a sentence; empty when all hold.

        Args:
            setting: what would be run.
            trials: so far. The first tells the size of a batch, those with workers what a worker takes.
        """
        workers, threads = setting.num_workers, setting.workers == "thread"
        if workers == 0:
            return ""
        if not threads and self.most_started is not None and workers > self.most_started:
            return (
                f"workers that are not forked import torch anew, which takes {IMPORT_S:g} s of CPU time each: starting "
                f"more than {self.most_started} takes too much of the budget"
            )
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
        if self.files.most is None:
            return ""
        tensors = max((trial.batch_tensors or 0 for trial in trials), default=0) if self.files.kept else 0
        needed = self.files.now + workers * WORKER_FILES + batches * tensors + SPARE_FILES
        if needed <= self.files.most:
            return ""
        batches_text = f"{plural(batches, 'batch', 'batches')} of {plural(tensors, 'tensor')}"
        return (
            f"{plural(workers, 'worker')} and {batches_text} would keep up to {needed} files open in this process, of "
            f"{self.files.most} that it may (RLIMIT_NOFILE); `ulimit -n` raises that, and tensors keep none open with "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
