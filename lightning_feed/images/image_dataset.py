"""Images of a folder or a pack as a dataset, decoded in the workers or left encoded for a backend."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_feed.errors import DatasetError, DecodeError, SettingsError
from lightning_feed.images.crop import CropSpec, EvalRecipe, Recipe, SourceImage, TrainRecipe, crop_image
from lightning_feed.images.decoders import Decoder, Pixels, Region
from lightning_feed.images.header import Encoded, clear_orientation
from lightning_feed.load.collate import BadSamples, Skipped, fill_skipped
from lightning_feed.load.order import mix_seed
from lightning_feed.load.slot_batches import new_bytes
from lightning_feed.load.stage import traced
from lightning_feed.storage.folder import SampleSource
from lightning_feed.wording import printable

logger = logging.getLogger(__name__)


class CpuFallback:
    """Counts, by reason, the images that the CPU decodes in the training process because a device decoder cannot.

    Attributes:
        known: image index -> reason why the device decoder failed. These images are not tried again.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.known: dict[int, str] = {}

    def add(self, reason: str, name: str) -> None:
        """Count one image, and log the first with each reason.

        Args:
            reason: kind of the image, or the failure.
            name: name of the image.
        """
        self._counts[reason] += 1
        if self._counts[reason] == 1:
            logger.warning(
                "The CPU decodes %s, and others like it, in the training process: %s. Later ones are only counted. "
                'If most images are like that, backend="torch" is faster, because its workers decode.',
                printable(name),
                reason,
            )

    def as_dict(self) -> dict[str, int]:
        """Return the number of decodes by reason; an image counts each time it is decoded."""
        return dict(self._counts)


class CpuPart(Protocol):
    """Chooses images of an encoded dataset that the CPU decodes where they are read."""

    def takes(self, data: Encoded, size: tuple[int, int], index: int, name: str) -> bool:
        """Return True if the CPU is to decode this image now.

        Args:
            data: the file.
            size: (height, width) in pixels.
            index: index of the image in its dataset.
            name: name of the image.
        """


class ImageDataset(Dataset[Any]):
    """Labelled images: ``dataset[i]`` is (recipe's result for image i, label as int), or, with ``encoded``, an
    :class:`EncodedSample`.

    Args:
        source: source of the encoded images, or of pixels.
        decoder: decoder of encoded images.
        recipe: crop, resize and augmentation.
        kept: recipe used instead of ``recipe`` for images that stay on the device: makes images of one size, without
            random draws. None if ``recipe`` already does so. With ``kept``, samples that stay on the device have the
            image's width / height as a third part.
        bad_samples: policy for images that cannot be read or decoded.
        encoded: True to leave samples encoded. Their crops are drawn by ``recipe``, with the same random draws as for
            decoded samples, so every backend makes the same crops. May be changed between passes.
        cpu_part: chooses encoded samples that are decoded nevertheless; None to leave all encoded.
    """

    def __init__(  # noqa: PLR0913 - the last four have a default
        self,
        source: SampleSource,
        decoder: Decoder,
        recipe: Recipe,
        *,
        kept: Recipe | None = None,
        bad_samples: BadSamples | None = None,
        encoded: bool = False,
        cpu_part: CpuPart | None = None,
    ) -> None:
        self.source = source
        self.decoder = decoder
        self.recipe = recipe
        self.kept = kept
        self.bad_samples = bad_samples or BadSamples()
        self.encoded = encoded
        self.cpu_part = cpu_part

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels."""
        return self.source.classes

    @cached_property
    def cpu_fallback(self) -> CpuFallback:
        """Images that the device decoder left to the CPU."""
        return CpuFallback()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        sample = self.encoded_sample if self.encoded else self._sample
        try:
            return sample(index)
        except DatasetError as error:
            return self.bad_samples.instead(index, error, len(self), sample)

    # --- the steps of a sample ----------------------------------------------------------------------------------------

    def read(self, index: int) -> Encoded:
        """Return the encoded bytes of image ``index``, or its pixels from a pack of pixels."""
        with traced("read"):
            return self.source.read(index)

    def decode(self, data: Encoded, index: int) -> Pixels:
        """Return all pixels: uint8, shape (H, W, 3), RGB."""
        if holds_pixels(data):
            return data
        with self._naming(index), traced("decode"):
            return self.decoder.decode(data)

    def augment(self, decoded: Pixels, index: int) -> Any:
        """Make the sample from all pixels."""
        with traced("augment"):
            return self.recipe(SourceImage(decoded)), int(self.source.labels[index])

    def sample_to_keep(self, index: int) -> Any:
        """Make the sample to keep on a device."""
        decoded = self.decode(self.read(index), index)
        if self.kept is None:
            return self.augment(decoded, index)
        height, width = decoded.shape[:2]
        return self.kept(SourceImage(decoded)), int(self.source.labels[index]), np.float32(width / height)

    def _sample(self, index: int) -> object:
        data = self.read(index)
        decoder = None if holds_pixels(data) else self.decoder
        # Not decode() and augment(): the recipe may need only a part of the image.
        with self._naming(index), traced("augment"):
            return self.recipe(SourceImage(data, decoder)), int(self.source.labels[index])

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        try:
            yield
        except DecodeError as error:
            raise DecodeError(f"{self.source.name(index)} (sample {index}): {error}") from error

    # --- samples that are decoded later -------------------------------------------------------------------------------

    def encoded_sample(self, index: int, generator: torch.Generator | None = None) -> "EncodedSample":
        """Return the bytes of image ``index`` with its crop.

        Args:
            index: index of the sample.
            generator: generator for the crop; None for the sample's generator.
        """
        data = self.read(index)
        if holds_pixels(data):  # not a fault of this sample, so on_error does not apply
            raise SettingsError(
                f"{self.source.name(index)} (sample {index}) already holds pixels. "
                'Use backend="torch" for a pack of pixels.'
            )
        with self._naming(index):
            size = self.decoder.size(data)
        crop = self.crop_recipe.spec(*size, generator)
        label = int(self.source.labels[index])
        sample = EncodedSample(data, size, crop, label, index)
        if self.cpu_part is None or not self.cpu_part.takes(data, size, index, self.source.name(index)):
            return sample
        pixels, _ = self._decoded(sample)
        return EncodedSample(b"", size, crop, label, index, pixels)

    def decoded(self, sample: "EncodedSample") -> tuple[Tensor, int] | Skipped:
        """Decode as ``backend="torch"`` does: (uint8 of shape (3, H, W), label), or the sample's ``on_error``
        replacement.

        Raises:
            DatasetError: if the image cannot be decoded, and ``on_error`` does not handle it; or if too many samples
                have failed. Names the image.
        """
        try:
            return self._decoded(sample)
        except DatasetError as error:
            # This runs in the training process, whose random numbers must not change. So the failed image's crop is the
            # seed: it differs in each epoch, and is the same in a repeated run.
            seed = mix_seed(sample.index, *sample.crop.region[:2], "substitute")
            generator = torch.Generator().manual_seed(seed)
            found = self.bad_samples.instead(
                sample.index, error, len(self), lambda index: self._decoded(self.encoded_sample(index, generator))
            )
            return cast("tuple[Tensor, int] | Skipped", found)

    def _decoded(self, sample: "EncodedSample") -> tuple[Tensor, int]:
        if sample.pixels is not None:
            return sample.pixels, sample.label
        image = SourceImage(sample.data, self.decoder)
        with self._naming(sample.index), traced("augment"):
            return crop_image(image, sample.crop, self.crop_recipe.quality), sample.label

    @property
    def crop_recipe(self) -> TrainRecipe | EvalRecipe:
        """The recipe of encoded samples, which is always one of ours."""
        return cast("TrainRecipe | EvalRecipe", self.recipe)


def holds_pixels(data: object) -> TypeGuard[Pixels]:
    """Return True for pixels from a pack of pixels, instead of an encoded image."""
    return isinstance(data, np.ndarray) and data.ndim == 3


def collate_images(samples: list[Any]) -> Any:
    """Make a batch of samples that begin with an image. uint8 images of one shape stay channels last, as decoded, which
    avoids transposing them. Other parts are collated by torch.

    Returns:
        A list of the images, shape (B, 3, H, W); the labels, int64, shape (B,); and any other parts.
    """
    images, *others = zip(*fill_skipped(samples), strict=True)
    with torch.device("cpu"):  # torch makes tensors of numbers on the default device
        collated = [default_collate(list(other)) for other in others]
    return [_stack(images), *collated]


def _stack(images: tuple[Any, ...]) -> Any:
    if not all(_is_channels_last(image) and image.shape == images[0].shape for image in images):
        return default_collate(list(images))
    return default_collate([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)


def _is_channels_last(image: object) -> bool:
    return (
        isinstance(image, torch.Tensor)
        and image.dtype == torch.uint8
        and image.ndim == 3
        and image.stride(0) == 1  # also true for a crop of a larger image
    )


# --- batches that are decoded later -----------------------------------------------------------------------------------


class EncodedSample(NamedTuple):
    """A sample to be put into an :class:`EncodedBatch`."""

    data: Encoded
    """The file; empty if ``pixels`` is there."""
    size: tuple[int, int]
    """(height, width) in pixels."""
    crop: CropSpec
    label: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which has no use here
    """Index of the sample in its dataset."""
    pixels: Tensor | None = None
    """The crop, if a worker has decoded it: uint8, shape (3, height, width), channels last in memory."""


SIZE = slice(0, 2)
REGION = slice(2, 6)
RESIZED = slice(6, 8)
WINDOW = slice(8, 12)
FLIPPED = 12
LABEL = 13
INDEX = 14
"""Columns of :attr:`EncodedBatch.plan`."""


@dataclass(eq=False, kw_only=True)
class EncodedBatch:
    """B image files with their crops and labels, on the host. Some images may be decoded already.

    It is not a frozen dataclass because Lightning rebuilds dataclasses for ``precision="bf16-true"`` and the like, and
    refuses frozen ones. Treat a batch as read-only.
    """

    files: Tensor
    """uint8, shape (total bytes,): the files, concatenated. Nothing is there of an image that is decoded already."""
    offsets: Tensor
    """int64, shape (B + 1,): start of each file in ``files``, and the end of the last."""
    plan: Tensor
    """int64, shape (B, 15): size (2), region (4), resized (2), window (4), flipped, label, index."""
    labels: Tensor
    """int64, shape (B,)."""
    decoded: Tensor
    """int64, shape (K,): positions in the batch of the images that the workers have decoded."""
    pixels: Tensor
    """uint8, shape (K, height, width, 3): the crops of these images."""

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def window(self) -> tuple[int, int]:
        """(height, width) of all crops, in pixels."""
        height, width = self.plan[0, WINDOW].tolist()[2:]
        return height, width

    def images(self) -> list[EncodedSample]:
        """Return the samples of the batch; their bytes are views of ``files``."""
        files = self.files.numpy()
        offsets = self.offsets.tolist()
        made: dict[int, Tensor] = dict(zip(self.decoded.tolist(), self.pixels.permute(0, 3, 1, 2), strict=True))
        return [
            EncodedSample(
                data=files[start:end],
                size=(row[0], row[1]),
                crop=CropSpec(
                    region=Region(*row[REGION]),
                    resized=(row[6], row[7]),
                    window=Region(*row[WINDOW]),
                    flipped=bool(row[FLIPPED]),
                ),
                label=row[LABEL],
                index=row[INDEX],
                pixels=made.get(position),
            )
            for position, (start, end, row) in enumerate(
                zip(offsets[:-1], offsets[1:], self.plan.tolist(), strict=True)
            )
        ]

    def pin_memory(self) -> "EncodedBatch":
        """Return the batch with the parts that are copied to the device in page-locked memory, for DataLoader."""
        return replace(self, labels=self.labels.pin_memory(), pixels=self.pixels.pin_memory())


def collate_encoded(samples: list[Any]) -> EncodedBatch:
    """Make a batch from samples. In a worker process, files and crops are put straight into the slot of the batch."""
    images: list[EncodedSample] = fill_skipped(samples)
    flat = [np.frombuffer(image.data, np.uint8) for image in images]
    offsets = torch.tensor([0, *(len(data) for data in flat)], device="cpu").cumsum(0)
    in_slot = new_bytes(int(offsets[-1]))
    files = in_slot.numpy()
    np.concatenate(flat, out=files)
    for start, end in pairwise(offsets.tolist()):
        clear_orientation(files[start:end])
    rows = [
        (*i.size, *i.crop.region, *i.crop.resized, *i.crop.window, int(i.crop.flipped), i.label, i.index)
        for i in images
    ]
    plan = torch.tensor(rows, device="cpu")
    made = {position: image.pixels for position, image in enumerate(images) if image.pixels is not None}
    _, _, height, width = images[0].crop.window
    pixels = new_bytes(len(made) * height * width * 3).view(len(made), height, width, 3)
    for row, crop in zip(pixels, made.values(), strict=True):
        row.copy_(crop.permute(1, 2, 0))
    return EncodedBatch(
        files=in_slot,
        offsets=offsets,
        plan=plan,
        labels=plan[:, LABEL].clone(),
        decoded=torch.tensor([*made], dtype=torch.int64, device="cpu"),
        pixels=pixels,
    )


def decode_rest(
    positions: Iterable[int],
    images: list[EncodedSample],
    dataset: ImageDataset,
    batch: Tensor,
    convert: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Fill positions of a batch with images decoded by the CPU, or their ``on_error`` replacements.

    Copies to the device are asynchronous: the host does not wait for them.

    Args:
        positions: positions of the images that are still to be decoded.
        images: all images of the batch.
        dataset: the dataset of the images.
        batch: pixels of the batch, shape (B, 3, height, width). Written to.
        convert: function from a uint8 image, shape (3, height, width), on the batch's device, to the values that the
            batch holds; None if the batch holds uint8.

    Returns:
        Labels of the batch: int64, shape (B,), on the host.

    Raises:
        DatasetError: if an image cannot be decoded, and ``on_error`` does not handle it. Names the image.
    """
    pin = batch.device.type != "cpu"
    labels: list[int] = [image.label for image in images]
    order: list[object] = list(range(len(images)))
    for position in positions:
        decoded = dataset.decoded(images[position])
        if isinstance(decoded, Skipped):
            order[position] = decoded
            continue
        pixels, labels[position] = decoded
        _, height, width = pixels.shape
        row = torch.empty((height, width, 3), dtype=torch.uint8, device="cpu", pin_memory=pin)
        image = row.copy_(pixels.permute(1, 2, 0)).to(batch.device, non_blocking=True).permute(2, 0, 1)
        if convert is not None:
            image = convert(image)
        batch[position] = image
    for position, other in enumerate(fill_skipped(order)):
        if other != position:
            batch[position] = batch[other]
            labels[position] = labels[other]
    return torch.tensor(labels, device="cpu", pin_memory=pin)
