"""The verdict: the bottleneck of training or of the whole run, its figures, and the changes to make."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.measure.stats import MIN_STEPS, Confidence
from lightning_feed.measure.wall import WallStats
from lightning_feed.verdict.causes import Reason, compute_cause, copy_cause, data_cause, framework_cause
from lightning_feed.verdict.diagnosis import Bottleneck, Diagnosis, Remedy
from lightning_feed.verdict.notes import MOST, SHARD, cut_short, notes_for, why_not
from lightning_feed.verdict.remedies import LEAST_PCT, PLACE, Finding, largest, remedies_for, trainer_remedy
from lightning_feed.verdict.shares import (
    DATA_PCT,
    HIGH_PCT,
    LOOP_WORDS,
    MODERATE_PCT,
    Shares,
    StepPart,
    grade_of,
    in_ms,
    lacked_cpu,
    model_alone_ms,
    model_disturbed,
    shares_of,
    toy_sentence,
)
from lightning_feed.wording import plural, source_line

_FIND: dict[Bottleneck, Callable[[Measurements, Shares], Reason]] = {
    "framework": framework_cause,
    "copy": copy_cause,
    "data": data_cause,
    "compute": compute_cause,
}
_LOWER: dict[Confidence, Confidence] = {"high": "medium", "medium": "low", "low": "low"}


def diagnose(measured: Measurements) -> Diagnosis:
    """Find the bottleneck of a run and its cause: in the training steps, or in validation and checkpoints."""
    steps = _of_steps(measured)
    limit = _limit_of(measured)
    one = measured.validation
    if limit is None:
        beside = _beside_training(measured)
        return replace(steps, notes=(beside, *steps.notes)[:MOST]) if beside else steps
    if limit == "checkpoints" or one is None:
        return _of_the_run(limit, steps, None)
    inside = Measurements(stats=one.stats, facts=one.facts, loaders=one.loaders, by_loader=one.by_loader)
    return _of_the_run(limit, steps, _of_steps(inside))


def _of_steps(measured: Measurements) -> Diagnosis:
    """Find what limits the steps, and why.

    The parts of a step are compared with their limits in the order framework (10 %), copy (5 %), data (5 %). The
    largest part over its limit is the bottleneck, the earlier one on a tie; others over their limits are named and
    treated too. If there is none, computing limits training. Waiting for data is the longest over the ranks, if known.
    It does not count if the model alone, fed the same batch repeatedly, takes as long as a step. If the model alone
    took even longer, that experiment was disturbed: the verdict ignores it, with lower confidence.
    """
    if model_disturbed(measured):
        return _without_model(measured)
    shares = shares_of(measured)
    if shares is None:
        return _not_measured(measured)
    parts: tuple[Bottleneck, ...] = shares.headline_parts
    reasons = {part: _FIND[part](measured, shares) for part in parts}
    if parts[0] == "data" and lacked_cpu(measured):
        return _cannot_tell(measured, shares)
    because = [line for one in reasons.values() for line in one.because]
    if shares.compute_bound_confirmed and shares.over:
        because += compute_cause(measured, shares).because
    first = reasons[parts[0]]
    toy = toy_sentence(shares.step_ms)
    found = Diagnosis(
        bottleneck=parts[0],
        cause=first.cause,
        grade="OK" if shares.compute_bound_confirmed else grade_of(shares.data_pct),
        confidence=_confidence(measured, shares, first),
        evidence=_evidence(measured, shares, because),
        notes=(*cut_short(measured.facts), toy) if toy else (),
        measurements=measured,
    )
    finding = Finding(measured=measured, shares=shares, causes={part: one.cause for part, one in reasons.items()})
    return found if toy else _with_advice(found, finding)


def _with_advice(found: Diagnosis, finding: Finding) -> Diagnosis:
    stripped = _stripped(finding)
    no_advice = stripped or finding.facts.repeated  # what repeats samples has to be mended first
    remedies = () if no_advice else remedies_for(finding)
    reasons = why_not(finding, remedies)
    notes = [note for note in notes_for(finding, remedies) if not (reasons and note == SHARD)]
    return replace(found, remedies=remedies, notes=(*stripped, *notes)[:MOST], why_not=reasons)


def _stripped(finding: Finding) -> tuple[str, ...]:
    """The note on a diagnosis whose fit ran without callbacks, loggers or validation, and hardly waited for data.

    Its steps are shorter than in the user's fit, so small waits, such as taking a ready batch, are a larger share.
    """
    measured = finding.measured
    shares = finding.shares
    limit = HIGH_PCT if finding.data == "hand-over" else MODERATE_PCT
    if not measured.found.stripped or shares.data_pct >= limit:
        return ()
    said = "not run here, and the rest waits little. Train with LIGHTNING_FEED=1 to measure them"
    return (f"{measured.found.stripped}: {said}",)


def _not_measured(measured: Measurements) -> Diagnosis:
    steps = measured.stats.steps
    reason = (
        f"{steps} steps were measured, and a verdict needs {MIN_STEPS}: the first of an epoch and those after a "
        "validation do not count"
    )
    if not steps and measured.found.loader_per_s:
        reason = "only the loader was measured: give a LightningModule, too, to see if training waits for it"
    return Diagnosis(
        bottleneck="unknown", grade="not measured", confidence="low", evidence=(reason,), measurements=measured
    )


def _cannot_tell(measured: Measurements, shares: Shares) -> Diagnosis:
    """No verdict on loading from threads that had no CPU."""
    waits = f"training waits {shares.data_pct:.0f} % of each step for data, and loading for a CPU"
    return Diagnosis(
        bottleneck="unknown",
        grade=grade_of(shares.data_pct),
        confidence="low",
        evidence=(_others(measured), waits, *_loading(measured)),
        measurements=measured,
    )


def _others(measured: Measurements) -> str:
    """The one line about other programs."""
    return f"other programs take {measured.facts.others_cpu_pct:.0f} % of the CPUs: figures are of this moment"


def _without_model(measured: Measurements) -> Diagnosis:
    """The verdict that ignores an impossible figure of the model alone."""
    alone = model_alone_ms(measured) or 0.0
    step_ms = measured.stats.step_ms or 0.0
    found = _of_steps(replace(measured, experiments=replace(measured.found, model_per_s=None)))
    said = (
        f"the model alone took {in_ms(alone, step_ms)} ms, more than the {in_ms(step_ms, step_ms)} ms of a step: "
        "something disturbed that experiment, so its result is ignored"
    )
    return replace(found, confidence=_LOWER[found.confidence], evidence=(*found.evidence, said), measurements=measured)


def _confidence(measured: Measurements, shares: Shares, found: Reason) -> Confidence:
    """Confidence of the figures; lower if a share is close to a limit, or figures of the cause are missing."""
    stats = measured.stats
    confidence = measured.stats.confidence
    low, high = stats.interval_pct or (0.0, 0.0)
    wide = any(low < limit <= high for limit in (DATA_PCT, HIGH_PCT))
    if (wide and not shares.compute_bound_confirmed) or shares.close_to_limit:
        confidence = _LOWER[confidence]
    if found.contradicted or measured.facts.crowded:
        return "low"
    return confidence if found.sure else _LOWER[confidence]


SLOW_START_S = 1.0
"""Time to the first batch of an epoch above which the evidence mentions it."""
SLACK_SHARE = 0.01
"""Share of a step above which the evidence mentions a hidden wait."""


def _evidence(measured: Measurements, shares: Shares, because: Sequence[str]) -> tuple[str, ...]:
    """Evidence: the largest parts of a step, the figures of their cause (``because``), and related facts."""
    stats = measured.stats
    whole = shares.step_ms
    said = [_part(measured, shares, part) for part in shares.over]
    if not shares.over:
        pct = 100 * (stats.compute_ms or 0.0) / whole
        said.append(f"{pct:.0f} % of each step is forward, backward and optimizer")
    said += because
    if "data" in shares.over:
        said += [*_loading(measured), *_making(measured)]
    return (*said, *_beside(measured, whole))


def _beside(measured: Measurements, step_ms: float) -> Iterator[str]:
    stats = measured.stats
    facts = measured.facts
    if stats.hidden_wait_ms is not None and stats.hidden_wait_ms >= SLACK_SHARE * step_ms:
        hidden = in_ms(stats.hidden_wait_ms, step_ms)
        wait = in_ms(stats.next_wait_ms, step_ms)
        yield f"{hidden} of {wait} ms in next(loader) are hidden: the device computes meanwhile"
    if facts.waited_ms is not None:
        before, now = (in_ms(ms, step_ms) for ms in facts.waited_ms)
        yield f"in earlier epochs, which do not count here, a step waited {before} ms for data, and since then {now}"
    if stats.epoch_start_s is not None and stats.epoch_start_s >= SLOW_START_S:
        yield f"the first batch of an epoch takes {stats.epoch_start_s:.1f} s"
    if facts.crowded:
        yield _others(measured)
    if stats.lost_steps:
        yield f"{stats.lost_steps} steps could not be measured on the device"


def _loading(measured: Measurements) -> list[str]:
    """Evidence: the number of workers, and their shares of time on a CPU, waiting for one, and blocked."""
    facts = measured.facts
    loaders = measured.loaders
    if not facts.num_workers:
        turns = f"num_workers=0, so loading and {LOOP_WORDS[facts.stage]} take turns"
        return [turns] if facts.num_workers == 0 else []
    cpus = f" on {plural(facts.usable_cpus, 'CPU')}" if facts.usable_cpus is not None else ""
    on_cpu = loaders.workers_on_cpu_pct
    queue = loaders.workers_run_queue_pct
    blocked = loaders.workers_blocked_pct
    did = ""
    if on_cpu is not None and queue is not None and blocked is not None:
        did = f": on a CPU {on_cpu:.0f} % of the time, waiting for one {queue:.0f} %, blocked {blocked:.0f} %"
    return [f"the loader has {plural(facts.num_workers, 'worker')}{cpus}{did}"]


def _making(measured: Measurements) -> list[str]:
    """Evidence: the time to make a batch, its larger part (samples or collating), and that part's slowest function."""
    found = measured.found
    if found.samples_ms is None or not found.collate_ms:
        return []
    whole = found.samples_ms + found.collate_ms
    stage, ms = max(("samples", found.samples_ms), ("collate", found.collate_ms), key=lambda one: one[1])
    slowest = next((one for one in found.functions if one.stage == stage), None)
    at = "" if slowest is None else f", most of it in {slowest.name} ({source_line(slowest.file, slowest.line)})"
    what = "making its samples" if stage == "samples" else "collating them"
    return [f"a batch takes {whole:.1f} ms in one process, {what} {100 * ms / whole:.0f} %{at}"]


def _part(measured: Measurements, shares: Shares, part: StepPart) -> str:
    stats = measured.stats
    whole = shares.step_ms
    where, ms, pct = {
        "framework": ("between the steps", stats.other_ms, shares.framework_pct),
        "copy": ("in the transfer to the device", stats.h2d_ms, shares.copy_pct),
        "data": ("waiting for data", shares.data_ms, shares.data_pct),
    }[part]
    if part == "data":
        pct = 100 * shares.data_ms / whole  # the first batches of epochs do not belong to a step
        where = "waiting for data, the slowest rank of each step" if shares.by_ranks else where
    return f"{in_ms(ms, whole)} of {in_ms(whole, whole)} ms ({pct:.0f} %) {where}"


# --- where most of a run is not training --------------------------------------------------------------------------

Limit = Literal["validation", "checkpoints"]
LEAST_S = 2.0
"""Seconds of validation and checkpoints above which they get a verdict or a note."""
NOTED_SHARE = 0.15
"""Share of the wall time above which validation and checkpoints get a note."""
AT_MOST = 0.25
"""Goal for validation or checkpoints, as a share of the training time."""
FACTORS = (2, 5, 10)
"""Factors by which validation may run less often."""


def _limit_of(measured: Measurements) -> Limit | None:
    """The longer of validation and checkpoints; None if training with its epoch starts takes longer than both together.

    Also None if both together take less than :data:`LEAST_S`.
    """
    wall = measured.wall
    if wall is None or measured.facts.stage != "fit":
        return None
    validation = wall.seconds("validation")
    checkpoints = wall.seconds("checkpoints")
    if validation + checkpoints < max(LEAST_S, wall.seconds("train", "epoch starts")):
        return None
    return "validation" if validation >= checkpoints else "checkpoints"


def _beside_training(measured: Measurements) -> str:
    """The note on validation and checkpoints; empty unless they take much of a fit."""
    wall = measured.wall
    if wall is None or measured.facts.stage != "fit":
        return ""
    taken_s = wall.seconds("validation") + wall.seconds("checkpoints")
    return share_text(measured) if taken_s >= max(LEAST_S, NOTED_SHARE * wall.wall_s) else ""


def share_text(measured: Measurements) -> str:
    """``validation takes 60 % of the run, and waits for data 80 % of its time``; with checkpoints if they take much."""
    wall = measured.wall
    validation = measured.validation
    if wall is None or wall.wall_s <= 0:
        return ""  # an older report
    taken = wall.seconds("validation")
    saving = wall.seconds("checkpoints")
    said = []
    waits = ""
    if validation is not None and taken:
        waits = f", and waits for data {100 * min(1.0, validation.waited_s / taken):.0f} % of its time"
    if taken:
        said.append(f"validation takes {100 * taken / wall.wall_s:.0f} % of the run{waits}")
    if saving >= taken or 100 * saving >= LEAST_PCT * wall.wall_s:
        said.append(f"checkpoints take {100 * saving / wall.wall_s:.0f} % of the run")
    return "; ".join(said if taken >= saving else said[::-1])


def _of_the_run(limit: Limit, steps: Diagnosis, validation: Diagnosis | None) -> Diagnosis:
    """The verdict on a fit that is limited by validation or checkpoints.

    Args:
        limit: validation or checkpoints.
        steps: the verdict on the training steps.
        validation: the verdict on the validation; None if validation is not the limit, or was not measured.
    """
    measured = steps.measurements
    wall = steps.measurements.wall
    assert wall is not None
    rule = rarer_validation if limit == "validation" else rarer_checkpoints
    remedies = [one for one in (rule(measured, wall),) if one is not None]
    found = replace(steps, bottleneck=limit, cause="unknown", evidence=(share_text(measured),), notes=(), why_not=())
    if validation is not None:
        remedies += [_in_the_run(one, wall) for one in validation.remedies]
        found = replace(
            found,
            cause=validation.cause,
            confidence=validation.confidence,
            evidence=(*found.evidence, *(f"in validation: {one}" for one in validation.evidence)),
            notes=validation.notes,
            why_not=validation.why_not,
        )
    return replace(found, remedies=largest(remedies, LEAST_PCT))


def _in_the_run(remedy: Remedy, wall: WallStats) -> Remedy:
    """Convert a remedy for the validation loader: its saving becomes a share of the run."""
    gain = (remedy.most_gain_pct or 0.0) * wall.seconds("validation") / wall.wall_s
    return replace(remedy, why=f"in validation: {remedy.why}", least_step_ms=None, most_gain_pct=gain)


# --- remedies for the run -----------------------------------------------------------------------------------------


def rarer_validation(measured: Measurements, wall: WallStats) -> Remedy | None:
    """Remedy: validate less often, if there was more than one validation."""
    facts = measured.facts
    taken = wall.seconds("validation")
    train = wall.seconds("train", "epoch starts")
    factors = [one for one in FACTORS if one <= wall.times("validation")]  # keep at least one validation
    times = next((one for one in factors if taken / one <= AT_MOST * train), factors[-1]) if factors else 0
    setting = _rarer_setting(facts, times) if times else None
    if setting is None:
        return None
    name, now, then, rarer = setting
    if wall.times("checkpoints") <= wall.times("validation"):
        taken += wall.seconds("checkpoints")  # without an interval, ModelCheckpoint saves after each validation
    gain = 100 * taken * (1 - 1 / rarer) / wall.wall_s
    why = (
        f"validation runs {rarer:.3g} times less often, and so do early stopping, the choice of the best "
        "checkpoint and schedulers that use a validation metric"
    )
    return trainer_remedy(facts.place or PLACE, name, now, then, why=why, most_gain_pct=gain)


def _rarer_setting(facts: LoopFacts, times: int) -> tuple[str, int, int | float, float] | None:
    """(Trainer setting, old value, new value, factor), or None if the schedule of validation is by time or unknown."""
    every = facts.check_val_every_n_epoch
    between = facts.val_check_batches
    epoch = facts.batches_per_epoch
    if between is None:
        return None if every is None else ("check_val_every_n_epoch", every, every * times, times)
    if every is not None and epoch is not None and between * times >= epoch:  # Lightning refuses more than an epoch
        return "val_check_interval", between, 1.0, epoch / between
    return "val_check_interval", between, between * times, times


def rarer_checkpoints(measured: Measurements, wall: WallStats) -> Remedy | None:
    """Remedy: save less often, if a single ModelCheckpoint saves by steps and has saved at least four times."""
    facts = measured.facts
    taken = wall.seconds("checkpoints")
    times = wall.times("checkpoints")
    now = facts.checkpoint_steps
    train = wall.seconds("train", "epoch starts")
    most = times // 2  # keep at least one; ``save_last`` may save each twice
    if now is None or not train or most < 2 or (facts.place or PLACE).trainer_key:
        return None  # a command line can add callbacks, but not change them
    rarer = min(most, max(2, math.ceil(taken / (AT_MOST * train))))
    gain = 100 * taken * (1 - 1 / rarer) / wall.wall_s
    return Remedy(
        code=f"ModelCheckpoint(every_n_train_steps={now * rarer})",
        form="callback",
        where=f"every_n_train_steps: {now} -> {now * rarer} in callbacks=[...] of your Trainer, with `from "
        f"{facts.package}.callbacks import ModelCheckpoint`",
        why=f"each of {times} checkpoints took {taken / times:.2f} s",
        most_gain_pct=gain,
        changes=f"every_n_train_steps={now * rarer}",
    )


RUN_RULES = (rarer_validation, rarer_checkpoints)
