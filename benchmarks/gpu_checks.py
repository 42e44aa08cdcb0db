"""Checks of claims on one CUDA device. tests/gpu has their controls: safeguards that are taken out.

Parts of gpu_day.py, which says what each is for. One alone, its results in FILE:

    python benchmarks/gpu_checks.py PART --out FILE
"""

import gc
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_claims import Claim, Report, at_least, at_most, if_active, run_part
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from pictures import make_picture
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.data.image_backends import check_available, require_nvjpeg
from lightning_feed.errors import FeedError
from lightning_feed.transfer import prefetcher as streams
from lightning_feed.transfer.gpu_decode import NvJpeg

# Behind the folder of this file: both have a module of the name `decode`.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

import on_cuda
from gpu_trace import FETCH, Trace, covered_pct, profiled, starved_pct

Batch = dict[str, Tensor]
IMAGES = (64, 3, 512, 512)
"""A batch of 50 MB, which takes about a millisecond to copy."""


# --- the device -------------------------------------------------------------------------------------------------------


class CudaDevice:
    """The first CUDA device."""

    def __init__(self) -> None:
        on_cuda.cycles_per_ms()  # measured now, since that waits for the device

    def fit(self, model: LightningModule, loader: Any, *callbacks: Callback, **options: Any) -> None:
        """Train for one epoch, and wait for the device."""
        Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            **options,
        ).fit(model, loader)
        torch.cuda.synchronize()

    spin = staticmethod(on_cuda.spin)

    def wait(self, ms: float) -> None:
        """Let the host do nothing."""
        time.sleep(ms / 1e3)

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in page-locked memory."""
        return tensor.pin_memory()

    def forget_memory(self) -> None:
        """Give unused memory back, and begin to measure the peak anew."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The most memory that torch held; blocks of less than 1 MiB, which lie elsewhere, are not counted."""
        return int(torch.cuda.memory_stats()["reserved_bytes.large_pool.peak"])


BATCHES = 40
LATE_MS = 20.0


class Reads(LightningModule):
    """Reads each batch on the device.

    Args:
        device: to run on.
        before_ms: the device computes so long before it reads the batch; the host has queued all of it at once.
        after_ms: the device goes on computing so long afterwards.
    """

    def __init__(self, device: CudaDevice, *, before_ms: float = 0.0, after_ms: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.gpu = device
        self.before_ms = before_ms
        self.after_ms = after_ms

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.before_ms:
            self.gpu.spin(self.before_ms)
        while batch:  # the last reference goes as soon as the read is queued
            torch.aminmax(batch.popitem()[1])
        if self.after_ms:
            self.gpu.spin(self.after_ms)
        return self.weight * 2.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


# --- share ------------------------------------------------------------------------------------------------------------

STEPS = 60


class SlowLoader:
    """A loader in which the host waits for ``ms``."""

    def __init__(self, device: CudaDevice, ms: float) -> None:
        self._device = device
        self._ms = ms
        self._tensor = device.pin(torch.ones(32))

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(STEPS):
            with torch.profiler.record_function(FETCH):
                self._device.wait(self._ms)
            yield {"0": self._tensor}


def share(report: Report, device: CudaDevice) -> None:
    """starved_pct beside the share of a trace in which the host fetched and the device had nothing to do."""
    for data_ms, compute_ms in ((8, 20), (20, 5), (12, 10)):
        for ahead in (False, True):
            starvation = GPUStarvationCallback(every_n_steps=10, nvml=False, report=False)
            callbacks: list[Callback] = [PrefetchCallback(), starvation] if ahead else [starvation]
            traces: list[Trace] = []
            with profiled(traces):
                device.fit(Reads(device, after_ms=compute_ms), SlowLoader(device, data_ms), *callbacks)
            stats = starvation.report().stats
            what = f"data {data_ms} ms, compute {compute_ms} ms{', prefetched' if ahead else ''}"
            if len(traces[0].spins) != STEPS or len(traces[0].fetches) != STEPS:
                report.add(Claim(claim=what, detail=f"the profiler saw {len(traces[0].spins)} of {STEPS} kernels"))
                continue
            told = math.nan if stats.starved_pct is None else stats.starved_pct
            true = starved_pct(traces[0], stats.steps) if stats.steps else math.nan
            detail = f"told {told:.1f} %, in the trace {true:.1f} %"
            report.add(at_most(f"starved_pct against the trace, {what}", abs(told - true), 2, "points", detail))
            report.row(
                data_ms=data_ms,
                compute_ms=compute_ms,
                prefetched=ahead,
                step_ms=stats.step_ms,
                told_pct=stats.starved_pct,
                trace_pct=true,
            )


# --- overlap and memory -----------------------------------------------------------------------------------------------


class SameBatch:
    """The same page-locked batch again and again: the host is never the slow one."""

    def __init__(self, device: CudaDevice, shape: tuple[int, ...], count: int) -> None:
        self._tensor = device.pin(torch.zeros(shape, dtype=torch.uint8))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return ({"0": self._tensor} for _ in range(self._count))


def overlap_trace(report: Report, device: CudaDevice) -> None:
    """The share of copying during which the device computed."""
    for name, callbacks in (("plain", []), ("PrefetchCallback", [PrefetchCallback()])):
        traces: list[Trace] = []
        with profiled(traces):
            device.fit(Reads(device, after_ms=LATE_MS), SameBatch(device, IMAGES, BATCHES), *callbacks)
        what = f"copying under compute, {name}"
        # Nothing computes yet beside the copies of the first two batches. Small copies are not of batches.
        copies = [(start, end) for start, end in traces[0].to_device if end - start > 200][2:]
        spins = traces[0].spins
        if len(copies) != BATCHES - 2 or len(spins) != BATCHES:
            report.add(Claim(claim=what, detail=f"the profiler saw {len(copies)} copies and {len(spins)} spins"))
            continue
        under = covered_pct(copies, traces[0].kernels)
        step_ms = (spins[-1][1] - spins[2][1]) / (BATCHES - 3) / 1e3
        copy_ms = sum(end - start for start, end in copies) / len(copies) / 1e3
        detail = f"{copy_ms:.2f} ms a copy, {step_ms:.2f} ms a step"
        report.add(
            at_least(what, under, 95, "%", detail) if callbacks else at_most(f"control: {what}", under, 5, "%", detail)
        )
        gb_per_s = torch.Size(IMAGES).numel() / (copy_ms * 1e6)
        report.row(run=name, copy_ms=copy_ms, gb_per_s=gb_per_s, under_compute_pct=under, step_ms=step_ms)


def memory(report: Report, device: CudaDevice) -> None:
    """Device memory beyond that of plain Lightning, in batches, with a host that could run far ahead.

    Of the ``depth + 3`` batches that are documented, plain Lightning holds one.
    """
    plain = _peak_bytes(device)
    size = torch.Size(IMAGES).numel()
    report.row(run="plain", peak_mb=plain / 1e6, batches_beyond_plain=0.0)
    for depth in (1, 2, 3):
        callback = PrefetchCallback(depth=depth)
        peak = _peak_bytes(device, callback)
        beyond = (peak - plain) / size
        most = depth + streams.RUN_AHEAD + 0.5  # half a batch for all that is no batch
        claim = at_most(f"memory beyond plain, depth {depth}", beyond, most, "batches")
        report.add(if_active(claim, active=callback.active))
        report.row(run=f"depth {depth}", peak_mb=peak / 1e6, batches_beyond_plain=beyond)


def _peak_bytes(device: CudaDevice, *callbacks: Callback) -> int:
    device.forget_memory()
    device.fit(Reads(device, before_ms=LATE_MS), SameBatch(device, IMAGES, BATCHES), *callbacks)  # in use throughout
    return device.peak_bytes()


# --- weights ----------------------------------------------------------------------------------------------------------


class Random(LightningModule):
    """Draws random numbers on the device: dropout in the step, noise in the batch hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 8))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        values, labels = batch
        return [values + 0.1 * torch.randn_like(values), labels]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values, labels = batch
        return nn.functional.cross_entropy(self.net(values), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Captured(Random):
    """Forward and backward of the network are a CUDA graph, so that the host runs ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def on_train_start(self) -> None:
        torch.cuda.make_graphed_callables(self.net, (torch.randn(16, 64, device=self.device),))


def same(report: Report, device: CudaDevice) -> None:
    """Weights to the bit, with PrefetchCallback and without."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    for name, make, options in (
        ("32-true", Random, {"precision": "32-true"}),
        ("bf16-mixed", Random, {"precision": "bf16-mixed"}),
        ("16-mixed", Random, {"precision": "16-mixed"}),
        ("captured graph", Captured, {}),
    ):
        plain = _weights(device, make, **options)
        again = _weights(device, make, **options)
        report.add(_same_claim(f"control: weights of the same run twice, {name}", plain, again))
        for depth in (1, 3):
            callback = PrefetchCallback(depth=depth)
            ours = _weights(device, make, callback, **options)
            report.add(if_active(_same_claim(f"weights, {name}, depth {depth}", plain, ours), active=callback.active))


def _weights(
    device: CudaDevice, make: Callable[[], LightningModule], *callbacks: Callback, **options: Any
) -> list[Tensor]:
    seed_everything(1, verbose=False)
    model = make()
    samples = TensorDataset(torch.randn(640, 64), torch.arange(640) % 8)
    device.fit(model, DataLoader(samples, batch_size=16, pin_memory=True), *callbacks, **options)
    return [weight.detach().cpu() for weight in model.parameters()]


def _same_claim(what: str, first: list[Tensor], second: list[Tensor]) -> Claim:
    passed = all(torch.equal(weight, other) for weight, other in zip(first, second, strict=True))
    return Claim(claim=what, measured="the same" if passed else "different", goal="the same", passed=passed)


# --- nvJPEG -----------------------------------------------------------------------------------------------------------


def nvjpeg(report: Report, _: CudaDevice) -> None:
    """Images that nvJPEG decodes in a second."""
    where = torch.device("cuda", 0)
    try:
        check_available("nvjpeg", where)
        require_nvjpeg(where)
    except FeedError as error:
        report.add(Claim(claim="nvJPEG", detail=str(error).partition("\n")[0]))
        return
    files = [torch.frombuffer(bytearray(make_picture(seed)), dtype=torch.uint8) for seed in range(64)]
    mean_file_kb = sum(map(len, files)) / len(files) / 1e3
    decode = NvJpeg(where)
    rates: dict[int, float] = {}
    for size in (64, 256, 512):
        rates[size] = _decode_rate(decode, files * (size // len(files)))
        report.row(batch=size, images_per_s=rates[size], mean_file_kb=mean_file_kb)
    best = max(rates, key=lambda size: rates[size])
    report.add(at_least(f"nvJPEG, decoding, batches of {best}", rates[best], 3 * 3910, "images/s"))


def _decode_rate(decode: NvJpeg, files: list[Tensor], seconds: float = 2.0) -> float:
    for _ in range(3):
        decode(files)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    decoded = 0
    while time.perf_counter() - began_s < seconds:
        decode(files)
        decoded += len(files)
    torch.cuda.synchronize()
    return decoded / (time.perf_counter() - began_s)


CHECKS: dict[str, Callable[[Report, CudaDevice], None]] = {
    "share": share,
    "overlap-trace": overlap_trace,
    "memory": memory,
    "same": same,
    "nvjpeg": nvjpeg,
}


def main() -> None:
    """Run one of the checks."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS then gives the same bits every time
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_feed"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def on_cuda(check: Callable[[Report, CudaDevice], None], report: Report, _: float) -> None:
        check(report, CudaDevice())

    run_part({name: partial(on_cuda, check) for name, check in CHECKS.items()})


if __name__ == "__main__":
    main()
