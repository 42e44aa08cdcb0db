"""Notes: things to try without a known gain, and reasons why the obvious change would not help."""

import re
from typing import TypeGuard

from lightning_feed.measure.experiment_results import NOT_TRANSFORMS, step_of
from lightning_feed.measure.measurements import SYNCS, HookCode, HookTime, LoopFacts
from lightning_feed.verdict import bounds
from lightning_feed.verdict.device_use import has_idle_device, waits_in_each_step
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Note, NoteKind, Remedy
from lightning_feed.verdict.lighter_samples import may_try_lighter_samples
from lightning_feed.verdict.remedies import (
    IN_PLACE,
    MADE_ON_CPU,
    JudgedRun,
    least_gain_pct,
    may_have_workers,
    may_try_workers,
)
from lightning_feed.verdict.thresholds import LEAST_GAIN_PCT, MANY_TENSORS, MOST_NOTES, TOY_STEP_MS
from lightning_feed.wording import source_line

MADE_IN_YOUR_CODE: tuple[Cause, ...] = ("no workers", "cpu", "oversubscribed", "waiting", "unknown")
"""Causes that lie in making samples or batches."""
Notes = list[Note]
"""Empty if there is nothing to say."""


def notes_for(judged: JudgedRun, remedies: tuple[Remedy, ...]) -> tuple[Note, ...]:
    """Further facts and things to try: first the notes on the longest part of a step."""
    notes = cut_short(judged.facts)
    for part in judged.causes:
        notes += _notes_on(part, judged, remedies)
    notes += _short_steps(judged)
    different = [note for number, note in enumerate(notes) if note not in notes[:number]]
    return tuple(different)[:MOST_NOTES]


def _notes_on(part: Bottleneck, judged: JudgedRun, remedies: tuple[Remedy, ...]) -> Notes:
    if part == "framework":
        return _framework(judged, remedies)
    if part == "copy":
        return _copy(judged, remedies)
    if part == "data":
        return _data(judged, remedies)
    return _step_itself(judged)


def cut_short(facts: LoopFacts) -> Notes:
    """Note on an epoch that ended too early, because Lightning does not report it."""
    if facts.cut_short is None:
        return []
    batches, length = facts.cut_short
    return [Note.of("epoch cut short", batches=batches, length=length)]


def why_not(judged: JudgedRun, remedies: tuple[Remedy, ...]) -> tuple[Note, ...]:
    """Return the reasons why more workers, or decoding only the crops, did not help in the trials."""
    reasons: list[Note | None] = []
    if judged.data is not None and not any(remedy.sets("num_workers") for remedy in remedies):
        reasons.append(_workers_in_vain(judged))
        reasons.append(_taken_back(judged))
    reasons.append(_crops_in_vain(judged))
    return tuple(reason for reason in reasons if reason is not None)


def _taken_back(judged: JudgedRun) -> Note | None:
    """Return the note on a setting that was faster in the trials, but not in training itself; None if there is none."""
    results = judged.measured.experiments
    own = results.tried_as("own")
    if results.chosen_fit_ms is None or own is None or not own.chosen:
        return None
    return Note.of("taken back", workers=results.trained_workers, ms=results.chosen_fit_ms, own_ms=results.own_fit_ms)


def _workers_in_vain(judged: JudgedRun) -> Note | None:
    """Return the note on trials of more workers that were no faster; None if more workers were chosen, or not tried."""
    results = judged.measured.experiments
    own = results.tried_as("own")
    chosen = results.tried_as("chosen")
    if own is None or chosen is None or results.chosen_fit_ms is not None:
        return None
    more_ms = [setting.step_ms for setting in results.tried if setting.num_workers > own.num_workers]
    if not more_ms or chosen.num_workers > own.num_workers:
        return None
    return Note.of("more workers in vain", ms=min(more_ms), own_ms=own.step_ms)


def _crops_in_vain(judged: JudgedRun) -> Note | None:
    trial = judged.measured.experiments.crops
    least_ms = bounds.with_crops(judged.measured, judged.shares)
    if trial is None or least_ms is None:
        return None
    if judged.shares.step_ms - least_ms >= LEAST_GAIN_PCT / 100 * judged.step_with_start_ms:
        return None
    return Note.of("crops in vain", whole_ms=trial.whole_ms, crop_ms=trial.crop_ms)


# --- waiting for data ---------------------------------------------------------------------------------------------


def _data(judged: JudgedRun, remedies: tuple[Remedy, ...]) -> Notes:
    cause = judged.data
    if cause is None:
        return []
    notes: Notes = []
    if judged.measured.experiments.out_of_time:
        notes.append(Note.of("search ran out of time"))
    notes += _undivided(judged, cause)
    whole_images = _whole_images(judged, cause)
    notes += whole_images
    if not remedies and not may_try_workers(judged.measured, cause):
        notes += [] if whole_images else _diagnose(judged, cause)
        notes += _without_remedy(judged, cause)
    notes += _hints(judged, cause, remedies)
    if judged.facts.datamodule.backend in ("dali-cpu", "dali-gpu"):
        notes.append(Note.of("DALI decodes"))
    return notes + _transforms(judged)


def _diagnose(judged: JudgedRun, cause: Cause) -> Notes:
    """Note on the command that finds the lines of the user's code, or ways with less work for each sample."""
    if cause not in MADE_IN_YOUR_CODE or not _may_diagnose(judged):
        return []
    lighter = cause in MADE_ON_CPU and may_try_lighter_samples(judged.measured)
    return [Note.of("diagnose", tries="lighter samples" if lighter else "lines")]


def _undivided(judged: JudgedRun, cause: Cause) -> Notes:
    """Note on a dataset that does not survive a fork, or whose samples several workers would repeat.

    There is no note on repeated samples if batches are ready when training asks for them.
    """
    loader = judged.loader
    if loader.why_no_workers:
        return [Note.of("no workers allowed", why=loader.why_no_workers)]
    if cause != "hand-over" and (loader.num_workers or 0) <= 1 and not may_have_workers(loader):
        return [Note.of("may repeat samples")]
    return []


def _may_diagnose(judged: JudgedRun) -> bool:
    """Return True for the report of a fit that ``diagnose`` can measure further."""
    return not judged.measured.diagnosed and judged.facts.loop == "trainer" and judged.facts.stage == "fit"


def _is_worth_it(step_ms: float | None, judged: JudgedRun) -> TypeGuard[float]:
    """Return True if a step time is known and saves at least as much as a printed remedy has to save."""
    if step_ms is None:
        return False
    return 100 * (judged.shares.step_ms - step_ms) / judged.step_with_start_ms >= least_gain_pct(judged)


def _hints(judged: JudgedRun, cause: Cause, remedies: tuple[Remedy, ...]) -> Notes:
    """Return the notes on a cause, with or without a remedy."""
    ranks = judged.measured.ranks
    depth = judged.loader.prefetch_factor
    if cause == "one rank" and ranks is not None:
        return [Note.of("slow rank", rank=ranks.slow_rank)]
    if cause == "jitter" and depth is not None:
        return [Note.of("deeper queue", prefetch_factor=2 * depth)]
    if cause == "pin thread" and not _come_in_place(remedies):
        return [Note.of("pin thread")]
    return []


def _come_in_place(remedies: tuple[Remedy, ...]) -> bool:
    """Return True if batches in place are a remedy. Nothing else is then said about the same causes."""
    return any(remedy.change == IN_PLACE for remedy in remedies)


def _without_remedy(judged: JudgedRun, cause: Cause) -> Notes:
    """Return the notes on a cause for which there is no remedy."""
    tensors = judged.facts.batch.tensors or 0
    if cause == "hand-over" and tensors >= MANY_TENSORS:
        return [Note.of("many tensors", tensors=tensors)]
    if cause == "cold reads":
        return _cold_reads(judged)
    return []


def _cold_reads(judged: JudgedRun) -> Notes:
    """Note on the loader's rate with all files in memory, or on the command that measures it."""
    results = judged.measured.experiments
    if _may_diagnose(judged):
        return [Note.of("diagnose cold reads")]
    if not _is_worth_it(bounds.with_rate(judged.measured, judged.shares, results.cached_bytes_per_s), judged):
        return []
    return [Note.of("in memory", batches_per_s=results.cached_bytes_per_s, own_batches_per_s=results.loader_per_s)]


def _whole_images(judged: JudgedRun, cause: Cause) -> Notes:
    if not judged.loader.decodes_whole or cause not in MADE_ON_CPU or not _may_diagnose(judged):
        return []
    return [Note.of("diagnose whole images")]


def _transforms(judged: JudgedRun) -> Notes:
    """Note on the slowest transform, and on the loader's rate without any: faster transforms cannot exceed it."""
    results = judged.measured.experiments
    costs = [cost for cost in results.costs if step_of(cost.name) not in NOT_TRANSFORMS]
    without_ms = bounds.with_rate(judged.measured, judged.shares, results.no_transform_per_s)
    if not costs or not _is_worth_it(without_ms, judged):
        return []
    slowest = max(costs, key=lambda cost: cost.cpu_ms)
    note = Note.of(
        "slow transforms",
        transform=slowest.name,
        ms=slowest.cpu_ms,
        batches_per_s=results.no_transform_per_s,
        own_batches_per_s=results.loader_per_s,
    )
    return [note]


# --- the other parts of a step ------------------------------------------------------------------------------------


def _framework(judged: JudgedRun, remedies: tuple[Remedy, ...]) -> Notes:
    hooks = judged.measured.hooks
    if not hooks:
        slow_hook = [Note.of("profile hooks")]
    else:
        users = [hook for hook in hooks if not hook.name.startswith("logger ") and not _is_treated(hook, remedies)]
        slow_hook = [_slow_hook(judged, hook) for hook in users[:1]]
    if judged.facts.device_type == "cpu":
        return slow_hook
    return _syncs(judged) + slow_hook


def _syncs(judged: JudgedRun) -> Notes:
    """Return the notes on the known reasons for which the host waits for the device."""
    return [Note.of("avoid waits", sync=name) for name in SYNCS if name in judged.facts.syncs]


def _is_treated(hook: HookTime, remedies: tuple[Remedy, ...]) -> bool:
    return "ProgressBar" in hook.name and any(remedy.sets("bar_refresh_rate") for remedy in remedies)


def _slow_hook(judged: JudgedRun, hook: HookTime) -> Note:
    """Return the note on a slow hook: a note, not a remedy, because the hook may be needed."""
    name = re.sub(r"\{.*\}", "", hook.name)  # Lightning adds the callback's settings to the name
    unknown = HookCode(name=name, at="")
    code = next((code for code in judged.facts.hook_code if code.name == name), unknown)
    kind: NoteKind = "rarer bar" if "ProgressBar" in name else "rarer hook"
    return Note.of(
        kind, hook=name, at=code.at, interval=code.interval, ms=hook.ms_per_step, step_ms=judged.shares.step_ms
    )


def _copy(judged: JudgedRun, remedies: tuple[Remedy, ...]) -> Notes:
    cause = judged.causes["copy"]
    if judged.facts.device_type == "cpu":
        if judged.facts.datamodule.normalizes:
            return []
        hooks = "device_transform" if judged.facts.datamodule.device_transform else ""
        return [Note.of("move hooks", hooks=hooks)]
    if cause == "unpinned" and not _come_in_place(remedies):
        return _unpinned(judged)
    if cause == "small tensors" and judged.measured.stats.prefetch_active:
        return [Note.of("combine tensors")]
    return []


def _unpinned(judged: JudgedRun) -> Notes:
    """Note on batches in pageable memory that do not come in place, or whose slots are not page-locked."""
    if not judged.loader.pin_memory:
        return [Note.of("pin")]
    if judged.loader.in_place:
        return [Note.of("lock memory")]
    return [Note.of("pin method")]


def _step_itself(judged: JudgedRun) -> Notes:
    """Return the notes on a step itself that the host limits."""
    cause = judged.causes.get("compute")
    if cause == "launch":
        return [Note.of("launch less")]
    if cause == "synchronisation":
        lines = [wait for wait in waits_in_each_step(judged.facts) if wait.is_users]
        rarer = [Note.of("rarer wait", at=source_line(wait.file, wait.line)) for wait in lines[:1]]
        return rarer + _syncs(judged)
    if cause == "unknown" and has_idle_device(judged.measured):
        return [Note.of("profile the step")]
    return []


def _short_steps(judged: JudgedRun) -> Notes:
    """Note on short steps, below 2 x :data:`TOY_STEP_MS`. (Below that constant, only larger batches are advised.)"""
    step_ms = judged.shares.step_ms
    if step_ms >= 2 * TOY_STEP_MS:
        return []
    return [Note.of("short steps", ms=step_ms)]
