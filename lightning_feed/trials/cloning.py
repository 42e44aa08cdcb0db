"""Clones of a user's loader for trials and experiments: changes, timing, watchdog, and locating failures.

Workers finish together, so batches arrive in rounds of ``num_workers``, and the first ones were made before the clock
started. Rates over a fixed number of batches were off by -13 to +52 %, rates over whole rounds by -4 to +3 %.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.load.kinds import AnyDataset, Batch
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import drawing_device
from lightning_feed.load.processes import end_pass, stop_workers
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import TORCH_PREFETCH, Setting
from lightning_feed.load.worker import on_this_device

_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order")
_KNOWN = ("_iterator", "dataset", "sampler", "batch_sampler")
_WORKER = re.compile(r"in DataLoader worker process (\d+)")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to a loader. None leaves a setting unchanged."""

    dataset: AnyDataset = None
    """Replaces the dataset. Of the same kind and length."""
    setting: Setting | None = None
    """The workers, and what belongs to them."""
    num_workers: int | None = None
    workers: Literal["process", "thread"] | None = None
    """Kind of workers. Only a FeedLoader has the choice."""
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    in_order: bool | None = None
    batches: Sequence[Any] | None = None
    """Items for the sampler to yield: a list of indices per batch, or indices if the loader does not batch."""
    endless: bool = False
    """True to restart the sampler at its end. Has no effect on iterable datasets."""


class GivenOrder:
    """A sampler that yields the items of ``source``, repeatedly if ``endless``.

    Args:
        source: a sampler, or a list.
        endless: restart at the end. An empty source still ends.
    """

    def __init__(self, source: Any, *, endless: bool) -> None:
        self.source = source
        self.endless = endless

    def __iter__(self) -> Iterator[Batch]:
        while True:
            empty = True
            for item in self.source:
                empty = False
                yield item
            if empty or not self.endless:
                return

    def __len__(self) -> int:
        return len(self.source)


def twin_of(loader: DataLoader[Batch], **values: object) -> DataLoader[Batch]:
    """Copy a loader, with other ``values`` and without running workers. Class, dataset, samplers and functions stay.

    The constructor is not called: its arguments may differ from the attributes, and its side effects must not be
    repeated. Without workers, options that need workers are dropped.

    Args:
        loader: a DataLoader, of a derived class, or ours. It stays as it is.
        **values: attributes of the copy. ``prefetch_factor=None`` with workers means torch's default.
    """
    context = loader.multiprocessing_context
    if not values.get("num_workers", loader.num_workers):
        context = None
        values |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    elif values.get("prefetch_factor", loader.prefetch_factor) is None:
        values["prefetch_factor"] = TORCH_PREFETCH
    twin = object.__new__(type(loader))
    twin.__dict__.update(vars(loader), **values, _iterator=None)
    twin.multiprocessing_context = None if has_threads(twin) else context
    if isinstance(twin, FeedLoader):
        twin.forget()
    return twin


def clone_loader(loader: DataLoader[Batch], changes: Changes | None = None) -> DataLoader[Batch]:
    """Clone a loader for trials, with changes. Class, dataset, samplers, collate function and other settings stay.

    The clone shares the loader's dataset, samplers and generator, so it draws the same order. Iterate it within
    :func:`preserve_state`, which restores their state. A FeedLoader's clone has no order of its own.

    Args:
        loader: a DataLoader, of a derived class, or ours. It is not iterated, and its workers are left alone.
        changes: the differences.

    Raises:
        LoaderError: the loader cannot be cloned, because its sampler can be iterated only once, or it keeps its own
            iterator.
    """
    changes = changes or Changes()
    _refuse_kept_iterator(loader)
    values: dict[str, Any] = _order(loader, changes)
    if changes.setting is not None:
        values |= {name: getattr(changes.setting, name) for name in _SETTINGS}
    values |= {name: value for name in _SETTINGS if (value := getattr(changes, name)) is not None}
    if changes.dataset is not None:
        values["dataset"] = changes.dataset
    if "next_iter_state" in vars(loader):  # the position at which torchdata's StatefulDataLoader resumes
        values["next_iter_state"] = None
    if isinstance(loader, FeedLoader):
        kind = changes.setting.workers if changes.setting is not None and changes.setting.num_workers else None
        values |= {"order": None, "watch": None, "workers": kind or changes.workers or loader.workers}
    return twin_of(loader, **values)


def burst_of(loader: DataLoader[Batch]) -> int:
    """Return the number of batches that arrive together: one per worker process.

    1 without workers, and with threads, which share a batch.
    """
    return 1 if has_threads(loader) else max(1, loader.num_workers)


def has_threads(loader: object) -> bool:
    """Check for a loader whose workers are threads."""
    return isinstance(loader, FeedLoader) and loader.workers == "thread"


def background_of(loader: object) -> int:
    """Return the number of batches that the loader's own thread keeps ready."""
    return loader.background if isinstance(loader, FeedLoader) else 0


def iter_is_itself(source: object) -> bool:
    """Check if ``source`` can be iterated only once: an iterator, such as a generator."""
    return hasattr(source, "__next__") and isinstance(source, Iterator)


def _order(loader: DataLoader[Batch], changes: Changes) -> dict[str, Any]:
    """Return the sampler or batch sampler of the clone, by attribute name. Empty if it stays as it is."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    source = getattr(loader, name) if changes.batches is None else changes.batches
    if iter_is_itself(source):
        raise LoaderError(
            f"The sampler ({type(source).__name__}) is an iterator, which can be iterated only once, so the loader "
            "cannot be tried without using it up. Use an object whose __iter__ starts again."
        )
    if changes.batches is None and not changes.endless:
        return {}
    return {name: GivenOrder(source, endless=changes.endless)}


def _refuse_kept_iterator(loader: DataLoader[Batch]) -> None:
    for name, value in vars(loader).items():
        if name not in _KNOWN and hasattr(value, "__next__") and not isinstance(value, type):
            raise LoaderError(
                f"The loader ({type(loader).__name__}) keeps an iterator in its attribute {name!r}, so it cannot be "
                "tried without taking batches from it. Try it with a plain DataLoader."
            )


# --- locating failures ------------------------------------------------------------------------------------------------


def original_error(error: BaseException) -> tuple[str, str]:
    """Return class name and message of an error, or of the original error that a worker's error reports."""
    kind = type(error).__name__
    text = str(error).strip()
    if text.startswith("Caught "):  # torch puts the worker's traceback into the message
        text = text.rpartition("\n")[2]
        name, _, rest = text.partition(":")
        if name.replace(".", "").isidentifier():
            return name.rpartition(".")[2], rest.strip()
    return kind, text


def locate_failure(parts: Sequence[Any], error: BaseException, came: int | None) -> DatasetError:
    """Return the error to raise for a loader's error. It names the worker and the sample, if known.

    Repeats the sampler's draws up to the failed batch, and makes its samples in this process. Names the sample that
    raises the same kind of error.

    Args:
        parts: the loaders, in their state before the pass.
        error: the loader's error.
        came: batches received before the error, in the first pass. None: unknown.
    """
    kind, text = original_error(error)
    worker = _WORKER.search(str(error))
    where = [f"worker {worker.group(1)}"] if worker else []
    if came is not None and len(parts) == 1 and not parts[0].stream:
        sample = _failing_sample(parts[0].loader, kind, came)
        where += [] if sample is None else [f"sample {sample}"]
    data = ", ".join(sorted({type(part.loader.dataset).__name__ for part in parts}))
    place = f" in {', '.join(where)}" if where else ""
    end = "" if text.endswith((".", "!", "?")) else "."
    return DatasetError(
        f"Loading from the data set ({data}) failed{place}: {kind}: {text}{end} Fix or exclude this sample."
    )


def _failing_sample(loader: DataLoader[Batch], kind: str, came: int) -> Any:
    """Find the failed sample. None if it is not found."""
    with preserve_state(loader):
        # Torch draws a seed, too, before it draws from the sampler.
        with drawing_device(loader.generator):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            batched = loader.batch_sampler is not None
            source = loader.batch_sampler if batched else loader.sampler
            if iter_is_itself(source):
                return None
            failed = next((batch for number, batch in enumerate(source or ()) if number == came), None)
        if failed is None:
            return None
        for index in failed if batched else [failed]:
            try:
                loader.dataset[index]
            except Exception as error:  # noqa: BLE001  # compared with the error to be explained
                if type(error).__name__ == kind:
                    return index
    return None


T = TypeVar("T")

_END = object()
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
    """A loader without a batch for this time is considered hanging. None: ``max_s``."""


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

    If a pass ends too early, a new pass follows. Not counted are the incomplete round at the end of the old pass, the
    start-up, and the first batch and the warm-up rounds of the new pass. If passes are too short for that, fewer rounds
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
    began: float
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
        self._started = clock()
        self.passes: list[_Pass] = []

    def run(self, batches: Iterator[Batch], heartbeat: "Heartbeat") -> None:
        now = self.passes[-1]
        began = time.thread_time()
        while next(batches, _END) is not _END:
            now.stamps.append(self._clock())
            now.cpu_s = time.thread_time() - began
            heartbeat.beat()
            late = now.stamps[-1] - self._started > self._limits.max_s
            if heartbeat.stopped or late or ((len(now.stamps) - 1) % self._burst == 0 and self.enough()):
                return
        now.whole = True

    def enough(self) -> bool:
        batches, elapsed = self._best(-1 if any(one.whole for one in self.passes) else self._limits.warm_rounds)
        asked = batches >= self._burst * self._limits.min_rounds and elapsed >= self._limits.min_s
        return asked or self._clock() - self._started > self._limits.max_s

    def hanging(self, silent_s: float) -> str:
        came = sum(len(one.stamps) for one in self.passes)
        return (
            f"The loader gave no batch for {silent_s:g} s (after {came} batches): it hangs, or is far too slow. "
            "Its workers were ended. Look for locks and open connections that a worker inherits, and for reads "
            "without a timeout; DataLoader(timeout=...) ends a run that waits for ever."
        )

    def rate(self) -> LoaderRate:
        passes = self.passes
        limits = self._limits
        came = sum(len(one.stamps) for one in passes)
        batches, elapsed = self._best(-1)  # the time may have ended during the warm-up
        if not elapsed:  # not even a round
            batches = came - len(passes)
            elapsed = sum(one.stamps[-1] - one.stamps[0] for one in passes)
        if elapsed <= 0:
            raise LoaderError(
                f"The loader yielded {came} batches in {limits.max_s:g} s, too few to measure its rate. "
                "Allow more time."
            )
        return LoaderRate(
            batches_per_s=batches / elapsed,
            start_s=passes[0].stamps[0] - passes[0].began,
            taking_ms=1e3 * sum(one.cpu_s for one in passes) / came,
        )

    def _best(self, fewest_warm: int) -> tuple[int, float]:
        """Return (batches, seconds) after the requested number of warm-up rounds. If nothing remains, discards fewer
        rounds, down to ``fewest_warm``."""
        found = map(self._measured, range(self._limits.warm_rounds, fewest_warm - 1, -1))
        return next((one for one in found if one[1]), (0, 0.0))

    def _measured(self, warm: int) -> tuple[int, float]:
        """Return (batches, seconds) of the whole rounds after the first batch and ``warm`` rounds of each pass. -1
        counts whole passes."""
        if warm < 0:
            whole = [one for one in self.passes if one.whole and one.stamps]
            return sum(len(one.stamps) for one in whole), sum(one.stamps[-1] - one.began for one in whole)
        first = warm * self._burst  # the last batch that does not count
        counted = [max(0, len(one.stamps) - 1 - first) // self._burst * self._burst for one in self.passes]
        pairs = zip((one.stamps for one in self.passes), counted, strict=True)
        return sum(counted), sum(stamps[first + more] - stamps[first] for stamps, more in pairs if more)


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
        what: makes the error message, given the number of seconds without a beat (``silent_s``).

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
