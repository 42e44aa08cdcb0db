"""Whether a thing can be sent to worker processes that are not forked, found out before they are started."""

import io
import pickle
import socket
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


def why_not_picklable(thing: Any) -> str | None:
    """What keeps ``thing`` from being pickled for a worker process, in Python's words; None where nothing is known to.

    Costs the time of pickling but no memory: nothing is written, and tensors and arrays are not looked into.
    """
    try:
        _Probe(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(thing)
    except RuntimeError:
        return None  # locks and queues of multiprocessing refuse, except while a process is being started
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return str(error)
    return None


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _Probe(ForkingPickler):
    """The pickler of multiprocessing, without the handles that it opens for what is shared rather than copied."""

    def reducer_override(self, thing: Any) -> Any:
        shared = isinstance(thing, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, socket.socket, Connection))
        if not shared and type(thing).__module__ == "numpy" and type(thing).__name__ == "ndarray":
            shared = not thing.dtype.hasobject
        return (int, ()) if shared else NotImplemented
