"""Trials of loaders that give what a test wrote down, in place of ``run_trial``."""

from typing import Any

from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import Trial

THREE_ARE_BEST = {0: 0.1, 1: 0.09, 2: 0.05, 3: 0.03}


class QuietMachine:
    """In the place of OtherPrograms: other programs of the machine that runs the tests do not matter."""

    def __init__(self, used_pct: float = 0.0) -> None:
        self.used_pct = used_pct

    def others_pct(self, usable_cpus: int | None) -> float:
        return self.used_pct


class Trials:
    """Seconds of a step by the number of workers; an error is raised."""

    def __init__(self, steps_s: dict[int, Any]) -> None:
        self.steps_s = steps_s
        self.loaders: list[Any] = []
        self.settings: list[Setting] = []
        self.works: list[Any] = []
        self.in_place_share = 1.0
        """Time of a step with batches in place, as a share of ``steps_s``."""
        self.start_s = 0.0
        """Seconds from the start of workers to the first batch."""

    def __call__(self, loader: Any, setting: Setting, work: Any, limits: Any, **_: Any) -> Trial:
        self.loaders.append(loader)
        self.settings.append(setting)
        self.works.append(work)
        step_s = self.steps_s[min(setting.num_workers, max(self.steps_s))]
        if isinstance(step_s, Exception):
            raise step_s
        if setting.in_place:
            step_s *= self.in_place_share
        return Trial(setting=setting, steps_s=(step_s,), start_s=self.start_s)
