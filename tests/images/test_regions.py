"""A region holds the very pixels of the whole image, and at a smaller scale it lies where it should."""

import ctypes
import io
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
from images.made_images import BROKEN, WHOLE, encoded, pillow_pixels, waves
from PIL import Image

from lightning_feed.errors import DecodeError, MissingExtraError
from lightning_feed.images import turbo_region
from lightning_feed.images.choose import FallbackDecoder, make_decoder, psnr_db
from lightning_feed.images.decoders import Region
from lightning_feed.images.turbo_region import TurboRegionDecoder, scale_for, scaled_box

SUBSAMPLINGS = ["444", "422", "420", "440", "411"]


def _noise(seed: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Every pixel matters: a wrong neighbour in the upsampling shows."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _jpeg(seed: int, size: tuple[int, int], subsampling: str, *, progressive: bool) -> bytes:
    data: bytes = simplejpeg.encode_jpeg(_noise(seed, *size), quality=85, colorsubsampling=subsampling)
    if progressive:  # Pillow makes it so, at the same subsampling
        data = encoded(Image.open(io.BytesIO(data)), quality="keep", progressive=True)
    return data


def _random_region(draw: random.Random, height: int, width: int) -> Region:
    top, left = draw.randrange(height), draw.randrange(width)
    return Region(top, left, draw.randint(1, height - top), draw.randint(1, width - left))


def snap(region: Region, size: tuple[int, int], eighths: int) -> Region:
    """The box of full-size pixels that a region really gets at a scale."""
    step = 8 // eighths
    top, left, height, width = scaled_box(region, size, eighths)
    bottom, right = min((top + height) * step, size[0]), min((left + width) * step, size[1])
    return Region(top * step, left * step, bottom - top * step, right - left * step)


@pytest.fixture
def decoder() -> TurboRegionDecoder:
    return TurboRegionDecoder()


@pytest.mark.parametrize("progressive", [False, True], ids=["baseline", "progressive"])
@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_a_decoded_region_equals_the_cut_of_the_whole_image(
    decoder: TurboRegionDecoder, subsampling: str, progressive: bool
) -> None:
    draw = random.Random(subsampling)
    for seed in range(25):
        height, width = draw.randint(1, 150), draw.randint(1, 150)
        data = _jpeg(seed, (height, width), subsampling, progressive=progressive)
        whole = pillow_pixels(data)
        assert np.array_equal(decoder.decode(data), whole)
        for _ in range(6):
            region = _random_region(draw, height, width)
            top, left, rows, columns = region
            pixels = decoder.decode_region(data, region)
            assert pixels.flags.writeable
            assert pixels.dtype == np.uint8
            assert np.array_equal(pixels, whole[top : top + rows, left : left + columns]), (seed, region)


def test_regions_of_every_kind_of_image_equal_cuts_of_pillow_images() -> None:
    """What the library cannot do is cut out of Pillow's image, and counted."""
    for image in WHOLE.keys() - {"one pixel"}:
        decoder = make_decoder("turbo-region").decoder
        assert isinstance(decoder, FallbackDecoder)
        whole = pillow_pixels(WHOLE[image])
        region = Region(0, 5, whole.shape[0], 20)
        for cover in (None, (1, 20)):
            pixels = decoder.decode_region(WHOLE[image], region, cover=cover)
            assert np.array_equal(pixels, whole[:, 5:25]), image
            assert pixels.flags.writeable
        refused = image not in {"bytes after the end"} and (image == "CMYK" or WHOLE[image][:2] != b"\xff\xd8")
        assert sum(decoder.tally.as_dict().values()) == (2 if refused else 0), image


def test_regions_of_broken_images_raise_decode_errors(decoder: TurboRegionDecoder) -> None:
    for one in (decoder, make_decoder("turbo-region").decoder):
        for broken in BROKEN.values():
            with pytest.raises(DecodeError):
                one.decode_region(broken, Region(0, 0, 8, 8))


def test_a_truncated_file_raises_even_if_the_region_is_intact(decoder: TurboRegionDecoder) -> None:
    data = _jpeg(0, (400, 60), "420", progressive=False)
    with pytest.raises(DecodeError, match="Premature end"):
        decoder.decode_region(data[: len(data) * 3 // 4], Region(0, 0, 16, 16))


@pytest.mark.parametrize("image", ["colour", "RGB PNG"])
def test_a_region_outside_the_image_is_refused(image: str) -> None:
    decoder = make_decoder("turbo-region").decoder
    for box in ((-1, 0, 5, 5), (0, 0, 62, 5), (0, 40, 5, 8), (0, 0, 0, 5), (61, 0, 1, 1)):
        with pytest.raises(ValueError, match="is not inside an image of 61 x 47 pixels"):
            decoder.decode_region(WHOLE[image], Region(*box))


# --- smaller scales -------------------------------------------------------------------------------------------------


def test_the_smallest_scale_that_covers_the_target_is_used(decoder: TurboRegionDecoder) -> None:
    data = encoded(Image.fromarray(waves(3, 400, 300)))
    region = Region(0, 0, 400, 300)
    for cover, shape in (
        ((50, 38), (50, 38, 3)),
        ((51, 38), (100, 75, 3)),
        ((100, 76), (200, 150, 3)),
        ((201, 10), (400, 300, 3)),
        ((500, 500), (400, 300, 3)),
    ):
        assert decoder.decode_region(data, region, cover=cover).shape == shape


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440"])
def test_a_scaled_region_equals_the_cut_of_the_scaled_image(decoder: TurboRegionDecoder, subsampling: str) -> None:
    draw = random.Random(subsampling)
    for seed in range(10):
        height, width = draw.randint(64, 200), draw.randint(64, 200)
        data = _jpeg(seed, (height, width), subsampling, progressive=seed % 2 == 0)
        for step in (2, 4, 8):
            small = decoder.decode_region(data, Region(0, 0, height, width), cover=(height // step, width // step))
            assert small.shape == (-(-height // step), -(-width // step), 3)
            box = _random_region(draw, height // step, width // step)
            top, left, rows, columns = box
            region = Region(*(edge * step for edge in box))
            pixels = decoder.decode_region(data, region, cover=(rows, columns))
            assert np.array_equal(pixels, small[top : top + rows, left : left + columns]), (seed, step, region)


def test_a_region_smaller_than_a_pixel_of_the_scale_is_not_scaled(decoder: TurboRegionDecoder) -> None:
    region = Region(11, 21, 3, 3)
    pixels = decoder.decode_region(WHOLE["colour"], region, cover=(1, 1))
    assert pixels.shape == (1, 1, 3)
    assert snap(region, (61, 47), scale_for(region, (61, 47), (1, 1))) == Region(12, 22, 2, 2)


def test_a_scaled_region_is_the_box_rounded_to_whole_pixels_of_the_scale(decoder: TurboRegionDecoder) -> None:
    """Against Pillow's shrunken cut of the same box: a shift by one pixel costs more than 10 dB."""
    pixels_in = waves(3, 600, 500)
    data = encoded(Image.fromarray(pixels_in), quality=95, subsampling=0)
    whole = pillow_pixels(data)
    draw = random.Random(1)
    for _ in range(30):
        region = Region(draw.randrange(200), draw.randrange(200), draw.randint(120, 400), draw.randint(120, 300))
        for step in (2, 4):
            cover = (region.height // step - 1, region.width // step - 1)
            eighths = scale_for(region, (600, 500), cover)
            assert eighths == 8 // step
            box = snap(region, (600, 500), eighths)
            assert abs(box.top - region.top) <= step / 2
            assert abs(box.left + box.width - region.left - region.width) <= step / 2
            pixels = decoder.decode_region(data, region, cover=cover)
            cut = Image.fromarray(whole[box.top : box.top + box.height, box.left : box.left + box.width])
            shrunk = np.asarray(cut.resize((pixels.shape[1], pixels.shape[0]), Image.Resampling.BOX))
            assert psnr_db(pixels, shrunk) > 45
            shifted = np.roll(shrunk, 1, axis=1)
            assert psnr_db(pixels, shifted) < psnr_db(pixels, shrunk) - 10


def test_boxes_rounded_to_a_scale_stay_inside_the_image_and_at_its_edges() -> None:
    assert snap(Region(0, 0, 61, 47), (61, 47), 4) == Region(0, 0, 61, 47)
    assert snap(Region(3, 5, 58, 42), (61, 47), 4) == Region(4, 6, 57, 41)
    assert snap(Region(3, 5, 10, 10), (61, 47), 8) == Region(3, 5, 10, 10)
    for eighths in (1, 2, 4):
        for top in range(20):
            for height in range(1, 21 - top):
                top_, left, rows, columns = snap(Region(top, 0, height, 9), (20, 9), eighths)
                assert top_ >= 0
                assert rows >= 1
                assert top_ + rows <= 20
                assert (left, columns) == (0, 9)


# --- the library ----------------------------------------------------------------------------------------------------


def test_each_thread_has_a_decompressor_of_its_own() -> None:
    together = threading.Barrier(3)

    def mine(_: int) -> int:
        together.wait(30)
        found = id(turbo_region.decompressor())
        assert id(turbo_region.decompressor()) == found
        together.wait(30)
        return found

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(mine, range(3)))) == 3


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turbo_region, "SYSTEM_LIBRARY", "libno-such-library.so.0")
    monkeypatch.setattr(turbo_region.importlib.util, "find_spec", lambda name: None)
    turbo_region.library_path.cache_clear()


@pytest.fixture(autouse=True)
def _forget_the_library() -> None:
    turbo_region.library_path.cache_clear()


def test_a_missing_libjpeg_turbo_names_the_pip_line(no_library: None) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-feed\[images\]'"):
        TurboRegionDecoder()


def test_a_system_library_that_is_too_old_is_named(no_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turbo_region, "SYSTEM_LIBRARY", "libm.so.6")  # a library without tj3Init
    with pytest.raises(MissingExtraError, match=r"libm\.so\.6 of the system is older than 3"):
        TurboRegionDecoder()


def test_a_system_library_of_version_3_is_preferred_to_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    path = turbo_region.library_path()
    turbo_region.library_path.cache_clear()
    monkeypatch.setattr(turbo_region, "SYSTEM_LIBRARY", path)
    monkeypatch.setattr(turbo_region.importlib.util, "find_spec", lambda name: pytest.fail("looked for the wheel"))
    assert turbo_region.library_path() == path


def test_an_older_library_is_refused_when_opened() -> None:
    with pytest.raises(MissingExtraError, match="2 or older"):
        turbo_region.TurboJpeg("libm.so.6")


def test_the_wheel_holds_the_library() -> None:
    path = turbo_region.library_path()
    assert Path(path).name.startswith("libturbojpeg")
    assert hasattr(ctypes.CDLL(path), "tj3SetCroppingRegion")
