"""Measurements of runs that were not made: steps of 100 ms, unless told otherwise."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning_feed.measure.experiment_results import ExperimentResults
from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.measure.stats import LoaderStats, StarvationStats
from lightning_feed.verdict.diagnosis import Note, NoteKind

ROOM = {"num_workers": 2, "usable_cpus": 8, "prefetch_factor": 2, "map_style": True, "tensors": 2}
BUSY = {"workers_on_cpu_pct": 90.0, "workers_run_queue_pct": 5.0, "workers_blocked_pct": 5.0}
ASLEEP = {"workers_on_cpu_pct": 2.0, "workers_run_queue_pct": 1.0, "workers_blocked_pct": 97.0, "disk_mb_per_s": 0.0}
READY = {"handover_pct": 95.0, "queue_ready": 3.9, "queue_capacity": 4.0, **ASLEEP}
"""Batches lie ready, and taking them takes the time."""
GROUPS = ("loader", "batch", "host", "datamodule", "trainer")
"""Fields of LoopFacts that hold further facts."""


def kinds(notes: Iterable[Note]) -> list[str]:
    """The kinds of notes."""
    return [note.kind for note in notes]


def figures_of(kind: NoteKind, notes: Iterable[Note]) -> dict[str, Any]:
    """The figures and names of the first note of a kind."""
    note = next(note for note in notes if note.kind == kind)
    return note.figures | note.names


def under(limit: float) -> float:
    """A value that is slightly below a threshold."""
    return 0.998 * limit


def changed_facts(facts: LoopFacts, **changes: Any) -> LoopFacts:
    """Facts with other values, each by the name of its field, whichever group it belongs to."""
    for name, value in changes.items():
        groups = [group for group in GROUPS if name in vars(getattr(facts, group))]
        if groups:
            value = replace(getattr(facts, groups[0]), **{name: value})
        facts = replace(facts, **{groups[0] if groups else name: value})
    return facts


def loop_facts(**values: Any) -> LoopFacts:
    """Facts of which only these are known, each by the name of its field."""
    return changed_facts(LoopFacts(), **values)


def measured(
    *,
    data: float = 40.0,
    copy: float = 0.0,
    other: float = 0.0,
    step: float = 100.0,
    stats: dict[str, Any] | None = None,
    loaders: dict[str, Any] | None = None,
    experiments: dict[str, Any] | None = None,
    hooks: Any = (),
    ranks: Any = None,
    wall: Any = None,
    **facts: Any,
) -> Measurements:
    """What a fit with such steps would have measured; ``facts`` are those of ``LoopFacts`` and its groups."""
    figures: dict[str, Any] = {
        "steps": 412,
        "confidence": "high",
        "step_ms": step,
        "other_ms": other,
        "data_ms": data,
        "copy_ms": copy,
        "compute_ms": step - data - copy - other,
        "starved_pct": 100 * data / step,
        "input_pct": 100 * (data + copy) / step,
        "next_wait_ms": data,
        "hidden_wait_ms": 0.0,
    }
    return Measurements(
        stats=StarvationStats(**(figures | (stats or {}))),
        facts=loop_facts(**(ROOM | facts)),
        loaders=LoaderStats(**(loaders or {})),
        experiments=ExperimentResults(**(experiments or {})),
        diagnosed=experiments is not None,
        hooks=tuple(hooks),
        ranks=ranks,
        wall=wall,
    )
