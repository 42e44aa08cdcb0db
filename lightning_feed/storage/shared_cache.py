"""Samples of one dataset in one memory buffer per node; the first process to read a sample stores it.

Layout after the file header: counters of each process, the index (an offset per sample; 0 if not held), and the sample
records in order of arrival. A writer reserves space for a record under the lock, fills it without the lock, and
publishes it under the lock with one 8-byte store into the index. So readers take no inter-process lock, and a killed
writer leaves only a gap.
"""

import errno
import fcntl
import logging
import mmap
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from lightning_feed.errors import ArchiveError
from lightning_feed.storage import system

Kind = Literal["bytes", "decoded"]

PREFIX = "lightning-feed-cache-"
_MemoryLeft: TypeAlias = Callable[[], int | None]

# Words of the header; the identity takes up to 7.
_MAGIC = 0
_IDENTITY = 1
_LIMIT = 8
_NEXT = 9
_ENTRIES = 16
_STORED = 17
_REFUSED = 18
_VERSION = 0x3143_4546_4D  # change it with the layout
_PAGE = 4096
_STEP_BYTES = 16 << 20
"""Bytes filled between two checks of the free memory."""
_SPARE_BYTES = 128 << 20
"""Memory left to other programs when the cache grows."""
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_ENLARGE = "Enlarge it (docker run --shm-size=8g; or mount -o remount,size=8g /dev/shm), or leave the cache out."
_SLOTS = 512
_SLOT_WORDS = 8  # a cache line, to avoid false sharing between the counters of processes
_HITS, _MISSES = range(2)
_ALIGN = 64
_HEAD = struct.Struct("=12sI")  # dtype, number of dimensions; the shape follows, 8 bytes each

logger = logging.getLogger(__name__)
_open_files: "WeakValueDictionary[str, _CacheFile]" = WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """Contents and use of a cache, over all processes of the node."""

    hits: int
    """Reads that found their sample."""
    misses: int
    """Reads that did not find their sample."""
    entries: int
    """Samples held."""
    stored_bytes: int
    """Bytes used by samples, including 64-byte headers and rounding."""
    limit_bytes: int
    """Limit of ``stored_bytes``."""
    full: bool
    """True if a sample was refused for lack of space."""


class SampleCache:
    """Arrays by index, in one buffer for all processes and threads of this node that open the same name.

    If there is no space, :meth:`put` returns False and nothing else happens. Memory is taken as samples are stored, up
    to the limit. A limit above the free space or memory is reduced, with a warning. The last user removes the file.
    Leftovers of killed runs are removed when the next cache is opened.

    Pickling sends only the name: the other process attaches to the same buffer.

    Args:
        size: samples in the dataset.
        limit_bytes: limit of the space for samples. The first user's limit holds for all.
        kind: content: ``"bytes"`` as read, or ``"decoded"`` arrays. All users of one name must pass the same kind.
        name: shared by the processes that use the cache; letters, digits, ``.``, ``_`` and ``-``.
        directory: folder of the file; a tmpfs is memory, a local disk is page cache and disk.
        memory_left: function that returns the free memory in bytes, None if unknown; called when the cache grows. Leave
            it out if ``directory`` is not memory. Must be picklable for workers that are not forked.

    Raises:
        ArchiveError: if the file cannot be opened, belongs to other data, or has no space for its index.

    Example:
        >>> cache = SampleCache(100, 1 << 20, kind="bytes", name="example")
        >>> cache.put(7, np.arange(3)), cache.get(7), cache.get(8)
        (True, array([0, 1, 2]), None)
    """

    def __init__(
        self,
        size: int,
        limit_bytes: int,
        *,
        kind: Kind,
        name: str,
        directory: str | Path = "/dev/shm",
        memory_left: _MemoryLeft | None = None,
    ) -> None:
        self.size = size
        self.kind: Kind = kind
        self._open_again = partial(
            SampleCache, size, limit_bytes, kind=kind, name=name, directory=str(directory), memory_left=memory_left
        )
        slot_bytes = _SLOTS * _SLOT_WORDS * 8
        self._file = _open_cache_file(
            Path(directory) / f"{PREFIX}{os.getuid()}-{name}",
            (int(kind == "decoded"), size),
            slot_bytes + 8 * size,
            -(-limit_bytes // _PAGE) * _PAGE,
            memory_left,
        )
        self._slots = self._file.buffer[_PAGE : _PAGE + slot_bytes].cast("q")
        self._index = self._file.buffer[_PAGE + slot_bytes : _PAGE + slot_bytes + 8 * size].cast("q")
        self.path = self._file.path

    @property
    def growth_bytes(self) -> int:
        """Bytes that the cache may still take. Do not plan other uses for them."""
        return self._file.words[_LIMIT] - self._file.words[_NEXT]

    def get(self, index: int) -> npt.NDArray[Any] | None:
        """Return the sample as a read-only view of the shared memory; None if it is not held."""
        offset = self._index[index]
        self._count(_HITS if offset else _MISSES)
        if not offset:
            return None
        buffer = self._file.readonly
        dtype, ndim = _HEAD.unpack_from(buffer, offset)
        shape = struct.unpack_from(f"={ndim}q", buffer, offset + _HEAD.size)
        start = offset + _head_bytes(ndim)
        found: npt.NDArray[Any] = np.ndarray(shape, dtype.rstrip(b"\0").decode(), buffer, start)
        return found

    def holds(self, index: int) -> bool:
        """True if the sample is held; does not count as a read."""
        return bool(self._index[index])

    def put(self, index: int, array: npt.NDArray[Any]) -> bool:
        """Store a copy of the sample. A sample already held stays as it is.

        Returns:
            True if the cache now holds the sample; False if there is no space for it.

        Raises:
            ArchiveError: for an array of Python objects or records, which cannot be shared.
        """
        dtype = array.dtype.str.encode()
        if array.dtype.hasobject or array.dtype.names is not None or len(dtype) > 12:
            raise ArchiveError(f"Sample {index} is of dtype {array.dtype}. Only numeric arrays can be cached.")
        head = bytearray(_head_bytes(array.ndim))
        space = -(-(len(head) + array.nbytes) // _ALIGN) * _ALIGN
        words = self._file.words
        if self._index[index]:
            return True
        if words[_REFUSED] and words[_NEXT] + space > words[_LIMIT]:
            return False
        try:
            with self._file.locked():
                if self._index[index]:
                    return True
                start = self._file.take(space)
            _HEAD.pack_into(head, 0, dtype, array.ndim)
            struct.pack_into(f"={array.ndim}q", head, _HEAD.size, *array.shape)
            self._file.write(start, memoryview(head))
            self._file.write(start + len(head), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        except _NoRoomError as error:
            self._refuse(error)
            return False
        self._publish(index, start, space)
        return True

    def stats(self) -> CacheStats:
        """Return the figures over all processes of this node that use the cache."""
        counters = np.frombuffer(self._slots, dtype=np.int64).reshape(_SLOTS, _SLOT_WORDS).sum(axis=0)
        words = self._file.words
        return CacheStats(
            hits=int(counters[_HITS]),
            misses=int(counters[_MISSES]),
            entries=words[_ENTRIES],
            stored_bytes=words[_STORED],
            limit_bytes=words[_LIMIT],
            full=bool(words[_REFUSED]),
        )

    def close(self) -> None:
        """Release the name; the memory is freed when no process uses the cache, or an array from it, any more."""
        self._file.close()

    def __reduce__(self) -> tuple[Callable[[], "SampleCache"], tuple[()]]:
        return self._open_again, ()

    def __deepcopy__(self, memo: dict[int, object]) -> "SampleCache":
        return self  # a copy of a dataset reads the same samples

    def _publish(self, index: int, start: int, space: int) -> None:
        words = self._file.words
        # The lock between writing the sample and its offset also orders memory: see _CacheFile.locked.
        with self._file.locked():
            if not self._index[index]:
                words[_ENTRIES] += 1
                words[_STORED] += space
                self._index[index] = self._file.data_start + start
            elif words[_NEXT] == start + space:  # another process was faster
                words[_NEXT] = start

    def _refuse(self, problem: "_NoRoomError") -> None:
        words = self._file.words
        with self._file.locked():
            first, words[_REFUSED] = not words[_REFUSED], 1
        if first:
            logger.warning(
                "The cache is full: it holds %d of %d samples in %d MiB, and %s. All others are read each time. "
                "Raise cache_limit if there is memory for it.",
                words[_ENTRIES],
                self.size,
                words[_STORED] >> 20,
                problem,
            )

    def _count(self, what: int) -> None:
        # The processes of a run have consecutive ids, so each gets its own counters.
        with system.process_lock:
            self._slots[os.getpid() % _SLOTS * _SLOT_WORDS + what] += 1


def _head_bytes(ndim: int) -> int:
    return -(-(_HEAD.size + 8 * ndim) // _ALIGN) * _ALIGN


class _NoRoomError(Exception):
    """Reason that a cache can take no further sample."""


# --- the file behind a cache ------------------------------------------------------------------------------------------


class _CacheFile:
    """A mapped file: one page of header words, a table, and data space that is filled from its start.

    A plain file in /dev/shm, not ``multiprocessing.shared_memory``: before Python 3.13, the resource tracker of a
    process that only attached to a block unlinks it when that process ends. Data is read through the mapping and
    written with ``pwrite``. Writing through the mapping into a full tmpfs would end the process with SIGBUS; ``pwrite``
    raises an error, and costs half because there are no page faults.

    Writers exclude each other by a POSIX byte lock. The lock belongs to a process, so it also excludes forked children,
    and the kernel drops it when a writer is killed. The kernel also drops it when the process closes any descriptor of
    the file, so :func:`_open_cache_file` makes only one object per file and process.

    Attributes:
        words: the header as 64-bit integers, shared.
        buffer: the whole file, writable.
        readonly: the whole file, read-only.
        data_start: offset of the data space in the file.
    """

    def __init__(
        self, path: Path, identity: tuple[int, ...], table_bytes: int, limit_bytes: int, memory_left: _MemoryLeft | None
    ) -> None:
        self.path = path
        self.data_start = -(-(_PAGE + table_bytes) // _PAGE) * _PAGE
        self._memory_left = memory_left
        self.file = system.open_refcounted(path)
        self._fd = self.file.fd
        try:
            with self.locked():
                self._prepare(identity, limit_bytes)
                self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        except BaseException:
            self.file.give_up()
            raise
        self.buffer = memoryview(self._map)
        self.readonly = self.buffer.toreadonly()
        self.words = self.buffer[:_PAGE].cast("q")
        # A negative exit priority runs after this process's daemonic workers have ended. It also runs in processes
        # started by multiprocessing, but never in a fork of the process that opened the file.
        self._finalizer = Finalize(self, self.file.give_up, exitpriority=-10)

    def close(self) -> None:
        """Release the file; its last user removes it. Existing references to this object stay usable."""
        with system.process_lock:
            if _open_files.get(str(self.path)) is self:
                del _open_files[str(self.path)]
            self._finalizer()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process and thread that takes this lock.

        The system call is also a memory barrier: if a reader sees a write made after the call, it also sees all writes
        made before the call, even on processors that reorder stores.
        """
        with system.process_lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, 0)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 0)

    def take(self, space: int) -> int:
        """Reserve the next ``space`` bytes of the data space, and return their start. Call it under :meth:`locked`.

        Raises:
            _NoRoomError: if they would exceed the limit or the free memory.
        """
        start = self.words[_NEXT]
        end = start + space
        if end > self.words[_LIMIT]:
            raise _NoRoomError("the limit is reached")
        if self._memory_left is not None and (not start or start // _STEP_BYTES < end // _STEP_BYTES):
            left = self._memory_left()
            if left is not None and left < space + _SPARE_BYTES:
                self.words[_LIMIT] = start
                raise _NoRoomError(f"memory is short ({left >> 20} MiB can still be taken)")
        self.words[_NEXT] = end
        return start

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes into reserved space.

        Raises:
            _NoRoomError: if the file system is full; no more can be reserved then.
        """
        offset = self.data_start + start
        try:
            while data:
                written = os.pwrite(self._fd, data, offset)
                data = data[written:]
                offset = offset + written
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            with self.locked():
                self.words[_LIMIT] = self.words[_NEXT]
            raise _NoRoomError(f"{self.path.parent} is full") from error

    def check_identity(self, identity: tuple[int, ...], words: memoryview) -> None:
        """Refuse a cache of other data, or from another version of this package."""
        theirs = (words[_MAGIC], *words[_IDENTITY : _IDENTITY + len(identity)])
        if theirs != (_VERSION, *identity):
            raise ArchiveError(
                f"The cache {self.path} is in use for other data, or by another version of this package: version, kind "
                f"and size are {theirs} and should be {(_VERSION, *identity)}. Use another name."
            )

    def _prepare(self, identity: tuple[int, ...], limit_bytes: int) -> None:
        """Initialise a file that is new or incomplete; else check that it is the same cache."""
        header = bytearray(os.pread(self._fd, _PAGE, 0).ljust(_PAGE, b"\0"))
        words = memoryview(header).cast("q")
        if words[_MAGIC]:
            self.check_identity(identity, words)
            return
        os.ftruncate(self._fd, 0)
        try:
            os.posix_fallocate(self._fd, 0, self.data_start)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise ArchiveError(
                f"{self.path.parent} has no room for the index of the cache ({self.data_start} bytes). {_ENLARGE}"
            ) from error
        limit = self._possible(limit_bytes)
        os.ftruncate(self._fd, self.data_start + limit)
        words[_IDENTITY : _IDENTITY + len(identity)] = array("q", identity)
        words[_LIMIT] = limit
        os.pwrite(self._fd, header, 0)
        words[_MAGIC] = _VERSION  # last: after a kill before this, the next process initialises the file again
        os.pwrite(self._fd, header[:8], 0)

    def _possible(self, limit_bytes: int) -> int:
        """Return the limit that memory and the file system allow."""
        found = os.statvfs(self.path.parent)
        room = found.f_bavail * found.f_frsize
        lack = f"{self.path.parent} has {room >> 20} MiB free. {_ENLARGE}"
        left = self._memory_left() if self._memory_left is not None else None
        if left is not None and left - _SPARE_BYTES < room:
            room = max(0, left - _SPARE_BYTES)
            lack = f"{max(left, 0) >> 20} MiB of memory can still be taken"
        if limit_bytes > room:
            say = "The cache is limited to %d MiB instead of %d MiB, since %s"
            logger.warning(say, room >> 20, limit_bytes >> 20, lack)
        return min(limit_bytes, room)


def _open_cache_file(path: Path, identity: tuple[int, ...], *given: Any) -> _CacheFile:
    """Attach to the file, or make it. Remove leftovers of dead processes beside it.

    Args:
        path: the file.
        identity: values that must be equal for all users, up to 7 integers.
        *given: size of the zeroed table after the header, in bytes; size of the data space, in bytes (the first user's
            size holds for all users); and the function that returns the free memory, called as the file is filled.

    Raises:
        ArchiveError: if the file is another user's, of other data, or has no space for its table.
    """
    with system.process_lock:
        known = _open_files.get(str(path))
        if known is not None and known.file.is_linked():
            known.check_identity(identity, known.words)
            return known
        system.remove_leftovers(path.parent, f"{PREFIX}{os.getuid()}-*", keep={str(path), *_open_files})
        _open_files[str(path)] = made = _CacheFile(path, identity, *given)
        return made
