"""The loader alone: its rate, other numbers of workers, constant samples, and the hand-over of a ready batch."""

import multiprocessing
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as torch_mp
from torch.utils.data import Dataset, IterableDataset

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.cloning import Changes, burst_of, clone_loader, iter_is_itself
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.throughput import RoundLimits, time_loader
from lightning_feed.load.worker import worker_processes
from lightning_feed.watch.experiments.results import KeyUse
from lightning_feed.watch.experiments.session import (
    START_S,
    LeftOut,
    Part,
    Session,
    Together,
    counted_s,
    fresh,
    key_bytes,
    rate_of,
)
from lightning_feed.watch.loader_state import Probe, probe_loader
from lightning_feed.watch.worker_time import WorkerClock, Workers, WorkerTime

_TIMES = 3
"""Each number of workers is tried at most this often."""
_EACH = 1 / 8
"""Of the time, for each try."""
_WARM, _BATCHES = 2, 20
"""Batches of a pass of the hand-over that do not count, and those that do."""
_FULL_S, _POLL_S = 0.5, 0.0005
"""How long the queue may take to fill up, and how often it is looked at."""
_CHILD_S = 20.0
_LONG_S = 0.7
"""With a smaller share of the time, the hand-over is measured once with each sharing strategy."""


def measure_loader(session: Session) -> None:
    """Drain the loaders side by side as they are configured. Samplers begin again at their end.

    Raises:
        LoaderError: nothing can be taken from it, or it hangs.
        DatasetError: a sample cannot be loaded.
    """
    limits = RoundLimits(min_s=counted_s(session.share_s), max_s=max(START_S, session.share_s))
    if not session.parts:
        _measure_iterable(session, limits)
        return
    session.check_memory()
    loaders = [part.loader for part in session.parts]
    reads = _ReadMeter(max(map(burst_of, loaders)))
    rate, session.first = rate_of(session.parts, limits, on_batch=reads)
    session.alone, session.reads = rate, reads.total
    session.note(
        loader_per_s=rate.batches_per_s,
        loader_start_s=rate.start_s,
        taking_ms=rate.taking_ms if all(loader.num_workers for loader in loaders) else None,
        worker_scaling=((max(loader.num_workers for loader in loaders), rate.batches_per_s),),
    )


def _measure_iterable(session: Session, limits: RoundLimits) -> None:
    """The rate of what is no DataLoader."""
    loader = session.loader
    kind = type(loader).__name__
    if not hasattr(loader, "__iter__"):
        raise LoaderError(
            f"The training loader is a {kind}, which nothing can be taken from. Give a DataLoader, a dict or list of "
            "them, or another iterable."
        )
    if iter_is_itself(loader):
        raise LeftOut(f"a {kind} can be gone through only once, and training needs it")
    passes: list[Together] = []

    def begin() -> Together:
        passes.append(Together([iter(loader)]))
        return passes[-1]

    with preserve_state(loader):
        rate = time_loader(begin, burst=1, limits=limits)
    session.alone, session.first = rate, passes[0].first or []
    session.note(loader_per_s=rate.batches_per_s, loader_start_s=rate.start_s, taking_ms=rate.taking_ms)


class _ReadMeter:
    """Called after every batch: adds up what the workers read, once a round, without the first two rounds."""

    def __init__(self, burst: int) -> None:
        self.total = WorkerTime()
        self._burst, self._clock = burst, WorkerClock()

    def __call__(self, passes: Together) -> None:
        if passes.came >= 2 * self._burst and passes.came % self._burst == 0:
            pids = tuple(process.pid for process in worker_processes(passes)) or (os.getpid(),)
            self.total.add(self._clock.take(Workers(pids), time.perf_counter_ns()))


def measure_keys(session: Session) -> None:
    """The bytes of each part of the first batch."""
    names = [part.name for part in session.parts] or [""]
    session.note(
        keys=tuple(
            KeyUse(name=f"{place}.{name}" if place else name, bytes_per_batch=size, used=None)
            for place, batch in zip(names, session.first, strict=True)
            for name, size in key_bytes(batch).items()
        )
    )


# --- other numbers of workers -----------------------------------------------------------------------------------------


def workers_to_try(session: Session) -> list[int]:
    """Numbers of workers around the configured one and the number of CPUs, the most telling first; none is 0. The
    configured one is among them."""
    now = max(part.loader.num_workers for part in session.parts)
    cpus = max(1, session.machine.usable_cpus // len(session.parts))
    wanted = [cpus, 0, 1, 2 * now, now // 2, max(1, cpus // 2), now + 1]
    numbers = [number for number in dict.fromkeys(wanted) if number <= max(2 * cpus, now) and number != now]
    numbers.insert(min(2, len(numbers)), now)
    return numbers


def measure_scaling(session: Session) -> None:
    """The rate with each number of workers, all of them again and again while there is time: rates of the same loader
    differ, and by how much tells what a difference between two numbers is worth.

    Raises:
        LeftOut: which numbers were not tried, and why.
    """
    deadline = session.clock() + session.share_s
    rates = {now: [rate] for now, rate in session.results.worker_scaling}
    numbers, reasons = workers_to_try(session), list[str]()
    for _ in range(_TIMES):
        for number in tuple(numbers):
            if session.clock() >= deadline - counted_s(_EACH * session.share_s):
                break
            try:
                session.check_memory(number)
                rate = session.rate(partial(_with_workers, number), share=_EACH)
            except (LeftOut, FeedError) as error:
                if number and isinstance(error, FeedError):  # without workers: a data set may ask which it is in
                    raise
                numbers.remove(number)
                reasons.append(f"{number} workers: {error}" if isinstance(error, LeftOut) else str(error))
                continue
            rates.setdefault(number, []).append(rate)
            session.note(
                worker_scaling=tuple((each, statistics.median(rates[each])) for each in sorted(rates)),
                worker_spread=tuple((each, min(of), max(of)) for each, of in sorted(rates.items()) if len(of) > 1),
            )
    if reasons:
        raise LeftOut("; ".join(reasons))


def _with_workers(number: int, part: Part) -> Changes:
    return Changes(num_workers=number, endless=not part.stream)


# --- constant samples -------------------------------------------------------------------------------------------------


class _Constant:
    """What stands for a data set, and gives one sample again and again.

    Args:
        sample: what it gives.
        original: the data set that it stands for, asked for attributes that a ``worker_init_fn`` may want.
    """

    def __init__(self, sample: Any, original: Any) -> None:
        self.sample = sample
        self.original = original

    def give(self) -> Any:
        """The sample."""
        return fresh(self.sample)

    def __getattr__(self, name: str) -> Any:
        # Not __getitems__, by which torch would load whole batches from the original; no length and no state of a
        # stream, which would be believed; and nothing while unpickling.
        if name in ("state_dict", "load_state_dict") or name.startswith("__") or "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original, name)


class NullDataset(_Constant, Dataset[Any]):
    """Gives the same sample for every index."""

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: Any) -> Any:
        return self.give()


class NullStream(_Constant, IterableDataset[Any]):
    """Gives the same sample without end."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.give()


def _null(part: Part, sample: Any) -> Any:
    return (NullStream if part.stream else NullDataset)(sample, part.loader.dataset)


def measure_ceiling(session: Session) -> None:
    """The rate of the loaders with constant samples: what handing over, collating and pinning allow."""
    session.check_memory()
    samples = dict(zip(session.parts, session.samples, strict=True))
    rate = session.rate(lambda part: Changes(dataset=_null(part, samples[part]), endless=True))
    session.note(ceiling_per_s=rate)


# --- handing a batch over ---------------------------------------------------------------------------------------------


def measure_hand_over(session: Session) -> None:
    """Take constant batches that are ready from one worker of each loader, with both sharing strategies.

    All of it happens in a process of its own: the strategy is one for the whole process, and with ``file_system``
    helpers of torch live as long as the process that received a tensor.

    Raises:
        LeftOut: why that cannot be done.
    """
    for part in session.parts:
        context = getattr(part.loader, "multiprocessing_context", None) or multiprocessing
        if context.get_start_method() != "fork":
            raise LeftOut(
                f"worker processes are made by {context.get_start_method()}: only forked ones can be measured"
            )
        if getattr(part.loader, "workers", "process") == "thread":
            raise LeftOut("worker threads hand nothing over")
        if getattr(part.loader, "decode", None) is not None:
            raise LeftOut("batches are decoded behind the workers, on a device that a forked process must not touch")
    session.check_memory()
    now, ms = _in_a_process(lambda: _compare(session, 1 if session.share_s < _LONG_S else 2))
    others = [taken for strategy, taken in ms.items() if strategy != now]
    session.note(sharing_strategy=now, hand_over_ms=ms[now], hand_over_file_system_ms=others[0] if others else None)


def _in_a_process(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked process.

    Raises:
        LeftOut: it fails there, takes too long, or ends the process.
    """

    def answer(there: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            there.send(work())
        except LeftOut as reason:
            there.send(reason)
        except Exception as error:  # noqa: BLE001  # of the user's collate function, or memory: told in the parent
            # A worker's has its traceback before it.
            there.send(LeftOut(f"{type(error).__name__}: {error}".rstrip().rpartition("\n")[2]))

    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=answer, args=(there,), daemon=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        child.start()  # as torch's loaders do for each worker
    there.close()
    try:
        given = here.recv() if here.poll(_CHILD_S) else LeftOut(f"no batch was handed over within {_CHILD_S:g} s")
    except EOFError:
        given = LeftOut("the process that measured it ended before it was done")
    finally:
        child.join(1.0)
        child.kill()  # its workers see it, and end
        child.join()
        here.close()
    if isinstance(given, LeftOut):
        raise given
    return given


def _compare(session: Session, passes: int) -> tuple[str, dict[str, float]]:
    """(strategy in force, milliseconds of each strategy)."""
    now: str = torch_mp.get_sharing_strategy()  # type: ignore[no-untyped-call]
    strategies = [now] if now == "file_system" or not sys.platform.startswith("linux") else [now, "file_system"]
    total = dict.fromkeys(strategies, 0.0)
    for part, sample in zip(session.parts, session.samples, strict=True):
        taken: dict[str, list[float]] = {strategy: [] for strategy in strategies}
        for strategy in strategies * passes:
            torch_mp.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
            taken[strategy] += taking_times(_constant_loader(part, sample))
        for strategy, times in taken.items():
            if not times:
                raise LeftOut("the queue of the worker did not fill up")
            total[strategy] += 1e3 * statistics.median(times)
    return now, total


def _constant_loader(part: Part, sample: Any) -> Iterable[Any]:
    # The device is not touched in a forked process, so nothing is pinned.
    changes = Changes(dataset=_null(part, sample), num_workers=1, pin_memory=False, endless=True)
    made = clone_loader(part.loader, changes)
    if isinstance(made, FeedLoader):
        made.background = 0  # a thread that takes them would hide what it takes
    return made


def taking_times(
    loader: Iterable[Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
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
