"""Samples of any map-style dataset as bytes, and back, without pickle: a JSON header, then the raw arrays.

Layout: length of the header (8 bytes, little endian), the header, then each array from a multiple of 64 bytes on.
"""

import json
from typing import Any

import numpy as np
import torch

from lightning_feed.errors import ArchiveError, DatasetError

_ALIGN = 64
_PLAIN = (bool, int, float, str, type(None))


def to_bytes(sample: Any) -> bytes:
    """A nested dict, list or tuple of tensors, arrays, numbers, strings, bytes and None as bytes.

    Raises:
        DatasetError: for anything else in it, with its place.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    header = json.dumps(_describe(sample, arrays, "sample")).encode()
    parts = [len(header).to_bytes(8, "little"), header]
    at = 8 + len(header)
    for array in arrays:
        gap = -at % _ALIGN
        parts += [bytes(gap), array.tobytes()]
        at += gap + array.nbytes
    return b"".join(parts)


def from_bytes(data: bytes) -> Any:
    """The sample that :func:`to_bytes` was given. Arrays and tensors are copies that may be written to.

    Raises:
        ArchiveError: when the bytes are not such a sample.
    """
    try:
        at = 8 + int.from_bytes(data[:8], "little")
        tree = json.loads(data[8:at])
        return _Reader(data, at).build(tree)
    except Exception as error:  # of JSON, NumPy or torch: a stranger may have written it
        raise ArchiveError(f"{len(data)} bytes that are no packed sample: {error}. Pack the source again.") from error


def _describe(value: Any, arrays: list[np.ndarray[Any, Any]], place: str) -> Any:
    if isinstance(value, _PLAIN) and not isinstance(value, np.floating):  # np.float64 is a float
        return {"value": value}
    if isinstance(value, (bytes, bytearray)):
        arrays.append(np.frombuffer(value, np.uint8))
        return {"bytes": len(value)}
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        # Through bytes, since NumPy has no bfloat16 and no float8.
        arrays.append(plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8))
        return {"tensor": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        arrays.append(np.ascontiguousarray(value))
        return {"array": value.dtype.str, "shape": list(value.shape), "scalar": isinstance(value, np.generic)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _describe(inner, arrays, f"{place}[{key!r}]") for key, inner in value.items()}}
    if type(value) in (list, tuple):
        inner = [_describe(one, arrays, f"{place}[{number}]") for number, one in enumerate(value)]
        return {type(value).__name__: inner}
    raise DatasetError(
        f"{place} is a {type(value).__name__}, which cannot be packed. Give dicts with text keys, lists and tuples of "
        "tensors, arrays, numbers, strings, bytes and None."
    )


class _Reader:
    """Takes the arrays in the order in which they were described."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def build(self, tree: dict[str, Any]) -> Any:
        if "value" in tree:
            return tree["value"]
        if "dict" in tree:
            return {key: self.build(inner) for key, inner in tree["dict"].items()}
        if "list" in tree:
            return [self.build(inner) for inner in tree["list"]]
        if "tuple" in tree:
            return tuple(self.build(inner) for inner in tree["tuple"])
        if "bytes" in tree:
            return self._take(tree["bytes"])
        if "tensor" in tree:
            dtype = getattr(torch, tree["tensor"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{tree['tensor']!r} is no type of a tensor")
            raw = self._take(int(np.prod(tree["shape"], dtype=np.int64)) * dtype.itemsize)
            flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
            return flat.reshape(tree["shape"])
        dtype = np.dtype(tree["array"])
        array = np.frombuffer(self._take(int(np.prod(tree["shape"], dtype=np.int64)) * dtype.itemsize), dtype)
        array = array.reshape(tree["shape"])
        return array[()] if tree["scalar"] else array.copy()

    def _take(self, size: int) -> bytes:
        begin = self.at + -self.at % _ALIGN
        self.at = begin + size
        if self.at > len(self.data):
            raise ValueError(f"cut short: {size} bytes are missing at {begin}")
        return bytes(self.data[begin : self.at])
