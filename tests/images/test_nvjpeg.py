"""Which files are for nvJPEG, and how it is called beside other work on the device."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from images.made_images import BROKEN, WHOLE, encoded
from made_samples import batch_of, nvjpeg_dataset, photo

from lightning_feed.errors import MissingExtraError
from lightning_feed.images import nvjpeg
from lightning_feed.images.nvjpeg import NvJpeg, _by_torchcodec, not_for_nvjpeg, refusal

JPEG = WHOLE["colour"]

# --- which files ------------------------------------------------------------------------------------------------------

FOR_IT = [
    "colour",
    "greyscale",
    "EXIF-rotated",
    "4:4:4",
    "4:2:2",
    "one pixel",
    "one row",
    "restart markers",
]
NOT_FOR_IT = {
    "progressive": "decodes only baseline",
    "CMYK": "CMYK",
    "RGB inside": "reads it as YCbCr",
    "bytes after the end": "end marker",
    "palette PNG": "kind PNG",
    "WebP": "kind WebP",
    "animated WebP": "kind WebP",
    "GIF": "kind GIF",
    "BMP": "kind BMP",
    "TIFF": "kind TIFF",
    "16 bit PNG": "kind PNG",
}


@pytest.mark.parametrize("name", FOR_IT)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_nvjpeg_accepts_the_usual_jpegs(name: str, kind: Any) -> None:
    assert not_for_nvjpeg(kind(WHOLE[name])) is None


@pytest.mark.parametrize("name", NOT_FOR_IT)
def test_nvjpeg_rejects_other_images_with_a_reason(name: str) -> None:
    reason = not_for_nvjpeg(WHOLE[name])
    assert reason is not None
    assert NOT_FOR_IT[name] in reason


@pytest.mark.parametrize("name", BROKEN)
def test_nvjpeg_rejects_broken_images(name: str) -> None:
    assert not_for_nvjpeg(BROKEN[name]) is not None


def with_frame(change: Any) -> bytes:
    """A JPEG whose frame header is changed; from its marker on, in place."""
    data = bytearray(JPEG)
    change(memoryview(data)[JPEG.index(b"\xff\xc0") :])
    return bytes(data)


def put(place: int, value: int) -> Any:
    def change(frame: memoryview) -> None:
        frame[place] = value

    return change


# FF C0, length (2), bits, height (2), width (2), components, then id, factors, table of each.
FRAMES = {
    "extended": (put(1, 0xC1), "12 bits, lossless"),
    "lossless": (put(1, 0xC3), "12 bits, lossless"),
    "arithmetic": (put(1, 0xC9), "12 bits, lossless"),
    "12 bits": (put(4, 12), "12 bits, lossless"),
    "two components": (put(9, 2), "CMYK"),
    "factors 3 x 1": (put(11, 0x31), "chroma subsampling"),
    "factors 2 x 4": (put(11, 0x24), "chroma subsampling"),
    "chroma of 2 x 1": (put(14, 0x21), "chroma subsampling"),
    "components cut off": (put(9, 200), "no frame header"),
    "no frame at all": (put(1, 0xE5), "no frame header"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_nvjpeg_rejects_unsupported_frame_headers_with_a_reason(name: str) -> None:
    change, words = FRAMES[name]
    assert words in str(not_for_nvjpeg(with_frame(change)))


@pytest.mark.parametrize("factors", [0x11, 0x21, 0x22, 0x12, 0x41, 0x42])
def test_nvjpeg_accepts_all_subsamplings_it_supports(factors: int) -> None:
    assert not_for_nvjpeg(with_frame(put(11, factors))) is None


def test_fill_bytes_and_long_segments_are_skipped() -> None:
    padded = JPEG[:2] + b"\xff" * 3 + JPEG[2:]
    long = JPEG[:2] + b"\xff\xe1\xff\xff" + b"\xc0" * 65533 + JPEG[2:]
    assert not_for_nvjpeg(padded) is None
    assert not_for_nvjpeg(long) is None


def test_a_frame_header_inside_the_scan_is_ignored() -> None:
    data = b"\xff\xd8\xff\xda\x00\x02\xff\xc0" + JPEG[JPEG.index(b"\xff\xc0") + 2 :]
    assert "no frame header" in str(not_for_nvjpeg(data))


def test_rejection_reasons_are_the_same_for_images_of_a_kind() -> None:
    """They are counted."""
    small, large = (encoded(photo(*size), "PNG") for size in ((20, 30), (50, 70)))
    assert not_for_nvjpeg(small) == not_for_nvjpeg(large)


def test_images_beyond_the_limit_of_decompression_bombs_are_not_for_nvjpeg() -> None:
    """As on the CPU, where the error names the image."""
    assert refusal(JPEG, (60, 80)) is None
    assert refusal(JPEG, (2**16, 2**16)) == "the image is too large, or its header is broken"


# --- the call ---------------------------------------------------------------------------------------------------------


def test_missing_nvjpeg_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvjpeg, "_by_torchcodec", lambda device: None)
    operator = Mock(side_effect=RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: MagicMock())
    monkeypatch.setattr(torch.ops.image, "decode_jpegs_cuda", operator, raising=False)
    decode = NvJpeg(torch.device("cuda", 0))
    with pytest.raises(MissingExtraError, match=r"pip install torchvision --index-url \S+/whl/cu\d+$"):
        decode([torch.zeros(1)])
    operator.side_effect = RuntimeError("Failed to decode batch: 3")
    with pytest.raises(RuntimeError, match="Failed to decode batch"):
        decode([torch.zeros(1)])
    monkeypatch.setattr(torch.ops, "image", object())
    with pytest.raises(MissingExtraError, match="too new"):
        NvJpeg(torch.device("cuda", 0))


def test_decode_jpegs_cuda_of_torchvision_has_the_expected_signature() -> None:
    """(list of tensors, int mode, device); read in torchvision 0.21 and 0.29."""
    schema = torch.ops.image.decode_jpegs_cuda.default._schema
    assert [str(argument.type) for argument in schema.arguments] == ["List[Tensor]", "int", "Device"]
    assert [str(given.type) for given in schema.returns] == ["List[Tensor]"]


def test_torchvision_decodes_where_torchcodec_was_built_without_nvjpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: MagicMock())
    without = SimpleNamespace(decode_jpeg=Mock(side_effect=RuntimeError("not compiled with nvJPEG support")))
    monkeypatch.setitem(sys.modules, "torchcodec", without)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", without)
    assert NvJpeg(torch.device("cuda", 0)).library == "torchvision"


def test_torchcodec_leaves_pixels_as_stored() -> None:
    """It applies the Exif orientation, which workers clear in their batches."""
    found = _by_torchcodec(torch.device("cpu"))
    if found is None:
        pytest.skip("torchcodec is not installed, or not for this torch")
    _, decode = found
    batch = batch_of(nvjpeg_dataset([WHOLE["EXIF-rotated"]]))
    (image,) = decode([torch.from_numpy(batch.images()[0].data.copy())], torch.device("cpu"))
    assert tuple(image.shape[1:]) == batch.images()[0].size
