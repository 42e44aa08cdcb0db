"""Holds two reports against each other: what changed, and whether what was predicted came true."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from lightning_feed.watch.reports.environment import Environment
from lightning_feed.watch.reports.report import RemedyCheck, Report, rate
from lightning_feed.watch.stats import StarvationStats
from lightning_feed.watch.verdict.diagnosis import SYNCS, LoopFacts, Remedy

Setting = bool | int | float | str | None

FIGURES = (
    "step_ms",
    "compute_ms",
    "data_idle_ms",
    "h2d_ms",
    "other_ms",
    "next_wait_ms",
    "starved_pct",
    "input_pct",
    "epoch_start_s",
)
"""Fields of StarvationStats that are compared, after ``samples_per_s``."""
MACHINE = ("platform", "cpu", "device", "usable_cpus")
"""Fields of Environment by which another machine is known."""
_PASSING = ("available_memory_bytes", "free_shm_bytes", "cpu_reason")
"""Fields of Environment that say nothing about why a run is faster."""

_NONE_IS_OFF = ("prefetch_callback",)
"""Settings of which None says that there is no such thing, and not that it is not known."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A setting or version that is not the same in both."""

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
    """Where the earlier was read from."""
    after: str
    settings: tuple[Changed, ...]
    """Of the run. What is not known of one of both is left out."""
    versions: tuple[Changed, ...]
    """Of packages and machine."""
    figures: tuple[Figure, ...]
    verdict_changed: bool
    """Another bottleneck, cause or grade."""
    verdict_before: str
    verdict_after: str
    starved_within_noise: bool | None
    """Whether the 95 % intervals of starved_pct overlap. None: one is not known."""
    predictions: tuple[RemedyCheck, ...]
    """The earlier report's remedies that are in effect in the later."""
    unchecked: tuple[str, ...]
    """``changes`` of its other remedies that no report tells of: a transform, a copy in memory."""
    cautions: tuple[str, ...]
    """Why the figures may not be comparable."""


def compare(before: Report, after: Report) -> Comparison:
    """What changed from one report to another.

    A remedy of the earlier report counts as followed when its ``changes`` is true of the later run's facts and not of
    the earlier's. What cannot be read off the facts (another model, another transform) is never taken for followed.
    """
    settings = tuple(_changed(_settings(before), _settings(after)))
    ours, theirs = before.diagnosis.stats, after.diagnosis.stats
    verdicts = _verdict(before), _verdict(after)
    return Comparison(
        before=_label(before, "the earlier report"),
        after=_label(after, "the later report"),
        settings=settings,
        versions=tuple(_changed(_versions(before.environment), _versions(after.environment))),
        figures=(
            _figure("samples_per_s", _samples_per_s(before), _samples_per_s(after)),
            *(_figure(name, getattr(ours, name), getattr(theirs, name)) for name in FIGURES),
        ),
        verdict_changed=verdicts[0] != verdicts[1],
        verdict_before=verdicts[0],
        verdict_after=verdicts[1],
        starved_within_noise=_overlap(ours, theirs),
        predictions=tuple(_check(one, after, settings) for one in _followed(before, after)),
        unchecked=tuple(dict.fromkeys(_unchecked(before))),
        cautions=tuple(_cautions(before, after)),
    )


# --- settings -----------------------------------------------------------------------------------------------------


_NOT_CHOSEN = (
    "syncs", "usable_cpus", "lightning", "batch_hooks", "place", "may_persist", "shards_by_worker", "free_shm_bytes",
    "others_cpu_pct", "every_num_workers", "may_leave_process", "hook_places", "package",
    "batch_bytes",  # of the first batch, where each may have another length
)  # fmt: skip


def _settings(report: Report) -> dict[str, Setting]:
    """What a user chose, by name; a synchronisation is named by itself and True where it is set up."""
    facts = report.diagnosis.measurements.facts
    chosen: dict[str, Setting] = {
        one.name: getattr(facts, one.name)
        for one in fields(LoopFacts)
        if one.name not in _NOT_CHOSEN and not one.name.endswith("_ms")
    }
    chosen["prefetch_callback"] = report.diagnosis.stats.prefetch_active
    return chosen | {name: name in facts.syncs for name in SYNCS}


def _versions(environment: Environment) -> dict[str, Setting]:
    return {one.name: getattr(environment, one.name) for one in fields(Environment) if one.name not in _PASSING}


def _changed(before: dict[str, Setting], after: dict[str, Setting]) -> Iterator[Changed]:
    for name, old in before.items():
        new = after[name]
        known = name in _NONE_IS_OFF or None not in (old, new)
        if known and old != new:
            yield Changed(name=name, before=old, after=new)


# --- predictions --------------------------------------------------------------------------------------------------


def _followed(before: Report, after: Report) -> Iterator[Remedy]:
    for remedy in before.diagnosis.remedies:
        wanted = wanted_settings(remedy)
        old, new = _settings(before), _settings(after)
        known = all(name in _NONE_IS_OFF or old.get(name) is not None for name in wanted)
        if wanted and known and _in_effect(wanted, new) and not _in_effect(wanted, old):
            yield remedy


def _unchecked(before: Report) -> Iterator[str]:
    names = _settings(before).keys()
    for remedy in before.diagnosis.remedies:
        wanted = wanted_settings(remedy)
        if remedy.changes and not (wanted and wanted.keys() <= names):
            yield remedy.changes


def wanted_settings(remedy: Remedy) -> dict[str, str]:
    """The settings in a remedy's ``changes``: ``"num_workers=8,prefetch_factor=4"`` gives both, as text."""
    pairs = (part.partition("=") for part in remedy.changes.split(","))
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals}


def _in_effect(wanted: dict[str, str], settings: dict[str, Setting]) -> bool:
    return all(
        name in settings and str(settings[name]).casefold() == value.casefold() for name, value in wanted.items()
    )


def _check(remedy: Remedy, after: Report, settings: tuple[Changed, ...]) -> RemedyCheck:
    predicted, achieved = remedy.predicted_step_ms, after.diagnosis.stats.step_ms
    wanted = wanted_settings(remedy)
    return RemedyCheck(
        code=remedy.code,
        changes=remedy.changes,
        predicted_step_ms=predicted,
        achieved_step_ms=achieved,
        error_pct=None if predicted is None or not achieved else 100 * (predicted - achieved) / achieved,
        also_changed=tuple(one.name for one in settings if one.name not in wanted),
    )


# --- figures ------------------------------------------------------------------------------------------------------


def _figure(name: str, before: float | None, after: float | None) -> Figure:
    change = None if before is None or after is None or not before else 100 * (after - before) / before
    return Figure(name=name, before=before, after=after, change_pct=change)


def _samples_per_s(report: Report) -> float | None:
    return rate(report.diagnosis.stats.step_ms, report.diagnosis.measurements.facts.batch_size)


def _overlap(before: StarvationStats, after: StarvationStats) -> bool | None:
    low, high = before.starved_low_pct, before.starved_high_pct
    other_low, other_high = after.starved_low_pct, after.starved_high_pct
    if low is None or high is None or other_low is None or other_high is None:
        return None
    return low <= other_high and other_low <= high


def _verdict(report: Report) -> str:
    found = report.diagnosis
    cause = "" if found.cause in ("unknown", found.bottleneck) else f" ({found.cause})"
    return f"{found.bottleneck}{cause}, {found.grade}"


def _label(report: Report, otherwise: str) -> str:
    return otherwise if report.path is None else str(report.path)


def _cautions(before: Report, after: Report) -> Iterator[str]:
    old, new = _settings(before), _settings(after)
    machines = [[getattr(one.environment, name) for name in MACHINE] for one in (before, after)]
    if machines[0] != machines[1]:
        yield "they ran on different machines, or on a machine that was changed"
    if None not in (old["batch_size"], new["batch_size"]) and old["batch_size"] != new["batch_size"]:
        yield "the batch sizes differ: compare samples per second, not step times or predictions"
    if old["world_size"] != new["world_size"]:
        yield "the numbers of ranks differ: figures are those of one rank"
    for report, which in ((before, "earlier"), (after, "later")):
        if report.diagnosis.grade == "not measured":
            yield f"the {which} run was not measured"
        elif report.diagnosis.confidence == "low":
            yield f"the {which} report's figures are of low confidence"
