"""Causes: the reasons for each part of a step that is over its limit.

The first rule that matches gives the cause of waiting. Idle workers look blocked, too. So the rules that recognise idle
workers (one slow batch in front, a queue that is mostly full) come before those that read the workers' times.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from lightning_feed.measure.measurements import SYNCS, HookTime, Measurements
from lightning_feed.verdict.diagnosis import Cause
from lightning_feed.verdict.shares import (
    DATA_PCT,
    RUN_QUEUE_PCT,
    Shares,
    in_ms,
    model_alone_ms,
)

HEAD_OF_LINE_PCT = 25.0
"""Limit of the share of waiting during which a later batch was ready."""
PIN_SHARE = 0.5
"""Limit of the mean wait for the pin thread, as a share of the mean wait."""
THROTTLED_PCT = 20.0
CPU_PRESSURE_PCT = 30.0
BUSY_PCT = 70.0
BLOCKED_PCT = 50.0
"""Limits of the workers' busy time (on a CPU, or ready for one) and of their blocked time."""
READY_SHARE = 0.5
"""Limit of the mean fill of the queue. Workers in lockstep deliver batches in bursts, and leave it less than half full:
(workers - 1) / 2 of at least ``workers`` batches."""
HANDOVER_PCT = 80.0
"""Limit of the share of waiting that began with batches ready. It is high, because taking a ready batch also needs a
millisecond: even if the queue is sometimes empty, much of the waiting is spent on that."""
QUEUE_SHARE = 0.1
"""Smallest share of loading spent waiting for a CPU that the evidence mentions."""
WARM_PCT = 80.0
"""Share of bytes from the page cache above which the disk is not the reason."""
DISK_MB_PER_S = 0.05
"""Rate of reading from storage below which workers do not wait for it: even 100 random reads of 4 kB a second, as from
a slow disk, give more."""
IO_PRESSURE_PCT = 20.0
DALI_DECODES = "DALI decodes on the GPU, so this time includes its decoding"
FASTER = 1.25
NO_FASTER = 1.1
"""Speed-up of the loader without a stage: above the first, the stage is the cause; below the second, it is not."""


@dataclass(frozen=True)
class Reason:
    """A cause and the figures that support it."""

    cause: Cause
    because: Sequence[str] = ()
    """One sentence each."""
    sure: bool = True
    """True if no missing figure could change the cause."""
    contradicted: bool = False
    """True if an experiment contradicts the cause: confidence is then low."""


# --- waiting for data ---------------------------------------------------------------------------------------------


def data_cause(measured: Measurements, shares: Shares) -> Reason:
    """The cause of waiting for data: the first rule that matches."""
    found = next(reason for rule in DATA_RULES for reason in rule(measured, shares))
    if measured.facts.backend == "dali-gpu":
        return replace(found, because=[*found.because, DALI_DECODES])
    return found


def _epoch_start(measured: Measurements, shares: Shares) -> Iterator[Reason]:
    pct = shares.epoch_pct
    batches = measured.facts.batches_per_epoch
    if pct is not None and pct >= max(DATA_PCT, 100 * shares.data_ms / shares.step_ms):
        took = f"before its first batch ({measured.stats.epoch_start_s:.2f} s)"
        yield Reason("epoch start", [f"{pct:.0f} % of an epoch of {batches} steps passes {took}"])


def _one_rank(measured: Measurements, _: Shares) -> Iterator[Reason]:
    ranks = measured.ranks
    if ranks is not None and ranks.slow_rank is not None:
        said = f"rank {ranks.slow_rank} of {ranks.world_size} waits longest, and the others wait for it"
        yield Reason("one rank", [said])


def _no_workers(measured: Measurements, shares: Shares) -> Iterator[Reason]:
    facts = measured.facts
    because = _loading_here(measured, shares.step_ms)
    busy_ms = (facts.load_cpu_ms or 0.0) + (facts.load_queue_ms or 0.0)
    is_busy = 100 * busy_ms >= BUSY_PCT * (measured.stats.next_wait_ms or math.inf)
    if facts.num_workers == 0 or (facts.generator and is_busy):
        yield Reason("no workers", because)
    elif facts.generator and because:
        yield Reason("unknown", [*because, "the training thread is blocked for the rest"], sure=False)


def _loading_here(measured: Measurements, step: float) -> list[str]:
    """Evidence: the time that the training process takes to make a batch; empty if unknown."""
    facts = measured.facts
    wait = measured.stats.next_wait_ms
    if not wait or facts.load_cpu_ms is None or facts.load_queue_ms is None:
        return []
    cpu = min(wait, facts.load_cpu_ms)
    queue = min(wait - cpu, facts.load_queue_ms)
    who, where = (facts.generator, " in the training process") if facts.generator else ("loading", "")
    said = f"{who} takes {in_ms(wait, step)} ms{where}, {in_ms(cpu, step)} of them on a CPU"
    return [said + (f" and {in_ms(queue, step)} waiting for one" if queue >= QUEUE_SHARE * wait else "")]


def _oversubscribed(measured: Measurements, _: Shares) -> Iterator[Reason]:
    facts = measured.facts
    loaders = measured.loaders
    queue = loaders.workers_run_queue_pct
    throttled = loaders.throttled_pct or 0.0
    if queue is not None and queue >= RUN_QUEUE_PCT:
        because = [f"workers wait for a CPU {queue:.0f} % of their time"]
        if 0 < (facts.num_workers or 0) <= (facts.usable_cpus or 0):
            because.append("there are no more workers than CPUs: other threads have them")
        yield Reason("oversubscribed", because)
    if throttled >= THROTTLED_PCT:
        yield Reason("oversubscribed", [f"the CPU quota is used up in {throttled:.0f} % of the scheduler's periods"])


def _ready_without_cpu(measured: Measurements, shares: Shares) -> Iterator[Reason]:
    facts = measured.facts
    wait = measured.stats.next_wait_ms
    never_idle = (_busy_pct(measured) or 0.0) >= BUSY_PCT  # these workers are too slow in any case
    if never_idle or not facts.num_workers or not wait:
        return
    if (facts.load_queue_ms or 0.0) >= READY_SHARE * wait:
        waited = f"{in_ms(facts.load_queue_ms, shares.step_ms)} of {in_ms(wait, shares.step_ms)} ms"
        yield Reason("oversubscribed", [f"the training thread waits {waited} for a CPU, to take a batch that is ready"])


def _more_workers_than_cpus(measured: Measurements, _: Shares) -> Iterator[Reason]:
    facts = measured.facts
    loaders = measured.loaders
    pressure = measured.loaders.cpu_pressure_pct or 0.0
    # Workers with a full queue rest. Then the training process waits for a CPU, to take a ready batch.
    unseen = loaders.workers_run_queue_pct is None or (loaders.handover_pct or 0.0) >= HANDOVER_PCT
    more = (facts.num_workers or 0) > (facts.usable_cpus or math.inf)
    if unseen and more and pressure >= CPU_PRESSURE_PCT:
        yield Reason("oversubscribed", [f"some task waits for a CPU {pressure:.0f} % of the time"], sure=False)


def _idle_workers(measured: Measurements, _: Shares) -> Iterator[Reason]:
    """Reasons for idle workers. Workers that are never idle are too slow on average, in any order of batches."""
    loaders = measured.loaders
    wait = measured.stats.next_wait_ms or 0.0
    held = loaders.head_of_line_pct or 0.0
    handed = loaders.handover_pct or 0.0
    ready = loaders.queue_ready or 0.0
    most = loaders.queue_capacity or 0.0
    pin_lag_ms = loaders.pin_lag_ms or 0.0
    if (_busy_pct(measured) or 0.0) >= BUSY_PCT:
        return
    if pin_lag_ms >= PIN_SHARE * wait > 0 and measured.facts.pin_memory is not False:
        yield Reason("pin thread", [f"finished batches wait {pin_lag_ms:.1f} ms for the thread that pins them"])
    if held >= HEAD_OF_LINE_PCT:
        yield Reason("head of line", [f"a later batch was ready in {held:.0f} % of the waiting"])
    if handed >= HANDOVER_PCT:
        said = f"batches were ready in {handed:.0f} % of the waiting: handing one over takes most of {wait:.1f} ms"
        yield Reason("hand-over", [said])
    if ready >= READY_SHARE * most > 0:
        yield Reason("jitter", [f"{ready:.1f} of {most:.0f} batches are ready on average, but sometimes none is"])


def _workers(measured: Measurements, _: Shares) -> Iterator[Reason]:
    """Busy or blocked workers. The evidence shows their shares of time for any cause."""
    busy = _busy_pct(measured)
    if busy is not None:
        yield _blocked(measured) if 100.0 - busy >= BLOCKED_PCT else Reason("cpu", sure=busy >= BUSY_PCT)


def _busy_pct(measured: Measurements) -> float | None:
    """Share of the workers' time on a CPU or ready for one."""
    loaders = measured.loaders
    on_cpu = loaders.workers_on_cpu_pct
    queue = loaders.workers_run_queue_pct
    blocked = loaders.workers_blocked_pct
    if blocked is not None:
        return max(0.0, 100.0 - blocked)
    return None if on_cpu is None or queue is None else min(100.0, on_cpu + queue)


def _blocked(measured: Measurements) -> Reason:
    """Blocked workers: they wait for storage, or for something else."""
    gain = _gain(measured, "cached_bytes_per_s")
    if gain is not None and gain >= FASTER:
        return Reason("cold reads", [f"with its files in memory, the loader is {gain:.1f} x as fast"])
    if gain is not None and gain < NO_FASTER:
        return Reason("waiting", ["with its files in memory, the loader is no faster"])
    return _cold_reads(measured) or _waiting(measured)


def _cold_reads(measured: Measurements) -> Reason | None:
    cached = measured.loaders.page_cache_pct
    disk = measured.loaders.disk_mb_per_s
    if disk is not None and disk < DISK_MB_PER_S:
        return None
    if cached is not None and cached < WARM_PCT:
        rate = "" if disk is None else f", {disk:.1f} MB/s"
        return Reason("cold reads", [f"{100 - cached:.0f} % of the bytes come from storage{rate}"])
    if cached is None and disk is not None and (measured.loaders.io_pressure_pct or 0.0) >= IO_PRESSURE_PCT:
        return Reason("cold reads", [f"storage delivers {disk:.1f} MB/s through memory-mapped reads"])
    return None


def _waiting(measured: Measurements) -> Reason:
    loaders = measured.loaders
    cached = loaders.page_cache_pct
    pressure = loaders.io_pressure_pct
    if cached is None and loaders.disk_mb_per_s is None:
        if pressure is None:
            return Reason("unknown", ["it is unknown if workers wait for storage"], sure=False)
        if pressure >= IO_PRESSURE_PCT:
            return Reason("cold reads", [f"some task waits for storage {pressure:.0f} % of the time"], sure=False)
    read = "" if cached is None else f": {cached:.0f} % of the bytes come from the page cache"
    return Reason("waiting", [f"workers do not wait for storage{read}"])


def _experiments(measured: Measurements, _: Shares) -> Iterator[Reason]:
    """Reasons from experiments, if the workers' times are unknown."""
    found = measured.found
    cached = _gain(measured, "cached_bytes_per_s")
    ceiling = _gain(measured, "ceiling_per_s")
    if cached is not None and cached >= FASTER:
        yield Reason("cold reads", [f"with its files in memory, the loader is {cached:.1f} x as fast"])
    wall = sum(cost.wall_ms for cost in found.costs)
    if wall > 0:
        cpu_pct = 100 * sum(cost.cpu_ms for cost in found.costs) / wall
        said = f"a sample takes {wall:.2f} ms, {cpu_pct:.0f} % of it on a CPU"
        if cpu_pct >= BUSY_PCT:
            yield Reason("cpu", [said])
        if cpu_pct <= 100 - BLOCKED_PCT and cached is not None:
            yield Reason("waiting", [said, "with its files in memory, the loader is no faster"])
    if ceiling is not None and ceiling < NO_FASTER:
        said = "constant samples load no faster: collating and sending batches is the limit"
        yield Reason("cpu", [said], sure=False)


def _gain(measured: Measurements, rate: Literal["cached_bytes_per_s", "ceiling_per_s"]) -> float | None:
    """The loader's rate with one change, divided by its rate as configured."""
    changed: float | None = vars(measured.found)[rate]
    now = measured.found.loader_per_s
    return None if changed is None or not now else changed / now


def _unknown(_: Measurements, __: Shares) -> Iterator[Reason]:
    yield Reason("unknown", ["it is not known what the workers do meanwhile"], sure=False)


DATA_RULES = (
    _epoch_start, _one_rank, _no_workers, _oversubscribed, _more_workers_than_cpus, _ready_without_cpu, _idle_workers,
    _workers, _experiments, _unknown,
)  # fmt: skip


# --- the other parts of a step ------------------------------------------------------------------------------------

NAMED_SHARE = 0.5
"""Share of the time between steps from which hooks are its cause, even if the host is known to wait for the device."""
HOOKS_SAID = 3
SMALL_BYTES = 64 * 1024
MANY_TENSORS = 8
"""Largest mean size in bytes, and fewest tensors, of a batch of many small tensors."""
LAUNCH_SHARE = 0.9
"""CPU time of the training thread, as a share of the device's time without the backward pass, from which launching is
the cause."""
FAR = 1.5
"""Ratio of the step to the model alone from which the model is not the cause. A smaller one may come from workers that
share the model's CPUs."""
WAITING_HOOKS = ("ProgressBar", "ThroughputMonitor")
"""Callbacks of Lightning that wait for the device to read a metric or to measure: their time counts as that wait."""


def framework_cause(measured: Measurements, shares: Shares) -> Reason:
    """The cause of time between steps: hooks, or a wait for the device that empties its queue."""
    hooks = measured.hooks
    facts = measured.facts
    said = [f"{hook.name} takes {in_ms(hook.ms_per_step, shares.step_ms)} ms a step" for hook in hooks[:HOOKS_SAID]]
    working = sum(hook.ms_per_step for hook in hooks if not _waits(hook))
    syncs = facts.syncs if facts.device_type != "cpu" else ()
    if syncs and working < NAMED_SHARE * (measured.stats.other_ms or 0.0):
        waits = [f"the host waits for the device in each step: {SYNCS[name]}" for name in syncs if name in SYNCS]
        return Reason("synchronisation", waits + said, sure=bool(hooks))
    return Reason("hooks", said)


def _waits(hook: HookTime) -> bool:
    return any(name in hook.name for name in WAITING_HOOKS)


def copy_cause(measured: Measurements, _: Shares) -> Reason:
    """The cause of an exposed transfer to the device."""
    return next(chain(_beside_the_copy(measured), _slow_copies(measured), _link(measured)))


def _slow_copies(measured: Measurements) -> Iterator[Reason]:
    facts = measured.facts
    if facts.pin_memory is False:
        yield Reason("unpinned", ["batches are in pageable memory"])
    count = facts.batch_tensors or 0
    size = facts.batch_bytes
    if size is not None and count >= MANY_TENSORS and size <= count * SMALL_BYTES:
        yield Reason("small tensors", [f"a batch has {count} tensors of {size / count / 1024:.1f} kB"])
    if facts.pin_memory and not measured.stats.prefetch_active:
        yield Reason("not overlapped", ["batches are copied on the stream that computes"])


def _link(measured: Measurements) -> Iterator[Reason]:
    h2d_ms = measured.stats.h2d_ms
    if measured.facts.pin_memory and h2d_ms and measured.facts.batch_bytes:
        rate = measured.facts.batch_bytes / h2d_ms * 1e-6
        yield Reason("link", [f"batches are copied ahead, and still {rate:.1f} GB/s are not enough"])
    yield Reason("unknown", ["it is not known if batches are pinned"], sure=False)


def _beside_the_copy(measured: Measurements) -> Iterator[Reason]:
    """Causes in the transfer besides the copy itself."""
    facts = measured.facts
    if facts.device_type == "cpu":
        takes = "device_transform takes" if facts.device_transform else "transfer hooks take"
        yield Reason("transfer hooks", [f"nothing is copied on the CPU: {takes} the time"])
    if facts.backend == "nvjpeg":
        said = "nvJPEG decodes during the transfer, and the host waits for it: this time is decoding, not the copy"
        yield Reason("decoding on the GPU", [said])


def compute_cause(measured: Measurements, shares: Shares) -> Reason:
    """The cause of a long step itself: work on the device, or on the host to launch it."""
    compute = measured.stats.compute_ms or 0.0
    alone = model_alone_ms(measured)
    because = []
    if alone is not None and compute >= FAR * alone:
        return _not_the_model(measured, shares, alone)
    if shares.compute_bound_confirmed:
        because.append(
            f"the model alone takes {in_ms(alone, shares.step_ms)} ms a step with one batch repeated: "
            "faster loading would not help here"
        )
    host_ms = _launching_ms(measured)
    if host_ms is not None:
        whole = shares.step_ms
        said = f"the training thread computes {in_ms(host_ms, whole)} ms a step to launch the work of the device"
        return Reason("launch", [*because, said], sure=False)
    return Reason("compute", because)


def _launching_ms(measured: Measurements) -> float | None:
    """CPU time of the training thread in a step, if that takes as long as the device's work; else None.

    The thread launches the forward pass and the optimizer. The backward pass has a thread of its own, for which it
    waits (https://docs.pytorch.org/docs/stable/notes/autograd.html#multithreaded-autograd). A thread that waits for
    the device spins, so it looks busy: nothing follows if a synchronisation is known.
    """
    facts = measured.facts
    stats = measured.stats
    compute_ms = stats.compute_ms or 0.0
    if facts.device_type == "cpu" or facts.syncs or facts.host_cpu_ms is None or not compute_ms:
        return None
    own_ms = compute_ms - (stats.backward_ms or 0.0)
    return facts.host_cpu_ms if facts.host_cpu_ms >= LAUNCH_SHARE * own_ms else None


def _not_the_model(measured: Measurements, shares: Shares, alone: float) -> Reason:
    """The cause of a step that takes much longer than its model: something else uses the CPUs."""
    whole = shares.step_ms
    pressure = measured.loaders.cpu_pressure_pct
    said = (
        f"the model alone takes {in_ms(alone, whole)} of the {in_ms(measured.stats.compute_ms, whole)} ms of the step "
        "itself: other programs take its CPUs, or the step does more than the model"
    )
    if pressure is None or pressure < CPU_PRESSURE_PCT:
        return Reason("unknown", [said], contradicted=True)
    because = [said, f"some task waits for a CPU {pressure:.0f} % of the time"]
    return Reason("oversubscribed", because, contradicted=True)
