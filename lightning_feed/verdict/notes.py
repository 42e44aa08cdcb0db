"""Notes: things to try without a known gain, and reasons why the obvious change would not help."""

import re
from collections.abc import Callable, Iterator
from typing import TypeGuard

from lightning_feed.measure.experiment_results import NOT_TRANSFORMS, step_of
from lightning_feed.measure.measurements import SYNCS, HookTime, LoopFacts
from lightning_feed.trials.search import OUT_OF_TIME
from lightning_feed.verdict import bounds
from lightning_feed.verdict.causes import MANY_TENSORS
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Remedy
from lightning_feed.verdict.remedies import LEAST_PCT, MADE_ON_CPU, Finding, least_gain_pct, may_have_workers
from lightning_feed.verdict.shares import MODERATE_PCT, TOY_STEP_MS, in_ms
from lightning_feed.wording import in_rate, rate_unit

MOST = 3
SHARD = (
    "the dataset is an IterableDataset that may not divide its samples among workers, so no number of workers is "
    "advised: with num_workers=2 every sample could come twice"
)
_DIAGNOSE = "`lightning-feed diagnose your_script.py -- ARGUMENTS`"
_ASK: tuple[Cause, ...] = ("no workers", "cpu", "oversubscribed", "waiting", "unknown")
"""Causes that lie in making samples or batches."""
_WAYS_OUT = {
    "prog_bar": "self.log(..., prog_bar=False) avoids it",
    "grad_scaler": 'precision="bf16-mixed" needs no scaler',
    "sigterm_broadcast": "there is no switch for it",
    "throughput_monitor": "remove that callback once you have its figures",
}


def notes_for(finding: Finding, remedies: tuple[Remedy, ...]) -> tuple[str, ...]:
    """Further facts and things to try: first those that concern the longest part of a step."""
    said = [*cut_short(finding.facts)]
    for part in finding.causes:
        said += _BY_PART.get(part, _no_notes)(finding, remedies)
    said += _short_steps(finding)
    return tuple(dict.fromkeys(said))[:MOST]


def cut_short(facts: LoopFacts) -> Iterator[str]:
    """Note on an epoch that ended too early, since Lightning says nothing about it."""
    if facts.cut_short is not None:
        came, promised = facts.cut_short
        yield (
            f"the loader ended after {came} of {promised} batches, so Lightning ran no validation: its dataset raised "
            "StopIteration, or the length of its sampler is wrong"
        )


def why_not(finding: Finding, remedies: tuple[Remedy, ...]) -> tuple[str, ...]:
    """The reasons why more workers, or decoding only the crops, did not help in the trials."""
    reasons = []
    if finding.data is not None and not any(remedy.changes.startswith("num_workers=") for remedy in remedies):
        reasons.append(_workers_in_vain(finding))
        reasons.append(_taken_back(finding))
    reasons.append(_crops_in_vain(finding))
    return tuple(reason for reason in reasons if reason)


def _taken_back(finding: Finding) -> str:
    """The setting that was faster in the trials, but not in training itself. Empty: there is none."""
    found = finding.measured.found
    own = found.tried_as("own")
    if found.chosen_fit_ms is None or own is None or not own.chosen:
        return ""
    return f"what was faster in trials: {found.why_chosen}"


def _workers_in_vain(finding: Finding) -> str:
    """The reason why the trials chose no more workers. Empty: they did, or there were none."""
    found = finding.measured.found
    own = found.tried_as("own")
    chosen = found.tried_as("chosen")
    if own is None or chosen is None or chosen.num_workers > own.num_workers or found.chosen_fit_ms is not None:
        return ""
    more = [setting.step_ms for setting in found.tried if setting.num_workers > own.num_workers]
    if not more:
        return ""
    step_ms = in_ms(own.step_ms, own.step_ms)
    return f"more workers: {in_ms(min(more), own.step_ms)} ms a step at best in the trials, as it is {step_ms} ms"


def _crops_in_vain(finding: Finding) -> str:
    trial = finding.measured.found.crops
    least_ms = bounds.with_crops(finding.measured, finding.shares)
    step_ms = finding.shares.step_ms
    if trial is None or least_ms is None or step_ms - least_ms >= LEAST_PCT / 100 * finding.step_with_start_ms:
        return ""
    return f"decoding only the crops: {trial.whole_ms:.2f} -> {trial.crop_ms:.2f} ms of CPU for a sample, no clear gain"


# --- waiting for data ---------------------------------------------------------------------------------------------


def _data(finding: Finding, remedies: tuple[Remedy, ...]) -> Iterator[str]:
    facts = finding.facts
    cause = finding.causes.get("data")
    if cause is None:
        return
    if finding.measured.found.why_chosen.endswith(OUT_OF_TIME):
        yield "the search for workers ran out of time: LIGHTNING_FEED=tune searches on, and remembers the result"
    yield from _undivided(finding, cause)
    crops = tuple(_whole_images(finding, cause))
    yield from crops
    if not remedies:
        if cause in _ASK and _may_diagnose(finding) and not crops:
            yield f"{_DIAGNOSE} finds the lines of your code that take the time"
        yield from _TRY.get(cause, _no_hint)(finding)
    yield from _HINTS.get(cause, _no_hint)(finding)
    if facts.backend in ("dali-cpu", "dali-gpu"):
        yield 'the workers wait, and DALI decodes what they read: compare with backend="torch"'
    yield from _transforms(finding)


def _undivided(finding: Finding, cause: Cause) -> Iterator[str]:
    """Note on data that workers would repeat or break, unless its batches are ready and workers are no remedy."""
    if finding.facts.why_no_workers:
        yield f"no workers, though they would load while the model trains: {finding.facts.why_no_workers}"
    elif finding.facts.keeps:
        yield second_epoch(finding.facts)
    elif cause != "hand-over" and (finding.facts.num_workers or 0) <= 1 and not may_have_workers(finding):
        yield SHARD


def second_epoch(facts: LoopFacts) -> str:
    """Note on a dataset that keeps what it reads, in the epoch in which it does."""
    return (
        f"train for a second epoch before you change workers: {facts.keeps} keeps what was read, and each worker would "
        "have to fill its own"
    )


def _may_diagnose(finding: Finding) -> bool:
    """True for the report of a fit, which diagnose can measure further."""
    return finding.measured.experiments is None and finding.facts.loop == "trainer" and finding.facts.stage == "fit"


def _is_worth_it(step: float | None, finding: Finding) -> TypeGuard[float]:
    """True for a known step time that saves as much as a remedy must save."""
    if step is None:
        return False
    return 100 * (finding.shares.step_ms - step) / finding.step_with_start_ms >= least_gain_pct(finding)


def _no_hint(_: Finding) -> Iterator[str]:
    yield from ()


def _one_rank(finding: Finding) -> Iterator[str]:
    if finding.measured.ranks is not None:
        yield f"rank {finding.measured.ranks.slow_rank} alone is slow: compare the nodes' disks and CPUs"


def _jitter(finding: Finding) -> Iterator[str]:
    depth = finding.facts.prefetch_factor
    if depth is not None:
        more = f"More prefetched batches may cover the slow ones: try prefetch_factor={2 * depth}"
        yield f"the loader is fast enough on average. {more}"


def _pin_thread(finding: Finding) -> Iterator[str]:
    yield "one thread pins all batches and cannot keep up: send fewer bytes, such as uint8 images for device_transform"
    yield from _in_place(finding)


def _in_place(finding: Finding) -> Iterator[str]:
    """Note on loaders whose workers hand batches over without copying them, if a data module can have them."""
    place = finding.place
    theirs = place.datamodule and place.form != "settings" and finding.facts.workers == "process"
    if theirs and finding.shares.data_pct >= MODERATE_PCT:
        yield f"FastDataModule.wrap({place.datamodule}(...)) hands batches over in place, and no thread has to pin them"


def _hand_over(finding: Finding) -> Iterator[str]:
    facts = finding.facts
    if (facts.batch_tensors or 0) >= MANY_TENSORS:
        yield (
            f"a batch has {facts.batch_tensors} tensors, and each is sent separately: fewer, larger tensors are "
            "faster to send"
        )


def _cold(finding: Finding) -> Iterator[str]:
    """Note on the trial with all files in memory."""
    found = finding.measured.found
    if _may_diagnose(finding):
        yield f"files are read from storage: {_DIAGNOSE} times the loader with its files in memory"
    elif _is_worth_it(bounds.with_rate(finding.measured, finding.shares, found.cached_bytes_per_s), finding):
        rates = _rates(finding, found.loader_per_s, found.cached_bytes_per_s)
        yield f"files are read from storage: with them in memory the loader alone gives {rates}"


def _rates(finding: Finding, before_per_s: float | None, after_per_s: float | None) -> str:
    """Two rates of the loader alone, as tried."""
    size = finding.measured.found.batch_size
    before = in_rate((before_per_s or 0.0) * (size or 1))
    after = in_rate((after_per_s or 0.0) * (size or 1))
    return f"{after} {rate_unit(size)} instead of {before}"


def _oversubscribed(finding: Finding) -> Iterator[str]:
    workers = finding.facts.num_workers
    cpus = finding.facts.usable_cpus
    if not workers or not cpus:
        return
    if workers > cpus:
        yield f"{workers} workers share {cpus} CPUs: fewer may be as fast. `lightning-feed tune` tries it"
        return
    yield (
        "other threads take the workers' CPUs. If these are threads of the training process, torch.set_num_threads(1) "
        "at the start of your program gives them back"
    )


_TRY: dict[Cause, Callable[[Finding], Iterator[str]]] = {
    "hand-over": _hand_over,
    "oversubscribed": _oversubscribed,
    "cold reads": _cold,
}
"""Cause -> notes if there is no remedy."""
_HINTS: dict[Cause, Callable[[Finding], Iterator[str]]] = {
    "one rank": _one_rank,
    "hand-over": _in_place,
    "jitter": _jitter,
    "pin thread": _pin_thread,
}
"""Cause -> notes, with or without a remedy."""


def _whole_images(finding: Finding, cause: Cause) -> Iterator[str]:
    if finding.facts.decodes_whole and cause in MADE_ON_CPU and _may_diagnose(finding):
        yield f"your ImageFolder decodes each image whole and then crops it: {_DIAGNOSE} times decoding only the crops"


def _transforms(finding: Finding) -> Iterator[str]:
    """Note on the slowest transforms, and the loader's rate without transforms: the limit for faster ones."""
    found = finding.measured.found
    costs = [cost for cost in found.costs if step_of(cost.name) not in NOT_TRANSFORMS]
    without_ms = bounds.with_rate(finding.measured, finding.shares, found.no_transform_per_s)
    if not costs or not _is_worth_it(without_ms, finding):
        return
    slowest = sorted(costs, key=lambda cost: cost.cpu_ms, reverse=True)[:2]
    named = " and ".join(f"{cost.name} ({cost.cpu_ms:.1f} ms)" for cost in slowest)
    rates = _rates(finding, found.loader_per_s, found.no_transform_per_s)
    yield f"the slowest transforms of a sample are {named}; without transforms the loader alone gives {rates}"


# --- the other parts of a step ------------------------------------------------------------------------------------


def _framework(finding: Finding, remedies: tuple[Remedy, ...]) -> Iterator[str]:
    facts = finding.facts
    hooks = finding.measured.hooks
    if "framework" not in finding.causes:
        return
    if facts.device_type != "cpu":
        yield from (f"{SYNCS[name]}: {way}" for name, way in _WAYS_OUT.items() if name in facts.syncs)
    theirs = [hook for hook in hooks if not hook.name.startswith("logger ") and not _treated(hook, remedies)]
    if theirs:
        yield _slow_hook(finding, theirs[0])
    if not hooks:
        yield 'Trainer(profiler="simple") names the callback or hook that takes the time between the steps'


def _treated(hook: HookTime, remedies: tuple[Remedy, ...]) -> bool:
    return "ProgressBar" in hook.name and any(remedy.changes.startswith("bar_") for remedy in remedies)


def _slow_hook(finding: Finding, hook: HookTime) -> str:
    """The note on a slow hook. It is not a remedy, since the hook may be needed."""
    name = re.sub(r"\{.*\}", "", hook.name)  # Lightning adds the callback's settings to the name
    place = next((one for one in finding.facts.hook_places if one.name == name), None)
    at = f" ({place.at})" if place is not None else ""
    step = finding.shares.step_ms
    way = "if it only observes, every 50th step is enough"
    if place is not None and place.interval:
        way += f" ({place.interval}=50)"
    if "ProgressBar" in name:
        way = "Trainer(enable_progress_bar=False) saves it"
    return f"{name}{at} takes {in_ms(hook.ms_per_step, step)} of {in_ms(step, step)} ms a step; {way}"


def _copy(finding: Finding, _: tuple[Remedy, ...]) -> Iterator[str]:
    cause = finding.causes.get("copy")
    if cause is not None and finding.facts.device_type == "cpu":
        hook = "device_transform" if finding.facts.device_transform else "your transfer hooks"
        yield f"nothing is copied on a CPU, so this is {hook}: move it to the dataset, and workers do it meanwhile"
    elif cause == "unpinned":
        yield "batches are in pageable memory, so the host has to wait while they are copied: try pin_memory=True"
    elif cause == "small tensors" and finding.measured.stats.prefetch_active:
        yield "each of the many small tensors is copied separately: combine them into one tensor in collate"
    elif cause == "decoding on the GPU":
        yield 'to compare decoders: ImageFolderDataModule(backend="torch"), or "dali-gpu"'


def _launch(finding: Finding, _: tuple[Remedy, ...]) -> Iterator[str]:
    if finding.causes.get("compute") == "launch":
        yield (
            "the loader is not the limit: "
            'torch.compile(model, mode="reduce-overhead") launches many operations at once, '
            "as CUDA graphs do, and larger batches launch fewer for each sample"
        )


def _short_steps(finding: Finding) -> Iterator[str]:
    """Note on steps hardly longer than those for which nothing but larger batches is advised."""
    step_ms = finding.shares.step_ms
    if step_ms < 2 * TOY_STEP_MS:
        yield f"a step of {in_ms(step_ms, step_ms)} ms is short: larger batches may gain more than any other setting"


def _no_notes(_: Finding, __: tuple[Remedy, ...]) -> Iterator[str]:
    yield from ()


_BY_PART: dict[Bottleneck, Callable[[Finding, tuple[Remedy, ...]], Iterator[str]]] = {
    "framework": _framework,
    "copy": _copy,
    "data": _data,
    "compute": _launch,
}
"""Part of a step -> its notes."""
