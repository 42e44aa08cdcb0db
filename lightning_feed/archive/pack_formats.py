"""The three formats that a pack can have: how payloads are written, and how one is read by its number.

Files are opened in the process that reads, on the first read: neither LMDB nor HDF5 survives a fork.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt

from lightning_feed.archive import in_use
from lightning_feed.archive.pack_manifest import Format, PartIndex
from lightning_feed.errors import ArchiveError
from lightning_feed.extras import require

Write = Callable[[Path, Iterator[bytes], PartIndex, Callable[[int], None]], None]
"""(folder, payloads, their index, report of bytes written)"""
_LMDB_PAGE = 4096
_BATCH_BYTES = 64 << 20
_CHUNK_BYTES = 64 << 20


class Reader(Protocol):
    """Reads payloads of one part in this process, from any thread."""

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``."""


# --- LMDB -------------------------------------------------------------------------------------------------------------


def write_lmdb(folder: Path, payloads: Iterator[bytes], index: PartIndex, report: Callable[[int], None]) -> None:
    """One LMDB environment; keys are numbers of 8 bytes, big-endian, so that they sort."""
    lmdb = _lmdb()
    pages = int(
        ((index.sizes + 16 + _LMDB_PAGE - 1) // _LMDB_PAGE + 1).sum()
    )  # each payload in whole pages, and its key
    environment = lmdb.open(str(folder), map_size=int(pages * _LMDB_PAGE * 1.1) + (16 << 20), subdir=True, lock=False)
    transaction, waiting = environment.begin(write=True), 0
    try:
        for number, payload in enumerate(payloads):
            transaction.put(_key(number), payload, append=True)
            waiting += len(payload)
            if waiting >= _BATCH_BYTES:
                transaction.commit()
                report(waiting)
                transaction, waiting = environment.begin(write=True), 0
        transaction.commit()
        report(waiting)
        environment.sync(True)  # noqa: FBT003 - lmdb has no name for it
    finally:
        environment.close()


class LmdbReader:
    """Reads from a memory map."""

    def __init__(self, folder: Path) -> None:
        self._lmdb = _lmdb()
        self._folder = folder
        self._environment = _open_once(self._lmdb, folder)
        self._entries = self._environment.lmdb.stat()["entries"]

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``, copied out of the map: it is valid within a transaction only."""
        try:
            with self._environment.lmdb.begin(buffers=False) as transaction:
                found = transaction.get(_key(index))
        except self._lmdb.Error as error:
            raise ArchiveError(f"{self._folder} cannot be read at sample {index}: {error}.") from error
        if found is None:
            raise ArchiveError(f"{self._folder} has no sample {index} among {self._entries}. Pack the source again.")
        payload: bytes = found
        return payload


class _Environment:
    """An open environment, and the process that opened it."""

    def __init__(self, lmdb: Any) -> None:
        self.lmdb, self.pid = lmdb, os.getpid()

    def __del__(self) -> None:
        self.lmdb.close()


_environments: "WeakValueDictionary[tuple[int, int], _Environment]" = WeakValueDictionary()
"""By device and inode of the data: another pack may lie at the path by now."""


def _open_once(lmdb: Any, folder: Path) -> _Environment:
    """LMDB forbids to open an environment twice in a process; several datasets may read one pack."""
    path = os.path.realpath(folder)
    with in_use.process_lock:
        try:
            status = (folder / "data.mdb").stat()
        except OSError as error:
            raise ArchiveError(
                f"{folder / 'data.mdb'} cannot be read: {error.strerror}. Copy or pack it again."
            ) from error
        identity = (status.st_dev, status.st_ino)
        held = _environments.get(identity)
        if held is not None and held.pid == os.getpid():
            return held
        if held is not None:
            held.lmdb.close()  # inherited by a fork: closed in this process only
        try:
            # No lock: nobody writes. No readahead: training reads at random. Spare readers are for threads.
            environment = lmdb.open(path, readonly=True, lock=False, readahead=False, subdir=True, max_readers=512)
        except lmdb.Error as error:
            raise ArchiveError(
                f"{folder} cannot be read: {error}. The pack is damaged: copy it again, or pack the source again."
            ) from error
        page = environment.stat()["psize"]
        needed, there = environment.info()["last_pgno"] + 1, status.st_size // page if page else 0
        if there < needed:  # reading on would end the process with SIGBUS
            environment.close()
            raise ArchiveError(
                f"{folder / 'data.mdb'} is cut short: {there} of {needed} pages are there. Copy or pack it again."
            )
        _environments[identity] = made = _Environment(environment)
        return made


def _key(index: int) -> bytes:
    return index.to_bytes(8, "big")


def _lmdb() -> Any:
    return require("lmdb", extra="pack", why="A pack of the format lmdb")


# --- HDF5 -------------------------------------------------------------------------------------------------------------


def write_hdf5(folder: Path, payloads: Iterator[bytes], index: PartIndex, report: Callable[[int], None]) -> None:
    """``data.h5``: ``bytes``, uint8 of all payloads one after the other, and ``ends``, int64, where each ends."""
    h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
    total = int(index.sizes.sum())
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("ends", data=np.cumsum(index.sizes))
        # Contiguous and not compressed: readers take bytes from a place in the file, without the HDF5 library.
        data = file.create_dataset("bytes", shape=(max(1, total),), dtype="u1")
        at, waiting = 0, bytearray()
        for payload in payloads:
            waiting += payload
            if len(waiting) >= _BATCH_BYTES:
                data[at : at + len(waiting)] = np.frombuffer(waiting, np.uint8)
                report(len(waiting))
                at, waiting = at + len(waiting), bytearray()
        if waiting:
            data[at : at + len(waiting)] = np.frombuffer(waiting, np.uint8)
            report(len(waiting))


class Hdf5Reader:
    """Asks HDF5 once where the bytes lie in the file, and reads there: its library locks, and dislikes forks."""

    def __init__(self, folder: Path) -> None:
        h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
        path = folder / "data.h5"
        try:
            with h5py.File(path, "r", locking=False) as file:
                self._ends: npt.NDArray[np.int64] = file["ends"][:]
                self._offset: int = file["bytes"].id.get_offset() or 0  # None when all files are empty
            ends = self._ends
            if ends.dtype.kind not in "iu" or ends.ndim != 1 or (np.diff(ends, prepend=0) < 0).any():
                raise ValueError("it does not say where its samples lie")
            self._descriptor = os.open(path, os.O_RDONLY)
        except Exception as error:  # a flipped bit can make the library raise nearly anything
            raise ArchiveError(
                f"{path} cannot be read: {error}. The pack is damaged: copy it again, or pack the source again."
            ) from error
        finalize(self, os.close, self._descriptor)
        self._path = path

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``."""
        try:
            begin = int(self._ends[index - 1]) if index else 0
            size = int(self._ends[index]) - begin
            left = os.fstat(self._descriptor).st_size - self._offset - begin
            payload = os.pread(self._descriptor, min(size, max(0, left)), self._offset + begin)
        except (OSError, ValueError, OverflowError, IndexError) as error:
            raise ArchiveError(
                f"{self._path} cannot be read at sample {index}: {error}. Copy or pack it again."
            ) from error
        if len(payload) < size:
            raise ArchiveError(f"{self._path} is cut short at sample {index}. Copy or pack it again.")
        return payload


# --- LitData ----------------------------------------------------------------------------------------------------------


def write_litdata(folder: Path, payloads: Iterator[bytes], index: PartIndex, report: Callable[[int], None]) -> None:
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
            raise ArchiveError(
                f"{folder} cannot be read: {error}. The pack is damaged: copy it again, or pack the source again."
            ) from error

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``."""
        try:
            return bytes(self._dataset[index]["data"])
        except Exception as error:
            raise ArchiveError(
                f"{self._folder} cannot be read at sample {index}: {error}. Copy or pack it again."
            ) from error


def _check_litdata(path: Path) -> None:
    """Refuse an index that names other types than ours: LitData unpickles and imports what its index names."""
    try:
        config = json.loads(path.read_bytes())["config"]
        if config["data_format"] != ["bytes", "int"]:
            raise ValueError(f"its samples are of the types {config['data_format']!r}, in place of bytes and int")
        _, shape = json.loads(config["data_spec"])
        leaves = [(leaf["type"], leaf["children_spec"]) for leaf in shape["children_spec"]]
        if (shape["type"], json.loads(shape["context"]), leaves) != (
            "builtins.dict",
            ["data", "label"],
            [(None, []), (None, [])],
        ):
            raise ValueError("its samples are not dicts of data and label")
        if config.get("compression") or config.get("encryption"):
            raise ValueError("its samples are compressed or encrypted")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(
            f"{path} is not that of a pack of ours, so it is not read: {error}. Pack the source again."
        ) from error


WRITERS: dict[Format, Write] = {"lmdb": write_lmdb, "hdf5": write_hdf5, "litdata": write_litdata}
READERS: dict[Format, Callable[[Path], Reader]] = {"lmdb": LmdbReader, "hdf5": Hdf5Reader, "litdata": LitDataReader}
