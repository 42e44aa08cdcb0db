"""Which decoder "auto" takes, on a clock that only the decoders move."""

import dataclasses
import sys
from collections.abc import Callable

import numpy as np
import pytest
from decode.made_images import BROKEN, HEIGHT, WHOLE, WIDTH, pillow_pixels

from lightning_feed.decode import choose
from lightning_feed.decode.choose import DECODER_NAMES, Choice, make_decoder
from lightning_feed.decode.decoder import Decoder, Encoded, Pixels, Region
from lightning_feed.decode.fallback import FallbackDecoder
from lightning_feed.decode.pillow_decoder import PillowDecoder
from lightning_feed.errors import DecodeError, MissingExtraError, SettingsError

SAMPLES = [WHOLE["colour"], WHOLE["progressive"], WHOLE["4:4:4"]]


class Clock:
    """Seconds that only pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
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


def _auto(clock: Clock, *, regions: bool = False, samples: list[bytes] | None = None) -> Choice:
    return make_decoder("auto", samples or SAMPLES, regions=regions, clock=clock)


def test_the_fastest_is_taken_with_its_figures(clock: Clock, racing: Racing) -> None:
    racing(slow=Timed(clock, 0.002), quick=Timed(clock, 0.001))
    choice = _auto(clock)
    assert choice.name == "quick"
    assert isinstance(choice.decoder, FallbackDecoder)
    assert {name: one.ms for name, one in choice.table.items()} == pytest.approx({"slow": 2, "quick": 1, "pillow": 3})
    assert choice.reason == (
        "decoder=\"auto\" took 'quick': 1.00 ms per image (whole images, 3 of your images), Pillow's own pixels; "
        "slow 2.00 ms, pillow 3.00 ms"
    )


def test_pillow_itself_when_nothing_is_faster(clock: Clock, racing: Racing) -> None:
    racing(slow=Timed(clock, 0.004))
    choice = _auto(clock)
    assert choice.name == "pillow"
    assert isinstance(choice.decoder, PillowDecoder)


def test_too_far_from_pillow_is_out_however_fast(clock: Clock, racing: Racing) -> None:
    racing(rough=Timed(clock, 0.0001, noise=2), fine=Timed(clock, 0.002, noise=1))
    choice = _auto(clock)
    assert choice.name == "fine"
    assert choice.table["fine"].psnr_db == pytest.approx(48.1, abs=0.2)
    assert choice.table["rough"].out.endswith("dB to Pillow, less than 45")
    assert "rough out: 42.1 dB to Pillow, less than 45" in choice.reason
    assert "48.1 dB or more to Pillow" in choice.reason


def test_another_shape_is_out(clock: Clock, racing: Racing) -> None:
    class Turned(Timed):
        def decode(self, data: Encoded) -> Pixels:
            return super().decode(data).transpose(1, 0, 2)

    racing(turned=Turned(clock, 0.001))
    assert _auto(clock).table["turned"].out == "gives (47, 61, 3) where Pillow gives (61, 47, 3)"


@pytest.mark.parametrize(("milliseconds", "taken"), [(1.04, "regions"), (1.06, "whole")])
def test_a_tie_goes_to_the_decoder_of_regions(clock: Clock, racing: Racing, milliseconds: float, taken: str) -> None:
    racing(whole=Timed(clock, 0.001), regions=TimedRegions(clock, milliseconds / 1e3))
    assert _auto(clock).name == taken


def test_one_slow_round_is_outvoted(clock: Clock, racing: Racing) -> None:
    class Hiccup(Timed):
        calls = 0

        def decode(self, data: Encoded) -> Pixels:
            self.calls += 1
            if self.calls == 2 * len(SAMPLES):  # in the first timed round: before it each sample was compared
                self.clock.now += 60
            return super().decode(data)

    racing(quick=Hiccup(clock, 0.001), other=Timed(clock, 0.002))
    assert _auto(clock).name == "quick"


def test_regions_are_timed_where_they_will_be_decoded(clock: Clock, racing: Racing) -> None:
    racing(whole=Timed(clock, 0.001), regions=TimedRegions(clock, 0.0015))
    assert _auto(clock).name == "whole"
    choice = _auto(clock, regions=True)
    assert choice.name == "regions"
    assert choice.table["regions"].ms == pytest.approx(0.75)
    assert "random crops" in choice.reason


def test_what_it_refuses_costs_it_the_time_of_pillow(clock: Clock, racing: Racing) -> None:
    racing(some=Timed(clock, 0.001, refuses=(SAMPLES[0],)), none=Timed(clock, 0.001, refuses=tuple(SAMPLES)))
    choice = _auto(clock)
    assert choice.table["some"].ms == pytest.approx((3 + 1 + 1) / 3)
    assert choice.table["some"].refused == 1
    assert choice.table["none"].out == "decodes none of the samples"
    assert choice.name == "some"


def test_a_missing_library_is_out_with_its_pip_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert "pip install 'lightning-feed[images]'" in make_decoder("auto", SAMPLES, clock=clock).table["turbo"].out
    with pytest.raises(MissingExtraError, match=r"decoder=\"turbo\" needs simplejpeg.*lightning-feed\[images\]"):
        make_decoder("turbo")


def test_broken_samples_are_passed_over(clock: Clock, racing: Racing) -> None:
    racing(quick=Timed(clock, 0.001))
    assert "1 of your images" in _auto(clock, samples=[BROKEN["0 bytes"], SAMPLES[0]]).reason
    with pytest.raises(DecodeError, match="got 2 samples, and none can be decoded"):
        _auto(clock, samples=[BROKEN["0 bytes"], BROKEN["text named .jpg"]])


def test_at_most_64_samples_and_fewer_large_ones(clock: Clock, racing: Racing, monkeypatch: pytest.MonkeyPatch) -> None:
    racing(quick=Timed(clock, 0.001))
    assert "64 of your images" in _auto(clock, samples=[SAMPLES[0]] * 100).reason
    monkeypatch.setattr(choose, "MAX_PIXELS", 10 * HEIGHT * WIDTH)
    assert "10 of your images" in _auto(clock, samples=[SAMPLES[0]] * 100).reason
    monkeypatch.setattr(choose, "MAX_PIXELS", 1)
    assert "4 of your images" in _auto(clock, samples=[SAMPLES[0]] * 100).reason


def test_the_installed_ones_on_made_images() -> None:
    """With the real clock: whichever is fastest, all that are installed were measured and none lost a pixel."""
    choice = make_decoder("auto", [data for name, data in WHOLE.items() if name != "one pixel"], regions=True)
    assert set(choice.table) == set(DECODER_NAMES) - {"auto"}
    assert {name: one.out for name, one in choice.table.items() if one.out} == {}
    assert np.array_equal(choice.decoder.decode(WHOLE["CMYK"]).shape, (HEIGHT, WIDTH, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("samples", [None, []])
def test_auto_needs_samples(samples: list[bytes] | None) -> None:
    with pytest.raises(SettingsError, match="got none"):
        make_decoder("auto", samples)


def test_an_unknown_name() -> None:
    with pytest.raises(SettingsError, match=r"decoder='fast' is not known. Choose one of 'auto', 'turbo-region'"):
        make_decoder("fast")


def test_by_name_nothing_is_measured() -> None:
    choice = make_decoder("pillow", SAMPLES)
    assert (choice.name, choice.reason, choice.table) == ("pillow", "decoder='pillow', as asked for", {})
