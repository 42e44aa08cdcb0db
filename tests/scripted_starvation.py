"""A GPUStarvationCallback that tells what a test wrote down, for what acts on its figures."""

from typing import Any

import pytest

from lightning_feed import GPUStarvationCallback
from lightning_feed.watch.stats import LoaderStats, StarvationStats
from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts, Measurements

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

    def report(self) -> Diagnosis:
        past = [self.script[min(k, len(self.script) - 1)] for k in range(self.ended)]
        stats = StarvationStats(steps=0, confidence="low")
        if past:
            stats = StarvationStats(
                steps=100 * len(past),
                confidence="high",
                step_ms=sum(step for step, _ in past) / len(past),
                data_idle_ms=sum(waits for _, waits in past) / len(past),
                starved_low_pct=0.0,
            )
        measured = Measurements(
            stats=stats,
            facts=LoopFacts(num_workers=1, prefetch_factor=2),
            loaders=LoaderStats(queue_ready=self.ready, queue_capacity=self.capacity),
        )
        return Diagnosis(
            bottleneck="data",
            grade="not measured",
            confidence="low",
            evidence=(),
            remedies=(),
            measurements=measured,
        )


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lightning_feed.callbacks.autotune"]
