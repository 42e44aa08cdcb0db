"""libjpeg-turbo 3, decoding only the part of a JPEG that a crop needs."""

from lightning_feed.decode.decoder import Encoded, Pixels, Region
from lightning_feed.decode.header import JPEG, ends_like_jpeg, kind_of
from lightning_feed.decode.libturbojpeg import SCALES, JpegShape, TurboJpeg, decompressor, library_path
from lightning_feed.decode.pillow_decoder import refuse_bomb
from lightning_feed.errors import DecodeError

MARGIN = 2
"""Pixels around a box that upsampling of the colours looks at: one sample of chroma beside, at half the resolution."""


class TurboRegionDecoder:
    """JPEGs only. A warning of libjpeg-turbo (cut short, corrupt data) is an error.

    A region costs the entropy decoding of all rows down to its lower edge, and the rest of the work for itself alone.
    What is below it is not read: there, corrupt data is not noticed (a file that is cut short is, by its missing end).
    """

    name = "turbo-region"
    kinds = frozenset({JPEG})

    def __init__(self) -> None:
        library_path()  # missing: say so now, not in a worker

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`~lightning_feed.decode.decoder.Decoder`."""
        library, shape = _open(data)
        return library.decompress_all(data, shape)

    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) from the header."""
        _, shape = _open(data)
        return shape.height, shape.width

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """Decode the pixels of a region, see :class:`~lightning_feed.decode.decoder.RegionDecoder`.

        With ``cover``, the result is that of ``snap(region, ...)``: the box moved to the nearest pixels of the scale.
        """
        library, shape = _open(data)
        region.check_inside(shape.height, shape.width)
        eighths = 8 if cover is None else scale_for(region, (shape.height, shape.width), cover)
        if shape.mcu_width == 0 or not ends_like_jpeg(data):
            eighths = 8
            pixels = library.decompress_all(data, shape)  # whoever cut it, this will see it
            box = tuple(region)
            outer = (0, 0, shape.height, shape.width)
        else:
            box = scaled_box(region, (shape.height, shape.width), eighths)
            outer = _with_margin(box, shape, eighths)
            pixels = library.decompress(data, outer, eighths)
        top, left, height, width = box[0] - outer[0], box[1] - outer[1], box[2], box[3]
        return pixels[top : top + height, left : left + width]


def scale_for(region: Region, size: tuple[int, int], cover: tuple[int, int]) -> int:
    """The smallest scale, in eighths, at which a region is still at least ``cover`` (height, width) large."""
    for eighths in sorted(SCALES):
        step = 8 // eighths
        if min(region.height, region.width) < step:
            continue  # smaller than one pixel of that scale
        if region.height // step + 1 < cover[0] or region.width // step + 1 < cover[1]:
            continue  # spares the exact box, which takes 5 us
        _, _, height, width = scaled_box(region, size, eighths)
        if height >= cover[0] and width >= cover[1]:
            return eighths
    return 8


def scaled_box(region: Region, size: tuple[int, int], eighths: int) -> tuple[int, int, int, int]:
    """The region's (top, left, height, width) at a scale, its edges on the nearest whole pixels of that scale."""
    step = 8 // eighths
    (top, bottom), (left, right) = (
        _edges(start, length, full, step) for start, length, full in zip(region[:2], region[2:], size, strict=True)
    )
    return top, left, bottom - top, right - left


def snap(region: Region, size: tuple[int, int], eighths: int) -> Region:
    """The box of full-size pixels that a region really gets at a scale.

    Moving the box by less than a pixel of the scale before anything is decoded changes which crop is drawn, and no
    pixel of it. Rounding it later would shift the image under its labels and cost 10 dB.
    """
    step = 8 // eighths
    top, left, height, width = scaled_box(region, size, eighths)
    bottom, right = min((top + height) * step, size[0]), min((left + width) * step, size[1])
    return Region(top * step, left * step, bottom - top * step, right - left * step)


def _edges(start: int, length: int, full: int, step: int) -> tuple[int, int]:
    """Both edges of a box along one axis, in pixels of the scale 1 / step."""
    limit = -(-full // step)  # libjpeg-turbo rounds up
    end = start + length
    first = min((2 * start + step) // (2 * step), limit - 1)
    last = limit if end == full else (2 * end + step) // (2 * step)
    return first, min(max(last, first + 1), limit)


def _with_margin(box: tuple[int, ...], shape: JpegShape, eighths: int) -> tuple[int, int, int, int]:
    """A box that begins with an MCU and holds all that the pixels of ``box`` depend on."""
    step = 8 // eighths
    limit_height, limit_width = -(-shape.height // step), -(-shape.width // step)
    mcu_width = shape.mcu_width // step
    top, left, height, width = box
    outer_top = max(0, top - MARGIN)
    outer_left = max(0, left - MARGIN) // mcu_width * mcu_width
    bottom, right = min(limit_height, top + height + MARGIN), min(limit_width, left + width + MARGIN)
    return outer_top, outer_left, bottom - outer_top, right - outer_left


def _open(data: Encoded) -> tuple[TurboJpeg, JpegShape]:
    if kind_of(data) != JPEG:
        raise DecodeError(f'{len(data)} bytes that are no JPEG, and decoder="turbo-region" decodes nothing else.')
    library = decompressor()
    shape = library.read_header(data)
    refuse_bomb(shape.height, shape.width)
    return library, shape
