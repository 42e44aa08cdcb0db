"""One image on its way to a sample: as much of it is decoded as is asked for."""

from dataclasses import dataclass

import numpy as np

from lightning_feed.decode.decoders import Decoder, Pixels, Region
from lightning_feed.decode.header import Encoded
from lightning_feed.load.trace import traced


@dataclass(frozen=True, eq=False)
class EncodedPicture:
    """An image that is still encoded."""

    data: Encoded
    decoder: Decoder

    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.decoder.size(self.data)

    def whole(self) -> Pixels:
        """All pixels."""
        with traced("decode"):
            return self.decoder.decode(self.data)

    def region(self, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """The pixels of ``region``; at a smaller scale that is at least ``cover`` (height, width), if that is given."""
        decode_region = getattr(self.decoder, "decode_region", None)  # isinstance with a protocol takes 15 us
        if decode_region is None:
            return _cut(self.whole(), region)
        with traced("decode"):
            found: Pixels = decode_region(self.data, region, cover=cover)
        return found


@dataclass(frozen=True, eq=False)
class DecodedPicture:
    """An image whose pixels are there: from a cache, or from a pack of pixels. They are not written to."""

    pixels: Pixels

    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def whole(self) -> Pixels:
        """All pixels."""
        return self.pixels

    def region(self, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """The pixels of ``region``, at full size: there is nothing to save with a smaller scale."""
        return _cut(self.pixels, region)


def _cut(pixels: Pixels, region: Region) -> Pixels:
    cut: np.ndarray = pixels[region.top : region.top + region.height, region.left : region.left + region.width]
    return cut
