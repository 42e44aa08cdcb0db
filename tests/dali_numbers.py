"""A DaliDataModule whose samples are numbers, so that what was trained can be read off."""

from pathlib import Path
from typing import Any

from nvidia.dali import fn, types

from lightning_feed.data.dali import DaliDataModule
from lightning_feed.load.dali.binding import DaliOptions

VAL = 1000
"""The number of the first validation sample."""


def write_files(folder: Path, count: int) -> list[str]:
    """Files for a reader: their content is not looked at. Those that are there stay, since DALI maps them."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"{index:03}.bin" for index in range(count)]
    for file in files:
        if not file.exists():
            file.write_bytes(b"x")
    return [str(file) for file in files]


class DaliNumbers(DaliDataModule):
    """Sample i is (i, i, i, i), plus noise below 0.5 when asked: as a pipeline that augments."""

    def __init__(
        self,
        folder: Path,
        batch_size: int = 2,
        *,
        train: int = 14,
        val: int = 0,
        noise: bool = False,
        prefetch: int = 2,
        keep: bool = False,
        **options: Any,
    ) -> None:
        dali = DaliOptions(threads=1, prefetch=prefetch, keep_eval_pipelines=keep)
        super().__init__(batch_size, dali=dali, **options)
        self.files = write_files(folder, max(train, val))
        self.sizes = {"train": train, "val": val, "test": val, "predict": val}
        self.noise = noise
        self.made: list[str] = []

    def pipeline(self, split: str) -> Any:
        size, first = self.sizes[split], 0 if split == "train" else VAL
        if not size:
            return None
        self.made.append(split)
        numbers = list(range(first, first + size))
        _, labels = fn.readers.file(files=self.files[:size], labels=numbers, **self.reader())
        labels = fn.cast(labels, dtype=types.FLOAT)
        values = fn.cat(labels, labels, labels, labels)
        return values + fn.random.uniform(range=(0.0, 0.5), shape=[4]) if self.noise else values


class Defined(DaliDataModule):
    """A pipeline given as a function of the data module."""

    def __init__(self, define: Any, batch_size: int = 4, **options: Any) -> None:
        super().__init__(batch_size, dali=DaliOptions(threads=1), **options)
        self.define = define

    def pipeline(self, split: str) -> Any:
        return self.define(self)


def decoded(module: DaliDataModule, root: Path) -> Any:
    jpegs, labels = fn.readers.file(file_root=str(root), **module.reader(shuffle=False))
    images = fn.decoders.image(jpegs, device=module.decoder_device)
    return fn.resize(images, size=(8, 10)), labels


def numbers(batches: Any) -> list[list[int]]:
    """The samples of batches, without their noise."""
    return [[int(row[0]) for row in batch] for batch in batches]


def flat(batches: Any) -> list[int]:
    return [number for batch in numbers(batches) for number in batch]
