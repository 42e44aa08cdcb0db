"""Names under which figures are logged, and how TensorBoard lays them out. The table comes from the dataclasses."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

from lightning_feed.watch.nvml import GpuStats
from lightning_feed.watch.stats import LoaderStats, LoaderSteps, RankStats, StarvationStats

Which = Literal["core", "all"]
"""``core``: what tells how fast training is, and what it waits for. ``all``: what may say why, too."""

STACK = {
    "feed_stack/0_pct": (),
    "feed_stack/1_compute_pct": ("compute_ms",),
    "feed_stack/2_step_pct": ("compute_ms", "h2d_ms", "data_idle_ms", "other_ms"),
}
"""Tag -> the parts of a step that it is the share of. One chart of TensorBoard: computing, between 0 and the step."""

_CORE = (
    *("starved_pct", "prefetch_active", "step_ms", "compute_ms", "h2d_ms", "data_idle_ms", "other_ms", "start_s"),
    *("slow_rank", "util_pct"),
)
"""Names of the figures that are always logged, whatever the section before the ``/``."""


def tag_table() -> dict[str, str]:
    """Every tag that can be logged, and the name of the field that it shows."""
    table = {
        one.metadata["tag"]: one.name
        for kind in (StarvationStats, RankStats, LoaderStats, GpuStats)
        for one in fields(kind)
        if one.metadata
    }
    return table | {tag: f"share of {' + '.join(parts)}" if parts else "0" for tag, parts in STACK.items()}


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
    parts = {name: getattr(stats, name) for name in STACK["feed_stack/2_step_pct"]}
    if None not in parts.values() and stats.step_ms:
        for tag, names in STACK.items():
            tags[tag] = 100 * sum(parts[name] for name in names) / sum(parts.values())
    return tags


def choose_tags(tags: dict[str, float], which: Which, *, tensorboard: bool) -> dict[str, float]:
    """Those that a logger is given: ``feed_stack`` is for TensorBoard alone."""
    return {
        tag: value
        for tag, value in tags.items()
        if (tensorboard if tag.startswith("feed_stack/") else which == "all" or tag.rpartition("/")[2] in _CORE)
    }


LOOPS = {"validate": "feed_val", "test": "feed_test", "predict": "feed_predict"}
"""Stage -> the section of its tags."""
LOOP_FIELDS = ("starved_pct", "step_ms", "compute_ms", "h2d_ms", "data_idle_ms", "other_ms", "epoch_start_s")
"""Fields of StarvationStats that are logged of a validation, test or prediction: ``feed_val/step_ms`` and so on."""


def loop_tags(stage: str, stats: StarvationStats, by_loader: Sequence[LoaderSteps] = ()) -> dict[str, float]:
    """The measured figures of a validation, test or prediction by tag; of several loaders also each by its name."""
    section = LOOPS[stage]
    found = {name.removeprefix("epoch_"): getattr(stats, name) for name in LOOP_FIELDS}
    tags = {f"{section}/{name}": float(value) for name, value in found.items() if value is not None}
    for one in by_loader:
        tags |= {f"{section}/{one.name}/step_ms": one.step_ms, f"{section}/{one.name}/data_idle_ms": one.data_idle_ms}
    return tags


def custom_scalar_layout(which: Which) -> dict[str, Any]:
    """What ``SummaryWriter.add_custom_scalars`` takes: how much of a step computes, then its parts."""
    zero, compute, step = STACK
    logged = choose_tags(dict.fromkeys(tag_table(), 0.0), which, tensorboard=True)
    charts = {
        "step (%): computing below the line, lost above it": ["Margin", [compute, zero, step]],
        "waiting for data (% of the step)": ["Multiline", ["feed/starved_pct"]],
        "parts of the step (ms)": ["Multiline", [tag for tag in logged if tag.startswith("feed_step/")]],
    }
    if which == "all":
        charts |= {
            "waiting of the host (ms)": ["Multiline", ["feed_host/next_wait_ms", "feed_host/hidden_wait_ms"]],
            "time of the workers (%)": [
                "Multiline",
                ["feed_workers/on_cpu_pct", "feed_workers/run_queue_pct", "feed_workers/blocked_pct"],
            ],
            "batches ready": ["Multiline", ["feed_queue/ready", "feed_queue/capacity"]],
        }
    return {"lightning_feed": charts}
