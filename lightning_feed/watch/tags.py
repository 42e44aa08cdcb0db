"""Names under which figures are logged, and how TensorBoard lays them out. The table comes from the dataclasses."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lightning_feed.watch.nvml import GpuStats
from lightning_feed.watch.stats import LoaderStats, LoaderSteps, RankStats, StarvationStats

STACK = {
    "feed_stack/1_compute_ms": ("compute_ms",),
    "feed_stack/2_plus_h2d_ms": ("compute_ms", "h2d_ms"),
    "feed_stack/3_plus_data_ms": ("compute_ms", "h2d_ms", "data_idle_ms"),
    "feed_stack/4_plus_other_ms": ("compute_ms", "h2d_ms", "data_idle_ms", "other_ms"),
}
"""Cumulative parts of a step. Drawn over each other they are a stack, for which TensorBoard has no chart."""


def tag_table() -> dict[str, str]:
    """Every tag that can be logged, and the name of the field that it shows."""
    table = {
        one.metadata["tag"]: one.name
        for kind in (StarvationStats, RankStats, LoaderStats, GpuStats)
        for one in fields(kind)
        if one.metadata
    }
    return table | {tag: " + ".join(parts) for tag, parts in STACK.items()}


def to_tags(
    stats: StarvationStats,
    gpu: GpuStats | None = None,
    loaders: LoaderStats | None = None,
    ranks: RankStats | None = None,
) -> dict[str, float]:
    """The measured figures by tag. What was not measured is absent, so that 0 always means a measured zero."""
    tags: dict[str, float] = {}
    for value in (stats, gpu, loaders, ranks):
        for one in fields(value) if value is not None else ():
            if one.metadata and getattr(value, one.name) is not None:
                tags[one.metadata["tag"]] = float(getattr(value, one.name))
    for tag, names in STACK.items():
        parts = [getattr(stats, name) for name in names]
        if None not in parts:
            tags[tag] = float(sum(parts))
    return tags


LOOPS = {"validate": "feed_val", "test": "feed_test", "predict": "feed_predict"}
"""Stage -> the section of its tags."""
LOOP_FIELDS = ("starved_pct", "step_ms", "compute_ms", "h2d_ms", "data_idle_ms", "other_ms", "epoch_start_s")
"""Fields of StarvationStats that are logged of a validation, test or prediction: ``feed_val/step_ms`` and so on."""


def loop_tags(stage: str, stats: StarvationStats, by_loader: Sequence[LoaderSteps] = ()) -> dict[str, float]:
    """The measured figures of a validation, test or prediction by tag; of several loaders also each by its name."""
    section = LOOPS[stage]
    found = {name: getattr(stats, name) for name in LOOP_FIELDS}
    tags = {f"{section}/{name}": float(value) for name, value in found.items() if value is not None}
    for one in by_loader:
        tags |= {f"{section}/{one.name}/step_ms": one.step_ms, f"{section}/{one.name}/data_idle_ms": one.data_idle_ms}
    return tags


def custom_scalar_layout() -> dict[str, Any]:
    """What ``SummaryWriter.add_custom_scalars`` takes: the step as a stack first, then the shares."""
    shown = [tag for tag in tag_table() if tag.startswith("feed_step/")]
    return {
        "lightning_feed": {
            "step, stacked (ms)": ["Multiline", list(STACK)],
            "share of the step (%)": ["Multiline", ["feed/starved_pct", "feed/input_pct"]],
            "parts of the step (ms)": ["Multiline", shown],
            "waiting of the host (ms)": ["Multiline", ["feed_host/next_wait_ms", "feed_host/hidden_wait_ms"]],
            "time of the workers (%)": [
                "Multiline",
                ["feed_workers/on_cpu_pct", "feed_workers/run_queue_pct", "feed_workers/blocked_pct"],
            ],
            "batches ready": ["Multiline", ["feed_queue/ready", "feed_queue/capacity"]],
        }
    }
