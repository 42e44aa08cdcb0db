"""The file behind a shared cache: made by whoever comes first, filled by all, gone with its last user.

A plain file in /dev/shm that is mapped, not ``multiprocessing.shared_memory``: before Python 3.13 the resource tracker
of any process that only attached to such a block unlinks it when that process ends.

Writers exclude each other by a POSIX byte lock. It belongs to the process, so it holds between a process and its forked
children too, and it is dropped when a writer is killed. A thread lock stands in between threads.
"""

import errno
import fcntl
import logging
import mmap
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from weakref import WeakValueDictionary

from lightning_feed.archive import in_use
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

PAGE = 4096
HEADER_WORDS = PAGE // 8
PREFIX = "lightning-feed-cache-"
_MAGIC = 0x3143_4546_4C  # also the version: another layout is another number
_STEP_BYTES = 16 << 20
"""How often, in bytes filled, it is asked how much memory is left."""
_SPARE_BYTES = 128 << 20
"""Memory that is left to everybody else when the cache grows."""
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)

# Words of the header.
MAGIC, IDENTITY, LIMIT, NEXT, FIRST_FREE = 0, 1, 8, 9, 16
"""``IDENTITY`` takes up to 7 words; the words from ``FIRST_FREE`` on are the caller's."""

_open_files: "WeakValueDictionary[str, CacheFile]" = WeakValueDictionary()


class CacheFile:
    """A mapped file: one page of header words, a table, and data space that is filled from its start.

    Data is read through the mapping and written with ``pwrite``. Writing through the mapping into a full tmpfs would
    end the process with SIGBUS; this way it is the error of one call, and without page faults it costs half.

    Use :func:`open_cache_file`, which gives one object for each file of a process.

    Attributes:
        words: the header as 64-bit integers, shared.
        buffer: the whole file, writable.
        readonly: the same, read-only.
        data_start: offset of the data space in the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        identity: tuple[int, ...],
        table_bytes: int,
        limit_bytes: int,
        memory_left: Callable[[], int | None] | None,
    ) -> None:
        self.path = path
        self.data_start = _whole_pages(PAGE + table_bytes)
        self._memory_left = memory_left
        self._descriptor = in_use.open_marked(path)
        self._fd = self._descriptor.fd
        try:
            with self.locked():
                self._prepare(identity, limit_bytes)
                self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        except BaseException:
            in_use.give_up(self._descriptor, path)
            raise
        self.buffer = memoryview(self._map)
        self.readonly = self.buffer.toreadonly()
        self.words = self.buffer[:PAGE].cast("q")
        # At exit a negative priority comes after the daemonic workers of this process have been ended. Runs in
        # processes that multiprocessing started, too, and never in one that was forked from the one that opened.
        self._finalizer = Finalize(self, in_use.give_up, args=(self._descriptor, path), exitpriority=-10)

    def close(self) -> None:
        """Give up the file; its last user removes it. Who still has this object can go on with it alone."""
        with in_use.process_lock:
            if _open_files.get(str(self.path)) is self:
                del _open_files[str(self.path)]
            self._finalizer()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process and thread that takes this lock.

        The system call orders memory as well: what was written before it is seen by whoever sees what is written after
        it, on processors that would otherwise reorder two stores.
        """
        with in_use.process_lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, 0)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 0)

    def take(self, space: int) -> int | str:
        """Take the next ``space`` bytes of the data space. Call it under :meth:`locked`.

        Returns:
            Where they start, or why there are none.
        """
        start = self.words[NEXT]
        end = start + space
        if end > self.words[LIMIT]:
            return "the limit is reached"
        if self._memory_left is not None and (not start or start // _STEP_BYTES < end // _STEP_BYTES):
            left = self._memory_left()
            if left is not None and left < space + _SPARE_BYTES:
                self.words[LIMIT] = start
                return f"memory is short ({left >> 20} MiB can still be taken)"
        self.words[NEXT] = end
        return start

    def write(self, start: int, data: memoryview) -> str | None:
        """Write bytes into space that was taken.

        Returns:
            None, or why it could not be done; then no more can be taken.
        """
        offset = self.data_start + start
        try:
            while data:
                written = os.pwrite(self._fd, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            with self.locked():
                self.words[LIMIT] = self.words[NEXT]
            return f"{self.path.parent} is full"
        return None

    def _prepare(self, identity: tuple[int, ...], limit_bytes: int) -> None:
        """Initialise the file where it is new, or was left half-made; else see that it is the same cache."""
        header = bytearray(os.pread(self._fd, PAGE, 0).ljust(PAGE, b"\0"))
        words = memoryview(header).cast("q")
        theirs = tuple(words[IDENTITY : IDENTITY + len(identity)])
        if words[MAGIC] == _MAGIC:
            if theirs != identity:
                raise ArchiveError(
                    f"The cache {self.path} is in use for other data (its kind and size are {theirs}, asked for is "
                    f"{identity}). Give this cache another name."
                )
            return
        if words[MAGIC]:
            raise ArchiveError(f"{self.path} is not a cache of this version of lightning_feed. Give another name.")
        limit = self._possible(limit_bytes)
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self.data_start + limit)
        try:
            os.posix_fallocate(self._fd, 0, self.data_start)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise ArchiveError(self._too_small(0)) from error
        words[IDENTITY : IDENTITY + len(identity)] = array("q", identity)
        words[LIMIT] = limit
        os.pwrite(self._fd, header, 0)
        words[MAGIC] = _MAGIC  # last: a maker that is killed before leaves a file that the next one makes again
        os.pwrite(self._fd, header[:8], 0)

    def _possible(self, limit_bytes: int) -> int:
        """The limit that memory and the file system allow."""
        found = os.statvfs(self.path.parent)
        free = found.f_bavail * found.f_frsize - self.data_start
        left = self._memory_left() if self._memory_left is not None else None
        room = free if left is None else min(free, left - _SPARE_BYTES - self.data_start)
        if free <= 0:
            raise ArchiveError(self._too_small(free + self.data_start))
        if limit_bytes > room:
            lack = f"{self.path.parent} has {max(free, 0) >> 20} MiB free"
            if room < free:
                lack = f"{max(left or 0, 0) >> 20} MiB of memory can still be taken"
            logger.warning(
                "The cache is limited to %d MiB instead of %d MiB, since %s. What does not fit is read each time.%s",
                max(0, room) >> 20,
                limit_bytes >> 20,
                lack,
                f" {_ENLARGE}" if room == free else "",
            )
        return max(0, min(limit_bytes, room))

    def _too_small(self, free: int) -> str:
        return (
            f"{self.path.parent} has {free} bytes free, which is not enough for the index of the cache "
            f"({self.data_start} bytes). {_ENLARGE}"
        )


_ENLARGE = "Enlarge it (docker run --shm-size=8g; or mount -o remount,size=8g /dev/shm), or leave the cache out."


def open_cache_file(
    path: Path,
    *,
    identity: tuple[int, ...],
    table_bytes: int,
    limit_bytes: int,
    memory_left: Callable[[], int | None] | None,
) -> CacheFile:
    """Attach to the file, or make it. Within a process the same file gives the same object.

    One object, because a POSIX lock is dropped as soon as the process closes any descriptor of the file.

    Args:
        path: the file; left-overs of dead processes beside it are removed.
        identity: what must agree between all users, up to 7 integers.
        table_bytes: size of the table after the header, zeroed.
        limit_bytes: size of the data space; the first comer's holds.
        memory_left: bytes of memory that can still be taken, asked as it is filled.

    Raises:
        ArchiveError: when the file is another user's, of other data, or has no room for its table.
    """
    with in_use.process_lock:
        known = _open_files.get(str(path))
        if known is not None and in_use.is_linked(known._fd, path):
            if tuple(known.words[IDENTITY : IDENTITY + len(identity)]) == identity:
                return known
            known._prepare(identity, limit_bytes)  # raises, saying how they differ
        in_use.remove_leftovers(path.parent, f"{PREFIX}{os.getuid()}-*", keep={str(path), *_open_files})
        made = CacheFile(
            path, identity=identity, table_bytes=table_bytes, limit_bytes=limit_bytes, memory_left=memory_left
        )
        _open_files[str(path)] = made
        return made


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
