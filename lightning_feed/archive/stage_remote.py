"""Staging of a remote place: its files as a tree, and each of them fetched, large ones in parts."""

import asyncio
import os
from pathlib import Path

from lightning_feed.archive.remote import Connection, GoneError, RemotePlace
from lightning_feed.archive.remote_folder import list_files, stamp_of
from lightning_feed.archive.stage_copy import Advance, FileStamp, Mirror, Tree
from lightning_feed.errors import ArchiveError, DatasetError

_PART_BYTES = 16 << 20
_PARTS = 4
"""Of one file at the same time."""


class RemoteMirror(Mirror):
    """A copy that is to equal a remote place."""

    threads = 32
    """Each waits for the network most of the time."""

    def __init__(self, place: RemotePlace, target: str, parts: Path) -> None:
        super().__init__(str(place), target, parts)
        self._place = place

    def scan(self) -> Tree:
        """List the place."""
        return scan_remote(self._place)

    def fetch(self, name: str, part: Path, advance: Advance) -> bool:
        """Bring a file to ``part``."""
        try:
            return fetch_file(self._place, name, self.source.files[name], part, advance)
        except DatasetError:
            return False  # gone, or another by now


def scan_remote(place: RemotePlace) -> Tree:
    """Sizes and versions of all files at a place, listed now; the modification time stands for the version.

    Raises:
        ArchiveError: when it cannot be listed, or the server does not tell sizes.
    """
    listing, tree = list_files(place, fresh=True), Tree(str(place))
    folders: dict[str, None] = {}
    for name, number in listing.files():
        size = int(listing.sizes[number])
        if size < 0:
            raise ArchiveError(f"{place.url_of(name)} has no size that its server tells, so no copy can be checked.")
        tree.files[name] = FileStamp(size, int(listing.stamps[number]))
        if name:
            folders |= dict.fromkeys(["", *(name[:at] for at, letter in enumerate(name) if letter == "/")])
    tree.folders = list(folders)
    return tree


def fetch_file(place: RemotePlace, name: str, stamp: FileStamp, part: Path, advance: Advance) -> bool:
    """Bring a file to this machine. False when that is to stop.

    Raises:
        GoneError: when it is not there, or not what was listed.
        ArchiveError: when it cannot be read.
        OSError: when it cannot be written.
    """
    connection = place.connection()
    with part.open("wb") as target:
        if stamp.size <= _PART_BYTES:
            target.write(connection.submit(connection.fetch(name, 0, stamp.size, whole=True)).result())
            return advance(stamp.size)
        before = connection.submit(connection.call("info", name)).result()
        if not connection.submit(_fetch_parts(connection, name, stamp.size, target.fileno(), advance)).result():
            return False
        now = connection.submit(connection.call("info", name)).result()
    # Not compared with the listing: some servers list the time of a change with its milliseconds, and say it without.
    if stamp_of(before) != stamp_of(now) or now.get("size") != stamp.size:
        raise GoneError(f"{place.url_of(name)} was replaced while it was copied. Stage it again.")
    return True


async def _fetch_parts(connection: Connection, name: str, size: int, target: int, advance: Advance) -> bool:
    begins = iter(range(0, size, _PART_BYTES))

    async def fetch() -> bool:
        for begin in begins:
            data, at = memoryview(await connection.fetch(name, begin, min(_PART_BYTES, size - begin))), begin
            while data:
                written = os.pwrite(target, data, at)
                data, at = data[written:], at + written
            if not advance(at - begin):
                return False
        return True

    fetching = [asyncio.ensure_future(fetch()) for _ in range(_PARTS)]
    try:
        return all(await asyncio.gather(*fetching))
    finally:  # the file is closed next, and its number may be another file's then
        for one in fetching:
            one.cancel()
        await asyncio.wait(fetching)
