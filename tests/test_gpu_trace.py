"""The arithmetic of traces, on made-up ones and on a real one of the host. tests/test_gpu_day.py reads a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_trace import Trace, covered, covered_pct, read_trace, starved_pct
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from recording import quiet_trainer
from torch.utils.data import DataLoader

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("span", "by", "inside"),
    [
        ((0, 9), [], 0),
        ((4, 9), [(0, 4)], 0),
        ((4, 9), [(0, 5)], 1),
        ((2, 3), [(0, 9)], 1),
        ((0, 9), [(1, 2), (3, 5)], 3),
        ((0, 9), [(1, 4), (2, 5)], 4),  # what overlaps counts once
        ((0, 9), [(5, 5), (7, 6)], 0),
    ],
)
def test_covered_gives_the_length_of_a_span_that_is_covered(span: Any, by: Any, inside: float) -> None:
    assert covered(span, by) == inside


def test_covered_pct_gives_the_covered_share_of_all_spans() -> None:
    assert covered_pct([(0, 4), (10, 14)], [(0, 2), (9, 20)]) == 75
    assert covered_pct([(0, 4)], [(5, 6)]) == 0


@pytest.mark.parametrize(
    ("kernels", "share"),
    [
        ([(0, 100)], 0),  # the device has work queued all the time: waiting is hidden
        ([], 40),  # each of two fetches of 20
        ([(0, 20), (60, 80)], 30),  # drained in the middle of the first fetch, and before the second
        ([(0, 15), (16, 100)], 1),
        ([(0, 15), (0, 30), (60, 95)], 5),
    ],
)
def test_starved_pct_counts_fetching_while_the_device_is_idle(kernels: Any, share: float) -> None:
    """Two steps of 50 behind another, whose fetch does not count."""
    spins = [(-5, 0), (45, 50), (95, 100)]
    fetches = [(-30, -10), (10, 30), (80, 100)]
    trace = Trace(kernels=kernels, other=[], to_device=[], spins=spins, fetches=fetches)
    assert starved_pct(trace, steps=2) == share


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging interval")
def test_a_trace_of_a_fit_has_one_fetch_for_each_batch(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        quiet_trainer([], max_epochs=1, limit_val_batches=0).fit(BoringModel(), DataLoader(RandomDataset(32, 7)))
    file = tmp_path / "trace.json"
    profile.export_chrome_trace(str(file))
    trace = read_trace(file)
    assert len(trace.fetches) == 7
    assert all(end > start for start, end in trace.fetches)
    assert trace.kernels == trace.other == []
