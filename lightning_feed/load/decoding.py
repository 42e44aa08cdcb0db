"""A stage that decodes whole batches after they have left the workers."""

from collections.abc import Generator, Iterator
from typing import Protocol

from lightning_feed.load.kinds import Batch
from lightning_feed.load.stage import Stage


class BatchDecoder(Protocol):
    """Decodes the batches of one loader. Pickled with it for ``ddp_spawn``, without what it holds of a device."""

    def run(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """Decode one pass: as many batches as come, in their order.

        A few may be drawn ahead. The generator is closed when the pass ends, also in its middle; whatever was drawn
        ahead is dropped then, and when ``batches`` raises an error.

        Raises:
            DecodeError: from ``next()``, when an image cannot be decoded, with its name.
        """


class Decoding(Stage):
    """Decoded batches."""

    def __init__(self, decoder: BatchDecoder, batches: Iterator[Batch]) -> None:
        self._decoded = decoder.run(batches)

    def __next__(self) -> Batch:
        return next(self._decoded)

    def close(self) -> None:
        """See :meth:`Stage.close`. Raises ValueError while another thread is in ``next()``."""
        self._decoded.close()
