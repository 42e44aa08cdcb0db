"""DecoderChoice of a decoder: by name, or the fastest one that matches Pillow on the user's own images.

Pillow decodes the images that the chosen decoder refuses; they are counted, and reported once.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from lightning_feed.errors import DecodeError, MissingExtraError, SettingsError
from lightning_feed.images.decoders import (
    Decoder,
    OpenCVDecoder,
    PillowDecoder,
    Pixels,
    Region,
    TorchvisionDecoder,
    TurboDecoder,
    draw_region,
)
from lightning_feed.images.header import JPEG, KINDS, Encoded, jpeg_header, kind_of
from lightning_feed.images.turbo_region import TurboRegionDecoder
from lightning_feed.load.counts import SharedCounts

log = logging.getLogger(__name__)

MIN_PSNR_DB: Final = 45.0
"""Minimum fidelity to Pillow, for "auto"; every sample must reach it."""
MAX_SAMPLES: Final = 64
MAX_PIXELS: Final = 32_000_000
"""Total pixels after which no more samples are used, once there are MIN_SAMPLES, so that the choice takes only a second
or two even with large images."""
MIN_SAMPLES: Final = 4
ROUNDS: Final = 3
TIE: Final = 1.05
"""A decoder of regions is preferred if it takes at most the fastest time multiplied by this factor."""


@dataclass
class Measured:
    """Results of one decoder on the samples."""

    ms: float = math.nan
    """Milliseconds per image, median of the rounds, including Pillow's time for refused images."""
    psnr_db: float = math.nan
    """Fidelity in dB of the sample that differs most from Pillow's pixels; infinite if all are equal."""
    out: str = ""
    """Reason for excluding the decoder; empty if it may be chosen."""


@dataclass(frozen=True)
class DecoderChoice:
    """A decoder, and the reason for the choice."""

    decoder: Decoder
    """The decoder, with Pillow as fallback: see :class:`FallbackDecoder`."""
    name: str
    """Name that selects the same decoder in another process."""
    reason: str
    """One sentence, with the measured figures if there are any."""
    table: dict[str, Measured] = field(default_factory=dict)
    """Measurements by decoder name; empty if the decoder was requested by name."""


_MAKERS: Final[dict[str, Callable[[], Decoder]]] = {
    "turbo-region": TurboRegionDecoder,
    "turbo": TurboDecoder,
    "opencv": OpenCVDecoder,
    "torchvision": TorchvisionDecoder,
    "pillow": PillowDecoder,
}
DECODER_NAMES: Final = ("auto", *_MAKERS)
"""Names for :func:`make_decoder`."""


def make_decoder(
    name: str,
    samples: Sequence[Encoded] | None = None,
    *,
    regions: bool = False,
    clock: Callable[[], float] = time.thread_time,
) -> DecoderChoice:
    """Make a decoder by name. ``"auto"`` chooses the fastest that is faithful to Pillow on these samples.

    Every decoder except Pillow falls back to Pillow. ``"auto"`` decodes up to 64 samples (fewer if they are large)
    with each installed decoder, alternating, three times. If two decoders are equally fast, two processes may choose
    differently: choose in one process, and pass :attr:`DecoderChoice.name` to the others.

    Args:
        name: one of :data:`DECODER_NAMES`.
        samples: encoded images of the user, for ``"auto"``.
        regions: True to time a RandomResizedCrop: some decoders decode only its box.
        clock: clock in seconds; the default is this thread's CPU time, which other programs do not affect.

    Raises:
        SettingsError: for an unknown name, or ``"auto"`` without samples.
        MissingExtraError: if the library of the requested decoder is not installed.
        DecodeError: if Pillow can decode none of the samples.
    """
    if name == "auto":
        if not samples:
            raise SettingsError('decoder="auto" times the decoders on some of your images: pass samples.')
        return _choose(samples, regions=regions, clock=clock)
    if name not in _MAKERS:
        raise SettingsError(f"decoder={name!r} is not valid. Use one of {', '.join(map(repr, DECODER_NAMES))}.")
    return DecoderChoice(decoder=with_fallback(_MAKERS[name]()), name=name, reason=f"decoder={name!r}, as requested")


@dataclass(frozen=True)
class _Sample:
    data: Encoded
    reference: Pixels
    box: Region


def _choose(samples: Sequence[Encoded], *, regions: bool, clock: Callable[[], float]) -> DecoderChoice:
    kept = _decodable(samples)
    table: dict[str, Measured] = {}
    decoders: dict[str, Decoder] = {}
    for name, make in _MAKERS.items():
        try:
            decoders[name] = make()
            table[name] = _fidelity(decoders[name], kept)
        except MissingExtraError as error:
            table[name] = Measured(out=str(error))
    racing = [name for name in decoders if not table[name].out]
    # Alternating, so that a change of the machine's speed affects all decoders.
    rounds = [[_ms(decoders[name], kept, clock, regions=regions) for name in racing] for _ in range(ROUNDS)]
    for name, times in zip(racing, zip(*rounds, strict=True), strict=True):
        table[name].ms = statistics.median(times)
    taken = _fastest({name: table[name].ms for name in racing}, decoders)
    return DecoderChoice(
        with_fallback(decoders[taken]), taken, _sentence(taken, table, len(kept), regions=regions), table
    )


def _ms(decoder: Decoder, samples: list[_Sample], clock: Callable[[], float], *, regions: bool) -> float:
    began = clock()
    for sample in samples:
        _decode(decoder, sample, regions=regions)
    return (clock() - began) * 1e3 / len(samples)


def _decodable(samples: Sequence[Encoded]) -> list[_Sample]:
    """Return the samples that Pillow can decode, each with Pillow's pixels and a random box."""
    generator = torch.Generator().manual_seed(0)
    pillow = PillowDecoder()
    kept: list[_Sample] = []
    failure: DecodeError | None = None
    pixels = 0
    for data in samples[:MAX_SAMPLES]:
        try:
            reference = pillow.decode(data)
        except DecodeError as error:
            failure = error
            continue
        height, width = reference.shape[:2]
        box = draw_region(height, width, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), generator=generator)
        kept.append(_Sample(data, reference, box))
        pixels += height * width
        if pixels >= MAX_PIXELS and len(kept) >= MIN_SAMPLES:
            break
    if not kept:
        raise DecodeError(f'decoder="auto" got {len(samples)} samples, and none can be decoded: {failure}') from failure
    return kept


def _decode(decoder: Decoder, sample: _Sample, *, regions: bool) -> Pixels | None:
    """Decode a sample. Returns None if the decoder refused the sample, and Pillow decoded it instead."""
    try:
        if regions:
            return decoder.decode_region(sample.data, sample.box)
        return decoder.decode(sample.data)
    except DecodeError:
        PillowDecoder().decode(sample.data)
        return None


def _fidelity(decoder: Decoder, samples: list[_Sample]) -> Measured:
    worst = math.inf
    decoded = 0
    for sample in samples:
        pixels = _decode(decoder, sample, regions=False)
        if pixels is None:
            continue
        if pixels.shape != sample.reference.shape:
            return Measured(out=f"returns {pixels.shape}, but Pillow returns {sample.reference.shape}")
        worst = min(worst, psnr_db(pixels, sample.reference))
        decoded = decoded + 1
    if not decoded:
        return Measured(out="decodes none of the samples")
    if worst < MIN_PSNR_DB:
        return Measured(psnr_db=worst, out=f"{worst:.1f} dB to Pillow, less than {MIN_PSNR_DB:.0f}")
    return Measured(psnr_db=worst)


def _fastest(ms: dict[str, float], decoders: dict[str, Decoder]) -> str:
    limit = min(ms.values()) * TIE
    close = sorted((name for name in ms if ms[name] <= limit), key=lambda name: ms[name])
    return next((name for name in close if decoders[name].decodes_regions), close[0])


def _sentence(taken: str, table: dict[str, Measured], samples: int, *, regions: bool) -> str:
    what = "random crops" if regions else "whole images"
    winner = table[taken]
    pixels = "Pillow's own pixels" if math.isinf(winner.psnr_db) else f"{winner.psnr_db:.1f} dB or more to Pillow"
    others = [
        f"{name} out: {one.out}" if one.out else f"{name} {one.ms:.2f} ms"
        for name, one in table.items()
        if name != taken
    ]
    return (
        f'decoder="auto" took {taken!r}: {winner.ms:.2f} ms per image ({what}, {samples} of your images), {pixels}; '
        f"{', '.join(others)}"
    )


def psnr_db(image: Pixels, reference: Pixels) -> float:
    """Return the peak signal-to-noise ratio of two uint8 images of one shape, in dB; infinite if they are equal.

    20 log10(255 / root mean square error): an error of 1.4 grey levels is 45 dB, one level 48 dB, five levels 34 dB.

    Example:
        >>> black = np.zeros((2, 2, 3), dtype=np.uint8)
        >>> psnr_db(black, black), round(psnr_db(black + 1, black), 2)
        (inf, 48.13)
    """
    error = image.astype(np.int16) - reference
    square = float(np.mean(np.square(error, dtype=np.int32)))
    if square == 0:
        return math.inf
    return 10 * math.log10(255**2 / square)


# --- Pillow as fallback -----------------------------------------------------------------------------------------------

_CMYK: Final = "CMYK JPEG"
REASONS: Final = (*KINDS, _CMYK)
"""Kinds of images by which images left to Pillow are counted. CMYK JPEGs have their own kind; all other counted JPEGs
are corrupt, but readable by Pillow."""


class FallbackDecoder(Decoder):
    """A fast decoder with Pillow as fallback, so that every image that Pillow reads can be decoded.

    Attributes:
        primary: the fast decoder.
        tally: images decoded by Pillow, counted by reason; shared with the workers.
    """

    def __init__(self, primary: Decoder) -> None:
        self.primary = primary
        self._pillow = PillowDecoder()
        self.name = primary.name
        self.decodes_regions = primary.decodes_regions
        self.tally = SharedCounts(*REASONS)

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image, see :class:`~lightning_feed.images.decoders.Decoder`."""
        return self._decode(data, lambda decoder: decoder.decode(data))

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """Decode a region; if the primary refuses the image, Pillow decodes it whole, and the region is cut out."""
        return self._decode(data, lambda decoder: decoder.decode_region(data, region, cover=cover))

    def size(self, data: Encoded) -> tuple[int, int]:
        """Return (height, width) from the header. Images left to Pillow are not counted here."""
        if kind_of(data) in self.primary.kinds:
            try:
                return self.primary.size(data)
            except DecodeError:  # decode() will count it
                pass
        return self._pillow.size(data)

    def _decode(self, data: Encoded, decode: Callable[[Decoder], Pixels]) -> Pixels:
        kinds = self.primary.kinds
        why: object = f"{self.name!r} decodes only {' and '.join(sorted(kinds))}"
        if kind_of(data) in kinds:
            try:
                return decode(self.primary)
            except DecodeError as error:
                why = error
        pixels = decode(self._pillow)
        reason = _reason(data)
        if self.tally.add(reason):
            log.warning(
                "decoder=%r leaves images of the kind %s to pillow: %s. Later ones are only counted.",
                self.name,
                reason,
                why,
            )
        return pixels


def with_fallback(primary: Decoder) -> Decoder:
    """Return the decoder with Pillow as fallback; Pillow itself is returned as is."""
    if isinstance(primary, PillowDecoder):
        return primary
    return FallbackDecoder(primary)


def _reason(data: Encoded) -> str:
    kind = kind_of(data)
    if kind != JPEG:
        return kind
    try:
        if jpeg_header(data).components == 4:
            return _CMYK
        return JPEG
    except DecodeError:  # Pillow read a header that we cannot
        return JPEG
