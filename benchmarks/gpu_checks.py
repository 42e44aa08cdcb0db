"""Checks of claims on one CUDA device. tests/gpu has their controls: streams with a fault each.

Parts of gpu_day.py, which says what each is for. One alone, its results in FILE:

    python benchmarks/gpu_checks.py PART --out FILE
"""

import copy
import gc
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_claims import Claim, Report, at_least, at_most, if_active, run_part
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from pictures import make_picture
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import models

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.errors import FeedError
from lightning_feed.images.backends import check_available, require_nvjpeg
from lightning_feed.images.nvjpeg import NvJpeg
from lightning_feed.transfer.prefetcher import RUN_AHEAD

# Behind the folder of this file: both have a module of the name `decode`.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from gpu_trace import FETCH, Trace, profiled, starved_pct
from on_cuda import fitted, spin, warm_up

STEPS = 60


class Reads(LightningModule):
    """Reads each batch on the device.

    Args:
        before_ms: the device computes so long before it reads the batch; the host has queued all of it at once.
        after_ms: the device goes on computing so long afterwards.
    """

    def __init__(self, *, before_ms: float = 0.0, after_ms: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.before_ms = before_ms
        self.after_ms = after_ms

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.before_ms:
            spin(self.before_ms)
        while batch:  # the last reference goes as soon as the read is queued
            torch.aminmax(batch.popitem()[1])
        if self.after_ms:
            spin(self.after_ms)
        return self.weight * 2.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class SameBatch:
    """The same batch again and again.

    Args:
        batch: any.
        wait_ms: the host waits so long for each.
    """

    def __init__(self, batch: Any, *, wait_ms: float = 0.0) -> None:
        self._batch = batch
        self._wait_ms = wait_ms

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        for _ in range(STEPS):
            with torch.profiler.record_function(FETCH):
                time.sleep(self._wait_ms / 1e3)
            yield copy.copy(self._batch)


def pinned(*shape: int) -> dict[str, Tensor]:
    """A batch in page-locked memory."""
    return {"pixels": torch.zeros(shape, dtype=torch.uint8).pin_memory()}


# --- the share of waiting ---------------------------------------------------------------------------------------------


def share(report: Report, _: float) -> None:
    """starved_pct beside the share of a trace in which the host fetched and the device had nothing to do."""
    for data_ms, compute_ms in ((8, 20), (20, 5), (12, 10)):
        for ahead in (False, True):
            starvation = GPUStarvationCallback(every_n_steps=10, report=False)
            callbacks: list[Callback] = [PrefetchCallback(), starvation] if ahead else [starvation]
            traces: list[Trace] = []
            with profiled(traces):
                fitted(Reads(after_ms=compute_ms), SameBatch(pinned(32), wait_ms=data_ms), *callbacks, max_epochs=1)
            stats = starvation.report().stats
            what = f"data {data_ms} ms, compute {compute_ms} ms{', prefetched' if ahead else ''}"
            if len(traces[0].spins) != STEPS or stats.starved_pct is None:
                report.add(Claim(claim=what, detail=f"the profiler saw {len(traces[0].spins)} of {STEPS} kernels"))
                continue
            trace_pct = starved_pct(traces[0], stats.steps)
            difference = abs(stats.starved_pct - trace_pct)
            report.add(at_most(f"starved_pct against the trace, {what}", difference, 2, "points"))
            report.row(
                data_ms=data_ms,
                compute_ms=compute_ms,
                prefetched=str(ahead),
                step_ms=stats.step_ms,
                starved_pct=stats.starved_pct,
                trace_pct=trace_pct,
            )


# --- memory -----------------------------------------------------------------------------------------------------------

IMAGES = (64, 3, 512, 512)
"""A batch of 50 MB, which takes about a millisecond to copy."""


def memory(report: Report, _: float) -> None:
    """Device memory beyond that of plain Lightning, in batches, with a host that could run far ahead.

    Of the ``depth + 3`` batches that are documented, plain Lightning holds one.
    """
    plain = _peak_bytes()
    report.row(run="plain", peak_mb=plain / 1e6, batches_beyond_plain=0.0)
    for depth in (1, 2, 3):
        callback = PrefetchCallback(depth=depth)
        peak = _peak_bytes(callback)
        beyond = (peak - plain) / math.prod(IMAGES)
        most = depth + RUN_AHEAD + 0.5  # half a batch for all that is no batch
        claim = at_most(f"memory beyond plain, depth {depth}", beyond, most, "batches")
        report.add(if_active(claim, active=callback.active))
        report.row(run=f"depth {depth}", peak_mb=peak / 1e6, batches_beyond_plain=beyond)


def _peak_bytes(*callbacks: Callback) -> int:
    """The most memory that torch held; blocks of less than 1 MiB, which lie elsewhere, are not counted."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fitted(Reads(before_ms=20), SameBatch(pinned(*IMAGES)), *callbacks, max_epochs=1)
    return int(torch.cuda.memory_stats()["reserved_bytes.large_pool.peak"])


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


def same(report: Report, _: float) -> None:
    """Weights to the bit, with PrefetchCallback and without."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    for name, make, precision in (
        ("32-true", Random, "32-true"),
        ("bf16-mixed", Random, "bf16-mixed"),
        ("16-mixed", Random, "16-mixed"),
        ("captured graph", Captured, "32-true"),
    ):
        plain = _weights(make, precision)
        report.add(_same_claim(f"control: weights of the same run twice, {name}", plain, _weights(make, precision)))
        for depth in (1, 3):
            callback = PrefetchCallback(depth=depth)
            claim = _same_claim(f"weights, {name}, depth {depth}", plain, _weights(make, precision, callback))
            report.add(if_active(claim, active=callback.active))


def _weights(make: Callable[[], LightningModule], precision: str, *callbacks: Callback) -> list[Tensor]:
    seed_everything(1, verbose=False)
    model = make()
    samples = TensorDataset(torch.randn(640, 64), torch.arange(640) % 8)
    fitted(model, DataLoader(samples, batch_size=16, pin_memory=True), *callbacks, precision=precision)
    return [weight.detach().cpu() for weight in model.parameters()]


def _same_claim(what: str, first: list[Tensor], second: list[Tensor]) -> Claim:
    passed = all(torch.equal(weight, other) for weight, other in zip(first, second, strict=True))
    return Claim(claim=what, measured="the same" if passed else "different", goal="the same", passed=passed)


# --- a step against its slowest part ----------------------------------------------------------------------------------

WARM_UP = 10
WORKERS = 8
ROUNDS = 2
PICTURES = (256, 3, 224, 224)


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Batches of pictures that cost some multiplications of a small matrix to make."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.pixels = (torch.rand(PICTURES) * 255).to(dtype)
        self.labels = torch.arange(PICTURES[0]) % 10

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        scratch = torch.rand(64, 64)
        for _ in range(50):
            scratch = (scratch @ scratch).tanh()
        return self.pixels.clone(), self.labels.clone()


class Classifier(LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = models.get_model(name, num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pixels, labels = batch
        return nn.functional.cross_entropy(self.net(pixels.float() / 255), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepClock(Callback):
    """Time of a step between two points at which the device was waited for: after the warm-up, and at the end."""

    began_s = 0.0
    step_ms = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            torch.cuda.synchronize()
            self.began_s = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.synchronize()
        self.step_ms = 1e3 * (time.perf_counter() - self.began_s) / (STEPS - WARM_UP)


def overlap(report: Report, _: float) -> None:
    """Steps beside their slowest part alone: computing, loading, or copying. All take turns."""
    for name in ("shufflenet_v2_x0_5", "resnet18"):
        for dtype in (torch.float32, torch.uint8):
            pictures = Pictures(dtype)
            host_batch = [tensor.pin_memory() for tensor in pictures[0]]
            device_batch = [tensor.cuda() for tensor in host_batch]
            times_ms: dict[str, list[float]] = {key: [] for key in ("compute", "loader", "copy", "plain", "ours")}
            for _ in range(ROUNDS):
                times_ms["compute"].append(_fit_ms(name, SameBatch(device_batch)))
                times_ms["loader"].append(_loader_ms(_workers(pictures)))
                times_ms["copy"].append(_copy_ms(host_batch))
                times_ms["plain"].append(_fit_ms(name, _workers(pictures)))
                times_ms["ours"].append(_fit_ms(name, _workers(pictures), PrefetchCallback()))
            middle_ms = {key: statistics.median(values) for key, values in times_ms.items()}
            slowest_ms = max(middle_ms["compute"], middle_ms["loader"], middle_ms["copy"])
            batch = f"{PICTURES[0]} {str(dtype).removeprefix('torch.')}"
            detail = f"plain Lightning {middle_ms['plain'] / slowest_ms:.2f}"
            ratio = middle_ms["ours"] / slowest_ms
            report.add(at_most(f"step over its slowest part, {name}, {batch}", ratio, 1.02, detail=detail))
            report.row(model=name, batch=batch, **{f"{key}_ms": value for key, value in middle_ms.items()})


def _workers(pictures: Pictures) -> DataLoader[Any]:
    return DataLoader(pictures, batch_size=None, num_workers=WORKERS, pin_memory=True)


def _fit_ms(name: str, loader: Any, *callbacks: Callback) -> float:
    clock = StepClock()
    fitted(Classifier(name), loader, *callbacks, clock, max_epochs=1, precision="bf16-mixed")
    return clock.step_ms


def _loader_ms(loader: DataLoader[Any]) -> float:
    """Whole rounds of all workers, after two rounds."""
    stamps_s = [time.perf_counter() for _ in loader]
    first = 2 * WORKERS
    return 1e3 * (stamps_s[-1] - stamps_s[first]) / (len(stamps_s) - 1 - first)


def _copy_ms(batch: list[Tensor], repeats: int = 20) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        for tensor in batch:
            tensor.cuda(non_blocking=True)
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / repeats


# --- nvJPEG -----------------------------------------------------------------------------------------------------------


def nvjpeg(report: Report, _: float) -> None:
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


CHECKS = {"share": share, "memory": memory, "same": same, "overlap": overlap, "nvjpeg": nvjpeg}

if __name__ == "__main__":
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS then gives the same bits every time
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric", "lightning_feed"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    if torch.cuda.is_available():
        warm_up()
    run_part(CHECKS)
