"""PackedDataset: what was packed, by its number, in any process and from any thread."""

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lightning_feed.archive import system
from lightning_feed.archive.folder import Encoded, Place, located
from lightning_feed.archive.pack_formats import ALL, READERS, Manifest, PartIndex, Read, damaged, read_manifest
from lightning_feed.archive.pack_samples import from_bytes, pixels_of
from lightning_feed.archive.remote import RemotePlace, RemoteSamples, place_of
from lightning_feed.archive.remote_pack import RemotePackReader, copy_index
from lightning_feed.errors import ArchiveError, DatasetError, FeedError, SettingsError


class DamagedSampleError(ArchiveError, DatasetError):
    """A sample that is not what was packed. As a DatasetError it is a bad sample, which ``on_error`` may leave out."""


class PackedDataset(Dataset[Any]):
    """A map-style dataset of what :func:`~lightning_feed.archive.pack` packed. Pickled, it is the path that travels.

    ``dataset[i]`` is (bytes of the file, label) of a packed folder, (uint8 pixels (H, W, 3), label) of one that was
    packed decoded, and the sample itself of a packed dataset. Files are opened on the first read in each process, so
    that it is safe under fork, spawn and forkserver, and in threads. Nothing is unpickled. The checksum of each sample
    is compared the first time that a process reads it.

    Args:
        path: the pack, also at a URL of fsspec, where each sample is read by its range (not of the format litdata); or
            a place that says where it lies now, such as a copy that is being staged.
        part: ``"train"``, ``"val"`` or ``"test"`` of a folder that had these; None where the pack has one part.
        storage_options: for a URL, those of fsspec.

    Attributes:
        classes: names of the labels, sorted; empty for a packed dataset.
        labels: int64, shape (n,).

    Raises:
        ArchiveError: when it is no pack, is damaged, or was written by another version.
        SettingsError: when there is no such part.
        MissingExtraError: from the first read, when the library of its format is not installed.
    """

    def __init__(
        self,
        path: str | Path | Place | RemotePlace,
        part: str | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        place = place_of(path, storage_options) if isinstance(path, (str, Path)) else path
        self.place: Path | Place | RemotePlace = place
        self.path = copy_index(place) if isinstance(place, RemotePlace) else located(place)
        told: object = place if isinstance(place, RemotePlace) else self.path
        self.manifest = read_manifest(self.path)
        parts = self.manifest.parts
        self.part = next(iter(parts)) if part is None and len(parts) == 1 else str(part)
        if self.part not in parts:
            raise SettingsError(f"{told} has no part {part!r}. Give one of {', '.join(map(repr, parts))}.")
        self.index = PartIndex.load(self.path / self.part / "index.npz", self.manifest.indexes.get(self.part))
        self.classes = self.manifest.classes
        self.labels: npt.NDArray[Any] = self.index.labels
        known = self.manifest.kind == "samples" or np.isin(self.labels, np.arange(len(self.classes))).all()
        if len(self) != parts[self.part] or not known:
            raise ArchiveError(f"{told}/{self.part} does not fit its index. Copy or pack it again.")
        if not isinstance(place, RemotePlace):
            self._check_files(self.path)
        self._identity = self.manifest.identity
        self._checked = np.zeros(len(self), bool)
        self._opened: tuple[int, Path, Read] | None = None
        self._remote: RemotePackReader | None = None

    @staticmethod
    def manifest_of(path: str | Path | RemotePlace) -> Manifest:
        """What a pack is, without opening its data."""
        return read_manifest(copy_index(path) if isinstance(path, RemotePlace) else Path(path))

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
        """What lies in the pack for sample ``index``, as it lies there.

        Raises:
            ArchiveError: when it cannot be read, is not what was packed, or another pack has taken the place of this.
        """
        read = self._reader()
        try:
            payload = read(index)
        except FeedError:
            raise
        except Exception as error:
            raise damaged(self.path, error, index) from error
        # LitData opens its chunks by name at any time, as requests do, and they may be those of another pack by now.
        by_name = self.manifest.format == "litdata" or isinstance(self.place, RemotePlace)
        if by_name or not self._checked[index]:
            if zlib.crc32(payload) != self.index.checksums[index]:
                raise DamagedSampleError(f"{self.name(index)} is not what was packed. Copy or pack it again.")
            self._checked[index] = True
        return payload

    def remote_reads(self) -> RemoteSamples | None:
        """The samples as they are read from a remote place; None for a pack on this machine."""
        if isinstance(self.place, RemotePlace):
            self._reader()
        return self._remote.remote_reads() if self._remote is not None else None

    def expect(self, indices: Iterable[int]) -> object:
        """Begin to read samples that will be asked for next, where they are remote; gives what holds them."""
        found = self.remote_reads()
        return None if found is None else found.reads.expect(indices)

    def name(self, index: int) -> str:
        """What sample ``index`` was called, with the pack in front."""
        where = self.place if isinstance(self.place, RemotePlace) else self.path
        return f"{where}/{self.part if self.part != ALL else ''}:{self.index.name(index)}"

    def _reader(self) -> Read:
        here = (os.getpid(), self.path if isinstance(self.place, RemotePlace) else located(self.place))
        opened = self._opened
        if opened is None or opened[:2] != here:
            with system.process_lock:  # one that a fork renews
                opened = self._opened
                if opened is None or opened[:2] != here:
                    self._opened = opened = (*here, self._open(here[1]))
        return opened[2]

    def _open(self, path: Path) -> Read:
        if isinstance(self.place, RemotePlace):
            self._check_identity(self.manifest, place=self.place)
            self._remote = RemotePackReader(self.place, path, self.manifest, self.part, self.index.sizes)
            return self._remote.read
        try:
            read = READERS[self.manifest.format](path / self.part / "data", self.index)
        except FeedError:
            raise
        except Exception as error:
            raise damaged(path / self.part / "data", error) from error
        # After the data were opened: a pack that takes this one's place before that has its manifest there by now.
        self._check_identity(read_manifest(path), place=path)
        self._check_files(path)
        self._checked[:] = False
        return read

    def _check_identity(self, manifest: Manifest, *, place: object) -> None:
        if manifest.identity != self._identity:
            raise ArchiveError(f"{place} is another pack than the one that this run began with. Start it again.")

    def _check_files(self, path: Path) -> None:
        """See whether the data files are there and as long as they were."""
        for name, size in self.manifest.files.items():
            file = path / name
            if name.startswith(f"{self.part}/") and not (file.is_file() and file.stat().st_size == size):
                raise ArchiveError(f"{file} is missing, cut short or damaged. Copy or pack it again.")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.place, "part": self.part, "identity": self._identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["part"])  # type: ignore[misc]  # the index is read again, not sent
        self._identity = state["identity"]  # compared when the data are opened
