"""Random numbers: one generator per sample in worker threads; comparing and restoring random states.

Python, NumPy and torch each have one default generator per process, from which worker threads and training would draw
in an unpredictable order. Our recipes draw from :func:`sample_generator` instead. If the first sample uses a default
generator, a warning says so.
"""

import gc
import pickle
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_feed.load.order import mix_seed


class DefaultGenerators:
    """The states of torch's, Python's and NumPy's default generators, to detect use and to restore them.

    Example:
        >>> before = DefaultGenerators()
        >>> _ = random.random()
        >>> before.restore()
        ["Python's random module"]
    """

    _known: ClassVar[dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]] = {
        "torch's default generator": (
            lambda: torch.get_rng_state().numpy(),
            lambda s: torch.set_rng_state(torch.from_numpy(s)),
        ),
        "Python's random module": (random.getstate, random.setstate),
        "numpy.random's functions": (np.random.get_state, np.random.set_state),
    }

    def __init__(self) -> None:
        self._before = {name: get() for name, (get, _) in self._known.items()}

    def used(self) -> list[str]:
        """Return the names of the generators used since this object was made."""
        return [
            name for name, (get, _) in self._known.items() if pickle.dumps(get()) != pickle.dumps(self._before[name])
        ]

    def restore(self) -> list[str]:
        """Restore the generators used since this object was made. Returns their names."""
        changed = self.used()
        for name in changed:
            self._known[name][1](self._before[name])
        return changed


# --- worker threads -------------------------------------------------------------------------------------------------


class _Local(threading.local):
    """The current sample of a worker thread."""

    place: tuple[int, int, int] | None = None
    generator: torch.Generator | None = None


_thread = _Local()


def begin_sample(seed: int, batch: int, place: int) -> None:
    """Set the current sample of this thread. Cheap until a number is drawn.

    Args:
        seed: seed of the pass.
        batch: number of the batch in the epoch.
        place: position of the sample in the batch.
    """
    _thread.place = (seed, batch, place)
    _thread.generator = None


def sample_generator() -> torch.Generator | None:
    """Return the generator for this worker thread's current sample. None (torch's default) in other threads.

    Example:
        >>> flipped = torch.rand(1, generator=sample_generator()) < 0.5
    """
    if _thread.generator is None and _thread.place is not None:
        _thread.generator = torch.Generator().manual_seed(mix_seed(*_thread.place, "sample"))
    return _thread.generator


# --- restoring state -----------------------------------------------------------------------------------------------

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), Tensor, np.ndarray, np.generic)
_CODE = (type, BuiltinFunctionType, ModuleType)
_LONG = 100_000
"""Longest container whose elements are restored. Datasets hold longer lists of all samples."""
_ENTERED = 1_000
"""Longest container whose elements are visited. Longer ones hold samples, which have no state."""
_MOST = 200_000
"""Largest number of visited objects."""
_APART = re.compile(
    r"(threading|multiprocessing|logging|torch\.multiprocessing|lightning_feed\.(storage|_host|diagnosing))\b"
    r"|(lightning|pytorch_lightning)\b(?!(\.pytorch|\.fabric)?\.(core|utilities)\b)"
)
"""Packages whose objects are not visited: parts of the running program, a diagnosis that runs, and our storage, whose
state is outside Python.

Exceptions are Lightning's objects that hold user data: data modules made by ``from_datasets``, ``hparams``,
``CombinedLoader``."""
_GENERATORS = ((torch.Generator, "get_state"), (random.Random, "getstate"), (np.random.RandomState, "get_state"))

Undo = Callable[[], object]


@contextmanager
def preserve_state(*owners: object) -> Iterator[None]:
    """Restore ``owners`` and the global generators at the end of a ``with`` block.

    Restores torch's, NumPy's and Python's global generators. Also restores attributes, container contents and
    generators in all objects reachable from the owners, such as datasets, samplers and transforms.

    Does not restore the contents of arrays and tensors, or state outside Python, such as a file's position. Containers
    of more than 100,000 elements are not restored. In containers of more than 1,000, the elements' own state is not
    restored.

    Args:
        owners: loaders, datasets, or containers of them. Iterators of loaders are not visited.
    """
    undo: list[Undo] = [DefaultGenerators().restore, *_reached(owners)]
    if torch.cuda.is_initialized():
        undo.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _reached(owners: object) -> Iterator[Undo]:
    seen: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
    stack = [owners]
    while stack and len(seen) < _MOST:
        value = stack.pop()
        if id(value) in seen or isinstance(value, (*_ATOMS, *_CODE)):
            continue
        seen[id(value)] = value
        generator = _generator(value)
        if generator is not None:
            yield generator
        elif isinstance(value, (Dataset, Sampler, DataLoader)) or not _APART.match(type(value).__module__):
            yield from _kept(value)
            stack += _inside(value)


def _generator(value: object) -> Undo | None:
    """Return a function that restores a random generator. None for other objects."""
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    for kind, get in _GENERATORS:
        if isinstance(value, kind) and not isinstance(value, random.SystemRandom):
            return partial(getattr(value, get.replace("get", "set")), getattr(value, get)())
    return None


def _kept(value: object) -> Iterator[Undo]:
    if isinstance(value, (list, dict, set, deque)) and len(value) <= _LONG:
        yield partial(_refill, value, dict(value) if isinstance(value, dict) else list(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield partial(_refill, attributes, attributes.copy())


def _refill(container: Any, before: Any) -> None:
    """Restore the elements of a container. An unchanged container is not written to."""
    here, there = (chain(one, one.values()) if isinstance(one, dict) else one for one in (container, before))
    if len(container) == len(before) and all(now is then for now, then in zip(here, there, strict=True)):
        return
    container.clear()
    getattr(container, "update" if isinstance(container, (dict, set)) else "extend")(before)


def _inside(value: object) -> list[object]:
    if isinstance(value, FunctionType):
        return list(value.__closure__ or ())
    if isinstance(value, (CellType, MethodType, partial)):
        return gc.get_referents(value)
    inside: list[object] = []
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)) and len(value) <= _ENTERED:
        inside += value.values() if isinstance(value, dict) else value
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        is_loader = isinstance(value, DataLoader) or type(value).__name__ == "CombinedLoader"
        inside += [held for name, held in attributes.items() if not (is_loader and name == "_iterator")]
    return inside
