"""The rate of a loader: whole rounds of its workers, after warm-up, bounded in time; and a watchdog for calls.

Workers finish together, so batches come in bursts of ``num_workers``, and what comes first was made before the clock
started. Windows of a fixed number of batches were seen to be off by -13 to +52 %, whole rounds by -4 to +3 %.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.worker import end_pass, stop_workers

T = TypeVar("T")

_END = object()
_POLL_S = 0.2
_SOON_S = 1.0
"""How long a call is waited for after it was told to stop."""
_GRACE_S = 7.0
"""And after what it waits for is gone. Torch's iterator looks every 5 s whether its workers live."""


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    """How long to measure, and when to give up.

    Raises:
        SettingsError: for limits that leave nothing to measure.
    """

    min_s: float = 1.0
    """Measure at least this long."""
    min_rounds: int = 2
    """Measure at least so many whole rounds."""
    warm_rounds: int = 2
    """Rounds of each pass that do not count, after the first batch, which does not count either."""
    max_s: float = 30.0
    """End then with what was measured."""
    silent_s: float | None = None
    """A loader that gives no batch for as long is taken to hang. None: ``max_s``."""

    def __post_init__(self) -> None:
        if self.min_rounds < 1 or self.warm_rounds < 0 or self.max_s <= 0 or self.min_s > self.max_s:
            raise SettingsError(
                f"{self} leaves nothing to measure. Give min_rounds of 1 or more, warm_rounds of 0 or more, and a "
                "max_s above 0 and not below min_s."
            )


@dataclass(frozen=True, kw_only=True)
class LoaderRate:
    """What a loader gives."""

    batches_per_s: float
    start_s: float
    """From before ``iter(loader)`` to the first batch, of the first pass."""
    taking_ms: float
    """CPU time that the thread which takes the batches spends for each, of all that came: with workers, what it costs
    to open a batch that they have sent; without, all of the loading."""


def time_loader(
    begin: Callable[[], Iterator[Any]],
    *,
    burst: int,
    limits: RoundLimits | None = None,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[], object] | None = None,
) -> LoaderRate:
    """Drain a loader and tell how fast it is.

    A pass that ends before enough was measured is followed by a new one. What lies between the two is not counted: the
    broken round at the end, the start-up, and the first batch and rounds of the new pass. Where passes are too short
    for that, fewer rounds are discarded, then whole passes are measured.

    Args:
        begin: begins a pass. The loader is used up: its workers are ended, persistent ones too.
        burst: batches of a round: the loader's ``num_workers``, or 1.
        limits: how long.
        clock: seconds.
        prepare: called before each pass; its time belongs to nothing that is measured.

    Raises:
        LoaderError: when the loader is empty, gives no batch for ``silent_s``, or gave too few in that time.
        Exception: what the loader raises.
    """
    limits = limits or RoundLimits()
    drain = _Drain(max(1, burst), limits, clock)
    batches: Iterator[Any] | None = None
    try:
        while not drain.enough():
            if prepare is not None:
                prepare()
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
                    "The loader gave no batch at all. Check the length of the dataset, the sampler and drop_last."
                )
    finally:
        if batches is not None:
            end_pass(batches)
    return drain.rate()


@dataclass
class _Pass:
    began: float
    stamps: list[float] = field(default_factory=list)
    """When each batch came."""
    whole: bool = False
    """Whether it came to its end."""
    cpu_s: float = 0.0
    """CPU time of the thread that took them."""


class _Drain:
    """Draws batches until enough is measured or the pass ends. Each batch is let go of at once."""

    def __init__(self, burst: int, limits: RoundLimits, clock: Callable[[], float]) -> None:
        self._burst, self._limits, self._clock = burst, limits, clock
        self._started = clock()
        self.passes: list[_Pass] = []

    def run(self, batches: Iterator[Any], heartbeat: "Heartbeat") -> None:
        now, began = self.passes[-1], time.thread_time()
        while next(batches, _END) is not _END:
            now.stamps.append(self._clock())
            now.cpu_s = time.thread_time() - began
            heartbeat.beat()
            if heartbeat.stopped or ((len(now.stamps) - 1) % self._burst == 0 and self.enough()):
                return
            if now.stamps[-1] - self._started > self._limits.max_s:
                return
        now.whole = True

    def enough(self) -> bool:
        batches, elapsed = self._measured(self._warm_rounds())
        asked = batches >= self._burst * self._limits.min_rounds and elapsed >= self._limits.min_s
        return asked or self._clock() - self._started > self._limits.max_s

    def hanging(self, silent_s: float) -> str:
        came = sum(len(one.stamps) for one in self.passes)
        return (
            f"The loader gave no batch for {silent_s:g} s (after {came} batches): it hangs, or is far slower than "
            "that. Its workers were ended. Look for locks and open connections that a worker inherits, and for reads "
            "without a timeout; DataLoader(timeout=...) ends a run that waits for ever."
        )

    def rate(self) -> LoaderRate:
        passes, limits = self.passes, self._limits
        came = sum(len(one.stamps) for one in passes)
        for warm in range(self._warm_rounds(), -2, -1):  # time may have run out before the warm-up was over
            batches, elapsed = self._measured(warm)
            if elapsed > 0:
                break
        else:  # not even a round
            batches, elapsed = came - len(passes), sum(one.stamps[-1] - one.stamps[0] for one in passes)
        if elapsed <= 0:
            raise LoaderError(
                f"The loader gave {came} batches in {limits.max_s:g} s, and its rate needs some after the first one. "
                "Allow more time."
            )
        return LoaderRate(
            batches_per_s=batches / elapsed,
            start_s=passes[0].stamps[0] - passes[0].began,
            taking_ms=1e3 * sum(one.cpu_s for one in passes) / came,
        )

    def _warm_rounds(self) -> int:
        """Rounds to discard in each pass, as many as asked for where whole passes leave a round; -1: none is left."""
        if not any(one.whole for one in self.passes):
            return self._limits.warm_rounds
        rounds = (max(len(one.stamps) for one in self.passes) - 1) // self._burst
        return max(-1, min(self._limits.warm_rounds, rounds - 1))

    def _measured(self, warm: int) -> tuple[int, float]:
        """(batches, seconds) of the whole rounds that follow the first batch and ``warm`` rounds of each pass; of whole
        passes for -1."""
        if warm < 0:
            whole = [one for one in self.passes if one.whole and one.stamps]
            return sum(len(one.stamps) for one in whole), sum(one.stamps[-1] - one.began for one in whole)
        batches, elapsed, first = 0, 0.0, warm * self._burst  # the last batch that does not count
        for one in self.passes:
            counted = max(0, len(one.stamps) - 1 - first) // self._burst * self._burst
            if counted:
                batches += counted
                elapsed += one.stamps[first + counted] - one.stamps[first]
        return batches, elapsed


# --- the watchdog ---------------------------------------------------------------------------------------------------


class Heartbeat:
    """The sign of life that a watched call gives."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.stopped = False
        """Set when the call should end."""

    def beat(self) -> None:
        """Say that the call goes on."""
        self.last = time.monotonic()


def watchdog(
    work: Callable[[Heartbeat], T], *, silent_s: float, unblock: Callable[[], bool], what: Callable[[float], str]
) -> T:
    """What ``work`` returns, or raises. Ctrl-C ends the work before it is raised here.

    The work runs in a daemon thread: a call that never returns cannot be ended from outside, only left behind.

    Args:
        work: calls ``beat()`` at least every ``silent_s``.
        silent_s: how long it may be silent.
        unblock: called to let the work past what it waits for; returns whether there was anything to do.
        what: the message for so many seconds of silence.

    Raises:
        LoaderError: the work was silent for longer.
    """
    heartbeat = Heartbeat()
    given: list[T] = []
    raised: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread starts on device 0
            given.append(work(heartbeat))
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread that asked
            raised.append(error)

    thread = threading.Thread(target=run, name="lightning-feed-measuring", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            if thread.is_alive() and time.monotonic() - heartbeat.last > silent_s:
                raise LoaderError(what(silent_s))
    except BaseException as ended:
        heartbeat.stopped = True
        thread.join(_SOON_S)
        # What was silent for too long may hang for ever. What Ctrl-C met in the midst of a sample ends with that, and
        # must: it would draw random numbers after their state has been put back.
        if thread.is_alive() and (unblock() or isinstance(ended, KeyboardInterrupt)):
            thread.join(_GRACE_S)
        raise
    if raised:
        error = raised.pop()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
    return given[0]
