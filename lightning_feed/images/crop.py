"""Images: decoded as far as is asked for, boxes drawn before that; the standard recipes, and the user's own transforms.

Crops are drawn before an image is decoded, so that any backend can decode, and all take the same. Everything is uint8.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from PIL import Image

from lightning_feed.decode.decoders import Decoder, Pixels, Region, draw_region, resize
from lightning_feed.errors import SettingsError
from lightning_feed.load.random_state import sample_generator
from lightning_feed.load.trace import traced

Quality: TypeAlias = Literal["exact", "near", "fast"]
QUALITIES: tuple[Quality, ...] = ("exact", "near", "fast")
"""``"exact"``: the pixels of torchvision's antialiased uint8 resize. ``"near"``: decoded at a smaller scale that
still has twice the pixels each way, then the same resize. ``"fast"``: at the smallest that has as many, and resized
without antialiasing. How far each is from the first is measured in docs/reference/decoders.md."""


@dataclass(frozen=True, eq=False)
class SourceImage:
    """An image that is still encoded, or whose pixels are there: from a cache, or from a pack of pixels."""

    data: Any
    """Encoded, or the pixels. Not written to."""
    decoder: Decoder | None = None
    """None for pixels."""

    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        height, width = self.data.shape[:2] if self.decoder is None else self.decoder.size(self.data)
        return height, width

    def whole(self) -> Pixels:
        """All pixels."""
        if self.decoder is None:
            return cast("Pixels", self.data)
        with traced("decode"):
            return self.decoder.decode(self.data)

    def region(self, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """The pixels of ``region``; if they are encoded, at a smaller scale that is at least ``cover`` (height, width),
        where that is given."""
        if self.decoder is None:
            return region.cut(self.data)
        with traced("decode"):
            return self.decoder.decode_region(self.data, region, cover=cover)


@dataclass(frozen=True, kw_only=True)
class CropSpec:
    """A box of the image, resized, of which a window is kept, mirrored or not."""

    region: Region
    """Of the image as it is stored."""
    resized: tuple[int, int]
    """(height, width) that the region is brought to."""
    window: Region
    """The part of that which is kept."""
    flipped: bool
    """True if left and right change places."""


def crop_image(image: SourceImage, crop: CropSpec, quality: Quality) -> torch.Tensor:
    """The pixels of a crop: uint8, shape (3, height, width) of its window, channels last in memory."""
    cover = {
        "exact": None,
        "near": (2 * crop.resized[0], 2 * crop.resized[1]),  # at once, the antialiasing would be left to the decoder
        "fast": crop.resized,
    }[quality]
    pixels = image.region(crop.region, cover=cover)
    made = resize(pixels, crop.resized, antialias=quality != "fast")
    top, left, height, width = crop.window
    kept = made[..., top : top + height, left : left + width]
    return kept.flip(-1) if crop.flipped else kept


class Recipe(Protocol):
    """A transform of an image, applied each time that it is loaded. Random draws come from torch's generator."""

    @property
    def crops(self) -> bool:
        """True if only a part of each image is used."""

    def __call__(self, image: SourceImage) -> Any:
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

    def __call__(self, image: SourceImage) -> torch.Tensor:
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
        """The crop of an image of that size: its middle. Nothing is drawn."""
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

    def __call__(self, image: SourceImage) -> torch.Tensor:
        """Resize, and crop the middle."""
        return crop_image(image, self.spec(*image.size()), self.quality)


@dataclass(frozen=True, kw_only=True)
class SquareRecipe:
    """The whole image, stretched to a square: so that images of any shape can lie in one tensor on the device.

    Gives uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 256
    crops: ClassVar[bool] = False

    def __call__(self, image: SourceImage) -> torch.Tensor:
        """Resize to the square."""
        return resize(image.whole(), (self.size, self.size))


class UserTransform:
    """The user's transform, of torchvision v1 or v2 or any callable, for one image.

    It gets what it was written for: a PIL image when a step of it takes no tensors (``ToTensor``, ``PILToTensor``) or
    is not of torchvision, else a uint8 tensor (3, H, W). A ``RandomResizedCrop`` that comes first draws its box before
    the image is decoded, so that only that box has to be.

    Args:
        transform: called with one image.
        kind: what it takes; ``"auto"`` looks at its steps.
    """

    def __init__(self, transform: Callable[[Any], Any], kind: Literal["auto", "tensor", "pil"] = "auto") -> None:
        if not callable(transform):
            raise SettingsError(
                f"transform={transform!r} cannot be called. Give a torchvision transform, or a function."
            )
        if kind not in ("auto", "tensor", "pil"):
            raise SettingsError(f"transform_input={kind!r} is not a choice. Give 'auto', 'tensor' or 'pil'.")
        self.transform = transform
        self.takes_pil = kind == "pil" or (kind == "auto" and not _takes_tensors(transform))
        crop = cropping_step(transform)
        self.crops = crop is not None
        self._steps = _steps(transform) if self.crops else []
        if self.crops:
            version = ".v2" if ".v2." in type(crop).__module__ else ""  # they round differently
            self._resize = import_module(f"torchvision.transforms{version}.functional").resize

    def __call__(self, image: SourceImage) -> Any:
        """Apply the transform."""
        if not self.crops:
            return self.transform(self._image(image.whole()))
        crop, *rest = self._steps
        region = draw_region(*image.size(), crop.scale, crop.ratio, sample_generator())
        pixels, size = self._image(image.region(region)), list(crop.size)
        made: object = self._resize(pixels, size, interpolation=crop.interpolation, antialias=crop.antialias)
        for step in rest:
            made = step(made)
        return made

    def _image(self, pixels: Pixels) -> object:
        if self.takes_pil:
            return Image.fromarray(pixels)
        # Without gaps: v2's resize would fall into a slow path. Writable: torch warns of memory that is not.
        return torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)


def cropping_step(transform: object) -> Any:
    """The RandomResizedCrop that a transform begins with; None where it begins with another step."""
    first = next(iter(_steps(transform)), None)
    return first if _of_torchvision(first, "RandomResizedCrop") else None


def _of_torchvision(thing: object, *names: str) -> bool:
    """True for one of torchvision's transforms: by name, since importing them takes a spawned worker 2 s."""
    return type(thing).__module__.startswith("torchvision.") and (not names or type(thing).__name__ in names)


def _takes_tensors(transform: object) -> bool:
    if _of_torchvision(transform, "ToTensor", "PILToTensor", "Lambda"):  # what a Lambda takes cannot be seen
        return False
    if type(transform) is not torch.nn.Sequential and not _of_torchvision(transform):
        return False
    inner = getattr(transform, "transforms", None)
    if inner is None and isinstance(transform, torch.nn.Module):
        inner = transform.children()
    return all(map(_takes_tensors, inner or ()))


def _steps(transform: Any) -> list[Any]:
    if _of_torchvision(transform, "Compose"):
        return list(transform.transforms)
    return list(transform) if type(transform) is torch.nn.Sequential else [transform]
