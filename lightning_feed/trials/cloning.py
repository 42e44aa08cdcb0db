"""Clones of a user's loader for trials and experiments: with changes, timed, watched, their failures located.

Workers finish together, so batches come in bursts of ``num_workers``, and what comes first was made before the clock
started. Windows of a fixed number of batches were seen to be off by -13 to +52 %, whole rounds by -4 to +3 %.
"""

import copy
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.load.kinds import AnyDataset, Batch
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import drawing_device
from lightning_feed.load.processes import end_pass, stop_workers
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import TORCH_PREFETCH
from lightning_feed.load.worker import on_this_device

_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order")
_KNOWN = ("_iterator", "dataset", "sampler", "batch_sampler")
_WORKER = re.compile(r"in DataLoader worker process (\d+)")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to a loader; None leaves a setting as it is."""

    dataset: AnyDataset = None
    """In place of its dataset, of the same kind and length."""
    num_workers: int | None = None
    workers: Literal["process", "thread"] | None = None
    """The kind of workers; only a FeedLoader has the choice."""
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    in_order: bool | None = None
    batches: Sequence[Any] | None = None
    """Items for the sampler to give, batch for batch: lists of indices, or indices where the loader does not batch."""
    endless: bool = False
    """True to have the sampler begin again at its end. Iterable datasets end when they end."""


class GivenOrder:
    """A sampler that gives what it was given, over and over if it is to be endless.

    Args:
        source: a sampler, or a list.
        endless: begin again at its end; a source that gives nothing ends all the same.
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
    """A loader of the same class, dataset, samplers and functions, without workers yet, and with other ``values``.

    The constructor is not called: it may take other arguments than its objects have attributes, and may do more than
    once what must be done once. Where there are no workers, what only workers have is left out.

    Args:
        loader: a DataLoader, of a derived class, or ours. It stays as it is.
        **values: attributes of the twin. ``prefetch_factor=None`` beside workers gives torch's default.
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
    """A loader for trials: of the same class, dataset, samplers, collate function and settings, but for the changes.

    Its dataset, samplers and generator are the loader's own objects, so it draws the same order: iterate it within
    :func:`preserve_state`, which puts back what they draw and change. A FeedLoader's clone has no order of its own.

    Args:
        loader: a DataLoader, of a derived class, or ours. It is not iterated, and its workers are left alone.
        changes: the differences.

    Raises:
        LoaderError: when it cannot be cloned: its sampler can be gone through only once, or it keeps an iterator of its
            own.
    """
    changes = changes or Changes()
    _refuse_kept_iterator(loader)
    values: dict[str, Any] = _order(loader, changes)
    values |= {name: value for name in _SETTINGS if (value := getattr(changes, name)) is not None}
    if changes.dataset is not None:
        values["dataset"] = changes.dataset
    if "next_iter_state" in vars(loader):  # torchdata's: where a StatefulDataLoader is to go on
        values["next_iter_state"] = None
    if isinstance(loader, FeedLoader):
        values |= {"order": None, "watch": None, "workers": changes.workers or loader.workers}
    return twin_of(loader, **values)


def map_loaders(made: Any, change: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    """Rebuild a structure of loaders, with ``change(loader, path)`` in place of each loader.

    Args:
        made: the result of a hook for loaders: a loader, dicts and lists of loaders, or a CombinedLoader.
        change: given a loader and the keys and numbers that lead to it.
    """

    def each(path: tuple[Any, ...], leaf: Any) -> Any:
        if not (hasattr(leaf, "flattened") and hasattr(leaf, "limits")):
            return change(leaf, tuple(entry.key if hasattr(entry, "key") else entry.idx for entry in path))
        combined = copy.copy(leaf)
        inside, _ = tree_flatten_with_path(leaf.iterables, lambda node: any(node is one for one in leaf.flattened))
        combined.flattened = [each((*path, *below), one) for below, one in inside]
        return combined

    return tree_map_with_path(each, made)


def burst_of(loader: DataLoader[Batch]) -> int:
    """Batches that come together: one for each worker process; 1 without, and with threads, which share a batch."""
    return 1 if has_threads(loader) else max(1, loader.num_workers)


def has_threads(loader: object) -> bool:
    """Check for a loader whose workers are threads."""
    return isinstance(loader, FeedLoader) and loader.workers == "thread"


def background_of(loader: object) -> int:
    """Batches that the loader's own thread keeps ready."""
    return loader.background if isinstance(loader, FeedLoader) else 0


def iter_is_itself(source: object) -> bool:
    """Check if iterating uses ``source`` up: it is an iterator, such as a generator."""
    return hasattr(source, "__next__") and isinstance(source, Iterator)


def _order(loader: DataLoader[Batch], changes: Changes) -> dict[str, Any]:
    """The source of the indices, where it is to change."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    source = getattr(loader, name) if changes.batches is None else changes.batches
    if iter_is_itself(source):
        raise LoaderError(
            f"The sampler ({type(source).__name__}) is an iterator, which can be gone through only once, so the loader "
            "cannot be tried without using it up. Give an object whose __iter__ begins again."
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


# --- with their failures located ------------------------------------------------------------------------------------


def original_error(error: BaseException) -> tuple[str, str]:
    """Class name and message of an error; of one that comes from a worker, those of the original."""
    kind, text = type(error).__name__, str(error).strip()
    if text.startswith("Caught "):  # torch puts the worker's traceback into the message
        text = text.rpartition("\n")[2]
        name, _, rest = text.partition(":")
        if name.replace(".", "").isidentifier():
            return name.rpartition(".")[2], rest.strip()
    return kind, text


def locate_failure(parts: Sequence[Any], error: BaseException, came: int | None) -> DatasetError:
    """The error to raise for one that a loader raised, with the worker and the sample as far as they are known.

    The sampler's draws are repeated up to the batch that failed, and its samples are made in this process: the one that
    raises the same kind of error is named.

    Args:
        parts: the loaders, restored to before the pass.
        error: the error raised.
        came: batches that came before, in the first pass; None: not known.
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
    """The sample that failed; None where it is not found."""
    with preserve_state(loader):
        # As torch does before it asks the sampler for anything.
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
            except Exception as error:  # noqa: BLE001  # compared with the one that is being explained
                if type(error).__name__ == kind:
                    return index
    return None


T = TypeVar("T")

_END = object()
_POLL_S = 0.2
_SOON_S = 1.0
"""Time for a call to end after it was asked to stop."""
_GRACE_S = 7.0
"""And after what it waits for is gone. Torch's iterator looks every 5 s whether its workers live."""


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    """Limits of a measurement."""

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


@dataclass(frozen=True, kw_only=True)
class LoaderRate:
    """The rate of a loader."""

    batches_per_s: float
    start_s: float
    """From before ``iter(loader)`` to the first batch, of the first pass."""
    taking_ms: float
    """CPU time that the thread which takes the batches spends for each, of all that came: with workers, what it costs
    to open a batch that they have sent; without, all of the loading."""


def time_loader(
    begin: Callable[[], Iterator[Batch]],
    *,
    burst: int,
    limits: RoundLimits | None = None,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[], object] | None = None,
) -> LoaderRate:
    """Drain a loader and measure its rate.

    A pass that ends before enough was measured is followed by a new one. What lies between the two is not counted: the
    broken round at the end, the start-up, and the first batch and rounds of the new pass. Where passes are too short
    for that, fewer rounds are discarded, then whole passes are measured.

    Args:
        begin: begins a pass. The loader is used up: its workers are ended, persistent ones too.
        burst: batches of a round: the loader's ``num_workers``, or 1.
        limits: limits of the measurement.
        clock: seconds.
        prepare: called before each pass; its time belongs to nothing that is measured.

    Raises:
        LoaderError: when the loader is empty, gives no batch for ``silent_s``, or gave too few in that time.
        Exception: what the loader raises.
    """
    limits = limits or RoundLimits()
    drain = _Drain(max(1, burst), limits, clock)
    batches: Iterator[Batch] | None = None
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
    """The time at which each batch came."""
    whole: bool = False
    """True if it came to its end."""
    cpu_s: float = 0.0
    """CPU time of the thread that took them."""


class _Drain:
    """Draws batches until enough is measured or the pass ends. Each batch is let go of at once."""

    def __init__(self, burst: int, limits: RoundLimits, clock: Callable[[], float]) -> None:
        self._burst, self._limits, self._clock = burst, limits, clock
        self._started = clock()
        self.passes: list[_Pass] = []

    def run(self, batches: Iterator[Batch], heartbeat: "Heartbeat") -> None:
        now, began = self.passes[-1], time.thread_time()
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
            f"The loader gave no batch for {silent_s:g} s (after {came} batches): it hangs, or is far slower than "
            "that. Its workers were ended. Look for locks and open connections that a worker inherits, and for reads "
            "without a timeout; DataLoader(timeout=...) ends a run that waits for ever."
        )

    def rate(self) -> LoaderRate:
        passes, limits = self.passes, self._limits
        came = sum(len(one.stamps) for one in passes)
        batches, elapsed = self._best(-1)  # time may have run out before the warm-up was over
        if not elapsed:  # not even a round
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

    def _best(self, fewest_warm: int) -> tuple[int, float]:
        """(batches, seconds) without the warm-up rounds asked for; with fewer where nothing else is left."""
        found = map(self._measured, range(self._limits.warm_rounds, fewest_warm - 1, -1))
        return next((one for one in found if one[1]), (0, 0.0))

    def _measured(self, warm: int) -> tuple[int, float]:
        """(batches, seconds) of the whole rounds that follow the first batch and ``warm`` rounds of each pass; of whole
        passes for -1."""
        if warm < 0:
            whole = [one for one in self.passes if one.whole and one.stamps]
            return sum(len(one.stamps) for one in whole), sum(one.stamps[-1] - one.began for one in whole)
        first = warm * self._burst  # the last batch that does not count
        counted = [max(0, len(one.stamps) - 1 - first) // self._burst * self._burst for one in self.passes]
        pairs = zip((one.stamps for one in self.passes), counted, strict=True)
        return sum(counted), sum(stamps[first + more] - stamps[first] for stamps, more in pairs if more)


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
    """Return what ``work`` returns, or raise its error. Ctrl-C ends the work before it is raised here.

    The work runs in a daemon thread: a call that never returns cannot be ended from outside, only left behind.

    Args:
        work: calls ``beat()`` at least every ``silent_s``.
        silent_s: seconds that it may be silent.
        unblock: called to let the work past what it waits for; returns whether there was anything to do.
        what: the message for so many seconds of silence.

    Raises:
        LoaderError: the work was silent for longer.
    """
    heartbeat, outcome = Heartbeat(), Future[T]()
    thread = threading.Thread(
        target=_watched,
        args=(partial(work, heartbeat), outcome, on_this_device()),
        name="lightning-feed-measuring",
        daemon=True,
    )
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
    try:
        return outcome.result()
    finally:
        del outcome  # the traceback of an error holds this frame


def _watched(work: Callable[[], T], outcome: "Future[T]", set_device: Callable[[], None]) -> None:
    try:
        set_device()
        outcome.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised in the thread that asked
        outcome.set_exception(error)
    finally:
        del outcome
