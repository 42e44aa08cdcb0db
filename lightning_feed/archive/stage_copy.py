"""Copies files in a few threads, each to a part beside the copy that is renamed into place when it is whole."""

import errno
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from lightning_feed.archive.stage_tree import FileStamp, Tree, below, shown
from lightning_feed.errors import ArchiveError

THREADS = 4
_CHUNK_BYTES = 16 << 20
"""Copied in one system call: between two of them a stop is heeded and the bar moves."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
"""What a fast way to copy answers where a file system or kernel does not have it; the next way is tried."""

Step = Callable[[int, int, int, int], int]
"""(from, to, offset, count) -> bytes copied; ``to`` stands at the offset."""


@dataclass
class CopyJob:
    """What threads that copy share.

    Attributes:
        source: where from.
        target: where to.
        parts: a folder on the same file system as the target.
        stop: set to end the work early; what is whole stays, and parts are gone on with next time.
    """

    source: Tree
    target: str
    parts: str
    stop: threading.Event = field(default_factory=threading.Event)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """Names and reasons."""
    copied: list[str] = field(default_factory=list)
    """Names of those that are whole and in place."""
    done: list[int] = field(default_factory=list)
    """Bytes done, one number for each thread: each adds to its own."""

    def part(self, name: str) -> str:
        """Where a file is written until it is whole. A changed file has another part."""
        return f"{self.parts}/{part_name(name, self.source.files[name])}"


def part_name(name: str, stamp: FileStamp) -> str:
    """The name of the part of one version of a file."""
    return hashlib.blake2b(os.fsencode(f"{stamp.size} {stamp.mtime_ns} {name}"), digest_size=16).hexdigest()


def copy_files(job: CopyJob, names: Iterable[str], *, report: Callable[[int], None], threads: int = THREADS) -> None:
    """Copy files to a target whose folders exist. One that changes or vanishes meanwhile is left out.

    Args:
        job: from where to where.
        names: which files.
        report: called now and then in this thread with the bytes done in all.
        threads: how many files at once.

    Raises:
        ArchiveError: when the target is full or cannot be written, or when files cannot be read.
    """
    _in_threads(job, names, lambda name, add: _copy_one(job, name, add), report=report, threads=threads)
    if job.unreadable:
        listed = "; ".join(f"{shown(job.source.path(name))}: {reason}" for name, reason in sorted(job.unreadable)[:5])
        more = len(job.unreadable) - 5
        raise ArchiveError(
            f"{len(job.unreadable)} of {len(job.source.files)} files cannot be read: {listed}"
            f"{f', and {more} more' if more > 0 else ''}. Make them readable or remove them, and run it again: what is "
            "copied is kept."
        )


def differing_files(
    job: CopyJob, names: Iterable[str], *, report: Callable[[int], None], threads: int = THREADS
) -> list[str]:
    """The files whose contents are not those of the source, each compared byte by byte; as in :func:`copy_files`."""
    found: list[str] = []

    def compare(name: str, add: Callable[[int], None]) -> None:
        if not _same_bytes(job, name, add):
            found.append(name)

    _in_threads(job, names, compare, report=report, threads=threads)
    return found


def _in_threads(
    job: CopyJob,
    names: Iterable[str],
    work: Callable[[str, Callable[[int], None]], None],
    *,
    report: Callable[[int], None],
    threads: int,
) -> None:
    waiting = _Shared(names)
    job.done[:] = [0] * threads
    futures: list[Future[None]] = [Future() for _ in range(threads)]
    running = [
        threading.Thread(target=_drain, args=(job, waiting, work, number, future), daemon=True)
        for number, future in enumerate(futures)
    ]
    try:
        for thread in running:
            thread.start()
        for thread in running:
            while thread.is_alive():
                thread.join(0.1)
                report(sum(job.done))
    finally:  # after Ctrl-C too: nothing may write to the copy once the lock on it is given back
        if any(thread.is_alive() for thread in running):
            job.stop.set()
        for thread in running:
            if thread.ident is not None:
                thread.join()
    report(sum(job.done))
    for future in futures:
        future.result()


def _drain(
    job: CopyJob,
    waiting: Iterator[str],
    work: Callable[[str, Callable[[int], None]], None],
    number: int,
    future: "Future[None]",
) -> None:
    def add(count: int) -> None:
        job.done[number] += count

    try:
        for name in waiting:
            if job.stop.is_set():
                break
            work(name, add)
    except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
        job.stop.set()
        future.set_exception(error)
    else:
        future.set_result(None)


class _Shared(Iterator[str]):
    """An iterator that several threads take from."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = iter(names)
        self._lock = threading.Lock()

    def __next__(self) -> str:
        with self._lock:
            return next(self._names)


def _copy_one(job: CopyJob, name: str, add: Callable[[int], None]) -> None:
    stamp, path, part = job.source.files[name], job.source.path(name), job.part(name)
    try:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO by now would be waited for
    except FileNotFoundError:
        return
    except OSError as error:
        job.unreadable.append((name, error.strerror or str(error)))
        return
    try:
        status = os.fstat(source)
        if stamp != (status.st_size, status.st_mtime_ns) or not stat.S_ISREG(status.st_mode):
            return
        if not _write_part(source, part, stamp, stop=job.stop, add=add):
            return
        if stamp != _stamp_of(source):
            Path(part).unlink()  # changed while it was read: this is neither the old file nor the new
            return
        # A single file lies among those of others; what is in a folder of ours only we can reach.
        os.chmod(part, status.st_mode & (0o777 if job.source.is_folder else 0o700))  # noqa: PTH101 - as in stage_tree
        os.utime(part, ns=(stamp.mtime_ns, stamp.mtime_ns))
        os.replace(part, below(job.target, name))  # noqa: PTH105
        job.copied.append(name)
    except ArchiveError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            # The part goes at once: a full /dev/shm kills loaders, and a full disk everything.
            Path(part).unlink(missing_ok=True)
            raise ArchiveError(
                f"{shown(job.target)} is full ({error.strerror}), so something else writes there too: there was room "
                f"when it was checked. {shown(path)} was not copied; those before it are whole and stay. Make room "
                "and run it again."
            ) from error
        raise ArchiveError(f"{shown(path)} could not be copied to {shown(job.target)}: {error}") from error
    finally:
        os.close(source)


def _write_part(source: int, part: str, stamp: FileStamp, *, stop: threading.Event, add: Callable[[int], None]) -> bool:
    """Write a part, or go on with one; False when it was stopped or when the source is shorter than it was."""
    target = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        at = min(os.lseek(target, 0, os.SEEK_END), stamp.size)
        os.lseek(target, at, os.SEEK_SET)
        add(at)
        steps = _steps(source, target) if at < stamp.size else []
        while at < stamp.size and not stop.is_set():
            try:
                count = steps[0](source, target, at, min(_CHUNK_BYTES, stamp.size - at))
            except OSError as error:
                if error.errno not in _CANNOT or len(steps) == 1:
                    raise
                del steps[0]
                os.lseek(target, at, os.SEEK_SET)
                continue
            if count == 0:
                break
            at += count
            add(count)
        return at == stamp.size
    finally:
        os.close(target)


def _steps(source: int, target: int) -> list[Step]:
    """Ways to copy, the cheapest first."""
    if sys.platform != "linux":
        return [_by_hand]
    if os.fstat(source).st_dev == os.fstat(target).st_dev:
        # Within a file system the blocks may be shared instead of copied.
        return [_range, _send, _by_hand]
    return [_send, _by_hand]


def _range(source: int, target: int, offset: int, count: int) -> int:
    return os.copy_file_range(source, target, count, offset)


def _send(source: int, target: int, offset: int, count: int) -> int:
    return os.sendfile(target, source, offset, count)


def _by_hand(source: int, target: int, offset: int, count: int) -> int:
    left = memoryview(os.pread(source, min(count, 1 << 20), offset))
    size = len(left)
    while left:
        left = left[os.write(target, left) :]
    return size


def _stamp_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


def _same_bytes(job: CopyJob, name: str, add: Callable[[int], None]) -> bool:
    try:
        with (
            open(job.source.path(name), "rb", buffering=0) as source,  # noqa: PTH123
            open(below(job.target, name), "rb", buffering=0) as copy,  # noqa: PTH123
        ):
            if sys.platform == "linux":
                # What was just written is read from the disk, not from memory, where it would always be right.
                os.fsync(copy.fileno())
                os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not job.stop.is_set():
                ours, theirs = _read_full(source.fileno()), _read_full(copy.fileno())
                if ours != theirs:
                    return False
                if not ours:
                    return True
                add(len(ours))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ArchiveError(f"{shown(job.source.path(name))} could not be compared with its copy: {error}") from error
    return True


def _read_full(fd: int) -> bytes:
    """Up to 1 MiB, less only at the end: two files that give their bytes in other pieces are still compared well."""
    pieces, left = [], 1 << 20
    while left and (piece := os.read(fd, left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
