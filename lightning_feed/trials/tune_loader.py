"""Tuning a loader by trials, and the results of earlier runs of the same program."""

import hashlib
import json
import logging
import math
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from lightning_feed.errors import DatasetError, LoaderError, SettingsError
from lightning_feed.extras import installed_version
from lightning_feed.load.child import NoAnswer
from lightning_feed.load.kinds import AnyDataset, Batch
from lightning_feed.load.order import size_of
from lightning_feed.load.rehearsal import Rehearsal
from lightning_feed.load.settings import PINNING_DEVICES, REGISTERING_DEVICES, Setting
from lightning_feed.load.slot_loaders import may_use_slots, uses_slots
from lightning_feed.load.worker import why_not_sent
from lightning_feed.machine.limits import Machine, cpu_model, read_machine
from lightning_feed.machine.private_files import cache_folder, read_json, write_json
from lightning_feed.measure.cpu_time import OtherPrograms
from lightning_feed.measure.measurements import OTHERS_PCT
from lightning_feed.trials.cloning import background_of
from lightning_feed.trials.search import (
    ALIKE,
    UNLIKE,
    Choice,
    OutOfTime,
    Space,
    Trial,
    find_setting,
    start_share_s,
)
from lightning_feed.trials.time_left import TimeLeft
from lightning_feed.trials.training_work import TrainingWork
from lightning_feed.trials.trial import TrialLimits, limits_of, run_trial
from lightning_feed.wording import throughput

logger = logging.getLogger(__name__)

MOST_WORKERS = 16
"""Largest number of workers to try on a machine with few CPUs: loaders that wait for storage use more workers than
CPUs."""
_WORKERS_PER_CPU = 2
"""Largest number of workers to try for each CPU, if that is more than ``MOST_WORKERS`` in all."""
_PATIENCE = 20
"""A loader is taken to hang if a batch takes longer than this many times the longest step so far."""
_LEAST_PATIENCE_S = 5.0
_FIRST_TRIAL_S = 3.0
"""Seconds for the first trial, even if the budget is smaller."""
_FIRST_PATIENCE_S = 60.0
"""Seconds to wait for the first trial: spawned workers may take long to import."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of tuning a loader."""

    work: TrainingWork = field(default_factory=TrainingWork)
    """The work of a training step. The default finds the fastest loader."""
    model: str = ""
    """Class and size of the model. Results are valid for this model only."""
    device_type: str = "cpu"
    """Type of the training device."""
    local_ranks: int = 1
    """Training processes on this machine, all of which load at the same time."""
    most_workers: int | None = None
    """Largest number of workers to try; None for as many as CPUs, memory and /dev/shm allow."""
    in_slots: bool = False
    """True if even worker processes of torch's own DataLoader may leave their batches in slots in training."""
    budget_s: float = 30.0
    """Seconds for the trials. After that time no trial runs."""
    time_left: TimeLeft | None = None
    """The rest of the run, from which a shorter budget follows; None if the result is for later runs."""
    own_step_s: float | None = None
    """Time of a step within an epoch that training has measured with the user's setting, in seconds; None if none."""
    steps_per_epoch: float = math.inf
    """Steps of an epoch, at whose beginning workers start. Infinite if their start does not count."""

    def __post_init__(self) -> None:
        if not _is_positive(self.budget_s):
            raise SettingsError(f"budget_s={self.budget_s!r} is not valid. Use a number of seconds above 0.")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The setting of a loader with which training is fastest, and the trials by which it was chosen."""

    setting: Setting
    """The setting to use."""
    own: Setting
    """The user's setting."""
    in_place: Setting | None = None
    """The best setting with batches in place, if the user's worker processes do not leave them in slots, and training
    itself has not compared the two yet; else None."""
    without_workers: Setting | None = None
    """The user's setting without workers, if only training itself can tell whether it is faster: see
    :meth:`_Run._without_workers`."""
    reason: str
    """The reason for the setting, in one sentence."""
    trials: tuple[Trial, ...]
    """All trials, in the order in which their settings were first tried."""
    work: TrainingWork = field(default_factory=TrainingWork)
    """The imitated work of a training step. Without work, a step is the loading of a batch."""
    batch_size: int | None = None
    whole: bool = True
    """True if the search was conclusive, not ended by time, and not disturbed by other programs. Only such results are
    stored."""
    others_pct: float = 0.0
    """Percentage of the CPUs that other programs used during the trials."""
    out_of_time: bool = False
    """True if time ended the search."""
    inconclusive: bool = False
    """True if nothing follows from the trials: they did not imitate training, or their turns disagree."""
    remembered: bool = False
    """True if an earlier run of the same program found the setting."""
    seconds: float = 0.0
    """Seconds of tuning, with the rehearsal."""
    trained_ms: tuple[float, float] | None = None
    """Milliseconds of a step of training itself, with the user's setting and with another one that was tried there;
    None if none was."""

    def trial_of(self, setting: Setting) -> Trial | None:
        """Return the trial with the workers of a setting; None if these were not tried, or could not run."""
        wanted = _what_is_tried(setting)
        return next((trial for trial in self.trials if _what_is_tried(trial.setting) == wanted and trial.steps_s), None)

    def with_start_ms(self, setting: Setting, step_ms: float) -> float:
        """Add the share of a step in the start of an epoch's workers, as far as trials have shown it, in ms."""
        trial = self.trial_of(setting)
        return step_ms + (0.0 if trial is None else 1e3 * trial.start_share_s)

    @property
    def step_s(self) -> float | None:
        """Time of a training step with the chosen setting, in the trials."""
        trial = self.trial_of(self.setting)
        if trial is None:
            return None
        return trial.step_s

    def in_words(self, trial: Trial) -> str:
        """Return the result of a trial: a step time, or the rate of the loader alone."""
        if not trial.steps_s:
            return f"could not run: {trial.infeasible}"
        if self.work.step_s > 0:
            return f"{1e3 * trial.step_s:.3g} ms a step"
        return throughput(1 / trial.step_s, self.batch_size)

    def __repr__(self) -> str:
        return f"<Tuned: {self.setting}; {self.reason}>"

    def _repr_html_(self) -> str:
        """Return the result as HTML, for a notebook."""
        rows = [
            f"<tr><td>{escape(str(trial.setting))}</td><td>{escape(self.in_words(trial))}</td></tr>"
            for trial in self.trials
        ]
        return f"<p><b>{escape(str(self.setting))}</b><br>{escape(self.reason)}</p><table>{''.join(rows)}</table>"


def _what_is_tried(setting: Setting) -> Setting:
    """Return a setting with default values for ``pin_memory`` and ``persistent_workers``, which no trial changes."""
    return replace(setting, pin_memory=False, persistent_workers=False)


def tune_loader(  # noqa: PLR0913  # all but the loader and its goal are by name, and have a default
    loader: DataLoader[Batch],
    goal: Goal | None = None,
    *,
    rehearsal: Rehearsal | None = None,
    on_trial: Callable[[Trial], object] = lambda _: None,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.perf_counter,
    stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Find the setting of a loader with which training is fastest. The loader itself is not iterated.

    Args:
        loader: a DataLoader or a FeedLoader with a map-style dataset: see :func:`lightning_feed.in_fit.goal.why_fixed`.
        goal: the work of training, and limits; None for a Goal with its defaults.
        rehearsal: the rehearsal of the loader. After a refusal its number of workers stays. None if samples are known
            to stay the same.
        on_trial: called with each finished trial.
        machine: limits of this machine; None to read them now.
        clock: returns the time in seconds.
        stop: returns True if the trials are to end now.

    Raises:
        Stopped: ``stop`` returned True.
        LoaderError: the loader is empty, or hangs without workers, or no setting could run.
        DatasetError: the dataset raises an error.
    """
    rehearsal = rehearsal or Rehearsal()
    return _Run(loader, goal or Goal(), machine or read_machine(), rehearsal, on_trial, clock, stop).search()


class _Run:
    """The trials of one loader."""

    def __init__(  # noqa: PLR0913  # those of tune_loader
        self,
        loader: DataLoader[Batch],
        goal: Goal,
        machine: Machine,
        rehearsal: Rehearsal,
        on_trial: Callable[[Trial], object],
        clock: Callable[[], float],
        stop: Callable[[], bool],
    ) -> None:
        self.loader = loader
        self.goal = goal
        self.machine = machine
        self._rehearsal = rehearsal
        self._on_trial = on_trial
        self._clock = clock
        self._stop = stop
        self._began_s = clock() - min(rehearsal.seconds, self.goal.budget_s / 2)  # the rest of the time is for trials
        self._setting_limits = limits_of(self.loader, machine, goal.local_ranks)
        self._trials: list[Trial] = []
        self._slowest_s = 0.0

    def search(self) -> Tuned:
        """Run trials until the search or the budget ends."""
        own = Setting.of(self.loader)
        others = OtherPrograms()
        cpus = (self.machine.cpu_time or self.machine.usable_cpus) / self.goal.local_ranks
        why_none = why_not_sent(self.loader, self._setting_limits.start_method)
        in_place = uses_slots(self.loader) or (self.goal.in_slots and may_use_slots(self.loader))
        space = Space(
            own=own,
            cpus=cpus,
            most_workers=0 if why_none else self._most_workers(cpus),
            own_s=self.goal.own_step_s,
            copies=self.goal.device_type in REGISTERING_DEVICES,
            model_s=(self.goal.work.in_place if in_place else self.goal.work).step_s,
            in_place=in_place,
            number_stays=self._rehearsal.refusal is not None,
        )
        alone = self._alone(own)
        choice = find_setting(space, self._try)
        if choice is None:
            raise self._nothing_ran()
        others_pct = others.others_pct(self.machine.usable_cpus) or 0.0
        best_in_place = _best_in_place(choice.trials, own)
        return Tuned(
            setting=self._pinned(choice.setting, own),
            own=own,
            in_place=best_in_place and self._pinned(best_in_place, own),
            without_workers=self._without_workers(own, alone, choice),
            reason="; ".join([choice.reason, *self._limits_in_words(choice, why_none)]),
            trials=choice.trials,
            work=self.goal.work,
            out_of_time=not choice.finished,
            inconclusive=choice.inconclusive,
            batch_size=self.loader.batch_size,
            whole=choice.finished and not choice.inconclusive and others_pct < OTHERS_PCT,
            others_pct=others_pct,
            seconds=self._clock() - self._began_s,
        )

    def _alone(self, own: Setting) -> Trial | None:
        """Try making batches without workers, if these may take CPUs from a model that computes on CPUs.

        Returns None if they take none from it, or if the trial fails.
        """
        if self.goal.own_step_s is None or not own.num_workers or self.goal.device_type != "cpu":
            return None
        if self._rehearsal.refusal is not None:
            return None
        setting = own.with_workers(0)
        limits = TrialLimits(max_s=max(1.0, self._budget_s() / 4), left_s=self._budget_s())
        try:
            ranks = self.goal.local_ranks
            return run_trial(self.loader, setting, TrainingWork(), limits, ranks=ranks, stop=self._stop)
        except (OutOfTime, DatasetError, LoaderError):
            return None

    def _without_workers(self, own: Setting, alone: Trial | None, choice: Choice) -> Setting | None:
        """Return the user's setting without workers, if only training can tell whether it is faster.

        Each operation of the model waits for all its threads, so for the one that lacks a CPU (see
        ``benchmarks/threads.py``). How long steps take without that, no imitation tells. Training may compare if making
        a batch takes clearly less time than a step does now, with its share of the start of workers.
        """
        if alone is None or self.goal.own_step_s is None:
            return None
        starts_s = [trial.start_share_s for trial in choice.trials if trial.setting == own and trial.steps_s]
        own_s = self.goal.own_step_s + max(starts_s, default=0.0)
        return alone.setting if UNLIKE * alone.running_s < own_s else None

    def _nothing_ran(self) -> LoaderError:
        failures = [f"{trial.setting}: {trial.infeasible}" for trial in self._trials if trial.infeasible]
        if not failures:
            return NoAnswer(f"No setting of the loader could be run: no trial ended within {self.goal.budget_s:g} s")
        return LoaderError("No setting of the loader could be run: " + "; ".join(failures))

    def _limits_in_words(self, choice: Choice, why_none: str) -> Iterator[str]:
        """Yield the limits of the search, for the reason."""
        if self._rehearsal.refusal is not None:
            yield f"other numbers of workers were not tried: {self._rehearsal.refusal}"
        if why_none:
            yield f"no worker processes: {why_none}"
        infeasible = [trial for trial in choice.trials if trial.infeasible]
        if infeasible:
            most = infeasible[-1]
            yield f"num_workers={most.setting.num_workers} could not run: {str(most.infeasible).rstrip('.')}"
        if choice.setting.in_place and self.goal.work.copy_s:
            copy = f"the copy to the device, {1e3 * self.goal.work.copy_s:.3g} ms of a step"
            yield f"in place, {copy}, counts as hidden until training itself has shown it"

    def _pinned(self, chosen: Setting, own: Setting) -> Setting:
        """Return the chosen setting, with ``pin_memory``, which no trial changes, set as well."""
        if chosen == own:
            return chosen
        return replace(chosen, pin_memory=own.pin_memory or self.goal.device_type in PINNING_DEVICES)

    def _try(self, setting: Setting) -> Trial:
        left_s = self._budget_s() - (self._clock() - self._began_s)
        if self._trials and left_s <= 0:
            raise OutOfTime
        if not self._trials:
            left_s = max(_FIRST_TRIAL_S, left_s)
        broken_limit = self._setting_limits.broken(setting, self._trials)
        if broken_limit:
            return Trial(setting=setting, infeasible=broken_limit)
        patience_s = _FIRST_PATIENCE_S
        if self._slowest_s:
            patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * self._slowest_s)
        limits = TrialLimits(max_s=max(1.0, self._budget_s() / 4), patience_s=patience_s, left_s=left_s)
        ranks = self.goal.local_ranks
        trial = run_trial(self.loader, setting, self.goal.work, limits, ranks=ranks, stop=self._stop)
        trial = replace(trial, start_share_s=start_share_s(trial, self.goal.steps_per_epoch))
        self._trials.append(trial)
        if trial.steps_s:
            self._slowest_s = max(self._slowest_s, trial.step_s * max(1, setting.num_workers), trial.start_s or 0.0)
        self._on_trial(trial)
        return trial

    def _budget_s(self) -> float:
        """Return the seconds for all trials, which grow with the gain of the fastest setting so far."""
        if self.goal.time_left is None:
            return self.goal.budget_s
        gain = 0.0
        if self._trials and self._trials[0].steps_s:
            gain = 1 - min(trial.step_s for trial in self._trials) / self._trials[0].step_s
        return min(self.goal.budget_s, self.goal.time_left.budget_s(gain))

    def _most_workers(self, cpus: float) -> int:
        if self.goal.most_workers is not None:
            return self.goal.most_workers
        return max(MOST_WORKERS // self.goal.local_ranks, int(_WORKERS_PER_CPU * cpus), 1)


def _best_in_place(trials: Sequence[Trial], own: Setting) -> Setting | None:
    """Return the smallest of the fastest settings with batches in place: see :attr:`Tuned.in_place`. None if none was
    tried."""
    if own.in_place or not own.num_workers:
        return None
    tried = [trial for trial in trials if trial.setting.in_place and trial.steps_s]
    limit_s = ALIKE * min((trial.step_s for trial in tried), default=0.0)
    alike = [trial.setting for trial in tried if trial.step_s <= limit_s]
    return min(alike, key=lambda setting: (setting.num_workers, setting.prefetch_factor or 0), default=None)


# --- remembered between runs ------------------------------------------------------------------------------------------

Key: TypeAlias = dict[str, Any]
"""The conditions under which a result is valid, by name, in the form written to the result's file."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NESTED = 6
_MEMORY_STEP = 4.0
"""Sizes within this factor are in one class, since free memory changes all the time."""


class Store:
    """A folder of results. If the folder cannot be read or written, it counts as empty, without an error.

    Args:
        folder: the folder; None for ``tuning`` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_folder() / "tuning"

    def load(self, key: Key) -> Tuned | None:
        """Load the result saved under ``key``; None if there is none."""
        path = self._path(key)
        document = read_json(path)
        if not document:
            return None
        try:
            return _tuned(document["tuned"])
        except (ValueError, KeyError, TypeError) as error:  # content of another kind
            logger.debug("The stored tuning result in %s is not used (%s): tuning starts again.", path, error)
            return None

    def save(self, key: Key, tuned: Tuned, *, final: bool = False) -> None:
        """Save a result under ``key``, replacing any earlier one.

        A final result also holds for a run whose loader has the setting by then. Batches come in place by a callback or
        a data module only, not by a loader's arguments.

        Args:
            key: the conditions of the result.
            tuned: the result.
            final: True if training itself has compared, or need not.
        """
        self._write(key, tuned)
        if final and tuned.setting != tuned.own and not tuned.setting.in_place:
            pasted = replace(tuned, own=tuned.setting, in_place=None)
            self._write(key | {"own": asdict(tuned.setting)}, pasted)

    def _write(self, key: Key, tuned: Tuned) -> None:
        path = self._path(key)
        try:
            write_json(path, {"key": key, "tuned": asdict(tuned)})
        except OSError as error:
            logger.info("The tuning result could not be stored in %s: %s. The next run tunes again.", path, error)

    def may_know(self, key: Key) -> bool:
        """Return True if there is a result that matches in all but the samples, which only a rehearsal can compare."""
        return any(self.folder.glob(f"{_digest(_without_samples(key))}-*.json"))

    def _path(self, key: Key) -> Path:
        return self.folder / f"{_digest(_without_samples(key))}-{_digest(key)}.json"


def _without_samples(key: Key) -> Key:
    """Return the conditions that need no rehearsal."""
    return {name: value for name, value in key.items() if name not in ("samples", "rehearsed")}


def _digest(key: Key) -> str:
    text = json.dumps(key, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def key_of(loader: DataLoader[Batch], goal: Goal, machine: Machine, rehearsal: Rehearsal) -> Key:
    """Return the conditions under which a result is valid: machine, samples, batch size, model, versions and goal.

    The time of a step is not one of these conditions, because it is known only after some steps.
    """
    return {
        "machine": {
            "host": socket.gethostname(),
            "cpu": cpu_model(),
            "cpus": machine.cpu_time or machine.usable_cpus,
            "memory": _class_of(machine.available_memory_bytes, _MEMORY_STEP),
            "shm": _class_of(machine.free_shm_bytes, _MEMORY_STEP),
            "threads": torch.get_num_threads(),
        },
        "data": _data(loader),
        "samples": rehearsal.fingerprint,
        "rehearsed": rehearsal.refusal is None,
        "batch_size": loader.batch_size,
        "batches": _described(loader.batch_sampler),
        "collate": _described(loader.collate_fn),
        "loader": [_name(loader), background_of(loader), _described(loader.multiprocessing_context)],
        "own": asdict(Setting.of(loader)),
        "versions": [installed_version("lightning-feed"), str(torch.__version__), platform.python_version()],
        "model": goal.model,
        "goal": [
            goal.work.step_s > 0,
            goal.local_ranks,
            goal.device_type,
            goal.most_workers,
            goal.in_slots,
        ],
    }


def _tuned(saved: dict[str, Any]) -> Tuned:
    """Return the result in a saved document."""
    values = dict(saved)
    values["setting"] = Setting(**saved["setting"])
    values["own"] = Setting(**saved["own"])
    values["in_place"] = saved["in_place"] and Setting(**saved["in_place"])
    values["without_workers"] = None
    values["work"] = TrainingWork(**saved["work"])
    values["trials"] = tuple(map(_trial, saved["trials"]))
    values["trained_ms"] = saved["trained_ms"] and tuple(saved["trained_ms"])
    values["remembered"] = True
    return Tuned(**values)


def _trial(saved: dict[str, Any]) -> Trial:
    return Trial(**saved | {"setting": Setting(**saved["setting"]), "steps_s": tuple(saved["steps_s"])})


def _data(loader: DataLoader[Batch]) -> list[list[object]]:
    """Return the class, length and transforms of a dataset, and of the datasets inside it."""
    dataset: AnyDataset = loader.dataset
    parts: list[list[object]] = []
    while dataset is not None and len(parts) < _NESTED:
        values = {name: getattr(dataset, name, None) for name in ("transform", "transforms", "target_transform")}
        transforms = {name: _described(value) for name, value in values.items() if value is not None}
        parts.append([_name(dataset), size_of(dataset), transforms])
        dataset = getattr(dataset, "dataset", None)
    return parts


def _name(thing: object) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _described(thing: object) -> str:
    """Return an object's name or repr, without parts that differ between runs."""
    if thing is None:
        return ""
    name = getattr(thing, "__qualname__", None)
    if name:
        return f"{getattr(thing, '__module__', '')}.{name}"
    return _ADDRESS.sub("", repr(thing))[:2000]


def _class_of(size: float | None, step: float) -> int | None:
    """Return a class number that is stable under small changes of ``size``; None if the size is unknown or 0."""
    if size is None or size <= 0:
        return None
    return math.floor(math.log(size, step))
