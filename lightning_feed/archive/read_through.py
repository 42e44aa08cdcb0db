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
before they are written, so that a kill can only leave the count too high, until the next look at all files.
"""

import asyncio
import errno
import fcntl
import logging
import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lightning_feed.archive import system
from lightning_feed.archive.system import find_mount, memory_limits, size_text
from lightning_feed.errors import ArchiveError

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
_SHARE = 0.9
"""How much of what is free on the disk, or in memory, may be taken."""
_POLL_S = 0.003
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PART = ".part"


class _Found(NamedTuple):
    goes_at: int
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
        ArchiveError: when the folder cannot be made, or is another user's.
    """

    def __init__(self, folder: str | Path, limit_bytes: int) -> None:
        self.folder = Path(folder).absolute() / _FOLDER
        self._opened: tuple[int, int] | None = None
        self._said = threading.Event()
        try:
            self.folder.parent.mkdir(mode=0o700, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if self.folder.lstat().st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            for bucket in range(_BUCKETS):
                (self.folder / f"{bucket:02x}").mkdir(mode=0o700, exist_ok=True)
            status = os.statvfs(self.folder)
        except OSError as error:
            raise ArchiveError(
                f"{self.folder} cannot be used for a cache: {error.strerror}. Give a folder of your own as stage_to, "
                "on a local disk or in memory."
            ) from error
        free, mount = status.f_bavail * status.f_frsize, find_mount(self.folder)
        if mount is not None and mount.in_memory:
            free = min([free, *(max(0, limit.left_bytes) for limit in memory_limits())])
        room = self.used_bytes() + int(free * _SHARE)
        self.limit_bytes = min(limit_bytes, room)
        if room < limit_bytes:
            logger.warning(
                "The cache in %s is limited to %s instead of %s, which is what is left there, less a tenth.",
                self.folder, size_text(room), size_text(limit_bytes),
            )  # fmt: skip

    # --- reading ------------------------------------------------------------------------------------------------------

    def holds(self, key: str) -> bool:
        """Whether a file is there."""
        return os.path.exists(self._path(key))  # noqa: PTH110 - often

    def is_coming(self, key: str) -> bool:
        """Whether a process fetches it now, or was killed while it did."""
        return os.path.exists(self._path(key) + _PART)  # noqa: PTH110 - often

    def keep(self, key: str) -> bool:
        """Have a file stay, if it is there: it will be read soon."""
        try:
            os.utime(self._path(key))
        except OSError:
            return False
        return True

    def read(self, key: str, size: int, *, again_late: bool = False) -> bytes | None:
        """The bytes of a file; None where it is not there, or is damaged.

        Args:
            key: of the file.
            size: that it must have; -1: any.
            again_late: whether it will be read again only after most others, as in epochs.
        """
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - often
                stored = file.readall()
        except FileNotFoundError:
            return None
        data = stored[: -_CHECK.size]
        if stored[-_CHECK.size :] != _CHECK.pack(zlib.crc32(data)) or size not in (-1, len(data)):
            logger.warning("%s was damaged, by a crash or a faulty disk, and is read from its source again.", path)
            self._remove(_Found(0, len(stored), path))
            return None
        self._mark(path, again_late=again_late)
        return data

    async def through(
        self, key: str, size: int, fetch: Callable[[], Awaitable[bytes]], *, again_late: bool = False
    ) -> bytes:
        """The bytes of a file from here, or from ``fetch``, and from then on here. Only one process fetches it."""
        data: bytes | None = None
        try:
            while True:
                data = self.read(key, size, again_late=again_late)
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
            self._say_once(error)
            return await fetch() if data is None else data

    # --- writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _claimed(self, key: str) -> Iterator[int | None]:
        """A descriptor of the file in the making, which no other process has now; None where one has it.

        The kernel drops the lock of a process that is killed. What it left is written over.
        """
        path = self._path(key) + _PART
        part = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            os.rename(self._path(key) + _PART, self._path(key))  # noqa: PTH104
        except OSError:
            self._count(-taken)
            raise

    def _say_once(self, error: OSError) -> None:
        """Say that a file could not be kept, which costs speed only."""
        if self._said.is_set():
            return
        self._said.set()
        what = f"cannot be used any more ({error})"
        if error.errno in _FULL:
            what = f"is full ({error.strerror}), before the limit of the cache there: something else writes there, too"
        logger.warning("%s %s. What is not kept there is read from its source each time.", self.folder, what)

    # --- room ---------------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """What is counted as taken, in whole blocks of the disk."""
        return int.from_bytes(os.pread(self._counter(), 8, 0), "little")

    def _count(self, change: int) -> int:
        with self._locked(0):
            total = max(0, self.used_bytes() + change)
            os.pwrite(self._counter(), total.to_bytes(8, "little"), 0)
        return total

    def _take(self, taken: int) -> bool:
        """Count bytes that will be written; whether there is room for them, made if need be."""
        if taken > self.limit_bytes:
            return False
        if self._count(taken) > self.limit_bytes:
            with self._locked(8):  # one process at a time makes room
                excess = self.used_bytes() - self.limit_bytes
                if excess > 0:
                    self._make_room(excess + self.limit_bytes // _AT_ONCE // _BLOCK * _BLOCK)
        return True

    def _make_room(self, wanted: int) -> None:
        """Remove the files that go first, of all or of as many as are looked at."""
        found, buckets, counted = list[_Found](), list(range(_BUCKETS)), self.used_bytes()
        _chance.shuffle(buckets)
        while buckets and len(found) < _LOOK_AT:
            found += self._look_into(self.folder / f"{buckets.pop():02x}")
        if not buckets:  # all were seen: what kills have left in the count goes
            too_high = counted - sum(each.size for each in found)
            if too_high > self.limit_bytes // _AT_ONCE:  # less may be files that are written now
                self._count(-too_high)
                wanted -= too_high
        for each in sorted(each for each in found if not each.path.endswith(_PART)):
            if wanted <= 0:
                return
            self._remove(each)
            wanted -= each.size

    def _look_into(self, folder: Path) -> Iterator[_Found]:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    if entry.name.endswith(_PART) and status.st_mtime < time.time() - 3600:  # left by a kill
                        os.unlink(entry.path)  # noqa: PTH108
                    else:
                        yield _Found(status.st_mtime_ns, _on_disk(status.st_size), entry.path)

    def _remove(self, found: _Found) -> None:
        with suppress(FileNotFoundError):
            os.unlink(found.path)  # noqa: PTH108
            self._count(-_on_disk(found.size))

    # --- details ------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self.folder}/{key[:2]}/{key[2:]}"

    def _mark(self, path: str, *, again_late: bool) -> None:
        now = time.time()
        used_ns = int(((1 << 32) - now) / 4 * 1e9) if again_late else int(now * 1e9)
        with suppress(FileNotFoundError):
            os.utime(path, ns=(used_ns, used_ns))

    def _counter(self) -> int:
        """The descriptor of the count; one for each process, for locks of POSIX go with the first that is closed."""
        if self._opened is None or self._opened[0] != os.getpid():
            path = self.folder / "used_bytes"
            with system.process_lock:
                key = (os.getpid(), str(path))
                if key not in _counters:
                    _counters[key] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._opened = (key[0], _counters[key])
        return self._opened[1]

    @contextmanager
    def _locked(self, place: int) -> Iterator[None]:
        """Exclude all other processes, and threads of this one, from one of two things: 0 the count, 8 making room."""
        lock = _locks[place]
        with lock:
            fcntl.lockf(self._counter(), fcntl.LOCK_EX, 1, place)
            try:
                yield
            finally:
                fcntl.lockf(self._counter(), fcntl.LOCK_UN, 1, place)

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "limit_bytes": self.limit_bytes}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _opened=None, _said=threading.Event())


_chance = random.SystemRandom()  # never the user's generators
_counters: dict[tuple[int, str], int] = {}
"""Descriptors of counts, by process and path."""
_locks = {0: threading.RLock(), 8: threading.RLock()}


def _renew_locks() -> None:
    _locks.update({0: threading.RLock(), 8: threading.RLock()})  # another thread of the parent may have held them


os.register_at_fork(after_in_child=_renew_locks)
