"""One trial of a loader, which measures the time of a training step with a setting; and limits of the machine."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.load.child import NoAnswer, run_in_children
from lightning_feed.load.digest import leaf_sizes
from lightning_feed.load.kinds import Batch
from lightning_feed.load.processes import ended_worker, worker_processes
from lightning_feed.load.settings import Setting
from lightning_feed.load.worker import original_error
from lightning_feed.machine.limits import THREAD_BYTES, WORKER_BYTES, Footprint, Machine, exceeded_limit
from lightning_feed.trials.cloning import Changes, background_of, burst_of, clone_loader
from lightning_feed.trials.search import OutOfTime, Trial
from lightning_feed.trials.training_work import ImitatedTraining, TrainingWork
from lightning_feed.wording import plural

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

WORKER_FILES = 4
"""Open files in this process per worker process: both ends of its index queue, its sentinel, and one spare. With torch
2.15, /proc/self/fd lists 3 of them."""
OTHER_FILES = 256
"""Open files reserved for the program: libraries, checkpoints, logs, connections."""


def open_files_limit() -> float:
    """Return the limit of open files of this process. Infinite if there is no limit."""
    if resource is None:
        return math.inf
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit < 0 else limit


@dataclass(frozen=True, kw_only=True)
class SettingLimits:
    """Machine limits for each local rank."""

    machine: Machine
    open_files: float = math.inf
    """Limit of open files of this process."""
    local_ranks: int = 1
    background: int = 0
    """Batches that the loader's background thread keeps ready."""
    start_method: str = "fork"
    """Start method of the loader's workers."""

    def broken(self, setting: Setting, trials: Sequence[Trial] = ()) -> str:
        """Describe the limit that a setting would break. Empty if all limits hold.

        Args:
            setting: the setting to check.
            trials: the trials so far, from which the bytes of a batch and the memory of a worker are taken.
        """
        workers = setting.num_workers
        if workers == 0:
            return ""
        has_threads = setting.workers == "thread"
        batch_bytes = _largest(trial.batch_bytes for trial in trials)
        # Batches of the workers and of the background thread, and the batch in training.
        batches = setting.batches_ahead + self.background + 1
        footprint = Footprint(
            workers=workers,
            batches=batches,
            batch_bytes=batch_bytes,
            size=f"{plural(batches, 'batch', 'batches')} of {batch_bytes / 1e6:.3g} MB",
            worker_bytes=THREAD_BYTES if has_threads else self._worker_bytes(trials),
            in_shm=not has_threads and not setting.in_place,
            sharers=self.local_ranks,
        )
        exceeded = exceeded_limit(self.machine, footprint)
        if exceeded or has_threads:
            return exceeded
        tensors = 0
        if multiprocessing.get_sharing_strategy() == "file_descriptor" and not setting.in_place:
            tensors = _largest(trial.batch_tensors for trial in trials)
        return self._too_many_files(workers, batches, tensors)

    def _worker_bytes(self, trials: Sequence[Trial]) -> int:
        """Return the memory of a worker process, measured if possible."""
        measured = [
            trial.memory_bytes // trial.setting.num_workers
            for trial in trials
            if trial.memory_bytes and trial.setting.num_workers
        ]
        return max(measured, default=WORKER_BYTES[self.start_method])

    def _too_many_files(self, workers: int, batches: int, tensors: int) -> str:
        needed = workers * WORKER_FILES + batches * tensors
        if needed + OTHER_FILES <= self.open_files:
            return ""
        return (
            f"{plural(workers, 'worker')} and {plural(batches, 'batch', 'batches')} of {plural(tensors, 'tensor')} "
            f"would keep {needed} files open, but this process may have {self.open_files:.0f} (`ulimit -n`)"
        )


def _largest(values: Iterable[int | None]) -> int:
    """Return the largest known value; 0 if none is known."""
    return max(filter(None, values), default=0)


def limits_of(loader: DataLoader[Batch], machine: Machine, local_ranks: int = 1) -> SettingLimits:
    """Return the limits of this process for a loader."""
    context: Any = loader.multiprocessing_context
    start_method = machine.start_method
    if context is not None:
        start_method = context.get_start_method()
    return SettingLimits(
        machine=machine,
        open_files=open_files_limit(),
        local_ranks=local_ranks,
        background=background_of(loader),
        start_method=start_method,
    )


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """Length of a trial."""

    min_s: float = 0.5
    """Measure at least this long."""
    min_rounds: int = 2
    """Measure at least this many rounds. A round has one batch from each worker."""
    max_s: float = 10.0
    """End after this time, with the measurements so far."""
    patience_s: float = 60.0
    """Seconds to wait for a result beyond ``max_s``. Then the loader hangs or is far too slow, and the trial ends."""
    left_s: float = math.inf
    """Seconds that are left for all trials. The trial ends after that time, whatever a sample does."""


def run_trial(
    loader: DataLoader[Batch],
    setting: Setting,
    work: TrainingWork,
    limits: TrialLimits,
    *,
    ranks: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Trial:
    """Measure the time of a training step with a setting, in a forked child for each rank.

    Without workers the samples are made with as many torch threads as in the training process; worker processes have
    one each. If a setting with workers cannot run, the returned Trial has the reason.

    Args:
        loader: any DataLoader. It stays unchanged: the children iterate copies, from the beginning of the dataset.
        setting: the setting to try. Nothing is pinned, since a forked child must not touch the device.
        work: the work of training for each batch.
        limits: the length of the trial.
        ranks: number of loaders to run at the same time, as the local ranks do.
        stop: returns True if the trial is to end now.

    Raises:
        OutOfTime: no result came in the time that is left for all trials.
        Stopped: ``stop`` returned True.
        DatasetError: the dataset raised an error without workers.
        LoaderError: the loader is empty, or hangs without workers.
    """
    measure = partial(_measure, loader, setting, work, limits)
    run = partial(run_in_children, [measure] * ranks, stop=stop)
    if not setting.num_workers:
        run = partial(_with_torch_threads, run)
    patience_s = limits.max_s + limits.patience_s
    try:
        trials = run(timeout_s=min(patience_s, limits.left_s))
    except (DatasetError, LoaderError) as error:
        if isinstance(error, NoAnswer) and limits.left_s < patience_s:
            raise OutOfTime from error
        if not setting.num_workers:
            raise
        return Trial(setting=setting, infeasible=str(error))
    return max(trials, key=lambda trial: trial.step_s)


def _with_torch_threads(run: Callable[..., list[Trial]], *, timeout_s: float) -> list[Trial]:
    """Run trials with this process's number of torch threads, or with one if the dataset raises in a new thread.

    SQLite's connections, for one, are for the thread that made them (docs.python.org/3/library/sqlite3.html,
    ``check_same_thread``).
    """
    threads = torch.get_num_threads()
    if threads > 1:
        with suppress(DatasetError):
            return run(timeout_s=timeout_s, torch_threads=threads)
    return run(timeout_s=timeout_s)


def _measure(loader: DataLoader[Batch], setting: Setting, work: TrainingWork, limits: TrialLimits) -> Trial:
    """Run one rank's loader with the setting. Called in the child."""
    # More workers than CPUs are intended. For the user's loader, torch has already warned of useless pinning.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
    tried = replace(setting, pin_memory=False, persistent_workers=False)
    endless = not isinstance(loader.dataset, IterableDataset)
    copy = clone_loader(loader, Changes(setting=tried, endless=endless))
    if setting.in_place:
        work = work.in_place
    began_s = time.perf_counter()
    iterator = iter(copy)
    try:
        return _Steps(setting, iterator, burst_of(copy), began_s).measure(ImitatedTraining(work).train, limits)
    except (DatasetError, LoaderError):
        raise
    except Exception as error:
        ended = ended_worker(iterator, error)
        if ended:
            raise LoaderError(ended) from error
        kind, text = original_error(error)
        name = type(loader.dataset).__name__
        raise DatasetError(f"Loading from the dataset ({name}) failed: {kind}: {text}") from error


class _Steps:
    """The steps of one trial.

    The queue is empty at the first batch. If the loader is slower than training, the queue stays empty, and each step
    takes as long as the loader needs for a batch; else the queue fills up, and a step takes as long as training.
    Batches arrive in rounds of one batch from each worker, so whole rounds are measured, and the first is left out.
    """

    def __init__(self, setting: Setting, iterator: Any, burst: int, began_s: float) -> None:
        self._setting = setting
        self._iterator = iterator
        self._burst = burst
        self._began_s = began_s
        self._stamps_s: list[float] = []
        self._sizes: list[int] = []

    def measure(self, train: Callable[[], None], limits: TrialLimits) -> Trial:
        """Take batches and train on them until enough is measured."""
        while not self._is_enough(limits):
            batch = next(self._iterator, _END)
            if batch is _END:
                break
            self._stamps_s.append(time.perf_counter())
            if len(self._stamps_s) <= 2:
                self._sizes = max(self._sizes, leaf_sizes(batch), key=sum)
            del batch
            train()
        return self._trial()

    def _is_enough(self, limits: TrialLimits) -> bool:
        if not self._stamps_s:
            return False
        passed_s = time.perf_counter() - self._stamps_s[0]
        if passed_s > limits.max_s:
            return True
        return self._measured_s() >= limits.min_s and self._measured_batches() >= limits.min_rounds * self._burst

    def _first(self) -> int:
        """Return the position of the batch with which measuring begins: after one round, or sooner if there are few
        batches."""
        return min(self._burst, max(0, len(self._stamps_s) - 2))

    def _measured_batches(self) -> int:
        """Return the number of batches in complete rounds since measuring began; of all batches if no round is
        complete."""
        batches = max(0, len(self._stamps_s) - 1 - self._first())
        return batches // self._burst * self._burst or batches

    def _measured_s(self) -> float:
        batches = self._measured_batches()
        if not batches:
            return 0.0
        first = self._first()
        return self._stamps_s[first + batches] - self._stamps_s[first]

    def _trial(self) -> Trial:
        batches = self._measured_batches()
        if not batches:
            raise LoaderError(
                f"The loader yielded {plural(len(self._stamps_s), 'batch', 'batches')}, too few to measure its speed. "
                "Check the length of the dataset, the sampler and drop_last."
            )
        step_s = self._measured_s() / batches
        first = self._first()
        gaps_s = np.diff(self._stamps_s[first : first + batches + 1])
        longest_s = [gaps_s[start : start + self._burst].max() for start in range(0, batches, self._burst)]
        slow_s = float(np.percentile(longest_s, _SLOW_PERCENTILE))
        pids = [process.pid for process in worker_processes(self._iterator) if process.pid is not None]
        return Trial(
            setting=self._setting,
            steps_s=(step_s,),
            unevenness=slow_s / (step_s * self._burst) if step_s > 0 else None,
            start_s=self._stamps_s[0] - self._began_s,
            batch_bytes=sum(self._sizes),
            batch_tensors=len(self._sizes),
            memory_bytes=worker_memory(pids) or None,
        )


_SLOW_PERCENTILE = 90
"""Percentile of the longest waits of all rounds that counts as a slow batch."""
_END = object()
"""Marks the end of a pass."""


def worker_memory(pids: Iterable[int], root: Path = Path("/")) -> int | None:
    """Return the workers' memory in bytes, without /dev/shm; None if it cannot be read.

    Memory that processes share counts proportionally (PSS).
    """
    total = 0
    for pid in pids:
        try:
            lines = (root / f"proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            fields = [line.partition(":") for line in lines]
            sizes = {name: int(size.split()[0]) for name, _, size in fields}
            total += 1024 * (sizes["Pss"] - sizes.get("Pss_Shmem", 0))
        except (OSError, KeyError):
            return None
    return total
