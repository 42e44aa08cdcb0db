"""What the first and last bytes say."""

import pytest
from decode.made_images import BROKEN, WHOLE, pillow_pixels

from lightning_feed.decode.decoder import Region
from lightning_feed.decode.header import KINDS, ends_like_jpeg, jpeg_header, kind_of, png_bit_depth, png_size
from lightning_feed.errors import DecodeError

JPEGS = [name for name, data in WHOLE.items() if data.startswith(b"\xff\xd8")]


@pytest.mark.parametrize("image", WHOLE)
def test_kind(image: str) -> None:
    named = next((kind for kind in KINDS if kind in image), "JPEG")
    for data in (WHOLE[image], memoryview(WHOLE[image])):
        assert kind_of(data) == named


def test_no_kind() -> None:
    assert kind_of(b"") == kind_of(b"\xff\xd8") == kind_of(BROKEN["text named .jpg"]) == "unknown"
    assert kind_of(b"RIFF....WAVE") == "unknown"


@pytest.mark.parametrize("image", JPEGS)
def test_size_of_a_jpeg(image: str) -> None:
    header = jpeg_header(WHOLE[image])
    assert header[:2] == pillow_pixels(WHOLE[image]).shape[:2]
    assert header.components == {"greyscale": 1, "CMYK": 4}.get(image, 3)


def test_size_behind_fill_bytes_and_other_markers() -> None:
    jpeg = WHOLE["colour"]
    assert jpeg_header(jpeg[:2] + b"\xff\xff\xff\x01\xff\xd0" + jpeg[2:]) == jpeg_header(jpeg)


@pytest.mark.parametrize("cut", [0, 1, 3, 30])
def test_a_jpeg_without_a_frame_header(cut: int) -> None:
    with pytest.raises(DecodeError, match=f"a JPEG of {cut} bytes without a frame header"):
        jpeg_header(WHOLE["colour"][:cut])


def test_garbage_after_the_start_is_no_header() -> None:
    with pytest.raises(DecodeError):
        jpeg_header(b"\xff\xd8\xff" + bytes(100))


@pytest.mark.parametrize("image", JPEGS)
def test_end_of_a_jpeg(image: str) -> None:
    whole = WHOLE[image]
    assert ends_like_jpeg(whole) is (image != "bytes after the end")
    assert ends_like_jpeg(whole + b"\0\0") is (image != "bytes after the end")
    assert not ends_like_jpeg(whole[: len(whole) * 3 // 4])
    assert not ends_like_jpeg(b"")


def test_bits_of_a_png() -> None:
    assert png_bit_depth(WHOLE["16 bit PNG"]) == 16
    assert png_bit_depth(WHOLE["1 bit PNG"]) == 1
    assert png_bit_depth(WHOLE["RGB PNG"][:20]) == 0


def test_size_of_a_png() -> None:
    assert png_size(WHOLE["RGB PNG"]) == (61, 47)
    assert png_size(b"") == (0, 0)


def test_region_inside() -> None:
    Region(0, 0, 10, 20).check_inside(10, 20)
    with pytest.raises(ValueError, match="cut the box to the image"):
        Region(0, 1, 10, 20).check_inside(10, 20)
