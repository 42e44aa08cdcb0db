"""The report as text for the console."""

from typing import Literal

from lightning_feed.errors import printable_lines
from lightning_feed.watch.experiments.results import ExperimentResults
from lightning_feed.watch.reports.road import in_rate, read_road, road_text
from lightning_feed.watch.reports.tables import batch_parts, code_places, disk_text
from lightning_feed.watch.reports.wall_text import compute_text, validation_text, wall_text
from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts
from lightning_feed.watch.verdict.shares import LOOP_WORDS, grade_of, in_ms, plural, shares_of, toy_sentence
from lightning_feed.watch.verdict.whole_run import share_text

COSTS_NAMED = 6
"""Costs of a sample that the console names, the largest first."""
CODE_NAMED = 3
"""Places in the user's code that the console names, the slowest first."""
NOISY_PCT = 10.0
"""Rates of the same setting that lie this far apart are worth a word."""
KEYS_NAMED = 6
"""Parts of a batch that a line names."""


def as_text(diagnosis: Diagnosis) -> str:
    """The verdict, how a step divides, why, and what to change; a line each. With experiments, the pipeline behind it.

    Of steps so short that Python takes most of them: one sentence, and what experiments found.
    """
    stats, of_run = diagnosis.stats, diagnosis.bottleneck in ("validation", "checkpoints")
    if diagnosis.bottleneck == "unknown" or stats.step_ms is None:
        lines = [f"FEED  no verdict: {next(iter(diagnosis.evidence), 'nothing was measured')}."]
    elif not of_run and (toy := toy_sentence(stats.step_ms)) is not None:
        lines = [f"FEED  {toy}"]
    else:
        lines = _verdict_lines(diagnosis, stats.step_ms)
    return printable_lines("\n".join(lines + _found(diagnosis)))


def _verdict_lines(diagnosis: Diagnosis, whole: float) -> list[str]:
    trust = f"confidence {diagnosis.confidence}, {plural(diagnosis.stats.steps, 'step')}"
    known = interval(diagnosis)
    if known is not None:
        trust = f"95 % CI {known}, {trust}"
    lines = [f"FEED  {headline(diagnosis)} ({trust})"]
    split = f"step {in_ms(whole, whole)} ms = "
    inside = {"compute": compute_text(diagnosis.stats)}
    split += " | ".join(
        f"{part_name(part)} {in_ms(ms, whole)}{inside.get(part, '')}" for part, ms in step_parts(diagnosis)
    )
    lines.append(f"{split}        {if_free(diagnosis)}".rstrip())
    lines += [one for one in (wall_text(diagnosis.measurements.wall), validation_text(diagnosis.measurements)) if one]
    cause = cause_text(diagnosis)
    if cause:
        lines.append(f"cause {cause}")
    if diagnosis.evidence:
        lines.append("why   " + "; ".join(diagnosis.evidence))
    for number, remedy in enumerate(diagnosis.remedies):
        predicted = remedy.predicted_step_ms
        gain = remedy.predicted_gain_pct
        then = "" if gain is None else f" (predicted: {gain:.0f} % less time)"
        then = then if predicted is None else f" (predicted step {in_ms(predicted, whole)} ms)"
        lead = "      " if number else "fix   "
        if remedy.where:
            lines.append(f"{lead}{remedy.where}")
            lead = "        "
        *first, last = remedy.code.split("\n")
        lines += [f"{lead}{one}" for one in first] + [f"{lead}{last}    # {remedy.why}{then}"]
    return lines + [f"not   {said}" for said in diagnosis.why_not] + [f"note  {said}" for said in diagnosis.notes]


def headline(diagnosis: Diagnosis) -> str:
    """The verdict in a line. Of what was not measured: ``no verdict``."""
    verdict, share = headline_parts(diagnosis)
    if not share:
        return verdict
    return f"{verdict}. {share}." if verdict.startswith("OK") else f"{verdict}: {share}"


def headline_parts(diagnosis: Diagnosis) -> tuple[str, str]:
    """The verdict, and the share of time that it rests on; empty where there is none to tell."""
    stats = diagnosis.stats
    if diagnosis.bottleneck in ("validation", "checkpoints"):
        return f"limited by {diagnosis.bottleneck}", share_text(diagnosis.measurements)
    if diagnosis.bottleneck == "unknown" or stats.starved_pct is None:
        return "no verdict", ""
    toy = toy_sentence(stats.step_ms)
    if toy is not None:
        return toy.rstrip("."), ""
    waits = _waits(diagnosis, stats.starved_pct)
    if diagnosis.bottleneck == "data":
        return diagnosis.grade, waits
    if diagnosis.bottleneck == "compute":
        return _OF_THE_STEP.get(diagnosis.cause, "limited by the step itself, not by data"), waits
    part, where = stats.other_ms, "between the steps"
    if diagnosis.bottleneck == "copy":
        part = stats.h2d_ms
        where = "in batch hooks" if diagnosis.device_type == "cpu" else "copying batches to the device"
    taken = 100 * (part or 0.0) / (stats.step_ms or 1.0)
    return f"{diagnosis.bottleneck}-bound", f"{taken:.0f} % of each step {where}; {waits}"


def _waits(diagnosis: Diagnosis, starved_pct: float) -> str:
    """The share of time that training waits for data, in words."""
    on_cpu, ranks = diagnosis.device_type == "cpu", diagnosis.measurements.ranks
    loop = LOOP_WORDS[diagnosis.measurements.facts.stage]
    shares, counted = shares_of(diagnosis.measurements), _counted(diagnosis)
    if counted == "ranks" and ranks is not None:
        whose = "one of them" if ranks.slow_rank is None else f"rank {ranks.slow_rank}"
        return f"all ranks wait {ranks.starved_pct:.0f} % of each step for the data of {whose}"
    if counted == "epochs" and shares is not None:
        if on_cpu:
            return f"{loop} waits for data {shares.epoch_pct:.0f} % of each epoch, for its first batch"
        return f"GPU idle {shares.epoch_pct:.0f} % of each epoch waiting for its first batch"
    if diagnosis.bottleneck == "compute":
        proven = shares is not None and shares.acquitted
        more = ", which faster loading would not change: the model alone takes as long as a step"
        return f"{starved_pct:.0f} % of time waiting for data{more if proven else ''}"
    if on_cpu:
        return f"{loop} waits for data {starved_pct:.0f} % of each step"
    return f"GPU idle {starved_pct:.0f} % of each step waiting for data"


_OF_THE_STEP = {
    "compute": "OK: limited by the model",
    "launch": "limited by Python, which hardly issues the GPU's work as fast as it is done",
}
"""Cause -> verdict, where it is neither data nor what lies between the steps."""


def interval(diagnosis: Diagnosis) -> str | None:
    """The 95 % interval of the share that the headline names, in percent; None where it is not known, or has no width.

    Only that of this rank's steps is: not what all ranks lose, nor what an epoch loses before its first batch.
    """
    low, high = diagnosis.stats.starved_low_pct, diagnosis.stats.starved_high_pct
    of_steps = _counted(diagnosis) == "steps" and diagnosis.bottleneck not in ("validation", "checkpoints")
    if low is None or high is None or not of_steps or f"{low:.0f}" == f"{high:.0f}":
        return None
    return f"{low:.0f}-{high:.0f}"


def if_free(diagnosis: Diagnosis) -> str:
    """What free data would give. Empty: not known."""
    faster = speedup(diagnosis)
    if faster is None:
        return ""
    starts = ", starts of epochs included" if _counted(diagnosis) == "epochs" else ""
    return f"if data were free: {faster:.2f} x as fast{starts}"


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


def step_parts(diagnosis: Diagnosis) -> tuple[tuple[str, float], ...]:
    """The parts of a step in milliseconds, as they follow each other on the device; they add up to the step. What was
    not measured is not among them.

    On a CPU nothing is copied: what little time is taken on the way there counts as ``other``.
    """
    stats, other = diagnosis.stats, diagnosis.stats.other_ms
    copy: tuple[tuple[str, float | None], ...] = (("h2d", stats.h2d_ms),)
    if diagnosis.device_type == "cpu" and diagnosis.bottleneck != "copy":
        copy, other = (), None if other is None else other + (stats.h2d_ms or 0.0)
    parts = (("compute", stats.compute_ms), ("data", stats.data_idle_ms), *copy, ("other", other))
    return tuple((part, ms) for part, ms in parts if ms is not None)


def part_name(part: str) -> str:
    """A part of a step as people call it."""
    return "copy to device" if part == "h2d" else part


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
    """What experiments found: the pipeline, and what beside it is worth a line."""
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
    lines += _making(found)
    if len(found.worker_scaling) > 1:
        size, unit = (found.batch_size, "samples/s") if found.batch_size else (1, "batches/s")
        tried = [f"{workers}: {in_rate(size * per_s)}" for workers, per_s in found.worker_scaling]
        noise = found.noise_pct
        again = "" if noise is None or noise < NOISY_PCT else f"; tried again, they differed by up to {noise:.0f} %"
        lines.append(f"tried num_workers {', '.join(tried)} {unit}, the loader alone{again}")
    if found.disk is not None and disk_text(found.disk):
        lines.append(f"disk  {disk_text(found.disk)}")
    unused = [
        f"{place} ({size / 1e3:.1f} kB a batch)" for place, size, used in batch_parts(found.keys) if used is False
    ]
    if unused:
        lines.append(f"keys  {_some(unused)}: never used by the model")
    unsure = [place for place, _, used in batch_parts(found.keys) if used is None]
    stepped = diagnosis.stats.steps > 0 or any(one.used is not None for one in found.keys)
    if unsure and stepped:  # without a step nobody could have used them
        lines.append(f"keys  {_some(unsure)}: use by the model unknown")
    return lines + [f"skip  {name}: {why}" for name, why in found.left_out]


def _making(found: ExperimentResults) -> list[str]:
    """What a batch takes in one process, and where in the user's code; what handing it over takes."""
    lines = []
    if found.samples_ms is not None and found.collate_ms is not None:
        lines.append(f"batch {found.samples_ms:.1f} ms for its samples, {found.collate_ms:.1f} ms to collate them")
    lines += [f"code  {place}: {ms:.1f} ms a batch" for place, ms in code_places(found.functions)[:CODE_NAMED]]
    if found.hand_over_ms is not None:
        saved = found.hand_over_file_system_ms
        other = "" if saved is None else f'; {saved:.1f} ms with the sharing strategy "file_system"'
        lines.append(f"IPC   {found.hand_over_ms:.1f} ms to take a batch from a worker{other}")
    return lines


def _some(names: list[str]) -> str:
    more = f" and {len(names) - KEYS_NAMED} more" if len(names) > KEYS_NAMED else ""
    return ", ".join(names[:KEYS_NAMED]) + more


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
    if facts.num_workers == 0:
        return f"num_workers=0, so loading and {LOOP_WORDS[facts.stage]} take turns"
    workers = plural(facts.num_workers, "worker")
    if facts.usable_cpus is None:
        return workers
    if crowded:  # workers do not get the CPUs that are left for them
        return f"{workers}, {plural(facts.usable_cpus, 'CPU')} may be used"
    return f"{workers} on {plural(facts.usable_cpus, 'CPU')}"
