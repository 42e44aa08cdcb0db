"""Calls of the device that a steady step of the callbacks makes, and what the parts of a step are worth then."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cells import in_gate
from measure.small_fits import Memory
from simulated.device import Event, SimulatedDevice, Stream
from simulated.training import Model, SimulatedLoader, evaluate, fit
from torch import Tensor

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.measure import step_meter
from lightning_feed.measure.stats import StarvationStats

KINDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "record": (Event, ("record",)),
    "query": (Event, ("query",)),
    "elapsed_time": (Event, ("elapsed_time",)),
    "synchronize": (Event, ("synchronize",)),
    "wait": (Stream, ("wait_event", "wait_stream")),
    "current_stream": (SimulatedDevice, ("current_stream", "is_current_stream_capturing")),
    "switch": (SimulatedDevice, ("stream",)),  # to a stream and back
    "record_stream": (SimulatedDevice, ("record_stream",)),
}
FIRST = 80
LAST = 240
"""Steps between which calls are counted: the host is as far ahead of the device then as it gets."""


class Calls(Counter[str]):
    """Counts calls while ``counts`` is set, but not those that the simulation makes within them."""

    counts = False

    @contextmanager
    def patched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for kind, (owner, names) in KINDS.items():
                for name in names:
                    patch.setattr(owner, name, self._counted(kind, getattr(owner, name)))
            yield

    def _counted(self, kind: str, call: Any) -> Any:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts = self.counts
            self[kind] += counts
            self.counts = False
            try:
                return call(*args, **kwargs)
            finally:
                self.counts = counts

        return counted


def a_pair(index: int) -> Any:
    return [torch.full((4, 8), float(index)), torch.full((4,), index)]


def calls_per_step(*callbacks: Any, load_ms: float, synchronise: bool) -> dict[str, float]:
    """Calls by kind, mean over the steps from ``FIRST`` to ``LAST``."""
    calls = Calls()

    class Counts(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            calls.counts = FIRST <= batch_idx < LAST

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            counts = calls.counts
            calls.counts = False  # the step's own calls
            loss = super().training_step(batch, batch_idx)
            calls.counts = counts
            return loss

    device = SimulatedDevice()
    loader = SimulatedLoader(device, LAST + 20, period_ms=load_ms, make=a_pair)
    with calls.patched():
        fit(device, Counts(device, 3.0, synchronise=synchronise), loader, *callbacks, logger=Memory())
    assert device.races == []
    return {kind: count / (LAST - FIRST) for kind, count in calls.items() if count}


@pytest.mark.parametrize(
    ("load_ms", "synchronise"), [(1, False), pytest.param(9, False, marks=pytest.mark.nightly), (9, True)]
)
def test_both_callbacks_make_at_most_ten_device_calls_per_step(load_ms: float, synchronise: bool) -> None:
    starvation = GPUStarvationCallback(report=False)
    calls = calls_per_step(PrefetchCallback(), starvation, load_ms=load_ms, synchronise=synchronise)
    assert calls.pop("record_stream") == 2  # one for each tensor, whatever else is called
    assert sum(calls.values()) <= 10
    assert calls["wait"] == calls["switch"] == calls["current_stream"] == 1
    assert calls["query"] <= 0.2
    assert calls["record"] + calls["elapsed_time"] <= 7


def test_a_callback_alone_makes_fewer_device_calls_per_step() -> None:
    starvation = GPUStarvationCallback(report=False)
    calls = calls_per_step(starvation, load_ms=9, synchronise=False)
    assert set(calls) == {"record", "elapsed_time", "query"}
    assert sum(calls.values()) <= 5.5
    calls = calls_per_step(PrefetchCallback(), load_ms=1, synchronise=False)
    assert calls.pop("record_stream") == 2
    assert sum(calls.values()) <= 4.2


# --- the parts of a step ----------------------------------------------------------------------------------------------

STEPS = 240
PARTS = ("other_ms", "copy_ms", "compute_ms", "forward_ms", "backward_ms", "optimizer_ms")


class Uneven(Model):
    """The device works for another time in each step and each part of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.lengths = torch.Generator("cpu").manual_seed(batch_idx)
        self.work(2)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.work(4)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.work(1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.work(0.5)

    def work(self, mean_ms: float) -> None:
        device = torch.rand((), generator=self.lengths, device="cpu").item()
        host = torch.rand((), generator=self.lengths, device="cpu").item()
        self.sim.launch(mean_ms * (0.5 + device))
        self.sim.host(mean_ms * host)


def measured(
    model: type[Model], *callbacks: Any, load_ms: float = 6, steps: int = STEPS, **options: Any
) -> StarvationStats:
    device = SimulatedDevice(copy_bytes_per_ms=100)
    starvation = GPUStarvationCallback(report=False)
    loader = SimulatedLoader(device, steps, periods_ms=[load_ms, 2 * load_ms, load_ms / 2])
    fit(device, model(device, 1.0), loader, *callbacks, starvation, **options)
    assert device.races == []
    stats = starvation.report().stats
    assert stats.lost_steps == 0
    return stats


@pytest.mark.parametrize("prefetch", in_gate([False, True], [True]))
def test_parts_sampled_in_some_steps_match_those_of_all_steps(prefetch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> StarvationStats:
        return measured(Uneven, *([PrefetchCallback()] if prefetch else []), steps=320)

    stats = run()
    monkeypatch.setattr(step_meter, "is_divided", lambda number: True)
    plain = run()
    for exact in ("steps", "step_ms", "data_ms", "starved_pct"):
        assert getattr(stats, exact) == pytest.approx(getattr(plain, exact), rel=1e-9), exact
    for part in PARTS:
        assert getattr(stats, part) == pytest.approx(getattr(plain, part), rel=0.1, abs=0.05), part
    parts = (stats.other_ms, stats.data_ms, stats.copy_ms, stats.compute_ms)
    assert sum(part or 0.0 for part in parts) == pytest.approx(stats.step_ms)


class StepsRarely(Model):
    """The optimizer takes long, and not in every step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.sim.launch(24)


@pytest.mark.parametrize("every", in_gate([3, 8, 13], [8]))
def test_optimizer_time_is_right_when_gradients_accumulate(every: int) -> None:
    stats = measured(StepsRarely, PrefetchCallback(), load_ms=1, accumulate_grad_batches=every)
    assert stats.optimizer_ms == pytest.approx(24 / every, rel=0.15)


@pytest.mark.nightly
def test_sampling_exactly_every_eighth_step_would_miss_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_meter, "is_divided", lambda number: number % 8 == 1)
    stats = measured(StepsRarely, PrefetchCallback(), load_ms=1, accumulate_grad_batches=8)
    assert stats.optimizer_ms == 0


def test_one_step_in_eight_is_divided_into_parts_at_any_period_and_phase() -> None:
    numbers = range(step_meter.FIRST_DIVIDED + 1, 20_000)
    for period in range(1, 33):
        for phase in range(period):
            of_phase = [number for number in numbers if number % period == phase]
            share = sum(map(step_meter.is_divided, of_phase)) / len(of_phase)
            assert share == pytest.approx(1 / step_meter.DIVIDE_EVERY, abs=0.02), (period, phase)


# --- where a step ends ------------------------------------------------------------------------------------------------


class LongEnds(Model):
    """What the device does after the last step of an epoch is no part of that step."""

    def long(self) -> None:
        self.sim.launch(1000)
        self.sim.host(1000)

    on_train_epoch_end = long
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = long

    def on_validation_start(self) -> None:
        self.long()


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_last_step_of_an_epoch_excludes_the_work_after_it(prefetch: bool) -> None:
    device = SimulatedDevice()
    starvation = GPUStarvationCallback(report=False)
    callbacks = [PrefetchCallback()] if prefetch else []
    train = SimulatedLoader(device, 30)
    val = SimulatedLoader(device, 20)
    fit(device, LongEnds(device, 1.0), train, *callbacks, starvation, val=val, max_epochs=3, val_check_interval=10)
    stats = starvation.report().stats
    # Of 70 steps after the warm-up, 2 begin an epoch, and 5 follow a validation.
    assert stats.steps == 63
    assert stats.step_ms == pytest.approx(1)
    validation = starvation.report().measurements.validation
    assert validation is not None
    assert validation.stats.step_ms == pytest.approx(1)


@pytest.mark.filterwarnings("ignore:predict returned None")
@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_the_last_step_of_an_evaluation_excludes_the_work_after_it(entry: Any) -> None:
    device = SimulatedDevice()
    starvation = GPUStarvationCallback(report=False)
    evaluate(device, entry, LongEnds(device, 1.0), SimulatedLoader(device, 60), starvation)
    assert starvation.report(entry).stats.step_ms == pytest.approx(1)
