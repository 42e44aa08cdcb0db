"""Splits of a folder or a pack, and their samples."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.storage.folder import Encoded, FolderSource, SampleSource, class_names, is_pack, scan_classes
from lightning_feed.storage.packed_dataset import ALL, PackedDataset, read_manifest

_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
"""Folder names of each split."""
SPLITS = tuple(_FOLDERS)


def has_splits(root: Path) -> bool:
    """Return True if the folder has split folders, of which ``train`` is required, instead of class folders."""
    return (root / "train").is_dir()


def folder_of_split(root: Path, split: str) -> FolderSource | None:
    """Return the images in the folder of a split; None if there is no such folder.

    Raises:
        DatasetError: if there are no images, or if several folders (``val``, ``valid``) are for the same split.
    """
    names = [name for name in _FOLDERS[split] if (root / name).is_dir()]
    if not names:
        return None
    if len(names) > 1:
        raise DatasetError(f"{root} has {' and '.join(names)}, which all mean the split {split!r}. Rename all but one.")
    folder = root / names[0]
    if split == "train":
        return FolderSource(folder, scan_classes(folder))
    return FolderSource(folder, scan_classes(folder, class_names(root / "train")))


@dataclass(frozen=True)
class Splits:
    """Splits of a folder or a pack: its ``train``, ``val`` and ``test`` parts, or else a random share for ``val``.

    Args:
        val_fraction: share of the samples for ``"val"`` if there are no split folders; 0 for no validation.
        seed: seed of the random choice.

    Raises:
        SettingsError: if the fraction is not in [0, 1).
    """

    val_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        value = self.val_fraction
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise SettingsError(f"val_fraction={value!r} is not valid. Use a share from 0 to below 1.")

    def source(self, root: Path, split: str) -> SampleSource | None:
        """Return the samples of ``split`` under ``root``; None if the split does not exist.

        Raises:
            DatasetError: if there are no samples.
            ArchiveError: if a pack is damaged, or was written by another version.
        """
        if split not in SPLITS:
            return None
        if is_pack(root):
            return self._packed(root, split)
        if has_splits(root):
            return folder_of_split(root, split)
        if split == "test":
            return None
        return self._share(FolderSource(root, scan_classes(root)), split)

    def classes(self, root: Path) -> tuple[str, ...]:
        """Return the label names, sorted."""
        if is_pack(root):
            return read_manifest(root).classes
        if has_splits(root):
            return class_names(root / "train")
        return class_names(root)

    def _packed(self, root: Path, split: str) -> SampleSource | None:
        parts = read_manifest(root).parts
        if ALL in parts:
            return self._share(PackedDataset(root), split)
        if split in parts:
            return PackedDataset(root, split)
        return None

    def _share(self, source: SampleSource, split: str) -> SampleSource | None:
        if split == "test":
            return None
        # RandomState has a frozen stream (NEP 19): a new NumPy must not move samples from val to train.
        order = np.random.RandomState(self.seed).permutation(len(source))
        validation = round(len(source) * self.val_fraction)
        chosen = order[validation:] if split == "train" else order[:validation]
        if not len(chosen):
            return None
        return Chosen(source, np.sort(chosen))


class Chosen:
    """Some samples of a source, chosen by their indices."""

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

    def name(self, index: int) -> str:
        """Return the path of the chosen sample ``index``."""
        return self.source.name(int(self.chosen[index]))
