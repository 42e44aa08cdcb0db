"""The work of training between two batches, imitated in a trial: it takes CPUs from the loader as training does."""

import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

_BLOCK = bytes(1 << 18)
"""Bytes of one piece of work: about 0.1 ms, long enough for zlib to release the GIL."""


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """The work of a training step, without loading. The default is no work: then the loader alone is measured."""

    step_s: float = 0.0
    """Time of a step that never waits for data."""
    cpu_s: float = 0.0
    """CPU time of each thread within a step."""
    threads: int = 1
    """Threads that compute."""
    on_device: bool = False
    """True if a device computes the step while the training thread goes on to the next batch."""
    copy_s: float = 0.0
    """The part of ``step_s`` in which the step waits for the copy of a batch that is not in place, and that batches in
    place may save. A trial cannot copy to the device."""

    @property
    def in_place(self) -> "TrainingWork":
        """The work of a step with batches in place, if their copies take no time of it."""
        step_s = max(0.0, self.step_s - self.copy_s)
        return replace(self, step_s=step_s, cpu_s=min(self.cpu_s, step_s), copy_s=0.0)


class ImitatedTraining:
    """Takes as long as training, and as much CPU time, for each batch.

    On a device, the training thread is at most one step ahead: it issues a step while the device computes the one
    before, and then waits for the device.

    Args:
        work: the work of a step.
        clock: returns the time in seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        work: TrainingWork,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._work = work
        self._clock = clock
        self._sleep = sleep
        self._device_free_s = 0.0
        self._others = ThreadPoolExecutor(max_workers=max(1, work.threads - 1))

    def train(self) -> None:
        """Do the work of one step."""
        if self._work.step_s <= 0:
            return
        began_s = self._clock()
        self._compute()
        if not self._work.on_device:
            self._wait_until(began_s + self._work.step_s)
            return
        step_begins_s = max(self._clock(), self._device_free_s)
        self._device_free_s = step_begins_s + self._work.step_s
        self._wait_until(step_begins_s)

    def _compute(self) -> None:
        pieces = [self._others.submit(_compute, self._work.cpu_s) for _ in range(self._work.threads - 1)]
        _compute(self._work.cpu_s)
        for piece in pieces:
            piece.result()

    def _wait_until(self, moment_s: float) -> None:
        left_s = moment_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)


def _compute(cpu_s: float) -> None:
    """Keep a CPU busy until this thread has used ``cpu_s`` seconds of CPU time."""
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        zlib.crc32(_BLOCK)
