"""The sections of a report, described once: rows for Markdown and HTML, and lines for the console."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lightning_feed.measure.experiment_results import (
    NOT_TRANSFORMS,
    ExperimentResults,
    FunctionCost,
    KeyBytes,
    NamedCost,
    step_of,
)
from lightning_feed.measure.measurements import LoopFacts, LoopMeasurements, Measurements
from lightning_feed.measure.stats import LoaderStats, StarvationStats
from lightning_feed.measure.wall import WallStats
from lightning_feed.report.report import Report, cause_text, if_free, needs_trial, rate, takes_turns
from lightning_feed.verdict.diagnosis import Bottleneck, Diagnosis, Remedy
from lightning_feed.verdict.shares import in_ms, model_disturbed
from lightning_feed.wording import in_rate, plural, rate_unit, source_line

# --- the pipeline from disk to model ------------------------------------------------------------------------------

_CHARACTERS = 32
_FEWEST_CHARACTERS = 8
"""Length of the longest bar in characters, in a wide and in a narrow terminal."""
_REMARK = 17
"""Characters of the longest remark behind a bar."""
WIDE = 120
"""Characters of a line: enough for every line of the pipeline."""
_CUT = 3
"""The longest bar shows this many times the lowest rate; longer bars are cut. A copy may be 100 times as fast."""
Kind = Literal["stage", "part", "fit", "if"]
_Row = tuple[Kind, str, float | None, str]
"""Kind and name of a bar, its rate in batches per second, and the way the rate was measured."""


class Bar(NamedTuple):
    """A rate in the pipeline's unit."""

    name: str
    per_s: float
    kind: Kind
    """``stage``: every sample passes it. ``part``: a part of the loader, which shares the workers with other parts.
    ``fit``: the fit as it ran. ``if``: the loader under other conditions."""
    note: str = ""
    """The way the figure was measured."""
    narrowest: bool = False
    """The stage that limits the whole, or the part that limits the loader."""


class Pipeline(NamedTuple):
    """The measured rates of the pipeline, in the order in which a sample passes its stages."""

    unit: str
    """``samples/s``, or ``batches/s`` where the batch size is not known."""
    bars: Sequence[Bar]
    full_per_s: float
    """The rate of the longest bar."""


def read_pipeline(diagnosis: Diagnosis) -> Pipeline | None:
    """The pipeline as far as experiments measured it. None: no stage was measured."""
    measured = diagnosis.measurements
    found = measured.found
    facts = measured.facts
    size = next((one for one in (found.batch_size, facts.batch_size) if one and one > 0), None)
    rows: list[_Row] = [
        *_sample_parts(found.costs, facts, size),
        ("part", "collate, send", found.ceiling_per_s, "constant samples, same workers"),
        ("stage", "loader", found.loader_per_s, "alone, as configured"),
        ("stage", "model", None if model_disturbed(measured) else found.model_per_s, "the same device batch each step"),
        ("fit", "fit as it ran", rate(measured.stats.step_ms, 1), ""),
        ("if", "files in memory", found.cached_bytes_per_s, ""),
        ("if", "no transforms", found.no_transform_per_s, ""),
    ]
    scaled = [(kind, name, (size or 1) * per_s, note) for kind, name, per_s, note in rows if per_s is not None]
    bars = [Bar(name, per_s, kind, note) for kind, name, per_s, note in scaled if 0 < per_s < math.inf]
    bars = _mark(bars, diagnosis)
    rates = [one.per_s for one in bars if one.kind in ("stage", "part")]
    if not rates:
        return None
    return Pipeline(rate_unit(size), bars, min(max(rates), _CUT * min(rates)))


def pipeline_text(pipeline: Pipeline, width: int = WIDE) -> list[str]:
    """The pipeline as bars of characters, a line for each."""
    leads = {"stage": "", "part": "  ", "fit": "", "if": "if: loader, "}
    beside = 13 + 2 + 2 + _REMARK  # the rate, the spaces around the bar, and the remark
    names = [_short(leads[one.kind] + one.name, width - beside - _FEWEST_CHARACTERS) for one in pipeline.bars]
    title = f"Pipeline ({pipeline.unit})"
    column = max(len(title) - 13, *map(len, names))
    most = min(_CHARACTERS, max(_FEWEST_CHARACTERS, width - column - beside))
    lines = [title]
    for name, one in zip(names, pipeline.bars, strict=True):
        bar = "#" * max(1, round(most * min(1.0, one.per_s / pipeline.full_per_s)))
        if one.per_s > pipeline.full_per_s:
            bar = bar[:-1] + ">"
        remark = ""
        if one.narrowest:
            remark = "<- bottleneck" if one.kind == "stage" else "<- slowest part"
        lines.append(f"{name:{column}}{in_rate(one.per_s):>13}  {bar:{most}}  {remark}".rstrip())
    return lines


def _short(name: str, most: int) -> str:
    indent = name[: len(name) - len(name.lstrip())]
    words = name.split()
    most = max(12, min(50, most))
    code = indent + " ".join(words)
    return code if len(code) <= most else f"{code[: most - 3]}..."


_SAMPLE_PARTS = (*NOT_TRANSFORMS, "transforms")


def _sample_parts(costs: tuple[NamedCost, ...], facts: LoopFacts, batch_size: int | None) -> Iterator[_Row]:
    """Bars for reading, decoding and the transforms: the rate of the workers if they did only that.

    Assumes that a worker runs at full speed as long as there is a CPU for it.
    """
    if facts.num_workers is None or batch_size is None:
        return
    wall_ms = dict.fromkeys(_SAMPLE_PARTS, 0.0)
    cpu_ms = dict.fromkeys(_SAMPLE_PARTS, 0.0)
    for one in costs:
        step = step_of(one.name) if step_of(one.name) in NOT_TRANSFORMS else "transforms"
        wall_ms[step] += one.wall_ms
        cpu_ms[step] += one.cpu_ms
    for name in _SAMPLE_PARTS:
        per_s = rate(wall_ms[name], max(facts.num_workers, 1))
        most = rate(cpu_ms[name], facts.usable_cpus)
        if per_s is not None:
            per_s = per_s if most is None else min(per_s, most)
            yield "part", name, per_s / batch_size, "cost of one sample, shared by the workers"


_STAGE_NAMED: dict[Bottleneck, str] = {"data": "loader", "copy": "copy", "compute": "model"}
"""Bottleneck -> the stage of the pipeline that it means in the headline."""


def _mark(bars: list[Bar], diagnosis: Diagnosis) -> list[Bar]:
    """Mark the narrowest of several stages if the headline names it, and the loader's slowest part if the loader is the
    narrowest."""
    stages, parts = ([one for one in bars if one.kind == kind] for kind in ("stage", "part"))
    narrow = min(stages, key=lambda one: one.per_s) if len(stages) > 1 else None
    named = narrow is not None and narrow.name == _STAGE_NAMED.get(diagnosis.bottleneck) and not takes_turns(diagnosis)
    marked = [narrow] if narrow and named else []
    of_loader = diagnosis.bottleneck in ("data", "unknown") and (narrow is None or narrow.name == "loader")
    if len(parts) > 1 and of_loader:
        marked.append(min(parts, key=lambda one: one.per_s))
    return [one._replace(narrowest=one in marked) for one in bars]


# --- sections -----------------------------------------------------------------------------------------------------

VALIDATION_PCT = 10.0
"""Share of the run from which the console shows the parts of validation."""
ROWS_NAMED = 6
"""Largest number of a section's rows that its line on the console lists."""

Row = tuple[str, ...]


class CodeLine(NamedTuple):
    """Code to paste, as lines of the console that are never broken, and a comment behind the last of them."""

    lines: Sequence[str]
    comment: str


def folded(line: str, width: int, indent: str = "      ") -> str:
    """A line of prose, broken to fit the width. Code in backquotes, shares and words stay whole."""
    kept = re.sub(r"`[^`]*`|\d %", lambda code: code[0].replace(" ", "\0"), line)
    broken = textwrap.fill(kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return broken.replace("\0", " ")


def _folded_code(code: CodeLine, width: int) -> Iterator[str]:
    *first, last = code.lines
    yield from first
    if len(last) + len("    # ") + len(code.comment) <= width:
        yield f"{last}    # {code.comment}"
        return
    yield last
    indent = " " * 8
    yield folded(f"{indent}# {code.comment}", width, f"{indent}# ")


@dataclass(frozen=True)
class Section:
    """One topic of a report, for pages as rows, and for the console as lines."""

    title: str
    rows: Sequence[Row]
    """Cells as text. The first column holds names; in a table, the other columns hold figures."""
    header: Row = ()
    form: Literal["table", "list", "step", "remedies", "pipeline", "pairs"] = "table"
    """Its form on a page: a ``table``, a ``list`` (a single column), or one of its own."""
    console: Sequence[str | CodeLine] | str = ()
    """Lines, or the first word of a line that lists the rows. Empty: the console does not show the section."""
    note: str = ""
    """A sentence below."""
    pipeline: Pipeline | None = None

    def console_lines(self, width: int) -> Iterator[str]:
        """The lines on the console, broken at the width."""
        if self.pipeline is not None:
            yield from ("", *pipeline_text(self.pipeline, width))
        elif isinstance(self.console, str):
            named = [f"{row[0]}: {row[1]}" for row in self.rows[:ROWS_NAMED]]
            more = [f"{len(self.rows) - ROWS_NAMED} more"] if len(self.rows) > ROWS_NAMED else []
            yield folded(f"{self.console:<5} {'; '.join(named + more)}", width)
        else:
            for line in self.console:
                yield from _folded_code(line, width) if isinstance(line, CodeLine) else [folded(line, width)]


def step_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """The parts of a step."""
    if diagnosis.stats.step_ms:
        copies = diagnosis.device_type != "cpu" or diagnosis.bottleneck == "copy"
        end = f"        {if_free(diagnosis)}"
        yield _parts_section("step", diagnosis.stats, copies=copies, end=end)


def _parts_section(what: str, stats: StarvationStats, *, copies: bool, end: str) -> Section:
    """The measured parts of a step as they follow each other on the device; they add up to the step.

    If nothing is copied (on a CPU), the short time of the transfer counts as ``other``.
    """
    whole = stats.step_ms or 0.0
    copy_ms = stats.h2d_ms
    other_ms = stats.other_ms
    if not copies:
        other_ms = None if other_ms is None else other_ms + (copy_ms or 0.0)
        copy_ms = None
    named = {"forward": stats.forward_ms, "backward": stats.backward_ms, "optimizer": stats.optimizer_ms}
    inside = ", ".join(f"{name} {in_ms(ms, whole)}" for name, ms in named.items() if ms is not None)
    parts = (
        ("compute", stats.compute_ms, "forward, backward and optimizer", f" ({inside})" if inside else ""),
        ("data", stats.data_idle_ms, "the device waited for data", ""),
        ("copy to device", copy_ms, "as far as no computing hides it, with the hooks before it", ""),
        ("other", other_ms, "between the steps: callbacks, logging, checkpoints", ""),
    )
    known = [(name, ms, meaning, inside) for name, ms, meaning, inside in parts if ms is not None]
    rows = [
        (name, in_ms(ms, whole), f"{100 * ms / whole:.1f}", meaning + inside) for name, ms, meaning, inside in known
    ]
    split = " | ".join(f"{name} {in_ms(ms, whole)}{inside}" for name, ms, _, inside in known)
    line = f"{what} {in_ms(whole, whole)} ms = {split}{end}".rstrip()
    return Section(f"Where a {what} of {in_ms(whole, whole)} ms goes", rows, _PARTS, "step", [line])


_PARTS = ("part of the step", "ms", "%", "")


def time_sections(measured: Measurements) -> Iterator[Section]:
    """The parts of the run, and of its validation."""
    wall = measured.wall
    validation = measured.validation
    by_loader = measured.by_loader
    if wall is not None and wall.wall_s > 0:
        yield _wall_section(wall)
    if validation is not None:
        by_loader = by_loader or validation.by_loader
        large = wall is not None and 100 * wall.seconds("validation") >= VALIDATION_PCT * wall.wall_s
        yield from _validation_sections(validation, shown=large)
    rows = [(one.name, str(one.steps), f"{one.step_ms:.2f}", f"{one.data_idle_ms:.2f}") for one in by_loader]
    yield from _table("Loader by loader", rows, ("loader", "steps", "ms a step", "waiting for data"))


def _wall_section(wall: WallStats) -> Section:
    digits = 1 if wall.wall_s >= 10 else 2
    named = [f"{one.name} {one.seconds:.{digits}f}" for one in wall.parts if round(one.seconds, digits)]
    rows = [(one.name, f"{one.seconds:.2f}", f"{100 * one.seconds / wall.wall_s:.1f}") for one in wall.parts]
    return Section(
        f"Where {wall.wall_s:.1f} s of wall time go",
        rows,
        ("part of the run", "s", "%"),
        console=[f"wall  {wall.wall_s:.{digits}f} s = {' | '.join(named)}"],
    )


def _validation_sections(validation: LoopMeasurements, *, shown: bool) -> Iterator[Section]:
    step = validation.stats.step_ms
    copies = validation.facts.device_type != "cpu"
    if step:
        waits = [
            f"; {one.name} waits {in_ms(one.data_idle_ms, step)} of {in_ms(one.step_ms, step)}"
            for one in validation.by_loader
        ]
        section = _parts_section("validation step", validation.stats, copies=copies, end="".join(waits))
        yield section if shown else replace(section, console=())


# --- advice -------------------------------------------------------------------------------------------------------


def advice_sections(diagnosis: Diagnosis, notes: Sequence[str]) -> Iterator[Section]:
    """Causes, remedies, and the notes that the next step does not repeat."""
    cause = cause_text(diagnosis)
    evidence = diagnosis.evidence
    lines = [f"cause {cause}"] * bool(cause) + ["why   " + "; ".join(evidence)] * bool(evidence)
    yield from _list("Why", [one for one in (cause, *evidence) if one], lines)
    if diagnosis.remedies:
        rows = [_remedy_row(one, diagnosis) for one in diagnosis.remedies]
        header = ("change", "why", "gain")
        yield Section("What to change", rows, header, "remedies", list(_remedy_lines(diagnosis)))
    lines = [f"not   {one}" for one in diagnosis.why_not] + [f"note  {one}" for one in notes]
    yield from _list("Notes", [*(f"not {one}" for one in diagnosis.why_not), *notes], lines)


def _list(title: str, lines: Iterable[str], console: Sequence[str] = ()) -> Iterator[Section]:
    rows = [(one,) for one in lines]
    if rows:
        yield Section(title, rows, form="list", console=console)


def _remedy_row(remedy: Remedy, diagnosis: Diagnosis) -> Row:
    why = f"{remedy.where}: {remedy.why}" if remedy.where else remedy.why
    code = f"try {remedy.changes}" if needs_trial(diagnosis, remedy) else remedy.code
    return (code, why, _at_most(remedy, diagnosis))


def _at_most(remedy: Remedy, diagnosis: Diagnosis) -> str:
    """The largest possible gain of a remedy, or that of its trial, in words. Empty: unknown."""
    if remedy.tried:
        return f"tried: {remedy.tried}"
    step_ms = diagnosis.stats.step_ms
    if remedy.least_step_ms and step_ms:
        return f"at most {step_ms / remedy.least_step_ms:.2f} x as fast"
    if remedy.most_gain_pct is None:
        return ""
    return f"saves at most {remedy.most_gain_pct:.0f} % of the time"


def _remedy_lines(diagnosis: Diagnosis) -> Iterator[str | CodeLine]:
    lead = "fix   "
    for remedy in diagnosis.remedies:
        gain = _at_most(remedy, diagnosis)
        comment = f"{remedy.why} ({gain})" if gain else remedy.why
        if needs_trial(diagnosis, remedy):
            yield f"try   {remedy.where}: {comment}"
            continue
        if remedy.where:
            yield f"{lead}{remedy.where}"
            lead = " " * 8
        yield CodeLine([f"{lead}{line}" for line in remedy.code.split("\n")], comment)
        lead = " " * 6


# --- measurements -------------------------------------------------------------------------------------------------


def pipeline_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """The pipeline from disk to model."""
    pipeline = read_pipeline(diagnosis)
    if pipeline is None:
        return
    cut = any(one.per_s > pipeline.full_per_s for one in pipeline.bars)
    note = f"Bars end at {in_rate(pipeline.full_per_s)} {pipeline.unit}; longer ones are cut." if cut else ""
    title = f"Pipeline: {pipeline.unit} that each part could do"
    yield Section(title, (), form="pipeline", note=note, pipeline=pipeline)


def measured_sections(measured: Measurements) -> Iterator[Section]:
    """Hooks, ranks, workers and what experiments found; none for what was not measured."""
    hooks = [(one.name, f"{one.ms_per_step:.2f}") for one in measured.hooks]
    yield from _table("Slowest hooks", hooks, ("hook or logger", "ms a step"))
    if measured.ranks is not None:
        slow = measured.ranks.slow_rank
        waits = enumerate(measured.ranks.data_idle_ms_by_rank)
        rows = [(f"rank {rank}{' (the slow one)' if rank == slow else ''}", f"{ms:.2f}") for rank, ms in waits]
        yield from _table("Ranks", rows, ("", "waits for data, ms a step"))
    yield from _table("Loader and workers during the fit", _loader_rows(measured.loaders))
    yield from _experiments(measured.found)


def _table(title: str, rows: Sequence[Row], header: Row = (), console: str = "") -> Iterator[Section]:
    if rows:
        yield Section(title, rows, header, console=console or ())


def _figures(*rows: tuple[str, float | None, str]) -> list[Row]:
    """Rows (name, figure as text) for all given (name, figure, format) whose figure is known."""
    return [(name, form.format(value)) for name, value, form in rows if value is not None]


def _loader_rows(loaders: LoaderStats) -> list[Row]:
    return _figures(
        ("workers on a CPU", loaders.workers_on_cpu_pct, "{:.0f} %"),
        ("workers waiting for a CPU", loaders.workers_run_queue_pct, "{:.0f} %"),
        ("workers blocked", loaders.workers_blocked_pct, "{:.0f} %"),
        ("read by the workers", loaders.read_mb_per_s, "{:.1f} MB/s"),
        ("of that from memory", loaders.page_cache_pct, "{:.0f} %"),
        ("batches ready when asked", loaders.queue_ready, "{:.1f}"),
        ("batches that may be ready", loaders.queue_capacity, "{:.0f}"),
        ("waiting while a later batch was ready", loaders.head_of_line_pct, "{:.0f} %"),
        ("waiting for the pin thread", loaders.pin_lag_ms, "{:.2f} ms"),
        ("batches made", loaders.produced_per_s, "{:.2f} /s"),
        ("time with tasks waiting for a CPU", loaders.cpu_pressure_pct, "{:.0f} %"),
        ("time with tasks waiting for a disk", loaders.io_pressure_pct, "{:.0f} %"),
        ("time with tasks waiting for memory", loaders.memory_pressure_pct, "{:.0f} %"),
        ("CPU quota used up", loaders.throttled_pct, "{:.0f} % of periods"),
    )


def _experiments(found: ExperimentResults) -> Iterator[Section]:
    costs = sorted(found.costs, key=lambda one: -one.wall_ms)
    rows: list[Row] = [(one.name, f"{one.wall_ms:.2f} ms", f"{one.cpu_ms:.2f} ms") for one in costs]
    yield from _table("What one sample costs", rows, ("", "wall time", "CPU time"), "costs")
    rows = [(_code_place(one), f"{one.ms_per_batch:.1f} ms a batch") for one in found.functions]
    yield from _table("Where in your code a batch is made", rows, console="code")
    yield from _table("Workers tried", _tried_rows(found), ("", "step", "in its turns", ""), "tried")
    yield from _table("What one batch takes", _batch_rows(found), console="batch")
    yield from _table("Parts of a batch", _key_rows(found.keys))
    yield from _table("Experiments that were left out", found.left_out, ("", "why"), "skip")


def _tried_rows(found: ExperimentResults) -> list[Row]:
    return [
        (
            plural(setting.num_workers, "worker"),
            f"{in_ms(setting.step_ms, setting.step_ms)} ms",
            f"{in_ms(setting.shortest_ms, setting.step_ms)} to {in_ms(setting.longest_ms, setting.step_ms)} ms",
            "as it is" if setting.own else "chosen" if setting.chosen else "",
        )
        for setting in found.tried
    ]


def _code_place(cost: FunctionCost) -> str:
    """``Birds.__getitem__ (birds.py:41), calling ColorJitter``."""
    calls = f", calling {cost.calls}" if cost.calls else ""
    return f"{cost.name} ({source_line(cost.file, cost.line)}){calls}"


def _batch_rows(found: ExperimentResults) -> list[Row]:
    return _figures(
        ("its samples, in one process", found.samples_ms, "{:.1f} ms"),
        ("collating them", found.collate_ms, "{:.1f} ms"),
        ("start of the loader", found.loader_start_s, "{:.2f} s"),
    )


def _key_rows(keys: tuple[KeyBytes, ...]) -> list[Row]:
    """(place, size) of each part of a batch; the parts in a list share one row.

    Places are as Python writes them: ``batch[1]``, ``targets[*].boxes``.
    """
    sizes: Counter[str] = Counter()
    for key in keys:
        first, *inner = key.name.split(".")
        place = f"batch[{first}]" if first.isdecimal() else first
        place += "".join("[*]" if name.isdecimal() else f".{name}" for name in inner)
        sizes[place] += key.bytes_per_batch
    return [(place, f"{size / 1e3:,.1f} kB a batch") for place, size in sizes.items()]


# --- all of a report ----------------------------------------------------------------------------------------------


def other_sections(report: Report) -> Iterator[Section]:
    """The sections of a page below the step and the advice."""
    diagnosis = report.diagnosis
    yield from pipeline_sections(diagnosis)
    yield from time_sections(diagnosis.measurements)
    yield from measured_sections(diagnosis.measurements)
    yield Section("Run and machine", _run_rows(report), form="pairs")


def _run_rows(report: Report) -> list[Row]:
    """(name, value) of the run and its machine, as far as they are known."""
    facts = report.diagnosis.measurements.facts
    where = report.environment
    size = facts.batch_bytes
    batch = _figures(("", facts.batch_size, "{} samples"), ("", None if size is None else size / 1e6, "{:.2f} MB"))
    rows = (
        ("written", report.written_at),
        ("device", where.device or facts.device_type),
        ("CPU", where.cpu),
        ("usable CPUs", where.usable_cpus if facts.usable_cpus is None else facts.usable_cpus),
        ("ranks", facts.world_size),
        ("batch", ", ".join(said for _, said in batch) or None),
        ("workers", facts.num_workers),
        ("prefetch factor", facts.prefetch_factor),
        ("pinned memory", facts.pin_memory),
        ("persistent workers", facts.persistent_workers),
        ("decoder", facts.decoder),
        ("backend", facts.backend),
        ("lightning_feed", where.lightning_feed),
        ("Lightning", facts.lightning or where.lightning or where.pytorch_lightning),
        ("torch", where.torch),
        ("Python", where.python),
        ("platform", where.platform),
    )
    words = {True: "yes", False: "no"}
    return [
        (name, words[value] if isinstance(value, bool) else str(value)) for name, value in rows if value is not None
    ]
