"""PackedDataset: what was packed, by its number, in any process and from any thread."""

import os
from pathlib import Path
from typing import Any

import numpy.typing as npt
from torch.utils.data import Dataset

from lightning_feed.archive import in_use
from lightning_feed.archive.folder_source import Place
from lightning_feed.archive.pack_formats import READERS, Reader
from lightning_feed.archive.pack_manifest import ALL, Manifest, PartIndex, check_files, read_manifest
from lightning_feed.archive.pack_sample import from_bytes
from lightning_feed.archive.pack_samples import pixels_of
from lightning_feed.archive.source import Encoded
from lightning_feed.errors import ArchiveError, SettingsError


class PackedDataset(Dataset[Any]):
    """A map-style dataset of what :func:`~lightning_feed.archive.pack` packed. Pickled, it is the path that travels.

    ``dataset[i]`` is (bytes of the file, label) of a packed folder, (uint8 pixels (H, W, 3), label) of one that was
    packed decoded, and the sample itself of a packed dataset. Files are opened on the first read in each process, so
    that it is safe under fork, spawn and forkserver, and in threads. Nothing is unpickled.

    Args:
        path: the pack; or a place that says where it lies now, such as a copy that is being staged.
        part: ``"train"``, ``"val"`` or ``"test"`` of a folder that had these; None where the pack has one part.

    Raises:
        ArchiveError: when it is no pack, is damaged, or was written by another version.
        SettingsError: when there is no such part.
        MissingExtraError: from the first read, when the library of its format is not installed.
    """

    def __init__(self, path: str | Path | Place, part: str | None = None) -> None:
        self.place = Path(path) if isinstance(path, (str, Path)) else path
        self.path = self.place if isinstance(self.place, Path) else self.place.current()
        self.manifest = read_manifest(self.path)
        self.part = part if part is not None else next(iter(self.manifest.parts))
        if part is None and len(self.manifest.parts) > 1:
            raise SettingsError(f"{self.path} has the parts {', '.join(map(repr, self.manifest.parts))}. Say which.")
        if self.part not in self.manifest.parts:
            raise SettingsError(
                f"{self.path} has no part {part!r}. It has {', '.join(map(repr, self.manifest.parts))}."
            )
        self.index = PartIndex.load(self.path / self.part / "index.npz")
        if len(self.index.sizes) != self.manifest.parts[self.part]:
            raise ArchiveError(
                f"{self.path} should have {self.manifest.parts[self.part]} samples in {self.part!r}, and its index has "
                f"{len(self.index.sizes)}. Copy or pack it again."
            )
        check_files(self.path, self.manifest, self.part)
        self._opened: tuple[int, Path, Reader] | None = None

    @staticmethod
    def manifest_of(path: str | Path) -> Manifest:
        """What a pack is, without opening its data."""
        return read_manifest(Path(path))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, sorted; empty for a packed dataset."""
        return self.manifest.classes

    @property
    def labels(self) -> npt.NDArray[Any]:
        """int64, shape (n,)."""
        return self.index.labels

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
        return pixels_of(payload) if self.manifest.kind == "decoded" else payload

    def payload(self, index: int) -> bytes:
        """What lies in the pack for sample ``index``, as it lies there."""
        return self._reader().read(index)

    def name(self, index: int) -> str:
        """What sample ``index`` was called, with the pack in front."""
        return f"{self.path}/{self.part if self.part != ALL else ''}:{self.index.name(index)}"

    def _reader(self) -> Reader:
        here = (os.getpid(), self.place if isinstance(self.place, Path) else self.place.current())
        opened = self._opened
        if opened is not None and opened[:2] == here:
            return opened[2]
        with in_use.process_lock:  # one that a fork renews
            opened = self._opened
            if opened is None or opened[:2] != here:
                self._opened = opened = (*here, READERS[self.manifest.format](here[1] / self.part / "data"))
            return opened[2]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.place, "part": self.part}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["part"])  # type: ignore[misc]  # the index is read again, not sent
