"""Folders of classes: their listing and reading, and the protocol of all sample sources."""

import errno
import io
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_feed.errors import DatasetError
from lightning_feed.wording import printable

logger = logging.getLogger(__name__)

Encoded: TypeAlias = "bytes | memoryview | npt.NDArray[np.uint8]"
"""One sample: the bytes of a whole encoded file, or decoded pixels, uint8 (H, W, 3)."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of torchvision's ImageFolder; case is ignored."""
MANIFEST = "pack.json"
"""The file that makes a folder a pack."""


@runtime_checkable
class SampleSource(Protocol):
    """Labelled samples by index. Can be pickled and forked: files are opened in the process that reads."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Label names, sorted; ``labels`` are indices into this tuple."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels of all samples, shape (n,)."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def read(self, index: int) -> Encoded:
        """Return the data of sample ``index``.

        Raises:
            DatasetError: if the sample cannot be read. The message has the name of the sample and the reason.
        """

    def name(self, index: int) -> str:
        """Return the name of sample ``index`` for errors: its path, or its path inside the pack."""


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """The files of a folder in two arrays, in the order of torchvision's ``ImageFolder``.

    Reading a Python object writes its reference count, so each forked worker gradually copies a list of a million
    paths; arrays are not copied. (``benchmarks/index_memory.py`` measures the growth.)
    """

    classes: tuple[str, ...]
    """Names of the class folders, sorted."""
    labels: npt.NDArray[np.int64]
    """Shape (n,): indices into ``classes``."""
    paths: npt.NDArray[np.bytes_]
    """Shape (n,): paths below the root, as bytes from the file system."""

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> str:
        """Return the path of file ``index`` below the root."""
        return os.fsdecode(self.paths[index])


class FolderSource:
    """The files of a :class:`FolderIndex`, read whole.

    Args:
        root: the indexed folder.
        index: index of its files.
    """

    def __init__(self, root: Path, index: FolderIndex) -> None:
        self.root = root
        self.index = index
        self.classes = index.classes
        self.labels = index.labels

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        """Return the bytes of file ``index``.

        Raises:
            DatasetError: if the file cannot be read, or is not a file any more (a FIFO, for example).
        """
        path = self.name(index)
        try:
            with open_file(path) as file:
                return file.readall()
        except OSError as error:
            raise DatasetError(f"{path} (sample {index}) cannot be read: {error.strerror}.") from error

    def name(self, index: int) -> str:
        """Return the path of file ``index``."""
        return f"{self.root}/{self.index.path(index)}"


# --- files and folders on a file system -------------------------------------------------------------------------------


def open_file(path: str) -> io.FileIO:
    """Open a file to read.

    Raises:
        OSError: if the file cannot be opened, or is not a regular file. Reading a FIFO, for example, might never end.
    """
    # A Path would cost as much as the read; without O_NONBLOCK, opening a FIFO would block.
    file = io.FileIO(path, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file, so reading it might never end", path)
    return file


def walk(top: str) -> Iterator["os.DirEntry[str]"]:
    """Yield all entries below ``top`` that are not folders, following symbolic links.

    Raises:
        OSError: if a folder cannot be read, or if links form a cycle.
    """
    # A stack, not recursion: folders may be deeper than Python's stack. Each folder comes with all folders above it.
    waiting = [(top, frozenset[tuple[int, int]]())]
    while waiting:
        path, parents = waiting.pop()
        status = os.stat(path)  # noqa: PTH116 - a Path for each folder costs too much
        identity = (status.st_dev, status.st_ino)
        if identity in parents:
            raise OSError(errno.ELOOP, "it is a symbolic link to a folder above it, so there is no end", path)
        with os.scandir(path) as listed:
            entries = list(listed)
        for entry in entries:
            if entry.is_dir():
                waiting.append((entry.path, parents | {identity}))
            else:
                yield entry


def is_pack(path: str | Path) -> bool:
    """Return True if ``path`` is a pack. Checks only that the manifest exists."""
    return os.path.isfile(os.path.join(path, MANIFEST))  # noqa: PTH113, PTH118 - also False if access fails


# --- listing ----------------------------------------------------------------------------------------------------------


def scan_classes(root: Path, classes: tuple[str, ...] | None = None) -> FolderIndex:
    """Index the images of each class folder in ``root`` and its subfolders, following symbolic links.

    Entries that are not files (a FIFO, a link to a device) are left out with a warning: reading them might never end.

    Args:
        root: the folder of class folders.
        classes: the allowed classes, to which labels refer; None for the names of the class folders.

    Raises:
        DatasetError: if ``root`` is not a folder, cannot be read or has no class folders; if a class has no images
            (with ``classes``: if no class has any); if a class folder is not in ``classes``; or if symbolic links form
            a cycle.
    """
    names = class_names(root)
    unknown = set(names).difference(classes or names)
    if unknown:
        raise DatasetError(
            f"{root} has classes that training does not have: {_first_of(sorted(unknown))}. Move them away."
        )
    try:
        paths = {name: _images_below(root, name) for name in names}
    except OSError as error:
        raise _unreadable(error) from error
    empty = [name for name in names if not paths[name]]
    # A validation or test folder may lack images of some classes, but not of all.
    if empty and (classes is None or len(empty) == len(names)):
        raise DatasetError(f"No images in {_first_of(empty)} of {root}: add some ({', '.join(IMAGE_SUFFIXES)}).")
    return _index(classes or names, paths)


def _index(classes: tuple[str, ...], paths: dict[str, list[bytes]]) -> FolderIndex:
    parts = [paths.get(name, []) for name in classes]
    return FolderIndex(
        classes=classes,
        labels=np.repeat(np.arange(len(classes), dtype=np.int64), [len(part) for part in parts]),
        paths=np.array(list(chain.from_iterable(parts))),
    )


def class_names(root: Path) -> tuple[str, ...]:
    """Return the sorted names of the class folders in ``root``.

    Raises:
        DatasetError: if ``root`` is not a folder, cannot be read or has no class folders.
    """
    try:
        with os.scandir(root) as entries:
            folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(error) from error
    # A pack may lie inside the folder that was packed; it is not a class.
    names = sorted(entry.name for entry in folders if not is_pack(entry.path))
    if not names:
        raise DatasetError(
            f"{root} has no folders in it. Use a folder with one folder of images for each class: {root}/cats/1.jpg, "
            f"{root}/dogs/1.jpg; or with train and val folders of such folders."
        )
    return tuple(names)


def _unreadable(error: OSError) -> DatasetError:
    if isinstance(error, FileNotFoundError):
        return DatasetError(f"{error.filename} does not exist. Give the path of a folder of images.")
    return DatasetError(f"{error.filename} cannot be read: {error.strerror}. Make it readable, or move it away.")


def _images_below(root: Path, name: str) -> list[bytes]:
    """Return the paths of the images of a class below the root, folder by folder, each sorted."""
    length = len(str(root)) + 1
    images = [entry for entry in walk(f"{root}/{name}") if entry.name.lower().endswith(IMAGE_SUFFIXES)]
    files = [entry.path[length:] for entry in images if _is_file(entry)]
    return [os.fsencode(path) for path in sorted(files, key=os.path.split)]


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """Return True for a file, or for a broken link: reading such a link raises an error with its name."""
    if entry.is_file() or not os.path.exists(entry.path):  # noqa: PTH110
        return True
    logger.warning("%s is neither a file nor a folder, so it is not a sample. Move it away.", printable(entry.path))
    return False


def _first_of(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    if len(names) <= 5:
        return shown
    return f"{shown} and {len(names) - 5} more"
