"""The length of a step on the simulated device: what theory says is what the callbacks reach, and what they report."""

from itertools import product
from typing import Any

import pytest
import torch
from cells import covering, in_gate
from simulated.device import MS, SimulatedDevice
from simulated.grid import BYTES, Case, run
from simulated.training import Model, SimulatedLoader, evaluate, fit

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.transfer import prefetcher as streams
from lightning_feed.transfer.prefetcher import MOST_AHEAD, RUN_AHEAD

pytestmark = [
    pytest.mark.filterwarnings("ignore:predict returned None"),
]
DURATIONS = [(11, 5, 2), (5, 11, 2), (2, 5, 11)]
"""(compute, copy, load) in milliseconds: each the longest in turn."""
TIES = [(5, 5, 5), (11, 11, 2), (10, 9, 10)]
CASES = [
    *(Case(*durations, *how) for how in product([True, False], repeat=3) for durations in DURATIONS),
    *(Case(*durations, pinned=True, synchronises=waits) for waits in (False, True) for durations in TIES),
]
DEPTHS = [None, 2, 1]


def with_depths() -> list[Any]:
    """Each case with each depth. The gate has each case once or not at all, and in turn without and with a depth."""
    cells = []
    for number, case in enumerate(CASES):
        turn = (number + number // len(DEPTHS)) % len(DEPTHS)
        for place, depth in enumerate(DEPTHS):
            marks = [] if place == turn and depth != 1 else [pytest.mark.nightly]
            cells.append(pytest.param(case, depth, id=f"{case}-{depth}", marks=marks))
    return cells


@pytest.mark.parametrize(("case", "depth"), with_depths())
def test_step_time_and_reported_starvation_match_theory(case: Case, depth: int | None) -> None:
    expected = case.plain_ms() if depth is None else case.prefetched_ms(depth)
    outcome = run(case, depth)
    assert outcome.races == []
    assert outcome.step_ms == pytest.approx(expected, rel=0.02)
    assert outcome.starved_pct == pytest.approx(outcome.truly_starved_pct, abs=1)


@pytest.mark.parametrize(
    "durations", in_gate([(11, 5, 2), (11, 11, 2), (5, 2, 2), (5, 11, 2)], [(11, 5, 2), (5, 11, 2)])
)
def test_copies_overlap_with_compute_as_far_as_theory_allows(durations: tuple[float, float, float]) -> None:
    case = Case(*durations)
    reach = 100 * min(1, case.compute / case.copy)
    assert run(case, 1, steps=60).copied_under_compute_pct == pytest.approx(reach, abs=2)
    assert run(case, None).copied_under_compute_pct == 0


# --- what costs time, and is found ------------------------------------------------------------------------------------

SHORT = Case(compute=11, copy=5, load=2)
LIMIT = ("Event.synchronize", "limit_run_ahead")
"""What the host waits for where it is far ahead."""


def fit_short(model: type[Model] = Model, *, pinned: bool = True, depth: int = 1) -> tuple[Model, float]:
    """The module of a fit of 30 steps, and milliseconds a step."""
    device = SimulatedDevice(copy_bytes_per_ms=BYTES / SHORT.copy)
    made = model(device, SHORT.compute)
    loader = SimulatedLoader(device, 30, period_ms=SHORT.load, pinned=pinned)
    fit(device, made, loader, PrefetchCallback(depth=depth), GPUStarvationCallback(report=False))
    return made, (made.ended_at[-3] - made.ended_at[4]) / (len(made.ended_at) - 7) / MS


def waits_of(model: Model) -> set[str]:
    """What the host waited for in training, but for the limit of its run ahead."""
    return {wait.what for wait in model.waits if (wait.what, wait.where.rpartition(" ")[2]) != LIMIT}


def test_the_host_waits_only_when_it_is_too_far_ahead() -> None:
    model, step_ms = fit_short()
    assert waits_of(model) == set()
    assert step_ms == pytest.approx(SHORT.compute, rel=0.02)


def test_the_wait_for_a_copy_from_pageable_memory_is_found() -> None:
    assert waits_of(fit_short(pinned=False)[0]) == {"a copy from pageable memory"}


def test_the_wait_of_a_transform_that_reads_values_is_found() -> None:
    class Looks(Model):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            there = super().transfer_batch_to_device(batch, device, dataloader_idx)
            there.max().item()
            return there

    assert waits_of(fit_short(Looks)[0]) == {"aten._local_scalar_dense.default"}


# --- memory under a host that runs ahead ------------------------------------------------------------------------------


def on_side(device: SimulatedDevice) -> float:
    """Batches for which there is memory on the side stream."""
    [side] = [stream for stream in device._pools if stream is not device.compute]
    return device.memory_bytes(side) / BYTES


def side_batches(depth: int) -> float:
    """After a fit of 30 steps that never waits."""
    return on_side(fit_short(depth=depth)[0].sim)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch counts as a large one."""
    monkeypatch.setattr(streams, "RUN_AHEAD_BYTES", 0)


def test_the_run_ahead_of_small_batches_is_bounded_by_bytes_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "RUN_AHEAD_BYTES", 8 * BYTES)
    assert side_batches(1) == 8 + 2
    monkeypatch.setattr(streams, "RUN_AHEAD_BYTES", 1 << 30)
    monkeypatch.setattr(streams, "MOST_AHEAD", 12)
    assert side_batches(1) == 12 + 2
    assert MOST_AHEAD == 60


@pytest.mark.usefixtures("large")
@covering(depth=[1, 2, 3], every=[2, 3, 5])
def test_prefetched_memory_is_bounded_when_validation_interrupts_training(depth: int, every: int) -> None:
    device = SimulatedDevice()
    train = SimulatedLoader(device, 16)
    val = SimulatedLoader(device, 12)
    callback = PrefetchCallback(depth=depth)
    fit(device, Model(device, compute_ms=10), train, callback, val=val, val_check_interval=every)
    assert on_side(device) <= depth + 1 + RUN_AHEAD
    assert device.races == []


@pytest.mark.usefixtures("large")
@covering(entry=["validate", "test", "predict"], depth=[1, 3])
def test_prefetched_evaluation_is_race_free_bounded_and_hides_copies(entry: Any, depth: int) -> None:
    steps = {}
    for callbacks in ([], [PrefetchCallback(depth=depth)]):
        device = SimulatedDevice(copy_bytes_per_ms=BYTES / 5)
        began = device.now
        evaluate(device, entry, Model(device, compute_ms=11), SimulatedLoader(device, 30), *callbacks)
        steps[len(callbacks)] = (device.compute.free_at - began) / 30 / MS
        assert device.races == []
    assert on_side(device) <= depth + 1 + RUN_AHEAD
    assert steps[0] == pytest.approx(16, rel=0.02)
    assert steps[1] == pytest.approx(11, rel=0.02)


# --- a loader that stalls ---------------------------------------------------------------------------------------------


def test_running_ahead_on_small_batches_hides_loader_stalls() -> None:
    """100 ms in every 20 batches, steps of 10 ms: as long as the device has work queued, a stall costs nothing."""

    def step_ms(*callbacks: Any) -> float:
        device = SimulatedDevice(copy_bytes_per_ms=BYTES)
        model = Model(device, compute_ms=10)
        fit(device, model, SimulatedLoader(device, 120, periods_ms=[2.0] * 19 + [100.0]), *callbacks)
        return (model.ended_at[-1] - model.ended_at[39]) / 80 / MS

    assert step_ms() == pytest.approx(11, rel=0.02)  # its copies are in the way
    assert step_ms(PrefetchCallback()) == pytest.approx(10, rel=0.02)
