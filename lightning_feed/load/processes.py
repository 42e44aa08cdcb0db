"""Torch's iterator as a stage, which loads in worker processes or in the training process itself."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data._utils import signal_handling

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import AnyIterator, Batch
from lightning_feed.load.loader_tree import idle_share
from lightning_feed.load.position import Position
from lightning_feed.load.stage import Maker, shortened, stack_here
from lightning_feed.load.worker import stack_of
from lightning_feed.wording import plural

_LAST_MOMENT_S = 0.5
"""Seconds to wait for a process to end after its connections have closed."""


class TorchBatches(Maker):
    """Batches from torch's iterator.

    Args:
        iterator: made by a DataLoader.
        position: position of the pass.
        see: called with each batch; None to call nothing.
    """

    def __init__(
        self, iterator: Iterator[Batch], position: Position, see: Callable[[Batch], None] | None = None
    ) -> None:
        self._iterator: AnyIterator = iterator
        self._position = position
        self._see = see
        self._taken = 0
        self._thread = 0
        self._shut_down = False

    def __next__(self) -> Batch:
        if self._position.followed and self._taken == self._position.requested:
            raise StopIteration  # torch's iterator would go on with batches of the next pass
        self._thread = threading.get_ident()
        began = time.perf_counter_ns()
        batch = next(self._iterator)
        self.head_of_line_ns += idle_share(self._iterator) * (time.perf_counter_ns() - began)
        self._taken += 1
        if self._see is not None:
            self._see(batch)
        return batch

    @property
    def source(self) -> Any:
        """See :attr:`Maker.source`."""
        return self._iterator

    def fail(self, error: BaseException) -> LoaderError | None:
        """See :meth:`Stage.fail`.

        Ends the worker processes at once. Torch would end them only when the traceback is freed. By then torch's queues
        are gone, so it would wait 5 s for each worker (torch 2.6 and 2.15). Persistent workers stay alive, unless one
        of them is dead: then no other pass can use the rest.
        """
        if isinstance(error, KeyboardInterrupt):
            stop_workers(self._iterator)
            return None
        ended = ended_worker(self._iterator, error)
        self._shut_down = ended is not None or not getattr(self._iterator, "_persistent_workers", True)
        if ended is None or isinstance(error, RuntimeError):
            return None
        return LoaderError(ended)

    def close(self) -> None:
        """See :meth:`Stage.close`. Persistent workers stay alive; other workers end with torch's iterator."""
        iterator = self._iterator
        self._iterator = None
        if self._shut_down:
            shut_down_workers(iterator)

    def where(self) -> str:
        """See :meth:`Maker.where`."""
        iterator = self._iterator
        if getattr(iterator, "_workers", None):
            return _open_tasks(iterator, self._position)
        work = "The training process itself loads the batch"
        newest = self._position.newest()
        if newest is not None:
            work += f", at {shortened(newest)}"
        return f"{work}. Its stack:\n{stack_here(self._thread)}"


def _open_tasks(iterator: AnyIterator, position: Position) -> str:
    """Describe the worker that makes the earliest missing batch, from torch's open tasks (``_task_info`` in torch 2.6
    and 2.15).

    Each worker processes its tasks in order. A thread in the worker sends finished batches, so the worker may already
    be past the task of its first missing batch.
    """
    unsent: dict[int, list[int]] = {}
    for number, info in sorted(dict(iterator._task_info).items()):
        if len(info) == 1:  # no data yet
            unsent.setdefault(info[0], []).append(number)
    if not unsent:
        return "The worker processes are idle: a later stage hangs, such as decoding or pinning memory."
    worker = min(unsent, key=lambda number: unsent[number])
    pid = iterator._workers[worker].pid
    first, *later = unsent[worker]
    index = position.index_of(first - position.before)
    samples = f"task {first} of this pass"
    if index is not None:
        samples = f"the samples {shortened(index)}"
    text = f"Worker {worker} (process {pid}) has not sent {samples}"
    if later:
        text += f", nor {plural(len(later), 'batch', 'batches')} after that. It may be at any of these"
    text += "."
    if len(unsent) > 1:
        text += f" {len(unsent) - 1} other workers have work, too."
    return f"{text} Its stack:\n{stack_of(pid)}"


# --- ending worker processes ------------------------------------------------------------------------------------------


def torch_iterators(batches: AnyIterator) -> list[Any]:
    """Return torch's iterators in ``batches``: a torch iterator, a LoaderPass, or the iterator of a CombinedLoader."""
    side_by_side = getattr(batches, "iterators", None)
    if isinstance(side_by_side, list):
        return [inner for iterator in side_by_side for inner in torch_iterators(iterator)]
    source = getattr(batches, "source", None)
    if source is None:
        return [batches]
    return [source]


def worker_processes(batches: AnyIterator) -> list[Any]:
    """Return the worker processes of torch's iterator or of a LoaderPass.

    Checked against torch 2.6 and 2.15 (``_workers``).
    """
    return [
        worker
        for iterator in torch_iterators(batches)
        for worker in getattr(iterator, "_workers", None) or ()
        if hasattr(worker, "pid")
    ]


def ended_worker(batches: AnyIterator, error: BaseException) -> str | None:
    """Describe the worker process whose early end made a pass fail. Returns None if there is no such worker.

    Torch reports such an end with a RuntimeError, unless a batch was being sent: then the connection to the worker
    breaks first.

    Args:
        batches: the iterator that failed.
        error: the error that the iterator raised.
    """
    if not _may_be_of_an_ended_worker(error):
        return None
    workers = {process.sentinel: process for process in worker_processes(batches)}
    ended: list[Any] = []
    with contextlib.suppress(RuntimeError):  # torch's signal handler may report the same at this moment
        ended = wait(list(workers), timeout=_LAST_MOMENT_S)
    processes = [workers[sentinel] for sentinel in ended]
    for process in processes or workers.values():
        process.join(_LAST_MOMENT_S if ended else 0)
        if process.exitcode:
            return (
                f"A worker process of the loader (pid {process.pid}) {_exit_words(process.exitcode)}, so its batches "
                "are lost. SIGKILL usually means that memory ran out: see dmesg, and use fewer workers or smaller "
                "batches."
            )
    return None


def _may_be_of_an_ended_worker(error: BaseException) -> bool:
    text = str(error)
    is_broken = isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and "Caught" not in text
    return is_broken or text.startswith("DataLoader worker (pid")


def _exit_words(exitcode: int) -> str:
    if exitcode > 0:
        return f"ended with {exitcode}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-exitcode, f'signal {-exitcode}')}"


def end_pass(batches: Iterator[Batch]) -> None:
    """End a pass, its threads and its worker processes, persistent ones too."""
    iterators = torch_iterators(batches)
    close = getattr(batches, "close", None)
    if close is not None:
        with contextlib.suppress(ValueError):  # raised by a generator that still runs in an abandoned thread
            close()
    for iterator in iterators:
        shut_down_workers(iterator)


def shut_down_workers(iterator: AnyIterator) -> None:
    """End the worker processes, if any, of torch's iterator, as torch does."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


def stop_workers(batches: Iterator[Batch]) -> bool:
    """Kill all worker processes of a pass, including persistent ones. Returns False if the pass has no workers.

    Workers that received Ctrl-C are about to end; torch would wait 5 s for each of the other workers. A consumer that
    waits for a batch of the killed workers gets torch's error within 5 s.
    """
    processes = worker_processes(batches)
    _expect_their_end(batches)
    for end in ("terminate", "kill"):
        until = time.monotonic() + _LAST_MOMENT_S
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in processes:
            if process.is_alive():
                getattr(process, end)()
    return bool(processes)


def _expect_their_end(batches: AnyIterator) -> None:
    """Keep torch from raising an error about the ended workers at an arbitrary point in the main thread."""
    forget = getattr(signal_handling, "_remove_worker_pids", None)
    for iterator in torch_iterators(batches):
        if forget is not None and getattr(iterator, "_worker_pids_set", False):
            forget(id(iterator))
            iterator._worker_pids_set = False
