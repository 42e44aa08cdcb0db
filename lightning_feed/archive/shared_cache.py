"""Samples of one dataset in one shared memory buffer per node, filled by whoever comes first.

Layout behind the header of the file: counters of each process, the index (an offset for each sample, 0 where there is
none), and records of samples in the order in which they came. Space for a record is reserved under the lock, filled
without it, and published under it again by one 8-byte store into the index. So readers take no lock, and a writer that
is killed in the middle leaves nothing but a gap.
"""

import errno
import logging
import os
import re
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from lightning_feed.archive.cache_file import (
    FIRST_FREE,
    LIMIT,
    NEXT,
    PAGE,
    PREFIX,
    CacheFile,
    open_cache_file,
)
from lightning_feed.errors import ArchiveError, SettingsError

Kind = Literal["bytes", "decoded"]
KINDS: tuple[Kind, ...] = ("bytes", "decoded")

# Words of the header that are ours.
_ENTRIES, _STORED, _REFUSED = range(FIRST_FREE, FIRST_FREE + 3)
_SLOTS = 512
_SLOT_WORDS = 8  # a cache line, so that processes do not pull each other's counters out of their caches
_PID, _HITS, _MISSES = range(3)
_ALIGN = 64
_HEAD = struct.Struct("=12sI")  # dtype, number of dimensions; the shape follows, 8 bytes each

logger = logging.getLogger(__name__)
_caches: "WeakSet[SampleCache]" = WeakSet()


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """What a cache holds and has done, over all processes of the node."""

    hits: int
    """Reads that found their sample."""
    misses: int
    """Reads that did not."""
    entries: int
    """Samples held."""
    stored_bytes: int
    """Memory in use by samples, their 64-byte heads and rounding included."""
    limit_bytes: int
    """The bound on ``stored_bytes``."""
    full: bool
    """Whether a sample has been turned away for lack of space."""


class SampleCache:
    """Arrays by index, in one buffer for all processes and threads of this node that open the same name.

    Filling is best effort: where there is no more room, :meth:`put` says so and nothing else happens. Memory is taken
    as samples come, never beyond the limit, which is cut down, with a warning, where the file system or memory has
    less. The file disappears with its last user. What a killed run leaves behind is removed when the next cache is
    opened.

    Pickled, it is the name that travels: the other process attaches to the same buffer.

    Args:
        size: samples in the dataset.
        limit_bytes: bound on the space for samples. The first comer's holds for all.
        kind: what is kept, ``"bytes"`` as read or arrays as ``"decoded"``. Users of one name must agree.
        name: what the processes that share agree on, of letters, digits, ``.``, ``_`` and ``-``.
        directory: where the file lies; a tmpfs is memory, a local disk is page cache and disk.
        memory_left: gives the bytes of memory that can still be taken, or None; asked when the cache grows. Leave it
            out where ``directory`` is not memory. Must be picklable for workers that are not forked.

    Raises:
        SettingsError: for a kind, size, limit or name that is not possible.
        ArchiveError: when the file cannot be opened, belongs to other data, or has no room for its index.

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
        memory_left: Callable[[], int | None] | None = None,
    ) -> None:
        if kind not in KINDS:
            raise SettingsError(f"kind={kind!r} is not possible. Give one of {', '.join(map(repr, KINDS))}.")
        for what, value in (("size", size), ("limit_bytes", limit_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{what}={value!r} is not possible. Give a whole number, 1 or more.")
        if not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
            raise SettingsError(f"name={name!r} is not possible. Use up to 128 letters, digits, '.', '_' and '-'.")
        self.size = size
        self.kind: Kind = kind
        self.name = name
        self._given = (size, limit_bytes, kind, name, str(directory), memory_left)
        slot_bytes = _SLOTS * _SLOT_WORDS * 8
        self._file: CacheFile = open_cache_file(
            Path(directory) / f"{PREFIX}{os.getuid()}-{name}",
            identity=(KINDS.index(kind), size),
            table_bytes=slot_bytes + 8 * size,
            limit_bytes=-(-limit_bytes // PAGE) * PAGE,
            memory_left=memory_left,
        )
        self._slots = self._file.buffer[PAGE : PAGE + slot_bytes].cast("q")
        self._index = self._file.buffer[PAGE + slot_bytes : PAGE + slot_bytes + 8 * size].cast("q")
        self._renew()
        _caches.add(self)

    @property
    def path(self) -> Path:
        """The file behind the cache."""
        return self._file.path

    @property
    def limit_bytes(self) -> int:
        """The bound on what is stored, as it is now."""
        return self._file.words[LIMIT]

    @property
    def growth_bytes(self) -> int:
        """Memory that the cache may still take: a plan for other uses of memory has to leave it alone."""
        return self._file.words[LIMIT] - self._file.words[NEXT]

    def get(self, index: int) -> npt.NDArray[Any] | None:
        """The sample, as a read-only view on the shared memory, or None where it is not held."""
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

    def __contains__(self, index: int) -> bool:
        return self._index[index] != 0

    def put(self, index: int, array: npt.NDArray[Any]) -> bool:
        """Keep a copy of the sample. What is held already stays as it is.

        Returns:
            Whether the cache holds the sample now; False where there is no room for it.

        Raises:
            ArchiveError: for an array whose elements are Python objects or records, which cannot be shared.
        """
        dtype = array.dtype.str.encode()
        if array.dtype.hasobject or array.dtype.names is not None or len(dtype) > 12:
            raise ArchiveError(
                f"Sample {index} is an array of dtype {array.dtype}, which a shared cache cannot hold. Give numbers, "
                "booleans or strings of fixed length."
            )
        head = bytearray(_head_bytes(array.ndim))
        space = -(-(len(head) + array.nbytes) // _ALIGN) * _ALIGN
        words = self._file.words
        if self._index[index]:
            return True
        if words[_REFUSED] and words[NEXT] + space > words[LIMIT]:
            return False
        with self._file.locked():
            if self._index[index]:
                return True
            taken = self._file.take(space)
        if isinstance(taken, str):
            return self._refuse(taken)
        _HEAD.pack_into(head, 0, dtype, array.ndim)
        struct.pack_into(f"={array.ndim}q", head, _HEAD.size, *array.shape)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        problem = self._file.write(taken, memoryview(head)) or self._file.write(taken + len(head), flat.data)
        if problem is not None:
            return self._refuse(problem)
        self._publish(index, taken, space)
        return True

    def stats(self) -> CacheStats:
        """The figures of all processes of this node that use the cache."""
        counters = np.frombuffer(self._slots, dtype=np.int64).reshape(_SLOTS, _SLOT_WORDS).sum(axis=0)
        words = self._file.words
        return CacheStats(
            hits=int(counters[_HITS]),
            misses=int(counters[_MISSES]),
            entries=words[_ENTRIES],
            stored_bytes=words[_STORED],
            limit_bytes=words[LIMIT],
            full=bool(words[_REFUSED]),
        )

    def close(self) -> None:
        """Give up the name; memory is free when nobody has the cache, or an array from it, any more."""
        self._file.close()

    def __getstate__(self) -> tuple[Any, ...]:
        return self._given

    def __setstate__(self, given: tuple[Any, ...]) -> None:
        size, limit_bytes, kind, name, directory, memory_left = given
        self.__init__(size, limit_bytes, kind=kind, name=name, directory=directory, memory_left=memory_left)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> "SampleCache":
        return self  # a copy of a dataset reads the same samples

    def _publish(self, index: int, start: int, space: int) -> None:
        words = self._file.words
        # The lock comes between the sample and its offset also for its order of memory: see CacheFile.locked.
        with self._file.locked():
            if not self._index[index]:
                words[_ENTRIES] += 1
                words[_STORED] += space
                self._index[index] = self._file.data_start + start
            elif words[NEXT] == start + space:  # somebody else was faster
                words[NEXT] = start

    def _refuse(self, problem: str) -> bool:
        words = self._file.words
        with self._file.locked():
            first, words[_REFUSED] = not words[_REFUSED], 1
        if first:
            logger.warning(
                "The cache is full: it holds %d of %d samples in %d MiB, and %s. The rest is read again each time. "
                "Raise cache_limit if there is memory for it.",
                words[_ENTRIES],
                self.size,
                words[_STORED] >> 20,
                problem,
            )
        return False

    # --- counters -----------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Begin as a process of its own; after a fork, too, where another thread may have held the lock."""
        self._counting = threading.Lock()
        self._slot: int | None = None

    def _count(self, what: int) -> None:
        with self._counting:  # between the threads of this process only
            if self._slot is None:
                self._slot = self._claim_slot()
            self._slots[self._slot + what] += 1

    def _claim_slot(self) -> int:
        """The counters of this process: new ones, or those of a process that has ended, which are counted on."""
        own = os.getpid()
        with self._file.locked():
            starts = range(0, _SLOTS * _SLOT_WORDS, _SLOT_WORDS)
            for wanted in (lambda pid: pid == own, lambda pid: pid == 0, _has_ended):
                for start in starts:
                    if wanted(self._slots[start + _PID]):
                        self._slots[start + _PID] = own
                        return start
        return starts[-1]  # more live processes than slots: the last one counts roughly


def _head_bytes(ndim: int) -> int:
    return -(-(_HEAD.size + 8 * ndim) // _ALIGN) * _ALIGN


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.ESRCH  # of another user's we may not ask, but it lives
    return False


def _renew_all() -> None:
    for cache in _caches:
        cache._renew()


os.register_at_fork(after_in_child=_renew_all)
