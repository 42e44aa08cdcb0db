"""What samples, steps and hooks of the verdict benchmark cost: real work, real waiting, of a known length.

Work on the CPU is an amount of hashing that was calibrated once, so that a CPU that is shared makes it take longer, as
it would a decoder. Hashing lets go of the GIL for some tenths of a millisecond at a time, as decoders in C do. Waiting
is a wait of the operating system.
"""

import functools
import hashlib
import io
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Cost = Callable[[int], None]
"""Takes its time for the sample with this index."""

MB = 1 << 20
_BLOCK = bytes(MB // 2)
_rates: list[float] = []
"""Blocks hashed per millisecond of CPU time, once calibrated. Forked workers inherit it."""


def calibrate() -> float:
    """Blocks of 512 KiB hashed per millisecond on a CPU of its own; the best of some, since others may use it too."""
    if not _rates:
        found = []
        for _ in range(20):
            began = time.thread_time()
            for _ in range(4):
                hashlib.sha256(_BLOCK)
            found.append(4 / (1e3 * (time.thread_time() - began)))
        _rates.append(max(found))
    return _rates[0]


@dataclass(frozen=True)
class Nothing:
    """No cost."""

    def __call__(self, index: int) -> None:
        pass


@dataclass(frozen=True)
class Spin:
    """Work on a CPU."""

    ms: float

    def __call__(self, index: int) -> None:
        """As many blocks as take ``ms`` on a CPU of its own."""
        for _ in range(max(1, round(self.ms * calibrate()))):
            hashlib.sha256(_BLOCK)


@dataclass(frozen=True)
class Sleep:
    """A wait for the clock: a rate limit, a retry, a server's answer by polling."""

    ms: float

    def __call__(self, index: int) -> None:
        time.sleep(self.ms / 1e3)


@dataclass(frozen=True)
class OneIn:
    """Every so many samples, ``span`` in a row are of another kind."""

    every: int
    rare: Cost
    usual: Cost = field(default_factory=Nothing)
    span: int = 1

    def __call__(self, index: int) -> None:
        """The cost of this sample's kind."""
        (self.rare if index % self.every < self.span else self.usual)(index)


@dataclass(frozen=True)
class ReadDirect:
    """Reads past the page cache: what comes from a disk comes from a disk each time, for as long on any disk."""

    path: Path
    ms: float

    def __call__(self, index: int) -> None:
        """Read pieces of 1 MiB, from places that differ by sample, until the time is up."""
        file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, MB)
        until, number = time.perf_counter() + self.ms / 1e3, 0
        try:
            pieces = os.fstat(file).st_size // MB
            while number == 0 or time.perf_counter() < until:
                os.preadv(file, [buffer], (index * 7 + number) % pieces * MB)
                number += 1
        finally:
            buffer.close()
            os.close(file)


@dataclass(frozen=True)
class Decode:
    """Decodes a JPEG that is in memory already."""

    width: int
    height: int

    def __call__(self, index: int) -> None:
        """Decode with Pillow."""
        with Image.open(io.BytesIO(_jpeg(self.width, self.height))) as image:
            image.convert("RGB")


@functools.cache
def _jpeg(width: int, height: int) -> bytes:
    file = io.BytesIO()
    small = Image.frombytes(
        "RGB", (width // 8, height // 8), random.Random(0).randbytes(width // 8 * (height // 8) * 3)
    )
    small.resize((width, height)).save(file, "JPEG", quality=90)
    return file.getvalue()


def make_files(folder: Path) -> None:
    """The file that scenarios read: ``large`` (64 MiB)."""
    with (folder / "large").open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(MB))
        file.flush()
        os.fsync(file.fileno())


class Samples(Dataset[torch.Tensor]):
    """A map-style dataset of endless length, as far as a run is concerned."""

    def __init__(self, cost: Cost, *, floats: int = 16, length: int = 100_000) -> None:
        self.cost, self.floats, self.length = cost, floats, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.cost(index)
        return torch.ones(self.floats)


class Pieces(Samples):
    """Samples of many small tensors, each of which is handed over by itself."""

    def __init__(self, cost: Cost, *, count: int) -> None:
        super().__init__(cost)
        self.count = count

    def __getitem__(self, index: int) -> Any:
        return {f"{number}": super(Pieces, self).__getitem__(index) for number in range(self.count)}


class Stream(IterableDataset[torch.Tensor]):
    """The same as a stream, divided among the workers."""

    def __init__(self, cost: Cost, *, length: int = 100_000) -> None:
        self.cost, self.length = cost, length

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for index in range(first, self.length, step):
            self.cost(index)
            yield torch.ones(16)


@dataclass(frozen=True)
class Collate:
    """A collate function that takes its time."""

    cost: Cost

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.cost(0)
        return torch.stack(samples)
