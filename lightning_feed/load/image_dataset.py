"""Images of a folder or a pack as a dataset: read, decode as much as the recipe asks for, crop, label."""

import math
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from lightning_feed.archive.folder import SampleSource
from lightning_feed.decode.decoders import Decoder, Pixels
from lightning_feed.decode.header import Encoded
from lightning_feed.errors import DatasetError, DecodeError
from lightning_feed.load.bad_samples import BadSamples, fill_skipped
from lightning_feed.load.cacheable import CacheableDataset
from lightning_feed.load.image_recipe import Recipe
from lightning_feed.load.picture import DecodedPicture, EncodedPicture
from lightning_feed.load.trace import traced


class ImageDataset(CacheableDataset):
    """Labelled images: ``dataset[i]`` is (what the recipe makes of image i, label as int).

    Args:
        source: where the encoded images, or their pixels, are read from.
        decoder: for encoded ones.
        recipe: crop, resize and augmentation.
        kept: in place of it for images that stay on the device, of one size and without chance; None where ``recipe``
            itself is like that. With it, a sample has the image's width / height as a third part.
        bad_samples: what to do about an image that cannot be read or decoded.
    """

    def __init__(
        self,
        source: SampleSource,
        decoder: Decoder,
        recipe: Recipe,
        *,
        kept: Recipe | None = None,
        bad_samples: BadSamples | None = None,
    ) -> None:
        self.source = source
        self.decoder = decoder
        self.recipe = recipe
        self.kept = kept
        self.bad_samples = bad_samples or BadSamples()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels."""
        return self.source.classes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._sample(index)
        except DatasetError as error:
            return self.bad_samples.instead(index, error, len(self), self._sample)

    # --- the steps that caches stand between --------------------------------------------------------------------------

    def read(self, index: int) -> Encoded:
        """The encoded bytes of image ``index``; its pixels, where a pack holds pixels."""
        with traced("read"):
            return self.source.read(index)

    def decode(self, data: Encoded, index: int) -> Pixels:
        """All pixels: uint8, shape (H, W, 3), RGB."""
        if isinstance(data, np.ndarray) and data.ndim == 3:
            return data
        try:
            with traced("decode"):
                return self.decoder.decode(data)
        except DecodeError as error:
            raise self._named(index, error) from error

    def augment(self, decoded: Pixels, index: int) -> Any:
        """The sample, made from all pixels."""
        with traced("augment"):
            return self.recipe(DecodedPicture(decoded)), int(self.source.labels[index])

    def plain(self, decoded: Pixels, index: int) -> Any:
        """The sample to keep on a device."""
        if self.kept is None:
            return self.augment(decoded, index)
        height, width = decoded.shape[:2]
        return self.kept(DecodedPicture(decoded)), int(self.source.labels[index]), np.float32(width / height)

    def _sample(self, index: int) -> Any:
        if self.cache is not None and self.cache.kind == "decoded":
            return self.augment(self.cached_decoded(index), index)
        data = self.cached_bytes(index)
        if isinstance(data, np.ndarray) and data.ndim == 3:
            return self.augment(data, index)
        try:
            # Not decode() and augment(): the recipe may need a part of the picture only.
            with traced("augment"):
                image = self.recipe(EncodedPicture(data, self.decoder))
        except DecodeError as error:
            raise self._named(index, error) from error
        return image, int(self.source.labels[index])

    def _named(self, index: int, error: DecodeError) -> DecodeError:
        return DecodeError(f"{self.source.name(index)} (sample {index}): {error}")


def collate_images(samples: list[Any]) -> Any:
    """A batch of samples that begin with an image: uint8 images of one shape are laid channels last, as decoders give
    them, since laying them out otherwise would transpose each of them. All else is done as torch does it.

    Returns:
        A list: images, shape (B, 3, H, W), labels, int64 of shape (B,), and what else there is.
    """
    images, *others = zip(*fill_skipped(samples), strict=True)
    with torch.device("cpu"):  # torch makes tensors of numbers on the default device
        collated = [default_collate(list(other)) for other in others]
    return [_stack(images), *collated]


def _stack(images: tuple[Any, ...]) -> Any:
    if not all(_is_channels_last(image) and image.shape == images[0].shape for image in images):
        return default_collate(list(images))
    channels, height, width = images[0].shape
    shape = (len(images), height, width, channels)
    if get_worker_info() is None:
        batch = torch.empty(shape, dtype=torch.uint8, device="cpu")
    else:  # written at once where the training process will read it, as torch's own collate does
        storage = torch.UntypedStorage._new_shared(math.prod(shape), device="cpu")  # type: ignore[no-untyped-call]
        batch = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).view(shape)
    for place, image in enumerate(images):
        batch[place] = image.permute(1, 2, 0)
    return batch.permute(0, 3, 1, 2)


def _is_channels_last(image: Any) -> bool:
    return (
        isinstance(image, torch.Tensor)
        and image.dtype == torch.uint8
        and image.ndim == 3
        and image.stride(0) == 1  # cut out of a larger one or not
    )
