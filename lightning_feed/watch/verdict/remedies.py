"""Remedies: all that can be printed, and the one place where it is decided which of them are."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lightning_feed.load.machine import SHM_SHARE
from lightning_feed.watch.verdict import predict
from lightning_feed.watch.verdict.case import Case, callback_remedy, loader_remedy, trainer_remedy, with_kept_workers
from lightning_feed.watch.verdict.causes import MANY_TENSORS
from lightning_feed.watch.verdict.diagnosis import Cause, HookTime, Remedy
from lightning_feed.watch.verdict.shares import DATA_PCT, OTHERS_PCT

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


RARELY = 50
"""Steps between two drawings of the progress bar, or two calls of the loggers."""
_BARS = ("TQDMProgressBar", "RichProgressBar")
_LOGGING = re.compile(r"^logger .*\.log_metrics$")


def pinned(case: Case) -> Remedy | None:
    """Pinned memory, where both kinds of copies were timed."""
    facts = case.facts
    if case.causes.get("copy") != "unpinned" or facts.device_type == "cpu" or not case.can_set("pin_memory"):
        return None
    step = predict.with_pinned(case.measured, case.shares)
    why = "a copy from pageable memory makes the host wait and does not overlap"
    return None if step is None else loader_remedy(case, {"pin_memory": True}, why=why, step_ms=step)


def prefetch_callback(case: Case) -> Remedy | None:
    """Copies, and nvJPEG's decoding, beside the step before."""
    facts, stats = case.facts, case.measured.stats
    cause = case.causes.get("copy")
    overlaps = facts.pin_memory is True or cause == "decoding on the GPU"
    if cause is None or not overlaps or stats.prefetch_active or stats.h2d_ms is None:
        return None
    if facts.device_type != "cuda" or facts.dali_device == "cuda":  # there it would stand aside
        return None
    what = "decodes" if cause == "decoding on the GPU" else "copies"
    return callback_remedy(
        case.place,
        "lightning_feed" if facts.package == "lightning.pytorch" else "lightning_feed.pl",
        "PrefetchCallback",
        None,
        why=f"{what} the next batch while this one computes",
        predicted_step_ms=predict.without(case.shares, stats.h2d_ms),
        changes="prefetch_callback=True",
    )


def rare_progress_bar(case: Case) -> Remedy | None:
    """The progress bar drawn every 50 batches."""
    rate = case.facts.bar_refresh_rate
    drawn = [hook for hook in case.measured.hooks if any(f"]{bar}" in hook.name for bar in _BARS)]
    if "framework" not in case.causes or not rate or rate >= RARELY or not drawn:
        return None
    bar = next(bar for bar in _BARS if f"]{bar}" in drawn[0].name)
    return callback_remedy(
        case.place,
        f"{case.facts.package}.callbacks",
        bar,
        ("refresh_rate", rate, RARELY),
        why=f"drawing it takes {_sum(drawn):.2f} ms a step",
        predicted_step_ms=_rarer(case, _sum(drawn), rate),
        changes=f"bar_refresh_rate={RARELY}",
    )


def log_rarely(case: Case) -> Remedy | None:
    """Metrics given to the loggers every 50 steps."""
    every = case.facts.log_every_n_steps
    called = [hook for hook in case.measured.hooks if _LOGGING.search(hook.name)]
    if "framework" not in case.causes or not every or every >= RARELY or not called:
        return None
    return trainer_remedy(
        case.place,
        "log_every_n_steps",
        every,
        RARELY,
        why=f"{called[0].name} takes {_sum(called):.2f} ms a step",
        predicted_step_ms=_rarer(case, _sum(called), every),
    )


def plain_name(hook: HookTime) -> str:
    """The name of a hook without the settings of its callback, which Lightning puts into it."""
    return re.sub(r"\{.*\}", "", hook.name)


def _sum(hooks: list[HookTime]) -> float:
    return sum(hook.ms_per_step for hook in hooks)


def _rarer(case: Case, takes_ms: float, every: int) -> float:
    """Step time with what is done every so many steps done every 50."""
    return predict.without(case.shares, min(takes_ms, case.measured.stats.other_ms or 0.0) * (1 - every / RARELY))


LEAST_PCT, LEAST_UNSURE_PCT = 5.0, 10.0
"""A remedy has to save so much of an epoch's time; and where the figures are of low confidence, or a first worker would
share the CPUs that train."""
LEAST_SHARED_PCT = 20.0
"""The same where workers are busy and training computes on the same CPUs: a step of 17.6 ms was predicted, of 21.5, for
all CPUs kept busy all the time, and 20.9 achieved (``benchmarks/advice.py`` on a virtual machine with 2 CPUs)."""
MOST = 3


Given = TypeVar("Given")


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Given]):
    """A remedy that can be printed."""

    name: str
    condition: str
    """When it may be, in words; ``find`` is the same as code."""
    changes: str
    """What it changes."""
    find: Callable[[Given], Remedy | None]
    """The remedy with its prediction; None where the condition does not hold, or nothing can be predicted."""


RULES: tuple[Rule[Case], ...] = (
    Rule(
        name="more workers",
        condition="training waits for batches that take time to make; what the workers do was seen, or other numbers "
        "were tried; a stream was seen to divide itself among workers, or may live in a single one; /dev/shm has room "
        "for the batches",
        changes="num_workers, up to the CPUs; beyond them where who makes the batches was seen to be blocked",
        find=more_workers,
    ),
    Rule(
        name="fewer workers",
        condition="training waits for data, and fewer workers were tried: they load faster, or batches are ready and "
        "a single worker makes one sooner than one is handed over",
        changes="num_workers, down to 0",
        find=fewer_workers,
    ),
    Rule(
        name="persistent workers",
        condition="the first batch of each epoch is what is waited for, workers are started anew for each, and nothing "
        "in the data set has to reach them then",
        changes="persistent_workers",
        find=persistent_workers,
    ),
    Rule(
        name="any order",
        condition="a finished batch was seen to wait for a slow one while workers had nothing to do, not in "
        "trainer.predict",
        changes="in_order, so the order of batches",
        find=any_order,
    ),
    Rule(
        name="shared files",
        condition="handing over many tensors takes the time, and was measured to be faster through files",
        changes="how torch hands tensors over between processes",
        find=shared_files,
    ),
    Rule(
        name="files in memory",
        condition="an ImageFolderDataModule without a cache waits for storage",
        changes="cache of the data module",
        find=files_in_memory,
    ),
    Rule(
        name="nvjpeg",
        condition="the workers of an ImageFolderDataModule without transforms of the user's decode too slowly, and the "
        "GPU was measured to decode faster",
        changes="backend of the data module",
        find=nvjpeg,
    ),
    Rule(
        name="pinned memory",
        condition="copies from pageable memory are waited for, and both kinds of copies were measured",
        changes="pin_memory",
        find=pinned,
    ),
    Rule(
        name="prefetch callback",
        condition="copies from pinned memory, or nvJPEG, are waited for on a GPU, with no PrefetchCallback at work",
        changes="the callbacks of the Trainer",
        find=prefetch_callback,
    ),
    Rule(
        name="rare progress bar",
        condition="the progress bar was seen to take time between the steps, and is drawn often",
        changes="refresh_rate of the progress bar",
        find=rare_progress_bar,
    ),
    Rule(
        name="log rarely",
        condition="loggers were seen to take time between the steps, and are called often",
        changes="log_every_n_steps of the Trainer",
        find=log_rarely,
    ),
)
"""Where two save as much, the first is printed first."""


def remedies_for(case: Case) -> tuple[Remedy, ...]:
    """Those that save what is worth it, the largest saving first; of two that set the same, the better."""
    found = [remedy for rule in RULES if (remedy := rule.find(case)) is not None]
    if case.facts.loop == "plain":
        found = [remedy for remedy in found if remedy.form in ("arguments", "line")]
    gains = [replace(remedy, predicted_gain_pct=gain_pct(case, remedy)) for remedy in found]
    gains = [remedy for remedy in gains if (remedy.predicted_gain_pct or 0.0) >= least_gain_pct(case)]
    gains.sort(key=lambda remedy: -(remedy.predicted_gain_pct or 0.0))
    best = {remedy.changes.partition("=")[0]: remedy for remedy in reversed(gains)}
    return tuple(remedy for remedy in gains if remedy in best.values())[:MOST]


def gain_pct(case: Case, remedy: Remedy) -> float | None:
    """Share of an epoch's time, first batch included, that a remedy saves; what it predicts itself, where it does."""
    if remedy.predicted_gain_pct is not None or remedy.predicted_step_ms is None:
        return remedy.predicted_gain_pct
    return 100 * (case.shares.step_ms - remedy.predicted_step_ms) / case.step_with_start_ms


def least_gain_pct(case: Case) -> float:
    """The gain from which a remedy is printed: 5 %, or what can be told from noise."""
    stats, found = case.measured.stats, case.measured.experiments
    low, high = stats.starved_low_pct, stats.starved_high_pct
    noise = 0.0 if low is None or high is None else (high - low) / 2
    apart = (found.noise_pct or 0.0) / 2 if found is not None else 0.0
    unsure = stats.confidence == "low" or (case.facts.others_cpu_pct or 0.0) >= OTHERS_PCT
    on_cpu = case.facts.device_type == "cpu"
    least = LEAST_UNSURE_PCT if unsure or (on_cpu and case.data == "no workers") else LEAST_PCT
    if on_cpu and case.data == "cpu":
        least = LEAST_SHARED_PCT
    return max(least, noise, apart)
