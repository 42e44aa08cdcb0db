"""The device clock on a real device: what it reads against work of known length, and that it never waits."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.watch.nvml import NvmlSampler
from lightning_feed.watch.windows import WARM_UP_STEPS

pytestmark = [
    pytest.mark.gpu,
    # These fits are small on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
]
STEPS = 60
FETCH = "test.fetch"


class Slow(Dataset[torch.Tensor]):
    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.profiler.record_function(FETCH):
            time.sleep(self.ms / 1e3)
        return torch.ones(32)


class Busy(LightningModule):
    """Keeps the device busy for ``ms`` a step, while the host goes on at once."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)
        self.cycles = int(ms * _cycles_per_ms())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.cuda._sleep(self.cycles)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _cycles_per_ms() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 50_000_000
    torch.cuda._sleep(cycles)  # the first one also loads the kernel
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return float(cycles / start.elapsed_time(end))


class NoWaiting(Callback):
    """torch itself raises on a synchronising call, from the first step to the last."""

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def on_train_epoch_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def _fit(data_ms: float, compute_ms: float, *others: Callback) -> GPUStarvationCallback:
    starvation = GPUStarvationCallback(every_n_steps=10, nvml=False, report=False)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*others, starvation],
    )
    trainer.fit(Busy(compute_ms), DataLoader(Slow(data_ms), pin_memory=True))
    return starvation


def test_queued_work_hides_the_wait() -> None:
    stats = _fit(8, 20, NoWaiting()).report().stats
    assert stats.starved_pct == pytest.approx(0, abs=2)
    assert stats.step_ms == pytest.approx(20, rel=0.1)
    assert stats.next_wait_ms == pytest.approx(8, rel=0.2)
    assert stats.hidden_wait_ms == pytest.approx(stats.next_wait_ms, rel=0.1)
    assert stats.lost_steps == 0


def test_a_drained_device_waits_for_data() -> None:
    stats = _fit(20, 5, NoWaiting()).report().stats
    assert stats.compute_ms == pytest.approx(5, abs=1.5)
    assert stats.starved_pct == pytest.approx(75, abs=8)


def test_a_look_ahead_hides_the_copy_and_the_wait_is_still_data() -> None:
    stats = _fit(20, 5, PrefetchCallback(), NoWaiting()).report().stats
    assert stats.prefetch_active is True
    assert stats.starved_pct == pytest.approx(75, abs=8)


@pytest.mark.parametrize(("data_ms", "compute_ms"), [(8, 20), (20, 5), (12, 10)])
def test_the_share_is_that_of_a_trace(data_ms: float, compute_ms: float) -> None:
    """Within 2 points of what the profiler saw of the same run: kernels that had ended, while the host was fetching."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        stats = _fit(data_ms, compute_ms).report().stats
    assert stats.steps == STEPS - WARM_UP_STEPS
    assert stats.starved_pct == pytest.approx(_starved_pct(profile.events()), abs=2)


def _starved_pct(events: Any) -> float:
    """From the end of the warm-up to the last kernel, in the trace's microseconds."""
    cuda = torch.autograd.DeviceType.CUDA
    fetches = sorted((one.time_range.start, one.time_range.end) for one in events if one.name == FETCH)
    assert len(fetches) == STEPS
    ends = sorted(one.time_range.end for one in events if one.device_type == cuda and one.name != FETCH)

    def drained(moment: float) -> float:
        """When the last kernel before ``moment`` ended."""
        return max((end for end in ends if end <= moment), default=0.0)

    def busy(moment: float) -> bool:
        return any(
            one.time_range.start < moment < one.time_range.end
            for one in events
            if one.device_type == cuda and one.name != FETCH
        )

    idle = sum(0.0 if busy(end) else end - max(start, drained(end)) for start, end in fetches[WARM_UP_STEPS:])
    spins = sorted(one.time_range.end for one in events if "spin_kernel" in one.name and one.device_type == cuda)
    return 100 * idle / (ends[-1] - spins[-STEPS + WARM_UP_STEPS - 1])


def test_the_parts_add_up() -> None:
    stats = _fit(5, 5).report().stats
    parts = (stats.compute_ms, stats.h2d_ms, stats.data_idle_ms, stats.other_ms)
    assert sum(part or 0 for part in parts) == pytest.approx(stats.step_ms)
    assert all(part is not None and part >= 0 for part in parts)


def test_nvml_knows_the_device_by_the_uuid_of_torch() -> None:
    sampler = NvmlSampler(str(torch.cuda.get_device_properties(0).uuid), period_s=0.05)
    sampler.start()
    time.sleep(1)
    sampler.stop()
    stats = sampler.take()
    assert stats is not None
    assert stats.mem_used_mib is not None
    assert stats.mem_used_mib > 0
