"""What was found beside the verdict, as small tables of text: for Markdown and HTML alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_feed.watch.experiments.results import DiskFacts, ExperimentResults, FunctionCost, KeyUse
from lightning_feed.watch.reports.wall_text import compute_parts, loop_parts
from lightning_feed.watch.stats import LoaderStats, RankStats
from lightning_feed.watch.verdict.diagnosis import Measurements
from lightning_feed.watch.verdict.shares import plural


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text. The first column names; the others are figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(measured: Measurements) -> Iterator[Table]:
    """A table for each kind of thing that was measured; none for what was not."""
    yield from _run(measured)
    if measured.hooks:
        rows = tuple((one.name, f"{one.ms_per_step:.2f}") for one in measured.hooks)
        yield Table(title="Slowest hooks", header=("hook or logger", "ms a step"), rows=rows)
    if measured.ranks is not None:
        yield from _ranks(measured.ranks)
    loaders = tuple(_loader_rows(measured.loaders))
    if loaders:
        yield Table(title="Loader and workers during the fit", header=("", ""), rows=loaders)
    if measured.experiments is not None:
        yield from _experiments(measured.experiments)


def _run(measured: Measurements) -> Iterator[Table]:
    """Where the time of the run goes, and what lies inside computing and validation."""
    wall, found = measured.wall, measured.validation
    if wall is not None and wall.wall_s > 0:
        rows = [(one.name, f"{one.seconds:.2f}", f"{100 * one.seconds / wall.wall_s:.1f}") for one in wall.parts]
        title = f"Where {wall.wall_s:.1f} s of wall time go"
        yield Table(title=title, header=("part of the run", "s", "%"), rows=tuple(rows))
    inside = tuple((name, f"{ms:.2f}") for name, ms in compute_parts(measured.stats))
    if inside:
        yield Table(title="Inside compute", header=("", "ms a step"), rows=inside)
    if found is not None and found.stats.step_ms is not None:
        parts = tuple((name, f"{ms:.2f}") for name, ms in loop_parts(found) if ms is not None)
        yield Table(title=f"A validation step of {found.stats.step_ms:.2f} ms", header=("", "ms"), rows=parts)
    by_loader = measured.by_loader or (found.by_loader if found is not None else ())
    if by_loader:
        each = tuple((one.name, str(one.steps), f"{one.step_ms:.2f}", f"{one.data_idle_ms:.2f}") for one in by_loader)
        yield Table(title="Loader by loader", header=("loader", "steps", "ms a step", "waiting for data"), rows=each)


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


def disk_text(disk: DiskFacts) -> str:
    """Where the bytes come from, in a line. Empty: nothing is known."""
    size = None if disk.mean_file_bytes is None else disk.mean_file_bytes / 1e3
    known = (
        " on ".join(one for one in (disk.file_system, disk.kind) if one),
        _said(disk.read_mb_per_s, "{:.1f} MB/s read"),
        _said(disk.files_per_s, "{:.0f} files/s"),
        _said(size, "{:.0f} kB a file"),
        _said(disk.page_cache_pct, "{:.0f} % from memory"),
    )
    return ", ".join(one for one in known if one)


def code_places(functions: Sequence[FunctionCost]) -> list[tuple[str, float]]:
    """(``Birds.__getitem__ (birds.py:41), calling ColorJitter``, milliseconds a batch)."""
    places = []
    for one in functions:
        calls = f", calling {one.calls}" if one.calls else ""
        places.append((f"{one.name} ({Path(one.file).name}:{one.line}){calls}", one.ms_per_batch))
    return places


def _ranks(ranks: RankStats) -> Iterator[Table]:
    if not ranks.data_idle_ms_by_rank:
        return
    rows = tuple(
        (f"rank {rank}{' (the slow one)' if rank == ranks.slow_rank else ''}", f"{ms:.2f}")
        for rank, ms in enumerate(ranks.data_idle_ms_by_rank)
    )
    yield Table(title="Ranks", header=("", "waits for data, ms a step"), rows=rows)


def _loader_rows(loaders: LoaderStats) -> Iterator[tuple[str, str]]:
    rows = (
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
    for name, value, form in rows:
        if value is not None:
            yield name, form.format(value)


def _experiments(found: ExperimentResults) -> Iterator[Table]:
    if found.costs:
        rows = tuple((one.name, f"{one.cpu_ms:.3f}", f"{one.wall_ms:.3f}") for one in found.costs)
        yield Table(title="What one sample costs", header=("", "CPU ms", "wall ms"), rows=rows)
    if found.functions:
        places = tuple((place, f"{ms:.1f}") for place, ms in code_places(found.functions))
        yield Table(title="Where in your code a batch is made", header=("", "ms a batch"), rows=places)
    if found.worker_scaling:
        spread = {workers: f"{low:.2f} to {high:.2f}" for workers, low, high in found.worker_spread}
        scaling = tuple(
            (plural(workers, "worker"), f"{per_s:.2f}", spread.get(workers, ""))
            for workers, per_s in found.worker_scaling
        )
        yield Table(title="Numbers of workers that were tried", header=("", "batches/s", "tried again"), rows=scaling)
    if found.keys:
        words = {True: "yes", False: "never", None: "not known"}
        keys = tuple((place, f"{size / 1e3:,.1f}", words[used]) for place, size, used in batch_parts(found.keys))
        yield Table(title="Parts of a batch", header=("", "kB a batch", "used by the model"), rows=keys)
    machine = tuple(_machine_rows(found))
    if machine:
        yield Table(title="Disk, batches and copies", header=("", ""), rows=machine)
    if found.left_out:
        yield Table(title="Experiments that were left out", header=("", "why"), rows=found.left_out)


def _machine_rows(found: ExperimentResults) -> Iterator[tuple[str, str]]:
    if found.disk is not None and disk_text(found.disk):
        yield "files", disk_text(found.disk)
    for name, value, form in (
        ("copy, pinned", found.pinned_gb_per_s, "{:.1f} GB/s"),
        ("copy, pageable", found.pageable_gb_per_s, "{:.1f} GB/s"),
        ("one batch to the device", found.copy_ms, "{:.2f} ms"),
        ("start of the loader", found.loader_start_s, "{:.2f} s"),
        ("samples of a batch, in one process", found.samples_ms, "{:.1f} ms"),
        ("collating them", found.collate_ms, "{:.1f} ms"),
        ("taking a batch from a worker", found.hand_over_ms, "{:.2f} ms"),
        ('the same with "file_system"', found.hand_over_file_system_ms, "{:.2f} ms"),
    ):
        if value is not None:
            yield name, form.format(value)


def _said(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
