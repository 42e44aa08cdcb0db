"""A bounded cache of remote files on a local disk or in memory, shared by all processes of the node.

One file for each remote one, named by a digest of where it is from and which version it is, so that a second run finds
what the first left, and a replaced object is another file. Looked at first: fsspec's own ``filecache`` and
``simplecache`` have no bound, forget nothing, and do not keep two processes from reading the same object at once.

What goes first is written on the file itself, as its modification time: the smallest. A file that is read again at any
time gets the time of the read, so the least recently used one goes first. In epochs each file is read once, so what was
just read is what is needed again last: it gets a time that falls as the clock rises, and files of the window that is
read ahead get the present one. (With the least recently used first, a cache of half the data serves 15 % of the reads
of shuffled epochs; this way it serves half.)

Kills: a file is written beside its place, under a lock of the kernel's, and renamed. The bytes in use are counted
before they are written, so that a kill can only leave the count too high. A crash of the machine can leave any count:
the first process that opens a cache counts what is there.
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
"""Behind the bytes of each file: their CRC-32. A crash of the machine can leave a renamed file without its content."""
_BLOCK = 4096
_LOOK_AT = 20_000
"""Files among which those that go are chosen: all of a small cache, some of a large one, found at random."""
_AT_ONCE = 64
"""This part of the limit is freed at once."""
_POLL_S = 0.003
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Follow no link, and wait for nobody at the other end of a FIFO."""
_PART = ".part"
_COUNT, _WARNED = "used_bytes", "told"
_MOST = 1 << 62
"""No real count is larger, whatever a crash has left."""


class _Found(NamedTuple):
    goes_at: int
    """The smallest goes first."""
    size: int
    path: str


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


class ReadThrough:
    """Remote files on a local disk, within a limit. Can be pickled and forked.

    Args:
        folder: of a local disk, or in memory; a folder is made in it that only this user can enter. Caches of several
            places in one folder share it, and its limit.
        limit_bytes: the most that it may take; cut down, with a warning, to what the disk has.

    Raises:
        ArchiveError: when the folder cannot be made, or others own it or may write to it.
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
                "The cache in %s is limited to %s instead of %s, which is what is left there, less a tenth.",
                self.folder, size_text(self.limit_bytes), size_text(limit_bytes),
            )  # fmt: skip
        self._make_room()

    # --- reading ------------------------------------------------------------------------------------------------------

    def holds(self, key: str) -> bool:
        """True if a file is there."""
        return os.path.exists(self._path(key))  # noqa: PTH110 - often

    def is_coming(self, key: str) -> bool:
        """True if a process fetches it now, or was killed while it did."""
        return os.path.exists(self._path(key) + _PART)  # noqa: PTH110 - often

    def keep(self, key: str) -> bool:
        """Have a file stay, if it is there: it will be read soon."""
        try:
            os.utime(self._path(key), follow_symlinks=False)
        except OSError:
            return False
        return True

    def read(self, key: str, size: int, *, again_late: bool = False) -> bytes | None:
        """The bytes of a file; None where it is not there, or is damaged.

        Args:
            key: of the file.
            size: that it must have.
            again_late: whether it will be read again only after most others, as in epochs.
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
            stored = b""  # a FIFO, a link, or nothing that can be read
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
        """The bytes of a file from here, or from ``fetch``, and from then on here. Only one process fetches it."""
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
            if isinstance(error, ArchiveError):  # of what is fetched
                raise
            self._warn_once(error)
            return await fetch() if data is None else data

    # --- writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _claimed(self, key: str) -> Iterator[int | None]:
        """A descriptor of the file in the making, which no other process has now; None where one has it.

        The kernel drops the lock of a process that is killed. What it left is written over.
        """
        path = self._path(key) + _PART
        part = os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        mine = False
        try:
            with suppress(BlockingIOError):
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = self._is_at(part, path)  # else it is in its place by now, under its own name
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
        """Write a claimed file and give it its name. One that is larger than the limit is not kept."""
        stored = data + _CHECK.pack(zlib.crc32(data))
        taken = _on_disk(len(stored))
        os.ftruncate(part, len(stored))  # so that who makes room sees what was counted for it
        if not self._take(taken):
            return
        try:
            view, at = memoryview(stored), 0
            while at < len(stored):
                at += os.pwrite(part, view[at:], at)
            with self._locked(_COUNT):  # not while all is counted, which would miss it
                os.rename(self._path(key) + _PART, self._path(key))  # noqa: PTH104
        except OSError:
            self._count(-taken)
            raise

    def _warn_once(self, error: OSError) -> None:
        """Warn, in the first process of the node, that a file could not be kept, which costs speed only."""
        if self._warned:
            return
        self._warned = True
        try:
            (self.folder / _WARNED).touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # the disk is full, or the folder gone
        what = f"cannot be used any more ({error})"
        if error.errno in _FULL:
            what = f"is full ({error.strerror}), before the limit of the cache there: something else writes there, too"
        logger.warning("%s %s. What is not kept there is read from its source each time.", self.folder, what)

    # --- room ---------------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """The bytes counted as taken, in whole blocks of the disk."""
        return self._count(0)

    def _count(self, change: int) -> int:
        with self._locked(_COUNT) as file:
            return _write_count(file, _read_count(file) + change)

    def _join(self) -> None:
        """Register this process as a user of the cache, and count what is there if it is the only one."""
        with self._locked(_COUNT) as file:
            in_use = os.open(self.folder / "in_use", os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
            weakref.finalize(self, os.close, in_use)
            with suppress(BlockingIOError):  # else the count is right: it is kept by those who use it
                fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_count(file, self._present_bytes())
                (self.folder / _WARNED).unlink(missing_ok=True)
            fcntl.flock(in_use, fcntl.LOCK_SH)

    def _present_bytes(self) -> int:
        """The bytes of all files. Call it under the lock of the count: none must be renamed or removed meanwhile."""
        return sum(found.size for folder in self._buckets() for found in self._look_into(folder))

    def _take(self, taken: int) -> bool:
        """Count bytes that will be written. True if there is room for them, made if need be."""
        if taken > self.limit_bytes:
            return False
        if self._count(taken) > self.limit_bytes:
            self._make_room()
            if self.used_bytes() > self.limit_bytes:  # others write now
                self._count(-taken)
                return False
        return True

    def _make_room(self) -> None:
        """Remove files until the count is within the limit, or nothing is left that can go."""
        with self._locked("making_room"):  # one process at a time
            removed = True
            while removed and (excess := self.used_bytes() - self.limit_bytes) > 0:
                removed = self._remove_first(excess + self.limit_bytes // _AT_ONCE // _BLOCK * _BLOCK)

    def _remove_first(self, wanted: int) -> bool:
        """Remove the files that go first, of all or of as many as are looked at. True if there were any."""
        found, buckets, counted = list[_Found](), self._buckets(), self.used_bytes()
        _chance.shuffle(buckets)
        while buckets and len(found) < _LOOK_AT:
            found += self._look_into(buckets.pop())
        # All were seen: what kills have left in the count goes. A smaller difference may be files that are written now.
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
        """The files of a bucket. What a kill has left in the making is removed, and what is no file of this user's."""
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
        """Remove a file in the making that no process has now. Tells whether it was one."""
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
        """Exclude all other processes and threads that take this lock. Gives a descriptor of its file."""
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # not left to close(): a child that was forked meanwhile has the file, too
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
