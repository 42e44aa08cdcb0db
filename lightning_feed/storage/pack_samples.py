"""Samples of a pack as bytes: original, shrunk or decoded files, or samples of any dataset, encoded without pickle.

A dataset sample consists of the length of a JSON header (8 bytes, little endian), the header, and the raw arrays, each
starting at a multiple of 64 bytes.
"""

import io
import json
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from lightning_feed.errors import ArchiveError, DatasetError, DecodeError
from lightning_feed.storage.folder import FolderSource

_SHAPE_BYTES = 8
"""Size of the prefix of decoded pixels: height and width, 4 bytes each, little endian."""
_ALIGN = 64
# Exceptions of Pillow's readers on corrupt files; as in decode/decoders.py.
_CORRUPT = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)


# --- files and datasets -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shrink:
    """Changes made to images when they are packed."""

    short_side: int | None = None
    """Maximum length of the shorter side, in pixels. Larger images are resized to it, smaller files stay unchanged."""
    quality: int | None = None
    """Quality of re-encoded JPEGs, 1 to 100. Without a short side, all images are re-encoded."""
    decoded: bool = False
    """True to store pixels, uint8 (H, W, 3), instead of a file."""

    @property
    def written_quality(self) -> int | None:
        """Quality of re-encoded JPEGs; None if none are re-encoded."""
        return 95 if self.quality is None and self.short_side and not self.decoded else self.quality


class Payload(NamedTuple):
    """One sample, ready to be packed."""

    data: bytes | None
    """None if it could not be read."""
    checksum: int
    """CRC-32."""
    problem: str
    """Reason why it could not be read."""
    changed_ns: int
    """Change time of its file before the read, in ns since 1970; 0 without a file."""


class Payloads(Dataset[Payload]):
    """Map-style dataset of payloads.

    Args:
        source: labelled files, or any map-style dataset.
        shrink: changes to images; only for files.
    """

    def __init__(self, source: Any, shrink: Shrink) -> None:
        self.source = source
        self.shrink = shrink
        self.kind: Literal["files", "decoded", "samples"] = "samples"
        self.labels: npt.NDArray[np.int64] = np.zeros(len(source), dtype=np.int64)
        if isinstance(source, FolderSource):
            self.kind = "decoded" if shrink.decoded else "files"
            self.labels = source.labels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Payload:
        changed_ns = self.changed_ns(index)  # before the read, so that a concurrent write is noticed
        try:
            payload = self._payload(index)
        except DatasetError as error:
            return Payload(None, 0, str(error), changed_ns)
        return Payload(payload, zlib.crc32(payload), "", changed_ns)

    def __getitems__(self, indices: list[int]) -> list[Payload]:
        expect = getattr(self.source, "expect", None)
        _held = None if expect is None else expect(indices)  # reads remote samples concurrently
        return [self[index] for index in indices]

    def name(self, index: int) -> str:
        """Return the name of a sample in the pack: the path of its file, or its number."""
        return self.source.index.path(index) if isinstance(self.source, FolderSource) else str(index)

    def changed_ns(self, index: int) -> int:
        """Return the change time of a sample's file, in ns since 1970; 0 without a file."""
        return self.source.changed_ns(index) if isinstance(self.source, FolderSource) else 0

    def _payload(self, index: int) -> bytes:
        if self.kind == "samples":
            return to_bytes(self.source[index])
        data: bytes = self.source.read(index)
        if self.kind == "files" and self.shrink.short_side is None and self.shrink.quality is None:
            return data
        try:
            with Image.open(io.BytesIO(data)) as image:
                return self._decoded(image) if self.kind == "decoded" else self._encoded(image, data)
        except _CORRUPT as error:
            # Pillow's own message names only the in-memory file object.
            why = "Pillow does not know its format" if isinstance(error, UnidentifiedImageError) else error
            raise DecodeError(f"{self.source.name(index)} (sample {index}) is not a readable image: {why}.") from error

    def _decoded(self, image: Image.Image) -> bytes:
        pixels = np.asarray(_resized(image.convert("RGB"), self.shrink.short_side))
        return np.array(pixels.shape[:2], "<u4").tobytes() + pixels.tobytes()

    def _encoded(self, image: Image.Image, data: bytes) -> bytes:
        image.load()  # even without resizing, to notice a truncated file now
        if self.shrink.short_side is not None and min(image.size) <= self.shrink.short_side:
            return data  # small enough already: re-encoding would only lose quality
        file = io.BytesIO()
        # Chroma at full resolution: it was halved once already, and halving it again would lose more.
        resized = _resized(image.convert("RGB"), self.shrink.short_side)
        resized.save(file, "JPEG", quality=self.shrink.written_quality, subsampling=0)
        return file.getvalue()


def pixels_of(payload: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """Return decoded pixels from their payload: uint8, shape (H, W, 3), read-only."""
    height, width = np.frombuffer(payload, "<u4", count=2)
    return np.frombuffer(payload, np.uint8, offset=_SHAPE_BYTES).reshape(int(height), int(width), 3)


def _resized(image: Image.Image, short_side: int | None) -> Image.Image:
    short = min(image.size)
    if short_side is None or short <= short_side:
        return image
    size = tuple(max(1, round(side * short_side / short)) for side in image.size)
    return image.resize((size[0], size[1]), Image.Resampling.BICUBIC)


# --- samples of any dataset -------------------------------------------------------------------------------------------


def to_bytes(sample: object) -> bytes:
    """Encode a nested dict, list or tuple of tensors, arrays, numbers, strings, bytes and None.

    Raises:
        DatasetError: for any other type, with its place in the sample.
    """
    arrays: list[npt.NDArray[Any]] = []
    header = json.dumps(_describe(sample, arrays, "sample")).encode()
    parts = [len(header).to_bytes(8, "little"), header]
    at = 8 + len(header)
    for array in arrays:
        gap = -at % _ALIGN
        parts += [bytes(gap), array.tobytes()]
        at += gap + array.nbytes
    return b"".join(parts)


def from_bytes(data: bytes) -> Any:
    """Decode a sample encoded by :func:`to_bytes`. Arrays and tensors are writable copies.

    Raises:
        ArchiveError: if the bytes are not such a sample.
    """
    try:
        at = 8 + int.from_bytes(data[:8], "little")
        tree = json.loads(data[8:at])
        return _Reader(data, at).build(tree)
    except Exception as error:  # from JSON, NumPy or torch: the bytes may come from a stranger
        raise ArchiveError(
            f"{len(data)} bytes are not a valid packed sample: {error}. Pack the source again."
        ) from error


def _describe(value: Any, arrays: list[npt.NDArray[Any]], place: str) -> dict[str, Any]:
    """Return the header of a value, whose first key is its kind; append its arrays to ``arrays``."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _describe(inner, arrays, f"{place}[{key!r}]") for key, inner in value.items()}}
    if type(value) in (list, tuple):
        inner = [_describe(one, arrays, f"{place}[{number}]") for number, one in enumerate(value)]
        return {type(value).__name__: inner}
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        # As bytes, since NumPy has neither bfloat16 nor float8.
        arrays.append(plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8))
        return {"tensor": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        arrays.append(np.ascontiguousarray(value))
        return {"array": value.dtype.str, "shape": list(value.shape), "scalar": isinstance(value, np.generic)}
    if isinstance(value, (bytes, bytearray)):
        arrays.append(np.frombuffer(value, np.uint8))
        return {"bytes": len(value)}
    if isinstance(value, (bool, int, float, str, type(None))):
        return {"value": value}
    raise DatasetError(f"{place} is a {type(value).__name__}, which cannot be packed. Make it a tensor or a number.")


class _Reader:
    """Reads the arrays in the order of the header."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at

    def build(self, tree: dict[str, Any]) -> Any:
        """Build the value from its header."""
        kind, inner = next(iter(tree.items()))
        make: Callable[[dict[str, object]], object] = {
            "value": lambda _: inner,
            "dict": lambda _: {key: self.build(one) for key, one in inner.items()},
            "list": lambda _: [self.build(one) for one in inner],
            "tuple": lambda _: tuple(self.build(one) for one in inner),
            "bytes": lambda _: self._take(inner),
            "tensor": self._tensor,
            "array": self._array,
        }[kind]
        return make(tree)

    def _tensor(self, tree: dict[str, Any]) -> torch.Tensor:
        dtype = getattr(torch, tree["tensor"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{tree['tensor']!r} is not a tensor type")
        raw = self._take(math.prod(tree["shape"]) * dtype.itemsize)
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
        return flat.reshape(tree["shape"])

    def _array(self, tree: dict[str, Any]) -> Any:
        dtype = np.dtype(tree["array"])
        array = np.frombuffer(self._take(math.prod(tree["shape"]) * dtype.itemsize), dtype).reshape(tree["shape"])
        return array[()] if tree["scalar"] else array.copy()

    def _take(self, size: int) -> bytes:
        begin = self.at + -self.at % _ALIGN
        self.at = begin + size
        if self.at > len(self.data):
            raise ValueError(f"cut short: {size} bytes are missing at {begin}")
        return bytes(self.data[begin : self.at])
