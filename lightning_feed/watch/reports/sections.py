"""The sections of a report, described once: rows for Markdown and HTML, and lines for the console."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_feed.errors import plural
from lightning_feed.watch.experiments.results import DiskFacts, ExperimentResults, FunctionCost, KeyUse
from lightning_feed.watch.reports.compare import check_text
from lightning_feed.watch.reports.headline import cause_text, if_free, step_parts
from lightning_feed.watch.reports.pipeline import Pipeline, in_rate, pipeline_text, read_pipeline
from lightning_feed.watch.reports.report import Report, rate
from lightning_feed.watch.stats import LoaderStats
from lightning_feed.watch.verdict.diagnosis import Diagnosis, Measurements, Remedy
from lightning_feed.watch.verdict.shares import in_ms

COSTS_NAMED, CODE_NAMED, KEYS_NAMED = 6, 3, 6
"""Rows of a table that the console names: costs of a sample, places in the user's code, parts of a batch."""
NOISY_PCT = 10.0
"""Rates of the same setting that lie this far apart are worth a word."""
VALIDATION_PCT = 10.0
"""Share of the run from which the console tells how validation divides."""

Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One topic of a report."""

    title: str
    form: Literal["table", "list", "step", "remedies", "pipeline", "pairs"] = "table"
    """How a page shows it; those besides ``table`` and ``list`` (a single column) have a look of their own."""
    header: Row = ()
    rows: Sequence[Row] = ()
    """Text. The first column names; in a table the others are figures."""
    pipeline: Pipeline | None = None
    note: str = ""
    """A sentence below."""
    console: Sequence[str] = ()
    """What the console says of it. Empty: nothing."""


def step_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """How a step divides."""
    stats, whole = diagnosis.stats, diagnosis.stats.step_ms
    if not whole:
        return
    parts, step = step_parts(diagnosis), in_ms(whole, whole)
    split = " | ".join(f"{one.name} {in_ms(one.ms, whole)}{one.inside}" for one in parts)
    slack = ""
    if stats.hidden_wait_ms and stats.next_wait_ms is not None:
        hidden, wait = in_ms(stats.hidden_wait_ms, whole), in_ms(stats.next_wait_ms, whole)
        slack = f"Of {wait} ms in next(loader), {hidden} ms cost nothing."
    yield Section(
        title=f"Where a step of {step} ms goes",
        form="step",
        header=("part of the step", "ms", "%", ""),
        rows=[
            (one.name, in_ms(one.ms, whole), f"{100 * one.ms / whole:.1f}", f"{one.meaning}{one.inside}")
            for one in parts
        ],
        note=slack,
        console=[f"step {step} ms = {split}        {if_free(diagnosis)}".rstrip()],
    )


def time_sections(measured: Measurements) -> Iterator[Section]:
    """Where the time of the run and of its validation goes."""
    wall, validation = measured.wall, measured.validation
    if wall is not None and wall.wall_s > 0:
        digits = 1 if wall.wall_s >= 10 else 2
        told = [f"{one.name} {one.seconds:.{digits}f}" for one in wall.parts if round(one.seconds, digits)]
        yield Section(
            title=f"Where {wall.wall_s:.1f} s of wall time go",
            header=("part of the run", "s", "%"),
            rows=[(one.name, f"{one.seconds:.2f}", f"{100 * one.seconds / wall.wall_s:.1f}") for one in wall.parts],
            console=[f"wall  {wall.wall_s:.{digits}f} s = {' | '.join(told)}"],
        )
    if validation is not None and validation.stats.step_ms is not None:
        whole, stats = validation.stats.step_ms, validation.stats
        parts = {"compute": stats.compute_ms, "data": stats.data_idle_ms, "copy": stats.h2d_ms, "other": stats.other_ms}
        split = " | ".join(f"{name} {in_ms(ms, whole)}" for name, ms in parts.items())
        waits = "".join(
            f"; {one.name} waits {in_ms(one.data_idle_ms, whole)} of {in_ms(one.step_ms, whole)}"
            for one in validation.by_loader
        )
        told = [f"valid step {in_ms(whole, whole)} ms = {split}{waits}"]
        large = wall is not None and 100 * wall.seconds("validation") >= VALIDATION_PCT * wall.wall_s
        yield Section(
            title=f"A validation step of {whole:.2f} ms",
            header=("", "ms"),
            rows=[(name, f"{ms:.2f}") for name, ms in parts.items() if ms is not None],
            console=told if large else [],
        )
    by_loader = measured.by_loader or (validation.by_loader if validation is not None else ())
    if by_loader:
        yield Section(
            title="Loader by loader",
            header=("loader", "steps", "ms a step", "waiting for data"),
            rows=[(one.name, str(one.steps), f"{one.step_ms:.2f}", f"{one.data_idle_ms:.2f}") for one in by_loader],
        )


# --- advice -------------------------------------------------------------------------------------------------------


def advice_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """Causes, remedies and notes."""
    cause, evidence = cause_text(diagnosis), diagnosis.evidence
    told = [f"cause {cause}"] if cause else []
    told += ["why   " + "; ".join(evidence)] if evidence else []
    yield from _list("Why", [one for one in (cause, *evidence) if one], told)
    if diagnosis.remedies:
        yield Section(
            title="What to change",
            form="remedies",
            header=("change", "why", "predicted step", "predicted rate"),
            rows=[_remedy_row(one, diagnosis) for one in diagnosis.remedies],
            console=list(_remedy_lines(diagnosis)),
        )
    told = [f"not   {one}" for one in diagnosis.why_not] + [f"note  {one}" for one in diagnosis.notes]
    yield from _list("Notes", [*diagnosis.why_not, *diagnosis.notes], told)


def _list(title: str, lines: Iterable[str], console: Sequence[str] = ()) -> Iterator[Section]:
    rows = [(one,) for one in lines]
    if rows:
        yield Section(title=title, form="list", rows=rows, console=console)


def _remedy_row(remedy: Remedy, diagnosis: Diagnosis) -> Row:
    predicted = remedy.predicted_step_ms
    per_s = rate(predicted, diagnosis.measurements.facts.batch_size)
    return (
        remedy.code,
        f"{remedy.where}: {remedy.why}" if remedy.where else remedy.why,
        "" if predicted is None else f"{in_ms(predicted, diagnosis.stats.step_ms or predicted)} ms",
        "" if per_s is None else f"{in_rate(per_s)} samples/s",
    )


def _remedy_lines(diagnosis: Diagnosis) -> Iterator[str]:
    lead = "fix   "
    for remedy in diagnosis.remedies:
        then = "" if remedy.predicted_gain_pct is None else f" (predicted: {remedy.predicted_gain_pct:.0f} % less time)"
        if remedy.predicted_step_ms is not None:
            then = f" (predicted step {in_ms(remedy.predicted_step_ms, diagnosis.stats.step_ms or 0.0)} ms)"
        if remedy.where:
            yield f"{lead}{remedy.where}"
            lead = "        "
        *first, last = remedy.code.split("\n")
        yield from (f"{lead}{one}" for one in first)
        yield f"{lead}{last}    # {remedy.why}{then}"
        lead = "      "


# --- measurements -------------------------------------------------------------------------------------------------


def pipeline_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """The pipeline from disk to model."""
    pipeline = read_pipeline(diagnosis)
    if pipeline is None:
        return
    cut = any(one.per_s > pipeline.full_per_s for one in pipeline.bars)
    yield Section(
        title=f"Pipeline: {pipeline.unit} that each part could do",
        form="pipeline",
        pipeline=pipeline,
        note=f"Bars end at {in_rate(pipeline.full_per_s)} {pipeline.unit}; longer ones are cut." if cut else "",
        console=["", *pipeline_text(pipeline)],
    )


def measured_sections(measured: Measurements) -> Iterator[Section]:
    """Hooks, ranks, workers and what experiments found; none for what was not measured."""
    if measured.hooks:
        hooks = [(one.name, f"{one.ms_per_step:.2f}") for one in measured.hooks]
        yield Section(title="Slowest hooks", header=("hook or logger", "ms a step"), rows=hooks)
    ranks = measured.ranks
    if ranks is not None and ranks.data_idle_ms_by_rank:
        waits = enumerate(ranks.data_idle_ms_by_rank)
        rows = [(f"rank {at}{' (the slow one)' if at == ranks.slow_rank else ''}", f"{ms:.2f}") for at, ms in waits]
        yield Section(title="Ranks", header=("", "waits for data, ms a step"), rows=rows)
    loaders = _loader_rows(measured.loaders)
    if loaders:
        yield Section(title="Loader and workers during the fit", rows=loaders)
    if measured.experiments is not None:
        used = measured.stats.steps > 0 or any(one.used is not None for one in measured.experiments.keys)
        yield from _experiments(measured.experiments, keys_were_read=used)


def _experiments(found: ExperimentResults, *, keys_were_read: bool) -> Iterator[Section]:
    if found.costs:
        yield _costs(found)
    if found.functions:
        places = code_places(found.functions)
        yield Section(
            title="Where in your code a batch is made",
            header=("", "ms a batch"),
            rows=[(place, f"{ms:.1f}") for place, ms in places],
            console=[f"code  {place}: {ms:.1f} ms a batch" for place, ms in places[:CODE_NAMED]],
        )
    if found.worker_scaling:
        yield _scaling(found)
    machine = _machine_rows(found)
    if machine:
        yield Section(title="Disk, batches and copies", rows=machine, console=list(_machine_lines(found)))
    if found.keys:
        yield _keys(found.keys, keys_were_read=keys_were_read)
    if found.left_out:
        skipped = [f"skip  {name}: {why}" for name, why in found.left_out]
        yield Section(title="Experiments that were left out", header=("", "why"), rows=found.left_out, console=skipped)


def _costs(found: ExperimentResults) -> Section:
    largest = sorted(found.costs, key=lambda one: -one.wall_ms)
    named = [f"{one.name} {one.wall_ms:.2f} ms" for one in largest[:COSTS_NAMED]]
    more = f", {len(largest) - COSTS_NAMED} more" if len(largest) > COSTS_NAMED else ""
    return Section(
        title="What one sample costs",
        header=("", "CPU ms", "wall ms"),
        rows=[(one.name, f"{one.cpu_ms:.3f}", f"{one.wall_ms:.3f}") for one in found.costs],
        console=[f"costs {', '.join(named)}{more}: {sum(one.wall_ms for one in largest):.2f} ms a sample"],
    )


def _scaling(found: ExperimentResults) -> Section:
    size, unit = (found.batch_size, "samples/s") if found.batch_size else (1, "batches/s")
    tried = [f"{workers}: {in_rate(size * per_s)}" for workers, per_s in found.worker_scaling]
    noise = found.noise_pct
    again = "" if noise is None or noise < NOISY_PCT else f"; tried again, they differed by up to {noise:.0f} %"
    spread = {workers: f"{low:.2f} to {high:.2f}" for workers, low, high in found.worker_spread}
    line = f"tried num_workers {', '.join(tried)} {unit}, the loader alone{again}"
    return Section(
        title="Numbers of workers that were tried",
        header=("", "batches/s", "tried again"),
        rows=[(plural(one, "worker"), f"{per_s:.2f}", spread.get(one, "")) for one, per_s in found.worker_scaling],
        console=[line] if len(found.worker_scaling) > 1 else [],
    )


def _keys(keys: tuple[KeyUse, ...], *, keys_were_read: bool) -> Section:
    parts = batch_parts(keys)
    unused = [f"{place} ({size / 1e3:.1f} kB a batch)" for place, size, used in parts if used is False]
    told = [f"keys  {_some(unused)}: never used by the model"] if unused else []
    unsure = [place for place, _, used in parts if used is None]
    if unsure and keys_were_read:  # without a step nobody could have used them
        told.append(f"keys  {_some(unsure)}: use by the model unknown")
    words = {True: "yes", False: "never", None: "not known"}
    return Section(
        title="Parts of a batch",
        header=("", "kB a batch", "used by the model"),
        rows=[(place, f"{size / 1e3:,.1f}", words[used]) for place, size, used in parts],
        console=told,
    )


def batch_parts(keys: tuple[KeyUse, ...]) -> list[tuple[str, int, bool | None]]:
    """(place, bytes of a batch, whether the model uses it) of each part of a batch; those of a list are one.

    Places are as Python writes them: ``batch[1]``, ``targets[*].boxes``.
    """
    parts: dict[tuple[str, bool | None], int] = {}
    for one in keys:
        first, *inner = one.name.split(".")
        place = f"batch[{first}]" if first.isdecimal() else first
        place += "".join("[*]" if name.isdecimal() else f".{name}" for name in inner)
        parts[place, one.used] = parts.get((place, one.used), 0) + one.bytes_per_batch
    return [(place, size, used) for (place, used), size in parts.items()]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - KEYS_NAMED} more" if len(names) > KEYS_NAMED else ""
    return ", ".join(names[:KEYS_NAMED]) + more


def code_places(functions: Sequence[FunctionCost]) -> list[tuple[str, float]]:
    """(``Birds.__getitem__ (birds.py:41), calling ColorJitter``, milliseconds a batch)."""
    return [
        (
            f"{one.name} ({Path(one.file).name}:{one.line}){f', calling {one.calls}' if one.calls else ''}",
            one.ms_per_batch,
        )
        for one in functions
    ]


def _figures(*rows: tuple[str, float | None, str]) -> list[Row]:
    """(name, figure as text) of what is known, by (name, figure, format)."""
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
        ("reads answered by the cache", loaders.cache_hit_pct, "{:.0f} %"),
    )


def _machine_rows(found: ExperimentResults) -> list[Row]:
    disk = "" if found.disk is None else _disk_text(found.disk)
    return [("files", disk)] * bool(disk) + _figures(
        ("copy, pinned", found.pinned_gb_per_s, "{:.1f} GB/s"),
        ("copy, pageable", found.pageable_gb_per_s, "{:.1f} GB/s"),
        ("one batch to the device", found.copy_ms, "{:.2f} ms"),
        ("start of the loader", found.loader_start_s, "{:.2f} s"),
        ("samples of a batch, in one process", found.samples_ms, "{:.1f} ms"),
        ("collating them", found.collate_ms, "{:.1f} ms"),
        ("taking a batch from a worker", found.hand_over_ms, "{:.2f} ms"),
        ('the same with "file_system"', found.hand_over_file_system_ms, "{:.2f} ms"),
    )


def _machine_lines(found: ExperimentResults) -> Iterator[str]:
    if found.samples_ms is not None and found.collate_ms is not None:
        yield f"batch {found.samples_ms:.1f} ms for its samples, {found.collate_ms:.1f} ms to collate them"
    if found.hand_over_ms is not None:
        saved = found.hand_over_file_system_ms
        other = "" if saved is None else f'; {saved:.1f} ms with the sharing strategy "file_system"'
        yield f"IPC   {found.hand_over_ms:.1f} ms to take a batch from a worker{other}"
    if found.disk is not None and _disk_text(found.disk):
        yield f"disk  {_disk_text(found.disk)}"


def _disk_text(disk: DiskFacts) -> str:
    """Where the bytes come from, in a line. Empty: nothing is known."""
    where = " on ".join(one for one in (disk.file_system, disk.kind) if one)
    known = _figures(
        ("", disk.read_mb_per_s, "{:.1f} MB/s read"),
        ("", disk.files_per_s, "{:.0f} files/s"),
        ("", None if disk.mean_file_bytes is None else disk.mean_file_bytes / 1e3, "{:.0f} kB a file"),
        ("", disk.page_cache_pct, "{:.0f} % from memory"),
    )
    return ", ".join([where] * bool(where) + [said for _, said in known])


# --- all of a report ----------------------------------------------------------------------------------------------


def other_sections(report: Report) -> Iterator[Section]:
    """What pages show below the step and the advice."""
    diagnosis = report.diagnosis
    yield from _list("What an earlier report predicted for this run", map(check_text, report.report_card))
    yield from pipeline_sections(diagnosis)
    yield from time_sections(diagnosis.measurements)
    yield from measured_sections(diagnosis.measurements)
    yield Section(title="Run and machine", form="pairs", rows=_run_rows(report))


def _run_rows(report: Report) -> list[Row]:
    """(what, value) of the run and its machine, as far as they are known."""
    facts, where = report.diagnosis.measurements.facts, report.environment
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
