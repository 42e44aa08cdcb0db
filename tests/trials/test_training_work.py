"""The imitated training takes as long as the one that was measured, on the CPU and on a device."""

import time

from lightning_feed.trials.training_work import ImitatedTraining, TrainingWork


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_imitated_training_without_work_takes_no_time() -> None:
    clock = Clock()
    ImitatedTraining(TrainingWork(), clock=clock, sleep=clock.sleep).train()
    assert clock.slept_s == []


def test_imitated_step_on_the_cpu_takes_the_full_step_time() -> None:
    clock = Clock()
    training = ImitatedTraining(TrainingWork(step_s=0.25), clock=clock, sleep=clock.sleep)
    training.train()
    clock.now_s += 1.0  # waiting for the next batch
    training.train()
    assert clock.slept_s == [0.25, 0.25]


def test_imitated_host_runs_one_step_ahead_of_the_device() -> None:
    clock = Clock()
    training = ImitatedTraining(TrainingWork(step_s=0.25, on_device=True), clock=clock, sleep=clock.sleep)
    training.train()
    assert clock.slept_s == []  # the device has begun, and the host draws the next batch
    clock.now_s += 0.1
    training.train()
    assert clock.now_s == 0.25  # the device begins the second step
    clock.now_s += 1.0  # a slow batch: the device is idle
    training.train()
    assert clock.now_s == 1.25


def test_imitated_training_uses_cpu_time_in_all_threads() -> None:
    before_s = time.process_time()
    ImitatedTraining(TrainingWork(step_s=0.02, cpu_s=0.02, threads=3)).train()
    assert time.process_time() - before_s >= 0.06
