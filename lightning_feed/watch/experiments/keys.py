"""What each part of a batch weighs."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lightning_feed.transfer.nested import tensors

WHOLE = "batch"
"""The name of a batch that has no parts."""
_NUMBER_BYTES = 8


def key_bytes(batch: Any) -> dict[str, int]:
    """The bytes of every leaf of a batch by its place in it, in order.

    Mappings, lists, tuples, named tuples and dataclasses are entered; any other object counts as one leaf with the
    tensors that it holds. Lists of plain values, such as paths, are one leaf too.

    Args:
        batch: as a loader gives it.

    Returns:
        ``{"image": 602112, "meta.path": 1830}``, ``{"0": 602112, "1": 32}`` for a tuple, ``{"batch": 602112}`` for a
        batch without parts. Tensors and arrays by their elements, text and bytes by length, numbers as 8.

    Example:
        >>> key_bytes({"image": Tensor(2, 3), "meta": {"path": ["a.jpg", "b.jpg"]}})
        {'image': 24, 'meta.path': 10}
    """
    return {place: size_of_leaf(leaf) for place, leaf in key_leaves(batch)}


def key_leaves(batch: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a batch in order, each with its place, as :func:`key_bytes` names them."""
    parts = _parts(batch)
    if parts is None:
        yield place or WHOLE, batch
        return
    for key, value in parts:
        yield from key_leaves(value, f"{place}.{key}" if place else str(key))


def size_of_leaf(leaf: Any) -> int:
    """Bytes of a leaf; of a whole sample or batch too."""
    if isinstance(leaf, Tensor):
        return leaf.numel() * leaf.element_size()
    if isinstance(leaf, np.ndarray):
        return int(leaf.nbytes)
    if isinstance(leaf, str):
        return len(leaf.encode("utf-8", "surrogatepass"))
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        return len(leaf)
    if isinstance(leaf, (int, float, complex, np.generic)):
        return _NUMBER_BYTES
    if isinstance(leaf, Mapping):
        return sum(map(size_of_leaf, leaf.values()))
    if isinstance(leaf, (list, tuple, set, frozenset)):
        return sum(map(size_of_leaf, leaf))
    size = getattr(leaf, "size", None)
    bands = getattr(leaf, "getbands", None)
    if bands is not None and isinstance(size, tuple):
        return int(size[0] * size[1] * len(bands()))  # a PIL image
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(leaf))


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """The named parts of a container; None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        holds_parts = any(isinstance(part, (Tensor, np.ndarray, Mapping, list, tuple)) for part in value)
        return list(enumerate(value)) if holds_parts or any(map(dataclasses.is_dataclass, value)) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return None
