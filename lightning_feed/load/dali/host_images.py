"""The images of a batch that DALI is not given: they are decoded on the host, and put into its batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_feed.decode.header import JPEG, PNG, WEBP, Encoded, ends_like_jpeg, jpeg_header, kind_of, png_bit_depth
from lightning_feed.errors import DecodeError
from lightning_feed.load.bad_samples import Skipped, fill_skipped
from lightning_feed.load.cut import cut_out
from lightning_feed.load.encoded_batch import EncodedImage, EncodedImageDataset
from lightning_feed.load.picture import EncodedPicture


def why_on_host(data: Encoded) -> str:
    """Why a file is not given to DALI; "" where it is.

    DALI makes other pixels than Pillow of 16 bits a channel, knows no GIF, and may decode what is there of a JPEG or a
    TIFF that is cut short. What nvJPEG makes of CMYK on the GPU is its own affair.
    """
    kind = kind_of(data)
    if kind == JPEG:
        try:
            components = jpeg_header(data).components
        except DecodeError:
            return "a JPEG without a frame header"
        if components == 4:
            return "a CMYK JPEG"
        return "" if ends_like_jpeg(data) else "a JPEG with something else at its end than the end of its image"
    if kind == PNG:
        return "" if png_bit_depth(data) < 16 else "a PNG of 16 bits a channel"
    return "" if kind in (WEBP, "BMP") else f"an image of the kind {kind}"


class HostImages:
    """Decodes what DALI cannot, as ``backend="torch"`` would. ``dataset.left_to_cpu`` counts it.

    Args:
        dataset: whose decoder and ``on_error`` are used.
        mean: of R, G and B for values in [0, 1], where the batch is normalised; see :meth:`put_into`.
        std: the same.
    """

    def __init__(self, dataset: EncodedImageDataset, mean: Sequence[float], std: Sequence[float]) -> None:
        self.dataset = dataset
        self.mean, self.std = tuple(mean), tuple(std)

    def reasons(self, images: Sequence[EncodedImage]) -> dict[int, str]:
        """Which of a batch's images are not given to DALI, by their place, and why."""
        known = self.dataset.left_to_cpu.known
        reasons = {place: known.get(image.index) or why_on_host(image.data) for place, image in enumerate(images)}
        return {place: reason for place, reason in reasons.items() if reason}

    def refuse(self, reasons: Mapping[int, str]) -> None:
        """Keep images from DALI from now on, which has failed at them.

        Args:
            reasons: index in the dataset -> why.
        """
        self.dataset.left_to_cpu.known.update(reasons)

    def name(self, index: int) -> str:
        """What errors call an image."""
        return f"{self.dataset.source.name(index)} (sample {index})"

    def broken(self, images: Sequence[EncodedImage]) -> dict[int, str]:
        """Those of the images that cannot be decoded on the host either, by their index in the dataset."""
        found = {}
        for image in images:
            try:
                cut_out(EncodedPicture(image.data, self.dataset.decoder), image.cut, "exact")
            except DecodeError:
                found[image.index] = "DALI failed at it, and the CPU's decoder too"
        return found

    def put_into(
        self, batch: Tensor, labels: Tensor, images: Sequence[EncodedImage], reasons: Mapping[int, str]
    ) -> tuple[Tensor, Tensor]:
        """The batch with these images in their places, or what ``on_error`` puts there.

        Args:
            batch: shape (B, 3, H, W), uint8, or normalised where it is of floats.
            labels: shape (B,).
            images: all of the batch.
            reasons: of those that it lacks, by their place.

        Raises:
            DatasetError: when one cannot be decoded and ``on_error`` does not deal with it, with its name.
        """
        # The outputs of DALI are its own memory, and may be read-only for us: what is changed is a copy.
        batch, labels = batch.clone(), labels.clone()
        order: list[Any] = list(range(len(images)))
        for place, reason in reasons.items():
            self.dataset.left_to_cpu.add(reason, self.name(images[place].index))
            made = self.dataset.decoded(images[place])
            if isinstance(made, Skipped):
                order[place] = made
                continue
            pixels, label = made
            batch[place] = self._like(pixels, batch)
            labels[place] = label
        if any(isinstance(place, Skipped) for place in order):
            kept = torch.tensor(fill_skipped(order), device="cpu")
            batch = batch[kept.to(batch.device)].contiguous(memory_format=torch.channels_last)
            labels = labels[kept.to(labels.device)]
        return batch, labels

    def _like(self, pixels: Tensor, batch: Tensor) -> Tensor:
        if batch.dtype == torch.uint8:
            return pixels
        values = pixels.to(batch.device).float() / 255
        mean, std = (torch.tensor(numbers, device=batch.device).view(3, 1, 1) for numbers in (self.mean, self.std))
        return ((values - mean) / std).to(batch.dtype)
