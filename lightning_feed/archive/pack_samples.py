"""What is packed: each sample of a source as bytes, kept, made smaller, or decoded. Runs in worker processes."""

import io
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from lightning_feed.archive.folder_source import FolderSource
from lightning_feed.archive.pack_manifest import Kind
from lightning_feed.archive.pack_sample import to_bytes
from lightning_feed.archive.source import Encoded, SampleSource
from lightning_feed.errors import DatasetError, DecodeError

# What Pillow's readers are known to raise on corrupt files; as in decode/pillow_decoder.py.
_CORRUPT = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)
QUALITY = 95
"""Of images that are resized, where none was asked for."""
SHAPE_BYTES = 8
"""Before decoded pixels: height and width, 4 bytes each, little endian."""


@dataclass(frozen=True)
class Shrink:
    """How images are changed once, while they are packed."""

    short_side: int | None = None
    """Images with a longer shorter side are resized to this, in pixels; smaller ones stay as they are."""
    quality: int | None = None
    """Of JPEGs that are written anew, 1 to 100. Without a short side, all images are written anew."""
    decoded: bool = False
    """Whether pixels are stored, uint8 (H, W, 3), instead of a file."""


class Payload(NamedTuple):
    """One sample as it is packed."""

    data: bytes | None
    """None where it could not be read."""
    checksum: int
    """CRC-32."""
    problem: str
    """Why it could not be read."""
    changed_ns: int
    """When its file had last changed before it was read; 0 where it is of no file."""


class Payloads(Dataset[Payload]):
    """A map-style dataset of payloads.

    Args:
        source: labelled files, or any map-style dataset.
        kind: what is packed.
        shrink: for files and decoded pixels.
    """

    def __init__(self, source: Any, kind: Kind, shrink: Shrink) -> None:
        self.source, self.kind, self.shrink = source, kind, shrink

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Payload:
        changed_ns = self.changed_ns(index)  # before it is read: what is written meanwhile changes it
        try:
            payload = self._payload(index)
        except DatasetError as error:
            return Payload(None, 0, str(error), changed_ns)
        return Payload(payload, zlib.crc32(payload), "", changed_ns)

    def changed_ns(self, index: int) -> int:
        """When the file of a sample last changed, in ns since 1970; 0 where there is none.

        That of the inode: a copy that keeps the modification time changes it.
        """
        if not isinstance(self.source, FolderSource):
            return 0
        try:
            return os.stat(self.source.name(index)).st_ctime_ns  # noqa: PTH116 - a million times
        except OSError:
            return 0

    def _payload(self, index: int) -> bytes:
        if self.kind == "samples":
            return to_bytes(self.source[index])
        source: SampleSource = self.source
        data = source.read(index)
        if self.kind == "files" and self.shrink.short_side is None and self.shrink.quality is None:
            return bytes(data)
        try:
            return _decoded(data, self.shrink) if self.kind == "decoded" else _encoded(data, self.shrink)
        except _CORRUPT as error:
            # Pillow would show the object that it read from.
            why = "it is of no format that Pillow knows" if isinstance(error, UnidentifiedImageError) else error
            raise DecodeError(
                f"{source.name(index)} (sample {index}) is not an image that can be read: {why}."
            ) from error


def pixels_of(payload: bytes | memoryview) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Decoded pixels from their payload: uint8, shape (H, W, 3), read-only."""
    height, width = np.frombuffer(payload, "<u4", count=2)
    return np.frombuffer(payload, np.uint8, offset=SHAPE_BYTES).reshape(int(height), int(width), 3)


def _decoded(data: Encoded, shrink: Shrink) -> bytes:
    with Image.open(io.BytesIO(bytes(data))) as image:
        pixels = np.asarray(_resized(image.convert("RGB"), shrink.short_side))
    return np.array(pixels.shape[:2], "<u4").tobytes() + pixels.tobytes()


def _encoded(data: Encoded, shrink: Shrink) -> bytes:
    with Image.open(io.BytesIO(bytes(data))) as image:
        image.load()  # whether or not it is resized: a file that is cut short is found now
        if shrink.short_side is not None and min(image.size) <= shrink.short_side:
            return bytes(data)  # as good as new ones would be, and of the size that was asked for
        file = io.BytesIO()
        quality = QUALITY if shrink.quality is None else shrink.quality
        # The colours at full resolution: they have been halved once, and would be so again.
        _resized(image.convert("RGB"), shrink.short_side).save(file, "JPEG", quality=quality, subsampling=0)
    return file.getvalue()


def _resized(image: Image.Image, short_side: int | None) -> Image.Image:
    short = min(image.size)
    if short_side is None or short <= short_side:
        return image
    size = tuple(max(1, round(side * short_side / short)) for side in image.size)
    return image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
