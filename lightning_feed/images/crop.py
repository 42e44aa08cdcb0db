"""Image recipes: the standard crops, and the user's own transforms.

Crops are drawn before an image is decoded, so all backends use the same crops. All pixels are uint8.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from PIL import Image

from lightning_feed.errors import SettingsError
from lightning_feed.images.decoders import Decoder, Pixels, Region, draw_region, resize
from lightning_feed.load.random_state import sample_generator
from lightning_feed.load.stage import traced

Quality: TypeAlias = Literal["exact", "fast"]
QUALITIES: tuple[Quality, ...] = ("exact", "fast")
"""``"exact"``: the pixels of torchvision's antialiased uint8 resize. ``"fast"``: decoded at the smallest scale that is
at least the target size, then resized without antialiasing. Their differences: docs/how-to/images.md."""


@dataclass(frozen=True, eq=False)
class SourceImage:
    """An encoded image, or pixels from a cache or a pack of pixels."""

    data: Any
    """Encoded bytes, or pixels. Never modified."""
    decoder: Decoder | None = None
    """Decoder of ``data``. None if ``data`` holds pixels."""

    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        height, width = self.data.shape[:2] if self.decoder is None else self.decoder.size(self.data)
        return height, width

    def whole(self) -> Pixels:
        """Return all pixels."""
        if self.decoder is None:
            return cast("Pixels", self.data)
        with traced("decode"):
            return self.decoder.decode(self.data)

    def region(self, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """Return the pixels of ``region``; with ``cover``, an encoded image may be decoded at a smaller scale that is
        at least ``cover`` (height, width) large."""
        if self.decoder is None:
            return region.cut(self.data)
        with traced("decode"):
            return self.decoder.decode_region(self.data, region, cover=cover)


@dataclass(frozen=True, kw_only=True)
class CropSpec:
    """A crop: a box of the image is resized, and a window of the result is kept and possibly flipped."""

    region: Region
    """The box, in pixels of the stored image."""
    resized: tuple[int, int]
    """(height, width) of the resized region."""
    window: Region
    """The part of the resized region to keep."""
    flipped: bool
    """True to swap left and right."""


def crop_image(image: SourceImage, crop: CropSpec, quality: Quality) -> torch.Tensor:
    """Return the pixels of a crop: uint8, shape (3, window height, window width), channels last in memory."""
    cover = crop.resized if quality == "fast" else None
    pixels = image.region(crop.region, cover=cover)
    made = resize(pixels, crop.resized, antialias=quality != "fast")
    top, left, height, width = crop.window
    kept = made[..., top : top + height, left : left + width]
    return kept.flip(-1) if crop.flipped else kept


class Recipe(Protocol):
    """Image transform, applied each time that an image is loaded. Random draws come from torch's generators."""

    @property
    def crops(self) -> bool:
        """True if only a part of each image may be used."""

    def __call__(self, image: SourceImage) -> Any:
        """Make the image part of a sample."""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """RandomResizedCrop and RandomHorizontalFlip, with torchvision's defaults and the same random draws.

    Returns uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 224
    quality: Quality = "exact"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_probability: float = 0.5
    crops: ClassVar[bool] = True

    def spec(self, height: int, width: int, generator: torch.Generator | None = None) -> CropSpec:
        """Draw the crop of an image of that size from ``generator``; None for the sample's generator."""
        generator = generator or sample_generator()
        region = draw_region(height, width, self.scale, self.ratio, generator)
        drawn = torch.rand(1, generator=generator, dtype=torch.float32, device="cpu").item()
        whole = Region(0, 0, self.size, self.size)
        return CropSpec(
            region=region, resized=(self.size, self.size), window=whole, flipped=drawn < self.flip_probability
        )

    def __call__(self, image: SourceImage) -> torch.Tensor:
        """Crop, resize, and flip at random."""
        return crop_image(image, self.spec(*image.size()), self.quality)


@dataclass(frozen=True, kw_only=True)
class EvalRecipe:
    """Resize of the shorter side and CenterCrop, as in torchvision's reference evaluation.

    Returns uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 224
    short_side: int = 256
    quality: Quality = "exact"
    crops: ClassVar[bool] = False

    def spec(self, height: int, width: int, generator: torch.Generator | None = None) -> CropSpec:
        """Return the centre crop of an image of this height and width. Draws no random numbers."""
        short = min(height, width)
        # As in torchvision, the longer side is truncated, not rounded.
        rows = int(self.short_side * height / short)
        columns = int(self.short_side * width / short)
        # As in torchvision's center_crop, halves are rounded to even.
        top, left = (round((side - self.size) / 2) for side in (rows, columns))
        return CropSpec(
            region=Region(0, 0, height, width),
            resized=(rows, columns),
            window=Region(top, left, self.size, self.size),
            flipped=False,
        )

    def __call__(self, image: SourceImage) -> torch.Tensor:
        """Resize, and crop the centre."""
        return crop_image(image, self.spec(*image.size()), self.quality)


@dataclass(frozen=True, kw_only=True)
class SquareRecipe:
    """The whole image, stretched to a square, so that images of any shape fit into one tensor on the device.

    Returns uint8 of shape (3, size, size), channels last in memory.
    """

    size: int = 256
    crops: ClassVar[bool] = False

    def __call__(self, image: SourceImage) -> torch.Tensor:
        """Resize to the square."""
        return resize(image.whole(), (self.size, self.size))


class UserTransform:
    """The user's transform of one image: torchvision v1 or v2, or any callable.

    The input is a PIL image if a step takes no tensors (``ToTensor``, ``PILToTensor``) or is not from torchvision;
    otherwise a uint8 tensor (3, H, W). A leading ``RandomResizedCrop`` draws its box first, so that only the box has to
    be decoded.

    Args:
        transform: called with one image.
        kind: type of its input; ``"auto"`` infers it from the steps.
    """

    def __init__(self, transform: Callable[[Any], Any], kind: Literal["auto", "tensor", "pil"] = "auto") -> None:
        if not callable(transform):
            raise SettingsError(
                f"transform={transform!r} cannot be called. Pass a torchvision transform, or a function."
            )
        if kind not in ("auto", "tensor", "pil"):
            raise SettingsError(f"kind={kind!r} is not valid. Use 'auto', 'tensor' or 'pil'.")
        self.transform = transform
        self.takes_pil = kind == "pil" or (kind == "auto" and not _takes_tensors(transform))
        crop = cropping_step(transform)
        self.crops = crop is not None
        self._steps = _steps(transform) if self.crops else []
        if self.crops:
            version = ".v2" if ".v2." in type(crop).__module__ else ""  # v1 and v2 round differently
            self._resize = import_module(f"torchvision.transforms{version}.functional").resize

    def __call__(self, image: SourceImage) -> Any:
        """Apply the transform."""
        if not self.crops:
            return self.transform(self._image(image.whole()))
        crop, *rest = self._steps
        region = draw_region(*image.size(), crop.scale, crop.ratio, sample_generator())
        pixels = self._image(image.region(region))
        size = list(crop.size)
        made: object = self._resize(pixels, size, interpolation=crop.interpolation, antialias=crop.antialias)
        for step in rest:
            made = step(made)
        return made

    def _image(self, pixels: Pixels) -> object:
        if self.takes_pil:
            return Image.fromarray(pixels)
        # Contiguous, because v2's resize is slow otherwise. Writeable, because torch warns otherwise.
        return torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)


def cropping_step(transform: object) -> Any:
    """Return the RandomResizedCrop at the start of a transform; None if another step is first."""
    first = next(iter(_steps(transform)), None)
    if _of_torchvision(first, "RandomResizedCrop"):
        return first
    return None


def _of_torchvision(thing: object, *names: str) -> bool:
    """Return True for a torchvision transform. Checked by name, because the import takes 2 s in a spawned worker."""
    return type(thing).__module__.startswith("torchvision.") and (not names or type(thing).__name__ in names)


def _takes_tensors(transform: object) -> bool:
    if _of_torchvision(transform, "ToTensor", "PILToTensor", "Lambda"):  # a Lambda's input type is unknown
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
    if type(transform) is torch.nn.Sequential:
        return list(transform)
    return [transform]
