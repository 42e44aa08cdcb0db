"""PackedDataset, and the pack format: its manifest, the index of each part, and readers of LMDB and HDF5.

Data files are opened on the first read in the process that reads: neither LMDB nor HDF5 survives a fork.
"""

import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lightning_feed.errors import ArchiveError, DatasetError, FeedError, SettingsError
from lightning_feed.extras import require
from lightning_feed.storage import system
from lightning_feed.storage.folder import MANIFEST, Encoded, is_pack, nth_name
from lightning_feed.storage.pack_samples import from_bytes, pixels_of
from lightning_feed.storage.remote import RemotePlace, place_of

ALL = "all"
"""Name of the only part of a pack without splits."""

Format = Literal["lmdb", "hdf5"]
FORMATS: tuple[Format, ...] = get_args(Format)
_VERSION = 1
_PARTS = {ALL, "train", "val", "test"}


def damaged(path: Path, error: Exception, index: int | None = None) -> ArchiveError:
    """Return the error for any exception of a library. A flipped bit can raise nearly anything."""
    where = "" if index is None else f" at sample {index}"
    return ArchiveError(f"{path} cannot be read{where}: {error}. Copy it again, or pack the source again.")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# --- manifest and index -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a pack. Written last: a folder without a manifest is not a pack."""

    format: Format
    kind: Literal["files", "decoded", "samples"]
    """``"files"``: encoded files, unchanged or re-encoded. ``"decoded"``: pixels. ``"samples"``: dataset samples."""
    classes: tuple[str, ...]
    """Label names; empty for samples of a dataset."""
    parts: dict[str, int]
    """Number of samples by part: ``train``, ``val`` ..., or ``all``."""
    total_bytes: int
    options: dict[str, object]
    """Options of the packing: ``short_side``, ``quality``."""
    files: dict[str, int]
    """Size in bytes of each data file, by its path in the pack."""
    version: int = _VERSION
    indexes: dict[str, str] = field(default_factory=dict)
    """Digest of each part's index, which holds the checksums of all samples; empty in packs of earlier versions."""

    def checksum(self, *without: str) -> str:
        """Return a digest of the manifest without the named fields."""
        about = {name: value for name, value in asdict(self).items() if name not in without}
        return _digest(json.dumps(about, sort_keys=True).encode())

    @property
    def identity(self) -> str:
        """Digest of the data: equal only for equal data."""
        # File sizes are left out: earlier versions could resume a pack, which added pages to the file for equal data.
        return self.checksum("files") if self.indexes else self.checksum()

    def save(self, folder: Path) -> None:
        """Write the manifest atomically."""
        with system.atomic_write(folder / MANIFEST) as file:
            file.write(json.dumps({**asdict(self), "checksum": self.checksum()}, indent=1).encode())


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a pack.

    Raises:
        ArchiveError: if it is missing, damaged, or was written by another version.
    """
    if not is_pack(path):
        raise ArchiveError(f"{path} is not a pack: it has no {MANIFEST}. To make one: lightning-feed pack SRC DEST")
    try:
        found = json.loads((path / MANIFEST).read_text())
        version = found["version"]
        format = found.get("format")
        if version == _VERSION and format != "litdata":
            return _manifest_of(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path / MANIFEST, error) from error
    if format == "litdata":
        raise ArchiveError(
            f"{path} is a LitData pack of an earlier version. Read {path}/PART/data with litdata.StreamingDataset, "
            "whose loader is measured like any other, or pack the source again."
        )
    raise ArchiveError(f"{path} is a pack of version {version!r}, but only {_VERSION} can be read. Pack it again.")


def _manifest_of(classes: list[str], checksum: str | None = None, **found: Any) -> Manifest:
    """Make a manifest from JSON, checking names and types: the file may come from a stranger."""
    manifest = Manifest(classes=tuple(classes), **found)
    numbers = [*manifest.parts.values(), *manifest.files.values(), manifest.total_bytes]
    sound = (
        manifest.format in FORMATS,
        manifest.kind in ("files", "decoded", "samples"),
        isinstance(classes, list),
        {type(name) for name in classes} <= {str},
        bool(manifest.parts),
        _PARTS.issuperset(manifest.parts),
        {type(number) for number in numbers} == {int},
    )
    if not all(sound) or min(numbers) < 0:
        raise ValueError("it is not the manifest of a pack")
    if checksum != manifest.checksum() and (checksum is not None or manifest.indexes):  # earlier versions have neither
        raise ValueError("its checksum does not match")
    return manifest


@dataclass(frozen=True, eq=False)
class PartIndex:
    """The samples of one part in flat arrays, without a Python object per sample."""

    labels: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    """Bytes of each payload."""
    checksums: npt.NDArray[np.uint32]
    """CRC-32 of each payload."""
    names: npt.NDArray[np.uint8]
    """All names, concatenated, in UTF-8 (undecodable bytes are kept)."""
    name_ends: npt.NDArray[np.int64]

    def name(self, index: int) -> str:
        """Return the name of sample ``index`` in the source."""
        return nth_name(self.names, self.name_ends, index).decode("utf-8", "surrogateescape")

    def save(self, path: Path) -> str:
        """Write the index as ``.npz``, and return its digest."""
        content = io.BytesIO()
        np.savez(content, **vars(self))
        path.write_bytes(content.getvalue())
        return _digest(content.getvalue())

    @classmethod
    def load(cls, path: Path, digest: str | None = None) -> "PartIndex":
        """Read an index.

        Args:
            path: the file.
            digest: the digest from :meth:`save`; None if unknown.

        Raises:
            ArchiveError: if it is missing or damaged, or an array other than ``names`` does not hold one integer for
                each sample.
        """
        try:
            content = path.read_bytes()
            if digest is not None and _digest(content) != digest:
                raise ValueError("it was not written with this pack")
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                read = cls(**{each.name: stored[each.name] for each in fields(cls)})
            numbers = (read.labels, read.checksums, read.name_ends, read.sizes)
            if any(array.dtype.kind not in "iu" or array.shape != (len(read.sizes),) for array in numbers):
                raise ValueError(f"its arrays do not hold one integer for each of {len(read.sizes)} samples")
            return read
        except Exception as error:
            raise damaged(path, error) from error


# --- readers ----------------------------------------------------------------------------------------------------------

Read = Callable[[int], bytes]
"""Reads a sample's payload in this process, from any thread; may raise any exception."""
_environments: "WeakValueDictionary[tuple[int, int, int], Any]" = WeakValueDictionary()
"""Open LMDB environments by process id, and by device and inode of the data file. Not by path, because another pack may
have replaced the one at that path."""


def lmdb_key(number: int) -> bytes:
    """Return the key of a sample: its number in 8 bytes, big-endian, so that keys sort."""
    return number.to_bytes(8, "big")


def open_lmdb(folder: Path) -> Any:
    """Open an LMDB environment to read. LMDB forbids opening one twice in a process, so all readers of a pack share it.

    Raises:
        lmdb.Error: if it is damaged or truncated.
        OSError: if it does not exist.
    """
    lmdb = require("lmdb", extra="pack", why="A pack of the format lmdb")
    with system.process_lock:
        status = (folder / "data.mdb").stat()
        identity = (os.getpid(), status.st_dev, status.st_ino)
        for known, environment in list(_environments.items()):
            if known[0] != identity[0]:
                environment.close()  # inherited by a fork, and closed in this process only
                del _environments[known]
        if identity in _environments:
            return _environments[identity]
        # No lock: nobody writes. No readahead: training reads at random. Extra readers are for threads.
        environment = lmdb.open(os.path.realpath(folder), readonly=True, lock=False, readahead=False, max_readers=512)
        page = environment.stat()["psize"]
        needed = environment.info()["last_pgno"] + 1
        there = status.st_size // page if page else 0
        if there < needed:  # reading further would end the process with SIGBUS
            environment.close()
            raise lmdb.CorruptedError(f"it is cut short: only {there} of {needed} pages are present")
        _environments[identity] = environment
        return environment


def _open_lmdb(folder: Path, _index: PartIndex) -> Read:
    environment = open_lmdb(folder)

    def read(number: int) -> bytes:
        with environment.begin() as transaction:  # the map is valid until its end
            found: bytes | None = transaction.get(lmdb_key(number))
        if found is None:
            raise LookupError("it is missing")
        return found

    return read


def _open_hdf5(folder: Path, index: PartIndex) -> Read:
    """Get the offset of the bytes from HDF5 once, then read the file directly: HDF5 locks, and is not fork-safe."""
    h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
    path = folder / "data.h5"
    ends = np.cumsum(index.sizes)
    with h5py.File(path, "r", locking=False) as opened:
        offset = opened["bytes"].id.get_offset() or 0  # None when all files are empty
    file = os.open(path, os.O_RDONLY)

    def read(number: int) -> bytes:
        size = int(index.sizes[number])
        payload = os.pread(file, size, offset + int(ends[number]) - size)
        if len(payload) < size:
            raise ValueError("it is cut short")
        return payload

    finalize(read, os.close, file)
    return read


READERS: dict[Format, Callable[[Path, PartIndex], Read]] = {"lmdb": _open_lmdb, "hdf5": _open_hdf5}


# --- the dataset ------------------------------------------------------------------------------------------------------


class DamagedSampleError(ArchiveError, DatasetError):
    """A sample that differs from the packed one. Also a DatasetError, so ``on_error`` may skip it."""


class PackedDataset(Dataset[Any]):
    """Map-style dataset over the result of :func:`~lightning_feed.storage.pack`. Pickling it sends only the path.

    ``dataset[i]`` is (bytes of the file, label) for a packed folder, (uint8 pixels (H, W, 3), label) for a folder
    packed with ``decoded=True``, and the sample itself for a packed dataset. Files are opened on the first read in each
    process, so fork, spawn, forkserver and threads are safe. Nothing is unpickled. Each process compares a sample's
    checksum when it first reads the sample.

    Args:
        path: the pack. A pack at a URL must be staged first.
        part: ``"train"``, ``"val"`` or ``"test"`` if the packed folder had these splits; None if the pack has one part.
        storage_options: fsspec options of a URL. Of no use yet: URLs are refused, and so are options for a path.

    Attributes:
        classes: label names, sorted; empty for a packed dataset.
        labels: int64, shape (n,).

    Raises:
        ArchiveError: if it is not a pack, is damaged, or was written by another version.
        SettingsError: if the part does not exist, or for a URL or ``storage_options``.
        MissingExtraError: on the first read, if the library of the format is not installed.
    """

    def __init__(
        self, path: str | Path, part: str | None = None, *, storage_options: Mapping[str, object] | None = None
    ) -> None:
        place = place_of(path, storage_options)
        if isinstance(place, RemotePlace):
            raise remote_pack_error(place)
        self.path = place
        self.manifest = read_manifest(self.path)
        parts = self.manifest.parts
        self.part = next(iter(parts)) if part is None and len(parts) == 1 else str(part)
        if self.part not in parts:
            raise SettingsError(f"{self.path} has no part {part!r}. Choose one of {', '.join(map(repr, parts))}.")
        self.index = PartIndex.load(self.path / self.part / "index.npz", self.manifest.indexes.get(self.part))
        self.classes = self.manifest.classes
        self.labels: npt.NDArray[np.int64] = self.index.labels
        known = self.manifest.kind == "samples" or np.isin(self.labels, np.arange(len(self.classes))).all()
        if len(self) != parts[self.part] or not known:
            raise ArchiveError(f"{self.path}/{self.part} does not match its index. Copy or pack it again.")
        self._check_files()
        self._identity = self.manifest.identity
        self._checked = np.zeros(len(self), bool)
        self._opened: tuple[int, Read] | None = None

    @staticmethod
    def manifest_of(path: str | Path) -> Manifest:
        """Return the manifest of a pack, without opening its data."""
        return read_manifest(Path(path))

    def __len__(self) -> int:
        return len(self.index.sizes)

    def __getitem__(self, index: int) -> Any:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"There is no sample {index} among {len(self)}.")
        if self.manifest.kind == "samples":
            return from_bytes(self.payload(place))
        return self.read(place), int(self.index.labels[place])

    def read(self, index: int) -> Encoded:
        """Return the bytes of file ``index``, or its pixels if the pack holds pixels.

        Raises:
            ArchiveError: if they cannot be read.
        """
        payload = self.payload(index)
        if self.manifest.kind != "decoded":
            return payload
        try:
            return pixels_of(payload)
        except ValueError as error:
            raise DamagedSampleError(f"{self.name(index)} does not hold pixels: {error}. Pack it again.") from error

    def payload(self, index: int) -> bytes:
        """Return the raw payload of sample ``index``.

        Raises:
            ArchiveError: if it cannot be read or differs from the packed one, or if another pack replaced this one.
        """
        read = self._reader()
        try:
            payload = read(index)
        except Exception as error:
            raise damaged(self.path, error, index) from error
        if not self._checked[index]:
            if zlib.crc32(payload) != self.index.checksums[index]:
                raise DamagedSampleError(f"{self.name(index)} differs from the packed sample. Copy or pack it again.")
            self._checked[index] = True
        return payload

    def name(self, index: int) -> str:
        """Return the name of sample ``index``, prefixed with the pack."""
        return f"{self.path}/{self.part if self.part != ALL else ''}:{self.index.name(index)}"

    def _reader(self) -> Read:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            with system.process_lock:  # renewed after a fork
                opened = self._opened
                if opened is None or opened[0] != os.getpid():
                    self._opened = opened = (os.getpid(), self._open())
        return opened[1]

    def _open(self) -> Read:
        data = self.path / self.part / "data"
        try:
            read = READERS[self.manifest.format](data, self.index)
        except FeedError:
            raise
        except Exception as error:
            raise damaged(data, error) from error
        # Checked after opening the data: if another pack replaced this one before, its manifest is in place by now.
        if read_manifest(self.path).identity != self._identity:
            raise ArchiveError(f"{self.path} was replaced during this run. Start the run again.")
        self._check_files()
        self._checked[:] = False
        return read

    def _check_files(self) -> None:
        """Check that the data files exist with their original sizes."""
        for name, size in self.manifest.files.items():
            file = self.path / name
            if name.startswith(f"{self.part}/") and not (file.is_file() and file.stat().st_size == size):
                raise ArchiveError(f"{file} is missing, cut short or damaged. Copy or pack it again.")

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "part": self.part, "identity": self._identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["part"])  # type: ignore[misc]  # the index is read again, not sent
        self._identity = state["identity"]  # compared when the data is opened


def remote_pack_error(place: RemotePlace) -> SettingsError:
    """Return the error for a pack at a URL."""
    return SettingsError(
        f"{place} is a URL, but packs are read from this machine. Stage it first: lightning-feed stage {place} FOLDER, "
        "or the stage_to of a data module, without stage_limit."
    )
