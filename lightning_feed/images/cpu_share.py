"""The part of the images that the workers decode while the device decodes the others."""

import logging
from dataclasses import dataclass

from torch.utils.data import get_worker_info

from lightning_feed.images.header import Encoded
from lightning_feed.images.nvjpeg import REASONS, refusal
from lightning_feed.load.collate import is_relayed
from lightning_feed.load.counts import SharedCounts, SharedNumber
from lightning_feed.wording import printable

logger = logging.getLogger(__name__)

_SPREAD = 40503
"""An odd number near 2**16 divided by the golden ratio, which spreads consecutive indices evenly (Knuth, The Art of
Computer Programming, volume 3, section 6.4)."""


class CpuShare:
    """The share of the images that the workers decode: all that nvJPEG cannot, and as many others as set.

    An image's index decides, so that with a constant share an image is always decoded by the same side.

    Attributes:
        refused: the images that nvJPEG cannot decode, counted by reason; shared with the workers.
    """

    def __init__(self) -> None:
        self._share = SharedNumber(0.0)
        self.refused = SharedCounts(*REASONS)

    @property
    def share(self) -> float:
        """The share of the images that workers decode, from 0 to 1. Takes effect at once in all processes."""
        return self._share.value

    @share.setter
    def share(self, share: float) -> None:
        self._share.value = share

    def takes(self, data: Encoded, size: tuple[int, int], index: int, name: str) -> bool:
        """See :class:`~lightning_feed.images.image_dataset.CpuPart`.

        Outside of the workers of training, only what nvJPEG cannot: in a rehearsal or a probe, samples that change with
        the share would look like those of a dataset that changes.
        """
        reason = refusal(data, size)
        if reason is None:
            if get_worker_info() is None or is_relayed():
                return False
            return index * _SPREAD % 2**16 < self.share * 2**16
        if self.refused.add(reason):
            logger.info(
                "The workers decode %s, and others like it: %s. Later ones are only counted.", printable(name), reason
            )
        return True


@dataclass
class Seconds:
    """Times of a thread that decodes for the device."""

    files: float = 0.0
    """Seconds that it waited for the workers."""
    decoding: float = 0.0
    room: float = 0.0
    """Seconds that it waited for training to take a batch."""

    @property
    def total(self) -> float:
        """All seconds."""
        return self.files + self.decoding + self.room


FIRST_STEP = 1 / 8
LAST_STEP = 1 / 64
MEASURED_BATCHES = 8
"""Least number of batches between two moves, besides those that were under way at the last one. If more batches are
under way, as many as these: many workers end their batches in bursts."""
SETTLED_MOVES = 16
"""Moves that are left out once the share has turned with the smallest step."""
FED = 0.1
"""Training is the limit if the device waits for room for more than this part of the time."""
LEAST_WAITING = 0.03
MOST_WAITING = 0.1
"""The device should wait for the workers for a part of the time between these."""


class Balance:
    """Moves the share of the workers to where neither they nor the device wait for the other.

    While training takes batches as fast as they come, the rate is highest where both sides are busy all the time. A
    device that waits for the workers decodes too little, so their share shrinks; for a device that never waits, it
    grows. The step is halved at each turn, so that the share settles. Nothing moves while training is the limit.

    Args:
        shares: the share to move.
    """

    def __init__(self, shares: CpuShare) -> None:
        self._shares = shares
        self._step = FIRST_STEP
        self._direction = 0
        self._seconds = Seconds()
        self._batches = 0

    def note(self, seconds: Seconds, under_way: int) -> None:
        """Note a batch, and move the share when enough is known.

        Args:
            seconds: what was done for this batch.
            under_way: batches that the workers may have begun.
        """
        self._batches += 1
        if self._batches <= 0:
            return
        self._seconds.files += seconds.files
        self._seconds.decoding += seconds.decoding
        self._seconds.room += seconds.room
        measured = max(MEASURED_BATCHES, under_way)
        if self._batches < measured:
            return
        direction = self._wanted_direction()
        self._seconds = Seconds()
        self._batches = 0
        if direction and direction == -self._direction:
            if self._step == LAST_STEP and direction > 0:  # the share is as high as it can be
                self._batches = -SETTLED_MOVES * measured
                return
            self._step = max(self._step / 2, LAST_STEP)
        share = min(1.0, max(0.0, self._shares.share + direction * self._step))
        if share != self._shares.share:
            self._direction = direction
            self._shares.share = share
            self._batches = -under_way

    def _wanted_direction(self) -> int:
        """1 if the workers should decode more, -1 if they should decode less, 0 to leave it."""
        total = self._seconds.total
        if self._seconds.room > FED * total:
            return 0
        waiting = self._seconds.files / total
        if waiting > MOST_WAITING:
            return -1
        return 1 if waiting < LEAST_WAITING else 0
