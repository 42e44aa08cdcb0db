"""The settings that fit a loader: remembered, or found by a few trials."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import LoaderError
from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.load.machine import Machine, read_machine
from lightning_feed.load.picklable import why_not_picklable
from lightning_feed.load.recommend import PINNING_DEVICES
from lightning_feed.load.rounds import RoundLimits
from lightning_feed.load.tuning.feasible import IMPORT_S, Feasible, read_open_files
from lightning_feed.load.tuning.search import Found, Offer, Search
from lightning_feed.load.tuning.sharding import divides_itself
from lightning_feed.load.tuning.store import Store, key_of
from lightning_feed.load.tuning.trials import not_a_loader, run_trial
from lightning_feed.load.tuning.values import Goal, Kind, Setting, Trial, Tuned

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
        store: where results are remembered; None remembers nothing. See :class:`Store`.
        fresh: look anew, whatever is remembered.
        on_trial: told of each trial when it is over.
        machine: its limits; None reads them.
        clock: seconds.

    Raises:
        LoaderError: it is no DataLoader, gives no batch, or hangs without workers.
        DatasetError: the data set raises; the message names the sample.
    """
    wrong = not_a_loader(loader)
    if wrong is not None:
        raise wrong
    run = _Run(loader, goal or Goal(), machine or read_machine(), on_trial, clock)
    key = key_of(loader, run.goal, run.machine, _version()) if store is not None else {}
    if store is not None and not fresh:
        kept = run.check(store.load(key))
        if kept is not None:
            return kept
    tuned = run.search()
    if store is not None:
        store.save(key, tuned)
    return tuned


def _version() -> str:
    """Of this package as installed; empty where it is only on the path."""
    try:
        return metadata.version("lightning-feed")
    except metadata.PackageNotFoundError:
        return ""


class _Run:
    """One tuning."""

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
        context: Any = getattr(loader, "multiprocessing_context", None)
        self._method = context.get_start_method() if context is not None else machine.start_method
        self._feasible = Feasible(
            machine=machine,
            files=read_open_files(),
            local_ranks=goal.local_ranks,
            background=getattr(loader, "background", 0),
            start_method=self._method,
            most_started=None if self._method == "fork" else self._most_started(),
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
        found = search.found()
        if found is None:
            raise LoaderError("No setting of the loader could be run: " + "; ".join(self._failures(search)))
        return self._tuned(found, search)

    def _try(self, setting: Setting, limits: RoundLimits) -> Trial:
        trial = run_trial(self.loader, setting, limits, copies=self.goal.local_ranks, clock=self._clock)
        if self._on_trial is not None:
            self._on_trial(trial)
        return trial

    def _offer(self) -> Offer:
        cpus = (self.machine.cpu_time or self.machine.usable_cpus) / self.goal.local_ranks
        most = self.goal.most_workers
        if most is None:
            most = max(MOST_WORKERS, int(2 * cpus)) if self.goal.local_ranks == 1 else max(4, int(2 * cpus))
        kinds: tuple[Kind, ...] = ("process",)
        stream = isinstance(self.loader.dataset, IterableDataset)
        if isinstance(self.loader, FeedLoader) and not stream and most:
            kinds = ("process", "thread")
        why = self._why_no_processes()
        if why:
            self._notes.append(f"no worker processes: {why}")
            kinds = kinds[1:]
        if cpus < 1:
            self._notes.append(f"there is {cpus:.2g} of a CPU for each rank ({self.machine.cpu_reason})")
        if stream and most > 1 and self.loader.num_workers < 2 and not divides_itself(self.loader):
            most = 1
            self._notes.append(
                "at most one worker, since the iterable data set does not ask torch.utils.data.get_worker_info() which "
                "part is its own: each worker would give all samples"
            )
        pin = self.goal.device_type in PINNING_DEVICES
        return Offer(cpus=cpus, most_workers=most if kinds else 0, kinds=kinds, pin_memory=pin)

    def _most_started(self) -> int:
        """As many as there are CPUs, or as start within a quarter of the budget."""
        cpus = (self.machine.cpu_time or self.machine.usable_cpus) / self.goal.local_ranks
        return max(1, int(cpus), int(cpus * self.goal.budget_s / 4 / IMPORT_S))

    def _why_no_processes(self) -> str:
        if self._method == "fork":
            return ""
        for name in ("dataset", "collate_fn", "worker_init_fn"):
            why = why_not_picklable(getattr(self.loader, name))
            if why is not None:
                return f"its {name} cannot be sent to processes that are started by {self._method!r}: {why}"
        return ""

    def _tuned(self, found: Found, search: Search) -> Tuned:
        trial, demand = found.trial, self.goal.demand_per_s
        persistent, why = self._persistent(trial)
        starved = None if demand is None else max(0.0, 100 * (1 - search.effective(trial) / demand))
        failures = [f"not taken: {failure}" for failure in self._failures(search)[-1:]]
        return Tuned(
            setting=replace(trial.setting, persistent_workers=persistent),
            reason="; ".join([found.reason, *why, *self._notes, *failures]),
            trials=tuple(search.trials),
            rejected=tuple(search.rejected),
            demand_per_s=demand,
            batch_size=self.loader.batch_size,
            batches_per_s=trial.batches_per_s,
            starved_pct=starved,
            options=found.options,
            seconds=self._clock() - self._began,
        )

    def _persistent(self, trial: Trial) -> tuple[bool, list[str]]:
        """Whether workers live on from epoch to epoch, and why."""
        if not trial.setting.num_workers or trial.setting.workers == "thread" or not self.goal.may_persist:
            return False, []
        try:
            batches: int | None = len(self.loader)
        except (TypeError, NotImplementedError):
            batches = None
        if batches is None or not trial.start_s or not trial.batches_per_s:
            return True, ["workers live on from epoch to epoch, since the length of one is not known"]
        epoch_s = batches / trial.batches_per_s
        if self.goal.demand_per_s is not None:
            epoch_s = max(epoch_s, batches / self.goal.demand_per_s)
        if trial.start_s <= _START_SHARE * epoch_s:
            return False, [f"workers start anew for each epoch, which takes {trial.start_s:.2g} of {epoch_s:.3g} s"]
        return True, [f"workers live on, since starting them takes {trial.start_s:.2g} s, and an epoch {epoch_s:.3g} s"]

    @staticmethod
    def _failures(search: Search) -> list[str]:
        return [
            f"num_workers={trial.setting.num_workers} ({trial.setting.workers}): {trial.infeasible}"
            for trial in search.trials
            if trial.infeasible
        ]
