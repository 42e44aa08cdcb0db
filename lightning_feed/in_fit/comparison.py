"""Settings that training itself compares, after trials have left few of them."""

import math
from collections.abc import Sequence

from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import ALIKE
from lightning_feed.trials.tune_loader import Tuned


class Comparison:
    """Compares settings by steps of training itself, one setting after the other, with the user's own.

    Args:
        tuned: the result of trials, or of an earlier fit.
        settings: the settings to train with, in this order.
        step_ms: time of a step, in milliseconds.
        noise_ms: half the width of the 95 % interval of that time.
        measured: the setting in which this was measured; None for the user's own.

    Attributes:
        tuned: as given.
        setting: the setting in use.
    """

    def __init__(
        self,
        tuned: Tuned,
        settings: Sequence[Setting],
        step_ms: float,
        noise_ms: float = 0.0,
        measured: Setting | None = None,
    ) -> None:
        self.tuned = tuned
        self._left = list(settings)
        self._noise_ms: dict[Setting, float] = {}
        self._steps_ms: dict[Setting, float] = {}
        self.setting = measured or tuned.own
        self.note(step_ms, noise_ms)
        self.go_on()

    def note(self, step_ms: float, noise_ms: float = 0.0) -> None:
        """Note the time of a step with the setting in use, in milliseconds.

        Args:
            step_ms: the mean.
            noise_ms: half the width of its 95 % interval.
        """
        self._noise_ms[self.setting] = noise_ms
        self._steps_ms[self.setting] = self.tuned.with_start_ms(self.setting, step_ms)

    def go_on(self) -> bool:
        """Take the next setting. Returns False if none is left."""
        if not self._left:
            return False
        self.setting = self._left.pop(0)
        return True

    def step_ms(self, setting: Setting) -> float:
        """Return the time of a step that was measured, with its share of the start of workers, in milliseconds."""
        return self._steps_ms[setting]

    def fastest(self) -> Setting:
        """Return the setting with the shortest steps; the user's own unless another gains more than the noise.

        The trials have shown a gain of their choice. Settings whose gain trials cannot tell must gain more than 3 %,
        too: no workers, and the user's own workers with batches in place.
        """
        gaining = [setting for setting in self._steps_ms if self._gains(setting)]
        return min(gaining, key=self.step_ms, default=self.tuned.own)

    def fastest_other(self) -> Setting:
        """Return the setting with the shortest steps, the user's own left out, unless there is no other.

        Where nodes of a fit differ, a node that keeps the user's setting takes part with that alone.
        """
        others = [setting for setting in self._steps_ms if setting != self.tuned.own]
        return min(others, key=self.step_ms, default=self.tuned.own)

    def _gains(self, setting: Setting) -> bool:
        own = self.tuned.own
        gain_ms = self.step_ms(own) - self.step_ms(setting)
        noise_ms = math.hypot(self._noise_ms[own], self._noise_ms[setting])  # of the difference of two means
        was_shown = setting == self.tuned.setting and not self._adds_slots(setting)
        least_ms = 0.0 if was_shown else (ALIKE - 1) * self.step_ms(setting)
        return setting != own and gain_ms >= max(noise_ms, least_ms)

    def _adds_slots(self, setting: Setting) -> bool:
        return setting.in_place and not self.tuned.own.in_place
