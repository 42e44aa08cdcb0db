"""Decoders from encoded images to RGB pixels: Pillow (the reference), OpenCV, torchvision and simplejpeg."""

import functools
import io
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_feed.errors import DecodeError, MissingExtraError
from lightning_feed.extras import require
from lightning_feed.images.header import JPEG, KINDS, PNG, WEBP, Encoded, as_array, jpeg_header, kind_of, png_bit_depth

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""uint8, shape (H, W, 3), RGB, C-contiguous, owned by the caller."""


class Region(NamedTuple):
    """A box in the full-size image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def check_inside(self, height: int, width: int) -> None:
        """Raise if the box is empty or not inside an image of that size.

        Raises:
            ValueError: the message contains the box and the image size.
        """
        bottom = self.top + self.height
        right = self.left + self.width
        if self.top < 0 or self.left < 0 or self.height < 1 or self.width < 1 or bottom > height or right > width:
            raise ValueError(f"{self} is not inside an image of {height} x {width} pixels: clip the box to the image.")

    def cut(self, pixels: Pixels) -> Pixels:
        """Return a view of the pixels inside the box."""
        part: Pixels = pixels[self.top : self.top + self.height, self.left : self.left + self.width]
        return part


class Decoder:
    """Decodes one image at a time. Can be called from several threads, and pickled to workers.

    All decoders follow torchvision's ``ImageFolder``: palettes, greyscale and CMYK become RGB as in Pillow's
    ``convert("RGB")``, and EXIF rotation is not applied.
    """

    name: str
    kinds = frozenset(KINDS)
    """Kinds of image that the decoder is used for."""
    decodes_regions = False
    """True if the decoder can decode only the region of a crop."""

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image.

        Raises:
            DecodeError: if the bytes are truncated, or not an image of a kind that this decoder reads.
        """
        raise NotImplementedError

    def size(self, data: Encoded) -> tuple[int, int]:
        """Return (height, width), read only from the header.

        Raises:
            DecodeError: as in :meth:`decode`.
        """
        if kind_of(data) == JPEG:
            return jpeg_header(data)[:2]
        return PillowDecoder().size(data)

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """Decode the pixels of ``region``. Without :attr:`decodes_regions`, decodes the whole image first.

        Args:
            data: the encoded image.
            region: the box to decode, inside the image.
            cover: None for exactly the pixels of :meth:`decode`, at full size. With (height, width), the decoder may
                use the smallest scale that makes the result at least that large. The edges of the box are then moved to
                whole pixels of that scale, by less than one pixel, which makes a slightly different crop but does not
                shift the image inside its box.

        Returns:
            Pixels of the region. Without ``cover``, at full size. With ``cover``, no larger than at full size and, if
            the region is large enough, at least as large as ``cover``. Rows may have gaps in memory, because a
            decoder's margin is cut off without a copy.

        Raises:
            DecodeError: as in :meth:`decode`, for the data that is read.
            ValueError: if the region is not inside the image.
        """
        pixels = self.decode(data)
        region.check_inside(*pixels.shape[:2])
        return region.cut(pixels)


# --- Pillow -----------------------------------------------------------------------------------------------------------

# Exceptions of Pillow's readers on corrupt files, see
# https://pillow.readthedocs.io/en/stable/handbook/image-file-formats.html and its fuzzers.
_CORRUPT = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)


class PillowDecoder(Decoder):
    """``Image.open(...).convert("RGB")``: the reference for the pixels of all decoders."""

    name = "pillow"

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`~lightning_feed.images.decoders.Decoder`."""
        try:
            with Image.open(io.BytesIO(bytes(data))) as image:
                return np.array(image.convert("RGB"), dtype=np.uint8)
        except _CORRUPT as error:
            raise _pillow_refusal(data, error) from error

    def size(self, data: Encoded) -> tuple[int, int]:
        """Return (height, width) from the header."""
        try:
            with Image.open(io.BytesIO(bytes(data))) as image:
                width, height = image.size
        except _CORRUPT as error:
            raise _pillow_refusal(data, error) from error
        return height, width


def _pillow_refusal(data: Encoded, error: Exception) -> DecodeError:
    if len(data) == 0:
        return DecodeError("0 bytes: the file is empty. Replace it, or leave it out.")
    start = bytes(data[:8])
    if isinstance(error, UnidentifiedImageError):
        return DecodeError(
            f"{len(data)} bytes that begin with {start!r} are not an image that Pillow knows. "
            "Replace the file, or leave it out."
        )
    return DecodeError(f"Pillow cannot decode these {len(data)} bytes: {error}. Replace the file, or leave it out.")


def refuse_bomb(height: int, width: int) -> None:
    """Refuse an image above Pillow's size limit, because a broken header could request all memory.

    Raises:
        DecodeError: for more than twice ``PIL.Image.MAX_IMAGE_PIXELS`` pixels, unless this limit is None.
    """
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > 2 * limit:
        raise DecodeError(
            f"{width} x {height} pixels are more than Pillow's limit of {2 * limit}: a corrupt header, or an attack. "
            "If the size is right, raise PIL.Image.MAX_IMAGE_PIXELS."
        )


# --- OpenCV and torchvision ---------------------------------------------------------------------------------------


class _LibraryDecoder(Decoder):
    """Decoder for JPEG, PNG and WebP. Refuses any image that it would decode differently from Pillow."""

    kinds = frozenset({JPEG, PNG, WEBP})

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`Decoder`."""
        kind = kind_of(data)
        if kind not in self.kinds or (kind == PNG and png_bit_depth(data) == 16):
            what = "PNGs of 16 bits" if kind == PNG else f"images of the kind {kind}"
            raise DecodeError(f"decoder={self.name!r} is not used for {what}. Pillow decodes these.")
        refuse_bomb(*self.size(data))
        try:
            pixels = self._read(data)
        except (RuntimeError, ValueError) as error:  # no other errors: an image is not at fault if memory runs out
            reason = str(error).partition("\n")[0]
            raise DecodeError(f"{self.name} cannot decode this {kind} of {len(data)} bytes: {reason}") from error
        return np.ascontiguousarray(pixels)

    def _read(self, data: Encoded) -> Pixels:
        raise NotImplementedError


class OpenCVDecoder(_LibraryDecoder):
    """``cv2.imdecode`` without applying the EXIF rotation."""

    name = "opencv"

    def __init__(self) -> None:
        open_cv2()  # raise an error now, not in a worker, if it is missing

    def _read(self, data: Encoded) -> Pixels:
        cv2, flags = open_cv2()
        try:
            pixels: Pixels | None = cv2.imdecode(as_array(data), flags)
        except cv2.error as error:
            raise ValueError(str(error)) from error
        if pixels is None:
            raise ValueError("it is cut short or corrupt")
        return pixels


@functools.cache
def open_cv2() -> tuple[Any, int]:
    """Import OpenCV and disable its threads. Return it with the flags that match torchvision's ImageFolder.

    Raises:
        MissingExtraError: if OpenCV is not installed, or older than 4.11 (older ones fill truncated JPEGs with grey).
    """
    cv2 = require("cv2", extra="images", why="decoding or resizing with OpenCV")
    if not hasattr(cv2, "IMREAD_COLOR_RGB"):
        raise MissingExtraError(
            f"decoding or resizing with OpenCV needs 4.11 or newer, but {cv2.__version__} is installed. "
            "Install it:  pip install 'lightning-feed[images]'"
        )
    cv2.setNumThreads(0)  # the loader's workers provide the parallelism; pools inside them would compete
    return cv2, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION


_AS_STORED = False
"""Do not apply the EXIF rotation."""


class TorchvisionDecoder(_LibraryDecoder):
    """``torchvision.io.decode_image``; needs no extra package.

    Deprecated since torchvision 0.29 in favour of torchcodec, which is not used here because it always applies EXIF
    rotation.
    """

    name = "torchvision"

    def __init__(self) -> None:
        _torchvision_reader()

    def _read(self, data: Encoded) -> Pixels:
        # torch warns about read-only memory, such as `bytes`, although nothing here writes to it.
        flat = as_array(data)
        source = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        pixels: Pixels = _torchvision_reader()(source).permute(1, 2, 0).numpy()
        return pixels


@functools.cache
def _torchvision_reader() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torchvision's operator. Its Python wrapper warns for every image, and a warnings filter would be global.

    Checked against torchvision 0.21 and 0.29: ``decode_image(Tensor data, int mode, bool apply_exif_orientation)``.
    """
    from torchvision.io import ImageReadMode

    try:
        operator = torch.ops.image.decode_image
    except AttributeError as error:
        raise MissingExtraError(
            "this torchvision cannot decode images (it was built without a decoder, or is too new). Use "
            'decoder="pillow", or decoder="auto" for the fastest that is installed.'
        ) from error
    return lambda source: operator(source, ImageReadMode.RGB.value, _AS_STORED)


# --- simplejpeg ---------------------------------------------------------------------------------------------------


class TurboDecoder(Decoder):
    """libjpeg-turbo through simplejpeg: the fastest decoder of whole JPEGs.

    Decodes no other kinds of image. A warning of libjpeg-turbo (truncated or corrupt data) raises an error.
    """

    name = "turbo"
    kinds = frozenset({JPEG})

    def __init__(self) -> None:
        _simplejpeg()

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`Decoder`."""
        refuse_bomb(*self.size(data))
        try:
            pixels: Pixels = _simplejpeg().decode_jpeg(data, colorspace="RGB", strict=True)
        except (ValueError, RuntimeError) as error:
            raise DecodeError(f"libjpeg-turbo cannot decode these {len(data)} bytes as a JPEG: {error}") from error
        return pixels


@functools.cache
def _simplejpeg() -> Any:
    return require("simplejpeg", extra="images", why='decoder="turbo"')


def resize(pixels: Pixels, size: tuple[int, int], *, antialias: bool = True) -> Tensor:
    """Resize an image bilinearly.

    Args:
        pixels: uint8, (H, W, 3). A box cut out of a larger image need not be copied first.
        size: (height, width) of the result.
        antialias: True for torchvision's uint8 resize, which is within one grey level of Pillow's. False for OpenCV's
            linear resize, which takes about half the time. Its result is equal if the image is enlarged, and less
            accurate the more the image is shrunk.

    Returns:
        uint8, shape (3, height, width), channels last in memory.

    Raises:
        MissingExtraError: without antialiasing, if OpenCV is not installed.
    """
    if not antialias:
        cv2, _ = open_cv2()
        return torch.from_numpy(cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_LINEAR)).permute(2, 0, 1)
    # Writeable: torch warns about read-only memory, such as a cache's, although nothing here writes.
    batch = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))[None].permute(0, 3, 1, 2)
    # A channels-last batch: torch's AVX2 code for uint8 then reads and writes interleaved pixels. With any other
    # strides, even for a batch of one, it converts to planes and back, which takes 50 % longer.
    resized: Tensor = interpolate(batch, size=list(size), mode="bilinear", antialias=True, align_corners=False)
    return resized[0]


# --- random crops ---------------------------------------------------------------------------------------------------

_TRIES: Final = 10


def draw_region(
    height: int,
    width: int,
    scale: Sequence[float],
    ratio: Sequence[float],
    generator: torch.Generator | None = None,
) -> Region:
    """Draw the box of a RandomResizedCrop, with the same draws as torchvision (uniform area, log-uniform aspect, ten
    tries, then the centre; Szegedy et al., arXiv 1409.4842).

    Args:
        height: image height, in pixels.
        width: image width, in pixels.
        scale: smallest and largest share of the area.
        ratio: smallest and largest width / height.
        generator: None for torch's default.
    """
    shortest, longest = _logarithms(*ratio)
    # Not the default dtype, because precision="bf16-true" changes it during a step while other threads draw.
    drawn = torch.empty(1, dtype=torch.float32, device="cpu")
    for _ in range(_TRIES):
        area = height * width * drawn.uniform_(scale[0], scale[1], generator=generator).item()
        aspect = drawn.uniform_(shortest, longest, generator=generator).exp().item()
        rows = round(math.sqrt(area / aspect))
        columns = round(math.sqrt(area * aspect))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(torch.randint(height - rows + 1, (1,), generator=generator, device="cpu").item())
            left = int(torch.randint(width - columns + 1, (1,), generator=generator, device="cpu").item())
            return Region(top, left, rows, columns)
    rows = height
    columns = width
    if width / height < min(ratio):
        rows = round(width / min(ratio))
    elif width / height > max(ratio):
        columns = round(height * max(ratio))
    return Region((height - rows) // 2, (width - columns) // 2, rows, columns)


@functools.lru_cache
def _logarithms(*values: float) -> tuple[float, ...]:
    return tuple(torch.log(torch.tensor(values, dtype=torch.float32, device="cpu")).tolist())  # as torchvision does
