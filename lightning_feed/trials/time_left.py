"""The time that is left in a run, which decides how long trials may take and what they compare."""

import math
from dataclasses import dataclass

LEAST_S = 60.0
"""With less time left there are no trials: they would cost more than they could return."""
MOST_S = 30.0
"""Longest time of trials."""
BLIND_SHARE = 0.1
"""Share of the time left that trials may take before any setting was faster than the user's."""
GAIN_SHARE = 0.25
"""Share of the time that a setting saves which further trials may take."""


@dataclass(frozen=True, kw_only=True)
class TimeLeft:
    """The rest of a run. Numbers are infinite where nothing bounds them."""

    steps: float
    """Training steps."""
    step_s: float
    """Mean time of a training step, in seconds."""
    epochs: float = 0.0
    """Epochs that have not begun."""
    epoch_start_s: float = 0.0
    """Time to the first batch of an epoch, in seconds."""
    validation_s: float = 0.0
    """Time of validation in an epoch, in seconds."""
    limit_s: float = math.inf
    """Seconds until a time limit ends the run."""

    @property
    def seconds(self) -> float:
        """The time left, in seconds, as far as it is known."""
        between_s = self.epoch_start_s + self.validation_s
        epochs_s = self.epochs * between_s if between_s else 0.0
        return min(self.limit_s, self.steps * self.step_s + epochs_s)

    @property
    def pays_for_trials(self) -> bool:
        """True if enough time is left for trials to return what they cost."""
        return self.seconds >= LEAST_S

    def budget_s(self, gain: float) -> float:
        """Return the seconds that the trials may take in all.

        Args:
            gain: share of a step that the fastest setting so far saves, from 0 to 1.
        """
        return min(MOST_S, self.seconds * max(BLIND_SHARE, GAIN_SHARE * gain))
