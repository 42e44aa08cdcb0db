"""Two reports side by side: what changed, and how many times as fast the later run was."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_feed.report.report import Report, rate
from lightning_feed.wording import printable_lines

FIGURES = (
    "step_ms", "compute_ms", "data_ms", "copy_ms", "other_ms", "next_wait_ms", "starved_pct", "input_pct",
    "epoch_start_s",
)  # fmt: skip
"""Fields of StarvationStats that are compared, after ``samples_per_s``."""
_MACHINE = ("platform", "cpu", "device", "usable_cpus")
"""Fields of Environment by which machines are distinguished."""
_NOT_COMPARED = ("left_s", "measures", "repeated", "available_memory_bytes", "free_shm_bytes", "cpu_reason")
"""Facts that do not explain why a run is faster."""
_WORDS = {"ours": "FastDataModule", "map_style": "map-style dataset", "decodes_whole": "images decoded whole"}
"""Fact -> words for it, where its name is hard to understand."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A setting, a version or a figure in both reports. The name of a figure ends with its unit."""

    name: str
    before: bool | float | str | None
    after: bool | float | str | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of an earlier report with a later report."""

    before: str
    """The file of the earlier report."""
    after: str
    """The file of the later report."""
    changed: tuple[Row, ...]
    """Changed settings and versions, as far as both are known."""
    figures: tuple[Row, ...]
    times_as_fast: float | None
    """Samples per second of the later run, divided by those of the earlier; of steps per second if a batch size is
    unknown, and None if a step time is."""
    is_noise: bool
    """True if the 95 % intervals of the times for a sample overlap."""
    verdict_before: str
    verdict_after: str
    cautions: tuple[str, ...]
    """Reasons why the figures may not be comparable."""


def compare(before: Report, after: Report) -> Comparison:
    """Return the changes from one report to another."""
    old = _settings(before)
    new = _settings(after)
    changed = (Row(name=name, before=old[name], after=new.get(name)) for name in old if old[name] != new.get(name))
    figures = (_figures(before), _figures(after))
    return Comparison(
        before=str(before.path or "the earlier report"),
        after=str(after.path or "the later report"),
        changed=tuple(row for row in changed if None not in (row.before, row.after)),
        figures=tuple(Row(name=name, before=figures[0][name], after=figures[1][name]) for name in figures[0]),
        times_as_fast=_times_as_fast(*figures),
        is_noise=_overlap(before, after),
        verdict_before=_verdict(before),
        verdict_after=_verdict(after),
        cautions=tuple(_cautions(before, after)),
    )


def _settings(report: Report) -> dict[str, Any]:
    """Return the settings and versions of a run by name: all plain facts that the report has."""
    facts = report.diagnosis.measurements.facts
    groups = (facts, facts.loader, facts.datamodule, facts.trainer, report.environment)
    known = {name: value for group in groups for name, value in vars(group).items() if name not in _NOT_COMPARED}
    plain = {name: value for name, value in known.items() if value is None or isinstance(value, (bool, int, str))}
    return {**plain, "prefetch_callback": bool(report.diagnosis.stats.prefetch_active)}


def _figures(report: Report) -> dict[str, float | None]:
    stats = report.diagnosis.stats
    samples_per_s = rate(stats.step_ms, report.diagnosis.measurements.facts.loader.batch_size)
    return {"samples_per_s": samples_per_s, **{name: vars(stats)[name] for name in FIGURES}}


def _times_as_fast(old: dict[str, float | None], new: dict[str, float | None]) -> float | None:
    if old["samples_per_s"] and new["samples_per_s"]:
        return new["samples_per_s"] / old["samples_per_s"]
    if old["step_ms"] and new["step_ms"]:
        return old["step_ms"] / new["step_ms"]
    return None


def _overlap(before: Report, after: Report) -> bool:
    ends = [end for report in (before, after) for end in _interval(report)]
    return len(ends) == 4 and ends[0] <= ends[3] and ends[2] <= ends[1]


def _interval(report: Report) -> list[float]:
    """Return the 95 % interval of the time for a sample, in milliseconds; empty if it is not known."""
    stats = report.diagnosis.stats
    size = report.diagnosis.measurements.facts.loader.batch_size or 1
    return [ms / size for ms in (stats.step_low_ms, stats.step_high_ms) if ms is not None]


def _verdict(report: Report) -> str:
    diagnosis = report.diagnosis
    return f"{diagnosis.bottleneck}, {diagnosis.cause}, {diagnosis.grade}"


def _cautions(before: Report, after: Report) -> Iterator[str]:
    programs = (before.run.program, after.run.program)
    if all(programs) and programs[0] != programs[1]:
        yield f"they are of different programs, {programs[0]} and {programs[1]}: differences may be theirs"
    if any(vars(before.environment)[name] != vars(after.environment)[name] for name in _MACHINE):
        yield "they ran on different machines, or on a machine that was changed"
    for which, report in (("earlier", before), ("later", after)):
        if report.diagnosis.confidence == "low":
            yield f"the {which} report's figures are of low confidence"


# --- text ---------------------------------------------------------------------------------------------------------


def comparison_text(comparison: Comparison) -> str:
    """Return a comparison for the console: the factor, changes, figures and cautions."""
    return printable_lines("\n".join(_lines(comparison)))


def _lines(comparison: Comparison) -> Iterator[str]:
    yield f"before   {comparison.before}"
    yield f"after    {comparison.after}"
    if comparison.times_as_fast is not None:
        noise = "within noise: " if comparison.is_noise else ""
        yield f"result   {noise}{comparison.times_as_fast:.2f} times as fast"
    yield f"verdict  {comparison.verdict_before} -> {comparison.verdict_after}"
    changes = (f"{_WORDS.get(row.name, row.name)} {row.before} -> {row.after}" for row in comparison.changed)
    yield f"changed  {'; '.join(changes) or 'no setting that the reports name'}"
    yield f"{'':14}{'before':>11}{'after':>11}"
    yield from (_in_line(row) for row in comparison.figures if row.before is not None or row.after is not None)
    for caution in comparison.cautions:
        yield f"caution  {caution}"


def _in_line(row: Row) -> str:
    before, after = ("-" if value is None else f"{value:.1f}" for value in (row.before, row.after))
    return f"{row.name:14}{before:>11}{after:>11}"
