"""From a picture to a sample: the standard training recipe on uint8 the whole way, or the user's own transforms."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
import torchvision.transforms as v1
from PIL import Image
from torchvision.transforms import v2

from lightning_feed.decode.decoder import Pixels, Region
from lightning_feed.decode.resize import resize
from lightning_feed.errors import SettingsError
from lightning_feed.load.cut import Cut, Picture, Quality, cut_out
from lightning_feed.load.thread_random import SampleDraws

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
        with SampleDraws() as own:
            generator = own if generator is None else generator
            region = draw_region(height, width, self.scale, self.ratio, generator)
            flipped = torch.rand(1, generator=generator, dtype=torch.float32).item() < self.flip_probability
        whole = Region(0, 0, self.size, self.size)
        return Cut(region=region, resized=(self.size, self.size), window=whole, flipped=flipped)

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


class GivenTransform:
    """The user's transform, of torchvision v1 or v2 or any callable, for one image.

    It gets what it was written for: a PIL image when a step of it takes no tensors (``ToTensor``, ``PILToTensor``) or
    is not of torchvision, else a uint8 tensor (3, H, W). A ``RandomResizedCrop`` that comes first draws its box before
    the picture is decoded, so that only that box has to be.

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
        steps = _steps(transform)
        self._crop = steps[0] if steps and type(steps[0]) in (v1.RandomResizedCrop, v2.RandomResizedCrop) else None
        self._rest = steps[1:] if self._crop is not None else []
        self.crops = self._crop is not None

    def __call__(self, picture: Picture) -> Any:
        """Apply the transform."""
        crop = self._crop
        if crop is None:
            return self.transform(self._image(picture.whole()))
        with SampleDraws() as generator:
            region = draw_region(*picture.size(), crop.scale, crop.ratio, generator)
        functional = (
            v1.functional if isinstance(crop, v1.RandomResizedCrop) else v2.functional
        )  # they round differently
        made: Any = functional.resize(
            self._image(picture.region(region)),
            list(crop.size),
            interpolation=crop.interpolation,
            antialias=crop.antialias,
        )
        for step in self._rest:
            made = step(made)
        return made

    def _image(self, pixels: Pixels) -> Any:
        if self.takes_pil:
            return Image.fromarray(pixels)
        # Without gaps: v2's resize would fall into a slow path. Writable: torch warns of memory that is not.
        return torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)


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
    drawn = torch.empty(1, dtype=torch.float32)
    for _ in range(_TRIES):
        area = height * width * drawn.uniform_(scale[0], scale[1], generator=generator).item()
        aspect = drawn.uniform_(shortest, longest, generator=generator).exp().item()
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(torch.randint(height - rows + 1, (1,), generator=generator).item())
            left = int(torch.randint(width - columns + 1, (1,), generator=generator).item())
            return Region(top, left, rows, columns)
    rows, columns = height, width
    if width / height < min(ratio):
        rows = round(width / min(ratio))
    elif width / height > max(ratio):
        columns = round(height * max(ratio))
    return Region((height - rows) // 2, (width - columns) // 2, rows, columns)


@lru_cache
def _logarithms(*values: float) -> tuple[float, ...]:
    return tuple(torch.log(torch.tensor(values, dtype=torch.float32)).tolist())  # as torchvision has it


_NOT_OF_TENSORS = tuple(
    getattr(module, name)
    for module in (v1, v2)
    for name in ("ToTensor", "PILToTensor", "Lambda")  # what a Lambda takes cannot be seen
    if hasattr(module, name)
)


def _takes_tensors(transform: Any) -> bool:
    if isinstance(transform, _NOT_OF_TENSORS):
        return False
    if type(transform) is not torch.nn.Sequential and not type(transform).__module__.startswith("torchvision."):
        return False
    inner = getattr(transform, "transforms", None)
    if inner is None and isinstance(transform, torch.nn.Module):
        inner = transform.children()
    return all(map(_takes_tensors, inner or ()))


def _steps(transform: Any) -> list[Any]:
    if type(transform) in (v1.Compose, v2.Compose):
        return list(transform.transforms)
    return list(transform) if type(transform) is torch.nn.Sequential else [transform]
