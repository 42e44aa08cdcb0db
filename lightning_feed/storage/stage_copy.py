"""Updates a copy of a folder, a file or a URL: lists both sides, compares sizes and times, copies the differences."""

import errno
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lightning_feed.errors import ArchiveError
from lightning_feed.storage.file_system import check_room
from lightning_feed.storage.folder import below, open_file, walk
from lightning_feed.storage.remote import GoneError, RemotePlace
from lightning_feed.storage.remote_folder import list_files, stamp_of
from lightning_feed.storage.system import owner_of, progress_bar

_CHUNK_BYTES = 1 << 20
_PART_BYTES = 16 << 20
_PARTS = 4
"""Concurrent part requests of one remote file."""


class FileStamp(NamedTuple):
    """Size and modification time of a file."""

    size: int
    """Bytes; -1 if it is not a regular file."""
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStamp":
        """Make the stamp from a file's status."""
        return cls(status.st_size if stat.S_ISREG(status.st_mode) else -1, status.st_mtime_ns)


Tree: TypeAlias = dict[str, FileStamp | None]
"""Stamps by relative path, for one file, or for all files and folders below a root folder. A folder has None as stamp.
Each folder comes before its contents. The path of the root is ``""``."""


# --- sources ----------------------------------------------------------------------------------------------------------


class LocalOrigin:
    """A folder or a file on this machine.

    Args:
        root: its absolute path.
        target: path of the copy.

    Raises:
        ArchiveError: if one is inside the other.
    """

    threads = 4

    def __init__(self, root: str, target: Path) -> None:
        self.root = root
        self._target = target
        real = Path(os.path.realpath(root))
        same = any(is_same(path, root) for path in (target, *target.parents))
        if same or any(path.is_relative_to(target) for path in (Path(root), real)):
            raise overlap_error(root, target)

    def scan(self) -> Tree:
        """Return sizes and times of all files, following links.

        Raises:
            ArchiveError: if there are no files or they cannot be read; if links form a cycle, are broken, or lead into
                the copy; or for an entry that is neither file nor folder.
        """
        tree: Tree = {}
        for name, status, linked in _listed(self.root, follow=True):
            path = below(self.root, name)
            if linked:
                real = Path(os.path.realpath(path))
                if real.is_relative_to(self._target) or self._target.is_relative_to(real):
                    raise overlap_error(self.root, self._target)
            tree[name] = stamp = _stamp(status)
            if stamp is not None and stamp.size < 0:
                raise ArchiveError(f"{path} is neither a file nor a folder. Move it away.")
        if not any(tree.values()):
            raise ArchiveError(f"There are no files in {self.root}. Choose the folder that has them.")
        return tree

    def fetch(self, name: str, stamp: FileStamp, part: Path, advance: Callable[[int], None]) -> None:
        """Copy a file to ``part``.

        Raises:
            OSError: if it cannot be read or written, or has changed since the listing.
        """
        with open_file(below(self.root, name)) as source, part.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                copy.write(chunk)
                advance(len(chunk))
            status = os.fstat(source.fileno())
            if FileStamp.of(status) != stamp:
                raise OSError(errno.EBUSY, "it changed during the copy")
            os.fchmod(copy.fileno(), status.st_mode & 0o700)


class RemoteOrigin:
    """A remote place. Modification times of the copied files encode the remote version."""

    threads = 32
    """Many, because each mostly waits for the network."""

    def __init__(self, place: RemotePlace) -> None:
        if place.url.startswith(("file:", "local:")):
            raise ArchiveError(f"{place} is on this machine. Use its path instead of the URL.")
        self.root = str(place)
        self._place = place

    def scan(self) -> Tree:
        """Return sizes and versions of all files, listed now.

        Raises:
            ArchiveError: if they cannot be listed, or the server sends no sizes.
        """
        listing = list_files(self._place, fresh=True)
        files = dict[str, FileStamp | None]()
        folders = dict[str, FileStamp | None]()
        for name, number in listing.files():
            size = int(listing.sizes[number])
            if size < 0:
                url = self._place.url_of(name)
                raise ArchiveError(f"The server reports no size for {url}, so copies cannot be verified.")
            files[name] = FileStamp(size, int(listing.stamps[number]))
            if name:
                folders |= dict.fromkeys(["", *(name[:at] for at, letter in enumerate(name) if letter == "/")])
        return folders | files

    def fetch(self, name: str, stamp: FileStamp, part: Path, advance: Callable[[int], None]) -> None:
        """Download a file to ``part``.

        Raises:
            ArchiveError: if it cannot be read, or differs from the listing.
        """
        connection = self._place.connection()
        url = self._place.url_of(name)
        large = stamp.size > _PART_BYTES
        before = connection.submit(connection.call("info", name)).result() if large else {}
        asked = (
            connection.submit(connection.fetch(name, min(_PART_BYTES, stamp.size - at), begin=at, whole=not large))
            for at in range(0, max(1, stamp.size), _PART_BYTES)
        )
        reading = deque(islice(asked, _PARTS))
        try:
            with part.open("wb") as copy:
                while reading:
                    while not wait(list(reading)[:1], timeout=0.5).done:
                        advance(0)
                    advance(copy.write(reading.popleft().result()))
                    reading.extend(islice(asked, 1))
        finally:
            for one in reading:
                one.cancel()
        # Not compared with the listing: some servers send milliseconds only in listings.
        if large and stamp_of(before) != stamp_of(connection.submit(connection.call("info", name)).result()):
            raise GoneError(f"{url} was replaced while it was copied. Stage it again.")


def _listed(root: str, *, follow: bool) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Yield (path below the root, status, True for a link) of all entries, folders before their contents."""
    try:
        status = os.stat(root, follow_symlinks=follow)  # noqa: PTH116 - a million times, Path objects cost too much
    except OSError as error:
        raise ArchiveError(f"{root} cannot be staged: {error.strerror}. Choose a folder or a file.") from error
    if not stat.S_ISDIR(status.st_mode):
        yield "", status, False
        return
    for folder, status, entries in walk(root, follow=follow, error=ArchiveError):
        yield folder, status, os.path.islink(below(root, folder))  # noqa: PTH114
        for entry in entries:
            if entry.is_dir(follow_symlinks=follow):
                continue
            try:
                found = entry.stat(follow_symlinks=follow)
            except OSError as error:
                if not os.path.lexists(entry.path):
                    continue  # removed in the meantime
                nowhere = " (a symbolic link that leads nowhere)" if entry.is_symlink() else ""
                raise ArchiveError(f"{entry.path} cannot be read: {error.strerror}{nowhere}. Remove it.") from error
            yield below(folder, entry.name), found, entry.is_symlink()


def is_same(one: str | Path, other: str | Path) -> bool:
    """True if two paths lead to one file or folder, and the first is not a link."""
    with suppress(OSError):
        return not os.path.islink(one) and os.path.samefile(one, other)  # noqa: PTH114, PTH121
    return False


def overlap_error(source: str, target: Path) -> ArchiveError:
    """Return the error for a copy that would be written into its source, or whose removal would remove the source."""
    return ArchiveError(
        f"{source} cannot be staged to {target}: one is inside the other, perhaps by a link. Choose another DEST, in "
        "memory (/dev/shm/<user>) or on a local disk."
    )


# --- making a copy equal to its source --------------------------------------------------------------------------------


class Mirror:
    """Makes a copy equal to its source.

    Args:
        source: origin of the copy.
        target: path of the copy.
        parts: a folder on the same file system, for incomplete files.

    Attributes:
        to_copy: files that are missing in the copy or differ from the source, with the source's stamps.
        to_remove: files and folders of the copy that are missing in the source or differ, each after its contents.
    """

    def __init__(self, source: LocalOrigin | RemoteOrigin, target: Path, parts: Path) -> None:
        self._source = source
        self._target = str(target)
        self._parts = parts
        self._wanted = Tree()
        self._there = Tree()
        self.to_copy, self.to_remove = dict[str, FileStamp](), list[str]()

    @property
    def sizes(self) -> list[int]:
        """Size in bytes of each file of the source."""
        return [stamp.size for stamp in self._wanted.values() if stamp is not None]

    def compare(self, *, force: bool) -> None:
        """List both sides, and compare sizes and times.

        Args:
            force: True to remove and copy everything.

        Raises:
            ArchiveError: if one of them cannot be listed.
        """
        self._wanted, self._there = wanted, there = self._source.scan(), scan_copy(self._target)
        self.to_remove = [
            name for name in reversed(there) if force or name not in wanted or wanted[name] != there[name]
        ]
        self.to_copy = {
            name: stamp for name, stamp in wanted.items() if stamp is not None and (force or there.get(name) != stamp)
        }

    def check_room(self) -> None:
        """Refuse a copy that does not fit."""
        shutil.rmtree(self._parts, ignore_errors=True)  # left by a killed process
        folder = str(Path(self._target).parent)
        block = os.statvfs(folder).f_frsize

        def blocks(stamps: Iterable[FileStamp | None]) -> int:
            return sum(-(-stamp.size // block) * block for stamp in stamps if stamp is not None)

        new_bytes = blocks(self.to_copy.values()) - blocks(self._there[name] for name in self.to_remove)
        check_room(new_bytes, len(self._wanted) - len(self.sizes) + len(self.to_copy) - len(self.to_remove), folder)

    def apply(self) -> None:
        """Remove outdated files, and copy each file to a part that is renamed once complete.

        Raises:
            ArchiveError: if a file cannot be read or changes meanwhile, or the target is full, not writable, or another
                user's.
        """
        remove_all(self._target, self.to_remove)
        self._parts.mkdir(mode=0o700, exist_ok=True)
        for name in [name for name, stamp in self._wanted.items() if stamp is None]:
            with suppress(FileExistsError):
                os.mkdir(below(self._target, name), 0o700)  # noqa: PTH102
            if not name:
                check_owner(self._target)  # another user may have made it first
        largest_first = iter(sorted(self.to_copy, key=lambda name: -self.to_copy[name].size))
        bar = progress_bar(f"Staging {Path(self._target).name}", sum(stamp.size for stamp in self.to_copy.values()))
        stop = threading.Event()

        def advance(count: int) -> None:
            bar.update(count)
            if stop.is_set():
                raise InterruptedError(errno.EINTR, "another file could not be copied")

        def drain() -> None:
            for name in largest_first:  # all threads share one iterator
                if stop.is_set():
                    return
                self._copy_file(name, advance)

        with bar, ThreadPoolExecutor(self._source.threads) as pool:  # waits for its threads at the end
            try:
                running = [pool.submit(drain) for _ in range(self._source.threads)]
                for future in wait(running, return_when=FIRST_EXCEPTION).done:
                    future.result()
            finally:  # after Ctrl-C too
                stop.set()

    def _copy_file(self, name: str, advance: Callable[[int], None]) -> None:
        part = self._parts / str(threading.get_ident())
        stamp = self.to_copy[name]
        try:
            self._source.fetch(name, stamp, part, advance)
            part.chmod(part.stat().st_mode & 0o700)  # only this user may access the copy
            os.utime(part, ns=(stamp.mtime_ns, stamp.mtime_ns))
            part.replace(below(self._target, name))
        except ArchiveError:
            raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            todo = "Make room: other programs write there too" if full else "Make it readable, or move it away"
            raise ArchiveError(
                f"{below(self._source.root, name)} could not be copied to {self._target}: {error.strerror}. {todo}, "
                "and stage again: files that are already copied are kept."
            ) from error
        finally:
            part.unlink(missing_ok=True)  # immediately, because a full /dev/shm kills loaders

    def finish(self) -> None:
        """Remove the parts, and close the copy to other users (an earlier version left it open)."""
        shutil.rmtree(self._parts, ignore_errors=True)
        mode = os.stat(self._target).st_mode  # noqa: PTH116
        if mode & 0o077:  # only if needed: chmod always changes the ctime
            os.chmod(self._target, mode & 0o700)  # noqa: PTH101


def scan_copy(target: str) -> Tree:
    """Return sizes and times of all files of a copy, not following links. Empty if there is no copy."""
    if not os.path.lexists(target):
        return {}
    return {name: _stamp(status) for name, status, _ in _listed(target, follow=False)}


def _stamp(status: os.stat_result) -> FileStamp | None:
    return None if stat.S_ISDIR(status.st_mode) else FileStamp.of(status)


def remove_all(target: str, names: list[str]) -> None:
    """Remove files and empty folders of a copy; missing ones are ignored."""
    for name in names:
        path = below(target, name)
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.rmdir(path)  # noqa: PTH106
            else:
                os.unlink(path)  # noqa: PTH108


def check_owner(target: str | os.PathLike[str]) -> None:
    """Refuse to write into another user's file or folder."""
    if owner_of(target) not in (None, os.geteuid()):
        raise ArchiveError(f"{target} belongs to another user. Use a folder of your own: /dev/shm/<user>.")
