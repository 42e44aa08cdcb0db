"""The format of a pack: its manifest, the index of each part, and the three data formats LMDB, HDF5 and LitData.

Data files are opened in the process that reads, on the first read: neither LMDB nor HDF5 survives a fork.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt

from lightning_feed.archive import files
from lightning_feed.errors import ArchiveError, MissingExtraError
from lightning_feed.extras import require

NAME = "pack.json"
VERSION = 1
ALL = "all"
"""The name of the only part of a pack that has no splits."""

Format = Literal["lmdb", "hdf5", "litdata"]
FORMATS: tuple[Format, ...] = get_args(Format)
Kind = Literal["files", "decoded", "samples"]
_PARTS = {ALL, "train", "val", "test"}
_CHUNK_BYTES = 64 << 20


def _damaged(path: Path, error: Exception, index: int | None = None) -> ArchiveError:
    """The error for anything that a library raises: a flipped bit can make it raise nearly everything."""
    where = "" if index is None else f" at sample {index}"
    return ArchiveError(f"{path} cannot be read{where}: {error}. Copy it again, or pack the source again.")


# --- manifest and index -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a pack is. Written last: a folder without it is no pack."""

    format: Format
    kind: Kind
    """Encoded files as they are or re-encoded; decoded pixels; or samples of a dataset."""
    classes: tuple[str, ...]
    """Names of the labels; empty for samples of a dataset."""
    parts: dict[str, int]
    """Samples of each part: ``train``, ``val`` ..., or ``all``."""
    total_bytes: int
    options: dict[str, Any]
    """What was asked for: ``short_side``, ``quality``."""
    files: dict[str, int]
    """Bytes of each data file, by its path in the pack."""
    version: int = VERSION
    indexes: dict[str, str] = field(default_factory=dict)
    """The digest of each part's index, which holds the checksums of all samples; none in packs of earlier versions."""

    @property
    def checksum(self) -> str:
        """A digest of the whole manifest."""
        return digest_of(json.dumps(asdict(self), sort_keys=True).encode())

    @property
    def identity(self) -> str:
        """A digest that is the same for the same data, and another for any other."""
        about = asdict(self)
        if self.indexes:
            del about["files"]  # a pack that was interrupted takes some pages more
        return digest_of(json.dumps(about, sort_keys=True).encode())

    def save(self, folder: Path) -> None:
        """Write it, atomically."""
        temporary = folder / f"{NAME}.tmp"
        temporary.write_text(json.dumps({**asdict(self), "checksum": self.checksum}, indent=1))
        temporary.replace(folder / NAME)


def is_pack(path: str | Path) -> bool:
    """Whether ``path`` is a pack. Looks for one file."""
    return os.path.isfile(os.path.join(path, NAME))  # noqa: PTH113, PTH118 - False, too, where it cannot be looked for


def read_manifest(path: Path) -> Manifest:
    """The manifest of a pack.

    Raises:
        ArchiveError: when there is none, it is damaged, or another version wrote it.
    """
    if not is_pack(path):
        raise ArchiveError(f"{path} is no pack: it has no {NAME}. To make one: lightning-feed pack SRC DEST")
    try:
        found = json.loads((path / NAME).read_text())
        version = found["version"]
        if version == VERSION:
            return _manifest_of(found)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path / NAME, error) from error
    raise ArchiveError(
        f"{path} is a pack of version {version!r}, and this lightning_feed reads version {VERSION}. Pack the source "
        "again, or read it with the version that wrote it."
    )


def _manifest_of(found: dict[str, Any]) -> Manifest:
    """A manifest out of JSON, if it has the names and types of one: a stranger may have written it."""
    checksum = found.pop("checksum", None)
    manifest = Manifest(**found)
    tables = (manifest.parts, manifest.files, manifest.options, manifest.indexes)
    sound = (
        all(isinstance(table, dict) for table in tables)
        and manifest.format in FORMATS
        and manifest.kind in get_args(Kind)
        and isinstance(manifest.classes, list)
        and all(isinstance(name, str) for name in manifest.classes)
        and bool(manifest.parts)
        and _PARTS.issuperset(manifest.parts)
        and all(
            type(number) is int and number >= 0
            for number in (*manifest.parts.values(), *manifest.files.values(), manifest.total_bytes)
        )
    )
    if not sound:
        raise ValueError("it is not the manifest of a pack")
    manifest = replace(manifest, classes=tuple(manifest.classes))
    if checksum != manifest.checksum and (checksum is not None or manifest.indexes):  # earlier versions wrote neither
        raise ValueError("its checksum does not fit")
    return manifest


def check_files(path: Path, manifest: Manifest, part: str) -> None:
    """See whether the data files of a part are there and as long as they were.

    Raises:
        ArchiveError: for the first that is not.
    """
    for name, size in manifest.files.items():
        file = path / name
        if name.startswith(f"{part}/") and not (file.is_file() and file.stat().st_size == size):
            raise ArchiveError(
                f"{file} is missing, cut short or damaged: {size} bytes were packed. Copy or pack it again."
            )


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
        """What sample ``index`` was called in the source."""
        begin = int(self.name_ends[index - 1]) if index else 0
        return self.names[begin : int(self.name_ends[index])].tobytes().decode("utf-8", "surrogateescape")

    def save(self, path: Path) -> str:
        """Write it as ``.npz``, and return its digest."""
        content = io.BytesIO()
        np.savez(content, **{each.name: getattr(self, each.name) for each in fields(self)})
        path.write_bytes(content.getvalue())
        return digest_of(content.getvalue())

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
            if digest is not None and digest_of(content) != digest:
                raise ValueError("it is not the one that was written with the pack")
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                read = cls(**{each.name: stored[each.name] for each in fields(cls)})
            numbers = (read.labels, read.checksums, read.name_ends, read.sizes)
            if any(array.dtype.kind not in "iu" or array.shape != (len(read.sizes),) for array in numbers):
                raise ValueError(f"its arrays are not one integer for each of {len(read.sizes)} samples")
            return read
        except Exception as error:
            raise _damaged(path, error) from error


def digest_of(content: bytes) -> str:
    """What tells some content from any other."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Reader(Protocol):
    """Reads payloads of one part in this process, from any thread."""

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``."""


# --- LMDB -------------------------------------------------------------------------------------------------------------

_environments: "WeakValueDictionary[tuple[int, int, int], Any]" = WeakValueDictionary()
"""Those that are read, by process, device and inode of the data: another pack may lie at the path by now."""


def lmdb_key(number: int) -> bytes:
    """The key of a sample: its number in 8 bytes, big-endian, so that keys sort."""
    return number.to_bytes(8, "big")


def open_lmdb(folder: Path, *, write: bool = False) -> Any:
    """Open an LMDB environment to read, or to write, made if there is none.

    LMDB forbids to open one twice in a process, so those that read one file share it.

    Raises:
        lmdb.Error: when it is damaged or cut short.
        OSError: when there is none, or it cannot be written.
    """
    lmdb = require("lmdb", extra="pack", why="Packing" if write else "A pack of the format lmdb")
    data = folder / "data.mdb"
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        data.touch()
    with files.process_lock:
        status = data.stat()
        identity = (os.getpid(), status.st_dev, status.st_ino)
        for known, environment in list(_environments.items()):
            if known[0] != identity[0] or (write and known == identity):
                environment.close()  # inherited by a fork, and closed in this process only; or a reader in the way
                del _environments[known]
        if identity in _environments:
            return _environments[identity]
        # No lock: nobody else writes. No readahead: training reads at random. Spare readers are for threads.
        environment = lmdb.open(
            os.path.realpath(folder), readonly=not write, lock=False, readahead=False, max_readers=512
        )
        page = environment.stat()["psize"]
        needed, there = environment.info()["last_pgno"] + 1, data.stat().st_size // page if page else 0
        if there < needed:  # reading on would end the process with SIGBUS
            environment.close()
            raise lmdb.CorruptedError(f"it is cut short: {there} of {needed} pages are there")
        if not write:
            _environments[identity] = environment
        return environment


class LmdbReader:
    """Reads from a memory map."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._environment = open_lmdb(folder)
        except MissingExtraError:
            raise
        except Exception as error:
            raise _damaged(folder, error) from error

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``, copied out of the map: it is valid within a transaction only."""
        try:
            with self._environment.begin() as transaction:
                found: bytes | None = transaction.get(lmdb_key(index))
            if found is None:
                raise LookupError("it is not there")
        except Exception as error:
            raise _damaged(self._folder, error, index) from error
        return found


# --- HDF5 -------------------------------------------------------------------------------------------------------------


def write_hdf5(folder: Path, payloads: Iterator[bytes], index: PartIndex, report: Callable[[int], object]) -> None:
    """``data.h5``: ``bytes``, uint8 of all payloads one after the other, and ``ends``, int64, where each ends."""
    h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("ends", data=np.cumsum(index.sizes))
        # Contiguous and not compressed: bytes are written to and read from a place in the file, without the library.
        data = file.create_dataset("bytes", shape=(max(1, int(index.sizes.sum())),), dtype="u1")
        data[-1] = 0  # which gives it its place
        offset = data.id.get_offset()
    with (folder / "data.h5").open("r+b") as plain:
        plain.seek(offset)
        for payload in payloads:
            plain.write(payload)
            report(len(payload))


class Hdf5Reader:
    """Asks HDF5 once where the bytes lie in the file, and reads there: its library locks, and dislikes forks."""

    def __init__(self, folder: Path) -> None:
        h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
        self._path = folder / "data.h5"
        try:
            with h5py.File(self._path, "r", locking=False) as file:
                self._ends: npt.NDArray[np.int64] = file["ends"][:]
                self._offset: int = file["bytes"].id.get_offset() or 0  # None when all files are empty
            ends = self._ends
            if ends.dtype.kind not in "iu" or ends.ndim != 1 or (np.diff(ends, prepend=0) < 0).any():
                raise ValueError("it does not say where its samples lie")
            self._descriptor = os.open(self._path, os.O_RDONLY)
        except Exception as error:
            raise _damaged(self._path, error) from error
        finalize(self, os.close, self._descriptor)

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``."""
        try:
            begin = int(self._ends[index - 1]) if index else 0
            size = int(self._ends[index]) - begin
            left = os.fstat(self._descriptor).st_size - self._offset - begin
            payload = os.pread(self._descriptor, min(size, max(0, left)), self._offset + begin)
            if len(payload) < size:
                raise ValueError("it is cut short")
        except (OSError, ValueError, OverflowError, IndexError) as error:
            raise _damaged(self._path, error, index) from error
        return payload


# --- LitData ----------------------------------------------------------------------------------------------------------


def write_litdata(folder: Path, payloads: Iterator[bytes], index: PartIndex, report: Callable[[int], object]) -> None:
    """Chunks as ``litdata.StreamingDataset`` reads them, from object stores too.

    A sample is ``{"data": bytes, "label": int}``: such a reader has no index to look the label up in.
    """
    litdata = require("litdata", extra="litdata", why="A pack of the format litdata")
    cache = litdata.streaming.Cache(str(folder), chunk_bytes=_CHUNK_BYTES)
    for number, payload in enumerate(payloads):
        cache[number] = {"data": payload, "label": int(index.labels[number])}
        report(len(payload))
    cache.done()
    cache.merge()


class LitDataReader:
    """Reads through LitData's own dataset."""

    def __init__(self, folder: Path) -> None:
        litdata = require("litdata", extra="litdata", why="A pack of the format litdata")
        self._folder = folder
        _check_litdata(folder / "index.json")
        try:
            self._dataset = litdata.StreamingDataset(str(folder))
        except Exception as error:
            raise _damaged(folder, error) from error

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``."""
        try:
            return bytes(self._dataset[index]["data"])
        except Exception as error:
            raise _damaged(self._folder, error, index) from error


def _check_litdata(path: Path) -> None:
    """Refuse an index that names other types than ours: LitData unpickles and imports what its index names."""
    try:
        config = json.loads(path.read_bytes())["config"]
        if config["data_format"] != ["bytes", "int"]:
            raise ValueError(f"its samples are of the types {config['data_format']!r}, in place of bytes and int")
        _, shape = json.loads(config["data_spec"])
        leaves = [(leaf["type"], leaf["children_spec"]) for leaf in shape["children_spec"]]
        found = (shape["type"], json.loads(shape["context"]), leaves)
        if found != ("builtins.dict", ["data", "label"], [(None, []), (None, [])]):
            raise ValueError("its samples are not dicts of data and label")
        if config.get("compression") or config.get("encryption"):
            raise ValueError("its samples are compressed or encrypted")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(
            f"{path} is not that of a pack of ours, so it is not read: {error}. Pack the source again."
        ) from error


READERS: dict[Format, Callable[[Path], Reader]] = {"lmdb": LmdbReader, "hdf5": Hdf5Reader, "litdata": LitDataReader}
