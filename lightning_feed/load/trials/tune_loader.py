"""The settings that fit a loader: remembered, or found by a few trials."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker

from lightning_feed.errors import LoaderError
from lightning_feed.load.build import size_of
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.machine import Machine, read_machine
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.recommend import PINNING_DEVICES
from lightning_feed.load.throughput import RoundLimits, watchdog
from lightning_feed.load.trials.search import Goal, Offer, Search, Tuned
from lightning_feed.load.trials.store import Store, key_of
from lightning_feed.load.trials.trial import Feasible, Kind, Setting, Trial, free_files, run_trial
from lightning_feed.load.worker import why_not_sent

logger = logging.getLogger(__name__)

MOST_WORKERS = 16
"""Tried where nothing else bounds their number: loaders that wait for storage gain from more than there are CPUs."""
SAME_WITHIN = 0.10
"""A remembered setting is trusted when it gives what it gave, up to this share."""
_MEASURE_S = 2.0
_CHECK_S = 1.0
_SILENT_S = 60.0
"""A loader that gives no batch for as long hangs. Spawned workers may import for long."""
_START_SHARE = 0.01
"""Workers live on from epoch to epoch where starting them takes more of an epoch."""
_FIRST_SAMPLE_S = 10.0
IMPORT_S = 2.5
"""CPU time in which a process that is not forked imports torch: 2.2 to 2.9 s with torch 2.15 on an AMD EPYC."""


def tune_loader(  # noqa: PLR0913  # all but the loader and its goal are by name, and have a default
    loader: DataLoader[Any],
    goal: Goal | None = None,
    *,
    store: Store | None = None,
    fresh: bool = False,
    on_trial: Callable[[Trial], object] | None = None,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Find the settings for a loader, in ``goal.max_trials`` trials and ``goal.budget_s`` seconds.

    The loader is not iterated: loaders like it are, and end with their workers. Its samplers and generators, and the
    global random state, are as before.

    Args:
        loader: any DataLoader, or a FeedLoader, for which threads are tried too.
        goal: what for; None looks for the fastest setting.
        store: where results are remembered; None remembers nothing.
        fresh: tune anew, whatever is remembered.
        on_trial: called with each trial when it is over.
        machine: its limits; None reads them.
        clock: seconds.

    Raises:
        LoaderError: it is no DataLoader, gives no batch, or hangs without workers.
        DatasetError: the data set raises; the message names the sample.
    """
    if not isinstance(loader, DataLoader):
        raise LoaderError(
            f"A {type(loader).__name__} cannot be tuned. Give a torch DataLoader, or a loader of a class derived from "
            "it."
        )
    run = _Run(loader, goal or Goal(), machine or read_machine(), on_trial, clock)
    if store is None:
        return run.search()
    key = key_of(loader, run.goal, run.machine, _version())
    tuned = None if fresh else run.check(store.load(key))
    if tuned is None:
        tuned = run.search()
        store.save(key, tuned)
    return tuned


def _version() -> str:
    """The installed version of this package; empty where it is only on the path."""
    try:
        return metadata.version("lightning-feed")
    except metadata.PackageNotFoundError:
        return ""


class _Run:
    """One tuning of one loader."""

    def __init__(
        self,
        loader: DataLoader[Any],
        goal: Goal,
        machine: Machine,
        on_trial: Callable[[Trial], object] | None,
        clock: Callable[[], float],
    ) -> None:
        self.loader, self.goal, self.machine, self._on_trial, self._clock = loader, goal, machine, on_trial, clock
        self._began = clock()
        self._notes: list[str] = []
        self._cpus = (machine.cpu_time or machine.usable_cpus) / goal.local_ranks
        context: Any = getattr(loader, "multiprocessing_context", None)
        self._method = context.get_start_method() if context is not None else machine.start_method
        self._feasible = Feasible(
            machine=machine,
            free_files=free_files(),
            local_ranks=goal.local_ranks,
            background=getattr(loader, "background", 0),
            start_method=self._method,
        )

    def check(self, kept: Tuned | None) -> Tuned | None:
        """A remembered result, if its setting is still possible and gives what it gave."""
        if kept is None or kept.batches_per_s is None or self._feasible.broken(kept.setting, kept.trials):
            return None
        trial = self._try(kept.setting, RoundLimits(min_s=_CHECK_S, max_s=self.goal.budget_s, silent_s=_SILENT_S))
        if trial.batches_per_s is None or abs(trial.batches_per_s / kept.batches_per_s - 1) > SAME_WITHIN:
            logger.info("A remembered loader setting gives other than it gave, so the loader is tuned anew.")
            return None
        return replace(kept, trials=(trial,), remembered=True, seconds=self._clock() - self._began)

    def search(self) -> Tuned:
        """Trials until the search ends, or the budget."""
        search = Search(self._offer(), self.goal, self._feasible.broken)
        while (setting := search.next_setting()) is not None:
            left = self.goal.budget_s - (self._clock() - self._began)
            if search.trials and left < _MEASURE_S / 2:
                self._notes.append(f"the budget of {self.goal.budget_s:g} s ended the search")
                break
            measure = min(_MEASURE_S, self.goal.budget_s / 8)
            longest = max(measure, left if not search.trials else left / 2)
            search.take(self._try(setting, RoundLimits(min_s=measure, max_s=longest, silent_s=_SILENT_S)))
        failures = [
            f"num_workers={trial.setting.num_workers} ({trial.setting.workers}): {trial.infeasible}"
            for trial in search.trials
            if trial.infeasible
        ]
        found = search.found()
        if found is None:
            raise LoaderError("No setting of the loader could be run: " + "; ".join(failures))
        persistent, why = self._persistent(found)
        reasons = [found.reason, *why, *self._notes, *(f"not taken: {failure}" for failure in failures[-1:])]
        return replace(
            found,
            setting=replace(found.setting, persistent_workers=persistent),
            reason="; ".join(reasons),
            batch_size=self.loader.batch_size,
            seconds=self._clock() - self._began,
        )

    def _try(self, setting: Setting, limits: RoundLimits) -> Trial:
        trial = run_trial(self.loader, setting, limits, copies=self.goal.local_ranks, clock=self._clock)
        if self._on_trial is not None:
            self._on_trial(trial)
        return trial

    def _offer(self) -> Offer:
        """What the loader and the machine allow; what they do not is noted."""
        most = self.goal.most_workers
        if most is None:
            most = max(MOST_WORKERS if self.goal.local_ranks == 1 else 4, int(2 * self._cpus))
        if self._method != "fork":  # as many as there are CPUs, or as start within a quarter of the budget
            most = min(most, max(1, int(self._cpus), int(self._cpus * self.goal.budget_s / 4 / IMPORT_S)))
        kinds: tuple[Kind, ...] = ("process",)
        stream = isinstance(self.loader.dataset, IterableDataset)
        if isinstance(self.loader, FeedLoader) and not stream:
            kinds = ("process", "thread")
        why = why_not_sent(self.loader, self._method)
        if why:
            self._notes.append(f"no worker processes: {why}")
            kinds = kinds[1:]
        if self._cpus < 1:
            self._notes.append(f"there is {self._cpus:.2g} of a CPU for each rank ({self.machine.cpu_reason})")
        if stream and most > 1 and self.loader.num_workers < 2 and not divides_itself(self.loader):
            most = 1
            self._notes.append(
                "at most one worker, since the iterable data set does not ask torch.utils.data.get_worker_info() which "
                "part is its own: each worker would give all samples"
            )
        return Offer(
            cpus=self._cpus, most_workers=most, kinds=kinds, pin_memory=self.goal.device_type in PINNING_DEVICES
        )

    def _persistent(self, found: Tuned) -> tuple[bool, list[str]]:
        """Whether workers live on from epoch to epoch, and why."""
        setting, rate = found.setting, found.batches_per_s
        if not setting.num_workers or setting.workers == "thread" or not self.goal.may_persist:
            return False, []
        start_s = next(trial.start_s for trial in found.trials if trial.setting == setting)
        batches = size_of(self.loader)
        if not batches or not start_s or not rate:
            return True, ["workers live on from epoch to epoch, since the length of one is not known"]
        epoch_s = batches / min(rate, self.goal.demand_per_s or rate)
        if start_s <= _START_SHARE * epoch_s:
            return False, [f"workers start anew for each epoch, which takes {start_s:.2g} of {epoch_s:.3g} s"]
        return True, [f"workers live on, since starting them takes {start_s:.2g} s, and an epoch {epoch_s:.3g} s"]


class _ObservedInfo:
    """A stand-in for torch's WorkerInfo, as the second of two, that notes whether it is asked."""

    asked = False

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.seed = dataset, 1

    def __getattr__(self, name: str) -> int:
        number = {"id": 1, "num_workers": 2}.get(name)
        if number is None:
            raise AttributeError(name)
        self.asked = True
        return number


def divides_itself(loader: DataLoader[Any]) -> bool:
    """Whether an iterable data set asks which worker it is in, by the time it gives its first sample.

    False where it gives none, or raises. ``get_worker_info`` reads a private name (``_worker_info``; torch 2.6 and
    2.15); where that is gone, nobody is seen to ask.
    """
    observed, before = _ObservedInfo(loader.dataset), getattr(worker, "_worker_info", None)
    with preserve_state(loader):
        try:
            worker._worker_info = observed  # type: ignore[assignment]
            watchdog(
                lambda _: next(iter(loader.dataset), None),
                silent_s=_FIRST_SAMPLE_S,
                unblock=lambda: False,
                what=lambda _: "no sample came",
            )
        except Exception:  # noqa: BLE001  # whatever a data set raises, the trials will name it
            return False
        finally:
            worker._worker_info = before
    return observed.asked
