"""Stages of a pass over a loader, from its workers to the training loop, and their names in a trace."""

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, get_args

import torch
from torch.autograd import profiler
from torch.utils.data import DataLoader
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import pin_memory

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import Batch, Index, Sample
from lightning_feed.load.order import mix_seed, rank_of_run
from lightning_feed.load.slot_batches import is_plain
from lightning_feed.load.worker import WrappedError, resend_ctrl_c

logger = logging.getLogger(__name__)

SOON_S = 0.5
"""Longest time, in seconds, that Ctrl-C waits for loading threads to end."""
PATIENCE_S = 10.0
"""Longest time, in seconds, that any other shutdown waits for loading threads to end. A thread cannot be stopped while
it loads a sample."""
CLOSED = "This pass over the loader was closed. Begin a new pass with iter(loader)."
COLLATING = -1
"""Used in place of a sample's position in the batch, for the collating of the batch."""


class Stage(Iterator[Batch]):
    """One step of a pass: an iterator over batches that cleans up after itself.

    A pass is a list of stages. Each stage only iterates over the previous one.
    """

    def fail(self, error: BaseException) -> LoaderError | None:
        """Handle the error that ends the pass. Returns a clearer error to raise, or None."""
        return None

    def cancel(self) -> None:
        """Unblock a ``next()`` in another thread."""

    def close(self) -> None:
        """End the threads and processes of this stage. A second call does nothing."""


class Maker(Stage):
    """The first stage of a pass: the workers that make its batches."""

    head_of_line_ns = 0.0
    """Nanoseconds that ``next()`` waited while a later batch was ready, weighted by the share of idle workers."""

    @property
    def source(self) -> Any:
        """The iterator whose queues and workers are measured. None once closed."""
        return self

    def where(self) -> str:
        """Describe the work that a consumer is waiting for. May be called from any thread."""
        raise NotImplementedError


class OwnPass(Maker):
    """Batches of a map-style dataset from our own workers: threads or Ray.

    As in DataLoader, the consumer draws the indices, ``capacity`` batches ahead, and raises the errors.
    ``worker_init_fn`` is not called.

    Args:
        loader: the loader whose arguments are used; no reference to the loader is kept.
        indices: indices from the loader's sampler or batch sampler.
        first: number of the first batch of the pass in its epoch, from 0.
        seed: seed of the samples' random numbers, for :func:`~lightning_feed.load.random_state.sample_generator`.

    Attributes:
        capacity: number of batches requested ahead.
    """

    thread_ids: tuple[int, ...] = ()
    """Kernel thread ids of the worker threads in this process."""

    def __init__(self, loader: DataLoader[Batch], indices: Iterator[Index], *, first: int, seed: int) -> None:
        self.capacity = loader.num_workers * (loader.prefetch_factor or 1)
        self._indices = indices
        self._number = first
        self._in_order = loader.in_order
        self._timeout_s = loader.timeout
        self._seed = mix_seed(seed, rank_of_run(), 0, "rank")
        self._pin = _pin_function() if loader.pin_memory else None
        self._ended = False

    @property
    def ready(self) -> int:
        """Number of complete batches not yet taken. May be read from any thread."""
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
        """End the workers of this pass. Wait at most ``patience_s`` for them."""
        raise NotImplementedError


def _pin_function() -> Callable[[Batch], Batch] | None:
    """Return DataLoader's function to pin a batch. Returns None if pinning is not possible."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == "mps":
        return None
    return pin_memory.pin_memory


def collate_pinned(samples: list[Sample]) -> Batch:
    """Collate samples as torch's ``default_collate`` does, into page-locked memory of torch's allocator."""
    functions = {**torch_collate.default_collate_fn_map, torch.Tensor: _stack_pinned}
    return torch_collate.collate(samples, collate_fn_map=functions)


def _stack_pinned(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0][...]  # a plain tensor if samples are torchvision's images, which it stacks to plain tensors
    if not is_plain(first):
        stacked: torch.Tensor = torch_collate.default_collate_fn_map[torch.Tensor](batch, collate_fn_map=collate_fn_map)
        return stacked
    out = torch.empty((len(batch), *first.shape), dtype=first.dtype, device="cpu", pin_memory=True)
    return torch.stack(batch, 0, out=out)


class ThreadShutdown:
    """Shuts down an object's threads when the object is closed or garbage-collected.

    Holds no reference to the object, so an abandoned object is garbage-collected, and its threads end.

    Args:
        owner: the object.
        threads: its threads; more may be added later.
        stop: makes the threads end after their current item. Called from any thread or a finalizer.
    """

    def __init__(self, owner: object, threads: list[threading.Thread], stop: Callable[[], None]) -> None:
        self._threads = threads
        self._stop = stop
        self._pid = os.getpid()
        self._starter = threading.get_ident()
        self._finalizer = weakref.finalize(owner, self._abandon)

    @property
    def is_here(self) -> bool:
        """True in the process of the threads, False in a forked copy of it."""
        return os.getpid() == self._pid

    def end(self, patience_s: float = PATIENCE_S) -> None:
        """Stop the threads. Wait at most ``patience_s`` for their current samples. A second call does nothing."""
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
            return  # may be one of the threads, or a thread that a sample waits for: must not block
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        still_loading = sum(thread.is_alive() for thread in self._threads)
        if still_loading:
            logger.warning(
                "%d threads of the loader are still loading a sample after %g s and were abandoned. Each ends after "
                "its sample. A dataset that may never return needs its own timeout, or "
                "LoaderSettings(timeout_s=...).",
                still_loading,
                patience_s,
            )


# --- words for messages -----------------------------------------------------------------------------------------------


def shortened(index: Index, longest: int = 200) -> str:
    """Shorten an index for a message."""
    text = repr(index)
    if len(text) <= longest:
        return text
    return f"{text[:longest]}..."


def at_index(index: Index) -> str:
    """Describe the loading of one sample, or of several at once."""
    return f"at index {shortened(index)} of the dataset"


def collating(index: Index) -> str:
    """Describe collating."""
    return f"collating the samples of index {shortened(index)}"


def with_place(error: BaseException, where: str) -> WrappedError:
    """Wrap an error to be raised again, in its own type, with its original location."""
    if isinstance(error, StopIteration):  # would be taken for the end of the epoch
        error = LoaderError(f"StopIteration was raised {where}. The dataset must not raise it.")
    return WrappedError((type(error), error, error.__traceback__), where=where)


def stack_here(ident: int | None) -> str:
    """Format the stack of a thread in this process."""
    frame = sys._current_frames().get(ident or 0)
    if frame is None:
        return "(the thread has ended)"
    return "".join(traceback.format_stack(frame)).rstrip()


class BatchDecoder(Protocol):
    """Decodes the batches of one loader. Pickled with the loader for ``ddp_spawn``, without device resources."""

    def run(self, batches: Iterator[Batch], under_way: int) -> Generator[Batch, None, None]:
        """Decode all batches of one pass, in order.

        May read a few batches ahead. Batches read ahead are dropped if ``batches`` raises an error, or if the generator
        is closed early.

        Args:
            batches: the batches of the pass.
            under_way: batches that workers may have begun; 0 if they are made in this thread.

        Raises:
            DecodeError: from ``next()``, if an image cannot be decoded. Names the image.
        """


class Decoding(Stage):
    """Stage that decodes batches."""

    def __init__(self, decoder: BatchDecoder, batches: Iterator[Batch], under_way: int) -> None:
        self._decoded = decoder.run(batches, under_way)

    def __next__(self) -> Batch:
        return next(self._decoded)

    def close(self) -> None:
        """See :meth:`Stage.close`. Raises ValueError while another thread is in ``next()``."""
        self._decoded.close()


Traced = Literal[
    "read",
    "decode",
    "augment",
    "thread_sample",
    "thread_collate",
    "background_load",
    "loader_next",
    "background_wait",
    "thread_wait",
    "gather",
    "look_ahead",
    "transfer",
    "device_copy",
    "device_transform",
    "hand_over",
]
"""All stages, in pipeline order. See docs/reference/callbacks.md."""
PREFIX = "lightning_feed."
"""Prefix of this package's span names in a trace."""

_LABELS: dict[Traced, str] = {name: PREFIX + name for name in get_args(Traced)}
_NOTHING: AbstractContextManager[Any] = nullcontext()


def traced(name: Traced) -> AbstractContextManager[Any]:
    """Return a context that appears as ``lightning_feed.<name>`` in an active profiler's trace.

    Reads torch's ``_is_profiler_enabled`` (torch 2.6 to 2.15; without this attribute, no stage is named). Unlike
    ``torch.autograd._profiler_enabled()``, it is set for all threads of the process, not only for the thread that
    started the profiler, so a profiler with ``profile_all_threads`` records our threads. Without a profiler, a stage
    costs about 0.3 us.

    Example:
        >>> with traced("decode"):
        ...     pass
    """
    if getattr(profiler, "_is_profiler_enabled", False):
        return profiler.record_function(_LABELS[name])
    return _NOTHING
