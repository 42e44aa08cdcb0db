"""Decodes batches on a CUDA device: JPEGs in bulk with nvJPEG, other images on the CPU."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from lightning_feed.errors import LoaderError
from lightning_feed.images.image_dataset import (
    INDEX,
    SIZE,
    EncodedBatch,
    ImageDataset,
    collate_images,
    decode_rest,
)
from lightning_feed.images.nvjpeg import DecodeJpegs, nvjpeg, small_jpeg
from lightning_feed.images.ragged_crop import Normalization, crop_ragged
from lightning_feed.load.stage import traced

MOST_BYTES: Final = 256 * 2**20
"""Limit for decoded full-size pixels. Larger batches are split: otherwise a batch of 12-megapixel photographs would
take 10 GB."""
_NO_MEMORY: Final = re.compile(r"(Failed to [\w ]+|failed): 5\b")
"""The messages of torchvision and torchcodec for NVJPEG_STATUS_ALLOCATOR_FAILURE (docs.nvidia.com/cuda/nvjpeg, return
codes)."""
_FAILED: Final = "nvJPEG failed on the JPEG"


def decode_on_cpu(batch: EncodedBatch, dataset: ImageDataset) -> Any:
    """Return [images, labels] as ``backend="torch"`` does: uint8, shape (B, 3, H, W), channels last; and int64 (B,).

    Raises:
        DatasetError: if an image cannot be decoded, and ``on_error`` does not handle it. Names the image.
    """
    return collate_images([dataset.decoded(image) for image in batch.images()])


def decode_batch(
    batch: EncodedBatch,
    dataset: ImageDataset,
    device: torch.device,
    *,
    normalization: Normalization | None = None,
    decode: DecodeJpegs | None = None,
) -> list[Tensor]:
    """Decode to [images, labels] on a device: shape (B, 3, H, W), channels last; and int64, shape (B,).

    All work goes to the current stream, and the host waits only for nvJPEG. Images on which nvJPEG fails are decoded by
    the CPU in this process, and counted in ``dataset.cpu_fallback``.

    Args:
        batch: the encoded images.
        dataset: the dataset of the batch.
        device: the CUDA device.
        normalization: what to make of grey levels. None for uint8.
        decode: function to use instead of nvJPEG; None for nvJPEG.

    Raises:
        DatasetError: if an image cannot be decoded, and ``on_error`` does not handle it. Names the image.
        MissingExtraError: if no library with nvJPEG is installed.
        LoaderError: if nvJPEG decodes no file any more.
    """
    batch_decoder = _BatchDecoder(batch, dataset, device, normalization, decode or nvjpeg(device))
    return batch_decoder.run()


class _BatchDecoder:
    """Decodes one batch. See :func:`decode_batch`."""

    def __init__(
        self,
        batch: EncodedBatch,
        dataset: ImageDataset,
        device: torch.device,
        normalization: Normalization | None,
        decode: DecodeJpegs,
    ) -> None:
        self._batch = batch
        self._dataset = dataset
        self._normalization = normalization
        self._decode = decode
        self._indices: list[int] = batch.plan[:, INDEX].tolist()
        dtype = torch.uint8 if normalization is None else normalization.dtype
        # Filled image by image, channels last: no stacking or transposing afterwards.
        self._out = torch.empty((len(batch), *batch.window, 3), dtype=dtype, device=device)

    def run(self) -> list[Tensor]:
        self._put_decoded()
        for_the_cpu = self._decode_on_device()
        images = self._out.permute(0, 3, 1, 2)
        labels = self._batch.labels
        if for_the_cpu:
            convert = None if self._normalization is None else partial(_as_planes, self._normalization)
            labels = decode_rest(for_the_cpu, self._batch.images(), self._dataset, images, convert)
        return [images, labels.to(images.device, non_blocking=True)]

    def _put_decoded(self) -> None:
        """Copy the images that the workers have decoded."""
        if not len(self._batch.decoded):
            return
        device = self._out.device
        pixels = self._batch.pixels.to(device, non_blocking=True)
        values = pixels if self._normalization is None else self._normalization(pixels)
        self._out.index_copy_(0, self._batch.decoded.to(device, non_blocking=True), values)

    def _decode_on_device(self) -> list[int]:
        """Decode the files. Return the positions of those that nvJPEG cannot decode."""
        lengths = self._batch.offsets.diff()
        files = self._batch.files.split(lengths.tolist())
        positions: list[int] = lengths.nonzero().flatten().tolist()
        fallback = self._dataset.cpu_fallback
        for_the_cpu = [position for position in positions if self._indices[position] in fallback.known]
        for position in for_the_cpu:
            index = self._indices[position]
            fallback.add(fallback.known[index], self._dataset.source.name(index))
        refused = set(for_the_cpu)
        for part in self._parts([position for position in positions if position not in refused]):
            for_the_cpu += self._decode_part(part, [files[position] for position in part])
        return sorted(for_the_cpu)

    def _parts(self, positions: list[int]) -> Iterator[list[int]]:
        """Split positions in order into parts of at most ``MOST_BYTES`` of pixels, with at least one image each."""
        nbytes = (3 * self._batch.plan[:, SIZE].prod(1)).tolist()
        part: list[int] = []
        size = 0
        for position in positions:
            if part and size + nbytes[position] > MOST_BYTES:
                yield part
                part = []
                size = 0
            part.append(position)
            size += nbytes[position]
        if part:
            yield part

    def _decode_part(self, part: list[int], files: list[Tensor]) -> list[int]:
        """Decode some files, and crop their images. Return the positions of those that nvJPEG cannot decode.

        A separate function, so that its return frees the full-size images.
        """
        decoded = self._decode_many(part, files)
        whole = {position: image for position, image in zip(part, decoded, strict=True) if image is not None}
        if whole:
            crops = self._batch.plan[[*whole]]
            quality = self._dataset.crop_recipe.quality
            crop_ragged([*whole.values()], crops, quality, self._out, [*whole], self._normalization)
        return [position for position in part if position not in whole]

    def _decode_many(self, part: list[int], files: list[Tensor]) -> list[Tensor | None]:
        """Decode files. In the result, None stands for an image on which nvJPEG fails; such an image is recorded in
        ``cpu_fallback.known``."""
        with traced("decode"):
            images = self._decode_all_or_each(files)
        fallback = self._dataset.cpu_fallback
        sizes = self._batch.plan[part, SIZE].tolist()
        for place, (position, size, image) in enumerate(zip(part, sizes, images, strict=True)):
            if image is not None and [*image.shape] == [3, *size]:
                continue
            images[place] = None
            index = self._indices[position]
            fallback.known[index] = _FAILED
            fallback.add(_FAILED, self._dataset.source.name(index))
        return images

    def _decode_all_or_each(self, files: list[Tensor]) -> list[Tensor | None]:
        """Decode files in one call; if it fails, each alone, since the error does not say which file failed."""
        images, error = _try(files, self._decode)
        if error is None:
            return images
        if len(files) > 1:
            images = [_try([file], self._decode)[0][0] for file in files]
        if all(image is None for image in images):
            self._check_device()
        return images

    def _check_device(self) -> None:
        """Decode a JPEG that is known to be good. If that fails, too, the files are not at fault: without an error, the
        CPU would decode all images of the run here."""
        _, error = _try([small_jpeg()], self._decode)
        if error is not None:
            raise LoaderError(
                f"The device decodes no JPEG, not even one that is known to be good: {error}. Check the driver and the "
                'CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
            ) from error


def _as_planes(normalization: Normalization, image: Tensor) -> Tensor:
    """Normalize one image of shape (3, height, width)."""
    return normalization(image.permute(1, 2, 0)).permute(2, 0, 1)


def _try(files: list[Tensor], decode: DecodeJpegs) -> tuple[list[Tensor | None], RuntimeError | None]:
    """Decode all files in one call. If the call fails, return None for each file, and the error.

    The error does not name the file that caused it. Errors that no file can have caused, such as too little memory, are
    raised.
    """
    try:
        return [*decode(files)], None
    except RuntimeError as error:
        text = str(error)
        # Device errors, which torchvision also raises as plain RuntimeErrors.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "CUDA error" in text:
            raise
        if _NO_MEMORY.search(text):
            raise torch.OutOfMemoryError(
                "CUDA out of memory: nvJPEG allocates memory outside of torch, and there was not enough for "
                f"{len(files)} JPEGs ({text}). Use a smaller batch_size, or limit torch: "
                "torch.cuda.set_per_process_memory_fraction."
            ) from error
        return [None] * len(files), error
