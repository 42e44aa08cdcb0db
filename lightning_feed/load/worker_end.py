"""The worker processes of a pass: which they are, and their end."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data._utils import signal_handling


def worker_processes(batches: Any) -> list[Any]:
    """The processes that prepare the batches of an iterator of torch or ours; empty where it has none.

    Read in torch 2.6 and 2.15 (``_workers``).
    """
    found = []
    for iterator in torch_iterators(batches):
        found += list(getattr(iterator, "_workers", None) or ())
    return [process for process in found if hasattr(process, "pid")]


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
        forget = getattr(signal_handling, "_remove_worker_pids", None)
        if forget is not None and getattr(iterator, "_worker_pids_set", False):
            # Else torch would take their end for an accident, and raise it in the main thread wherever that is.
            forget(id(iterator))
            iterator._worker_pids_set = False
        for process in getattr(iterator, "_workers", None) or ():
            process.kill()
            killed = True
    return killed
