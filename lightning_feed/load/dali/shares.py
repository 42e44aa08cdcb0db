"""How DALI's readers divide a set among ranks and into batches."""

from dataclasses import dataclass
from typing import Literal, get_args

LastBatch = Literal["partial", "drop", "fill"]
LAST_BATCH: tuple[LastBatch, ...] = get_args(LastBatch)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's share of a set that is read with ``pad_last_batch=True``.

    Share ``i`` of ``n`` is the samples ``[floor(i * N / n), floor((i + 1) * N / n))``: shares differ by one sample at
    most. The reader repeats the last sample of a share until every rank has the same number of whole batches (read in
    DALI 1.22 to 2.4, ``loader.h: ShouldPadBatch`` and ``loader.cc: start_index``).
    """

    samples: int
    """In the whole set: at least as many as ranks, else DALI builds no pipeline."""
    ranks: int
    rank: int
    batch_size: int
    last_batch: LastBatch
    sticks: bool
    """Whether the rank reads the same share in each epoch, and not the next one's."""

    def __len__(self) -> int:
        """Batches that are handed out in an epoch, the same number on every rank."""
        return self.samples // self.ranks // self.batch_size if self.last_batch == "drop" else self.read_batches

    @property
    def read_batches(self) -> int:
        """Batches that the reader gives in an epoch, the same number on every rank."""
        largest = -(-self.samples // self.ranks)
        return -(-largest // self.batch_size)

    def kept(self, epoch: int, batch: int) -> int:
        """Samples to hand out, the first ones, of a batch that was read; 0: it is left out.

        Args:
            epoch: of the reader, from 0.
            batch: within that epoch, from 0.
        """
        if self.last_batch == "drop":
            return self.batch_size if batch < len(self) else 0
        if self.last_batch == "fill":
            return self.batch_size
        share = self.rank if self.sticks else (self.rank + epoch) % self.ranks
        size = (share + 1) * self.samples // self.ranks - share * self.samples // self.ranks
        # A batch of nothing but padding keeps one sample: every rank has to make the same number of steps.
        return max(1, min(self.batch_size, size - batch * self.batch_size))


@dataclass
class Place:
    """Where a reader stands: in which of its epochs, and how many of that epoch's batches were taken."""

    epoch: int = 0
    batch: int = 0

    def advance(self, share: Share) -> int:
        """Go past one batch. Returns how many of its samples are to be handed out."""
        kept = share.kept(self.epoch, self.batch)
        self.batch += 1
        if self.batch == share.read_batches:
            self.epoch, self.batch = self.epoch + 1, 0
        return kept
