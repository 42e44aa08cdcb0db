"""Where most of a run is not training: validation or checkpoints, and how to spend less on them."""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

from lightning_feed.watch.verdict.case import PLACE, trainer_remedy
from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts, Measurements, Remedy
from lightning_feed.watch.verdict.remedies import LEAST_PCT, MOST, Rule
from lightning_feed.watch.wall import WallStats

Limit = Literal["validation", "checkpoints"]
LEAST_S = 2.0
"""Seconds of validation and checkpoints from which they are worth a verdict."""
AT_MOST = 0.25
"""Validation, or checkpoints, are to take so much of the time of training, or less."""
FACTORS = (2, 5, 10)
"""So many times rarer a validation may be."""


class Run(NamedTuple):
    """A fit that is limited by what is not training."""

    measured: Measurements
    wall: WallStats
    limit: Limit


def limit_of(measured: Measurements) -> Limit | None:
    """What takes more of a fit than training, epoch starts included; None where training takes most."""
    wall = measured.wall
    if wall is None or measured.facts.stage != "fit":
        return None
    validation, checkpoints = wall.seconds("validation"), wall.seconds("checkpoints")
    if validation + checkpoints < max(LEAST_S, wall.seconds("train", "epoch starts")):
        return None
    return "validation" if validation >= checkpoints else "checkpoints"


def validation_of(measured: Measurements) -> Measurements | None:
    """The validation by itself, to be diagnosed; None where it was not measured."""
    one = measured.validation
    if one is None:
        return None
    return Measurements(stats=one.stats, facts=one.facts, loaders=one.loaders, by_loader=one.by_loader)


def share_text(measured: Measurements) -> str:
    """``validation takes 60 % of the run, and waits for data 80 % of its time``; with checkpoints where they count."""
    wall, validation = measured.wall, measured.validation
    if wall is None or wall.wall_s <= 0:
        return ""  # of a report from elsewhere
    taken, saving = wall.seconds("validation"), wall.seconds("checkpoints")
    said = []
    if taken:
        waits = ""
        if validation is not None:
            waits = f", and waits for data {100 * min(1.0, validation.waited_s / taken):.0f} % of its time"
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
    measured = steps.measurements
    wall = measured.wall
    assert wall is not None
    inside = validation if limit == "validation" else None
    remedies = [one for rule in RULES if (one := rule.find(Run(measured, wall, limit))) is not None]
    if inside is not None:
        remedies += [_in_the_run(one, wall) for one in inside.remedies]
    remedies = [one for one in remedies if (one.predicted_gain_pct or 0.0) >= LEAST_PCT]
    remedies.sort(key=lambda one: -(one.predicted_gain_pct or 0.0))
    return replace(
        steps,
        bottleneck=limit,
        cause=inside.cause if inside is not None else "unknown",
        confidence=(inside or steps).confidence,
        evidence=(share_text(measured), *(f"in validation: {one}" for one in (inside.evidence if inside else ()))),
        remedies=tuple(remedies[:MOST]),
        notes=inside.notes if inside is not None else (),
        why_not=inside.why_not if inside is not None else (),
    )


def _in_the_run(remedy: Remedy, wall: WallStats) -> Remedy:
    """A remedy for the validation's loader, with what it saves of the run."""
    gain = (remedy.predicted_gain_pct or 0.0) * wall.seconds("validation") / wall.wall_s
    why = f"in validation: {remedy.why}{_saves(gain)}"
    return replace(remedy, why=why, predicted_step_ms=None, predicted_gain_pct=gain)


def _rarer_validation(run: Run) -> Remedy | None:
    """Validation every so many epochs or steps."""
    measured, wall, limit = run
    taken, train = wall.seconds("validation"), wall.seconds("train", "epoch starts")
    factors = [one for one in FACTORS if one <= wall.times("validation")]  # one at least is to be left
    if limit != "validation" or not factors:
        return None
    setting = _setting(measured.facts, next((one for one in factors if taken / one <= AT_MOST * train), factors[-1]))
    if setting is None:
        return None
    if wall.times("checkpoints") <= wall.times("validation"):
        taken += wall.seconds("checkpoints")  # ModelCheckpoint saves behind a validation, if it was given no interval
    gain = 100 * taken * (1 - 1 / setting.times) / wall.wall_s
    return trainer_remedy(
        measured.facts.place or PLACE,
        setting.name,
        setting.now,
        setting.then,
        why=f"validation {setting.times:.3g} times as rare; so is what follows it: early stopping, the choice of the "
        f"best checkpoint, schedulers of a validation metric{_saves(gain)}",
        predicted_gain_pct=gain,
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


def _rarer_checkpoints(run: Run) -> Remedy | None:
    """Checkpoints every so many steps."""
    measured, wall, limit = run
    taken, times, now = wall.seconds("checkpoints"), wall.times("checkpoints"), measured.facts.checkpoint_steps
    train = wall.seconds("train", "epoch starts")
    most = times // 2  # one at least is to be left, and ``save_last`` may save each twice
    if limit != "checkpoints" or now is None or not train or most < 2 or (measured.facts.place or PLACE).trainer_key:
        return None  # a command line adds callbacks, and cannot change one
    rarer = min(most, max(2, math.ceil(taken / (AT_MOST * train))))
    gain = 100 * taken * (1 - 1 / rarer) / wall.wall_s
    return Remedy(
        code=f"ModelCheckpoint(every_n_train_steps={now * rarer})",
        form="callback",
        where=f"every_n_train_steps: {now} -> {now * rarer} in callbacks=[...] of your Trainer, with `from "
        f"{measured.facts.package}.callbacks import ModelCheckpoint`",
        why=f"each of {times} checkpoints took {taken / times:.2f} s{_saves(gain)}",
        predicted_gain_pct=gain,
        changes=f"every_n_train_steps={now * rarer}",
    )


def _saves(pct: float) -> str:
    return f" (predicted to save {pct:.0f} % of the run)"


RULES: tuple[Rule[Run], ...] = (
    Rule(
        name="rarer validation",
        condition="validation and checkpoints take more of the run than training, validation the larger part, and "
        "there was more than one",
        changes="check_val_every_n_epoch or val_check_interval of the Trainer",
        find=_rarer_validation,
    ),
    Rule(
        name="rarer checkpoints",
        condition="validation and checkpoints take more of the run than training, checkpoints the larger part, and "
        "one ModelCheckpoint saves them every so many steps, and has done so four times",
        changes="every_n_train_steps of the ModelCheckpoint",
        find=_rarer_checkpoints,
    ),
)
