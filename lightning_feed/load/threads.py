"""Worker threads: one pass over a map-style dataset, with threads in place of worker processes.

Each sample of a batch is a task of its own. All threads work on the same batch, so that the first one of an epoch is
ready as many times sooner as there are threads, and then go on to the next. Everything that is waited for is a
``queue.SimpleQueue``, whose ``put`` may be called from a finalizer that garbage collection runs inside another ``put``.

Written on the standard library. torchdata's ParallelMapper (read in 0.11) has no threads that live on, polls its queues
ten times a second, loses what is no Exception and cannot say which sample it waits for; and ThreadPoolExecutor is
joined when Python exits, which a sample that hangs would prevent for ever. The threads end with the pass: they start in
less than a millisecond.
"""

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import pin_memory as _pinning

from lightning_feed.errors import LoaderError
from lightning_feed.load.order import mix_seed, rank_of_run
from lightning_feed.load.random_state import DefaultGenerators, begin_sample
from lightning_feed.load.trace import traced
from lightning_feed.load.worker import disable_opencv_threads, on_this_device, resend_ctrl_c

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long ending threads waits for the samples that they are at. They can only be waited for, not stopped."""
_SHORT_PATIENCE_S = 0.2
"""The same where one of them is known to hang: enough for the others."""
_LOOK_S = 1.0
"""How often a waiting consumer looks at the clock, and lets Ctrl-C through on Windows."""
CLOSED = "This pass over the loader was closed. Begin a new pass with iter(loader)."
COLLATING = -1
"""The place of collating among the places of a batch's samples."""
_END = object()

_Task = Callable[[int], object]
"""Called with the number of the thread. Must not raise."""


class Ending:
    """The end of the threads that work for one object: told once, and waited for where they were started.

    It does not know that object, so that one which is abandoned is collected, and its threads end.

    Args:
        owner: whose threads they are.
        threads: all of them; more may be added later.
        tell: makes them end after what they are at. Called in any thread, also from a finalizer.
    """

    def __init__(self, owner: object, threads: list[threading.Thread], tell: Callable[[], None]) -> None:
        self._threads, self._tell = threads, tell
        self._pid, self._starter = os.getpid(), threading.get_ident()
        self._finalizer = weakref.finalize(owner, self._abandon)

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the threads, and not a forked copy of it."""
        return os.getpid() == self._pid

    def end(self, patience_s: float | None = None) -> None:
        """End the threads, and wait so long for the samples that they are at, PATIENCE_S if not given. A second call
        does nothing."""
        if self._finalizer.detach() is not None:
            self._end(PATIENCE_S if patience_s is None else patience_s)

    def _abandon(self) -> None:
        with resend_ctrl_c():
            self._end(PATIENCE_S)

    def _end(self, patience_s: float) -> None:
        if not self.is_here:
            return
        self._tell()
        if threading.get_ident() != self._starter:
            return  # perhaps one of them, or a thread that a sample waits for: it must not be kept waiting
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        left = sum(thread.is_alive() for thread in self._threads)
        if left:
            logger.warning(
                "%d threads of the loader are still at a sample after %g s and were left behind. They end when the "
                "sample does. A dataset that may never return needs a timeout of its own, or "
                "LoaderSettings(timeout_s=...).",
                left,
                patience_s,
            )


@dataclass
class _Plan:
    """How the batches of one pass are made."""

    dataset: Any
    collate: Callable[[Any], Any]
    pin: Callable[[Any], Any] | None
    batched: bool
    """Whether an index stands for a batch of samples, rather than for one sample that is no batch."""
    seed: int
    """What the random numbers of the samples come from."""
    done: "SimpleQueue[int | None]" = field(default_factory=SimpleQueue)
    """Numbers of batches that are complete; None: the pass was closed."""
    tasks: "SimpleQueue[_Task | None]" = field(default_factory=SimpleQueue)
    """What the threads do next; None: end."""
    cancelled: bool = False

    def __post_init__(self) -> None:
        # What expects the samples of a batch has them read at the same time, and they are still made one by one.
        whole_batches = bool(getattr(self.dataset, "__getitems__", None)) and not hasattr(self.dataset, "expect")
        self.at_once = self.batched and whole_batches
        self.whole = self.at_once or not self.batched

    def cancel(self, threads: list[threading.Thread]) -> None:
        """End the threads after what they are at, and wake the consumer."""
        self.cancelled = True
        self.done.put(None)
        for _ in threads:
            self.tasks.put(None)


class _Job:
    """One batch in the making. Threads call :meth:`work`; whoever does so last puts the batch together.

    Args:
        plan: how.
        number: of the batch in its epoch, from 0.
        index: what the sampler gave for it.
    """

    def __init__(self, plan: _Plan, number: int, index: Any) -> None:
        self.plan, self.number, self.index = plan, number, index
        self.parts = [index] if plan.whole else list(index)
        self.places = range(max(1, len(self.parts)))  # one that is empty has a task, too: to be collated
        self.left = len(self.places)
        self.at: dict[int, int] = {}  # the place that each thread is at, by its number
        self._loaded: list[Any] = [None] * len(self.parts)
        self._lock = threading.Lock()
        self._failure: tuple[int, int, BaseException] | None = None  # place, thread, error
        self._held: object = None
        if not plan.whole and hasattr(plan.dataset, "expect"):
            self._held = plan.dataset.expect(self.parts)  # what is read already, for as long as this job lives

    def work(self, place: int, thread: int) -> None:
        """Load what belongs at ``place``. Never raises."""
        # Places are taken in their order, so those before a failed one are all done: the first failure is told.
        if self.parts and self._failure is None:
            self._attempt(place, thread, self._load)
        with self._lock:
            self.left -= 1
            last = self.left == 0
        if last:
            if self._failure is None:
                self._attempt(COLLATING, thread, self._put_together)
            self.plan.done.put(self.number)
        self.at.pop(thread, None)

    def take(self) -> Any:
        """The batch, once; or raise what went wrong, in the type that it had, with the thread and the index."""
        if self._failure is None:
            batch, self._loaded = self._loaded[0], []
            return batch
        place, thread, error = self._failure
        if not isinstance(error, Exception):
            raise error
        try:
            return with_place(error, f"in thread worker {thread}, {self.describe(place)}").reraise()
        finally:
            del error  # its traceback holds this frame

    def describe(self, place: int) -> str:
        """What is done at ``place``, in words."""
        return at_index(self.parts[place]) if place != COLLATING else collating(self.index)

    def _attempt(self, place: int, thread: int, what: Callable[[int], None]) -> None:
        if self.plan.cancelled:
            return
        self.at[thread] = place
        begin_sample(self.plan.seed, self.number, place)
        try:
            what(place)
        except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt and SystemExit too: raised by the consumer
            with self._lock:
                if self._failure is None or place < self._failure[0]:
                    self._failure = (place, thread, error)

    def _load(self, place: int) -> None:
        part, dataset = self.parts[place], self.plan.dataset
        with traced("thread_sample"):
            self._loaded[place] = dataset.__getitems__(part) if self.plan.at_once else dataset[part]

    def _put_together(self, _: int) -> None:
        loaded, self._loaded, self._held = self._loaded, [], None
        with traced("thread_collate"):
            batch = self.plan.collate(loaded[0] if self.plan.whole else loaded)
            self._loaded = [batch if self.plan.pin is None else self.plan.pin(batch)]


def shortened(index: Any, most: int = 200) -> str:
    """An index for a message."""
    text = repr(index)
    return text if len(text) <= most else f"{text[:most]}..."


def at_index(index: Any) -> str:
    """The loading of one sample, or of those that are loaded at once, in words."""
    return f"at index {shortened(index)} of the dataset"


def collating(index: Any) -> str:
    """Collating, in words."""
    return f"putting together the samples of index {shortened(index)}"


def with_place(error: BaseException, where: str) -> ExceptionWrapper:
    """An error that is raised again, in its own type, with the place where it was raised first."""
    if isinstance(error, StopIteration):  # raised as it is, it would look like the end of the epoch
        error = LoaderError(f"StopIteration was raised {where}. The dataset must not raise it.")
    return ExceptionWrapper((type(error), error, error.__traceback__), where=where)


def stack_here(ident: int | None) -> str:
    """The stack of a thread of this process."""
    frame = sys._current_frames().get(ident or 0)
    return "(the thread has ended)" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


class OwnPass(Iterator[Any]):
    """A pass over a map-style dataset whose workers are ours, not torch's.

    Indices are drawn, and errors raised, where DataLoader does so: by the consumer, ``capacity`` batches ahead.
    ``worker_init_fn`` is not called.

    Args:
        loader: whose arguments count. Not kept.
        indices: what its sampler or batch sampler gives.
        first: the number of the first batch in its epoch.
        seed: of the samples' random numbers, for :func:`~lightning_feed.load.random_state.sample_generator`.

    Attributes:
        capacity: batches asked for ahead.
    """

    head_of_line_ns = 0.0
    """Nanoseconds that ``next()`` has waited while a later batch was ready, times the share of workers that had nothing
    to do for that."""
    thread_ids: tuple[int, ...] = ()
    """The worker threads of this process, as the kernel numbers them."""

    def __init__(self, loader: DataLoader[Any], indices: Iterator[Any], *, first: int, seed: int) -> None:
        self.capacity = loader.num_workers * (loader.prefetch_factor or 1)
        self._indices, self._number = indices, first
        self._in_order, self._timeout_s = loader.in_order, loader.timeout
        self._seed = mix_seed(seed, rank_of_run(), 0, "rank")
        self._pin = _pin_function() if loader.pin_memory else None
        self._ended = False

    @property
    def ready(self) -> int:
        """Batches that are complete and not handed out. Any thread may ask."""
        raise NotImplementedError

    def where(self) -> str:
        """What is waited for, in words. Any thread may ask."""
        raise NotImplementedError

    def close(self, patience_s: float | None = None) -> None:
        """End the work of this pass. A second call does nothing."""
        raise NotImplementedError


class ThreadPass(OwnPass):
    """Iterates over what a DataLoader of the same arguments would, with threads in place of worker processes.

    The threads are set up as torch sets up worker processes: one thread each for what torch computes, gradients on, the
    CPU as default device. ``worker_init_fn`` would prepare the training process. Leaving this object to garbage
    collection ends them.

    Args:
        loader: see :class:`OwnPass`.
        indices: see :class:`OwnPass`.
        probe: whether to look what the first sample draws from. It is then loaded before all others.
        **begun: see :class:`OwnPass`.

    Attributes:
        threads: the workers.

    Raises:
        LoaderError: when a thread cannot be started; from ``next()``, when ``loader.timeout`` has passed, or the pass
            was closed.
    """

    def __init__(self, loader: DataLoader[Any], indices: Iterator[Any], *, probe: bool, **begun: int) -> None:
        super().__init__(loader, indices, **begun)
        self._jobs: dict[int, _Job] = {}
        self._ready: dict[int, None] = {}
        self._plan = plan = _Plan(
            dataset=loader.dataset,
            collate=loader.collate_fn,
            pin=self._pin,
            batched=loader.batch_sampler is not None,
            seed=self._seed,
        )
        self.threads: list[threading.Thread] = []
        self._ending = Ending(self, self.threads, partial(plan.cancel, self.threads))
        try:
            _start(self.threads, loader.num_workers, plan)
            for number in range(self.capacity):
                self._ask(probe=probe and number == 0)
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Any:
        if not self._ending.is_here:
            raise LoaderError(
                "This pass over the loader belongs to another process, where its worker threads are: a forked copy "
                "has none. Begin a new pass with iter(loader)."
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
        """Batches that are complete and not handed out. Any thread may ask."""
        return len(self._ready) + self._plan.done.qsize()

    def where(self) -> str:
        """See :meth:`OwnPass.where`."""
        stacks = (
            f"Thread worker {thread} is {doing}. Its stack:\n{stack_here(self.threads[thread].ident)}"
            for thread, doing in self._at_work()
        )
        return "\n".join(stacks) or "The worker threads have nothing to do."

    def _at_work(self) -> list[tuple[int, str]]:
        """The threads that work on the first batch that is not complete, and what each is at, in words."""
        job = next((job for job in list(self._jobs.values()) if job.at), None)
        return [] if job is None else [(thread, job.describe(place)) for thread, place in dict(job.at).items()]

    @property
    def thread_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """See :class:`OwnPass`."""
        return tuple(thread.native_id for thread in self.threads if thread.native_id is not None)

    def close(self, patience_s: float | None = None) -> None:
        """End the work of this pass, see :meth:`Ending.end`; a consumer that waits in another thread is woken."""
        self._ending.end(patience_s)
        self._jobs.clear()

    def _ask(self, *, probe: bool = False) -> None:
        """Ask the threads for one batch more, if there is one."""
        index = next(self._indices, _END)
        if index is _END:
            return
        job = self._jobs[self._number] = _Job(self._plan, self._number, index)
        self._number += 1
        places = iter(job.places)
        if probe:
            self._probe(job, next(places))
        for place in places:
            self._plan.tasks.put(partial(job.work, place))

    def _probe(self, job: _Job, place: int) -> None:
        before, loaded = DefaultGenerators(), SimpleQueue[None]()

        def task(thread: int) -> None:
            job.work(place, thread)
            loaded.put(None)

        self._plan.tasks.put(task)
        try:
            loaded.get(timeout=self._timeout_s or None)
        except Empty:
            return  # next() will wait for it as long again, and then say what it waits for
        changed = before.restore()
        if changed:
            logger.warning(
                "A sample of %s draws from %s. Worker threads share that with each other and with the training, so "
                "random augmentations are not reproducible, and training that draws from it is changed. Use "
                "workers='process', or give each draw a generator of the sample's own, as ImageFolderDataModule does.",
                type(self._plan.dataset).__name__,
                " and ".join(changed),
            )

    def _wait(self) -> int:
        """The number of the batch to hand out, when it is complete."""
        until = time.monotonic() + self._timeout_s if self._timeout_s else None
        while True:
            number = next(iter(self._jobs), None) if self._in_order else next(iter(self._ready), None)
            if self._plan.cancelled:
                raise LoaderError(CLOSED)
            if number is not None and number in self._ready:
                del self._ready[number]
                return number
            idle, since = self._idle_share() if self._ready else 0.0, time.perf_counter_ns()
            patience_s = _LOOK_S if until is None else max(0.0, min(_LOOK_S, until - time.monotonic()))
            try:
                done = self._plan.done.get(timeout=patience_s)
            except Empty:
                self._give_up_after(until)
                continue
            finally:
                self.head_of_line_ns += idle * (time.perf_counter_ns() - since)
            if done is not None:
                self._ready[done] = None

    def _idle_share(self) -> float:
        """Of the threads, those that have done all that was asked for, 0 to 1; 0 at the end of the data."""
        if len(self._jobs) < self.capacity:
            return 0.0
        left = sum(max(1, job.left) for number, job in self._jobs.items() if number not in self._ready)
        return max(0.0, 1 - left / len(self.threads))

    def _give_up_after(self, until: float | None) -> None:
        """Raise for a batch that is overdue."""
        if until is None or time.monotonic() < until:
            return
        at = "; ".join(f"thread worker {thread} is {doing}" for thread, doing in self._at_work())
        self.close(_SHORT_PATIENCE_S)
        raise LoaderError(
            f"No batch came within timeout={self._timeout_s:g} s: {at or 'the threads are busy for another pass'}. "
            "A sample that hangs cannot be stopped in a thread, so that thread is left behind. Give what it waits "
            "for a timeout of its own, or allow more time by LoaderSettings(timeout_s=...)."
        )


def _start(threads: list[threading.Thread], count: int, plan: _Plan) -> None:
    disable_opencv_threads()  # one pool for the process, which these threads would only wait for
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
        # What a thread sets for itself becomes the default of all threads that are made later.
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
        torch.get_num_threads()  # a thread's first call of it sets the default: before the next line, not after it
        torch.set_num_threads(1)
        set_device()
    except BaseException as error:  # noqa: BLE001  # raised where the threads are started: nobody would do their tasks
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


def _pin_function() -> Any:
    """What DataLoader pins batches with; None where nothing can be pinned."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None or device.type == "mps" else _pinning.pin_memory
