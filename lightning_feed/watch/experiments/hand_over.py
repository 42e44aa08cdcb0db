"""X7: what it takes to hand a batch over from a worker process, and whether another sharing strategy saves of it.

All of it happens in a process of its own: the strategy is one for the whole process, and with ``file_system`` helpers
of torch live as long as the process that received a tensor.
"""

import multiprocessing
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch.multiprocessing as torch_mp

from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.load.variant import Changes, with_changes
from lightning_feed.watch.experiments.null_dataset import NullDataset, NullStream
from lightning_feed.watch.experiments.subject import Part
from lightning_feed.watch.loader_state import Probe, probe_loader

_WARM, _BATCHES = 2, 20
"""Batches of a pass that do not count, and those that do."""
_FULL_S = 0.5
"""So long the queue is given to fill up."""
_POLL_S = 0.0005
_GIVEN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """Median wall times to take a batch that is ready, in milliseconds."""

    strategy: str
    """The sharing strategy in force."""
    ms: float
    file_system_ms: float | None
    """With the strategy ``file_system``; None: it is in force."""


class _Loader(Protocol):
    def __iter__(self) -> Any: ...


def measure_hand_over(parts: tuple[Part, ...], samples: list[Any], *, passes: int = 2) -> HandOver | str:
    """Take constant batches that are ready from one worker of each loader; or why that cannot be.

    Args:
        parts: the loaders.
        samples: one of each.
        passes: with each strategy, in turn.
    """
    for part in parts:
        context = getattr(part.loader, "multiprocessing_context", None)
        method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
        if method != "fork":
            return f"worker processes are made by {method}: what handing a batch over takes is told of forked ones"
        if getattr(part.loader, "workers", "process") == "thread":
            return "worker threads hand nothing over"
        if getattr(part.loader, "decode", None) is not None:
            return "batches are decoded behind the workers, on a device that a forked process must not touch"
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_answer, args=(there, parts, samples, passes), name="lightning-feed-hand-over", daemon=False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        child.start()  # as torch's loaders do for each worker
    there.close()
    try:
        if not here.poll(_GIVEN_S):
            return f"no batch was handed over within {_GIVEN_S:g} s"
        answer: HandOver | str = here.recv()
    except EOFError:
        return "the process that measured it ended before it was done"
    finally:
        if child.is_alive():
            child.join(1.0)
        if child.is_alive():
            child.kill()  # its workers see it, and end
        child.join()
        child.close()
        here.close()
    return answer


def _answer(there: Connection, parts: tuple[Part, ...], samples: list[Any], passes: int) -> None:
    """In the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        answer: HandOver | str = _compare(parts, samples, passes)
    except Exception as error:  # noqa: BLE001  # of the user's collate function, or memory: told in the parent
        answer = f"{type(error).__name__}: {error}".rstrip().rpartition("\n")[2]  # a worker's has its traceback before
    there.send(answer)
    there.close()


def _compare(parts: tuple[Part, ...], samples: list[Any], passes: int) -> HandOver | str:
    now: str = torch_mp.get_sharing_strategy()  # type: ignore[no-untyped-call]
    strategies = [now] if now == "file_system" or not sys.platform.startswith("linux") else [now, "file_system"]
    total = dict.fromkeys(strategies, 0.0)
    for part, sample in zip(parts, samples, strict=True):
        taken: dict[str, list[float]] = {strategy: [] for strategy in strategies}
        for _ in range(passes):
            for strategy in strategies:
                torch_mp.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
                taken[strategy] += taking_times(_constant(part, sample))
        for strategy, times in taken.items():
            if not times:
                return "the queue of the worker did not fill up"
            total[strategy] += 1e3 * statistics.median(times)
    return HandOver(strategy=now, ms=total[now], file_system_ms=total.get("file_system") if len(total) > 1 else None)


def _constant(part: Part, sample: Any) -> _Loader:
    kind = NullStream if part.stream else NullDataset
    dataset = kind(sample, part.loader.dataset)
    # The device is not touched in a forked process, so nothing is pinned.
    made = with_changes(part.loader, Changes(dataset=dataset, num_workers=1, pin_memory=False, endless=True))
    if isinstance(made, FeedLoader):
        made.background = 0  # a thread that takes them would hide what it takes
    return made


def taking_times(
    loader: _Loader, *, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], object] = time.sleep
) -> list[float]:
    """Seconds in ``next()``, of batches that were ready."""
    batches = iter(loader)
    probe = probe_loader(batches)
    times: list[float] = []
    for number in range(_WARM + _BATCHES):
        if number and (probe is None or not _full(probe, sleep)):
            break
        began = clock()
        next(batches)
        if number >= _WARM:
            times.append(clock() - began)
    return times


def _full(probe: Probe, sleep: Callable[[float], object]) -> bool:
    """Wait until all is made that may be; whether it was."""
    for _ in range(round(_FULL_S / _POLL_S)):
        state, capacity = probe.read(), probe.capacity()
        if state is None or capacity is None:
            return False
        if state.ready >= capacity:
            return True
        sleep(_POLL_S)
    return False
