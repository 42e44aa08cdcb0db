"""Tuning a loader: settings from an earlier run, or found by a few trials."""

import hashlib
import json
import logging
import math
import platform
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import LoaderError
from lightning_feed.extras import installed_version
from lightning_feed.load.kinds import AnyDataset, Batch
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.machine import Machine, read_machine
from lightning_feed.load.order import size_of
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import PINNING_DEVICES
from lightning_feed.load.streams import divides_among_workers
from lightning_feed.load.worker import why_not_sent
from lightning_feed.storage.system import cache_folder, read_json, read_text, write_json
from lightning_feed.trials.cloning import RoundLimits, background_of, watchdog
from lightning_feed.trials.search import Goal, Offer, Search, Tuned
from lightning_feed.trials.trial import Kind, Setting, Trial, feasible, leaf_sizes, run_trial

logger = logging.getLogger(__name__)

MOST_WORKERS = 16
"""Largest number of workers to try with one local rank, unless CPUs or the user allow another number. Loaders that wait
for storage use more workers than CPUs."""
SAME_WITHIN = 0.10
"""Largest deviation, as a share, from a stored rate for the stored setting to be trusted."""
_MEASURE_S = 2.0
_CHECK_S = 1.0
_SILENT_S = 60.0
"""Seconds without a batch before a loader counts as hanging. Spawned workers may take long to import."""
IMPORT_S = 2.5
"""CPU time to import torch in a process that is not forked: 2.2 to 2.9 s with torch 2.15 on an AMD EPYC."""


def tune_loader(  # noqa: PLR0913  # all but the loader and its goal are by name, and have a default
    loader: DataLoader[Batch],
    goal: Goal | None = None,
    *,
    store: "Store | None" = None,
    fresh: bool = False,
    on_trial: Callable[[Trial], object] = lambda _: None,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Find the settings for a loader, in ``goal.max_trials`` trials and ``goal.budget_s`` seconds.

    Iterates clones of the loader, not the loader itself, and ends their workers. Restores samplers, generators and the
    global random state.

    Args:
        loader: any DataLoader, or a FeedLoader, for which threads are tried too.
        goal: target and limits. None: find the fastest setting.
        store: the store of results. None: store nothing.
        fresh: ignore stored results.
        on_trial: called with each finished trial.
        machine: limits of this machine. None: read now.
        clock: returns the time in seconds.

    Raises:
        LoaderError: the loader is empty, or hangs without workers.
        DatasetError: the data set raises an error; the message names the sample.
    """
    run = _Run(loader, goal or Goal(), machine or read_machine(), on_trial, clock)
    if store is None:
        return run.search()
    key = key_of(loader, run.goal, run.machine, installed_version("lightning-feed") or "")
    tuned = None if fresh else run.check(store.load(key))
    if tuned is None:
        tuned = run.search()
        store.save(key, tuned)
    return tuned


def remember(loader: DataLoader[Batch], goal: Goal, tuned: Tuned, taken: Setting) -> None:
    """Store another setting as the result because it trained better, if it was among the trials.

    Args:
        loader: the loader that was tuned.
        goal: target and limits.
        tuned: result of the trials.
        taken: the better setting.
    """
    trial = next((one for one in tuned.trials if one.setting == taken), None)
    if trial is not None and trial.batches_per_s is not None:
        kept = replace(tuned, setting=taken, batches_per_s=trial.batches_per_s, reason="steps were shorter with it")
        Store().save(key_of(loader, goal, read_machine(), installed_version("lightning-feed") or ""), kept)


class _Run:
    """A tuning run for one loader."""

    def __init__(
        self,
        loader: DataLoader[Batch],
        goal: Goal,
        machine: Machine,
        on_trial: Callable[[Trial], object],
        clock: Callable[[], float],
    ) -> None:
        self.loader = loader
        self.goal = goal
        self.machine = machine
        self._on_trial = on_trial
        self._clock = clock
        self._began = clock()
        self._notes: list[str] = []
        self._cpus = (machine.cpu_time or machine.usable_cpus) / goal.local_ranks
        self._feasible = feasible(loader, machine, goal.local_ranks)
        self._method = self._feasible.start_method

    def check(self, kept: Tuned | None) -> Tuned | None:
        """Return the stored result, if its setting is still possible and as fast as before."""
        if kept is None or kept.batches_per_s is None or self._feasible.broken(kept.setting, kept.trials):
            return None
        trial = self._try(kept.setting, RoundLimits(min_s=_CHECK_S, max_s=self.goal.budget_s, silent_s=_SILENT_S))
        if trial.batches_per_s is None or abs(trial.batches_per_s / kept.batches_per_s - 1) > SAME_WITHIN:
            logger.info("The stored loader setting no longer has the stored rate, so the loader is tuned again.")
            return None
        own = [one for one in kept.trials if one.setting == self.goal.given != kept.setting]
        return replace(kept, trials=(trial, *own), remembered=True, seconds=self._clock() - self._began)

    def search(self) -> Tuned:
        """Run trials until the search or the budget ends."""
        search = Search(self._offer(), self.goal, self._feasible.broken)
        while (setting := search.next_setting()) is not None:
            left = self.goal.budget_s - (self._clock() - self._began)
            if search.trials and left < _MEASURE_S / 2:
                self._notes.append(f"the budget of {self.goal.budget_s:g} s ended the search")
                break
            measure = min(_MEASURE_S, self.goal.budget_s / 8)
            longest = max(measure, left if not search.trials else left / 2)
            search.take(self._try(setting, RoundLimits(min_s=measure, max_s=longest, silent_s=_SILENT_S)))
        failed = [trial for trial in search.trials if trial.infeasible]
        failures = [
            f"num_workers={one.setting.num_workers} ({one.setting.workers}): {one.infeasible}" for one in failed
        ]
        found = search.found()
        if found is None:
            raise LoaderError("No setting of the loader could be run: " + "; ".join(failures))
        reason = "; ".join([found.reason, *self._notes, *(f"not taken: {failure}" for failure in failures[-1:])])
        return replace(found, reason=reason, batch_size=self.loader.batch_size, seconds=self._clock() - self._began)

    def _try(self, setting: Setting, limits: RoundLimits) -> Trial:
        trial = run_trial(self.loader, setting, limits, copies=self.goal.local_ranks)
        self._on_trial(trial)
        return trial

    def _offer(self) -> Offer:
        """Return the settings that the loader and the machine allow. Notes name the excluded ones."""
        stream = isinstance(self.loader.dataset, IterableDataset)
        threads = isinstance(self.loader, FeedLoader) and self.goal.threads and not stream
        kinds: tuple[Kind, ...] = ("process", "thread") if threads else ("process",)
        if why := why_not_sent(self.loader, self._method):
            self._notes.append(f"no worker processes: {why}")
            kinds = kinds[1:]
        if self._cpus < 1:
            self._notes.append(f"there is {self._cpus:.2g} of a CPU for each rank ({self.machine.cpu_reason})")
        most = self._most_workers()
        if stream and most > 1 and not divides_among_workers(self.loader):
            most = 1
            self._notes.append(
                "at most one worker, because the IterableDataset may not divide its samples among workers: each worker "
                "could give all samples"
            )
        given = self.goal.given
        pin = self.goal.device_type in PINNING_DEVICES if given is None else given.pin_memory
        return Offer(cpus=self._cpus, most_workers=most, kinds=kinds, pin_memory=pin, may_persist=self.goal.may_persist)

    def _most_workers(self) -> int:
        most = self.goal.most_workers
        if most is None:
            most = max(MOST_WORKERS if self.goal.local_ranks == 1 else 4, int(2 * self._cpus))
        if self._method != "fork":  # one per CPU, but no more than start within a quarter of the budget
            most = min(most, max(1, int(self._cpus), int(self._cpus * self.goal.budget_s / 4 / IMPORT_S)))
        return most


# --- remembered between runs ------------------------------------------------------------------------------------------

_VERSION = 1
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SAMPLE_S = 10.0
_NESTED = 6
_DEMAND_STEP = 1.25
_MEMORY_STEP = 4.0
"""Sizes within this factor are in one class, since free memory changes all the time."""


class Store:
    """A folder of results. If it is unreadable or unwritable, it is treated as missing, without an error.

    Args:
        folder: the folder. None: ``tuning`` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_folder() / "tuning"

    def load(self, key: dict[str, Any]) -> Tuned | None:
        """Load the result saved under ``key``. None if there is no result."""
        path = self._path(key)
        kept = read_json(path)
        try:
            if kept and (kept["version"] != _VERSION or kept["key"] != key):
                raise ValueError("it is from another version")
            return _tuned(kept["tuned"]) if kept else None
        except (ValueError, KeyError, TypeError) as error:  # content of another kind
            logger.debug("The stored tuning result in %s is not used (%s): tuning starts again.", path, error)
            return None

    def save(self, key: dict[str, Any], tuned: Tuned) -> None:
        """Save a result under ``key``, replacing any earlier one."""
        path = self._path(key)
        try:
            write_json(path, {"version": _VERSION, "key": key, "tuned": asdict(tuned)})
        except OSError as error:
            logger.info("The tuning result could not be stored in %s: %s. The next run tunes again.", path, error)

    def _path(self, key: dict[str, Any]) -> Path:
        text = json.dumps([_VERSION, key], sort_keys=True)
        return self.folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def key_of(loader: DataLoader[Batch], goal: Goal, machine: Machine, version: str) -> dict[str, Any]:
    """Return the conditions under which a result is valid: machine, data set, batch size, versions and goal.

    Loads one sample for its shape. If that takes long or fails, the key has no shape.

    Args:
        loader: the loader to tune.
        goal: target and limits.
        machine: limits of the machine.
        version: version of this package.
    """
    return {
        "machine": {
            "host": socket.gethostname(),
            "cpu": _cpu_model(),
            "cpus": machine.cpu_time or machine.usable_cpus,
            "memory": _class_of(machine.available_memory_bytes, _MEMORY_STEP),
            "shm": _class_of(machine.free_shm_bytes, _MEMORY_STEP),
        },
        "data": _data(loader),
        "batch_size": loader.batch_size,
        "batches": _described(loader.batch_sampler),
        "collate": _described(loader.collate_fn),
        "loader": [_name(loader), background_of(loader), _described(loader.multiprocessing_context)],
        "versions": [version, str(torch.__version__), platform.python_version()],
        "goal": [
            _class_of(goal.demand_per_s, _DEMAND_STEP),
            goal.local_ranks,
            goal.device_type,
            goal.most_workers,
            False,  # earlier versions had an option to yield batches in another order
            goal.may_persist,
            *([] if goal.threads else ["no threads"]),
            *([] if goal.given is None else [vars(goal.given)]),
        ],
    }


def _tuned(kept: dict[str, Any]) -> Tuned:
    for gone in [kept, *kept["trials"]]:  # written by earlier versions
        gone.pop("options", None), gone.pop("head_of_line_pct", None)
    kept["setting"] = Setting(**kept["setting"])
    kept["trials"] = tuple(Trial(**{**one, "setting": Setting(**one["setting"])}) for one in kept["trials"])
    kept["rejected"] = tuple((Setting(**setting), why) for setting, why in kept["rejected"])
    tuned = Tuned(**kept)
    if not tuned.batches_per_s or tuned.settings.num_workers == "auto":  # `.settings` raises for impossible values
        raise ValueError(f"{tuned} cannot be used")
    return tuned


def _data(loader: DataLoader[Batch]) -> dict[str, Any]:
    dataset: AnyDataset = loader.dataset
    parts: list[list[object]] = []
    while dataset is not None and len(parts) < _NESTED:
        held = {name: getattr(dataset, name, None) for name in ("transform", "transforms", "target_transform")}
        transforms = {name: _described(one) for name, one in held.items() if one is not None}
        parts.append([_name(dataset), size_of(dataset), transforms])
        dataset = getattr(dataset, "dataset", None)
    return {"parts": parts, "sample": _sample(loader)}


def _sample(loader: DataLoader[Batch]) -> list[Any] | None:
    """Return the sizes of the first sample's tensors. None if it cannot be loaded."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        with preserve_state(loader):
            sample = watchdog(
                lambda _: loader.dataset[0], silent_s=_SAMPLE_S, unblock=lambda: False, what=lambda _: "no sample came"
            )
    except Exception as error:  # noqa: BLE001  # the trials will report any error of the data set
        logger.debug("The first sample could not be made for the key of the result: %s", error)
        return None
    return leaf_sizes(sample)


def _name(thing: object) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _described(thing: object) -> str:
    """Return an object's name or repr, without parts that differ between runs."""
    if thing is None:
        return ""
    named = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', '')}.{named}" if named else _ADDRESS.sub("", repr(thing))[:2000]


def _class_of(size: float | None, step: float) -> int | None:
    """Return a class number that is stable under small changes of ``size``."""
    return None if size is None or size <= 0 else math.floor(math.log(size, step))


def _cpu_model() -> str:
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
