"""torchvision's own readers: JPEG, PNG and WebP."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torchvision.io import ImageReadMode

from lightning_feed.decode.decoder import Encoded, Pixels
from lightning_feed.decode.header import JPEG, PNG, WEBP, as_array, jpeg_header, kind_of, png_bit_depth, png_size
from lightning_feed.decode.opencv_decoder import header_size
from lightning_feed.decode.pillow_decoder import refuse_bomb
from lightning_feed.errors import DecodeError, MissingExtraError

_AS_STORED = False
"""Not turned by the EXIF rotation."""


class TorchvisionDecoder:
    """``torchvision.io.decode_image``; nothing to install.

    torchvision deprecates it since 0.29 in favour of torchcodec. That is not used: it turns images by their EXIF
    rotation, and cannot be told not to.
    """

    name = "torchvision"
    kinds = frozenset({JPEG, PNG, WEBP})

    def __init__(self) -> None:
        self._decode = _open_reader()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # the reader is chosen anew where this arrives

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._decode = _open_reader()

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`~lightning_feed.decode.decoder.Decoder`."""
        kind = kind_of(data)
        if kind not in self.kinds:
            raise DecodeError(f'decoder="torchvision" is not used for images of the kind {kind}: they go to Pillow.')
        if kind == PNG and png_bit_depth(data) == 16:
            raise DecodeError('decoder="torchvision" keeps the 16 bits of such a PNG: they go to Pillow.')
        if kind != WEBP:  # at most 16383 x 16383 pixels
            refuse_bomb(*(jpeg_header(data)[:2] if kind == JPEG else png_size(data)))
        # torch warns about memory that it could write to and must not, such as that of `bytes`; nothing here writes.
        flat = as_array(data)
        source = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        try:
            pixels = self._decode(source)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DecodeError(f"torchvision cannot decode this {kind} of {len(data)} bytes: {reason}") from error
        return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())

    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) from the header."""
        return header_size(data)


def _open_reader() -> Callable[[torch.Tensor], torch.Tensor]:
    """torchvision's operator itself: its wrapper in Python warns with every image, and a filter would be global.

    Read in torchvision 0.21 and 0.29: ``decode_image(Tensor data, int mode, bool apply_exif_orientation)``.
    """
    try:
        operator = torch.ops.image.decode_image
    except AttributeError as error:
        raise MissingExtraError(
            'this torchvision cannot decode images (it was built without, or is too new). Use decoder="pillow", or '
            'decoder="auto" for the fastest that is installed.'
        ) from error
    return lambda source: operator(source, ImageReadMode.RGB.value, _AS_STORED)
