"""The figures that a verdict rests on, a sentence each."""

from lightning_feed.watch.verdict.diagnosis import Measurements
from lightning_feed.watch.verdict.remedies_data import SLOW_START_S
from lightning_feed.watch.verdict.shares import Part, Shares
from lightning_feed.watch.verdict.units import in_ms

SLACK_SHARE = 0.01
"""Share of a step from which a hidden wait is worth telling."""


def evidence_of(measured: Measurements, shares: Shares, because: tuple[str, ...]) -> tuple[str, ...]:
    """What takes a step, why (``because``), and what else bears on it."""
    stats, facts = measured.stats, measured.facts
    whole = shares.step_ms
    said = [_part(measured, shares, part) for part in shares.over]
    if not shares.over:
        said.append(f"{in_ms(stats.compute_ms, whole)} of {in_ms(whole, whole)} ms are the step itself")
    said += because
    if stats.hidden_wait_ms is not None and stats.hidden_wait_ms >= SLACK_SHARE * whole:
        hidden, wait = in_ms(stats.hidden_wait_ms, whole), in_ms(stats.next_wait_ms, whole)
        said.append(f"{hidden} of {wait} ms in next(loader) cost nothing")
    if stats.epoch_start_s is not None and stats.epoch_start_s >= SLOW_START_S:
        said.append(f"the first batch of an epoch comes after {stats.epoch_start_s:.1f} s")
    if "data" in shares.over and facts.num_workers is not None:
        cpus = f" on {facts.usable_cpus} CPUs" if facts.usable_cpus is not None else ""
        some = (
            f"{facts.num_workers} worker{'' if facts.num_workers == 1 else 's'}" if facts.num_workers else "no workers"
        )
        said.append(f"the loader has {some}{cpus}")
    if stats.lost_steps:
        said.append(f"{stats.lost_steps} steps could not be measured on the device")
    return tuple(said)


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
