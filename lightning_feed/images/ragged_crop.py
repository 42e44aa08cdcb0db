"""Crops many images of different sizes into one batch on a device."""

import importlib.util
import logging
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from lightning_feed.images.crop import Quality
from lightning_feed.images.image_dataset import FLIPPED, REGION, RESIZED, SIZE, WINDOW
from lightning_feed.machine import limits

logger = logging.getLogger(__name__)

Rows: TypeAlias = "npt.NDArray[np.float64]"
_FAST_SHRINK = 2
_ALIGNED_ROWS = 4
"""With a multiple of so many rows, each table of the kernel begins at a multiple of 16 bytes. Triton compiles a kernel
anew for pointers that are aligned otherwise, and the number of images differs from batch to batch."""


class Normalization(NamedTuple):
    """The values that are made of grey levels."""

    factors: Tensor
    """float32, shape (2, 3), on the device: scale and offset of the channels. A value is ``level * scale + offset``."""
    dtype: torch.dtype

    def __call__(self, levels: Tensor) -> Tensor:
        """Normalize uint8 pixels, whose last axis is that of the channels."""
        scale, offset = self.factors.unbind()
        # In float32, then cast: in half precision, the offset would be off by up to a grey level.
        return torch.addcmul(offset, levels.to(torch.float32), scale).to(self.dtype)


def crop_ragged(
    images: list[Tensor],
    plan: Tensor,
    quality: Quality,
    out: Tensor,
    positions: list[int],
    normalization: Normalization | None = None,
) -> None:
    """Cut a box out of each image, resize it (bilinear, as torchvision), flip it, and write it into a batch.

    On a CUDA device with Triton, one kernel does it for all images. Its results are within one grey level of
    torchvision's, which rounds between lines and columns. Elsewhere, torch resizes image by image.

    ``quality="fast"`` omits the antialiasing if an image shrinks by a factor of 2 or less. The CPU always omits it,
    because it decodes at a smaller scale first. Always omitting it here, from whole images, would be less accurate (26
    dB from ``"exact"`` instead of the CPU's 33 dB, measured on 60 photographs 6 to 11 times as large as the result).

    Args:
        images: whole images: uint8, shape (3, H, W), contiguous.
        plan: the crops of these images: rows of :attr:`EncodedBatch.plan`, on the host.
        quality: resize quality.
        out: the batch, shape (B, height, width, 3), contiguous: uint8, or ``normalization.dtype``.
        positions: positions of the images in the batch.
        normalization: what to make of grey levels; None to keep them.
    """
    rows = plan.numpy().astype(np.float64)
    if out.device.type == "cuda" and has_triton():
        _crop_by_kernel(images, rows, quality, out, positions, normalization)
        return
    for image, row, position in zip(images, rows, positions, strict=True):
        made = _crop_one(image, row, quality).permute(1, 2, 0)
        out[position] = made if normalization is None else normalization(made)


@lru_cache
def normalization_of(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Normalization:
    """Return the normalization ``(x / 255 - mean) / std`` of levels x. Cached, and ready on every stream."""
    means, stds = torch.tensor([mean, std], dtype=torch.float64, device="cpu")
    values = torch.stack([1 / (255 * stds), -means / stds]).float()
    if device.type in limits.STREAM_BACKENDS:
        # With set_sync_debug_mode("error"), torch raises at a blocking copy, but not when the host waits for an event.
        values = values.to(device, non_blocking=True)
        torch.get_device_module(device).current_stream(device).record_event().synchronize()
    return Normalization(values.to(device), dtype)


@lru_cache
def has_triton() -> bool:
    """Return True if the kernel can be used. Says once if it cannot."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning(
            "Triton is not installed, so images are cropped and resized one by one on the device, which takes longer. "
            "torch for Linux brings it:  pip install triton"
        )
    return found


def _crop_by_kernel(
    images: list[Tensor],
    rows: Rows,
    quality: Quality,
    out: Tensor,
    positions: list[int],
    normalization: Normalization | None,
) -> None:
    from lightning_feed.images import ragged_kernel as kernel

    count, height, width = len(images), *out.shape[1:3]
    padding = -count % _ALIGNED_ROWS
    boxes = np.concatenate([rows[:, SIZE], rows[:, REGION], np.array(positions)[:, None]], 1).astype(np.int32)
    filters = np.concatenate([*_filters(rows, quality)], 1).astype(np.float32)
    addresses = np.array([[image.data_ptr()] for image in images])
    # One copy from page-locked memory, so that the host does not wait for it.
    tables = [np.pad(table, ((0, padding), (0, 0))) for table in (addresses, boxes, filters)]
    packed = np.concatenate([table.view(np.uint8).ravel() for table in tables])
    host = torch.from_numpy(packed)
    if out.device.type != "cpu":
        host = host.pin_memory()
    table = host.to(out.device, non_blocking=True)
    starts, box_table, filter_table = table.split([part.nbytes for part in tables])
    grid = (count, -(-height // kernel.ROWS), -(-width // kernel.COLUMNS))
    kernel.crop_kernel[grid](
        starts.view(torch.int64),
        box_table.view(torch.int32),
        filter_table.view(torch.float32),
        filter_table.view(torch.float32) if normalization is None else normalization.factors,
        out,
        height,
        width,
        NORMALIZE=normalization is not None,
        ROWS=kernel.ROWS,
        COLUMNS=kernel.COLUMNS,
    )


def _filters(rows: Rows, quality: Quality) -> tuple[Rows, Rows]:
    """Return, for lines and for columns, the centre of the first output pixel in the box, the distance between centres,
    and the radius of the filter, all in pixels of the box; shape (B, 3) each."""
    region = rows[:, REGION]
    window = rows[:, WINDOW]
    scales = region[:, 2:] / rows[:, RESIZED]
    antialiased = np.ones(len(rows), bool) if quality != "fast" else scales.max(1) > _FAST_SHRINK
    radius = np.where(antialiased[:, None], np.maximum(scales, 1), 1)
    flipped = rows[:, FLIPPED] > 0
    across = np.where(flipped, window[:, 1] + window[:, 3] - 1, window[:, 1])
    step = np.where(flipped, -1, 1)
    lines = [scales[:, 0] * (window[:, 0] + 0.5) - 0.5, scales[:, 0], radius[:, 0]]
    columns = [scales[:, 1] * (across + 0.5) - 0.5, scales[:, 1] * step, radius[:, 1]]
    return np.stack(lines, 1), np.stack(columns, 1)


def _crop_one(image: Tensor, row: Any, quality: Quality) -> Tensor:
    """One crop by torch's own resize: uint8, shape (3, height, width)."""
    top, left, height, width = map(int, row[REGION])
    lines, columns = map(int, row[RESIZED])
    box = image[None, :, top : top + height, left : left + width].to(torch.float32)
    antialias = quality != "fast" or max(height / lines, width / columns) > _FAST_SHRINK
    made = functional.interpolate(box, (lines, columns), mode="bilinear", antialias=antialias)
    top, left, height, width = map(int, row[WINDOW])
    kept = made[0, :, top : top + height, left : left + width]
    levels = kept.add(0.5).floor_().clamp_(0, 255).to(torch.uint8)
    return levels.flip(-1) if row[FLIPPED] else levels
