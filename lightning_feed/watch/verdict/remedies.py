"""All remedies that can be printed, and the one place where it is decided which of them are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lightning_feed.watch.verdict.case import Case
from lightning_feed.watch.verdict.diagnosis import Remedy
from lightning_feed.watch.verdict.evidence import OTHERS_PCT
from lightning_feed.watch.verdict.remedies_loader import (
    any_order,
    fewer_workers,
    files_in_memory,
    more_workers,
    nvjpeg,
    persistent_workers,
    shared_files,
)
from lightning_feed.watch.verdict.remedies_step import (
    log_rarely,
    pinned,
    prefetch_callback,
    rare_progress_bar,
)

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
