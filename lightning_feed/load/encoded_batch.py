"""A batch of images that are still encoded, with what is to be cut out of each: decoded later, by the backend."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lightning_feed.decode.decoders import Region
from lightning_feed.decode.header import Encoded
from lightning_feed.errors import DatasetError, DecodeError, SettingsError
from lightning_feed.load.bad_samples import Skipped, fill_skipped
from lightning_feed.load.cut import Cut, cut_out
from lightning_feed.load.image_dataset import ImageDataset, collate_images
from lightning_feed.load.image_recipe import EvalRecipe, TrainRecipe
from lightning_feed.load.left_to_cpu import LeftToCpu
from lightning_feed.load.order import mix_seed
from lightning_feed.load.picture import EncodedPicture
from lightning_feed.load.trace import traced

_HOST = torch.device("cpu")


class EncodedImage(NamedTuple):
    """One sample on its way to an :class:`EncodedBatch`."""

    data: Encoded
    size: tuple[int, int]
    """(height, width) in pixels."""
    cut: Cut
    label: int
    index: int  # type: ignore[assignment]  # in the place of tuple.index, which nobody looks for here
    """Of the sample in its dataset."""


@dataclass(eq=False, kw_only=True)
class EncodedBatch:
    """B image files, what to take of each, and their labels.

    Decoders read the files and the plan on the host, where they stay: ``to`` moves the labels, and notes the device
    that the pixels are wanted on. It is not written to, and not frozen either: Lightning takes dataclasses apart for
    ``precision="bf16-true"`` and the like, and refuses frozen ones.
    """

    files: Tensor
    """uint8, shape (all bytes,): one file after the other."""
    offsets: Tensor
    """int64, shape (B + 1,): where each begins, and the end."""
    plan: Tensor
    """int64, shape (B, 15): size (2), region (4), resized (2), window (4), flipped, label, index."""
    labels: Tensor
    """int64, shape (B,)."""
    device: torch.device = _HOST
    """Where the decoded images are to lie."""

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, part: Any) -> Any:
        # Also what `images, labels = batch` asks for first. There is no __iter__: Lightning looks into what has one.
        raise SettingsError(
            "This batch is not decoded: its images are still bytes, and a GPU backend decodes them on the way to the "
            "device. Train with trainer.fit(model, datamodule=...), not with the loader alone; by hand, call "
            "datamodule.device_transform(batch.to(device), split), which gives images, labels."
        )

    def images(self) -> list[EncodedImage]:
        """The samples that it was made of; their bytes are views of ``files``."""
        files, offsets = self.files.numpy(), self.offsets.tolist()
        return [
            EncodedImage(
                data=files[start:end],
                size=(row[0], row[1]),
                cut=Cut(
                    region=Region(*row[2:6]), resized=(row[6], row[7]), window=Region(*row[8:12]), flipped=bool(row[12])
                ),
                label=row[13],
                index=row[14],
            )
            for start, end, row in zip(offsets[:-1], offsets[1:], self.plan.tolist(), strict=True)
        ]

    def to(self, device: Any, non_blocking: bool = False) -> "EncodedBatch":  # noqa: FBT001, FBT002  # torch's own form
        """The batch for a device. Lightning calls this, without ``non_blocking``: pinned labels never wait."""
        labels = self.labels.to(device, non_blocking=non_blocking or self.labels.is_pinned())
        return replace(self, labels=labels, device=labels.device)

    def pin_memory(self) -> "EncodedBatch":
        """The batch with pinned labels. DataLoader calls this; the files are not copied as they are."""
        return replace(self, labels=self.labels.pin_memory())


class EncodedImageDataset(ImageDataset):
    """The same samples as :class:`ImageDataset`'s, not decoded: ``dataset[i]`` is an :class:`EncodedImage`.

    Random draws are those of ``recipe``, in the same order, so that every backend takes the same boxes of the same
    images.
    """

    recipe: TrainRecipe | EvalRecipe

    @cached_property
    def left_to_cpu(self) -> LeftToCpu:
        """What a device that decodes the batches has left to the CPU."""
        return LeftToCpu()

    def _sample(self, index: int, generator: torch.Generator | None = None) -> EncodedImage:
        data = self.cached_bytes(index)
        if isinstance(data, np.ndarray) and data.ndim == 3:  # no fault of this one sample that on_error could deal with
            raise SettingsError(
                f"{self.source.name(index)} (sample {index}) holds pixels: there is nothing to decode. "
                'Use backend="torch" for a pack of pixels.'
            )
        try:
            size = self.decoder.size(data)
        except DecodeError as error:
            raise self._named(index, error) from error
        return EncodedImage(data, size, self.recipe.cut(*size, generator), int(self.source.labels[index]), index)

    def decoded(self, image: EncodedImage) -> tuple[Tensor, int] | Skipped:
        """The sample of ``backend="torch"``: (uint8 of shape (3, H, W), label), or what ``on_error`` puts in its place.

        Raises:
            DatasetError: when it cannot be decoded, with its name, or there have been too many of these.
        """
        try:
            return self._decoded(image)
        except DatasetError as error:
            # Here is the process that trains, whose random numbers are not to be touched; those of the image that
            # failed are others in each epoch, and the same in a run that is repeated.
            seed = mix_seed(image.index, *image.cut.region[:2], "substitute")
            generator = torch.Generator().manual_seed(seed)
            found = self.bad_samples.instead(
                image.index, error, len(self), lambda index: self._decoded(self._sample(index, generator))
            )
            return cast("tuple[Tensor, int] | Skipped", found)

    def _decoded(self, image: EncodedImage) -> tuple[Tensor, int]:
        try:
            with traced("augment"):
                pixels = cut_out(EncodedPicture(image.data, self.decoder), image.cut, self.recipe.quality)
        except DecodeError as error:
            raise self._named(image.index, error) from error
        return pixels, image.label


def collate_encoded(samples: list[Any]) -> EncodedBatch:
    """Put a batch together. Runs in the workers; in a worker process, in memory that the training process shares."""
    images: list[EncodedImage] = fill_skipped(samples)
    flat = [np.frombuffer(image.data, np.uint8) for image in images]
    offsets = torch.tensor([0, *(len(data) for data in flat)], device="cpu").cumsum(0)
    files = _empty(int(offsets[-1]))
    np.concatenate(flat, out=files.numpy())
    rows = [
        (*i.size, *i.cut.region, *i.cut.resized, *i.cut.window, int(i.cut.flipped), i.label, i.index) for i in images
    ]
    plan = torch.tensor(rows, device="cpu")
    return EncodedBatch(files=files, offsets=offsets, plan=plan, labels=plan[:, 13].clone())


def decode_on_cpu(batch: EncodedBatch, dataset: EncodedImageDataset) -> Any:
    """[images, labels] as ``backend="torch"`` gives them: uint8 of shape (B, 3, H, W), channels last, and int64 (B,).

    Raises:
        DatasetError: when an image cannot be decoded, with its name, and ``on_error`` does not deal with it.
    """
    return collate_images([dataset.decoded(image) for image in batch.images()])


def _empty(size: int) -> Tensor:
    if get_worker_info() is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    # Written at once where the training process will read it, as torch's own collate does.
    storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).view(size)
