"""Causes of each part of a step that is over its limit.

For waiting for data, the first rule that matches gives the cause. Idle workers look like blocked workers. So the rules
that recognise idle workers (one slow batch in front, a queue that is mostly full) come before the rules that read the
workers' times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from lightning_feed.measure.measurements import SYNCS, HookTime, LoaderFacts, Measurements
from lightning_feed.verdict.device_use import has_idle_device, idle_share, waits_in_each_step
from lightning_feed.verdict.diagnosis import Cause
from lightning_feed.verdict.shares import Shares, in_ms, model_alone_ms
from lightning_feed.verdict.thresholds import (
    BLOCKED_PCT,
    BUSY_PCT,
    CPU_PRESSURE_PCT,
    DATA_PCT,
    DISK_MB_PER_S,
    FASTER_RATIO,
    HANDOVER_PCT,
    HEAD_OF_LINE_PCT,
    HOOKS_NAMED,
    IO_PRESSURE_PCT,
    LAUNCH_SHARE,
    MANY_TENSORS,
    MODEL_FAR_RATIO,
    MOSTLY_IDLE_SHARE,
    NAMED_SHARE,
    NO_FASTER_RATIO,
    PIN_SHARE,
    QUEUE_READY_SHARE,
    QUEUE_SHARE,
    READY_WAIT_SHARE,
    RUN_QUEUE_PCT,
    SMALL_TENSOR_BYTES,
    THROTTLED_PCT,
    WARM_PCT,
)

DEVICE_DECODES = "the GPU decodes in this time, too"


@dataclass(frozen=True)
class Reason:
    """A cause and the figures that support it."""

    cause: Cause
    evidence: Sequence[str] = ()
    """One sentence each."""
    sure: bool = True
    """True if no missing figure could change the cause."""
    contradicted: bool = False
    """True if an experiment contradicts the cause: confidence is then low."""


# --- waiting for data ---------------------------------------------------------------------------------------------


def data_cause(measured: Measurements, shares: Shares) -> Reason:
    """The cause of waiting for data: the first rule that matches."""
    reason = _first_match(measured, shares)
    if measured.facts.datamodule.backend in ("nvjpeg", "dali-gpu"):
        return replace(reason, evidence=[*reason.evidence, DEVICE_DECODES])
    return reason


def _first_match(measured: Measurements, shares: Shares) -> Reason:
    for rule in DATA_RULES:
        reason = rule(measured, shares)
        if reason is not None:
            return reason
    return Reason("unknown", ["it is not known what the workers do meanwhile"], sure=False)


def _reaches(value: float | None, limit: float) -> TypeGuard[float]:
    """True for a known figure at its limit or above."""
    return value is not None and value >= limit


def _epoch_start(measured: Measurements, shares: Shares) -> Reason | None:
    if not _reaches(shares.epoch_pct, max(DATA_PCT, 100 * shares.data_ms / shares.step_ms)):
        return None
    if measured.facts.loader.persistent_workers and _never_idle(measured):
        return None  # no worker starts, and all are busy: an epoch's first batch is made as slowly as the others
    epoch = f"an epoch of {measured.facts.batches_per_epoch} steps"
    before = f"before its first batch ({measured.stats.epoch_start_s:.2f} s)"
    return Reason("epoch start", [f"{shares.epoch_pct:.0f} % of {epoch} passes {before}"])


def _one_rank(measured: Measurements, _: Shares) -> Reason | None:
    ranks = measured.ranks
    if ranks is None or ranks.slow_rank is None:
        return None
    slow = f"rank {ranks.slow_rank} of {ranks.world_size}"
    return Reason("one rank", [f"{slow} waits longest, and the others wait for it"])


def _no_workers(measured: Measurements, shares: Shares) -> Reason | None:
    loader = measured.facts.loader
    host = measured.facts.host
    evidence = _loading_here(measured, shares.step_ms)
    if loader.num_workers == 0:
        return Reason("no workers", evidence)
    if not loader.generator:
        return None
    busy_ms = (host.load_cpu_ms or 0.0) + (host.load_queue_ms or 0.0)
    if 100 * busy_ms >= BUSY_PCT * (measured.stats.next_wait_ms or math.inf):
        return Reason("no workers", evidence)
    if evidence:
        return Reason("unknown", [*evidence, "the training thread is blocked for the rest"], sure=False)
    return None


def _loading_here(measured: Measurements, step_ms: float) -> list[str]:
    """Evidence: the time that the training process takes to make a batch; empty if unknown."""
    host = measured.facts.host
    wait_ms = measured.stats.next_wait_ms
    if not wait_ms or host.load_cpu_ms is None or host.load_queue_ms is None:
        return []
    cpu_ms = min(wait_ms, host.load_cpu_ms)
    queue_ms = min(wait_ms - cpu_ms, host.load_queue_ms)
    text = f"loading takes {in_ms(wait_ms, step_ms)} ms"
    if measured.facts.loader.generator:
        text = f"{measured.facts.loader.generator} takes {in_ms(wait_ms, step_ms)} ms in the training process"
    text += f", {in_ms(cpu_ms, step_ms)} of them on a CPU"
    if queue_ms >= QUEUE_SHARE * wait_ms:
        text += f" and {in_ms(queue_ms, step_ms)} waiting for one"
    return [text]


def _oversubscribed(measured: Measurements, _: Shares) -> Reason | None:
    loaders = measured.loaders
    if _reaches(loaders.workers_run_queue_pct, RUN_QUEUE_PCT):
        evidence = [f"workers wait for a CPU {loaders.workers_run_queue_pct:.0f} % of their time"]
        if 0 < (measured.facts.loader.num_workers or 0) <= (measured.facts.usable_cpus or 0):
            evidence.append("there are no more workers than CPUs: other threads have them")
        return Reason("oversubscribed", evidence)
    if _reaches(loaders.throttled_pct, THROTTLED_PCT):
        quota = f"the CPU quota is used up in {loaders.throttled_pct:.0f} % of the scheduler's periods"
        return Reason("oversubscribed", [quota])
    return None


def _more_workers_than_cpus(measured: Measurements, _: Shares) -> Reason | None:
    loaders = measured.loaders
    # Workers rest while the queue is full. Then it is the training process that waits for a CPU, to take a ready batch.
    workers_rest = _reaches(loaders.handover_pct, HANDOVER_PCT)
    if loaders.workers_run_queue_pct is not None and not workers_rest:
        return None
    more_workers = (measured.facts.loader.num_workers or 0) > (measured.facts.usable_cpus or math.inf)
    if not more_workers or not _reaches(loaders.cpu_pressure_pct, CPU_PRESSURE_PCT):
        return None
    return Reason("oversubscribed", [_cpu_pressure(loaders.cpu_pressure_pct)], sure=False)


def _cpu_pressure(pct: float) -> str:
    return f"some task waits for a CPU {pct:.0f} % of the time"


def _ready_without_cpu(measured: Measurements, shares: Shares) -> Reason | None:
    queue_ms = measured.facts.host.load_queue_ms
    wait_ms = measured.stats.next_wait_ms
    if _never_idle(measured) or not measured.facts.loader.num_workers:
        return None
    if not wait_ms or not _reaches(queue_ms, READY_WAIT_SHARE * wait_ms):
        return None
    waited = f"{in_ms(queue_ms, shares.step_ms)} of {in_ms(wait_ms, shares.step_ms)} ms"
    return Reason("oversubscribed", [f"the training thread waits {waited} for a CPU, to take a batch that is ready"])


def _idle_workers(measured: Measurements, _: Shares) -> Reason | None:
    """The cause, if workers are idle although training waits; None if they are busy, or no rule matches."""
    loaders = measured.loaders
    wait_ms = measured.stats.next_wait_ms or 0.0
    if _never_idle(measured):
        return None
    may_pin = measured.facts.loader.pin_memory is not False and wait_ms > 0
    if may_pin and _reaches(loaders.pin_lag_ms, PIN_SHARE * wait_ms):
        return Reason(
            "pin thread", [f"finished batches wait {loaders.pin_lag_ms:.1f} ms for the thread that pins them"]
        )
    if _reaches(loaders.head_of_line_pct, HEAD_OF_LINE_PCT):
        return Reason("head of line", [f"a later batch was ready in {loaders.head_of_line_pct:.0f} % of the waiting"])
    if _reaches(loaders.handover_pct, HANDOVER_PCT):
        ready = f"batches were ready in {loaders.handover_pct:.0f} % of the waiting"
        return Reason("hand-over", [f"{ready}: handing one over takes most of {wait_ms:.1f} ms"])
    if loaders.queue_capacity and _reaches(loaders.queue_ready, QUEUE_READY_SHARE * loaders.queue_capacity):
        ready = f"{loaders.queue_ready:.1f} of {loaders.queue_capacity:.0f} batches are ready on average"
        return Reason("jitter", [f"{ready}, but sometimes none is"])
    return None


def _workers(measured: Measurements, _: Shares) -> Reason | None:
    """The cause, if workers are busy or blocked; None if their times are unknown.

    Their shares of time are not added here: the evidence lists them for every cause of waiting.
    """
    busy_pct = _busy_pct(measured)
    if busy_pct is None:
        return None
    if 100.0 - busy_pct >= BLOCKED_PCT:
        return _blocked(measured)
    return Reason("cpu", sure=busy_pct >= BUSY_PCT)


def _busy_pct(measured: Measurements) -> float | None:
    """Share of the workers' time on a CPU or ready to run, in percent; None if unknown."""
    loaders = measured.loaders
    if loaders.workers_blocked_pct is not None:
        return max(0.0, 100.0 - loaders.workers_blocked_pct)
    if loaders.workers_on_cpu_pct is None or loaders.workers_run_queue_pct is None:
        return None
    return min(100.0, loaders.workers_on_cpu_pct + loaders.workers_run_queue_pct)


def _never_idle(measured: Measurements) -> bool:
    """True if the workers are busy most of the time. Then they are too slow on average, in any order of batches."""
    return _reaches(_busy_pct(measured), BUSY_PCT)


def _blocked(measured: Measurements) -> Reason:
    """The cause, if workers are blocked: they wait for storage, or for something else."""
    gain = _gain(measured, measured.experiments.cached_bytes_per_s)
    if _reaches(gain, FASTER_RATIO):
        return Reason("cold reads", [f"with its files in memory, the loader is {gain:.1f} x as fast"])
    if gain is not None and gain < NO_FASTER_RATIO:
        return Reason("waiting", ["with its files in memory, the loader is no faster"])
    return _cold_reads(measured) or _waiting(measured)


def _cold_reads(measured: Measurements) -> Reason | None:
    cached_pct = measured.loaders.page_cache_pct
    disk = measured.loaders.disk_mb_per_s
    if disk is not None and disk < DISK_MB_PER_S:
        return None
    if cached_pct is not None:
        if cached_pct >= WARM_PCT:
            return None
        rate = "" if disk is None else f", {disk:.1f} MB/s"
        return Reason("cold reads", [f"{100 - cached_pct:.0f} % of the bytes come from storage{rate}"])
    if disk is not None and _reaches(measured.loaders.io_pressure_pct, IO_PRESSURE_PCT):
        return Reason("cold reads", [f"storage delivers {disk:.1f} MB/s through memory-mapped reads"])
    return None


def _waiting(measured: Measurements) -> Reason:
    cached_pct = measured.loaders.page_cache_pct
    pressure_pct = measured.loaders.io_pressure_pct
    if cached_pct is None and measured.loaders.disk_mb_per_s is None:
        if pressure_pct is None:
            return Reason("unknown", ["it is unknown if workers wait for storage"], sure=False)
        if pressure_pct >= IO_PRESSURE_PCT:
            return Reason("cold reads", [f"some task waits for storage {pressure_pct:.0f} % of the time"], sure=False)
    read = "" if cached_pct is None else f": {cached_pct:.0f} % of the bytes come from the page cache"
    return Reason("waiting", [f"workers do not wait for storage{read}"])


def _experiments(measured: Measurements, _: Shares) -> Reason | None:
    """The cause by the results of experiments, if the workers' times are unknown; None if they do not decide it."""
    results = measured.experiments
    cached = _gain(measured, results.cached_bytes_per_s)
    ceiling = _gain(measured, results.ceiling_per_s)
    wall_ms = sum(cost.wall_ms for cost in results.costs)
    if _reaches(cached, FASTER_RATIO):
        return Reason("cold reads", [f"with its files in memory, the loader is {cached:.1f} x as fast"])
    if wall_ms > 0:
        cpu_pct = 100 * sum(cost.cpu_ms for cost in results.costs) / wall_ms
        takes = f"a sample takes {wall_ms:.2f} ms, {cpu_pct:.0f} % of it on a CPU"
        if cpu_pct >= BUSY_PCT:
            return Reason("cpu", [takes])
        if cpu_pct <= 100 - BLOCKED_PCT and cached is not None:
            return Reason("waiting", [takes, "with its files in memory, the loader is no faster"])
    if ceiling is not None and ceiling < NO_FASTER_RATIO:
        limit = "constant samples load no faster: collating and sending batches is the limit"
        return Reason("cpu", [limit], sure=False)
    return None


def _gain(measured: Measurements, changed_per_s: float | None) -> float | None:
    """The loader's rate with one change, divided by its rate as configured."""
    configured_per_s = measured.experiments.loader_per_s
    if changed_per_s is None or not configured_per_s:
        return None
    return changed_per_s / configured_per_s


DATA_RULES: tuple[Callable[[Measurements, Shares], Reason | None], ...] = (
    _epoch_start, _one_rank, _no_workers, _oversubscribed, _more_workers_than_cpus, _ready_without_cpu, _idle_workers,
    _workers, _experiments,
)  # fmt: skip
"""Rules in the order in which they are tried: each returns the cause of waiting for data, or None if it does not match.
"""


# --- the other parts of a step ------------------------------------------------------------------------------------

WAITING_HOOKS = ("ProgressBar", "ThroughputMonitor")
"""Callbacks of Lightning that wait for the device, to read a metric or to measure: their time counts as waiting for the
device, not as work of a hook."""


def framework_cause(measured: Measurements, shares: Shares) -> Reason:
    """The cause of time between steps: hooks, or a wait for the device that empties its queue."""
    hooks = measured.hooks
    syncs = measured.facts.syncs if measured.facts.device_type != "cpu" else ()
    times = [(hook.name, in_ms(hook.ms_per_step, shares.step_ms)) for hook in hooks[:HOOKS_NAMED]]
    evidence = [f"{name} takes {ms} ms a step" for name, ms in times]
    working_ms = sum(hook.ms_per_step for hook in hooks if not _waits(hook))
    if not syncs or working_ms >= NAMED_SHARE * (measured.stats.other_ms or 0.0):
        return Reason("hooks", evidence)
    waits = [f"the host waits for the device in each step: {SYNCS[name]}" for name in syncs if name in SYNCS]
    return Reason("synchronisation", waits + evidence, sure=bool(hooks))


def _waits(hook: HookTime) -> bool:
    return any(name in hook.name for name in WAITING_HOOKS)


def copy_cause(measured: Measurements, _: Shares) -> Reason:
    """The cause of an exposed transfer to the device."""
    return _beside_the_copy(measured) or _slow_copies(measured) or _link(measured)


def _beside_the_copy(measured: Measurements) -> Reason | None:
    """The cause, if the transfer takes its time for work other than copying; None otherwise."""
    datamodule = measured.facts.datamodule
    if measured.facts.device_type == "cpu":
        takes = "device_transform takes" if datamodule.device_transform else "transfer hooks take"
        return Reason("transfer hooks", [f"nothing is copied on the CPU: {takes} the time"])
    return None


def _slow_copies(measured: Measurements) -> Reason | None:
    pinned = _is_pinned(measured)
    if pinned is False:
        return Reason("unpinned", [_why_unpinned(measured.facts.loader)])
    tensors = measured.facts.batch.tensors or 0
    size_bytes = measured.facts.batch.size_bytes
    if size_bytes is not None and tensors >= MANY_TENSORS and size_bytes <= tensors * SMALL_TENSOR_BYTES:
        each_kb = size_bytes / tensors / 1024
        return Reason("small tensors", [f"a batch has {tensors} tensors of {each_kb:.1f} kB"])
    if pinned and not measured.stats.prefetch_active:
        return Reason("not overlapped", ["batches are copied on the stream that computes"])
    return None


def _why_unpinned(loader: LoaderFacts) -> str:
    if not loader.pin_memory:
        return "batches are in pageable memory"
    if loader.in_place:
        return "batches are in place, but the driver has not locked their memory"
    return "pin_memory=True has left the batches in pageable memory: their class needs a method pin_memory()"


def _is_pinned(measured: Measurements) -> bool | None:
    """True if batches are in pinned memory: as seen, or as the loader is set if no batch was seen, or if a batch has
    files that the device decodes, which nothing pins."""
    seen = measured.facts.batch.pinned
    if seen is None or measured.facts.datamodule.backend not in (None, "torch"):
        return measured.facts.loader.pin_memory
    return seen


def _link(measured: Measurements) -> Reason:
    copy_ms = measured.stats.copy_ms
    size_bytes = measured.facts.batch.size_bytes
    if _is_pinned(measured) and copy_ms and size_bytes:
        rate = size_bytes / copy_ms * 1e-6
        return Reason("link", [f"batches are copied ahead, and still {rate:.1f} GB/s are not enough"])
    return Reason("unknown", ["it is not known if batches are pinned"], sure=False)


def compute_cause(measured: Measurements, shares: Shares) -> Reason:
    """The cause, if computing takes most of a step: work on the device, or the host's work to launch it."""
    step_ms = shares.step_ms
    alone_ms = model_alone_ms(measured)
    if alone_ms is not None and (measured.stats.compute_ms or 0.0) >= MODEL_FAR_RATIO * alone_ms:
        return _not_the_model(measured, step_ms, alone_ms)
    evidence = []
    if shares.compute_bound_confirmed:
        evidence.append(
            f"the model alone takes {in_ms(alone_ms, step_ms)} ms a step with one batch repeated: "
            "faster loading would not help here"
        )
    if measured.facts.device_type == "cpu" or not has_idle_device(measured):
        return Reason("compute", evidence)
    return _idle_device(measured, step_ms, evidence)


def _idle_device(measured: Measurements, step_ms: float, evidence: list[str]) -> Reason:
    """The cause, if the device is idle for a part of the step itself: the host limits it.

    A thread that waits for the device spins, so it looks busy. So its CPU time shows that it launches only as far as
    it cannot have waited: if it waits in each step, the device must be idle for most of the step.
    """
    share = idle_share(measured) or 0.0
    evidence = [*evidence, f"the GPU is idle {100 * share:.0f} % of the step itself"]
    waits = bool(waits_in_each_step(measured.facts)) or bool(measured.facts.syncs)
    if waits and share < MOSTLY_IDLE_SHARE:
        return Reason("synchronisation", evidence, sure=False)
    if _launches_all_the_time(measured):
        computes = f"the training thread computes {in_ms(measured.facts.host.cpu_ms, step_ms)} ms a step"
        return Reason("launch", [*evidence, f"{computes} to launch the work of the device"], sure=False)
    return Reason("unknown", [*evidence, "the training thread is not busy meanwhile"], sure=False)


def _launches_all_the_time(measured: Measurements) -> bool:
    """True if the training thread is on a CPU during nearly all of the step itself, without the backward pass.

    The training thread launches the forward pass and the optimizer, and waits for the backward pass, which has a thread
    of its own (https://docs.pytorch.org/docs/stable/notes/autograd.html#multithreaded-autograd).
    """
    cpu_ms = measured.facts.host.cpu_ms
    own_ms = (measured.stats.compute_ms or 0.0) - (measured.stats.backward_ms or 0.0)
    return cpu_ms is not None and cpu_ms >= LAUNCH_SHARE * own_ms


def _not_the_model(measured: Measurements, step_ms: float, alone_ms: float) -> Reason:
    """The cause if a step computes much longer than the model alone: ``oversubscribed`` if tasks wait for CPUs, else
    ``unknown``."""
    pressure_pct = measured.loaders.cpu_pressure_pct
    evidence = (
        f"the model alone takes {in_ms(alone_ms, step_ms)} of the {in_ms(measured.stats.compute_ms, step_ms)} ms of "
        "the step itself: other programs take its CPUs, or the step does more than the model"
    )
    if _reaches(pressure_pct, CPU_PRESSURE_PCT):
        return Reason("oversubscribed", [evidence, _cpu_pressure(pressure_pct)], contradicted=True)
    return Reason("unknown", [evidence], contradicted=True)
