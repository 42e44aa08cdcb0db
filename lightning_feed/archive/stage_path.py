"""A path that leads to the source until the copy is complete, and to the copy from then on."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from lightning_feed.archive.stage_record import StagePlace, is_ours, read_boot_id
from lightning_feed.archive.stage_tree import shown

_LOOK_EVERY_S = 1.0


class StagedPath:
    """Where to read from now. Can be pickled and forked: each process looks for itself.

    Args:
        source: what is copied.
        staged: the copy, there or not.
        since_s: only a copy that was seen to equal its source at this time or later counts, on the clock of
            :func:`~lightning_feed.archive.stage_record.now_s`. None takes any complete copy of this run of the machine.
        clock: seconds.

    Example:
        >>> root = StagedPath("/data/birds", "/dev/shm/me/birds")
        >>> root.current()
        PosixPath('/data/birds')
    """

    def __init__(
        self,
        source: str | Path,
        staged: str | Path,
        *,
        since_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = Path(os.path.abspath(source))  # noqa: PTH100 - as it stands in the record, links not resolved
        self.staged = Path(os.path.abspath(staged))  # noqa: PTH100
        self._since_s = since_s
        self._clock = clock
        self._current = self.source
        self._look_at_s = float("-inf")

    def current(self) -> Path:
        """The source, or the copy once it is complete. Looks for the copy once a second at most, and never again after
        it was found."""
        if self._current is self.source:
            now_s = self._clock()
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + _LOOK_EVERY_S
                if self._is_complete():
                    self._current = self.staged
        return self._current

    @property
    def is_staged(self) -> bool:
        """Whether :meth:`current` leads to the copy."""
        return self.current() is self.staged

    def _is_complete(self) -> bool:
        found = StagePlace(self.staged).read_complete()
        if (
            found is None
            or found.source != str(self.source)
            or found.boot_id != read_boot_id()
            or not is_ours(self.staged)
        ):
            return False
        return self._since_s is None or found.checked_s >= self._since_s

    def __getstate__(self) -> dict[str, object]:
        # The choice goes along, not the objects that `is` compares.
        return {**self.__dict__, "_current": None, "_staged_found": self._current is not self.source}

    def __setstate__(self, state: dict[str, object]) -> None:
        found = state.pop("_staged_found")
        self.__dict__.update(state)
        self._current = self.staged if found else self.source

    def __repr__(self) -> str:
        return f"StagedPath({shown(self.source)!r}, {shown(self.staged)!r})"
