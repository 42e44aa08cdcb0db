"""PackedDataset: what was packed, by its number, in any process and from any thread."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lightning_feed.errors import ArchiveError, DatasetError, FeedError, SettingsError
from lightning_feed.storage import system
from lightning_feed.storage.folder import Encoded
from lightning_feed.storage.pack_formats import ALL, READERS, Manifest, PartIndex, Read, damaged, read_manifest
from lightning_feed.storage.pack_samples import from_bytes, pixels_of
from lightning_feed.storage.remote import RemotePlace, place_of


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
        self, path: str | Path, part: str | None = None, *, storage_options: Mapping[str, Any] | None = None
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
        self.labels: npt.NDArray[Any] = self.index.labels
        known = self.manifest.kind == "samples" or np.isin(self.labels, np.arange(len(self.classes))).all()
        if len(self) != parts[self.part] or not known:
            raise ArchiveError(f"{self.path}/{self.part} does not fit its index. Copy or pack it again.")
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

    def __getstate__(self) -> dict[str, Any]:
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
