"""Why the time between steps, the copy, or the step itself takes what it takes."""

from lightning_feed.watch.verdict.causes_data import CPU_PRESSURE_PCT
from lightning_feed.watch.verdict.diagnosis import SYNCS, HookTime, Measurements
from lightning_feed.watch.verdict.finding import Finding
from lightning_feed.watch.verdict.shares import Shares, model_alone_ms
from lightning_feed.watch.verdict.units import in_ms

NAMED_SHARE = 0.5
"""Share of the time between the steps that hooks must take to be its cause, and not a wait for the device."""
HOOKS_SAID = 3
SMALL_BYTES, MANY_TENSORS = 64 * 1024, 8
"""What PrefetchCallback(pack_small=True) would pack: so many tensors of at most so many bytes."""
COPY_SHARE = 0.5
"""Share of the time on the way to the device that the copy alone takes, or else hooks are at fault."""
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
    """Why the way to the device is exposed."""
    facts, stats, found = measured.facts, measured.stats, measured.experiments
    h2d = stats.h2d_ms or 0.0
    if facts.device_type == "cpu":
        return Finding(cause="transfer hooks", because=("nothing is copied on the CPU: transfer hooks take the time",))
    alone = None if found is None else found.copy_ms
    if facts.backend == "nvjpeg" and (alone is None or alone < COPY_SHARE * h2d):
        said = "nvJPEG decodes on the way to the device, and the host waits for it: this is decoding, not the copy"
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
    if shares.acquitted and alone is not None:
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
