"""Encoded batches to pixels on the device that they were sent to: JPEGs many at once there, the rest by the CPU."""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import resize_image

from lightning_feed.decode.pillow_decoder import refuse_bomb
from lightning_feed.errors import DecodeError, LoaderError
from lightning_feed.load.bad_samples import Skipped, fill_skipped
from lightning_feed.load.cut import Cut, Quality
from lightning_feed.load.encoded_batch import EncodedBatch, EncodedImage, EncodedImageDataset, decode_on_cpu
from lightning_feed.load.trace import traced
from lightning_feed.transfer.nvjpeg import not_for_nvjpeg, nvjpeg

DecodeJpegs: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""Whole JPEGs (uint8, (bytes,), on the host) to uint8 (3, H, W) on the device; RuntimeError when any of them fails."""
MOST_BYTES: Final = 256 * 2**20
"""Of decoded pixels at a time, at full size: larger batches are decoded in parts, so that a batch of photographs of 12
megapixels does not take 10 GB."""
_NO_MEMORY: Final = re.compile(r"Failed to [\w ]+: 5\b")
"""How torchvision passes on nvJPEG's NVJPEG_STATUS_ALLOCATOR_FAILURE (docs.nvidia.com/cuda/nvjpeg, return codes)."""
_FAILED: Final = "nvJPEG failed on the JPEG"
_MOST_SHRINK: Final = 64
"""The antialiasing kernel of a CUDA device keeps its weights in shared memory, which is full at about 90."""


def decode_batch(batch: EncodedBatch, dataset: EncodedImageDataset, decode: DecodeJpegs | None = None) -> Any:
    """[images, labels] on ``batch.device``: uint8 of shape (B, 3, H, W), channels last, and int64 of shape (B,).

    On a CUDA device all work goes to the current stream, and the host waits for nvJPEG alone. What nvJPEG cannot do is
    decoded by the CPU, here, and counted in ``dataset.left_to_cpu``. ``quality="near"`` gives what ``"exact"`` does:
    there are no smaller scales to decode at. Elsewhere it is the batch of ``backend="torch"``.

    Args:
        batch: what to decode.
        dataset: where it is from.
        decode: in place of nvJPEG.

    Raises:
        DatasetError: when an image cannot be decoded, with its name, and ``on_error`` does not deal with it.
        MissingExtraError: this torchvision has no nvJPEG.
        LoaderError: nvJPEG fails on whatever it is given.
    """
    if decode is None:
        if batch.device.type != "cuda":
            return decode_on_cpu(batch, dataset)
        decode = nvjpeg(batch.device)
    images = batch.images()
    _, _, height, width = images[0].cut.window
    # Filled image by image, in channels last: no stacking, and no transposing after it.
    pixels = torch.empty((len(images), height, width, 3), dtype=torch.uint8, device=batch.device)
    left = _decode_on_device(images, dataset, decode, pixels)
    labels = batch.labels
    if left:
        labels = _decode_the_rest(left, images, dataset, pixels, labels)
    return [pixels.permute(0, 3, 1, 2), labels]


def _decode_on_device(
    images: list[EncodedImage], dataset: EncodedImageDataset, decode: DecodeJpegs, pixels: Tensor
) -> list[int]:
    """Fill the places of ``pixels`` whose images the device can decode; the others are returned."""
    left: list[int] = []
    there: list[int] = []
    for place, image in enumerate(images):
        reason = dataset.left_to_cpu.known.get(image.index) or _refusal(image)
        if reason is None:
            there.append(place)
        else:
            left.append(place)
            dataset.left_to_cpu.add(reason, dataset.source.name(image.index))
    for part in _parts(there, images):
        left += _decode_part(part, images, dataset, decode, pixels)
    return sorted(left)


def _decode_part(
    part: list[int], images: list[EncodedImage], dataset: EncodedImageDataset, decode: DecodeJpegs, pixels: Tensor
) -> list[int]:
    """The same for some of the places. A function of its own, whose end lets the whole images go."""
    left: list[int] = []
    for place, whole in zip(part, _decode_many([images[place] for place in part], dataset, decode), strict=True):
        if whole is None:
            left.append(place)
        else:
            cut = cut_out_on_device(whole, images[place].cut, dataset.recipe.quality)
            pixels[place].copy_(cut.permute(1, 2, 0))
    return left


def _decode_many(images: list[EncodedImage], dataset: EncodedImageDataset, decode: DecodeJpegs) -> list[Tensor | None]:
    """The pixels of each image; None for one that the device fails on, which is then known."""
    files = [torch.from_numpy(image.data) for image in images]
    with traced("decode"):
        found, error = _try(files, decode)
        if error is not None and len(files) > 1:  # which of them it was, is not said
            alone = [_try([file], decode) for file in files]
            found = [pixels for (pixels,), _ in alone]
    memory = dataset.left_to_cpu
    for place, (image, pixels) in enumerate(zip(images, found, strict=True)):
        if pixels is not None and pixels.shape[1:] == image.size:
            memory.worked = True
            continue
        found[place] = None
        memory.known[image.index] = _FAILED
        memory.add(_FAILED, dataset.source.name(image.index))
    if not memory.worked and len(images) > 1:
        # Not the images' fault, then: to go on would be to decode all of them here, on the CPU.
        raise LoaderError(
            f"The device decoded none of the first {len(images)} JPEGs that it was given: {error}. Look at the driver "
            'and at the CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
        ) from error
    return found


def _try(files: list[Tensor], decode: DecodeJpegs) -> tuple[list[Tensor | None], RuntimeError | None]:
    """The pixels of all files; None for each and the error, if one of the files can be the cause of it."""
    try:
        return [*decode(files)], None
    except RuntimeError as error:
        text = str(error)
        # Those of the device, which torchvision gives as plain RuntimeErrors too.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "CUDA error" in text:
            raise
        if _NO_MEMORY.search(text):
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: nvJPEG, which takes memory beside torch's, found none for {len(files)} JPEGs "
                f"({text}). Use a smaller batch_size, or leave torch less: torch.cuda.set_per_process_memory_fraction."
            ) from error
        return [None] * len(files), error


def _decode_the_rest(
    left: list[int], images: list[EncodedImage], dataset: EncodedImageDataset, pixels: Tensor, labels: Tensor
) -> Tensor:
    """Fill the places that are left with what the CPU decodes, and what ``on_error`` puts in place of the others."""
    on_device = pixels.device.type != "cpu"
    true_labels = [image.label for image in images]
    places: list[Any] = list(range(len(images)))
    # Pinned: the copies then wait for nothing, and the allocator keeps this memory until they are done.
    decoded = torch.empty((len(left), *pixels.shape[1:]), dtype=torch.uint8, device="cpu", pin_memory=on_device)
    for row, place in zip(decoded, left, strict=True):
        sample = dataset.decoded(images[place])
        if isinstance(sample, Skipped):
            places[place] = sample
            continue
        image, true_labels[place] = sample
        row.copy_(image.permute(1, 2, 0))
        pixels[place].copy_(row, non_blocking=True)
    for place, other in enumerate(fill_skipped(places)):
        if other != place:
            pixels[place].copy_(pixels[other])
            true_labels[place] = images[other].label if other not in left else true_labels[other]
    if true_labels == [image.label for image in images]:
        return labels
    changed = torch.tensor(true_labels, device="cpu", pin_memory=on_device)
    return changed.to(labels.device, non_blocking=True)


def cut_out_on_device(pixels: Tensor, cut: Cut, quality: Quality) -> Tensor:
    """The pixels of a cut out of a whole image, by torchvision's resize of uint8: within a grey level of the CPU's.

    ``"fast"`` leaves the antialiasing out where an image shrinks to no less than half. The CPU does so throughout, at
    the smaller scale that it decodes at; out of a whole image that would be further off (measured on 60 photographs, 6
    to 11 times as large as the result: 26 dB from ``"exact"``, and the CPU's 33).

    Args:
        pixels: uint8, shape (3, H, W): the whole image.
        cut: what to take of it.
        quality: of the resize.

    Returns:
        uint8, shape (3, height, width) of the cut's window.
    """
    top, left, height, width = cut.region
    box = pixels[:, top : top + height, left : left + width]
    antialias = quality != "fast" or _shrink(cut) > 2
    image: Tensor = resize_image(box, list(cut.resized), antialias=antialias)
    top, left, height, width = cut.window
    kept = image[:, top : top + height, left : left + width]
    return kept.flip(-1) if cut.flipped else kept


def _refusal(image: EncodedImage) -> str | None:
    try:
        refuse_bomb(*image.size)
    except DecodeError:
        return "the image is too large, or its header is broken"
    if _shrink(image.cut) > _MOST_SHRINK:
        return f"the image is to shrink to less than 1/{_MOST_SHRINK}"
    return not_for_nvjpeg(image.data)


def _shrink(cut: Cut) -> float:
    return max(cut.region.height / cut.resized[0], cut.region.width / cut.resized[1])


def _parts(places: list[int], images: list[EncodedImage]) -> Iterator[list[int]]:
    """The places in turn, as many at a time as make ``MOST_BYTES`` of pixels; at least one."""
    part: list[int] = []
    size = 0
    for place in places:
        height, width = images[place].size
        more = 3 * height * width
        if part and size + more > MOST_BYTES:
            yield part
            part, size = [], 0
        part.append(place)
        size += more
    if part:
        yield part
