"""Remedies: the rules, the text to paste, and the choice of those to print."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_feed.load.machine import SHM_SHARE
from lightning_feed.measure.measurements import HookTime, LoopFacts, Measurements, Place
from lightning_feed.verdict import predict
from lightning_feed.verdict.causes import MANY_TENSORS
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Form, Remedy
from lightning_feed.verdict.shares import DATA_PCT, LOOP_WORDS, Shares

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
        predicted_step_ms=step_ms,
        predicted_gain_pct=gain_pct,
        changes=f"{name}={value!r}",
    )


def datamodule_remedy(finding: Finding, name: str, value: str, why: str, step_ms: float | None) -> Remedy:
    """A remedy that changes an argument of an ImageFolderDataModule."""
    change = f"{name}: {vars(finding.facts)[name] or 'not set'} -> {value}"
    where = f"{change} in the call that makes your {finding.place.datamodule or 'ImageFolderDataModule'}"
    code = f'{name}="{value}"'
    changes = f"{name}={value!r}"
    return Remedy(code=code, form="datamodule", where=where, why=why, predicted_step_ms=step_ms, changes=changes)


def trainer_remedy(place: Place, name: str, now: object, value: object, **more: Any) -> Remedy:
    """A remedy that changes an argument of the Trainer; ``more``: its ``why`` and its prediction."""
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

MOST_WAITING = 4
"""Largest factor on the number of workers if they only wait."""
MOST_WORKERS = 16
"""Largest number of workers suggested for a loader without workers."""
NEARLY = 1.02
"""Fewer workers are preferred if their step time is within this factor of the best."""
_MADE_SLOWLY: tuple[Cause, ...] = ("no workers", "cpu", "cold reads", "remote reads", "waiting", "unknown")
_READ_SLOWLY: tuple[Cause, ...] = ("cold reads", "remote reads", "waiting")
MADE_ON_CPU: tuple[Cause, ...] = ("cpu", "no workers", "oversubscribed")


def more_workers(finding: Finding) -> Remedy | None:
    """Remedy: more workers, if training waits for batches that take time to make.

    Suggests the fewest workers that nearly reach the best step time: at most one per CPU, or more if workers are
    blocked. None if the present workers were not observed and no other numbers were tried, if a stream is not known to
    divide itself among workers, or if /dev/shm has no room for the batches.
    """
    predicted = steps_with_more(finding)
    if not predicted:
        return None
    best = min(predicted.values())
    number = min(number for number, step in predicted.items() if step <= NEARLY * best)
    now = finding.facts.num_workers
    cpus = finding.facts.usable_cpus
    why = "batches are made while the model trains" if now == 0 else "more workers make more batches at once"
    if cpus is not None and number > cpus:
        why += "; workers that wait need little CPU"
    kept = _with_kept_workers(finding)[1] if now == 0 else {}
    return loader_remedy(finding, why, predicted[number], num_workers=number, **kept)


def steps_with_more(finding: Finding) -> dict[int, float]:
    """Predicted step times by number of workers; empty if more workers would not help."""
    facts = finding.facts
    now = finding.facts.num_workers
    if now is None or not facts.usable_cpus or facts.workers == "thread" or finding.data not in _MADE_SLOWLY:
        return {}
    if now and not predict.tried_rates(finding.measured) and finding.measured.loaders.workers_on_cpu_pct is None:
        return {}
    measured = _with_kept_workers(finding)[0]
    steps = {
        number: predict.with_workers(measured, finding.shares, number)
        for number in _numbers_to_name(finding, now)
        if _fits(finding, number)
    }
    return {number: step for number, step in steps.items() if step is not None}


def _numbers_to_name(finding: Finding, now: int) -> Iterable[int]:
    """Numbers of workers to consider: those tried, else all up to the limit; none for a stream that is not divided."""
    if not _can_change_workers(finding) or not may_have_workers(finding):
        return []
    tried = [number for number in predict.tried_rates(finding.measured) if number > now]
    return tried or range(now + 1, _most_workers(finding) + 1)


def may_have_workers(finding: Finding) -> bool:
    """True if several workers yield the same samples as one. A stream must divide them."""
    return finding.facts.map_style is not False or finding.facts.shards_by_worker is True


def _can_change_workers(finding: Finding) -> bool:
    """True if all training loaders can get the same number of workers."""
    return finding.can_set("num_workers") and len(set(finding.facts.every_num_workers)) <= 1


def _with_kept_workers(finding: Finding) -> tuple[Measurements, dict[str, Any]]:
    """The measurements as if workers persist between epochs, if they can, and the setting to add for that, if any."""
    facts = finding.facts
    if finding.place.form == "settings":  # LoaderSettings keep the workers by default
        return finding.measured, {}
    kept = bool(facts.may_persist) and finding.can_set_with_workers("persistent_workers")
    measured = replace(finding.measured, facts=replace(facts, may_persist=kept))
    return measured, {"persistent_workers": True} if kept and facts.persistent_workers is not True else {}


def _most_workers(finding: Finding) -> int:
    """Largest number of workers to suggest: one per CPU, or as many as keep the CPUs busy if workers mostly wait."""
    facts = finding.facts
    now = finding.facts.num_workers or 0
    most = cpus = max(1, (facts.usable_cpus or 1) // facts.loaders_beside)
    blocked = predict.blocked_share(finding.measured) if now == 0 or finding.data in _READ_SLOWLY else 0.0
    if blocked >= predict.MOSTLY:
        most = max(cpus, min(MOST_WAITING * max(1, now), int(cpus / max(1e-9, 1 - blocked))))
    return min(MOST_WORKERS, most) if now == 0 else most


def _fits(finding: Finding, workers: int) -> bool:
    """True if /dev/shm has room for the batches that the workers keep ready: without room, a worker dies."""
    facts = finding.facts
    if facts.free_shm_bytes is None or facts.batch_bytes is None:
        return True
    more = facts.loaders_beside * (workers - (facts.num_workers or 0))
    return more * ((facts.prefetch_factor or 2) + 1) * facts.batch_bytes <= SHM_SHARE * facts.free_shm_bytes


def fewer_workers(finding: Finding) -> Remedy | None:
    """Remedy: fewer workers, if training waits for data and fewer were measured to be faster.

    If handing over batches is the cause, may also suggest ``num_workers=0``: making a batch in the training process may
    be faster.
    """
    now = finding.facts.num_workers
    if not now or finding.data in (None, "epoch start", "one rank") or not _can_change_workers(finding):
        return None
    steps = {
        number: predict.by_trial(finding.measured, finding.shares, number)
        for number in predict.tried_rates(finding.measured)
        if 0 < number < now
    }
    without = _without_workers(finding) if finding.data == "hand-over" else None
    if without is not None:
        steps[0] = predict.without_workers(finding.measured, finding.shares)
    known = {number: step for number, step in steps.items() if step is not None}
    if not known:
        return None
    number = min(known, key=lambda one: known[one])
    if number:
        return loader_remedy(finding, "the workers compete for CPUs", known[number], num_workers=number)
    return loader_remedy(
        finding,
        "making a batch is faster than sending it from a worker",
        known[0],
        num_workers=0,
        **(without or {}),
    )


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
        predict.in_any_order(finding.measured, finding.shares),
        in_order=False,
    )


def shared_files(finding: Finding) -> Remedy | None:
    """Remedy: torch's other sharing strategy, if handing over many tensors was measured to be faster with it."""
    found = finding.measured.found
    count = finding.facts.batch_tensors or 0
    now = found.hand_over_ms
    then = found.hand_over_file_system_ms
    if finding.data != "hand-over" or found.sharing_strategy != "file_descriptor" or count < MANY_TENSORS:
        return None
    if now is None or then is None:
        return None
    return Remedy(
        code='torch.multiprocessing.set_sharing_strategy("file_system")',
        form="line",
        where="sharing strategy: file_descriptor -> file_system, at the start of your script, after `import torch`",
        why=f"a batch has {count} tensors: taking it from a worker takes {now:.1f} ms, or {then:.1f} ms through files",
        predicted_step_ms=predict.without(finding.shares, min(finding.shares.data_ms, now - then)),
        changes="sharing_strategy='file_system'",
    )


def files_in_memory(finding: Finding) -> Remedy | None:
    """Remedy: a cache, if an ImageFolderDataModule without one waits for storage, or for an object store."""
    facts = finding.facts
    found = finding.measured.found
    if finding.data not in ("cold reads", "remote reads") or facts.decoder is None or facts.cache != "off":
        return None
    step = predict.with_files_near(finding.measured, finding.shares)
    if found.cached_bytes_per_s:
        step = predict.with_rate(finding.measured, finding.shares, found.cached_bytes_per_s, found.loader_per_s)
    return datamodule_remedy(
        finding, "cache", "bytes", "files that fit are kept in host memory from the first epoch on", step
    )


def crops_only(finding: Finding) -> Remedy | None:
    """Remedy: decode only the crops of an image folder, if that was timed, instead of decoding whole images."""
    trial = finding.measured.found.crops
    facts = finding.facts
    if trial is None or finding.data not in MADE_ON_CPU or facts.stage != "fit":
        return None
    steps = predict.with_crops(finding.measured, finding.shares)
    if facts.num_workers is None or facts.num_workers not in steps:
        return None
    workers = min(steps, key=lambda number: steps[number])
    if 100 * (steps[facts.num_workers] - steps[workers]) / finding.step_with_start_ms < least_gain_pct(finding):
        workers = facts.num_workers  # another number is not worth it
    split = "" if trial.val_fraction is None else f"val_fraction={trial.val_fraction:g}, "
    return Remedy(
        code=f"from {_door(facts)} import ImageFolderDataModule, LoaderSettings\n"
        f"ImageFolderDataModule({json.dumps(trial.folder)}, {facts.batch_size}, transform=..., {split}"
        f"loader=LoaderSettings(num_workers={workers}))",
        form="replacement",
        where=f"as the datamodule of trainer.fit, in place of {finding.place.words}",
        why="put in your transform. Only the crop of an image is decoded: "
        f"{trial.crop_ms:.1f} ms of CPU instead of {trial.whole_ms:.1f}",
        predicted_step_ms=steps[workers],
        changes=f"decodes_whole=False,num_workers={workers}",
    )


def _door(facts: LoopFacts) -> str:
    return "lightning_feed" if facts.package == "lightning.pytorch" else "lightning_feed.pl"


def nvjpeg(finding: Finding) -> Remedy | None:
    """Remedy: decode on the GPU, if that was measured to be faster than an ImageFolderDataModule's workers.

    None with the user's own transforms, or with a cache of decoded images.
    """
    facts = finding.facts
    found = finding.measured.found
    if finding.data not in MADE_ON_CPU or facts.decoder is None or facts.backend not in (None, "torch"):
        return None
    if facts.device_type != "cuda" or facts.own_transforms or facts.cache in ("decoded", "device"):
        return None
    if not found.device_decode_per_s or not found.batch_size:
        return None
    rate = f"{found.device_decode_per_s * found.batch_size:,.0f} images/s if the GPU does nothing else"
    why = f"nvJPEG decodes on the GPU ({rate}); workers only read"
    step = predict.decoded_on_device(finding.measured, finding.shares, found.device_decode_per_s)
    return datamodule_remedy(finding, "backend", "nvjpeg", why, step)


# --- the transfer, callbacks and loggers --------------------------------------------------------------------------

RARELY = 50
"""Steps between two updates of the progress bar, or two calls of the loggers."""
_BARS = ("TQDMProgressBar", "RichProgressBar")
_LOGGING = re.compile(r"^logger .*\.log_metrics$")


def pinned_memory(finding: Finding) -> Remedy | None:
    """Remedy: pin memory, if training waits for copies from pageable memory, and both kinds of copies were measured."""
    unpinned = finding.causes.get("copy") == "unpinned" and finding.facts.device_type != "cpu"
    if not unpinned or not finding.can_set("pin_memory"):
        return None
    return loader_remedy(
        finding,
        "the host waits for copies from pageable memory",
        predict.with_pinned(finding.measured, finding.shares),
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
        predicted_step_ms=predict.without(finding.shares, stats.h2d_ms),
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
        predicted_step_ms=_rarer(finding, takes_ms, rate),
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
    return trainer_remedy(finding.place, name, every, RARELY, why=why, predicted_step_ms=step)


def _sum(hooks: list[HookTime]) -> float:
    return sum(hook.ms_per_step for hook in hooks)


def _rarer(finding: Finding, takes_ms: float, every: int) -> float:
    """Step time if something done every ``every`` steps is done every 50 steps."""
    return predict.without(finding.shares, min(takes_ms, finding.measured.stats.other_ms or 0.0) * (1 - every / RARELY))


# --- which of them are printed ------------------------------------------------------------------------------------

LEAST_PCT = 5.0
LEAST_UNSURE_PCT = 10.0
"""Smallest saving of a remedy, as a share of an epoch; the second for low confidence, and for a first worker that
shares the CPUs with training."""
LEAST_SHARED_PCT = 20.0
"""Smallest saving worth advising if workers are busy and training shares their CPUs. In one run with every CPU busy, a
step was predicted to fall from 21.5 to 17.6 ms, and only fell to 20.9 (``benchmarks/advice.py``, 2 CPUs)."""
MOST = 3
RULES = (
    more_workers, fewer_workers, persistent_workers, any_order, shared_files, files_in_memory, crops_only, nvjpeg,
    pinned_memory, prefetch_callback, rare_progress_bar, log_rarely,
)  # fmt: skip
"""Rules: each returns its remedy with a prediction, or None. If two save the same, the earlier one is printed first."""


def remedies_for(finding: Finding) -> tuple[Remedy, ...]:
    """The remedies to print, the largest saving first. If two change the same setting, only the better one."""
    found = [remedy for rule in RULES if (remedy := rule(finding)) is not None]
    if finding.facts.loop == "plain":
        found = [remedy for remedy in found if remedy.form in ("arguments", "line")]
    gains = [replace(remedy, predicted_gain_pct=_gain_pct(finding, remedy)) for remedy in found]
    least = least_gain_pct(finding)
    # A replacement saves CPU time that was measured both ways in turn, so other programs do not affect it.
    worth = [one for one in gains if one.form == "replacement" or (one.predicted_gain_pct or 0.0) >= least]
    return largest(worth, LEAST_PCT)


def largest(remedies: list[Remedy], least_pct: float) -> tuple[Remedy, ...]:
    """The best three remedies, of those that save at least ``least_pct``. For each setting, only the best counts."""
    gains = [remedy for remedy in remedies if (remedy.predicted_gain_pct or 0.0) >= least_pct]
    gains.sort(key=lambda remedy: -(remedy.predicted_gain_pct or 0.0))
    best = {remedy.changes.partition("=")[0]: remedy for remedy in reversed(gains)}
    return tuple(remedy for remedy in gains if remedy in best.values())[:MOST]


def _gain_pct(finding: Finding, remedy: Remedy) -> float | None:
    """Share of an epoch, with its first batch, that a remedy saves: as it predicts, else by its step time."""
    if remedy.predicted_gain_pct is not None or remedy.predicted_step_ms is None:
        return remedy.predicted_gain_pct
    return 100 * (finding.shares.step_ms - remedy.predicted_step_ms) / finding.step_with_start_ms


def least_gain_pct(finding: Finding) -> float:
    """Smallest gain of a printed remedy: 5 %, or more if noise is larger."""
    stats = finding.measured.stats
    facts = finding.facts
    low, high = stats.interval_pct or (0.0, 0.0)
    least = LEAST_UNSURE_PCT if stats.confidence == "low" or facts.crowded else LEAST_PCT
    if facts.device_type == "cpu" and finding.data == "no workers":
        # Other programs may take more or less CPU time in the next run.
        least = min(LEAST_SHARED_PCT, LEAST_UNSURE_PCT + (facts.others_cpu_pct or 0.0))
    elif facts.device_type == "cpu" and finding.data == "cpu":
        least = LEAST_SHARED_PCT
    return max(least, (high - low) / 2, (finding.measured.found.noise_pct or 0.0) / 2)
