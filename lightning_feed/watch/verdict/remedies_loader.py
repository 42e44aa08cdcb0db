"""Remedies about the loader that training waits for. Each is None where its condition does not hold."""

from collections.abc import Iterable
from dataclasses import replace

from lightning_feed.load.bounds import SHM_SHARE
from lightning_feed.watch.verdict import predict
from lightning_feed.watch.verdict.case import Case, loader_remedy, with_kept_workers
from lightning_feed.watch.verdict.causes_other import MANY_TENSORS
from lightning_feed.watch.verdict.diagnosis import Cause, Remedy
from lightning_feed.watch.verdict.shares import DATA_PCT

MOST_WAITING = 4
"""Times as many workers, at most, where they only wait."""
MOSTLY = 0.5
"""Share of the time for a batch from which who makes it is taken to wait."""
MOST_WORKERS = 16
"""More are never named where there are none."""
NEARLY = 1.02
"""Fewer workers than the best number do, where the step takes no longer than this times its step."""
_MADE_SLOWLY: tuple[Cause, ...] = ("no workers", "cpu", "cold reads", "waiting", "unknown")
_READ_SLOWLY: tuple[Cause, ...] = ("cold reads", "waiting")
_MADE_ON_CPU: tuple[Cause, ...] = ("cpu", "no workers", "oversubscribed")


def more_workers(case: Case) -> Remedy | None:
    """The fewest that reach nearly the best step."""
    predicted = steps_with_more(case)
    if not predicted:
        return None
    best = min(predicted.values())
    number = min(number for number, step in predicted.items() if step <= NEARLY * best)
    now, cpus = case.facts.num_workers, case.facts.usable_cpus
    why = "batches are made beside training, not in turn with it" if now == 0 else "they make batches side by side"
    if not may_have_workers(case):
        why += "; the data set then lives in the one worker, which gives its stream whole"
    if cpus is not None and number > cpus:
        why += "; workers that wait need no CPU each"
    settings: dict[str, object] = {"num_workers": number}
    if now == 0:
        settings |= with_kept_workers(case)[1]
    return loader_remedy(case, settings, why=why, step_ms=predicted[number])


def steps_with_more(case: Case) -> dict[int, float]:
    """The step time to expect by number of workers, of each that is possible; empty where more are no remedy."""
    facts, now = case.facts, case.facts.num_workers
    tried = predict.tried_rates(case.measured)
    known = bool(tried) or case.loaders.workers_on_cpu_pct is not None or now == 0
    if now is None or not facts.usable_cpus or case.data not in _MADE_SLOWLY or not known or facts.workers == "thread":
        return {}
    if not case.can_set("num_workers") or len(set(facts.every_num_workers)) > 1:
        return {}
    numbers: Iterable[int] = [number for number in tried if number > now] or range(now + 1, _most_workers(case) + 1)
    if not may_have_workers(case):
        numbers = [1] if now == 0 and facts.may_leave_process else []
    measured = with_kept_workers(case)[0]
    steps = {number: predict.with_workers(measured, case.shares, number) for number in numbers if _fits(case, number)}
    return {number: step for number, step in steps.items() if step is not None}


def may_have_workers(case: Case) -> bool:
    """Whether two workers or more give the samples that one gives: a stream has to divide them."""
    facts = case.facts
    return facts.map_style is not False or facts.shards_by_worker is True


def fewer_workers(case: Case) -> Remedy | None:
    """By what was tried: more than the CPUs can serve, or none at all where handing over takes longer than loading."""
    facts, now = case.facts, case.facts.num_workers
    if not now or case.data in (None, "epoch start", "one rank") or not case.can_set("num_workers"):
        return None
    if len(set(facts.every_num_workers)) > 1:
        return None
    steps: dict[int, float | None] = {
        number: predict.by_trial(case.measured, case.shares, number)
        for number in predict.tried_rates(case.measured)
        if 0 < number < now
    }
    if case.data == "hand-over" and _may_have_none(case):
        steps[0] = predict.without_workers(case.measured, case.shares)
    known = {number: step for number, step in steps.items() if step is not None}
    if not known:
        return None
    number = min(known, key=lambda one: known[one])
    settings: dict[str, object] = {"num_workers": number}
    why = "so many workers take CPUs from each other"
    if number == 0:
        why = "a batch is made sooner than one is handed over"
        settings |= _without_what_needs_workers(case)
    return loader_remedy(case, settings, why=why, step_ms=known[number])


def persistent_workers(case: Case) -> Remedy | None:
    """Saves what the first batch of an epoch takes beyond the time in which workers make one."""
    facts, stats = case.facts, case.measured.stats
    epoch_pct = case.shares.epoch_pct
    if case.data is None or epoch_pct is None or epoch_pct < DATA_PCT or not case.can_set("persistent_workers"):
        return None
    if facts.persistent_workers is not False or not facts.num_workers or not facts.may_persist:
        return None
    making_s = 1e-3 * facts.num_workers * case.shares.step_ms  # at most: each makes one batch in so many steps
    saved_ms = 1e3 * max(0.0, (stats.epoch_start_s or 0.0) - making_s) / (facts.batches_per_epoch or 1)
    why = f"workers are started anew for each epoch: its first batch comes after {stats.epoch_start_s or 0.0:.2f} s"
    remedy = loader_remedy(case, {"persistent_workers": True}, why=why, step_ms=None)
    return replace(remedy, predicted_gain_pct=100 * saved_ms / case.step_with_start_ms)


def any_order(case: Case) -> Remedy | None:
    """A finished batch overtakes a slow one."""
    facts = case.facts
    if case.data != "head of line" or facts.in_order is False or (facts.num_workers or 0) < 2:
        return None
    if not case.can_set("in_order") or facts.stage == "predict":  # its results are told apart by their order alone
        return None
    why = "a finished batch overtakes a slow one; the order of batches is then left to chance"
    step = predict.in_any_order(case.measured, case.shares)
    return None if step is None else loader_remedy(case, {"in_order": False}, why=why, step_ms=step)


def shared_files(case: Case) -> Remedy | None:
    """torch's other sharing strategy, where taking a batch was timed with both."""
    found, count = case.measured.experiments, case.facts.batch_tensors or 0
    if case.data != "hand-over" or found is None or found.sharing_strategy != "file_descriptor":
        return None
    now, then = found.hand_over_ms, found.hand_over_file_system_ms
    if now is None or then is None or count < MANY_TENSORS:
        return None
    return Remedy(
        code='torch.multiprocessing.set_sharing_strategy("file_system")',
        form="line",
        where="sharing strategy: file_descriptor -> file_system, at the start of your script, after `import torch`",
        why=f"a batch has {count} tensors: taking it from a worker takes {now:.1f} ms, and through files {then:.1f} ms",
        predicted_step_ms=predict.without(case.shares, min(case.shares.data_ms, now - then)),
        changes="sharing_strategy='file_system'",
    )


def files_in_memory(case: Case) -> Remedy | None:
    """The cache of an ImageFolderDataModule."""
    facts, found, loaders = case.facts, case.measured.experiments, case.loaders
    if case.data != "cold reads" or facts.decoder is None or facts.cache != "off":
        return None
    running = predict.period_ms(case.measured, case.shares)
    if found is not None and found.cached_bytes_per_s:
        step = predict.with_rate(case.measured, case.shares, found.cached_bytes_per_s, found.loader_per_s)
    elif loaders.workers_blocked_pct is not None and running is not None:
        step = predict.with_batch_in(case.measured, case.shares, running * (100 - loaders.workers_blocked_pct) / 100)
    else:
        return None
    why = "files are kept in host memory from the first epoch on, those that fit"
    return _datamodule_remedy(case, "cache", "bytes", why=why, step_ms=step)


def nvjpeg(case: Case) -> Remedy | None:
    """Decoding on the GPU, where it was timed there."""
    facts, found = case.facts, case.measured.experiments
    if case.data not in _MADE_ON_CPU or facts.decoder is None or facts.backend not in (None, "torch"):
        return None
    if facts.device_type != "cuda" or facts.own_transforms or facts.cache in ("decoded", "device"):
        return None
    if found is None or not found.device_decode_per_s or not found.batch_size:
        return None
    step = predict.decoded_on_device(case.measured, case.shares, found.device_decode_per_s)
    rate = f"{found.device_decode_per_s * found.batch_size:,.0f} images/s with nothing beside it"
    why = f"nvJPEG decodes on the GPU ({rate}); workers only read"
    return _datamodule_remedy(case, "backend", "nvjpeg", why=why, step_ms=step)


def _datamodule_remedy(case: Case, name: str, value: str, *, why: str, step_ms: float | None) -> Remedy | None:
    if step_ms is None:
        return None
    owner = case.place.datamodule or "ImageFolderDataModule"
    return Remedy(
        code=f'{name}="{value}"',
        form="datamodule",
        where=f"{name}: {getattr(case.facts, name) or 'not set'} -> {value} in the call that makes your {owner}",
        why=why,
        predicted_step_ms=step_ms,
        changes=f"{name}={value!r}",
    )


def _may_have_none(case: Case) -> bool:
    """Whether nothing was seen that torch refuses without workers, and that is set where this remedy does not reach."""
    facts = case.facts
    chosen = {"persistent_workers": facts.persistent_workers, "prefetch_factor": facts.prefetch_factor not in (None, 2)}
    return all(case.can_set_with_workers(name) for name, given in chosen.items() if given)


def _without_what_needs_workers(case: Case) -> dict[str, object]:
    """torch refuses these without workers; LoaderSettings too, unless it chooses them."""
    facts, ours = case.facts, case.place.form == "settings"
    settings: dict[str, object] = {}
    if facts.prefetch_factor is not None:
        settings["prefetch_factor"] = "auto" if ours else None
    if facts.persistent_workers:
        settings["persistent_workers"] = "auto" if ours else False
    return {name: value for name, value in settings.items() if case.can_set(name)}


def _most_workers(case: Case) -> int:
    """As many as there are CPUs; more where they are blocked most of the time, as many as then keep the CPUs busy."""
    facts, now = case.facts, case.facts.num_workers or 0
    cpus = max(1, (facts.usable_cpus or 1) // case.loaders_beside)
    blocked = predict.blocked_share(case.measured) if now == 0 or case.data in _READ_SLOWLY else 0.0
    most = cpus
    if blocked >= MOSTLY:
        most = max(cpus, min(MOST_WAITING * max(1, now), int(cpus / max(1e-9, 1 - blocked))))
    return min(MOST_WORKERS, most) if now == 0 else most


def _fits(case: Case, workers: int) -> bool:
    """Whether /dev/shm has room for the batches that so many workers keep ready: a worker without it dies."""
    facts = case.facts
    if facts.free_shm_bytes is None or facts.batch_bytes is None:
        return True
    more = case.loaders_beside * (workers - (facts.num_workers or 0))
    return more * ((facts.prefetch_factor or 2) + 1) * facts.batch_bytes <= SHM_SHARE * facts.free_shm_bytes
