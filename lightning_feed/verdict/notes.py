"""Notes: things to try without a known gain, and reasons why the obvious change would not help."""

import re
from typing import TypeGuard

from lightning_feed.measure.experiment_results import NOT_TRANSFORMS, step_of
from lightning_feed.measure.measurements import SYNCS, DeviceWait, HookTime, LoopFacts
from lightning_feed.trials.search import OUT_OF_TIME
from lightning_feed.verdict import bounds
from lightning_feed.verdict.device_use import has_idle_device, waits_in_each_step
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Remedy
from lightning_feed.verdict.lighter_samples import TRIES_LIGHTER_SAMPLES, may_try_lighter_samples
from lightning_feed.verdict.remedies import (
    IN_PLACE,
    MADE_ON_CPU,
    Finding,
    least_gain_pct,
    may_have_workers,
    may_try_workers,
)
from lightning_feed.verdict.shares import in_ms
from lightning_feed.verdict.thresholds import LEAST_GAIN_PCT, MANY_TENSORS, MOST_NOTES, TOY_STEP_MS
from lightning_feed.wording import in_rate, rate_unit, source_line

SHARD = (
    "the dataset is an IterableDataset that may not divide its samples among workers, so no number of workers is "
    "advised: with num_workers=2 every sample could come twice"
)
_DIAGNOSE = "`lightning-feed diagnose your_script.py -- ARGUMENTS`"
_MADE_IN_YOUR_CODE: tuple[Cause, ...] = ("no workers", "cpu", "oversubscribed", "waiting", "unknown")
"""Causes that lie in making samples or batches."""
_WAYS_OUT = {
    "prog_bar": "self.log(..., prog_bar=False) avoids it",
    "grad_scaler": 'precision="bf16-mixed" needs no scaler',
    "sigterm_broadcast": "there is no switch for it",
    "throughput_monitor": "remove that callback once you have its figures",
}
Notes = list[str]
"""Notes, one sentence each; empty if there is nothing to say."""


def notes_for(finding: Finding, remedies: tuple[Remedy, ...]) -> tuple[str, ...]:
    """Further facts and things to try: first the notes on the longest part of a step."""
    notes = cut_short(finding.facts)
    for part in finding.causes:
        notes += _notes_on(part, finding, remedies)
    notes += _short_steps(finding)
    return tuple(dict.fromkeys(notes))[:MOST_NOTES]


def _notes_on(part: Bottleneck, finding: Finding, remedies: tuple[Remedy, ...]) -> Notes:
    if part == "framework":
        return _framework(finding, remedies)
    if part == "copy":
        return _copy(finding, remedies)
    if part == "data":
        return _data(finding, remedies)
    return _step_itself(finding)


def cut_short(facts: LoopFacts) -> Notes:
    """Note on an epoch that ended too early, because Lightning does not report it."""
    if facts.cut_short is None:
        return []
    batches, length = facts.cut_short
    return [
        f"the loader ended after {batches} of {length} batches, so Lightning ran no validation: its dataset raised "
        "StopIteration, or the length of its sampler is wrong"
    ]


def why_not(finding: Finding, remedies: tuple[Remedy, ...]) -> tuple[str, ...]:
    """The reasons why more workers, or decoding only the crops, did not help in the trials."""
    reasons = []
    if finding.data is not None and not any(remedy.changes.startswith("num_workers=") for remedy in remedies):
        reasons.append(_workers_in_vain(finding))
        reasons.append(_taken_back(finding))
    reasons.append(_crops_in_vain(finding))
    return tuple(reason for reason in reasons if reason)


def _taken_back(finding: Finding) -> str:
    """The sentence on a setting that was faster in the trials, but not in training itself; empty if there is none."""
    results = finding.measured.experiments
    own = results.tried_as("own")
    if results.chosen_fit_ms is None or own is None or not own.chosen:
        return ""
    return f"what was faster in trials: {results.why_chosen}"


def _workers_in_vain(finding: Finding) -> str:
    """The sentence on trials of more workers that were no faster; empty if more workers were chosen, or not tried."""
    results = finding.measured.experiments
    own = results.tried_as("own")
    chosen = results.tried_as("chosen")
    if own is None or chosen is None or results.chosen_fit_ms is not None:
        return ""
    more_ms = [setting.step_ms for setting in results.tried if setting.num_workers > own.num_workers]
    if not more_ms or chosen.num_workers > own.num_workers:
        return ""
    best = in_ms(min(more_ms), own.step_ms)
    return f"more workers: {best} ms a step at best in the trials, as it is {in_ms(own.step_ms, own.step_ms)} ms"


def _crops_in_vain(finding: Finding) -> str:
    trial = finding.measured.experiments.crops
    least_ms = bounds.with_crops(finding.measured, finding.shares)
    if trial is None or least_ms is None:
        return ""
    if finding.shares.step_ms - least_ms >= LEAST_GAIN_PCT / 100 * finding.step_with_start_ms:
        return ""
    return f"decoding only the crops: {trial.whole_ms:.2f} -> {trial.crop_ms:.2f} ms of CPU for a sample, no clear gain"


# --- waiting for data ---------------------------------------------------------------------------------------------


def _data(finding: Finding, remedies: tuple[Remedy, ...]) -> Notes:
    cause = finding.data
    if cause is None:
        return []
    notes: Notes = []
    if finding.measured.experiments.why_chosen.endswith(OUT_OF_TIME):
        more = "LIGHTNING_FEED=tune searches on, and remembers the result"
        notes.append(f"the search for workers ran out of time: {more}")
    notes += _undivided(finding, cause)
    whole_images = _whole_images(finding, cause)
    notes += whole_images
    if not remedies and not may_try_workers(finding.measured, cause):
        if cause in _MADE_IN_YOUR_CODE and _may_diagnose(finding) and not whole_images:
            lighter = cause in MADE_ON_CPU and may_try_lighter_samples(finding.measured)
            what = TRIES_LIGHTER_SAMPLES if lighter else "finds the lines of your code that take the time"
            notes.append(f"{_DIAGNOSE} {what}")
        notes += _without_remedy(finding, cause)
    notes += _hints(finding, cause, remedies)
    if finding.facts.datamodule.backend in ("dali-cpu", "dali-gpu"):
        notes.append('the workers wait, and DALI decodes what they read: compare with backend="torch"')
    return notes + _transforms(finding)


def _undivided(finding: Finding, cause: Cause) -> Notes:
    """Note on a dataset that does not survive a fork, or whose samples several workers would repeat.

    There is no note on repeated samples if batches are ready when training asks for them.
    """
    loader = finding.loader
    if loader.why_no_workers:
        return [f"no workers, though they would load while the model trains: {loader.why_no_workers}"]
    if cause != "hand-over" and (loader.num_workers or 0) <= 1 and not may_have_workers(loader):
        return [SHARD]
    return []


def _may_diagnose(finding: Finding) -> bool:
    """True for the report of a fit that ``diagnose`` can measure further."""
    return not finding.measured.diagnosed and finding.facts.loop == "trainer" and finding.facts.stage == "fit"


def _is_worth_it(step_ms: float | None, finding: Finding) -> TypeGuard[float]:
    """True if a step time is known and saves at least as much as a printed remedy has to save."""
    if step_ms is None:
        return False
    return 100 * (finding.shares.step_ms - step_ms) / finding.step_with_start_ms >= least_gain_pct(finding)


def _hints(finding: Finding, cause: Cause, remedies: tuple[Remedy, ...]) -> Notes:
    """Notes on a cause, with or without a remedy."""
    ranks = finding.measured.ranks
    depth = finding.loader.prefetch_factor
    if cause == "one rank" and ranks is not None:
        return [f"rank {ranks.slow_rank} alone is slow: compare the nodes' disks and CPUs"]
    if cause == "jitter" and depth is not None:
        more = f"More prefetched batches may cover the slow ones: try prefetch_factor={2 * depth}"
        return [f"the loader is fast enough on average. {more}"]
    if cause == "pin thread" and not _come_in_place(remedies):
        fewer_bytes = "send fewer bytes, such as uint8 images for device_transform"
        return [f"one thread pins all batches and cannot keep up: {fewer_bytes}"]
    return []


def _come_in_place(remedies: tuple[Remedy, ...]) -> bool:
    """True if batches in place are a remedy. Nothing else is then said about the same causes."""
    return any(remedy.changes == IN_PLACE for remedy in remedies)


def _without_remedy(finding: Finding, cause: Cause) -> Notes:
    """Notes on a cause for which there is no remedy."""
    tensors = finding.facts.batch.tensors or 0
    if cause == "hand-over" and tensors >= MANY_TENSORS:
        return [f"a batch has {tensors} tensors, and each is sent separately: fewer, larger tensors are faster to send"]
    if cause == "oversubscribed":
        return _oversubscribed(finding)
    if cause == "cold reads":
        return _cold_reads(finding)
    return []


def _oversubscribed(finding: Finding) -> Notes:
    workers = finding.loader.num_workers
    cpus = finding.facts.usable_cpus
    if not workers or not cpus or workers > cpus:  # trials of fewer are the next step
        return []
    return [
        "other threads take the workers' CPUs. If these are threads of the training process, torch.set_num_threads(1) "
        "at the start of your program gives them back"
    ]


def _cold_reads(finding: Finding) -> Notes:
    """Note on the loader's rate with all files in memory, or on the command that measures it."""
    results = finding.measured.experiments
    if _may_diagnose(finding):
        return [f"files are read from storage: {_DIAGNOSE} times the loader with its files in memory"]
    if not _is_worth_it(bounds.with_rate(finding.measured, finding.shares, results.cached_bytes_per_s), finding):
        return []
    rates = _rates(finding, results.cached_bytes_per_s)
    return [f"files are read from storage: with them in memory the loader alone gives {rates}"]


def _rates(finding: Finding, changed_per_s: float | None) -> str:
    """Two rates of the loader alone, as text: with one change, and as configured."""
    size = finding.measured.experiments.batch_size
    own = in_rate((finding.measured.experiments.loader_per_s or 0.0) * (size or 1))
    changed = in_rate((changed_per_s or 0.0) * (size or 1))
    return f"{changed} {rate_unit(size)} instead of {own}"


def _whole_images(finding: Finding, cause: Cause) -> Notes:
    if not finding.loader.decodes_whole or cause not in MADE_ON_CPU or not _may_diagnose(finding):
        return []
    return [f"your ImageFolder decodes each image whole and then crops it: {_DIAGNOSE} times decoding only the crops"]


def _transforms(finding: Finding) -> Notes:
    """Note on the slowest transforms, and on the loader's rate without them: faster transforms cannot exceed it."""
    results = finding.measured.experiments
    costs = [cost for cost in results.costs if step_of(cost.name) not in NOT_TRANSFORMS]
    without_ms = bounds.with_rate(finding.measured, finding.shares, results.no_transform_per_s)
    if not costs or not _is_worth_it(without_ms, finding):
        return []
    slowest = sorted(costs, key=lambda cost: cost.cpu_ms, reverse=True)[:2]
    names = " and ".join(f"{cost.name} ({cost.cpu_ms:.1f} ms)" for cost in slowest)
    rates = _rates(finding, results.no_transform_per_s)
    return [f"the slowest transforms of a sample are {names}; without transforms the loader alone gives {rates}"]


# --- the other parts of a step ------------------------------------------------------------------------------------


def _framework(finding: Finding, remedies: tuple[Remedy, ...]) -> Notes:
    hooks = finding.measured.hooks
    if not hooks:
        slow_hook = ['Trainer(profiler="simple") names the callback or hook that takes the time between the steps']
    else:
        users = [hook for hook in hooks if not hook.name.startswith("logger ") and not _is_treated(hook, remedies)]
        slow_hook = [_slow_hook(finding, hook) for hook in users[:1]]
    if finding.facts.device_type == "cpu":
        return slow_hook
    return _syncs(finding) + slow_hook


def _syncs(finding: Finding) -> Notes:
    """The known reasons for which the host waits for the device, each with a way to avoid it."""
    return [f"{SYNCS[name]}: {way}" for name, way in _WAYS_OUT.items() if name in finding.facts.syncs]


def _is_treated(hook: HookTime, remedies: tuple[Remedy, ...]) -> bool:
    return "ProgressBar" in hook.name and any(remedy.changes.startswith("bar_") for remedy in remedies)


def _slow_hook(finding: Finding, hook: HookTime) -> str:
    """The note on a slow hook: a note, not a remedy, because the hook may be needed."""
    name = re.sub(r"\{.*\}", "", hook.name)  # Lightning adds the callback's settings to the name
    code = next((code for code in finding.facts.hook_code if code.name == name), None)
    step_ms = finding.shares.step_ms
    takes = f"takes {in_ms(hook.ms_per_step, step_ms)} of {in_ms(step_ms, step_ms)} ms a step"
    way = "if it only observes, every 50th step is enough"
    if "ProgressBar" in name:
        way = "Trainer(enable_progress_bar=False) saves it"
    elif code is not None and code.interval:
        way += f" ({code.interval}=50)"
    if code is None:
        return f"{name} {takes}; {way}"
    return f"{name} ({code.at}) {takes}; {way}"


def _copy(finding: Finding, remedies: tuple[Remedy, ...]) -> Notes:
    cause = finding.causes["copy"]
    if finding.facts.device_type == "cpu":
        hook = "device_transform" if finding.facts.datamodule.device_transform else "your transfer hooks"
        return [f"nothing is copied on a CPU, so this is {hook}: move it to the dataset, and workers do it meanwhile"]
    if cause == "unpinned" and not _come_in_place(remedies):
        return _unpinned(finding)
    if cause == "small tensors" and finding.measured.stats.prefetch_active:
        return ["each of the many small tensors is copied separately: combine them into one tensor in collate"]
    return []


def _unpinned(finding: Finding) -> Notes:
    """Note on batches in pageable memory that do not come in place, or whose slots are not page-locked."""
    waits = "batches are in pageable memory, so the host has to wait while they are copied"
    if not finding.loader.pin_memory:
        return [f"{waits}: try pin_memory=True"]
    if finding.loader.in_place:
        return [f"{waits}: allow more locked memory (`ulimit -l`), or use smaller batches"]
    return [f"{waits}: give their class a method pin_memory(), or use dicts and lists of tensors"]


def _step_itself(finding: Finding) -> Notes:
    """Notes on a step itself that the host limits."""
    cause = finding.causes.get("compute")
    if cause == "launch":
        return [
            "the loader is not the limit: "
            'torch.compile(model, mode="reduce-overhead") launches many operations at once, '
            "as CUDA graphs do, and larger batches launch fewer for each sample"
        ]
    if cause == "synchronisation":
        lines = [wait for wait in waits_in_each_step(finding.facts) if wait.is_users]
        return [_rarer_wait(wait) for wait in lines[:1]] + _syncs(finding)
    if cause == "unknown" and has_idle_device(finding.measured):
        return [
            "the GPU waits for something else that the step does on the host: "
            'Trainer(profiler="advanced") names the function'
        ]
    return []


def _rarer_wait(wait: DeviceWait) -> str:
    line = source_line(wait.file, wait.line)
    return f"{line}: read the value in every 50th step, or keep it on the GPU with .detach()"


def _short_steps(finding: Finding) -> Notes:
    """Note on short steps, below 2 x :data:`TOY_STEP_MS`. (Below that constant, only larger batches are advised.)"""
    step_ms = finding.shares.step_ms
    if step_ms >= 2 * TOY_STEP_MS:
        return []
    return [f"a step of {in_ms(step_ms, step_ms)} ms is short: larger batches may gain more than any other setting"]
