"""The user's own transforms, in the place of a recipe.

Apart from the recipes, which do without torchvision: importing it takes each spawned worker 2 s of CPU time.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torchvision.transforms as v1
from PIL import Image
from torchvision.transforms import v2

from lightning_feed.decode.decoders import Pixels
from lightning_feed.errors import SettingsError
from lightning_feed.load.crop import AnyImage, draw_region
from lightning_feed.load.random_state import sample_generator


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
        steps = _steps(transform)
        self._crop = steps[0] if steps and type(steps[0]) in (v1.RandomResizedCrop, v2.RandomResizedCrop) else None
        self._rest = steps[1:] if self._crop is not None else []
        self.crops = self._crop is not None

    def __call__(self, image: AnyImage) -> Any:
        """Apply the transform."""
        crop = self._crop
        if crop is None:
            return self.transform(self._image(image.whole()))
        region = draw_region(*image.size(), crop.scale, crop.ratio, sample_generator())
        functional = (
            v1.functional if isinstance(crop, v1.RandomResizedCrop) else v2.functional
        )  # they round differently
        made: Any = functional.resize(
            self._image(image.region(region)),
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
