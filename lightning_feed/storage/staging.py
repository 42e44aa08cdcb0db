"""Staging: copies a folder, a file or a URL to memory or a local disk, whole or not at all, once per node."""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.callbacks import TqdmCallback
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_feed.errors import ArchiveError
from lightning_feed.machine.file_system import check_room, find_caveats, find_mount
from lightning_feed.machine.private_files import read_json, write_json
from lightning_feed.machine.progress import progress_bar
from lightning_feed.storage.folder import open_file, walk
from lightning_feed.storage.whole import Workshop

logger = logging.getLogger(__name__)

_THREADS = 8
_FILES_AT_ONCE = 1024
_CHUNK_BYTES = 16 << 20
_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""Keys under which fsspec's file systems report the version or the modification time of a file."""


class FileStamp(NamedTuple):
    """Size and version of a file, to detect that the file has changed."""

    size: int
    version: str
    """Modification time of the file, or an object store's tag."""


Listing: TypeAlias = dict[str, FileStamp]
"""Stamps by path below the source; the path is ``""`` if the source is one file."""


@dataclass(frozen=True, kw_only=True)
class StagedCopy:
    """A complete copy."""

    source: str
    """The source: an absolute path, or the URL without secrets."""
    path: Path
    """The copy: a folder or a file, like the source."""
    files: int
    total_bytes: int
    copied: bool
    """True if this call made the copy; False if it was up to date, or if another process made it meanwhile."""
    took_s: float
    in_memory: bool
    """True if the copy is in memory: a tmpfs or a RAM disk."""
    caveats: tuple[str, ...]
    """Warnings about the place of the copy, one sentence each."""


def is_url(source: str | os.PathLike[str]) -> bool:
    """Return True for a URL of fsspec, such as ``s3://bucket/birds``."""
    return "://" in os.fspath(source)


def stage(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> StagedCopy:
    """Copy ``source`` to ``dest/<name of source>``, unless the copy there is up to date.

    Every process of a node may call this function: one process copies, the others wait and use the same copy. The copy
    is made in a hidden folder beside its final path and renamed at the end, so that it is never incomplete. If files of
    the source were added, removed or changed, by size and modification time, a new copy replaces the old one.

    Args:
        source: a folder or a file (symbolic links are followed), or a URL for fsspec.
        dest: a folder in memory or on a local disk, for example ``/dev/shm/<user>``; made if its parent exists. Only
            this user can open the copy.

    Raises:
        ArchiveError: if there is no space (before a byte is written), if the source is inside the copy or the copy in
            the source, if something else is at the path of the copy, or if a file cannot be read or written, or changes
            meanwhile.

    Example:
        >>> staged = stage("/data/birds", "/dev/shm/me")  # doctest: +SKIP
        >>> staged.path  # doctest: +SKIP
        PosixPath('/dev/shm/me/birds')
    """
    began_s = time.monotonic()
    origin = _find_source(source)
    target = Path(os.path.realpath(dest)) / os.path.basename(origin.name.rstrip("/"))  # noqa: PTH119 - a URL, too
    origin.check_apart(target)
    try:
        listing = origin.list_files()
        target.parent.mkdir(mode=0o700, exist_ok=True)
        workshop = Workshop(target, "staging")
        with workshop.claimed(wait=True):
            copied = _update(workshop, origin, listing)
    except ArchiveError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.filename and error.strerror and error.filename not in (str(origin), str(target)):
            reason = f"{error.filename}: {error.strerror}"
        raise ArchiveError(f"{origin.name} was not staged to {target}: {reason}.") from error
    mount = find_mount(target.parent)
    caveats = find_caveats(str(target.parent))
    if copied:
        for caveat in caveats:
            logger.warning("%s", caveat)
    return StagedCopy(
        source=origin.name,
        path=target,
        files=len(listing),
        total_bytes=_total_bytes(listing),
        copied=copied,
        took_s=time.monotonic() - began_s,
        in_memory=mount is not None and mount.in_memory,
        caveats=caveats,
    )


# --- the copy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """Record of a complete copy, stored beside it."""

    source: str
    fingerprint: str
    """Digest of the source's listing."""
    inode: int
    """Inode of the copy. A file or folder with another inode at the copy's path is not replaced."""
    replaced_inode: int | None
    """Inode of the earlier copy that this copy replaces. The earlier copy is still in place if the process was killed
    just before replacing it."""


def _update(workshop: Workshop, origin: "_Source", listing: Listing) -> bool:
    """Copy the source, unless the copy is up to date: then return False."""
    target = workshop.target
    record_path = workshop.folder / "record.json"
    known = read_json(record_path)
    fingerprint = _fingerprint(listing)
    inode = None
    if os.path.lexists(target):
        status = target.lstat()
        inode = status.st_ino
        ours = status.st_uid == os.geteuid() and inode in (known.get("inode"), known.get("replaced_inode"))
        if not ours or known.get("source") != origin.name:
            raise ArchiveError(f"{target} is not a staged copy of {origin.name}. Remove it, or choose another DEST.")
        unchanged = known == asdict(_Record(origin.name, fingerprint, inode, known.get("replaced_inode")))
        if unchanged and _sizes(_list_folder(str(target))) == _sizes(listing):
            return False
        logger.info("%s has changed since it was copied to %s, and is copied again.", origin.name, target)
    _check_room(listing, target.parent)
    origin.copy(listing, workshop.whole)
    if _sizes(_list_folder(str(workshop.whole))) != _sizes(listing) or _fingerprint(origin.list_files()) != fingerprint:
        raise ArchiveError(f"{origin.name} changed while it was copied. Stage it again when no program writes there.")
    if workshop.whole.is_file():
        workshop.whole.chmod(0o600)
    else:
        workshop.whole.chmod(0o700)
    record = _Record(origin.name, fingerprint, workshop.whole.stat().st_ino, inode)
    write_json(record_path, asdict(record))
    workshop.put_in_place()
    return True


def _check_room(listing: Listing, folder: Path) -> None:
    block = os.statvfs(folder).f_frsize
    needed = sum(-(-stamp.size // block) * block for stamp in listing.values())
    folders = {os.path.dirname(name) for name in listing}  # noqa: PTH120 - a million times
    check_room(needed, len(listing) + len(folders), str(folder))


def _fingerprint(listing: Listing) -> str:
    return hashlib.blake2b(json.dumps(sorted(listing.items())).encode(), digest_size=16).hexdigest()


def _sizes(listing: Listing) -> dict[str, int]:
    return {name: stamp.size for name, stamp in listing.items()}


def _total_bytes(listing: Listing) -> int:
    return sum(stamp.size for stamp in listing.values())


def _list_folder(root: str) -> Listing:
    """Return the stamps of all files in a folder, or of a single file, following links.

    Raises:
        OSError: if a file or folder cannot be read, if a link leads nowhere, or if links form a cycle.
    """
    if not os.path.isdir(root):  # noqa: PTH112
        return {"": _stamp(os.stat(root))}  # noqa: PTH116
    return {entry.path[len(root) + 1 :]: _stamp(entry.stat()) for entry in walk(root)}


def _stamp(status: os.stat_result) -> FileStamp:
    return FileStamp(status.st_size, str(status.st_mtime_ns))


# --- sources ----------------------------------------------------------------------------------------------------------


class _Source(Protocol):
    name: str

    def check_apart(self, target: Path) -> None: ...

    def list_files(self) -> Listing: ...

    def copy(self, listing: Listing, whole: Path) -> None: ...


def _find_source(source: str | os.PathLike[str]) -> _Source:
    path = os.fspath(source)
    if not is_url(path):
        return _LocalSource(path)
    try:
        system, root = url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise ArchiveError(f"{_without_secrets(path)} cannot be opened: {error}.") from error
    if isinstance(system, LocalFileSystem):
        return _LocalSource(root)
    return _UrlSource(path, system, root)


class _LocalSource:
    """A folder or a file on this machine."""

    def __init__(self, path: str) -> None:
        # Not resolved, so that the copy keeps the name that the user wrote.
        self.name = os.path.abspath(path)  # noqa: PTH100
        self._stop = threading.Event()

    def check_apart(self, target: Path) -> None:
        """Refuse a copy that would be written into its source, or that would replace its source."""
        real = Path(self.name).resolve()
        if real.is_relative_to(target) or target.is_relative_to(real):
            raise ArchiveError(
                f"{self.name} cannot be staged to {target}: one is inside the other, perhaps by a link. Choose another "
                "DEST, in memory (/dev/shm/<user>) or on a local disk."
            )

    def list_files(self) -> Listing:
        """Return sizes and times of all files."""
        listing = _list_folder(self.name)
        if not listing:
            raise ArchiveError(f"There are no files in {self.name}. Choose the folder that has them.")
        return listing

    def copy(self, listing: Listing, whole: Path) -> None:
        """Copy all files."""
        _make_folders(listing, whole)
        names = list(listing)
        bar = progress_bar(f"Staging {Path(self.name).name}", _total_bytes(listing))

        def copy(name: str) -> None:
            try:
                self._copy_file(_below(self.name, name), _below(whole, name), bar)
            except BaseException:
                self._stop.set()  # the other threads need not finish their files
                raise

        with bar, ThreadPoolExecutor(_THREADS) as pool:  # the pool waits for its threads at the end
            try:
                for start in range(0, len(names), _FILES_AT_ONCE):
                    list(pool.map(copy, names[start : start + _FILES_AT_ONCE]))
            finally:  # after Ctrl-C too
                self._stop.set()

    def _copy_file(self, path: str, copy: str, bar: Any) -> None:
        with open_file(path) as reading, open(copy, "wb") as writing:  # noqa: PTH123 - a million times
            while chunk := reading.read(_CHUNK_BYTES):
                if self._stop.is_set():
                    return
                writing.write(chunk)
                bar.update(len(chunk))


class _UrlSource:
    """A folder or a file of an fsspec file system, such as an object store."""

    def __init__(self, url: str, system: fsspec.AbstractFileSystem, root: str) -> None:
        self.name = _without_secrets(url)
        self._has_secrets = self.name != url.rstrip("/")
        self._system = system
        self._root = root.rstrip("/")

    def check_apart(self, target: Path) -> None:
        """Do nothing: a URL cannot be inside a folder."""

    def list_files(self) -> Listing:
        """Return sizes and versions of all files, listed now."""
        self._system.invalidate_cache()
        try:
            if self._system.isfile(self._root):
                return {"": self._stamp("", self._system.info(self._root))}
            found = self._system.find(self._root, detail=True)
        except Exception as error:  # each file system has its own errors
            raise ArchiveError(f"{self.name} cannot be listed: {self._describe(error)}.") from error
        listing = {path[len(self._root) :].lstrip("/"): info for path, info in found.items()}
        # Some object stores list a folder as an object with the folder's name and no bytes.
        listing = {name: info for name, info in listing.items() if name and not name.endswith("/")}
        if not listing:
            raise ArchiveError(f"There are no files at {self.name}. Choose the folder that has them.")
        return {name: self._stamp(name, info) for name, info in listing.items()}

    def copy(self, listing: Listing, whole: Path) -> None:
        """Download all files."""
        _make_folders(listing, whole)
        paths = [_below(self._root, name) for name in listing]
        bar = TqdmCallback(tqdm_kwargs={"desc": f"Staging {self.name}", "unit": " files", "disable": None})
        try:
            self._system.get(paths, [_below(whole, name) for name in listing], callback=bar)
        except OSError:
            raise
        except Exception as error:  # each file system has its own errors
            raise ArchiveError(f"{self.name} cannot be copied: {self._describe(error)}.") from error

    def _describe(self, error: Exception) -> str:
        if self._has_secrets:  # messages of file systems show the whole URL
            return type(error).__name__
        return f"{type(error).__name__}: {error}"

    def _stamp(self, name: str, info: Mapping[str, Any]) -> FileStamp:
        if ".." in name.split("/"):
            raise ArchiveError(f"{name!r} at {self.name} would be written outside of the copy. Rename it.")
        if info.get("size") is None:
            raise ArchiveError(f"The server reports no size for {self.name}/{name}, so a copy cannot be checked.")
        version = next((info[key] for key in _VERSION_KEYS if key in info), "")
        return FileStamp(int(info["size"]), str(version))


def _make_folders(listing: Listing, whole: Path) -> None:
    folders = {os.path.dirname(name) for name in listing if name}  # noqa: PTH120 - a million times
    for folder in folders:
        os.makedirs(_below(whole, folder), exist_ok=True)  # noqa: PTH103


def _below(root: str | Path, name: str) -> str:
    """Return the path of a file of a listing. Its ``name`` is empty if the source is a single file."""
    if not name:
        return str(root)
    return f"{root}/{name}"


def _without_secrets(url: str) -> str:
    """Return a URL without a password and without its query, which may hold a signature."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
