"""What a decoder cannot do goes to the reference, and is counted and said."""

import logging
import os
import threading
from typing import Any, Final

import torch

from lightning_feed.decode.decoder import Decoder, Encoded, Pixels, Region, RegionDecoder
from lightning_feed.decode.header import JPEG, KINDS, jpeg_header, kind_of
from lightning_feed.decode.pillow_decoder import PillowDecoder
from lightning_feed.errors import DecodeError

log = logging.getLogger(__name__)

_CMYK: Final = "CMYK JPEG"
REASONS: Final = (*KINDS, _CMYK)
"""What is counted: the kinds of image, and CMYK apart from other JPEGs (those are corrupt, but not for Pillow)."""
_ROWS: Final = 512


class FallbackTally:
    """Counts per reason, in memory that workers share with the process that reads them.

    Each process counts in a row of its own, chosen by its process id, since adding to shared memory is not atomic.
    Pickled to a worker process, it stays the same memory.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros((_ROWS, len(REASONS)), dtype=torch.int64, device="cpu")
        self._counts.share_memory_()  # type: ignore[no-untyped-call]
        self._renew_lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_counts": self._counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._counts = state["_counts"]
        self._renew_lock()

    def add(self, reason: str) -> bool:
        """Count one image. True for the first with this reason, of all workers (two may be first at once)."""
        if self._pid != os.getpid():  # forked: the lock may have been held by a thread that is not here
            self._renew_lock()
        column = REASONS.index(reason)
        with self._lock:
            first = not self._counts[:, column].any()
            self._counts[self._pid % _ROWS, column] += 1
        return first

    def as_dict(self) -> dict[str, int]:
        """Images per reason, those that occurred."""
        totals = self._counts.sum(0).tolist()
        return {reason: total for reason, total in zip(REASONS, totals, strict=True) if total}

    def _renew_lock(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()


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
        refusal = None
        if kind_of(data) in self._kinds:
            try:
                return self.primary.decode(data)
            except DecodeError as error:
                refusal = error
        pixels = self.reference.decode(data)
        self._count(data, refusal)
        return pixels

    def size(self, data: Encoded) -> tuple[int, int]:
        """(height, width) from the header; never counted."""
        if kind_of(data) in self._kinds:
            try:
                return self.primary.size(data)
            except DecodeError:  # decode() will count it
                return self.reference.size(data)
        return self.reference.size(data)

    def _count(self, data: Encoded, refusal: DecodeError | None) -> None:
        reason = _reason(data)
        if self.tally.add(reason):
            why = refusal or f"{self.name!r} decodes only {' and '.join(sorted(self._kinds))}"
            log.warning(
                "decoder=%r leaves images of the kind %s to %s: %s. Further ones are only counted.",
                self.name,
                reason,
                self.reference.name,
                why,
            )


class RegionFallbackDecoder(FallbackDecoder):
    """The same around a decoder of regions."""

    primary: RegionDecoder

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        """Decode the pixels of a region: of the whole image and cut out of it, where the primary refuses it.

        Raises:
            DecodeError: when the reference cannot decode it either.
        """
        refusal = None
        if kind_of(data) in self._kinds:
            try:
                return self.primary.decode_region(data, region, cover=cover)
            except DecodeError as error:
                refusal = error
        pixels = self.reference.decode(data)
        self._count(data, refusal)
        region.check_inside(*pixels.shape[:2])
        top, left, height, width = region
        cut: Pixels = pixels[top : top + height, left : left + width]
        return cut


def with_fallback(primary: Decoder) -> FallbackDecoder:
    """The decoder with Pillow behind it; it decodes regions if the decoder does."""
    return RegionFallbackDecoder(primary) if isinstance(primary, RegionDecoder) else FallbackDecoder(primary)


def _reason(data: Encoded) -> str:
    kind = kind_of(data)
    if kind != JPEG:
        return kind
    try:
        return _CMYK if jpeg_header(data).components == 4 else JPEG
    except DecodeError:  # Pillow found its way through a header that we do not
        return JPEG
