"""Workloads of the prediction benchmark: a loader, the remedy that is asked for, and the same loader with it."""

import math
import os
import random
import select
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.report.compare import wanted_settings
from lightning_feed.verdict.diagnosis import Remedy

PICTURES, SIDE = 800, 384
LARGE_FILES, LARGE_BYTES, KEPT = 3_000, 1 << 20, 256
PIECES, PIECE_BYTES = 24, 4096


def make_pictures(folder: Path) -> None:
    """JPEG files in two classes, of smooth noise."""
    draw = random.Random(0)
    for number in range(PICTURES):
        place = folder / f"class_{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        small = Image.frombytes("RGB", (SIDE // 8, SIDE // 8), draw.randbytes(3 * (SIDE // 8) ** 2))
        small.resize((SIDE, SIDE)).save(place / f"{number}.jpg", quality=90)


def make_large_files(folder: Path) -> None:
    """More than a diagnosis reads, each written through to the disk."""
    folder.mkdir(parents=True)
    for number in range(LARGE_FILES):
        with (folder / f"{number}.bin").open("wb") as file:
            file.write(os.urandom(LARGE_BYTES))
    os.sync()


def drop(path: Path) -> None:
    """A file out of the page cache. One in ``/dev/shm`` stays."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def drop_all(folder: Path) -> None:
    """All files of a folder out of it: what follows is a first epoch."""
    for path in folder.iterdir():
        drop(path)


class Blocking(Dataset[tuple[Tensor, int]]):
    """Each sample waits for an answer that takes ``ms``, as that of a server does."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        here, there = os.pipe()
        try:
            select.select([here], [], [], self.ms / 1e3)
        finally:
            os.close(here)
            os.close(there)
        return torch.ones(3, 32, 32), index % 2


class Files(Dataset[tuple[Tensor, int]]):
    """A file for each sample, of which pieces are read here and there, as of chunked arrays. Only the last ``KEPT``
    stay in the page cache, as those of a data set that is larger than the memory."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(path), number % 2) for number, path in enumerate(sorted(folder.iterdir()))]
        self.kept: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead of what nobody asks for
            places = range(0, LARGE_BYTES, LARGE_BYTES // PIECES)[:PIECES]
            data = b"".join(os.pread(file, PIECE_BYTES, place // PIECE_BYTES * PIECE_BYTES) for place in places)
        finally:
            os.close(file)
        self.kept[path] = None
        self.kept.move_to_end(path)
        if len(self.kept) > KEPT:
            drop(Path(self.kept.popitem(last=False)[0]))
        return torch.frombuffer(bytearray(data[: 3 * 64 * 64]), dtype=torch.uint8).reshape(3, 64, 64).float(), label


def light() -> Any:
    """A crop, and to floats."""
    return v2.Compose([v2.RandomResizedCrop(96), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])


def heavy() -> Any:
    """Augmentation that takes longer than decoding."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(160),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.GaussianBlur(9),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


def sized() -> Any:
    """What is left of it in the workers where the device does the rest."""
    return v2.Compose([v2.RandomResizedCrop(160), v2.PILToTensor()])


class Given:
    """Stands for transforms that take no time: a tensor of the shape that ``heavy`` gives, for any picture."""

    def __init__(self) -> None:
        self.made = torch.zeros(3, 160, 160)

    def __call__(self, picture: Image.Image) -> Tensor:
        return self.made


class Data(FastDataModule):
    """One of the data sets, in so many workers."""

    def __init__(self, make: Callable[..., Any], workers: int, batch_size: int, **storage: Any) -> None:
        super().__init__(batch_size, loader=LoaderSettings(num_workers=workers, prefetch_factor=2), **storage)
        self.make, self.stored = make, bool(storage)

    def make_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        return self.make(self.staged_dir) if self.stored else self.make()


class OnDevice(Data):
    """The same; what the transforms do is left to the device, which is simulated and takes no time for it."""

    def device_transform(self, batch: Any, split: str) -> Any:
        return batch


class Waiting(LightningModule):
    """Its step waits without CPU: a simulated accelerator that each step is synchronised with."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms, self.layer = ms, nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.ms / 1e3)
        loss: Tensor = self.layer(torch.ones(1, 1)).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


_ROUNDS: dict[float, int] = {}


class Computing(Waiting):
    """Its step computes on the CPU, in one thread, for about as long: convolutions, as many as were calibrated."""

    def __init__(self, ms: float) -> None:
        super().__init__(ms)
        self.net = nn.Conv2d(16, 16, 3, padding=1)
        self.picture = torch.ones(8, 16, 64, 64)
        if ms not in _ROUNDS:  # the same work each time that one is made, so that runs can be compared
            began, times = time.thread_time(), 50
            for _ in range(times):
                self.net(self.picture)
            _ROUNDS[ms] = max(1, math.ceil(ms / (1e3 * (time.thread_time() - began) / times)))
        self.rounds = _ROUNDS[ms]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for _ in range(self.rounds):
                self.net(self.picture)
        loss: Tensor = self.layer(torch.ones(1, 1)).sum()
        return loss


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Before, the remedy to take, and after."""

    remedy: str
    """What the table calls it."""
    changes: str
    """With what ``Remedy.changes`` begins."""
    model: Callable[[], LightningModule]
    before: Callable[[], Data]
    after: Callable[[Remedy], Data]
    between: Callable[[], object] = lambda: None
    """Called before each run without the remedy."""


def make_workloads(folder: Path, memory: Path) -> dict[str, Workload]:
    """All of them, by name. Files are made in ``folder``, and copied to ``memory``."""
    pictures, large = folder / "pictures", folder / "large"
    make_pictures(pictures)
    make_large_files(large)

    def decode(transform: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: ImageFolder(str(pictures), transform())

    def workers(make: Callable[[], Any], now: int, model: Callable[[], LightningModule], size: int = 16) -> Workload:
        return Workload(
            remedy="more workers",
            changes="num_workers=",
            model=model,
            before=lambda: Data(make, now, size),
            after=lambda remedy: Data(make, int(wanted_settings(remedy)["num_workers"]), size),
        )

    def cached(now: int, model: Callable[[], LightningModule]) -> Workload:
        return Workload(
            remedy="cached bytes (staged to memory)",
            changes="staged=True",
            model=model,
            before=lambda: Data(Files, now, 16, data_dir=large),
            after=lambda _: Data(Files, now, 16, data_dir=large, stage_to=memory),
            between=lambda: drop_all(large),
        )

    def off(now: int, model: Callable[[], LightningModule], left: Callable[[], Any] = Given) -> Workload:
        return Workload(
            remedy="transforms off" if left is Given else "uint8 batches, the rest on the device",
            changes="transforms=off" if left is Given else "device_transform=True",
            model=model,
            before=lambda: Data(decode(heavy), now, 16),
            after=lambda _: (Data if left is Given else OnDevice)(decode(left), now, 16),
        )

    return {
        "decode, 1 worker, step waits 10 ms": workers(decode(light), 1, lambda: Waiting(10)),
        "decode, 1 worker, step waits 40 ms": workers(decode(light), 1, lambda: Waiting(40)),
        "decode, 1 worker, step computes 20 ms": workers(decode(light), 1, lambda: Computing(20)),
        "blocking 2 ms, 1 worker, step waits 10 ms": workers(lambda: Blocking(2), 1, lambda: Waiting(10)),
        "blocking 4 ms, 1 worker, step waits 5 ms": workers(lambda: Blocking(4), 1, lambda: Waiting(5)),
        "blocking 4 ms, 2 workers, step waits 5 ms": workers(lambda: Blocking(4), 2, lambda: Waiting(5)),
        "blocking 4 ms, 2 workers, step computes 10 ms": workers(lambda: Blocking(4), 2, lambda: Computing(10)),
        "cold files, 1 worker, step waits 5 ms": cached(1, lambda: Waiting(5)),
        "cold files, 1 worker, step waits 15 ms": cached(1, lambda: Waiting(15)),
        "heavy transforms, 2 workers, step waits 10 ms": off(2, lambda: Waiting(10)),
        "heavy transforms, 1 worker, step waits 10 ms": off(1, lambda: Waiting(10)),
        "heavy transforms, 1 worker, step computes 20 ms": off(1, lambda: Computing(20)),
        "heavy transforms, 1 worker, uint8, step waits 10 ms": off(1, lambda: Waiting(10), sized),
        "heavy transforms, 2 workers, uint8, step waits 10 ms": off(2, lambda: Waiting(10), sized),
    }
