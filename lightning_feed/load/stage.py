"""Stages: the steps of a pass over a loader, from the workers that make its batches to the training loop."""

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import pin_memory

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import Batch, Index
from lightning_feed.load.order import mix_seed, rank_of_run
from lightning_feed.load.worker import resend_ctrl_c

logger = logging.getLogger(__name__)

SOON_S = 0.5
"""Longest wait of Ctrl-C for the current batch."""
PATIENCE_S = 10.0
"""Longest wait of a shutdown for the samples that threads are loading. A thread cannot be stopped."""
CLOSED = "This pass over the loader was closed. Begin a new pass with iter(loader)."
COLLATING = -1
"""The place of collating among the places of a batch's samples."""


class Stage(Iterator[Batch]):
    """One step of a pass: an iterator over batches that ends what it has started.

    A pass is a list of stages, each of which draws from the one before it and knows nothing else of it.
    """

    def fail(self, error: BaseException) -> LoaderError | None:
        """React to the error that ends the pass. Returns a clearer error to raise, or None."""
        return None

    def cancel(self) -> None:
        """Make a ``next()`` that is blocked in another thread return soon."""

    def close(self) -> None:
        """End the threads and processes of this stage. A second call does nothing."""


class Maker(Stage):
    """The first stage of a pass: the workers that make its batches."""

    @property
    def source(self) -> Any:
        """The iterator whose queues and workers are measured; None once it is closed."""
        return self

    def where(self) -> str:
        """The work that a consumer is waiting for, in words. Any thread may ask."""
        raise NotImplementedError


class OwnPass(Maker):
    """Batches of a map-style dataset from workers that are ours: threads or Ray.

    Indices are drawn, and errors raised, where DataLoader does so: by the consumer, ``capacity`` batches ahead.
    ``worker_init_fn`` is not called.

    Args:
        loader: its arguments are used. Not kept.
        indices: of the batches, from its sampler or batch sampler.
        first: the number of the first batch in its epoch.
        seed: of the samples' random numbers, for :func:`~lightning_feed.load.random_state.sample_generator`.

    Attributes:
        capacity: batches requested ahead.
    """

    head_of_line_ns = 0.0
    """Nanoseconds that ``next()`` has waited while a later batch was ready, times the share of idle workers."""
    thread_ids: tuple[int, ...] = ()
    """The worker threads of this process, as the kernel numbers them."""

    def __init__(self, loader: DataLoader[Batch], indices: Iterator[Index], *, first: int, seed: int) -> None:
        self.capacity = loader.num_workers * (loader.prefetch_factor or 1)
        self._indices, self._number = indices, first
        self._in_order, self._timeout_s = loader.in_order, loader.timeout
        self._seed = mix_seed(seed, rank_of_run(), 0, "rank")
        self._pin = _pin_function() if loader.pin_memory else None
        self._ended = False

    @property
    def ready(self) -> int:
        """Complete batches that were not yet taken. Any thread may ask."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> LoaderError | None:
        """See :meth:`Stage.fail`. Ctrl-C does not wait for samples."""
        if isinstance(error, KeyboardInterrupt):
            self.close(SOON_S)
        return None

    def cancel(self) -> None:
        """See :meth:`Stage.cancel`."""
        self.close()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """End the workers of this pass, and wait for them at most ``patience_s``."""
        raise NotImplementedError


def _pin_function() -> Callable[[Batch], Batch] | None:
    """DataLoader's own function to pin a batch; None where nothing can be pinned."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None or device.type == "mps" else pin_memory.pin_memory


class ThreadShutdown:
    """The shutdown of the threads that work for one object, when it is closed or garbage.

    It holds no reference to that object, so an abandoned one is collected, and its threads end.

    Args:
        owner: the object.
        threads: its threads; more may be added later.
        stop: makes them end after their current item. Called in any thread, also from a finalizer.
    """

    def __init__(self, owner: object, threads: list[threading.Thread], stop: Callable[[], None]) -> None:
        self._threads, self._stop = threads, stop
        self._pid, self._starter = os.getpid(), threading.get_ident()
        self._finalizer = weakref.finalize(owner, self._abandon)

    @property
    def is_here(self) -> bool:
        """True in the process of the threads, False in a forked copy of it."""
        return os.getpid() == self._pid

    def end(self, patience_s: float = PATIENCE_S) -> None:
        """Stop the threads, and wait at most ``patience_s`` for their current samples. A second call does nothing."""
        if self._finalizer.detach() is not None:
            self._end(patience_s)

    def _abandon(self) -> None:
        with resend_ctrl_c():
            self._end(PATIENCE_S)

    def _end(self, patience_s: float) -> None:
        if not self.is_here:
            return
        self._stop()
        if threading.get_ident() != self._starter:
            return  # perhaps one of them, or a thread that a sample waits for: it must not be blocked
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        left = sum(thread.is_alive() for thread in self._threads)
        if left:
            logger.warning(
                "%d threads of the loader are still loading a sample after %g s and were left behind. They end when "
                "the sample does. A dataset that may never return needs a timeout of its own, or "
                "LoaderSettings(timeout_s=...).",
                left,
                patience_s,
            )


# --- words for messages -----------------------------------------------------------------------------------------------


def shortened(index: Index, most: int = 200) -> str:
    """An index for a message."""
    text = repr(index)
    return text if len(text) <= most else f"{text[:most]}..."


def at_index(index: Index) -> str:
    """The loading of one sample, or of several that are loaded at once, in words."""
    return f"at index {shortened(index)} of the dataset"


def collating(index: Index) -> str:
    """Collating, in words."""
    return f"putting together the samples of index {shortened(index)}"


def with_place(error: BaseException, where: str) -> ExceptionWrapper:
    """An error that is raised again, in its own type, with the place where it was first raised."""
    if isinstance(error, StopIteration):  # unchanged, it would look like the end of the epoch
        error = LoaderError(f"StopIteration was raised {where}. The dataset must not raise it.")
    return ExceptionWrapper((type(error), error, error.__traceback__), where=where)


def stack_here(ident: int | None) -> str:
    """The stack of a thread of this process."""
    frame = sys._current_frames().get(ident or 0)
    return "(the thread has ended)" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
