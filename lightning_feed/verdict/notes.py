"""Notes: changes without a prediction, and reasons why the obvious change would not help."""

import re
from collections.abc import Callable, Iterator
from typing import TypeGuard

from lightning_feed.errors import in_rate, plural, rate_unit
from lightning_feed.measure.measurements import SYNCS, HookTime
from lightning_feed.verdict import predict
from lightning_feed.verdict.causes import MANY_TENSORS
from lightning_feed.verdict.diagnosis import Cause, Remedy
from lightning_feed.verdict.remedies import (
    LEAST_PCT,
    MADE_ON_CPU,
    Finding,
    least_gain_pct,
    may_have_workers,
    steps_with_more,
)
from lightning_feed.verdict.shares import in_ms

MOST = 3
FULL_SHARE = 0.8
"""Mean fill of the queue above which there may be too many workers."""
MOSTLY_BUSY = 0.8
"""Share of the available CPU time above which all CPUs count as busy."""
SPARE = 1.1
"""Factor by which the loader, with fewer workers, must be faster than the model."""
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
    """Further facts and things to try, the most useful first."""
    said = [*_framework(finding, remedies), *_copy(finding), *_data(finding, remedies), *_launch(finding)]
    said += _fed(finding)
    return tuple(dict.fromkeys(said))[:MOST]


def why_not(finding: Finding, remedies: tuple[Remedy, ...]) -> tuple[str, ...]:
    """The reasons why more workers, or decoding only the crops, would not help, as tried or predicted."""
    said = []
    if finding.data is not None and not any(one.changes.startswith("num_workers=") for one in remedies):
        workers = _tried_in_vain(finding) or _predicted_in_vain(finding)
        said += [f"more workers: {workers}"] if workers else []
    crops = _crops_in_vain(finding)
    return (*said, f"decoding only the crops: {crops}") if crops else tuple(said)


def _tried_in_vain(finding: Finding) -> str:
    now = finding.facts.num_workers or 0
    tried = predict.tried_rates(finding.measured)
    more = [rate for number, rate in tried.items() if number > now]
    if now not in tried or not more or max(more) >= tried[now] * (1 + least_gain_pct(finding) / 100):
        return ""
    size = finding.measured.found.batch_size
    now_per_s, *span = (in_rate(per_s * (size or 1)) for per_s in (tried[now], min(more), max(more)))
    return f"{' to '.join(dict.fromkeys(span))} {rate_unit(size)} from the loader alone, no clear gain over {now_per_s}"


def _predicted_in_vain(finding: Finding) -> str:
    facts = finding.facts
    step = finding.shares.step_ms
    least = min(steps_with_more(finding).values(), default=None)
    if least is None or facts.crowded:  # beside other programs a small gain cannot be told from none
        return ""
    then = f"step {in_ms(step, step)} -> {in_ms(least, step)} ms predicted, no gain worth it"
    because = ""
    if facts.usable_cpus is not None and facts.device_type == "cpu":
        because = f": training and loading share {plural(facts.usable_cpus, 'CPU')}"
    return (then if least < step else "no gain predicted") + because


def _crops_in_vain(finding: Finding) -> str:
    trial = finding.measured.found.crops
    steps = predict.with_crops(finding.measured, finding.shares)
    step = finding.shares.step_ms
    then = min(steps.values(), default=0.0)
    if trial is None or not steps or step - then >= LEAST_PCT / 100 * finding.step_with_start_ms:
        return ""
    times = f"{trial.whole_ms:.2f} -> {trial.crop_ms:.2f} ms of CPU for a sample"
    return f"{times}, step {in_ms(step, step)} -> {in_ms(then, step)} ms predicted, no gain worth it"


# --- waiting for data ---------------------------------------------------------------------------------------------


def _data(finding: Finding, remedies: tuple[Remedy, ...]) -> Iterator[str]:
    facts = finding.facts
    cause = finding.causes.get("data")
    if cause is None:
        return
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
    yield from _pixels(finding)
    yield from _transforms(finding, finding.shares.step_ms)


def _undivided(finding: Finding, cause: Cause) -> Iterator[str]:
    """Note on a stream that workers would repeat, unless its batches are ready and more workers are no remedy."""
    if cause != "hand-over" and (finding.facts.num_workers or 0) <= 1 and not may_have_workers(finding):
        yield SHARD


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


def _pin_thread(_: Finding) -> Iterator[str]:
    yield "one thread pins all batches and cannot keep up: compare with pin_memory=False, or send fewer bytes"


def _hand_over(finding: Finding) -> Iterator[str]:
    facts = finding.facts
    if (facts.batch_tensors or 0) >= MANY_TENSORS:
        yield (
            f"a batch has {facts.batch_tensors} tensors, and each is sent separately: fewer, larger tensors are "
            "faster to send"
        )
    making_ms = predict.loading_cpu_ms(finding.measured, finding.shares)
    taking_ms = finding.shares.data_ms
    if facts.num_workers and 0 < making_ms < taking_ms:
        step = finding.shares.step_ms
        yield (
            f"making a batch costs {in_ms(making_ms, step)} ms of CPU time, and fetching it from the workers costs "
            f"{in_ms(taking_ms, step)}: num_workers=0 may be faster. `lightning-feed tune` tries it"
        )


def _cold(finding: Finding) -> Iterator[str]:
    """Note on the step time with all files in memory, if measured: the limit for a local copy."""
    found = finding.measured.found
    step = finding.shares.step_ms
    if finding.facts.cache == "bytes":
        return
    then = predict.with_rate(finding.measured, finding.shares, found.cached_bytes_per_s, found.loader_per_s)
    if _may_diagnose(finding):
        yield f"files are read from storage: {_DIAGNOSE} times the loader with its files in memory"
    elif _is_worth_it(then, finding):
        yield (
            f"files are read from storage: with them in memory a step takes {in_ms(then, step)} ms; from a local disk "
            "(FastDataModule(stage_to=...)) at best the same"
        )


def _over_the_network(finding: Finding) -> Iterator[str]:
    """Ways to read more at a time, and the limit of the network."""
    facts = finding.facts
    disk = finding.measured.found.disk
    near = predict.with_files_near(finding.measured, finding.shares)
    if facts.remote and not facts.staged and near is not None:
        yield (
            "samples are read from a URL one by one; FastDataModule(stage_to=..., stage_limit=...) reads them "
            "ahead, and from the second epoch on from a local disk: then a step takes "
            f"{in_ms(near, finding.shares.step_ms)} ms"
        )
    if disk is not None and disk.line_mb_per_s and disk.mean_file_bytes:
        most = disk.line_mb_per_s * 1e6 / disk.mean_file_bytes
        yield f"the network gives {disk.line_mb_per_s:.0f} MB/s, or {most:.0f} samples/s: no loader is faster"


def _missing_cpus(finding: Finding) -> Iterator[str]:
    """Note on the number of missing CPUs, if all are busy and the device is not, and on loading on other machines."""
    measured = finding.measured
    shares = finding.shares
    facts = finding.facts
    floor_ms = predict.floor_ms(measured, shares)
    cpus = facts.usable_cpus
    training_ms = predict.training_cpu_ms(measured, shares)
    if facts.device_type == "cpu" or not cpus or training_ms is None or floor_ms <= 0:
        return
    used_ms = training_ms + predict.loading_cpu_ms(measured, shares)
    missing = used_ms / floor_ms - cpus
    if used_ms < MOSTLY_BUSY * cpus * shares.step_ms or missing < 0.5:
        return
    said = f"all {cpus} CPUs of this rank are busy: about {missing:.0f} more would keep the device busy"
    if facts.batch_bytes and facts.loop == "trainer":
        rate = facts.batch_bytes / floor_ms * 1e-3
        said += f'; other machines\' (LoaderSettings(workers="ray")) would send {rate:.0f} MB/s of batches'
    yield said


def _crowded(finding: Finding) -> Iterator[str]:
    workers = finding.facts.num_workers
    cpus = finding.facts.usable_cpus
    if not workers or not cpus or finding.facts.crowded:  # the evidence already names other programs
        return
    if workers > cpus:
        yield f"{workers} workers share {cpus} CPUs: fewer may be as fast. `lightning-feed tune` tries it"
        return
    yield (
        "other threads or programs take the workers' CPUs. If these are threads of the training process, "
        "torch.set_num_threads(1) at the start of your program gives them back"
    )


_TRY: dict[Cause, Callable[[Finding], Iterator[str]]] = {
    "hand-over": _hand_over,
    "oversubscribed": _crowded,
    "cold reads": _cold,
    "cpu": _missing_cpus,
}
"""Cause -> notes if there is no remedy."""
_HINTS: dict[Cause, Callable[[Finding], Iterator[str]]] = {
    "remote reads": _over_the_network,
    "one rank": _one_rank,
    "jitter": _jitter,
    "pin thread": _pin_thread,
}
"""Cause -> notes, with or without a remedy."""


def _whole_images(finding: Finding, cause: Cause) -> Iterator[str]:
    if finding.facts.decodes_whole and cause in MADE_ON_CPU and _may_diagnose(finding):
        yield f"your ImageFolder decodes each image whole and then crops it: {_DIAGNOSE} times decoding only the crops"


def _pixels(finding: Finding) -> Iterator[str]:
    """Note on the step time with uint8 images, which needs a change of the data set and a hook."""
    facts = finding.facts
    found = finding.measured.found
    done = facts.device_transform or (facts.decoder is not None and facts.own_transforms is False)
    then = predict.with_rate(finding.measured, finding.shares, found.as_uint8_per_s, found.loader_per_s)
    if not done and facts.device_type != "cpu" and _is_worth_it(then, finding):
        yield (
            "with transforms that end with uint8 images, and the rest done on the device (device_transform), a step "
            f"takes {in_ms(then, finding.shares.step_ms)} ms"
        )


def _transforms(finding: Finding, step: float) -> Iterator[str]:
    """Note on the slowest transforms, and the step time without transforms: the limit for faster ones."""
    found = finding.measured.found
    costs = [cost for cost in found.costs if predict.step_of(cost.name) not in predict.NOT_TRANSFORMS]
    then = predict.with_rate(finding.measured, finding.shares, found.no_transform_per_s, found.loader_per_s)
    if not costs or not _is_worth_it(then, finding):
        return
    slowest = sorted(costs, key=lambda cost: cost.cpu_ms, reverse=True)[:2]
    named = " and ".join(f"{cost.name} ({cost.cpu_ms:.1f} ms)" for cost in slowest)
    yield f"the slowest transforms of a sample are {named}; without transforms a step takes {in_ms(then, step)} ms"


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
    then = in_ms(predict.without(finding.shares, hook.ms_per_step), step)
    way = f"without it, a step takes {then} ms. If it only observes, every 50th step is enough"
    if place is not None and place.interval:
        way += f" ({place.interval}=50)"
    if "ProgressBar" in name:
        way = f"without a progress bar a step takes {then} ms"
    return f"{name}{at} takes {in_ms(hook.ms_per_step, step)} of {in_ms(step, step)} ms a step; {way}"


def _copy(finding: Finding) -> Iterator[str]:
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


def _launch(finding: Finding) -> Iterator[str]:
    if finding.causes.get("compute") == "launch":
        yield 'model.compile(mode="reduce-overhead") launches many operations at once'


def _fed(finding: Finding) -> Iterator[str]:
    """Note on a smaller number of workers that suffices, by the rates of loader and model."""
    loaders = finding.measured.loaders
    found = finding.measured.found
    workers = finding.facts.num_workers or 0
    ready = loaders.queue_ready or 0.0
    capacity = loaders.queue_capacity or 0.0
    # Other programs make the step longer; without them it may need more workers.
    if "compute" not in finding.causes or finding.facts.crowded or not ready >= FULL_SHARE * capacity > 0:
        return
    if not found.model_per_s or not found.loader_per_s:
        return
    fewer = max(1, int(-(-workers * SPARE * found.model_per_s // found.loader_per_s)))
    if fewer < workers:
        ready_text = f"{ready:.1f} of {capacity:.0f} batches are ready on average"
        yield f"num_workers={fewer} would do: with {workers}, {ready_text}"
