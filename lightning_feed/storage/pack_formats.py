"""The format of a pack: its manifest, the index of each part, and readers of LMDB and HDF5.

Data files are opened in the process that reads, on the first read: neither LMDB nor HDF5 survives a fork.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt

from lightning_feed.errors import ArchiveError
from lightning_feed.extras import require
from lightning_feed.storage import system
from lightning_feed.storage.folder import MANIFEST, is_pack, nth_name

ALL = "all"
"""The name of the only part of a pack that has no splits."""

Format = Literal["lmdb", "hdf5"]
FORMATS: tuple[Format, ...] = get_args(Format)
_VERSION = 1
_PARTS = {ALL, "train", "val", "test"}


def damaged(path: Path, error: Exception, index: int | None = None) -> ArchiveError:
    """The error for anything that a library raises: a flipped bit can make it raise nearly everything."""
    where = "" if index is None else f" at sample {index}"
    return ArchiveError(f"{path} cannot be read{where}: {error}. Copy it again, or pack the source again.")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# --- manifest and index -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a pack. Written last: a folder without it is no pack."""

    format: Format
    kind: Literal["files", "decoded", "samples"]
    """Encoded files as they are or re-encoded; decoded pixels; or samples of a dataset."""
    classes: tuple[str, ...]
    """Names of the labels; empty for samples of a dataset."""
    parts: dict[str, int]
    """Samples of each part: ``train``, ``val`` ..., or ``all``."""
    total_bytes: int
    options: dict[str, Any]
    """The options it was made with: ``short_side``, ``quality``."""
    files: dict[str, int]
    """Bytes of each data file, by its path in the pack."""
    version: int = _VERSION
    indexes: dict[str, str] = field(default_factory=dict)
    """The digest of each part's index, which holds the checksums of all samples; none in packs of earlier versions."""

    def checksum(self, *without: str) -> str:
        """A digest of the manifest, but for some of its fields."""
        about = {name: value for name, value in asdict(self).items() if name not in without}
        return _digest(json.dumps(about, sort_keys=True).encode())

    @property
    def identity(self) -> str:
        """A digest that is the same for the same data, and another for any other."""
        return self.checksum("files") if self.indexes else self.checksum()  # one that was resumed had more pages

    def save(self, folder: Path) -> None:
        """Write it, atomically."""
        with system.atomic_write(folder / MANIFEST) as file:
            file.write(json.dumps({**asdict(self), "checksum": self.checksum()}, indent=1).encode())


def read_manifest(path: Path) -> Manifest:
    """The manifest of a pack.

    Raises:
        ArchiveError: when there is none, it is damaged, or another version wrote it.
    """
    if not is_pack(path):
        raise ArchiveError(f"{path} is no pack: it has no {MANIFEST}. To make one: lightning-feed pack SRC DEST")
    try:
        found = json.loads((path / MANIFEST).read_text())
        version, format = found["version"], found.get("format")
        if version == _VERSION and format != "litdata":
            return _manifest_of(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path / MANIFEST, error) from error
    if format == "litdata":
        raise ArchiveError(
            f"{path} is a LitData pack of an earlier version. Read {path}/PART/data with litdata.StreamingDataset, "
            "whose loader is measured as any, or pack the source again."
        )
    raise ArchiveError(f"{path} is a pack of version {version!r}, and only {_VERSION} can be read. Pack it again.")


def _manifest_of(classes: list[str], checksum: str | None = None, **found: Any) -> Manifest:
    """A manifest out of JSON, if it has the names and types of one: a stranger may have written it."""
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
    if checksum != manifest.checksum() and (checksum is not None or manifest.indexes):  # earlier versions wrote neither
        raise ValueError("its checksum does not fit")
    return manifest


@dataclass(frozen=True, eq=False)
class PartIndex:
    """The samples of one part, in flat arrays: a million of them cost no Python objects."""

    labels: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    """Bytes of each payload."""
    checksums: npt.NDArray[np.uint32]
    """CRC-32 of each payload."""
    names: npt.NDArray[np.uint8]
    """All names, one after the other, in UTF-8 (undecodable bytes as they were)."""
    name_ends: npt.NDArray[np.int64]

    def name(self, index: int) -> str:
        """The name of sample ``index`` in the source."""
        return nth_name(self.names, self.name_ends, index).decode("utf-8", "surrogateescape")

    def save(self, path: Path) -> str:
        """Write it as ``.npz``, and return its digest."""
        content = io.BytesIO()
        np.savez(content, **{each.name: getattr(self, each.name) for each in fields(self)})
        path.write_bytes(content.getvalue())
        return _digest(content.getvalue())

    @classmethod
    def load(cls, path: Path, digest: str | None = None) -> "PartIndex":
        """Read it.

        Args:
            path: the file.
            digest: what :meth:`save` returned; None where that is not known.

        Raises:
            ArchiveError: when it is missing or damaged, or the labels are no integers.
        """
        try:
            content = path.read_bytes()
            if digest is not None and _digest(content) != digest:
                raise ValueError("it is not the one that was written with the pack")
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                read = cls(**{each.name: stored[each.name] for each in fields(cls)})
            numbers = (read.labels, read.checksums, read.name_ends, read.sizes)
            if any(array.dtype.kind not in "iu" or array.shape != (len(read.sizes),) for array in numbers):
                raise ValueError(f"its arrays are not one integer for each of {len(read.sizes)} samples")
            return read
        except Exception as error:
            raise damaged(path, error) from error


# --- readers ----------------------------------------------------------------------------------------------------------

Read = Callable[[int], bytes]
"""Reads the payload of a sample in this process, from any thread; raises anything."""
_environments: "WeakValueDictionary[tuple[int, int, int], Any]" = WeakValueDictionary()
"""Those that are read, by process, device and inode of the data: another pack may lie at the path by now."""


def lmdb_key(number: int) -> bytes:
    """The key of a sample: its number in 8 bytes, big-endian, so that keys sort."""
    return number.to_bytes(8, "big")


def open_lmdb(folder: Path) -> Any:
    """Open an LMDB environment to read. LMDB forbids to open one twice in a process, so those that read one share it.

    Raises:
        lmdb.Error: when it is damaged or cut short.
        OSError: when there is none.
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
        # No lock: nobody writes. No readahead: training reads at random. Spare readers are for threads.
        environment = lmdb.open(os.path.realpath(folder), readonly=True, lock=False, readahead=False, max_readers=512)
        page = environment.stat()["psize"]
        needed, there = environment.info()["last_pgno"] + 1, status.st_size // page if page else 0
        if there < needed:  # reading on would end the process with SIGBUS
            environment.close()
            raise lmdb.CorruptedError(f"it is cut short: {there} of {needed} pages are there")
        _environments[identity] = environment
        return environment


def _open_lmdb(folder: Path, _index: PartIndex) -> Read:
    environment = open_lmdb(folder)

    def read(number: int) -> bytes:
        with environment.begin() as transaction:  # which the map is valid in
            found: bytes | None = transaction.get(lmdb_key(number))
        if found is None:
            raise LookupError("it is not there")
        return found

    return read


def _open_hdf5(folder: Path, index: PartIndex) -> Read:
    """Ask HDF5 once where the bytes lie in the file, and read there: its library locks, and dislikes forks."""
    h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
    path, ends = folder / "data.h5", np.cumsum(index.sizes)
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
