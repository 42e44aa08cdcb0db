"""Datasets of encoded images that lie in memory, for tests that need no folder, and crops as torchvision makes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from images import made_images
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import resize_image

from lightning_feed.errors import DatasetError
from lightning_feed.images.choose import make_decoder
from lightning_feed.images.cpu_share import CpuShare
from lightning_feed.images.crop import CropSpec, TrainRecipe
from lightning_feed.images.image_dataset import EncodedBatch, ImageDataset, collate_encoded
from lightning_feed.load.collate import BadSamples


class InMemory:
    """A source of samples; ``None`` for one that cannot be read. Labels are 10 times the index."""

    classes = tuple("abcdefghij")

    def __init__(self, files: Sequence[Any]) -> None:
        self.files = list(files)
        self.labels = 10 * np.arange(len(files), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> Any:
        if self.files[index] is None:
            raise DatasetError(f"{self.name(index)} (sample {index}) cannot be read.")
        return self.files[index]

    def name(self, index: int) -> str:
        return f"photos/{index}.jpg"


def photo(height: int = 60, width: int = 80, shift: int = 0) -> Image.Image:
    """A smooth picture with an edge in it."""
    pixels = np.roll(made_images.waves(3, height, width), 3 * shift, axis=1)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 60)
    return Image.fromarray(pixels)


def jpegs(count: int, **options: Any) -> list[bytes]:
    """JPEGs of two shapes in turn, each another picture."""
    shapes = ((60, 80), (90, 50))
    return [
        made_images.encoded(photo(*shapes[index % 2], shift=index), **{"quality": 95, **options})
        for index in range(count)
    ]


def dataset(
    files: Sequence[Any],
    recipe: Any = None,
    *,
    encoded: bool = True,
    decoder: str = "torchvision",
    on_error: Any = "raise",
) -> Any:
    """A dataset of these files; ``encoded=False`` gives that of ``backend="torch"``."""
    return ImageDataset(
        InMemory(files),
        make_decoder(decoder).decoder,
        recipe or TrainRecipe(size=32),
        bad_samples=BadSamples(on_error),
        encoded=encoded,
    )


def nvjpeg_dataset(files: Any, recipe: Any = None, **options: Any) -> Any:
    """A dataset of these files as ``backend="nvjpeg"`` has it."""
    made = dataset(files, recipe, **options)
    made.cpu_part = CpuShare()
    return made


def batch_of(made: ImageDataset, seed: int = 0) -> EncodedBatch:
    """All samples of a dataset in one batch."""
    torch.manual_seed(seed)
    return collate_encoded([made[index] for index in range(len(made))])


def torn(jpeg: bytes) -> bytes:
    """A JPEG with a whole header and an end, whose scan names a table that is not there: all decoders refuse it."""
    data = bytearray(jpeg)
    data[data.index(b"\xff\xda") + 6] = 0x77
    return bytes(data)


def noise(*size: int) -> Tensor:
    """uint8, shape (3, height, width)."""
    return torch.randint(0, 256, (3, *size), dtype=torch.uint8)


def obvious(whole: Tensor, cut: CropSpec, *, antialias: bool, exact: bool = False) -> Tensor:
    """The pixels of a cut as torchvision makes them; ``exact``: not rounded."""
    top, left, height, width = cut.region
    box = whole[:, top : top + height, left : left + width]
    resized = resize_image(box.double() if exact else box, list(cut.resized), antialias=antialias)
    top, left, height, width = cut.window
    kept = resized[:, top : top + height, left : left + width]
    return kept.flip(-1) if cut.flipped else kept
