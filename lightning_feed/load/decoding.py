"""A stage that decodes whole batches after they have left the workers."""

from collections.abc import Generator, Iterator
from typing import Protocol

from lightning_feed.load.kinds import Batch
from lightning_feed.load.stage import Stage


class BatchDecoder(Protocol):
    """Decodes the batches of one loader. Pickled with the loader for ``ddp_spawn``, without device resources."""

    def run(self, batches: Iterator[Batch], under_way: int) -> Generator[Batch, None, None]:
        """Decode all batches of one pass, in order.

        May read a few batches ahead. Batches read ahead are dropped if ``batches`` raises an error, or if the generator
        is closed early.

        Args:
            batches: the batches of the pass.
            under_way: batches that workers may have begun; 0 if they are made in this thread.

        Raises:
            DecodeError: from ``next()``, if an image cannot be decoded. Names the image.
        """


class Decoding(Stage):
    """Stage that decodes batches."""

    def __init__(self, decoder: BatchDecoder, batches: Iterator[Batch], under_way: int) -> None:
        self._decoded = decoder.run(batches, under_way)

    def __next__(self) -> Batch:
        return next(self._decoded)

    def close(self) -> None:
        """See :meth:`Stage.close`. Raises ValueError while another thread is in ``next()``."""
        self._decoded.close()
