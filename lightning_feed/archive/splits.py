"""Which samples of a folder or a pack belong to which split."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_feed.archive.folder import (
    MANIFEST,
    Encoded,
    FolderSource,
    SampleSource,
    index_of,
    is_pack,
)
from lightning_feed.archive.pack_formats import ALL
from lightning_feed.archive.packed_dataset import PackedDataset, remote_pack_error
from lightning_feed.archive.remote import RemotePlace
from lightning_feed.archive.remote_folder import RemoteSamples, RemoteSource, list_files
from lightning_feed.errors import DatasetError, SettingsError

_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
"""What the folders of a split are called."""


SPLITS = tuple(_FOLDERS)


def split_folder(root: Path | RemotePlace, split: str, has: Callable[[str], bool] | None = None) -> str | None:
    """What the folder of a split under ``root`` is called; None where there is none.

    Args:
        root: the folder.
        split: its name.
        has: says whether ``root`` has a folder; None looks on the disk.

    Raises:
        DatasetError: when there are several, of which one would be left out in silence.
    """
    has = has or (lambda name: os.path.isdir(f"{root}/{name}"))  # noqa: PTH112
    names = [name for name in _FOLDERS[split] if has(name)]
    if len(names) > 1:
        raise DatasetError(f"{root} has {' and '.join(names)}, which all mean the split {split!r}. Rename all but one.")
    return names[0] if names else None


@dataclass(frozen=True)
class Splits:
    """The splits of a root: its folders ``train``, ``val`` and ``test``, or a random share of its class folders.

    Args:
        val_fraction: share of the samples for ``"val"`` where there are no split folders; 0 for none.
        seed: decides which ones.

    Raises:
        SettingsError: when the fraction is not in [0, 1).
    """

    val_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        value = self.val_fraction
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise SettingsError(f"val_fraction={value!r} is not possible. Give a share from 0 to below 1.")

    def source(self, root: Path | RemotePlace, split: str) -> SampleSource | None:
        """The samples of ``split`` under ``root``; None where there is no such split.

        Raises:
            DatasetError: when there is nothing to read there.
            ArchiveError: when a pack cannot be trusted.
        """
        if split not in _FOLDERS:
            return None
        if isinstance(root, RemotePlace):
            return self._remote(root, split)
        if is_pack(root):
            return self._packed(root, split)
        if not (root / "train").is_dir():
            return self._share(FolderSource(root, index_of(root)), split)
        name = split_folder(root, split)
        if name is None:
            return None
        classes = None if split == "train" else index_of(root / "train").classes
        return FolderSource(root / name, index_of(root / name, classes))

    def classes(self, root: Path | RemotePlace) -> tuple[str, ...]:
        """Names of the labels, sorted."""
        source = self.source(root, "train")
        return source.classes if source is not None else ()

    def _remote(self, place: RemotePlace, split: str) -> SampleSource | None:
        listing = list_files(place)
        if listing.find(MANIFEST) is not None:
            raise remote_pack_error(place)
        if not listing.has_folder("train"):
            return self._share(RemoteSource.of(place, listing), split)
        name = split_folder(place, split, listing.has_folder)
        if name is None:
            return None
        classes = None if split == "train" else RemoteSource.of(place, listing, "train").classes
        return RemoteSource.of(place, listing, name, classes)

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
        # RandomState, since its stream is frozen (NEP 19): another NumPy must not move samples from val to train.
        order = np.random.RandomState(self.seed).permutation(len(source))
        validation = round(len(source) * self.val_fraction)
        chosen = order[validation:] if split == "train" else order[:validation]
        return Chosen(source, np.sort(chosen)) if len(chosen) else None


class Chosen:
    """Some of the samples of a source, by their numbers."""

    def __init__(self, source: SampleSource, chosen: npt.NDArray[np.int64]) -> None:
        self.source = source
        self.chosen = chosen
        self.classes = source.classes
        self.labels = source.labels[chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, index: int) -> Encoded:
        """The bytes of sample ``index`` of those chosen."""
        return self.source.read(int(self.chosen[index]))

    def remote_reads(self) -> RemoteSamples | None:
        """The samples as they are read from a remote place; None where they are on this machine."""
        find = getattr(self.source, "remote_reads", None)
        found: RemoteSamples | None = find() if find is not None else None
        return None if found is None else RemoteSamples(found.reads, self.chosen)

    def expect(self, indices: Iterable[int]) -> object:
        """Begin to read samples that will be asked for next, where they are remote; gives what holds them."""
        found = self.remote_reads()
        return None if found is None else found.reads.expect(self.chosen[list(indices)].tolist())

    def name(self, index: int) -> str:
        """The path of sample ``index`` of those chosen."""
        return self.source.name(int(self.chosen[index]))
