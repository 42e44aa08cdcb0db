"""libjpeg-turbo through simplejpeg: the fastest way to a whole JPEG."""

from typing import Any

from lightning_feed.decode.decoder import Encoded, Pixels
from lightning_feed.decode.header import JPEG, kind_of
from lightning_feed.decode.pillow_decoder import refuse_bomb
from lightning_feed.errors import DecodeError
from lightning_feed.extras import require


class TurboDecoder:
    """JPEGs only. A warning of libjpeg-turbo (cut short, corrupt data) is an error."""

    name = "turbo"
    kinds = frozenset({JPEG})

    def __init__(self) -> None:
        self._simplejpeg: Any = _open_simplejpeg()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a module cannot be pickled; it is imported where it arrives

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._simplejpeg = _open_simplejpeg()

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`~lightning_feed.decode.decoder.Decoder`."""
        refuse_bomb(*self.size(data))
        try:
            pixels: Pixels = self._simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
        except (ValueError, RuntimeError) as error:
            raise _refusal(data, error) from error
        return pixels

    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) from the header."""
        try:
            height, width, _, _ = self._simplejpeg.decode_jpeg_header(data, strict=True)
        except (ValueError, RuntimeError) as error:
            raise _refusal(data, error) from error
        return height, width


def _refusal(data: Encoded, error: Exception) -> DecodeError:
    if kind_of(data) != JPEG:
        return DecodeError(f'{len(data)} bytes that are no JPEG, and decoder="turbo" decodes nothing else.')
    return DecodeError(f"libjpeg-turbo cannot decode this JPEG of {len(data)} bytes: {error}")


def _open_simplejpeg() -> Any:
    return require("simplejpeg", extra="images", why='decoder="turbo"')
