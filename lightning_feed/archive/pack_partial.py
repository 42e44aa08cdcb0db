"""A pack in the making: private and locked, resumable for the same plan, and renamed when it is whole.

Samples go straight into LMDB transactions. A journal beside them has a line for each sample of the source, written
after the transaction that holds its payload is on the disk; a call that was broken off is resumed after its last line.
A pack of another format is written from there at the end.
"""

import ctypes
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from lightning_feed.archive.folder import FolderSource, is_pack
from lightning_feed.archive.pack_formats import Format, PartIndex, lmdb_key, open_lmdb
from lightning_feed.archive.pack_samples import Payload, Payloads
from lightning_feed.archive.system import progress_bar
from lightning_feed.errors import ArchiveError
from lightning_feed.extras import require

logger = logging.getLogger(__name__)

_PLAN = "plan.json"
_LOCK = "lock"
_REPLACED = "replaced"
"""A pack that was replaced, until it is removed."""
_CHUNK_BYTES = 64 << 20
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


@contextmanager
def alone_in(partial: Path) -> Iterator[None]:
    """Hold the lock of a pack in the making. The system drops it when the process ends, however it ends.

    Raises:
        ArchiveError: when another process holds it, when another user could change what is packed, or in place of any
            error that says that the disk is full.
    """
    lock = FileLock(partial / _LOCK, fallback_to_soft=False)
    try:
        _make_private(partial)
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError) as error:  # not found: renamed by the other process, which is done
        raise ArchiveError(f"Another process is packing to {partial}. Wait for it, or give another DEST.") from error
    try:
        yield
    except Exception as error:
        text = str(error)
        # LMDB calls it an input/output error when a write fitted in part.
        full = "No space left" in text or (text.startswith("mdb_") and "Input/output error" in text)
        if not full and getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ArchiveError(
            f"The disk of {partial.parent} is full. What is packed so far is kept in {partial}: free some space there "
            f"and pack to {partial.with_suffix('')} again, which resumes it. To give up, remove that folder."
        ) from error
    finally:
        if partial.is_dir() and [entry.name for entry in partial.iterdir()] == [_LOCK]:
            shutil.rmtree(partial)
        lock.release()


def _make_private(partial: Path) -> None:
    """Make the folder, or take it if it is this user's, and let nobody else write to it.

    What others left there while they could write is refused: a link would have another file overwritten.
    """
    try:
        partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=partial) as probe:
            mine = os.fstat(probe.fileno()).st_uid  # root is another user on some network file systems
    except OSError as error:
        raise ArchiveError(f"{partial} cannot be made or written to: {error.strerror}. Give another DEST.") from error
    for path in chain((partial,), partial.rglob("*")):
        status = path.lstat()
        single = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
        if status.st_uid != mine or not single:
            raise ArchiveError(f"{path} is a link, or another user's. Remove it, or give another DEST.")
        if path == partial and status.st_mode & 0o077:
            with suppress(OSError):  # a file system without modes
                partial.chmod(status.st_mode & 0o7700)


def begin_or_resume(partial: Path, plan: str) -> None:
    """Keep what is there if it is of the same plan; else begin anew.

    Raises:
        ArchiveError: when something lies there that is no pack in the making.
    """
    written = partial / _PLAN
    others = [entry for entry in partial.iterdir() if entry.name not in (_LOCK, _PLAN)]
    if others and not written.exists():
        raise ArchiveError(f"{partial} holds {others[0].name!r}, which is of no pack. Move it, or give another DEST.")
    if others and written.read_bytes() == plan.encode():
        return
    if others:
        logger.info("%s is of another source, other options or another version, so it is begun anew.", partial)
    for entry in others:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    written.write_text(plan)


def plan_of(parts: dict[str, Payloads], format: Format) -> str:
    """A digest of what a pack that was broken off must have in common with this one to be resumed."""
    plan = hashlib.blake2b(f"version 3, {format}".encode(), digest_size=16)
    for name, part in parts.items():
        source = part.source
        about = (name, part.kind, part.shrink, len(part), type(source).__module__, type(source).__qualname__)
        plan.update(repr(about).encode())
        if isinstance(source, FolderSource):
            plan.update(os.fsencode(source.origin()))
            for array in (source.index.names, source.index.ends, source.index.labels):
                plan.update(array.tobytes())
        elif len(part):  # two datasets of one class may be of one length: train and val, or with another transform
            for index in (0, len(part) // 2, len(part) - 1):
                plan.update(repr(part[index][1:]).encode())
    return plan.hexdigest()


def finish(partial: Path, target: Path) -> None:
    """Put a pack that is whole in its place; what lay at ``target`` is removed after that.

    The two are exchanged, so that there is a pack at every moment. Where the file system cannot do that there is none
    between two renames; killed there, the next call puts the old one back.
    """
    one_part = next(entry for entry in partial.iterdir() if entry.is_dir())
    partial.chmod(stat.S_IMODE(one_part.stat().st_mode))  # it was made for this user alone; its parts were not
    if is_pack(target) and _exchanged(partial, target):
        (partial / _PLAN).touch()  # the old pack: if this call is killed, the next one removes the rest
        shutil.rmtree(partial)
    else:
        if is_pack(target):
            target.rename(partial / _REPLACED)
        partial.rename(target)
    for folder in (target / _REPLACED, *target.glob("*/store")):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (*target.glob("*/journal"), target / _PLAN, target / _LOCK):
        file.unlink(missing_ok=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the system could exchange two folders in one step."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # not Linux, or an old C library
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def put_back(partial: Path, target: Path) -> None:
    """Put back the pack that a process was about to replace when it was killed between two renames."""
    if (partial / _REPLACED).is_dir() and not os.path.lexists(target):
        (partial / _REPLACED).rename(target)


# --- the store --------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A line of the journal: a sample of the source that is done."""

    size: int
    """Bytes of the payload; -1 for a sample that was left out."""
    checksum: int
    problem: str
    changed_ns: int


class Store:
    """The payloads of one part in the making, in LMDB, and the journal of the samples that they were made of.

    As a context it is open for writing, and holds what an earlier call had done, up to the first sample that is damaged
    there, or has changed in its source since.

    Attributes:
        lines: the journal.
        samples: how many of them were kept.
        resumed_at: how many of them an earlier call had done.
        digest: of the index that was written.
    """

    def __init__(self, folder: Path, part: Payloads, format: Format) -> None:
        self.part, self.name, self.format = part, folder.name, format
        self._index, self._journal, self._data = folder / "index.npz", folder / "journal", folder / "data"
        self._payloads = self._data if format == "lmdb" else folder / "store"

    @property
    def total_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(line.size for line in self.lines if line.size >= 0)

    def __enter__(self) -> "Store":
        lmdb = require("lmdb", extra="pack", why="Packing")
        try:
            self._resume()
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError):
            shutil.rmtree(self._payloads)  # a crash of the machine can have damaged them
            self._resume()
        return self

    def __exit__(self, *_: object) -> None:
        self._environment.close()

    def append(self, payloads: list[Payload]) -> None:
        """Bring the next samples of the source to the disk: payloads first, then the lines that speak of them."""
        kept = [payload.data for payload in payloads if payload.data is not None]
        with self._writing(kept) as transaction:
            for number, data in enumerate(kept, self.samples):
                transaction.put(lmdb_key(number), data, append=True)
        lines = [_Line(-1 if each.data is None else len(each.data), *each[1:]) for each in payloads]
        with self._journal.open("ab") as journal:
            journal.writelines(json.dumps(line).encode() + b"\n" for line in lines)
        self.lines += lines
        self.samples += len(kept)

    def write(self) -> None:
        """Write the index of the part, and its data where they are of another format than LMDB."""
        kept = [row for row, line in enumerate(self.lines) if line.size >= 0]
        names = [self.part.name(row).encode("utf-8", "surrogateescape") for row in kept]
        index = PartIndex(
            labels=self.part.labels[kept],
            sizes=np.array([self.lines[row].size for row in kept], dtype=np.int64),
            checksums=np.array([self.lines[row].checksum for row in kept], dtype=np.uint32),
            names=np.frombuffer(b"".join(names), dtype=np.uint8),
            name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        )
        self.digest = index.save(self._index)
        if self.format == "lmdb":
            return
        shutil.rmtree(self._data, ignore_errors=True)  # of a call that was broken off while it wrote it
        self._data.mkdir()
        write = _write_hdf5 if self.format == "hdf5" else _write_litdata
        with (
            progress_bar(f"Writing {self.format}", self.total_bytes) as bar,
            self._environment.begin() as transaction,
        ):
            write(self._data, (payload for _, payload in transaction.cursor()), index, bar.update)

    def files(self) -> dict[str, int]:
        """Bytes of each data file, by its path in the pack."""
        return {f"{self.name}/data/{file.name}": file.stat().st_size for file in sorted(self._data.iterdir())}

    def check_source(self) -> None:
        """Refuse samples whose files have changed since they were read: they may have been read while written.

        At the end, not after each read: what empties a file and fills it later is seen, too.
        """
        for row, line in enumerate(self.lines):
            if self.part.changed_ns(row) != line.changed_ns:
                raise ArchiveError(
                    f"{self.part.source.name(row)} (sample {row}) changed while it was packed. Pack again when nothing "
                    "writes there: what comes before that file is kept."
                )

    def _resume(self) -> None:
        """Take over what an earlier call had done, as far as it is undamaged, and drop the rest."""
        self.lines: list[_Line] = []
        self.samples = 0
        self._environment = open_lmdb(self._payloads, write=True)
        try:
            with self._environment.begin() as transaction, self._journal.open("a+", errors="replace") as journal:
                journal.seek(0)
                for text in journal:
                    line = _parsed(text)
                    payload = b"" if line.size < 0 else transaction.get(lmdb_key(self.samples))
                    sound = payload is not None and zlib.crc32(payload) == line.checksum
                    if not sound or self.part.changed_ns(len(self.lines)) != line.changed_ns:
                        break
                    self.lines.append(line)
                    self.samples += line.size >= 0
            self._journal.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
            with self._writing([]) as transaction:
                cursor = transaction.cursor()
                while cursor.set_range(lmdb_key(self.samples)):
                    cursor.delete()
        except BaseException:
            self._environment.close()
            raise
        self.resumed_at = len(self.lines)

    def _writing(self, payloads: list[bytes]) -> Any:
        """A transaction with room for these payloads."""
        page = self._environment.stat()["psize"]
        pages = self._environment.info()["last_pgno"] + 1 + sum(len(payload) // page + 2 for payload in payloads)
        self._environment.set_mapsize(pages * page + (16 << 20))  # LMDB keeps some pages for itself
        return self._environment.begin(write=True)


def _parsed(text: str) -> _Line:
    """A line of the journal; one that no sample fits where a kill or a crash of the machine left something else."""
    with suppress(ValueError, TypeError):
        if text.endswith("\n"):
            return _Line(*json.loads(text))
    return _Line(0, -1, "", 0)


# --- other formats ----------------------------------------------------------------------------------------------------


def _write_hdf5(folder: Path, payloads: Iterator[bytes], index: PartIndex, report: Callable[[int], object]) -> None:
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


def _write_litdata(folder: Path, payloads: Iterator[bytes], index: PartIndex, report: Callable[[int], object]) -> None:
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
