"""The reference: what torchvision's ImageFolder gives, for every kind of image that Pillow reads."""

import io
import struct

import numpy as np
from PIL import Image, UnidentifiedImageError

from lightning_feed.decode.decoder import Encoded, Pixels
from lightning_feed.errors import DecodeError

# What Pillow's readers are known to raise on corrupt files, see
# https://pillow.readthedocs.io/en/stable/handbook/image-file-formats.html and its fuzzers.
_CORRUPT = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)


class PillowDecoder:
    """``Image.open(...).convert("RGB")``: all decoders are held to these pixels."""

    name = "pillow"

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`~lightning_feed.decode.decoder.Decoder`."""
        try:
            with Image.open(io.BytesIO(bytes(data))) as image:
                return np.array(image.convert("RGB"), dtype=np.uint8)
        except _CORRUPT as error:
            raise _refusal(data, error) from error

    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) from the header."""
        try:
            with Image.open(io.BytesIO(bytes(data))) as image:
                width, height = image.size
        except _CORRUPT as error:
            raise _refusal(data, error) from error
        return height, width


def refuse_bomb(height: int, width: int) -> None:
    """Refuse an image as large as Pillow refuses: a few bytes of a broken header can ask for all memory.

    Raises:
        DecodeError: for more than twice ``PIL.Image.MAX_IMAGE_PIXELS`` pixels, unless that is None.
    """
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > 2 * limit:
        raise DecodeError(
            f"{width} x {height} pixels are more than Pillow's limit of {2 * limit}: a corrupt header, or an attack. "
            "If the image is meant so, raise PIL.Image.MAX_IMAGE_PIXELS."
        )


def _refusal(data: Encoded, error: Exception) -> DecodeError:
    if len(data) == 0:
        return DecodeError("0 bytes: the file is empty. Replace it, or leave it out.")
    start = bytes(data[:8])
    if isinstance(error, UnidentifiedImageError):
        return DecodeError(
            f"{len(data)} bytes that begin with {start!r} are no image that Pillow knows. "
            "Replace the file, or leave it out."
        )
    return DecodeError(f"Pillow cannot decode these {len(data)} bytes: {error}. Replace the file, or leave it out.")
