"""Crops: images decoded as far as is asked for, boxes drawn before that, and the standard recipes.

Crops are drawn before an image is decoded, so that any backend can decode, and all take the same. Everything is uint8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch

from lightning_feed.decode.decoders import Decoder, Pixels, Region, resize
from lightning_feed.decode.header import Encoded
from lightning_feed.load.random_state import sample_generator
from lightning_feed.load.trace import traced

Quality: TypeAlias = Literal["exact", "near", "fast"]
QUALITIES: tuple[Quality, ...] = ("exact", "near", "fast")
"""``"exact"``: the pixels of torchvision's antialiased uint8 resize. ``"near"``: decoded at a smaller scale that
still has twice the pixels each way, then the same resize. ``"fast"``: at the smallest that has as many, and resized
without antialiasing. How far each is from the first is measured in docs/reference/decoders.md."""
_TRIES = 10


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image that is still encoded."""

    data: Encoded
    decoder: Decoder

    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.decoder.size(self.data)

    def whole(self) -> Pixels:
        """All pixels."""
        with traced("decode"):
            return self.decoder.decode(self.data)

    def region(self, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """The pixels of ``region``; at a smaller scale that is at least ``cover`` (height, width), if that is given."""
        decode_region = getattr(self.decoder, "decode_region", None)  # isinstance with a protocol takes 15 us
        if decode_region is None:
            return _part(self.whole(), region)
        with traced("decode"):
            found: Pixels = decode_region(self.data, region, cover=cover)
        return found


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """An image whose pixels are there: from a cache, or from a pack of pixels. They are not written to."""

    pixels: Pixels

    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def whole(self) -> Pixels:
        """All pixels."""
        return self.pixels

    def region(self, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """The pixels of ``region``, at full size: there is nothing to save with a smaller scale."""
        return _part(self.pixels, region)


def _part(pixels: Pixels, region: Region) -> Pixels:
    part: Pixels = pixels[region.top : region.top + region.height, region.left : region.left + region.width]
    return part


AnyImage: TypeAlias = EncodedImage | DecodedImage


@dataclass(frozen=True, kw_only=True)
class CropSpec:
    """A box of the image, resized, of which a window is kept, mirrored or not."""

    region: Region
    """Of the image as it is stored."""
    resized: tuple[int, int]
    """(height, width) that the region is brought to."""
    window: Region
    """What is kept of that."""
    flipped: bool
    """Whether left and right change places."""


def crop_image(image: AnyImage, crop: CropSpec, quality: Quality) -> torch.Tensor:
    """The pixels of a crop: uint8, shape (3, height, width) of its window, channels last in memory."""
    cover = {
        "exact": None,
        "near": (2 * crop.resized[0], 2 * crop.resized[1]),  # at once, the antialiasing would be left to the decoder
        "fast": crop.resized,
    }[quality]
    pixels = image.region(crop.region, cover=cover)
    made = resize(pixels, crop.resized, fidelity="linear" if quality == "fast" else "exact")
    top, left, height, width = crop.window
    kept = made[..., top : top + height, left : left + width]
    return kept.flip(-1) if crop.flipped else kept


class Recipe(Protocol):
    """What is done to an image each time that it is asked for. Random draws come from torch's generator."""

    @property
    def crops(self) -> bool:
        """Whether only a part of each image is asked for."""

    def __call__(self, image: AnyImage) -> Any:
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

    def spec(self, height: int, width: int, generator: torch.Generator | None = None) -> CropSpec:
        """Draw what is taken of an image of that size, from ``generator`` or where the sample draws from."""
        generator = sample_generator() if generator is None else generator
        region = draw_region(height, width, self.scale, self.ratio, generator)
        drawn = torch.rand(1, generator=generator, dtype=torch.float32, device="cpu").item()
        whole = Region(0, 0, self.size, self.size)
        return CropSpec(
            region=region, resized=(self.size, self.size), window=whole, flipped=drawn < self.flip_probability
        )

    def __call__(self, image: AnyImage) -> torch.Tensor:
        """Crop, resize, and flip or not."""
        return crop_image(image, self.spec(*image.size()), self.quality)


@dataclass(frozen=True, kw_only=True)
class EvalRecipe:
    """Resize of the shorter side and CenterCrop, as in torchvision's reference evaluation.

    Gives uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 224
    short_side: int = 256
    quality: Quality = "exact"
    crops: ClassVar[bool] = False

    def spec(self, height: int, width: int, generator: torch.Generator | None = None) -> CropSpec:
        """What is taken of an image of that size: the middle. Nothing is drawn."""
        short = min(height, width)
        # As torchvision computes it: the longer side is cut to a whole number, not rounded.
        rows, columns = int(self.short_side * height / short), int(self.short_side * width / short)
        # As torchvision's center_crop does: halves are rounded to even.
        top, left = (round((side - self.size) / 2) for side in (rows, columns))
        return CropSpec(
            region=Region(0, 0, height, width),
            resized=(rows, columns),
            window=Region(top, left, self.size, self.size),
            flipped=False,
        )

    def __call__(self, image: AnyImage) -> torch.Tensor:
        """Resize, and crop the middle."""
        return crop_image(image, self.spec(*image.size()), self.quality)


@dataclass(frozen=True, kw_only=True)
class SquareRecipe:
    """The whole image, stretched to a square: so that images of any shape can lie in one tensor on the device.

    Gives uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 256
    crops: ClassVar[bool] = False

    def __call__(self, image: AnyImage) -> torch.Tensor:
        """Resize to the square."""
        return resize(image.whole(), (self.size, self.size))


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
