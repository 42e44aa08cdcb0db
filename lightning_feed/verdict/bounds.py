"""Lower bounds of the step time after a change, computed from the run's own measurements.

A step takes at least as long as its work other than loading, and at least as long as the loader needs for a batch. Only
a trial can measure how close to its bound a change comes, because more workers share CPUs, memory and storage.
"""

from lightning_feed.measure.experiment_results import LighterSample
from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.verdict.shares import Shares, model_alone_ms


def without(shares: Shares, part_ms: float) -> float:
    """Return the step time if a part that takes ``part_ms`` is saved."""
    return max(0.0, shares.step_ms - max(0.0, part_ms))


def loads_in_turn(facts: LoopFacts) -> bool:
    """Return True if the training process itself loads, so that loading and training take turns."""
    return facts.loader.num_workers == 0


def data_free_ms(measured: Measurements, shares: Shares) -> float:
    """Return the step time if training never waited for data: the rest of the step, or the model alone if that takes
    longer."""
    return min(shares.step_ms, max(shares.floor_ms, model_alone_ms(measured) or 0.0))


def with_loading_time(measured: Measurements, shares: Shares, factor: float) -> float | None:
    """Return the lower bound of the step time if the same loader needs ``factor`` times its present time for a batch.

    Returns None if the present time is unknown. A loader with workers, for which training waits, is assumed to need one
    step for a batch.
    """
    wait_ms = measured.stats.next_wait_ms
    if not loads_in_turn(measured.facts):
        return max(data_free_ms(measured, shares), factor * shares.step_ms)
    if wait_ms is None:
        return None
    return max(data_free_ms(measured, shares), without(shares, (1 - factor) * wait_ms))


def with_crops(measured: Measurements, shares: Shares) -> float | None:
    """Return the lower bound of the step time if only the crops of images are decoded; None if decoding crops was not
    timed."""
    trial = measured.experiments.crops
    if trial is None or not trial.whole_ms:
        return None
    return with_loading_time(measured, shares, _share_of_batch(measured, trial.crop_ms / trial.whole_ms))


def with_lighter_samples(measured: Measurements, shares: Shares, trial: LighterSample) -> float | None:
    """Return the lower bound of the step time if samples take as little work as in a trial; None if the present time is
    unknown.

    A step also takes at least as long as the device needs to decode a batch, if it does.
    """
    if not trial.now_ms:
        return None
    share = _share_of_batch(measured, min(1.0, trial.then_ms / trial.now_ms))
    least_ms = with_loading_time(measured, shares, share)
    batch_size = measured.facts.loader.batch_size
    if least_ms is None or trial.device_ms is None or batch_size is None:
        return least_ms
    return max(least_ms, batch_size * trial.device_ms)


def _share_of_batch(measured: Measurements, share_of_samples: float) -> float:
    """Return the share of a batch's loading time that remains if loading its samples takes ``share_of_samples`` of the
    time it took. Collating takes as long as before."""
    samples_ms = measured.experiments.samples_ms
    collate_ms = measured.experiments.collate_ms
    if not samples_ms or not collate_ms:
        return share_of_samples
    return (share_of_samples * samples_ms + collate_ms) / (samples_ms + collate_ms)


def with_rate(measured: Measurements, shares: Shares, per_s: float | None) -> float | None:
    """Return the lower bound of the step time if the loader alone reaches ``per_s`` batches per second.

    Returns None if this rate, or the loader's rate as configured, was not measured.
    """
    configured = measured.experiments.loader_per_s
    if not per_s or not configured:
        return None
    return with_loading_time(measured, shares, min(1.0, configured / per_s))
