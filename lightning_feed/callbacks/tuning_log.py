"""The changes that AutotuneCallback makes in a fit, and the lines that it logs."""

import logging
import math
import shlex
from dataclasses import dataclass, field

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.callbacks.starvation_loggers import LoggerOutput
from lightning_feed.load.settings import Setting
from lightning_feed.measure.guard import Guard, Once, say
from lightning_feed.trials.time_left import TimeLeft
from lightning_feed.trials.tune_loader import Tuned

logger = logging.getLogger("lightning_feed.callbacks.autotune")  # the callback's own, by which users filter


@dataclass(frozen=True, kw_only=True)
class Move:
    """A change of the training loader."""

    epoch: int
    """Epoch of the change (``trainer.current_epoch``)."""
    setting: Setting
    reason: str


@dataclass(kw_only=True)
class Outcome:
    """The result of the tuning of a fit, so far."""

    decided: bool = False
    """True once the number of workers is known to stay: after trials, or because nothing may be changed."""
    moves: list[Move] = field(default_factory=list)


class TuningLog:
    """Notes what happens to the training loader of a fit, and tells the user.

    Args:
        trainer: the Trainer of the fit.
        guard: the callback's guard.
        once: keeps the lines that the callback has logged in this fit and in earlier ones.
        outcome: where changes are noted.
    """

    def __init__(self, trainer: AnyTrainer, guard: Guard, once: Once, outcome: Outcome) -> None:
        self._trainer = trainer
        self._guard = guard
        self._once = once
        self.outcome = outcome

    def say(self, line: str) -> None:
        """Log a line on the first rank."""
        if self._trainer.is_global_zero:
            say(logger, logging.INFO, line)

    def does_nothing(self, why: str) -> None:
        """Log why the loader stays as it is."""
        self.outcome.decided = True
        self._once.say(self._trainer, logging.INFO, f"AutotuneCallback does nothing: {why}.")

    def announce(self, tuned: Tuned) -> None:
        """Log which setting the training loader has from here on, and why."""
        origin = "an earlier run found: " if tuned.remembered else ""
        if tuned.setting == tuned.own:
            self.say(f"AutotuneCallback keeps {tuned.own}: {origin}{tuned.reason}.")
            return
        self.note_move(tuned.setting, tuned.reason)
        self.say(
            f"{self.now}: {_described(tuned.own, tuned.setting)}: {origin}{tuned.reason}{_tried(tuned)}. "
            f"The order of samples stays; random numbers drawn inside workers differ.{_cost_of(tuned)}"
        )

    @property
    def now(self) -> str:
        """The beginning of a line on what happens in the current epoch."""
        return f"AutotuneCallback, epoch {self._trainer.current_epoch}"

    def note_move(self, setting: Setting, reason: str) -> None:
        """Note a change of the training loader, and log the new setting as metrics."""
        trainer = self._trainer
        self.outcome.moves.append(Move(epoch=trainer.current_epoch, setting=setting, reason=reason))
        if not trainer.is_global_zero:
            return
        metrics = {"feed/num_workers": float(setting.num_workers)}
        if setting.prefetch_factor is not None:
            metrics["feed/prefetch_factor"] = float(setting.prefetch_factor)
        step = _host.steps_logged(trainer)
        output = LoggerOutput(trainer, self._guard)
        output.for_each("log its settings to", lambda trainer_logger: trainer_logger.log_metrics(metrics, step=step))


def too_short(time_left: TimeLeft) -> str:
    """Return the reason for no trials in a short fit, and the command that has them outside of it."""
    from lightning_feed.report.report import NOTEBOOK, read_program  # what only some fits need

    program = read_program()
    command = "lightning_feed.tune(loader)"
    if program not in ("", NOTEBOOK):
        command = f"lightning-feed tune {program if program.startswith('-m ') else shlex.quote(program)}"
    return (
        f"the fit ends in about {time_left.seconds:.0f} s, and trials would take longer than they could save. "
        f"`{command}` tries settings outside of it"
    )


def _tried(tuned: Tuned) -> str:
    """Return the figures of trials with the user's setting and the chosen one; empty if the reason has those of
    training."""
    if tuned.trained_ms is not None:
        return ""
    trials = [tuned.trial_of(setting) for setting in (tuned.own, tuned.setting)]
    figures = [f"{trial.setting}: {tuned.in_words(trial)}" for trial in trials if trial is not None]
    return f" ({', '.join(figures)})"


def _cost_of(tuned: Tuned) -> str:
    """Return the seconds of the trials, and the steps that return them; empty after an earlier run, or without a
    gain."""
    own = tuned.trial_of(tuned.own)
    if tuned.remembered or own is None or tuned.step_s is None or tuned.step_s >= own.step_s:
        return ""
    steps = math.ceil(tuned.seconds / (own.step_s - tuned.step_s))
    return f" The trials took {tuned.seconds:.1f} s, which {steps:,} steps save again ({steps * tuned.step_s:.0f} s)."


def _described(before: Setting, after: Setting) -> str:
    """Return the changes from one setting to another."""
    names = ("num_workers", "workers", "prefetch_factor", "persistent_workers", "pin_memory")
    changed = [(name, getattr(before, name), getattr(after, name)) for name in names]
    changes = [f"{name} {old} -> {new}" for name, old, new in changed if old != new]
    if after.in_place and not before.in_place:
        changes.append("batches in place")
    return ", ".join(changes)
