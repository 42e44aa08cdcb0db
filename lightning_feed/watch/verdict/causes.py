"""Causes: why each part of a step takes what it takes.

For waiting, the first rule that the figures meet. Workers are blocked, too, when they have nothing to do. So what they
do counts only while training waits for them, and what can leave them idle meanwhile (one slow batch in front, a queue
that is full most of the time) is asked first.
"""

from dataclasses import replace

from lightning_feed.watch.verdict.diagnosis import SYNCS, Finding, HookTime, Measurements
from lightning_feed.watch.verdict.shares import DATA_PCT, OTHERS_PCT, Shares, in_ms, model_alone_ms

HEAD_OF_LINE_PCT = 25.0
"""Share of the waiting in which a later batch was ready."""
PIN_SHARE = 0.5
"""Mean wait for the pin thread over the mean wait of a step."""
RUN_QUEUE_PCT = 30.0
THROTTLED_PCT = 20.0
CPU_PRESSURE_PCT = 30.0
BUSY_PCT, BLOCKED_PCT = 70.0, 50.0
"""Shares of the workers' time on a CPU or ready for one, and neither."""
READY_SHARE = 0.5
"""Share of the queue that is full on average. Workers in step with each other, who finish all at once, leave it less
than half full: (workers - 1) / 2 of at least ``workers`` batches."""
HANDOVER_PCT = 80.0
"""Share of the waiting that began with batches ready from which handing them over is the cause. Where a queue runs dry
now and then, the millisecond that each of the other batches takes is a good part of it, too."""
QUEUE_SHARE = 0.1
"""Share of loading without a CPU, from which it is worth telling."""
WARM_PCT = 80.0
"""Share of the bytes from the page cache from which the disk is not the reason."""
DISK_MB_PER_S = 0.05
"""A disk that gives less than this is not what workers wait for, were it one of random 4 kB reads (100 a second)."""
IO_PRESSURE_PCT = 20.0
DALI_DECODES = (
    "DALI works on the GPU, and a batch that it is not done with is waited for there: its decoding is part of this time"
)
FASTER, NO_FASTER = 1.25, 1.1
"""How much faster the loader is without a stage that is at fault, and at most without one that is not."""


def data_cause(measured: Measurements, shares: Shares) -> Finding:
    """Why training waits for data."""
    found = (
        _epoch_start(measured, shares)
        or _one_rank(measured, shares)
        or _no_workers(measured)
        or _oversubscribed(measured)
        or _pin_thread(measured)
        or _head_of_line(measured)
        or _handover(measured)
        or _jitter(measured)
        or _workers(measured)
        or _experiments(measured)
        or _unknown(measured)
    )
    facts = measured.facts
    if facts.dali_device == "cuda" or facts.backend == "dali-gpu":
        return replace(found, because=(*found.because, DALI_DECODES))
    return found


def _unknown(measured: Measurements) -> Finding:
    if measured.facts.dali_device is not None:
        return Finding(
            cause="unknown", because=("DALI loads in threads of its own, whose work is not measured",), sure=False
        )
    return Finding(cause="unknown", because=("what the workers do meanwhile is not known",), sure=False)


def _epoch_start(measured: Measurements, shares: Shares) -> Finding | None:
    if shares.epoch_pct is None or shares.epoch_pct < DATA_PCT:
        return None
    steady = 100 * shares.data_ms / shares.step_ms
    if shares.epoch_pct < steady:
        return None
    start, batches = measured.stats.epoch_start_s, measured.facts.batches_per_epoch
    return Finding(
        cause="epoch start",
        because=(
            f"{shares.epoch_pct:.0f} % of an epoch of {batches} steps goes by before its first batch ({start:.2f} s)",
        ),
    )


def _one_rank(measured: Measurements, shares: Shares) -> Finding | None:
    ranks = measured.ranks
    if ranks is None or ranks.slow_rank is None:
        return None
    said = f"rank {ranks.slow_rank} of {ranks.world_size} waits longest, the others wait for it"
    if ranks.slow_rank < len(ranks.data_idle_ms_by_rank):
        by_rank = sorted(ranks.data_idle_ms_by_rank)
        its, median = ranks.data_idle_ms_by_rank[ranks.slow_rank], by_rank[(len(by_rank) - 1) // 2]
        said += f" ({in_ms(its, shares.step_ms)} ms a step; the median rank {in_ms(median, shares.step_ms)})"
    return Finding(cause="one rank", because=(said,))


def _no_workers(measured: Measurements) -> Finding | None:
    """Reports say what that means where they name the cause."""
    facts, wait = measured.facts, measured.stats.next_wait_ms
    if facts.num_workers != 0:
        return None
    cpu, queue, step = facts.load_cpu_ms, facts.load_queue_ms, measured.stats.step_ms or 0.0
    if not wait or cpu is None or queue is None:
        return Finding(cause="no workers")
    cpu = min(wait, cpu)
    queue = min(wait - cpu, queue)
    said = f"of {in_ms(wait, step)} ms that loading takes, {in_ms(cpu, step)} are on a CPU"
    if queue >= QUEUE_SHARE * wait:
        said += f", and in {in_ms(queue, step)} other threads or programs have the CPUs"
    return Finding(cause="no workers", because=(said,))


def _oversubscribed(measured: Measurements) -> Finding | None:
    loaders, facts = measured.loaders, measured.facts
    queue, throttled, pressure = loaders.workers_run_queue_pct, loaders.throttled_pct, loaders.cpu_pressure_pct
    if queue is not None and queue >= RUN_QUEUE_PCT:
        why = [f"workers are ready to run, without a CPU, {queue:.0f} % of their time"]
        if facts.num_workers and facts.usable_cpus and facts.num_workers <= facts.usable_cpus:
            why.append("there are no more workers than CPUs, so other threads or other programs take them")
        return Finding(cause="oversubscribed", because=tuple(why))
    if throttled is not None and throttled >= THROTTLED_PCT:
        said = f"the CPU quota is used up in {throttled:.0f} % of the scheduler's periods"
        return Finding(cause="oversubscribed", because=(said,))
    crowded = facts.num_workers and facts.usable_cpus and facts.num_workers > facts.usable_cpus
    # Workers whose queue is full rest; then it is the training process that waits for a CPU, to take what is ready.
    unseen = queue is None or (loaders.handover_pct or 0.0) >= HANDOVER_PCT
    by_others = (facts.others_cpu_pct or 0.0) >= OTHERS_PCT
    if unseen and crowded and not by_others and pressure is not None and pressure >= CPU_PRESSURE_PCT:
        said = f"some task waits for a CPU {pressure:.0f} % of the time"
        return Finding(cause="oversubscribed", because=(said,), sure=False)
    return None


def _pin_thread(measured: Measurements) -> Finding | None:
    lag, wait = measured.loaders.pin_lag_ms, measured.stats.next_wait_ms
    if not lag or not wait or lag < PIN_SHARE * wait or measured.facts.pin_memory is False:
        return None
    return Finding(
        cause="pin thread", because=(f"batches that were there had to be pinned first: {lag:.1f} ms a wait",)
    )


def _head_of_line(measured: Measurements) -> Finding | None:
    held = measured.loaders.head_of_line_pct
    if held is None or held < HEAD_OF_LINE_PCT or (_busy_pct(measured) or 0.0) >= BUSY_PCT:
        return None  # workers that are never idle lose nothing to the order
    return Finding(cause="head of line", because=(f"a later batch was ready in {held:.0f} % of the waiting",))


def _handover(measured: Measurements) -> Finding | None:
    share, wait = measured.loaders.handover_pct, measured.stats.next_wait_ms
    if share is None or share < HANDOVER_PCT or (_busy_pct(measured) or 0.0) >= BUSY_PCT:
        return None
    said = f"batches were ready in {share:.0f} % of the waiting: handing one over takes most of {wait or 0.0:.1f} ms"
    return Finding(cause="hand-over", because=(said,))


def _jitter(measured: Measurements) -> Finding | None:
    ready, capacity = measured.loaders.queue_ready, measured.loaders.queue_capacity
    if (_busy_pct(measured) or 0.0) >= BUSY_PCT:
        return None  # workers that never rest are not fast enough on average
    if ready is not None and capacity and ready >= READY_SHARE * capacity:
        said = f"{ready:.1f} of {capacity:.0f} batches are ready on average, yet not always one"
        return Finding(cause="jitter", because=(said,))
    return None


def _workers(measured: Measurements) -> Finding | None:
    busy = _busy_pct(measured)
    if busy is None:
        return None
    loaders = measured.loaders
    on_cpu, queue = loaders.workers_on_cpu_pct or 0.0, loaders.workers_run_queue_pct or 0.0
    blocked = 100.0 - busy
    said = f"workers are on a CPU {on_cpu:.0f} % of their time, ready for one {queue:.0f} %, blocked {blocked:.0f} %"
    if blocked < BLOCKED_PCT:
        return Finding(cause="cpu", because=(said,), sure=busy >= BUSY_PCT)
    return _blocked(measured, said)


def _busy_pct(measured: Measurements) -> float | None:
    """Share of the workers' time on a CPU or ready for one."""
    loaders = measured.loaders
    on_cpu, queue, blocked = loaders.workers_on_cpu_pct, loaders.workers_run_queue_pct, loaders.workers_blocked_pct
    if blocked is not None:
        return max(0.0, 100.0 - blocked)
    return None if on_cpu is None or queue is None else min(100.0, on_cpu + queue)


def _blocked(measured: Measurements, said: str) -> Finding:
    """Workers neither compute nor could: do they wait for storage, or for something else?"""
    loaders, found = measured.loaders, measured.experiments
    gain = None if found is None else _ratio(found.cached_bytes_per_s, found.loader_per_s)
    if gain is not None and gain >= FASTER:
        return Finding(
            cause="cold reads", because=(said, f"with its files in memory the loader is {gain:.1f} x as fast")
        )
    if gain is not None and gain < NO_FASTER:
        return Finding(cause="waiting", because=(said, "with its files in memory the loader is no faster"))
    cached, disk, pressure = loaders.page_cache_pct, loaders.disk_mb_per_s, loaders.io_pressure_pct
    gives = disk is None or disk >= DISK_MB_PER_S
    if cached is not None and cached < WARM_PCT and gives:
        rate = "" if disk is None else f", {disk:.1f} MB/s"
        return Finding(cause="cold reads", because=(said, f"{100 - cached:.0f} % of the bytes come from storage{rate}"))
    if cached is None and disk is not None and gives and (pressure or 0.0) >= IO_PRESSURE_PCT:
        return Finding(cause="cold reads", because=(said, f"storage gives {disk:.1f} MB/s, mapped into memory"))
    if cached is None and disk is None:
        if pressure is None:
            return Finding(cause="unknown", because=(said, "whether for storage is not known"), sure=False)
        if pressure >= IO_PRESSURE_PCT:
            because = (said, f"some task waits for storage {pressure:.0f} % of the time")
            return Finding(cause="cold reads", because=because, sure=False)
    read = "" if cached is None else f": {cached:.0f} % of the bytes come from the page cache"
    return Finding(cause="waiting", because=(said, f"not for storage{read}"))


def _experiments(measured: Measurements) -> Finding | None:
    """Nothing is known of the workers: what the loader gained from leaving a stage out."""
    found = measured.experiments
    if found is None:
        return None
    cached = _ratio(found.cached_bytes_per_s, found.loader_per_s)
    if cached is not None and cached >= FASTER:
        return Finding(cause="cold reads", because=(f"with its files in memory the loader is {cached:.1f} x as fast",))
    wall = sum(cost.wall_ms for cost in found.costs)
    if wall > 0:
        cpu_pct = 100 * sum(cost.cpu_ms for cost in found.costs) / wall
        said = f"a sample takes {wall:.2f} ms, {cpu_pct:.0f} % of it on a CPU"
        if cpu_pct >= BUSY_PCT:
            return Finding(cause="cpu", because=(said,))
        if cpu_pct <= 100 - BLOCKED_PCT and cached is not None:
            return Finding(cause="waiting", because=(said, "with its files in memory the loader is no faster"))
    ceiling = _ratio(found.ceiling_per_s, found.loader_per_s)
    if ceiling is not None and ceiling < NO_FASTER:
        said = "constant samples load no faster: collating and sending batches is the limit"
        return Finding(cause="cpu", because=(said,), sure=False)
    return None


def _ratio(rate: float | None, base: float | None) -> float | None:
    return None if rate is None or not base else rate / base


NAMED_SHARE = 0.5
"""Share of the time between the steps that hooks must take to be its cause, and not a wait for the device."""
HOOKS_SAID = 3
SMALL_BYTES, MANY_TENSORS = 64 * 1024, 8
"""What PrefetchCallback(pack_small=True) would pack: so many tensors of at most so many bytes."""
COPY_SHARE = 0.5
"""Share of the time in the transfer to the device that the copy alone takes, or else hooks are at fault."""
LINK_SHARE = 0.5
"""Share of the speed of a pinned copy from which the link is the limit."""
LAUNCH_SHARE = 0.9
"""CPU time of the training thread over the time of the step on the device."""
FAR = 1.5
"""The step itself over the model alone, from which it is not the model that takes the time. Below, it may be workers
that share its CPUs as they should."""
WAITING_HOOKS = ("ProgressBar", "ThroughputMonitor")
"""Callbacks of Lightning that wait for the device when they read a metric or measure: their time is such a wait."""


def framework_cause(measured: Measurements, shares: Shares) -> Finding:
    """Hooks, or what makes the host wait for the device so that nothing is queued when it comes to the next step."""
    hooks = measured.hooks
    said = tuple(
        f"{hook.name} takes {in_ms(hook.ms_per_step, shares.step_ms)} ms a step" for hook in hooks[:HOOKS_SAID]
    )
    syncs = measured.facts.syncs if measured.facts.device_type != "cpu" else ()
    working = sum(hook.ms_per_step for hook in hooks if not _waits(hook))
    if syncs and working < NAMED_SHARE * (measured.stats.other_ms or 0.0):
        waits = tuple(f"the host waits for the device in each step: {SYNCS[name]}" for name in syncs if name in SYNCS)
        return Finding(cause="synchronisation", because=waits + said, sure=bool(hooks))
    return Finding(cause="hooks", because=said)


def copy_cause(measured: Measurements, shares: Shares) -> Finding:
    """Why the transfer to the device is exposed."""
    facts, stats, found = measured.facts, measured.stats, measured.experiments
    h2d = stats.h2d_ms or 0.0
    if facts.device_type == "cpu":
        return Finding(cause="transfer hooks", because=("nothing is copied on the CPU: transfer hooks take the time",))
    alone = None if found is None else found.copy_ms
    if facts.backend == "nvjpeg" and (alone is None or alone < COPY_SHARE * h2d):
        said = "nvJPEG decodes in the transfer to the device, and the host waits for it: this is decoding, not the copy"
        return Finding(cause="decoding on the GPU", because=(said,))
    if alone is not None and alone < COPY_SHARE * h2d:
        said = f"the copy alone takes {in_ms(alone, shares.step_ms)} ms, hooks the rest"
        return Finding(cause="transfer hooks", because=(said,))
    if facts.pin_memory is False:
        return Finding(cause="unpinned", because=("batches lie in pageable memory",))
    count, size = facts.batch_tensors, facts.batch_bytes
    if count is not None and size is not None and count >= MANY_TENSORS and size <= count * SMALL_BYTES:
        return Finding(cause="small tensors", because=(f"a batch has {count} tensors of {size / count / 1024:.1f} kB",))
    if facts.pin_memory and not stats.prefetch_active:
        return Finding(cause="not overlapped", because=("batches are copied on the stream that computes",))
    if alone is not None:
        said = f"the copy alone takes {in_ms(alone, shares.step_ms)} ms"
        return Finding(cause="link", because=(said,))
    if found is not None and found.pinned_gb_per_s and size and h2d:
        rate = size / h2d * 1e-6
        if rate >= LINK_SHARE * found.pinned_gb_per_s:
            said = f"{rate:.1f} GB/s of the {found.pinned_gb_per_s:.1f} that the link gives"
            return Finding(cause="link", because=(said,))
    return Finding(
        cause="unknown", because=("whether batches are pinned, or what the link gives, is not known",), sure=False
    )


def compute_cause(measured: Measurements, shares: Shares) -> Finding:
    """The step itself: what the device computes, or what the host needs to tell it so."""
    facts, compute = measured.facts, measured.stats.compute_ms
    because = []
    alone = model_alone_ms(measured)
    if alone is not None and compute is not None and compute >= FAR * alone:
        return _not_the_model(measured, shares, alone)
    if shares.compute_bound_confirmed and alone is not None:
        because.append(
            f"the model alone takes {in_ms(alone, shares.step_ms)} ms a step with one batch again and again: "
            "faster loading would not help here"
        )
    # A thread that waits for the device spins, and so looks busy: with a known synchronisation nothing can be told.
    host = facts.host_cpu_ms if facts.device_type != "cpu" and not facts.syncs else None
    if host is not None and compute and host >= LAUNCH_SHARE * compute:
        said = f"the training thread computes {in_ms(host, shares.step_ms)} ms a step to issue what the device does"
        return Finding(cause="launch", because=(*because, said), sure=False)
    return Finding(cause="compute", because=tuple(because))


def _not_the_model(measured: Measurements, shares: Shares, alone: float) -> Finding:
    """The step takes much longer than the model in it: what else is known to take the CPUs."""
    whole, compute = shares.step_ms, measured.stats.compute_ms
    said = (
        f"the model alone takes {in_ms(alone, whole)} of the {in_ms(compute, whole)} ms of the step itself: "
        "others take its processors, or the step does what the model does not"
    )
    pressure = measured.loaders.cpu_pressure_pct
    if pressure is None or pressure < CPU_PRESSURE_PCT:
        return Finding(cause="unknown", because=(said,), contradicted=True)
    because = (said, f"some task waits for a CPU {pressure:.0f} % of the time")
    return Finding(cause="oversubscribed", because=because, contradicted=True)


def _waits(hook: HookTime) -> bool:
    return any(name in hook.name for name in WAITING_HOOKS)
