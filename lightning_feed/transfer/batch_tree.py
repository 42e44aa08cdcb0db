"""Traverses batches of any structure, and keeps some of their parts on the host.

Traverses containers, dataclasses, named tuples, and objects of the user's own classes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_feed.load.collate import drop, missing_keys, rebuild
from lightning_feed.load.kinds import Batch

_OPAQUE = (str, bytes, bytearray, int, float, complex, bool, type(None), torch.dtype, torch.device)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def tensors(batch: object) -> Iterator[Tensor]:
    """Yield every tensor reachable from ``batch``, each once.

    Traverses mappings, lists, tuples (including ``PackedSequence``), sets, dataclasses, and the attributes of any other
    object: a batch class with its own ``.to`` keeps its tensors in attributes. For a sparse tensor, yields the strided
    tensors that hold its memory.
    """
    yield from _leaves(batch)


def record_stream(batch: object, stream: Any) -> None:
    """Mark every device tensor of ``batch`` as used by ``stream`` in the caching allocator.

    Otherwise the allocator may reuse a tensor's memory for the next copy while ``stream`` still reads it
    (https://pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html). If an object has a method
    ``record_stream`` (PyTorch Geometric's batches), this method is called as well, because the object may hold memory
    that this walk cannot find. The method is not called if all tensors of the object are on the host.
    """
    for leaf in _leaves(batch, to_record=True):
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cpu":
                leaf.record_stream(stream)
            continue
        parts = list(tensors(leaf))
        if off_host(parts) or not parts:
            record_stream(parts, stream)
            with suppress(NotImplementedError):  # raised for a host tensor: torch has no such kernel
                leaf.record_stream(stream)


def off_host(batch: object) -> bool:
    """Return True if any tensor in ``batch`` is outside host memory."""
    return any(tensor.device.type != "cpu" for tensor in tensors(batch))


def bytes_off_host(batch: object) -> int:
    """Return the bytes of the tensors in ``batch`` that are outside host memory."""
    return sum(tensor.nbytes for tensor in tensors(batch) if tensor.device.type != "cpu")


class _Held:
    """Hides a value from code that moves batches: not a container, and without a ``.to``."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def hold(batch: object, keys: frozenset[str]) -> Any:
    """Hide the values under ``keys`` from the transfer. The user's containers are not modified.

    Only plain containers (mappings, lists, tuples, named tuples) are traversed: an object with its own ``.to`` moves
    its own contents. :func:`release` restores the values.
    """
    is_mapping = isinstance(batch, Mapping)

    def change(key: object, value: object) -> object:
        if is_mapping and key in keys:
            return _Held(value)
        return hold(value, keys)

    return _enter(batch, change)


def release(batch: object) -> Any:
    """Undo :func:`hold`."""

    def change(_: object, value: object) -> object:
        return value.value if isinstance(value, _Held) else release(value)

    return _enter(batch, change)


def _enter(batch: object, change: Callable[[object, object], object]) -> object:
    if isinstance(batch, (Mapping, list, tuple)) and not hasattr(batch, "to"):
        return rebuild(batch, change)
    return batch


def _leaves(batch: object, *, to_record: bool = False) -> Iterator[Batch]:
    """Yield tensors and, with ``to_record``, objects with a ``record_stream``.

    Visits each object once, so cycles are safe.
    """
    seen: set[int] = set()
    stack = [batch]
    while stack:
        value = stack.pop()
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield from _strided(value)
        elif to_record and not isinstance(value, type) and callable(getattr(value, "record_stream", None)):
            yield value
        else:
            stack.extend(_children(value))


def _children(value: object) -> Iterable[object]:
    """Return elements, slots and attributes of a value. A container subclass may have all three."""
    if isinstance(value, (_Held, *_CODE)):
        return ()
    children: list[object] = []
    if isinstance(value, Mapping):
        children += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        children += value
    for kind in type(value).__mro__:
        children += [getattr(value, name, None) for name in _slots_of(kind)]
    return children + list(getattr(value, "__dict__", {}).values())


def _slots_of(kind: type) -> Iterator[str]:
    """Yield the attribute names of a class's own slots. Python stores private ones with the name of the class."""
    slots = kind.__dict__.get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        is_private = name.startswith("__") and not name.endswith("__")
        yield f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def _strided(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors that own a tensor's memory: ``Tensor.record_stream`` supports no other layouts."""
    if tensor.is_nested:
        ragged: Any = tensor  # its methods are not in torch's stubs
        yield ragged.values()  # one buffer for all of its rows
        if tensor.layout is torch.jagged:
            yield ragged.offsets()
            if ragged.lengths() is not None:
                yield ragged.lengths()
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        yield from (part(tensor) for part in _SPARSE_PARTS.get(tensor.layout, ()))


_ROWS = (Tensor.crow_indices, Tensor.col_indices, Tensor.values)
_COLUMNS = (Tensor.ccol_indices, Tensor.row_indices, Tensor.values)
_SPARSE_PARTS: dict[torch.layout, tuple[Callable[[Tensor], Tensor], ...]] = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
"""Methods that return the tensors that hold a sparse tensor's memory, by layout."""


# --- keys that are not transferred ------------------------------------------------------------------------------------


class LeanTransfer:
    """Wraps a function that copies a batch: drops some keys, and keeps others on the host.

    Args:
        drop_keys: keys to leave out; see :func:`lightning_feed.load.collate.drop`.
        host_keys: keys whose values are not copied.
        warn: called with each warning for the user, at most once per warning.
    """

    def __init__(self, *, drop_keys: frozenset[str], host_keys: frozenset[str], warn: Callable[[str], object]) -> None:
        self._drop_keys = drop_keys
        self._host_keys = host_keys
        self._warn = warn
        self._has_looked = False

    def look(self, batch: object) -> None:
        """Warn once if the first batch lacks some of the keys to drop."""
        if self._has_looked:
            return
        self._has_looked = True
        warning = missing_keys(batch, self._drop_keys)
        if warning is not None:
            self._warn(warning)

    def send(self, batch: object, copy: Callable[[object], object]) -> Any:
        """Return the batch copied by ``copy``, without the dropped keys. Values of host keys are not copied."""
        if self._drop_keys:
            batch = drop(batch, self._drop_keys)
        if not self._host_keys:
            return copy(batch)
        return release(copy(hold(batch, self._host_keys)))
