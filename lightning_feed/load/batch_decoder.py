"""What stands behind a loader of encoded batches and decodes them, some of them ahead."""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning_feed.load.encoded_batch import EncodedBatch


class BatchDecoder(Protocol):
    """Decodes the batches of one loader. Pickled with it for ``ddp_spawn``, without what it holds of a device."""

    def run(self, batches: Iterator["EncodedBatch"]) -> Generator[Any, None, None]:
        """Decode one pass: as many batches as come, in their order.

        A few may be taken ahead. The generator is closed when the pass ends, also in its middle; whatever
        was taken ahead is dropped then. Errors of ``batches`` are raised in the place of the batch that failed.

        Raises:
            DecodeError: from ``next()``, when an image cannot be decoded, with its name.
        """
