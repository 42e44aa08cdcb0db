"""What loading changes in the user's objects and in the global random generators, kept and put back."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), Tensor, np.ndarray, np.generic)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_LONG = 100_000
"""A longer container is kept by its owner's attribute only, not its elements: data sets hold lists of all samples."""
_ENTERED = 1_000
"""Elements of a longer one are samples, not objects that draw or count."""
_MOST = 200_000
"""Objects that are looked at."""
_APART = ("threading", "multiprocessing", "logging", "torch.multiprocessing", "lightning", "pytorch_lightning")
"""Packages whose objects belong to a running program; and our archive's, whose state lies outside Python."""

Undo = Callable[[], object]


@contextmanager
def untouched(*owners: Any) -> Iterator[None]:
    """Within it, ``owners`` may be worked with; after it they are as before, and so are the global generators.

    Put back: torch's, numpy's and random's global states; and in everything that can be reached from the owners, data
    sets, samplers and transforms among it: attributes, contents of containers, generators. Not put back: contents of
    arrays and tensors, of containers above 100,000 elements (and what is in those above 1,000), and what lies outside
    Python, such as a file's position.

    Args:
        owners: loaders, data sets, or containers of them. Iterators of loaders are not looked into.
    """
    undo = [*_global_random(), *_reached(owners)]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _global_random() -> Iterator[Undo]:
    yield partial(torch.set_rng_state, torch.get_rng_state())
    yield partial(np.random.set_state, np.random.get_state())
    yield partial(random.setstate, random.getstate())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())


def _reached(owners: Any) -> Iterator[Undo]:
    seen: dict[int, Any] = {}  # holds what it names: an id may be used again
    stack = [owners]
    while stack and len(seen) < _MOST:
        value = stack.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        generator = _generator(value)
        if generator is not None:
            yield generator
        elif isinstance(value, (MethodType, partial)):
            stack += [value.__self__] if isinstance(value, MethodType) else [value.func, *value.args, value.keywords]
        elif isinstance(value, FunctionType):
            stack += [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        elif not isinstance(value, _CODE) and not _apart(value):
            yield from _kept(value)
            stack += _inside(value)


def _generator(value: Any) -> Undo | None:
    """Puts a random generator's state back; None for what is none."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None


def _kept(value: Any) -> Iterator[Undo]:
    if isinstance(value, (list, dict, set, deque)) and len(value) <= _LONG:
        yield partial(_refill, value, dict(value) if isinstance(value, dict) else list(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield partial(_refill, attributes, attributes.copy())


def _refill(container: Any, before: Any) -> None:
    """The same container with the elements that it had. One that is as it was is not written to."""
    same = len(container) == len(before) and all(
        here is there for here, there in zip(_flat(container), _flat(before), strict=True)
    )
    if same:
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)


def _flat(container: Any) -> Iterator[Any]:
    if not isinstance(container, dict):
        yield from container
        return
    for key, value in container.items():
        yield key
        yield value


def _inside(value: Any) -> list[Any]:
    inside: list[Any] = []
    if isinstance(value, dict):
        inside += value.values() if len(value) <= _ENTERED else ()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inside += value if len(value) <= _ENTERED else ()
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        skipped = {"_iterator"} if isinstance(value, DataLoader) else set()
        inside += [held for name, held in attributes.items() if name not in skipped]
    return inside


def _apart(value: Any) -> bool:
    if isinstance(value, (Dataset, Sampler, DataLoader)):
        return False
    module = type(value).__module__
    return any(module == name or module.startswith(f"{name}.") for name in (*_APART, "lightning_feed.archive"))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not sys
    except ValueError:  # a cell of a function that is not yet defined
        return False
