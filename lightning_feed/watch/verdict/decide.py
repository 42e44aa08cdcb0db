"""Says what limits training, with the figures it rests on and what to change. A pure function of what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_feed.errors import plural, source_line
from lightning_feed.watch.stats import Confidence
from lightning_feed.watch.verdict.causes import Finding, compute_cause, copy_cause, data_cause, framework_cause
from lightning_feed.watch.verdict.diagnosis import Bottleneck, Diagnosis, Measurements
from lightning_feed.watch.verdict.notes import notes_for, why_not
from lightning_feed.watch.verdict.remedies import Case, remedies_for
from lightning_feed.watch.verdict.shares import (
    DATA_PCT,
    HIGH_PCT,
    MIN_STEPS,
    OTHERS_PCT,
    Part,
    Shares,
    grade_of,
    in_ms,
    model_alone_ms,
    model_disturbed,
    shares_of,
    toy_sentence,
)
from lightning_feed.watch.verdict.whole_run import limit_of, of_the_run

_FIND: dict[Bottleneck, Callable[[Measurements, Shares], Finding]] = {
    "framework": framework_cause,
    "copy": copy_cause,
    "data": data_cause,
    "compute": compute_cause,
}
_LOWER: dict[Confidence, Confidence] = {"high": "medium", "medium": "low", "low": "low"}


def diagnose(measured: Measurements) -> Diagnosis:
    """Find what limits a run, and why: its training steps, or validation and checkpoints where they take more time."""
    steps, limit = _of_steps(measured), limit_of(measured)
    if limit is None:
        return steps
    one = measured.validation
    if one is None:
        return of_the_run(limit, steps, None)
    inside = Measurements(stats=one.stats, facts=one.facts, loaders=one.loaders, by_loader=one.by_loader)
    return of_the_run(limit, steps, _of_steps(inside))


def _of_steps(measured: Measurements) -> Diagnosis:
    """Find what limits the steps, and why.

    The parts of a step are held against their limits in the order framework (10 %), copy (5 %), data (5 %). Of those
    over their limit the largest is the bottleneck, the earlier on a tie; the others are named and treated too. With
    none, training is limited by what it computes. Waiting for data is the longest over the ranks, where that is known,
    and does not count where the model alone, fed the same batch again and again, takes as long as a step. A model alone
    that took longer than that was disturbed: the verdict is then that of the other figures, and less sure.
    """
    if model_disturbed(measured):
        return _without_model(measured)
    shares = shares_of(measured)
    if shares is None:
        return _not_measured(measured)
    parts: tuple[Bottleneck, ...] = shares.over or ("compute",)
    found = {part: _FIND[part](measured, shares) for part in parts}
    because = [line for one in found.values() for line in one.because]
    if shares.compute_bound_confirmed and shares.over:
        because += compute_cause(measured, shares).because
    first = found[parts[0]]
    case = Case(measured=measured, shares=shares, causes={part: one.cause for part, one in found.items()})
    toy = toy_sentence(shares.step_ms)
    remedies = () if toy else remedies_for(case)
    return Diagnosis(
        bottleneck=parts[0],
        cause=first.cause,
        grade="fed" if shares.compute_bound_confirmed else grade_of(shares.data_pct),
        confidence=_confidence(measured, shares, first),
        evidence=_evidence(measured, shares, because),
        remedies=remedies,
        notes=(toy,) if toy else notes_for(case, remedies),
        why_not=() if toy else why_not(case, remedies),
        measurements=measured,
    )


def _not_measured(measured: Measurements) -> Diagnosis:
    found, steps = measured.experiments, measured.stats.steps
    reason = f"{steps} steps were measured, and a verdict needs {MIN_STEPS}: the first of an epoch and those "
    reason += "after a validation do not count"
    if not steps and found is not None and found.loader_per_s:
        reason = "only the loader was measured; whether training waits for it takes a LightningModule"
    return Diagnosis(
        bottleneck="unknown", grade="not measured", confidence="low", evidence=(reason,), measurements=measured
    )


def _without_model(measured: Measurements) -> Diagnosis:
    """The verdict without what the model took alone, which is impossible."""
    alone, step_ms = model_alone_ms(measured) or 0.0, measured.stats.step_ms or 0.0
    assert measured.experiments is not None
    found = _of_steps(replace(measured, experiments=replace(measured.experiments, model_per_s=None)))
    said = (
        f"the model alone took {in_ms(alone, step_ms)} ms, more than the {in_ms(step_ms, step_ms)} ms of a step: "
        "something disturbed that experiment, and it does not count"
    )
    return replace(found, confidence=_LOWER[found.confidence], evidence=(*found.evidence, said), measurements=measured)


def _confidence(measured: Measurements, shares: Shares, found: Finding) -> Confidence:
    """That of the figures; lower where their interval holds a limit of the verdict, or figures of the cause lack."""
    stats, confidence = measured.stats, measured.stats.confidence
    low, high = stats.starved_low_pct, stats.starved_high_pct
    wide = low is not None and high is not None and any(low < limit <= high for limit in (DATA_PCT, HIGH_PCT))
    if wide and not shares.compute_bound_confirmed:
        confidence = _LOWER[confidence]
    if found.contradicted or (measured.facts.others_cpu_pct or 0.0) >= OTHERS_PCT:
        return "low"
    return confidence if found.sure else _LOWER[confidence]


SLOW_START_S = 1.0
"""Time to the first batch of an epoch that is worth telling."""
SLACK_SHARE = 0.01
"""Share of a step from which a hidden wait is worth telling."""


def _evidence(measured: Measurements, shares: Shares, because: Sequence[str]) -> tuple[str, ...]:
    """What takes a step, why (``because``), and what else bears on it."""
    stats, facts = measured.stats, measured.facts
    whole = shares.step_ms
    said = [_part(measured, shares, part) for part in shares.over]
    if not shares.over:
        pct = 100 * (stats.compute_ms or 0.0) / whole
        said.append(f"{pct:.0f} % of each step is forward, backward and optimizer")
    said += because
    if "data" in shares.over:
        said += _making(measured)
    if stats.hidden_wait_ms is not None and stats.hidden_wait_ms >= SLACK_SHARE * whole:
        hidden, wait = in_ms(stats.hidden_wait_ms, whole), in_ms(stats.next_wait_ms, whole)
        said.append(f"{hidden} of {wait} ms in next(loader) cost nothing: the device computes meanwhile")
    if stats.epoch_start_s is not None and stats.epoch_start_s >= SLOW_START_S:
        said.append(f"the first batch of an epoch comes after {stats.epoch_start_s:.1f} s")
    if "data" in shares.over and facts.num_workers:  # without workers the cause says so
        cpus = f" on {plural(facts.usable_cpus, 'CPU')}" if facts.usable_cpus is not None else ""
        said.append(f"the loader has {plural(facts.num_workers, 'worker')}{cpus}")
    if facts.others_cpu_pct is not None and facts.others_cpu_pct >= OTHERS_PCT:
        said.append(f"{facts.others_cpu_pct:.0f} % of the CPUs were taken by other programs: low confidence")
    if stats.lost_steps:
        said.append(f"{stats.lost_steps} steps could not be measured on the device")
    return tuple(said)


def _making(measured: Measurements) -> list[str]:
    """Whether samples or collating take most of the time for a batch, and where in the user's code."""
    found = measured.experiments
    if found is None or found.samples_ms is None or not found.collate_ms:
        return []
    whole = found.samples_ms + found.collate_ms
    stage, ms = max(("samples", found.samples_ms), ("collate", found.collate_ms), key=lambda one: one[1])
    slowest = next((one for one in found.functions if one.stage == stage), None)
    at = "" if slowest is None else f", most of it in {slowest.name} ({source_line(slowest.file, slowest.line)})"
    what = "making its samples" if stage == "samples" else "collating them"
    return [f"a batch takes {whole:.1f} ms in one process, {what} {100 * ms / whole:.0f} %{at}"]


def _part(measured: Measurements, shares: Shares, part: Part) -> str:
    stats, whole = measured.stats, shares.step_ms
    where, ms, pct = {
        "framework": ("between the steps", stats.other_ms, shares.framework_pct),
        "copy": ("in the transfer to the device", stats.h2d_ms, shares.copy_pct),
        "data": ("waiting for data", shares.data_ms, shares.data_pct),
    }[part]
    if part == "data":
        pct = 100 * shares.data_ms / whole  # the first batches of epochs lie in no step
        where = "waiting for data, the slowest rank of each step" if shares.by_ranks else where
    return f"{in_ms(ms, whole)} of {in_ms(whole, whole)} ms ({pct:.0f} %) {where}"
