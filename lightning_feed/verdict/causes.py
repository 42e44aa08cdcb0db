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
from lightning_feed.verdict.diagnosis import Cause, Note, NoteKind
from lightning_feed.verdict.shares import Shares, model_alone_ms
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


@dataclass(frozen=True)
class Reason:
    """A cause and the figures that support it."""

    cause: Cause
    evidence: Sequence[Note] = ()
    sure: bool = True
    """True if no missing figure could change the cause."""
    contradicted: bool = False
    """True if an experiment contradicts the cause: confidence is then low."""


# --- waiting for data ---------------------------------------------------------------------------------------------


def data_cause(measured: Measurements, shares: Shares) -> Reason:
    """Return the cause of waiting for data: the first rule that matches."""
    reason = _first_match(measured, shares)
    if measured.facts.datamodule.backend in ("nvjpeg", "dali-gpu"):
        return replace(reason, evidence=[*reason.evidence, Note.of("device decodes")])
    return reason


def _first_match(measured: Measurements, shares: Shares) -> Reason:
    for rule in DATA_RULES:
        reason = rule(measured, shares)
        if reason is not None:
            return reason
    return Reason("unknown", [Note.of("workers unknown")], sure=False)


def _reaches(value: float | None, limit: float) -> TypeGuard[float]:
    """Return True for a known figure at its limit or above."""
    return value is not None and value >= limit


def _epoch_start(measured: Measurements, shares: Shares) -> Reason | None:
    if not _reaches(shares.epoch_pct, max(DATA_PCT, 100 * shares.data_ms / shares.step_ms)):
        return None
    if measured.facts.loader.persistent_workers and _never_idle(measured):
        return None  # no worker starts, and all are busy: an epoch's first batch is made as slowly as the others
    start = Note.of(
        "first batch of an epoch",
        pct=shares.epoch_pct,
        steps=measured.facts.batches_per_epoch,
        s=measured.stats.epoch_start_s,
    )
    return Reason("epoch start", [start])


def _one_rank(measured: Measurements, _: Shares) -> Reason | None:
    ranks = measured.ranks
    if ranks is None or ranks.slow_rank is None:
        return None
    return Reason("one rank", [Note.of("slowest rank", rank=ranks.slow_rank, ranks=ranks.world_size)])


def _no_workers(measured: Measurements, _: Shares) -> Reason | None:
    loader = measured.facts.loader
    host = measured.facts.host
    evidence = _loading_here(measured)
    if loader.num_workers == 0:
        return Reason("no workers", evidence)
    if not loader.generator:
        return None
    busy_ms = (host.load_cpu_ms or 0.0) + (host.load_queue_ms or 0.0)
    if 100 * busy_ms >= BUSY_PCT * (measured.stats.next_wait_ms or math.inf):
        return Reason("no workers", evidence)
    if evidence:
        return Reason("unknown", [*evidence, Note.of("thread blocked")], sure=False)
    return None


def _loading_here(measured: Measurements) -> list[Note]:
    """Return the evidence: the time that the training process takes to make a batch; empty if unknown."""
    host = measured.facts.host
    wait_ms = measured.stats.next_wait_ms
    if not wait_ms or host.load_cpu_ms is None or host.load_queue_ms is None:
        return []
    cpu_ms = min(wait_ms, host.load_cpu_ms)
    queue_ms = min(wait_ms - cpu_ms, host.load_queue_ms)
    queued_ms = queue_ms if queue_ms >= QUEUE_SHARE * wait_ms else None
    generator = measured.facts.loader.generator or ""
    return [Note.of("loading here", ms=wait_ms, cpu_ms=cpu_ms, queue_ms=queued_ms, generator=generator)]


def _oversubscribed(measured: Measurements, _: Shares) -> Reason | None:
    loaders = measured.loaders
    if _reaches(loaders.workers_run_queue_pct, RUN_QUEUE_PCT):
        evidence = [Note.of("workers lack CPUs", pct=loaders.workers_run_queue_pct)]
        if 0 < (measured.facts.loader.num_workers or 0) <= (measured.facts.usable_cpus or 0):
            evidence.append(Note.of("other threads have the CPUs"))
        return Reason("oversubscribed", evidence)
    if _reaches(loaders.throttled_pct, THROTTLED_PCT):
        return Reason("oversubscribed", [Note.of("quota used up", pct=loaders.throttled_pct)])
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
    return Reason("oversubscribed", [Note.of("CPU pressure", pct=loaders.cpu_pressure_pct)], sure=False)


def _ready_without_cpu(measured: Measurements, _: Shares) -> Reason | None:
    queue_ms = measured.facts.host.load_queue_ms
    wait_ms = measured.stats.next_wait_ms
    if _never_idle(measured) or not measured.facts.loader.num_workers:
        return None
    if not wait_ms or not _reaches(queue_ms, READY_WAIT_SHARE * wait_ms):
        return None
    return Reason("oversubscribed", [Note.of("ready without a CPU", queue_ms=queue_ms, ms=wait_ms)])


def _idle_workers(measured: Measurements, _: Shares) -> Reason | None:
    """Return the cause, if workers are idle although training waits; None if they are busy, or no rule matches."""
    loaders = measured.loaders
    wait_ms = measured.stats.next_wait_ms or 0.0
    if _never_idle(measured):
        return None
    may_pin = measured.facts.loader.pin_memory is not False and wait_ms > 0
    if may_pin and _reaches(loaders.pin_lag_ms, PIN_SHARE * wait_ms):
        return Reason("pin thread", [Note.of("waits for pinning", ms=loaders.pin_lag_ms)])
    if _reaches(loaders.head_of_line_pct, HEAD_OF_LINE_PCT):
        return Reason("head of line", [Note.of("later batch ready", pct=loaders.head_of_line_pct)])
    if _reaches(loaders.handover_pct, HANDOVER_PCT):
        return Reason("hand-over", [Note.of("handing over", pct=loaders.handover_pct, ms=wait_ms)])
    if loaders.queue_capacity and _reaches(loaders.queue_ready, QUEUE_READY_SHARE * loaders.queue_capacity):
        ready = Note.of("queue mostly ready", ready=loaders.queue_ready, capacity=loaders.queue_capacity)
        return Reason("jitter", [ready])
    return None


def _workers(measured: Measurements, _: Shares) -> Reason | None:
    """Return the cause, if workers are busy or blocked; None if their times are unknown.

    The shares of the workers' time are no evidence here: every cause of waiting lists them.
    """
    busy_pct = _busy_pct(measured)
    if busy_pct is None:
        return None
    if 100.0 - busy_pct >= BLOCKED_PCT:
        return _blocked(measured)
    return Reason("cpu", sure=busy_pct >= BUSY_PCT)


def _busy_pct(measured: Measurements) -> float | None:
    """Return the share of the workers' time on a CPU or ready to run, in percent; None if unknown."""
    loaders = measured.loaders
    if loaders.workers_blocked_pct is not None:
        return max(0.0, 100.0 - loaders.workers_blocked_pct)
    if loaders.workers_on_cpu_pct is None or loaders.workers_run_queue_pct is None:
        return None
    return min(100.0, loaders.workers_on_cpu_pct + loaders.workers_run_queue_pct)


def _never_idle(measured: Measurements) -> bool:
    """Return True if the workers are busy most of the time. Then they are too slow on average, in any order of
    batches."""
    return _reaches(_busy_pct(measured), BUSY_PCT)


def _blocked(measured: Measurements) -> Reason:
    """Return the cause, if workers are blocked: they wait for storage, or for something else."""
    gain = _gain(measured, measured.experiments.cached_bytes_per_s)
    if _reaches(gain, FASTER_RATIO):
        return Reason("cold reads", [Note.of("faster from memory", gain=gain)])
    if gain is not None and gain < NO_FASTER_RATIO:
        return Reason("waiting", [Note.of("no faster from memory")])
    return _cold_reads(measured) or _waiting(measured)


def _cold_reads(measured: Measurements) -> Reason | None:
    cached_pct = measured.loaders.page_cache_pct
    disk = measured.loaders.disk_mb_per_s
    if disk is not None and disk < DISK_MB_PER_S:
        return None
    if cached_pct is not None:
        if cached_pct >= WARM_PCT:
            return None
        return Reason("cold reads", [Note.of("read from storage", pct=100 - cached_pct, mb_per_s=disk)])
    if disk is not None and _reaches(measured.loaders.io_pressure_pct, IO_PRESSURE_PCT):
        return Reason("cold reads", [Note.of("mapped reads", mb_per_s=disk)])
    return None


def _waiting(measured: Measurements) -> Reason:
    cached_pct = measured.loaders.page_cache_pct
    pressure_pct = measured.loaders.io_pressure_pct
    if cached_pct is None and measured.loaders.disk_mb_per_s is None:
        if pressure_pct is None:
            return Reason("unknown", [Note.of("storage unknown")], sure=False)
        if pressure_pct >= IO_PRESSURE_PCT:
            return Reason("cold reads", [Note.of("storage pressure", pct=pressure_pct)], sure=False)
    return Reason("waiting", [Note.of("not storage", pct=cached_pct)])


def _experiments(measured: Measurements, _: Shares) -> Reason | None:
    """Return the cause by the results of experiments, if the workers' times are unknown; None if they do not decide
    it."""
    results = measured.experiments
    cached = _gain(measured, results.cached_bytes_per_s)
    ceiling = _gain(measured, results.ceiling_per_s)
    wall_ms = sum(cost.wall_ms for cost in results.costs)
    if _reaches(cached, FASTER_RATIO):
        return Reason("cold reads", [Note.of("faster from memory", gain=cached)])
    if wall_ms > 0:
        cpu_pct = 100 * sum(cost.cpu_ms for cost in results.costs) / wall_ms
        takes = Note.of("sample cost", ms=wall_ms, pct=cpu_pct)
        if cpu_pct >= BUSY_PCT:
            return Reason("cpu", [takes])
        if cpu_pct <= 100 - BLOCKED_PCT and cached is not None:
            return Reason("waiting", [takes, Note.of("no faster from memory")])
    if ceiling is not None and ceiling < NO_FASTER_RATIO:
        return Reason("cpu", [Note.of("ceiling reached")], sure=False)
    return None


def _gain(measured: Measurements, changed_per_s: float | None) -> float | None:
    """Return the loader's rate with one change, divided by its rate as configured; None if one is unknown."""
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


def framework_cause(measured: Measurements, _: Shares) -> Reason:
    """Return the cause of time between steps: hooks, or a wait for the device that empties its queue."""
    hooks = measured.hooks
    syncs = measured.facts.syncs if measured.facts.device_type != "cpu" else ()
    evidence = [Note.of("slow hook", hook=hook.name, ms=hook.ms_per_step) for hook in hooks[:HOOKS_NAMED]]
    working_ms = sum(hook.ms_per_step for hook in hooks if not _waits(hook))
    if not syncs or working_ms >= NAMED_SHARE * (measured.stats.other_ms or 0.0):
        return Reason("hooks", evidence)
    waits = [Note.of("waits for the device", sync=name) for name in syncs if name in SYNCS]
    return Reason("synchronisation", waits + evidence, sure=bool(hooks))


def _waits(hook: HookTime) -> bool:
    return any(name in hook.name for name in WAITING_HOOKS)


def copy_cause(measured: Measurements, _: Shares) -> Reason:
    """Return the cause of an exposed transfer to the device."""
    return _beside_the_copy(measured) or _slow_copies(measured) or _link(measured)


def _beside_the_copy(measured: Measurements) -> Reason | None:
    """Return the cause, if the transfer takes its time for work other than copying; None otherwise."""
    datamodule = measured.facts.datamodule
    if measured.facts.device_type == "cpu":
        hooks = "device_transform" if datamodule.device_transform else ""
        if datamodule.normalizes:
            return Reason("transfer hooks", [Note.of("normalised here")])
        return Reason("transfer hooks", [Note.of("nothing to copy", hooks=hooks)])
    return None


def _slow_copies(measured: Measurements) -> Reason | None:
    pinned = _is_pinned(measured)
    if pinned is False:
        return Reason("unpinned", [Note.of(_why_unpinned(measured.facts.loader))])
    tensors = measured.facts.batch.tensors or 0
    size_bytes = measured.facts.batch.size_bytes
    if size_bytes is not None and tensors >= MANY_TENSORS and size_bytes <= tensors * SMALL_TENSOR_BYTES:
        small = Note.of("small tensors", tensors=tensors, kib=size_bytes / tensors / 1024)
        return Reason("small tensors", [small])
    if pinned and not measured.stats.prefetch_active:
        return Reason("not overlapped", [Note.of("compute stream")])
    return None


def _why_unpinned(loader: LoaderFacts) -> NoteKind:
    if not loader.pin_memory:
        return "pageable"
    if loader.in_place:
        return "not locked"
    return "pinning failed"


def _is_pinned(measured: Measurements) -> bool | None:
    """Return True if batches are in pinned memory, as seen; None if unknown.

    The loader's setting counts if no batch was seen, or if batches have files for the device, which nothing pins.
    """
    seen = measured.facts.batch.pinned
    if seen is None or measured.facts.datamodule.backend not in (None, "torch"):
        return measured.facts.loader.pin_memory
    return seen


def _link(measured: Measurements) -> Reason:
    copy_ms = measured.stats.copy_ms
    size_bytes = measured.facts.batch.size_bytes
    if _is_pinned(measured) and copy_ms and size_bytes:
        return Reason("link", [Note.of("slow link", gb_per_s=size_bytes / copy_ms * 1e-6)])
    return Reason("unknown", [Note.of("pinning unknown")], sure=False)


def compute_cause(measured: Measurements, shares: Shares) -> Reason:
    """Return the cause of a step that mostly computes: work on the device, or the host's work to launch it."""
    alone_ms = model_alone_ms(measured)
    if alone_ms is not None and (measured.stats.compute_ms or 0.0) >= MODEL_FAR_RATIO * alone_ms:
        return _not_the_model(measured, alone_ms)
    evidence = []
    if shares.compute_bound_confirmed:
        evidence.append(Note.of("model alone", ms=alone_ms))
    if measured.facts.device_type == "cpu" or not has_idle_device(measured):
        return Reason("compute", evidence)
    return _idle_device(measured, evidence)


def _idle_device(measured: Measurements, evidence: list[Note]) -> Reason:
    """Return the cause, if the device is idle for a part of the step itself: the host limits it.

    A thread that waits for the device spins, so it looks busy. So its CPU time shows that it launches only as far as
    it cannot have waited: if it waits in each step, the device must be idle for most of the step.
    """
    share = idle_share(measured) or 0.0
    evidence = [*evidence, Note.of("device idle", pct=100 * share)]
    waits = bool(waits_in_each_step(measured.facts)) or bool(measured.facts.syncs)
    if waits and share < MOSTLY_IDLE_SHARE:
        return Reason("synchronisation", evidence, sure=False)
    if _launches_all_the_time(measured):
        return Reason("launch", [*evidence, Note.of("launching", ms=measured.facts.host.cpu_ms)], sure=False)
    return Reason("unknown", [*evidence, Note.of("thread idle")], sure=False)


def _launches_all_the_time(measured: Measurements) -> bool:
    """Return True if the training thread is on a CPU during nearly all of the step itself, without the backward pass.

    The training thread launches the forward pass and the optimizer, and waits for the backward pass, which has a thread
    of its own (https://docs.pytorch.org/docs/stable/notes/autograd.html#multithreaded-autograd).
    """
    cpu_ms = measured.facts.host.cpu_ms
    own_ms = (measured.stats.compute_ms or 0.0) - (measured.stats.backward_ms or 0.0)
    return cpu_ms is not None and cpu_ms >= LAUNCH_SHARE * own_ms


def _not_the_model(measured: Measurements, alone_ms: float) -> Reason:
    """Return the cause if a step computes much longer than the model alone: ``oversubscribed`` if tasks wait for CPUs,
    else ``unknown``."""
    pressure_pct = measured.loaders.cpu_pressure_pct
    evidence = Note.of("not the model", ms=alone_ms, compute_ms=measured.stats.compute_ms)
    if _reaches(pressure_pct, CPU_PRESSURE_PCT):
        return Reason("oversubscribed", [evidence, Note.of("CPU pressure", pct=pressure_pct)], contradicted=True)
    return Reason("unknown", [evidence], contradicted=True)
