"""The check of a setting that trials have found: training itself, with the new setting and with the user's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from lightning_feed.diagnosing.batches import idle_copy, own_loaders
from lightning_feed.diagnosing.session import Session
from lightning_feed.diagnosing.short_fits import Limits, time_fit
from lightning_feed.load.kinds import Batch
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import Setting
from lightning_feed.measure.windows import WARM_UP_STEPS
from lightning_feed.trials.in_fit import with_setting
from lightning_feed.trials.search import ALIKE
from lightning_feed.trials.tune_loader import Tuned

PROOF_STEPS = 60
"""Steps of each fit, after its warm-up."""
FEWEST_STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Step times of two fits, one after the other, with the same training but different loader settings."""

    own_ms: float
    """Step time with the user's setting, with its share of the start of an epoch's workers."""
    chosen_ms: float
    """Step time with the setting that the trials chose, with the same share."""

    @property
    def holds(self) -> bool:
        """True if the chosen setting makes steps shorter by more than repeated trials differ (``ALIKE``)."""
        return ALIKE * self.chosen_ms < self.own_ms


def prove(session: Session, tuned: Tuned, *, seconds: float) -> Proof | None:
    """Train with the chosen setting, and then with the user's, to compare their step times.

    Trials only imitate the time of a step: they miss how torch's threads, which wait for each other, are delayed when
    workers take their CPUs. Returns None if a fit had too few steps, there is no model, or the user's setting was
    chosen.

    Args:
        session: the session, whose model was trained already. The session has one training loader.
        tuned: the result of the trials.
        seconds: seconds for each of the two fits.

    Raises:
        Exception: an error of the user's code.
    """
    if session.model is None or tuned.setting == tuned.own:
        return None

    def with_chosen(loader: DataLoader[Batch]) -> DataLoader[Batch]:
        return with_setting(idle_copy(loader), tuned.setting)

    chosen_ms = _step_ms(session, with_chosen, tuned.setting, seconds)
    own_ms = _step_ms(session, idle_copy, tuned.own, seconds)
    if chosen_ms is None or own_ms is None:
        return None
    return Proof(own_ms=tuned.with_start_ms(tuned.own, own_ms), chosen_ms=tuned.with_start_ms(tuned.setting, chosen_ms))


def _step_ms(session: Session, make: Callable[[Any], Any], setting: Setting, seconds: float) -> float | None:
    queue = setting.batches_ahead if setting.prefetch_factor else 0
    limits = Limits(min_steps=FEWEST_STEPS, max_steps=PROOF_STEPS + WARM_UP_STEPS + queue, seconds=seconds)
    with preserve_state(session.train_loaders):
        return time_fit(session, limits, own_loaders(session.train_loaders, make))


def proven(tuned: Tuned, proof: Proof) -> Tuned:
    """The tuning result after this check: with the user's own setting if the chosen one did not make steps shorter."""
    figures = f"training itself took {proof.own_ms:.3g} ms a step with {tuned.own}, {proof.chosen_ms:.3g} with"
    reason = f"{figures} {tuned.setting}"
    if proof.holds:
        return replace(tuned, reason=f"{tuned.reason}; {reason}")
    return replace(tuned, setting=tuned.own, reason=reason)
