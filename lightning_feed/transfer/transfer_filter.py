"""Keys of a batch that are dropped before its transfer, or held back from it."""

from collections.abc import Callable
from typing import Any

from lightning_feed.load.collate import drop, missing_keys
from lightning_feed.transfer.batch_tree import hold, release


class LeanTransfer:
    """Drops keys and holds keys back, around whatever copies a batch.

    Args:
        drop_keys: left out; see :func:`lightning_feed.load.collate.drop`.
        host_keys: kept from the copy.
        warn: takes what the user should know of, at most once each.
    """

    def __init__(self, *, drop_keys: frozenset[str], host_keys: frozenset[str], warn: Callable[[str], object]) -> None:
        self._drop, self._held, self._warn = drop_keys, host_keys, warn
        self._looked = False

    def look(self, batch: Any) -> None:
        """Warn, once, of keys to drop that a first batch does not have."""
        if not self._looked:
            self._looked = True
            absent = missing_keys(batch, self._drop)
            if absent is not None:
                self._warn(absent)

    def send(self, batch: Any, copy: Callable[[Any], Any]) -> Any:
        """The batch as ``copy`` makes it of what is left; held values come back untouched."""
        left = drop(batch, self._drop) if self._drop else batch
        return release(copy(hold(left, self._held))) if self._held else copy(left)
