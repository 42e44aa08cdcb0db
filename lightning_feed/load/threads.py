"""Worker threads: a stage that makes batches of a map-style dataset in threads of the training process.

Each sample of a batch is a task. All threads work on the same batch and then go on to the next. So ``n`` threads make
the first batch of an epoch ``n`` times sooner. All queues are ``queue.SimpleQueue``, whose ``put`` may be called from a
finalizer that garbage collection runs inside another ``put``.

Uses only the standard library. torchdata's ParallelMapper (read in 0.11) polls its queues ten times a second, loses a
BaseException and cannot say which sample it waits for. Python joins a ThreadPoolExecutor at exit, so a sample that
hangs would block the exit for ever. Our threads end with the pass. Keeping them would save less than a millisecond.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, default_collate

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import AnyDataset, Batch, Index, Sample
from lightning_feed.load.random_state import DefaultGenerators, begin_sample
from lightning_feed.load.stage import (
    CLOSED,
    COLLATING,
    PATIENCE_S,
    OwnPass,
    ThreadShutdown,
    at_index,
    collate_pinned,
    collating,
    stack_here,
    traced,
    with_place,
)
from lightning_feed.load.worker import disable_opencv_threads, on_this_device

logger = logging.getLogger(__name__)

_SHORT_PATIENCE_S = 0.2
"""Seconds to wait for the remaining threads if one is known to hang."""
_CHECK_S = 1.0
"""Seconds between a waiting consumer's checks of the clock, which let Ctrl-C through on Windows."""
_END = object()

_Task = Callable[[int], object]
"""Called with the number of the thread. Must not raise."""


@dataclass
class _PassTasks:
    """Functions and queues shared by the threads of a pass."""

    dataset: AnyDataset
    collate: Callable[[Sample], Batch]
    pin: Callable[[Batch], Batch] | None
    batched: bool
    """True if an index is a batch of samples, not a single one."""
    seed: int
    """Seed of the samples' random numbers."""
    done: "SimpleQueue[int | None]" = field(default_factory=SimpleQueue)
    """Queue of the numbers of complete batches. A None in it means that the pass was closed."""
    tasks: "SimpleQueue[_Task | None]" = field(default_factory=SimpleQueue)
    """Queue of the threads' tasks. A None in it ends the thread that takes it."""
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.at_once = self.batched and bool(getattr(self.dataset, "__getitems__", None))
        self.whole = self.at_once or not self.batched

    def cancel(self, threads: list[threading.Thread]) -> None:
        """End the threads after their current task, and wake the consumer."""
        self.cancelled = True
        self.done.put(None)
        for _ in threads:
            self.tasks.put(None)


@dataclass
class _Failure:
    """An error that ended the work on a batch."""

    position: int
    """The sample's position in the batch, or COLLATING."""
    thread: int
    error: BaseException


class _BatchInProgress:
    """One batch in progress. Threads call :meth:`work`; the last one collates the batch.

    Args:
        plan: plan of the pass.
        number: number of the batch in its epoch, from 0.
        index: index from the sampler.
    """

    def __init__(self, plan: _PassTasks, number: int, index: Index) -> None:
        self.plan = plan
        self.number = number
        self.index = index
        self.parts = [index] if plan.whole else list(index)
        self.positions = range(max(1, len(self.parts)))  # an empty batch needs a task too: collating
        self.open_tasks = len(self.positions)
        self.at: dict[int, int] = {}
        """The position of the sample that each thread is working on, or COLLATING, by number of the thread."""
        self._loaded: list[Any] = [None] * len(self.parts)
        self._lock = threading.Lock()
        self._failure: _Failure | None = None
        """The first failure, by position in the batch."""

    def work(self, position: int, thread: int) -> None:
        """Load the sample at a position of the batch. Never raises."""
        # Threads take samples in order. Those before a failed one are still attempted, so the first failure is raised.
        if self.parts and self._comes_before_failure(position):
            self._attempt(position, thread, self._load)
        with self._lock:
            self.open_tasks -= 1
            is_last = self.open_tasks == 0
        if is_last:
            if self._failure is None:
                self._attempt(COLLATING, thread, self._put_together)
            self.plan.done.put(self.number)
        self.at.pop(thread, None)

    def take(self) -> Batch:
        """Return the batch. Works only once.

        Raises:
            BaseException: the error of the first failed sample, in its own type. Any Exception names thread and index.
        """
        if self._failure is None:
            batch = self._loaded[0]
            self._loaded = []
            return batch
        failure = self._failure
        if not isinstance(failure.error, Exception):
            raise failure.error
        where = f"in thread worker {failure.thread}, {self.describe(failure.position)}"
        try:
            return with_place(failure.error, where).reraise()
        finally:
            del failure  # the error's traceback holds this frame

    def describe(self, position: int) -> str:
        """Describe the work at a position of the batch."""
        if position == COLLATING:
            return collating(self.index)
        return at_index(self.parts[position])

    def _comes_before_failure(self, position: int) -> bool:
        return self._failure is None or position < self._failure.position

    def _attempt(self, position: int, thread: int, work: Callable[[int], None]) -> None:
        if self.plan.cancelled:
            return
        self.at[thread] = position
        begin_sample(self.plan.seed, self.number, position)
        try:
            work(position)
        except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt and SystemExit too: raised by the consumer
            with self._lock:
                if self._comes_before_failure(position):
                    self._failure = _Failure(position, thread, error)

    def _load(self, position: int) -> None:
        part = self.parts[position]
        dataset = self.plan.dataset
        with traced("thread_sample"):
            self._loaded[position] = dataset.__getitems__(part) if self.plan.at_once else dataset[part]

    def _put_together(self, _: int) -> None:
        samples: Any = self._loaded
        self._loaded = []
        with traced("thread_collate"):
            if self.plan.whole:
                samples = samples[0]
            if self.plan.pin is None:
                self._loaded = [self.plan.collate(samples)]
            elif self.plan.collate is default_collate:
                self._loaded = [self.plan.pin(collate_pinned(samples))]
            else:
                self._loaded = [self.plan.pin(self.plan.collate(samples))]


class ThreadPass(OwnPass):
    """Yields the same batches as a DataLoader, made by threads instead of processes.

    The threads are set up like torch's worker processes: one torch thread each, gradients on, the CPU as default
    device. They end when this object is garbage-collected.

    Args:
        loader: see :class:`OwnPass`.
        indices: see :class:`OwnPass`.
        probe: True to detect the default random generators that the first sample uses. This sample is then loaded
            before all others.
        **begun: see :class:`OwnPass`.

    Attributes:
        threads: the workers.

    Raises:
        LoaderError: a thread cannot be started. From ``next()``: ``loader.timeout`` has passed, or the pass was closed.
    """

    def __init__(self, loader: DataLoader[Batch], indices: Iterator[Index], *, probe: bool, **begun: int) -> None:
        super().__init__(loader, indices, **begun)
        self._jobs: dict[int, _BatchInProgress] = {}
        self._ready: dict[int, None] = {}
        self._plan = plan = _PassTasks(
            dataset=loader.dataset,
            collate=loader.collate_fn,
            pin=self._pin,
            batched=loader.batch_sampler is not None,
            seed=self._seed,
        )
        self.threads: list[threading.Thread] = []
        self._shutdown = ThreadShutdown(self, self.threads, partial(plan.cancel, self.threads))
        try:
            _start(self.threads, loader.num_workers, plan)
            for number in range(self.capacity):
                self._ask(probe=probe and number == 0)
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Batch:
        if not self._shutdown.is_here:
            raise LoaderError(
                "The worker threads of this pass over the loader are in another process: a fork does not copy "
                "threads. Begin a new pass with iter(loader)."
            )
        if not self._jobs and (self._ended or not self._plan.cancelled):
            self._ended = True
            self.close()
            raise StopIteration
        with traced("thread_wait"):
            number = self._wait()
        batch = self._jobs.pop(number).take()
        self._ask()
        return batch

    @property
    def ready(self) -> int:
        """See :attr:`OwnPass.ready`."""
        return len(self._ready) + self._plan.done.qsize()

    def where(self) -> str:
        """See :meth:`Maker.where`."""
        stacks = (
            f"Thread worker {thread} is {doing}. Its stack:\n{stack_here(self.threads[thread].ident)}"
            for thread, doing in self._at_work()
        )
        return "\n".join(stacks) or "The worker threads have nothing to do."

    def _at_work(self) -> list[tuple[int, str]]:
        """Return the threads working on the first incomplete batch, with a description of their work."""
        for job in list(self._jobs.values()):
            if job.at:
                return [(thread, job.describe(position)) for thread, position in dict(job.at).items()]
        return []

    @property
    def thread_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """See :class:`OwnPass`."""
        return tuple(thread.native_id for thread in self.threads if thread.native_id is not None)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """See :meth:`OwnPass.close`. Wakes a consumer that waits in another thread."""
        self._shutdown.end(patience_s)
        self._jobs.clear()

    def _ask(self, *, probe: bool = False) -> None:
        """Request the next batch, if any, from the threads."""
        index = next(self._indices, _END)
        if index is _END:
            return
        job = self._jobs[self._number] = _BatchInProgress(self._plan, self._number, index)
        self._number += 1
        positions = iter(job.positions)
        if probe:
            self._probe(job, next(positions))
        for position in positions:
            self._plan.tasks.put(partial(job.work, position))

    def _probe(self, job: _BatchInProgress, position: int) -> None:
        before = DefaultGenerators()
        loaded = SimpleQueue[None]()

        def task(thread: int) -> None:
            job.work(position, thread)
            loaded.put(None)

        self._plan.tasks.put(task)
        try:
            loaded.get(timeout=self._timeout_s or None)
        except Empty:
            return  # next() waits for this sample again, up to the timeout, and then names it
        changed = before.restore()
        if changed:
            logger.warning(
                "A sample of %s draws from %s, which worker threads share with each other and with training. So "
                "random augmentations are not reproducible, and they change the random numbers of training. Use "
                "workers='process', or a separate generator for each sample, as ImageFolderDataModule does.",
                type(self._plan.dataset).__name__,
                " and ".join(changed),
            )

    def _wait(self) -> int:
        """Wait for the next complete batch. Returns its number."""
        until = math.inf
        if self._timeout_s:
            until = time.monotonic() + self._timeout_s
        while True:
            number = next(iter(self._jobs if self._in_order else self._ready), None)
            if self._plan.cancelled:
                raise LoaderError(CLOSED)
            if number is not None and number in self._ready:
                del self._ready[number]
                return number
            if not self._take_completed(min(_CHECK_S, until - time.monotonic())) and time.monotonic() >= until:
                self._give_up()

    def _take_completed(self, timeout_s: float) -> bool:
        """Wait for the number of a complete batch, or for the end of the pass. Returns False if neither came."""
        idle_share = self._idle_share() if self._ready else 0.0
        began_ns = time.perf_counter_ns()
        try:
            number = self._plan.done.get(timeout=max(0.0, timeout_s))
        except Empty:
            return False
        finally:
            self.head_of_line_ns += idle_share * (time.perf_counter_ns() - began_ns)
        if number is not None:
            self._ready[number] = None
        return True

    def _idle_share(self) -> float:
        """Return the share of idle threads, 0 to 1. 0 at the end of the data."""
        if len(self._jobs) < self.capacity:
            return 0.0
        tasks = sum(max(1, job.open_tasks) for number, job in self._jobs.items() if number not in self._ready)
        return max(0.0, 1 - tasks / len(self.threads))

    def _give_up(self) -> NoReturn:
        """Raise an error for an overdue batch."""
        at = "; ".join(f"thread worker {thread} is {doing}" for thread, doing in self._at_work())
        self.close(_SHORT_PATIENCE_S)
        raise LoaderError(
            f"No batch came within timeout={self._timeout_s:g} s: {at or 'the threads are busy for another pass'}. "
            "A sample that hangs cannot be stopped in a thread, so that thread is abandoned. Set a timeout "
            "in the call that hangs, or allow more time with LoaderSettings(timeout_s=...)."
        )


def _start(threads: list[threading.Thread], count: int, plan: _PassTasks) -> None:
    disable_opencv_threads()  # OpenCV has one pool per process, and these threads would only wait for it
    computing = torch.get_num_threads()
    started: SimpleQueue[BaseException | None] = SimpleQueue()
    try:
        for number in range(count):
            arguments = (plan.tasks, started, number, on_this_device())
            thread = threading.Thread(target=_serve, args=arguments, name=f"feed-{number}", daemon=True)
            thread.start()
            threads.append(thread)
        problems = [started.get() for _ in threads]
    except RuntimeError as error:
        raise LoaderError(
            f"Only {len(threads)} of {count} worker threads could be started: {error}. Lower num_workers, or raise the "
            "limit of processes (`ulimit -u`; a container's `--pids-limit`)."
        ) from error
    finally:
        # set_num_threads(1) in a worker thread becomes the default of all later threads, so it is undone here.
        torch.set_num_threads(computing)
    for problem in filter(None, problems):
        raise problem


def _serve(
    tasks: "SimpleQueue[_Task | None]",
    started: "SimpleQueue[BaseException | None]",
    number: int,
    set_device: Callable[[], None],
) -> None:
    try:
        torch.get_num_threads()  # the first call in a thread resets the number to the default, so it comes first
        torch.set_num_threads(1)
        set_device()
    except BaseException as error:  # noqa: BLE001  # raised where the threads are started
        started.put(error)
        return
    started.put(None)
    while _do_one(tasks, number):
        pass


def _do_one(tasks: "SimpleQueue[_Task | None]", number: int) -> bool:
    # A function, so that the thread holds no batch while it waits for the next task.
    task = tasks.get()
    if task is not None:
        task(number)
    return task is not None
