"""Packs at a remote place: each sample is one range of one file.

The manifest and the indexes are copied to this machine once. Where the samples lie in the data file is found out once,
too, and kept: an LMDB is a tree of pages, of which all but the samples themselves are read; HDF5 says it itself.
"""

import asyncio
import hashlib
import io
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from lightning_feed.archive.folder import MANIFEST
from lightning_feed.archive.pack_formats import Manifest
from lightning_feed.archive.remote import GoneError, RemotePlace, RemoteReads, Request
from lightning_feed.archive.remote_folder import Listing, list_files
from lightning_feed.archive.system import cache_folder, read_private, write_private
from lightning_feed.errors import ArchiveError
from lightning_feed.extras import require

_MAGIC = 0xBEEFC0DE
_HEAD = struct.Struct("<QHHHH")
"""Of a page of LMDB: its number, nothing, flags, where its pointers end, where its nodes begin."""
_META = struct.Struct("<IIQQ 48x IHHQQQQQ QQ")
"""Behind the head of the first two pages: magic, version ..., the main database, the last page and the transaction."""
_NODE = struct.Struct("<HHHH")
"""Before the key: size of the data (or page below) in two halves, flags (or its third part), size of the key."""
_BRANCH = _BIG = 0x01


def copy_index(place: RemotePlace) -> Path:
    """A folder on this machine with the manifest and the indexes of a pack.

    Raises:
        ArchiveError: when there is no pack, or it cannot be read.
    """
    listing, connection = list_files(place, fresh=True), place.connection()
    if listing.find(MANIFEST) is None:
        raise ArchiveError(f"{place} is no pack: it has no {MANIFEST}. To make one: lightning-feed pack SRC DEST")

    def read(name: str) -> bytes:
        size = int(listing.sizes[listing.find(name) or 0])
        return connection.submit(connection.fetch(name, size=size if size >= 0 else None, whole=True)).result()

    manifest = read(MANIFEST)  # each time: not every server tells when it was changed
    version = hashlib.blake2b(place.key.encode() + manifest, digest_size=12).hexdigest()
    folder = cache_folder() / "packs" / version
    indexes = [name for name, _ in listing.files() if name.endswith("/index.npz")]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(folder / "lock", fallback_to_soft=False):
            for name in indexes:
                if not (folder / name).is_file():
                    write_private(folder / name, read(name))
            write_private(folder / MANIFEST, manifest)  # last, as in a pack
    except OSError as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(
            f"The index of {place} cannot be kept in {folder}: {error.strerror}. Set XDG_CACHE_HOME to a folder of "
            "your own."
        ) from error
    return folder


class RemotePackReader(RemoteReads):
    """The samples of one part of a pack, each read by its range.

    Args:
        place: of the pack.
        folder: with its index, as :func:`copy_index` gives it.
        manifest: of the pack.
        part: ``"train"`` ...
        sizes: bytes of each sample.

    Raises:
        ArchiveError: for a format that cannot be read by ranges, or data that are not those of the manifest.
    """

    def __init__(
        self, place: RemotePlace, folder: Path, manifest: Manifest, part: str, sizes: npt.NDArray[np.int64]
    ) -> None:
        super().__init__(place)
        self.sizes, self._identity = sizes, manifest.identity
        if manifest.format == "litdata":
            raise ArchiveError(
                f"{place} is a pack of the format litdata, which is not read by ranges. Give stage_to without "
                "stage_limit, which copies it whole, or read it with LitData's own StreamingDataset."
            )
        self._name = f"{part}/data/data.{'mdb' if manifest.format == 'lmdb' else 'h5'}"
        _check_size(place, list_files(place), self._name, manifest)
        kept = folder / part / "offsets.npy"
        with FileLock(folder / "lock", fallback_to_soft=False):
            if not kept.is_file():
                find = lmdb_offsets if manifest.format == "lmdb" else hdf5_offsets
                content = io.BytesIO()
                np.save(content, find(place, self._name, sizes))
                write_private(kept, content.getvalue())
        self._offsets = np.load(io.BytesIO(read_private(kept)), allow_pickle=False)

    def request(self, number: int) -> Request:
        """The range of a sample."""
        return Request(self._name, self._identity, int(self._offsets[number]))

    def read(self, index: int) -> bytes:
        """The payload of sample ``index``."""
        return self.read_bytes(index)


def _check_size(place: RemotePlace, listing: Listing, name: str, manifest: Manifest) -> None:
    number, size = listing.find(name), manifest.files[name]
    if number is None or int(listing.sizes[number]) not in (-1, size):
        raise GoneError(f"{place.url_of(name)} is missing or cut short: {size} bytes were packed. Copy it again.")


def hdf5_offsets(place: RemotePlace, name: str, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each sample begins in an HDF5 file."""
    h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
    connection = place.connection()
    try:
        with connection.fs.open(connection.path(name), "rb") as remote, h5py.File(remote, "r") as file:
            first = file["bytes"].id.get_offset() or 0
    except Exception as error:
        raise connection.told(error, name) from error
    return np.cumsum(sizes, dtype=np.int64) - sizes + first


def lmdb_offsets(place: RemotePlace, name: str, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each sample begins in the file of an LMDB, whose keys are the numbers of the samples."""
    connection = place.connection()
    try:
        offsets = connection.submit(_walk_lmdb(place, name, len(sizes))).result()
    except (struct.error, IndexError) as error:
        raise ArchiveError(f"{place.url_of(name)} is not the LMDB of a pack: {error}. Copy it again.") from error
    if (offsets < 0).any():
        raise ArchiveError(f"{place.url_of(name)} does not have all of its {len(sizes)} samples. Copy it again.")
    return offsets


async def _walk_lmdb(place: RemotePlace, name: str, count: int) -> npt.NDArray[np.int64]:
    connection, offsets = place.connection(), np.full(count, -1, np.int64)
    first = await connection.fetch(name, 0, 4096)
    magic, *_ = _META.unpack_from(first, _HEAD.size)
    if magic != _MAGIC:
        raise struct.error("its first page is of another kind")
    (page_size,) = struct.unpack_from("<I", first, _HEAD.size + 24)
    metas = [_META.unpack_from(await connection.fetch(name, at, 4096), _HEAD.size) for at in (0, page_size)]
    root = max(metas, key=lambda meta: meta[-1])[-3]  # of the newer transaction
    level, seen = [root], {root}
    while level:
        pages = await asyncio.gather(*(connection.fetch(name, number * page_size, page_size) for number in level))
        level = [below for number, page in zip(level, pages, strict=True)
                 for below in _look_into(page, number * page_size, page_size, offsets)]  # fmt: skip
        if len(seen) + len(level) > len(seen.union(level)):
            raise struct.error("its pages lead in a circle")
        seen.update(level)
    return offsets


def _look_into(page: bytes, at: int, page_size: int, offsets: npt.NDArray[np.int64]) -> list[int]:
    """Note where the samples of a leaf begin; the pages below a branch."""
    _, _, flags, lower, _ = _HEAD.unpack_from(page)
    below = []
    for place in struct.unpack_from(f"<{(lower - _HEAD.size) // 2}H", page, _HEAD.size):
        low, high, more, key_size = _NODE.unpack_from(page, place)
        if flags & _BRANCH:
            below.append(low | high << 16 | more << 32)
            continue
        data = place + _NODE.size + key_size
        number = int.from_bytes(page[place + _NODE.size : data], "big")
        if more & _BIG:
            (first_page,) = struct.unpack_from("<Q", page, data)
            offsets[number] = first_page * page_size + _HEAD.size
        else:
            offsets[number] = at + data
    return below
