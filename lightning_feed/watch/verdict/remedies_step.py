"""Remedies about copies and about what happens between the steps. Each is None where its condition does not hold."""

import re

from lightning_feed.watch.verdict import predict
from lightning_feed.watch.verdict.case import Case, callback_remedy, loader_remedy, trainer_remedy
from lightning_feed.watch.verdict.diagnosis import HookTime, Remedy

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
