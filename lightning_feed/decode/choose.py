"""The choice of a decoder: by name, or the fastest that is true to Pillow on the user's own images.

Behind each stands Pillow, for the images that it refuses; those are counted and said once.
"""

import logging
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch

from lightning_feed.decode.decoders import (
    Decoder,
    OpenCVDecoder,
    PillowDecoder,
    Pixels,
    Region,
    RegionDecoder,
    TorchvisionDecoder,
    TurboDecoder,
)
from lightning_feed.decode.header import JPEG, KINDS, Encoded, jpeg_header, kind_of
from lightning_feed.decode.turbo_region import TurboRegionDecoder
from lightning_feed.errors import DecodeError, MissingExtraError, SettingsError

log = logging.getLogger(__name__)

MIN_PSNR_DB: Final = 45.0
"""What "auto" asks of every sample, against Pillow."""
MAX_SAMPLES: Final = 64
MAX_PIXELS: Final = 32_000_000
"""Fewer samples where images are large, but at least MIN_SAMPLES: choosing should take a second or two."""
MIN_SAMPLES: Final = 4
ROUNDS: Final = 3
TIE: Final = 1.05
"""Within this factor of the fastest, a decoder of regions is taken."""


@dataclass(frozen=True)
class Measured:
    """What one decoder did on the samples."""

    ms: float = math.nan
    """Time per image, median of the rounds; what it refused was decoded by Pillow in that time."""
    psnr_db: float = math.nan
    """Of the sample that is furthest from Pillow's pixels; infinite when all are the same."""
    refused: int = 0
    """Samples that it left to Pillow."""
    out: str = ""
    """Why it could not be taken; empty when it could."""


@dataclass(frozen=True)
class Choice:
    """A decoder and why it is this one."""

    decoder: Decoder
    """With Pillow behind it for what it cannot do, see :class:`FallbackDecoder`."""
    name: str
    """What to ask for to get the same one elsewhere."""
    reason: str
    """One sentence, with the measured figures if there are any."""
    table: dict[str, Measured] = field(default_factory=dict)
    """What was measured, by name; empty when a decoder was asked for by name."""


_MAKERS: Final[dict[str, Callable[[], Decoder]]] = {
    "turbo-region": TurboRegionDecoder,
    "turbo": TurboDecoder,
    "opencv": OpenCVDecoder,
    "torchvision": TorchvisionDecoder,
    "pillow": PillowDecoder,
}
DECODER_NAMES: Final = ("auto", *_MAKERS)
"""What :func:`make_decoder` knows."""


def make_decoder(
    name: str,
    samples: Sequence[Encoded] | None = None,
    *,
    regions: bool = False,
    clock: Callable[[], float] = time.thread_time,
) -> Choice:
    """Make the decoder of that name, or with ``"auto"`` the fastest one within the bound on these samples.

    Every decoder but Pillow comes with Pillow behind it. ``"auto"`` decodes up to 64 samples (fewer where they are
    large) with each installed decoder, in turns, three times. Two processes may choose differently when two decoders
    are equally fast: let one of them choose, and ask for :attr:`Choice.name` in the others.

    Args:
        name: one of :data:`DECODER_NAMES`.
        samples: encoded images of the user's, for ``"auto"``.
        regions: time what a random crop needs (the box of a RandomResizedCrop), which some decoders decode alone.
        clock: seconds; the default counts the CPU time of this thread, so that other programs do not matter.

    Raises:
        SettingsError: for an unknown name, or ``"auto"`` without samples.
        MissingExtraError: when the library of the decoder asked for is not installed.
        DecodeError: when Pillow can decode none of the samples.
    """
    if name == "auto":
        if not samples:
            raise SettingsError('decoder="auto" times the decoders on some of your images, and got none: give samples.')
        return _choose(samples, regions=regions, clock=clock)
    if name not in _MAKERS:
        raise SettingsError(f"decoder={name!r} is not known. Choose one of {', '.join(map(repr, DECODER_NAMES))}.")
    return Choice(decoder=with_fallback(_MAKERS[name]()), name=name, reason=f"decoder={name!r}, as asked for")


@dataclass(frozen=True)
class _Sample:
    data: Encoded
    reference: Pixels
    box: Region


def _choose(samples: Sequence[Encoded], *, regions: bool, clock: Callable[[], float]) -> Choice:
    kept = _decodable(samples)
    table: dict[str, Measured] = {}
    decoders: dict[str, Decoder] = {}
    for name, make in _MAKERS.items():
        try:
            decoders[name] = make()
        except MissingExtraError as error:
            table[name] = Measured(out=str(error))
            continue
        table[name] = _fidelity(decoders[name], kept)
    racing = [name for name in decoders if not table[name].out]
    rounds: dict[str, list[float]] = {name: [] for name in racing}
    for _ in range(ROUNDS):
        for name in racing:  # in turns: a machine that gets slower does so for all
            began = clock()
            for sample in kept:
                _decode(decoders[name], sample, regions=regions)
            rounds[name].append((clock() - began) * 1e3 / len(kept))
    for name in racing:
        table[name] = replace(table[name], ms=statistics.median(rounds[name]))
    taken = _fastest({name: table[name].ms for name in racing}, decoders)
    return Choice(with_fallback(decoders[taken]), taken, _sentence(taken, table, len(kept), regions=regions), table)


def _decodable(samples: Sequence[Encoded]) -> list[_Sample]:
    """Samples that the reference can decode, with its pixels and a random box."""
    draw, pillow = random.Random(0), PillowDecoder()
    kept: list[_Sample] = []
    failure: DecodeError | None = None
    pixels = 0
    for data in samples[:MAX_SAMPLES]:
        try:
            reference = pillow.decode(data)
        except DecodeError as error:
            failure = error
            continue
        kept.append(_Sample(data, reference, _random_box(draw, *reference.shape[:2])))
        pixels += reference.shape[0] * reference.shape[1]
        if pixels >= MAX_PIXELS and len(kept) >= MIN_SAMPLES:
            break
    if not kept:
        raise DecodeError(f'decoder="auto" got {len(samples)} samples, and none can be decoded: {failure}') from failure
    return kept


def _random_box(draw: random.Random, height: int, width: int) -> Region:
    """A box as RandomResizedCrop draws it: 8 to 100 % of the area, sides 3:4 to 4:3, drawn anew until it fits."""
    for _ in range(10):
        area = height * width * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        rows, columns = max(round(math.sqrt(area / ratio)), 1), max(round(math.sqrt(area * ratio)), 1)
        if rows <= height and columns <= width:
            return Region(draw.randint(0, height - rows), draw.randint(0, width - columns), rows, columns)
    return Region(0, 0, height, width)


def _decode(decoder: Decoder, sample: _Sample, *, regions: bool) -> Pixels | None:
    """None when the decoder refused it, and Pillow decoded it in its place."""
    try:
        if regions and isinstance(decoder, RegionDecoder):
            return decoder.decode_region(sample.data, sample.box)
        return decoder.decode(sample.data)
    except DecodeError:
        PillowDecoder().decode(sample.data)
        return None


def _fidelity(decoder: Decoder, samples: list[_Sample]) -> Measured:
    worst, refused = math.inf, 0
    for sample in samples:
        pixels = _decode(decoder, sample, regions=False)
        if pixels is None:
            refused += 1
        elif pixels.shape != sample.reference.shape:
            return Measured(out=f"gives {pixels.shape} where Pillow gives {sample.reference.shape}")
        else:
            worst = min(worst, psnr_db(pixels, sample.reference))
    if refused == len(samples):
        return Measured(refused=refused, out="decodes none of the samples")
    out = f"{worst:.1f} dB to Pillow, less than {MIN_PSNR_DB:.0f}" if worst < MIN_PSNR_DB else ""
    return Measured(psnr_db=worst, refused=refused, out=out)


def _fastest(ms: dict[str, float], decoders: dict[str, Decoder]) -> str:
    limit = min(ms.values()) * TIE
    close = sorted((name for name in ms if ms[name] <= limit), key=lambda name: ms[name])
    return next((name for name in close if isinstance(decoders[name], RegionDecoder)), close[0])


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
    """Peak signal-to-noise ratio of two uint8 images of one shape, in dB; infinite when they are the same.

    20 log10(255 / root mean square error): 45 dB is an error of 1.4 grey levels, 48 dB of one, 34 dB of five.

    Example:
        >>> black = np.zeros((2, 2, 3), dtype=np.uint8)
        >>> psnr_db(black, black), round(psnr_db(black + 1, black), 2)
        (inf, 48.13)
    """
    error = image.astype(np.int16) - reference
    square = float(np.mean(np.square(error, dtype=np.int32)))
    return math.inf if square == 0 else 10 * math.log10(255**2 / square)


# --- Pillow behind the others -----------------------------------------------------------------------------------------

_CMYK: Final = "CMYK JPEG"
REASONS: Final = (*KINDS, _CMYK)
"""What is counted: the kinds of image, and CMYK apart from other JPEGs (those are corrupt, but not for Pillow)."""
_ROWS: Final = 512
_tally_lock = threading.Lock()
os.register_at_fork(before=_tally_lock.acquire, after_in_parent=_tally_lock.release, after_in_child=_tally_lock.release)


class FallbackTally:
    """Counts per reason, in memory that workers share with the process that reads them.

    Each process counts in a row of its own, chosen by its process id, since adding to shared memory is not atomic.
    Pickled to a worker process, it stays the same memory.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros((_ROWS, len(REASONS)), dtype=torch.int64, device="cpu")
        self._counts.share_memory_()  # type: ignore[no-untyped-call]

    def add(self, reason: str) -> bool:
        """Count one image. True for the first with this reason, of all workers (two may be first at once)."""
        column = REASONS.index(reason)
        with _tally_lock:
            first = not self._counts[:, column].any()
            self._counts[os.getpid() % _ROWS, column] += 1
        return first

    def as_dict(self) -> dict[str, int]:
        """Images per reason, those that occurred."""
        totals = self._counts.sum(0).tolist()
        return {reason: total for reason, total in zip(REASONS, totals, strict=True) if total}


class FallbackDecoder:
    """A fast decoder, and the reference for what it refuses: the images that Pillow reads are all read."""

    def __init__(self, primary: Decoder, reference: Decoder | None = None) -> None:
        self.primary = primary
        self.reference = reference or PillowDecoder()
        self.name = primary.name
        self.tally = FallbackTally()
        """What went to the reference, counted by reason; shared with the workers."""
        self._kinds: frozenset[str] = getattr(primary, "kinds", frozenset(KINDS))

    def decode(self, data: Encoded) -> Pixels:
        """Decode the whole image.

        Raises:
            DecodeError: when the reference cannot decode it either.
        """
        pixels, _ = self._decode(data, self.primary.decode)
        return pixels

    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) from the header; never counted."""
        if kind_of(data) in self._kinds:
            try:
                return self.primary.size(data)
            except DecodeError:  # decode() will count it
                pass
        return self.reference.size(data)

    def _decode(self, data: Encoded, primary: Callable[[Encoded], Pixels]) -> tuple[Pixels, bool]:
        """What the primary gives; else the whole image by the reference, and True."""
        why: object = f"{self.name!r} decodes only {' and '.join(sorted(self._kinds))}"
        if kind_of(data) in self._kinds:
            try:
                return primary(data), False
            except DecodeError as error:
                why = error
        pixels, reason = self.reference.decode(data), _reason(data)
        if self.tally.add(reason):
            log.warning(
                "decoder=%r leaves images of the kind %s to %s: %s. Further ones are only counted.",
                self.name,
                reason,
                self.reference.name,
                why,
            )
        return pixels, True


class RegionFallbackDecoder(FallbackDecoder):
    """The same around a decoder of regions."""

    primary: RegionDecoder

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """Decode the pixels of a region: of the whole image and cut out of it, where the primary refuses it.

        Raises:
            DecodeError: when the reference cannot decode it either.
        """
        pixels, whole = self._decode(data, lambda data: self.primary.decode_region(data, region, cover=cover))
        if not whole:
            return pixels
        region.check_inside(*pixels.shape[:2])
        top, left, height, width = region
        crop: Pixels = pixels[top : top + height, left : left + width]
        return crop


def with_fallback(primary: Decoder) -> Decoder:
    """The decoder with Pillow behind it, if it is not Pillow; it decodes regions if the decoder does."""
    if isinstance(primary, PillowDecoder):
        return primary
    return RegionFallbackDecoder(primary) if isinstance(primary, RegionDecoder) else FallbackDecoder(primary)


def _reason(data: Encoded) -> str:
    kind = kind_of(data)
    if kind != JPEG:
        return kind
    try:
        return _CMYK if jpeg_header(data).components == 4 else JPEG
    except DecodeError:  # Pillow found its way through a header that we do not
        return JPEG
