"""The threads of a loader, and the batches that they make: each sample of a batch is a task of its own.

All threads work on the same batch, so that the first one of an epoch is ready as many times sooner as there are
threads, and then go on to the next. Everything that is waited for is a ``queue.SimpleQueue``, whose ``put`` may be
called from a finalizer that garbage collection runs inside another ``put``.

Written on the standard library. torchdata's ParallelMapper (read in 0.11) has no threads that live on, polls its queues
ten times a second, loses what is no Exception and cannot say which sample it waits for; SPDL is a dependency with an
event loop for what is one queue here; and ThreadPoolExecutor is joined when Python exits, which a sample that hangs
would prevent for ever.
"""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from lightning_feed.errors import LoaderError
from lightning_feed.load.background import ctrl_c_again
from lightning_feed.load.thread_random import SampleRandom, prepare
from lightning_feed.load.trace import traced

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long ending the threads waits for the samples that they are at. They can only be waited for, not stopped."""
SHORT_PATIENCE_S = 0.2
"""The same where one of them is known to hang: enough for the others."""
_COLLATING = -1
"""The place of collating among the places of a batch's samples."""


@dataclass
class Plan:
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
    cancelled: bool = False

    def __post_init__(self) -> None:
        self._whole = not self.batched or bool(getattr(self.dataset, "__getitems__", None))

    def cut(self, index: Any) -> list[Any]:
        """What is loaded one by one for a batch."""
        return [index] if self._whole else list(index)

    def load(self, index: Any) -> Any:
        """One of the things that ``cut`` gave."""
        if self._whole and self.batched:
            return self.dataset.__getitems__(index)
        return self.dataset[index]

    def put_together(self, loaded: list[Any]) -> Any:
        """The batch of what was loaded."""
        batch = self.collate(loaded[0] if self._whole else loaded)
        return batch if self.pin is None else self.pin(batch)


class Job:
    """One batch in the making. Threads call :meth:`work`; whoever does so last puts the batch together.

    Args:
        plan: how.
        number: of the batch in its epoch, from 0.
        index: what the sampler gave for it.
    """

    def __init__(self, plan: Plan, number: int, index: Any) -> None:
        self.plan, self.number, self.index = plan, number, index
        self.parts = plan.cut(index)
        self.places = range(max(1, len(self.parts)))  # one that is empty has a task, too: to be collated
        self.at: dict[int, int] = {}  # the place that each thread is at, by its number
        self._loaded: list[Any] = [None] * len(self.parts)
        self._left = len(self.places)
        self._lock = threading.Lock()
        self._failure: tuple[int, int, BaseException] | None = None  # place, thread, error

    def work(self, place: int, thread: int, random: SampleRandom) -> None:
        """Load what belongs at ``place``. Never raises."""
        # Places are taken in their order, so those before a failed one are all done: the first failure is told.
        if self._failure is None and not self.plan.cancelled and self.parts:
            self.at[thread] = place
            random.begin(self.plan.seed, self.number, place)
            try:
                with traced("thread_sample"):
                    self._loaded[place] = self.plan.load(self.parts[place])
            except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt and SystemExit too: raised by the consumer
                self._fail(place, thread, error)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._put_together(thread, random)
        self.at.pop(thread, None)

    def take(self) -> Any:
        """The batch, once; or raise what went wrong, in the type that it had, with the thread and the index."""
        if self._failure is None:
            batch, self._loaded = self._loaded[0], []
            return batch
        place, thread, error = self._failure
        if not isinstance(error, Exception):
            raise error
        where = f"in thread worker {thread}, {self.describe(place)}"
        if isinstance(error, StopIteration):  # raised as it is, it would look like the end of the epoch
            raise LoaderError(f"StopIteration was raised {where}. The dataset must not raise it.") from error
        wrapper: Any = ExceptionWrapper((type(error), error, error.__traceback__), where=where)  # type: ignore[no-untyped-call]
        try:
            wrapper.reraise()
        except Exception as told:
            raise told from error
        finally:
            del error, wrapper  # their tracebacks hold this frame

    @property
    def left(self) -> int:
        """Places that are not done, begun or not. Collating is none of them."""
        return self._left

    def describe(self, place: int) -> str:
        """What is done at ``place``, in words."""
        if place == _COLLATING:
            return f"putting together the samples of index {_short(self.index)}"
        return f"at index {_short(self.parts[place])} of the dataset"

    def _put_together(self, thread: int, random: SampleRandom) -> None:
        loaded, self._loaded = self._loaded, []
        if self._failure is None and not self.plan.cancelled:
            self.at[thread] = _COLLATING
            random.begin(self.plan.seed, self.number, _COLLATING)
            try:
                with traced("thread_collate"):
                    self._loaded = [self.plan.put_together(loaded)]
            except BaseException as error:  # noqa: BLE001  # as above
                self._fail(_COLLATING, thread, error)
        self.plan.done.put(self.number)

    def _fail(self, place: int, thread: int, error: BaseException) -> None:
        with self._lock:
            if self._failure is None or place < self._failure[0]:
                self._failure = (place, thread, error)


def _short(index: Any, most: int = 200) -> str:
    text = repr(index)
    return text if len(text) <= most else f"{text[:most]}..."


Task = tuple[Job, int, "SimpleQueue[None] | None"]
"""A batch, the place in it, and whom to tell when it is loaded."""


class ThreadCrew:
    """Threads that wait for tasks and do them in their order, until closed, garbage, or Python's end.

    They are set up as torch sets up worker processes: one thread each for what torch computes, gradients on, the CPU
    as default device. ``worker_init_fn`` is not called, since what it does would be done to the training process.

    Args:
        count: threads.
        base_seed: what passes without an :class:`~lightning_feed.load.epoch_order.EpochOrder` take their seeds from.

    Raises:
        LoaderError: when a thread cannot be started, or torch cannot give it random numbers of its own.
    """

    def __init__(self, count: int, base_seed: int) -> None:
        self.base_seed = base_seed
        self.passes = 0
        self.patience_s = PATIENCE_S
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._pid, self._owner = os.getpid(), threading.get_ident()
        prepare()
        cv2 = sys.modules.get("cv2")
        if cv2 is not None:
            cv2.setNumThreads(0)  # one pool for the process, which these threads would only wait for
        computing = torch.get_num_threads()
        # A new thread starts on device 0, whatever its maker's is; pinned memory would be registered with that one.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _end, self.tasks, self.threads, self._pid, self._owner)
        try:
            for number in range(count):
                made = threading.Thread(
                    target=_serve, args=(self.tasks, started, number, device), name=f"feed-{number}", daemon=True
                )
                made.start()
                self.threads.append(made)
            problems = [started.get() for _ in range(count)]
        except RuntimeError as error:
            self.close()
            raise LoaderError(
                f"Only {len(self.threads)} of {count} worker threads could be started: {error}. Lower num_workers, or "
                "raise the limit of processes (`ulimit -u`; a container's `--pids-limit`)."
            ) from error
        finally:
            # What a thread sets for itself becomes the default of all threads that are made later.
            torch.set_num_threads(computing)
        for problem in problems:
            if problem is not None:
                self.close()
                raise problem

    @property
    def usable(self) -> bool:
        """Whether the threads are there: not after closing, nor in a forked copy of this process."""
        return bool(self._finalizer.alive) and self.is_here and any(thread.is_alive() for thread in self.threads)

    @property
    def thread_ids(self) -> tuple[int, ...]:
        """The threads, as the kernel numbers them."""
        return tuple(thread.native_id for thread in self.threads if thread.native_id is not None)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that the threads belong to."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """End the threads after what they are at, and wait for that where they were made."""
        if self._finalizer.detach() is not None:
            _dismiss(self.tasks, self.threads, self._pid)
        _wait_for(self.threads, self._pid, self._owner, self.patience_s)


def _serve(
    tasks: "SimpleQueue[Task | None]",
    started: "SimpleQueue[BaseException | None]",
    number: int,
    device: int | None,
) -> None:
    try:
        _set_up(device)
    except BaseException as error:  # noqa: BLE001  # raised by the maker
        started.put(error)
        return
    started.put(None)
    with SampleRandom() as random:
        while _do_one(tasks, number, random):
            pass


def _set_up(device: int | None) -> None:
    torch.get_num_threads()  # a thread's first call of it sets the default: before the next line, not after it
    torch.set_num_threads(1)
    if device is not None:
        torch.cuda.set_device(device)


def _do_one(tasks: "SimpleQueue[Task | None]", number: int, random: SampleRandom) -> bool:
    # A function, so that the thread holds no batch while it waits for the next task.
    task = tasks.get()
    if task is None:
        return False
    job, place, told = task
    job.work(place, number, random)
    if told is not None:
        told.put(None)
    return True


def _end(tasks: "SimpleQueue[Task | None]", threads: list[threading.Thread], pid: int, owner: int) -> None:
    with ctrl_c_again():
        _dismiss(tasks, threads, pid)
        _wait_for(threads, pid, owner, PATIENCE_S)


def _dismiss(tasks: "SimpleQueue[Task | None]", threads: list[threading.Thread], pid: int) -> None:
    if os.getpid() == pid:  # in a forked copy the threads are the parent's
        for _ in threads:
            tasks.put(None)


def _wait_for(threads: list[threading.Thread], pid: int, owner: int, patience_s: float) -> None:
    if os.getpid() != pid or threading.get_ident() != owner:
        return  # perhaps one of them, or a thread that a sample waits for: it must not be kept waiting
    until = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    left = sum(thread.is_alive() for thread in threads)
    if left:
        logger.warning(
            "%d worker threads are still at a sample after %g s and were left behind. They end when the sample does. "
            "A dataset that may never return needs a timeout of its own.",
            left,
            patience_s,
        )
