"""Finds the parts of a dataset that do not survive a fork into workers: generators, open files, threads, connections.

Only attributes are looked at, and no code of the user is called: the dataset's own attributes, and those of the objects
in them, such as the datasets inside it and its transforms.
"""

import asyncio
import concurrent.futures
import ctypes
import io
import logging
import multiprocessing.pool
import multiprocessing.process
import random
import socket
import sqlite3
import subprocess
import tarfile
import threading
import types
import zipfile
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseProxy
from multiprocessing.queues import Queue
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Event, SemLock
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

Kind = Literal["generator", "file", "process"]
"""``generator``: draws random numbers; ``file``: has a position; ``process``: belongs to the process that made it."""

_WORST_FIRST: tuple[Kind, ...] = ("process", "file", "generator")
_DEEPEST = 4
"""Levels of attributes looked at: a Subset, its dataset, a transform, and a transform inside it."""
_MOST_OBJECTS = 2000
_MOST_ITEMS = 50
"""Items of one container that are looked at: samples may lie in long lists."""
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_FILES = (zipfile.ZipFile, tarfile.TarFile, sqlite3.Connection)
_FILES_BY_NAME = ("h5py._hl.files.File", "builtins.Environment")
"""Classes of libraries that may not be installed: h5py's, and lmdb's, which names no module."""
_OF_A_PROCESS = (
    threading.Thread,
    concurrent.futures.Executor,
    multiprocessing.pool.Pool,
    multiprocessing.process.BaseProcess,
    subprocess.Popen,
    socket.socket,
    asyncio.AbstractEventLoop,
)
_SHARED = (
    SynchronizedBase,
    Event,
    SemLock,
    SharedMemory,
    BaseProxy,
    ctypes.Array,
    ctypes._SimpleCData,
    Queue,
    Connection,
)
_PASSED_OVER = (logging.Logger, types.ModuleType, types.FunctionType, type)
"""Objects whose attributes are not the dataset's."""
_PLAIN = (int, float, complex, str, bytes, type(None))
_NUMBERS = (int, float, complex, type(None))
_MOST_VALUES = 1000
"""Values of a list that are looked at, evenly spaced."""
_GROWN = 10
"""Values by which a container has grown if it keeps what was read."""
_OURS = "lightning_feed."
"""Prefix of the modules of our own datasets, which open their files in each process."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class _Held(NamedTuple):
    """An object in a dataset, and what holds it."""

    holder: object
    """The object or container that holds it."""
    key: Any
    """Its attribute in ``holder``, or its key or position in a container."""
    value: object
    path: str
    """Its location: ``dataset.transform.rng``."""


@dataclass(frozen=True)
class Hazard:
    """An object in a dataset that workers would share, or copy, wrongly."""

    kind: Kind
    held: _Held

    @property
    def path(self) -> str:
        """Its location: ``dataset.transform.rng``."""
        return self.held.path

    @property
    def value(self) -> Any:
        """The object."""
        return self.held.value

    @property
    def name(self) -> str:
        """Class of the object: ``numpy.random.Generator``."""
        kind = type(self.held.value)
        module = kind.__module__.partition("._")[0]
        if module == "builtins":
            return kind.__qualname__
        return f"{module}.{kind.__qualname__}"

    def replace(self, value: object) -> None:
        """Put another object in its place."""
        holder = self.held.holder
        if isinstance(holder, (dict, list)):
            holder[self.held.key] = value
        else:
            vars(holder)[self.held.key] = value


def find_hazards(dataset: object) -> list[Hazard]:
    """The objects in a dataset that do not survive a fork, in the order of their depth."""
    hazards = []
    for held in _objects_in(dataset):
        kind = _kind_of(held.value)
        if kind is not None:
            hazards.append(Hazard(kind, held))
    return hazards


def plain_values(dataset: object) -> dict[str, object]:
    """The numbers and strings in a dataset by their path, to see if the program has changed them.

    Those of its class count too: ``level = 0`` in the class becomes ``dataset.level`` when it is set.
    """
    values: dict[str, object] = {}
    inner = dataset
    path = "dataset"
    while inner is not None and path.count(".") < _DEEPEST:
        for base in reversed(type(inner).__mro__):
            values |= {f"{path}.{name}": value for name, value in vars(base).items() if not name.startswith("__")}
        inner = getattr(inner, "__dict__", {}).get("dataset")  # as a Subset has one
        path += ".dataset"
    values |= {held.path: held.value for held in _objects_in(dataset)}
    return {path: value for path, value in values.items() if isinstance(value, _PLAIN)}


def why_no_workers(dataset: object) -> str:
    """The reason why workers must not be given to a dataset that has none; empty if nothing was found."""
    hazards = find_hazards(dataset)
    if not hazards:
        return ""
    worst = min(hazards, key=lambda hazard: _WORST_FIRST.index(hazard.kind))
    subject = f"{worst.path} ({worst.name})"
    if worst.kind == "generator":
        return (
            f"{subject} draws random numbers, and each worker would draw the same. Seed it in a worker_init_fn of the "
            f"DataLoader, from torch.initial_seed(), to use workers"
        )
    if worst.kind == "file":
        return (
            f"{subject} is open, and workers would share its position. Open it in the first call of __getitem__ to use "
            "workers"
        )
    return f"{subject} belongs to this process, and does not work in workers. Make it in the first call of __getitem__"


def why_not_renewed(dataset: object) -> str:
    """The reason why :func:`renew` cannot make a dataset safe for workers; empty if it can."""
    for hazard in find_hazards(dataset):
        is_lost = hazard.kind == "file" and not _can_reopen(hazard.value)
        if hazard.kind == "process" or is_lost:
            return why_no_workers(dataset)
    return ""


def may_change(dataset: object) -> bool:
    """True if a program can tell a dataset its epoch, which must reach the workers: it has a ``set_epoch``."""
    for _ in range(_DEEPEST):
        if dataset is None or hasattr(dataset, "set_epoch"):
            return dataset is not None
        dataset = getattr(dataset, "dataset", None)
    return False


def kept_items(dataset: object) -> dict[str, int]:
    """The containers in a dataset that hold more than numbers, with their lengths, by their path.

    Empty items of a list (``None``) do not count.
    """
    lengths = {
        held.path: _length(held.value)
        for held in _objects_in(dataset)
        if type(held.value) in (dict, OrderedDict, list) and not isinstance(held.holder, (dict, list, tuple))
    }
    return {path: length for path, length in lengths.items() if length}


def growing(before: dict[str, int], dataset: object) -> str:
    """The path of the container in which a dataset keeps what it has read; empty if there is none.

    Args:
        before: result of :func:`kept_items` before samples were read.
        dataset: the dataset, from which samples were read in this process.
    """
    growth = {path: length - before.get(path, 0) for path, length in kept_items(dataset).items()}
    fastest = max(growth, key=lambda path: growth[path], default="")
    if growth.get(fastest, 0) < _GROWN:
        return ""
    return fastest


def _length(container: Any) -> int:
    """Number of values in a container, if they are more than numbers. About 1,000 of a list's are looked at."""
    if isinstance(container, list):
        step = 1 + len(container) // _MOST_VALUES
        return step * sum(not isinstance(value, _NUMBERS) for value in container[::step])
    newest = next(reversed(container.values()), None)
    if isinstance(newest, _NUMBERS):
        return 0
    return len(container)


def shares_memory(dataset: object) -> bool:
    """True if a dataset holds memory, or a connection, that it shares with other processes: a program may change it
    there while workers load."""
    return any(
        isinstance(held.value, _SHARED) or (isinstance(held.value, torch.Tensor) and held.value.is_shared())
        for held in _objects_in(dataset)
    )


def renew(dataset: object, seed: int) -> None:
    """Give this worker's copy of a dataset generators and files of its own.

    Args:
        dataset: the worker's dataset.
        seed: the worker's seed, different for each worker and epoch.
    """
    renewed: dict[int, Any] = {}
    for hazard in find_hazards(dataset):
        key = id(hazard.value)
        if hazard.kind == "generator" and key not in renewed:  # a transform and its parts may share one
            renewed[key] = hazard.value
            _seed(hazard.value, np.random.SeedSequence([seed, len(renewed)]))
        elif hazard.kind == "file" and _can_reopen(hazard.value):
            if key not in renewed:
                renewed[key] = _reopened(hazard.value)
            hazard.replace(renewed[key])


def _objects_in(dataset: object) -> Iterator[_Held]:
    """The objects in a dataset, in the order of their depth."""
    waiting: deque[tuple[object, str, int]] = deque([(dataset, "dataset", 0)])
    seen = {id(dataset)}
    while waiting and len(seen) < _MOST_OBJECTS:
        holder, path, depth = waiting.popleft()
        for held in _parts(holder, path):
            yield held
            value = held.value
            is_new = id(value) not in seen and _kind_of(value) is None
            if is_new and depth < _DEEPEST and _may_hold_more(value):
                seen.add(id(value))
                waiting.append((value, held.path, depth + (not isinstance(holder, (dict, list, tuple)))))


def _parts(holder: object, path: str) -> Iterator[_Held]:
    """The attributes or items of an object."""
    if isinstance(holder, dict):
        for key in list(holder)[:_MOST_ITEMS]:
            yield _Held(holder, key, holder[key], f"{path}[{key!r}]")
    elif isinstance(holder, (list, tuple)):
        for position, value in enumerate(holder[:_MOST_ITEMS]):
            yield _Held(holder, position, value, f"{path}[{position}]")
    else:
        attributes: dict[str, object] = getattr(holder, "__dict__", {})
        for name in list(attributes):
            yield _Held(holder, name, attributes[name], f"{path}.{name}")


def _may_hold_more(value: object) -> bool:
    """True if the attributes or items of an object are looked at."""
    if isinstance(value, _PASSED_OVER) or type(value).__module__.startswith(_OURS):
        return False
    return isinstance(value, (dict, list, tuple)) or hasattr(type(value), "__dict__")


def _kind_of(value: object) -> Kind | None:
    if isinstance(value, _GENERATORS):
        return "generator"
    if _belongs_to_process(value):
        return "process"
    if _is_open_file(value):
        return "file"
    return None


def _belongs_to_process(value: object) -> bool:
    if isinstance(value, _LOCKS):
        return _is_held(value)
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu"
    return isinstance(value, _OF_A_PROCESS)


def _is_open_file(value: object) -> bool:
    if isinstance(value, io.IOBase):
        in_memory = isinstance(value, (io.BytesIO, io.StringIO))
        return not in_memory and not value.closed
    kind = type(value)
    return isinstance(value, _FILES) or f"{kind.__module__}.{kind.__qualname__}" in _FILES_BY_NAME


def _is_held(lock: Any) -> bool:
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


def _can_reopen(value: object) -> bool:
    if isinstance(value, zipfile.ZipFile):
        return value.mode == "r" and isinstance(value.filename, str)
    name = getattr(value, "name", None)
    return isinstance(value, io.IOBase) and isinstance(name, str) and _is_only_read(value)


def _is_only_read(file: Any) -> bool:
    return bool(file.readable()) and not file.writable()


def _reopened(value: Any) -> Any:
    if isinstance(value, zipfile.ZipFile):
        return zipfile.ZipFile(str(value.filename))
    if isinstance(value, io.TextIOWrapper):
        return open(value.name, encoding=value.encoding, errors=value.errors)  # noqa: PTH123
    return open(value.name, "rb")  # noqa: PTH123


def _seed(generator: Any, sequence: np.random.SeedSequence) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(sequence).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(sequence.generate_state(8))
    elif isinstance(generator, random.Random):
        generator.seed(int(sequence.generate_state(1, np.uint64)[0]))
    else:
        generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0]) >> 1)
