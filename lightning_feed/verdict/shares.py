"""Shares of a step: waiting for data, the copy, and the time between steps."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_feed.measure.measurements import Measurements
from lightning_feed.measure.stats import MIN_STEPS, ratio
from lightning_feed.verdict.diagnosis import Grade
from lightning_feed.verdict.thresholds import (
    CLOSE_SHARE,
    COPY_PCT,
    DATA_PCT,
    FRAMEWORK_PCT,
    FREE_CPUS_SHARE,
    HEADLINE_PCT,
    HIGH_PCT,
    MODEL_MOST_SHARE,
    MODEL_SHARE,
    MODERATE_PCT,
    RUN_QUEUE_PCT,
    TOY_STEP_MS,
)

StepPart = Literal["framework", "copy", "data"]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the mean step, in percent; 0 for a part of unknown length."""

    step_ms: float
    framework_pct: float
    copy_pct: float
    data_pct: float
    """Waiting for data: the largest of three shares: this rank's own, the cost of each step's slowest rank for all
    ranks, and the cost of an epoch's first batch."""
    data_ms: float
    """Mean waiting for data in a step, in milliseconds, which a perfect loader would save."""
    epoch_pct: float | None
    """Share of an epoch by which its first batch takes longer than other batches; None if unknown."""
    by_ranks: bool
    """True if ``data_pct`` is the waiting of the slowest rank in each step, which is more than this rank's own."""
    over: tuple[StepPart, ...]
    """The parts over their limits, the largest first."""
    compute_bound_confirmed: bool
    """True if the waiting is over its limit, but the model without the loader takes as long as a step."""

    @property
    def headline_parts(self) -> tuple[StepPart | Literal["compute"], ...]:
        """The parts over their limits, the headline first. ``compute`` is the headline if there is no such part, or if
        even the largest is small and computing takes more."""
        if not self.over:
            return ("compute",)
        pcts: dict[StepPart, float] = {"framework": self.framework_pct, "copy": self.copy_pct, "data": self.data_pct}
        largest_pct = pcts[self.over[0]]
        if largest_pct < HEADLINE_PCT and largest_pct < 100 - sum(pcts.values()):
            return ("compute", *self.over)
        return self.over

    @property
    def close_to_limit(self) -> bool:
        """True if the copy or the time between steps is so close to its limit that another run may cross the limit."""
        return _is_close(self.copy_pct, COPY_PCT) or _is_close(self.framework_pct, FRAMEWORK_PCT)

    @property
    def floor_ms(self) -> float:
        """Step time without waiting for the loader."""
        return max(0.0, self.step_ms - self.data_ms)


def _is_close(pct: float, limit_pct: float) -> bool:
    return abs(pct - limit_pct) < CLOSE_SHARE * limit_pct


def shares_of(measured: Measurements) -> Shares | None:
    """Return the shares of a run; None if too little was measured."""
    stats = measured.stats
    if stats.steps < MIN_STEPS or stats.starved_pct is None or stats.input_pct is None or not stats.step_ms:
        return None
    waiting = _waiting_of(measured, stats.starved_pct, stats.step_ms)
    epoch_pct = _epoch_pct(measured, stats.step_ms)
    pcts = _other_parts(measured, stats.step_ms, max(0.0, stats.input_pct - stats.starved_pct))
    pcts["data"] = max(waiting.pct, epoch_pct or 0.0)
    over = [part for part in sorted(pcts, key=lambda part: -pcts[part]) if pcts[part] >= _LIMITS[part]]
    compute_bound_confirmed = "data" in over and _model_explains_wait(measured, waiting, epoch_pct)
    if compute_bound_confirmed:
        over.remove("data")
    return Shares(
        step_ms=stats.step_ms,
        framework_pct=pcts["framework"],
        copy_pct=pcts["copy"],
        data_pct=pcts["data"],
        data_ms=waiting.ms,
        epoch_pct=epoch_pct,
        by_ranks=waiting.by_ranks,
        over=tuple(over),
        compute_bound_confirmed=compute_bound_confirmed,
    )


_LIMITS: dict[StepPart, float] = {"framework": FRAMEWORK_PCT, "copy": COPY_PCT, "data": DATA_PCT}


def _other_parts(measured: Measurements, step_ms: float, copy_pct: float) -> dict[StepPart, float]:
    """Return the shares of the time between steps and of the copy."""
    between_pct = 100 * measured.between_ms / step_ms
    return {"framework": between_pct, "copy": 0.0 if measured.facts.copies_nothing else copy_pct}


class _Waiting(NamedTuple):
    """Waiting for data: fields of :class:`Shares`."""

    pct: float
    ms: float
    by_ranks: bool


def _waiting_of(measured: Measurements, own_pct: float, step_ms: float) -> _Waiting:
    ranks = measured.ranks
    own_ms = measured.stats.data_ms or 0.0
    if ranks is not None and ranks.starved_pct is not None and ranks.starved_pct > own_pct:
        longest_ms = max(own_ms, min(step_ms, ranks.max_data_ms or 0.0))
        return _Waiting(ranks.starved_pct, longest_ms, by_ranks=True)
    return _Waiting(own_pct, own_ms, by_ranks=False)


def lacked_cpu(measured: Measurements) -> bool:
    """Return True if other programs had the CPUs for which the loading threads waited, so that loading cannot be
    judged."""
    queue_pct = measured.loaders.workers_run_queue_pct or 0.0
    wait_ms = measured.stats.next_wait_ms or 0.0
    if wait_ms > 0:
        queue_pct = max(queue_pct, 100 * (measured.facts.host.load_queue_ms or 0.0) / wait_ms)
    return measured.facts.crowded and queue_pct >= RUN_QUEUE_PCT


def workers_fill_cpus(measured: Measurements) -> bool:
    """Return True if the workers and the training thread leave hardly any CPU of this rank free, so that more workers
    cannot gain much. False without workers, or if the number of workers or of CPUs is unknown."""
    loader = measured.facts.loader
    workers = sum(loader.every_num_workers) or loader.num_workers
    cpus = measured.facts.usable_cpus
    if not workers or cpus is None:
        return False
    return cpus - workers - 1 < FREE_CPUS_SHARE * cpus


def grade_of(data_pct: float) -> Grade:
    """Return the degree of starvation, by the share of the step that waits for data."""
    if data_pct < DATA_PCT:
        return "OK"
    if data_pct < MODERATE_PCT:
        return "slightly data-bound"
    if data_pct < HIGH_PCT:
        return "moderately data-bound"
    return "highly data-bound"


def _epoch_pct(measured: Measurements, step_ms: float) -> float | None:
    stats = measured.stats
    batches = measured.facts.batches_per_epoch
    if stats.epoch_start_s is None or not batches:
        return None
    start_ms = stats.epoch_start_s * 1e3
    excess_ms = max(0.0, start_ms - (stats.data_ms or 0.0))
    # An epoch is its first batch, then all its steps; the first step no longer includes waiting.
    whole_ms = start_ms + batches * step_ms
    return ratio(100 * excess_ms, whole_ms)


def model_alone_ms(measured: Measurements) -> float | None:
    """Return the step time of the model with the same batch repeated; None if not measured."""
    return ratio(1e3, measured.experiments.model_per_s or 0.0)


def model_disturbed(measured: Measurements) -> bool:
    """Return True if the model alone took longer than whole steps, which is impossible: the experiment was
    disturbed."""
    alone_ms = model_alone_ms(measured)
    step_ms = measured.stats.step_ms
    return alone_ms is not None and step_ms is not None and alone_ms > MODEL_MOST_SHARE * step_ms


def _model_explains_wait(measured: Measurements, waiting: _Waiting, epoch_pct: float | None) -> bool:
    """Return True if this rank waits within its steps, but the model alone takes as long as a step."""
    alone_ms = model_alone_ms(measured)
    step_ms = measured.stats.step_ms
    if waiting.by_ranks or (epoch_pct or 0.0) >= DATA_PCT:
        return False
    if alone_ms is None or not step_ms or measured.facts.device_type == "cpu":
        return False  # on a CPU nothing is queued ahead, so waiting is never part of the step itself
    return MODEL_SHARE * step_ms <= alone_ms <= MODEL_MOST_SHARE * step_ms


def is_toy_step(step_ms: float | None) -> bool:
    """Return True for steps so short that Python dominates them."""
    return bool(step_ms) and (step_ms or 0.0) < TOY_STEP_MS
