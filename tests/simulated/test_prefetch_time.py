"""The length of a step on the simulated device: what theory says is what the callbacks reach, and what they report."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from simulated.device import MS, SimulatedDevice
from simulated.grid import BYTES, Case, run
from simulated.training import Model, SimulatedLoader, fit

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.transfer.streams import RUN_AHEAD, DeviceStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
]
DURATIONS = [(11, 5, 2), (5, 11, 2), (2, 5, 11), (5, 5, 5), (11, 11, 2), (10, 9, 10)]
"""(compute, copy, load) in milliseconds: each the longest in turn, and ties."""


@pytest.mark.parametrize("durations", DURATIONS)
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("synchronises", [False, True], ids=["host ahead", "host waits"])
@pytest.mark.parametrize("in_main_process", [False, True], ids=["workers", "main process"])
@pytest.mark.parametrize("depth", [None, 1, 2])
def test_a_step_takes_what_theory_says_and_so_does_the_report(
    durations: tuple[float, float, float], pinned: bool, synchronises: bool, in_main_process: bool, depth: int | None
) -> None:
    case = Case(*durations, pinned, synchronises, in_main_process)
    expected = case.plain_ms() if depth is None else case.prefetched_ms(depth)
    found = run(case, depth)
    assert found.races == []
    assert found.step_ms == pytest.approx(expected, rel=0.02)
    assert found.starved_pct == pytest.approx(found.truly_starved_pct, abs=1)


def test_theory_allows_the_longest_part_alone_where_it_should() -> None:
    """Of the formulas: a host that runs ahead, workers, pinned memory; or one step more of depth."""
    for compute, copy, load in DURATIONS:
        longest = max(compute, copy, load)
        assert Case(compute, copy, load).prefetched_ms(1) == longest
        assert Case(compute, copy, load, synchronises=True).prefetched_ms(2) == longest
        assert Case(compute, copy, load, pinned=False).prefetched_ms(1) == longest


@pytest.mark.parametrize("durations", [(11, 5, 2), (11, 11, 2), (5, 2, 2), (5, 11, 2)])
def test_copies_run_under_kernels_as_far_as_these_reach(durations: tuple[float, float, float]) -> None:
    case = Case(*durations)
    reach = 100 * min(1, case.compute / case.copy)
    assert run(case, 1).copied_under_compute_pct == pytest.approx(reach, abs=2)
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
    fit(device, made, loader, PrefetchCallback(depth=depth), GPUStarvationCallback(nvml=False, report=False))
    return made, (made.ended_at[-3] - made.ended_at[4]) / (len(made.ended_at) - 7) / MS


def waits_of(model: Model) -> set[str]:
    """What the host waited for in training, but for the limit of its run ahead."""
    return {wait.what for wait in model.waits if (wait.what, wait.where.rpartition(" ")[2]) != LIMIT}


def test_nothing_waits_but_a_host_that_is_far_ahead() -> None:
    model, step_ms = fit_short()
    assert waits_of(model) == set()
    assert step_ms == pytest.approx(SHORT.compute, rel=0.02)


def test_a_copy_from_pageable_memory_is_found() -> None:
    assert waits_of(fit_short(pinned=False)[0]) == {"a copy from pageable memory"}


def test_a_transform_that_looks_at_values_is_found() -> None:
    class Looks(Model):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            there = super().transfer_batch_to_device(batch, device, dataloader_idx)
            there.max().item()
            return there

    assert waits_of(fit_short(Looks)[0]) == {"aten._local_scalar_dense.default"}


def test_a_copy_on_the_compute_stream_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStream, "issue", lambda self: nullcontext())
    _, step_ms = fit_short()
    assert step_ms == pytest.approx(SHORT.compute + SHORT.copy, rel=0.02)


# --- memory under a host that runs ahead ------------------------------------------------------------------------------


def on_side(device: SimulatedDevice) -> float:
    """Batches for which there is memory on the side stream."""
    [side] = [stream for stream in device._pools if stream is not device.compute]
    return device.memory_bytes(side) / BYTES


def side_batches(depth: int) -> float:
    """After a fit of 30 steps that never waits."""
    return on_side(fit_short(depth=depth)[0].sim)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_memory_is_bounded_under_a_host_that_runs_ahead(depth: int) -> None:
    assert side_batches(depth) <= depth + 1 + RUN_AHEAD


def test_without_the_limit_a_host_that_runs_ahead_takes_memory_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStream, "limit_run_ahead", lambda self: None)
    assert side_batches(1) > 20


def test_memory_is_bounded_in_stages_that_are_not_prefetched() -> None:
    device = SimulatedDevice()
    train, val = SimulatedLoader(device, 3), SimulatedLoader(device, 30)
    fit(device, Model(device, compute_ms=10), train, PrefetchCallback(stages=("fit",)), val=val)
    assert on_side(device) <= 2 + RUN_AHEAD
