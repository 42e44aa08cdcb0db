"""One cell of `backends.py`: a model trained by one image backend, in a process of its own.

python backends_cell.py JOB OUT      (JOB: the fields of :class:`Job` as JSON; OUT: where the figures go)
"""

import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchvision.models import get_model

from lightning_feed import GPUStarvationCallback, ImageFolderDataModule, LoaderSettings, PrefetchCallback
from lightning_feed.load.machine import read_machine
from lightning_feed.measure.nvml import find_handle

CLASSES = 1000
FIT_SHARE, FEED_SHARE, COMPUTE_SHARE = 0.55, 0.3, 0.15
"""Of the budget."""
SETTLING = 20
"""Steps to leave out, besides as many as the loader's queue holds batches: a full queue hides a slow loader."""
ATTEMPT_STEPS = 4
OUT_OF_MEMORY = ("out of memory", "cudaErrorMemoryAllocation", "bytes on device")
"""How torch, nvJPEG and DALI say it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and for how long."""

    what: Literal["rate", "attempt"]
    """``"attempt"``: only whether this batch size fits into the device's memory."""
    model: str
    backend: str
    folder: str
    batch_size: int
    image_size: int
    device: Literal["cuda", "cpu"]
    budget_s: float
    steps: int
    workers: int | Literal["auto"] = "auto"
    torch_workers: Literal["process", "thread"] = "process"
    device_gb: float | None = None
    """As if the device had so much memory: the rest is taken first."""


class Classifier(LightningModule):
    """A model of torchvision's and SGD with momentum; batches and weights channels last."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = get_model(name, num_classes=CLASSES).to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class StepClock(Callback):
    """Mean time of steps between two moments at which the device was waited for; ends the fit.

    The first of them is after ``settling`` steps, or when ``settling_s`` are over; the second after ``steps`` more, or
    when ``budget_s`` are over, but never before three.
    """

    def __init__(self, settling: int | None, steps: int, budget_s: float) -> None:
        self.settling, self.steps, self.budget_s = settling, steps, budget_s
        self.settled = False
        """Whether all steps that were to be left out were."""
        self.measured = 0
        self.step_s = 0.0
        self.workers: int | None = None
        """Of the loader."""
        self._began: float | None = None
        self._first = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._entered = time.perf_counter()
        self.workers = getattr(trainer.train_dataloader, "num_workers", None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done, spent_s = trainer.global_step, time.perf_counter() - self._entered
        if self._began is None:
            settling = SETTLING + queue_of(trainer.train_dataloader) if self.settling is None else self.settling
            if done >= settling or (done >= 2 and spent_s > self.budget_s / 2):
                self.settled = done >= settling
                wait_for(pl_module.device)
                self._began, self._first = time.perf_counter(), done
        elif done - self._first >= self.steps or (done - self._first >= 3 and spent_s > self.budget_s):
            wait_for(pl_module.device)
            self.measured = done - self._first
            self.step_s = (time.perf_counter() - self._began) / self.measured
            trainer.should_stop = True


class Replay:
    """The same device batch again and again."""

    def __init__(self, batch: list[Tensor]) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            yield self.batch


def measure(job: Job) -> dict[str, Any]:
    """Train; then the model alone, and the feed alone."""
    device = open_device(job)
    before, ballast = device_bytes(device), allocated(device)
    clock = StepClock(None, job.steps, FIT_SHARE * job.budget_s)
    starvation = GPUStarvationCallback(nvml=False, report=False)
    # Batches of "dali-gpu" are on the device: there the callback would only say that it does nothing.
    ahead = [] if job.backend == "dali-gpu" else [PrefetchCallback()]
    data = data_module(job)
    trainer(job, [starvation, clock, *ahead]).fit(Classifier(job.model), datamodule=data)
    stats = starvation.report().stats
    figures: dict[str, Any] = {
        "step_ms": 1e3 * clock.step_s,
        "images_per_s": job.batch_size / clock.step_s,
        "steps": clock.measured,
        "settled": clock.settled,
        "starved_pct": stats.starved_pct,
        "allocated_mb": (peak(device) - ballast) / 1e6 if device.type == "cuda" else None,
        "device_mb": (device_bytes(device) - before) / 1e6 if device.type == "cuda" else None,
        "workers": clock.workers,
    }
    del data
    gc.collect()  # its workers end
    figures["compute_ms"] = compute_ms(job, device)
    figures["feed_ms"] = feed_ms(job, device)
    return figures


def attempt(job: Job) -> dict[str, Any]:
    """Whether some steps of this batch size fit."""
    device = open_device(job)
    ballast = allocated(device)
    ahead = [] if job.backend == "dali-gpu" else [PrefetchCallback()]
    try:
        trainer(job, ahead, max_steps=ATTEMPT_STEPS).fit(Classifier(job.model), datamodule=data_module(job))
        wait_for(device)
    except Exception as error:
        if any(text in f"{error} {error.__cause__}" for text in OUT_OF_MEMORY):
            return {"fits": False, "reason": str(error).partition("\n")[0]}
        raise
    return {"fits": True, "allocated_mb": (peak(device) - ballast) / 1e6 if device.type == "cuda" else None}


def data_module(job: Job) -> ImageFolderDataModule:
    """As a user has it; few workers in an attempt, whose batches may be of gigabytes."""
    of_threads = job.backend != "torch" or job.torch_workers == "thread" or job.what == "attempt"
    few = max(1, min(8, read_machine().usable_cpus - 1))
    return ImageFolderDataModule(
        job.folder,
        job.batch_size,
        image_size=job.image_size,
        backend=job.backend,
        dtype=torch.float32 if job.device == "cpu" else torch.bfloat16,
        loader=LoaderSettings(
            num_workers=few if job.what == "attempt" else job.workers,
            prefetch_factor=1 if job.what == "attempt" else "auto",
            workers="thread" if of_threads else "process",
            drop_last=True,
        ),
    )


def trainer(job: Job, callbacks: list[Any], max_steps: int = -1) -> Trainer:
    """Without what writes files."""
    return Trainer(
        accelerator="cpu" if job.device == "cpu" else "gpu",
        devices=1,
        precision="32-true" if job.device == "cpu" else "bf16-mixed",
        max_epochs=-1,
        max_steps=max_steps,
        limit_val_batches=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def compute_ms(job: Job, device: torch.device) -> float:
    """A step of the model on a batch that is on the device already."""
    images = torch.rand(job.batch_size, 3, job.image_size, job.image_size, device=device)
    images = images.to(torch.float32 if job.device == "cpu" else torch.bfloat16, memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (job.batch_size,), device=device)
    clock = StepClock(10, job.steps, COMPUTE_SHARE * job.budget_s)
    trainer(job, [clock]).fit(Classifier(job.model), Replay([images, labels]))
    return 1e3 * clock.step_s


def feed_ms(job: Job, device: torch.device) -> float:
    """The time between two batches that are ready on the device, with nothing else to do."""
    data = data_module(job)
    data.trainer = trainer(job, [])  # which does not run: without one, no batch is pinned, and copies take longer
    loader = data.train_dataloader()
    settling = queue_of(loader) + 2
    entered, began, first = time.perf_counter(), None, 0
    done = 0
    while True:
        for batch in loader:
            data.device_transform(move_data_to_device(batch, device), "train")
            done += 1
            spent_s = time.perf_counter() - entered
            if began is None:
                if done >= settling or (done >= 2 and spent_s > FEED_SHARE * job.budget_s / 2):
                    wait_for(device)
                    began, first = time.perf_counter(), done
            elif done - first >= job.steps or (done - first >= 3 and spent_s > FEED_SHARE * job.budget_s):
                wait_for(device)
                return 1e3 * (time.perf_counter() - began) / (done - first)


def queue_of(loader: Any) -> int:
    """Batches that a DataLoader may hold ready."""
    return int(loader.num_workers * (loader.prefetch_factor or 0))


# --- the device -------------------------------------------------------------------------------------------------------


def open_device(job: Job) -> torch.device:
    """The device, with no more memory left than the job allows."""
    if job.device == "cpu":
        torch.set_num_threads(1)  # of few CPUs, the workers need some
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    free, _ = torch.cuda.mem_get_info(device)
    if job.device_gb is not None and (taken := int(free - job.device_gb * 1e9)) > 0:
        _BALLAST.append(torch.empty(taken, dtype=torch.uint8, device=device))
    torch.zeros(1, device=device)
    return device


_BALLAST: list[Tensor] = []


def wait_for(device: torch.device) -> None:
    """Until all that is queued there is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes that torch has allocated now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    """The most bytes that torch had allocated."""
    return torch.cuda.max_memory_allocated(device)


def device_bytes(device: torch.device) -> int:
    """Bytes in use on the device by all processes, as NVML says. Allocators keep what they have had: so it is the most
    that was used."""
    if device.type != "cuda":
        return 0
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = find_handle(pynvml, str(torch.cuda.get_device_properties(device).uuid))
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    finally:
        pynvml.nvmlShutdown()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_feed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    job = Job(**json.loads(sys.argv[1]))
    figures = measure(job) if job.what == "rate" else attempt(job)
    Path(sys.argv[2]).write_text(json.dumps(figures))
