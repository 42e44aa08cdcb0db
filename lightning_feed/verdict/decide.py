"""The verdict: the bottleneck of training or of the whole run, its figures, and the changes to make."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.measure.stats import MIN_STEPS, Confidence
from lightning_feed.measure.wall import WallStats
from lightning_feed.verdict.causes import Reason, compute_cause, copy_cause, data_cause, framework_cause
from lightning_feed.verdict.device_use import wait_note, waits_in_each_step
from lightning_feed.verdict.diagnosis import Bottleneck, Change, Diagnosis, Note, Remedy
from lightning_feed.verdict.notes import cut_short, notes_for, why_not
from lightning_feed.verdict.remedies import DATALOADER, JudgedRun, largest, remedies_for, trainer_remedy
from lightning_feed.verdict.shares import (
    Shares,
    StepPart,
    grade_of,
    is_toy_step,
    lacked_cpu,
    model_alone_ms,
    model_disturbed,
    shares_of,
)
from lightning_feed.verdict.thresholds import (
    BESIDE_LEAST_S,
    BESIDE_MOST_SHARE,
    BESIDE_NOTED_SHARE,
    DATA_PCT,
    HIGH_PCT,
    LEAST_GAIN_PCT,
    MODERATE_PCT,
    MOST_NOTES,
    RARER_FACTORS,
    SLACK_SHARE,
    SLOW_START_S,
    WAITS_NAMED,
)
from lightning_feed.wording import source_line

_FIND: dict[Bottleneck, Callable[[Measurements, Shares], Reason]] = {
    "framework": framework_cause,
    "copy": copy_cause,
    "data": data_cause,
    "compute": compute_cause,
}
_LOWER: dict[Confidence, Confidence] = {"high": "medium", "medium": "low", "low": "low"}


def decide(measured: Measurements) -> Diagnosis:
    """Find the bottleneck of a run and its cause: in the training steps, or in validation and checkpoints."""
    steps = _of_steps(measured)
    limit = _limit_of(measured)
    if limit is None:
        if not _takes_much_beside_training(measured):
            return steps
        return replace(steps, notes=(Note.of("share of the run"), *steps.notes)[:MOST_NOTES])
    validation = measured.validation
    if limit == "checkpoints" or validation is None:
        return _of_the_run(limit, steps, None)
    inside = Measurements(
        stats=validation.stats,
        facts=validation.facts,
        loaders=validation.loaders,
        by_loader=validation.by_loader,
    )
    return _of_the_run(limit, steps, _of_steps(inside))


def _of_steps(measured: Measurements) -> Diagnosis:
    """Find the bottleneck of the steps and its cause.

    The parts of a step are compared with their limits: framework (10 %), copy (5 %), data (5 %). The largest part over
    its limit is the bottleneck; on a tie, the part that comes first in this order. The causes and remedies of other
    parts over their limits are reported, too. Computing is the bottleneck if no part is over its limit, or if the
    largest such part is below 10 % and computing takes more. With several ranks, the longest wait of each step counts,
    if known. Waiting does not count if the model alone, fed the same batch repeatedly, takes as long as a step. If the
    model alone took even longer, that experiment was disturbed: the verdict ignores it, with lower confidence.
    """
    if model_disturbed(measured):
        return _without_model(measured)
    shares = shares_of(measured)
    if shares is None:
        return _not_measured(measured)
    headline = shares.headline_parts[0]
    if headline == "data" and lacked_cpu(measured):
        return _cannot_tell(measured, shares)
    reasons: dict[Bottleneck, Reason] = {part: _FIND[part](measured, shares) for part in shares.headline_parts}
    diagnosis = Diagnosis(
        bottleneck=headline,
        cause=reasons[headline].cause,
        grade="OK" if shares.compute_bound_confirmed else grade_of(shares.data_pct),
        confidence=_confidence(measured, shares, reasons[headline]),
        evidence=_evidence(measured, shares, list(reasons.values())),
        measurements=measured,
    )
    if is_toy_step(shares.step_ms):
        return replace(diagnosis, notes=tuple(cut_short(measured.facts)))
    causes = {part: reason.cause for part, reason in reasons.items()}
    return _with_advice(diagnosis, JudgedRun(measured=measured, shares=shares, causes=causes))


def _with_advice(diagnosis: Diagnosis, judged: JudgedRun) -> Diagnosis:
    stripped = _stripped(judged)
    remedies: tuple[Remedy, ...] = ()
    if not judged.loader.repeated:  # a stream that repeats samples has to be mended first
        remedies = remedies_for(judged)
    if stripped:
        remedies = tuple(remedy for remedy in remedies if remedy.tried_ms is not None)
    reasons = why_not(judged, remedies)
    notes = [note for note in notes_for(judged, remedies) if not (reasons and note.kind == "may repeat samples")]
    return replace(diagnosis, remedies=remedies, notes=(*stripped, *notes)[:MOST_NOTES], why_not=reasons)


def _stripped(judged: JudgedRun) -> tuple[Note, ...]:
    """Return the note on a diagnosis whose fit ran without callbacks, loggers or validation, and hardly waited for
    data.

    Steps of such a fit are shorter than in the user's fit, so small waits, such as taking a ready batch, are a larger
    share of them.
    """
    left_out = judged.measured.experiments.stripped
    limit_pct = HIGH_PCT if judged.data == "hand-over" else MODERATE_PCT
    if not left_out or judged.shares.data_pct >= limit_pct:
        return ()
    return (Note.of("left out of the fit", parts=left_out),)


def _not_measured(measured: Measurements) -> Diagnosis:
    steps = measured.stats.steps
    reason = Note.of("too few steps", steps=steps, needed=MIN_STEPS)
    if not steps and measured.experiments.loader_per_s:
        reason = Note.of("loader alone")
    return Diagnosis(
        bottleneck="unknown", grade="not measured", confidence="low", evidence=(reason,), measurements=measured
    )


def _cannot_tell(measured: Measurements, shares: Shares) -> Diagnosis:
    """Report that there is no verdict, because the loading threads waited for CPUs that other programs used."""
    waits = Note.of("waits and lacks a CPU", pct=shares.data_pct)
    return Diagnosis(
        bottleneck="unknown",
        grade=grade_of(shares.data_pct),
        confidence="low",
        evidence=(_others(measured), waits, *_loading(measured)),
        measurements=measured,
    )


def _others(measured: Measurements) -> Note:
    """Return the note about the CPU use of other programs."""
    return Note.of("others busy", pct=measured.facts.others_cpu_pct)


def _without_model(measured: Measurements) -> Diagnosis:
    """Return the verdict without the measured time of the model alone, which is impossible: it is longer than a
    step."""
    diagnosis = _of_steps(replace(measured, experiments=replace(measured.experiments, model_per_s=None)))
    disturbed = Note.of("model disturbed", ms=model_alone_ms(measured), step_ms=measured.stats.step_ms)
    return replace(
        diagnosis,
        confidence=_LOWER[diagnosis.confidence],
        evidence=(*diagnosis.evidence, disturbed),
        measurements=measured,
    )


def _confidence(measured: Measurements, shares: Shares, reason: Reason) -> Confidence:
    """Return the confidence in the verdict: the confidence of the figures, but lower if a share is close to a limit, or
    if figures that could change the cause are missing. Low if an experiment contradicts the cause, or if other programs
    take many CPUs."""
    if reason.contradicted or measured.facts.crowded:
        return "low"
    confidence = measured.stats.confidence
    low, high = measured.stats.interval_pct or (0.0, 0.0)
    crosses_limit = low < DATA_PCT <= high or low < HIGH_PCT <= high
    if (crosses_limit and not shares.compute_bound_confirmed) or shares.close_to_limit:
        confidence = _LOWER[confidence]
    if not reason.sure:
        confidence = _LOWER[confidence]
    return confidence


def _evidence(measured: Measurements, shares: Shares, reasons: Sequence[Reason]) -> tuple[Note, ...]:
    """Return the evidence: the largest parts of a step, the figures of their causes, and related facts."""
    step_ms = shares.step_ms
    evidence = [_part(measured, shares, part) for part in shares.over]
    if not shares.over:
        evidence.append(Note.of("compute share", pct=100 * (measured.stats.compute_ms or 0.0) / step_ms))
    for reason in reasons:
        evidence += reason.evidence
    if shares.compute_bound_confirmed and shares.over:
        evidence += compute_cause(measured, shares).evidence
    if "data" in shares.over:
        evidence += [*_loading(measured), *_making(measured)]
    return (*evidence, *_further_evidence(measured, step_ms))


def _further_evidence(measured: Measurements, step_ms: float) -> list[Note]:
    """Return further evidence: hidden waits, earlier epochs, starts of epochs, other programs, lost steps."""
    stats = measured.stats
    facts = measured.facts
    evidence = []
    if stats.hidden_wait_ms is not None and stats.hidden_wait_ms >= SLACK_SHARE * step_ms:
        evidence.append(Note.of("hidden wait", hidden_ms=stats.hidden_wait_ms, ms=stats.next_wait_ms))
    evidence += [wait_note(wait, measured) for wait in waits_in_each_step(facts)[:WAITS_NAMED]]
    if facts.waited_ms is not None:
        before_ms, since_ms = facts.waited_ms
        evidence.append(Note.of("waited in earlier epochs", before_ms=before_ms, since_ms=since_ms))
    if stats.epoch_start_s is not None and stats.epoch_start_s >= SLOW_START_S:
        evidence.append(Note.of("slow epoch start", s=stats.epoch_start_s))
    if facts.crowded:
        evidence.append(_others(measured))
    if stats.lost_steps:
        evidence.append(Note.of("lost steps", steps=stats.lost_steps))
    return evidence


def _loading(measured: Measurements) -> list[Note]:
    """Return the evidence on workers: their number, whether they hand batches over in place, and the shares of their
    time on a CPU, waiting for a CPU, and blocked."""
    workers = measured.facts.loader.num_workers
    if workers is None:
        return []
    if workers == 0:
        return [Note.of("takes turns", stage=measured.facts.stage)]
    loaders = measured.loaders
    note = Note.of(
        "workers",
        workers=workers,
        cpus=measured.facts.usable_cpus,
        in_place=bool(measured.facts.loader.in_place),
        on_cpu_pct=loaders.workers_on_cpu_pct,
        queue_pct=loaders.workers_run_queue_pct,
        blocked_pct=loaders.workers_blocked_pct,
    )
    return [note]


def _making(measured: Measurements) -> list[Note]:
    """Return the evidence: the time to make a batch, its larger part (samples or collating), and that part's slowest
    function."""
    samples_ms = measured.experiments.samples_ms
    collate_ms = measured.experiments.collate_ms
    if samples_ms is None or not collate_ms:
        return []
    stage = "collate" if collate_ms > samples_ms else "samples"
    whole_ms = samples_ms + collate_ms
    larger_pct = 100 * max(samples_ms, collate_ms) / whole_ms
    slowest = next((function for function in measured.experiments.functions if function.stage == stage), None)
    if slowest is None:
        return [Note.of("making a batch", ms=whole_ms, pct=larger_pct, stage=stage)]
    at = source_line(slowest.file, slowest.line)
    return [Note.of("making a batch", ms=whole_ms, pct=larger_pct, stage=stage, function=slowest.name, at=at)]


def _part(measured: Measurements, shares: Shares, part: StepPart) -> Note:
    if part == "framework":
        ms: float | None = measured.between_ms
        pct = shares.framework_pct
    elif part == "copy":
        ms = measured.stats.copy_ms
        pct = shares.copy_pct
    else:  # not ``data_pct``, which may be the share of epochs' first batches: these belong to no step
        ms = shares.data_ms
        pct = 100 * shares.data_ms / shares.step_ms
    by_ranks = part == "data" and shares.by_ranks
    return Note.of("part of the step", part=part, ms=ms, step_ms=shares.step_ms, pct=pct, by_ranks=by_ranks)


# --- where most of a run is not training --------------------------------------------------------------------------

Limit = Literal["validation", "checkpoints"]


def _limit_of(measured: Measurements) -> Limit | None:
    """Return the longer of validation and checkpoints; None if training with its epoch starts takes longer than both
    together.

    Also None if both together take less than :data:`BESIDE_LEAST_S`.
    """
    wall = measured.wall
    if wall is None or measured.facts.stage != "fit":
        return None
    validation = wall.seconds("validation")
    checkpoints = wall.seconds("checkpoints")
    if validation + checkpoints < max(BESIDE_LEAST_S, wall.seconds("train", "epoch starts")):
        return None
    if validation >= checkpoints:
        return "validation"
    return "checkpoints"


def _takes_much_beside_training(measured: Measurements) -> bool:
    """Return True for a fit in which validation and checkpoints take much of the time."""
    wall = measured.wall
    if wall is None or measured.facts.stage != "fit":
        return False
    taken_s = wall.seconds("validation") + wall.seconds("checkpoints")
    return taken_s >= max(BESIDE_LEAST_S, BESIDE_NOTED_SHARE * wall.run_s)


def _of_the_run(limit: Limit, steps: Diagnosis, validation: Diagnosis | None) -> Diagnosis:
    """Return the verdict on a fit that is limited by validation or checkpoints.

    Args:
        limit: validation or checkpoints.
        steps: the verdict on the training steps.
        validation: the verdict on the validation; None if validation is not the limit, or was not measured.
    """
    measured = steps.measurements
    wall = measured.wall
    assert wall is not None
    find_rarer = {"validation": rarer_validation, "checkpoints": rarer_checkpoints}[limit]
    remedies = list(filter(None, [find_rarer(measured, wall)]))
    evidence = [Note.of("share of the run")]
    diagnosis = replace(steps, bottleneck=limit, cause="unknown", notes=(), why_not=())
    if validation is not None:
        remedies += [_in_the_run(remedy, wall) for remedy in validation.remedies]
        evidence += [note.of_validation() for note in validation.evidence]
        diagnosis = replace(
            diagnosis,
            cause=validation.cause,
            confidence=validation.confidence,
            notes=tuple(note.of_validation() for note in validation.notes),
            why_not=tuple(note.of_validation() for note in validation.why_not),
        )
    return replace(diagnosis, evidence=tuple(evidence), remedies=largest(remedies, LEAST_GAIN_PCT))


def _in_the_run(remedy: Remedy, wall: WallStats) -> Remedy:
    """Convert a remedy for the validation loader: its saving becomes a share of the run."""
    gain_pct = (remedy.most_gain_pct or 0.0) * wall.seconds("validation") / wall.run_s
    why = tuple(note.of_validation() for note in remedy.why)
    return replace(remedy, why=why, least_step_ms=None, most_gain_pct=gain_pct)


# --- remedies for the run -----------------------------------------------------------------------------------------


def rarer_validation(measured: Measurements, wall: WallStats) -> Remedy | None:
    """Remedy: validate less often, if there was more than one validation."""
    taken_s = wall.seconds("validation")
    factor = _rarer_factor(wall)
    change = None if factor is None else _validation_change(measured.facts, factor)
    if change is None:
        return None
    if wall.times("checkpoints") <= wall.times("validation"):
        taken_s += wall.seconds("checkpoints")  # without an interval, ModelCheckpoint saves after each validation
    why = Note.of("validation rarer", times=change.factor)
    code = measured.facts.loader_code or DATALOADER
    return replace(
        trainer_remedy(code, change.setting, change.before, change.after, why),
        most_gain_pct=100 * taken_s * (1 - 1 / change.factor) / wall.run_s,
    )


def _rarer_factor(wall: WallStats) -> int | None:
    """Return the smallest of :data:`RARER_FACTORS` with which validation takes little time beside training.

    At least one validation remains. If no such factor makes validation short enough, the largest one is returned; None
    if there was only one validation.
    """
    factors = [factor for factor in RARER_FACTORS if factor <= wall.times("validation")]
    training_s = wall.seconds("train", "epoch starts")
    for factor in factors:
        if wall.seconds("validation") / factor <= BESIDE_MOST_SHARE * training_s:
            return factor
    return next(reversed(factors), None)


class _ValidationChange(NamedTuple):
    """A setting of the Trainer with which validation runs less often."""

    setting: str
    before: int
    after: int | float
    factor: float
    """Number of times less often that validation runs."""


def _validation_change(facts: LoopFacts, factor: int) -> _ValidationChange | None:
    """Return the change to the schedule of validation; None if the schedule is by time or unknown."""
    every = facts.trainer.check_val_every_n_epoch
    between = facts.trainer.val_check_batches
    epoch = facts.batches_per_epoch
    if between is None:
        if every is None:
            return None
        return _ValidationChange("check_val_every_n_epoch", every, every * factor, factor)
    if every is not None and epoch is not None and between * factor >= epoch:  # Lightning refuses more than an epoch
        return _ValidationChange("val_check_interval", between, 1.0, epoch / between)
    return _ValidationChange("val_check_interval", between, between * factor, factor)


def rarer_checkpoints(measured: Measurements, wall: WallStats) -> Remedy | None:
    """Remedy: save less often, if a single ModelCheckpoint saves by steps and has saved at least four times."""
    facts = measured.facts
    interval = facts.trainer.checkpoint_steps
    taken_s = wall.seconds("checkpoints")
    times = wall.times("checkpoints")
    training_s = wall.seconds("train", "epoch starts")
    largest_factor = times // 2  # keep at least one; ``save_last`` may save each twice
    if interval is None or not training_s or largest_factor < 2:
        return None
    if (facts.loader_code or DATALOADER).trainer_key:
        return None  # a command line can add callbacks, but not change them
    factor = min(largest_factor, max(2, math.ceil(taken_s / (BESIDE_MOST_SHARE * training_s))))
    rarer = interval * factor
    return Remedy(
        code=f"ModelCheckpoint(every_n_train_steps={rarer})",
        form="callback",
        where=f"every_n_train_steps: {interval} -> {rarer} in callbacks=[...] of your Trainer, with `from "
        f"{facts.trainer.package}.callbacks import ModelCheckpoint`",
        why=(Note.of("checkpoint cost", times=times, s=taken_s / times),),
        most_gain_pct=100 * taken_s * (1 - 1 / factor) / wall.run_s,
        change=Change("every_n_train_steps", str(rarer)),
    )
