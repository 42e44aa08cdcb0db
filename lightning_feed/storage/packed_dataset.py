"""PackedDataset, and the pack format: a manifest, and an index and a data file for each part.

Data files are opened on the first read in the process that reads: neither LMDB nor HDF5 survives a fork.
"""

import io
import json
import mmap
import os
import threading
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, get_args
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lightning_feed.errors import ArchiveError, DatasetError, FeedError, SettingsError
from lightning_feed.extras import require
from lightning_feed.storage.folder import MANIFEST, Encoded, is_pack

ALL = "all"
"""Name of the only part of a pack without splits."""
Format = Literal["flat", "lmdb", "hdf5"]
FORMATS: tuple[Format, ...] = get_args(Format)
DATA_FILES: dict[Format, str] = {"flat": "data.bin", "lmdb": "data.mdb", "hdf5": "data.h5"}
_VERSION = 1
_PARTS = {ALL, "train", "val", "test"}
_SHAPE_BYTES = 8
"""Bytes in front of the pixels of a decoded sample: height and width, 4 bytes each, little endian."""
_process_lock = threading.RLock()
"""Lock that excludes other threads of this process. A forked child replaces it."""


def _renew_lock() -> None:
    global _process_lock  # another thread of the parent may have held the old lock
    _process_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class DamagedSampleError(ArchiveError, DatasetError):
    """A sample of a pack that cannot be read. Also a DatasetError, so ``on_error`` may skip it."""


def damaged(path: Path, error: Exception) -> ArchiveError:
    """Return the ArchiveError for an exception of a library. A flipped bit can cause nearly any exception."""
    return ArchiveError(f"{path} cannot be read: {error}. Copy it again, or pack the source again.")


# --- manifest and index -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a pack. Written last: a folder without a manifest is not a pack."""

    format: Format
    decoded: bool
    """True if the samples are pixels, False if they are encoded files."""
    classes: tuple[str, ...]
    """Label names."""
    parts: dict[str, int]
    """Size in bytes of the data file of each part: ``train``, ``val`` ..., or ``all``."""
    version: int = _VERSION

    def save(self, folder: Path) -> None:
        """Write the manifest."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1))


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a pack.

    Raises:
        ArchiveError: if the manifest is missing or damaged, or was written by another version.
    """
    if not is_pack(path):
        raise ArchiveError(f"{path} is not a pack: it has no {MANIFEST}. To make one: lightning-feed pack SRC DEST")
    try:
        document = json.loads((path / MANIFEST).read_text())
        version = document["version"]
        if version == _VERSION:
            return _checked_manifest(document)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path / MANIFEST, error) from error
    raise ArchiveError(f"{path} is a pack of version {version!r}, but only {_VERSION} can be read. Pack it again.")


def _checked_manifest(document: dict[str, Any]) -> Manifest:
    """Make a manifest from JSON, checking names and types: the file may come from a stranger."""
    manifest = Manifest(**{**document, "classes": tuple(document["classes"])})
    if manifest.format not in FORMATS:
        raise ValueError(f"{manifest.format!r} is not a format of packs")
    if not manifest.parts or not _PARTS.issuperset(manifest.parts):
        raise ValueError(f"{list(manifest.parts)} are not the parts of a pack")
    if not all(type(size) is int and size >= 0 for size in manifest.parts.values()):
        raise ValueError("it has no sizes of files")
    if not all(isinstance(name, str) for name in manifest.classes):
        raise ValueError("it has no names of classes")
    return manifest


@dataclass(frozen=True, eq=False)
class PartIndex:
    """The samples of one part in flat arrays of shape (n,), without a Python object per sample."""

    labels: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """Offset of the end of each sample, in bytes, when all samples lie one after the other. Equal in every format."""
    checksums: npt.NDArray[np.uint32]
    """CRC-32 of each sample."""
    names: npt.NDArray[np.bytes_]
    """Paths in the packed folder."""

    def save(self, path: Path) -> None:
        """Write the index as ``.npz``."""
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path, classes: int) -> "PartIndex":
        """Read an index.

        Args:
            path: the file.
            classes: number of classes; every label must be smaller.

        Raises:
            ArchiveError: if it is missing or damaged.
        """
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
                index = cls(**{field.name: stored[field.name] for field in fields(cls)})
            if {array.shape for array in vars(index).values()} != {(len(index.ends),)}:
                raise ValueError("its arrays do not hold one value for each sample")
            if any(array.dtype.kind not in "iu" for array in (index.labels, index.ends, index.checksums)):
                raise ValueError("its numbers are not integers")
            if np.any(np.diff(index.ends, prepend=0) < 0):
                raise ValueError("its samples overlap")
            if not np.isin(index.labels, np.arange(classes)).all():
                raise ValueError("it has labels that are not classes of the manifest")
        except Exception as error:
            raise damaged(path, error) from error
        return index


# --- readers ----------------------------------------------------------------------------------------------------------


class Reader(Protocol):
    """Reads samples in the process that made the reader, from any thread. May raise any exception."""

    def read(self, number: int) -> bytes | memoryview:
        """Return the bytes of a sample."""


class _FileReader:
    """Samples that lie one after the other in a file.

    Args:
        path: the file.
        start: offset of the first sample.
        ends: offset of the end of each sample, counted from ``start``.
        mapped: True to return views of a memory map instead of copies. That saves a third of the time for pixels,
            which are large; small samples would be read from a disk page by page.
    """

    def __init__(self, path: Path, start: int, ends: npt.NDArray[np.int64], *, mapped: bool) -> None:
        self._file = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)
        self._start = start
        self._ends = ends
        self._view: memoryview | None = None
        if mapped and len(ends):
            self._view = memoryview(mmap.mmap(self._file, 0, prot=mmap.PROT_READ))

    def read(self, number: int) -> bytes | memoryview:
        begin = self._start
        if number:
            begin += int(self._ends[number - 1])
        end = self._start + int(self._ends[number])
        if self._view is not None:
            return self._view[begin:end]
        sample = os.pread(self._file, end - begin, begin)
        if len(sample) < end - begin:
            raise ValueError("it is cut short")
        return sample


class _LmdbReader:
    """Samples in an LMDB environment, by :func:`lmdb_key`."""

    def __init__(self, folder: Path) -> None:
        self._environment = _open_environment(folder)

    def read(self, number: int) -> bytes:
        with self._environment.begin() as transaction:  # the data may be read until the transaction ends
            sample: bytes | None = transaction.get(lmdb_key(number))
        if sample is None:
            raise LookupError("it is missing")
        return sample


_environments: "WeakValueDictionary[tuple[int, int, int], Any]" = WeakValueDictionary()
"""Open LMDB environments by process id, and by device and inode of the data file."""


def lmdb_key(number: int) -> bytes:
    """Return the key of a sample: its number in 8 bytes, big-endian, so that keys sort."""
    return number.to_bytes(8, "big")


def _open_environment(folder: Path) -> Any:
    """Open an LMDB environment to read. LMDB forbids opening one twice in a process, so all readers of a pack share it.

    Raises:
        lmdb.Error: if it is damaged or truncated.
        OSError: if it does not exist.
    """
    lmdb = require("lmdb", extra="pack", why="A pack of the format lmdb")
    with _process_lock:
        status = (folder / DATA_FILES["lmdb"]).stat()
        identity = (os.getpid(), status.st_dev, status.st_ino)
        for known, environment in list(_environments.items()):
            if known[0] != identity[0]:
                environment.close()  # this process inherited it by a fork; the parent's stays open
                del _environments[known]
        if identity not in _environments:
            # No lock: no process writes. No readahead: training reads in random order. Many readers: one per thread.
            environment = lmdb.open(str(folder.resolve()), readonly=True, lock=False, readahead=False, max_readers=512)
            _environments[identity] = environment
        return _environments[identity]


def _open_reader(folder: Path, index: PartIndex, manifest: Manifest) -> Reader:
    """Open a reader for the data file of a part."""
    path = folder / DATA_FILES[manifest.format]
    if manifest.format == "lmdb":
        return _LmdbReader(folder)
    start = 0
    if manifest.format == "hdf5":
        # HDF5 locks files, and is not fork-safe, so it is used only to find where the bytes begin.
        h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
        with h5py.File(path, "r", locking=False) as opened:
            start = opened["bytes"].id.get_offset() or 0  # the offset is None if all samples are empty
    return _FileReader(path, start, index.ends, mapped=manifest.decoded)


# --- the dataset ------------------------------------------------------------------------------------------------------


class PackedDataset(Dataset[Any]):
    """Map-style dataset over the result of :func:`~lightning_feed.storage.pack`. A pickle has only its path and part.

    ``dataset[i]`` is (bytes of the file, label), or (uint8 pixels (H, W, 3), label) for a pack of pixels. Files are
    opened on the first read in each process, so fork, spawn, forkserver and threads are safe. Nothing is unpickled.

    Args:
        path: the pack.
        part: ``"train"``, ``"val"`` or ``"test"`` if the packed folder had these splits; None if the pack has one part.

    Attributes:
        classes: label names, sorted.
        labels: int64, shape (n,).

    Raises:
        ArchiveError: if ``path`` is not a pack, is damaged, or was written by another version.
        SettingsError: if the part does not exist.
        MissingExtraError: on the first read, if the library of the format is not installed.
    """

    def __init__(self, path: str | Path, part: str | None = None) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        parts = self.manifest.parts
        if part is None and len(parts) == 1:
            part = next(iter(parts))
        if part not in parts:
            raise SettingsError(f"{self.path} has no part {part!r}. Choose one of {', '.join(map(repr, parts))}.")
        self.part = part
        self.classes = self.manifest.classes
        self._folder = self.path / part
        self._index = PartIndex.load(self._folder / "index.npz", len(self.classes))
        self.labels: npt.NDArray[np.int64] = self._index.labels
        data = self._folder / DATA_FILES[self.manifest.format]
        if not data.is_file() or data.stat().st_size != parts[part]:  # reading a map beyond its file kills the process
            raise ArchiveError(f"{data} is missing, cut short or damaged. Copy or pack it again.")
        self._reader: Reader | None = None
        self._reader_of = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Encoded, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no sample {index} among {len(self)}.")
        number = index % len(self)
        return self.read(number), int(self.labels[number])

    def read(self, index: int) -> Encoded:
        """Return the bytes of sample ``index``, or its pixels if the pack holds pixels.

        Raises:
            ArchiveError: if the sample cannot be read.
        """
        try:
            sample = self._open().read(index)
            if not self.manifest.decoded:
                return sample
            return pixels_of(sample)
        except FeedError:
            raise
        except Exception as error:
            raise DamagedSampleError(
                f"{self.name(index)} cannot be read: {error}. Copy it again, or pack the source again."
            ) from error

    def verify(self, index: int) -> None:
        """Compare the checksum and the label of a sample with those recorded at packing.

        Raises:
            ArchiveError: if they differ, or if the sample cannot be read.
        """
        folder = f"{self.classes[self.labels[index]]}/"
        try:
            same = zlib.crc32(self._open().read(index)) == self._index.checksums[index]
        except FeedError:
            raise
        except Exception as error:
            raise damaged(self._folder, error) from error
        if not same or not os.fsdecode(self._index.names[index]).startswith(folder):
            raise DamagedSampleError(f"{self.name(index)} differs from the packed sample. Copy or pack it again.")

    @property
    def total_bytes(self) -> int:
        """Bytes of all samples."""
        return int(self._index.ends[-1:].sum())

    def name(self, index: int) -> str:
        """Return the name of sample ``index``: the path of the pack, then the sample's path inside the pack."""
        name = os.fsdecode(self._index.names[index])
        if self.part == ALL:
            return f"{self.path}/:{name}"
        return f"{self.path}/{self.part}:{name}"

    def _open(self) -> Reader:
        # If two threads open a reader at once, each may use its own: both work.
        if self._reader is None or self._reader_of != os.getpid():
            self._reader = _open_reader(self._folder, self._index, self.manifest)
            self._reader_of = os.getpid()
        return self._reader

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "part": self.part}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["part"])  # type: ignore[misc]  # the index is read again, not sent


def with_shape(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return pixels, uint8 (H, W, 3), as the bytes that a pack of pixels holds."""
    return np.array(pixels.shape[:2], "<u4").tobytes() + pixels.tobytes()


def pixels_of(sample: Encoded) -> npt.NDArray[np.uint8]:
    """Return the pixels, uint8 (H, W, 3), in the bytes that :func:`with_shape` returned."""
    height, width = np.frombuffer(sample, "<u4", count=2)
    pixels = np.frombuffer(sample, np.uint8, offset=_SHAPE_BYTES)
    return pixels.reshape(int(height), int(width), 3)
