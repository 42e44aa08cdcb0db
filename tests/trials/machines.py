"""Fake machines: how long a training step takes with a number of workers, by laws of speed that are known."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import OutOfTime, Trial

LOADING_S = 0.1
"""Time to make a batch in one process."""
Law = Callable[[int, int], float]
"""Number of workers, of which there is at least one, and number of CPUs -> seconds for a batch."""

LAWS: dict[str, Law] = {
    "linear": lambda workers, cpus: LOADING_S / min(workers, cpus),
    "saturating": lambda workers, cpus: LOADING_S / min(workers, max(1, cpus // 3)),
    "falling": lambda workers, cpus: LOADING_S / min(workers, cpus) * (1 + 0.5 * max(0, workers - cpus) / cpus),
    "blocked by one thread": lambda workers, cpus: max(LOADING_S / min(workers, cpus), LOADING_S / 3),
    "bound by a lock": lambda workers, cpus: LOADING_S * (1 + 0.02 * workers),
    "contended": lambda workers, cpus: LOADING_S * (1 / workers + 0.9 * (workers / cpus) ** 2),
    "waiting for storage": lambda workers, cpus: LOADING_S / workers,
}


@dataclass
class FakeMachine:
    """Gives the step times of a law, without a clock."""

    law: str
    cpus: int
    model_s: float = 0.0
    noise: float = 0.0
    busy: Callable[[int], float] = lambda turn: 1.0
    """Factor on the times of the trial with this number: other programs."""
    most: int = 1024
    """Workers beyond this number die."""
    trials: int = 1024
    """Trials until the time is over."""
    tried: list[Setting] = field(default_factory=list)

    def step_s(self, setting: Setting) -> float:
        """The true step time."""
        if setting.num_workers == 0:
            return LOADING_S + self.model_s
        return max(LAWS[self.law](setting.num_workers, self.cpus), self.model_s)

    def run(self, setting: Setting) -> Trial:
        """A trial of the setting."""
        if len(self.tried) == self.trials:
            raise OutOfTime
        self.tried.append(setting)
        if setting.num_workers > self.most:
            return Trial(setting=setting, infeasible="it died")
        wobble = 1 + self.noise * random.Random(len(self.tried)).uniform(-1, 1)
        step_s = self.step_s(setting) * wobble * self.busy(len(self.tried))
        return Trial(setting=setting, steps_s=(step_s,), unevenness=1.0)

    def best_s(self, most_workers: int) -> float:
        """The shortest possible step."""
        return min(self.step_s(workers(number)) for number in range(most_workers + 1))


def workers(number: int, **values: Any) -> Setting:
    """A setting with a number of workers."""
    return Setting(num_workers=number, prefetch_factor=2 if number else None, **values)
