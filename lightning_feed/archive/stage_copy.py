"""A folder or a file made equal to another: both listed, compared, and what differs copied in threads."""

import errno
import heapq
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lightning_feed.archive.folder import below, open_file, walk
from lightning_feed.archive.system import check_room, owner_of, progress_bar
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
"""Read at once: between two of them a stop is heeded and the bar moves."""

Advance = Callable[[int], bool]
"""Called with the bytes that were done; whether to go on."""
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
    folders: list[str] = field(default_factory=list)
    """Each before what is in it."""
    identities: set[Identity] = field(default_factory=set)
    """Of all folders, and of the files that links lead to: what is lost if it lies in a copy that goes."""

    def add(self, name: str, status: os.stat_result) -> None:
        """Add what lies at ``name``."""
        if stat.S_ISDIR(status.st_mode):
            self.folders.append(name)
        else:
            self.files[name] = FileStamp.of(status)


# --- what is there ----------------------------------------------------------------------------------------------------


def scan_source(root: str) -> Tree:
    """Sizes and times of a file, or of all files below a folder; links are followed.

    Raises:
        ArchiveError: when there is nothing or it cannot be read, when links go round in a circle or lead nowhere, and
            for what is neither file nor folder.
    """
    tree = Tree(root)
    for name, status, linked in _listed(root, follow=True):
        if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
            raise ArchiveError(f"{below(root, name)} is neither a file nor a folder. Move it away.")
        tree.add(name, status)
        if linked or stat.S_ISDIR(status.st_mode):
            tree.identities.add((status.st_dev, status.st_ino))
    if not tree.files:
        raise ArchiveError(f"There are no files in {root}. Give the folder that has them.")
    return tree


def scan_copy(target: str, source: Tree) -> Tree:
    """The same of a copy, without following links. Where there is nothing, the tree is empty.

    Raises:
        ArchiveError: when a part of the source lies in the copy, or the copy in the source.
    """
    tree = Tree(target)
    if identities_above(target) & source.identities:
        raise overlap_error(source.root, target)
    for name, status, _ in _listed(target, follow=False) if os.path.lexists(target) else ():
        if (status.st_dev, status.st_ino) in source.identities:
            raise overlap_error(source.root, target)
        tree.add(name, status)
    return tree


def _listed(root: str, *, follow: bool) -> Iterator[tuple[str, os.stat_result, bool]]:
    """(path below the root, status, whether a link leads to it) of all there is, folders before what is in them."""
    try:
        status = os.stat(root, follow_symlinks=follow)  # noqa: PTH116 - a million times, Path objects cost too much
    except OSError as error:
        raise ArchiveError(f"{root} cannot be staged: {error.strerror}. Give a folder or a file.") from error
    if not stat.S_ISDIR(status.st_mode):
        yield "", status, True
        return
    for folder, status, entries in walk(root, follow=follow, error=ArchiveError):
        yield folder, status, False
        for entry in entries:
            if entry.is_dir(follow_symlinks=follow):
                continue
            try:
                found = entry.stat(follow_symlinks=follow)
            except OSError as error:
                if not os.path.lexists(entry.path):
                    continue  # gone in the meantime
                nowhere = " (a symbolic link that leads nowhere)" if entry.is_symlink() else ""
                raise ArchiveError(f"{entry.path} cannot be read: {error.strerror}{nowhere}. Remove it.") from error
            yield below(folder, entry.name), found, entry.is_symlink()


def identities_above(path: str) -> set[Identity]:
    """The identities of what lies at a path and of the folders above it, as far as they exist; links are links."""
    found = set()
    for place in (Path(path), *Path(path).parents):
        with suppress(OSError):
            status = os.lstat(place)
            found.add((status.st_dev, status.st_ino))
    return found


def lies_in(inner: str, outer: str) -> bool:
    """Whether a path is another, or lies below it, under whatever mount or link."""
    with suppress(OSError):
        status = os.lstat(outer)
        return (status.st_dev, status.st_ino) in identities_above(inner)
    return False


def overlap_error(source: str, target: str) -> ArchiveError:
    """The refusal of a copy that would be written into its source, or whose removal would take its source along."""
    return ArchiveError(
        f"{source} cannot be staged to {target}: one lies in the other, perhaps by another mount or a link. Give a "
        "DEST elsewhere, in memory (/dev/shm/<user>) or on a local disk."
    )


# --- a copy made equal to it ------------------------------------------------------------------------------------------


class Mirror:
    """A copy that is to equal its source.

    Args:
        source: absolute path of a folder or a file.
        target: path of the copy.
        parts: a folder on the same file system, for files that are not yet whole.

    Attributes:
        to_copy: files that the copy lacks, or has in another version.
        to_remove: files and folders that the source does not have, each after what is in it.
        copied: bytes of each file that was copied.
        removed: how many files and folders were removed.
    """

    threads = 4

    def __init__(self, source: str, target: str, parts: Path) -> None:
        self.target, self.parts = target, parts
        self.source, self.copy = Tree(source), Tree(target)
        self.to_copy, self.to_remove = list[str](), list[str]()
        self.copied: dict[str, int] = {}
        self.removed = 0

    def compare(self, *, contents: bool = False, afresh: bool = False) -> list[str]:
        """List both and compare the stamps of their files. Gives what differs.

        Args:
            contents: compare files byte by byte, too, where nothing else differs.
            afresh: remove and copy everything.

        Raises:
            ArchiveError: as :func:`scan_source` and :func:`scan_copy`.
        """
        self.source = source = self.scan()
        self.copy = copy = scan_copy(self.target, source)
        folders = set(source.folders)
        self.to_remove = [name for name in copy.files if afresh or name not in source.files]
        self.to_remove += [name for name in reversed(copy.folders) if afresh or name not in folders]
        self.to_copy = [name for name, stamp in source.files.items() if afresh or copy.files.get(name) != stamp]
        if contents and not self.to_copy and not self.to_remove:
            self.to_copy = self._in_threads("Comparing", source.files, self._differs)
            if self.to_copy:
                say = "%d files in %s differ from their source in the same size and time, and are copied again."
                logger.warning(say, len(self.to_copy), self.target)
        return self.to_copy + self.to_remove

    def check_room(self) -> None:
        """Refuse a copy that does not fit."""
        shutil.rmtree(self.parts, ignore_errors=True)  # of a process that was killed
        folder = str(Path(self.target).parent)
        block = os.statvfs(folder).f_frsize

        def taken(tree: Tree, name: str) -> int:
            return -(-tree.files[name].size // block) * block if name in tree.files else 0

        gone = set(self.to_remove)  # before the first is copied
        replaced = {name: taken(self.copy, name) for name in self.to_copy if name not in gone}
        grown = sum(max(0, taken(self.source, name) - replaced.get(name, 0)) for name in self.to_copy)
        # One that changed stays until its new version is whole: both are there for a while.
        twice = sum(heapq.nlargest(self.threads, (taken(self.source, name) for name, size in replaced.items() if size)))
        new_bytes = grown + twice - sum(taken(self.copy, name) for name in gone)
        new_files = len(self.source.files) + len(self.source.folders) - len(self.copy.files) - len(self.copy.folders)
        check_room(new_bytes, new_files, folder)

    def apply(self) -> None:
        """Remove what is to go, and copy each file to a part that is renamed when it is whole.

        A file that vanishes or changes meanwhile has no copy, or another stamp, when they are compared again.

        Raises:
            ArchiveError: when a file cannot be read, or the target is full, cannot be written, or another user's.
        """
        self._remove(self.to_remove)
        self.parts.mkdir(mode=0o700, exist_ok=True)
        for name in self.source.folders:
            with suppress(FileExistsError):
                os.mkdir(below(self.target, name), 0o700)  # noqa: PTH102
            if not name:
                check_owner(self.target)  # another user may have been first
        copied = self._in_threads("Staging", self.to_copy, self._copy_file)
        self.copied |= {name: self.source.files[name].size for name in copied}

    def finish(self) -> None:
        """Tidy up, and keep the copy from other users, which an earlier version did not."""
        shutil.rmtree(self.parts, ignore_errors=True)
        mode = os.stat(self.target).st_mode  # noqa: PTH116
        if mode & 0o077:  # else its ctime would change each time
            os.chmod(self.target, mode & 0o700)  # noqa: PTH101

    def remove(self) -> None:
        """Remove the copy."""
        copy = scan_copy(self.target, self.source)
        self._remove([*copy.files, *reversed(copy.folders)])

    def _remove(self, names: list[str]) -> None:
        """Remove files and empty folders of the copy; those that are gone already are gone."""
        for name in names:
            path = below(self.target, name)
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    os.rmdir(path)  # noqa: PTH106
                else:
                    os.unlink(path)  # noqa: PTH108
        self.removed += len(names)

    def scan(self) -> Tree:
        """List the source."""
        return scan_source(self.source.root)

    def fetch(self, name: str, part: Path, advance: Advance) -> bool:
        """Copy a file of the source to ``part``. False when that is to stop.

        Raises:
            FileNotFoundError: when it is gone.
            OSError: when it cannot be read or written.
        """
        with open_file(below(self.source.root, name)) as source, part.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                copy.write(chunk)
                if not advance(len(chunk)):
                    return False
            os.fchmod(copy.fileno(), os.fstat(source.fileno()).st_mode & 0o700)
        return True

    def _copy_file(self, name: str, advance: Advance) -> bool:
        """Whether the whole file is there now."""
        part, stamp = self.parts / str(threading.get_ident()), self.source.files[name]
        try:
            if not self.fetch(name, part, advance):
                return False
            part.chmod(part.stat().st_mode & 0o700)  # nobody else may do anything with the copy
            os.utime(part, ns=(stamp.mtime_ns, stamp.mtime_ns))
            part.replace(below(self.target, name))
        except FileNotFoundError:
            return False
        except OSError as error:
            if isinstance(error, ArchiveError):
                raise
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            todo = "Make room: something else writes there too" if full else "Make it readable, or move it away"
            raise ArchiveError(
                f"{below(self.source.root, name)} could not be copied to {self.target}: {error.strerror}. {todo}, and "
                "run it again: files that are copied are whole, and stay."
            ) from error
        finally:
            part.unlink(missing_ok=True)  # at once: a full /dev/shm kills loaders
        return True

    def _differs(self, name: str, advance: Advance) -> bool:
        try:
            with open_file(below(self.source.root, name)) as source, open_file(below(self.target, name)) as copy:
                if hasattr(os, "posix_fadvise"):
                    # What was just written is read from the disk, not from memory, where it would always be right.
                    os.fsync(copy.fileno())
                    os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while (ours := source.read(_CHUNK_BYTES)) == copy.read(_CHUNK_BYTES):
                    if not ours or not advance(len(ours)):
                        return False
        except FileNotFoundError:
            pass
        return True

    def _in_threads(self, what: str, names: Iterable[str], work: Callable[[str, Advance], bool]) -> list[str]:
        """Do the work for each file, the largest first; gives the names for which it gave True."""
        waiting = sorted(names, key=lambda name: self.source.files[name].size)
        total = sum(self.source.files[name].size for name in waiting)
        found: list[str] = []
        lock, stop = threading.Lock(), threading.Event()

        def advance(count: int) -> bool:
            with lock:
                bar.update(count)
            return not stop.is_set()

        def drain() -> None:
            while not stop.is_set():
                with lock:
                    name = waiting.pop() if waiting else None
                if name is None:
                    return
                if work(name, advance):
                    found.append(name)

        bar = progress_bar(f"{what} {Path(self.target).name}", total)
        with bar, ThreadPoolExecutor(self.threads) as pool:  # which waits for its threads
            try:
                running = [pool.submit(drain) for _ in range(self.threads)]
                wait(running, return_when=FIRST_EXCEPTION)
            finally:  # after Ctrl-C too
                stop.set()
        for future in running:
            future.result()
        return found


def check_owner(target: str | os.PathLike[str]) -> None:
    """Refuse to write into what another user made."""
    if owner_of(target) not in (None, os.geteuid()):
        raise ArchiveError(f"{target} belongs to another user. Give a folder of your own: /dev/shm/<user>.")
