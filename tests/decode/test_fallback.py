"""What a decoder leaves to Pillow is counted, by whichever worker, and said once."""

import logging
import multiprocessing
import os
import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from decode.made_images import BROKEN, HEIGHT, WHOLE, WIDTH, pillow_pixels
from torch.utils.data import DataLoader, Dataset

from lightning_feed.decode.decoder import Decoder, Encoded, Pixels, Region, RegionDecoder
from lightning_feed.decode.fallback import FallbackDecoder, FallbackTally, RegionFallbackDecoder, with_fallback
from lightning_feed.decode.pillow_decoder import PillowDecoder
from lightning_feed.decode.turbo_decoder import TurboDecoder
from lightning_feed.errors import DecodeError


class Fussy:
    """Decodes JPEGs to black, and refuses those that are longer than a limit."""

    name = "fussy"
    kinds = frozenset({"JPEG"})

    def __init__(self, limit: int = 10**6) -> None:
        self.limit = limit
        self.asked = 0

    def decode(self, data: Encoded) -> Pixels:
        self.asked += 1
        if len(data) > self.limit:
            raise DecodeError("too long for me")
        return np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)

    def size(self, data: Encoded) -> tuple[int, int]:
        self.decode(data)
        return HEIGHT, WIDTH


class FussyRegions(Fussy):
    """The same for regions."""

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        return self.decode(data)[: region.height, : region.width]


class Pictures(Dataset[int]):
    """Decodes the same few pictures over and over."""

    def __init__(self, decoder: Decoder, pictures: list[bytes], length: int) -> None:
        self.decoder, self.pictures, self.length = decoder, pictures, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(self.decoder.decode(self.pictures[index % len(self.pictures)]).shape[0])


def test_another_kind_is_not_even_tried() -> None:
    fussy = Fussy()
    decoder = FallbackDecoder(fussy)
    assert np.array_equal(decoder.decode(WHOLE["RGBA PNG"]), pillow_pixels(WHOLE["RGBA PNG"]))
    assert decoder.size(WHOLE["RGBA PNG"]) == (HEIGHT, WIDTH)
    assert fussy.asked == 0
    assert decoder.tally.as_dict() == {"PNG": 1}


def test_what_it_can_do_is_its_own() -> None:
    decoder = FallbackDecoder(Fussy())
    assert not decoder.decode(WHOLE["colour"]).any()
    assert decoder.size(WHOLE["colour"]) == (HEIGHT, WIDTH)
    assert decoder.tally.as_dict() == {}


def test_reasons() -> None:
    decoder = FallbackDecoder(Fussy(limit=0))
    for image in ("colour", "greyscale", "CMYK", "GIF", "BMP", "TIFF", "WebP", "RGB PNG", "RGBA PNG"):
        assert np.array_equal(decoder.decode(WHOLE[image]), pillow_pixels(WHOLE[image]))
        assert decoder.size(WHOLE[image]) == (HEIGHT, WIDTH)
    assert decoder.tally.as_dict() == {"JPEG": 2, "CMYK JPEG": 1, "GIF": 1, "BMP": 1, "TIFF": 1, "WebP": 1, "PNG": 2}


@pytest.mark.parametrize("image", BROKEN)
def test_what_pillow_refuses_too_is_an_error_and_no_fallback(image: str) -> None:
    decoder = FallbackDecoder(Fussy(limit=0))
    with pytest.raises(DecodeError):
        decoder.decode(BROKEN[image])
    assert decoder.tally.as_dict() == {}


def test_a_jpeg_that_is_corrupt_but_not_for_pillow() -> None:
    """Pillow reads on where libjpeg-turbo warns; strictness must not lose a picture that ImageFolder would give."""
    corrupt = WHOLE["colour"][:-2] + bytes(30) + WHOLE["colour"][-2:]
    reference = pillow_pixels(corrupt)
    decoder = with_fallback(TurboDecoder())
    with pytest.raises(DecodeError, match="Corrupt JPEG data"):
        decoder.primary.decode(corrupt)
    assert np.array_equal(decoder.decode(corrupt), reference)
    assert decoder.tally.as_dict() == {"JPEG": 1}


def test_said_once_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    decoder = FallbackDecoder(Fussy(limit=0))
    with caplog.at_level(logging.WARNING, logger="lightning_feed"):
        for image in ("RGB PNG", "RGBA PNG", "colour", "greyscale"):
            decoder.decode(WHOLE[image])
    assert [record.getMessage() for record in caplog.records] == [
        "decoder='fussy' leaves images of the kind PNG to pillow: 'fussy' decodes only JPEG. "
        "Further ones are only counted.",
        "decoder='fussy' leaves images of the kind JPEG to pillow: too long for me. Further ones are only counted.",
    ]


def test_regions_of_what_it_refuses_are_cut_out() -> None:
    decoder = with_fallback(FussyRegions(limit=0))
    assert isinstance(decoder, RegionFallbackDecoder)
    assert isinstance(decoder, RegionDecoder)
    region = Region(10, 5, 20, 30)
    for image in ("colour", "RGB PNG"):
        pixels = decoder.decode_region(WHOLE[image], region)
        assert np.array_equal(pixels, pillow_pixels(WHOLE[image])[10:30, 5:35])
        assert pixels.flags.writeable
    assert decoder.tally.as_dict() == {"JPEG": 1, "PNG": 1}
    assert with_fallback(FussyRegions()).decode_region(WHOLE["colour"], region).shape == (20, 30, 3)
    assert not isinstance(with_fallback(Fussy()), RegionDecoder)


def test_a_reference_of_the_callers() -> None:
    decoder = FallbackDecoder(Fussy(limit=0), reference=Fussy())
    assert not decoder.decode(WHOLE["colour"]).any()
    assert isinstance(FallbackDecoder(Fussy()).reference, PillowDecoder)


# --- the tally, across threads and processes ------------------------------------------------------------------------


def test_threads_lose_no_count() -> None:
    tally = FallbackTally()
    with ThreadPoolExecutor(8) as pool:
        firsts = list(pool.map(tally.add, ["PNG"] * 2000))
    assert tally.as_dict() == {"PNG": 2000}
    assert sum(firsts) == 1


@pytest.fixture
def fork_warning_ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        # Python 3.12 and later: threads of earlier tests are alive when we fork.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        yield


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_count_where_the_main_process_reads(method: str, fork_warning_ignored: None) -> None:
    decoder = with_fallback(TurboDecoder())
    pictures = [WHOLE[image] for image in ("RGB PNG", "colour", "GIF", "colour")]
    loader = DataLoader(
        Pictures(decoder, pictures, 40), batch_size=4, num_workers=2, multiprocessing_context=method, timeout=200
    )
    assert sum(len(batch) for batch in loader) == 40
    assert decoder.tally.as_dict() == {"PNG": 10, "GIF": 10}
    decoder.decode(WHOLE["RGB PNG"])
    assert decoder.tally.as_dict() == {"PNG": 11, "GIF": 10}


def test_a_lock_held_at_a_fork_does_not_stop_the_child(fork_warning_ignored: None) -> None:
    tally = FallbackTally()
    with tally._lock:
        child = multiprocessing.get_context("fork").Process(target=tally.add, args=("PNG",))
        child.start()
        child.join(60)
        alive = child.is_alive()
        if alive:
            child.kill()
    assert not alive
    assert tally.as_dict() == {"PNG": 1}


def test_plain_pickle_copies_the_counts() -> None:
    tally = FallbackTally()
    tally.add("GIF")
    copy = pickle.loads(pickle.dumps(tally))
    copy.add("GIF")
    assert copy.as_dict() == {"GIF": 2}
    assert tally.as_dict() == {"GIF": 1}


def test_each_process_counts_in_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = FallbackTally()
    here = os.getpid()
    for pid in (here, here + 1, here + 1):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        tally.add("BMP")
    assert tally.as_dict() == {"BMP": 3}
    assert torch.count_nonzero(tally._counts) == 2
