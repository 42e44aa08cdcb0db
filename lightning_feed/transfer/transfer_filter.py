"""What is done to a batch around its transfer, so that less is copied, in fewer pieces."""

import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from lightning_feed.load.drop_keys import drop, missing_keys
from lightning_feed.transfer.batch_tree import hold, release
from lightning_feed.transfer.prefetcher import SideStream
from lightning_feed.transfer.small_tensors import AT_LEAST, PackTrial, pack, small_tensors

PackSmall = bool | Literal["auto"]


class LeanTransfer:
    """Drops keys, holds keys back, and packs small tensors, around whatever copies a batch.

    Args:
        drop_keys: left out; see :func:`lightning_feed.load.drop_keys.drop`.
        host_keys: kept from the copy.
        pack_small: pack small tensors always, never, or where that was measured to be cheaper.
        warn: takes what the user should know of, at most once each.
        tell: takes what was measured.
        clock: the host's time in nanoseconds.
    """

    def __init__(
        self,
        *,
        drop_keys: frozenset[str],
        host_keys: frozenset[str],
        pack_small: PackSmall,
        warn: Callable[[str], object],
        tell: Callable[[str], object],
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._drop, self._held, self._pack_small = drop_keys, host_keys, pack_small
        self._warn, self._tell, self._clock = warn, tell, clock
        self._looked = False
        self._trials: dict[str, PackTrial] = {}

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

    def send_packed(
        self, batch: Any, copy: Callable[[Any], Any], *, device: torch.device, stream: SideStream, stage: str
    ) -> Any:
        """The same, with small tensors packed where that pays. Called while ``stream`` is the current one.

        Args:
            batch: a host batch.
            copy: host batch -> device batch; tensors that are on the device already stay as they are.
            device: where to.
            stream: where the copies are issued.
            stage: each has batches of its own kind, so each is measured for itself.
        """

        def packed(left: Any) -> Any:
            small = small_tensors(left)
            if len(small) < AT_LEAST:
                return copy(left)
            pin = device.type != "cpu"
            return copy(pack(left, small, lambda host: host.to(device, non_blocking=True), pin=pin))

        def whichever(left: Any) -> Any:
            trial = self._trials.setdefault(stage, PackTrial(self._clock, stream.stamp))
            if trial.packs is not None:
                return packed(left) if trial.packs else copy(left)
            count = len(small_tensors(left))
            if count < AT_LEAST:
                return copy(left)
            sent = trial.run({True: lambda: packed(left), False: lambda: copy(left)})
            if trial.packs is not None:
                does = "are packed into one copy" if trial.packs else "are copied one by one"
                self._tell(f"The {count} small tensors of a batch ({stage}) {does} from now on: {trial.figures}.")
            return sent

        ways = {True: packed, False: copy, "auto": whichever}
        return self.send(batch, ways[self._pack_small])
