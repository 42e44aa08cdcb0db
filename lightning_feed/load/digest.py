"""Digests of samples and batches, by which to compare what different processes have made, and their sizes."""

import hashlib
import io
import pickle
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves

Digests: TypeAlias = tuple[bytes, ...]
"""A digest of the structure of a value, and one of each of its leaves."""
_BYTES = 16
_DEEPEST = 8


def digests_of(value: object, *, sent: bool = False) -> Digests:
    """Return the digests of a sample or batch of any structure.

    Two values of equal content have the same digests in all processes forked from one. Dicts, lists and tuples are
    taken apart; any other object is a leaf, digested by what pickle would send of it to a worker process.

    Args:
        value: the sample or batch.
        sent: True to raise pickle's error if a leaf cannot be sent to another process.
    """
    leaves, structure = tree_flatten(value)
    return (_digest(repr(structure)), *(_digest(leaf, sent=sent) for leaf in leaves))


def leaf_sizes(batch: object, depth: int = 0) -> list[int]:
    """Return the bytes of each tensor and array in a batch of any structure."""
    sizes = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            sizes.append(int(leaf.nbytes))
        elif depth < _DEEPEST:
            sizes += leaf_sizes(list(getattr(leaf, "__dict__", {}).values()), depth + 1)
    return sizes


def differing(one: Digests, other: Digests) -> set[int]:
    """Return the positions at which two values differ; all positions if their structures have different lengths."""
    if len(one) != len(other):
        return set(range(max(len(one), len(other))))
    return {position for position, (left, right) in enumerate(zip(one, other, strict=True)) if left != right}


def _digest(leaf: object, *, sent: bool = False) -> bytes:
    sink = _Sink()
    pickler = _ContentPickler(sink, pickle.HIGHEST_PROTOCOL)
    # Without its memo, pickle writes the same bytes whether two equal parts are one object or two.
    pickler.fast = True
    try:
        pickler.dump(leaf)
    except Exception:  # raised by code of the object: it can only be told by its class
        if sent:
            raise
        sink.write(type(leaf).__qualname__.encode())
    return sink.hash.digest()


class _Sink(io.RawIOBase):
    """A file that keeps only a hash of what is written to it."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=_BYTES)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.hash.update(view)
        return view.nbytes


class _ContentPickler(pickle.Pickler):
    """Pickles tensors and arrays as their type, shape and bytes: torch writes addresses, too."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return _content, _tensor_content(thing)
        if type(thing) is np.ndarray and not thing.dtype.hasobject:
            return _content, (thing.dtype.str, thing.shape, _hashed(np.ascontiguousarray(thing)))
        return NotImplemented


def _content(*_: object) -> None:
    """Stands for the constructor of a tensor or array in a pickle that nobody reads."""


def _tensor_content(tensor: torch.Tensor) -> tuple[object, ...]:
    described = (str(tensor.dtype), tuple(tensor.shape), str(tensor.layout))
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return *described, repr(tensor)
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return *described, _hashed(plain.reshape(-1).view(torch.uint8).numpy())


def _hashed(array: "np.typing.NDArray[Any]") -> bytes:
    content = array.reshape(-1).view(np.uint8).data if array.size else b""
    return hashlib.blake2b(content, digest_size=_BYTES).digest()
