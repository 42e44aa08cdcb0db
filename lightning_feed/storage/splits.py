"""Splits of a folder or a pack, and their samples."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.storage.folder import (
    MANIFEST,
    Encoded,
    FolderSource,
    SampleSource,
    index_of,
    is_pack,
)
from lightning_feed.storage.packed_dataset import ALL, PackedDataset, remote_pack_error
from lightning_feed.storage.remote import RemotePlace
from lightning_feed.storage.remote_folder import RemoteSamples, RemoteSource, list_files

_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
"""Folder names of each split."""


SPLITS = tuple(_FOLDERS)


class Root:
    """Folder of class folders, or of split folders with class folders, on this machine or at a URL.

    Args:
        place: the folder.
        fresh: True to list a remote place now.
    """

    def __init__(self, place: Path | RemotePlace, *, fresh: bool = False) -> None:
        self.place = place
        self._listing = list_files(place, fresh=fresh) if isinstance(place, RemotePlace) else None
        self.has_splits = self._has("train")

    @property
    def is_pack(self) -> bool:
        """True if the folder is a pack."""
        if self._listing is not None:
            return self._listing.find(MANIFEST) is not None
        return is_pack(str(self.place))

    def source(self, split: str) -> FolderSource | None:
        """Return the images of a split, or all images of a root without splits; None if the split does not exist.

        Raises:
            DatasetError: if there are no images, or several folders mean the same split.
        """
        if not self.has_splits:
            return self._read("")
        names = [name for name in _FOLDERS[split] if self._has(name)]
        if len(names) > 1:
            raise DatasetError(
                f"{self.place} has {' and '.join(names)}, which all mean the split {split!r}. Rename all but one."
            )
        if not names:
            return None
        return self._read(names[0], None if split == "train" else self._read("train").classes)

    def _has(self, name: str) -> bool:
        if self._listing is not None:
            return self._listing.has_folder(name)
        return os.path.isdir(f"{self.place}/{name}")  # noqa: PTH112

    def _read(self, name: str, classes: tuple[str, ...] | None = None) -> FolderSource:
        if isinstance(self.place, RemotePlace):
            assert self._listing is not None
            return RemoteSource.of(self.place, self._listing, name, classes)
        return FolderSource(self.place / name, index_of(self.place / name, classes))


@dataclass(frozen=True)
class Splits:
    """Splits of a root: its ``train``, ``val`` and ``test`` folders, or else a random share of its images for ``val``.

    Args:
        val_fraction: share of the samples for ``"val"`` if there are no split folders; 0 for none.
        seed: seed of the random choice.

    Raises:
        SettingsError: if the fraction is not in [0, 1).
    """

    val_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        value = self.val_fraction
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise SettingsError(f"val_fraction={value!r} is not possible. Use a share from 0 to below 1.")

    def source(self, root: Path | RemotePlace, split: str) -> SampleSource | None:
        """Return the samples of ``split`` under ``root``; None if the split does not exist.

        Raises:
            DatasetError: if there are no samples.
            ArchiveError: if a pack is damaged, or was written by another version.
            SettingsError: if ``root`` is a pack at a URL.
        """
        if split not in _FOLDERS:
            return None
        found = Root(root)
        if not found.is_pack:
            source = found.source(split)
            return source if found.has_splits or source is None else self._share(source, split)
        if isinstance(root, RemotePlace):
            raise remote_pack_error(root)
        return self._packed(root, split)

    def classes(self, root: Path | RemotePlace) -> tuple[str, ...]:
        """Return the label names, sorted."""
        source = self.source(root, "train")
        return source.classes if source is not None else ()

    def _packed(self, root: Path, split: str) -> SampleSource | None:
        manifest = PackedDataset.manifest_of(root)
        if manifest.kind == "samples":
            raise DatasetError(f"{root} is a pack of samples, not of images. Read it with PackedDataset.")
        if ALL in manifest.parts:
            return self._share(PackedDataset(root), split)
        return PackedDataset(root, split) if split in manifest.parts else None

    def _share(self, source: SampleSource, split: str) -> SampleSource | None:
        if split == "test":
            return None
        # RandomState has a frozen stream (NEP 19): a new NumPy must not move samples from val to train.
        order = np.random.RandomState(self.seed).permutation(len(source))
        validation = round(len(source) * self.val_fraction)
        chosen = order[validation:] if split == "train" else order[:validation]
        return Chosen(source, np.sort(chosen)) if len(chosen) else None


class Chosen:
    """Some samples of a source, chosen by number."""

    def __init__(self, source: SampleSource, chosen: npt.NDArray[np.int64]) -> None:
        self.source = source
        self.chosen = chosen
        self.classes = source.classes
        self.labels = source.labels[chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, index: int) -> Encoded:
        """Return the bytes of the chosen sample ``index``."""
        return self.source.read(int(self.chosen[index]))

    def remote_reads(self) -> RemoteSamples | None:
        """Return the reader of the remote samples; None if they are on this machine."""
        find = getattr(self.source, "remote_reads", None)
        found: RemoteSamples | None = find() if find is not None else None
        return None if found is None else RemoteSamples(found.reads, self.chosen)

    def expect(self, indices: Iterable[int]) -> object:
        """Start to read the next samples if they are remote. Return an object that holds the reads."""
        found = self.remote_reads()
        return None if found is None else found.reads.expect(self.chosen[list(indices)].tolist())

    def name(self, index: int) -> str:
        """Return the path of the chosen sample ``index``."""
        return self.source.name(int(self.chosen[index]))
