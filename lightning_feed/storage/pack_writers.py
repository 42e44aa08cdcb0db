"""A pack in the making: a private, locked folder beside DEST, the data and the index of each part, and the rename."""

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from lightning_feed.errors import ArchiveError
from lightning_feed.extras import require
from lightning_feed.storage.folder import flat_names, is_pack
from lightning_feed.storage.pack_formats import Format, PartIndex, lmdb_key
from lightning_feed.storage.pack_samples import Payload, Payloads
from lightning_feed.storage.system import make_private

logger = logging.getLogger(__name__)

_LOCK = "lock"


# --- the folder beside DEST -------------------------------------------------------------------------------------------


@contextmanager
def in_the_making(target: Path) -> Iterator[Path]:
    """A folder to pack to, locked, and removed after an error. What a killed process left there is removed first.

    Raises:
        ArchiveError: when another process packs there, when the folder cannot be made or is another user's, or in
            place of any error that says that the disk is full.
    """
    partial = target.with_name(f".{target.name}.partial")
    lock = FileLock(partial / _LOCK, fallback_to_soft=False)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        make_private(partial)
    except OSError as error:
        raise ArchiveError(f"{partial} cannot be made or written to: {error.strerror}. Give another DEST.") from error
    try:
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError) as error:  # not found: renamed by the other process, which is done
        raise ArchiveError(f"Another process is packing to {target}. Wait for it, or give another DEST.") from error
    if os.path.lexists(f"{target}.partial"):
        logger.warning("%s.partial was left by an earlier version, and is not resumed. Remove it.", target)
    try:
        _put_back(target)
        _empty(partial)
        yield partial
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        _put_back(target)
        if _is_full_disk(error):
            raise ArchiveError(
                f"The disk of {target.parent} is full. Free some space there, and pack again."
            ) from error
        raise
    finally:
        lock.release()


def _is_full_disk(error: BaseException) -> bool:
    # LMDB calls it an input/output error when a write fitted in part.
    text = str(error)
    of_lmdb = text.startswith("mdb_") and "Input/output error" in text
    return of_lmdb or "No space left" in text or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def _empty(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _put_back(target: Path) -> None:
    """Put back the pack that was about to be replaced when its process ended between two renames."""
    old = _replaced(target)
    if is_pack(old) and not os.path.lexists(target):
        old.rename(target)
    elif is_pack(old):
        shutil.rmtree(old)


def finish(partial: Path, target: Path) -> None:
    """Put a pack that is whole in its place; what lay at ``target`` is removed after that."""
    if is_pack(target):
        target.rename(_replaced(target))
    partial.rename(target)
    one_part = next(entry for entry in target.iterdir() if entry.is_dir())
    target.chmod(stat.S_IMODE(one_part.stat().st_mode))  # it was made for this user alone; its parts were not
    (target / _LOCK).unlink(missing_ok=True)
    shutil.rmtree(_replaced(target), ignore_errors=True)


# --- the data and the index of a part ---------------------------------------------------------------------------------


class PartWriter:
    """The payloads of one part, and its index.

    Attributes:
        digest: of the index that was written.
        problems: of the samples that were left out.
    """

    digest = ""

    def __init__(self, folder: Path, part: Payloads, format: Format) -> None:
        self.part, self.name = part, folder.name
        self._index, self._data = folder / "index.npz", folder / "data"
        self._data.mkdir(parents=True)
        self._write = _WRITERS[format](self._data)
        self._kept, self._sizes, self._checksums, self._changed_ns = list[int](), list[int](), list[int](), list[int]()
        self.problems: list[str] = []

    @property
    def samples(self) -> int:
        """Number of samples that were kept."""
        return len(self._kept)

    @property
    def total_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(self._sizes)

    def append(self, payloads: list[Payload]) -> None:
        """Write the next samples of the source."""
        self._write.append([payload.data for payload in payloads if payload.data is not None])
        for payload in payloads:
            if payload.data is None:
                self.problems.append(payload.problem)
            else:
                self._kept.append(len(self._changed_ns))
                self._sizes.append(len(payload.data))
                self._checksums.append(payload.checksum)
            self._changed_ns.append(payload.changed_ns)

    def finish(self) -> None:
        """Write the index, and what the format still lacks."""
        names, ends = flat_names([self.part.name(number).encode("utf-8", "surrogateescape") for number in self._kept])
        index = PartIndex(
            labels=self.part.labels[self._kept],
            sizes=np.array(self._sizes, dtype=np.int64),
            checksums=np.array(self._checksums, dtype=np.uint32),
            names=names,
            name_ends=ends,
        )
        self.digest = index.save(self._index)
        self._write.finish(index)

    def files(self) -> dict[str, int]:
        """Bytes of each data file, by its path in the pack."""
        return {f"{self.name}/data/{file.name}": file.stat().st_size for file in sorted(self._data.iterdir())}

    def check_source(self) -> None:
        """Refuse samples whose files have changed since they were read: they may have been read while written.

        At the end, not after each read: what empties a file and fills it later is seen, too.
        """
        for number, changed_ns in enumerate(self._changed_ns):
            if self.part.changed_ns(number) != changed_ns:
                raise ArchiveError(
                    f"{self.part.source.name(number)} (sample {number}) changed while it was packed. Pack again when "
                    "nothing writes there."
                )


class _LmdbWriter:
    def __init__(self, folder: Path) -> None:
        lmdb = require("lmdb", extra="pack", why="Packing")
        self._environment, self._count = lmdb.open(str(folder), lock=False, readahead=False), 0  # nobody reads it yet

    def append(self, payloads: list[bytes]) -> None:
        page = self._environment.stat()["psize"]
        pages = self._environment.info()["last_pgno"] + 1 + sum(len(payload) // page + 2 for payload in payloads)
        self._environment.set_mapsize(pages * page + (16 << 20))  # LMDB keeps some pages for itself
        with self._environment.begin(write=True) as transaction:
            for number, payload in enumerate(payloads, self._count):
                transaction.put(lmdb_key(number), payload, append=True)
        self._count += len(payloads)

    def finish(self, _index: PartIndex) -> None:
        self._environment.close()


class _Hdf5Writer:
    """``data.h5``: ``bytes``, uint8 of all payloads one after the other, and ``ends``, int64, where each ends.

    HDF5 must know the size first, so the payloads are collected in a file beside it.
    """

    def __init__(self, folder: Path) -> None:
        self._h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
        self._path, self._payloads = folder / "data.h5", folder / "payloads"

    def append(self, payloads: list[bytes]) -> None:
        with self._payloads.open("ab") as file:
            file.writelines(payloads)

    def finish(self, index: PartIndex) -> None:
        with self._h5py.File(self._path, "w") as file:
            file.create_dataset("ends", data=np.cumsum(index.sizes))
            # Contiguous and not compressed: bytes are written to and read from a place in the file, not by the library.
            data = file.create_dataset("bytes", shape=(max(1, int(index.sizes.sum())),), dtype="u1")
            data[-1] = 0  # which gives it its place
            offset = data.id.get_offset()
        with self._payloads.open("rb") as payloads, self._path.open("r+b") as plain:
            plain.seek(offset)
            shutil.copyfileobj(payloads, plain, 1 << 20)
        self._payloads.unlink()


_WRITERS: dict[Format, Callable[[Path], _LmdbWriter | _Hdf5Writer]] = {"lmdb": _LmdbWriter, "hdf5": _Hdf5Writer}
