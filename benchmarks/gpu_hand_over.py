"""Batches handed over in slots and as torch does it, in training on a CUDA device.

A part of gpu_day.py. ResNet-18 in bf16, channels last, on JPEGs in the page cache, with the model alone beside it; and
batches of 100 MB of float32, of which a small network reads little:

    python benchmarks/gpu_hand_over.py hand-over --out FILE --limit SECONDS [--photos FOLDER]
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_claims import Report, at_least, at_most, run_part
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from pictures import make_picture
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_feed import FastDataModule, ImageFolderDataModule, LoaderSettings, PrefetchCallback
from lightning_feed.errors import FeedError
from lightning_feed.images.dali_binding import require_dali
from lightning_feed.load.loader import FeedLoader
from lightning_feed.machine.limits import read_machine

ON_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if ON_DEVICE else "cpu"
SIZE = 224 if ON_DEVICE else 32
BATCH = 256 if ON_DEVICE else 4
STEPS = 60 if ON_DEVICE else 6
WARM_UP = STEPS // 3
PHOTOS = BATCH * (STEPS + WARM_UP)
WORKERS = max(1, read_machine().usable_cpus - 1)
DIFFERENT_PHOTOS = 30
HUGE = (3, SIZE, SIZE)
HUGE_BATCH = 166
"""Samples of float32 that are 100 MB together."""
OURS = "ImageFolderDataModule"
MARGIN_S = 20.0
"""Before the time limit, for writing the results."""


class Classifier(LightningModule):
    """ResNet-18, or a network that reads its batches once."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        module: Any = net  # torch 2.6 has no type for what follows
        self.net = module.to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pixels, labels = batch
        pixels = pixels.to(memory_format=torch.channels_last)
        if pixels.dtype is torch.uint8:
            pixels = pixels.float() / 255
        return nn.functional.cross_entropy(self.net(pixels), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def wait_for_device() -> None:
    """Until all work that was issued is done."""
    if ON_DEVICE:
        torch.cuda.synchronize()


class Clock(Callback):
    """Time of a step between two points at which the device was waited for."""

    def __init__(self) -> None:
        self.step_ms = 0.0
        self.main_cpu_ms = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == WARM_UP:
            wait_for_device()
            self._began = time.perf_counter(), time.process_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wait_for_device()
        began_s, began_cpu_s = self._began
        steps = trainer.global_step - WARM_UP
        self.step_ms = 1e3 * (time.perf_counter() - began_s) / steps
        self.main_cpu_ms = 1e3 * (time.process_time() - began_cpu_s) / steps


class Copies(Dataset[tuple[Tensor, int]]):
    """Samples that cost a copy."""

    def __init__(self) -> None:
        self.sample = torch.rand(HUGE)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.sample, index % 2


class Same:
    """One batch on the device, again and again: the model alone."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch)


def fitted(net: nn.Module, data: Any, *callbacks: Callback, steps: int = STEPS) -> Clock:
    """Train for a while, and return the times of a step."""
    clock = Clock()
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[*callbacks, clock],
        **quiet,
    )
    trainer.fit(Classifier(net), data)
    return clock


def plain_loader(photos: Path) -> DataLoader[Any]:
    """The recipe of torchvision, with workers that a careful user sets: pinned, and kept alive."""
    crop = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()])
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": WORKERS, "pin_memory": ON_DEVICE}
    return DataLoader(ImageFolder(str(photos), crop), shuffle=True, persistent_workers=True, **options)


class OwnData(LightningDataModule):
    """The plain loader in a data module."""

    def __init__(self, photos: Path) -> None:
        super().__init__()
        self.photos = photos

    def train_dataloader(self) -> DataLoader[Any]:
        return plain_loader(self.photos)


def wrapped(photos: Path) -> LightningDataModule:
    """The plain loader's data module, with batches in place and the same number of workers."""
    module: LightningDataModule = FastDataModule.wrap(OwnData(photos), LoaderSettings(num_workers=WORKERS))
    return module


def image_folder(photos: Path, backend: Any, hand_over: str) -> ImageFolderDataModule:
    """Ours, with the same crops."""
    loader = LoaderSettings(num_workers=WORKERS, hand_over=hand_over)  # type: ignore[arg-type]
    return ImageFolderDataModule(photos, BATCH, image_size=SIZE, val_fraction=0, backend=backend, loader=loader)


def images(report: Report, photos: Path, end_s: float) -> None:
    """Photos, with the recipe of torchvision and with what this package offers, in turns until the time is over."""
    sides: dict[str, Callable[[], Any]] = {
        "plain Lightning": lambda: plain_loader(photos),
        "FastDataModule.wrap": lambda: wrapped(photos),
        "ImageFolderDataModule, torch's hand-over": lambda: image_folder(photos, "torch", "torch"),
        OURS: lambda: image_folder(photos, "torch", "slots"),
    }
    if ON_DEVICE:
        sides["ImageFolderDataModule, nvjpeg"] = lambda: image_folder(photos, "nvjpeg", "slots")
    if ON_DEVICE and has_dali():
        sides["ImageFolderDataModule, dali-gpu"] = lambda: image_folder(photos, "dali-gpu", "slots")
        sides["ImageFolderDataModule, dali-cpu"] = lambda: image_folder(photos, "dali-cpu", "slots")
    pixels = torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8, device=DEVICE)
    labels = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE)
    alone = fitted(models.resnet18(num_classes=2), Same((pixels, labels)))
    report.row(run="the model alone", images_per_s=1e3 * BATCH / alone.step_ms, step_ms=alone.step_ms)
    made = making_rate(photos)
    report.row(run="making batches, without training", images_per_s=made)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    round_s = 0.0
    while time.monotonic() + round_s < end_s or round_s == 0.0:
        began_s = time.monotonic()
        for name, make in sides.items():
            callbacks = [] if name == "plain Lightning" else [PrefetchCallback()]
            clock = fitted(models.resnet18(num_classes=2), make(), *callbacks)
            rates[name].append(1e3 * BATCH / clock.step_ms)
            report.row(run=name, images_per_s=rates[name][-1], step_ms=clock.step_ms, main_cpu_ms=clock.main_cpu_ms)
        round_s = time.monotonic() - began_s
    best = min(1e3 * BATCH / alone.step_ms, made)
    ratio = statistics.median(rates[OURS]) / best
    report.add(at_least("ImageFolderDataModule over the model alone, or making", ratio, 0.95))


def has_dali() -> bool:
    """True if DALI can be imported."""
    try:
        require_dali(gpu=True)
    except FeedError:
        return False
    return True


def making_rate(photos: Path) -> float:
    """Images per second that the workers make, with nothing to wait for."""
    loader = LoaderSettings(num_workers=WORKERS)
    data = ImageFolderDataModule(photos, BATCH, image_size=SIZE, val_fraction=0, loader=loader)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    for _ in range(WARM_UP):
        next(batches)
    began_s = time.perf_counter()
    for _ in range(STEPS - WARM_UP):
        next(batches)
    return BATCH * (STEPS - WARM_UP) / (time.perf_counter() - began_s)


def huge(report: Report) -> None:
    """Batches of 100 MB."""
    times_ms: dict[str, list[float]] = {}
    for _ in range(2):
        for workers in (2, 8):
            for hand_over in ("torch", "slots"):
                options: dict[str, Any] = {"batch_size": HUGE_BATCH, "num_workers": min(workers, WORKERS)}
                loader = FeedLoader(Copies(), pin_memory=ON_DEVICE, hand_over=hand_over, **options)
                net = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, 2))
                clock = fitted(net, loader, PrefetchCallback())
                times_ms.setdefault(f"{workers} workers, {hand_over}", []).append(clock.step_ms)
                report.row(run=f"100 MB, {workers}, {hand_over}", step_ms=clock.step_ms, main_cpu_ms=clock.main_cpu_ms)
    middle_ms = {name: statistics.median(values) for name, values in times_ms.items()}
    for workers in (2, 8):
        ratio = middle_ms[f"{workers} workers, slots"] / middle_ms[f"{workers} workers, torch"]
        report.add(at_most(f"step, 100 MB, {workers} workers, slots over torch", ratio, 1.0))


def make_photos(folder: Path) -> Path:
    """Photos of the size of a camera's, of which some are alike; those of FEED_PHOTOS, if it is set."""
    given = os.environ.get("FEED_PHOTOS")
    if given is not None:
        photos = [path.read_bytes() for path in sorted(Path(given).rglob("*.jpg"))]
    else:
        photos = [make_picture(seed) for seed in range(DIFFERENT_PHOTOS)]
    for number in range(PHOTOS):
        file = folder / f"class_{number % 2}" / f"{number:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(photos[number % len(photos)])
    return folder


def hand_over(report: Report, limit_s: float) -> None:
    """Both, one after the other."""
    end_s = time.monotonic() + limit_s - MARGIN_S
    huge(report)
    with tempfile.TemporaryDirectory() as scratch:
        images(report, make_photos(Path(scratch) / "photos"), end_s)


if __name__ == "__main__":
    run_part({"hand-over": hand_over}, needs_device=False)
