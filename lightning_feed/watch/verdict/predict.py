"""Step time to expect of a remedy: ``max(1/G, h2d, 1/min(F, P, I))`` where experiments gave the rates, else what the
running figures give.

Each figure is a lower bound, "at best": a remedy can uncover the next limit, which was not measured.
"""

from lightning_feed.watch.verdict.diagnosis import Measurements
from lightning_feed.watch.verdict.shares import Shares

NO_GAIN = 0.98
"""A remedy that leaves more of the step than this is not worth naming for its speed."""
SAME = 1.1
"""By as much do two measurements of the same differ: of 67 fits that were measured twice within a minute, 58 agreed
within a tenth (``benchmarks/predictions.py`` on a virtual machine with 2 CPUs)."""


def without(shares: Shares, part_ms: float | None) -> float | None:
    """Step time without so much of it."""
    return None if part_ms is None else shares.step_ms - min(max(0.0, part_ms), shares.step_ms)


def floor_ms(measured: Measurements, shares: Shares) -> float:
    """Step time when no batch is waited for: the rest of the step, or the model alone where that takes longer; and the
    time to take a batch that is ready, which counts as waiting while none is."""
    found = measured.experiments
    alone = 1e3 / found.model_per_s if found is not None and found.model_per_s else 0.0
    taking = (found.taking_ms or 0.0) if found is not None else 0.0
    return min(shares.step_ms, taking + max(shares.floor_ms, alone))


def period_ms(measured: Measurements, shares: Shares) -> float | None:
    """Time in which the loader makes a batch while training waits for it.

    With workers that is a step; without, what ``next(loader)`` takes. None: not known.
    """
    if measured.facts.num_workers == 0:
        return measured.stats.next_wait_ms
    return shares.step_ms


def with_rate(
    measured: Measurements, shares: Shares, rate: float | None, now: float | None = None, workers: int | None = None
) -> float | None:
    """Step time with a loader that gives ``rate`` batches per second where it gave ``now``, both alone.

    Beside training a loader is slower than alone. Where it is by more than :data:`SAME`, it is taken to be with the
    remedy too; else the rate counts as it is. Alone a loader has the CPUs that training takes for itself, too: see
    :func:`cpu_floor_ms`.

    Args:
        measured: all figures.
        shares: how a step divides.
        rate: batches per second with the remedy.
        now: the same without it.
        workers: with the remedy; None: as many as now.
    """
    if not rate:
        return None
    running = period_ms(measured, shares)
    after = 1e3 / rate
    if now and running is not None and running * now > 1e3 * SAME:
        after = running * now / rate
    cpus = cpu_floor_ms(measured, shares, workers or measured.facts.num_workers or 0, after)
    return min(shares.step_ms, max(floor_ms(measured, shares), after, cpus))


def cpu_floor_ms(measured: Measurements, shares: Shares, workers: int, after: float) -> float:
    """Step time in which the CPUs can do all there is to do: ``(workers + host) / cpus``, CPU time of each per step.

    That of the workers is what they take now, or less where so many of them would have less time. 0.0: not known.

    Args:
        measured: all figures.
        shares: how a step divides.
        workers: with the remedy.
        after: milliseconds in which they make a batch with it, if they have a CPU each.
    """
    facts, on_cpu = measured.facts, measured.loaders.workers_on_cpu_pct
    running = period_ms(measured, shares)
    if on_cpu is None or running is None or not facts.usable_cpus or not facts.num_workers:
        return 0.0
    spent = min(facts.num_workers * running * on_cpu / 100, workers * after)
    return (spent + _host_ms(measured, shares)) / facts.usable_cpus


def with_workers(measured: Measurements, shares: Shares, more: int) -> float | None:
    """Step time with ``more`` workers.

    By the rates that were tried, where both numbers were. Else each worker adds its rate, until the CPU time of a batch
    takes all CPUs: ``T >= (workers x period x on_cpu + host) / cpus``, with the CPU time of the training process in a
    step. On a CPU that computes the steps it is all of the step that does not wait, where it was not measured. The same
    bound holds for the rates that were tried: those are of the loader alone.
    """
    running, workers = period_ms(measured, shares), measured.facts.num_workers
    if running is None or workers is None:
        return None
    tried = by_trial(measured, shares, more)
    if tried is not None:
        return tried
    after = running * max(workers, 1) / more
    return min(shares.step_ms, max(floor_ms(measured, shares), after, cpu_floor_ms(measured, shares, more, after)))


def by_trial(measured: Measurements, shares: Shares, workers: int) -> float | None:
    """Step time with so many workers, where that number and the present one were both tried; else None."""
    found, now = measured.experiments, measured.facts.num_workers
    tried = dict(found.worker_scaling) if found is not None else {}
    if workers not in tried or now not in tried:
        return None
    return with_rate(measured, shares, tried[workers], tried[now], workers)


def with_bytes_cached(measured: Measurements, shares: Shares) -> float | None:
    """Step time with all files in memory: by experiment, else with workers that are never blocked."""
    found, loaders = measured.experiments, measured.loaders
    if found is not None and found.cached_bytes_per_s:
        return with_rate(measured, shares, found.cached_bytes_per_s, found.loader_per_s)
    running = period_ms(measured, shares)
    if loaders.workers_blocked_pct is None or running is None:
        return None
    after = running * (100 - loaders.workers_blocked_pct) / 100
    return min(shares.step_ms, max(floor_ms(measured, shares), after))


def without_transforms(measured: Measurements, shares: Shares) -> float | None:
    """Step time with the data set's transforms left out."""
    found = measured.experiments
    return None if found is None else with_rate(measured, shares, found.no_transform_per_s, found.loader_per_s)


def as_uint8(measured: Measurements, shares: Shares) -> float | None:
    """Step time with uint8 batches of the final size, the device doing the rest of the transforms in no time."""
    found = measured.experiments
    return None if found is None else with_rate(measured, shares, found.as_uint8_per_s, found.loader_per_s)


def read_share(measured: Measurements) -> float | None:
    """What reading takes of the time for a sample, 0 to 1; None where the two were not told apart."""
    costs = {cost.name: cost.wall_ms for cost in measured.experiments.costs} if measured.experiments else {}
    whole = sum(costs.values())
    return costs["read"] / whole if "read" in costs and whole > 0 else None


def decoded_on_device(measured: Measurements, shares: Shares, device_per_s: float | None) -> float | None:
    """Step time when workers only read files, and the device decodes them beside the step.

    Args:
        measured: all figures.
        shares: how a step divides.
        device_per_s: batches per second that the device decodes alone; None: not known, so it takes no time here.
    """
    running, left = period_ms(measured, shares), read_share(measured)
    if running is None or left is None:
        return None
    facts = measured.facts
    now = max(1, facts.num_workers or 1)
    threads = max(now, facts.usable_cpus or 1)  # as many as there are by default, and they start at once
    after = running * left * now / threads
    decoding = 1e3 / device_per_s if device_per_s else 0.0
    cpus = cpu_floor_ms(measured, shares, now, running * left)
    return min(shares.step_ms, max(floor_ms(measured, shares), after, decoding, cpus))


def with_pinned(measured: Measurements, shares: Shares) -> float | None:
    """Step time with copies from pinned memory: what of the copy is left is as the two speeds."""
    found, h2d = measured.experiments, measured.stats.h2d_ms
    if found is None or not found.pinned_gb_per_s or not found.pageable_gb_per_s or h2d is None:
        return None
    return without(shares, h2d * (1 - found.pageable_gb_per_s / found.pinned_gb_per_s))


def in_any_order(measured: Measurements, shares: Shares) -> float | None:
    """Step time without the waits in which a later batch was ready."""
    held = measured.loaders.head_of_line_pct
    if held is None:
        return None
    return max(floor_ms(measured, shares), shares.step_ms - shares.data_ms * held / 100)


def worth_it(predicted: float | None, shares: Shares) -> bool:
    """Whether a remedy is expected to gain, or nothing is known against it."""
    return predicted is None or predicted < NO_GAIN * shares.step_ms


def _host_ms(measured: Measurements, shares: Shares) -> float:
    facts = measured.facts
    if facts.host_cpu_ms is not None:
        return facts.host_cpu_ms
    return shares.floor_ms if facts.device_type == "cpu" else 0.0
