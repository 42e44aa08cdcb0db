"""Headers of encoded images: the kind, and the size if it can be read without a library."""

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_feed.errors import DecodeError

Encoded: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"
"""A whole image file in memory; an array is one-dimensional."""

JPEG: Final = "JPEG"
PNG: Final = "PNG"
WEBP: Final = "WebP"
UNKNOWN: Final = "unknown"

# https://en.wikipedia.org/wiki/List_of_file_signatures
_SIGNATURES: Final = (
    (b"\xff\xd8\xff", JPEG),
    (b"\x89PNG\r\n\x1a\n", PNG),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
)
KINDS: Final = (JPEG, PNG, WEBP, "GIF", "BMP", "TIFF", UNKNOWN)
"""Results of :func:`kind_of`."""
FRAME_HEADERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..15 without DHT, JPG, DAC
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})  # TEM, RST0..7, SOI: markers without a length


class JpegHeader(NamedTuple):
    """Contents of a JPEG's frame header."""

    height: int
    width: int
    components: int
    """1 greyscale, 3 colour, 4 CMYK or YCCK."""


def as_array(data: Encoded) -> npt.NDArray[np.uint8]:
    """Return the bytes as a flat array, without a copy."""
    return np.frombuffer(data, dtype=np.uint8)


def kind_of(data: Encoded) -> str:
    """Return one of :data:`KINDS`, from the magic bytes."""
    start = bytes(data[:12])
    for signature, kind in _SIGNATURES:
        if start.startswith(signature):
            return kind
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return WEBP
    return UNKNOWN


def jpeg_segments(data: Encoded) -> Iterator[tuple[int, int, int]]:
    """Yield the consecutive segments of a JPEG: the marker, and the start and end of the body."""
    at = 2
    end = len(data)
    while at + 4 <= end and data[at] == 0xFF:
        marker = int(data[at + 1])
        if marker == 0xFF or marker in _ALONE:  # 0xFF: a fill byte before the marker
            at += 1 if marker == 0xFF else 2
            continue
        following = at + 2 + ((int(data[at + 2]) << 8) | int(data[at + 3]))
        yield marker, at + 4, following
        at = following


def jpeg_header(data: Encoded) -> JpegHeader:
    """Return height, width and components of a JPEG, found by walking its segments.

    Raises:
        DecodeError: if there is no frame header, or its image has no pixels.
    """
    if isinstance(data, memoryview) and data.format != "B":
        data = data.cast("B")
    for marker, body, _ in jpeg_segments(data):
        if marker in FRAME_HEADERS:
            if body + 6 > len(data):
                break
            height, width = ((int(data[p]) << 8) | int(data[p + 1]) for p in (body + 1, body + 3))
            if not height * width:
                raise DecodeError(f"a JPEG of {width} x {height} pixels: it is cut short or corrupt. Replace the file.")
            return JpegHeader(height, width, int(data[body + 5]))
    raise DecodeError(
        f"a JPEG of {len(data)} bytes without a frame header: it is cut short or corrupt. Replace the file."
    )


def ends_like_jpeg(data: Encoded) -> bool:
    """Return True if a JPEG ends with the end-of-image marker, ignoring padding, as every whole JPEG does.

    Also False for whole JPEGs with data appended: only a full decode could find out that they are whole.
    """
    return bytes(data[-16:]).rstrip(b"\x00\n\r").endswith(b"\xff\xd9")


def png_bit_depth(data: Encoded) -> int:
    """Return the bits per channel of a PNG; 0 if the header is truncated."""
    return int(data[24]) if len(data) > 24 else 0


_APP1: Final = 0xE1
_SCAN: Final = 0xDA
_ORIENTATION: Final = 0x0112
_EXIF: Final = b"Exif\0\0"


def clear_orientation(file: npt.NDArray[np.uint8]) -> None:
    """Set the Exif orientation of a JPEG to 1, in place, so that a decoder that applies it leaves pixels as stored.

    The tag is in the first directory of a TIFF header in an APP1 segment (CIPA DC-008, 4.5.4 and 4.6.4).
    """
    if kind_of(file) != JPEG:
        return
    for marker, start, end in jpeg_segments(file):
        if marker == _SCAN:
            return
        if marker == _APP1 and bytes(file[start : start + 6]) == _EXIF:
            _clear_orientation_in(file[start + 6 : end])


def _clear_orientation_in(tiff: npt.NDArray[np.uint8]) -> None:
    order: Literal["little", "big"] = "little" if bytes(tiff[:2]) == b"II" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(bytes(tiff[at : at + size]), order)

    directory = number(4, 4)
    count = min(number(directory, 2), len(tiff) // 12)
    for entry in range(count):
        at = directory + 2 + 12 * entry
        if number(at, 2) == _ORIENTATION and at + 10 <= len(tiff):
            tiff[at + 8 : at + 10] = np.frombuffer((1).to_bytes(2, order), np.uint8)
