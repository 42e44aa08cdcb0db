"""Checks on one CUDA device, each with a control that must fail: a check that cannot fail shows nothing.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from gpu_claims import Claim, Report, at_least, at_most, if_active, run_part
from gpu_weights import graphs, same
from lightning.pytorch import Callback, LightningModule, Trainer
from pictures import make_picture
from torch import Tensor, nn
from torchvision.io import ImageReadMode

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.data.image_backends import check_available, require_nvjpeg
from lightning_feed.errors import FeedError
from lightning_feed.measure.nvml import NvmlSampler, find_handle
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


class Device(Protocol):
    """What checks need of a device; the tests drive them with a simulated one."""

    def fit(self, model: LightningModule, loader: Any, *callbacks: Callback) -> None:
        """Train for one epoch."""
        ...

    def spin(self, ms: float) -> None:
        """Keep the current stream busy; the host goes on at once."""
        ...

    def wait(self, ms: float) -> None:
        """Let the host do nothing."""
        ...

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in page-locked memory."""
        ...

    def count_wrong(self, flags: list[Tensor]) -> int:
        """How many flags on the device are set."""
        ...

    def forget_memory(self) -> None:
        """Give unused memory back, and begin to measure the peak anew."""
        ...

    def peak_bytes(self) -> int:
        """The most memory that the allocator held."""
        ...


class CudaDevice:
    """The first CUDA device."""

    def __init__(self) -> None:
        on_cuda.cycles_per_ms()  # measured now, since that waits for the device

    def fit(self, model: LightningModule, loader: Any, *callbacks: Callback, **options: Any) -> None:
        """Train for one epoch, and wait for the device."""
        given: dict[str, Any] = {"max_epochs": 1, "precision": "32-true", **options}
        Trainer(
            accelerator="gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            **given,
        ).fit(model, loader)
        torch.cuda.synchronize()

    spin = staticmethod(on_cuda.spin)

    def wait(self, ms: float) -> None:
        """Let the host do nothing."""
        time.sleep(ms / 1e3)

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in page-locked memory."""
        return tensor.pin_memory()

    def count_wrong(self, flags: list[Tensor]) -> int:
        """How many flags on the device are set."""
        return int(torch.stack(flags).sum())

    def forget_memory(self) -> None:
        """Give unused memory back, and begin to measure the peak anew."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The most memory that torch held; blocks of less than 1 MiB, which lie elsewhere, are not counted."""
        return int(torch.cuda.memory_stats()["reserved_bytes.large_pool.peak"])


# --- controls ---------------------------------------------------------------------------------------------------------

BATCHES = 40
LATE_MS = 20.0


class Reads(LightningModule):
    """Batch ``k`` is all ``k % 251``: a flag for each batch says whether the step found something else.

    Args:
        device: to run on.
        late_ms: the step reads the batch so long after the host has queued it.
        slow_ms: the copy begins so long after the host has queued it.
        after_ms: the device goes on computing so long afterwards.
    """

    def __init__(self, device: Device, *, late_ms: float = 0.0, slow_ms: float = 0.0, after_ms: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.gpu = device
        self.late_ms, self.slow_ms, self.after_ms = late_ms, slow_ms, after_ms
        self.flags: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.late_ms:
            self.gpu.spin(self.late_ms)
        wrong = []
        while batch:  # the last reference goes as soon as the read is queued
            low, high = torch.aminmax(batch.popitem()[1])
            wrong += [low != batch_idx % 251, high != batch_idx % 251]
        self.flags.append(torch.stack(wrong).any())
        if self.after_ms:
            self.gpu.spin(self.after_ms)
        return self.weight * 2.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class CopiesLate(Reads):
    """Queues work before the copy."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.gpu.spin(self.slow_ms)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class HostBatches:
    """Batches of parts of one size, in page-locked memory, made beforehand.

    Args:
        device: to pin for.
        parts: in a batch.
        size: of each, bytes.
    """

    def __init__(self, device: Device, parts: int, size: int) -> None:
        shape = (parts, size)
        self._batches = [device.pin(torch.full(shape, k % 251, dtype=torch.uint8)) for k in range(BATCHES)]

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Batch]:
        return ({str(number): part for number, part in enumerate(batch)} for batch in self._batches)


def _no_record(_: Any, stream: Any) -> None:
    """In place of record_stream: memory is handed out again while it is read."""


def _no_wait(self: Any, batch: Any, _: Any) -> None:
    """In place of DeviceStream.hand_over: the step reads a batch before it was copied."""
    streams.record_stream(batch, self._backend.current_stream(self._device))


def controls(report: Report, device: Device) -> None:
    """No batch is corrupted; with each safeguard taken out some are, else the check sees nothing."""
    as_it_is: Callable[[], AbstractContextManager[Any]] = nullcontext
    no_record = partial(mock.patch.object, streams, "record_stream", _no_record)
    no_wait = partial(mock.patch.object, streams.DeviceStream, "hand_over", _no_wait)
    large, small = (1, 2**21), (64, 256)
    late, slow = partial(Reads, device, late_ms=LATE_MS), partial(CopiesLate, device, slow_ms=LATE_MS)
    for what, patched, make, parts, options in (
        ("late read", as_it_is, late, large, {}),
        ("late read, depth 3", as_it_is, late, large, {"depth": 3}),
        ("late read, small tensors", as_it_is, late, small, {}),
        ("slow copy", as_it_is, slow, large, {}),
        ("slow copy, depth 3", as_it_is, slow, large, {"depth": 3}),
        ("control: late read, no record_stream", no_record, late, large, {}),
        ("control: slow copy, no wait_event", no_wait, slow, large, {}),
    ):
        model, callback = make(), PrefetchCallback(**options)
        with patched():
            device.fit(model, HostBatches(device, *parts), callback)
        wrong, unit = device.count_wrong(model.flags), f"of {len(model.flags)} wrong"
        claim = at_most(what, wrong, 0, unit) if patched is as_it_is else at_least(what, wrong, 1, unit)
        report.add(if_active(claim, active=callback.active))


# --- share ------------------------------------------------------------------------------------------------------------

STEPS = 60


class SlowLoader:
    """A loader in which the host waits for ``ms``."""

    def __init__(self, device: Device, ms: float) -> None:
        self._device, self._ms, self._tensor = device, ms, device.pin(torch.ones(32))

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(STEPS):
            with torch.profiler.record_function(FETCH):
                self._device.wait(self._ms)
            yield {"0": self._tensor}


def share(report: Report, device: Device) -> None:
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

    def __init__(self, device: Device, shape: tuple[int, ...], count: int) -> None:
        self._tensor, self._count = device.pin(torch.zeros(shape, dtype=torch.uint8)), count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return ({"0": self._tensor} for _ in range(self._count))


def overlap_trace(report: Report, device: Device) -> None:
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


def memory(report: Report, device: Device) -> None:
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
    with mock.patch.object(streams.DeviceStream, "limit_run_ahead"):
        beyond = (_peak_bytes(device, PrefetchCallback()) - plain) / size
    report.add(at_least("control: memory beyond plain, the host does not wait", beyond, 6, "batches"))


def _peak_bytes(device: Device, *callbacks: Callback) -> int:
    device.forget_memory()
    device.fit(Reads(device, late_ms=LATE_MS), SameBatch(device, IMAGES, BATCHES), *callbacks)  # in use throughout
    return device.peak_bytes()


# --- nvJPEG -----------------------------------------------------------------------------------------------------------

ROUNDS = 20
VALUE = 7


def nvjpeg(report: Report, device: CudaDevice) -> None:
    """torchvision's call alone corrupts memory, unless the driver keeps the order; with our precautions none is."""
    where = torch.device("cuda", 0)
    try:
        check_available("nvjpeg", where)
        require_nvjpeg(where)
    except FeedError as error:
        report.add(Claim(claim="nvJPEG", detail=str(error).partition("\n")[0]))
        return
    files = [torch.frombuffer(bytearray(make_picture(seed)), dtype=torch.uint8) for seed in range(64)]
    ours = NvJpeg(where)
    main, side, unit = torch.cuda.current_stream(), torch.cuda.Stream(where), f"of {ROUNDS} corrupted"

    def alone(encoded: list[Tensor]) -> Any:
        return torch.ops.image.decode_jpegs_cuda(encoded, ImageReadMode.RGB.value, where)

    for stream, on in ((main, "the default stream"), (side, "a side stream")):
        report.add(at_most(f"nvJPEG by us, {on}", _corrupted(device, ours, files[:8], stream), 0, unit))
    # Either will do: whether the driver orders work with the default stream by itself is its own affair.
    corrupted = max(_corrupted(device, alone, files[:8], stream) for stream in (main, side))
    report.add(_seen_or_not_to_be_seen(corrupted, unit))
    # torch has 32 streams, and hands them out in turn: a user may be given ours.
    twins = (torch.cuda.Stream(where) for _ in range(64))
    twin = next((stream for stream in twins if stream.cuda_stream == ours._stream.cuda_stream), None)
    what = "nvJPEG by us, the stream that it uses itself"
    if twin is None:
        report.add(Claim(claim=what, detail="torch did not hand it out again"))
    else:
        report.add(at_most(what, _corrupted(device, ours, files[:8], twin), 0, unit))
    rates = {size: _decode_rate(ours, files * (size // len(files))) for size in (64, 256, 512)}
    for size, rate in rates.items():
        report.row(batch=size, images_per_s=rate, mean_file_kb=sum(map(len, files)) / len(files) / 1e3)
    best = max(rates, key=lambda size: rates[size])
    report.add(at_least(f"nvJPEG, decoding, batches of {best}", rates[best], 3 * 3910, "images/s"))


def _seen_or_not_to_be_seen(corrupted: int, unit: str) -> Claim:
    """The control: none shows nothing, neither for our precautions nor against them."""
    claim = at_least("control: nvJPEG by torchvision alone", corrupted, 1, unit)
    return claim if claim.passed else replace(claim, passed=None, detail="here the driver keeps the order by itself")


def _corrupted(device: CudaDevice, decode: Callable[[list[Tensor]], Any], files: list[Tensor], stream: Any) -> int:
    """Memory is freed while a kernel that reads it is queued, and images of the same size are decoded at once."""
    corrupted = 0
    with torch.cuda.stream(stream):
        shape = decode(files)[0].shape
        for _ in range(ROUNDS):
            values = [torch.full(shape, VALUE, dtype=torch.uint8, device="cuda") for _ in range(2 * len(files))]
            torch.cuda.synchronize()
            device.spin(25)
            sums = [value.sum(dtype=torch.int64) for value in values]
            del values
            images = decode(files)
            torch.cuda.synchronize()
            corrupted += any(int(total) != VALUE * shape.numel() for total in sums)
            del images
    return corrupted


def _decode_rate(decode: NvJpeg, files: list[Tensor], seconds: float = 2.0) -> float:
    for _ in range(3):
        decode(files)
    torch.cuda.synchronize()
    began, decoded = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        decode(files)
        decoded += len(files)
    torch.cuda.synchronize()
    return decoded / (time.perf_counter() - began)


# --- NVML -------------------------------------------------------------------------------------------------------------


def nvml(report: Report, _: CudaDevice) -> None:
    """Shares of a device that does nothing, and of one that multiplies matrices."""
    idle, busy = _sampled(lambda: time.sleep(0.1)), _sampled(_multiplier())
    for name in ("util_pct", "sm_pct"):
        when_idle, when_busy = getattr(idle, name, None), getattr(busy, name, None)
        if when_idle is None or when_busy is None:
            passed = False if _nvml_knows(name) else None
            report.add(Claim(claim=f"NVML, {name}", passed=passed, detail="the sampler has none"))
            continue
        report.add(
            at_least(f"NVML, {name} under matmul", when_busy, 80, "%"),
            at_most(f"control: NVML, {name} of an idle device", when_idle, 20, "%"),
        )
    for name, stats in (("idle", idle), ("matmul", busy)):
        report.row(device=name, **({} if stats is None else vars(stats)))


def _sampled(work: Callable[[], None], seconds: float = 3.0) -> Any:
    torch.cuda.synchronize()
    time.sleep(1.5)  # NVML's util_pct looks back by up to a second
    sampler = NvmlSampler(str(torch.cuda.get_device_properties(0).uuid), period_s=0.25)
    settled, ends = time.monotonic() + 1.5, time.monotonic() + 1.5 + seconds
    while time.monotonic() < settled:
        work()
    sampler.start()
    while time.monotonic() < ends:
        work()
    sampler.stop()
    return sampler.take()


def _multiplier() -> Callable[[], None]:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(40):
            matrix @ matrix
        torch.cuda.synchronize()

    return work


def _nvml_knows(name: str) -> bool:
    """Whether NVML is there, and has this figure of the device."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        handle = find_handle(pynvml, str(torch.cuda.get_device_properties(0).uuid))
        return name == "util_pct" or bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except (AttributeError, pynvml.NVMLError):
        return False
    finally:
        pynvml.nvmlShutdown()


CHECKS: dict[str, Callable[[Report, CudaDevice], None]] = {
    "controls": controls,
    "share": share,
    "overlap-trace": overlap_trace,
    "memory": memory,
    "same": same,
    "nvjpeg": nvjpeg,
    "nvml": nvml,
    "graphs": graphs,
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
