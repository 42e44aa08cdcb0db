"""Data sets with known costs, for the experiments."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_feed.diagnosing.less_work import measure_without_transforms
from lightning_feed.diagnosing.parts import LoaderPart
from lightning_feed.diagnosing.session import Session
from lightning_feed.machine.limits import Machine
from lightning_feed.trials.loader_rate import LoaderRate


def burn(seconds: float) -> None:
    """Work on the CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
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


def machine_of(cpus: int = 8, *, shm: int | None = None, memory: int | None = None) -> Machine:
    """A machine of which no more is known than what is given."""
    return Machine(
        usable_cpus=cpus, cpu_reason="", available_memory_bytes=memory, free_shm_bytes=shm, start_method="fork"
    )


def session_of(*loaders: Any, machine: Machine | None = None, rate: float | None = None) -> Session:
    """A session over one loader or several, with the shortest times; ``rate``: what they are said to give."""
    train_loaders = loaders[0] if len(loaders) == 1 else list(loaders)
    session = Session(train_loaders=train_loaders, share_s=0.0, machine=machine or machine_of())
    session.find_parts()
    if rate is not None:
        session.alone = LoaderRate(batches_per_s=rate, start_s=0, taking_ms=0)
    return session


def part_of(dataset: Any, **options: Any) -> LoaderPart:
    """The only part of a loader."""
    return LoaderPart("", DataLoader(dataset, **{"batch_size": 4, **options}))


def shuffled_part(dataset: Any, **options: Any) -> LoaderPart:
    """The only part of a loader, in random order if it has one."""
    return part_of(dataset, **{"shuffle": not isinstance(dataset, Stream), **options})


def without_transforms(dataset: Any) -> float | None:
    """The rate with constant transforms."""
    session = session_of(shuffled_part(dataset).loader)
    measure_without_transforms(session)
    return session.results.no_transform_per_s
