"""The datasets that the tuner is tried on, and the training steps beside them.

Samples are made by real work. Where a network's latency is meant, a sleep stands for it (``IoHeavy``).
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_feed.load.settings import Setting
from lightning_feed.trials.training_work import TrainingWork

_FETCH_S = 0.008
"""The latency of an object store within a data centre."""


class Packed:
    """Compressible pixels, as bytes: decompressing them is a decoder's work without its libraries."""

    def __init__(self, kib: int, count: int = 16) -> None:
        random = np.random.default_rng(0)
        smooth = [np.cumsum(random.integers(-2, 3, kib * 1024), dtype=np.int64).astype(np.uint8) for _ in range(count)]
        self.blobs = [zlib.compress(one.tobytes(), 6) for one in smooth]

    def decode(self, index: int) -> np.ndarray[Any, Any]:
        """One of them, as bytes again."""
        return np.frombuffer(zlib.decompress(self.blobs[index % len(self.blobs)]), dtype=np.uint8)


class CpuHeavy(Dataset[Tensor]):
    """Decompress 768 KiB, then work through it in numpy under the GIL."""

    def __init__(self, size: int) -> None:
        self.size, self.packed = size, Packed(768)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        pixels = self.packed.decode(index).astype(np.float32)
        pixels = np.sort(pixels[: 64 * 1024]).reshape(64, 1024)
        return torch.from_numpy((pixels - pixels.mean()) / (pixels.std() + 1))


class IoHeavy(Dataset[Tensor]):
    """Wait for a far store, then decompress 32 KiB of what it gave."""

    def __init__(self, size: int) -> None:
        self.size, self.packed = size, Packed(32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(_FETCH_S)  # stands for the network
        return torch.from_numpy(self.packed.decode(index).copy())


class Tiny(Dataset[Tensor]):
    """Four numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, index + 1, index + 2, index + 3], dtype=torch.float32)


class Huge(Dataset[Tensor]):
    """Four megabytes a sample, which must be copied, collated and sent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.scene = np.random.default_rng(0).random((4, 2**20), dtype=np.float32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.scene[index % 4] * np.float32(0.5))


class HeavyTailed(Dataset[Tensor]):
    """Decompress 32 KiB; of one sample in 60, forty times as much."""

    def __init__(self, size: int) -> None:
        self.size, self.packed = size, Packed(32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        turns = 40 if index % 60 == 0 else 1
        for turn in range(turns - 1):
            self.packed.decode(index + turn)
        return torch.from_numpy(self.packed.decode(index + turns - 1).copy())


class InMemory(Dataset[tuple[Tensor, int]]):
    """Small images that lie in memory as uint8, made floats one by one: CIFAR as most load it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.images = torch.randint(0, 256, (2000, 3, 32, 32), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index % 2000].float().div_(255), index % 10


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A dataset, how it is loaded, and the training step that it feeds."""

    name: str
    make: Callable[[], Dataset[Any]]
    batch_size: int
    work: TrainingWork

    def loader(self, dataset: Dataset[Any], setting: Setting) -> DataLoader[Any]:
        """A DataLoader with a setting."""
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=True,
            num_workers=setting.num_workers,
            prefetch_factor=setting.prefetch_factor,
        )


def on_device(step_ms: float) -> TrainingWork:
    """A step that a device computes. The host takes 2 ms of a CPU for it."""
    return TrainingWork(step_s=step_ms / 1e3, cpu_s=0.002, on_device=True)


def on_cpu(step_ms: float) -> TrainingWork:
    """A step that one thread computes."""
    return TrainingWork(step_s=step_ms / 1e3, cpu_s=step_ms / 1e3)


SIZE = 20_000
WORKLOADS = (
    Workload(name="CPU-heavy", make=lambda: CpuHeavy(SIZE), batch_size=8, work=on_device(10)),
    Workload(name="CPU-heavy, trained on the CPU", make=lambda: CpuHeavy(SIZE), batch_size=8, work=on_cpu(40)),
    Workload(name="I/O-heavy", make=lambda: IoHeavy(SIZE), batch_size=4, work=on_device(5)),
    Workload(name="tiny samples", make=lambda: Tiny(40 * SIZE), batch_size=256, work=on_device(5)),
    Workload(name="huge batches", make=lambda: Huge(SIZE), batch_size=4, work=on_device(10)),
    Workload(name="heavy-tailed", make=lambda: HeavyTailed(SIZE), batch_size=16, work=on_device(30)),
    Workload(name="in memory", make=lambda: InMemory(20 * SIZE), batch_size=128, work=on_cpu(10)),
)
