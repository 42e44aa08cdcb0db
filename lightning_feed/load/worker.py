"""Worker processes: set-up, pickling, errors that are groups, and the stack of a hanging worker."""

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import Batch

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
"""Environment variables that set the number of threads of a library. A library reads its variable when it is loaded, so
the variables affect only libraries that the dataset imports later."""
_STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7
_STACK_FILE = "lightning_feed_stack"
_POLL_S = 0.02
_POLLS = 50
_RESEND_S = 0.05


@dataclass(frozen=True)
class WorkerInit:
    """The ``worker_init_fn`` of our loaders. It can be pickled, so it works in spawned workers too.

    The workers run in parallel, so a thread pool in one worker would only take CPUs from the other workers.
    """

    rank: int = 0
    """Rank of the training process. Ranks must not draw the same random numbers."""
    seed_worker: Callable[[int, int], None] | None = None
    """Called with ``(worker_id, rank)`` to seed all generators, if ``seed_everything(workers=True)`` was called."""

    def __call__(self, worker_id: int) -> None:
        """Prepare the current worker process."""
        gc.freeze()  # collecting garbage of the training process that holds CUDA events would end this process
        _answer_for_stacks()
        torch.set_num_threads(1)
        for variable in ONE_THREAD:
            os.environ.setdefault(variable, "1")
        disable_opencv_threads()
        if self.seed_worker is not None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            self.seed_worker(worker_id, self.rank)
        if get_worker_info() is not None:
            vars(torch_worker)["ExceptionWrapper"] = WrappedError


def disable_opencv_threads() -> None:
    """Switch off OpenCV's thread pool, if OpenCV is loaded: the pool does not survive a fork."""
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)


def on_this_device() -> Callable[[], None]:
    """Return a function that sets this thread's CUDA device in another thread. That thread would otherwise use
    device 0, and register pinned memory there."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


# --- pickling for worker processes ------------------------------------------------------------------------------------


def why_not_picklable(thing: object) -> str | None:
    """Return the error raised by pickling ``thing`` for a worker process. Returns None if pickling works.

    Takes as long as pickling, but no memory: nothing is written, and tensors and arrays are skipped.
    """
    try:
        _DryPickler(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(thing)
    except RuntimeError:
        return None  # multiprocessing's locks and queues can only be pickled while a process starts
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return str(error)
    return None


def why_not_sent(loader: DataLoader[Batch], start_method: str) -> str:
    """Return the reason why a DataLoader cannot use worker processes with a start method. Empty if none is known."""
    if start_method == "fork":
        return ""
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        why = why_not_picklable(getattr(loader, name))
        if why is not None:
            return f"its {name} cannot be sent to worker processes that are started by {start_method!r}: {why}"
    return ""


def refuse_unsendable(loader: DataLoader[Batch], name: str, start_method: str) -> None:
    """Raise a LoaderError if a loader cannot use worker processes with a start method."""
    why = why_not_sent(loader, start_method)
    if why:
        raise LoaderError(
            f"{name} cannot start its workers, because {why}. Define functions and classes at the top level of a "
            "module, and open files and connections in the first __getitem__. Or set "
            "LoaderSettings(start_method='fork'), which does not pickle, or num_workers=0."
        )


def _main_can_be_imported() -> bool:
    """Return True if a new process can run this program's file or module again, as multiprocessing does. False for a
    program from stdin, from ``python -c``, or in a notebook."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or Path(getattr(main, "__file__", None) or "").is_file()


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _DryPickler(ForkingPickler):
    """The pickler of multiprocessing, except that it skips tensors and arrays, and opens no handles for shared
    objects."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__" and not _main_can_be_imported():
            raise pickle.PicklingError(f"{thing.__qualname__} is defined in a program that has no file to import")
        if isinstance(thing, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, socket.socket, Connection)):
            return int, ()
        is_array = type(thing).__module__ == "numpy" and type(thing).__name__ == "ndarray"
        if is_array and not thing.dtype.hasobject:
            return int, ()
        return NotImplemented


# --- errors that are groups ------------------------------------------------------------------------------------------


class WrappedError(ExceptionWrapper):
    """An error of a worker, to be raised again in the training process, where an ExceptionGroup keeps its exceptions.

    Torch's own class raises an error anew from its text. For a group this is a TypeError without any of the text (torch
    2.6 to 2.15). Worker processes use this class in place of torch's.

    Args:
        exc_info: as in ``sys.exc_info()``; None for the error that is being handled.
        where: place of the error.
    """

    def __init__(self, exc_info: Any = None, where: str = "in background") -> None:
        torch_init: Any = super().__init__  # has no types
        torch_init(exc_info, where)
        error: Any = (exc_info or sys.exc_info())[1]
        self._parts = pickle.dumps([_sendable(part) for part in error.exceptions]) if _is_group(error) else None

    def reraise(self) -> NoReturn:
        """Raise the error with its original text."""
        parts: Any = self._parts
        if parts is None:
            raise_anew: Any = super().reraise
            raise_anew()
        text = f"Caught {self.exc_type.__name__} {self.where}.\nOriginal error:\n{self.exc_msg}"
        try:
            error = self.exc_type(text, pickle.loads(parts))
        except Exception:  # noqa: BLE001  # a class of the user may need other arguments, or may not be found here
            error = RuntimeError(text)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


def _is_group(error: object) -> bool:
    """Return True for an ExceptionGroup: of Python 3.11, or of the package ``exceptiongroup``."""
    return hasattr(error, "exceptions") and hasattr(error, "derive")


def _sendable(error: Any) -> Any:
    """Copy an error by pickling it. One that cannot be copied so becomes a RuntimeError of its text."""
    try:
        if _is_group(error):
            error = error.derive([_sendable(part) for part in error.exceptions])
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # raised by code of the user
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())


# --- stacks of a hanging worker ------------------------------------------------------------------------------------


def _answer_for_stacks() -> None:
    """Let this worker process write its stacks on a signal, if the system supports it.

    ``faulthandler`` writes them in C, even if the worker hangs in C code. The signal is an unused real-time signal,
    sent only to processes that handle it. The worker keeps an in-memory file, which its parent finds under /proc, so
    that neither forked nor spawned workers need an argument for it.
    """
    create = getattr(os, "memfd_create", None)
    if create is None or get_worker_info() is None or signal.getsignal(_STACK_SIGNAL) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError):  # out of file descriptors: the work matters more
        faulthandler.register(_STACK_SIGNAL, file=create(_STACK_FILE), all_threads=True)


def _target_of(descriptor: Path) -> Path:
    try:
        return descriptor.readlink()
    except FileNotFoundError:  # closed after it was listed
        return Path()


def stack_of(pid: int) -> str:
    """Return the stacks of a worker's threads, innermost call first, or its kernel state if it does not answer.

    Takes up to a second.
    """
    process = Path("/proc") / str(pid)
    try:
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
        files = [file for file in (process / "fd").iterdir() if _STACK_FILE in _target_of(file).name]
        if files and int(status["SigCgt"], 16) >> (_STACK_SIGNAL - 1) & 1:
            stacks = _requested_stacks(pid, files[0])
            if stacks:
                return stacks
        return f"(not available; the kernel says of the process: {status['State'].strip()})"
    except (OSError, ValueError, KeyError) as error:
        return f"(not available: {type(error).__name__})"


def _requested_stacks(pid: int, file: Path) -> str:
    """Request the stacks of a worker, which writes them into its file. Empty if the worker does not answer."""
    before = len(file.read_bytes())
    written = b""
    os.kill(pid, _STACK_SIGNAL)
    for _ in range(_POLLS):
        time.sleep(_POLL_S)
        last = written
        written = file.read_bytes()[before:]
        if written and written == last:  # complete
            return written.decode(errors="replace").strip()
    return ""


# --- errors of workers -----------------------------------------------------------------------------------------------


def original_error(error: BaseException) -> tuple[str, str]:
    """Return class name and message of an error, or of the original error that a worker's error reports."""
    kind = type(error).__name__
    text = str(error).strip()
    if text.startswith("Caught "):  # torch puts the worker's traceback into the message
        text = text.rpartition("\n")[2]
        name, _, rest = text.partition(":")
        if name.replace(".", "").isidentifier():
            return name.rpartition(".")[2], rest.strip()
    return kind, text


def failed_in_worker(error: BaseException) -> bool:
    """Return True if torch passes on an error that code raised in a worker process. Torch says so only in the
    message."""
    return isinstance(error, Exception) and "DataLoader worker process" in str(error)


# --- signals in finalizers --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def resend_ctrl_c() -> Iterator[None]:
    """Send a signal in a finalizer or ``__del__`` again, a moment later, because Python drops the error that the
    signal's handler raises there, such as the KeyboardInterrupt of Ctrl-C."""
    try:
        yield
    except BaseException as error:
        number = _signal_behind(error)
        if number is None:
            raise
        with contextlib.suppress(RuntimeError):  # no new threads at interpreter shutdown
            main = threading.main_thread().ident
            threading.Timer(_RESEND_S, signal.pthread_kill, (main, number)).start()


def signal_proof(work: Callable[[], object]) -> Callable[[], object]:
    """Return a function for the callback of a weak reference that calls ``work`` and loses no signal.

    A signal's handler may run at the first instruction of a function, before any ``try`` in it. So ``work`` is called
    by a generator that has entered its ``try`` before. The handler's error is raised anew in the program: the signal
    is sent again in C, after all Python code.

    Args:
        work: called again from its beginning if a signal's handler raises an error in it.
    """
    waiting = _working(work)
    next(waiting)
    return partial(next, map(interrupt_main, waiting), None)


def _working(work: Callable[[], object]) -> Iterator[Any]:
    """Wait, call ``work``, and yield the signal that has arrived, if any."""
    is_waiting = True
    arrived: tuple[signal.Signals, BaseException] | None = None
    while True:
        try:
            if is_waiting:
                is_waiting = False
                yield 0
            work()
            break
        except GeneratorExit:  # the function is not needed any more
            raise
        except BaseException as error:
            number = _signal_behind(error)
            if number is None:
                raise
            arrived = number, error
    if arrived is not None:
        _raise_at_next(*arrived)
        yield arrived[0]


def _raise_at_next(number: signal.Signals, error: BaseException) -> None:
    """Raise an error when a signal arrives next, instead of calling the signal's handler, which has been called."""
    handler = signal.getsignal(number)

    def raise_once(*_: object) -> None:
        signal.signal(number, handler)
        raise error

    signal.signal(number, raise_once)


def _signal_behind(error: BaseException) -> signal.Signals | None:
    """Return the signal whose handler has raised an error. None if no handler has raised it."""
    codes = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            codes[getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)] = number
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in codes:
            return codes[frame.f_code]
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else None  # whose default handler is not Python code
