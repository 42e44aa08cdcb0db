"""Where most of a run is not training: validation or checkpoints, and how to spend less on them."""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts, Measurements, Remedy
from lightning_feed.watch.verdict.remedies import LEAST_PCT, PLACE, largest, trainer_remedy
from lightning_feed.watch.wall import WallStats

Limit = Literal["validation", "checkpoints"]
LEAST_S = 2.0
"""Seconds of validation and checkpoints from which they are worth a verdict."""
AT_MOST = 0.25
"""Validation, or checkpoints, are to take so much of the time of training, or less."""
FACTORS = (2, 5, 10)
"""So many times rarer a validation may be."""


def limit_of(measured: Measurements) -> Limit | None:
    """What takes more of a fit than training, epoch starts included; None where training takes most."""
    wall = measured.wall
    if wall is None or measured.facts.stage != "fit":
        return None
    validation, checkpoints = wall.seconds("validation"), wall.seconds("checkpoints")
    if validation + checkpoints < max(LEAST_S, wall.seconds("train", "epoch starts")):
        return None
    return "validation" if validation >= checkpoints else "checkpoints"


def share_text(measured: Measurements) -> str:
    """``validation takes 60 % of the run, and waits for data 80 % of its time``; with checkpoints where they count."""
    wall, validation = measured.wall, measured.validation
    if wall is None or wall.wall_s <= 0:
        return ""  # of a report from elsewhere
    taken, saving = wall.seconds("validation"), wall.seconds("checkpoints")
    said, waits = [], ""
    if validation is not None and taken:
        waits = f", and waits for data {100 * min(1.0, validation.waited_s / taken):.0f} % of its time"
    if taken:
        said.append(f"validation takes {100 * taken / wall.wall_s:.0f} % of the run{waits}")
    if saving >= taken or 100 * saving >= LEAST_PCT * wall.wall_s:
        said.append(f"checkpoints take {100 * saving / wall.wall_s:.0f} % of the run")
    return "; ".join(said if taken >= saving else said[::-1])


def of_the_run(limit: Limit, steps: Diagnosis, validation: Diagnosis | None) -> Diagnosis:
    """The verdict on a fit that is limited by what is not training.

    Args:
        limit: by what.
        steps: the verdict on its training steps.
        validation: the verdict on its validation; None where it was not measured.
    """
    measured, wall = steps.measurements, steps.measurements.wall
    assert wall is not None
    inside = validation if limit == "validation" else None
    rule = rarer_validation if limit == "validation" else rarer_checkpoints
    remedies = [one for one in (rule(measured, wall),) if one is not None]
    found = replace(steps, bottleneck=limit, cause="unknown", evidence=(share_text(measured),), notes=(), why_not=())
    if inside is not None:
        remedies += [_in_the_run(one, wall) for one in inside.remedies]
        evidence = (*found.evidence, *(f"in validation: {one}" for one in inside.evidence))
        found = replace(found, cause=inside.cause, confidence=inside.confidence, evidence=evidence)
        found = replace(found, notes=inside.notes, why_not=inside.why_not)
    return replace(found, remedies=largest(remedies, LEAST_PCT))


def _in_the_run(remedy: Remedy, wall: WallStats) -> Remedy:
    """A remedy for the validation's loader, with what it saves of the run."""
    gain = (remedy.predicted_gain_pct or 0.0) * wall.seconds("validation") / wall.wall_s
    why = f"in validation: {remedy.why}{_saves(gain)}"
    return replace(remedy, why=why, predicted_step_ms=None, predicted_gain_pct=gain)


def _saves(pct: float) -> str:
    return f" (predicted to save {pct:.0f} % of the run)"


# --- remedies -----------------------------------------------------------------------------------------------------


def rarer_validation(measured: Measurements, wall: WallStats) -> Remedy | None:
    """There was more than one validation: every so many epochs or steps."""
    facts, taken, train = measured.facts, wall.seconds("validation"), wall.seconds("train", "epoch starts")
    factors = [one for one in FACTORS if one <= wall.times("validation")]  # one at least is to be left
    times = next((one for one in factors if taken / one <= AT_MOST * train), factors[-1]) if factors else 0
    setting = _setting(facts, times) if times else None
    if setting is None:
        return None
    if wall.times("checkpoints") <= wall.times("validation"):
        taken += wall.seconds("checkpoints")  # ModelCheckpoint saves behind a validation, if it was given no interval
    gain = 100 * taken * (1 - 1 / setting.times) / wall.wall_s
    why = (
        f"validation {setting.times:.3g} times as rare; so is what follows it: early stopping, the choice of the best "
        f"checkpoint, schedulers of a validation metric{_saves(gain)}"
    )
    return trainer_remedy(
        facts.place or PLACE, setting.name, setting.now, setting.then, why=why, predicted_gain_pct=gain
    )


class _Setting(NamedTuple):
    """A setting of the Trainer that makes validation rarer, by how many times."""

    name: str
    now: int
    then: int | float
    times: float


def _setting(facts: LoopFacts, times: int) -> _Setting | None:
    """None: it goes by time, or what is set is not known."""
    every, between, epoch = facts.check_val_every_n_epoch, facts.val_check_batches, facts.batches_per_epoch
    if between is None:
        return None if every is None else _Setting("check_val_every_n_epoch", every, every * times, times)
    if every is not None and epoch is not None and between * times >= epoch:  # more than an epoch has is refused
        return _Setting("val_check_interval", between, 1.0, epoch / between)
    return _Setting("val_check_interval", between, between * times, times)


def rarer_checkpoints(measured: Measurements, wall: WallStats) -> Remedy | None:
    """One ModelCheckpoint saves every so many steps, and has done so four times: more rarely."""
    facts, taken, times = measured.facts, wall.seconds("checkpoints"), wall.times("checkpoints")
    now, train = facts.checkpoint_steps, wall.seconds("train", "epoch starts")
    most = times // 2  # one at least is to be left, and ``save_last`` may save each twice
    if now is None or not train or most < 2 or (facts.place or PLACE).trainer_key:
        return None  # a command line adds callbacks, and cannot change one
    rarer = min(most, max(2, math.ceil(taken / (AT_MOST * train))))
    gain = 100 * taken * (1 - 1 / rarer) / wall.wall_s
    return Remedy(
        code=f"ModelCheckpoint(every_n_train_steps={now * rarer})",
        form="callback",
        where=f"every_n_train_steps: {now} -> {now * rarer} in callbacks=[...] of your Trainer, with `from "
        f"{facts.package}.callbacks import ModelCheckpoint`",
        why=f"each of {times} checkpoints took {taken / times:.2f} s{_saves(gain)}",
        predicted_gain_pct=gain,
        changes=f"every_n_train_steps={now * rarer}",
    )


RULES = (rarer_validation, rarer_checkpoints)
