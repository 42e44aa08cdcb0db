"""Predicted step time with a remedy: from the rates of experiments, else from the figures of the run.

- Without workers, loading and training take turns: the step becomes shorter by the loading time that a remedy saves.
- With workers, a step takes as long as the slower of two: training plus taking a batch, or making a batch.
- Workers need CPUs. If they do not fit beside training, the step becomes longer: :func:`crowding_ms`. And training and
  loading cannot take less time than their CPU time on the CPUs that other programs leave: :func:`filled_ms`.
- Time in which a thread is ready to run without a CPU does not count as waiting for data.
- No prediction is below the rest of the step, or the model alone.
"""

import math
from dataclasses import replace

from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.verdict.shares import Shares, model_alone_ms

SAME = 1.1
"""Usual difference between two measurements of the same setting: of 67 fits measured twice within a minute, 58 agreed
within a tenth (``benchmarks/predictions.py`` on a virtual machine with 2 CPUs)."""
NOT_TRANSFORMS = ("read", "decode", "load")
"""Costs of a sample other than transforms, as experiments name them: see :func:`step_of`."""

_TAKE = (0.5, 0.1, 0.5)
"""Cost for the training process to take a batch from a worker process: ms, ms per tensor, ms per megabyte. Measured for
lists of 1 to 64 tensors of 100 B to 40 MB on a virtual machine with 2 CPUs, torch 2.15."""
_SEND = (0.3, 0.25, 0.75)
"""The worker's cost, in the same units: it moves the batch into shared memory, and answers for each tensor."""
_SLOWEST = 3.0
"""Largest factor by which other programs slow down taking a batch."""
_TENSORS = 32
"""Tensors assumed in a batch of a user's class, which may hide many."""
MOSTLY = 0.5
"""Share of a batch's time spent blocked above which a worker counts as waiting."""
_IDLE_CPUS = 0.3
"""CPUs that stay idle although training and its workers need more than there are, because each sometimes waits for the
other: 0.24 to 0.34 of 2 CPUs in three projects of ``tests/zoo``."""
_SIDE_BY_SIDE = 1.2
"""Factor on the CPU time of loading and training if they run at once instead of taking turns: they share caches, memory
and clock. With the first workers in ``tests/zoo`` (18 runs on two days), steps took 0.96 to 1.40 times as long as
predicted without this factor; nine of ten at most 1.34 times."""
_START_MS = 100.0
"""Time to start and end a worker process in each epoch: 50 ms if the forking process holds 0.5 GB, and 100 ms if it
holds 2.5 GB (1 to 8 workers on a virtual machine with 2 CPUs, torch 2.15)."""

_AHEAD = 2
"""Batches that a worker prefetches: torch's default ``prefetch_factor``."""


def step_of(name: str) -> str:
    """Name of a cost without its loader's name: ``load`` for ``"a: load"``."""
    return name.rpartition(": ")[2]


def without(shares: Shares, part_ms: float) -> float:
    """Step time if a part of ``part_ms`` is saved."""
    return shares.step_ms - min(max(0.0, part_ms), shares.step_ms)


def serial(facts: LoopFacts) -> bool:
    """True if the training process itself loads, so that loading and training take turns."""
    return facts.num_workers == 0


def period_ms(measured: Measurements, shares: Shares) -> float | None:
    """Time for the loader to make a batch: a step with workers, else the time in ``next(loader)``; None if unknown.

    Only meaningful while training waits for data.
    """
    return measured.stats.next_wait_ms if serial(measured.facts) else shares.step_ms


def floor_ms(measured: Measurements, shares: Shares) -> float:
    """Step time without waiting for data, but with the time to take a ready batch.

    It is the rest of the step, or the model alone if that takes longer.
    """
    taking = measured.found.taking_ms or 0.0
    return min(shares.step_ms, taking + max(shares.floor_ms, model_alone_ms(measured) or 0.0))


def with_batch_in(measured: Measurements, shares: Shares, after_ms: float) -> float | None:
    """Step time if the same workers, or none, make a batch in ``after_ms``; None if unknown."""
    running = period_ms(measured, shares)
    if running is None:
        return None
    if serial(measured.facts):
        return max(floor_ms(measured, shares), without(shares, running - after_ms))
    loading = loading_cpu_ms(measured, shares) * min(1.0, after_ms / running) if running else 0.0
    return min(shares.step_ms, max(filled_ms(measured, shares, loading), after_ms))


def with_rate(measured: Measurements, shares: Shares, rate: float | None, now: float | None) -> float | None:
    """Step time if the loader alone reaches ``rate`` batches per second, and reached ``now`` before.

    A loader is slower while a model trains. If the present loader is slower by more than the factor :data:`SAME`, the
    loader with the remedy is assumed to become slower by as much.
    """
    return with_batch_in(measured, shares, _beside(measured, shares, rate, now)) if rate else None


def crowding_ms(measured: Measurements, shares: Shares, loading_ms: float, workers: int) -> float:
    """Increase of the step time if workers take ``loading_ms`` of CPU time for each step; 0.0 if unknown.

    Workers first use the CPU time that training and other programs leave idle. The rest of their CPU time slows
    training down: a single training thread only by that thread's share of the CPUs, but threads that compute together
    on all CPUs by all of it, because each waits for the slowest. Workers never take more than an equal share for each
    runnable thread, because Linux gives them no more.
    """
    facts = measured.facts
    rest = shares.floor_ms
    training = training_cpu_ms(measured, shares)
    if not facts.usable_cpus or training is None or rest <= 0:
        return 0.0
    cpus = facts.usable_cpus
    width = min(cpus, max(1.0, training / rest))
    left = cpus * rest * (1 - facts.others_share) - training
    fair = rest * max(0.0, (width + workers) / cpus - 1)
    return min(fair, max(0.0, loading_ms - max(0.0, left)) * width / cpus)


def filled_ms(
    measured: Measurements,
    shares: Shares,
    loading_ms: float,
    taking_ms: float = 0.0,
    *,
    workers: int | None = None,
    slower: float = 1.0,
) -> float:
    """Step time if training never waits for a batch, and workers take ``loading_ms`` of CPU time for each step.

    The step is at least as long as the CPU time of training and loading, divided by the CPUs that the run will get
    (:func:`_cpus_to_get`). ``workers``: workers of each loader; None: as now. ``slower``: factor on the CPU time of
    training and loading, if the run has more than one CPU.
    """
    facts = measured.facts
    workers = facts.all_workers if workers is None else facts.loaders_beside * workers
    step = floor_ms(measured, shares) + taking_ms + crowding_ms(measured, shares, loading_ms, workers)
    if not facts.usable_cpus:
        return step
    training = training_cpu_ms(measured, shares) or 0.0
    left = _cpus_to_get(measured, (training + loading_cpu_ms(measured, shares)) / shares.step_ms)
    spent = (training + loading_ms) * (slower if left > 1 else 1.0)
    return max(step, spent / left) if left else step


def _cpus_to_get(measured: Measurements, now: float) -> float:
    """CPUs that training and loading will get, of which they use ``now``.

    They are those that other programs leave, less :data:`_IDLE_CPUS`. More workers do not take CPUs from other
    programs: Linux divides CPUs between sessions and containers first, and then between the threads of each. With
    several ranks, the share of other programs is unknown, and what the loading threads got stands for the rest. Threads
    that are mostly blocked use few CPUs, and could use those that they got whenever they were ready for one.
    """
    facts = measured.facts
    got = _share_got(measured)
    cpus = facts.usable_cpus or 0
    free = cpus * (1 - facts.others_share)
    idle = _IDLE_CPUS if cpus > 1 or facts.world_size > 1 else 0.0  # ranks wait for each other, too
    if got is not None and facts.world_size > 1:
        free = min(free, cpus * got)
    sure = max(now, free - idle)
    if got is None or blocked_share(measured) < MOSTLY:
        return sure
    threads = 1 if serial(facts) else facts.all_workers + 1
    return max(sure, min(min(threads, cpus) * got, cpus - idle))


def _share_got(measured: Measurements) -> float | None:
    """Share of the time in which the loading threads had a CPU, of that in which they were ready for one."""
    facts = measured.facts
    loaders = measured.loaders
    on_cpu = loaders.workers_on_cpu_pct
    queue = loaders.workers_run_queue_pct
    if serial(facts):
        on_cpu = facts.load_cpu_ms
        queue = facts.load_queue_ms
    return on_cpu / (on_cpu + queue) if on_cpu and queue is not None else None


def blocked_share(measured: Measurements) -> float:
    """Share of a batch's time in which its worker is blocked and leaves the CPU to others, 0 to 1; 0.0 if unknown."""
    facts = measured.facts
    wait = measured.stats.next_wait_ms
    pct = measured.loaders.workers_blocked_pct
    if not serial(facts):
        return (pct or 0.0) / 100
    if not wait or facts.load_cpu_ms is None or facts.load_queue_ms is None:
        return 0.0
    return max(0.0, 1 - (facts.load_cpu_ms + facts.load_queue_ms) / wait)


def with_files_near(measured: Measurements, shares: Shares) -> float | None:
    """Step time if workers are never blocked while they make a batch; None if unknown."""
    running = period_ms(measured, shares)
    blocked = measured.loaders.workers_blocked_pct
    if running is None or blocked is None:
        return None
    return with_batch_in(measured, shares, running * (100 - blocked) / 100)


def with_workers(measured: Measurements, shares: Shares, number: int) -> float | None:
    """Step time with ``number`` worker processes, more than now.

    Uses the loader's rates with this number and with the present one, if both were tried. Else assumes that each worker
    adds the same rate, as long as there are CPUs. None if unknown.
    """
    facts = measured.facts
    running = period_ms(measured, shares)
    now = facts.num_workers
    if running is None or now is None:
        return None
    loading = loading_cpu_ms(measured, shares)
    taking = 0.0
    slower = _SIDE_BY_SIDE if now == 0 and facts.device_type == "cpu" else 1.0
    if now == 0:
        sending = handing_ms(facts, _SEND)
        # A worker has one thread, while this process may have used several.
        one = max(running, loading) + (slower - 1) * loading + sending
        taking = _taking_ms(measured) + _restarting_ms(facts, number) + _left_over_ms(facts, one)
        after = one / number
        loading = loading + sending
    else:
        after = running * now / number
    tried = tried_rates(measured)
    if number in tried and now in tried:
        after = _beside(measured, shares, tried[number], tried[now])
        if now == 0:  # a worker has one thread, so its CPU time is at most its time; torch's threads spin as they wait
            loading = min(loading, 1e3 * facts.loaders_beside * number / tried[number])
    step = max(filled_ms(measured, shares, loading, taking, workers=number, slower=slower), after)
    return step if now == 0 else min(shares.step_ms, step)


def with_crops(measured: Measurements, shares: Shares) -> dict[int, float]:
    """Step time by number of workers if only the crops of images are decoded; empty if that was not timed.

    Contains the present number, and the numbers tried as first workers.
    """
    workers = measured.facts.num_workers
    running = period_ms(measured, shares)
    left = _left_with_crops(measured)
    if left is None or workers is None or running is None:
        return {}
    step = with_batch_in(measured, shares, running * left)
    if step is None:
        return {}
    if not serial(measured.facts):
        return {workers: step}
    cropping = _as_cropping(measured, shares, left, step)
    fewer = replace(shares, step_ms=step, data_ms=max(0.0, shares.data_ms - (shares.step_ms - step)))
    steps = {number: with_workers(cropping, fewer, number) for number in tried_rates(cropping) if number}
    return {0: step} | {number: then for number, then in steps.items() if then is not None}


def _left_with_crops(measured: Measurements) -> float | None:
    """Share of a batch's time that remains if only crops are decoded; None if that was not timed."""
    found = measured.found
    trial = measured.found.crops
    if trial is None or not trial.whole_ms:
        return None
    left = trial.crop_ms / trial.whole_ms
    if not found.samples_ms or not found.collate_ms:
        return left
    return (left * found.samples_ms + found.collate_ms) / (found.samples_ms + found.collate_ms)  # collating stays


def _as_cropping(measured: Measurements, shares: Shares, left: float, step_ms: float) -> Measurements:
    """The measurements that the run would have with crops only, to predict first workers from."""
    facts = measured.facts
    found = measured.found
    loading = loading_cpu_ms(measured, shares)
    queue = facts.load_queue_ms
    running = period_ms(measured, shares)
    most = found.ceiling_per_s or math.inf
    less = {name: (1 - left) * loading for name in ("host_cpu_ms", "process_cpu_ms") if vars(facts)[name] is not None}
    rates = {number: min(rate / left, most) for number, rate in tried_rates(measured).items()}
    return replace(
        measured,
        stats=replace(measured.stats, step_ms=step_ms, next_wait_ms=None if running is None else running * left),
        facts=replace(
            facts,
            load_cpu_ms=loading * left,
            load_queue_ms=None if queue is None else queue * left,
            **{name: vars(facts)[name] - saved for name, saved in less.items()},
        ),
        experiments=replace(found, worker_scaling=tuple(rates.items())),
    )


def without_workers(measured: Measurements, shares: Shares) -> float | None:
    """Step time without workers, if loading a batch in one process was timed; else None."""
    found = measured.found
    alone = tried_rates(measured).get(0)
    if alone:
        return shares.floor_ms + 1e3 / alone
    if found.samples_ms is None or found.collate_ms is None:
        return None
    return shares.floor_ms + found.samples_ms + found.collate_ms


def by_trial(measured: Measurements, shares: Shares, number: int) -> float | None:
    """Step time with ``number`` workers, if that number and the present one were both tried; else None."""
    tried = tried_rates(measured)
    now = measured.facts.num_workers
    if now is None or number not in tried or now not in tried:
        return None
    return with_rate(measured, shares, tried[number], tried[now])


def tried_rates(measured: Measurements) -> dict[int, float]:
    """Batches per second of the loader alone, by number of workers. Empty: none was tried."""
    return {number: rate for number, rate in measured.found.worker_scaling if rate > 0}


def handing_ms(facts: LoopFacts, cost: tuple[float, float, float] = _TAKE) -> float:
    """Time that one process spends on passing a batch to another, by the number of its tensors and bytes."""
    once, each, megabyte = cost
    by_size = each * (facts.batch_tensors or _TENSORS) + megabyte * (facts.batch_bytes or 0) * 1e-6
    return facts.loaders_beside * once + by_size


def read_share(measured: Measurements) -> float | None:
    """Share of a sample's time spent reading, 0 to 1; None if unknown."""
    costs = {cost.name: cost.wall_ms for cost in measured.found.costs}
    whole = sum(costs.values())
    return costs["read"] / whole if "read" in costs and whole > 0 else None


def in_any_order(measured: Measurements, shares: Shares) -> float | None:
    """Step time without the waits in which a later batch was ready."""
    held = measured.loaders.head_of_line_pct
    if held is None:
        return None
    filled = filled_ms(measured, shares, loading_cpu_ms(measured, shares))
    return min(shares.step_ms, max(filled, without(shares, shares.data_ms * held / 100)))


def _beside(measured: Measurements, shares: Shares, rate: float, now: float | None) -> float:
    """Milliseconds per batch during training, for a loader that reaches ``rate`` alone and reached ``now`` before."""
    running = period_ms(measured, shares)
    if now and running is not None and running * now > 1e3 * SAME:
        return running * now / rate
    return 1e3 / rate


def loading_cpu_ms(measured: Measurements, shares: Shares) -> float:
    """CPU time of loading a batch: as measured, or all of the loading time without workers."""
    facts = measured.facts
    on_cpu = measured.loaders.workers_on_cpu_pct
    if serial(facts):
        return (measured.stats.next_wait_ms or 0.0) if facts.load_cpu_ms is None else facts.load_cpu_ms
    return facts.all_workers * shares.step_ms * (on_cpu or 0.0) / 100


def training_cpu_ms(measured: Measurements, shares: Shares) -> float | None:
    """CPU time of the training process per step without loading; None if unknown."""
    facts = measured.facts
    spent = facts.process_cpu_ms if facts.process_cpu_ms is not None else facts.host_cpu_ms
    if spent is None:
        return shares.floor_ms if facts.device_type == "cpu" else None
    if serial(facts):
        spent -= loading_cpu_ms(measured, shares)
    return max(0.0, spent)


def _taking_ms(measured: Measurements) -> float:
    """Time to take a batch from a worker, estimated from its tensors and bytes."""
    others = measured.facts.others_share  # other programs slow this down as they do training
    return handing_ms(measured.facts) * min(_SLOWEST, 1 / max(1e-9, 1 - others))


def _restarting_ms(facts: LoopFacts, number: int) -> float:
    """Time for starting workers in each epoch, per step; 0.0 for persistent workers."""
    if facts.may_persist or not facts.batches_per_epoch:
        return 0.0
    return facts.loaders_beside * number * _START_MS / facts.batches_per_epoch


def _left_over_ms(facts: LoopFacts, one_ms: float) -> float:
    """Time for prefetched batches that are dropped if an epoch ends early, per step."""
    if not facts.breaks_off or not facts.batches_per_epoch:
        return 0.0
    return _AHEAD * one_ms / facts.batches_per_epoch
