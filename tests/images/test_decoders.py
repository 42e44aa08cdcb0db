"""Every decoder equals Pillow on every kind of image, or leaves it to Pillow and counts it; headers."""

import functools
import pickle
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from images.made_images import BROKEN, HEIGHT, WHOLE, WIDTH, pillow_pixels
from PIL import Image

from lightning_feed.errors import DecodeError, MissingExtraError
from lightning_feed.images import decoders
from lightning_feed.images.choose import DECODER_NAMES, FallbackDecoder, make_decoder, psnr_db
from lightning_feed.images.decoders import Decoder, Region, open_cv2, refuse_bomb
from lightning_feed.images.header import KINDS, ends_like_jpeg, jpeg_header, kind_of, png_bit_depth

NAMES = [name for name in DECODER_NAMES if name != "auto"]
FAST = [name for name in NAMES if name != "pillow"]
MIN_PSNR_DB = 45.0
JPEGS = {name for name, data in WHOLE.items() if data.startswith(b"\xff\xd8")}
NOT_FROM_ITSELF = {"16 bit PNG", "GIF", "BMP", "TIFF"}
FROM_ITSELF = {
    "pillow": set(WHOLE),
    "opencv": set(WHOLE) - NOT_FROM_ITSELF,
    "torchvision": set(WHOLE) - NOT_FROM_ITSELF - {"animated WebP"},
    "turbo": JPEGS,
    "turbo-region": JPEGS - {"CMYK"},
}


@functools.cache
def _decoder(name: str) -> Decoder:
    return make_decoder(name).decoder


def _primary(name: str) -> Decoder:
    decoder = _decoder(name)
    return decoder.primary if isinstance(decoder, FallbackDecoder) else decoder


@pytest.mark.parametrize("name", NAMES)
def test_pixels_and_sizes_match_those_of_pillow(name: str) -> None:
    for image, data in WHOLE.items():
        pixels, reference = _decoder(name).decode(data), pillow_pixels(data)
        assert pixels.shape == reference.shape, image
        assert psnr_db(pixels, reference) >= MIN_PSNR_DB, image
        assert _decoder(name).size(data) == reference.shape[:2], image


@pytest.mark.parametrize("name", FAST)
def test_unsupported_images_are_refused_and_counted(name: str) -> None:
    """So no kind goes to Pillow for want of trying, and none without a count."""
    for image, data in WHOLE.items():
        decoder = make_decoder(name).decoder
        assert isinstance(decoder, FallbackDecoder)
        decoder.decode(data)
        counted = decoder.tally.as_dict()
        try:
            pixels = decoder.primary.decode(data)
        except DecodeError:
            assert sum(counted.values()) == 1, image
            assert image not in FROM_ITSELF[name]
        else:
            assert counted == {}, image
            assert image in FROM_ITSELF[name]
            assert psnr_db(pixels, pillow_pixels(data)) >= MIN_PSNR_DB, image


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_image_raises_and_the_next_image_is_unaffected(name: str) -> None:
    decoder, reference = make_decoder(name).decoder, pillow_pixels(WHOLE["colour"])
    for broken in BROKEN.values():
        for one in (decoder, _primary(name)):
            with pytest.raises(DecodeError):
                one.decode(broken)
        assert np.array_equal(decoder.decode(WHOLE["colour"]), reference)
    if isinstance(decoder, FallbackDecoder):
        assert decoder.tally.as_dict() == {}, "a corrupt file is not a fallback"


@pytest.mark.parametrize("name", NAMES)
def test_decode_errors_say_what_is_wrong_with_the_file(name: str) -> None:
    with pytest.raises(DecodeError, match="0 bytes: the file is empty"):
        _decoder(name).decode(BROKEN["0 bytes"])
    with pytest.raises(DecodeError, match=r"340 bytes that begin with b'this is ' are not an image"):
        _decoder(name).decode(BROKEN["text named .jpg"])
    with pytest.raises(DecodeError, match="truncated"):
        _decoder(name).decode(BROKEN["JPEG cut in the middle"])
    with pytest.raises(DecodeError):
        _decoder(name).size(BROKEN["0 bytes"])


@pytest.mark.parametrize("image", ["colour", "RGB PNG"])
@pytest.mark.parametrize("name", NAMES)
def test_a_header_that_claims_a_huge_image_is_refused(name: str, image: str) -> None:
    """13 GB and most of a minute for 1.3 kB, or for whole images of that size."""
    data = bytearray(WHOLE[image])
    at, digits = (data.index(b"\xff\xc0") + 5, 2) if image == "colour" else (16, 4)
    data[at : at + 2 * digits] = (65500).to_bytes(digits, "big") * 2
    crc = zlib.crc32(data[12:29])
    if image == "RGB PNG":
        data[29:33] = crc.to_bytes(4, "big")
    for decoder in (_decoder(name), _primary(name)):
        with pytest.raises(DecodeError):
            decoder.decode(data)
    with pytest.raises(DecodeError, match=r"4290250000 pixels|65500 x 65500 pixels"):
        _decoder(name).decode(data)


def test_the_pixel_limit_is_that_set_in_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", HEIGHT * WIDTH // 2)
    refuse_bomb(HEIGHT, WIDTH - 1)
    with pytest.raises(DecodeError, match="47 x 61 pixels are more than Pillow's limit of 2866"):
        refuse_bomb(HEIGHT, WIDTH)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    refuse_bomb(10**6, 10**6)


@pytest.mark.parametrize("name", NAMES)
def test_decoded_pixels_are_writeable_and_not_reused(name: str) -> None:
    decoder = _decoder(name)
    pixels = decoder.decode(WHOLE["colour"])
    assert pixels.dtype == np.uint8
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    again = pixels.copy()
    pixels[:] = 0
    assert np.array_equal(decoder.decode(WHOLE["colour"]), again), "the next image came out of the same memory"


@pytest.mark.parametrize("name", NAMES)
def test_decoders_accept_any_buffer_of_bytes(name: str) -> None:
    for data in (WHOLE["colour"], WHOLE["RGB PNG"]):
        reference, array = pillow_pixels(data), np.frombuffer(data, dtype=np.uint8)
        for form in (bytearray(data), memoryview(data), memoryview(b"--" + data)[2:], array, array.copy()):
            assert np.array_equal(_decoder(name).decode(form), reference)
            assert _decoder(name).size(form) == (HEIGHT, WIDTH)


@pytest.mark.parametrize("name", NAMES)
def test_threads_can_share_a_decoder(name: str) -> None:
    decoder = make_decoder(name).decoder
    images = [WHOLE[image] for image in sorted(JPEGS - {"CMYK"})]
    references = [pillow_pixels(data) for data in images]
    together = threading.Barrier(4)

    def many(_: int) -> int:
        together.wait(30)
        return sum(
            np.array_equal(decoder.decode(data), reference)
            for _ in range(10)
            for data, reference in zip(images, references, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(many, range(4))) == [10 * len(images)] * 4


@pytest.mark.parametrize("name", NAMES)
def test_decoders_can_be_pickled_after_use(name: str) -> None:
    decoder = make_decoder(name).decoder
    decoder.decode(WHOLE["colour"])  # what it holds by then must not matter
    copy = pickle.loads(pickle.dumps(decoder))
    assert copy.name == name
    assert np.array_equal(copy.decode(WHOLE["colour"]), pillow_pixels(WHOLE["colour"]))


@pytest.mark.parametrize("name", NAMES)
def test_decodes_regions_is_true_only_for_turbo_region(name: str) -> None:
    assert _decoder(name).decodes_regions is (name == "turbo-region")


def test_torchvision_decodes_without_warnings() -> None:
    """Its function in Python warns with every image; pytest makes any warning an error here."""
    for data in (WHOLE["colour"], WHOLE["RGB PNG"], WHOLE["WebP"]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _primary("torchvision").decode(data)


def test_an_opencv_older_than_4_11_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cv2, "__version__", "4.10.0")
    monkeypatch.delattr(cv2, "IMREAD_COLOR_RGB")
    open_cv2.cache_clear()
    with pytest.raises(
        MissingExtraError, match=r"needs 4\.11 or newer, but 4\.10\.0 is installed.*lightning-feed\[images\]"
    ):
        make_decoder("opencv")


@pytest.mark.parametrize("error", [MemoryError(), MissingExtraError("torchvision is gone")])
def test_errors_not_caused_by_the_image_are_not_turned_into_decode_errors(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a DecodeError it would go to Pillow, or be left out of training, image by image."""

    def fail(_: object) -> None:
        raise error

    decoder = make_decoder("torchvision").decoder
    monkeypatch.setattr(decoders, "_torchvision_reader", lambda: fail)
    with pytest.raises(type(error)):
        decoder.decode(WHOLE["colour"])


def test_opencv_decoder_sets_opencv_to_one_thread() -> None:
    cv2.setNumThreads(2)
    open_cv2.cache_clear()
    make_decoder("opencv")
    assert cv2.getNumThreads() == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_jpeg_without_pixels_is_refused_before_a_crop_is_chosen(name: str) -> None:
    jpeg = WHOLE["colour"]
    at = jpeg.index(b"\xff\xc0") + 5  # height and width in the frame header
    for height, width in ((0, 0), (0, 8), (8, 0)):
        empty = jpeg[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + jpeg[at + 4 :]
        for read in (_decoder(name), _primary(name)):
            for call in (read.size, read.decode):
                with pytest.raises(DecodeError):
                    call(empty)


# --- headers ------------------------------------------------------------------------------------------------------


def test_kind_of_names_each_image_format() -> None:
    for image, data in WHOLE.items():
        named = next((kind for kind in KINDS if kind in image), "JPEG")
        assert kind_of(data) == kind_of(memoryview(data)) == named


def test_kind_of_returns_unknown_for_other_bytes() -> None:
    assert kind_of(b"") == kind_of(b"\xff\xd8") == kind_of(BROKEN["text named .jpg"]) == "unknown"
    assert kind_of(b"RIFF....WAVE") == "unknown"


def test_jpeg_header_gives_size_and_components() -> None:
    for image in JPEGS:
        header = jpeg_header(WHOLE[image])
        assert header[:2] == pillow_pixels(WHOLE[image]).shape[:2]
        assert header.components == {"greyscale": 1, "CMYK": 4}.get(image, 3)


def test_jpeg_header_skips_fill_bytes_and_other_markers() -> None:
    jpeg = WHOLE["colour"]
    assert jpeg_header(jpeg[:2] + b"\xff\xff\xff\x01\xff\xd0" + jpeg[2:]) == jpeg_header(jpeg)


def test_jpeg_header_raises_without_a_frame_header() -> None:
    for cut in (0, 1, 3, 30):
        with pytest.raises(DecodeError, match=f"a JPEG of {cut} bytes without a frame header"):
            jpeg_header(WHOLE["colour"][:cut])
    with pytest.raises(DecodeError):
        jpeg_header(b"\xff\xd8\xff" + bytes(100))


def test_ends_like_jpeg_is_false_for_cut_files() -> None:
    for image in JPEGS:
        whole = WHOLE[image]
        assert ends_like_jpeg(whole) is (image != "bytes after the end")
        assert ends_like_jpeg(whole + b"\0\0") is (image != "bytes after the end")
        assert not ends_like_jpeg(whole[: len(whole) * 3 // 4])
    assert not ends_like_jpeg(b"")


def test_png_bit_depth_is_read_from_the_header() -> None:
    assert png_bit_depth(WHOLE["16 bit PNG"]) == 16
    assert png_bit_depth(WHOLE["1 bit PNG"]) == 1
    assert png_bit_depth(WHOLE["RGB PNG"][:20]) == 0


def test_check_inside_refuses_a_region_outside_the_image() -> None:
    Region(0, 0, 10, 20).check_inside(10, 20)
    with pytest.raises(ValueError, match="clip the box to the image"):
        Region(0, 1, 10, 20).check_inside(10, 20)
