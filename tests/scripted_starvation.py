"""A GPUStarvationCallback and trials of loaders that tell what a test wrote down, for what acts on their figures."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_feed import GPUStarvationCallback
from lightning_feed.measure.kernel import WorkerTime
from lightning_feed.measure.loader_watch import LoaderSums
from lightning_feed.measure.loop import LoopSums
from lightning_feed.measure.measurements import LoopFacts
from lightning_feed.measure.windows import Sums
from lightning_feed.trials.trial import Setting, Trial

STARVED, STILL, FED = (100.0, 60.0), (80.0, 40.0), (60.0, 0.5)
"""(step_ms, data_idle_ms) of an epoch."""


class Scripted(GPUStarvationCallback):
    """Measures nothing, and tells what is in the script: (step_ms, data_idle_ms) of each epoch, 100 steps long."""

    def __init__(self, *script: tuple[float, float], ready: float = 0.0, capacity: float = 8.0) -> None:
        super().__init__(report=False)
        self.script, self.ready, self.capacity, self.ended = script, ready, capacity, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.ended = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended += 1

    @property
    def measured_fit(self) -> Any:
        return SimpleNamespace(settled=self._settled, main=SimpleNamespace(facts=LoopFacts()))

    def _settled(self) -> LoopSums | None:
        past = [self.script[min(k, len(self.script) - 1)] for k in range(self.ended)]
        return sums_of(*((100, step, waits, self.ready, self.capacity, None) for step, waits in past)) if past else None


class Trials:
    """In the place of ``run_trial``: batches per second by the number of workers; an error is raised."""

    def __init__(self, rates: dict[int, Any]) -> None:
        self.rates = rates
        self.settings: list[Setting] = []

    def __call__(self, loader: Any, setting: Setting, limits: Any, *, copies: int = 1) -> Trial:
        self.settings.append(setting)
        rate = self.rates[min(setting.num_workers, max(self.rates))]
        if isinstance(rate, Exception):
            raise rate
        return Trial(setting=setting, batches_per_s=rate, start_s=0.1, cpu_s_per_batch=1 / self.rates[0])


def sums_of(*epochs: tuple[int, float, float, float, float, float | None]) -> LoopSums:
    """What a run sums that had such epochs: (steps, step_ms, data_idle_ms, queue_ready, queue_capacity, on_cpu_pct)."""
    sums = LoopSums(Sums(), LoaderSums())
    for steps, step_ms, idle_ms, ready, capacity, on_cpu in epochs:
        sums.steps += Sums(steps=steps, data_ns=steps * idle_ms * 1e6, compute_ns=steps * (step_ms - idle_ms) * 1e6)
        sums.loaders += LoaderSums(
            fetches=steps, sized_fetches=steps, ready=round(steps * ready), capacity=round(steps * capacity)
        )
        if on_cpu is not None:
            wall = steps * step_ms * 1e6
            sums.loaders.workers += WorkerTime(
                wall_ns=wall, on_cpu_ns=wall * on_cpu / 100, run_queue_ns=wall * on_cpu / 200
            )
    return sums


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lightning_feed.callbacks.autotune"]
