"""Which decoder "auto" takes, on a clock that only the decoders move; what goes to Pillow is counted and said once."""

import dataclasses
import logging
import multiprocessing
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from images.made_images import BROKEN, HEIGHT, WHOLE, WIDTH, pillow_pixels
from skimage.metrics import peak_signal_noise_ratio
from torch.utils.data import DataLoader, Dataset

from lightning_feed.errors import DecodeError, MissingExtraError, SettingsError
from lightning_feed.images import choose, decoders
from lightning_feed.images.choose import (
    DECODER_NAMES,
    DecoderChoice,
    FallbackDecoder,
    make_decoder,
    psnr_db,
    with_fallback,
)
from lightning_feed.images.decoders import Decoder, PillowDecoder, Pixels, Region, TurboDecoder
from lightning_feed.images.header import Encoded
from lightning_feed.load.counts import SharedCounts

SAMPLES = [WHOLE["colour"], WHOLE["progressive"], WHOLE["4:4:4"]]


class Clock:
    """Seconds that only pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Decoder):
    """Pillow's pixels, changed by ``noise`` grey levels, for ``seconds`` on the clock."""

    def __init__(self, clock: Clock, seconds: float, *, noise: int = 0, refuses: tuple[bytes, ...] = ()) -> None:
        self.name = "timed"
        self.clock, self.seconds, self.noise, self.refuses = clock, seconds, noise, refuses

    def decode(self, data: Encoded) -> Pixels:
        if data in self.refuses:
            raise DecodeError("not for me")
        self.clock.now += self.seconds
        return np.clip(pillow_pixels(bytes(data)).astype(int) + self.noise, 0, 255).astype(np.uint8)

    def size(self, data: Encoded) -> tuple[int, int]:
        return HEIGHT, WIDTH


class TimedRegions(Timed):
    """Regions take half of the time."""

    decodes_regions = True

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        self.clock.now += self.seconds / 2
        top, left, height, width = region
        return pillow_pixels(bytes(data))[top : top + height, left : left + width]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that Pillow moves by 3 ms, when it is asked to decode."""
    clock = Clock()
    decode = PillowDecoder.decode

    def slow(self: PillowDecoder, data: Encoded) -> Pixels:
        clock.now += 0.003
        return decode(self, data)

    monkeypatch.setattr(PillowDecoder, "decode", slow)
    return clock


Racing = Callable[..., None]


@pytest.fixture
def racing(monkeypatch: pytest.MonkeyPatch) -> Racing:
    """Sets who takes part, besides Pillow."""

    def racing(**decoders: Decoder) -> None:
        makers = {name: (lambda decoder=decoder: decoder) for name, decoder in decoders.items()}
        monkeypatch.setattr(choose, "_MAKERS", {**makers, "pillow": PillowDecoder})

    return racing


def _auto(clock: Clock, *, regions: bool = False, samples: list[bytes] | None = None) -> DecoderChoice:
    return make_decoder("auto", samples or SAMPLES, regions=regions, clock=clock)


def test_auto_takes_the_fastest_decoder_and_reports_its_timings(clock: Clock, racing: Racing) -> None:
    racing(slow=Timed(clock, 0.002), quick=Timed(clock, 0.001))
    choice = _auto(clock)
    assert choice.name == "quick"
    assert isinstance(choice.decoder, FallbackDecoder)
    assert {name: one.ms for name, one in choice.table.items()} == pytest.approx({"slow": 2, "quick": 1, "pillow": 3})
    assert choice.reason == (
        "decoder=\"auto\" took 'quick': 1.00 ms per image (whole images, 3 of your images), Pillow's own pixels; "
        "slow 2.00 ms, pillow 3.00 ms"
    )


def test_auto_takes_pillow_if_no_decoder_is_faster(clock: Clock, racing: Racing) -> None:
    racing(slow=Timed(clock, 0.004))
    choice = _auto(clock)
    assert choice.name == "pillow"
    assert isinstance(choice.decoder, PillowDecoder)


def test_auto_rejects_a_fast_decoder_whose_pixels_differ_from_pillow(clock: Clock, racing: Racing) -> None:
    racing(rough=Timed(clock, 0.0001, noise=2), fine=Timed(clock, 0.002, noise=1))
    choice = _auto(clock)
    assert choice.name == "fine"
    assert choice.table["fine"].psnr_db == pytest.approx(48.1, abs=0.2)
    assert choice.table["rough"].out.endswith("dB to Pillow, less than 45")
    assert "rough out: 42.1 dB to Pillow, less than 45" in choice.reason
    assert "48.1 dB or more to Pillow" in choice.reason


def test_auto_rejects_a_decoder_that_returns_another_shape(clock: Clock, racing: Racing) -> None:
    class Turned(Timed):
        def decode(self, data: Encoded) -> Pixels:
            return super().decode(data).transpose(1, 0, 2)

    racing(turned=Turned(clock, 0.001))
    assert _auto(clock).table["turned"].out == "returns (47, 61, 3), but Pillow returns (61, 47, 3)"


@pytest.mark.parametrize(("milliseconds", "taken"), [(1.04, "regions"), (1.06, "whole")])
def test_auto_prefers_a_region_decoder_in_a_tie(clock: Clock, racing: Racing, milliseconds: float, taken: str) -> None:
    racing(whole=Timed(clock, 0.001), regions=TimedRegions(clock, milliseconds / 1e3))
    assert _auto(clock).name == taken


def test_auto_ignores_one_slow_round(clock: Clock, racing: Racing) -> None:
    class Hiccup(Timed):
        calls = 0

        def decode(self, data: Encoded) -> Pixels:
            self.calls += 1
            if self.calls == 2 * len(SAMPLES):  # in the first timed round: before it each sample was compared
                self.clock.now += 60
            return super().decode(data)

    racing(quick=Hiccup(clock, 0.001), other=Timed(clock, 0.002))
    assert _auto(clock).name == "quick"


def test_auto_times_region_decoding_if_regions_will_be_decoded(clock: Clock, racing: Racing) -> None:
    racing(whole=Timed(clock, 0.001), regions=TimedRegions(clock, 0.0015))
    assert _auto(clock).name == "whole"
    choice = _auto(clock, regions=True)
    assert choice.name == "regions"
    assert choice.table["regions"].ms == pytest.approx(0.75)
    assert "random crops" in choice.reason


def test_auto_adds_the_time_of_pillow_for_samples_a_decoder_refuses(clock: Clock, racing: Racing) -> None:
    racing(some=Timed(clock, 0.001, refuses=(SAMPLES[0],)), none=Timed(clock, 0.001, refuses=tuple(SAMPLES)))
    choice = _auto(clock)
    assert choice.table["some"].ms == pytest.approx((3 + 1 + 1) / 3)
    assert choice.table["none"].out == "decodes none of the samples"
    assert choice.name == "some"


def test_auto_rejects_a_missing_library_and_names_its_pip_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    decoders._simplejpeg.cache_clear()
    assert "pip install 'lightning-feed[images]'" in make_decoder("auto", SAMPLES, clock=clock).table["turbo"].out
    with pytest.raises(MissingExtraError, match=r"decoder=\"turbo\" needs simplejpeg.*lightning-feed\[images\]"):
        make_decoder("turbo")


def test_auto_skips_broken_samples_and_raises_if_all_are_broken(clock: Clock, racing: Racing) -> None:
    racing(quick=Timed(clock, 0.001))
    assert "1 of your images" in _auto(clock, samples=[BROKEN["0 bytes"], SAMPLES[0]]).reason
    with pytest.raises(DecodeError, match="got 2 samples, and none can be decoded"):
        _auto(clock, samples=[BROKEN["0 bytes"], BROKEN["text named .jpg"]])


def test_auto_times_at_most_64_samples_and_fewer_large_ones(
    clock: Clock, racing: Racing, monkeypatch: pytest.MonkeyPatch
) -> None:
    racing(quick=Timed(clock, 0.001))
    assert "64 of your images" in _auto(clock, samples=[SAMPLES[0]] * 100).reason
    monkeypatch.setattr(choose, "MAX_PIXELS", 10 * HEIGHT * WIDTH)
    assert "10 of your images" in _auto(clock, samples=[SAMPLES[0]] * 100).reason
    monkeypatch.setattr(choose, "MAX_PIXELS", 1)
    assert "4 of your images" in _auto(clock, samples=[SAMPLES[0]] * 100).reason


def test_auto_measures_all_installed_decoders_without_rejecting_any() -> None:
    """With the real clock: whichever is fastest, all that are installed were measured and none lost a pixel."""
    choice = make_decoder("auto", [data for name, data in WHOLE.items() if name != "one pixel"], regions=True)
    assert set(choice.table) == set(DECODER_NAMES) - {"auto"}
    assert {name: one.out for name, one in choice.table.items() if one.out} == {}
    assert np.array_equal(choice.decoder.decode(WHOLE["CMYK"]).shape, (HEIGHT, WIDTH, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("samples", [None, []])
def test_auto_needs_samples(samples: list[bytes] | None) -> None:
    with pytest.raises(SettingsError, match="pass samples"):
        make_decoder("auto", samples)


def test_an_unknown_decoder_name_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"decoder='fast' is not valid. Use one of 'auto', 'turbo-region'"):
        make_decoder("fast")


def test_a_decoder_chosen_by_name_is_not_measured() -> None:
    choice = make_decoder("pillow", SAMPLES)
    assert (choice.name, choice.reason, choice.table) == ("pillow", "decoder='pillow', as requested", {})


# --- Pillow behind the others -----------------------------------------------------------------------------------------


class Fussy(Decoder):
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

    decodes_regions = True

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        return self.decode(data)[: region.height, : region.width]


class Images(Dataset[int]):
    """Decodes the same few images over and over."""

    def __init__(self, decoder: Decoder, images: list[bytes], length: int) -> None:
        self.decoder, self.images, self.length = decoder, images, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(self.decoder.decode(self.images[index % len(self.images)]).shape[0])


def test_image_kinds_a_decoder_does_not_support_go_straight_to_pillow() -> None:
    fussy = Fussy()
    decoder = FallbackDecoder(fussy)
    assert np.array_equal(decoder.decode(WHOLE["RGBA PNG"]), pillow_pixels(WHOLE["RGBA PNG"]))
    assert decoder.size(WHOLE["RGBA PNG"]) == (HEIGHT, WIDTH)
    assert fussy.asked == 0
    assert decoder.tally.as_dict() == {"PNG": 1}


def test_fallbacks_to_pillow_are_counted_by_image_kind() -> None:
    decoder = FallbackDecoder(Fussy(limit=0))
    for image in ("colour", "greyscale", "CMYK", "GIF", "BMP", "TIFF", "WebP", "RGB PNG", "RGBA PNG"):
        assert np.array_equal(decoder.decode(WHOLE[image]), pillow_pixels(WHOLE[image]))
        assert decoder.size(WHOLE[image]) == (HEIGHT, WIDTH)
    assert decoder.tally.as_dict() == {"JPEG": 2, "CMYK JPEG": 1, "GIF": 1, "BMP": 1, "TIFF": 1, "WebP": 1, "PNG": 2}


def test_images_that_pillow_refuses_too_raise_and_are_not_counted() -> None:
    decoder = FallbackDecoder(Fussy(limit=0))
    for broken in BROKEN.values():
        with pytest.raises(DecodeError):
            decoder.decode(broken)
    assert decoder.tally.as_dict() == {}


def test_a_corrupt_jpeg_that_pillow_reads_is_decoded_by_pillow() -> None:
    """Pillow reads on where libjpeg-turbo warns; strictness must not lose an image that ImageFolder would give."""
    corrupt = WHOLE["colour"][:-2] + bytes(30) + WHOLE["colour"][-2:]
    reference = pillow_pixels(corrupt)
    decoder = with_fallback(TurboDecoder())
    with pytest.raises(DecodeError, match="Corrupt JPEG data"):
        decoder.primary.decode(corrupt)
    assert np.array_equal(decoder.decode(corrupt), reference)
    assert decoder.tally.as_dict() == {"JPEG": 1}


def test_fallbacks_are_logged_once_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    decoder = FallbackDecoder(Fussy(limit=0))
    with caplog.at_level(logging.WARNING, logger="lightning_feed"):
        for image in ("RGB PNG", "RGBA PNG", "colour", "greyscale"):
            decoder.decode(WHOLE[image])
    assert [record.getMessage() for record in caplog.records] == [
        "decoder='fussy' leaves images of the kind PNG to pillow: 'fussy' decodes only JPEG. "
        "Later ones are only counted.",
        "decoder='fussy' leaves images of the kind JPEG to pillow: too long for me. Later ones are only counted.",
    ]


def test_regions_of_refused_images_are_cut_from_the_whole_pillow_image() -> None:
    decoder = with_fallback(FussyRegions(limit=0))
    assert decoder.decodes_regions
    region = Region(10, 5, 20, 30)
    for image in ("colour", "RGB PNG"):
        pixels = decoder.decode_region(WHOLE[image], region)
        assert np.array_equal(pixels, pillow_pixels(WHOLE[image])[10:30, 5:35])
        assert pixels.flags.writeable
    assert decoder.tally.as_dict() == {"JPEG": 1, "PNG": 1}
    assert with_fallback(FussyRegions()).decode_region(WHOLE["colour"], region).shape == (20, 30, 3)
    assert not with_fallback(Fussy()).decodes_regions


# --- the tally, across threads and processes ------------------------------------------------------------------------


def test_counts_from_several_threads_are_complete() -> None:
    tally = SharedCounts(*choose.REASONS)
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


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_fallbacks_in_workers_are_counted_in_the_main_process(method: str, fork_warning_ignored: None) -> None:
    decoder = with_fallback(TurboDecoder())
    images = [WHOLE[image] for image in ("RGB PNG", "colour", "GIF", "colour")]
    loader = DataLoader(
        Images(decoder, images, 40), batch_size=4, num_workers=2, multiprocessing_context=method, timeout=200
    )
    assert sum(len(batch) for batch in loader) == 40
    assert decoder.tally.as_dict() == {"PNG": 10, "GIF": 10}
    decoder.decode(WHOLE["RGB PNG"])
    assert decoder.tally.as_dict() == {"PNG": 11, "GIF": 10}


def test_a_lock_held_during_a_fork_does_not_block_the_child(fork_warning_ignored: None) -> None:
    tally, over = SharedCounts(*choose.REASONS), threading.Event()

    def count() -> None:
        while not over.is_set():
            tally.add("GIF")

    counting = threading.Thread(target=count)
    counting.start()
    children = [multiprocessing.get_context("fork").Process(target=tally.add, args=("PNG",)) for _ in range(5)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        child.kill()
    over.set()
    counting.join()
    assert tally.as_dict()["PNG"] == 5


# --- PSNR -------------------------------------------------------------------------------------------------------------


def test_psnr_db_matches_scikit_image() -> None:
    draw = np.random.default_rng(0)
    for spread in (1, 5, 100):
        image = draw.integers(0, 256, (40, 30, 3), dtype=np.uint8)
        other = np.clip(image.astype(int) + draw.integers(-spread, spread + 1, image.shape), 0, 255).astype(np.uint8)
        assert psnr_db(image, other) == pytest.approx(peak_signal_noise_ratio(image, other), rel=1e-9)
