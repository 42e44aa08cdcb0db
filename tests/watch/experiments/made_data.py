"""Data sets with known costs, for the experiments."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset


def burn(seconds: float) -> None:
    """Work on the CPU."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Slow:
    """A transform that takes a known CPU time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0

    def __call__(self, image: Any) -> Any:
        self.calls += 1
        burn(self.seconds)
        return image + torch.rand(()) * 0


class Images(Dataset[Any]):
    """Random pictures and their numbers."""

    def __init__(self, transform: Callable[[Any], Any] | None = None, size: int = 40) -> None:
        self.transform = transform
        self.size = size
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        image = torch.rand(3, 16, 16)
        return (image if self.transform is None else self.transform(image)), index


class Files(Dataset[Any]):
    """Reads a file for each sample."""

    def __init__(self, folder: Path, size: int = 40, length: int = 3000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = [folder / f"{index}.bin" for index in range(size)]
        for index, path in enumerate(self.paths):
            path.write_bytes(bytes([index]) * length)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return torch.frombuffer(bytearray(self.paths[index].read_bytes()), dtype=torch.uint8)


class Broken(Images):
    """One sample cannot be made."""

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise ValueError("the picture is cut short")
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __init__(self, transform: Callable[[Any], Any] | None = None, size: int = 60) -> None:
        self.transform, self.size = transform, size

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.size):
            image = torch.rand(3, 8, 8)
            yield (image if self.transform is None else self.transform(image)), index
