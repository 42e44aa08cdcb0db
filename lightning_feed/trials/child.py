"""Trials in forked children, so that nothing in the training process changes and nothing has to be restored."""

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import torch
from torch import multiprocessing

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.open_files import read_alone

Result = TypeVar("Result")
_GRACE_S = 2.0
"""Seconds for a child to end after its result has come."""


@dataclass
class _Answer(Generic[Result]):
    """The message of a child: its result, or its error as text."""

    result: Result | None = None
    kind: type[FeedError] | None = None
    """Class of the error if it is a FeedError; else None."""
    text: str = ""


def run_in_children(work: Callable[[], Result], *, count: int, timeout_s: float) -> list[Result]:
    """Run ``work`` in forked children at the same time, and return their results.

    The children hold copies of all objects, so the work may iterate the user's loaders. The work must not use the
    device, because a forked process cannot. A child computes with one torch thread, because OpenMP's threads do not
    survive a fork.

    Args:
        work: called in each child. Its result is pickled.
        count: number of children.
        timeout_s: seconds after which all children are killed, with the processes that they started.

    Raises:
        LoaderError: a child did not answer in time, or ended without an answer; or this process may not have children.
        FeedError: the error of the work. Errors of other kinds become a LoaderError with their text.
    """
    if multiprocessing.current_process().daemon:
        raise LoaderError(
            "No trial can run, because this process is a daemon of multiprocessing (such as a worker of a Pool), which "
            "may not have children. Tune in the main process."
        )
    deadline_s = time.monotonic() + timeout_s
    children: list[_Child[Result]] = []
    try:
        for _ in range(count):
            with _ctrl_c_waits():
                children.append(_Child(work))
        return [child.result(deadline_s, timeout_s) for child in children]
    finally:
        for child in children:
            child.end()


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Context manager that delays Ctrl-C until its end.

    Python ignores exceptions in the functions that it calls after a fork, so a KeyboardInterrupt there would be lost.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if received:
            signal.raise_signal(signal.SIGINT)


class _Child(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        # Not a daemon: daemons may not have worker processes.
        self._process = context.Process(target=_answer, args=(work, sender), daemon=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            self._process.start()
        sender.close()

    def result(self, deadline_s: float, timeout_s: float) -> Result:
        """Wait for the child's result."""
        try:
            if not self._receiver.poll(max(0.0, deadline_s - time.monotonic())):
                raise LoaderError(f"it gave no batch within {timeout_s:.0f} s")
            answer: _Answer[Result] = self._receiver.recv()
        except EOFError as error:
            self._process.join(_GRACE_S)
            raise LoaderError(f"its process ended early (exit code {self._process.exitcode})") from error
        if answer.result is None:
            raise (answer.kind or LoaderError)(answer.text)
        return answer.result

    def end(self) -> None:
        """End the child and all processes that it started."""
        self._receiver.close()
        if self._process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):  # it has not begun, or has ended with all its workers
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def _answer(work: Callable[[], Result], sender: Connection) -> None:
    gc.freeze()  # garbage of the training process that holds CUDA events would end this process when collected
    os.setpgid(0, 0)  # so that its workers can be ended with it
    read_alone()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        sender.send(_Answer(result=work()))
    except FeedError as error:
        sender.send(_Answer(kind=type(error), text=str(error)))
    except Exception as error:  # noqa: BLE001  # of the user's code: raised in the parent
        sender.send(_Answer(text=f"{type(error).__name__}: {error}"))
