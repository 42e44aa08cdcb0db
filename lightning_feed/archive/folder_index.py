"""The files of a folder of class folders, in a few flat arrays: a million of them cost no Python objects."""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_feed.archive.pack_manifest import is_pack
from lightning_feed.errors import DatasetError, printable

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Those of torchvision's ImageFolder; upper or lower case."""


class FolderStamp(NamedTuple):
    """What changes when a file is added to a folder, removed or renamed, or another folder takes its place."""

    mtime_ns: int
    ctime_ns: int
    """Set by the kernel alone: programs that unpack archives set the modification time back."""
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FolderStamp":
        """The stamp of a folder whose status was read."""
        return cls(status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """Which files there are, in the order of torchvision's ``ImageFolder``.

    A list of a million tuples is copied bit by bit into each forked worker, because reading a Python object writes its
    reference count; arrays are not. (The growth is measured in ``benchmarks/index_memory.py``.)
    """

    classes: tuple[str, ...]
    """Names of the class folders, sorted."""
    labels: npt.NDArray[np.int64]
    """Shape (n,): indices into ``classes``."""
    names: npt.NDArray[np.uint8]
    """All paths below the root, one after the other, as the bytes that the file system gave."""
    ends: npt.NDArray[np.int64]
    """Shape (n,): where each path ends in ``names``."""
    folders: tuple[tuple[str, FolderStamp], ...]
    """Each folder that was read, with its stamp: as long as these stay, so does the index."""

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> str:
        """The path of file ``index`` below the root."""
        begin = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.names[begin : int(self.ends[index])].tobytes())

    def is_current(self, root: Path) -> bool:
        """Whether no file was added, removed or renamed since."""
        try:
            return all(FolderStamp.of((root / name).stat()) == stamp for name, stamp in self.folders)
        except OSError:
            return False


def scan_classes(root: Path, classes: tuple[str, ...] | None = None) -> FolderIndex:
    """Find the images of each class folder in ``root``, and of the folders in it, symbolic links followed.

    What is no file, such as a FIFO or a link to a device, is left out with a warning: reading it might never end.

    Args:
        root: the folder of class folders.
        classes: the classes there must be; None takes the names of the folders.

    Raises:
        DatasetError: when ``root`` is no folder, cannot be read or has no class folders, when a class has no images,
            when ``classes`` are given and there are others, or when symbolic links go round in a circle.
    """
    found = _class_folders(root)
    if classes is not None:
        strange = sorted(set(found) - set(classes))
        if strange:
            raise DatasetError(
                f"{root} has class folders that the training data does not have: {_some(strange)}. Their labels would "
                "have no meaning to the model. Move them away, or add them to the training data."
            )
    labels: list[int] = []
    lengths: list[int] = []
    names = bytearray()
    folders: list[tuple[str, FolderStamp]] = [(".", FolderStamp.of(root.stat()))]
    empty = []
    for label, name in enumerate(classes or found):
        before = len(lengths)
        for path in _images(root, name, folders) if name in found else ():
            encoded = os.fsencode(path)
            names += encoded
            lengths.append(len(encoded))
        labels += [label] * (len(lengths) - before)
        if len(lengths) == before and classes is None:
            empty.append(name)
    if empty:
        raise DatasetError(
            f"No images in the class folder{'s' if len(empty) > 1 else ''} {_some(empty)} of {root}. Images end in "
            f"{', '.join(IMAGE_SUFFIXES)}. Add some, or remove the folder."
        )
    if not lengths:
        raise DatasetError(f"No images in the class folders of {root}. Images end in {', '.join(IMAGE_SUFFIXES)}.")
    return FolderIndex(
        classes=tuple(classes or found),
        labels=np.array(labels, dtype=np.int64),
        names=np.frombuffer(bytes(names), dtype=np.uint8),
        ends=np.cumsum(lengths, dtype=np.int64),
        folders=tuple(folders),
    )


def _class_folders(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            # A pack in the folder that it was made of is no class.
            found = sorted(
                entry.name
                for entry in entries
                if entry.is_dir() and not entry.name.startswith(".") and not is_pack(entry.path)
            )
    except OSError as error:
        raise DatasetError(
            f"{root} cannot be read: {error.strerror}. Give a folder that has one folder of images for each class."
        ) from error
    if not found:
        raise DatasetError(
            f"{root} has no folders in it. Give a folder with one folder of images for each class: "
            f"{root / 'cats' / '1.jpg'}, {root / 'dogs' / '1.jpg'}; or with train and val folders of such folders."
        )
    return found


def _images(root: Path, name: str, folders: list[tuple[str, FolderStamp]]) -> Iterator[str]:
    """Paths below ``root`` of the images of class ``name``, in the order of ImageFolder's ``sorted(os.walk(...))``."""
    found = sorted(_walk(root, name))
    for folder, stamp, files in found:
        folders.append((folder, stamp))
        yield from (f"{folder}/{file}" for file in files)


def _walk(root: Path, top: str) -> Iterator[tuple[str, FolderStamp, list[str]]]:
    """Each folder from ``top`` down: its path below ``root``, its stamp, and the names of its images."""
    # A stack, not recursion: folders may be deeper than Python's stack. Each entry carries the folders above it.
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [(top, ())]
    while waiting:
        name, above = waiting.pop()
        path = f"{root}/{name}"
        images: list[str] = []
        try:
            status = os.stat(path)  # noqa: PTH116
            identity = (status.st_dev, status.st_ino)
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir():
                        waiting.append((f"{name}/{entry.name}", (*above, identity)))
                    elif entry.name.lower().endswith(IMAGE_SUFFIXES) and _is_file(entry):
                        images.append(entry.name)
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error.strerror}.") from error
        if identity in above:
            raise DatasetError(
                f"{path} is a symbolic link to a folder above it, so there is no end to the files. Remove the link."
            )
        yield name, FolderStamp.of(status), sorted(images)


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a file, or a link to nowhere, which reading tells of by its name."""
    if entry.is_file() or not os.path.exists(entry.path):  # noqa: PTH110
        return True
    logger.warning("%s is neither a file nor a folder, and is no sample. Move it away.", printable(entry.path))
    return False


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
