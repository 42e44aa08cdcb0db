"""One pass over a map-style dataset with worker threads: batches asked for ahead, and handed out in order."""

import logging
import time
import weakref
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import pin_memory as _pinning

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.epoch_order import mix_seed
from lightning_feed.load.thread_crew import SHORT_PATIENCE_S, Job, Plan, ThreadCrew
from lightning_feed.load.thread_random import SharedRandom, warn_of_shared
from lightning_feed.load.trace import traced

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often a waiting consumer looks whether the threads still live."""


_END = object()


class ThreadPass(Iterator[Any]):
    """Iterates over what a DataLoader of the same arguments would, with threads in place of worker processes.

    Indices are drawn, and errors raised, where DataLoader does so: by the consumer, ``num_workers * prefetch_factor``
    batches ahead, the first of them when this is made. Torch's random numbers depend on ``seed``, the number of the
    batch and the place in it alone. Leaving this object to garbage collection is enough to end its work.

    Args:
        loader: whose arguments count. Not kept.
        indices: what its sampler or batch sampler gives.
        crew: the threads. Closed with the pass, unless ``loader.persistent_workers``.
        first: the number of the first batch in its epoch.
        seed: of the samples' random numbers.
        probe: whether to look what the first sample draws from. It is then loaded before all others.

    Attributes:
        crew: as given.
        capacity: batches asked for ahead.
        head_of_line_ns: nanoseconds that ``next()`` has waited while a later batch was ready, times the share of
            threads that had nothing to do for that.

    Raises:
        LoaderError: from ``next()``, when ``loader.timeout`` has passed, or the pass was closed.
    """

    def __init__(
        self, loader: DataLoader[Any], indices: Iterator[Any], crew: ThreadCrew, *, first: int, seed: int, probe: bool
    ) -> None:
        self.crew = crew
        self._indices, self._number = indices, first
        self._in_order, self._timeout_s = loader.in_order, loader.timeout
        self._persistent = loader.persistent_workers
        self._ended = False
        self._jobs: dict[int, Job] = {}
        self._ready: dict[int, None] = {}
        self.capacity = loader.num_workers * (loader.prefetch_factor or 1)
        self.head_of_line_ns = 0.0
        self._plan = plan = Plan(
            dataset=loader.dataset,
            collate=loader.collate_fn,
            pin=_pin_function() if loader.pin_memory else None,
            batched=loader.batch_sampler is not None,
            seed=mix_seed(seed, _rank(), 0, "rank"),
        )
        # Neither the threads nor the plan know this object, so that a pass which is abandoned is collected.
        self._finalizer = weakref.finalize(self, _cancel, plan)
        try:
            for _ in range(self.capacity):
                self._ask(probe=probe)
                probe = False
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Any:
        if not self.crew.is_here:
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

    def close(self) -> None:
        """End the work of this pass; a consumer that waits in another thread is woken. Persistent threads live on."""
        if self._finalizer():  # the first time
            self._jobs.clear()
        if not self._persistent:
            self.crew.close()

    def hurry(self, patience_s: float) -> None:
        """Let :meth:`close` end the threads, persistent ones too, and wait no longer for them."""
        self._persistent, self.crew.patience_s = False, patience_s

    def _ask(self, *, probe: bool = False) -> None:
        """Ask the threads for one batch more, if there is one."""
        index = next(self._indices, _END)
        if index is _END:
            return
        job = self._jobs[self._number] = Job(self._plan, self._number, index)
        self._number += 1
        places = iter(job.places)
        if probe:
            self._probe(job, next(places))
        for place in places:
            self.crew.tasks.put((job, place, None))

    def _probe(self, job: Job, place: int) -> None:
        before, told = SharedRandom(), SimpleQueue[None]()
        self.crew.tasks.put((job, place, told))
        try:
            told.get(timeout=self._timeout_s or None)
        except Empty:
            return  # next() will wait for it as long again, and then say what it waits for
        changed = before.restore()
        if changed:
            warn_of_shared(changed, self._plan.dataset)

    def _wait(self) -> int:
        """The number of the batch to hand out, when it is complete."""
        until = time.monotonic() + self._timeout_s if self._timeout_s else None
        while True:
            number = next(iter(self._jobs), None) if self._in_order else next(iter(self._ready), None)
            if self._plan.cancelled:
                raise LoaderError("This pass over the loader was closed. Begin a new pass with iter(loader).")
            if number is not None and number in self._ready:
                del self._ready[number]
                return number
            idle, since = self._idle_share() if self._ready else 0.0, time.perf_counter_ns()
            try:
                done = self._plan.done.get(timeout=_patience(until))
            except Empty:
                self._look(until)
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
        return max(0.0, 1 - left / len(self.crew.threads))

    def _look(self, until: float | None) -> None:
        if until is not None and time.monotonic() >= until:
            at = "; ".join(
                f"thread worker {thread} is {job.describe(place)}"
                for job in list(self._jobs.values())
                for thread, place in dict(job.at).items()
            )
            self._finalizer()
            self.crew.patience_s = SHORT_PATIENCE_S
            self.crew.close()
            raise LoaderError(
                f"No batch came within timeout={self._timeout_s:g} s: {at or 'the threads are busy for another pass'}. "
                "A sample that hangs cannot be stopped in a thread, so that thread is left behind. Give what it waits "
                "for a timeout of its own, or allow more time by LoaderSettings(timeout_s=...)."
            )
        if not any(thread.is_alive() for thread in self.crew.threads):
            raise LoaderError(
                "All worker threads have ended without a word. Batches are missing: this is not the end of the epoch. "
                "Use workers='process'."
            )


def check_arguments(loader: DataLoader[Any]) -> None:
    """Refuse, or tell, what worker threads cannot do for ``loader``.

    Raises:
        SettingsError: for an iterable dataset, and for a ``multiprocessing_context``.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise SettingsError(
            f"workers='thread' cannot serve {type(loader.dataset).__name__}, an IterableDataset: a stream is drawn "
            "from in one place, and threads have no get_worker_info() to divide it by. Use workers='process', or "
            "num_workers=0 with background=2, which draws from it in one thread."
        )
    if loader.multiprocessing_context is not None:
        raise SettingsError(
            "workers='thread' starts no processes, so multiprocessing_context would have no effect. Leave it out."
        )
    function = getattr(loader.worker_init_fn, "func", loader.worker_init_fn)
    # Lightning sets its own after seed_everything(workers=True); the streams of the samples serve for it.
    if function is not None and getattr(function, "__name__", "") != "pl_worker_init_function":
        logger.warning(
            "worker_init_fn=%r is not called with workers='thread': what prepares a worker process would be done to "
            "the training process. Keep what each thread needs for itself in a threading.local().",
            function,
        )


def _patience(until: float | None) -> float:
    return LOOK_S if until is None else max(0.0, min(LOOK_S, until - time.monotonic()))


def _cancel(plan: Plan) -> bool:
    plan.cancelled = True
    plan.done.put(None)
    return True


def _rank() -> int:
    """Ranks must not draw the same random numbers."""
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if started else 0


def _pin_function() -> Any:
    """What DataLoader pins batches with; None where nothing can be pinned."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or device.type == "mps":
        logger.warning("pin_memory=True is without effect: there is no accelerator that copies from pinned memory.")
        return None
    return _pinning.pin_memory
