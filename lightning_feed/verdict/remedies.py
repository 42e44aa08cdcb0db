"""Remedies: the rules, the text to paste, and the choice of those to print."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_feed.load.machine import SHM_SHARE
from lightning_feed.load.settings import PINNING_DEVICES, TORCH_PREFETCH
from lightning_feed.measure.measurements import HookTime, LoopFacts, Measurements, Place
from lightning_feed.verdict import bounds
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Form, Remedy
from lightning_feed.verdict.shares import DATA_PCT, LOOP_WORDS, Shares, in_ms

PLACE = Place(words="your training DataLoader")
OUR_PLACE = Place(words="loader=LoaderSettings(...) of your data module", form="settings")
"""Places for loaders about which nothing more is known."""
_WRAPPED = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
"""Settings that ``wrap`` changes; others are set in the inner loader."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A run with its measurements, and the cause of each part of a step over its limit."""

    measured: Measurements
    shares: Shares
    causes: Mapping[Bottleneck, Cause]
    """The cause of each part of a step that is over its limit, or of the step itself if none is."""

    @property
    def facts(self) -> LoopFacts:
        """Facts of the run besides its times."""
        return self.measured.facts

    @property
    def data(self) -> Cause | None:
        """The cause of waiting for data; None if that is below its limit."""
        return self.causes.get("data")

    @property
    def step_with_start_ms(self) -> float:
        """Time of an epoch per step, with the time to its first batch if known."""
        batches = self.facts.batches_per_epoch
        start_s = self.measured.stats.epoch_start_s
        return self.shares.step_ms + (1e3 * start_s / batches if batches and start_s is not None else 0.0)

    @property
    def place(self) -> Place:
        """The place in the user's code that sets up the training loader."""
        if self.facts.place is None and not self.facts.ours:
            return replace(PLACE, words=f"your {LOOP_WORDS[self.facts.stage]} DataLoader")
        return self.facts.place or OUR_PLACE

    def can_set(self, name: str) -> bool:
        """True if a setting can be given at :attr:`place`."""
        if self.place.form == "callback":
            return name in ("num_workers", "prefetch_factor", "persistent_workers")
        return True

    def can_set_with_workers(self, name: str) -> bool:
        """True if a setting can be given where num_workers is given. On the command line, it needs a key of its own."""
        keys = dict(self.place.overrides)
        return name in keys if "num_workers" in keys else self.can_set(name)


# --- how a remedy is pasted ---------------------------------------------------------------------------------------


def loader_remedy(
    finding: Finding, why: str, step_ms: float | None, *, gain_pct: float | None = None, **settings: object
) -> Remedy:
    """A remedy that changes settings of the training loader. It is named after the first setting."""
    place, (name, value) = finding.place, next(iter(settings.items()))
    keys = dict(place.overrides)
    form: Form = place.form
    where = f"in {place.words}"
    code = ", ".join(f"{one}={given!r}" for one, given in settings.items())
    if form == "callback":
        code = "AutotuneCallback()"
        where = f"by AutotuneCallback in callbacks=[...] of the Trainer, or by LIGHTNING_FEED=tune, in {place.words}"
    if name in keys:
        form = "override"
        where = "on the command line"
        code = " ".join(f"{keys[one]}={json.dumps(given)}" for one, given in settings.items() if one in keys)
    elif form == "settings" and place.inner and name not in _WRAPPED:
        form = "arguments"
        where = f"in {place.inner}"
    now = vars(finding.facts).get(name)
    return Remedy(
        code=code,
        form=form,
        where=f"{name}: {'not set' if now is None else now} -> {value} {where}",
        why=why,
        least_step_ms=step_ms,
        most_gain_pct=gain_pct,
        changes=f"{name}={value!r}",
    )


def trainer_remedy(place: Place, name: str, now: object, value: object, **more: Any) -> Remedy:
    """A remedy that changes an argument of the Trainer; ``more``: its ``why`` and its bound."""
    form: Form = "override" if place.trainer_key else "trainer"
    return Remedy(
        code=f"{place.trainer_key}{name}={value}",
        form=form,
        where=f"{name}: {now} -> {value} {'on the command line' if place.trainer_key else 'in your Trainer'}",
        changes=f"{name}={value}",
        **more,
    )


def callback_remedy(
    place: Place, module: str, kind: str, setting: tuple[str, object, object] | None, **more: Any
) -> Remedy:
    """A remedy that adds a callback to the Trainer.

    Args:
        place: the loader's place, with the keys of a command line.
        module: module to import the class from.
        kind: name of the class.
        setting: its argument, as (name, old value, new value); None: no argument.
        more: as for :func:`trainer_remedy`, and ``changes``.
    """
    change = f"{setting[0]}: {setting[1]} -> {setting[2]} " if setting else ""
    given = f"{setting[0]}={setting[2]}" if setting else ""
    if place.trainer_key:
        key = f"{place.trainer_key}callbacks"
        code = f"{key}+={module}.{kind}" + (f" {key}.{given}" if given else "")
        return Remedy(code=code, form="override", where=f"{change}on the command line", **more)
    return Remedy(
        code=f"{kind}({given})",
        form="callback",
        where=f"{change}in callbacks=[...] of your Trainer, with `from {module} import {kind}`",
        **more,
    )


# --- the loader ---------------------------------------------------------------------------------------------------

_MADE_SLOWLY: tuple[Cause, ...] = ("no workers", "cpu", "cold reads", "waiting", "unknown")
MADE_ON_CPU: tuple[Cause, ...] = ("cpu", "no workers", "oversubscribed")


def more_workers(finding: Finding) -> Remedy | None:
    """Remedy: more workers, if training waits for batches that take time to make.

    Names the number that the trials chose. Without trials, names the smallest with which loading could keep up, at most
    one worker for each CPU. None for a stream that its workers do not divide among themselves, for a dataset that does
    not survive a fork, and if /dev/shm has no room for the batches.
    """
    number = workers_to_name(finding)
    if number is None:
        return None
    why = "more workers make more batches at once"
    kept: dict[str, Any] = {}
    if finding.facts.num_workers == 0:
        why = "batches are made while the model trains"
        kept = _kept_workers(finding)
    kept |= _pinned_with_workers(finding)
    if finding.measured.found.tried:
        return _tried_remedy(finding, why, kept)
    step_ms = bounds.with_workers(finding.measured, finding.shares, number)
    return loader_remedy(finding, why, step_ms, num_workers=number, **kept)


def workers_to_name(finding: Finding) -> int | None:
    """The number of workers that the report names; None if more workers are no remedy."""
    facts = finding.facts
    workers = facts.num_workers
    if workers is None or not facts.usable_cpus or facts.workers == "thread" or finding.data not in _MADE_SLOWLY:
        return None
    if not may_have_workers(finding) or not _can_change_workers(finding):
        return None
    chosen = finding.measured.found.tried_as("chosen")
    if chosen is None and facts.tuned:  # by trials, which know more than this run
        return None
    number = _enough_workers(finding) if chosen is None else chosen.num_workers
    if number is None or number <= workers or not _fits(finding, number):
        return None
    return number


def _tried_remedy(finding: Finding, why: str, settings: dict[str, Any]) -> Remedy | None:
    """Remedy: the setting that the trials chose; None if the present setting did not run in them."""
    own = finding.measured.found.tried_as("own")
    chosen = finding.measured.found.tried_as("chosen")
    if own is None or chosen is None:
        return None
    if chosen.num_workers and chosen.prefetch_factor not in (None, TORCH_PREFETCH, own.prefetch_factor):
        settings = {"prefetch_factor": chosen.prefetch_factor, **settings}
    remedy = loader_remedy(finding, why, None, num_workers=chosen.num_workers, **settings)
    found = finding.measured.found
    own_ms = found.own_fit_ms or own.step_ms
    chosen_ms = found.chosen_fit_ms or chosen.step_ms
    return replace(
        remedy,
        most_gain_pct=100 * (1 - chosen_ms / own_ms),
        tried=f"{in_ms(own_ms, own_ms)} -> {in_ms(chosen_ms, own_ms)} ms a step",
    )


def _enough_workers(finding: Finding) -> int | None:
    """The smallest number with which loading could keep up, at most one worker for each CPU; None if unknown."""
    facts = finding.facts
    if facts.num_workers and finding.measured.loaders.workers_on_cpu_pct is None:
        return None  # the workers were not observed
    loading_ms = bounds.loading_time_ms(finding.measured, finding.shares)
    training_ms = bounds.data_free_ms(finding.measured, finding.shares)
    if loading_ms is None or training_ms <= 0:
        return None
    most = max(1, (facts.usable_cpus or 1) // facts.loaders_beside)
    return min(most, math.ceil(loading_ms / training_ms))


def may_have_workers(finding: Finding) -> bool:
    """True if several workers yield the same samples as one. A stream must divide them, and a fork must be safe."""
    if finding.facts.why_no_workers or finding.facts.keeps:
        return False
    return finding.facts.map_style is not False or finding.facts.shards_by_worker is True


def _can_change_workers(finding: Finding) -> bool:
    """True if all training loaders can get the same number of workers."""
    return finding.can_set("num_workers") and len(set(finding.facts.every_num_workers)) <= 1


def _kept_workers(finding: Finding) -> dict[str, Any]:
    """The setting to add so that first workers persist between epochs, if they can."""
    facts = finding.facts
    if finding.place.form == "settings" or facts.persistent_workers is True:  # LoaderSettings keep them by default
        return {}
    can_set = facts.may_persist and finding.can_set_with_workers("persistent_workers")
    return {"persistent_workers": True} if can_set else {}


def _pinned_with_workers(finding: Finding) -> dict[str, Any]:
    """The setting to add so that the batches of more workers are copied to a device without waiting."""
    facts = finding.facts
    if facts.device_type not in PINNING_DEVICES or facts.pin_memory is not False or finding.place.form == "settings":
        return {}
    return {"pin_memory": True} if finding.can_set_with_workers("pin_memory") else {}


def _fits(finding: Finding, workers: int) -> bool:
    """True if /dev/shm has room for the batches that the workers keep ready: without room, a worker dies."""
    facts = finding.facts
    if facts.free_shm_bytes is None or facts.batch_bytes is None or finding.place.form == "settings":
        return True  # batches of our loaders are elsewhere
    more = facts.loaders_beside * (workers - (facts.num_workers or 0))
    return more * ((facts.prefetch_factor or 2) + 1) * facts.batch_bytes <= SHM_SHARE * facts.free_shm_bytes


def fewer_workers(finding: Finding) -> Remedy | None:
    """Remedy: fewer workers, or none, if training waits for data and fewer were faster in a trial."""
    workers = finding.facts.num_workers
    if not workers or finding.data in (None, "epoch start", "one rank") or not _can_change_workers(finding):
        return None
    chosen = finding.measured.found.tried_as("chosen")
    if chosen is None or chosen.num_workers >= workers:
        return None
    if chosen.num_workers:
        return _tried_remedy(finding, "the workers compete for CPUs", {})
    without = _without_workers(finding)
    if without is None:
        return None
    return _tried_remedy(finding, "making a batch is faster than sending it from a worker", without)


def _without_workers(finding: Finding) -> dict[str, Any] | None:
    """New values for settings that torch, and LoaderSettings, refuse without workers.

    None if one of them is set in a place that this remedy cannot change.
    """
    facts = finding.facts
    ours = finding.place.form == "settings"
    settings: dict[str, Any] = {}
    if facts.prefetch_factor is not None:
        settings["prefetch_factor"] = "auto" if ours else None
    if facts.persistent_workers:
        settings["persistent_workers"] = "auto" if ours else False
    given = [name for name in settings if name != "prefetch_factor" or facts.prefetch_factor != 2]
    if not all(map(finding.can_set_with_workers, given)):
        return None
    return {name: value for name, value in settings.items() if finding.can_set(name)}


def persistent_workers(finding: Finding) -> Remedy | None:
    """Remedy: persistent workers, if training waits in each epoch for workers to start and make the first batch.

    None if anything new, such as a call of ``set_epoch``, has to reach the workers in each epoch. Saves the time to the
    first batch of an epoch, less the time to make one batch.
    """
    facts = finding.facts
    start_s = finding.measured.stats.epoch_start_s or 0.0
    epoch_pct = finding.shares.epoch_pct
    if finding.data is None or epoch_pct is None or epoch_pct < DATA_PCT or not finding.can_set("persistent_workers"):
        return None
    if facts.persistent_workers is not False or not facts.num_workers or not facts.may_persist or facts.max_epochs == 1:
        return None
    making_s = 1e-3 * facts.num_workers * finding.shares.step_ms  # at most: a worker makes a batch in num_workers steps
    saved_ms = 1e3 * max(0.0, start_s - making_s) / (facts.batches_per_epoch or 1)
    why = f"workers are started again for each epoch, whose first batch takes {start_s:.2f} s"
    gain_pct = 100 * saved_ms / finding.step_with_start_ms
    return loader_remedy(finding, why, None, gain_pct=gain_pct, persistent_workers=True)


def any_order(finding: Finding) -> Remedy | None:
    """Remedy: any order, if finished batches wait for a slow one while workers are idle.

    Not for ``trainer.predict``, whose results are identified only by their order.
    """
    facts = finding.facts
    if finding.data != "head of line" or facts.in_order is False or (facts.num_workers or 0) < 2:
        return None
    if not finding.can_set("in_order") or facts.stage == "predict":
        return None
    return loader_remedy(
        finding,
        "finished batches do not wait for a slow one; the order of batches is then random",
        bounds.data_free_ms(finding.measured, finding.shares),
        in_order=False,
    )


def files_in_memory(finding: Finding) -> Remedy | None:
    """Remedy: a copy of the files in memory, if an ImageFolderDataModule without one waits for storage."""
    facts = finding.facts
    if finding.data != "cold reads" or facts.decoder is None or facts.staged is not False:
        return None
    step_ms = bounds.with_rate(finding.measured, finding.shares, finding.measured.found.cached_bytes_per_s)
    if step_ms is None:
        step_ms = bounds.data_free_ms(finding.measured, finding.shares)
    return Remedy(
        code='stage_to="/dev/shm"',
        form="datamodule",
        where="stage_to: not set -> /dev/shm in the call that makes your "
        f"{finding.place.datamodule or 'ImageFolderDataModule'}",
        why="the files are copied to memory once, if they fit",
        least_step_ms=step_ms,
        changes="staged=True",
    )


def crops_only(finding: Finding) -> Remedy | None:
    """Remedy: decode only the crops of an image folder, if that was timed, instead of decoding whole images."""
    trial = finding.measured.found.crops
    facts = finding.facts
    if trial is None or finding.data not in MADE_ON_CPU or facts.stage != "fit" or facts.num_workers is None:
        return None
    split = ""
    if trial.val_fraction is not None:
        split = f"val_fraction={trial.val_fraction:g}, "
    chosen = finding.measured.found.tried_as("chosen")
    workers = facts.num_workers
    if chosen is not None:
        workers = chosen.num_workers
    return Remedy(
        code=f"from {_door(facts)} import ImageFolderDataModule, LoaderSettings\n"
        f"ImageFolderDataModule({json.dumps(trial.folder)}, {facts.batch_size}, transform=..., {split}"
        f"loader=LoaderSettings(num_workers={workers}))",
        form="replacement",
        where=f"as the datamodule of trainer.fit, in place of {finding.place.words}",
        why="put in your transform. Only the crop of an image is decoded: "
        f"{trial.crop_ms:.1f} ms of CPU instead of {trial.whole_ms:.1f}",
        least_step_ms=bounds.with_crops(finding.measured, finding.shares),
        changes=f"decodes_whole=False,num_workers={workers}",
    )


def _door(facts: LoopFacts) -> str:
    return "lightning_feed" if facts.package == "lightning.pytorch" else "lightning_feed.pl"


# --- the transfer, callbacks and loggers --------------------------------------------------------------------------

RARELY = 50
"""Steps between two updates of the progress bar, or two calls of the loggers."""
_BARS = ("TQDMProgressBar", "RichProgressBar")
_LOGGING = re.compile(r"^logger .*\.log_metrics$")


def pinned_memory(finding: Finding) -> Remedy | None:
    """Remedy: pin memory, if training waits for copies from pageable memory."""
    unpinned = finding.causes.get("copy") == "unpinned" and finding.facts.device_type != "cpu"
    if not unpinned or not finding.can_set("pin_memory"):
        return None
    return loader_remedy(
        finding,
        "the host waits for copies from pageable memory",
        bounds.without(finding.shares, finding.measured.stats.h2d_ms or 0.0),
        pin_memory=True,
    )


def prefetch_callback(finding: Finding) -> Remedy | None:
    """Remedy: PrefetchCallback, if training waits for copies from pinned memory, or for nvJPEG, on a GPU."""
    facts = finding.facts
    stats = finding.measured.stats
    cause = finding.causes.get("copy")
    decodes = cause == "decoding on the GPU"
    if cause is None or facts.device_type != "cuda" or stats.prefetch_active or stats.h2d_ms is None:
        return None
    if not (facts.pin_memory is True or decodes):
        return None
    return callback_remedy(
        finding.place,
        _door(facts),
        "PrefetchCallback",
        None,
        why=f"{'decodes' if decodes else 'copies'} the next batch while this one computes",
        least_step_ms=bounds.without(finding.shares, stats.h2d_ms),
        changes="prefetch_callback=True",
    )


def rare_progress_bar(finding: Finding) -> Remedy | None:
    """Remedy: draw the progress bar rarely, if it is drawn often and takes time between the steps."""
    rate = finding.facts.bar_refresh_rate
    drawn = [hook for hook in finding.measured.hooks if any(f"]{bar}" in hook.name for bar in _BARS)]
    if "framework" not in finding.causes or not rate or rate >= RARELY or not drawn:
        return None
    bar = next(bar for bar in _BARS if f"]{bar}" in drawn[0].name)
    takes_ms = _sum(drawn)
    return callback_remedy(
        finding.place,
        f"{finding.facts.package}.callbacks",
        bar,
        ("refresh_rate", rate, RARELY),
        why=f"drawing it takes {takes_ms:.2f} ms a step",
        least_step_ms=_rarer(finding, takes_ms, rate),
        changes=f"bar_refresh_rate={RARELY}",
    )


def log_rarely(finding: Finding) -> Remedy | None:
    """Remedy: log rarely, if loggers are called often and take time between the steps."""
    every = finding.facts.log_every_n_steps
    name = "log_every_n_steps"
    called = [hook for hook in finding.measured.hooks if _LOGGING.search(hook.name)]
    if "framework" not in finding.causes or not every or every >= RARELY or not called:
        return None
    why = f"{called[0].name} takes {_sum(called):.2f} ms a step"
    step = _rarer(finding, _sum(called), every)
    return trainer_remedy(finding.place, name, every, RARELY, why=why, least_step_ms=step)


def _sum(hooks: list[HookTime]) -> float:
    return sum(hook.ms_per_step for hook in hooks)


def _rarer(finding: Finding, takes_ms: float, every: int) -> float:
    """Step time if something done every ``every`` steps is done every 50 steps."""
    return bounds.without(finding.shares, min(takes_ms, finding.measured.stats.other_ms or 0.0) * (1 - every / RARELY))


# --- which of them are printed ------------------------------------------------------------------------------------

LEAST_PCT = 5.0
LEAST_UNSURE_PCT = 10.0
"""Smallest saving of a remedy, as a share of an epoch; the second for low confidence."""
MOST = 3
RULES = (
    more_workers, fewer_workers, persistent_workers, any_order, files_in_memory, crops_only, pinned_memory,
    prefetch_callback, rare_progress_bar, log_rarely,
)  # fmt: skip
"""Rules: each returns its remedy with a bound, or None. If two save the same, the earlier one is printed first."""


def remedies_for(finding: Finding) -> tuple[Remedy, ...]:
    """The remedies to print, the largest saving first. If two change the same setting, only the better one."""
    found = [remedy for rule in RULES if (remedy := rule(finding)) is not None]
    if finding.facts.loop == "plain":
        found = [remedy for remedy in found if remedy.form == "arguments"]
    gains = [replace(remedy, most_gain_pct=_gain_pct(finding, remedy)) for remedy in found]
    return largest(gains, least_gain_pct(finding))


def largest(remedies: list[Remedy], least_pct: float) -> tuple[Remedy, ...]:
    """The best three remedies, of those that save at least ``least_pct``. For each setting, only the best counts."""
    gains = [remedy for remedy in remedies if (remedy.most_gain_pct or 0.0) >= least_pct]
    gains.sort(key=lambda remedy: -(remedy.most_gain_pct or 0.0))
    best = {remedy.changes.partition("=")[0]: remedy for remedy in reversed(gains)}
    return tuple(remedy for remedy in gains if remedy in best.values())[:MOST]


def _gain_pct(finding: Finding, remedy: Remedy) -> float | None:
    """Share of an epoch, with its first batch, that a remedy saves at most."""
    if remedy.most_gain_pct is not None or remedy.least_step_ms is None:
        return remedy.most_gain_pct
    return 100 * (finding.shares.step_ms - remedy.least_step_ms) / finding.step_with_start_ms


def least_gain_pct(finding: Finding) -> float:
    """Smallest gain of a printed remedy: 5 %, or more if noise is larger."""
    stats = finding.measured.stats
    low, high = stats.interval_pct or (0.0, 0.0)
    least = LEAST_UNSURE_PCT if stats.confidence == "low" or finding.facts.crowded else LEAST_PCT
    return max(least, (high - low) / 2, (finding.measured.found.noise_pct or 0.0) / 2)
