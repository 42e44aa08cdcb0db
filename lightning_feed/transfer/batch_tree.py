"""Walks over a batch of any shape, and the parts of it that stay on the host.

Containers, dataclasses, named tuples, and objects of the user's own are entered.
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
    """Every tensor that can be reached from ``batch``, each once.

    Looks into mappings, lists, tuples (``PackedSequence`` is one), sets, dataclasses, and the attributes of any other
    object, since a batch class with a ``.to`` of its own keeps its tensors there. Sparse tensors come as the strided
    tensors that hold their memory.
    """
    yield from _leaves(batch)


def record_stream(batch: object, stream: Any) -> None:
    """Tell the caching allocator that ``stream`` uses every device tensor of ``batch``.

    Without it the allocator may hand the memory of a tensor that was made on another stream to the next copy while
    ``stream`` still reads it (https://pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html). An object
    with a ``record_stream`` of its own, as PyTorch Geometric's batches have, is asked as well, unless all its tensors
    are on the host: it may hold memory that only it can find.
    """
    for leaf in _leaves(batch, to_record=True):
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cpu":
                leaf.record_stream(stream)
            continue
        found = list(tensors(leaf))
        if off_host(found) or not found:
            record_stream(found, stream)
            with suppress(NotImplementedError):  # it asked a tensor on the host, for which torch has no kernel
                leaf.record_stream(stream)


def off_host(batch: object) -> bool:
    """True if any tensor in ``batch`` is already outside host memory."""
    return any(tensor.device.type != "cpu" for tensor in tensors(batch))


def bytes_off_host(batch: object) -> int:
    """Memory that the tensors of ``batch`` take outside of the host."""
    return sum(tensor.nbytes for tensor in tensors(batch) if tensor.device.type != "cpu")


class _Held:
    """Hides a value from whatever moves batches: it is no container, and it has no ``.to``."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def hold(batch: object, keys: frozenset[str]) -> Any:
    """``batch`` with the values under ``keys`` hidden from the transfer. The user's containers are not written to.

    Only plain containers are entered (mappings, lists, tuples, named tuples): an object with its own ``.to`` decides
    for itself what it moves. :func:`release` brings the values back.
    """
    named = isinstance(batch, Mapping)
    return _enter(batch, lambda key, value: _Held(value) if named and key in keys else hold(value, keys))


def release(batch: object) -> Any:
    """Undo :func:`hold`."""
    return _enter(batch, lambda _, value: value.value if isinstance(value, _Held) else release(value))


def _enter(batch: object, change: Callable[[object, object], object]) -> object:
    plain = isinstance(batch, (Mapping, list, tuple)) and not hasattr(batch, "to")
    return rebuild(batch, change) if plain else batch


def _leaves(batch: object, *, to_record: bool = False) -> Iterator[Batch]:
    """Tensors, and ``to_record`` what has a ``record_stream``. Every object is visited once, so cycles end."""
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
    """Elements, slots and attributes of a value. A subclass of a container has all of them."""
    if isinstance(value, (_Held, *_CODE)):
        return ()
    inside: list[object] = []
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inside += value
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            inside.append(getattr(value, f"_{kind.__name__.lstrip('_')}{name}" if private else name, None))
    return inside + list(getattr(value, "__dict__", {}).values())


def _strided(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that own the memory: ``Tensor.record_stream`` knows strided layouts only."""
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
"""The tensors that hold the memory of a sparse one."""


# --- keys that are not transferred ------------------------------------------------------------------------------------


class LeanTransfer:
    """Drops keys and holds keys back, around whatever copies a batch.

    Args:
        drop_keys: left out; see :func:`lightning_feed.load.collate.drop`.
        host_keys: kept from the copy.
        warn: takes what the user should know of, at most once each.
    """

    def __init__(self, *, drop_keys: frozenset[str], host_keys: frozenset[str], warn: Callable[[str], object]) -> None:
        self._drop, self._held, self._warn = drop_keys, host_keys, warn
        self._looked = False

    def look(self, batch: object) -> None:
        """Warn, once, of keys to drop that a first batch does not have."""
        if not self._looked:
            self._looked = True
            absent = missing_keys(batch, self._drop)
            if absent is not None:
                self._warn(absent)

    def send(self, batch: object, copy: Callable[[object], object]) -> Any:
        """The batch as ``copy`` makes it of what is left; held values come back untouched."""
        left = drop(batch, self._drop) if self._drop else batch
        return release(copy(hold(left, self._held))) if self._held else copy(left)
