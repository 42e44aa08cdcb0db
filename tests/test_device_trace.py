"""The arithmetic of traces, on made-up events and on a real trace of the host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_trace import (
    LOADER_NEXT,
    covered_pct,
    device_work,
    host_ranges,
    intervals,
    overlap,
    starved_pct,
)
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from recording import quiet_trainer
from torch.utils.data import DataLoader

HOST, DEVICE = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(name: str, kind: Any, start: float, end: float) -> Any:
    return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))


def test_work_is_what_is_on_the_device_but_the_ranges_of_the_host() -> None:
    events = [
        event("Optimizer.step#SGD.step", HOST, 0, 9),
        event("Optimizer.step#SGD.step", DEVICE, 20, 90),  # a range, with the gaps between its kernels
        event("at::cuda::(anonymous namespace)::spin_kernel(long)", DEVICE, 20, 40),
        event("Memcpy HtoD (Pinned -> Device)", DEVICE, 30, 35),
        event("cudaMemcpyAsync", HOST, 1, 2),
    ]
    assert intervals(device_work(events)) == [(20, 40), (30, 35)]
    assert intervals(device_work(events), "spin_kernel") == [(20, 40)]
    assert host_ranges(events, "Optimizer.step#SGD.step") == [(0, 9)]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ([], [(0, 9)], 0),
        ([(0, 4)], [(4, 9)], 0),
        ([(0, 5)], [(4, 9)], 1),
        ([(2, 3)], [(0, 9)], 1),
        ([(0, 9)], [(1, 2), (3, 5)], 3),
        ([(0, 9)], [(1, 4), (2, 5)], 4),  # what overlaps counts once
        ([(0, 4), (2, 6)], [(3, 9)], 3),
        ([(5, 5), (7, 6)], [(0, 9)], 0),
    ],
)
def test_overlap(first: Any, second: Any, shared: float) -> None:
    assert overlap(first, second) == overlap(second, first) == shared


def test_the_share_that_is_covered() -> None:
    assert covered_pct([(0, 4), (10, 14)], [(0, 2), (9, 20)]) == 75
    assert covered_pct([(0, 4)], [(5, 6)]) == 0


@pytest.mark.parametrize(
    ("work", "share"),
    [
        ([(0, 100)], 0),  # the device has work queued all the time: waiting is hidden
        ([], 40),  # each of two fetches of 20
        ([(0, 20), (60, 80)], 30),  # drained in the middle of the first fetch, and before the second
        ([(0, 15), (16, 100)], 1),
        ([(0, 15), (0, 30), (60, 95)], 5),
    ],
)
def test_the_share_starved_of_data(work: Any, share: float) -> None:
    assert starved_pct([(10, 30), (80, 100), (100, 180)], work, (0, 100)) == share


def test_time_outside_of_the_window_does_not_count() -> None:
    assert starved_pct([(0, 60), (90, 200)], [], (50, 100)) == 40


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging interval")
def test_a_trace_of_a_fit_has_one_range_for_each_batch() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        quiet_trainer([], max_epochs=1, limit_val_batches=0).fit(BoringModel(), DataLoader(RandomDataset(32, 7)))
    found = host_ranges(profile.events(), LOADER_NEXT)
    assert len(found) == 7
    assert all(end > start for start, end in found)
    assert device_work(profile.events()) == []
