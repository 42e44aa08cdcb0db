"""The figures that a verdict rests on, a sentence each."""

from pathlib import Path

from lightning_feed.watch.verdict.diagnosis import Measurements
from lightning_feed.watch.verdict.shares import Part, Shares
from lightning_feed.watch.verdict.units import in_ms, plural

SLOW_START_S = 1.0
"""Time to the first batch of an epoch that is worth telling."""
SLACK_SHARE = 0.01
"""Share of a step from which a hidden wait is worth telling."""

OTHERS_PCT = 20.0
"""Share of the CPUs that other programs take, from which the figures are theirs as much as this run's."""


def evidence_of(measured: Measurements, shares: Shares, because: tuple[str, ...]) -> tuple[str, ...]:
    """What takes a step, why (``because``), and what else bears on it."""
    stats, facts = measured.stats, measured.facts
    whole = shares.step_ms
    said = [_part(measured, shares, part) for part in shares.over]
    if not shares.over:
        pct = 100 * (stats.compute_ms or 0.0) / whole
        said.append(f"{pct:.0f} % of each step is forward, backward and optimizer")
    said += because
    if "data" in shares.over:
        said += _making(measured)
    if stats.hidden_wait_ms is not None and stats.hidden_wait_ms >= SLACK_SHARE * whole:
        hidden, wait = in_ms(stats.hidden_wait_ms, whole), in_ms(stats.next_wait_ms, whole)
        said.append(f"{hidden} of {wait} ms in next(loader) cost nothing: the device computes meanwhile")
    if stats.epoch_start_s is not None and stats.epoch_start_s >= SLOW_START_S:
        said.append(f"the first batch of an epoch comes after {stats.epoch_start_s:.1f} s")
    if "data" in shares.over and facts.num_workers:  # without workers the cause says so
        cpus = f" on {plural(facts.usable_cpus, 'CPU')}" if facts.usable_cpus is not None else ""
        said.append(f"the loader has {plural(facts.num_workers, 'worker')}{cpus}")
    if facts.others_cpu_pct is not None and facts.others_cpu_pct >= OTHERS_PCT:
        said.append(f"{facts.others_cpu_pct:.0f} % of the CPUs were taken by other programs: low confidence")
    if stats.lost_steps:
        said.append(f"{stats.lost_steps} steps could not be measured on the device")
    return tuple(said)


def _making(measured: Measurements) -> list[str]:
    """Whether samples or collating take most of the time for a batch, and where in the user's code."""
    found = measured.experiments
    if found is None or found.samples_ms is None or not found.collate_ms:
        return []
    whole = found.samples_ms + found.collate_ms
    stage, ms = max(("samples", found.samples_ms), ("collate", found.collate_ms), key=lambda one: one[1])
    slowest = next((one for one in found.functions if one.stage == stage), None)
    at = "" if slowest is None else f", most of it in {slowest.name} ({Path(slowest.file).name}:{slowest.line})"
    what = "making its samples" if stage == "samples" else "collating them"
    return [f"a batch takes {whole:.1f} ms in one process, {what} {100 * ms / whole:.0f} %{at}"]


def _part(measured: Measurements, shares: Shares, part: Part) -> str:
    stats, whole = measured.stats, shares.step_ms
    where, ms, pct = {
        "framework": ("between the steps", stats.other_ms, shares.framework_pct),
        "copy": ("on the way to the device", stats.h2d_ms, shares.copy_pct),
        "data": ("waiting for data", shares.data_ms, shares.data_pct),
    }[part]
    if part == "data":
        pct = 100 * shares.data_ms / whole  # the first batches of epochs lie in no step
        where = "waiting for data, the slowest rank of each step" if shares.by_ranks else where
    return f"{in_ms(ms, whole)} of {in_ms(whole, whole)} ms ({pct:.0f} %) {where}"
