"""The device clock on a real device: what it reads against work of known length, and that it never waits."""

import time
from typing import Any

import pytest
import torch
from gpu_trace import Trace, profiled, starved_pct
from lightning.pytorch import Callback, LightningModule
from on_cuda import NoWaiting, fitted, spin, warm_up
from torch.utils.data import DataLoader, Dataset

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.measure.nvml import NvmlSampler
from lightning_feed.measure.stats import GpuStats
from lightning_feed.measure.windows import WARM_UP_STEPS

STEPS = 60


class Slow(Dataset[torch.Tensor]):
    """The host waits ``ms`` for each sample."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.ms / 1e3)
        return torch.ones(32)


class Busy(LightningModule):
    """Keeps the device busy for ``ms`` a step, while the host goes on at once."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)
        self.ms = ms

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        spin(self.ms)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Waits(Busy):
    """The step waits for the device itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


def watched(data_ms: float, model: LightningModule, *others: Callback) -> Any:
    """What the meter says of a fit without its warm-up."""
    warm_up()
    starvation = GPUStarvationCallback(every_n_steps=10, report=False)
    fitted(model, DataLoader(Slow(data_ms), pin_memory=True), *others, starvation, max_epochs=1)
    return starvation.report().stats


# --- against a trace --------------------------------------------------------------------------------------------------


@pytest.mark.gpu(twin="simulated/test_prefetch_time.py::test_step_time_and_reported_starvation_match_theory")
@pytest.mark.parametrize(("data_ms", "compute_ms"), [(8, 20), (20, 5), (12, 10)])
def test_starved_share_matches_a_profiler_trace(data_ms: float, compute_ms: float) -> None:
    """Within 2 points of what the profiler saw of the same run: the host was fetching, and the device did nothing."""
    traces: list[Trace] = []
    with profiled(traces):
        stats = watched(data_ms, Busy(compute_ms))
    assert stats.steps == STEPS - WARM_UP_STEPS
    assert len(traces[0].fetches) == STEPS
    assert len(traces[0].spins) > STEPS  # the first is of the warm-up
    truth = starved_pct(traces[0], stats.steps)
    assert stats.starved_pct == pytest.approx(truth, abs=2)
    # The control: where work is queued, the share of the host's waiting is not the truth, so that it would fail here.
    host_pct = 100 * stats.next_wait_ms / stats.step_ms
    if compute_ms > data_ms:
        assert truth < 2
        assert abs(host_pct - truth) > 2
    else:
        assert truth > 5


# --- against work of known length -------------------------------------------------------------------------------------


@pytest.mark.gpu(twin="simulated/test_prefetch_time.py::test_step_time_and_reported_starvation_match_theory")
def test_queued_work_hides_the_wait() -> None:
    stats = watched(8, Busy(20), NoWaiting())
    assert stats.starved_pct == pytest.approx(0, abs=2)
    assert stats.step_ms == pytest.approx(20, rel=0.15)
    assert stats.next_wait_ms >= 8
    assert stats.hidden_wait_ms == pytest.approx(stats.next_wait_ms, rel=0.1)
    assert stats.lost_steps == 0


@pytest.mark.gpu(twin="simulated/test_prefetch_time.py::test_step_time_and_reported_starvation_match_theory")
def test_a_drained_device_waits_for_data() -> None:
    stats = watched(20, Busy(5), NoWaiting())
    assert stats.compute_ms == pytest.approx(5, abs=2.5)  # and what the host takes to launch it
    assert 60 < stats.starved_pct < 90


@pytest.mark.gpu(twin="simulated/test_prefetch_time.py::test_step_time_and_reported_starvation_match_theory")
def test_a_step_that_waits_for_the_device_hides_no_data_wait() -> None:
    """The control of queued work: with ``.item()`` in the step nothing is queued while the host fetches."""
    assert watched(8, Waits(20)).starved_pct > 20


@pytest.mark.gpu(no_twin="torch itself raises, for CUDA only")
def test_the_no_waiting_callback_raises_on_a_device_sync() -> None:
    """The control of ``NoWaiting``."""
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        watched(0, Waits(5), NoWaiting())


@pytest.mark.gpu(twin="simulated/test_prefetch_time.py::test_step_time_and_reported_starvation_match_theory")
def test_a_look_ahead_hides_the_copy_and_the_wait_still_counts_as_data() -> None:
    stats = watched(20, Busy(5), PrefetchCallback(), NoWaiting())
    assert stats.prefetch_active is True
    assert 60 < stats.starved_pct < 90


@pytest.mark.gpu(twin="simulated/test_calls.py::test_parts_sampled_in_some_steps_match_those_of_all_steps")
def test_step_parts_add_up_to_the_step_time() -> None:
    stats = watched(5, Busy(5))
    parts = (stats.compute_ms, stats.copy_ms, stats.data_ms, stats.other_ms)
    assert sum(part or 0 for part in parts) == pytest.approx(stats.step_ms)
    assert all(part is not None and part >= 0 for part in parts)


# --- NVML -------------------------------------------------------------------------------------------------------------


def sampled(work: Any, seconds: float = 2) -> GpuStats:
    """What NVML says while ``work`` is done over and over."""
    sampler = NvmlSampler(str(torch.cuda.get_device_properties(0).uuid), period_s=0.25)
    work()
    torch.cuda.synchronize()
    sampler.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        work()
        torch.cuda.synchronize()
    sampler.stop()
    stats = sampler.take()
    assert stats is not None
    return stats


@pytest.mark.gpu(twin="measure/test_nvml.py::test_gpu_stats_are_the_means_of_the_nvml_samples")
def test_nvml_tells_a_busy_device_from_an_idle_one() -> None:
    """And knows the device by the UUID of torch."""
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def multiply() -> None:
        for _ in range(20):
            factor @ factor

    idle, busy = sampled(lambda: time.sleep(0.1)), sampled(multiply)
    assert busy.mem_used_mib is not None
    assert busy.mem_used_mib >= 2 * 8192 * 8192 / 2**20
    for pct in (idle.util_pct, busy.util_pct, idle.sm_pct, busy.sm_pct):
        assert pct is None or 0 <= pct <= 100
    if busy.sm_pct is None:
        pytest.skip("NVML gives no SM activity of this GPU, which takes Hopper and a driver that allows it")
    assert busy.sm_pct > 50
    assert idle.sm_pct is not None
    assert idle.sm_pct < busy.sm_pct - 30  # the control
