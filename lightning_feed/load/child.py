"""Work in forked children: it sees everything as it is now, and changes nothing in the training process."""

import gc
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import torch
from torch import multiprocessing

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.collate import relayed
from lightning_feed.load.slots import own_forks
from lightning_feed.machine.killed import note_ticks
from lightning_feed.machine.open_files import read_alone

Result = TypeVar("Result")
_GRACE_S = 2.0
"""Seconds for a child to end after its result has come."""
_POLL_S = 0.1
"""Seconds after which a parent looks if it is to stop, and a guard if its parent still lives."""


class Stopped(Exception):
    """Raised in place of a result if the parent is to stop."""


class NoAnswer(LoaderError):
    """Raised in place of a result that did not come in time."""


@dataclass
class _Answer(Generic[Result]):
    """The message of a child: its result, or its error as text."""

    result: Result | None = None
    kind: type[FeedError] | None = None
    """Class of the error if it is a FeedError; else None."""
    text: str = ""


def run_in_children(
    works: Sequence[Callable[[], Result]],
    *,
    timeout_s: float,
    stop: Callable[[], bool] = lambda: False,
    torch_threads: int = 1,
) -> list[Result]:
    """Run each work in a forked child of its own, all at the same time, and return their results in the same order.

    Args:
        works: see :class:`Child`.
        timeout_s: seconds after which all children are killed, with the processes that they started.
        stop: returns True if the children are to be killed now.
        torch_threads: see :class:`Child`.

    Raises:
        NoAnswer: a child did not answer in time.
        Stopped: ``stop`` returned True.
        LoaderError: a child ended without an answer, or this process may not have children.
        FeedError: the error of the work. Errors of other kinds become a LoaderError with their text.
    """
    deadline_s = time.monotonic() + timeout_s
    children: list[Child[Result]] = []
    try:
        for work in works:
            children.append(
                Child(work, torch_threads=torch_threads)
            )  # those that have started are ended if one cannot start
        return [child.result(deadline_s - time.monotonic(), stop) for child in children]
    except NoAnswer as error:
        raise NoAnswer(f"it gave nothing within {timeout_s:.3g} s") from error
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


class Child(Generic[Result]):
    """A forked child that does some work.

    The child holds copies of all objects, so the work may iterate the user's loaders. The work must not use the device,
    because a forked process cannot. What it prints is not shown, and unreadable samples do not count.

    Args:
        work: called in the child. Its result is pickled.
        torch_threads: threads with which torch computes in the child.
        guarded: True to fork twice, so that a guard stands between the two processes. If the parent dies, even by
            SIGKILL, the guard kills the child and the processes that it started, even if they hang. False for short
            work that starts no processes: then a thread of the child watches the parent.

    Raises:
        LoaderError: this process may not have children.
    """

    def __init__(self, work: Callable[[], Result], *, torch_threads: int = 1, guarded: bool = True) -> None:
        if multiprocessing.current_process().daemon:
            raise LoaderError(
                "Nothing can be tried here, because this process is a daemon of multiprocessing (such as a worker of a "
                "Pool), which may not have children. Tune in the main process."
            )
        if not hasattr(os, "fork"):
            raise LoaderError("Nothing can be tried here, because this system cannot fork processes.")
        context = multiprocessing.get_context("fork")
        try:
            self._receiver, sender = multiprocessing.Pipe(duplex=False)
            # Daemons may not have processes of their own. The others are waited for when the program ends.
            run = partial(_run, partial(_work, work, sender, torch_threads), sender, guarded=guarded)
            self._process = context.Process(target=run, daemon=not guarded)
            with warnings.catch_warnings(), own_forks(), _ctrl_c_waits():
                warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
                self._process.start()
        except OSError as error:  # no memory, no process, or no open file is left
            raise LoaderError(f"This process cannot be forked: {error}") from error
        except KeyboardInterrupt:  # raised once the process has started
            self.end()
            raise
        sender.close()

    def result(self, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> Result:
        """Wait for the result of the work. Raises as :func:`run_in_children`."""
        self._wait(timeout_s, stop)
        try:
            answer: _Answer[Result] = pickle.loads(self._receiver.recv_bytes())
        except EOFError as error:
            self._process.join(_GRACE_S)
            raise LoaderError(f"its process ended early (exit code {self._process.exitcode})") from error
        except Exception as error:  # of code of the user's classes, or of a connection that broke
            raise LoaderError(f"its result cannot be read: {type(error).__name__}: {error}") from error
        if answer.result is None:
            raise (answer.kind or LoaderError)(answer.text)
        return answer.result

    def _wait(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Wait until the child has answered, or has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not wait([self._receiver, self._process.sentinel], max(0.0, min(_POLL_S, deadline_s - time.monotonic()))):
            if stop():
                raise Stopped("the program is to stop")
            if time.monotonic() >= deadline_s:
                raise NoAnswer(f"it gave nothing within {timeout_s:.3g} s")
        if not self._receiver.poll():  # the child has ended; processes that it started may keep its connection open
            self._process.join(_GRACE_S)
            raise LoaderError(f"its process ended early (exit code {self._process.exitcode})")

    def end(self, *, wait: bool = True) -> None:
        """End the child and all processes that it started.

        Args:
            wait: True to return only once the child is gone.
        """
        self._receiver.close()
        if self._process.pid is not None:
            note_ticks(self._process.pid)
            with suppress(ProcessLookupError, PermissionError):  # it has not begun, or has ended with all its workers
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        if self._process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):  # it may have begun its group, and forked, just now
                os.killpg(self._process.pid, signal.SIGKILL)
        if wait:
            self._process.join()


def _run(work: Callable[[], NoReturn], sender: Connection, *, guarded: bool) -> NoReturn:
    """Do the work in this process, which the parent has forked; if ``guarded``, in a fork that this process watches."""
    gc.freeze()  # garbage of the training process that holds CUDA events would end this process when collected
    parent = os.getppid()
    os.setpgid(0, 0)  # so that all processes of the work can be ended together
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends these processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not guarded:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
        work()
    worker = os.fork()
    if not worker:
        work()
    sender.close()
    _watch(parent, worker)


def _watch(parent: int, worker: int | None = None) -> NoReturn:
    """End all processes of the work once the parent has ended. With a ``worker``, end as it does once it has ended."""
    while True:
        if worker is not None:
            ended, status = os.waitpid(worker, os.WNOHANG)
            if ended:
                _end_as(status)
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        time.sleep(_POLL_S)


def _end_as(status: int) -> NoReturn:
    """End this process as another one has ended: with its exit code, or by the same signal."""
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _work(work: Callable[[], Result], sender: Connection, torch_threads: int) -> NoReturn:
    """Do the work, with one torch thread in this thread, or with several in a new one.

    OpenMP keeps the threads of a parallel region for the thread that began it, and they do not survive a fork: this
    thread would wait for them for ever. A new thread begins with none, and starts its own (GCC's libgomp, ``team.c``).
    """
    try:
        _be_silent()
        read_alone()
        with relayed():
            if torch_threads > 1:
                thread = threading.Thread(target=_answer, args=(work, sender, torch_threads))
                thread.start()
                thread.join()
            else:
                _answer(work, sender, 1)
    finally:
        os._exit(0)


def _be_silent() -> None:
    """Send everything that this process and those that it starts print to nowhere."""
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as this process lives
    os.dup2(nowhere.fileno(), 1)
    os.dup2(nowhere.fileno(), 2)
    sys.stdout = sys.stderr = nowhere  # in notebooks, these write elsewhere


def _answer(work: Callable[[], Result], sender: Connection, torch_threads: int) -> None:
    torch.set_num_threads(torch_threads)
    try:
        # Not with multiprocessing's pickler, which leaves tensors in this process for the other one to fetch.
        content = pickle.dumps(_Answer(result=work()))
    except FeedError as error:
        content = pickle.dumps(_Answer(kind=type(error), text=str(error)))
    except Exception as error:  # noqa: BLE001  # of the user's code: raised in the parent
        content = pickle.dumps(_Answer(text=f"{type(error).__name__}: {error}"))
    sender.send_bytes(content)
