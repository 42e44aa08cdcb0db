"""A bounded cache of remote files on a local disk or in memory, shared by all processes of the node.

One cached file per remote file, named by a digest of its location and version: a second run finds the files of the
first, and a replaced object gets a new file. fsspec's own ``filecache`` and ``simplecache`` were considered: they have
no size limit, evict nothing, and let two processes read the same object at once.

Modification times hold the eviction order: the file with the smallest time is removed first. A file that may be read
again at any time gets the time of the read, so the least recently used file is removed first. In an epoch each file is
read once, so the file just read is the last to be needed again. It gets a time that decreases as the clock advances, so
the most recently read file is removed first. Files of the read-ahead window get the present time, so they stay longest.
(With least-recently-used eviction, a cache of half the data serves 15 % of the reads of shuffled epochs; with this
order, half.)

Killed processes: a file is written under a temporary name, with a kernel lock, and renamed. Used bytes are counted
before the write, so a kill can only leave the count too high. A crash of the machine can leave any count, so the first
process to open a cache recounts.
"""

import asyncio
import errno
import fcntl
import itertools
import logging
import os
import random
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lightning_feed.errors import ArchiveError
from lightning_feed.storage.file_system import RAM_SHARE, find_room
from lightning_feed.storage.system import make_private, read_private, size_text

logger = logging.getLogger(__name__)

_FOLDER = "read-through"
_BUCKETS = 256
_CHECK = struct.Struct("<I")
"""CRC-32 after the bytes of each file. A crash of the machine can leave a renamed file without its content."""
_BLOCK = 4096
_LOOK_AT = 20_000
"""Number of candidates for eviction: all files of a small cache, a random sample of a large one."""
_AT_ONCE = 64
"""Each eviction frees the excess, and 1 / this of the limit."""
_POLL_S = 0.003
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags that follow no link, and do not wait for the other end of a FIFO."""
_PART = ".part"
_COUNT = "used_bytes"
_WARNED = "told"
_MOST = 1 << 62
"""Upper bound of any real count; a crash may leave larger ones."""


class _Found(NamedTuple):
    goes_at: int
    """Eviction key: the smallest goes first."""
    size: int
    path: str


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


class ReadThrough:
    """Remote files on a local disk, within a limit. Can be pickled and forked.

    Args:
        folder: a folder on a local disk or in memory. A subfolder that only this user can enter is made in it. Caches
            of several remote places in one folder share that subfolder, and their sizes count together.
        limit_bytes: maximum size; reduced, with a warning, to the bytes already used plus 90 % of the free space.

    Raises:
        ArchiveError: if the folder cannot be made, or if another user owns it or may write to it.
    """

    def __init__(self, folder: str | Path, limit_bytes: int) -> None:
        self.folder = Path(folder).absolute() / _FOLDER
        self._warned = False
        try:
            self.folder.parent.mkdir(mode=0o700, exist_ok=True)
            for folder in (self.folder, *self._buckets()):
                make_private(folder)
            count = self.folder / _COUNT
            if count.is_symlink() or not count.is_file():
                count.unlink(missing_ok=True)
            self._join()
            free = find_room(self.folder).left_bytes
        except OSError as error:
            raise ArchiveError(
                f"{self.folder} cannot be used as a cache: {error.strerror or error}. Set stage_to to a folder that "
                "you own, on a local disk or in memory."
            ) from error
        self.limit_bytes = min(limit_bytes, self.used_bytes() + int(free * RAM_SHARE))
        if self.limit_bytes < limit_bytes:
            logger.warning(
                "The cache in %s is limited to %s instead of %s: the free space there, less a tenth.",
                self.folder, size_text(self.limit_bytes), size_text(limit_bytes),
            )  # fmt: skip
        self._make_room()

    # --- reading ------------------------------------------------------------------------------------------------------

    def holds(self, key: str) -> bool:
        """True if the file is in the cache."""
        return os.path.exists(self._path(key))  # noqa: PTH110 - often

    def is_coming(self, key: str) -> bool:
        """True if a process is fetching the file, or was killed while fetching it."""
        return os.path.exists(self._path(key) + _PART)  # noqa: PTH110 - often

    def keep(self, key: str) -> bool:
        """Protect a file from eviction because it will be read soon. False if it is not in the cache."""
        try:
            os.utime(self._path(key), follow_symlinks=False)
        except OSError:
            return False
        return True

    def read(self, key: str, size: int, *, again_late: bool = False) -> bytes | None:
        """Return the bytes of a file; None if it is missing or damaged.

        Args:
            key: key of the file.
            size: expected bytes.
            again_late: True if most other files will be read before this one is read again, as in epochs.
        """
        with suppress(OSError):
            return self._read(key, size, again_late=again_late)
        return None

    def _read(self, key: str, size: int, *, again_late: bool) -> bytes | None:
        path = self._path(key)
        try:
            stored = read_private(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _SHORT:
                raise
            stored = b""  # a FIFO, a link, or unreadable
        data = stored[: -_CHECK.size]
        if stored[-_CHECK.size :] != _CHECK.pack(zlib.crc32(data)) or size != len(data):
            logger.warning(
                "%s was damaged, by a crash, a faulty disk or another program, and is read from its source again.", path
            )
            self._remove(_Found(0, _on_disk(len(stored)), path))
            return None
        now_s = time.time()
        used_ns = int(((1 << 32) - now_s) / 4 * 1e9) if again_late else int(now_s * 1e9)
        with suppress(FileNotFoundError):
            os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)
        return data

    async def through(
        self, key: str, size: int, fetch: Callable[[], Awaitable[bytes]], *, again_late: bool = False
    ) -> bytes:
        """Return the bytes of a file from the cache; else call ``fetch`` in one process only, and keep the result."""
        data: bytes | None = None
        try:
            while True:
                data = self._read(key, size, again_late=again_late)
                if data is not None:
                    return data
                with self._claimed(key) as part:
                    if part is not None:
                        data = await fetch()
                        await asyncio.get_running_loop().run_in_executor(None, self._put, key, part, data)
                        return data
                await asyncio.sleep(_POLL_S)
        except OSError as error:
            if isinstance(error, ArchiveError):  # from fetch
                raise
            self._warn_once(error)
            return await fetch() if data is None else data

    # --- writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _claimed(self, key: str) -> Iterator[int | None]:
        """Yield a descriptor of the partial file, claimed for this process.

        Yields None if another process has claimed the file, or has completed it.

        The kernel drops the lock of a killed process. Its partial file is overwritten.
        """
        path = self._path(key) + _PART
        part = os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        mine = False
        try:
            with suppress(BlockingIOError):
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = self._is_at(part, path)  # else it was renamed to its final name meanwhile
            yield part if mine and not self.holds(key) else None
        finally:
            if mine and self._is_at(part, path):
                os.unlink(path)  # noqa: PTH108
            os.close(part)

    @staticmethod
    def _is_at(descriptor: int, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(path))
        except FileNotFoundError:
            return False

    def _put(self, key: str, part: int, data: bytes) -> None:
        """Write a claimed file and rename it into place. A file larger than the limit is not kept."""
        stored = data + _CHECK.pack(zlib.crc32(data))
        taken = _on_disk(len(stored))
        os.ftruncate(part, len(stored))  # now, so that a process that makes room counts these bytes, too
        if not self._take(taken):
            return
        try:
            view = memoryview(stored)
            at = 0
            while at < len(stored):
                at += os.pwrite(part, view[at:], at)
            with self._locked(_COUNT):  # not during a recount, which would miss the file
                os.rename(self._path(key) + _PART, self._path(key))  # noqa: PTH104
        except OSError:
            self._count(-taken)
            raise

    def _warn_once(self, error: OSError) -> None:
        """Warn, once per node, that a file could not be kept, which costs only speed."""
        if self._warned:
            return
        self._warned = True
        try:
            (self.folder / _WARNED).touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # the disk is full, or the folder was removed
        what = f"cannot be used any more ({error})"
        if error.errno in _FULL:
            what = f"is full ({error.strerror}) although the cache is below its limit: other programs write there, too"
        logger.warning("%s %s. Files that do not fit are read from their source each time.", self.folder, what)

    # --- room ---------------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return the bytes counted as used, in whole disk blocks."""
        return self._count(0)

    def _count(self, change: int) -> int:
        with self._locked(_COUNT) as file:
            return _write_count(file, _read_count(file) + change)

    def _join(self) -> None:
        """Register this process as a user of the cache; if it is the only one, recount the files."""
        with self._locked(_COUNT) as file:
            in_use = os.open(self.folder / "in_use", os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
            weakref.finalize(self, os.close, in_use)
            with suppress(BlockingIOError):  # otherwise other users have kept the count right
                fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_count(file, self._present_bytes())
                (self.folder / _WARNED).unlink(missing_ok=True)
            fcntl.flock(in_use, fcntl.LOCK_SH)

    def _present_bytes(self) -> int:
        """Return the total size of all files in bytes.

        The caller must hold the lock of the count, so that no file is renamed or removed meanwhile.
        """
        return sum(found.size for folder in self._buckets() for found in self._look_into(folder))

    def _take(self, taken: int) -> bool:
        """Count bytes to be written, making room if needed. False if they do not fit."""
        if taken > self.limit_bytes:
            return False
        if self._count(taken) > self.limit_bytes:
            self._make_room()
            if self.used_bytes() > self.limit_bytes:  # other processes are writing
                self._count(-taken)
                return False
        return True

    def _make_room(self) -> None:
        """Remove files until the count is within the limit, or no file can be removed."""
        with self._locked("making_room"):  # one process at a time
            removed = True
            while removed and (excess := self.used_bytes() - self.limit_bytes) > 0:
                removed = self._remove_first(excess + self.limit_bytes // _AT_ONCE // _BLOCK * _BLOCK)

    def _remove_first(self, wanted: int) -> bool:
        """Remove the first files in eviction order, from all or a sample of the files. True if there were any."""
        found = list[_Found]()
        buckets = self._buckets()
        counted = self.used_bytes()
        _chance.shuffle(buckets)
        while buckets and len(found) < _LOOK_AT:
            found += self._look_into(buckets.pop())
        # If all files were seen, a large difference means that kills have left a wrong count: correct it. A small one
        # may come from writes in progress.
        if not buckets and abs(counted - sum(each.size for each in found)) > self.limit_bytes // _AT_ONCE:
            with self._locked(_COUNT) as file:
                wanted += _write_count(file, self._present_bytes()) - counted
        going = sorted(each for each in found if not each.path.endswith(_PART))
        before = itertools.accumulate((each.size for each in going), initial=0)
        for each, freed in zip(going, before, strict=False):
            if freed < wanted:
                self._remove(each)
        return bool(going)

    def _look_into(self, folder: Path) -> Iterator[_Found]:
        """Yield the files of a bucket. Remove leftovers of killed processes, and files of other users."""
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        continue
                    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                        os.unlink(entry.path)  # noqa: PTH108
                    elif not (entry.name.endswith(_PART) and self._was_left(entry.path)):
                        yield _Found(status.st_mtime_ns, _on_disk(status.st_size), entry.path)

    def _was_left(self, path: str) -> bool:
        """Remove a partial file unless a process holds it. True if none does."""
        part = os.open(path, os.O_RDWR | _SAFELY)
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_at(part, path):
                os.unlink(path)  # noqa: PTH108
        except BlockingIOError:
            return False
        finally:
            os.close(part)
        return True

    def _remove(self, found: _Found) -> None:
        with suppress(FileNotFoundError), self._locked(_COUNT) as file:
            os.unlink(found.path)  # noqa: PTH108
            _write_count(file, _read_count(file) - found.size)

    # --- details ------------------------------------------------------------------------------------------------------

    def _buckets(self) -> list[Path]:
        return [self.folder / f"{bucket:02x}" for bucket in range(_BUCKETS)]

    def _path(self, key: str) -> str:
        return f"{self.folder}/{key[:2]}/{key[2:]}"

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """Exclude all other processes and threads that take this lock. Yield a descriptor of its file."""
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # close() is not enough: a child forked meanwhile also has the file open
            os.close(file)

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "limit_bytes": self.limit_bytes}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _warned=False)


def _read_count(file: int) -> int:
    return min(int.from_bytes(os.pread(file, 8, 0), "little"), _MOST)


def _write_count(file: int, total: int) -> int:
    os.pwrite(file, max(0, total).to_bytes(8, "little"), 0)
    return max(0, total)


_chance = random.SystemRandom()  # never the user's generators
