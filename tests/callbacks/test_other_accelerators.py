"""Both callbacks on MPS, HPU, MTIA and XPU: they work or stand aside, say so once, and change nothing."""

import logging
from types import SimpleNamespace
from typing import Any

import accelerators
import pytest
import torch
from accelerators import OnCpu, SaysDevice, Xpu, register
from lightning.pytorch import Callback, seed_everything
from measure.small_fits import Memory, make_trainer
from recording import Numbers, Recording
from torch.utils.data import DataLoader

from lightning_feed import GPUStarvationCallback, PrefetchCallback

BATCHES = 12
EPOCHS = 2


def fit(kind: str, callbacks: list[Callback]) -> tuple[dict[str, torch.Tensor], Memory]:
    """Weights, and what was logged. The dataset draws random numbers, the module drops out."""
    seed_everything(1)
    logger = Memory()
    model = Recording()
    trainer = make_trainer(
        *callbacks,
        strategy=SaysDevice(torch.device(kind)) if kind != "cpu" else "auto",
        logger=logger,
        max_epochs=EPOCHS,
        limit_val_batches=1.0,
        num_sanity_val_steps=1,
    )
    loader = DataLoader(Numbers(2 * BATCHES, noise=True), batch_size=2)
    with OnCpu(kind):
        trainer.fit(model, loader, DataLoader(Numbers(4, first=1000), batch_size=2))
    return model.state_dict(), logger


def prefetched(logger: Memory) -> list[float]:
    """What was logged of each window of training; validation has rows of its own."""
    rows = [tags for _, tags in logger.rows if not all(tag.startswith("feed_val/") for tag in tags)]
    return [tags["feed/prefetch_active"] for tags in rows]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("lightning_feed")]


@pytest.mark.parametrize(("kind", "module"), [("mps", SimpleNamespace()), ("hpu", None), ("mtia", torch.mtia)])
def test_callbacks_on_mps_hpu_and_mtia_log_their_limits_once(
    kind: str, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = fit("cpu", [])
    register(monkeypatch, kind, module)
    prefetch = PrefetchCallback()
    starvation = GPUStarvationCallback(every_n_steps=4, report=False)
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        weights, logger = fit(kind, [prefetch, starvation])
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert not prefetch.active
    assert prefetched(logger) == [0.0] * (EPOCHS * BATCHES // 4)
    assert sorted(said(caplog)) == [
        f"GPUStarvationCallback: device '{kind}' has no timing events. Times are measured on the host, which does not "
        "see queued work, so confidence is low.",
        f"No GPU figures from NVML: training runs on {kind}.",
        f"PrefetchCallback does nothing: batches cannot be copied ahead of time on {kind}.",
    ]
    stats = starvation.report().stats
    assert (stats.confidence, stats.lost_steps) == ("low", 0)


def test_xpu_batches_are_prefetched_and_timed_by_xpu_events(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = fit("cpu", [])
    xpu = Xpu()
    register(monkeypatch, "xpu", xpu)
    prefetch = PrefetchCallback()
    starvation = GPUStarvationCallback(every_n_steps=4, report=False)
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        weights, logger = fit("xpu", [prefetch, starvation])
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert said(caplog) == ["No GPU figures from NVML: training runs on xpu."]
    assert prefetched(logger) == [1.0] * (EPOCHS * BATCHES // 4)
    (side,) = xpu.side
    assert xpu.waits.count((xpu.compute, side)) >= EPOCHS * (BATCHES - 1)  # all batches but the first of each epoch
    assert xpu.now is xpu.compute
    assert xpu.timing_events > 0
    stats = starvation.report().stats
    assert (stats.steps + EPOCHS, stats.lost_steps) == (EPOCHS * BATCHES, 0)


@pytest.mark.parametrize("is_measured_first", [True, False])
def test_trials_lengthen_no_step_on_a_device(*, is_measured_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event takes 1 us, and the trials 31 s: neither the step before nor the step after has them."""
    register(monkeypatch, "xpu", Xpu())
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1e-6
        return now_s

    monkeypatch.setattr(accelerators, "time", SimpleNamespace(monotonic=clock))
    starvation = GPUStarvationCallback(report=False)

    class Tries(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            nonlocal now_s
            run = starvation.measured_fit
            if batch_idx == BATCHES // 2 and run is not None:
                with run.trials():
                    now_s += 31.0

    callbacks: list[Callback] = [starvation, Tries()]
    fit("xpu", callbacks if is_measured_first else callbacks[::-1])
    measured = starvation.report().measurements
    assert measured.timeline is not None
    assert sum(steps.steps for steps in measured.timeline.bins) == EPOCHS * (BATCHES - 2)  # nor the first of an epoch
    assert max(steps.to_ms for steps in measured.timeline.bins) < 1
