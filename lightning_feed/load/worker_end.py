"""The worker processes of a pass: which they are, and their end."""

import contextlib
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data._utils import signal_handling

_LAST_MOMENT_S = 0.5
"""Between the end of a process' connections and its own."""


def worker_processes(batches: Any) -> list[Any]:
    """The processes that prepare the batches of an iterator of torch or ours; empty where it has none.

    Read in torch 2.6 and 2.15 (``_workers``).
    """
    found = []
    for iterator in torch_iterators(batches):
        found += list(getattr(iterator, "_workers", None) or ())
    return [process for process in found if hasattr(process, "pid")]


def ended_worker(batches: Any, error: BaseException) -> str | None:
    """Which worker process of a failed pass ended before its time, and how; None where that is not why it failed.

    Torch says it (RuntimeError), unless a batch was on its way: then the connection to the worker breaks first.

    Args:
        batches: the iterator that failed.
        error: what it raised.
    """
    broken = isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and "Caught" not in str(error)
    if not broken and not str(error).startswith("DataLoader worker (pid"):
        return None
    workers = {one.sentinel: one for one in worker_processes(batches)}
    ended: list[Any] = []
    with contextlib.suppress(RuntimeError):  # torch's signal handler may say in this very moment what is found below
        ended = wait(list(workers), timeout=_LAST_MOMENT_S)
    for one in [workers[sentinel] for sentinel in ended] or workers.values():
        one.join(_LAST_MOMENT_S if ended else 0)
        if one.exitcode:
            how = f"was killed by {_signal_name(-one.exitcode)}" if one.exitcode < 0 else f"ended with {one.exitcode}"
            return (
                f"A worker process of the loader (pid {one.pid}) {how}, so its batches are lost. SIGKILL mostly means "
                "that memory ran out: see dmesg, and use fewer workers or smaller batches."
            )
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def torch_iterators(batches: Any) -> list[Any]:
    """The iterators of torch inside an iterator: itself, under a pass of a FeedLoader, or several side by side."""
    together = getattr(batches, "iterators", None)
    if isinstance(together, list):
        return [inner for one in together for inner in torch_iterators(one)]
    inner = getattr(batches, "source", None)
    return [inner if inner is not None else batches]


def end_pass(batches: Iterator[Any]) -> None:
    """End a pass with its threads and worker processes, persistent ones too."""
    iterators = torch_iterators(batches)
    close = getattr(batches, "close", None)
    if close is not None:
        # ValueError: a generator that runs in a thread that was left behind.
        with contextlib.suppress(ValueError):
            close()
    for iterator in iterators:
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def kill_workers(batches: Iterator[Any]) -> bool:
    """Kill the worker processes of a pass that do not answer. Asked to end, each of them would be waited for 5 s.

    Whoever waits for their batches gets torch's error about it, within 5 s.

    Returns:
        Whether there were any.
    """
    killed = False
    for iterator in torch_iterators(batches):
        _expect_their_end(iterator)
        for process in getattr(iterator, "_workers", None) or ():
            process.kill()
            killed = True
    return killed


def stop_workers(batches: Iterator[Any]) -> None:
    """End the worker processes of a pass now, persistent ones too: Ctrl-C does not wait for a sample that hangs.

    Those that got Ctrl-C themselves are on their way out; torch would wait 5 s for each of the others.
    """
    processes = worker_processes(batches)
    for iterator in torch_iterators(batches):
        _expect_their_end(iterator)
    for end in ("terminate", "kill"):
        until = time.monotonic() + _LAST_MOMENT_S
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in processes:
            if process.is_alive():
                getattr(process, end)()


def _expect_their_end(iterator: Any) -> None:
    forget = getattr(signal_handling, "_remove_worker_pids", None)
    if forget is not None and getattr(iterator, "_worker_pids_set", False):
        # Else torch would take their end for an accident, and raise it in the main thread wherever that is.
        forget(id(iterator))
        iterator._worker_pids_set = False
