"""Decodes only the region of a JPEG that a crop needs, with the TurboJPEG 3 C API through ctypes.

Functions, constants and structures follow ``turbojpeg.h`` of libjpeg-turbo 3, where each is documented
(https://github.com/libjpeg-turbo/libjpeg-turbo).
"""

import ctypes
import functools
import importlib.util
import threading
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from lightning_feed.errors import DecodeError, MissingExtraError
from lightning_feed.images.decoders import Decoder, Pixels, Region, refuse_bomb
from lightning_feed.images.header import JPEG, Encoded, as_array, ends_like_jpeg

MARGIN = 2
"""Pixels around a box that chroma upsampling reads: one neighbouring chroma sample, at half the resolution."""


class TurboRegionDecoder(Decoder):
    """Decodes JPEGs only. A warning of libjpeg-turbo (truncated or corrupt data) raises an error.

    A region needs entropy decoding of all rows down to its lower edge; all other work is for the region only. Rows
    below the region are not read, so corrupt data in them goes unnoticed. A file without an end marker is decoded
    whole, so truncation is noticed.
    """

    name = "turbo-region"
    kinds = frozenset({JPEG})
    decodes_regions = True

    def __init__(self) -> None:
        library_path()  # raises an error now, not in a worker, if the library is missing

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`~lightning_feed.images.decoders.Decoder`."""
        library, shape = _open(data)
        return library.decompress(data, shape[:2])

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """Decode the pixels of a region, see :class:`~lightning_feed.images.decoders.Decoder`.

        With ``cover``, the edges of the box are moved to the nearest whole pixels of the scale, by less than one pixel.
        Moved before decoding, the box is just another crop, with correct pixels. Rounding after decoding would shift
        the image and cost 10 dB.
        """
        library, shape = _open(data)
        region.check_inside(shape.height, shape.width)
        size = shape[:2]
        if shape.mcu_width == 0 or not ends_like_jpeg(data):
            pixels = library.decompress(data, size)  # reads all data, so it finds any truncation
            top, left, height, width = region
        else:
            eighths = 8 if cover is None else scale_for(region, size, cover)
            top, left, height, width = scaled_box(region, size, eighths)
            outer = _with_margin((top, left, height, width), shape, eighths)
            pixels = library.decompress(data, outer[2:], corner=outer[:2], eighths=eighths)
            top = top - outer[0]
            left = left - outer[1]
        return Region(top, left, height, width).cut(pixels)


def _open(data: Encoded) -> "tuple[TurboJpeg, JpegShape]":
    library = decompressor()
    shape = library.read_header(data)
    refuse_bomb(shape.height, shape.width)
    return library, shape


# --- the box to decode, and its scale -----------------------------------------------------------------------------


def scale_for(region: Region, size: tuple[int, int], cover: tuple[int, int]) -> int:
    """Return the smallest scale, in eighths, that makes a region at least ``cover`` (height, width) large."""
    for eighths in sorted(SCALES):
        step = 8 // eighths
        if min(region.height, region.width) < step:
            continue  # smaller than one pixel of that scale
        if region.height // step + 1 < cover[0] or region.width // step + 1 < cover[1]:
            continue  # avoids computing the exact box, which takes 5 us
        _, _, height, width = scaled_box(region, size, eighths)
        if height >= cover[0] and width >= cover[1]:
            return eighths
    return 8


def scaled_box(region: Region, size: tuple[int, int], eighths: int) -> tuple[int, int, int, int]:
    """Return the region's (top, left, height, width) at a scale, with edges on its nearest whole pixels."""
    step = 8 // eighths
    (top, bottom), (left, right) = (
        _edges(start, length, full, step) for start, length, full in zip(region[:2], region[2:], size, strict=True)
    )
    return top, left, bottom - top, right - left


def _edges(start: int, length: int, full: int, step: int) -> tuple[int, int]:
    """Return both edges of a box along one axis, in pixels of the scale 1 / step."""
    limit = -(-full // step)  # libjpeg-turbo rounds up
    end = start + length
    first = min((2 * start + step) // (2 * step), limit - 1)
    last = limit if end == full else (2 * end + step) // (2 * step)
    return first, min(max(last, first + 1), limit)


def _with_margin(box: tuple[int, ...], shape: "JpegShape", eighths: int) -> tuple[int, int, int, int]:
    """Return a box whose left edge is on an MCU boundary, with all pixels that ``box`` depends on."""
    step = 8 // eighths
    limit_height = -(-shape.height // step)
    limit_width = -(-shape.width // step)
    mcu_width = shape.mcu_width // step
    top, left, height, width = box
    outer_top = max(0, top - MARGIN)
    outer_left = max(0, left - MARGIN) // mcu_width * mcu_width
    bottom = min(limit_height, top + height + MARGIN)
    right = min(limit_width, left + width + MARGIN)
    return outer_top, outer_left, bottom - outer_top, right - outer_left


# --- the library --------------------------------------------------------------------------------------------------

_INIT_DECOMPRESS: Final = 1
# TJPARAM_*
_STOP_ON_WARNING = 0
_SUBSAMPLING = 4
_WIDTH = 5
_HEIGHT = 6
_PIXELS_RGB: Final = 0
_MCU_WIDTH: Final = (8, 16, 16, 8, 8, 32, 8)
"""Pixels per MCU by TJSAMP_*: 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1."""
SYSTEM_LIBRARY: Final = "libturbojpeg.so.0"
INSTALL: Final = "Install it:  pip install 'lightning-feed[images]'"


class _ScalingFactor(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


class JpegShape(NamedTuple):
    """Contents of a JPEG header."""

    height: int
    width: int
    mcu_width: int
    """Pixels per MCU; 0 for an unusual subsampling, with which only the whole image can be decoded."""


class TurboJpeg:
    """A decompressor. Not thread-safe: see :func:`decompressor`."""

    _handle: int | None = None

    def __init__(self, path: str) -> None:
        # Calls that only access a few fields keep the GIL: releasing it costs more than the calls.
        self._quick = ctypes.PyDLL(path)
        self._slow = ctypes.CDLL(path)
        if not hasattr(self._quick, "tj3Init"):
            raise MissingExtraError(
                f"{path} is libjpeg-turbo 2 or older, which cannot decode a part of a JPEG. Version 3 can. {INSTALL}"
            )
        _declare(self._quick)
        _declare(self._slow)
        self._destroy = self._quick.tj3Destroy
        self._handle = self._new_handle()

    def __del__(self) -> None:
        if self._handle is not None:
            self._destroy(self._handle)

    def _new_handle(self) -> int:
        handle: int | None = self._quick.tj3Init(_INIT_DECOMPRESS)
        if handle is None:
            raise MemoryError("libjpeg-turbo could not create a decompressor")
        self._quick.tj3Set(handle, _STOP_ON_WARNING, 1)
        return handle

    def read_header(self, data: Encoded) -> JpegShape:
        """Read the header.

        Raises:
            DecodeError: if the header is not a JPEG's, or is truncated.
        """
        if self._quick.tj3DecompressHeader(self._handle, _memory(data), len(data)):
            raise self._refusal(data)
        get = self._quick.tj3Get
        subsampling = get(self._handle, _SUBSAMPLING)
        mcu_width = _MCU_WIDTH[subsampling] if 0 <= subsampling < len(_MCU_WIDTH) else 0
        return JpegShape(get(self._handle, _HEIGHT), get(self._handle, _WIDTH), mcu_width)

    def decompress(
        self, data: Encoded, size: tuple[int, int], *, corner: tuple[int, int] | None = None, eighths: int = 8
    ) -> Pixels:
        """Decode the image whose header was just read, or a box of it. Only decoding the whole image checks all data.

        Args:
            data: the JPEG.
            size: (height, width) of the image, or of the box at the scale.
            corner: (top, left) of a box at the scale; left is a multiple of the MCU width at that scale.
            eighths: the scale, in eighths of the full size.

        Raises:
            DecodeError: if the data that is read is truncated or corrupt.
        """
        height, width = size
        box = _Region() if corner is None else _Region(corner[1], corner[0], width, height)  # zeros: TJUNCROPPED
        pixels = np.empty((height, width, 3), dtype=np.uint8)
        if (
            self._quick.tj3SetScalingFactor(self._handle, _ScalingFactor(*SCALES[eighths]))
            or self._quick.tj3SetCroppingRegion(self._handle, box)
            or self._slow.tj3Decompress8(
                self._handle, _memory(data), len(data), pixels.ctypes.data, 3 * width, _PIXELS_RGB
            )
        ):
            raise self._refusal(data)
        return pixels

    def _refusal(self, data: Encoded) -> DecodeError:
        words = self._quick.tj3GetErrorStr(self._handle).decode(errors="replace")
        # After a truncated header, version 3.0 beta (in the wheel) keeps its position and would read freed memory next.
        # So a new handle is used after any error.
        self._destroy(self._handle)
        self._handle = self._new_handle()
        return DecodeError(f"libjpeg-turbo cannot decode these {len(data)} bytes: {words}")


SCALES: Final = {8: (1, 1), 4: (1, 2), 2: (1, 4), 1: (1, 8)}
"""Scaling factors by eighths. Other factors have no SIMD code and are slower than full size."""


class _Thread(threading.local):
    decompressor: TurboJpeg | None = None


_thread = _Thread()


def decompressor() -> TurboJpeg:
    """Return this thread's decompressor, made on first use.

    Raises:
        MissingExtraError: if libjpeg-turbo 3 is not installed.
    """
    if _thread.decompressor is None:
        _thread.decompressor = TurboJpeg(library_path())
    return _thread.decompressor


@functools.lru_cache(maxsize=1)
def library_path() -> str:
    """Return the path of libjpeg-turbo 3: the system's, which gets security updates; else the turbojpeg wheel's.

    Raises:
        MissingExtraError: if there is none, or only an older version.
    """
    try:
        if hasattr(ctypes.PyDLL(SYSTEM_LIBRARY), "tj3Init"):
            return SYSTEM_LIBRARY
        older = f" {SYSTEM_LIBRARY} of the system is older than 3."
    except OSError:
        older = ""
    spec = importlib.util.find_spec("turbojpeg")
    if spec is not None and spec.origin is not None:
        for path in sorted((Path(spec.origin).parent / "turbojpeg.libs").glob("libturbojpeg*")):
            return str(path)
    raise MissingExtraError(
        f'decoder="turbo-region" needs libturbojpeg 3, from the package turbojpeg or the system.{older} {INSTALL}'
    )


def _memory(data: Encoded) -> bytes | int:
    """Return the ctypes argument for ``const unsigned char *``, without a copy."""
    if isinstance(data, bytes):
        return data
    return as_array(data).ctypes.data if len(data) else 0


def _declare(library: ctypes.CDLL) -> None:
    """Declare the argument types of turbojpeg.h, without which ctypes would truncate pointers to 32 bits."""
    handle = ctypes.c_void_p
    integer = ctypes.c_int
    size = ctypes.c_size_t
    for name, result, arguments in (
        ("tj3Init", handle, [integer]),
        ("tj3Destroy", None, [handle]),
        ("tj3Set", integer, [handle, integer, integer]),
        ("tj3Get", integer, [handle, integer]),
        ("tj3GetErrorStr", ctypes.c_char_p, [handle]),
        ("tj3DecompressHeader", integer, [handle, handle, size]),
        ("tj3SetScalingFactor", integer, [handle, _ScalingFactor]),
        ("tj3SetCroppingRegion", integer, [handle, _Region]),
        ("tj3Decompress8", integer, [handle, handle, size, handle, integer, integer]),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
