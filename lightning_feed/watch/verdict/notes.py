"""What is worth knowing beside the remedies: what nobody can predict, and why the obvious remedy would not help."""

from collections.abc import Iterator

from lightning_feed.errors import plural
from lightning_feed.watch.verdict import predict
from lightning_feed.watch.verdict.case import Case
from lightning_feed.watch.verdict.causes import MANY_TENSORS
from lightning_feed.watch.verdict.diagnosis import SYNCS, Cause, HookTime, Remedy
from lightning_feed.watch.verdict.remedies import least_gain_pct, may_have_workers, plain_name, steps_with_more
from lightning_feed.watch.verdict.shares import OTHERS_PCT, in_ms

MOST = 3
FULL_SHARE = 0.8
"""Share of the queue that is full on average where workers could be given back."""
SPARE = 1.1
"""The loader is to be so much faster than the model, where workers are given back."""
_SHARD = (
    "the data set is a stream, and was not seen to divide itself among workers: with num_workers=2 every sample would "
    "come twice. Divide it by torch.utils.data.get_worker_info() before you have more than one"
)
_ASK: tuple[Cause, ...] = ("no workers", "cpu", "waiting", "unknown")
"""Where the time goes into making samples or batches."""
_WAYS_OUT = {
    "prog_bar": "self.log(..., prog_bar=False) avoids it",
    "grad_scaler": 'precision="bf16-mixed" needs no scaler',
    "sigterm_broadcast": "there is no switch for it",
    "throughput_monitor": "leave that callback out once you have its figures",
}


def notes_for(case: Case, remedies: tuple[Remedy, ...]) -> tuple[str, ...]:
    """What else is worth knowing or trying, the most telling first."""
    said = [*_framework(case, remedies), *_copy(case), *_data(case, remedies), *_fed(case)]
    return tuple(dict.fromkeys(said))[:MOST]


def why_not(case: Case, remedies: tuple[Remedy, ...]) -> tuple[str, ...]:
    """Why there are not more workers among the remedies, where they were tried or can be reckoned."""
    if case.data is None or any(remedy.changes.startswith("num_workers=") for remedy in remedies):
        return ()
    now = case.facts.num_workers
    tried = predict.tried_rates(case.measured)
    more = [rate for number, rate in tried.items() if now is not None and number > now]
    if now is None or now not in tried or not more or max(more) >= tried[now] * (1 + least_gain_pct(case) / 100):
        return _reckoned(case)
    return (f"more workers: {tried[now]:.0f} -> {_span(more)} batches/s from the loader alone, no gain",)


def _reckoned(case: Case) -> tuple[str, ...]:
    steps = steps_with_more(case)
    if not steps:
        return ()
    step, best = case.shares.step_ms, min(steps.values())
    said = f"more workers: step {in_ms(step, step)} -> {in_ms(best, step)} ms predicted, no gain worth it"
    cpus, others = case.facts.usable_cpus, case.facts.others_cpu_pct
    if others is not None and others >= OTHERS_PCT:
        said += f": other programs take {others:.0f} % of the CPUs"
    elif cpus is not None and case.facts.device_type == "cpu":
        said += f": training and loading share {plural(cpus, 'CPU')}"
    return (said,)


def _span(rates: list[float]) -> str:
    low, high = f"{min(rates):.0f}", f"{max(rates):.0f}"
    return low if low == high else f"{low} to {high}"


def _data(case: Case, remedies: tuple[Remedy, ...]) -> Iterator[str]:
    facts, cause = case.facts, case.causes.get("data")
    if cause is None:
        return
    if facts.dali_device is not None:
        yield from _dali(case)
        return
    if not may_have_workers(case) and (facts.num_workers or 0) <= 1:
        yield _SHARD
    if not remedies:
        yield from _without_remedy(case, cause)
    if cause == "one rank" and case.measured.ranks is not None:
        yield f"rank {case.measured.ranks.slow_rank} alone is slow: compare the nodes' disks and CPUs"
    if cause == "jitter" and facts.prefetch_factor is not None:
        yield (
            "the loader is fast enough on average. More batches in stock may bridge the slow ones: try "
            f"prefetch_factor={2 * facts.prefetch_factor}"
        )
    if cause == "pin thread":
        yield "one thread pins all batches and cannot keep up: compare with pin_memory=False, or send fewer bytes"
    if facts.backend in ("dali-cpu", "dali-gpu"):
        yield 'the workers wait, and DALI decodes what they read: compare with backend="torch"'
    yield from _pixels(case)
    yield from _transforms(case, case.shares.step_ms)


def _without_remedy(case: Case, cause: Cause) -> Iterator[str]:
    facts = case.facts
    if case.measured.experiments is None and cause in _ASK and facts.loop == "trainer" and facts.stage == "fit":
        yield "`lightning-feed diagnose your_script.py -- ARGUMENTS` finds the lines of your code that take the time"
    if cause == "hand-over":
        yield from _handing_over(case)
    others = (facts.others_cpu_pct or 0.0) >= OTHERS_PCT  # the evidence says so
    if cause == "oversubscribed" and facts.num_workers and facts.usable_cpus and not others:
        yield _crowded(facts.num_workers, facts.usable_cpus)
    if cause == "cold reads" and facts.cache != "bytes":
        ours = (
            "`lightning-feed pack`" if facts.loop == "plain" else "`lightning-feed pack`, FastDataModule(stage_to=...)"
        )
        yield (
            "reads come from storage: a copy in memory or on a local disk, or fewer and larger files, is read faster "
            f"({ours})"
        )


def _pixels(case: Case) -> Iterator[str]:
    """Where the loader was timed with images that stay uint8: that takes a change of the data set and of a hook."""
    facts, found = case.facts, case.measured.experiments
    done = facts.device_transform or (facts.decoder is not None and facts.own_transforms is False)
    if done or found is None or not found.as_uint8_per_s or not found.loader_per_s:
        return
    if found.as_uint8_per_s >= found.loader_per_s * predict.SAME:
        yield (
            f"the loader alone gives {found.loader_per_s:.0f} batches/s, and {found.as_uint8_per_s:.0f} where the "
            "transforms end with uint8 images and the device does the rest (device_transform)"
        )


def _transforms(case: Case, step: float) -> Iterator[str]:
    """The slowest transforms by name, with what leaving all of them out gives: the most that faster ones can."""
    found = case.measured.experiments
    if found is None or not found.no_transform_per_s:
        return
    costs = [cost for cost in found.costs if predict.step_of(cost.name) not in predict.NOT_TRANSFORMS]
    then = predict.with_rate(case.measured, case.shares, found.no_transform_per_s, found.loader_per_s)
    if then is None or not costs or 100 * (step - then) / case.step_with_start_ms < least_gain_pct(case):
        return
    slowest = sorted(costs, key=lambda cost: cost.cpu_ms, reverse=True)[:2]
    named = " and ".join(f"{cost.name} ({cost.cpu_ms:.1f} ms)" for cost in slowest)
    yield f"the slowest transforms of a sample are {named}; without any of them a step takes {in_ms(then, step)} ms"


def _handing_over(case: Case) -> Iterator[str]:
    count = case.facts.batch_tensors or 0
    if count >= MANY_TENSORS:
        yield f"a batch has {count} tensors, each handed over by itself: fewer, larger ones are sooner handed over"
    if case.facts.num_workers:
        yield (
            "batches are ready, and taking them from the workers takes the time: where they are made quickly, fewer "
            "workers or num_workers=0 can be faster. `lightning-feed tune` tries it"
        )


def _crowded(workers: int, cpus: int) -> str:
    if workers > cpus:
        return f"{workers} workers share {cpus} CPUs: fewer may be as fast. `lightning-feed tune` tries it"
    return (
        "other threads or programs take the workers' CPUs. If they are threads of the training process, "
        "torch.set_num_threads(1) gives them back"
    )


def _dali(case: Case) -> Iterator[str]:
    facts = case.facts
    if facts.dali_device == "cpu" and facts.device_type == "cuda":
        yield 'DALI can decode and augment on the GPU: DaliDataModule(device="gpu")'
    threads, cpus = facts.dali_threads, facts.usable_cpus
    if threads is not None and cpus is not None and threads != cpus:
        yield f"DALI has {threads} threads, and {cpus} CPUs may be used: DaliOptions(threads={cpus})"
    if facts.dali_prefetch is not None:
        yield f"DALI makes {facts.dali_prefetch} batches ahead; more bridge slow ones: DaliOptions(prefetch=...)"


def _framework(case: Case, remedies: tuple[Remedy, ...]) -> Iterator[str]:
    if "framework" not in case.causes:
        return

    def treated(hook: HookTime) -> bool:
        if "ProgressBar" in hook.name:
            return any(remedy.changes.startswith("bar_") for remedy in remedies)
        return any(remedy.why.startswith(f"{plain_name(hook)} ") for remedy in remedies)

    facts, hooks = case.facts, case.measured.hooks
    if facts.device_type != "cpu":
        yield from (f"{SYNCS[name]}: {way}" for name, way in _WAYS_OUT.items() if name in facts.syncs)
    theirs = [hook for hook in hooks if not hook.name.startswith("logger ") and not treated(hook)]
    if theirs:
        name = plain_name(theirs[0])
        place = next((one for one in facts.hook_places if one.name == name), None)
        at = f" ({place.at})" if place is not None else ""
        step, ms = case.shares.step_ms, theirs[0].ms_per_step
        then = in_ms(predict.without(case.shares, ms), step)
        way = f"done rarely, a step takes {then} ms. Where it only observes, every 50th step is enough"
        if place is not None and place.interval:
            way += f" ({place.interval}=50)"
        if "ProgressBar" in name:
            way = f"without a progress bar a step takes {then} ms"
        yield f"{name}{at} takes {in_ms(ms, step)} of {in_ms(step, step)} ms a step; {way}"
    if not hooks:
        yield 'Trainer(profiler="simple") names the callback or hook that takes the time between the steps'


def _copy(case: Case) -> Iterator[str]:
    cause, facts = case.causes.get("copy"), case.facts
    if cause is None:
        return
    if facts.device_type == "cpu":
        yield "nothing is copied on a CPU: your transfer hooks take this time, and the loader's workers could do it"
    elif cause == "unpinned":
        yield "batches lie in pageable memory, and copying them makes the host wait: try pin_memory=True"
    elif cause == "small tensors" and case.measured.stats.prefetch_active:
        yield "many small tensors can be copied as one: PrefetchCallback(pack_small=True)"
    elif cause == "decoding on the GPU":
        yield 'to compare decoders: ImageFolderDataModule(backend="torch"), or "dali-gpu"'


def _fed(case: Case) -> Iterator[str]:
    if case.causes.get("compute") == "launch":
        yield 'model.compile(mode="reduce-overhead") issues many operations at once'
    fewer = _workers_needed(case)
    if fewer is not None:
        loaders, workers = case.loaders, case.facts.num_workers or 0
        yield (
            f"num_workers={fewer} would do: with {workers}, {loaders.queue_ready:.1f} of "
            f"{loaders.queue_capacity:.0f} batches are ready on average"
        )


def _workers_needed(case: Case) -> int | None:
    """Fewer workers that would do: by the rates of loader and model, else half of them. None: none to give back."""
    loaders, found, workers = case.loaders, case.measured.experiments, case.facts.num_workers
    ready, capacity = loaders.queue_ready, loaders.queue_capacity
    if "compute" not in case.causes or not workers or workers < 2:
        return None
    if ready is None or not capacity or ready < FULL_SHARE * capacity:
        return None
    fewer = (workers + 1) // 2
    if found is not None and found.model_per_s and found.loader_per_s:
        fewer = max(1, int(-(-workers * SPARE * found.model_per_s // found.loader_per_s)))
    return fewer if fewer < workers else None
