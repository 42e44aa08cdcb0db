"""Two reports compared: changes, and which predictions came true. And a gate for CI."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_feed.errors import ReportError, printable_lines
from lightning_feed.measure.measurements import SYNCS, LoopFacts, Measurements
from lightning_feed.measure.stats import StarvationStats
from lightning_feed.report.report import RemedyCheck, Report, cause_text, rate
from lightning_feed.verdict.diagnosis import Remedy
from lightning_feed.verdict.shares import LOOP_WORDS, shares_of

Setting = bool | int | float | str | None

FIGURES = (
    "step_ms", "compute_ms", "data_idle_ms", "h2d_ms", "other_ms", "next_wait_ms", "starved_pct", "input_pct",
    "epoch_start_s",
)  # fmt: skip
"""Fields of StarvationStats that are compared, after ``samples_per_s``."""
MACHINE = ("platform", "cpu", "device", "usable_cpus")
"""Fields of Environment that tell one machine from another."""
_PASSING = ("available_memory_bytes", "free_shm_bytes", "cpu_reason")
"""Fields of Environment that say nothing about why a run is faster."""

_LOAD_CHANGED_PCT = 10.0
"""Change of the share of the CPUs that other programs took, in points, above which it may explain a part of the factor.
Or the factor explains it: where a run takes more of the CPUs, others get less."""
_WORDS = {
    "breaks_off": "limit of batches", "decodes_whole": "images decoded whole", "map_style": "map-style dataset",
    "ours": "FastDataModule", "own_transforms": "transforms in workers",
}  # fmt: skip
"""Settings whose name in the report's file says little."""
_IN_CODE = re.compile(r"""(\w+)["']?(?:=|: )["']?(\w+)""")
"""A setting and its value in a remedy's code: ``num_workers=2`` or ``"num_workers": 2``."""
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
    """A figure in both reports. Its name holds the unit."""

    name: str
    before: float | None
    after: float | None
    change_pct: float | None
    """100 * (after - before) / before. None: one was not measured, or the first is 0."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two reports, the earlier first."""

    before: str
    """The file of the earlier report."""
    after: str
    settings: tuple[Changed, ...]
    """Changed settings of the run. Settings unknown in either report are left out."""
    versions: tuple[Changed, ...]
    """Changed versions of packages, and changes of the machine."""
    figures: tuple[Figure, ...]
    times_as_fast: float | None
    """Samples per second of the later run, divided by those of the earlier; steps per second if a batch size is
    unknown. None: a step time is unknown, too."""
    times_low: float | None
    """Lower end of the 95 % interval of ``times_as_fast``. None: a report has no interval of its step time, or other
    programs took more of the CPUs in one of the runs."""
    times_high: float | None
    """Upper end of that interval. If 1 lies inside, the runs differ by no more than noise."""
    others_change_pct: float | None
    """Change of the share of the CPUs that other programs took, in points. The interval is then left out: the runs
    differ in more than their settings. None: by 10 points or less, unknown, or too small a share to matter."""
    verdict_changed: bool
    """True if the bottleneck, the cause or the grade differs."""
    verdict_before: str
    verdict_after: str
    starved_within_noise: bool | None
    """True if the 95 % intervals of starved_pct overlap. None: one is not known."""
    advised: bool
    """True if the earlier report has remedies."""
    predictions: tuple[RemedyCheck, ...]
    """Checks of the earlier report's remedies that are in effect in the later run."""
    unchecked: tuple[str, ...]
    """``changes`` of remedies of the earlier report that cannot be checked, because no report records them: a
    transform, a copy in memory."""
    cautions: tuple[str, ...]
    """Reasons why the figures may not be comparable."""


def compare(before: Report, after: Report) -> Comparison:
    """The changes from one report to another.

    A remedy of the earlier report counts as followed if its ``changes`` are in effect in the later run, and were not in
    the earlier run. A remedy that the facts do not record (another model, another transform) never counts as followed.
    """
    old = _settings(before)
    new = _settings(after)
    settings = tuple(_changed(old, new))
    figures = tuple(_figures(before, after))
    times, low, high = _times_as_fast(figures, before.diagnosis.stats, after.diagnosis.stats)
    others_change_pct = _others_change_pct(before, after)
    if others_change_pct:
        low = high = None
    remedies = [(one, wanted_settings(one)) for one in before.diagnosis.remedies]
    unchecked = [one.changes for one, wanted in remedies if not wanted or wanted.keys() - old.keys()]
    return Comparison(
        before="the earlier report" if before.path is None else str(before.path),
        after="the later report" if after.path is None else str(after.path),
        settings=settings,
        versions=tuple(_changed(_versions(before), _versions(after))),
        figures=figures,
        times_as_fast=times,
        times_low=low,
        times_high=high,
        others_change_pct=others_change_pct,
        verdict_changed=_verdict(before) != _verdict(after),
        verdict_before=_verdict(before),
        verdict_after=_verdict(after),
        starved_within_noise=_overlap(before.diagnosis.stats, after.diagnosis.stats),
        advised=bool(remedies),
        predictions=tuple(_check(one, after, settings) for one, wanted in remedies if _followed(wanted, old, new)),
        unchecked=tuple(dict.fromkeys(filter(None, unchecked))),
        cautions=tuple(_cautions(before, after)),
    )


# --- settings and predictions -------------------------------------------------------------------------------------


_NOT_CHOSEN = (
    "syncs", "usable_cpus", "lightning", "batch_hooks", "place", "may_persist", "shards_by_worker", "free_shm_bytes",
    "others_cpu_pct", "others_cpu_median_pct", "generator", "every_num_workers", "hook_places",
    "package", "batch_bytes",  # of the first batch: other batches may have other sizes
)  # fmt: skip


def _settings(report: Report) -> dict[str, Setting]:
    """Settings chosen by the user, by name. Each known synchronisation is an entry of its own: True if configured."""
    facts = report.diagnosis.measurements.facts
    chosen = {
        name: value for name, value in vars(facts).items() if name not in _NOT_CHOSEN and not name.endswith("_ms")
    }
    chosen["prefetch_callback"] = report.diagnosis.stats.prefetch_active
    return chosen | {name: name in facts.syncs for name in SYNCS}


def _versions(report: Report) -> dict[str, Setting]:
    return {name: value for name, value in vars(report.environment).items() if name not in _PASSING}


def _changed(before: dict[str, Setting], after: dict[str, Setting]) -> Iterator[Changed]:
    for name, old in before.items():
        new = after[name]
        if old != new and (name in _NONE_IS_OFF or None not in (old, new)):
            yield Changed(name=name, before=old, after=new)


def wanted_settings(remedy: Remedy) -> dict[str, str]:
    """The settings in a remedy's ``changes``: ``"num_workers=8,prefetch_factor=4"`` gives both, as text."""
    pairs = (part.partition("=") for part in remedy.changes.split(","))
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals}


def _followed(wanted: dict[str, str], before: dict[str, Setting], after: dict[str, Setting]) -> bool:
    known = all(name in _NONE_IS_OFF or before.get(name) is not None for name in wanted)
    return bool(wanted) and known and _in_effect(wanted, after) and not _in_effect(wanted, before)


def _in_effect(wanted: dict[str, str], settings: dict[str, Setting]) -> bool:
    return all(str(settings.get(name)).casefold() == value.casefold() for name, value in wanted.items())


def _check(remedy: Remedy, after: Report, settings: tuple[Changed, ...]) -> RemedyCheck:
    predicted = remedy.predicted_step_ms
    achieved = after.diagnosis.stats.step_ms
    fixed = wanted_settings(remedy) | dict(_IN_CODE.findall(remedy.code))
    return RemedyCheck(
        code=remedy.code,
        changes=remedy.changes,
        predicted_step_ms=predicted,
        achieved_step_ms=achieved,
        error_pct=None if predicted is None or not achieved else 100 * (predicted - achieved) / achieved,
        also_changed=tuple(
            one.name for one in settings if fixed.get(one.name, "").casefold() != str(one.after).casefold()
        ),
    )


def _others_change_pct(before: Report, after: Report) -> float | None:
    old = before.diagnosis.measurements.facts
    new = after.diagnosis.measurements.facts
    if old.others_cpu_pct is None or new.others_cpu_pct is None or not (old.crowded or new.crowded):
        return None
    change_pct = new.others_cpu_pct - old.others_cpu_pct
    return change_pct if abs(change_pct) > _LOAD_CHANGED_PCT else None


# --- figures ------------------------------------------------------------------------------------------------------


def _taken(facts: LoopFacts) -> str:
    return "an unknown share" if facts.others_cpu_pct is None else f"{facts.others_cpu_pct:.0f} % of the CPUs"


def _figures(*reports: Report) -> Iterator[Figure]:
    def values(report: Report) -> dict[str, float | None]:
        stats = report.diagnosis.stats
        per_s = rate(stats.step_ms, report.diagnosis.measurements.facts.batch_size)
        return {"samples_per_s": per_s, **{name: vars(stats)[name] for name in FIGURES}}

    before, after = map(values, reports)
    for name, old in before.items():
        new = after[name]
        change = None if old is None or new is None or not old else 100 * (new - old) / old
        yield Figure(name=name, before=old, after=new, change_pct=change)


def _known(figures: tuple[Figure, ...]) -> dict[str, tuple[float, float]]:
    """The figures of both reports by name, where both are known and more than 0."""
    return {one.name: (one.before, one.after) for one in figures if one.before and one.after}


def _times_as_fast(
    figures: tuple[Figure, ...], before: StarvationStats, after: StarvationStats
) -> tuple[float | None, float | None, float | None]:
    """The quotient of two rates, and the ends of its 95 % interval, from the intervals of the two mean steps.

    Uses the method of variance estimates recovery, MOVER (Zou and Donner 2008, "Construction of confidence limits about
    effect measures: a general approach", Statistics in Medicine 27), on logarithms. The intervals only cover variation
    of the steps within a run, not variation between runs of the same program.
    """
    known = _known(figures)
    if "samples_per_s" in known:
        first, second = known["samples_per_s"]
    elif "step_ms" in known:
        second, first = known["step_ms"]
    else:
        return None, None, None
    times = second / first
    old = _spread(before)
    new = _spread(after)
    if not 0 < times < math.inf or old is None or new is None:
        return times, None, None
    down = math.hypot(old[0], new[1])
    up = math.hypot(old[1], new[0])
    return times, times * math.exp(-down), times * math.exp(min(up, 700.0))  # no overflow: no run has such figures


def _spread(stats: StarvationStats) -> tuple[float, float] | None:
    """Logarithms of two ratios: the mean step / the lower end of its interval, and the upper end / the mean step."""
    mean = stats.step_ms
    low = stats.step_low_ms
    high = stats.step_high_ms
    if mean is None or low is None or high is None or not 0 < low <= mean <= high < math.inf:
        return None
    return math.log(mean / low), math.log(high / mean)


def _overlap(before: StarvationStats, after: StarvationStats) -> bool | None:
    one = before.interval_pct
    other = after.interval_pct
    return None if one is None or other is None else one[0] <= other[1] and other[0] <= one[1]


def _verdict(report: Report) -> str:
    found = report.diagnosis
    cause = cause_text(report.diagnosis)
    return f"{found.bottleneck}{f' ({cause})' if cause else ''}, {found.grade}"


def _cautions(before: Report, after: Report) -> Iterator[str]:
    old = before.diagnosis.measurements.facts
    new = after.diagnosis.measurements.facts
    if any(vars(before.environment)[name] != vars(after.environment)[name] for name in MACHINE):
        yield "they ran on different machines, or on a machine that was changed"
    if None not in (old.batch_size, new.batch_size) and old.batch_size != new.batch_size:
        yield "the batch sizes differ: compare samples per second, not step times or predictions"
    if old.world_size != new.world_size:
        yield "the runs used different numbers of ranks: figures are per rank"
    if old.crowded or new.crowded:
        yield f"other programs took {_taken(old)} before and {_taken(new)} after: steps depend on it"
    for report, which in ((before, "earlier"), (after, "later")):
        if report.diagnosis.grade == "not measured":
            yield f"the {which} run was not measured"
        elif report.diagnosis.confidence == "low":
            yield f"the {which} report's figures are of low confidence"


# --- text ---------------------------------------------------------------------------------------------------------


def comparison_text(found: Comparison) -> str:
    """A comparison for the console: changes, figures, and outcomes of the predictions."""
    return printable_lines("\n".join([*_settings_lines(found), *_figure_lines(found), *_outcome_lines(found)]))


def _settings_lines(found: Comparison) -> Iterator[str]:
    verdict = f"{found.verdict_before} (unchanged)"
    if found.verdict_changed:
        verdict = f"{found.verdict_before} -> {found.verdict_after}"
    yield f"before   {found.before}"
    yield f"after    {found.after}"
    yield from _result(found)
    yield f"verdict  {verdict}"
    yield f"changed  {_changes(found.settings) or 'no setting that the reports tell of'}"
    if found.versions:
        yield f"versions {_changes(found.versions)}"


def _figure_lines(found: Comparison) -> Iterator[str]:
    yield f"{'':14}{'before':>11}{'after':>11}"
    yield from (_row(one) for one in found.figures if (one.before, one.after) != (None, None))
    if found.starved_within_noise is not None:
        said = "overlap: within noise" if found.starved_within_noise else "do not overlap: more than noise"
        unknown = "; of step times it is not known" if found.times_low is None else ""
        yield f"noise    of starved_pct: the 95 % intervals {said}{unknown}"


def _outcome_lines(found: Comparison) -> Iterator[str]:
    yield from (f"check    {check_text(one)}" for one in found.predictions)
    if not found.predictions and found.advised:
        yield "check    none of the earlier report's remedies is in effect in the later run"
    if found.unchecked:
        yield f"unknown  the reports do not tell whether these are in effect: {'; '.join(found.unchecked)}"
    yield from (f"caution  {one}" for one in found.cautions)


def _result(found: Comparison) -> Iterator[str]:
    """The speed-up: by samples a second where they are known, since batch sizes may differ."""
    known = _known(found.figures)
    if found.times_as_fast is None:
        return
    if "samples_per_s" in known:
        rates = "{:.1f} -> {:.1f} samples/s".format(*known["samples_per_s"])
    else:
        rates = "step {:.1f} -> {:.1f} ms".format(*known["step_ms"])
    times = f"{found.times_as_fast:.2f} times as fast"
    if found.times_low is not None and found.times_high is not None:
        within = "within noise: " if found.times_low <= 1 <= found.times_high else ""
        times = f"{within}{times} ({found.times_low:.2f} to {found.times_high:.2f})"
    if found.others_change_pct:
        times += f", while other programs took {'less' if found.others_change_pct < 0 else 'more'} of the CPUs"
    yield f"result   {times}: {rates}"


def check_text(check: RemedyCheck) -> str:
    """One prediction and its outcome."""
    achieved = "not measured" if check.achieved_step_ms is None else f"{check.achieved_step_ms:.1f} ms"
    outcome = "nothing was predicted"
    if check.predicted_step_ms is not None:
        outcome = f"predicted step {check.predicted_step_ms:.1f} ms, achieved {achieved}"
    error = "" if check.error_pct is None else f", error {check.error_pct:+.1f} %"
    changed = ", ".join(_WORDS.get(name, name) for name in check.also_changed)
    also = f" (also changed: {changed})" if changed else ""
    return f"{check.changes}: {outcome}{error}{also}"


def _changes(changes: tuple[Changed, ...]) -> str:
    return "; ".join(f"{_WORDS.get(one.name, one.name)} {one.before} -> {one.after}" for one in changes)


def _row(figure: Figure) -> str:
    change = "" if figure.change_pct is None or figure.name.endswith("_pct") else f"{figure.change_pct:+8.0f} %"
    if figure.name.endswith("_pct") and figure.before is not None and figure.after is not None:
        change = f"{figure.after - figure.before:+8.1f} points"
    cells = "".join(f"{'-' if one is None else f'{one:.1f}':>11}" for one in (figure.before, figure.after))
    return f"{figure.name:14}{cells}{change}"


# --- the gate -----------------------------------------------------------------------------------------------------


def check_starved(report: Report, *, above_pct: float) -> str:
    """Check that a run is within the limit.

    The checked figure is the one behind the verdict's grade, the largest of three shares: ``starved_pct``; with several
    ranks, the loss of all ranks together (``ranks.starved_pct``), because the rank that wrote the report may itself be
    fed while it waits for another rank; and the share of an epoch before its first batch, which belongs to no step. A
    run also passes if the model alone takes as long as a step, because nothing is lost then, as the verdict says.

    Time that the training thread waited for a CPU that other programs had does not count.

    Args:
        report: the run's report.
        above_pct: the largest share of step time that may be spent waiting for data, 0 to 100.

    Returns:
        The result in a line.

    Raises:
        ReportError: when the share is above the limit, or was not measured.
    """
    stats = report.diagnosis.stats
    measured = report.diagnosis.measurements
    shares = shares_of(measured)
    if report.diagnosis.grade == "not measured" or stats.starved_pct is None:
        alone = measured.experiments is not None and not stats.steps
        todo = "Diagnose a LightningModule with it." if alone else "Train longer with GPUStarvationCallback."
        raise ReportError(
            f"nothing to compare with the limit of {above_pct:g} %: {stats.steps} steps were measured. {todo}"
        )
    starved, of = _longest_wait(measured, stats.starved_pct)
    confidence = report.diagnosis.confidence
    loop = LOOP_WORDS[measured.facts.stage]
    said = f"{loop} waits for data {starved:.2f} % {of}, limit {above_pct:g} % (confidence {confidence})"
    if starved <= above_pct:
        return f"{said}: fine"
    if shares is not None and shares.compute_bound_confirmed:
        return f"{said}: fine, the model alone takes as long as a step"
    raise ReportError(f"{said}: too long")


def _longest_wait(measured: Measurements, starved_pct: float) -> tuple[float, str]:
    """The largest share of time that waits for data, and the time that it is a share of."""
    shares = shares_of(measured)
    of_steps = "of step time (starved_pct)"
    if shares is not None and shares.without_cpu_ms:
        starved_pct -= 100 * shares.without_cpu_ms / shares.step_ms
        of_steps = "of step time (starved_pct, less the wait for a CPU)"
    known = [
        (starved_pct, of_steps),
        (getattr(measured.ranks, "starved_pct", None), "of all ranks' step time (ranks.starved_pct)"),
        (getattr(shares, "epoch_pct", None), "of each epoch, for its first batch"),
    ]
    return max((pct, of) for pct, of in known if pct is not None)
