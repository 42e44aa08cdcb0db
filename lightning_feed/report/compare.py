"""Comparison of two reports: the changes, and how many times as fast the later run was. Also a gate for CI."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lightning_feed.errors import ReportError
from lightning_feed.measure.measurements import SYNCS, LoopFacts, Measurements
from lightning_feed.measure.stats import StarvationStats
from lightning_feed.report.report import Report, cause_text, rate
from lightning_feed.report.words import LOOP_WORDS
from lightning_feed.verdict.diagnosis import Diagnosis
from lightning_feed.verdict.shares import Shares, shares_of
from lightning_feed.wording import printable_lines

Setting = bool | int | float | str | tuple[int, int] | None

FIGURES = (
    "step_ms", "compute_ms", "data_ms", "copy_ms", "other_ms", "next_wait_ms", "starved_pct", "input_pct",
    "epoch_start_s",
)  # fmt: skip
"""Fields of StarvationStats that are compared, after ``samples_per_s``."""
MACHINE = ("platform", "cpu", "device", "usable_cpus")
"""Fields of Environment by which machines are distinguished."""
_PASSING = ("available_memory_bytes", "free_shm_bytes", "cpu_reason")
"""Fields of Environment that are not compared, because they do not explain why a run is faster."""
_WORDS = {
    "breaks_off": "limit of batches", "decodes_whole": "images decoded whole", "map_style": "map-style dataset",
    "ours": "FastDataModule", "own_transforms": "transforms in workers",
}  # fmt: skip
"""Setting -> words for it, for settings whose names in the report's file are hard to understand."""
_NONE_IS_OFF = ("prefetch_callback",)
"""Settings for which None means absent, not unknown."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A setting or version that differs."""

    name: str
    before: Setting
    after: Setting


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure in both reports. Its name ends with the unit."""

    name: str
    before: float | None
    after: float | None
    change_pct: float | None
    """100 * (after - before) / before; None if either was not measured, or if ``before`` is 0."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of an earlier report with a later report."""

    before: str
    """The file of the earlier report."""
    after: str
    """The file of the later report."""
    settings: tuple[Changed, ...]
    """Changed settings of the run. Settings unknown in either report are left out."""
    versions: tuple[Changed, ...]
    """Changed versions of packages, and changes of the machine."""
    figures: tuple[Figure, ...]
    times_as_fast: float | None
    """Samples per second of the later run, divided by samples per second of the earlier run. If a batch size is
    unknown: the same ratio of steps per second. None if a step time is unknown, too."""
    times_low: float | None
    """Lower end of the 95 % interval of ``times_as_fast``; None if a report has no interval of its step time."""
    times_high: float | None
    """Upper end of that interval. If 1 lies inside, the runs differ by no more than noise."""
    verdict_before: str
    verdict_after: str
    cautions: tuple[str, ...]
    """Reasons why the figures may not be comparable."""


def compare(before: Report, after: Report) -> Comparison:
    """The changes from one report to another."""
    figures = tuple(_figures(before, after))
    times = _times_as_fast(figures)
    interval = None if times is None else _interval(times, before.diagnosis.stats, after.diagnosis.stats)
    low, high = interval or (None, None)
    return Comparison(
        before="the earlier report" if before.path is None else str(before.path),
        after="the later report" if after.path is None else str(after.path),
        settings=tuple(_changed(_settings(before), _settings(after))),
        versions=tuple(_changed(_versions(before), _versions(after))),
        figures=figures,
        times_as_fast=times,
        times_low=low,
        times_high=high,
        verdict_before=_verdict(before),
        verdict_after=_verdict(after),
        cautions=tuple(_cautions(before, after)),
    )


def _settings(report: Report) -> dict[str, Setting]:
    """Settings chosen by the user, by name. Each known synchronisation has an entry of its own, True if it occurs."""
    facts = report.diagnosis.measurements.facts
    loader = facts.loader
    datamodule = facts.datamodule
    trainer = facts.trainer
    return {
        "loop": facts.loop,
        "stage": facts.stage,
        "device_type": facts.device_type,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory": loader.pin_memory,
        "in_place": loader.in_place,
        "persistent_workers": loader.persistent_workers,
        "in_order": loader.in_order,
        "workers": loader.workers,
        "map_style": loader.map_style,
        "decodes_whole": loader.decodes_whole,
        "ours": loader.ours,
        "tuned": trainer.tuned,
        "batch_size": loader.batch_size,
        "batch_tensors": facts.batch.tensors,
        "batches_per_epoch": facts.batches_per_epoch,
        "cut_short": facts.cut_short,
        "breaks_off": trainer.breaks_off,
        "decoder": datamodule.decoder,
        "quality": datamodule.quality,
        "backend": datamodule.backend,
        "own_transforms": datamodule.own_transforms,
        "staged": datamodule.staged,
        "device_transform": datamodule.device_transform,
        "max_epochs": trainer.max_epochs,
        "log_every_n_steps": trainer.log_every_n_steps,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "val_check_batches": trainer.val_check_batches,
        "checkpoint_steps": trainer.checkpoint_steps,
        "world_size": facts.world_size,
        "torch_threads": facts.torch_threads,
        "bar_refresh_rate": trainer.bar_refresh_rate,
        "prefetch_callback": report.diagnosis.stats.prefetch_active,
        **{name: name in facts.syncs for name in SYNCS},
    }


def _versions(report: Report) -> dict[str, Setting]:
    return {name: value for name, value in vars(report.environment).items() if name not in _PASSING}


def _changed(before: dict[str, Setting], after: dict[str, Setting]) -> Iterator[Changed]:
    for name, old in before.items():
        new = after[name]
        if old != new and (name in _NONE_IS_OFF or None not in (old, new)):
            yield Changed(name=name, before=old, after=new)


# --- figures ------------------------------------------------------------------------------------------------------


def _figures(before: Report, after: Report) -> Iterator[Figure]:
    new_values = _values(after)
    for name, old in _values(before).items():
        new = new_values[name]
        change_pct = 100 * (new - old) / old if old and new is not None else None
        yield Figure(name=name, before=old, after=new, change_pct=change_pct)


def _values(report: Report) -> dict[str, float | None]:
    stats = report.diagnosis.stats
    samples_per_s = rate(stats.step_ms, report.diagnosis.measurements.facts.loader.batch_size)
    return {"samples_per_s": samples_per_s, **{name: vars(stats)[name] for name in FIGURES}}


def _known(figures: tuple[Figure, ...], name: str) -> tuple[float, float] | None:
    """The values of one figure in both reports; None unless both are known and not 0."""
    for figure in figures:
        if figure.name == name and figure.before and figure.after:
            return figure.before, figure.after
    return None


def _times_as_fast(figures: tuple[Figure, ...]) -> float | None:
    """The later rate divided by the earlier: in samples per second if known, since batch sizes may differ."""
    rates = _known(figures, "samples_per_s")
    steps = _known(figures, "step_ms")
    times = math.nan
    if rates is not None:
        times = rates[1] / rates[0]
    elif steps is not None:
        times = steps[0] / steps[1]
    return times if 0 < times < math.inf else None


def _interval(times: float, before: StarvationStats, after: StarvationStats) -> tuple[float, float] | None:
    """The 95 % interval of ``times``, the ratio of the rates; None if the interval of a step time is unknown.

    Method of variance estimates recovery, MOVER (Zou and Donner 2008, "Construction of confidence limits about effect
    measures: a general approach", Statistics in Medicine 27), on logarithms. The intervals only cover variation of the
    steps within a run, not variation between runs of the same program.
    """
    spread_before = _spread(before)
    spread_after = _spread(after)
    if spread_before is None or spread_after is None:
        return None
    down = math.hypot(spread_before[0], spread_after[1])
    up = min(math.hypot(spread_before[1], spread_after[0]), 700.0)  # no overflow
    return times * math.exp(-down), times * math.exp(up)


def _spread(stats: StarvationStats) -> tuple[float, float] | None:
    """Logarithms of two ratios: of the mean step to the lower end of its interval, and of the upper end to the mean."""
    mean = stats.step_ms
    low = stats.step_low_ms
    high = stats.step_high_ms
    if mean is None or low is None or high is None or not 0 < low <= mean <= high < math.inf:
        return None
    return math.log(mean / low), math.log(high / mean)


def _verdict(report: Report) -> str:
    diagnosis = report.diagnosis
    cause = cause_text(diagnosis)
    bottleneck = f"{diagnosis.bottleneck} ({cause})" if cause else diagnosis.bottleneck
    return f"{bottleneck}, {diagnosis.grade}"


def _cautions(before: Report, after: Report) -> Iterator[str]:
    old = before.diagnosis.measurements.facts
    new = after.diagnosis.measurements.facts
    programs = (before.run.program, after.run.program)
    if all(programs) and programs[0] != programs[1]:
        yield f"they are of different programs, {programs[0]} and {programs[1]}: differences may be theirs"
    sizes = (old.loader.batch_size, new.loader.batch_size)
    if any(vars(before.environment)[name] != vars(after.environment)[name] for name in MACHINE):
        yield "they ran on different machines, or on a machine that was changed"
    if None not in sizes and sizes[0] != sizes[1]:
        yield "the batch sizes differ: compare samples per second, not step times"
    if old.world_size != new.world_size:
        yield "the runs used different numbers of ranks: figures are per rank"
    if old.crowded or new.crowded:
        yield f"other programs took {_others(old)} before and {_others(new)} after: steps depend on it"
    yield from _caution_of("earlier", before.diagnosis)
    yield from _caution_of("later", after.diagnosis)


def _caution_of(which: str, diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.grade == "not measured":
        yield f"the {which} run was not measured"
    elif diagnosis.confidence == "low":
        yield f"the {which} report's figures are of low confidence"


def _others(facts: LoopFacts) -> str:
    if facts.others_cpu_pct is None:
        return "an unknown share"
    return f"{facts.others_cpu_pct:.0f} % of the CPUs"


# --- text ---------------------------------------------------------------------------------------------------------


def comparison_text(comparison: Comparison) -> str:
    """A comparison for the console: the factor, changes, figures and cautions."""
    return printable_lines("\n".join(_lines(comparison)))


def _lines(comparison: Comparison) -> Iterator[str]:
    yield f"before   {comparison.before}"
    yield f"after    {comparison.after}"
    if comparison.times_as_fast is not None:
        yield f"result   {_result(comparison, comparison.times_as_fast)}"
    if comparison.verdict_before == comparison.verdict_after:
        yield f"verdict  {comparison.verdict_before} (unchanged)"
    else:
        yield f"verdict  {comparison.verdict_before} -> {comparison.verdict_after}"
    yield f"changed  {_changes(comparison.settings) or 'no setting that the reports name'}"
    if comparison.versions:
        yield f"versions {_changes(comparison.versions)}"
    yield f"{'':14}{'before':>11}{'after':>11}"
    for figure in comparison.figures:
        if figure.before is not None or figure.after is not None:
            yield _row(figure)
    for caution in comparison.cautions:
        yield f"caution  {caution}"


def _result(comparison: Comparison, times: float) -> str:
    result = f"{times:.2f} times as fast"
    if comparison.times_low is not None and comparison.times_high is not None:
        result += f" ({comparison.times_low:.2f} to {comparison.times_high:.2f})"
        if comparison.times_low <= 1 <= comparison.times_high:
            result = f"within noise: {result}"
    rates = _known(comparison.figures, "samples_per_s")
    if rates is not None:
        return f"{result}: {rates[0]:.1f} -> {rates[1]:.1f} samples/s"
    steps = _known(comparison.figures, "step_ms")
    assert steps is not None, "the factor is a ratio of rates or of step times"
    return f"{result}: step {steps[0]:.1f} -> {steps[1]:.1f} ms"


def _changes(changes: tuple[Changed, ...]) -> str:
    return "; ".join(f"{_WORDS.get(change.name, change.name)} {change.before} -> {change.after}" for change in changes)


def _row(figure: Figure) -> str:
    change = ""
    if figure.name.endswith("_pct"):
        if figure.before is not None and figure.after is not None:
            change = f"{figure.after - figure.before:+8.1f} points"
    elif figure.change_pct is not None:
        change = f"{figure.change_pct:+8.0f} %"
    before, after = ("-" if value is None else f"{value:.1f}" for value in (figure.before, figure.after))
    return f"{figure.name:14}{before:>11}{after:>11}{change}"


# --- the gate -----------------------------------------------------------------------------------------------------


def check_starved(report: Report, *, above_pct: float) -> str:
    """Check that a run does not wait for data longer than the limit.

    The checked figure is the figure that gives the verdict's grade, the largest of three shares: ``starved_pct``; with
    several ranks, the loss of all ranks together (``ranks.starved_pct``), because the rank that wrote the report may
    itself be fed while it waits for another rank; and the share of an epoch before its first batch, which belongs to no
    step. A run also passes if the model alone takes as long as a step, because nothing is lost then, as in the verdict.

    Waiting counts even if other programs had the CPUs that loading needed.

    Args:
        report: the run's report.
        above_pct: the largest share of step time that may be spent waiting for data, 0 to 100.

    Returns:
        The result, in one line.

    Raises:
        ReportError: when the share is above the limit, or was not measured.
    """
    diagnosis = report.diagnosis
    measured = diagnosis.measurements
    starved_pct = diagnosis.stats.starved_pct
    if diagnosis.grade == "not measured" or starved_pct is None:
        steps = diagnosis.stats.steps
        todo = "Train longer with GPUStarvationCallback."
        if measured.diagnosed and not steps:
            todo = "Diagnose a LightningModule with it."
        raise ReportError(f"nothing to compare with the limit of {above_pct:g} %: {steps} steps were measured. {todo}")
    shares = shares_of(measured)
    longest = _longest_wait(measured, shares, starved_pct)
    loop = LOOP_WORDS[measured.facts.stage]
    result = f"{loop} waits for data {longest.pct:.2f} % {longest.of}"
    result += f", limit {above_pct:g} % (confidence {diagnosis.confidence})"
    if longest.pct <= above_pct:
        return f"{result}: fine"
    if shares is not None and shares.compute_bound_confirmed:
        return f"{result}: fine, the model alone takes as long as a step"
    raise ReportError(f"{result}: too long")


class _Wait(NamedTuple):
    """A percentage of time spent waiting for data, and in words the time of which it is a percentage."""

    pct: float
    of: str


def _longest_wait(measured: Measurements, shares: Shares | None, starved_pct: float) -> _Wait:
    """The largest of the known shares of waiting."""
    waits = [_Wait(starved_pct, "of step time (starved_pct)")]
    if measured.ranks is not None and measured.ranks.starved_pct is not None:
        waits.append(_Wait(measured.ranks.starved_pct, "of all ranks' step time (ranks.starved_pct)"))
    if shares is not None and shares.epoch_pct is not None:
        waits.append(_Wait(shares.epoch_pct, "of each epoch, for its first batch"))
    return max(waits)
