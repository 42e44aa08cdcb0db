"""Figures over some steps, as frozen values with units in their names. Figures that were not measured are None."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

Confidence = Literal["high", "medium", "low"]

MIN_STEPS = 10
"""Fewest steps for a verdict."""
MANY_STEPS = 200
SOME_STEPS = 50
"""Fewest steps for high confidence (``MANY_STEPS``) and for medium confidence (``SOME_STEPS``)."""
LOST_SHARE = 0.1
"""Figures are not trusted if more than this share of steps has no device measurement."""


Sums = TypeVar("Sums", bound="Additive")
T = TypeVar("T")


@dataclass
class Additive:
    """Sums that only grow, so that the difference of two states is the sum over the time between them."""

    def __add__(self: Sums, other: Sums) -> Sums:
        return type(self)(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def __sub__(self: Sums, other: Sums) -> Sums:
        return type(self)(**{name: value - vars(other)[name] for name, value in vars(self).items()})


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None if there is no whole."""
    return part / whole if whole else None


def tagged(tag: str) -> Any:
    """Return a dataclass field whose figure is logged under ``tag``. The tables of tags are built from these fields."""
    return field(default=None, metadata={"tag": tag})


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Figures of the loaders, observed from outside or counted by the loaders.

    Figures of workers and of pressure are known only on Linux; elsewhere they are None.
    """

    workers_on_cpu_pct: float | None = tagged("feed_workers/on_cpu_pct")
    """Share of the workers' time on a CPU, 0 to 100, mean over workers. High while training waits for data: workers
    decode or augment."""
    workers_run_queue_pct: float | None = tagged("feed_workers/run_queue_pct")
    """Share of the workers' time ready to run, but without a CPU. High: there are more workers or threads than CPUs."""
    workers_blocked_pct: float | None = tagged("feed_workers/blocked_pct")
    """Share of the workers' time neither on a CPU nor ready to run. High while training waits for data: workers wait
    for a disk, a network or locks. High while it does not wait: workers are idle."""
    read_mb_per_s: float | None = tagged("feed_workers/read_mb_per_s")
    """Megabytes per second that all workers read, from storage or from the page cache."""
    disk_mb_per_s: float | None = tagged("feed_workers/disk_mb_per_s")
    """Megabytes per second that all workers read from storage. Near read_mb_per_s: nothing came from the page cache."""
    page_cache_pct: float | None = tagged("feed_workers/page_cache_pct")
    """Share of the bytes read that came from the page cache, 0 to 100. Low while workers are blocked: stage or pack the
    files."""

    queue_ready: float | None = tagged("feed_queue/ready")
    """Mean number of batches ready when the loop asked for a batch. Near 0: training waits for data. Near the capacity:
    training is well fed."""
    queue_capacity: float | None = tagged("feed_queue/capacity")
    """Batches that the loader may hold ready."""
    head_of_line_pct: float | None = tagged("feed_queue/head_of_line_pct")
    """Share of the waiting lost to the order of batches, 0 to 100: time in which a later batch was ready, times the
    share of workers idle because of it. From 25: set ``in_order=False``, or prefetch more batches."""
    handover_pct: float | None = tagged("feed_queue/handover_pct")
    """Share of the waiting that began with batches ready and was not lost to their order, 0 to 100. From 80: handing
    batches over to the training process takes the time, so send fewer and smaller tensors, or use threads."""
    pin_lag_ms: float | None = None
    """Mean time waited for a batch while batches had been made, but none was pinned. High: pinning is the limit."""
    produced_per_s: float | None = tagged("feed_queue/produced_per_s")
    """Batches per second that the loader made. Batches taken from a full queue do not count."""

    cpu_pressure_pct: float | None = tagged("feed_pressure/cpu_pct")
    """Share of time in which some task of the container, or of the machine, waited for a CPU (PSI "some")."""
    io_pressure_pct: float | None = tagged("feed_pressure/io_pct")
    """Share of time in which some task waited for reading or writing (PSI "some")."""
    memory_pressure_pct: float | None = tagged("feed_pressure/memory_pct")
    """Share of time in which some task waited for memory (PSI "some")."""
    throttled_pct: float | None = tagged("feed_pressure/throttled_pct")
    """Share of scheduler periods in which the cgroup used up its CPU quota. High: use fewer workers, or a higher
    quota."""


@dataclass(frozen=True, kw_only=True)
class GpuStats:
    """Means over the samples of a window. Figures that this GPU or driver does not report are None."""

    util_pct: float | None = tagged("feed_gpu/util_pct")
    """Share of time in which some kernel ran, 0 to 100. A rank that spins waiting for its peers reads 100."""
    sm_pct: float | None = tagged("feed_gpu/sm_pct")
    """Share of the multiprocessors that were busy, 0 to 100; from Hopper on. Low beside a high util_pct: kernels are
    too small to fill the GPU."""
    mem_used_mib: float | None = tagged("feed_gpu/mem_used_mib")
    """Device memory in use by all processes, MiB."""
    power_w: float | None = tagged("feed_gpu/power_w")
    """Power drawn, watts. Far below the board's limit: the GPU has little to do."""
    pcie_rx_mb_per_s: float | None = tagged("feed_gpu/pcie_rx_mb_per_s")
    """Data that the GPU received over PCIe, MB/s. Near the speed of the link: send fewer bytes."""


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """Cross-rank starvation. A starved rank makes the others wait in their gradient exchange.

    In each step the largest value over all ranks counts, never the mean.
    """

    world_size: int
    """Number of ranks."""
    steps: int
    """Steps that all ranks measured."""
    max_data_ms: float | None = tagged("feed_dist/max_data_ms")
    """Longest wait of any rank, mean over the steps. High while this rank's starved_pct is low: another rank waits for
    data."""
    slow_rank: int | None = tagged("feed_dist/slow_rank")
    """The rank with the longest mean wait, if this wait is 10 % of a step above the median; None if ranks are
    balanced."""
    starved_pct: float | None = tagged("feed_dist/starved_pct")
    """Sum of the longest waits divided by the sum of the longest steps, 0 to 100: the share of time that all ranks
    together lose by waiting for data."""
    amplification: float | None = None
    """Sum of the longest waits divided by the sum of the mean waits, 1 to world_size. High: ranks wait in turn, or all
    wait for one rank. None if no rank waits."""
    data_ms_by_rank: tuple[float, ...] = ()
    """Mean wait of each rank."""


@dataclass(frozen=True, kw_only=True)
class StarvationStats:
    """The parts of the steps of a window. Shares are sums divided by sums, never means of ratios.

    A step is ``other + data + copy + compute``, exactly. On a device, these are times between events on its compute
    stream, so work queued ahead hides waiting; on the CPU, they are times of the host's clock. On a device, step times
    and waits for data are measured in every step; ``other``, ``copy`` and ``compute`` with its parts are measured in
    one step of eight.
    """

    steps: int
    """Number of counted steps: not the first of each epoch, nor the first after each validation."""
    warm_up_steps: int = 0
    """Further steps at the beginning of the run, left out because a full queue hides a slow loader at first."""
    lost_steps: int = 0
    """Steps that were not measured: the host was too far ahead of the device, two events could not be compared, or the
    device failed."""
    confidence: Confidence
    """Confidence in the figures: it depends on the number of steps, on the clock, and on whether the steps include the
    warm-up."""

    starved_pct: float | None = tagged("feed/starved_pct")
    """Share of step time in which the device waited for data, 0 to 100. Near 0: training is fed. From 20: the loader is
    the limit."""
    starved_low_pct: float | None = None
    """Lower end of the 95 % interval of starved_pct, by a block bootstrap."""
    starved_high_pct: float | None = None
    """Upper end of that interval."""
    input_pct: float | None = None
    """Share of step time spent waiting for data and for copies that computing does not hide, 0 to 100. High with a low
    starved_pct: copies are slow."""
    speedup_if_free: float | None = tagged("feed/speedup_if_free")
    """Step time divided by step time without waiting for data, 1 or more. An estimate, because another part may become
    the limit."""
    prefetch_active: bool | None = tagged("feed/prefetch_active")
    """True if PrefetchCallback copies ahead (logged as 1 or 0); None if there is no such callback."""

    step_ms: float | None = tagged("feed_step/step_ms")
    """Mean time of a step: from the end of one step to the end of the next, or on a device from fetch to fetch."""
    step_low_ms: float | None = None
    """Lower end of the 95 % interval of step_ms, by a block bootstrap."""
    step_high_ms: float | None = None
    """Upper end of that interval."""
    compute_ms: float | None = tagged("feed_step/compute_ms")
    """Mean time from the arrival of the batch on the device to the end of the step. Near step_ms: training is
    compute-bound."""
    forward_ms: float | None = tagged("feed_step/forward_ms")
    """Part of compute_ms: ``training_step``, on a device with all that precedes the backward pass. None if unknown, as
    with manual optimisation."""
    backward_ms: float | None = tagged("feed_step/backward_ms")
    """Part of compute_ms: the backward pass, with the exchange of gradients between ranks."""
    optimizer_ms: float | None = tagged("feed_step/optimizer_ms")
    """Part of compute_ms: clipping gradients and the optimizer's step; on the CPU also setting gradients to zero."""
    copy_ms: float | None = tagged("feed_step/copy_ms")
    """Mean time of the transfer to the device, with its hooks, as far as computing does not hide it. High: pin batches,
    prefetch them, or make them smaller."""
    data_ms: float | None = tagged("feed_step/data_ms")
    """Mean time the device had nothing to do because the host was blocked in the loader. High: load faster. If
    the GPU decodes images, this time includes the decoding."""
    other_ms: float | None = tagged("feed_step/other_ms")
    """Mean time between steps: callbacks, logging, checkpoints. High: check these, not the loader."""

    next_wait_ms: float | None = tagged("feed_host/next_wait_ms")
    """Mean time the host was blocked in ``next(loader)``. High with a low data_ms: the wait costs nothing, because
    the device still has work."""
    hidden_wait_ms: float | None = tagged("feed_host/hidden_wait_ms")
    """The part of next_wait_ms during which the device still had work. 0 on the CPU, where nothing is queued ahead."""
    epoch_start_s: float | None = tagged("feed_epoch/start_s")
    """Mean time from the start of an epoch to its first batch. High: workers are started again each epoch."""

    @property
    def interval_pct(self) -> tuple[float, float] | None:
        """The 95 % interval of starved_pct; None if not known."""
        low = self.starved_low_pct
        high = self.starved_high_pct
        if low is None or high is None:
            return None
        return low, high


@dataclass(frozen=True)
class LoaderSteps:
    """The steps on one loader's batches, if several loaders are read one after the other."""

    name: str
    """The loader's key in a dict of loaders, else ``dataloader_idx_0`` and so on, as in Lightning's metric names."""
    steps: int
    """Number of steps on this loader's batches."""
    step_ms: float
    """Mean time of a step."""
    data_ms: float
    """Mean time the device had nothing to do because the host was blocked in this loader."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps of a run."""

    steps: int
    """Number of steps."""
    step_ms: float
    """Mean time of a step."""
    starved_pct: float
    """Share of the stretch's time in which the device waited for data, 0 to 100."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The steps of a run whose times lie in one range."""

    from_ms: float
    """Lower end of the range."""
    to_ms: float
    """Upper end of the range."""
    steps: int
    """Number of steps."""
    starved_pct: float
    """Share of these steps' time in which the device waited for data, 0 to 100."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The counted steps of a run, in their order and in a histogram of their times. The warm-up is included."""

    stretches: tuple[Stretch, ...]
    """The run in up to 64 stretches of as many steps each; the last may be shorter."""
    bins: tuple[Bin, ...]
    """Histogram of the step times, in up to 40 ranges from the shortest step to the longest. The ends of each range are
    in the same ratio. Ranges without steps are left out."""


def grade_confidence(*, steps: int, lost: int, settled: bool, trusted_clock: bool) -> Confidence:
    """Return the confidence in figures.

    Args:
        steps: number of steps measured.
        lost: number of steps that should have been measured, but were not.
        settled: True if the steps do not include the warm-up, in which a full queue hides a slow loader.
        trusted_clock: True for device events, or for the host's clock if the host computes.
    """
    if not settled or not trusted_clock or steps < SOME_STEPS or lost > LOST_SHARE * (steps + lost):
        return "low"
    if steps >= MANY_STEPS:
        return "high"
    return "medium"


Which = Literal["core", "all"]
"""The figures to log. ``core``: the speed of training and its waits. ``all``: also figures that explain the waits."""

_CORE = (
    *("starved_pct", "prefetch_active", "step_ms", "compute_ms", "copy_ms", "data_ms", "other_ms", "start_s"),
    *("slow_rank", "util_pct"),
)
"""Names of the figures that are always logged, in any section (the part before the ``/``)."""


def tag_table() -> dict[str, str]:
    """Every tag that can be logged, with the name of its field."""
    kinds = (StarvationStats, RankStats, LoaderStats, GpuStats)
    return {tag: name for kind in kinds for tag, name in _tags_of(kind).items()}


def _tags_of(kind: type[Any]) -> dict[str, str]:
    """Return the tags of a class of figures, with the names of their fields."""
    return {figure.metadata["tag"]: figure.name for figure in fields(kind) if figure.metadata}


def to_tags(
    stats: StarvationStats,
    gpu: GpuStats | None = None,
    loaders: LoaderStats | None = None,
    ranks: RankStats | None = None,
) -> dict[str, float]:
    """Return the measured figures by tag. Unmeasured figures are absent, so that 0 always means a measured zero."""
    tags: dict[str, float | None] = {}
    for group in (stats, gpu, loaders, ranks):
        if group is not None:
            tags |= {tag: vars(group)[name] for tag, name in _tags_of(type(group)).items()}
    return _measured(tags)


def _measured(tags: dict[str, float | None]) -> dict[str, float]:
    return {tag: float(figure) for tag, figure in tags.items() if figure is not None}


def choose_tags(tags: dict[str, T], which: Which) -> dict[str, T]:
    """Return the tags that are logged, from all tags."""
    return {tag: value for tag, value in tags.items() if which == "all" or tag.rpartition("/")[2] in _CORE}


LOOPS = {"validate": "feed_val", "test": "feed_test", "predict": "feed_predict"}
"""Stage -> the section of its tags."""
LOOP_FIELDS = ("starved_pct", "step_ms", "compute_ms", "copy_ms", "data_ms", "other_ms", "epoch_start_s")
"""Fields of StarvationStats that are logged for a validation, test or prediction: ``feed_val/step_ms`` and so on."""


def loop_tags(stage: str, stats: StarvationStats, by_loader: Sequence[LoaderSteps] = ()) -> dict[str, float]:
    """Return the measured figures of a validation, test or prediction, by tag. Each of several loaders has its own,
    too."""
    section = LOOPS[stage]
    tags = _measured({f"{section}/{name.removeprefix('epoch_')}": vars(stats)[name] for name in LOOP_FIELDS})
    for loader in by_loader:
        tags[f"{section}/{loader.name}/step_ms"] = loader.step_ms
        tags[f"{section}/{loader.name}/data_ms"] = loader.data_ms
    return tags


def custom_scalar_layout(which: Which) -> dict[str, Any]:
    """Return the charts for ``SummaryWriter.add_custom_scalars``: waiting for data, then the parts of a step.

    TensorBoard cannot stack, and colours lines by run: the parts of several runs in one chart are hard to tell apart.
    So each part has its chart, with one line for each run.
    """
    parts = {
        "step": "step_ms",
        "data": "data_ms",
        "compute": "compute_ms",
        "copy": "copy_ms",
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
