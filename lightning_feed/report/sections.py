"""The sections of a report, each described once for all forms: rows for Markdown and HTML, lines for the console."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lightning_feed.measure.experiment_results import (
    NOT_TRANSFORMS,
    ExperimentResults,
    FunctionCost,
    KeyBytes,
    LighterSample,
    NamedCost,
    TriedSetting,
    step_of,
)
from lightning_feed.measure.measurements import LoopFacts, LoopMeasurements, Measurements
from lightning_feed.measure.stats import LoaderStats, RankStats, StarvationStats
from lightning_feed.measure.wall import WallStats
from lightning_feed.report.report import Report, cause_text, fastest, rate, start_ms_per_step, takes_turns
from lightning_feed.report.words import in_ms, words
from lightning_feed.verdict.diagnosis import Bottleneck, Diagnosis, Effect, Remedy
from lightning_feed.verdict.lighter_samples import name_of_change
from lightning_feed.verdict.shares import model_disturbed
from lightning_feed.wording import in_rate, plural, rate_unit, size_text, source_line

# --- the pipeline from disk to model ------------------------------------------------------------------------------

_CHARACTERS = 32
_FEWEST_CHARACTERS = 8
"""Length of the longest bar in characters, in a wide and in a narrow terminal."""
_RATE = 11
_TIME = 8
_REMARK = 17
"""Number of characters of a rate and of a time in front of a bar, and of the longest remark behind the bar."""
WIDE = 120
"""Characters of a line: enough for every line of the pipeline."""
_LOWEST_PER_S = 1e-9
"""Lower rates are left out."""
Kind = Literal["stage", "part", "fit", "if"]
_Row = tuple[Kind, str, float | None, str]
"""Kind and name of a bar, its rate in batches per second, and the way the rate was measured."""


class Bar(NamedTuple):
    """The speed of a part. Its bar shows the time for a batch, not the rate: the fastest part may be 1,000 times as
    fast as the slowest, and the slowest matters most."""

    name: str
    per_s: float
    """Rate in the pipeline's unit."""
    batch_ms: float
    """Time for a batch."""
    kind: Kind
    """``stage``: every sample passes this stage. ``part``: a part of the loader that shares the workers with others.
    ``fit``: the fit as it ran. ``if``: the loader under other conditions."""
    note: str = ""
    """The way the figure was measured."""
    narrowest: bool = False
    """True for the stage that limits the pipeline, or for the part that limits the loader."""


class Pipeline(NamedTuple):
    """The measured rates of the pipeline, in the order in which a sample passes its stages."""

    unit: str
    """``samples/s``, or ``batches/s`` if the batch size is not known."""
    bars: Sequence[Bar]

    @property
    def longest_ms(self) -> float:
        """The time of the longest bar."""
        return max(bar.batch_ms for bar in self.bars)


def read_pipeline(diagnosis: Diagnosis) -> Pipeline | None:
    """Return the pipeline, as far as experiments have measured it; None if no stage or part was measured."""
    measured = diagnosis.measurements
    results = measured.experiments
    sizes = (results.batch_size, measured.facts.loader.batch_size)
    size = next((size for size in sizes if size is not None and size > 0), None)
    samples = size or 1
    model_per_s = None if model_disturbed(measured) else results.model_per_s
    rows: list[_Row] = [
        *_sample_parts(results.costs, measured.facts, size),
        ("part", "collate, send", results.ceiling_per_s, "constant samples, same workers"),
        ("stage", "loader", results.loader_per_s, "alone, as configured"),
        ("stage", "model", model_per_s, "the same device batch each step"),
        ("fit", "fit as it ran", rate(measured.stats.step_ms, 1), ""),
        ("if", "files in memory", results.cached_bytes_per_s, ""),
        ("if", "no transforms", results.no_transform_per_s, ""),
    ]
    bars = []
    for kind, name, batches_per_s, note in rows:
        per_s = samples * (batches_per_s or 0.0)
        if _LOWEST_PER_S < per_s < math.inf:
            bars.append(Bar(name, per_s, 1e3 * samples / per_s, kind, note))
    if not any(bar.kind in ("stage", "part") for bar in bars):
        return None
    return Pipeline(rate_unit(size), _mark(bars, diagnosis))


def pipeline_text(pipeline: Pipeline, width: int = WIDE) -> list[str]:
    """Return the pipeline as bars of characters, a line for each."""
    leads = {"stage": "", "part": "  ", "fit": "", "if": "if: loader, "}
    beside = _RATE + _TIME + 2 + 2 + _REMARK  # the rate, the time, the spaces around the bar, and the remark
    names = [_short(leads[bar.kind] + bar.name, width - beside - _FEWEST_CHARACTERS) for bar in pipeline.bars]
    title = f"Pipeline ({pipeline.unit}, ms a batch)"
    column = max(map(len, names))
    longest = min(_CHARACTERS, max(_FEWEST_CHARACTERS, width - column - beside))
    lines = [title]
    for name, bar in zip(names, pipeline.bars, strict=True):
        drawn = "#" * max(1, round(longest * bar.batch_ms / pipeline.longest_ms))
        time = in_ms(bar.batch_ms, bar.batch_ms)
        line = f"{name:{column}}{in_rate(bar.per_s):>{_RATE}}{time:>{_TIME}}  {drawn:{longest}}  {_remark(bar)}"
        lines.append(line.rstrip())
    return lines


def _remark(bar: Bar) -> str:
    if not bar.narrowest:
        return ""
    if bar.kind == "stage":
        return "<- bottleneck"
    return "<- slowest part"


def _short(name: str, longest: int) -> str:
    indent = name[: len(name) - len(name.lstrip())]
    text = indent + " ".join(name.split())
    longest = max(12, min(50, longest))
    if len(text) <= longest:
        return text
    return f"{text[: longest - 3]}..."


def _sample_parts(costs: tuple[NamedCost, ...], facts: LoopFacts, batch_size: int | None) -> list[_Row]:
    """Return the bars for reading, decoding and the transforms: the rate of the workers if they did only this part of
    the work.

    Assumes that each worker runs at full speed as long as there is a CPU for it.
    """
    workers = facts.loader.num_workers
    if workers is None or batch_size is None:
        return []
    rows: list[_Row] = []
    for part in (*NOT_TRANSFORMS, "transforms"):
        of_part = [cost for cost in costs if _part_of(cost) == part]
        of_workers = rate(sum(cost.wall_ms for cost in of_part), max(workers, 1))
        of_cpus = rate(sum(cost.cpu_ms for cost in of_part), facts.usable_cpus)
        if of_workers is not None:
            per_s = min(of_workers, of_cpus or math.inf)
            rows.append(("part", part, per_s / batch_size, "cost of one sample, shared by the workers"))
    return rows


def _part_of(cost: NamedCost) -> str:
    """Return the bar to which a cost belongs."""
    step = step_of(cost.name)
    return step if step in NOT_TRANSFORMS else "transforms"


_STAGE_NAMED: dict[Bottleneck, str] = {"data": "loader", "copy": "copy", "compute": "model"}
"""Bottleneck in the headline -> name of the pipeline's stage that it stands for."""


def _mark(bars: list[Bar], diagnosis: Diagnosis) -> list[Bar]:
    """Mark the slowest of several stages if the headline names this stage. If the loader limits, mark its slowest part.

    The loader limits if training waits for data, or if nothing is known to limit it, and no other stage is slower.
    """
    narrowest = _slowest_of(bars, "stage")
    stage_of_headline = "" if takes_turns(diagnosis) else _STAGE_NAMED.get(diagnosis.bottleneck)
    marked: list[Bar | None] = []
    if narrowest is not None and narrowest.name == stage_of_headline:
        marked.append(narrowest)
    if diagnosis.bottleneck in ("data", "unknown") and (narrowest is None or narrowest.name == "loader"):
        marked.append(_slowest_of(bars, "part"))
    return [bar._replace(narrowest=bar in marked) for bar in bars]


def _slowest_of(bars: list[Bar], kind: Kind) -> Bar | None:
    """Return the bar with the lowest rate among bars of this kind; None if there are fewer than two."""
    of_kind = [bar for bar in bars if bar.kind == kind]
    if len(of_kind) < 2:
        return None
    return min(of_kind, key=lambda bar: bar.per_s)


# --- sections -----------------------------------------------------------------------------------------------------

VALIDATION_PCT = 10.0
"""Smallest share of the run, in percent, that validation must take for the console to show its parts."""
ROWS_NAMED = 6
"""Largest number of a section's rows that are listed in its line on the console."""

Row = tuple[str, ...]


class CodeLine(NamedTuple):
    """Code to paste, as lines of the console that are never broken, and a comment behind the last line."""

    lines: Sequence[str]
    comment: str


def folded(line: str, width: int, indent: str = "      ") -> str:
    """Return a line of prose, broken to fit the width, but never inside a word, code in backquotes, or a figure in
    %."""
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
    """One topic of a report: its rows for pages, and its lines for the console."""

    title: str
    rows: Sequence[Row]
    """Cells as text. The first column holds names; in a table, the other columns hold figures."""
    header: Row = ()
    form: Literal["table", "list", "step", "remedies", "pipeline", "pairs"] = "table"
    """Form of the section on a page: a ``table``, a ``list`` (a single column), or a form for this topic only."""
    console: Sequence[str | CodeLine] | str = ()
    """Lines for the console, or the first word of a line that lists the rows. If empty, the console does not show the
    section."""
    note: str = ""
    """A sentence below the rows."""
    pipeline: Pipeline | None = None
    folded: bool = False
    """True if a page shows only the title until the reader opens the section."""

    def console_lines(self, width: int) -> Iterator[str]:
        """Yield the lines for the console, broken to fit the width."""
        if self.pipeline is not None:
            yield from ("", *pipeline_text(self.pipeline, width))
        elif isinstance(self.console, str):
            names = [f"{row[0]}: {row[1]}" for row in self.rows[:ROWS_NAMED]]
            if len(self.rows) > ROWS_NAMED:
                names.append(f"{len(self.rows) - ROWS_NAMED} more")
            yield folded(f"{self.console:<5} {'; '.join(names)}", width)
        else:
            for line in self.console:
                if isinstance(line, CodeLine):
                    yield from _folded_code(line, width)
                else:
                    yield folded(line, width)


def step_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """Yield the section on the parts of a step."""
    if diagnosis.stats.step_ms:
        copies = diagnosis.device_type != "cpu" or diagnosis.bottleneck == "copy"
        end = f"        {fastest(diagnosis)}"
        start_ms = start_ms_per_step(diagnosis)
        yield _parts_section("step", diagnosis.stats, copies=copies, start_ms=start_ms, end=end)


def _parts_section(
    what: str, stats: StarvationStats, *, copies: bool, start_ms: float | None = None, end: str
) -> Section:
    """Return the section on the parts of a step, in the order of the device. They add up to the step.

    If nothing is copied (on a CPU), the short time of the transfer counts as ``other``. Where starts of epochs count,
    each step has its share of them.
    """
    step_ms = (stats.step_ms or 0.0) + (start_ms or 0.0)
    copy_ms = stats.copy_ms
    other_ms = stats.other_ms
    if not copies:
        other_ms = None if other_ms is None else other_ms + (copy_ms or 0.0)
        copy_ms = None
    phases = {"forward": stats.forward_ms, "backward": stats.backward_ms, "optimizer": stats.optimizer_ms}
    inside = ", ".join(f"{name} {in_ms(ms, step_ms)}" for name, ms in phases.items() if ms is not None)
    if inside:
        inside = f" ({inside})"
    parts = (
        ("compute", stats.compute_ms, "forward, backward and optimizer", inside),
        ("data", stats.data_ms, "the device waited for data", ""),
        ("epoch start", start_ms, "until the first batch of an epoch came, shared by its steps", ""),
        ("copy", copy_ms, "as far as no computing hides it, with the hooks before it", ""),
        ("other", other_ms, "between the steps: callbacks, logging, checkpoints", ""),
    )
    rows = []
    texts = []
    for name, ms, meaning, detail in parts:
        if ms is not None:
            rows.append((name, in_ms(ms, step_ms), f"{100 * ms / step_ms:.1f}", meaning + detail))
            texts.append(f"{name} {in_ms(ms, step_ms)}{detail}")
    line = f"{what} {in_ms(step_ms, step_ms)} ms = {' | '.join(texts)}{end}"
    title = f"Where a {what} of {in_ms(step_ms, step_ms)} ms goes"
    return Section(title, rows, _PARTS, "step", [line.rstrip()])


_PARTS = ("part of the step", "ms", "%", "")


def time_sections(measured: Measurements) -> Iterator[Section]:
    """Yield the sections on the parts of the run and of its validation."""
    wall = measured.wall
    validation = measured.validation
    by_loader = measured.by_loader
    if wall is not None and wall.wall_s > 0:
        yield _wall_section(wall)
    if validation is not None:
        by_loader = by_loader or validation.by_loader
        is_large = wall is not None and 100 * wall.seconds("validation") >= VALIDATION_PCT * wall.run_s
        yield from _validation_sections(validation, shown=is_large)
    rows = [(steps.name, str(steps.steps), f"{steps.step_ms:.2f}", f"{steps.data_ms:.2f}") for steps in by_loader]
    yield from _table("Loader by loader", rows, ("loader", "steps", "ms a step", "waiting for data"))


def _wall_section(wall: WallStats) -> Section:
    digits = 1 if wall.wall_s >= 10 else 2
    parts = [f"{part.name} {part.seconds:.{digits}f}" for part in wall.parts if round(part.seconds, digits)]
    rows = [(part.name, f"{part.seconds:.2f}", f"{100 * part.seconds / wall.wall_s:.1f}") for part in wall.parts]
    return Section(
        f"Where {wall.wall_s:.1f} s of wall time go",
        rows,
        ("part of the run", "s", "%"),
        console=[f"wall  {wall.wall_s:.{digits}f} s = {' | '.join(parts)}"],
        folded=wall.seconds("train") > wall.run_s / 2,
    )


def _validation_sections(validation: LoopMeasurements, *, shown: bool) -> Iterator[Section]:
    step_ms = validation.stats.step_ms
    if not step_ms:
        return
    copies = validation.facts.device_type != "cpu"
    waits = [
        f"; {steps.name} waits {in_ms(steps.data_ms, step_ms)} of {in_ms(steps.step_ms, step_ms)}"
        for steps in validation.by_loader
    ]
    section = _parts_section("validation step", validation.stats, copies=copies, end="".join(waits))
    if not shown:
        section = replace(section, console=(), folded=True)
    yield section


# --- advice -------------------------------------------------------------------------------------------------------


def advice_sections(diagnosis: Diagnosis, notes: Sequence[str]) -> Iterator[Section]:
    """Yield the sections for the causes, the remedies, and the notes that the next step does not repeat."""
    measured = diagnosis.measurements
    causes = list(filter(None, [cause_text(diagnosis)]))
    evidence = [words(note, measured) for note in diagnosis.evidence]
    why_not = [words(note, measured) for note in diagnosis.why_not]
    console = [f"cause {cause}" for cause in causes]
    if evidence:
        console.append(f"why   {'; '.join(evidence)}")
    yield from _list("Why", [*causes, *evidence], console)
    if diagnosis.remedies:
        rows = [_remedy_row(remedy, diagnosis) for remedy in diagnosis.remedies]
        header = ("change", "why", "gain")
        yield Section("What to change", rows, header, "remedies", list(_remedy_lines(diagnosis)))
    console = [*(f"not   {reason}" for reason in why_not), *(f"note  {note}" for note in notes)]
    yield from _list("Notes", [*(f"not {reason}" for reason in why_not), *notes], console)


def _list(title: str, lines: Sequence[str], console: Sequence[str] = ()) -> Iterator[Section]:
    if lines:
        yield Section(title, [(line,) for line in lines], form="list", console=console)


def _remedy_row(remedy: Remedy, diagnosis: Diagnosis) -> Row:
    why = _why(remedy, diagnosis.measurements)
    if remedy.where:
        why = f"{remedy.where}: {why}"
    return (remedy.code, why, _at_most(remedy, diagnosis))


_EFFECTS: dict[Effect, str] = {
    "random numbers": "random numbers drawn in workers differ",
    "copies of the dataset": "workers keep their copies of the dataset",
    "order": "batches come in a random order",
    "pixels": "pixels differ slightly",
    "memory": "it takes memory",
    "sums": "sums of floats may differ in their last bits",
}


def _why(remedy: Remedy, measured: Measurements) -> str:
    """Return the reasons why a remedy helps, and its other effects."""
    reasons = [words(note, measured) for note in remedy.why]
    return "; ".join([*reasons, *(_EFFECTS[effect] for effect in remedy.effects)])


def _at_most(remedy: Remedy, diagnosis: Diagnosis) -> str:
    """Return the largest possible gain of a remedy, or its step times in trials, in words; empty if unknown."""
    if remedy.tried_ms is not None:
        own_ms, new_ms = remedy.tried_ms
        return f"tried: {in_ms(own_ms, own_ms)} -> {in_ms(new_ms, own_ms)} ms a step"
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
        comment = _why(remedy, diagnosis.measurements)
        if gain:
            comment += f" ({gain})"
        if remedy.where:
            yield f"{lead}{remedy.where}"
            lead = " " * 8
        yield CodeLine([f"{lead}{line}" for line in remedy.code.split("\n")], comment)
        lead = " " * 6


# --- measurements -------------------------------------------------------------------------------------------------


def pipeline_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """Yield the section on the pipeline from disk to model."""
    pipeline = read_pipeline(diagnosis)
    if pipeline is None:
        return
    note = "All bars have one scale: the time for a batch. The longest of the stages limits training."
    yield Section("Pipeline: time of each part for a batch", (), form="pipeline", note=note, pipeline=pipeline)


def measured_sections(measured: Measurements) -> Iterator[Section]:
    """Yield the sections for hooks, ranks, workers and the results of experiments, as far as they were measured."""
    hooks = [(hook.name, f"{hook.ms_per_step:.2f}") for hook in measured.hooks]
    yield from _table("Slowest hooks", hooks, ("hook or logger", "ms a step"))
    if measured.ranks is not None:
        yield from _table("Ranks", _rank_rows(measured.ranks), ("", "waits for data, ms a step"))
    yield from _table("Loader and workers during the fit", _loader_rows(measured.loaders))
    yield from _experiments(measured.experiments)


def _rank_rows(ranks: RankStats) -> list[Row]:
    remarks = {ranks.slow_rank: " (the slow one)"}
    return [(f"rank {rank}{remarks.get(rank, '')}", f"{ms:.2f}") for rank, ms in enumerate(ranks.data_ms_by_rank)]


def _table(title: str, rows: Sequence[Row], header: Row = (), console: str = "") -> Iterator[Section]:
    if rows:
        yield Section(title, rows, header, console=console or (), folded=True)


def _figures(*rows: tuple[str, float | None, str]) -> list[Row]:
    """Return the rows (name, figure as text) from tuples (name, figure, format), without unknown figures."""
    return [(name, form.format(value)) for name, value, form in rows if value is not None]


def _loader_rows(loaders: LoaderStats) -> list[Row]:
    capacity = loaders.queue_capacity or None
    return _figures(
        ("workers on a CPU", loaders.workers_on_cpu_pct, "{:.0f} %"),
        ("workers waiting for a CPU", loaders.workers_run_queue_pct, "{:.0f} %"),
        ("workers blocked", loaders.workers_blocked_pct, "{:.0f} %"),
        ("read by the workers", loaders.read_mb_per_s, "{:.1f} MB/s"),
        ("of that from memory", loaders.page_cache_pct, "{:.0f} %"),
        ("batches ready when asked", capacity and loaders.queue_ready, "{:.1f}"),
        ("batches that may be ready", capacity, "{:.0f}"),
        ("waiting while a later batch was ready", loaders.head_of_line_pct, "{:.0f} %"),
        ("waiting for the pin thread", loaders.pin_lag_ms, "{:.2f} ms"),
        ("batches made", loaders.produced_per_s, "{:.2f} /s"),
        ("time with tasks waiting for a CPU", loaders.cpu_pressure_pct, "{:.0f} %"),
        ("time with tasks waiting for a disk", loaders.io_pressure_pct, "{:.0f} %"),
        ("time with tasks waiting for memory", loaders.memory_pressure_pct, "{:.0f} %"),
        ("CPU quota used up", loaders.throttled_pct, "{:.0f} % of periods"),
    )


def _experiments(results: ExperimentResults) -> Iterator[Section]:
    costs = sorted(results.costs, key=lambda cost: -cost.wall_ms)
    cost_rows = [(cost.name, f"{cost.wall_ms:.2f} ms", f"{cost.cpu_ms:.2f} ms") for cost in costs]
    function_rows = [(_function_text(cost), f"{cost.ms_per_batch:.1f} ms a batch") for cost in results.functions]
    batch_rows = _figures(
        ("its samples, in one process", results.samples_ms, "{:.1f} ms"),
        ("collating them", results.collate_ms, "{:.1f} ms"),
        ("start of the loader", results.loader_start_s, "{:.2f} s"),
    )
    yield from _table("What one sample costs", cost_rows, ("", "wall time", "CPU time"), "costs")
    yield from _table("Where in your code a batch is made", function_rows, console="code")
    yield from _table("Ways to make a sample", list(map(_lighter_row, results.lighter)), ("", "CPU time"), "less")
    trial_rows = [*_trained_rows(results), *map(_tried_row, results.tried)]
    yield from _table("Workers tried", trial_rows, ("", "step", "trials", ""), "tried")
    yield from _table("What one batch takes", batch_rows, console="batch")
    yield from _table("Parts of a batch", _key_rows(results.keys))
    yield from _table("Experiments that were left out", results.left_out, ("", "why"), "skip")


def _tried_row(setting: TriedSetting) -> Row:
    step, shortest, longest = (
        in_ms(ms, setting.step_ms) for ms in (setting.step_ms, setting.shortest_ms, setting.longest_ms)
    )
    role = "chosen" if setting.chosen else ""
    if setting.own:
        role = "as it is"
    return (plural(setting.num_workers, "worker"), f"{step} ms", f"{shortest} to {longest} ms", role)


def _trained_rows(results: ExperimentResults) -> list[Row]:
    """Return the rows of the settings with which training itself was measured."""
    own = results.tried_as("own")
    own_ms = results.own_fit_ms
    new_ms = results.chosen_fit_ms
    if own is None or own_ms is None or new_ms is None or results.trained_workers is None:
        return []
    rows: list[Row] = []
    for workers, ms in ((own.num_workers, own_ms), (results.trained_workers, new_ms)):
        rows.append((f"training with {plural(workers, 'worker')}", f"{in_ms(ms, own_ms)} ms", "", ""))
    return rows


def _lighter_row(trial: LighterSample) -> Row:
    row = f"{trial.now_ms:.2f} -> {trial.then_ms:.2f} ms"
    if trial.device_ms is not None:
        row += f", and {trial.device_ms:.2f} ms on the device"
    return (name_of_change(trial), row)


def _function_text(cost: FunctionCost) -> str:
    """``Birds.__getitem__ (birds.py:41), calling ColorJitter``."""
    calls = f", calling {cost.calls}" if cost.calls else ""
    return f"{cost.name} ({source_line(cost.file, cost.line)}){calls}"


def _key_rows(keys: tuple[KeyBytes, ...]) -> list[Row]:
    """(path, size) of each part of a batch; the parts in a list share one row.

    Paths are written as in Python: ``batch[1]``, ``targets[*].boxes``.
    """
    sizes: Counter[str] = Counter()
    for key in keys:
        first, *inner = key.name.split(".")
        path = f"batch[{first}]" if first.isdecimal() else first
        for name in inner:
            path += "[*]" if name.isdecimal() else f".{name}"
        sizes[path] += key.bytes_per_batch
    return [(path, f"{size / 1e3:,.1f} kB a batch") for path, size in sizes.items()]


# --- all of a report ----------------------------------------------------------------------------------------------


def other_sections(report: Report) -> Iterator[Section]:
    """Yield the sections of a page below the step and the advice."""
    diagnosis = report.diagnosis
    yield from pipeline_sections(diagnosis)
    yield from time_sections(diagnosis.measurements)
    yield from measured_sections(diagnosis.measurements)
    yield Section("Settings", _settings_rows(report), form="pairs")
    yield Section("Machine", _machine_rows(report), form="pairs")


def _settings_rows(report: Report) -> list[Row]:
    """(name, value) for the known settings of the run."""
    facts = report.diagnosis.measurements.facts
    loader = facts.loader
    batch = []
    if loader.batch_size is not None:
        batch.append(f"{loader.batch_size} samples")
    if facts.batch.size_bytes is not None:
        batch.append(size_text(facts.batch.size_bytes))
    return _known(
        ("written", report.written_at.replace("T", " ")),
        ("ranks", facts.world_size),
        ("batch", ", ".join(batch) or None),
        ("workers", loader.num_workers),
        ("prefetch factor", loader.prefetch_factor),
        ("pinned memory", loader.pin_memory),
        ("batches in place", loader.in_place),
        ("persistent workers", loader.persistent_workers),
        ("threads of torch", facts.torch_threads),
        ("decoder", facts.datamodule.decoder),
        ("backend", facts.datamodule.backend),
    )


def _machine_rows(report: Report) -> list[Row]:
    """(name, value) for what is known of the machine, and for the versions."""
    facts = report.diagnosis.measurements.facts
    machine = report.environment
    return _known(
        ("device", machine.device or facts.device_type),
        ("CPU", machine.cpu),
        ("usable CPUs", _first_known(facts.usable_cpus, machine.usable_cpus)),
        ("memory available", _size(machine.available_memory_bytes)),
        ("free in /dev/shm", _size(_first_known(facts.free_shm_bytes, machine.free_shm_bytes))),
        ("file system", machine.file_system),
        ("platform", machine.platform),
        ("Python", machine.python),
        ("torch", machine.torch),
        ("Lightning", facts.trainer.lightning or machine.lightning or machine.pytorch_lightning),
        ("lightning_feed", machine.lightning_feed),
    )


def _first_known(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _size(size_bytes: int | None) -> str | None:
    if size_bytes is None:
        return None
    return size_text(size_bytes)


def _known(*rows: tuple[str, str | int | None]) -> list[Row]:
    """Return the rows (name, value as text) without unknown values."""
    words = {True: "yes", False: "no"}
    return [
        (name, words[value] if isinstance(value, bool) else str(value)) for name, value in rows if value is not None
    ]
