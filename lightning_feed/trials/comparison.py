"""Settings that training itself compares, after trials have left few of them."""

from collections.abc import Sequence

from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import ALIKE
from lightning_feed.trials.tune_loader import Tuned


class Comparison:
    """Compares settings by steps of training itself, one setting after the other, with the user's own.

    Args:
        tuned: the result of the trials.
        settings: the settings to compare with the user's, in this order.
        own_ms: time of a step with the user's setting, in milliseconds.

    Attributes:
        tuned: as given.
        setting: the setting in use.
    """

    def __init__(self, tuned: Tuned, settings: Sequence[Setting], own_ms: float) -> None:
        self.tuned = tuned
        self.setting = settings[0]
        self._left = list(settings[1:])
        self._steps_ms = {tuned.own: tuned.with_start_ms(tuned.own, own_ms)}

    def note(self, step_ms: float) -> None:
        """Note the time of a step with the setting in use, in milliseconds."""
        self._steps_ms[self.setting] = self.tuned.with_start_ms(self.setting, step_ms)

    def go_on(self) -> bool:
        """Take the next setting. Returns False if none is left."""
        if not self._left:
            return False
        self.setting = self._left.pop(0)
        return True

    def step_ms(self, setting: Setting) -> float:
        """Time of a step that was measured, with its share of the start of workers, in milliseconds."""
        return self._steps_ms[setting]

    def fastest(self) -> Setting:
        """The setting with the shortest steps; the user's own unless another gains.

        The trials have shown a gain of their choice, so its steps must only not be longer. Those of settings that
        trials cannot tell must be clearly shorter: no workers, and the user's own workers with batches in place.
        """
        best = self.tuned.own
        best_ms = self.step_ms(best)
        for setting, step_ms in self._steps_ms.items():
            factor = 1.0 if setting == self.tuned.setting and not self._adds_slots(setting) else ALIKE
            if factor * step_ms <= self.step_ms(self.tuned.own) and (step_ms < best_ms or best == self.tuned.own):
                best, best_ms = setting, step_ms
        return best

    def _adds_slots(self, setting: Setting) -> bool:
        return setting.in_place and not self.tuned.own.in_place
