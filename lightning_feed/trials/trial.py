"""Loader settings, and the trials that measure them."""

import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from torch import Tensor, multiprocessing
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, FeedError, plural
from lightning_feed.load.kinds import Batch
from lightning_feed.load.machine import THREAD_BYTES, WORKER_BYTES, Footprint, Machine, exceeded_limit
from lightning_feed.load.processes import ended_worker, worker_processes
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import TORCH_PREFETCH
from lightning_feed.trials.cloning import (
    Changes,
    LoaderRate,
    RoundLimits,
    background_of,
    burst_of,
    clone_loader,
    locate_failure,
    time_loader,
)

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

Kind = Literal["process", "thread"]

WORKER_FILES = 4
"""Open files in this process per worker process: both ends of its index queue, its sentinel, and one spare. With torch
2.15, /proc/self/fd shows 3."""
OTHER_FILES = 256
"""Open files reserved for the program: libraries, checkpoints, logs, connections."""


def open_files_limit() -> float:
    """Return the limit of open files of this process. Infinite if there is no limit."""
    most = -1 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if most < 0 else most


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Loader settings of a trial."""

    num_workers: int
    prefetch_factor: int | None
    """Batches prefetched per worker. None without workers."""
    workers: Kind = "process"
    persistent_workers: bool = False
    pin_memory: bool = False
    in_order: bool = True

    def __str__(self) -> str:
        kind = "" if self.workers == "process" else f", workers={self.workers!r}"
        ahead = f", prefetch_factor={self.prefetch_factor}" if self.prefetch_factor else ""
        return f"num_workers={self.num_workers}{kind}{ahead}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A setting and its measurements. None means unknown."""

    setting: Setting
    batches_per_s: float | None = None
    """Mean rate per rank on this machine. None: the trial could not run."""
    start_s: float | None = None
    """Seconds from ``iter(loader)`` to the first batch."""
    cpu_s_per_batch: float | None = None
    """CPU time of this process and its workers."""
    memory_bytes: int | None = None
    """Memory of the workers."""
    batch_bytes: int | None = None
    """Bytes of tensors and arrays in a batch, the largest of the first batches."""
    batch_tensors: int | None = None
    """Number of tensors and arrays in a batch."""
    gap_p99_s: float | None = None
    """Longest time between two batches in a round of ``num_workers`` batches, 99th percentile over the rounds."""
    seconds: float = 0.0
    """Seconds of the trial."""
    infeasible: str | None = None
    """Reason why the trial could not run."""


@dataclass(frozen=True, kw_only=True)
class Feasible:
    """Machine limits for each local rank."""

    machine: Machine
    open_files: float = math.inf
    """Limit of open files of this process."""
    local_ranks: int = 1
    background: int = 0
    """Batches that the loader's own thread keeps ready."""
    start_method: str = "fork"
    """Start method of the loader's workers."""

    def broken(self, setting: Setting, trials: Sequence[Trial] = ()) -> str:
        """Describe the limit that a setting would break. Empty if all limits hold.

        Args:
            setting: the setting to check.
            trials: the trials so far. The first has the batch size in bytes; trials with workers have the memory per
                worker.
        """
        workers = setting.num_workers
        threads = setting.workers == "thread"
        if workers == 0:
            return ""
        batch_bytes = max((trial.batch_bytes or 0 for trial in trials), default=0)
        # Batches of the workers and of the background thread, and the batch in training.
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
        said = exceeded_limit(self.machine, taken)
        return said if said or threads else self._too_many_files(workers, batches, trials)

    def _worker_bytes(self, trials: Sequence[Trial]) -> int:
        """Memory of a worker process, measured if possible."""
        ran = [one for one in trials if one.memory_bytes and one.setting.workers == "process"]
        measured = [(one.memory_bytes or 0) // one.setting.num_workers for one in ran if one.setting.num_workers]
        return max(measured, default=WORKER_BYTES[self.start_method])

    def _too_many_files(self, workers: int, batches: int, trials: Sequence[Trial]) -> str:
        kept = multiprocessing.get_sharing_strategy() == "file_descriptor"
        tensors = max((trial.batch_tensors or 0 for trial in trials), default=0) if kept else 0
        needed = workers * WORKER_FILES + batches * tensors
        if needed + OTHER_FILES <= self.open_files:
            return ""
        return (
            f"{plural(workers, 'worker')} and {plural(batches, 'batch', 'batches')} of {plural(tensors, 'tensor')} "
            f"would keep {needed} files open, but this process may have {self.open_files:.0f} (`ulimit -n`)"
        )


def feasible(loader: DataLoader[Batch], machine: Machine, local_ranks: int = 1) -> Feasible:
    """Return the limits of this process for a loader."""
    context: Any = loader.multiprocessing_context
    return Feasible(
        machine=machine,
        open_files=open_files_limit(),
        local_ranks=local_ranks,
        background=background_of(loader),
        start_method=context.get_start_method() if context is not None else machine.start_method,
    )


_READ_EVERY_S = 0.1
"""Seconds between two readings of CPU times. Each reads one file per worker."""
_DEEPEST = 8


def run_trial(loader: DataLoader[Batch], setting: Setting, limits: RoundLimits, *, copies: int = 1) -> Trial:
    """Measure a loader with a setting. Restores the loader, its samplers and generators, and all random state.

    If the setting cannot run, the trial holds the reason. A failing data set raises an error, since no setting would
    help.

    Args:
        loader: any DataLoader. Map-style data sets restart at the end, so few samples suffice.
        setting: the setting to run it with.
        limits: limits of the measurement.
        copies: number of copies of the loader to run at once, as local ranks do. Ignored without workers.

    Raises:
        DatasetError: the data set raised an error; the message names worker and sample.
        LoaderError: the loader is empty, or hangs without workers.
    """
    began = time.perf_counter()
    copies = copies if setting.num_workers else 1
    passes: list[_Pass] = []
    stream = isinstance(loader.dataset, IterableDataset)
    try:
        with preserve_state(loader), warnings.catch_warnings():
            # More workers than CPUs are intended. For the user's loader, torch has already warned of useless pinning.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
            own = asdict(replace(setting, persistent_workers=False))  # each trial ends its own workers
            variants = [clone_loader(loader, Changes(**own, endless=not stream)) for _ in range(copies)]
            burst = burst_of(variants[0])

            def begin() -> _Pass:
                passes.append(_Pass([iter(variant) for variant in variants], burst))
                return passes[-1]

            rate = time_loader(begin, burst=burst, limits=limits)
    except FeedError as error:
        if not setting.num_workers or isinstance(error, DatasetError):
            raise
        reason = str(error)
    except Exception as error:
        reason = (ended_worker(passes[-1], error) if passes else None) or ""
        if not reason:
            came = passes[-1].taken if len(passes) == 1 and copies == 1 else None
            raise locate_failure([SimpleNamespace(loader=loader, stream=stream)], error, came) from error
    else:
        return _measured(setting, rate, passes, time.perf_counter() - began)
    return Trial(setting=setting, infeasible=reason, seconds=time.perf_counter() - began)


@dataclass
class _Pass(Iterator[Batch]):
    """Parallel iterators, one per rank, with arrival times and CPU times of their batches."""

    iterators: list[Any]
    """The iterators. Their workers are found, and ended, through this attribute."""
    burst: int
    stamps: list[float] = field(default_factory=list)
    cpu: list[tuple[int, float]] = field(default_factory=list)
    """Samples of (batches so far, CPU seconds of this process and its workers)."""
    memory: int = 0
    batch_bytes: int = 0
    batch_tensors: int = 0
    _read_at: float = -math.inf

    def __post_init__(self) -> None:
        self.pids = [process.pid for process in worker_processes(self) if process.pid is not None]

    @property
    def taken(self) -> int:
        return len(self.stamps)

    def __next__(self) -> Any:
        batches = [next(iterator) for iterator in self.iterators]
        self.stamps.append(time.perf_counter())
        if self.taken <= 2:
            sizes = leaf_sizes(batches[0])
            self.batch_bytes = max(self.batch_bytes, sum(sizes))
            self.batch_tensors = max(self.batch_tensors, len(sizes))
        if self.taken > 1 + self.burst:
            self._read_counters(self.stamps[-1])
        return batches

    def _read_counters(self, now: float) -> None:
        if now - self._read_at < _READ_EVERY_S:
            return
        self._read_at = now
        if not self.memory and self.pids:
            self.memory = worker_memory(self.pids) or 0
        seconds = cpu_seconds(self.pids)
        if seconds is not None:
            self.cpu.append((self.taken, seconds))

    def longest_gaps(self) -> list[float]:
        """Return the longest gap of each round, after the first rounds."""
        stamps = self.stamps[self.burst :] if len(self.stamps) > 3 * self.burst else self.stamps
        gaps = np.diff(stamps)
        return [float(gaps[start : start + self.burst].max()) for start in range(0, len(gaps), self.burst)]


def _measured(setting: Setting, rate: LoaderRate, passes: list[_Pass], seconds: float) -> Trial:
    ranks = len(passes[0].iterators)
    spans = [(one.cpu[0], one.cpu[-1]) for one in passes if len(one.cpu) > 1]
    batches = sum(last[0] - first[0] for first, last in spans) * ranks
    cpu_s = sum(last[1] - first[1] for first, last in spans)
    gaps = sorted(gap for one in passes for gap in one.longest_gaps())
    memory = max(one.memory for one in passes)
    return Trial(
        setting=setting,
        batches_per_s=rate.batches_per_s,
        start_s=rate.start_s,
        cpu_s_per_batch=cpu_s / batches if batches else None,
        memory_bytes=memory // ranks if memory else None,
        batch_bytes=max(one.batch_bytes for one in passes),
        batch_tensors=max(one.batch_tensors for one in passes),
        gap_p99_s=gaps[int(0.99 * (len(gaps) - 1))] if gaps else None,
        seconds=seconds,
    )


# --- CPU time and memory of a running loader --------------------------------------------------------------------------


def cpu_seconds(pids: Iterable[int], root: Path = Path("/")) -> float | None:
    """Return the CPU seconds used so far by all threads of this process and its workers. None if unreadable."""
    total = time.process_time()
    for pid in pids:
        try:
            stat = (root / f"proc/{pid}/stat").read_text()
            user, system = stat.rpartition(")")[2].split()[11:13]  # proc(5), fields 14 and 15
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
    return total


def worker_memory(pids: Iterable[int], root: Path = Path("/")) -> int | None:
    """Return the workers' memory in bytes, without /dev/shm. Shared memory counts proportionally (PSS).
    None if unreadable."""
    total = 0
    for pid in pids:
        try:
            lines = (root / f"proc/{pid}/smaps_rollup").read_text().splitlines()
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
            total += 1024 * (sizes["Pss"] - sizes.get("Pss_Shmem", 0))
        except (OSError, KeyError):
            return None
    return total


def leaf_sizes(batch: object, depth: int = 0) -> list[int]:
    """Return the bytes of each tensor and array in a batch of any structure."""
    sizes = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, (Tensor, np.ndarray)):
            sizes.append(int(leaf.nbytes))
        elif depth < _DEEPEST:
            sizes += leaf_sizes(list(getattr(leaf, "__dict__", {}).values()), depth + 1)
    return sizes
