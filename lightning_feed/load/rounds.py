"""How fast a loader gives batches: whole rounds of its workers, after warm-up, bounded in time.

Workers finish together, so batches come in bursts of ``num_workers``, and what comes first was made before the clock
started. Windows of a fixed number of batches were seen to be off by -13 to +52 %, whole rounds by -4 to +3 %.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.watched import Beat, watched
from lightning_feed.load.worker_end import end_pass, kill_workers

_END = object()


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
    batches: int
    """That were measured."""
    rounds: int
    """Whole rounds that were measured. 0 where no pass was long enough for one, and whole passes were measured instead,
    their start-up included; and where time ran out before there was one."""
    elapsed_s: float
    """That was measured."""
    settled: bool
    """Whether as many rounds were discarded and measured as was asked for. False: take the rate with care."""
    taking_ms: float = 0.0
    """CPU time that the thread which takes the batches spends for each, of all that came: with workers, what it costs
    to open a batch that they have sent; without, all of the loading."""


@dataclass
class _Pass:
    began: float
    stamps: list[float]
    """When each batch came."""
    whole: bool = False
    """Whether it came to its end."""
    cpu_s: float = 0.0
    """CPU time of the thread that took them."""


def time_loader(
    begin: Callable[[], Iterator[Any]],
    *,
    burst: int,
    limits: RoundLimits | None = None,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.thread_time,
    prepare: Callable[[], object] | None = None,
) -> LoaderRate:
    """Drain a loader and tell how fast it is.

    A pass that ends before enough was measured is followed by a new one. What lies between the two is not counted: the
    broken round at the end, the start-up, and the first batch and rounds of the new pass. Where passes are too short
    for that, fewer rounds are discarded, then whole passes are measured (``rounds=0``).

    Args:
        begin: begins a pass. The loader is used up: its workers are ended, persistent ones too.
        burst: batches of a round: the loader's ``num_workers``, or 1.
        limits: how long.
        clock: seconds.
        cpu_clock: seconds of CPU time of the thread that calls it.
        prepare: called before each pass; its time belongs to nothing that is measured.

    Raises:
        LoaderError: when the loader is empty, gives no batch for ``silent_s``, or gave too few in that time.
        Exception: what the loader raises.
    """
    limits = limits or RoundLimits()
    burst = max(1, burst)
    passes: list[_Pass] = []
    batches: Iterator[Any] | None = None
    started = clock()
    try:
        while True:
            if prepare is not None:
                prepare()
            now = _Pass(clock(), [])
            batches = begin()
            passes.append(now)
            drain = _Drain(passes, burst, limits, clock, started)
            watched(
                drain.run_on(batches, cpu_clock),
                silent_s=limits.silent_s or limits.max_s,
                unblock=partial(kill_workers, batches),
                what=_hanging(passes),
            )
            if drain.enough():
                break
            if not now.stamps:
                raise LoaderError(
                    "The loader gave no batch at all. Check the length of the dataset, the sampler and drop_last."
                )
    finally:
        if batches is not None:
            end_pass(batches)
    return _rate(passes, burst, limits)


class _Drain:
    """Draws batches until enough is measured or the pass ends. Each batch is let go of at once."""

    def __init__(
        self, passes: list[_Pass], burst: int, limits: RoundLimits, clock: Callable[[], float], started: float
    ) -> None:
        self._passes, self._burst, self._limits, self._clock, self._started = passes, burst, limits, clock, started

    def run_on(self, batches: Iterator[Any], cpu_clock: Callable[[], float]) -> Callable[[Beat], None]:
        now, clock, burst = self._passes[-1], self._clock, self._burst

        def run(beat: Beat) -> None:
            began = cpu_clock()
            while next(batches, _END) is not _END:
                now.stamps.append(clock())
                now.cpu_s = cpu_clock() - began
                beat.beat()
                if beat.stopped or ((len(now.stamps) - 1) % burst == 0 and self.enough()):
                    return
                if now.stamps[-1] - self._started > self._limits.max_s:
                    return
            now.whole = True

        return run

    def enough(self) -> bool:
        passes, burst, limits = self._passes, self._burst, self._limits
        batches, elapsed, _ = _measured(passes, burst, _warm(passes, burst, limits))
        asked = batches >= burst * limits.min_rounds and elapsed >= limits.min_s
        return asked or self._clock() - self._started > limits.max_s


def _warm(passes: list[_Pass], burst: int, limits: RoundLimits) -> int:
    """Rounds to discard in each pass, as many as asked for where whole passes leave a round; -1: none is left."""
    if not any(one.whole for one in passes):
        return limits.warm_rounds
    rounds = (max(len(one.stamps) for one in passes) - 1) // burst
    return max(-1, min(limits.warm_rounds, rounds - 1))


def _measured(passes: list[_Pass], burst: int, warm: int) -> tuple[int, float, int]:
    """(batches, seconds, rounds) of the whole rounds that follow the first batch and ``warm`` rounds of each pass; of
    whole passes for -1."""
    if warm < 0:
        whole = [one for one in passes if one.whole and one.stamps]
        return sum(len(one.stamps) for one in whole), sum(one.stamps[-1] - one.began for one in whole), 0
    batches, elapsed = 0, 0.0
    for one in passes:
        first = warm * burst  # the last batch that does not count
        rounds = (len(one.stamps) - 1 - first) // burst
        if rounds > 0:
            batches += rounds * burst
            elapsed += one.stamps[first + rounds * burst] - one.stamps[first]
    return batches, elapsed, batches // burst


def _rate(passes: list[_Pass], burst: int, limits: RoundLimits) -> LoaderRate:
    batches, elapsed, rounds, warm = 0, 0.0, 0, 0
    for warm in range(_warm(passes, burst, limits), -2, -1):  # time may have run out before the warm-up was over
        batches, elapsed, rounds = _measured(passes, burst, warm)
        if elapsed > 0:
            break
    if elapsed <= 0:  # not even a round
        batches = sum(len(one.stamps) - 1 for one in passes if len(one.stamps) > 1)
        elapsed = sum(one.stamps[-1] - one.stamps[0] for one in passes if len(one.stamps) > 1)
    if elapsed <= 0:
        came = sum(len(one.stamps) for one in passes)
        raise LoaderError(
            f"The loader gave {came} batches in {limits.max_s:g} s, and its rate needs some after the first one. Allow "
            "more time."
        )
    return LoaderRate(
        batches_per_s=batches / elapsed,
        start_s=passes[0].stamps[0] - passes[0].began,
        batches=batches,
        rounds=rounds,
        elapsed_s=elapsed,
        taking_ms=1e3 * sum(one.cpu_s for one in passes) / sum(len(one.stamps) for one in passes),
        settled=warm == limits.warm_rounds and rounds >= limits.min_rounds,
    )


def _hanging(passes: list[_Pass]) -> Callable[[float], str]:
    def say(silent_s: float) -> str:
        came = sum(len(one.stamps) for one in passes)
        return (
            f"The loader gave no batch for {silent_s:g} s (after {came} batches): it hangs, or is far slower than "
            "that. Its workers were ended. Look for locks and open connections that a worker inherits, and for reads "
            "without a timeout; DataLoader(timeout=...) ends a run that waits for ever."
        )

    return say
