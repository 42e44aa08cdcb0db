"""Figures over some steps: frozen values, units in the names, None: not measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

Confidence = Literal["high", "medium", "low"]

MIN_STEPS = 10
"""With fewer steps there is no verdict."""
MANY_STEPS, SOME_STEPS = 200, 50
"""Steps from which figures are trusted highly, and at all."""
LOST_SHARE = 0.1
"""Share of steps without a device measurement from which figures are not trusted."""


Sums = TypeVar("Sums", bound="Additive")
T = TypeVar("T")


@dataclass
class Additive:
    """Sums that only grow: the sum between two times is the difference of their values then."""

    def __add__(self: Sums, other: Sums) -> Sums:
        return type(self)(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def __sub__(self: Sums, other: Sums) -> Sums:
        return type(self)(**{name: value - vars(other)[name] for name, value in vars(self).items()})


def tagged(tag: str) -> Any:
    """A field that is logged under ``tag``. The tables of tags are made of these."""
    return field(default=None, metadata={"tag": tag})


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Figures of the loaders, seen from outside or counted by themselves. Linux; elsewhere None."""

    workers_on_cpu_pct: float | None = tagged("feed_workers/on_cpu_pct")
    """Share of the workers' time on a CPU, 0 to 100, mean over workers. High while starved: decoding, augmenting."""
    workers_run_queue_pct: float | None = tagged("feed_workers/run_queue_pct")
    """Share of the workers' time ready to run without a CPU. High: more workers or threads than CPUs."""
    workers_blocked_pct: float | None = tagged("feed_workers/blocked_pct")
    """The rest. High while starved: disk, network, locks. High while fed: workers with nothing to do."""
    read_mb_per_s: float | None = tagged("feed_workers/read_mb_per_s")
    """Megabytes per second that all workers read, from wherever."""
    disk_mb_per_s: float | None = tagged("feed_workers/disk_mb_per_s")
    """Megabytes per second that storage gave to all workers. Near read_mb_per_s: nothing came from the page cache."""
    page_cache_pct: float | None = tagged("feed_workers/page_cache_pct")
    """Share of those bytes that no disk had to give, 0 to 100. Low while blocked: stage, cache or pack."""
    connections: float | None = None
    """Connections over the network that worker processes made, all together; mean of some counts. Above 0 while
    blocked: they wait for another machine, such as an object store."""

    queue_ready: float | None = tagged("feed_queue/ready")
    """Batches ready when the loop asked for one, mean. Near 0 while starved; near the capacity: the loader is ahead."""
    queue_capacity: float | None = tagged("feed_queue/capacity")
    """Batches that the loader may hold ready."""
    head_of_line_pct: float | None = tagged("feed_queue/head_of_line_pct")
    """Share of the waiting lost to the order of batches, 0 to 100: time with a later batch at hand, times the share of
    workers that had nothing to do for it. From 25: ``in_order=False``, or deeper."""
    handover_pct: float | None = tagged("feed_queue/handover_pct")
    """Share of the waiting that began with batches ready, and none of it lost to their order, 0 to 100. From 80: it is
    handing batches over to the training process that takes the time, so send fewer and smaller tensors, or threads."""
    pin_lag_ms: float | None = None
    """Mean time of waiting for a batch while batches were made, but none of them pinned. High: pinning limits."""
    produced_per_s: float | None = tagged("feed_queue/produced_per_s")
    """Batches per second that the loader made, without those that were only taken from a full queue."""

    cpu_pressure_pct: float | None = tagged("feed_pressure/cpu_pct")
    """Share of time in which some task of the container, or of the machine, waited for a CPU (PSI "some")."""
    io_pressure_pct: float | None = tagged("feed_pressure/io_pct")
    """Share of time in which some task waited for reading or writing (PSI "some")."""
    memory_pressure_pct: float | None = tagged("feed_pressure/memory_pct")
    """Share of time in which some task waited for memory (PSI "some")."""
    throttled_pct: float | None = tagged("feed_pressure/throttled_pct")
    """Share of the scheduler's periods in which the cgroup had used up its CPU quota. High: fewer workers, or quota."""

    cache_hit_pct: float | None = tagged("feed/cache_hit_pct")
    """Share of reads since the last window that FastDataModule(cache=...) answered, 0 to 100, over all processes of the
    node. Low after the first epoch: the cache is full."""


@dataclass(frozen=True, kw_only=True)
class GpuStats:
    """Means over the samples of a window. None: this GPU or driver does not say."""

    util_pct: float | None = tagged("feed_gpu/util_pct")
    """Share of time in which some kernel ran, 0 to 100. A rank that spins waiting for its peers reads 100."""
    sm_pct: float | None = tagged("feed_gpu/sm_pct")
    """Share of the multiprocessors that were busy, 0 to 100; from Hopper on. Low beside a high util_pct: small work."""
    mem_used_mib: float | None = tagged("feed_gpu/mem_used_mib")
    """Device memory in use by all processes, MiB."""
    power_w: float | None = tagged("feed_gpu/power_w")
    """Power drawn, watts. Far below the limit of the board: the GPU has little to do."""
    pcie_rx_mb_per_s: float | None = tagged("feed_gpu/pcie_rx_mb_per_s")
    """Data received over PCIe, MB/s. Near the speed of the link: send less."""


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """Cross-rank starvation. A starved rank makes the others wait in their gradient exchange.

    Per step the largest value over the ranks counts, never the mean.
    """

    world_size: int
    """Number of ranks."""
    steps: int
    """Steps that all ranks measured."""
    max_data_idle_ms: float | None = tagged("feed_dist/max_data_idle_ms")
    """Mean over the steps of the longest wait of any rank. High with a low starved_pct: another rank is starved."""
    slow_rank: int | None = tagged("feed_dist/slow_rank")
    """The rank that waits longest in the mean, where it is 10 % of a step above the median. Absent: balanced."""
    starved_pct: float | None = tagged("feed_dist/starved_pct")
    """Sum of the longest waits over sum of the longest steps, 0 to 100: what waiting for data costs all together."""
    amplification: float | None = None
    """Sum of the longest waits over the sum of the mean waits, 1 to world_size: what all pay over what a rank waits
    itself. High: ranks wait in turn, or one for all. Absent: nobody waits."""
    data_idle_ms_by_rank: tuple[float, ...] = ()
    """Mean wait of each rank."""


@dataclass(frozen=True, kw_only=True)
class StarvationStats:
    """The parts of the steps of a window. Shares are sums divided by sums, never means of ratios.

    A step is ``other + data_idle + h2d + compute``, exactly. On a device these are times between events on its compute
    stream, so work queued ahead hides waiting; on the CPU they are the host's.
    """

    steps: int
    """Steps in the window that count: not the first of an epoch, nor one after a validation."""
    lost_steps: int = 0
    """Steps that were not measured: the host was too far ahead of the device, two events could not be compared, or the
    device failed."""
    confidence: Confidence
    """Trust in the figures: by the number of steps, the clock, and whether the warm-up is among them."""

    starved_pct: float | None = tagged("feed/starved_pct")
    """Share of step time the device waited for data, 0 to 100. Near 0: fed. From 20: the loader is the limit."""
    starved_low_pct: float | None = None
    """Lower end of the 95 % interval of starved_pct, by a block bootstrap."""
    starved_high_pct: float | None = None
    """Upper end of that interval."""
    input_pct: float | None = None
    """Share of step time spent on data and exposed copying, 0 to 100. High beside a low starved_pct: slow copies."""
    speedup_if_free: float | None = tagged("feed/speedup_if_free")
    """Step time over step time without waiting for data, 1 or more. An estimate: something else may limit next."""
    prefetch_active: bool | None = tagged("feed/prefetch_active")
    """PrefetchCallback copies ahead: logged as 1 or 0. None: there is no such callback."""

    step_ms: float | None = tagged("feed_step/step_ms")
    """Mean step, from the end of one to the end of the next. Low is fast."""
    step_low_ms: float | None = None
    """Lower end of the 95 % interval of step_ms, by the same bootstrap."""
    step_high_ms: float | None = None
    """Upper end of that interval."""
    compute_ms: float | None = tagged("feed_step/compute_ms")
    """Mean time from the batch being on the device to the end of the step. Near step_ms: compute-bound."""
    forward_ms: float | None = tagged("feed_step/forward_ms")
    """Of compute_ms: ``training_step`` (mean). Absent: not known, as with manual optimisation."""
    backward_ms: float | None = tagged("feed_step/backward_ms")
    """Of compute_ms: the backward pass, where the gradients of several ranks are exchanged, too."""
    optimizer_ms: float | None = tagged("feed_step/optimizer_ms")
    """Of compute_ms: clipping gradients, the optimizer's step, and setting gradients to zero."""
    h2d_ms: float | None = tagged("feed_step/h2d_ms")
    """Mean time of the transfer to the device, as far as it is exposed, with hooks. High: pin, prefetch, shrink. With
    ``backend="nvjpeg"`` it is first of all decoding."""
    data_idle_ms: float | None = tagged("feed_step/data_idle_ms")
    """Mean time the device had nothing to do because the host was blocked in the loader. High: load faster. Where DALI
    works on the GPU, its decoding there is part of it."""
    other_ms: float | None = tagged("feed_step/other_ms")
    """Mean time between steps: callbacks, logging, checkpoints. High: look there, not at the loader."""

    next_wait_ms: float | None = tagged("feed_host/next_wait_ms")
    """Mean time the host was blocked in ``next(loader)``. High with a low data_idle_ms: slack, not starvation."""
    hidden_wait_ms: float | None = tagged("feed_host/hidden_wait_ms")
    """The part of next_wait_ms during which the device still had work. 0 on the CPU, where nothing is queued ahead."""
    epoch_start_s: float | None = tagged("feed_epoch/start_s")
    """Mean time from the start of an epoch to its first batch. High: workers are started again each epoch."""

    @property
    def interval_pct(self) -> tuple[float, float] | None:
        """The 95 % interval of starved_pct; None: not known."""
        low, high = self.starved_low_pct, self.starved_high_pct
        return None if low is None or high is None else (low, high)


@dataclass(frozen=True)
class LoaderSteps:
    """The steps on the batches of one of several loaders that are drawn from one after the other."""

    name: str
    """Its key in the dict of loaders, else ``dataloader_idx_0`` and so on, as Lightning has it in names of metrics."""
    steps: int
    """Steps on its batches."""
    step_ms: float
    """Mean step."""
    data_idle_ms: float
    """Mean time the device had nothing to do because the host was blocked in this loader."""


def grade_confidence(*, steps: int, lost: int, settled: bool, trusted_clock: bool) -> Confidence:
    """The trust in figures.

    Args:
        steps: steps measured.
        lost: steps that were to be measured and were not.
        settled: the warm-up, in which a full queue hides a slow loader, is not among the steps.
        trusted_clock: device events, or the host's clock where it computes itself.
    """
    if not settled or not trusted_clock or steps < SOME_STEPS or lost > LOST_SHARE * (steps + lost):
        return "low"
    return "high" if steps >= MANY_STEPS else "medium"


Which = Literal["core", "all"]
"""``core``: the speed of training and its waits. ``all``: possible reasons, too."""

_CORE = (
    *("starved_pct", "prefetch_active", "step_ms", "compute_ms", "h2d_ms", "data_idle_ms", "other_ms", "start_s"),
    *("slow_rank", "util_pct"),
)
"""Names of the figures that are always logged, whatever the section before the ``/``."""


def tag_table() -> dict[str, str]:
    """Every tag that can be logged, and the name of the field that it shows."""
    return {
        one.metadata["tag"]: one.name
        for kind in (StarvationStats, RankStats, LoaderStats, GpuStats)
        for one in fields(kind)
        if one.metadata
    }


def to_tags(
    stats: StarvationStats,
    gpu: GpuStats | None = None,
    loaders: LoaderStats | None = None,
    ranks: RankStats | None = None,
) -> dict[str, float]:
    """The measured figures by tag. What was not measured is absent, so that 0 always means a measured zero."""
    known = [value for value in (stats, gpu, loaders, ranks) if value is not None]
    found = {one.metadata["tag"]: vars(value)[one.name] for value in known for one in fields(value) if one.metadata}
    return {tag: float(figure) for tag, figure in found.items() if figure is not None}


def choose_tags(tags: dict[str, T], which: Which) -> dict[str, T]:
    """The tags that are logged."""
    return {tag: value for tag, value in tags.items() if which == "all" or tag.rpartition("/")[2] in _CORE}


LOOPS = {"validate": "feed_val", "test": "feed_test", "predict": "feed_predict"}
"""Stage -> the section of its tags."""
LOOP_FIELDS = ("starved_pct", "step_ms", "compute_ms", "h2d_ms", "data_idle_ms", "other_ms", "epoch_start_s")
"""Fields of StarvationStats that are logged of a validation, test or prediction: ``feed_val/step_ms`` and so on."""


def loop_tags(stage: str, stats: StarvationStats, by_loader: Sequence[LoaderSteps] = ()) -> dict[str, float]:
    """The measured figures of a validation, test or prediction by tag; of several loaders also each by its name."""
    section = LOOPS[stage]
    found = {name.removeprefix("epoch_"): vars(stats)[name] for name in LOOP_FIELDS}
    tags = {f"{section}/{name}": float(value) for name, value in found.items() if value is not None}
    for one in by_loader:
        tags |= {f"{section}/{one.name}/step_ms": one.step_ms, f"{section}/{one.name}/data_idle_ms": one.data_idle_ms}
    return tags


def custom_scalar_layout(which: Which) -> dict[str, Any]:
    """Charts for ``SummaryWriter.add_custom_scalars``: waiting for data, then the parts of a step.

    TensorBoard cannot stack, and colours lines by run: the parts of several runs in one chart are hard to tell apart.
    So each part has its chart, with one line for each run.
    """
    parts = {
        "whole step": "step_ms",
        "waiting for data": "data_idle_ms",
        "compute": "compute_ms",
        "copy to device": "h2d_ms",
        "other": "other_ms",
    }
    layout: dict[str, Any] = {
        "lightning_feed": {"waiting for data (% of the step)": ["Multiline", ["feed/starved_pct"]]},
        "lightning_feed: parts of the step": {
            f"{words} (ms)": ["Multiline", [f"feed_step/{name}"]] for words, name in parts.items()
        },
    }
    if which == "all":
        layout["lightning_feed: host, workers, queue"] = {
            "waiting of the host (ms)": ["Multiline", ["feed_host/next_wait_ms", "feed_host/hidden_wait_ms"]],
            "time of the workers (%)": [
                "Multiline",
                ["feed_workers/on_cpu_pct", "feed_workers/run_queue_pct", "feed_workers/blocked_pct"],
            ],
            "batches ready": ["Multiline", ["feed_queue/ready", "feed_queue/capacity"]],
        }
    return layout
