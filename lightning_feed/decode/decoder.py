"""What a decoder is: encoded bytes in, pixels out; some of them only where pixels are needed."""

from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Encoded: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"
"""A whole image file in memory; an array is one-dimensional."""
Pixels: TypeAlias = npt.NDArray[np.uint8]
"""uint8, shape (H, W, 3), RGB, C-contiguous, owned by the caller."""


class Region(NamedTuple):
    """A box in the full-size image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def check_inside(self, height: int, width: int) -> None:
        """Refuse a box that is empty or not inside an image of that size.

        Raises:
            ValueError: with both shapes.
        """
        bottom, right = self.top + self.height, self.left + self.width
        if self.top < 0 or self.left < 0 or self.height < 1 or self.width < 1 or bottom > height or right > width:
            raise ValueError(f"{self} is not inside an image of {height} x {width} pixels: cut the box to the image.")


@runtime_checkable
class Decoder(Protocol):
    """Decodes one image at a time. Safe to call from several threads, and to be pickled to workers.

    All decoders follow torchvision's ``ImageFolder``: palettes, greyscale and CMYK become RGB as in Pillow's
    ``convert("RGB")``, and an EXIF rotation is not applied.
    """

    name: str

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image.

        Raises:
            DecodeError: when the bytes are not an image, are cut short, or are of a kind that this decoder cannot do.
        """

    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width), read from the header alone.

        Raises:
            DecodeError: as in :meth:`decode`.
        """


@runtime_checkable
class RegionDecoder(Decoder, Protocol):
    """A decoder that can leave out what a crop does not need."""

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """Decode the pixels of ``region``.

        Args:
            data: the encoded image.
            region: the box to decode, inside the image.
            cover: None gives the very pixels that :meth:`decode` gives there, at full size. (height, width) allows a
                smaller scale of the decoder's, the smallest at which the result is still at least that large. The box
                is moved to the nearest whole pixels of that scale: by half of one at most, so that a random crop is
                another random crop, and no image is shifted under its box.

        Returns:
            Pixels of the region: of its size without ``cover``, at least of the size of ``cover`` otherwise
            (never larger than the region). Its rows may lie apart in memory: decoders need a margin, and cutting it
            off without a copy is cheaper.

        Raises:
            DecodeError: as in :meth:`decode`, as far as the data is read.
            ValueError: when the region is not inside the image.
        """
