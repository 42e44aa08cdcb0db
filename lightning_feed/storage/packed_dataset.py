"""PackedDataset, and the format of a pack: its manifest, the index of each part, and readers of LMDB and HDF5.

Data files are opened in the process that reads, on the first read: neither LMDB nor HDF5 survives a fork.
"""

import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lightning_feed.errors import ArchiveError, DatasetError, FeedError, SettingsError
from lightning_feed.extras import require
from lightning_feed.storage import system
from lightning_feed.storage.folder import MANIFEST, Encoded, is_pack, nth_name
from lightning_feed.storage.pack_samples import from_bytes, pixels_of
from lightning_feed.storage.remote import RemotePlace, place_of

ALL = "all"
"""The name of the only part of a pack that has no splits."""

Format = Literal["lmdb", "hdf5"]
FORMATS: tuple[Format, ...] = get_args(Format)
_VERSION = 1
_PARTS = {ALL, "train", "val", "test"}


def damaged(path: Path, error: Exception, index: int | None = None) -> ArchiveError:
    """The error for anything that a library raises: a flipped bit can make it raise nearly everything."""
    where = "" if index is None else f" at sample {index}"
    return ArchiveError(f"{path} cannot be read{where}: {error}. Copy it again, or pack the source again.")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# --- manifest and index -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a pack. Written last: a folder without it is no pack."""

    format: Format
    kind: Literal["files", "decoded", "samples"]
    """Encoded files as they are or re-encoded; decoded pixels; or samples of a dataset."""
    classes: tuple[str, ...]
    """Names of the labels; empty for samples of a dataset."""
    parts: dict[str, int]
    """Samples of each part: ``train``, ``val`` ..., or ``all``."""
    total_bytes: int
    options: dict[str, object]
    """The options it was made with: ``short_side``, ``quality``."""
    files: dict[str, int]
    """Bytes of each data file, by its path in the pack."""
    version: int = _VERSION
    indexes: dict[str, str] = field(default_factory=dict)
    """The digest of each part's index, which holds the checksums of all samples; none in packs of earlier versions."""

    def checksum(self, *without: str) -> str:
        """A digest of the manifest, but for some of its fields."""
        about = {name: value for name, value in asdict(self).items() if name not in without}
        return _digest(json.dumps(about, sort_keys=True).encode())

    @property
    def identity(self) -> str:
        """A digest that is the same for the same data, and another for any other."""
        return self.checksum("files") if self.indexes else self.checksum()  # one that was resumed had more pages

    def save(self, folder: Path) -> None:
        """Write it, atomically."""
        with system.atomic_write(folder / MANIFEST) as file:
            file.write(json.dumps({**asdict(self), "checksum": self.checksum()}, indent=1).encode())


def read_manifest(path: Path) -> Manifest:
    """The manifest of a pack.

    Raises:
        ArchiveError: when there is none, it is damaged, or another version wrote it.
    """
    if not is_pack(path):
        raise ArchiveError(f"{path} is no pack: it has no {MANIFEST}. To make one: lightning-feed pack SRC DEST")
    try:
        found = json.loads((path / MANIFEST).read_text())
        version, format = found["version"], found.get("format")
        if version == _VERSION and format != "litdata":
            return _manifest_of(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(path / MANIFEST, error) from error
    if format == "litdata":
        raise ArchiveError(
            f"{path} is a LitData pack of an earlier version. Read {path}/PART/data with litdata.StreamingDataset, "
            "whose loader is measured as any, or pack the source again."
        )
    raise ArchiveError(f"{path} is a pack of version {version!r}, and only {_VERSION} can be read. Pack it again.")


def _manifest_of(classes: list[str], checksum: str | None = None, **found: Any) -> Manifest:
    """A manifest out of JSON, if it has the names and types of one: a stranger may have written it."""
    manifest = Manifest(classes=tuple(classes), **found)
    numbers = [*manifest.parts.values(), *manifest.files.values(), manifest.total_bytes]
    sound = (
        manifest.format in FORMATS,
        manifest.kind in ("files", "decoded", "samples"),
        isinstance(classes, list),
        {type(name) for name in classes} <= {str},
        bool(manifest.parts),
        _PARTS.issuperset(manifest.parts),
        {type(number) for number in numbers} == {int},
    )
    if not all(sound) or min(numbers) < 0:
        raise ValueError("it is not the manifest of a pack")
    if checksum != manifest.checksum() and (checksum is not None or manifest.indexes):  # earlier versions wrote neither
        raise ValueError("its checksum does not fit")
    return manifest


@dataclass(frozen=True, eq=False)
class PartIndex:
    """The samples of one part, in flat arrays: a million of them cost no Python objects."""

    labels: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    """Bytes of each payload."""
    checksums: npt.NDArray[np.uint32]
    """CRC-32 of each payload."""
    names: npt.NDArray[np.uint8]
    """All names, one after the other, in UTF-8 (undecodable bytes as they were)."""
    name_ends: npt.NDArray[np.int64]

    def name(self, index: int) -> str:
        """The name of sample ``index`` in the source."""
        return nth_name(self.names, self.name_ends, index).decode("utf-8", "surrogateescape")

    def save(self, path: Path) -> str:
        """Write it as ``.npz``, and return its digest."""
        content = io.BytesIO()
        np.savez(content, **vars(self))
        path.write_bytes(content.getvalue())
        return _digest(content.getvalue())

    @classmethod
    def load(cls, path: Path, digest: str | None = None) -> "PartIndex":
        """Read it.

        Args:
            path: the file.
            digest: what :meth:`save` returned; None where that is not known.

        Raises:
            ArchiveError: when it is missing or damaged, or the labels are no integers.
        """
        try:
            content = path.read_bytes()
            if digest is not None and _digest(content) != digest:
                raise ValueError("it is not the one that was written with the pack")
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                read = cls(**{each.name: stored[each.name] for each in fields(cls)})
            numbers = (read.labels, read.checksums, read.name_ends, read.sizes)
            if any(array.dtype.kind not in "iu" or array.shape != (len(read.sizes),) for array in numbers):
                raise ValueError(f"its arrays are not one integer for each of {len(read.sizes)} samples")
            return read
        except Exception as error:
            raise damaged(path, error) from error


# --- readers ----------------------------------------------------------------------------------------------------------

Read = Callable[[int], bytes]
"""Reads the payload of a sample in this process, from any thread; raises anything."""
_environments: "WeakValueDictionary[tuple[int, int, int], Any]" = WeakValueDictionary()
"""Those that are read, by process, device and inode of the data: another pack may lie at the path by now."""


def lmdb_key(number: int) -> bytes:
    """The key of a sample: its number in 8 bytes, big-endian, so that keys sort."""
    return number.to_bytes(8, "big")


def open_lmdb(folder: Path) -> Any:
    """Open an LMDB environment to read. LMDB forbids to open one twice in a process, so those that read one share it.

    Raises:
        lmdb.Error: when it is damaged or cut short.
        OSError: when there is none.
    """
    lmdb = require("lmdb", extra="pack", why="A pack of the format lmdb")
    with system.process_lock:
        status = (folder / "data.mdb").stat()
        identity = (os.getpid(), status.st_dev, status.st_ino)
        for known, environment in list(_environments.items()):
            if known[0] != identity[0]:
                environment.close()  # inherited by a fork, and closed in this process only
                del _environments[known]
        if identity in _environments:
            return _environments[identity]
        # No lock: nobody writes. No readahead: training reads at random. Spare readers are for threads.
        environment = lmdb.open(os.path.realpath(folder), readonly=True, lock=False, readahead=False, max_readers=512)
        page = environment.stat()["psize"]
        needed, there = environment.info()["last_pgno"] + 1, status.st_size // page if page else 0
        if there < needed:  # reading on would end the process with SIGBUS
            environment.close()
            raise lmdb.CorruptedError(f"it is cut short: {there} of {needed} pages are there")
        _environments[identity] = environment
        return environment


def _open_lmdb(folder: Path, _index: PartIndex) -> Read:
    environment = open_lmdb(folder)

    def read(number: int) -> bytes:
        with environment.begin() as transaction:  # which the map is valid in
            found: bytes | None = transaction.get(lmdb_key(number))
        if found is None:
            raise LookupError("it is not there")
        return found

    return read


def _open_hdf5(folder: Path, index: PartIndex) -> Read:
    """Ask HDF5 once where the bytes lie in the file, and read there: its library locks, and dislikes forks."""
    h5py = require("h5py", extra="hdf5", why="A pack of the format hdf5")
    path, ends = folder / "data.h5", np.cumsum(index.sizes)
    with h5py.File(path, "r", locking=False) as opened:
        offset = opened["bytes"].id.get_offset() or 0  # None when all files are empty
    file = os.open(path, os.O_RDONLY)

    def read(number: int) -> bytes:
        size = int(index.sizes[number])
        payload = os.pread(file, size, offset + int(ends[number]) - size)
        if len(payload) < size:
            raise ValueError("it is cut short")
        return payload

    finalize(read, os.close, file)
    return read


READERS: dict[Format, Callable[[Path, PartIndex], Read]] = {"lmdb": _open_lmdb, "hdf5": _open_hdf5}


# --- the dataset ------------------------------------------------------------------------------------------------------


class DamagedSampleError(ArchiveError, DatasetError):
    """A sample that is not what was packed. As a DatasetError it is a bad sample, which ``on_error`` may leave out."""


class PackedDataset(Dataset[Any]):
    """A map-style dataset of what :func:`~lightning_feed.storage.pack` packed. Pickled, it is the path that travels.

    ``dataset[i]`` is (bytes of the file, label) of a packed folder, (uint8 pixels (H, W, 3), label) of one that was
    packed decoded, and the sample itself of a packed dataset. Files are opened on the first read in each process, so
    that it is safe under fork, spawn and forkserver, and in threads. Nothing is unpickled. The checksum of each sample
    is compared the first time that a process reads it.

    Args:
        path: the pack; one at a URL is to be staged first.
        part: ``"train"``, ``"val"`` or ``"test"`` of a folder that had these; None where the pack has one part.
        storage_options: for a URL, which is refused.

    Attributes:
        classes: names of the labels, sorted; empty for a packed dataset.
        labels: int64, shape (n,).

    Raises:
        ArchiveError: when it is no pack, is damaged, or was written by another version.
        SettingsError: when there is no such part, and for a URL.
        MissingExtraError: from the first read, when the library of its format is not installed.
    """

    def __init__(
        self, path: str | Path, part: str | None = None, *, storage_options: Mapping[str, object] | None = None
    ) -> None:
        place = place_of(path, storage_options)
        if isinstance(place, RemotePlace):
            raise remote_pack_error(place)
        self.path = place
        self.manifest = read_manifest(self.path)
        parts = self.manifest.parts
        self.part = next(iter(parts)) if part is None and len(parts) == 1 else str(part)
        if self.part not in parts:
            raise SettingsError(f"{self.path} has no part {part!r}. Give one of {', '.join(map(repr, parts))}.")
        self.index = PartIndex.load(self.path / self.part / "index.npz", self.manifest.indexes.get(self.part))
        self.classes = self.manifest.classes
        self.labels: npt.NDArray[np.int64] = self.index.labels
        known = self.manifest.kind == "samples" or np.isin(self.labels, np.arange(len(self.classes))).all()
        if len(self) != parts[self.part] or not known:
            raise ArchiveError(f"{self.path}/{self.part} does not match its index. Copy or pack it again.")
        self._check_files()
        self._identity = self.manifest.identity
        self._checked = np.zeros(len(self), bool)
        self._opened: tuple[int, Read] | None = None

    @staticmethod
    def manifest_of(path: str | Path) -> Manifest:
        """The manifest of a pack, without opening its data."""
        return read_manifest(Path(path))

    def __len__(self) -> int:
        return len(self.index.sizes)

    def __getitem__(self, index: int) -> Any:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"There is no sample {index} among {len(self)}.")
        if self.manifest.kind == "samples":
            return from_bytes(self.payload(place))
        return self.read(place), int(self.index.labels[place])

    def read(self, index: int) -> Encoded:
        """The bytes of file ``index``, or its pixels where the pack holds pixels.

        Raises:
            ArchiveError: when they cannot be read.
        """
        payload = self.payload(index)
        if self.manifest.kind != "decoded":
            return payload
        try:
            return pixels_of(payload)
        except ValueError as error:
            raise DamagedSampleError(f"{self.name(index)} does not hold pixels: {error}. Pack it again.") from error

    def payload(self, index: int) -> bytes:
        """The raw payload of sample ``index``.

        Raises:
            ArchiveError: when it cannot be read, is not what was packed, or another pack has taken the place of this.
        """
        read = self._reader()
        try:
            payload = read(index)
        except Exception as error:
            raise damaged(self.path, error, index) from error
        if not self._checked[index]:
            if zlib.crc32(payload) != self.index.checksums[index]:
                raise DamagedSampleError(f"{self.name(index)} is not what was packed. Copy or pack it again.")
            self._checked[index] = True
        return payload

    def name(self, index: int) -> str:
        """The name of sample ``index``, with the pack in front."""
        return f"{self.path}/{self.part if self.part != ALL else ''}:{self.index.name(index)}"

    def _reader(self) -> Read:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            with system.process_lock:  # one that a fork renews
                opened = self._opened
                if opened is None or opened[0] != os.getpid():
                    self._opened = opened = (os.getpid(), self._open())
        return opened[1]

    def _open(self) -> Read:
        data = self.path / self.part / "data"
        try:
            read = READERS[self.manifest.format](data, self.index)
        except FeedError:
            raise
        except Exception as error:
            raise damaged(data, error) from error
        # After the data were opened: a pack that takes this one's place before that has its manifest there by now.
        if read_manifest(self.path).identity != self._identity:
            raise ArchiveError(f"{self.path} is another pack than the one that this run began with. Start it again.")
        self._check_files()
        self._checked[:] = False
        return read

    def _check_files(self) -> None:
        """See whether the data files are there and as long as they were."""
        for name, size in self.manifest.files.items():
            file = self.path / name
            if name.startswith(f"{self.part}/") and not (file.is_file() and file.stat().st_size == size):
                raise ArchiveError(f"{file} is missing, cut short or damaged. Copy or pack it again.")

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "part": self.part, "identity": self._identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["part"])  # type: ignore[misc]  # the index is read again, not sent
        self._identity = state["identity"]  # compared when the data are opened


def remote_pack_error(place: RemotePlace) -> SettingsError:
    """The refusal of a pack at a URL."""
    return SettingsError(
        f"{place} is a URL, and packs are read from this machine. Stage it first: lightning-feed stage {place} FOLDER, "
        "or the stage_to of a data module, without stage_limit."
    )
