"""GPUStarvationCallback beside a device, NVML and a second clock: it never waits, and it tells the truth."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from measure.failing_device import FailingDevice
from measure.small_fits import CpuPrefetch, Memory, Slow, make_loader, make_trainer, run_fit
from simulated.device import SimulatedDevice
from torch.utils.data import DataLoader

from lightning_feed import GPUStarvationCallback
from lightning_feed.callbacks import starvation as starvation_callback
from lightning_feed.callbacks import starvation_run
from lightning_feed.measure import loop
from lightning_feed.measure.stats import GpuStats
from lightning_feed.measure.step_meter import EventRing

pytestmark = [
    # These fits are small on purpose.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set"),
    # Lightning's own advice, for runs that are resumed in the middle of an epoch.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

# --- a device that computes on its own ----------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Events of a fake device in the place of the CPU's missing ones; its clock is the host's."""
    fake = SimulatedDevice()
    monkeypatch.setattr(starvation_run, "open_ring", lambda _: EventRing(fake.event, 512))
    monkeypatch.setattr(loop, "clock", lambda: 0.0)  # no log is slow
    return fake


def test_the_callback_never_synchronizes_with_the_device_during_steps(
    device: SimulatedDevice, quiet: GPUStarvationCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"{name} makes the host wait for the device")

        return fail

    class Guard(lightning.pytorch.Callback):
        """From the first hook of the first batch to the last one of the epoch."""

        def on_train_epoch_start(self, *args: Any) -> None:
            self.patch = pytest.MonkeyPatch()
            for owner, name in (
                (torch.cuda, "synchronize"),
                (torch.cuda.Event, "synchronize"),
                (torch.cuda.Stream, "synchronize"),
                (torch.Tensor, "item"),
                (torch.Tensor, "cpu"),
                (torch.Tensor, "tolist"),
                (type(device.event()), "synchronize"),
            ):
                self.patch.setattr(owner, name, forbidden(name))

        def on_train_batch_end(self, *args: Any) -> None:
            device.launch(20)
            device.host(10)

        def on_train_end(self, *args: Any) -> None:
            self.patch.undo()

    logger = Memory()
    guard = Guard()
    try:
        run_fit(quiet, others=(guard, CpuPrefetch()), logger=logger, batches=60, enable_progress_bar=True)
    finally:
        guard.patch.undo()
    assert len(logger.rows) == 12
    assert device.waited == 1  # at the end of training
    assert quiet.report().stats.steps == 40  # without the warm-up


def test_logged_windows_hold_only_steps_the_device_has_finished(
    device: SimulatedDevice, quiet: GPUStarvationCallback
) -> None:
    class Work(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            device.launch(20)
            device.host(10)
            return super().training_step(batch, batch_idx)

    logger = Memory()
    run_fit(quiet, model=Work(), logger=logger, batches=20)
    assert [tags["feed_step/step_ms"] for _, tags in logger.rows] == [pytest.approx(20)] * 4
    assert [tags["feed/starved_pct"] for _, tags in logger.rows] == [0.0] * 4
    assert quiet.report().stats.steps == 19


@pytest.mark.parametrize("call", ["record", "query", "elapsed_time", "synchronize"])
@pytest.mark.parametrize("met", [True, False], ids=["the step meets it", "nobody else meets it"])
def test_device_errors_are_raised_by_the_training_and_not_by_the_meter(
    call: str,
    met: bool,
    quiet: GPUStarvationCallback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FailingDevice()
    monkeypatch.setattr(starvation_run, "open_ring", lambda _: EventRing(fake.event, 64))

    class Work(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 10:
                fake.fails_at = call
            if met and fake.broken:
                fake.reach("kernel")
            fake.launch(20)
            fake.host(10)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(quiet)
    raised = met and call != "synchronize"  # the only wait is behind the last step
    with pytest.raises(RuntimeError, match="CUDA error") if raised else nullcontext() as caught:
        trainer.fit(Work(), make_loader(20))
    assert fake.broken
    if caught is not None:
        assert not [entry for entry in caught.traceback if entry.path.name == "step_meter.py"]
    stats = quiet.report().stats
    assert stats.steps + stats.lost_steps >= 10 - 1  # the first of an epoch is not counted
    assert stats.lost_steps >= 1
    assert len([record for record in caplog.records if "device clock stopped" in record.getMessage()]) == 1


# --- NVML beside it -----------------------------------------------------------------------------------------------


class FakeSampler:
    """Stands for the sampling thread."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.started = self.stopped = self.forgotten = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1

    def forget_steps(self) -> None:
        self.forgotten += 1

    def take(self) -> GpuStats:
        return GpuStats(util_pct=97.0, mem_used_mib=1024.0)

    def steady_util_pct(self) -> float:
        return 96.0


@pytest.mark.parametrize("broken", [False, True])
def test_nvml_figures_are_logged_and_the_sampling_thread_stops(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    samplers: list[FakeSampler] = []

    def make(uuid: str, stretch: Any) -> FakeSampler:
        samplers.append(FakeSampler(uuid))
        return samplers[-1]

    class Model(BoringModel):
        def on_train_epoch_end(self) -> None:
            if broken:
                raise RuntimeError("broken on purpose")

    monkeypatch.setattr(starvation_callback, "NvmlSampler", make)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="uuid of torch"))
    monkeypatch.setattr(torch.version, "hip", None)
    starvation = GPUStarvationCallback(every_n_steps=5, report=False, tags="all")
    logger = Memory()
    start = starvation_callback._start_nvml
    gpu_0 = torch.device("cuda", 0)
    monkeypatch.setattr(starvation_callback, "_start_nvml", lambda trainer, _, *others: start(trainer, gpu_0, *others))
    trainer = make_trainer(starvation, logger=logger)
    with pytest.raises(RuntimeError, match="on purpose") if broken else nullcontext():
        trainer.fit(Model(), make_loader())
    (sampler,) = samplers
    assert (sampler.uuid, sampler.started, sampler.stopped) == ("uuid of torch", 1, 1)
    gpu = {tag: value for tag, value in logger.rows[0][1].items() if tag.startswith("feed_gpu")}
    assert gpu == {"feed_gpu/util_pct": 97.0, "feed_gpu/mem_used_mib": 1024.0}
    assert starvation.report().measurements.device_busy_pct == 96.0


def test_utilization_of_steps_with_another_loader_is_forgotten() -> None:
    """Steps before AutotuneCallback changed the loader are not those that the report is about."""
    starvation = GPUStarvationCallback(report=False)
    sampler = FakeSampler("any")

    class Restarts(lightning.pytorch.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            run: Any = starvation.measured_fit
            if args[-1] == 5:
                run.nvml = sampler
                run.restart()

    run_fit(starvation, others=(Restarts(),), logger=Memory())
    assert sampler.forgotten == 1


def test_a_cpu_run_logs_nothing_about_nvml(caplog: pytest.LogCaptureFixture) -> None:
    starvation = GPUStarvationCallback(report=False)
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        for _ in range(2):
            run_fit(starvation, logger=Memory())
    assert not [record for record in caplog.records if "NVML" in record.getMessage()]


# --- the truth ----------------------------------------------------------------------------------------------------


class TimedLoader(DataLoader[Any]):
    """Times its own ``next``: a second clock, which knows nothing of the callback."""

    def __iter__(self) -> Any:
        self.waits: list[float] = []
        inner = super().__iter__()
        while True:
            began = time.monotonic()
            try:
                batch = next(inner)
            except StopIteration:
                return
            self.waits.append(time.monotonic() - began)
            yield batch


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("workers", "data_ms", "compute_ms", "ideal_pct"),
    [
        (0, 20, 20, 50),
        pytest.param(0, 36, 4, 90, marks=pytest.mark.nightly),
        pytest.param(0, 4, 36, 10, marks=pytest.mark.nightly),
        (2, 80, 20, 50),  # two workers give a batch every 40 ms
        pytest.param(2, 30, 60, 0, marks=pytest.mark.nightly),
    ],
)
def test_the_starved_share_matches_an_independent_clock(
    workers: int, data_ms: float, compute_ms: float, ideal_pct: float, quiet: GPUStarvationCallback
) -> None:
    starts: list[float] = []

    class Steady(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            starts.append(time.monotonic())
            time.sleep(compute_ms / 1e3)
            return super().training_step(batch, batch_idx)

    loader = TimedLoader(Slow(48, data_ms), num_workers=workers)
    make_trainer(quiet).fit(Steady(), loader)
    stats = quiet.report().stats
    left_out = max(1, 20 + 2 * workers)
    assert stats.steps == 48 - left_out
    truth_pct = 100 * sum(loader.waits[left_out:]) / (starts[-1] - starts[left_out - 1])
    assert stats.starved_pct == pytest.approx(truth_pct, abs=5)
    # What the sleeps alone would give. Lightning's own millisecond or two, and a busy machine, come on top of them.
    assert stats.starved_pct == pytest.approx(ideal_pct, abs=12)
