"""X5: the loader as it would be with the pixel work on the device: pictures at their final size, as uint8.

Of a pipeline of transforms, those up to the last one that changes the picture's size stay in the workers, since a batch
needs one size. What comes after them (flips, colours, blurs, conversions to floats, normalising) can be done for the
whole batch in ``device_transform``, and is left out here.
"""

from typing import Any

import torch
import torchvision.transforms as v1
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from lightning_feed.load.given_transform import GivenTransform
from lightning_feed.load.rounds import LoaderRate, RoundLimits
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import Changes
from lightning_feed.watch.experiments.subject import Part, rate_of
from lightning_feed.watch.experiments.transform_sites import Site, find_sites, replaced


class UntilSized:
    """The first steps of a pipeline, and what they give as a uint8 tensor of shape (C, H, W).

    Args:
        steps: called one after the other, each with what the one before gave.
    """

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def __call__(self, picture: Any) -> Tensor:
        """Apply them."""
        for step in self.steps:
            picture = step(picture)
        if isinstance(picture, Tensor):
            return picture if picture.dtype == torch.uint8 else (picture * 255).to(torch.uint8)
        made: Tensor = v2.functional.pil_to_tensor(picture)
        return made


class _Noting:
    """Stands for a pipeline for one sample, and notes which steps would stay in the workers."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps
        self.kept: list[Any] | None = None
        """None: it is not about pictures, or they are uint8 already."""

    def __call__(self, picture: Any, *others: Any) -> Any:
        if others:  # pictures with boxes or masks: the device would have to do the same to those
            for step in self.steps:
                picture, *rest = step(picture, *others)
                others = tuple(rest)
            return (picture, *others)
        size, last = _size_of(picture), 0
        for number, step in enumerate(self.steps, start=1):
            picture = step(picture)
            before, size = size, _size_of(picture)
            if size != before:
                last = number
        if size is not None and not (isinstance(picture, Tensor) and picture.dtype == torch.uint8):
            self.kept = self.steps[:last]
        return picture


def measure_as_uint8(parts: tuple[Part, ...], limits: RoundLimits) -> LoaderRate | None:
    """The rate of the loaders with the pixel work left out; None where no pipeline of pictures is found.

    Pipelines are torchvision's ``Compose`` of either version, and ``nn.Sequential``.
    """
    kept: dict[int, UntilSized] = {}
    sites: list[Site] = []
    for part in parts:
        found = [site for site in find_sites(part.loader.dataset) if _steps(site.transform)]
        noting = _noting(part, found)
        kept |= {name: UntilSized(note.kept) for name, note in noting.items() if note.kept is not None}
        sites += [site for site in found if id(site.transform) in kept]
    if not sites:
        return None
    with replaced(sites, lambda site: _as(site, kept[id(site.transform)])):
        return rate_of(parts, lambda part: Changes(endless=not part.stream), limits)[0]


def _noting(part: Part, sites: list[Site]) -> dict[int, _Noting]:
    """What was noted of each site's pipeline with one sample, by the id of the transform."""
    noting = {id(site.transform): _Noting(_steps(site.transform)) for site in sites}
    with untouched(part.loader), replaced(sites, lambda site: _as(site, noting[id(site.transform)])):
        _one_sample(part)
    return noting


def _as(site: Site, pipeline: Any) -> Any:
    """A pipeline for the place of another, taking what that takes."""
    was = site.transform
    return GivenTransform(pipeline, kind="pil" if was.takes_pil else "tensor") if _is_given(was) else pipeline


def _steps(transform: Any) -> list[Any]:
    inner = transform.transform if _is_given(transform) else transform
    if isinstance(inner, nn.Sequential):
        return list(inner)
    return list(inner.transforms) if type(inner) in (v1.Compose, v2.Compose) else []


def _is_given(transform: Any) -> bool:
    return isinstance(transform, GivenTransform)


def _one_sample(part: Part) -> None:
    dataset = part.loader.dataset
    if part.stream:
        next(iter(dataset), None)
        return
    for index in part.first_samples(1):
        dataset[index]


def _size_of(picture: Any) -> tuple[int, int] | None:
    """(height, width); None for what is no picture."""
    if isinstance(picture, Image.Image):
        return picture.height, picture.width
    if isinstance(picture, Tensor) and picture.ndim == 3:
        return int(picture.shape[-2]), int(picture.shape[-1])
    return None
