"""Worker processes: their set-up, what can be sent to them, and the stack of one that hangs."""

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import Batch

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
"""Read by libraries when they are loaded, so these count for what the dataset imports later."""
_STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7
_STACK_FILE = "lightning_feed_stack"
_POLL_S, _POLLS = 0.02, 50
_RESEND_S = 0.05


@dataclass(frozen=True)
class WorkerInit:
    """The ``worker_init_fn`` of our loaders. It can be pickled, so that it serves spawned workers too.

    The workers run in parallel: a pool of threads in one of them would only take CPUs from the others.
    """

    rank: int = 0
    """The rank of the training process: ranks must not draw the same random numbers."""
    seed_worker: Callable[[int, int], None] | None = None
    """Called with ``(worker_id, rank)`` to seed all generators, when ``seed_everything(workers=True)`` was."""

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process that this runs in."""
        _answer_for_stacks()
        torch.set_num_threads(1)
        for variable in ONE_THREAD:
            os.environ.setdefault(variable, "1")
        disable_opencv_threads()
        if self.seed_worker is not None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            self.seed_worker(worker_id, self.rank)


def disable_opencv_threads() -> None:
    """Switch off OpenCV's own pool of threads, if OpenCV is loaded: it does not survive a fork."""
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)


def on_this_device() -> Callable[[], None]:
    """A function that moves another thread to this thread's CUDA device. It would start on device 0, and register
    pinned memory there."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


# --- pickling for worker processes ------------------------------------------------------------------------------------


def why_not_picklable(thing: object) -> str | None:
    """The error of pickling ``thing`` for a worker process; None where it can be pickled.

    Costs the time of pickling but no memory: nothing is written, and tensors and arrays are skipped.
    """
    try:
        _DryPickler(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(thing)
    except RuntimeError:
        return None  # locks and queues of multiprocessing refuse, except while a process is being started
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return str(error)
    return None


def why_not_sent(loader: DataLoader[Batch], start_method: str) -> str:
    """The reason why a DataLoader cannot have worker processes with a start method; empty where none is known."""
    for name in ("dataset", "collate_fn", "worker_init_fn") if start_method != "fork" else ():
        why = why_not_picklable(getattr(loader, name))
        if why is not None:
            return f"its {name} cannot be sent to worker processes that are started by {start_method!r}: {why}"
    return ""


def refuse_unsendable(loader: DataLoader[Batch], name: str, start_method: str) -> None:
    """Raise a LoaderError for a loader that cannot have worker processes with a start method."""
    why = why_not_sent(loader, start_method)
    if why:
        raise LoaderError(
            f"{name} cannot have its workers, because {why}. Define functions and classes at the top level of a "
            "module, and open files and connections in the first __getitem__. Or set "
            "LoaderSettings(start_method='fork'), which does not pickle, or num_workers=0."
        )


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _DryPickler(ForkingPickler):
    """The pickler of multiprocessing, without the handles that it opens for what is shared rather than copied."""

    def reducer_override(self, thing: Any) -> Any:
        shared = isinstance(thing, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, socket.socket, Connection))
        if not shared and type(thing).__module__ == "numpy" and type(thing).__name__ == "ndarray":
            shared = not thing.dtype.hasobject
        return (int, ()) if shared else NotImplemented


# --- stacks of a hanging worker ------------------------------------------------------------------------------------


def _answer_for_stacks() -> None:
    """Let this worker process write its stacks on a signal, where the system allows it.

    ``faulthandler`` writes them in C, also where the worker hangs in C and runs no Python. The signal is a real-time
    one that nobody uses, and is sent only to a process that handles it. The worker keeps a file in memory, which its
    parent finds under /proc, so that a worker needs no argument for it, forked or spawned.
    """
    create = getattr(os, "memfd_create", None)
    if create is None or get_worker_info() is None or signal.getsignal(_STACK_SIGNAL) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError):  # out of descriptors: its work goes first
        faulthandler.register(_STACK_SIGNAL, file=create(_STACK_FILE), all_threads=True)


def _target_of(descriptor: Path) -> Path:
    try:
        return descriptor.readlink()
    except FileNotFoundError:  # closed since it was listed
        return Path()


def stack_of(pid: int) -> str:
    """The stacks of a worker's threads, innermost call first, or its state in the kernel where it does not answer.

    Takes up to a second.
    """
    place = Path("/proc") / str(pid)
    try:
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        files = [file for file in (place / "fd").iterdir() if _STACK_FILE in _target_of(file).name]
        if files and int(status["SigCgt"], 16) >> (_STACK_SIGNAL - 1) & 1:
            before, said = len(files[0].read_bytes()), b""
            os.kill(pid, _STACK_SIGNAL)
            for _ in range(_POLLS):
                time.sleep(_POLL_S)
                last, said = said, files[0].read_bytes()[before:]
                if said and said == last:
                    return said.decode(errors="replace").strip()
        return f"(not available; the kernel says of the process: {status['State'].strip()})"
    except (OSError, ValueError, KeyError) as error:
        return f"(not available: {type(error).__name__})"


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def resend_ctrl_c() -> Iterator[None]:
    """Send a Ctrl-C that comes in here again a moment later: Python drops what a finalizer or ``__del__`` raises."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError):  # there are no new threads while Python ends
            main = threading.main_thread().ident
            threading.Timer(_RESEND_S, signal.pthread_kill, (main, signal.SIGINT)).start()
