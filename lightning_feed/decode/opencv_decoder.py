"""OpenCV's readers: JPEG, PNG and WebP."""

import functools
from typing import Any

import numpy as np

from lightning_feed.decode.decoder import Encoded, Pixels
from lightning_feed.decode.header import (
    JPEG,
    PNG,
    WEBP,
    as_array,
    jpeg_header,
    kind_of,
    png_bit_depth,
    png_size,
)
from lightning_feed.decode.pillow_decoder import PillowDecoder, refuse_bomb
from lightning_feed.errors import DecodeError, MissingExtraError
from lightning_feed.extras import require


class OpenCVDecoder:
    """``cv2.imdecode`` with the EXIF rotation left alone.

    It refuses what it would give other pixels for than Pillow, or none: PNGs of 16 bits, GIF, TIFF, BMP.
    """

    name = "opencv"
    kinds = frozenset({JPEG, PNG, WEBP})

    def __init__(self) -> None:
        self._cv2, self._flags = open_cv2()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a module cannot be pickled; it is imported where it arrives

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._cv2, self._flags = open_cv2()

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`~lightning_feed.decode.decoder.Decoder`."""
        kind = kind_of(data)
        if kind not in self.kinds:
            raise DecodeError(f'decoder="opencv" is not used for images of the kind {kind}: they go to Pillow.')
        if kind == PNG and png_bit_depth(data) == 16:
            raise DecodeError('decoder="opencv" scales PNGs of 16 bits otherwise than Pillow: they go to Pillow.')
        if kind != WEBP:  # at most 16383 x 16383 pixels
            refuse_bomb(*(jpeg_header(data)[:2] if kind == JPEG else png_size(data)))
        try:
            pixels = self._cv2.imdecode(as_array(data), self._flags)
        except self._cv2.error as error:
            raise DecodeError(f"OpenCV cannot decode these {len(data)} bytes: {error}") from error
        if pixels is None:
            raise DecodeError(f"OpenCV cannot decode this {kind} of {len(data)} bytes: it is cut short or corrupt.")
        return np.ascontiguousarray(pixels)

    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) from the header."""
        return header_size(data)


def header_size(data: Encoded) -> tuple[int, int]:
    """(height, width) for decoders without a way to read only the header.

    Raises:
        DecodeError: when the header is not that of an image.
    """
    if kind_of(data) == JPEG:
        return jpeg_header(data)[:2]
    return PillowDecoder().size(data)


@functools.cache
def open_cv2() -> tuple[Any, int]:
    """The module, its own threads off, and the flags that read an image as torchvision's ImageFolder does.

    Raises:
        MissingExtraError: when it is not installed, or too old: before 4.11 it gives grey where a JPEG is cut.
    """
    cv2 = require("cv2", extra="images", why="decoding or resizing with OpenCV")
    if not hasattr(cv2, "IMREAD_COLOR_RGB"):
        raise MissingExtraError(
            f"decoding or resizing with OpenCV needs 4.11 or newer, and {cv2.__version__} is installed. "
            "Install it:  pip install 'lightning-feed[images]'"
        )
    cv2.setNumThreads(0)  # the loader's workers are the threads; a pool inside each would fight them
    return cv2, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
