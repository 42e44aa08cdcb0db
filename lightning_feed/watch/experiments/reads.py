"""What the processes of a loader read, by the kernel's count."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_feed.archive.memory import read_text
from lightning_feed.load.worker_end import worker_processes


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Between two batches."""

    batches: int
    elapsed_s: float
    asked_bytes: int
    """Through ``read`` and its like, whoever gave them: ``rchar``. Memory maps do not count."""
    disk_bytes: int
    """That a disk had to give: ``read_bytes``."""

    @property
    def page_cache_pct(self) -> float | None:
        """Share that no disk had to give; None where files are mapped, so that the two counts do not compare."""
        if self.asked_bytes <= 0 or self.disk_bytes > self.asked_bytes:
            return None
        return 100 * (1 - self.disk_bytes / self.asked_bytes)


class ReadMarks:
    """Called after every batch: notes now and then what the workers have read by then.

    Args:
        first: batches before the first mark, so that what workers read to start up does not count.
        every: batches between marks.
        root: the file system to read ``proc`` from.
        clock: seconds.
    """

    def __init__(
        self, *, first: int, every: int, root: Path = Path("/"), clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._skipped, self._every, self._root, self._clock = first, every, root, clock
        self._first: tuple[Any, int, float, int, int] | None = None
        self._last: tuple[Any, int, float, int, int] | None = None

    def __call__(self, passes: Any) -> None:
        """Note it, if it is time to."""
        if passes.came < self._skipped or passes.came % self._every:
            return
        pids = [process.pid for process in worker_processes(passes)] or [os.getpid()]
        counts = [_counts(self._root, pid) for pid in pids]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return
        now = (passes, passes.came, self._clock(), sum(c[0] for c in known), sum(c[1] for c in known))
        if self._first is None or self._first[0] is not passes:
            self._first = now  # another pass has other workers
        self._last = now

    def result(self) -> Reads | None:
        """From the first mark to the last one; None without two."""
        if self._first is None or self._last is None or self._first[1] == self._last[1]:
            return None
        return Reads(
            batches=self._last[1] - self._first[1],
            elapsed_s=self._last[2] - self._first[2],
            asked_bytes=self._last[3] - self._first[3],
            disk_bytes=self._last[4] - self._first[4],
        )


def _counts(root: Path, pid: int) -> tuple[int, int] | None:
    """(rchar, read_bytes) of a process; None where the system does not tell."""
    fields = dict(line.partition(": ")[::2] for line in read_text(root / f"proc/{pid}/io").splitlines())
    asked, disk = fields.get("rchar", ""), fields.get("read_bytes", "")
    return (int(asked), int(disk)) if asked.isdigit() and disk.isdigit() else None
