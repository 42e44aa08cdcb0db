"""nvJPEG: which files it decodes, and the libraries by which it is called."""

import importlib
import io
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode

from lightning_feed.errors import DecodeError, MissingExtraError
from lightning_feed.images.decoders import refuse_bomb
from lightning_feed.images.header import (
    FRAME_HEADERS,
    JPEG,
    KINDS,
    Encoded,
    as_array,
    ends_like_jpeg,
    jpeg_segments,
    kind_of,
)

logger = logging.getLogger(__name__)

_BASELINE = 0xC0
_PROGRESSIVE_FRAME = 0xC2
_APP14 = 0xEE
_SCAN = 0xDA
_GREY = 1
_COLOUR = 3
_SUBSAMPLINGS: Final = frozenset({(1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (4, 2)})
"""(horizontal, vertical) luma factors, with chroma (1, 1): 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:1:0."""

DecodeJpegs: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""Decodes whole JPEGs (uint8, (bytes,), on the host) to contiguous uint8 (3, H, W) on the device. Raises a RuntimeError
if any of them fails."""


@lru_cache
def small_jpeg() -> Tensor:
    """Return a JPEG that each decoder can decode: uint8, shape (bytes,), on the host."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


# --- the call ---------------------------------------------------------------------------------------------------------


class NvJpeg:
    """Decodes lists of JPEGs on one CUDA device; one object serves the whole process.

    Calls nvJPEG by torchcodec, if that is installed for this torch and decodes on this device, else by torchvision,
    which deprecates its decoder (torchvision 0.29).

    Attributes:
        library: ``"torchcodec"`` or ``"torchvision"``.

    Raises:
        MissingExtraError: if neither torchcodec nor torchvision was built with nvJPEG.
    """

    def __init__(self, device: torch.device) -> None:
        self.library, self._decode = _by_torchcodec(device) or _by_torchvision()
        self._device = device
        self._module = torch.get_device_module(device)
        # torchcodec decodes on the current stream, whose priority is high here: nvJPEG's kernels are small, and the
        # model's step waits for them. torchvision has a stream of its own, of normal priority.
        self._stream = self._module.Stream(device, priority=-1)

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        """Decode, and wait on the host until nvJPEG is done with the files, which may be freed afterwards.

        Args:
            files: whole JPEGs: uint8, shape (bytes,), on the host.

        Returns:
            uint8, shape (3, height, width), contiguous, safe to use on the current stream.

        Raises:
            RuntimeError: if any file cannot be decoded; the error does not say which.
        """
        # torchvision allocates the images on the current stream, but nvJPEG writes them on another one, which does not
        # wait for the current one; the hardware decoder waits for no stream at all (github.com/pytorch/vision
        # pull 9606, meta-pytorch/torchcodec pull 1634). So nvJPEG may write to memory that was freed on the current
        # stream while kernels queued there still read it. Therefore:
        # 1. Allocate the images on a stream without queued work: memory freed there is not in use. Usually the stream
        #    is empty. But torch hands out 32 streams in turn, so another part of the program may share this one; the
        #    host waits for that part's work. It waits for an event, because torch.cuda.set_sync_debug_mode, which users
        #    set to find their own waits, would raise at Stream.synchronize.
        # 2. The current stream, not the host, waits for this stream.
        # 3. record_stream: the memory returns to this stream only when the current stream has finished with the images.
        self._stream.record_event().synchronize()
        current = self._module.current_stream(self._device)
        try:
            with self._module.stream(self._stream):
                images = self._decode(files, self._device)
                self._stream.record_event().synchronize()  # torchcodec returns while nvJPEG may still read the files
        except RuntimeError as error:
            if "not compiled with nvJPEG" in str(error):
                raise _without_nvjpeg() from error
            raise
        current.wait_stream(self._stream)
        for image in images:
            image.record_stream(current)
        return [image.contiguous() for image in images]


_Decode: TypeAlias = Callable[[list[Tensor], torch.device], list[Tensor]]


def _by_torchcodec(device: torch.device) -> tuple[str, _Decode] | None:
    """torchcodec's call (since 0.16). None if it is not installed, or not for this torch and device: each release goes
    with one torch, and some builds are without nvJPEG."""
    try:
        decoders: Any = importlib.import_module("torchcodec.decoders")
        decoders.decode_jpeg([small_jpeg()], mode="RGB", device=device)
    except ModuleNotFoundError:
        return None
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        logger.info("torchcodec is installed, but cannot decode on %s: %s", device, str(error).partition("\n")[0])
        return None
    return "torchcodec", lambda files, device: decoders.decode_jpeg(files, mode="RGB", device=device)


def _by_torchvision() -> tuple[str, _Decode]:
    try:
        decode: Any = torch.ops.image.decode_jpegs_cuda
    except AttributeError as error:
        raise _without_nvjpeg() from error
    return "torchvision", lambda files, device: decode(files, ImageReadMode.RGB.value, device)


def _without_nvjpeg() -> MissingExtraError:
    return MissingExtraError(
        'backend="nvjpeg" needs a torchvision that was built with nvJPEG, and this one was not (it is a CPU build, '
        "or too new). Install the build for your CUDA:  pip install torchvision --index-url "
        f"https://download.pytorch.org/whl/cu{(torch.version.cuda or '130').replace('.', '')}"
    )


@lru_cache
def nvjpeg(device: torch.device) -> NvJpeg:
    """Return the device's decoder. Cached, because each new stream would leave a memory pool behind.

    Raises:
        MissingExtraError: if this torchvision was built without nvJPEG.
    """
    return NvJpeg(device)


def has_engine(device: torch.device) -> bool:
    """Return False for a CUDA device without an engine for JPEG, on whose cores nvJPEG decodes; True if unknown.

    Those with one are the A100 and A30 of Ampere, and Ada, Hopper, Blackwell and Thor (section "Hardware Acceleration"
    of https://docs.nvidia.com/cuda/nvjpeg/, 13.2): compute capability 8.0, 8.9 and above.
    """
    capability_of = getattr(torch.get_device_module(device), "get_device_capability", None)
    if capability_of is None:
        return True
    capability = capability_of(device)
    return bool(capability == (8, 0) or capability >= (8, 9))


# --- the files --------------------------------------------------------------------------------------------------------

_CUT: Final = "the JPEG does not end with its end marker: it is cut short, or has data after it"
_NO_FRAME: Final = "the JPEG has no frame header"
_OTHER_CODING: Final = "nvJPEG decodes only 8-bit baseline and progressive JPEGs, not others (12 bits, lossless, ...)"
_PROGRESSIVE: Final = "the JPEG is progressive, and the engine of the GPU decodes only baseline JPEGs"
_CMYK: Final = "nvJPEG does not convert CMYK JPEGs to RGB"
_HOLDS_RGB: Final = "the JPEG holds RGB, but nvJPEG reads it as YCbCr"
_SUBSAMPLED: Final = "nvJPEG does not support the JPEG's chroma subsampling"
_TOO_LARGE: Final = "the image is too large, or its header is broken"
_OTHER_KINDS: Final = {
    kind: f"nvJPEG decodes only JPEG, and the image is of the kind {kind}" for kind in KINDS if kind != JPEG
}
REASONS: Final = (
    _CUT,
    _NO_FRAME,
    _OTHER_CODING,
    _PROGRESSIVE,
    _CMYK,
    _HOLDS_RGB,
    _SUBSAMPLED,
    _TOO_LARGE,
    *_OTHER_KINDS.values(),
)
"""The reasons why the workers decode a file, and not nvJPEG."""


def refusal(data: Encoded, size: tuple[int, int]) -> str | None:
    """Return the reason, one of ``REASONS``, why an image of (height, width) is not for nvJPEG; None if it is."""
    try:
        refuse_bomb(*size)
    except DecodeError:
        return _TOO_LARGE
    return not_for_nvjpeg(data)


def not_for_nvjpeg(data: Encoded) -> str | None:
    """Return the reason why a file is not for nvJPEG. Returns None if it is.

    nvJPEG decodes 8-bit baseline and progressive JPEGs, grey or colour, in the usual chroma subsamplings
    (https://docs.nvidia.com/cuda/nvjpeg/). Progressive ones are not for it: the device's engine does not decode them,
    and the host would decode a part of each. One unsupported file makes the call fail for the whole list, or is decoded
    in wrong colours; a truncated file may come out half grey, while other decoders refuse it.

    Args:
        data: the encoded image.

    Returns:
        One of ``REASONS``.
    """
    kind = kind_of(data)
    if kind != JPEG:
        return _OTHER_KINDS[kind]
    if not ends_like_jpeg(data):
        return _CUT
    frame = _read_frame(as_array(data).data)
    if frame is None:
        return _NO_FRAME
    return _frame_refusal(frame)


def _frame_refusal(frame: "_Frame") -> str | None:
    if frame.marker not in (_BASELINE, _PROGRESSIVE_FRAME) or frame.bits != 8:
        return _OTHER_CODING
    if frame.marker == _PROGRESSIVE_FRAME:
        return _PROGRESSIVE
    if len(frame.sampling) == _GREY:
        return None
    if len(frame.sampling) != _COLOUR:
        return _CMYK
    if frame.holds_rgb:
        return _HOLDS_RGB
    luma, *chroma = frame.sampling
    if luma not in _SUBSAMPLINGS or chroma != [(1, 1), (1, 1)]:
        return _SUBSAMPLED
    return None


class _Frame(NamedTuple):
    """Values from the frame header of a JPEG, and the colour space, which an Adobe segment may declare."""

    marker: int
    """The kind of JPEG."""
    bits: int
    """Bits of a sample."""
    sampling: Sequence[tuple[int, int]]
    """(horizontal, vertical) sampling factors of each component."""
    holds_rgb: bool
    """True if the components are R, G and B."""


def _is_adobes(segment: memoryview) -> bool:
    """Return True for a segment that declares the transform of the colours, in its byte 11."""
    return len(segment) >= 12 and bytes(segment[:5]) == b"Adobe"


def _read_frame(data: memoryview) -> _Frame | None:
    """Read the frame header. Returns None if it is missing or cut short.

    Its bytes (T.81, B.2.2): bits, height (2 bytes), width (2 bytes), number of components; then for each component: id,
    sampling factors, table.
    """
    frame = 0
    header = data[:0]
    is_untransformed = False
    for marker, start, end in jpeg_segments(data):
        segment = data[start:end]
        if marker == _SCAN:
            break
        if marker in FRAME_HEADERS:
            frame = marker
            header = segment
        elif marker == _APP14 and _is_adobes(segment):
            is_untransformed = segment[11] == 0
    if len(header) < 6 or len(header) < 6 + 3 * header[5]:
        return None
    components = header[6 : 6 + 3 * header[5]]
    return _Frame(
        marker=frame,
        bits=header[0],
        sampling=[(factors >> 4, factors & 15) for factors in components[1::3]],
        holds_rgb=is_untransformed or bytes(components[0::3]) == b"RGB",
    )
