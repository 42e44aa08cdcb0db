"""One setting, tried: a loader like the user's runs for some rounds, and is ended."""

import math
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, FeedError, LoaderError
from lightning_feed.load.blame import blamed
from lightning_feed.load.rounds import LoaderRate, RoundLimits, time_loader
from lightning_feed.load.tuning.meters import cpu_seconds, leaves_of, worker_memory
from lightning_feed.load.tuning.values import Setting, Trial
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import Changes, burst_of, with_changes
from lightning_feed.load.worker_end import torch_iterators, worker_processes

Clock = Callable[[], float]

_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal)")
_LOOK_S = 0.1
"""Between two readings of CPU times: each costs a file per worker."""


def run_trial(
    loader: DataLoader[Any], setting: Setting, limits: RoundLimits, *, copies: int = 1, clock: Clock = time.perf_counter
) -> Trial:
    """Run a loader with a setting. The user's loader, its samplers and generators, and all random state are as before.

    A setting that cannot run gives a trial that says why. A data set that fails is an error: no setting would help.

    Args:
        loader: any DataLoader. Map-style ones begin again at their end, so few samples suffice.
        setting: what to run it with.
        limits: how long.
        copies: loaders that run at once, as those of so many local ranks would. Only with workers.
        clock: seconds.

    Raises:
        DatasetError: the data set raised; the message names worker and sample.
        LoaderError: the loader is empty, or hangs without workers.
    """
    began = clock()
    copies = copies if setting.num_workers else 1
    seen: list[_Seen] = []
    try:
        with untouched(loader), warnings.catch_warnings():
            # More workers than CPUs: on purpose. Pinning without a device: the user was told by their own loader.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
            variants = [with_changes(loader, changes_for(loader, setting)) for _ in range(copies)]
            burst = burst_of(variants[0])

            def begin() -> _Seen:
                seen.append(_Seen([iter(variant) for variant in variants], burst, clock))
                return seen[-1]

            rate = time_loader(begin, burst=burst, limits=limits, clock=clock)
    except FeedError as error:
        if not setting.num_workers or isinstance(error, DatasetError):
            raise
        return Trial(setting=setting, infeasible=str(error), seconds=clock() - began)
    except Exception as error:
        died = _death(error, seen)
        if died is None:
            came = seen[-1].taken if len(seen) == 1 and copies == 1 else None
            stream = isinstance(loader.dataset, IterableDataset)
            raise blamed([_Subject(loader, stream)], error, came) from error
        return Trial(setting=setting, infeasible=died, seconds=clock() - began)
    return _trial(setting, rate, seen, clock() - began)


def changes_for(loader: DataLoader[Any], setting: Setting) -> Changes:
    """What to change in a loader so that it runs with a setting, over and over."""
    none = setting.num_workers == 0
    return Changes(
        num_workers=setting.num_workers,
        prefetch_factor=None if none else setting.prefetch_factor,
        workers=setting.workers,
        pin_memory=setting.pin_memory,
        persistent_workers=False,  # each trial ends its own
        in_order=True if none else setting.in_order,
        endless=not isinstance(loader.dataset, IterableDataset),
    )


class _Subject(NamedTuple):
    loader: Any
    stream: bool


@dataclass
class _Seen(Iterator[Any]):
    """Iterators side by side, one for each rank: when batches came, and what they took."""

    iterators: list[Any]
    """Under this name their workers are found, and ended."""
    burst: int
    clock: Clock
    stamps: list[float] = field(default_factory=list)
    taken: int = 0
    cpu: list[tuple[int, float]] = field(default_factory=list)
    """(Batches so far, CPU seconds of this process and its workers), now and then."""
    memory: int | None = None
    batch_bytes: int = 0
    batch_tensors: int = 0
    held_up_s: float | None = None
    _looked: float = -math.inf
    exit_codes: Callable[[], list[int]] = list

    def __post_init__(self) -> None:
        processes = worker_processes(self)
        self.pids = [process.pid for process in processes if process.pid is not None]
        self.exit_codes = lambda: [code for process in processes if (code := _exit_code(process))]

    def __next__(self) -> Any:
        asked = self.clock()
        batches = [next(iterator) for iterator in self.iterators]
        now = self.clock()
        self.stamps.append(now)
        self.taken += 1
        if self.taken <= 2:
            self._weigh(batches[0])
        if self.taken > 1 + self.burst:
            self._look(asked, now)
        return batches

    def _weigh(self, batch: Any) -> None:
        sizes = leaves_of(batch)
        self.batch_bytes, self.batch_tensors = max(self.batch_bytes, sum(sizes)), max(self.batch_tensors, len(sizes))

    def _look(self, asked: float, now: float) -> None:
        waits = [_others_idle(iterator) for one in self.iterators for iterator in torch_iterators(one)]
        if None not in waits:
            self.held_up_s = (self.held_up_s or 0.0) + (now - asked if any(waits) else 0.0)
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        if self.memory is None and self.pids:
            self.memory = worker_memory(self.pids)
        seconds = cpu_seconds(self.pids)
        if seconds is not None:
            self.cpu.append((self.taken, seconds))

    def longest_gaps(self) -> list[float]:
        """Of each round, after the first ones."""
        stamps = self.stamps[self.burst :] if len(self.stamps) > 3 * self.burst else self.stamps
        gaps = [after - before for before, after in pairwise(stamps)]
        return [max(gaps[start : start + self.burst]) for start in range(0, len(gaps), self.burst)]


def _trial(setting: Setting, rate: LoaderRate, seen: list[_Seen], seconds: float) -> Trial:
    cpu = [
        (last[0] - first[0], last[1] - first[1])
        for one in seen
        if len(one.cpu) > 1
        for first, last in [(one.cpu[0], one.cpu[-1])]
    ]
    batches = sum(count for count, _ in cpu) * len(seen[0].iterators)
    gaps = sorted(gap for one in seen for gap in one.longest_gaps())
    watched_s = sum(one.stamps[-1] - one.stamps[0] for one in seen if len(one.stamps) > 1)
    held_up = [one.held_up_s for one in seen if one.held_up_s is not None]
    memory = [one.memory for one in seen if one.memory is not None]
    return Trial(
        setting=setting,
        batches_per_s=rate.batches_per_s,
        start_s=rate.start_s,
        cpu_s_per_batch=sum(time for _, time in cpu) / batches if batches else None,
        memory_bytes=max(memory) // len(seen[0].iterators) if memory else None,
        batch_bytes=max(one.batch_bytes for one in seen),
        batch_tensors=max(one.batch_tensors for one in seen),
        gap_p99_s=gaps[int(0.99 * (len(gaps) - 1))] if gaps else None,
        head_of_line_pct=min(100.0, 100 * sum(held_up) / watched_s) if held_up and watched_s else None,
        seconds=seconds,
    )


def _others_idle(iterator: Any) -> bool | None:
    """Whether, when a batch has come, some worker has done all it was asked for, and so waited for this one.

    Torch keeps batches that come out of order as tuples of two (``_task_info``; private, read in torch 2.6 and 2.15).
    None for an iterator without these parts, or without workers.
    """
    try:
        kept = sum(len(info) == 2 for info in iterator._task_info.values())
        others = int(iterator._num_workers) - 1
        return others > 0 and kept > others * (int(iterator._prefetch_factor) - 1)
    except (AttributeError, TypeError, RuntimeError):
        return None


def _exit_code(process: Any) -> int:
    try:
        return process.exitcode or 0
    except (ValueError, AssertionError):  # closed, or another process's child
        return 0


def _death(error: BaseException, seen: list[_Seen]) -> str | None:
    """Why a worker died; None where none did."""
    match = _DIED.search(str(error))
    if match is None or not isinstance(error, RuntimeError):
        return None
    codes = [code for one in seen for code in one.exit_codes()]
    signals = [-code for code in codes if code < 0 and -code != signal.SIGTERM]
    if not signals and "killed by signal: Killed" in str(error):
        signals = [signal.SIGKILL]
    why = f"a worker process (pid {match.group(1).strip()}) died"
    if signals:
        name = signal.Signals(signals[0]).name
        why += f" of {name}"
        if name == "SIGKILL":
            why += ", as when memory runs out"
        elif name == "SIGBUS":
            why += ", as when /dev/shm is full"
    elif codes:
        why += f" with exit code {codes[0]}"
    return why


def not_a_loader(loader: Any) -> LoaderError | None:
    """The error for what cannot be tuned; None for a DataLoader."""
    if isinstance(loader, DataLoader):
        return None
    return LoaderError(
        f"A {type(loader).__name__} cannot be tuned. Give a torch DataLoader, or a loader of a class derived from it."
    )
