"""Every remedy that could be printed for a project: its own loader, place and Trainer, with figures of slow runs."""

import re
from dataclasses import replace
from typing import Any

from verdict.cases import changed_facts

from lightning_feed.measure.experiment_results import ExperimentResults, TriedSetting
from lightning_feed.measure.measurements import HookTime, HostTimes, LoopFacts, Measurements
from lightning_feed.measure.stats import LoaderStats, StarvationStats
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Remedy

BUSY = {"workers_on_cpu_pct": 90.0, "workers_run_queue_pct": 5.0, "workers_blocked_pct": 5.0}
CROWDED = {"workers_on_cpu_pct": 20.0, "workers_run_queue_pct": 75.0, "workers_blocked_pct": 5.0}
ASLEEP = {"workers_on_cpu_pct": 2.0, "workers_run_queue_pct": 1.0, "workers_blocked_pct": 97.0}
READY = {"handover_pct": 95.0, "queue_ready": 3.9, "queue_capacity": 4.0, **ASLEEP}


def every_remedy(facts: LoopFacts) -> list[Remedy]:
    """The first of each way to set the same things: with two workers, and not with one, too."""
    kinds: dict[tuple[Any, str], Remedy] = {}
    for measured in _slow_runs(replace(facts, others_cpu_pct=None, host=HostTimes())):
        for remedy in decide(measured).remedies:
            kinds.setdefault((remedy.form, re.sub(r"=\w+", "", remedy.code)), remedy)
    return list(kinds.values())


def _tried(own: int, chosen: int) -> tuple[TriedSetting, ...]:
    def one(number: int, step_ms: float, **role: bool) -> TriedSetting:
        return TriedSetting(num_workers=number, step_ms=step_ms, shortest_ms=step_ms, longest_ms=step_ms, **role)

    return (one(own, 100.0, own=True), one(chosen, 60.0, chosen=True))


def _slow_runs(facts: LoopFacts) -> list[Measurements]:
    workers = facts.loader.num_workers or 0
    roomy, narrow = replace(facts, usable_cpus=workers + 2), replace(facts, usable_cpus=1)
    bar = HookTime(name="[Callback]RichProgressBar.on_train_batch_end", ms_per_step=50.0)  # with rich it is the default
    logging = HookTime(name="logger CSVLogger.log_metrics", ms_per_step=50.0)
    found: dict[str, Any] = {"loader_per_s": 10.0, "model_per_s": 100.0}
    fewer = {"tried": _tried(workers, max(1, workers // 2))} if workers > 1 else {}
    none = {"tried": _tried(workers, 0)}
    may_be_tried = facts.loader.map_style and facts.loader.count == 1
    more = {"tried": _tried(workers, workers + 2)} if may_be_tried else {}
    return [
        _run(roomy, data=60, loaders=BUSY, found=found | more),
        _run(narrow, data=60, loaders=CROWDED, found=found | fewer),
        _run(roomy, data=60, loaders=READY, found=found | none),
        _run(replace(roomy, batches_per_epoch=20), data=1, stats={"epoch_start_s": 4.0}, loaders=ASLEEP),
        _run(roomy, data=60, loaders={"head_of_line_pct": 90.0, **BUSY}),
        _run(changed_facts(roomy, log_every_n_steps=1), other=60, hooks=[logging]),
        *([_run(roomy, other=60, hooks=[bar])] if roomy.trainer.bar_refresh_rate else []),
    ]


def _run(
    facts: LoopFacts,
    *,
    data: float = 0.0,
    other: float = 0.0,
    stats: dict[str, Any] | None = None,
    loaders: dict[str, Any] | None = None,
    found: dict[str, Any] | None = None,
    hooks: list[HookTime] | None = None,
) -> Measurements:
    """Steps of 100 ms, measured well."""
    figures: dict[str, Any] = {
        "steps": 500,
        "confidence": "high",
        "step_ms": 100.0,
        "other_ms": other,
        "data_ms": data,
        "copy_ms": 0.0,
        "compute_ms": 100.0 - data - other,
        "starved_pct": data,
        "input_pct": data,
        "next_wait_ms": data,
        "hidden_wait_ms": 0.0,
    }
    return Measurements(
        stats=StarvationStats(**(figures | (stats or {}))),
        facts=facts,
        loaders=LoaderStats(**(loaders or {})),
        experiments=ExperimentResults(**(found or {})),
        diagnosed=found is not None,
        hooks=tuple(hooks or ()),
    )
