"""A loader whose batches come from a DALI pipeline with readers of its own."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_feed.load.dali.reader_pass import Position, ReaderPass
from lightning_feed.load.dali.reader_pipeline import ReaderPipeline
from lightning_feed.load.dali.reader_share import Asked, LastBatch, Place, Share
from lightning_feed.load.order import EpochOrder, mix_seed


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a loader goes through its set."""

    batch_size: int
    ranks: int
    rank: int
    last_batch: LastBatch
    device: str
    """``cpu`` or ``cuda``: where the pipeline works."""
    threads: int
    """CPU threads of the pipeline."""
    prefetch: int
    """Batches that DALI makes ahead."""
    lives: bool
    """Whether the pipeline outlives a pass. Else there is none before a pass begins and after its last batch."""
    goes_on: bool
    """Whether a pass after one that was broken off has the samples that were left, and not the first ones again."""
    asked: Asked
    """What the pipeline and the options of its split are called, for errors."""


class ReaderLoader:
    """An iterable of a DALI pipeline's batches, with a length that is the same on every rank.

    DALI's own iterators cannot be reset in mid-epoch. Here a pass may be broken off anywhere. Where the reading
    ``goes_on``, the next pass has the samples that were not handed out yet, then those of the reader's next epoch:
    every sample has its turn, however short the passes are. Where not, the pipeline is made anew, and the next pass is
    the same from its beginning.

    Args:
        build: makes the pipeline, from a seed for all that is random and what ``ReaderPipeline.checkpoint`` gave, or
            None.
        reading: how to go through the set.
        order: what seeds the pipeline.

    Raises:
        DatasetError: from ``len()`` and ``iter()``, when DALI cannot build the pipeline, or the set is too small for
            the ranks; from ``next()``, when it cannot make a batch.
    """

    def __init__(
        self, build: Callable[[int, bytes | None], ReaderPipeline], reading: Reading, order: EpochOrder
    ) -> None:
        self.batch_size = reading.batch_size
        self.reading, self.order = reading, order
        self._build = build
        self._pipeline: ReaderPipeline | None = None
        self._share: Share | None = None
        self._place = Place()
        self._live: weakref.ref[ReaderPass] | None = None
        self._position: Position | None = None
        """Of the newest pass."""
        self._seed = 0
        """What the pipeline was built from."""

    def __len__(self) -> int:
        return len(self.share)

    @property
    def share(self) -> Share:
        """This rank's share of the set. A pipeline is built once to know it, and freed where it does not live."""
        if self._share is None:
            self._open()
            if not self.reading.lives:
                self.free()
        assert self._share is not None
        return self._share

    @property
    def built(self) -> bool:
        """Whether there is a pipeline now, with its threads and its memory."""
        return self._pipeline is not None

    def facts(self) -> dict[str, Any]:
        """Fields of ``LoopFacts`` that only this loader knows."""
        reading = self.reading
        return {
            "batch_size": reading.batch_size,
            "dali_device": reading.device,
            "dali_threads": reading.threads,
            "dali_prefetch": reading.prefetch,
        }

    def __iter__(self) -> ReaderPass:
        self.end_pass()
        if self._pipeline is not None and not self.reading.goes_on and 0 < self._place.batch < len(self):
            self.free()
        self._position = Position(self.order.epoch(), self._handed_out_before())
        made = ReaderPass(self, self._position, lives=self.reading.lives)
        self._live = weakref.ref(made)
        return made

    def take(self, to_follow: int) -> Any:
        """The next batch to hand out, to be called by a pass.

        Args:
            to_follow: batches of the pass that come after it.
        """
        pipeline, share = self._open(), self.share
        while True:
            outputs = pipeline.take(to_follow=None if self.reading.lives else to_follow)
            kept = self._place.advance(share)
            if kept:
                whole = kept == share.batch_size
                return pipeline.put_together(outputs if whole else [output[:kept] for output in outputs])

    def end_pass(self) -> None:
        """End the live pass, if there is one. A pipeline that does not live beyond it is freed."""
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()

    def close(self) -> None:
        """End the live pass, if there is one, and free the pipeline."""
        self.end_pass()
        self.free()

    def free(self) -> None:
        """Free the pipeline. The next batch makes it anew."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()

    def _handed_out_before(self) -> int:
        """Batches of the pass to begin that were handed out before, in the run that is resumed."""
        return 0

    def _open(self) -> ReaderPipeline:
        if self._pipeline is not None and not self._pipeline.usable:
            self.free()
        if self._pipeline is None:
            epoch = self.order.epoch() if self.reading.goes_on else 0
            self._start(mix_seed(self.order.seed, epoch, 0, "dali"), None, Place())
        assert self._pipeline is not None
        return self._pipeline

    def _start(self, seed: int, checkpoint: bytes | None, place: Place) -> None:
        pipeline = self._build(seed, checkpoint)
        try:
            self._share = Share(
                samples=pipeline.reader["epoch_size"],
                ranks=self.reading.ranks,
                rank=self.reading.rank,
                batch_size=self.reading.batch_size,
                last_batch=self.reading.last_batch,
                sticks=bool(pipeline.reader["stick_to_shard"]),
                asked=self.reading.asked,
            )
        except BaseException:
            pipeline.close()
            raise
        pipeline.before = place.epoch * self._share.read_batches + place.batch
        self._pipeline, self._place, self._seed = pipeline, place, seed
