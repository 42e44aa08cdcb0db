"""The rate of a loader, measured by iterating it; and a watchdog for calls that may hang.

Workers finish together, so batches arrive in rounds of ``num_workers``, and the first ones were made before the clock
started. Rates over a fixed number of batches were off by -13 to +52 %, rates over whole rounds by -4 to +3 %.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import Batch
from lightning_feed.load.processes import end_pass, stop_workers
from lightning_feed.load.worker import on_this_device
from lightning_feed.wording import plural

T = TypeVar("T")

_END = object()
_WHOLE_PASSES = -1
"""Used in place of a number of warm-up rounds, if no round is to be discarded and whole passes are to be counted."""
_POLL_S = 0.2
_SOON_S = 1.0
"""Seconds for a call to end after a request to stop."""
_GRACE_S = 7.0
"""Seconds for a call to end after it was unblocked. Torch's iterator checks its workers every 5 s."""


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    """Limits of a measurement."""

    min_s: float = 1.0
    """Measure at least this long."""
    min_rounds: int = 2
    """Measure at least this many whole rounds."""
    warm_rounds: int = 2
    """Rounds of each pass to discard, after the first batch, which is discarded too."""
    max_s: float = 30.0
    """End after this time, with the measurements so far."""
    silent_s: float | None = None
    """A loader that yields no batch for this time is considered hanging; None for ``max_s``."""


@dataclass(frozen=True, kw_only=True)
class LoaderRate:
    """A loader's measured rate."""

    batches_per_s: float
    start_s: float
    """Time from ``iter(loader)`` to the first batch, in the first pass."""
    taking_ms: float
    """CPU time per batch in the consuming thread, averaged over all batches. With workers, the cost of opening a
    received batch; without workers, all of the loading."""


def time_loader(
    begin: Callable[[], Iterator[Batch]],
    *,
    burst: int,
    limits: RoundLimits | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoaderRate:
    """Measure a loader's rate by iterating it.

    If a pass ends too early, a new pass follows. The incomplete round at the end of the old pass does not count, nor do
    the start-up, the first batch and the warm-up rounds of the new pass. If passes are too short for that, fewer rounds
    are discarded, and finally whole passes are measured.

    Args:
        begin: begins a pass. After the last pass all workers are ended, including persistent ones.
        burst: batches per round: the loader's ``num_workers``, or 1.
        limits: limits of the measurement.
        clock: returns the time in seconds.

    Raises:
        LoaderError: the loader is empty, yields no batch for ``silent_s``, or yields too few in the available time.
        Exception: any error of the loader.
    """
    limits = limits or RoundLimits()
    drain = _Drain(max(1, burst), limits, clock)
    batches: Iterator[Batch] | None = None
    try:
        while not drain.enough():
            drain.passes.append(_Pass(clock()))
            batches = begin()
            watchdog(
                partial(drain.run, batches),
                silent_s=limits.silent_s or limits.max_s,
                unblock=partial(stop_workers, batches),
                what=drain.hanging,
            )
            if not drain.passes[-1].stamps:
                raise LoaderError(
                    "The loader yielded no batch at all. Check the length of the dataset, the sampler and drop_last."
                )
    finally:
        if batches is not None:
            end_pass(batches)
    return drain.rate()


@dataclass
class _Pass:
    began_s: float
    stamps: list[float] = field(default_factory=list)
    """Arrival time of each batch."""
    whole: bool = False
    """True if the pass reached its end."""
    cpu_s: float = 0.0
    """CPU time of the consuming thread."""


class _Drain:
    """Draws batches until enough is measured or the pass ends. Keeps no batch."""

    def __init__(self, burst: int, limits: RoundLimits, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._limits = limits
        self._clock = clock
        self._began_s = clock()
        self.passes: list[_Pass] = []

    def run(self, batches: Iterator[Batch], heartbeat: "Heartbeat") -> None:
        this_pass = self.passes[-1]
        began_s = time.thread_time()
        while next(batches, _END) is not _END:
            this_pass.stamps.append(self._clock())
            this_pass.cpu_s = time.thread_time() - began_s
            heartbeat.beat()
            is_late = this_pass.stamps[-1] - self._began_s > self._limits.max_s
            is_whole_round = (len(this_pass.stamps) - 1) % self._burst == 0
            if heartbeat.stopped or is_late or (is_whole_round and self.enough()):
                return
        this_pass.whole = True

    def enough(self) -> bool:
        fewest_warm = self._limits.warm_rounds
        if any(one_pass.whole for one_pass in self.passes):
            fewest_warm = _WHOLE_PASSES
        batches, elapsed_s = self._best(fewest_warm)
        if batches >= self._burst * self._limits.min_rounds and elapsed_s >= self._limits.min_s:
            return True
        return self._clock() - self._began_s > self._limits.max_s

    def hanging(self, silent_s: float) -> str:
        return (
            f"The loader gave no batch for {silent_s:g} s (after {self._count()} batches): it hangs, or is far too "
            "slow. Its workers were ended. Look for locks and open connections that a worker inherits, and for reads "
            "without a timeout; DataLoader(timeout=...) ends a run that waits for ever."
        )

    def rate(self) -> LoaderRate:
        count = self._count()
        batches, elapsed_s = self._best(_WHOLE_PASSES)  # the time may have ended during the warm-up
        if not elapsed_s:  # not even a round
            batches = count - len(self.passes)
            elapsed_s = sum(one_pass.stamps[-1] - one_pass.stamps[0] for one_pass in self.passes)
        if elapsed_s <= 0:
            raise LoaderError(
                f"The loader yielded {plural(count, 'batch', 'batches')} in {self._limits.max_s:g} s, too few to "
                "measure its rate. "
                "Allow more time."
            )
        first = self.passes[0]
        return LoaderRate(
            batches_per_s=batches / elapsed_s,
            start_s=first.stamps[0] - first.began_s,
            taking_ms=1e3 * sum(one_pass.cpu_s for one_pass in self.passes) / count,
        )

    def _count(self) -> int:
        return sum(len(one_pass.stamps) for one_pass in self.passes)

    def _best(self, fewest_warm: int) -> tuple[int, float]:
        """Return (batches, seconds) after the requested number of warm-up rounds.

        If nothing remains, fewer rounds are discarded, down to ``fewest_warm``.
        """
        for warm in range(self._limits.warm_rounds, fewest_warm - 1, -1):
            batches, elapsed_s = self._whole_passes() if warm == _WHOLE_PASSES else self._whole_rounds(warm)
            if elapsed_s:
                return batches, elapsed_s
        return 0, 0.0

    def _whole_passes(self) -> tuple[int, float]:
        """Return (batches, seconds) of the passes that reached their end, from ``iter(loader)`` on."""
        whole = [one_pass for one_pass in self.passes if one_pass.whole and one_pass.stamps]
        elapsed_s = sum(one_pass.stamps[-1] - one_pass.began_s for one_pass in whole)
        return sum(len(one_pass.stamps) for one_pass in whole), elapsed_s

    def _whole_rounds(self, warm: int) -> tuple[int, float]:
        """Return (batches, seconds) of the whole rounds after the first batch and ``warm`` rounds of each pass."""
        first = warm * self._burst  # the last batch that does not count
        batches = 0
        elapsed_s = 0.0
        for one_pass in self.passes:
            rounds = max(0, len(one_pass.stamps) - 1 - first) // self._burst
            if rounds:
                last = first + rounds * self._burst
                batches += rounds * self._burst
                elapsed_s += one_pass.stamps[last] - one_pass.stamps[first]
        return batches, elapsed_s


# --- the watchdog ---------------------------------------------------------------------------------------------------


class Heartbeat:
    """Signals from a watched call that it is alive."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.stopped = False
        """Set when the call should end."""

    def beat(self) -> None:
        """Signal that the call is alive."""
        self.last = time.monotonic()


def watchdog(
    work: Callable[[Heartbeat], T], *, silent_s: float, unblock: Callable[[], bool], what: Callable[[float], str]
) -> T:
    """Run ``work`` and return its result. Ctrl-C ends the work first, and is then raised here.

    The work runs in a daemon thread, because a call that never returns cannot be ended, only abandoned.

    Args:
        work: must call ``beat()`` at least every ``silent_s`` seconds.
        silent_s: longest time between two beats.
        unblock: called to unblock the work. Returns True if there was anything to unblock.
        what: makes the error message from the number of seconds without a beat (``silent_s``).

    Raises:
        LoaderError: no beat for longer than ``silent_s``.
    """
    heartbeat = Heartbeat()
    outcome = Future[T]()
    thread = threading.Thread(
        target=_watched,
        args=(partial(work, heartbeat), outcome, on_this_device()),
        name="lightning-feed-measuring",
        daemon=True,
    )
    try:
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)
            if thread.is_alive() and time.monotonic() - heartbeat.last > silent_s:
                raise LoaderError(what(silent_s))
    except BaseException as ended:
        heartbeat.stopped = True
        wait([outcome], _SOON_S)
        # Silent work may hang for ever, so it is abandoned. Work interrupted by Ctrl-C ends with the current sample,
        # and must be waited for: it would draw random numbers after their state has been restored, and a thread that
        # uses torch while Python ends aborts the process. Ctrl-C may also come before the thread counts as alive.
        if not outcome.done() and (unblock() or isinstance(ended, KeyboardInterrupt)):
            wait([outcome], _GRACE_S)
        raise
    try:
        return outcome.result()
    finally:
        del outcome  # the traceback of an error holds this frame


def _watched(work: Callable[[], T], outcome: "Future[T]", set_device: Callable[[], None]) -> None:
    try:
        set_device()
        outcome.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised in the calling thread
        outcome.set_exception(error)
    finally:
        del outcome
