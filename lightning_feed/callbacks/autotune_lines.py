"""Lines that AutotuneCallback logs."""

import math

from lightning_feed.load.settings import Setting
from lightning_feed.trials.time_left import TimeLeft
from lightning_feed.trials.tune_loader import Tuned


def too_short(time_left: TimeLeft) -> str:
    """The reason for no trials in a short fit, and the command that has them outside of it."""
    return (
        f"the fit ends in about {time_left.seconds:.0f} s, and trials would take longer than they could save. "
        "`lightning-feed tune your_script.py` tries settings outside of it"
    )


def tried(tuned: Tuned) -> str:
    """The figures of trials with the user's setting and the chosen one; empty if the reason has those of training."""
    if tuned.trained_ms is not None:
        return ""
    trials = [tuned.trial_of(setting) for setting in (tuned.own, tuned.setting)]
    figures = [f"{trial.setting}: {tuned.in_words(trial)}" for trial in trials if trial is not None]
    return f" ({', '.join(figures)})"


def cost_of(tuned: Tuned) -> str:
    """The seconds of the trials, and the steps that return them; empty after an earlier run, or without a gain."""
    own = tuned.trial_of(tuned.own)
    if tuned.remembered or own is None or tuned.step_s is None or tuned.step_s >= own.step_s:
        return ""
    steps = math.ceil(tuned.seconds / (own.step_s - tuned.step_s))
    return f" The trials took {tuned.seconds:.1f} s, which {steps:,} steps save again ({steps * tuned.step_s:.0f} s)."


def described(before: Setting, after: Setting) -> str:
    """The changes from one setting to another."""
    names = ("num_workers", "workers", "prefetch_factor", "persistent_workers", "pin_memory")
    changed = [(name, getattr(before, name), getattr(after, name)) for name in names]
    changes = [f"{name} {old} -> {new}" for name, old, new in changed if old != new]
    if after.in_place and not before.in_place:
        changes.append("batches in place")
    return ", ".join(changes)
