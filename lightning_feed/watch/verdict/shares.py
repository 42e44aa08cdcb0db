"""Shares of a step: which part is over its limit, and what of it is proven not to matter."""

from dataclasses import dataclass
from typing import Literal

from lightning_feed.watch.verdict.diagnosis import Grade, Measurements

StepPart = Literal["framework", "copy", "data"]

FRAMEWORK_PCT, COPY_PCT, DATA_PCT = 10.0, 5.0, 5.0
"""Shares of a step from which its parts are at fault."""
JITTER_PCT, HIGH_PCT = 2.0, 20.0
"""Further limits of the grade; 5 and 20 are those of TensorFlow's input-pipeline analyzer."""
MIN_STEPS = 10
"""With fewer steps there is no verdict."""
OTHERS_PCT = 20.0
"""Share of the CPUs that other programs take, from which the figures are theirs as much as this run's."""
MODEL_SHARE, MODEL_MOST = 0.95, 1.1
"""The model alone takes at least this share of a step: then no loader, however fast, makes the step much shorter. It
cannot take more than all of it: beyond what two measurements differ by, something disturbed the one of it alone."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of a step. Percentages of the mean step; a part whose time is not known has 0."""

    step_ms: float
    framework_pct: float
    copy_pct: float
    data_pct: float
    """Of waiting for data: this rank's, or what the slowest rank of each step costs all, or what the first batch of
    each epoch costs an epoch: the largest."""
    data_ms: float
    """Waiting for data per step that a loader without fault would save."""
    epoch_pct: float | None
    """Share of an epoch that its first batch takes beyond what any other batch takes. None: not known."""
    by_ranks: bool
    """Waiting is that of the slowest rank in each step, and more than this rank's own."""
    over: tuple[StepPart, ...]
    """The parts over their limits, the largest first."""
    compute_bound_confirmed: bool
    """Waiting is over its limit, but the model alone takes as long as a step."""

    @property
    def floor_ms(self) -> float:
        """Step time with nothing to wait for in the loader."""
        return max(0.0, self.step_ms - self.data_ms)


def shares_of(measured: Measurements) -> Shares | None:
    """The shares; None where too little was measured for any."""
    stats, ranks = measured.stats, measured.ranks
    if stats.steps < MIN_STEPS or stats.starved_pct is None or stats.input_pct is None or not stats.step_ms:
        return None
    step_ms, data_pct, data_ms = stats.step_ms, stats.starved_pct, stats.data_idle_ms or 0.0
    by_ranks = False
    if ranks is not None and ranks.starved_pct is not None and ranks.starved_pct > data_pct:
        by_ranks, data_pct = True, ranks.starved_pct
        data_ms = max(data_ms, min(step_ms, ranks.max_data_idle_ms or 0.0))
    epoch_pct = _epoch_pct(measured, step_ms)
    pcts: dict[StepPart, float] = {
        "framework": 100 * (stats.other_ms or 0.0) / step_ms,
        "copy": max(0.0, stats.input_pct - stats.starved_pct),
        "data": max(data_pct, epoch_pct or 0.0),
    }
    limits: dict[StepPart, float] = {"framework": FRAMEWORK_PCT, "copy": COPY_PCT, "data": DATA_PCT}
    over = [part for part, pct in pcts.items() if pct >= limits[part]]
    over.sort(key=lambda part: -pcts[part])
    compute_bound_confirmed = (
        "data" in over and (epoch_pct or 0.0) < DATA_PCT and not by_ranks and _model_takes_all(measured)
    )
    if compute_bound_confirmed:
        over.remove("data")
    return Shares(
        step_ms=step_ms,
        framework_pct=pcts["framework"],
        copy_pct=pcts["copy"],
        data_pct=pcts["data"],
        data_ms=data_ms,
        epoch_pct=epoch_pct,
        by_ranks=by_ranks,
        over=tuple(over),
        compute_bound_confirmed=compute_bound_confirmed,
    )


def grade_of(data_pct: float) -> Grade:
    """Degree of starvation, by the share of the step that waits for data."""
    if data_pct < JITTER_PCT:
        return "fed"
    if data_pct < DATA_PCT:
        return "fed, some jitter"
    return "moderately data-bound" if data_pct < HIGH_PCT else "highly data-bound"


def _epoch_pct(measured: Measurements, step_ms: float) -> float | None:
    stats, batches = measured.stats, measured.facts.batches_per_epoch
    if stats.epoch_start_s is None or not batches:
        return None
    start_ms = stats.epoch_start_s * 1e3
    excess_ms = max(0.0, start_ms - (stats.data_idle_ms or 0.0))
    # An epoch: its first batch, then all of its steps, of which the first has no more waiting in it.
    whole_ms = start_ms + batches * step_ms
    return 100 * excess_ms / whole_ms if whole_ms > 0 else None


def model_alone_ms(measured: Measurements) -> float | None:
    """Step time of the model with one batch again and again; None where that was not measured."""
    found = measured.experiments
    return 1e3 / found.model_per_s if found is not None and found.model_per_s else None


def model_disturbed(measured: Measurements) -> bool:
    """Whether the model alone took longer than the steps that it is a part of: then its figure is good for nothing."""
    alone, step_ms = model_alone_ms(measured), measured.stats.step_ms
    return alone is not None and step_ms is not None and alone > MODEL_MOST * step_ms


def _model_takes_all(measured: Measurements) -> bool:
    alone, step_ms = model_alone_ms(measured), measured.stats.step_ms
    if alone is None or not step_ms or measured.facts.device_type == "cpu":
        return False  # on a CPU nothing is queued ahead: what is waited for is no part of the step itself
    return MODEL_SHARE * step_ms <= alone <= MODEL_MOST * step_ms


LOOP_WORDS = {"fit": "training", "validate": "validation", "test": "test", "predict": "prediction"}
"""Stage -> what its loop is called."""
SHORT_STEP_MS = 10.0
TOY_STEP_MS = 2.0
"""Steps below this are those of a first try: no setting of a loader makes them faster."""


def in_ms(value: float | None, step_ms: float) -> str:
    """Milliseconds as text, with a digit more where steps are short."""
    return "?" if value is None else f"{value:.{1 if step_ms >= SHORT_STEP_MS else 2}f}"


def toy_sentence(step_ms: float | None) -> str | None:
    """All there is to say about steps so short that Python takes most of them; None for longer ones."""
    if not step_ms or step_ms >= TOY_STEP_MS:
        return None
    return f"Steps of {step_ms:.1f} ms: Python overhead dominates; use larger batches."
