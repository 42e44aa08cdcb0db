"""What lies at a source: every file with its size and time, before one byte of it is copied."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_feed.errors import ArchiveError, printable


class FileStamp(NamedTuple):
    """What tells one version of a file from the next."""

    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change, in ns since 1970."""


class Identity(NamedTuple):
    """What tells one file or folder from all others, whatever paths, mounts and links lead to it."""

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Identity":
        """The identity of what a status was read of."""
        return cls(status.st_dev, status.st_ino)


@dataclass(frozen=True, eq=False)
class Tree:
    """A file, or the files and folders below a folder. Symbolic links are followed: what counts is what they lead to.

    Names are those that the file system gave, with undecodable bytes as surrogates (``os.fsdecode``).
    """

    root: str
    """Path of the file or the folder."""
    is_folder: bool
    files: dict[str, FileStamp]
    """By path below the root; a single file has the path ``""``."""
    folders: dict[str, tuple[int, int]]
    """Mode and mtime_ns of each folder by path below the root, which is itself ``""``; each before what is in it."""
    identities: frozenset[Identity]
    """Of all folders, and of the files that symbolic links lead to: what is lost if it lies in a copy that goes."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(stamp.size for stamp in self.files.values())

    def path(self, name: str) -> str:
        """The path of a file or folder of the tree."""
        return below(self.root, name)


def below(root: str, name: str) -> str:
    """The path of ``name`` below ``root``; the name of ``root`` itself is ``""``."""
    return f"{root}/{name}" if name else root


def shown(path: str | os.PathLike[str]) -> str:
    """A path as text that can be printed everywhere."""
    return printable(os.fspath(path))


def identities_above(path: str) -> set[Identity]:
    """The identities of what lies at a path and of the folders above it, as far as they exist."""
    found = map(identity_of, (path, *map(str, Path(path).parents)))
    return {identity for identity in found if identity is not None}


def identity_of(path: str) -> Identity | None:
    """The identity of what lies at a path, a link being a link; None where there is nothing, or nothing to be seen."""
    try:
        return Identity.of(os.lstat(path))
    except OSError:
        return None


def overlap_error(source: str | os.PathLike[str], target: str) -> ArchiveError:
    """The refusal of a copy that would be written into its source, or whose removal would take its source along."""
    return ArchiveError(
        f"{shown(source)} cannot be staged to {shown(target)}: one lies in the other, perhaps by another mount or a "
        "link. Give a DEST elsewhere, in memory (/dev/shm/<user>) or on a local disk."
    )


def scan_tree(root: str) -> Tree:
    """Read the sizes and times of a file, or of all files below a folder.

    A file that goes away between being listed and being read was deleted, and is not in the tree.

    Raises:
        ArchiveError: when there is nothing at ``root`` or it cannot be read, when symbolic links go round in a circle
            or lead nowhere, or when there is something that is neither file nor folder.
    """
    try:
        status = os.stat(root)  # noqa: PTH116 - a million times, Path objects cost more than the call
    except OSError as error:
        raise ArchiveError(f"{shown(root)} cannot be staged: {error.strerror}. Give a folder or a file.") from error
    if stat.S_ISREG(status.st_mode):
        itself = frozenset([Identity.of(status)])
        return Tree(root, is_folder=False, files={"": _stamp(status)}, folders={}, identities=itself)
    files: dict[str, FileStamp] = {}
    folders: dict[str, tuple[int, int]] = {}
    identities: set[Identity] = set()
    if not stat.S_ISDIR(status.st_mode):
        _refuse_kind(root, status)
    # A stack, not recursion: a tree may be deeper than Python's stack. Each entry carries the folders above it.
    waiting: list[tuple[str, os.stat_result, frozenset[Identity]]] = [("", status, frozenset())]
    while waiting:
        name, status, above = waiting.pop()
        path, identity = below(root, name), Identity.of(status)
        identities.add(identity)
        if identity in above:
            raise ArchiveError(
                f"{shown(path)} is a symbolic link to a folder above it, so there is no end to what would be copied. "
                "Remove the link."
            )
        folders[name] = (stat.S_IMODE(status.st_mode), status.st_mtime_ns)
        for child, found in _entries(path):
            child_name = f"{name}/{child.name}" if name else child.name
            if stat.S_ISREG(found.st_mode):
                files[child_name] = _stamp(found)
                if child.is_symlink():
                    identities.add(Identity.of(found))
            elif stat.S_ISDIR(found.st_mode):
                waiting.append((child_name, found, above | {identity}))
            else:
                _refuse_kind(below(root, child_name), found)
    return Tree(root, is_folder=True, files=files, folders=folders, identities=frozenset(identities))


def _entries(path: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    try:
        with os.scandir(path) as entries:
            listed = list(entries)
    except FileNotFoundError:
        return  # deleted since its own folder was listed
    except OSError as error:
        raise ArchiveError(
            f"The folder {shown(path)} cannot be read: {error.strerror}. Make it readable, or move it away."
        ) from error
    for entry in listed:
        try:
            yield entry, entry.stat()
        except OSError as error:
            if not os.path.lexists(entry.path):
                continue
            raise ArchiveError(
                f"{shown(entry.path)} cannot be read: {error.strerror}"
                f"{' (a symbolic link that leads nowhere)' if entry.is_symlink() else ''}. Repair or remove it."
            ) from error


def _stamp(status: os.stat_result) -> FileStamp:
    return FileStamp(status.st_size, status.st_mtime_ns)


def _refuse_kind(path: str, status: os.stat_result) -> None:
    raise ArchiveError(
        f"{shown(path)} is neither a file nor a folder ({stat.filemode(status.st_mode)}), so it cannot be copied. "
        "Move it away."
    )
