"""The files of a remote place: listed once and remembered, as class folders, and as the source that reads them."""

import asyncio
import calendar
import hashlib
import io
import logging
import os
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from lightning_feed.archive.folder import (
    IMAGE_SUFFIXES,
    MANIFEST,
    FolderIndex,
    FolderSource,
    check_classes,
    check_images,
)
from lightning_feed.archive.remote import (
    Connection,
    GoneError,
    RemotePlace,
    RemoteReads,
    ReplacedError,
    Request,
    status_of,
)
from lightning_feed.archive.system import cache_folder, read_private, write_private
from lightning_feed.errors import ArchiveError, printable

logger = logging.getLogger(__name__)

_VERSION = 2
_STARTED_S = time.time()
_RANKS_START_WITHIN_S = 60
"""A process uses a listing that it, or the process that it was forked from, has taken. Ranks of one run share one."""
_DIGEST_BYTES = 16
_CHANGED = ("LastModified", "last_modified", "updated", "modified", "mtime", "created")
_CONTENT = ("ETag", "Last-Modified", "etag", "md5Hash", "content_settings", "blob_id", "sha", "CRC", "ino")
"""What the entries of a listing call the time of a change, and what is another for other contents, by file system."""
_HEADERS = ("ETag", "Last-Modified")
"""Those of them that HTTP knows."""
_ASKED_AT_ONCE = 1000


@dataclass(frozen=True, eq=False)
class Listing:
    """All files of a place in a few flat arrays, folder by folder; both sorted by name."""

    folders: tuple[str, ...]
    """Paths below the place; ``""`` is the place itself."""
    starts: npt.NDArray[np.int64]
    """Shape (folders + 1,): the number of each folder's first file."""
    names: npt.NDArray[np.uint8]
    """The names of the files in their folders, one after the other."""
    ends: npt.NDArray[np.int64]
    """Shape (n,): where each ends in ``names``."""
    sizes: npt.NDArray[np.int64]
    """Shape (n,): bytes; -1 where the server does not say."""
    stamps: npt.NDArray[np.int64]
    """Shape (n,): another one for another version of the file; the time of its change, in ns since 1970, or less than a
    second for a hash alone. The time of the listing where the server tells nothing that would be another."""

    def __len__(self) -> int:
        return len(self.ends)

    def base(self, number: int) -> str:
        """The name of a file in its folder."""
        begin = int(self.ends[number - 1]) if number else 0
        return self.names[begin : int(self.ends[number])].tobytes().decode("utf-8", "surrogateescape")

    def files(self) -> Iterator[tuple[str, int]]:
        """The path below the place and the number of each file."""
        for place, folder in enumerate(self.folders):
            prefix = f"{folder}/" if folder else ""
            for number in range(int(self.starts[place]), int(self.starts[place + 1])):
                yield prefix + self.base(number), number

    def find(self, path: str) -> int | None:
        """The number of a file; None where there is none."""
        folder, _, base = path.rpartition("/")
        place = bisect_left(self.folders, folder)
        if place == len(self.folders) or self.folders[place] != folder:
            return None
        first, last = int(self.starts[place]), int(self.starts[place + 1])
        found = bisect_left(range(first, last), base.encode(), key=lambda number: self.base(number).encode()) + first
        return found if found < last and self.base(found) == base else None

    def has_folder(self, path: str) -> bool:
        """Whether there are files below a path."""
        return any(folder == path or folder.startswith(f"{path}/") for folder in self.folders)


def list_files(place: RemotePlace, *, fresh: bool = False) -> Listing:
    """The files of a place: as this run has listed them, else listed now, many folders at a time, by one rank.

    Args:
        place: a folder, or a single file, which has the name ``""``.
        fresh: list it now.

    Raises:
        GoneError: when there is nothing.
        ArchiveError: when it cannot be listed.
    """
    kept = _kept(place)
    if place.url.startswith("memory:"):
        return _take(place)
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(f"{kept}.lock", fallback_to_soft=False).acquire()
    except (OSError, NotImplementedError) as error:  # not implemented: locks, by a network file system
        logger.info("No listing can be remembered in %s: %s. Each process lists by itself.", kept.parent, error)
        return _take(place)
    with lock:
        listing = None if fresh else _load(kept)
        if listing is None:
            listing = _take(place)
            _save(listing, kept)
    return listing


def forget_listing(place: RemotePlace) -> None:
    """Have a place listed again by whoever asks next."""
    _kept(place).unlink(missing_ok=True)


def _kept(place: RemotePlace) -> Path:
    return cache_folder() / "index" / f"remote-{_VERSION}-{place.key}.npz"


def _load(kept: Path) -> Listing | None:
    try:
        ranks = any(os.environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_NTASKS"))
        if kept.stat().st_mtime < _STARTED_S - (_RANKS_START_WITHIN_S if ranks else 0):
            return None
        content = read_private(kept)
    except OSError:
        return None
    stored = content[_DIGEST_BYTES:]
    if content[:_DIGEST_BYTES] != hashlib.blake2b(stored, digest_size=_DIGEST_BYTES).digest():
        return None
    with np.load(io.BytesIO(stored), allow_pickle=False) as found:
        arrays = {field.name: found[field.name] for field in fields(Listing)}
    arrays["folders"] = tuple(arrays["folders"].tobytes().decode("utf-8", "surrogateescape").split("\0"))
    return Listing(**arrays)


def _save(listing: Listing, kept: Path) -> None:
    arrays = {field.name: getattr(listing, field.name) for field in fields(Listing)}
    arrays["folders"] = np.frombuffer("\0".join(listing.folders).encode("utf-8", "surrogateescape"), np.uint8)
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    content = stored.getvalue()
    try:
        write_private(kept, hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content)
    except OSError as error:
        logger.info("The listing could not be remembered in %s: %s. Each rank lists by itself.", kept, error)


def _take(place: RemotePlace) -> Listing:
    connection = place.connection()
    found = connection.submit(_walk(place)).result()
    if not found:
        raise GoneError(f"There are no files at {place}. Check the URL, and that the credentials may list it.")
    folders = sorted(found)
    counts = [len(found[folder].sizes) for folder in folders]
    return Listing(
        folders=tuple(folders),
        starts=np.cumsum([0, *counts], dtype=np.int64),
        names=np.concatenate([found[folder].names for folder in folders]),
        ends=np.cumsum(np.concatenate([found[folder].lengths for folder in folders]), dtype=np.int64),
        sizes=np.concatenate([found[folder].sizes for folder in folders]),
        stamps=np.concatenate([found[folder].stamps for folder in folders]),
    )


@dataclass(frozen=True, eq=False)
class _Folder:
    """The files of one folder. Entries of fsspec are dicts of a kilobyte each: they are dropped folder by folder."""

    names: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.int64]


async def _walk(place: RemotePlace) -> dict[str, _Folder]:
    """The files of each folder that has any, by its path below the place."""
    connection, found = place.connection(), dict[str, _Folder]()

    async def look(folder: str) -> list[str]:
        entries = await connection.call("ls", folder, detail=True)
        await _complete(entries, folder, connection)
        files, below = sorted_out(entries, folder, connection.path(folder))
        if files:
            names, sizes, stamps = zip(*sorted(files), strict=True)
            found[folder] = _Folder(
                names=np.frombuffer(b"".join(names), np.uint8),
                lengths=np.array([len(name) for name in names], np.int64),
                sizes=np.array(sizes, np.int64),
                stamps=np.array(stamps, np.int64),
            )
        return below

    waiting = {asyncio.ensure_future(look(""))}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # Gathered, so that of several failures none is left for asyncio to print.
            inside = [folder for below in await asyncio.gather(*done) for folder in below]
            waiting |= {asyncio.ensure_future(look(folder)) for folder in inside}
    finally:
        for one in waiting:
            one.cancel()
    return found


async def _complete(entries: list[dict[str, Any]], folder: str, connection: Connection) -> None:
    """Ask for the size and version of each file that is listed without, as all of HTTP are. An object of a list that
    cannot be read is an error when it is read."""

    async def ask(entry: dict[str, Any]) -> None:
        base = str(entry["name"]).rpartition("/")[2]
        name = f"{folder}/{base}" if folder else base
        try:
            entry.update({**await connection.call("info", name), "name": entry["name"]})
            if entry["size"] == 0:  # some servers answer HEAD so, whatever the size is
                entry["size"] = len(await connection.call("cat_file", name))
        except ArchiveError as error:
            if not isinstance(error, GoneError) and status_of(error) not in (401, 403):
                raise

    asked = [entry for entry in entries if entry["type"] == "file" and entry.get("size") is None]
    for begin in range(0, len(asked), _ASKED_AT_ONCE):
        await asyncio.gather(*map(ask, asked[begin : begin + _ASKED_AT_ONCE]))


def sorted_out(entries: list[dict[str, Any]], folder: str, path: str) -> tuple[list[tuple[bytes, int, int]], list[str]]:
    """(name, size, stamp) of each file in a folder, and the paths of the folders in it."""
    files, below = [], []
    for entry in entries:
        name = str(entry["name"])
        base, itself = name.rstrip("/").rpartition("/")[2], name.strip("/") == path.strip("/")
        if base in (".", "..") or "\0" in base:  # a copy of it would be written elsewhere
            raise ArchiveError(f"{printable(name)} has a name that leads out of its folder. Remove it there.")
        if entry["type"] == "directory" and not itself:
            below.append(f"{folder}/{base}" if folder else base)
        elif entry["type"] == "file" and not name.endswith("/") and not (itself and folder):
            # A place that is a file lists itself; object stores mark empty folders by an object of their name.
            encoded, size = (b"" if itself else base.encode("utf-8", "surrogateescape")), entry.get("size")
            known = any(entry.get(name) is not None for name in (*_CHANGED, *_CONTENT))
            files.append((encoded, -1 if size is None else int(size), stamp_of(entry) if known else time.time_ns()))
    return files, below


def stamp_of(entry: dict[str, Any]) -> int:
    """What tells one version of an object from the next: its time in ns, with a hash of its tag below the second."""
    changed = next((entry[name] for name in _CHANGED if entry.get(name) is not None), 0)
    # An ETag is weak within a second of the change, and may be strong later.
    content = repr([str(entry[name]).removeprefix("W/") for name in _CONTENT if entry.get(name) is not None])
    if isinstance(changed, str):
        try:
            changed = datetime.fromisoformat(changed.replace("Z", "+00:00"))
        except ValueError:
            content, changed = f"{content}{changed}", 0
    if isinstance(changed, datetime):
        changed = calendar.timegm(changed.utctimetuple()) + changed.microsecond / 1e6
    known_ns = int(float(changed) * 1e6) * 1000
    return known_ns // 10**9 * 10**9 + zlib.crc32(f"{known_ns}{content}".encode()) % 10**9


def same_version(stamp: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """Options of a request over HTTP that refuse an answer with another version than was listed.

    Args:
        stamp: as listed.
        headers: of all requests.
    """

    async def check(response: Any) -> None:
        told = {name: response.headers[name] for name in _HEADERS if name in response.headers}
        # Some servers tell less to HEAD, by which the listing was made.
        versions = [stamp_of(some) for some in (told, *({name: value} for name, value in told.items()))]
        if response.status in (200, 206) and told and stamp < 10**9 and stamp not in versions:
            response.close()
            raise ReplacedError(
                f"its {' or '.join(told)} has changed since it was listed: it was replaced, or the server gives "
                "another with each answer, so that nothing can be cached (leave out stage_limit)"
            )

    # Compressed, the same version has another ETag.
    return {"raise_for_status": check, "headers": {**headers, "Accept-Encoding": "identity"}}


# --- class folders ----------------------------------------------------------------------------------------------------


def class_files(
    listing: Listing, below: str, where: str, classes: tuple[str, ...] | None = None
) -> tuple[FolderIndex, npt.NDArray[np.int64]]:
    """The images of each class folder in a folder of a listing, in the order of torchvision's ``ImageFolder``.

    Args:
        listing: of a place.
        below: path of the folder below the place.
        where: its URL, for errors.
        classes: the classes there must be; None takes the names of the folders.

    Returns:
        Their index, with paths below ``below``, and their numbers in the listing.

    Raises:
        DatasetError: as :func:`~lightning_feed.archive.folder.scan_classes`.
    """
    prefix = f"{below}/" if below else ""
    by_class: dict[str, list[int]] = {}
    for place, folder in enumerate(listing.folders):  # sorted
        inner = folder.removeprefix(prefix)
        name = inner.partition("/")[0]
        # A pack in the folder that it was made of is no class.
        if folder.startswith(prefix) and name and name[0] != "." and listing.find(f"{prefix}{name}/{MANIFEST}") is None:
            by_class.setdefault(name, []).append(place)
    check_classes(sorted(by_class), classes, where)
    names, lengths, labels, numbers = bytearray(), list[int](), list[int](), list[int]()
    for label, name in enumerate(classes or sorted(by_class)):
        for place in by_class.get(name, ()):
            folder = listing.folders[place].removeprefix(prefix)
            for number in range(int(listing.starts[place]), int(listing.starts[place + 1])):
                base = listing.base(number)
                if base.lower().endswith(IMAGE_SUFFIXES):
                    path = f"{folder}/{base}".encode("utf-8", "surrogateescape")
                    names += path
                    lengths.append(len(path))
                    labels.append(label)
                    numbers.append(number)
    check_images(sorted(by_class), labels, where, every=classes is None)
    index = FolderIndex(
        classes=tuple(classes or sorted(by_class)),
        labels=np.array(labels, dtype=np.int64),
        names=np.frombuffer(bytes(names), dtype=np.uint8),
        ends=np.cumsum(lengths, dtype=np.int64),
        folders=(),
    )
    return index, np.array(numbers, dtype=np.int64)


class RemoteSource(FolderSource, RemoteReads):
    """Images in class folders at a remote place, each read whole.

    Args:
        place: the folder of class folders.
        index: which files there are.
        sizes: bytes of each, as listed.
        stamps: of each, as listed.
    """

    def __init__(
        self, place: RemotePlace, index: FolderIndex, sizes: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]
    ) -> None:
        RemoteReads.__init__(self, place)
        self.index, self.sizes, self.stamps = index, sizes, stamps
        self.classes, self.labels = index.classes, index.labels
        self._listed = place

    @classmethod
    def of(
        cls, place: RemotePlace, listing: Listing, below: str = "", classes: tuple[str, ...] | None = None
    ) -> "RemoteSource":
        """The images in the class folders of a folder below a place.

        Raises:
            DatasetError: as :func:`class_files`.
        """
        index, numbers = class_files(listing, below, place.url_of(below), classes)
        made = cls(place.below(below), index, listing.sizes[numbers], listing.stamps[numbers])
        made._listed = place
        return made

    def request(self, number: int) -> Request:
        """The file of a sample."""
        stamp, options = int(self.stamps[number]), None
        if self.place.is_http and self._cache(number) is not None:  # S3 replaces as a whole
            options = same_version(stamp, self.place.options.get("headers", {}))
        return Request(self.index.path(number), str(stamp), options=options)

    def read(self, index: int) -> bytes:
        """The bytes of file ``index``.

        Raises:
            GoneError: when it is not there any more, or was replaced.
            ArchiveError: when it cannot be read for another reason.
        """
        try:
            return self.read_bytes(index)
        except GoneError:
            forget_listing(self._listed)
            raise

    def name(self, index: int) -> str:
        """The URL of file ``index``."""
        return self.place.url_of(self.index.path(index))

    def changed_ns(self, index: int) -> int:
        """When file ``index`` was changed last, as listed."""
        return int(self.stamps[index])


class RemoteFolder:
    """All files at a remote place, by their paths below it. Can be pickled and forked.

    Args:
        place: a folder.

    Raises:
        ArchiveError: when it cannot be listed.
    """

    def __init__(self, place: RemotePlace) -> None:
        self.place = place
        self._listing = listing = list_files(place)
        names = [name.encode("utf-8", "surrogateescape") for name, _ in listing.files()]
        index = FolderIndex(
            classes=(),
            labels=np.zeros(len(names), np.int64),
            names=np.frombuffer(b"".join(names), np.uint8),
            ends=np.cumsum([len(name) for name in names], dtype=np.int64),
            folders=(),
        )
        self._source = RemoteSource(place, index, listing.sizes, listing.stamps)
        self._source.again_late = False

    def names(self) -> list[str]:
        """The paths of all files, folder by folder."""
        return [name for name, _ in self._listing.files()]

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            GoneError: when there is none of that name, or it is not what was listed any more.
            ArchiveError: when it cannot be read for another reason.
        """
        return self.read_many([name])[0]

    def read_many(self, names: Iterable[str]) -> list[bytes]:
        """The bytes of several files, read at the same time.

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
