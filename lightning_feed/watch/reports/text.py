"""The report as text for the console."""

import sys
from collections.abc import Callable
from typing import Literal

from lightning_feed.errors import printable_lines
from lightning_feed.watch.reports.road import in_rate, read_road, road_text
from lightning_feed.watch.reports.tables import disk_text
from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts
from lightning_feed.watch.verdict.shares import grade_of, shares_of
from lightning_feed.watch.verdict.units import in_ms

COSTS_NAMED = 6
"""Steps of a sample's way that the console names, the dearest first."""

Printer = Callable[[str], object]


def as_text(diagnosis: Diagnosis) -> str:
    """The verdict, how a step divides, why, and what to change; a line each. With experiments, the road behind it."""
    stats = diagnosis.stats
    if diagnosis.bottleneck == "unknown" or stats.step_ms is None:
        lines = [f"FEED  no verdict: {next(iter(diagnosis.evidence), 'nothing was measured')}."]
        return printable_lines("\n".join(lines + _found(diagnosis)))
    trust = f"confidence {diagnosis.confidence}, {stats.steps} steps"
    known = interval(diagnosis)
    if known is not None:
        trust = f"95 % CI {known[0]:.0f}-{known[1]:.0f}, {trust}"
    lines = [f"FEED  {headline(diagnosis)} ({trust})"]
    whole = stats.step_ms
    split = f"step {in_ms(whole, whole)} ms = "
    split += " | ".join(f"{name} {in_ms(ms, whole)}" for name, ms in step_parts(diagnosis))
    faster = speedup(diagnosis)
    if faster is not None:
        split += f"        if data were free: {faster:.2f} x"
    lines.append(split)
    cause = cause_text(diagnosis)
    if cause:
        lines.append(f"cause {cause}")
    if diagnosis.evidence:
        lines.append("why   " + "; ".join(diagnosis.evidence))
    for number, remedy in enumerate(diagnosis.remedies):
        predicted = remedy.predicted_step_ms
        then = "" if predicted is None else f" (predicted step {in_ms(predicted, whole)} ms)"
        lead = "      " if number else "fix   "
        if remedy.where:
            lines.append(f"{lead}{remedy.where}")
            lead = "        "
        lines.append(f"{lead}{remedy.code}    # {remedy.why}{then}")
    lines += [f"not   {said}" for said in diagnosis.why_not] + [f"note  {said}" for said in diagnosis.notes]
    return printable_lines("\n".join(lines + _found(diagnosis)))


def print_report(diagnosis: Diagnosis, printer: Printer | None) -> None:
    """Print the report, through ``printer`` where a progress bar would otherwise be drawn over.

    What the output cannot encode is escaped. Nothing is left in a buffer that cannot be written, as on a full disk or
    into a closed pipe: Python would fail with it once more when it ends, and make the exit code of a good run 120.
    """
    out = sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    text = as_text(diagnosis).encode(encoding, "backslashreplace").decode(encoding)
    if printer is not None:
        printer(text)
    elif out is sys.__stdout__ and out is not None and "write" not in vars(out):  # nobody listens in between
        out.flush()
        with open(out.fileno(), "w", encoding=encoding, closefd=False) as own:
            own.write(f"{text}\n")
    else:
        print(text, flush=True)


def headline(diagnosis: Diagnosis) -> str:
    """The verdict in a line. Of what was not measured: ``no verdict``."""
    stats = diagnosis.stats
    if diagnosis.bottleneck == "unknown" or stats.starved_pct is None:
        return "no verdict"
    on_cpu = diagnosis.device_type == "cpu"
    waits = f"GPU idle {stats.starved_pct:.0f} % of each step waiting for data"
    if on_cpu:
        waits = f"training waits for data {stats.starved_pct:.0f} % of each step"
    ranks, shares, counted = diagnosis.measurements.ranks, shares_of(diagnosis.measurements), _counted(diagnosis)
    if counted == "ranks" and ranks is not None:
        whose = "one of them" if ranks.slow_rank is None else f"rank {ranks.slow_rank}"
        waits = f"all ranks wait {ranks.starved_pct:.0f} % of each step for the data of {whose}"
    elif counted == "epochs" and shares is not None:
        waits = f"GPU idle {shares.epoch_pct:.0f} % of each epoch waiting for its first batch"
        if on_cpu:
            waits = f"training waits for data {shares.epoch_pct:.0f} % of each epoch, for its first batch"
    elif diagnosis.bottleneck == "compute" and shares is not None and shares.acquitted:
        waits += ", and the model alone takes as long as a step"
    if diagnosis.bottleneck in ("data", "compute"):
        kind = diagnosis.grade if diagnosis.bottleneck == "data" else f"compute-bound, {diagnosis.grade}"
        return f"{kind}: {waits}"
    return f"{diagnosis.bottleneck}-bound, {diagnosis.grade}: {waits}"


def interval(diagnosis: Diagnosis) -> tuple[float, float] | None:
    """The 95 % interval of the share that the headline names; None where it is not known.

    Only that of this rank's steps is: not what all ranks lose, nor what an epoch loses before its first batch.
    """
    low, high = diagnosis.stats.starved_low_pct, diagnosis.stats.starved_high_pct
    return None if low is None or high is None or _counted(diagnosis) != "steps" else (low, high)


def speedup(diagnosis: Diagnosis) -> float | None:
    """Times as fast if data were free, by the share that the headline names; None: not known."""
    measured, counted = diagnosis.measurements, _counted(diagnosis)
    stats, ranks, batches = measured.stats, measured.ranks, measured.facts.batches_per_epoch
    if counted == "steps":
        return stats.speedup_if_free
    if counted == "ranks":
        return _times(100.0, 100.0 - ((ranks.starved_pct if ranks is not None else None) or 0.0))
    step_ms, epochs = stats.step_ms or 0.0, batches or 0
    busy_ms = epochs * (step_ms - (stats.data_idle_ms or 0.0))
    return _times(1e3 * (stats.epoch_start_s or 0.0) + epochs * step_ms, busy_ms)


def _counted(diagnosis: Diagnosis) -> Literal["steps", "ranks", "epochs"]:
    """What the grade goes by: waiting in this rank's steps, in those of all ranks, or for an epoch's first batch."""
    measured = diagnosis.measurements
    starved, shares = measured.stats.starved_pct, shares_of(measured)
    if diagnosis.cause == "one rank" and measured.ranks is not None and measured.ranks.starved_pct is not None:
        return "ranks"
    if shares is None or starved is None or (diagnosis.cause != "epoch start" and grade_of(starved) == diagnosis.grade):
        return "steps"
    if shares.epoch_pct is not None and shares.epoch_pct == shares.data_pct:
        return "epochs"
    return "ranks" if shares.by_ranks and not shares.acquitted else "steps"


def _times(whole: float, part: float) -> float | None:
    return whole / part if part > 0 else None


def step_parts(diagnosis: Diagnosis) -> tuple[tuple[str, float | None], ...]:
    """The parts of a step in milliseconds, as they follow each other on the device; they add up to the step."""
    stats = diagnosis.stats
    return (
        ("compute", stats.compute_ms),
        ("data", stats.data_idle_ms),
        ("h2d", stats.h2d_ms),
        ("other", stats.other_ms),
    )


def cause_text(diagnosis: Diagnosis) -> str:
    """The cause with what the workers did meanwhile. Empty: the cause is not known, or the bottleneck says it all."""
    name = "" if diagnosis.cause in ("unknown", diagnosis.bottleneck) else diagnosis.cause
    said = ""
    if diagnosis.bottleneck == "data":
        cpus = _cpus(diagnosis.measurements.facts, crowded=diagnosis.cause == "oversubscribed")
        said = "; ".join(one for one in (_shares(diagnosis), cpus) if one)
    elif diagnosis.bottleneck == "framework":
        said = "; ".join(f"{one.name} {one.ms_per_step:.1f} ms a step" for one in diagnosis.measurements.hooks[:3])
    return f"{name}: {said}" if name and said else name or said


def _found(diagnosis: Diagnosis) -> list[str]:
    """What experiments found: the road, and what beside it is worth a line."""
    found = diagnosis.measurements.experiments
    if found is None:
        return []
    road = read_road(diagnosis)
    lines = ["", road_text(road)] if road is not None else []
    if found.costs:
        dearest = sorted(found.costs, key=lambda one: -one.wall_ms)
        named = [f"{one.name} {one.wall_ms:.2f} ms" for one in dearest[:COSTS_NAMED]]
        more = f", {len(dearest) - COSTS_NAMED} more" if len(dearest) > COSTS_NAMED else ""
        lines.append(f"costs {', '.join(named)}{more}: {sum(one.wall_ms for one in dearest):.2f} ms a sample")
    if len(found.worker_scaling) > 1:
        size, unit = (found.batch_size, "samples/s") if found.batch_size else (1, "batches/s")
        tried = [f"{workers}: {in_rate(size * per_s)}" for workers, per_s in found.worker_scaling]
        lines.append(f"tried num_workers {', '.join(tried)} {unit}, the loader alone")
    if found.disk is not None and disk_text(found.disk):
        lines.append(f"disk  {disk_text(found.disk)}")
    unused = [f"{one.name} ({one.bytes_per_batch / 1e3:.1f} kB a batch)" for one in found.keys if one.used is False]
    if unused:
        lines.append(f"keys  never used by the model: {', '.join(unused)}")
    unsure = [one.name for one in found.keys if one.used is None]
    stepped = diagnosis.stats.steps > 0 or any(one.used is not None for one in found.keys)
    if unsure and stepped:  # without a step nobody could have used them
        lines.append(f"keys  cannot be told whether the model uses: {', '.join(unsure)}")
    return lines + [f"skip  {name}: {why}" for name, why in found.left_out]


def _shares(diagnosis: Diagnosis) -> str:
    loaders = diagnosis.measurements.loaders
    shares = (
        ("on CPU", loaders.workers_on_cpu_pct),
        ("run queue", loaders.workers_run_queue_pct),
        ("blocked", loaders.workers_blocked_pct),
    )
    known = [f"{name} {pct:.0f} %" for name, pct in shares if pct is not None]
    return f"workers {', '.join(known)}" if known else ""


def _cpus(facts: LoopFacts, *, crowded: bool) -> str:
    if facts.num_workers is None:
        return ""
    workers = f"{facts.num_workers} worker{'' if facts.num_workers == 1 else 's'}"
    if facts.usable_cpus is None:
        return workers
    if crowded:  # workers do not get the CPUs that are left for them
        return f"{workers}, {facts.usable_cpus} CPU{'' if facts.usable_cpus == 1 else 's'} may be used"
    free = max(0, facts.usable_cpus - facts.num_workers)
    return f"{workers}, {free} of {facts.usable_cpus} CPUs free"
