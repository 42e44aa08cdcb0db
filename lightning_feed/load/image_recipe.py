"""From a picture to a sample: the standard training recipe, on uint8 the whole way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch

from lightning_feed.decode.decoders import Region
from lightning_feed.decode.resize import resize
from lightning_feed.load.cut import Cut, Picture, Quality, cut_out
from lightning_feed.load.thread_random import sample_generator

_TRIES = 10


class Recipe(Protocol):
    """What is done to a picture each time that it is asked for. Random draws come from torch's generator."""

    @property
    def crops(self) -> bool:
        """Whether only a part of each picture is asked for."""

    def __call__(self, picture: Picture) -> Any:
        """Make the image part of a sample."""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """RandomResizedCrop and RandomHorizontalFlip, with torchvision's defaults and its very draws.

    Gives uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 224
    quality: Quality = "exact"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_probability: float = 0.5
    crops: ClassVar[bool] = True

    def cut(self, height: int, width: int, generator: torch.Generator | None = None) -> Cut:
        """Draw what is taken of a picture of that size, from ``generator`` or where the sample draws from."""
        generator = sample_generator() if generator is None else generator
        region = draw_region(height, width, self.scale, self.ratio, generator)
        drawn = torch.rand(1, generator=generator, dtype=torch.float32, device="cpu").item()
        whole = Region(0, 0, self.size, self.size)
        return Cut(region=region, resized=(self.size, self.size), window=whole, flipped=drawn < self.flip_probability)

    def __call__(self, picture: Picture) -> torch.Tensor:
        """Crop, resize, and flip or not."""
        return cut_out(picture, self.cut(*picture.size()), self.quality)


@dataclass(frozen=True, kw_only=True)
class EvalRecipe:
    """Resize of the shorter side and CenterCrop, as in torchvision's reference evaluation.

    Gives uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 224
    short_side: int = 256
    quality: Quality = "exact"
    crops: ClassVar[bool] = False

    def cut(self, height: int, width: int, generator: torch.Generator | None = None) -> Cut:
        """What is taken of a picture of that size: the middle. Nothing is drawn."""
        short = min(height, width)
        # As torchvision computes it: the longer side is cut to a whole number, not rounded.
        rows, columns = int(self.short_side * height / short), int(self.short_side * width / short)
        # As torchvision's center_crop does: halves are rounded to even.
        top, left = (round((side - self.size) / 2) for side in (rows, columns))
        return Cut(
            region=Region(0, 0, height, width),
            resized=(rows, columns),
            window=Region(top, left, self.size, self.size),
            flipped=False,
        )

    def __call__(self, picture: Picture) -> torch.Tensor:
        """Resize, and cut the middle out."""
        return cut_out(picture, self.cut(*picture.size()), self.quality)


@dataclass(frozen=True, kw_only=True)
class SquareRecipe:
    """The whole picture, stretched to a square: so that pictures of any shape can lie in one tensor on the device.

    Gives uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 256
    crops: ClassVar[bool] = False

    def __call__(self, picture: Picture) -> torch.Tensor:
        """Resize to the square."""
        return resize(picture.whole(), (self.size, self.size))


def draw_region(
    height: int,
    width: int,
    scale: Sequence[float],
    ratio: Sequence[float],
    generator: torch.Generator | None = None,
) -> Region:
    """The box of a RandomResizedCrop, by the draws of torchvision's (area uniform, aspect log-uniform, ten tries, then
    the middle; Szegedy et al., arXiv 1409.4842).

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        scale: least and largest share of the area.
        ratio: least and largest width / height.
        generator: None for torch's default.
    """
    shortest, longest = _logarithms(*ratio)
    # Not of the default dtype, which precision="bf16-true" changes while a step runs, beside threads that draw.
    drawn = torch.empty(1, dtype=torch.float32, device="cpu")
    for _ in range(_TRIES):
        area = height * width * drawn.uniform_(scale[0], scale[1], generator=generator).item()
        aspect = drawn.uniform_(shortest, longest, generator=generator).exp().item()
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(torch.randint(height - rows + 1, (1,), generator=generator, device="cpu").item())
            left = int(torch.randint(width - columns + 1, (1,), generator=generator, device="cpu").item())
            return Region(top, left, rows, columns)
    rows, columns = height, width
    if width / height < min(ratio):
        rows = round(width / min(ratio))
    elif width / height > max(ratio):
        columns = round(height * max(ratio))
    return Region((height - rows) // 2, (width - columns) // 2, rows, columns)


@lru_cache
def _logarithms(*values: float) -> tuple[float, ...]:
    return tuple(torch.log(torch.tensor(values, dtype=torch.float32, device="cpu")).tolist())  # as torchvision has it
