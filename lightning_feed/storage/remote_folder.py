"""Files of a remote place: listed once and remembered, indexed as class folders, and read as a source."""

import asyncio
import calendar
import hashlib
import logging
import os
import time
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from lightning_feed.errors import ArchiveError, printable
from lightning_feed.storage.folder import (
    IMAGE_SUFFIXES,
    MANIFEST,
    FolderIndex,
    FolderSource,
    below,
    check_classes,
    flat_names,
    index_classes,
    load_arrays,
    nth_name,
    save_arrays,
)
from lightning_feed.storage.read_through import ReadThrough
from lightning_feed.storage.remote import Connection, GoneError, RemotePlace, ReplacedError, status_of
from lightning_feed.storage.system import cache_folder

logger = logging.getLogger(__name__)

_VERSION = 3
_STARTED_S = time.time()
_RANKS_START_WITHIN_S = 60
"""Largest difference between the start times of a run's ranks, in seconds. A process reuses a listing made since its
own start; with several ranks also one made up to this long before, so that the ranks of a run share one listing."""
_CHANGED = ("LastModified", "last_modified", "updated", "modified", "mtime", "created")
_CONTENT = ("ETag", "Last-Modified", "etag", "md5Hash", "content_settings", "blob_id", "sha", "CRC", "ino")
"""Keys of fsspec's listing entries, for all file systems: ``_CHANGED`` for the change time, ``_CONTENT`` for values
that change with the content."""
_HEADERS = ("ETag", "Last-Modified")
"""The keys of ``_CONTENT`` that are HTTP headers."""


@dataclass(frozen=True, eq=False)
class Listing:
    """All files of a place in a few flat arrays, sorted by folder, then by name."""

    names: npt.NDArray[np.uint8]
    """Paths of the files below the place, concatenated."""
    ends: npt.NDArray[np.int64]
    """Shape (n,): the end of each path in ``names``."""
    sizes: npt.NDArray[np.int64]
    """Shape (n,): bytes; -1 if the server does not report them."""
    stamps: npt.NDArray[np.int64]
    """Shape (n,): a number for the listed version of each file, see :func:`stamp_of`; the time of the listing, in ns
    since 1970, if the server sends neither a change time nor a tag."""

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, number: int) -> str:
        """Return the path of a file below the place."""
        return nth_name(self.names, self.ends, number).decode("utf-8", "surrogateescape")

    def files(self) -> Iterator[tuple[str, int]]:
        """Yield each file's path below the place, and its number."""
        for number in range(len(self)):
            yield self.path(number), number

    def find(self, path: str) -> int | None:
        """Return the number of a file; None if it does not exist."""
        found = self._at(path)
        return found if found < len(self) and self.path(found) == path else None

    def has_folder(self, path: str) -> bool:
        """True if there are files below a path."""
        # A folder's own files are not next to those of its subfolders: "a-b" sorts before "a/b".
        near = (self._at(f"{path}/"), self._at(f"{path}//"))
        return any(number < len(self) and self.path(number).startswith(f"{path}/") for number in near)

    def _at(self, path: str) -> int:
        return bisect_left(range(len(self)), _order(path), key=lambda number: _order(self.path(number)))


def _order(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name


def list_files(place: RemotePlace, *, fresh: bool = False) -> Listing:
    """Return this run's listing of a place. If there is none, one rank makes it, listing many folders concurrently.

    Args:
        place: a folder, or a single file, which has the name ``""``.
        fresh: True to list it now.

    Raises:
        GoneError: if there are no files.
        ArchiveError: if it cannot be listed.
    """
    kept = _kept(place)
    if place.url.startswith("memory:"):
        return _take(place)
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(f"{kept}.lock", fallback_to_soft=False).acquire()
    except (OSError, NotImplementedError) as error:  # a network file system may not implement locks
        logger.info("Cannot keep listings in %s: %s. Each process lists the files again.", kept.parent, error)
        return _take(place)
    with lock:
        listing = None if fresh else _load(kept)
        if listing is None:
            listing = _take(place)
            save_arrays(kept, **vars(listing))
    return listing


def _kept(place: RemotePlace) -> Path:
    return cache_folder() / "index" / f"remote-{_VERSION}-{place.key}.npz"


def _load(kept: Path) -> Listing | None:
    ranks = any(os.environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_NTASKS"))
    try:
        if kept.stat().st_mtime < _STARTED_S - (_RANKS_START_WITHIN_S if ranks else 0):
            return None
    except OSError:
        return None
    arrays = load_arrays(kept)
    return None if arrays is None else Listing(**arrays)


def _take(place: RemotePlace) -> Listing:
    found = place.connection().submit(_walk(place)).result()
    if not found:
        raise GoneError(f"There are no files at {place}. Check the URL, and that the credentials may list it.")
    found.sort(key=lambda file: _order(file.path))
    names, ends = flat_names([file.path.encode("utf-8", "surrogateescape") for file in found])
    sizes, stamps = np.array([file[1:] for file in found], np.int64).T
    return Listing(names, ends, sizes.copy(), stamps.copy())


class _File(NamedTuple):
    path: str
    """Path below the place."""
    size: int
    stamp: int


async def _walk(place: RemotePlace) -> list[_File]:
    connection = place.connection()
    found = list[_File]()

    async def walk(folder: str) -> None:
        entries = await connection.call("ls", folder, detail=True)
        await _complete(entries, folder, connection)
        files, inside = parse_entries(entries, folder, connection.path(folder))
        found.extend(files)
        tasks = [asyncio.ensure_future(walk(inner)) for inner in inside]
        try:
            await asyncio.gather(*tasks)
        finally:  # after an error in one of them
            for task in tasks:
                task.cancel()

    await walk("")
    return found


async def _complete(entries: list[dict[str, object]], folder: str, connection: Connection) -> None:
    """Request size and version of each file whose listing lacks them, as over HTTP. An unreadable object raises an
    error only when it is read."""

    async def ask(entry: dict[str, object]) -> None:
        name = below(folder, str(entry["name"]).rpartition("/")[2])
        try:
            entry.update({**await connection.call("info", name), "name": entry["name"]})
            if entry["size"] == 0:  # some servers answer HEAD with 0 for any size
                entry["size"] = len(await connection.call("cat_file", name))
        except ArchiveError as error:
            if not isinstance(error, GoneError) and status_of(error) not in (401, 403):
                raise

    await asyncio.gather(*(ask(entry) for entry in entries if entry["type"] == "file" and entry.get("size") is None))


def parse_entries(entries: list[dict[str, object]], folder: str, path: str) -> tuple[list[_File], list[str]]:
    """Return the files of a folder, and the paths of its subfolders.

    Args:
        entries: fsspec's listing of the folder.
        folder: path of the folder below the place.
        path: path of the folder in the file system. An entry with this path is the folder itself (object stores mark an
            empty folder with an object of its name), or the place itself if that is a file.

    Raises:
        ArchiveError: for a name that leads out of the folder.
    """
    files = []
    inside = []
    for entry in entries:
        name = str(entry["name"])
        base = name.rstrip("/").rpartition("/")[2]
        itself = name.strip("/") == path.strip("/")
        if base in (".", "..") or "\0" in base:
            raise ArchiveError(f"{printable(name)} has a name that leads out of its folder. Remove it there.")
        kind = entry["type"]
        place_itself = itself and not folder
        if kind == "directory" and not itself:
            inside.append(below(folder, base))
        elif kind == "file" and (place_itself or not itself) and not name.endswith("/"):
            files.append(_file("" if itself else below(folder, base), entry))
    return files, inside


def _file(path: str, entry: Mapping[str, Any]) -> _File:
    size = entry.get("size")
    known = any(entry.get(name) is not None for name in (*_CHANGED, *_CONTENT))
    return _File(path, -1 if size is None else int(size), stamp_of(entry) if known else time.time_ns())


def stamp_of(entry: Mapping[str, Any]) -> int:
    """Return a number for the version of an object, from its entry in a listing.

    It is the change time in ns since 1970, whose digits below one second are replaced by a hash of time and tag. For an
    object without a change time, it is only that hash, below 10**9.
    """
    changed = next((entry[name] for name in _CHANGED if entry.get(name) is not None), 0)
    # An ETag may be weak within a second of the change and become strong later.
    content = repr([str(entry[name]).removeprefix("W/") for name in _CONTENT if entry.get(name) is not None])
    if isinstance(changed, str):
        try:
            changed = datetime.fromisoformat(changed.replace("Z", "+00:00"))
        except ValueError:
            content = f"{content}{changed}"
            changed = 0
    if isinstance(changed, datetime):
        changed = calendar.timegm(changed.utctimetuple()) + changed.microsecond / 1e6
    known_ns = int(float(changed) * 1e6) * 1000
    return known_ns // 10**9 * 10**9 + zlib.crc32(f"{known_ns}{content}".encode()) % 10**9


def same_version(stamp: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return options for an HTTP request that raise an error if the response has another version than the listed one.

    Args:
        stamp: stamp from the listing.
        headers: headers of all requests.
    """

    async def check(response: Any) -> None:
        sent = {name: response.headers[name] for name in _HEADERS if name in response.headers}
        # The listing used HEAD, for which some servers send fewer headers.
        versions = [stamp_of(some) for some in (sent, *({name: value} for name, value in sent.items()))]
        if response.status in (200, 206) and sent and stamp < 10**9 and stamp not in versions:
            response.close()
            raise ReplacedError(
                f"its {' or '.join(sent)} has changed since it was listed: the file was replaced, or the server sends "
                "a new value each time, which prevents caching (leave out stage_limit)"
            )

    # A compressed response has another ETag for the same version.
    return {"raise_for_status": check, "headers": {**headers, "Accept-Encoding": "identity"}}


# --- class folders ----------------------------------------------------------------------------------------------------


def _class_folders(listing: Listing, prefix: str) -> dict[str, list[tuple[str, int]]]:
    """Return the files of each folder directly below ``prefix``, as (path below ``prefix``, number)."""
    folders: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, number in listing.files():
        inner = path.removeprefix(prefix)
        name, inside, _ = inner.partition("/")
        if path.startswith(prefix) and inside and name[:1] not in ("", "."):
            folders[name].append((inner, number))
    # A pack inside the folder it was made from is not a class.
    return {name: files for name, files in folders.items() if listing.find(f"{prefix}{name}/{MANIFEST}") is None}


class RemoteSource(FolderSource):
    """Images in class folders at a remote place. An image is read with one request, several concurrently (``expect``).

    Args:
        place: the folder of class folders.
        index: index of the files.
        sizes: listed bytes of each file; -1 if the server does not report them. The cache keeps no file of unknown
            size, since it may be truncated.
        stamps: listed stamp of each file.

    Attributes:
        again_late: True if each file is read once per epoch, so that the one just read will be needed last.
    """

    again_late = True

    def __init__(
        self, place: RemotePlace, index: FolderIndex, sizes: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]
    ) -> None:
        self.place = place
        self.index = index
        self.sizes = sizes
        self.stamps = stamps
        self.classes = index.classes
        self.labels = index.labels
        self._listed = place
        self._expected: WeakValueDictionary[int, Future[bytes]] = WeakValueDictionary()

    @classmethod
    def of(
        cls, place: RemotePlace, listing: Listing, top: str = "", classes: tuple[str, ...] | None = None
    ) -> "RemoteSource":
        """Index the images in the class folders of a folder below a place, in torchvision's ``ImageFolder`` order.

        Args:
            place: the listed place.
            listing: its files.
            top: path of the folder below the place.
            classes: the allowed classes; None for the folder names.

        Raises:
            DatasetError: as :func:`~lightning_feed.storage.folder.scan_classes`.
        """
        where = place.url_of(top)
        by_class = _class_folders(listing, f"{top}/" if top else "")
        names = check_classes(sorted(by_class), classes, where)
        images = {
            name: [(path, number) for path, number in files if path.lower().endswith(IMAGE_SUFFIXES)]
            for name, files in by_class.items()
        }
        paths = {name: [path.encode("utf-8", "surrogateescape") for path, _ in files] for name, files in images.items()}
        index = index_classes(names, paths, where, every=classes is None)
        numbers = np.array([number for name in names for _, number in images.get(name, ())], np.int64)
        made = cls(place.below(top), index, listing.sizes[numbers], listing.stamps[numbers])
        made._listed = place
        return made

    def remote_reads(self) -> "RemoteSamples":
        """Return all samples of this source as remote samples."""
        return RemoteSamples(self)

    def expect(self, numbers: Iterable[int]) -> "list[Future[bytes]]":
        """Start to read the samples of the next :meth:`read` calls concurrently.

        Returns:
            The reads in progress: keep them until the samples are read. Dropping them abandons the reads.
        """
        begun = list[Future[bytes]]()
        for number in numbers:
            cache = self._cache(number)
            key = "" if cache is None else self._key(number)
            # Skip files that are being fetched: polling for many at once would check all of them again and again.
            if number not in self._expected and (cache is None or not (cache.holds(key) or cache.is_coming(key))):
                self._expected[number] = future = self._begin(number)
                begun.append(future)
        return begun

    def read(self, index: int) -> bytes:
        """Return the bytes of file ``index``.

        Raises:
            GoneError: if it no longer exists, or was replaced.
            ArchiveError: if it cannot be read for another reason.
        """
        waiting = self._expected.pop(index, None)
        cache = self._cache(index)
        if waiting is None and cache is not None:
            found = cache.read(self._key(index), int(self.sizes[index]), again_late=self.again_late)
            if found is not None:
                return found
        try:
            return (waiting or self._begin(index)).result()
        except ArchiveError as error:
            if isinstance(error, GoneError):
                _kept(self._listed).unlink(missing_ok=True)  # so that the next run lists the files again
            raise type(error)(f"Sample {index}: {error}") from error

    def begin_ahead(self, number: int) -> "Future[bytes] | None":
        """Start to fetch a sample into the cache; None if it is there already, or cannot be kept."""
        cache = self._cache(number)
        return None if cache is None or cache.keep(self._key(number)) else self._begin(number)

    def options(self, number: int) -> dict[str, Any]:
        """Return the options of the request for a file."""
        if self.place.is_http and self._cache(number) is not None:  # S3 replaces objects atomically
            return same_version(int(self.stamps[number]), self.place.options.get("headers", {}))
        return {}

    def name(self, index: int) -> str:
        """Return the URL of file ``index``."""
        return self.place.url_of(self.index.path(index))

    def changed_ns(self, index: int) -> int:
        """Return the listed stamp of file ``index``."""
        return int(self.stamps[index])

    def _begin(self, number: int) -> "Future[bytes]":
        connection = self.place.connection()
        size = int(self.sizes[number])
        cache = self._cache(number)
        path = self.index.path(number)
        expected = size if size >= 0 else None
        fetch = partial(connection.fetch, path, expected, **self.options(number))
        if cache is None:
            return connection.submit(fetch())
        return connection.submit(cache.through(self._key(number), size, fetch, again_late=self.again_late))

    def _cache(self, number: int) -> ReadThrough | None:
        return self.place.cache if self.sizes[number] >= 0 else None

    def _key(self, number: int) -> str:
        url = f"{self.place.url}/{self.index.path(number)}"
        about = repr((url, str(self.stamps[number]), None, int(self.sizes[number])))
        return hashlib.blake2b(about.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_expected": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _expected=WeakValueDictionary())


class RemoteSamples(NamedTuple):
    """The samples of a dataset, or of a source, that are read from a remote place."""

    reads: RemoteSource
    numbers: npt.NDArray[np.int64] | None = None
    """Each sample's number in ``reads``; None if it equals the sample's index."""


class RemoteFolder:
    """All files at a remote place, by their paths below it. Can be pickled and forked.

    Args:
        place: a folder.

    Raises:
        ArchiveError: if it cannot be listed.
    """

    def __init__(self, place: RemotePlace) -> None:
        self.place = place
        self._listing = listing = list_files(place)
        index = FolderIndex((), np.zeros(len(listing), np.int64), listing.names, listing.ends, ())
        self._source = RemoteSource(place, index, listing.sizes, listing.stamps)
        self._source.again_late = False

    def names(self) -> list[str]:
        """Return the paths of all files, folder by folder."""
        return [name for name, _ in self._listing.files()]

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            GoneError: if no file has that name, or it differs from the listing.
            ArchiveError: if it cannot be read for another reason.
        """
        return self.read_many([name])[0]

    def read_many(self, names: Iterable[str]) -> list[bytes]:
        """Return the bytes of several files, read concurrently.

        Raises:
            GoneError: as :meth:`read`.
            ArchiveError: as :meth:`read`.
        """
        numbers = [self._number(name) for name in names]
        _held = self._source.expect(numbers)
        return [self._source.read(number) for number in numbers]

    def _number(self, name: str) -> int:
        number = self._listing.find(name)
        if number is None:
            raise GoneError(f"{self.place.url_of(name)} is not among the {len(self._listing)} files that were listed.")
        return number
