"""nvJPEG by way of torchvision: whole JPEGs to pixels on a CUDA device, and which files are not for it."""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torchvision.io import ImageReadMode

from lightning_feed.decode.decoder import Encoded
from lightning_feed.decode.header import JPEG, as_array, ends_like_jpeg, kind_of
from lightning_feed.errors import MissingExtraError

_BASELINE, _PROGRESSIVE, _APP14, _SCAN = 0xC0, 0xC2, 0xEE, 0xDA
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # without DHT, JPG, DAC, which are no frame headers
_GREY, _COLOUR = 1, 3
_SUBSAMPLINGS: Final = frozenset({(1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (4, 2)})
"""(horizontal, vertical) factors of the luma beside chroma of (1, 1): 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:1:0."""


class NvJpeg:
    """Decodes lists of JPEGs on one CUDA device; one object serves the whole process.

    torchcodec, which succeeds torchvision's decoders, is not used: it turns images by their EXIF rotation and cannot be
    told not to (read in 0.17), while every other decoder here leaves them as they are stored.

    Raises:
        MissingExtraError: this torchvision has no nvJPEG.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._decode: Any = torch.ops.image.decode_jpegs_cuda
        except AttributeError as error:
            raise _without_nvjpeg() from error
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        """Decode, and wait on the host until nvJPEG is done, as torchvision does. The files may then be let go.

        Args:
            files: whole JPEGs: uint8, shape (bytes,), on the host.

        Returns:
            uint8, shape (3, height, width), safe to use on the current stream.

        Raises:
            RuntimeError: when one of them cannot be decoded; it does not say which.
        """
        # torchvision allocates the images on the current stream and lets nvJPEG write them on a stream of its own, that
        # does not wait for the current one; and the hardware decoder waits for no stream (github.com/pytorch/vision
        # pull 9606, meta-pytorch/torchcodec pull 1634). So it may write to memory that was freed on the current stream
        # while kernels queued there still read it. Therefore:
        # 1. The images are allocated on a stream on which nothing is queued: what was freed there is not in use. As a
        #    rule it is empty. But torch hands out 32 streams in turn, so that another part of the program may have got
        #    this one, too; the host waits for what that has queued.
        # 2. The current stream waits for that one, not the host.
        # 3. record_stream: their memory goes back to it only when the current stream is done with them.
        self._stream.synchronize()
        current = self._module.current_stream(self._device)
        try:
            with self._module.stream(self._stream):
                images: list[Tensor] = self._decode(files, ImageReadMode.RGB.value, self._device)
        except RuntimeError as error:
            if "not compiled with nvJPEG" in str(error):
                raise _without_nvjpeg() from error
            raise
        current.wait_stream(self._stream)
        for image in images:
            image.record_stream(current)
        return images


@lru_cache
def nvjpeg(device: torch.device) -> NvJpeg:
    """The decoder of a device. Kept, since each new stream would leave a pool of memory behind.

    Raises:
        MissingExtraError: this torchvision has no nvJPEG.
    """
    return NvJpeg(device)


def not_for_nvjpeg(data: Encoded) -> str | None:
    """Why nvJPEG should not be given a file; None: it should.

    nvJPEG decodes baseline and progressive JPEGs of 8 bits, grey or colour, in the usual chroma subsamplings
    (https://docs.nvidia.com/cuda/nvjpeg/). One file beyond that fails the call for all files beside it, or comes out in
    wrong colours; a file that is cut short may come out half grey, where other decoders refuse it.

    Args:
        data: the encoded image.

    Returns:
        A reason that is the same for all images of the kind.
    """
    kind = kind_of(data)
    if kind != JPEG:
        return f"nvJPEG decodes JPEG, and the image is of the kind {kind}"
    if not ends_like_jpeg(data):
        return "the JPEG does not end with its end marker: it is cut short, or has something behind it"
    frame, holds_rgb = _read_frame(as_array(data).data)
    # A frame: bits, height (2), width (2), number of components; of each: id, sampling factors, table (T.81, B.2.2).
    if frame is None or len(frame.body) < 6 or len(frame.body) < 6 + 3 * frame.body[5]:
        return "the JPEG has no frame header"
    if frame.marker not in (_BASELINE, _PROGRESSIVE) or frame.body[0] != 8:
        return "nvJPEG decodes baseline and progressive JPEGs of 8 bits, and this is another (12 bits, lossless, ...)"
    if frame.body[5] == _GREY:
        return None
    if frame.body[5] != _COLOUR:
        return "nvJPEG makes no RGB of a CMYK JPEG"
    if holds_rgb or bytes(frame.body[6:15:3]) == b"RGB":
        return "the JPEG holds RGB, and nvJPEG takes it for YCbCr"
    luma, *chroma = ((factors >> 4, factors & 15) for factors in frame.body[7:16:3])
    if luma not in _SUBSAMPLINGS or chroma != [(1, 1), (1, 1)]:
        return "nvJPEG does not know the JPEG's chroma subsampling"
    return None


class _Frame(NamedTuple):
    marker: int
    body: memoryview


def _read_frame(data: memoryview) -> tuple[_Frame | None, bool]:
    """The frame header, and whether an Adobe segment says that the colours are not transformed."""
    frame, holds_rgb = None, False
    at, end = 2, len(data)
    while at + 4 <= end and data[at] == 0xFF and data[at + 1] != _SCAN:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte before the marker
            at += 1
            continue
        length = (data[at + 2] << 8) | data[at + 3]
        body = data[at + 4 : at + 2 + length]
        if marker in _FRAMES:
            frame = _Frame(marker, body)
        elif marker == _APP14 and bytes(body[:5]) == b"Adobe" and len(body) >= 12:
            holds_rgb = body[11] == 0
        at += 2 + length
    return frame, holds_rgb


def _without_nvjpeg() -> MissingExtraError:
    return MissingExtraError(
        'backend="nvjpeg" needs a torchvision that was built with nvJPEG, and this one was not (a build for the CPU, '
        "or too new). Install the build for your CUDA:  pip install torchvision --index-url "
        f"https://download.pytorch.org/whl/cu{(torch.version.cuda or '130').replace('.', '')}"
    )
