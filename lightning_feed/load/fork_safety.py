"""Finds the parts of a dataset that do not survive a fork into workers: generators, open files, threads, connections.

Searches the attributes of the dataset, and of the objects in these attributes, such as transforms and inner datasets.
Calls no code of the user.
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
"""``generator``: a random generator, from which each worker would draw the same numbers. ``file``: an open file, whose
position workers would share. ``process``: an object that works only in the process that made it."""

_WORST_FIRST: tuple[Kind, ...] = ("process", "file", "generator")
_DEEPEST = 4
"""Levels of attributes looked at: a Subset, its dataset, a transform, and a transform inside that transform."""
_MOST_OBJECTS = 2000
_MOST_ITEMS = 50
"""Largest number of items that are searched in one container: a list may hold all samples."""
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_FILES = (zipfile.ZipFile, tarfile.TarFile, sqlite3.Connection)
_FILES_BY_NAME = ("h5py._hl.files.File", "builtins.Environment")
"""Classes of open files, by name, because their libraries may not be installed: h5py's ``File``, and lmdb's
``Environment``, whose module is given as ``builtins``."""
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
"""Types of objects that are not searched, because their attributes do not belong to the dataset."""
_PLAIN = (int, float, complex, str, bytes, type(None))
_NUMBERS = (int, float, complex, type(None))
_MOST_VALUES = 1000
"""Approximate number of values of a list that :func:`_length` looks at, evenly spaced."""
_GROWN = 10
"""Smallest growth, in values, of a container that is taken to keep the samples that were read."""
_OURS = "lightning_feed."
"""Prefix of the modules of our own datasets, which open their files in each process."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class _Held(NamedTuple):
    """An object in a dataset, and the object or container that holds it."""

    holder: object
    """The object or container that holds ``value``."""
    key: Any
    """Name of the attribute of ``holder`` that holds ``value``, or its key or position in a container."""
    value: object
    path: str
    """Location of ``value``: ``dataset.transform.rng``."""


@dataclass(frozen=True)
class Hazard:
    """An object in a dataset that workers must not share or copy as it is."""

    kind: Kind
    held: _Held

    @property
    def path(self) -> str:
        """Location of the object: ``dataset.transform.rng``."""
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
        """Put another object in the place of this one."""
        holder = self.held.holder
        if isinstance(holder, (dict, list)):
            holder[self.held.key] = value
        else:
            vars(holder)[self.held.key] = value


def find_hazards(dataset: object) -> list[Hazard]:
    """Find the objects in a dataset that do not survive a fork, the least nested first."""
    hazards = []
    for held in _objects_in(dataset):
        kind = _kind_of(held.value)
        if kind is not None:
            hazards.append(Hazard(kind, held))
    return hazards


def plain_values(dataset: object) -> dict[str, object]:
    """Return the numbers and strings in a dataset by path, to find out later if the program has changed them.

    Includes class attributes of the dataset and of the datasets inside it: with ``level = 0`` in the class, an instance
    has no attribute ``level`` of its own until the program sets it.
    """
    values: dict[str, object] = {}
    inner = dataset
    path = "dataset"
    while inner is not None and path.count(".") < _DEEPEST:
        for base in reversed(type(inner).__mro__):
            values |= {f"{path}.{name}": value for name, value in vars(base).items() if not name.startswith("__")}
        inner = getattr(inner, "__dict__", {}).get("dataset")  # the attribute in which a Subset holds its dataset
        path += ".dataset"
    values |= {held.path: held.value for held in _objects_in(dataset)}
    return {path: value for path, value in values.items() if isinstance(value, _PLAIN)}


def why_no_workers(dataset: object) -> str:
    """Return the reason why a dataset must not be loaded by worker processes. Empty if no reason was found."""
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
    """Return the reason why :func:`renew` cannot make a dataset safe for workers. Empty if it can."""
    for hazard in find_hazards(dataset):
        is_lost = hazard.kind == "file" and not _can_reopen(hazard.value)
        if hazard.kind == "process" or is_lost:
            return why_no_workers(dataset)
    return ""


def may_change(dataset: object) -> bool:
    """True if a dataset, or a dataset inside it, has a ``set_epoch``: the program may change the epoch, and workers
    must then receive it."""
    for _ in range(_DEEPEST):
        if dataset is None or hasattr(dataset, "set_epoch"):
            return dataset is not None
        dataset = getattr(dataset, "dataset", None)
    return False


def kept_items(dataset: object) -> dict[str, int]:
    """Return the number of values in each container of a dataset, by the container's path.

    Numbers and ``None`` do not count as values, see :func:`_length`. Containers without values, or inside another
    container, are left out.
    """
    lengths = {
        held.path: _length(held.value)
        for held in _objects_in(dataset)
        if type(held.value) in (dict, OrderedDict, list) and not isinstance(held.holder, (dict, list, tuple))
    }
    return {path: length for path, length in lengths.items() if length}


def growing(before: dict[str, int], dataset: object) -> str:
    """Return the path of the container in which a dataset keeps the samples that it has read. Empty if there is none.

    Args:
        before: result of :func:`kept_items` before samples were read.
        dataset: the dataset, after samples were read from it in this process.
    """
    growth = {path: length - before.get(path, 0) for path, length in kept_items(dataset).items()}
    fastest = max(growth, key=lambda path: growth[path], default="")
    if growth.get(fastest, 0) < _GROWN:
        return ""
    return fastest


def _length(container: Any) -> int:
    """Count the values in a container, except numbers and None. For a list, estimated from about 1,000 of its values.
    For a dict, 0 if the newest value is a number or None; otherwise its length."""
    if isinstance(container, list):
        step = 1 + len(container) // _MOST_VALUES
        return step * sum(not isinstance(value, _NUMBERS) for value in container[::step])
    newest = next(reversed(container.values()), None)
    if isinstance(newest, _NUMBERS):
        return 0
    return len(container)


def shares_memory(dataset: object) -> bool:
    """True if a dataset holds shared memory, or a connection to another process, through which the program may change
    the data while workers load."""
    return any(
        isinstance(held.value, _SHARED) or (isinstance(held.value, torch.Tensor) and held.value.is_shared())
        for held in _objects_in(dataset)
    )


def renew(dataset: object, seed: int) -> None:
    """Reseed the random generators, and reopen the files, in this worker's copy of a dataset.

    Args:
        dataset: the worker's dataset.
        seed: the worker's seed, different for each worker and epoch.
    """
    renewed: dict[int, Any] = {}
    for hazard in find_hazards(dataset):
        key = id(hazard.value)
        if hazard.kind == "generator" and key not in renewed:  # a transform and its parts may share a generator
            renewed[key] = hazard.value
            _seed(hazard.value, np.random.SeedSequence([seed, len(renewed)]))
        elif hazard.kind == "file" and _can_reopen(hazard.value):
            if key not in renewed:
                renewed[key] = _reopened(hazard.value)
            hazard.replace(renewed[key])


def _objects_in(dataset: object) -> Iterator[_Held]:
    """Yield the objects in a dataset, the least nested first."""
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
    """Yield the attributes or items of an object."""
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
    """True if the attributes or items of an object are to be searched."""
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
