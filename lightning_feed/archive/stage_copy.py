"""Files of a staged copy: what lies at the source, how the copy differs from it, and copying in threads."""

import errno
import heapq
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from lightning_feed.archive.stage_path import shown
from lightning_feed.errors import ArchiveError, DatasetError

THREADS = 4
_FETCHING_THREADS = 32
"""Each waits for the network most of the time."""
_CHUNK_BYTES = 1 << 20
"""Read at once: between two of them a stop is heeded and the bar moves."""

Identity = tuple[int, int]
"""Device and inode: the same for one file or folder whatever paths, mounts and links lead to it."""


class FileStamp(NamedTuple):
    """What tells one version of a file from the next."""

    size: int
    """Bytes; -1 for what is no regular file."""
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStamp":
        """The stamp of what a status was read of."""
        return cls(status.st_size if stat.S_ISREG(status.st_mode) else -1, status.st_mtime_ns)


@dataclass(eq=False)
class Tree:
    """A file, or all files and folders below a folder, by path below it; the path of the root is ``""``."""

    root: str
    files: dict[str, FileStamp] = field(default_factory=dict)
    folders: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Mode and mtime_ns of each, before what is in it."""
    identities: set[Identity] = field(default_factory=set)
    """Of all folders, and of the files that links lead to: what is lost if it lies in a copy that goes."""

    def add(self, name: str, status: os.stat_result) -> None:
        """Add what lies at ``name``."""
        if stat.S_ISDIR(status.st_mode):
            self.folders[name] = (stat.S_IMODE(status.st_mode), status.st_mtime_ns)
        else:
            self.files[name] = FileStamp.of(status)


def below(root: str, name: str) -> str:
    """The path of ``name`` below ``root``; the name of ``root`` itself is ``""``."""
    return f"{root}/{name}" if name else root


def identity_of(path: str) -> Identity | None:
    """The identity of what lies at a path, a link being a link; None where there is nothing to be seen."""
    with suppress(OSError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino
    return None


def identities_above(path: str) -> set[Identity]:
    """The identities of what lies at a path and of the folders above it, as far as they exist."""
    return {found for found in map(identity_of, (path, *map(str, Path(path).parents))) if found is not None}


def overlap_error(source: str, target: str) -> ArchiveError:
    """The refusal of a copy that would be written into its source, or whose removal would take its source along."""
    return ArchiveError(
        f"{shown(source)} cannot be staged to {shown(target)}: one lies in the other, perhaps by another mount or a "
        "link. Give a DEST elsewhere, in memory (/dev/shm/<user>) or on a local disk."
    )


# --- what is there ------------------------------------------------------------------------------------------------


def scan_source(root: str) -> Tree:
    """Sizes and times of a file, or of all files below a folder; links are followed.

    Raises:
        ArchiveError: when there is nothing or it cannot be read, when links go round in a circle or lead nowhere, and
            for what is neither file nor folder.
    """
    tree = Tree(root)
    for name, status, linked in _walk(root, follow=True):
        if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
            raise ArchiveError(
                f"{shown(below(root, name))} is neither a file nor a folder ({stat.filemode(status.st_mode)}), so it "
                "cannot be copied. Move it away."
            )
        tree.add(name, status)
        if linked or name in tree.folders:
            tree.identities.add((status.st_dev, status.st_ino))
    return tree


def scan_copy(target: str, source: Tree) -> Tree:
    """The same of a copy, without following links. Where there is nothing, the tree is empty.

    Raises:
        ArchiveError: when a part of the source lies in the copy, or the copy in the source.
    """
    tree = Tree(target)
    if identities_above(target) & source.identities:
        raise overlap_error(source.root, target)
    for name, status, _ in _walk(target, follow=False) if os.path.lexists(target) else ():
        if (status.st_dev, status.st_ino) in source.identities:
            raise overlap_error(source.root, target)
        tree.add(name, status)
    return tree


def _walk(root: str, *, follow: bool) -> Iterator[tuple[str, os.stat_result, bool]]:
    """(path below the root, status, whether a link leads to it) of all there is, folders before what is in them."""
    try:
        status = os.stat(root, follow_symlinks=follow)  # noqa: PTH116 - a million times, Path objects cost too much
    except OSError as error:
        raise ArchiveError(f"{shown(root)} cannot be staged: {error.strerror}. Give a folder or a file.") from error
    # A stack: trees may be deeper than Python's. With each entry go the folders above it.
    waiting = [("", status, True, frozenset[Identity]())]
    while waiting:
        name, status, linked, above = waiting.pop()
        yield name, status, linked
        if stat.S_ISDIR(status.st_mode):
            inside = above | {(status.st_dev, status.st_ino)}
            if inside == above:
                raise ArchiveError(
                    f"{shown(below(root, name))} is a symbolic link to a folder above it, so there is no end to what "
                    "would be copied. Remove the link."
                )
            prefix = f"{name}/" if name else ""
            for entry, found in _entries(below(root, name), follow=follow):
                waiting.append((f"{prefix}{entry.name}", found, entry.is_symlink(), inside))


def _entries(path: str, *, follow: bool) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """What lies in a folder; what is deleted meanwhile is left out."""
    try:
        with os.scandir(path) as entries:
            listed = list(entries)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ArchiveError(
            f"The folder {shown(path)} cannot be read: {error.strerror}. Make it readable, or move it away."
        ) from error
    for entry in listed:
        try:
            yield entry, entry.stat(follow_symlinks=follow)
        except OSError as error:
            if os.path.lexists(entry.path):
                dangling = " (a symbolic link that leads nowhere)" if entry.is_symlink() else ""
                raise ArchiveError(
                    f"{shown(entry.path)} cannot be read: {error.strerror}{dangling}. Repair or remove it."
                ) from error


# --- what is to be done -------------------------------------------------------------------------------------------


class CopyPlan(NamedTuple):
    """The difference between a source and its copy."""

    to_copy: list[str]
    """Files that the copy lacks, or has in another size or time."""
    to_remove: list[str]
    """Files and folders that the source does not have, each after what is in it."""
    new_bytes: int = 0
    """What the copy takes beyond what lies there already."""
    new_files: int = 0


def plan_copy(source: Tree, copy: Tree, *, afresh: bool = False) -> CopyPlan:
    """Compare a source with its copy by the size and time of each file; ``afresh``, all is removed and copied."""
    stale = [name for name in copy.files if afresh or name not in source.files]
    stale += [name for name in reversed(copy.folders) if afresh or name not in source.folders]
    kept = {} if afresh else {name: stamp for name, stamp in copy.files.items() if name in source.files}
    to_copy = [name for name, stamp in source.files.items() if kept.get(name) != stamp]
    block = os.statvfs(Path(copy.root).parent).f_frsize

    def blocks(stamp: FileStamp | None) -> int:
        return -(-stamp.size // block) * block if stamp else 0

    # A file that changed stays until its new version is whole: both are there for a while.
    grown = sum(max(0, blocks(source.files[name]) - blocks(kept.get(name))) for name in to_copy)
    twice = sum(heapq.nlargest(THREADS, (blocks(source.files[name]) for name in to_copy if name in kept)))
    freed = sum(blocks(copy.files.get(name)) for name in stale)
    new_files = len(source.files) + len(source.folders) + len(stale) - len(copy.files) - len(copy.folders)
    return CopyPlan(to_copy, stale, max(0, grown + twice - freed), new_files)


def remove_entries(root: str, names: Iterable[str]) -> None:
    """Remove files and empty folders of a copy; those that are gone already are gone."""
    for name in names:
        path = below(root, name)
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.rmdir(path)  # noqa: PTH106
            else:
                os.unlink(path)  # noqa: PTH108


# --- the work -----------------------------------------------------------------------------------------------------


class FileWork:
    """Copies or compares files in a few threads.

    Args:
        source: where from.
        target: where to; its folders exist.
        parts: a folder on the same file system, for files that are not yet whole.
        progress: called with the bytes done since the last call, by one thread at a time.
        fetch: brings a file of that name and stamp to a path; None for files of this machine, which are copied.
    """

    def __init__(
        self,
        source: Tree,
        target: str,
        parts: Path,
        progress: Callable[[int], object],
        fetch: Callable[[str, FileStamp, Path], None] | None = None,
    ) -> None:
        self._source, self._target, self._parts, self._progress = source, target, parts, progress
        self._fetch = fetch
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._unreadable: list[str] = []
        self._found: list[str] = []

    def copy(self, names: Iterable[str]) -> list[str]:
        """Copy files, each to a part that is renamed when it is whole, and tell which are there now.

        One that changes or vanishes meanwhile is left out.

        Raises:
            ArchiveError: when the target is full or cannot be written, or when files cannot be read.
        """
        self._in_threads(self._copy_file, names)
        if self._unreadable:
            more = len(self._unreadable) - 5
            raise ArchiveError(
                f"{len(self._unreadable)} of {len(self._source.files)} files cannot be read: "
                f"{'; '.join(sorted(self._unreadable)[:5])}{f', and {more} more' if more > 0 else ''}. Make them "
                "readable or remove them, and run it again: what is copied is kept."
            )
        return self._found

    def compare(self) -> list[str]:
        """The files whose copies have other contents, compared byte by byte."""
        self._in_threads(self._compare_file, self._source.files)
        return self._found

    def _in_threads(self, work: Callable[[str], None], names: Iterable[str]) -> None:
        # The largest first: no thread is left with a large one at the end.
        waiting = sorted(names, key=lambda name: self._source.files[name].size)

        def drain() -> None:
            while not self._stop.is_set():
                with self._lock:
                    name = waiting.pop() if waiting else None
                if name is None:
                    return
                work(name)

        threads = THREADS if self._fetch is None else _FETCHING_THREADS
        with ThreadPoolExecutor(threads) as pool:  # which waits: nothing writes once the lock on the copy is given back
            try:
                running = [pool.submit(drain) for _ in range(threads)]
                wait(running, return_when=FIRST_EXCEPTION)
            finally:  # after Ctrl-C too
                self._stop.set()
        for future in running:
            future.result()

    def _copy_file(self, name: str) -> None:
        path, part = below(self._source.root, name), self._parts / str(threading.get_ident())
        if self._fetch is not None:
            self._place(name, part, lambda: self._fetched(name, part))
            return
        try:
            # O_NONBLOCK: what is a FIFO by now would be waited for.
            source = FileIO(path, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
        except FileNotFoundError:
            return
        except OSError as error:
            self._unreadable.append(f"{shown(path)}: {error.strerror}")
            return
        with source:
            self._place(name, part, lambda: self._write_part(source, part, name))

    def _fetched(self, name: str, part: Path) -> bool:
        assert self._fetch is not None
        try:
            self._fetch(name, self._source.files[name], part)
        except DatasetError:
            return False  # gone, or another by now
        self._advance(self._source.files[name].size)
        return True

    def _place(self, name: str, part: Path, write: Callable[[], bool]) -> None:
        """Give a file its name once ``write`` has written the whole of it to ``part``."""
        path = below(self._source.root, name)
        try:
            if write():
                part.replace(below(self._target, name))
                self._found.append(name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise ArchiveError(f"{shown(path)} could not be copied to {shown(self._target)}: {error}") from error
            raise ArchiveError(
                f"{shown(self._target)} is full ({error.strerror}), so something else writes there too: there was room "
                f"when it was checked. {shown(path)} was not copied; those before it are whole and stay. Make room "
                "and run it again."
            ) from error
        finally:
            part.unlink(missing_ok=True)  # at once: a full /dev/shm kills loaders

    def _write_part(self, source: FileIO, part: Path, name: str) -> bool:
        """Whether the whole file was copied: False when it changed or the work is to stop."""
        stamp, status = self._source.files[name], os.fstat(source.fileno())
        if stamp != FileStamp.of(status):
            return False
        with part.open("wb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                if self._stop.is_set():
                    return False
                target.write(chunk)
                self._advance(len(chunk))
            # A single file lies among those of others; what is in a folder of ours only we can reach.
            os.fchmod(target.fileno(), status.st_mode & (0o777 if name else 0o700))
        os.utime(part, ns=(stamp.mtime_ns, stamp.mtime_ns))
        return stamp == FileStamp.of(os.fstat(source.fileno())) == FileStamp.of(part.stat())

    def _compare_file(self, name: str) -> None:
        try:
            with open(below(self._source.root, name), "rb") as source, open(below(self._target, name), "rb") as copy:  # noqa: PTH123
                if sys.platform == "linux":
                    # What was just written is read from the disk, not from memory, where it would always be right.
                    os.fsync(copy.fileno())
                    os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while (ours := source.read(_CHUNK_BYTES)) == copy.read(_CHUNK_BYTES):
                    if not ours or self._stop.is_set():
                        return
                    self._advance(len(ours))
        except FileNotFoundError:
            pass
        self._found.append(name)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._progress(count)
