"""Remedies: the rules that find them, the text to paste, and the choice of the remedies to print."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_feed.load.settings import PINNING_DEVICES, REGISTERING_DEVICES, TORCH_PREFETCH
from lightning_feed.measure.measurements import HookTime, LoaderCode, LoaderFacts, LoopFacts, Measurements
from lightning_feed.verdict import bounds
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Change, Effect, Note, NoteKind, Remedy
from lightning_feed.verdict.lighter_samples import lighter_sample_remedy
from lightning_feed.verdict.paste import Settings, pastes
from lightning_feed.verdict.shares import Shares, workers_fill_cpus
from lightning_feed.verdict.thresholds import (
    DATA_PCT,
    LEAST_GAIN_PCT,
    LEAST_UNSURE_GAIN_PCT,
    MOST_REMEDIES,
    RARELY_STEPS,
)

DATALOADER = LoaderCode(words="your training DataLoader")
DATALOADERS = {
    "fit": DATALOADER,
    "validate": LoaderCode(words="your validation DataLoader"),
    "test": LoaderCode(words="your test DataLoader"),
    "predict": LoaderCode(words="your prediction DataLoader"),
}
OUR_SETTINGS = LoaderCode(words="loader=LoaderSettings(...) of your data module", form="settings")
"""Words for a loader if nothing more is known of the user's code: for a DataLoader, and for a FastDataModule."""
_TUNED = ("num_workers", "prefetch_factor", "persistent_workers")
"""Settings that AutotuneCallback changes."""


@dataclass(frozen=True, kw_only=True)
class JudgedRun:
    """A run with its measurements, and the cause of each part of a step over its limit."""

    measured: Measurements
    shares: Shares
    causes: Mapping[Bottleneck, Cause]
    """Part of a step -> its cause, for each part over its limit, and for ``compute`` if computing is the headline."""

    @property
    def facts(self) -> LoopFacts:
        """Facts about the run, other than its times."""
        return self.measured.facts

    @property
    def loader(self) -> LoaderFacts:
        """Facts about the training loaders."""
        return self.measured.facts.loader

    @property
    def data(self) -> Cause | None:
        """The cause of waiting for data; None if the wait is below its limit."""
        return self.causes.get("data")

    @property
    def step_with_start_ms(self) -> float:
        """Mean time of a step, plus its share of the time to an epoch's first batch, if known."""
        batches = self.facts.batches_per_epoch
        start_s = self.measured.stats.epoch_start_s
        if not batches or start_s is None:
            return self.shares.step_ms
        return self.shares.step_ms + 1e3 * start_s / batches

    @property
    def loader_code(self) -> LoaderCode:
        """The user's code that sets up the training loader."""
        if self.facts.loader_code is not None:
            return self.facts.loader_code
        if self.loader.ours:
            return OUR_SETTINGS
        return DATALOADERS[self.facts.stage]

    def can_set(self, name: str) -> bool:
        """Return True if the code described by :attr:`loader_code` takes this setting."""
        return self.loader_code.form != "callback" or name in _TUNED

    def can_set_with_workers(self, name: str) -> bool:
        """Return True if a setting can be changed where num_workers is changed. A command line needs a key for the
        setting."""
        keys = dict(self.loader_code.overrides)
        if "num_workers" in keys:
            return name in keys
        return self.can_set(name)


# --- how a remedy is pasted ---------------------------------------------------------------------------------------


def loader_remedy(judged: JudgedRun, settings: Settings, why: Note, step_ms: float | None = None) -> Remedy:
    """Return a remedy that changes settings of the training loader. Its words name the first setting."""
    name = next(iter(settings))
    value = settings[name]
    paste = pastes(judged.loader_code, settings)[0]
    present = vars(judged.loader).get(name)
    before = "not set" if present is None else present
    return Remedy(
        code=paste.code,
        form=None if paste.form == "yaml" else paste.form,
        where=f"{name}: {before} -> {value} {paste.where}",
        why=(why,),
        least_step_ms=step_ms,
        change=Change(name, repr(value)),
    )


def trainer_remedy(loader_code: LoaderCode, name: str, before: object, after: object, why: Note) -> Remedy:
    """Return a remedy that changes an argument of the Trainer, or its command-line key with LightningCLI.

    The caller adds the bound of the step time or of the saving.
    """
    trainer_key = loader_code.trainer_key
    where = "on the command line" if trainer_key else "in your Trainer"
    return Remedy(
        code=f"{trainer_key}{name}={after}",
        form="override" if trainer_key else "trainer",
        where=f"{name}: {before} -> {after} {where}",
        why=(why,),
        change=Change(name, str(after)),
    )


def _callback_remedy(
    judged: JudgedRun, module: str, name: str, why: Note, *, argument: str = "", change: str = ""
) -> Remedy:
    """Return a remedy that adds a callback to the Trainer, or on the command line with LightningCLI.

    The caller adds the bound of the step time.

    Args:
        judged: the run.
        module: module to import the callback's class from.
        name: name of the class.
        why: the reason why it helps.
        argument: an argument for the class, such as ``refresh_rate=50``.
        change: the change of this argument in words, with a space behind it: ``"refresh_rate: 1 -> 50 "``.
    """
    trainer_key = judged.loader_code.trainer_key
    if not trainer_key:
        where = f"{change}in callbacks=[...] of your Trainer, with `from {module} import {name}`"
        return Remedy(code=f"{name}({argument})", form="callback", where=where, why=(why,))
    code = f"{trainer_key}callbacks+={module}.{name}"
    if argument:
        code += f" {trainer_key}callbacks.{argument}"
    return Remedy(code=code, form="override", where=f"{change}on the command line", why=(why,))


# --- the loader ---------------------------------------------------------------------------------------------------

_MADE_SLOWLY: tuple[Cause, ...] = ("no workers", "cpu", "cold reads", "waiting", "unknown")
MADE_ON_CPU: tuple[Cause, ...] = ("cpu", "no workers", "oversubscribed")


def more_workers(judged: JudgedRun) -> Remedy | None:
    """Remedy: more workers, if training waits for batches that take time to make, and the trials chose more workers.

    Returns None for an iterable dataset that does not divide its samples among workers, and for a dataset that does not
    survive a fork.
    """
    loader = judged.loader
    chosen = judged.measured.experiments.tried_as("chosen")
    if judged.data not in _MADE_SLOWLY or chosen is None or not _may_add_workers(loader):
        return None
    if chosen.num_workers <= (loader.num_workers or 0) or not _are_alike(loader):
        return None
    why: NoteKind = "beside training" if loader.num_workers == 0 else "more at once"
    return _tried_remedy(judged, why, _pinned_with_workers(judged))


_BLOCKED: tuple[Cause, ...] = ("waiting", "cold reads")
"""Causes for which more workers than CPUs may help."""
_OTHER_WORKERS: tuple[Cause, ...] = ("epoch start", "jitter")
"""Causes for which fewer workers may help, or batches in place."""


def may_try_workers(measured: Measurements, cause: Cause | None) -> bool:
    """Return True if another number of workers, which was not tried, may help.

    Args:
        measured: the measurements of the run.
        cause: the cause of waiting for data; None if there is no waiting.
    """
    loader = measured.facts.loader
    was_tried = measured.diagnosed and not measured.experiments.inconclusive
    if was_tried or measured.facts.trainer.tuned or not _may_add_workers(loader):
        return False
    if cause in _MADE_SLOWLY:
        return cause in _BLOCKED or not workers_fill_cpus(measured)
    if cause == "oversubscribed":
        return _may_be_too_many_workers(measured.facts)
    return cause in _OTHER_WORKERS and bool(loader.num_workers)


def _may_be_too_many_workers(facts: LoopFacts) -> bool:
    """Return True if there are more workers than CPUs, or if they take the CPUs on which the model computes."""
    workers = facts.loader.num_workers or 0
    return bool(workers) and (facts.device_type == "cpu" or workers > (facts.usable_cpus or math.inf))


def _may_add_workers(loader: LoaderFacts) -> bool:
    """Return True if the number of worker processes is known, and may grow."""
    return loader.num_workers is not None and loader.workers != "thread" and may_have_workers(loader)


def may_have_workers(loader: LoaderFacts) -> bool:
    """Return True if several workers yield the same samples as one worker, and the dataset is safe in them.

    An iterable dataset must divide its samples among workers. The dataset must survive a fork.
    """
    return not loader.why_no_workers and (loader.map_style is not False or loader.shards_by_worker is True)


def _are_alike(loader: LoaderFacts) -> bool:
    """Return True if all training loaders have the same number of workers."""
    return len(set(loader.every_num_workers)) <= 1


def _tried_remedy(judged: JudgedRun, why: NoteKind, settings: Settings) -> Remedy | None:
    """Remedy: the setting that the trials chose; None if the trials did not measure the present setting."""
    results = judged.measured.experiments
    own = results.tried_as("own")
    chosen = results.tried_as("chosen")
    if own is None or chosen is None:
        return None
    if chosen.num_workers and chosen.prefetch_factor not in (None, TORCH_PREFETCH, own.prefetch_factor):
        settings = {"prefetch_factor": chosen.prefetch_factor, **settings}
    own_ms = results.own_fit_ms or own.step_ms
    chosen_ms = results.chosen_fit_ms or chosen.step_ms
    return replace(
        loader_remedy(judged, {"num_workers": chosen.num_workers} | settings, Note.of(why)),
        most_gain_pct=100 * (1 - chosen_ms / own_ms),
        tried_ms=(own_ms, chosen_ms),
    )


def _pinned_with_workers(judged: JudgedRun) -> Settings:
    """``pin_memory=True``, if the device copies from pinned memory, and the loader does not pin; else no setting.

    Also no setting if batches in place are a remedy, which pin without a thread.
    """
    if judged.facts.device_type not in PINNING_DEVICES or judged.loader_code.form == "settings":
        return {}
    if judged.loader.pin_memory is not False or not judged.can_set_with_workers("pin_memory"):
        return {}
    if batches_in_place(judged) is not None:
        return {}
    return {"pin_memory": True}


def fewer_workers(judged: JudgedRun) -> Remedy | None:
    """Remedy: fewer workers, or none, if a trial with fewer workers was faster.

    Where training does not wait for data, only training itself can have shown that.
    """
    was_trained = judged.measured.experiments.chosen_fit_ms is not None
    if judged.data == "one rank" or (judged.data is None and not was_trained) or not _are_alike(judged.loader):
        return None
    chosen = judged.measured.experiments.tried_as("chosen")
    if chosen is None or chosen.num_workers >= (judged.loader.num_workers or 0):
        return None
    if chosen.num_workers:
        return _tried_remedy(judged, "compete for CPUs", {})
    without = _without_workers(judged)
    if without is None:
        return None
    return _tried_remedy(judged, "sending is slow", without)


def _without_workers(judged: JudgedRun) -> Settings | None:
    """New values for settings that torch, and LoaderSettings, refuse with num_workers=0.

    Returns None if the user has set one of them where this remedy cannot change it.
    """
    loader = judged.loader
    settings: Settings = {}
    if loader.prefetch_factor is not None:
        settings["prefetch_factor"] = None
    if loader.persistent_workers:
        settings["persistent_workers"] = False
    set_by_user = set(settings)
    if loader.prefetch_factor == TORCH_PREFETCH:
        set_by_user.discard("prefetch_factor")
    if not all(map(judged.can_set_with_workers, set_by_user)):
        return None
    if judged.loader_code.form == "settings":
        settings = dict.fromkeys(settings, "auto")
    return {name: value for name, value in settings.items() if judged.can_set(name)}


def persistent_workers(judged: JudgedRun) -> Remedy | None:
    """Remedy: persistent workers, if training waits in each epoch for workers to start and make the first batch.

    Returns None if a dataset has a ``set_epoch``, which would have to reach the workers in each epoch. Whether the
    program changes a dataset in another way is not known. The saving is the time to the first batch of an epoch, less
    the time to make one batch.
    """
    epoch_pct = judged.shares.epoch_pct
    if judged.data is None or epoch_pct is None or epoch_pct < DATA_PCT or not _may_persist(judged):
        return None
    start_s = judged.measured.stats.epoch_start_s or 0.0
    # A worker makes a batch in at most num_workers steps.
    making_s = 1e-3 * (judged.loader.num_workers or 0) * judged.shares.step_ms
    saved_s = max(0.0, start_s - making_s)
    saved_ms = 1e3 * saved_s / (judged.facts.batches_per_epoch or 1)
    why = Note.of("starts again", s=saved_s)
    remedy = loader_remedy(judged, {"persistent_workers": True}, why)
    return replace(remedy, most_gain_pct=100 * saved_ms / judged.step_with_start_ms)


def _may_persist(judged: JudgedRun) -> bool:
    """Return True if there are workers that are started in each of several epochs, but could persist."""
    loader = judged.loader
    if not loader.num_workers or loader.persistent_workers is not False or not loader.may_persist:
        return False
    return judged.facts.trainer.max_epochs != 1 and judged.loader_code.form != "callback"


def any_order(judged: JudgedRun) -> Remedy | None:
    """Remedy: batches in any order (``in_order=False``), if finished batches wait for a slow one and workers are idle.

    Returns None for ``trainer.predict``, whose results are identified only by their order.
    """
    if judged.data != "head of line" or judged.loader.in_order is False or (judged.loader.num_workers or 0) < 2:
        return None
    if not judged.can_set("in_order") or judged.facts.stage == "predict":
        return None
    why = Note.of("slow batch overtaken")
    return loader_remedy(judged, {"in_order": False}, why, bounds.data_free_ms(judged.measured, judged.shares))


def files_in_memory(judged: JudgedRun) -> Remedy | None:
    """Remedy: a copy of the files in memory, if an ImageFolderDataModule without one waits for storage."""
    datamodule = judged.facts.datamodule
    if judged.data != "cold reads" or datamodule.decoder is None or datamodule.staged is not False:
        return None
    step_ms = bounds.with_rate(judged.measured, judged.shares, judged.measured.experiments.cached_bytes_per_s)
    if step_ms is None:
        step_ms = bounds.data_free_ms(judged.measured, judged.shares)
    name = judged.loader_code.datamodule or "ImageFolderDataModule"
    return Remedy(
        code='stage_to="/dev/shm"',
        form="datamodule",
        where=f"stage_to: not set -> /dev/shm in the call that makes your {name}",
        why=(Note.of("copied once"),),
        least_step_ms=step_ms,
        change=Change("staged", "True"),
    )


def crops_only(judged: JudgedRun) -> Remedy | None:
    """Remedy: decode only the crops of an image folder's images instead of whole images, if both were timed."""
    trial = judged.measured.experiments.crops
    workers = judged.loader.num_workers
    if trial is None or judged.data not in MADE_ON_CPU or judged.facts.stage != "fit" or workers is None:
        return None
    chosen = judged.measured.experiments.tried_as("chosen")
    if chosen is not None:
        workers = chosen.num_workers
    split = "" if trial.val_fraction is None else f"val_fraction={trial.val_fraction:g}, "
    return Remedy(
        code=f"from {_our_package(judged)} import ImageFolderDataModule, LoaderSettings\n"
        f"ImageFolderDataModule({json.dumps(trial.folder)}, {judged.loader.batch_size}, transform=..., {split}"
        f"loader=LoaderSettings(num_workers={workers}))",
        form="replacement",
        where=f"as the datamodule of trainer.fit, in place of {judged.loader_code.words}",
        why=(Note.of("only crops", crop_ms=trial.crop_ms, whole_ms=trial.whole_ms),),
        least_step_ms=bounds.with_crops(judged.measured, judged.shares),
        change=Change("decodes_whole", "False"),
    )


def faster_decoder(judged: JudgedRun) -> Remedy | None:
    """Remedy: another decoder for an ImageFolderDataModule whose decoder the user named, if both were timed."""
    return _lighter_samples(judged, "decoder")


def decoding_on_the_gpu(judged: JudgedRun) -> Remedy | None:
    """Remedy: nvJPEG decodes the images of an ImageFolderDataModule, if reading without decoding was timed."""
    return _lighter_samples(judged, "backend")


def fast_resizing(judged: JudgedRun) -> Remedy | None:
    """Remedy: an ImageFolderDataModule resizes without antialiasing, if both were timed."""
    return _lighter_samples(judged, "quality")


def packed_images(judged: JudgedRun) -> Remedy | None:
    """Remedy: an ImageFolderDataModule reads from a pack of smaller images or of pixels, if such samples were timed."""
    return _lighter_samples(judged, "root")


def _lighter_samples(judged: JudgedRun, setting: str) -> Remedy | None:
    """Return the remedy that changes this setting and gains most, of those that were tried; None if making samples is
    not the cause."""
    if judged.data not in MADE_ON_CPU or judged.facts.stage != "fit":
        return None
    remedies = [
        replace(
            lighter_sample_remedy(trial, judged.measured),
            least_step_ms=bounds.with_lighter_samples(judged.measured, judged.shares, trial),
        )
        for trial in judged.measured.experiments.lighter
        if trial.setting == setting
    ]
    return min(remedies, key=lambda remedy: remedy.least_step_ms or math.inf, default=None)


def _our_package(judged: JudgedRun) -> str:
    """Return the module of this package whose classes fit the package of the user's Trainer."""
    if judged.facts.trainer.package == "lightning.pytorch":
        return "lightning_feed"
    return "lightning_feed.pl"


# --- the CPUs -----------------------------------------------------------------------------------------------------


def fewer_torch_threads(judged: JudgedRun) -> Remedy | None:
    """Remedy: fewer threads of torch, if training itself was faster with them beside its workers."""
    trial = judged.measured.experiments.threads
    if trial is None or trial.own_ms <= trial.step_ms:
        return None
    present = judged.facts.torch_threads
    return Remedy(
        code=f"torch.set_num_threads({trial.torch_threads})",
        form="statement",
        where=f"threads of torch: {present} -> {trial.torch_threads} at the start of your program, after "
        "`import torch`",
        why=(Note.of("threads wait", workers=trial.num_workers),),
        most_gain_pct=100 * (1 - trial.step_ms / trial.own_ms),
        tried_ms=(trial.own_ms, trial.step_ms),
        change=Change("torch_threads", str(trial.torch_threads)),
    )


# --- the transfer, callbacks and loggers --------------------------------------------------------------------------

_COPIED_ON_THE_WAY: tuple[Cause, ...] = ("unpinned", "not overlapped", "link")
"""Causes of an exposed copy that page-locked batches in place may remove. On a slow link, copies within the host may be
what delays the copy to the device."""
_HANDED_OVER: tuple[Cause, ...] = ("hand-over", "pin thread")
"""Causes of waiting for data that batches in place may remove."""
_BARS = ("TQDMProgressBar", "RichProgressBar")
_LOGGING = re.compile(r"^logger .*\.log_metrics$")


def batches_in_place(judged: JudgedRun) -> Remedy | None:
    """Remedy: batches in place, if training waits for worker processes to hand batches over, for pinning, or for a copy
    that page-locked slots may speed up.

    Returns None if AutotuneCallback was in the fit, which has compared both ways. A data module is wrapped; for any
    other loader, AutotuneCallback changes the hand-over.
    """
    saved_ms = _saved_in_place_ms(judged)
    if not saved_ms or not _may_come_in_place(judged):
        return None
    why = Note.of("in place")
    remedy = _wrapped(judged, why)
    if remedy is None and may_be_tuned(judged.facts):
        remedy = _callback_remedy(judged, _our_package(judged), "AutotuneCallback", why)
    if remedy is None:
        return None
    return replace(remedy, least_step_ms=bounds.without(judged.shares, saved_ms), change=IN_PLACE)


IN_PLACE = Change("hand_over", "slots")
"""The change of the remedy that hands batches over in place."""


def _saved_in_place_ms(judged: JudgedRun) -> float:
    """Return the time of a step that batches in place may save at most."""
    saved_ms = 0.0
    if judged.causes.get("copy") in _COPIED_ON_THE_WAY and judged.facts.device_type in REGISTERING_DEVICES:
        saved_ms += judged.measured.stats.copy_ms or 0.0
    if judged.data in _HANDED_OVER:
        saved_ms += judged.shares.data_ms
    return saved_ms


def _may_come_in_place(judged: JudgedRun) -> bool:
    """Return True for a fit whose worker processes could leave batches in slots, and for which this was not tried."""
    facts = judged.facts
    loader = facts.loader
    was_tried = _was_tuned_in_a_fit(facts) and loader.map_style is not False and loader.count == 1
    return bool(loader.may_use_slots) and facts.loop == "trainer" and facts.stage == "fit" and not was_tried


def _was_tuned_in_a_fit(facts: LoopFacts) -> bool:
    return bool(facts.trainer.tuned) and not facts.trainer.tuned_outside


def _wrapped(judged: JudgedRun, why: Note) -> Remedy | None:
    """Remedy: the user's data module, wrapped. None without one, and for one that a command line sets up."""
    code = judged.loader_code
    if not code.datamodule or code.trainer_key or code.form == "settings":
        return None
    return Remedy(
        code=f"from {_our_package(judged)} import FastDataModule\nFastDataModule.wrap({code.datamodule}(...))",
        form="replacement",
        where=f"as the datamodule of trainer.fit, in place of {code.datamodule}(...)",
        why=(why,),
    )


def may_be_tuned(facts: LoopFacts) -> bool:
    """Return True for a loader of a fit that AutotuneCallback can tune, and has not tuned yet."""
    loader = facts.loader
    in_fit = facts.loop == "trainer" and facts.stage == "fit" and not _was_tuned_in_a_fit(facts)
    return in_fit and not loader.why_no_workers and loader.map_style is not False and len(loader.every_num_workers) <= 1


def pinned_memory(judged: JudgedRun) -> Remedy | None:
    """Remedy: pin memory, if training waits for copies from pageable memory, and batches cannot come in place."""
    unpinned = judged.causes.get("copy") == "unpinned" and judged.facts.device_type != "cpu"
    if not unpinned or judged.loader.pin_memory or not judged.can_set("pin_memory"):
        return None
    if batches_in_place(judged) is not None:
        return None
    step_ms = bounds.without(judged.shares, judged.measured.stats.copy_ms or 0.0)
    return loader_remedy(judged, {"pin_memory": True}, Note.of("copies wait"), step_ms)


def prefetch_callback(judged: JudgedRun) -> Remedy | None:
    """Remedy: PrefetchCallback, if training waits for copies from pinned memory on a GPU."""
    stats = judged.measured.stats
    cause = judged.causes.get("copy")
    if cause is None or judged.facts.device_type != "cuda" or stats.prefetch_active or stats.copy_ms is None:
        return None
    if judged.loader.pin_memory is not True:
        return None
    why = Note.of("copied ahead")
    return replace(
        _callback_remedy(judged, _our_package(judged), "PrefetchCallback", why),
        least_step_ms=bounds.without(judged.shares, stats.copy_ms),
        change=Change("prefetch_callback", "True"),
    )


def rare_progress_bar(judged: JudgedRun) -> Remedy | None:
    """Remedy: draw the progress bar rarely, if it is drawn often and takes time between the steps."""
    rate = judged.facts.trainer.bar_refresh_rate
    drawn = [hook for hook in judged.measured.hooks if _bar_of(hook) is not None]
    if "framework" not in judged.causes or not rate or rate >= RARELY_STEPS or not drawn:
        return None
    takes_ms = _sum_ms(drawn)
    remedy = _callback_remedy(
        judged,
        f"{judged.facts.trainer.package}.callbacks",
        str(_bar_of(drawn[0])),
        Note.of("bar drawn", ms=takes_ms),
        argument=f"refresh_rate={RARELY_STEPS}",
        change=f"refresh_rate: {rate} -> {RARELY_STEPS} ",
    )
    change = Change("bar_refresh_rate", str(RARELY_STEPS))
    return replace(remedy, least_step_ms=_rarer_ms(judged, takes_ms, rate), change=change)


def _bar_of(hook: HookTime) -> str | None:
    """Return the class of the progress bar that a hook belongs to; None for other hooks."""
    return next((bar for bar in _BARS if f"]{bar}" in hook.name), None)


def log_rarely(judged: JudgedRun) -> Remedy | None:
    """Remedy: log rarely, if loggers are called often and take time between the steps."""
    interval = judged.facts.trainer.log_every_n_steps
    calls = [hook for hook in judged.measured.hooks if _LOGGING.search(hook.name)]
    if "framework" not in judged.causes or not interval or interval >= RARELY_STEPS or not calls:
        return None
    takes_ms = _sum_ms(calls)
    why = Note.of("logger called", hook=calls[0].name, ms=takes_ms)
    remedy = trainer_remedy(judged.loader_code, "log_every_n_steps", interval, RARELY_STEPS, why)
    return replace(remedy, least_step_ms=_rarer_ms(judged, takes_ms, interval))


def _sum_ms(hooks: list[HookTime]) -> float:
    return sum(hook.ms_per_step for hook in hooks)


def _rarer_ms(judged: JudgedRun, takes_ms: float, interval: int) -> float:
    """Return the step time if something that is done every ``interval`` steps is done only every ``RARELY_STEPS``
    steps."""
    between_ms = judged.measured.stats.other_ms or 0.0
    return bounds.without(judged.shares, min(takes_ms, between_ms) * (1 - interval / RARELY_STEPS))


# --- which of them are printed ------------------------------------------------------------------------------------

RULES = (
    more_workers, fewer_workers, fewer_torch_threads, persistent_workers, any_order, files_in_memory, crops_only,
    batches_in_place, faster_decoder, decoding_on_the_gpu, fast_resizing, packed_images, pinned_memory,
    prefetch_callback, rare_progress_bar, log_rarely,
)  # fmt: skip
"""Rules: each returns a remedy with a bound, or None. If two remedies save the same, the earlier rule's comes first."""


def remedies_for(judged: JudgedRun) -> tuple[Remedy, ...]:
    """Return the remedies to print, the largest saving first. If several change the same setting, only the best is
    printed."""
    remedies = []
    for rule in RULES:
        remedy = rule(judged)
        if remedy is not None and (judged.facts.loop == "trainer" or remedy.form == "arguments"):
            gain_pct = _gain_pct(judged, remedy)
            remedies.append(replace(remedy, most_gain_pct=gain_pct, effects=_EFFECTS.get(setting_of(remedy), ())))
    return largest(remedies, least_gain_pct(judged))


def largest(remedies: list[Remedy], least_pct: float) -> tuple[Remedy, ...]:
    """Return the remedies with the largest savings, at most three, of those that save ``least_pct`` or more.

    For each setting, only the best counts.
    """
    gains = [remedy for remedy in remedies if (remedy.most_gain_pct or 0.0) >= least_pct]
    gains.sort(key=lambda remedy: -(remedy.most_gain_pct or 0.0))
    best: dict[str, Remedy] = {}
    for remedy in gains:
        best.setdefault(setting_of(remedy), remedy)
    return tuple(best.values())[:MOST_REMEDIES]


def setting_of(remedy: Remedy) -> str:
    """Return the name of the setting that a remedy changes; empty if it changes none."""
    if remedy.change is None:
        return ""
    return remedy.change.setting


_EFFECTS: dict[str, tuple[Effect, ...]] = {
    "num_workers": ("random numbers",),
    "torch_threads": ("sums",),
    "persistent_workers": ("random numbers", "copies of the dataset"),
    "in_order": ("order",),
    "staged": ("memory",),
    "decodes_whole": ("random numbers", "pixels"),
    "backend": ("pixels",),
    "quality": ("pixels",),
}
"""The setting that a remedy changes -> what else changes with it, if anything."""


def _gain_pct(judged: JudgedRun, remedy: Remedy) -> float | None:
    """Return the upper bound of a remedy's saving, in % of an epoch including its first batch; None if unknown."""
    if remedy.most_gain_pct is not None or remedy.least_step_ms is None:
        return remedy.most_gain_pct
    return 100 * (judged.shares.step_ms - remedy.least_step_ms) / judged.step_with_start_ms


def least_gain_pct(judged: JudgedRun) -> float:
    """Return the smallest saving of a printed remedy: 5 %, or 10 % if confidence is low, or more if the noise is
    larger."""
    low, high = judged.measured.stats.interval_pct or (0.0, 0.0)
    is_unsure = judged.measured.stats.confidence == "low" or judged.facts.crowded
    least_pct = LEAST_UNSURE_GAIN_PCT if is_unsure else LEAST_GAIN_PCT
    return max(least_pct, (high - low) / 2, (judged.measured.experiments.noise_pct or 0.0) / 2)
