"""Finds objects that processes share: reading them in one process changes what another one reads.

Follows the references that Python's garbage collector knows, so no code of the user runs.
"""

import ctypes
import gc
import logging
import socket
import sqlite3
import subprocess
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseProxy
from multiprocessing.queues import Queue, SimpleQueue
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Condition, Event, SemLock
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_feed.load.counts import SharedCounts, SharedNumber
from lightning_feed.load.kinds import AnyLoader

_SHARED = (
    socket.socket,
    sqlite3.Connection,
    subprocess.Popen,
    Queue,
    SimpleQueue,
    Connection,
    SynchronizedBase,
    Condition,
    Event,
    SemLock,
    SharedMemory,
    BaseProxy,
    ctypes.Array,
    ctypes._SimpleCData,
)
"""Connections, and classes of multiprocessing. The values of ``multiprocessing.RawValue`` and ``RawArray`` are of
classes of ctypes."""
_NOT_FOLLOWED = (
    types.ModuleType,
    types.CodeType,
    type,
    logging.Logger,
    torch.nn.Module,
    DataLoader,
    SharedCounts,
    SharedNumber,
)
"""Classes of objects whose references are not followed: they lead to the whole program, or are ours."""
_NOT_FOLLOWED_MODULES = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "torch.utils.data.dataloader")
"""Modules whose objects are not followed: a Trainer leads to the queues of its loaders' workers."""
_MOST_OBJECTS = 20_000
_MOST_PARTS = 100
"""Largest number of parts of one object that are looked at: a list may hold all samples."""


def refers_to_shared(loader: AnyLoader) -> str:
    """Return the class of an object shared by processes to which a loader refers. Empty if none was found."""
    names = ("dataset", "collate_fn", "worker_init_fn", "sampler", "batch_sampler")
    return shared_object(*(getattr(loader, name, None) for name in names))


def shared_object(*roots: object) -> str:
    """Return the class of an object shared by processes to which one of ``roots`` refers. Empty if none was found.

    Looks at attributes, slots, items, closures and arguments at any depth, and at the names of the modules in which the
    functions and classes on the way are defined.
    """
    waiting: deque[object] = deque(roots)
    seen = set(map(id, roots))
    while waiting and len(seen) < _MOST_OBJECTS:
        holder = waiting.popleft()
        if _is_shared(holder):
            return type(holder).__qualname__
        if issubclass(type(holder), _NOT_FOLLOWED) or type(holder).__module__.startswith(_NOT_FOLLOWED_MODULES):
            continue
        for value in _names_beside(holder):
            if _is_shared(value):
                return type(value).__qualname__
        for part in islice(_parts_of(holder), _MOST_PARTS):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return ""


def _is_shared(value: object) -> bool:
    # not isinstance(), which asks the object for its __class__, and so may run the user's code
    kind = type(value)
    return issubclass(kind, _SHARED) or (issubclass(kind, torch.Tensor) and _lies_in_shared_memory(value))


def _lies_in_shared_memory(tensor: Any) -> bool:
    return tensor.device.type == "cpu" and bool(torch.Tensor.is_shared(tensor))  # type: ignore[no-untyped-call]  # torch does not annotate it


def _parts_of(holder: object) -> Iterable[object]:
    if issubclass(type(holder), types.FunctionType):
        function: types.FunctionType = holder  # type: ignore[assignment]
        return (function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__)
    return gc.get_referents(holder)


def _names_beside(holder: object) -> Iterator[object]:
    """Yield the class attributes of an object, and the global names of the module that defines its class or the
    function."""
    if issubclass(type(holder), types.FunctionType):
        yield from list(holder.__globals__.values())  # type: ignore[attr-defined]
        return
    for kind in type(holder).__mro__:
        module = sys.modules.get(kind.__module__)
        if module is not None and kind.__module__ != "builtins":
            yield from list(vars(kind).values())
            yield from list(vars(module).values())
