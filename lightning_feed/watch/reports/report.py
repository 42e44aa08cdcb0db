"""A verdict with where and when it was found: what the files hold, and what is read from them."""

from dataclasses import dataclass, fields
from pathlib import Path

from lightning_feed.watch.experiments.results import ExperimentResults
from lightning_feed.watch.reports.environment import Environment
from lightning_feed.watch.stats import Confidence, LoaderStats, LoaderSteps, RankStats, StarvationStats
from lightning_feed.watch.verdict.diagnosis import (
    Bottleneck,
    Cause,
    Diagnosis,
    Grade,
    HookTime,
    LoopFacts,
    LoopMeasurements,
    Measurements,
    Remedy,
)
from lightning_feed.watch.wall import WallStats


@dataclass(frozen=True, kw_only=True)
class RemedyCheck:
    """What a remedy was to give, and what a later run with it gave."""

    code: str
    """The remedy, as the earlier report put it."""
    changes: str
    """The setting that is in effect in the later run and was not in the earlier: ``num_workers=8``."""
    predicted_step_ms: float | None
    """Mean step that the earlier report predicted. None: it predicted none."""
    achieved_step_ms: float | None
    """Mean step of the later run."""
    error_pct: float | None
    """100 * (predicted - achieved) / achieved. Above 0: it became faster than predicted."""
    also_changed: tuple[str, ...] = ()
    """Other settings that changed between the runs, to which a part of the difference may be due."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A verdict, and all that is needed to compare it with another."""

    diagnosis: Diagnosis
    environment: Environment
    written_at: str
    """ISO 8601, UTC."""
    report_card: tuple[RemedyCheck, ...] = ()
    """What an earlier report predicted for this run. Empty: there was none to compare with, or none of its remedies
    is in effect."""
    path: Path | None = None
    """Where it was read from."""

    def __repr__(self) -> str:
        return f"<Report of {self.written_at}: {self.diagnosis!r}>"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        from lightning_feed.watch.reports.html import as_html, in_frame  # which are made of this

        return in_frame(as_html(self))


# --- the parts of the file ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What limits training."""

    bottleneck: Bottleneck
    cause: Cause
    grade: Grade
    confidence: Confidence
    evidence: tuple[str, ...]
    notes: tuple[str, ...] = ()
    why_not: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Step time, turned into rates."""

    batches_per_s: float | None
    samples_per_s: float | None
    """None: the batch size is not known."""


@dataclass(frozen=True, kw_only=True)
class ReportedRemedy(Remedy):
    """A remedy, with its prediction as a rate."""

    predicted_samples_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of ``feed_report.json`` beside ``schema`` and ``written_at``. All are always there."""

    environment: Environment
    run: LoopFacts
    verdict: Verdict
    step: StarvationStats
    throughput: Throughput
    loaders: LoaderStats
    ranks: RankStats | None
    hooks: tuple[HookTime, ...]
    by_loader: tuple[LoaderSteps, ...] = ()
    wall: WallStats | None = None
    validation: LoopMeasurements | None = None
    experiments: ExperimentResults | None
    remedies: tuple[ReportedRemedy, ...]
    report_card: tuple[RemedyCheck, ...]


def to_parts(report: Report) -> Parts:
    """Lay a report out as it is written."""
    found, measured = report.diagnosis, report.diagnosis.measurements
    batch_size = measured.facts.batch_size
    return Parts(
        environment=report.environment,
        run=measured.facts,
        verdict=Verdict(
            bottleneck=found.bottleneck,
            cause=found.cause,
            grade=found.grade,
            confidence=found.confidence,
            evidence=found.evidence,
            notes=found.notes,
            why_not=found.why_not,
        ),
        step=measured.stats,
        throughput=Throughput(
            batches_per_s=rate(measured.stats.step_ms, 1), samples_per_s=rate(measured.stats.step_ms, batch_size)
        ),
        loaders=measured.loaders,
        ranks=measured.ranks,
        hooks=measured.hooks,
        by_loader=measured.by_loader,
        wall=measured.wall,
        validation=measured.validation,
        experiments=measured.experiments,
        remedies=tuple(
            ReportedRemedy(**vars(one), predicted_samples_per_s=rate(one.predicted_step_ms, batch_size))
            for one in found.remedies
        ),
        report_card=report.report_card,
    )


def from_parts(parts: Parts, *, written_at: str, path: Path | None) -> Report:
    """The report that :func:`to_parts` laid out."""
    verdict = parts.verdict
    diagnosis = Diagnosis(
        bottleneck=verdict.bottleneck,
        cause=verdict.cause,
        grade=verdict.grade,
        confidence=verdict.confidence,
        evidence=verdict.evidence,
        notes=verdict.notes,
        why_not=verdict.why_not,
        remedies=tuple(
            Remedy(**{each.name: getattr(one, each.name) for each in fields(Remedy)}) for one in parts.remedies
        ),
        measurements=Measurements(
            stats=parts.step,
            facts=parts.run,
            loaders=parts.loaders,
            ranks=parts.ranks,
            hooks=parts.hooks,
            by_loader=parts.by_loader,
            wall=parts.wall,
            validation=parts.validation,
            experiments=parts.experiments,
        ),
    )
    return Report(
        diagnosis=diagnosis,
        environment=parts.environment,
        written_at=written_at,
        report_card=parts.report_card,
        path=path,
    )


def rate(step_ms: float | None, batch_size: int | None) -> float | None:
    """Samples per second at a step time; None where one of both is not known or the step took no time."""
    return None if not step_ms or batch_size is None else 1000 * batch_size / step_ms
