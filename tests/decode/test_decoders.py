"""Every decoder equals Pillow on every kind of image, or leaves it to Pillow and counts it."""

import functools
import pickle
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from decode.made_images import BROKEN, HEIGHT, WHOLE, WIDTH, pillow_pixels
from PIL import Image

from lightning_feed.decode.choose import DECODER_NAMES, make_decoder
from lightning_feed.decode.decoder import Decoder, RegionDecoder
from lightning_feed.decode.fallback import FallbackDecoder
from lightning_feed.decode.fidelity import psnr_db
from lightning_feed.decode.opencv_decoder import open_cv2
from lightning_feed.decode.pillow_decoder import refuse_bomb
from lightning_feed.errors import DecodeError, MissingExtraError

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


@pytest.mark.parametrize("image", WHOLE)
@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_pillow(name: str, image: str) -> None:
    pixels = _decoder(name).decode(WHOLE[image])
    reference = pillow_pixels(WHOLE[image])
    assert pixels.shape == reference.shape
    assert psnr_db(pixels, reference) >= MIN_PSNR_DB
    assert _decoder(name).size(WHOLE[image]) == reference.shape[:2]


@pytest.mark.parametrize("image", WHOLE)
@pytest.mark.parametrize("name", FAST)
def test_what_it_does_not_do_is_refused_and_counted(name: str, image: str) -> None:
    """So no kind goes to Pillow for want of trying, and none without a count."""
    decoder = make_decoder(name).decoder
    assert isinstance(decoder, FallbackDecoder)
    decoder.decode(WHOLE[image])
    counted = decoder.tally.as_dict()
    try:
        pixels = _primary(name).decode(WHOLE[image])
    except DecodeError:
        assert sum(counted.values()) == 1
        assert image not in FROM_ITSELF[name]
    else:
        assert counted == {}
        assert image in FROM_ITSELF[name]
        assert psnr_db(pixels, pillow_pixels(WHOLE[image])) >= MIN_PSNR_DB


@pytest.mark.parametrize("image", BROKEN)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_whole_image_is_an_error(name: str, image: str) -> None:
    decoder = make_decoder(name).decoder
    for one in (decoder, _primary(name)):
        with pytest.raises(DecodeError):
            one.decode(BROKEN[image])
    if isinstance(decoder, FallbackDecoder):
        assert decoder.tally.as_dict() == {}, "a corrupt file is not a fallback"


@pytest.mark.parametrize("name", NAMES)
def test_the_error_says_what_is_wrong(name: str) -> None:
    with pytest.raises(DecodeError, match="0 bytes: the file is empty"):
        _decoder(name).decode(BROKEN["0 bytes"])
    with pytest.raises(DecodeError, match=r"340 bytes that begin with b'this is ' are no image"):
        _decoder(name).decode(BROKEN["text named .jpg"])
    with pytest.raises(DecodeError, match="truncated"):
        _decoder(name).decode(BROKEN["JPEG cut in the middle"])
    with pytest.raises(DecodeError):
        _decoder(name).size(BROKEN["0 bytes"])


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_file_does_not_disturb_the_next(name: str) -> None:
    reference = pillow_pixels(WHOLE["colour"])
    for broken in BROKEN.values():
        with pytest.raises(DecodeError):
            _decoder(name).decode(broken)
        assert np.array_equal(_decoder(name).decode(WHOLE["colour"]), reference)


@pytest.mark.parametrize("image", ["colour", "RGB PNG"])
@pytest.mark.parametrize("name", NAMES)
def test_a_header_that_asks_for_all_memory(name: str, image: str) -> None:
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


def test_the_limit_on_pixels_is_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", HEIGHT * WIDTH // 2)
    refuse_bomb(HEIGHT, WIDTH - 1)
    with pytest.raises(DecodeError, match="47 x 61 pixels are more than Pillow's limit of 2866"):
        refuse_bomb(HEIGHT, WIDTH)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    refuse_bomb(10**6, 10**6)


@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_the_callers(name: str) -> None:
    decoder = _decoder(name)
    pixels = decoder.decode(WHOLE["colour"])
    assert pixels.dtype == np.uint8
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    again = pixels.copy()
    pixels[:] = 0
    assert np.array_equal(decoder.decode(WHOLE["colour"]), again), "the next image came out of the same memory"


@pytest.mark.parametrize("image", ["colour", "RGB PNG"])
@pytest.mark.parametrize("name", NAMES)
def test_any_buffer_of_bytes_will_do(name: str, image: str) -> None:
    data = WHOLE[image]
    reference = pillow_pixels(data)
    array = np.frombuffer(data, dtype=np.uint8)
    for form in (bytearray(data), memoryview(data), memoryview(b"--" + data)[2:], array, array.copy()):
        assert np.array_equal(_decoder(name).decode(form), reference)
        assert _decoder(name).size(form) == (HEIGHT, WIDTH)


@pytest.mark.parametrize("name", NAMES)
def test_threads_may_share_it(name: str) -> None:
    decoder = make_decoder(name).decoder
    pictures = [WHOLE[image] for image in sorted(JPEGS - {"CMYK"})]
    references = [pillow_pixels(data) for data in pictures]
    together = threading.Barrier(4)

    def many(_: int) -> int:
        together.wait(30)
        return sum(
            np.array_equal(decoder.decode(data), reference)
            for _ in range(10)
            for data, reference in zip(pictures, references, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(many, range(4))) == [10 * len(pictures)] * 4


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_pickled(name: str) -> None:
    decoder = make_decoder(name).decoder
    decoder.decode(WHOLE["colour"])  # what it holds by then must not matter
    copy = pickle.loads(pickle.dumps(decoder))
    assert copy.name == name
    assert np.array_equal(copy.decode(WHOLE["colour"]), pillow_pixels(WHOLE["colour"]))


@pytest.mark.parametrize("name", NAMES)
def test_only_decoders_of_regions_say_that_they_are(name: str) -> None:
    assert isinstance(_decoder(name), Decoder)
    assert isinstance(_decoder(name), RegionDecoder) is (name == "turbo-region")


def test_torchvision_stays_quiet_where_all_warnings_are_shown() -> None:
    code = (
        "import io, numpy as np; from PIL import Image\n"
        "from lightning_feed.decode.torchvision_decoder import TorchvisionDecoder\n"
        "file = io.BytesIO(); Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file, 'JPEG')\n"
        "print(TorchvisionDecoder().decode(file.getvalue()).shape)"
    )
    command = [sys.executable, "-W", "always:The image decoding:DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "(8, 8, 3)\n"
    assert "TorchVision are deprecated" not in done.stderr


def test_an_opencv_that_fills_cut_files_with_grey_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cv2, "__version__", "4.10.0")
    monkeypatch.delattr(cv2, "IMREAD_COLOR_RGB")
    open_cv2.cache_clear()
    with pytest.raises(
        MissingExtraError, match=r"needs 4\.11 or newer, and 4\.10\.0 is installed.*lightning-feed\[images\]"
    ):
        make_decoder("opencv")


def test_opencv_opens_no_threads_of_its_own() -> None:
    cv2.setNumThreads(2)
    open_cv2.cache_clear()
    make_decoder("opencv")
    assert cv2.getNumThreads() == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sides", [(0, 0), (0, 8), (8, 0)])
def test_a_jpeg_without_pixels_is_refused_before_a_crop_is_chosen(name: str, sides: tuple[int, int]) -> None:
    jpeg = WHOLE["colour"]
    at = jpeg.index(b"\xff\xc0") + 5  # height and width in the frame header
    empty = jpeg[:at] + b"".join(side.to_bytes(2, "big") for side in sides) + jpeg[at + 4 :]
    for read in (make_decoder(name).decoder, _primary(name)):
        for call in (read.size, read.decode):
            with pytest.raises(DecodeError):
                call(empty)
