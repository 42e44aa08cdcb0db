"""Class folders (their listing, kept between runs, and reading), and the protocol of all sample sources."""

import errno
import hashlib
import io
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_feed.errors import DatasetError, FeedError, printable
from lightning_feed.storage.file_system import find_mount
from lightning_feed.storage.system import cache_folder, read_private, write_private

logger = logging.getLogger(__name__)

Encoded: TypeAlias = "bytes | memoryview | npt.NDArray[np.uint8]"
"""One sample: the bytes of a whole encoded file, or decoded pixels, uint8 (H, W, 3)."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of torchvision's ImageFolder; case is ignored."""
MANIFEST = "pack.json"
"""The file that makes a folder a pack."""
_VERSION = 2
_DIGEST_BYTES = 16
_SETTLED_NS = 2_000_000_000
"""A folder changed within the last two seconds may change again with the same timestamp (FAT: 2 s)."""


@runtime_checkable
class SampleSource(Protocol):
    """Labelled samples by index. Can be pickled and forked: files are opened in the process that reads."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Label names, sorted; ``labels`` are indices into it."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels of all samples, shape (n,)."""

    def __len__(self) -> int:
        """Number of samples."""

    def read(self, index: int) -> Encoded:
        """Return the bytes of sample ``index``.

        Raises:
            DatasetError: if they cannot be read, with the name of the sample and the reason.
        """

    def name(self, index: int) -> str:
        """Return the name of sample ``index`` for errors: its path, or its path inside the pack."""


class FolderStamp(NamedTuple):
    """Timestamps and inode of a folder, which change when a file is added, removed or renamed."""

    mtime_ns: int
    ctime_ns: int
    """Set only by the kernel; programs that unpack archives reset the modification time."""
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FolderStamp":
        """Make the stamp from a folder's status."""
        return cls(status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def flat_names(names: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return all names concatenated, and the end of each."""
    return np.frombuffer(b"".join(names), np.uint8), np.cumsum([len(name) for name in names], dtype=np.int64)


def nth_name(names: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64], index: int) -> bytes:
    """Return one name from the arrays of :func:`flat_names`."""
    begin = int(ends[index - 1]) if index else 0
    return names[begin : int(ends[index])].tobytes()


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """The files of a folder in a few flat arrays, in the order of torchvision's ``ImageFolder``.

    Reading a Python object writes its reference count, so each forked worker gradually copies a list of a million
    tuples; arrays are not copied. (``benchmarks/index_memory.py`` measures the growth.)
    """

    classes: tuple[str, ...]
    """Names of the class folders, sorted."""
    labels: npt.NDArray[np.int64]
    """Shape (n,): indices into ``classes``."""
    names: npt.NDArray[np.uint8]
    """All paths below the root, concatenated, as bytes from the file system."""
    ends: npt.NDArray[np.int64]
    """Shape (n,): the end of each path in ``names``."""
    folders: tuple[tuple[str, FolderStamp], ...]
    """Each listed folder with its stamp: the index is current while these stay the same."""

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> str:
        """Return the path of file ``index`` below the root."""
        return os.fsdecode(nth_name(self.names, self.ends, index))

    def is_current(self, root: Path) -> bool:
        """True if no file was added, removed or renamed since the listing."""
        try:
            return all(FolderStamp.of((root / name).stat()) == stamp for name, stamp in self.folders)
        except OSError:
            return False


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

    def changed_ns(self, index: int) -> int:
        """Return the change time of file ``index``, in ns since 1970; 0 if it does not exist.

        The inode's change time is used, because even a program that keeps the modification time (``cp -p``) changes it.
        """
        try:
            return os.stat(self.name(index)).st_ctime_ns  # noqa: PTH116 - a million times
        except OSError:
            return 0


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
        raise OSError(errno.EINVAL, "it is not a file, so reading it might never end")
    return file


def walk(
    root: str | Path, top: str = "", *, follow: bool = True, error: type[FeedError] = DatasetError
) -> Iterator[tuple[str, os.stat_result, list["os.DirEntry[str]"]]]:
    """Yield each folder from ``top`` down, parents first: its path below ``root``, its status, and its entries.

    Args:
        root: a folder.
        top: path of a folder below ``root``.
        follow: True to follow links to folders.
        error: raised if a folder cannot be read, or if links form a cycle.
    """
    # A stack, not recursion: folders may be deeper than Python's stack. Each entry carries the folders above it.
    waiting = [(top, frozenset[tuple[int, int]]())]
    while waiting:
        name, above = waiting.pop()
        path = below(str(root), name)
        try:
            status = os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - a million times, a Path costs too much
            with os.scandir(path) as listed:
                entries = list(listed)
            inside = [entry for entry in entries if entry.is_dir(follow_symlinks=follow)]
        except OSError as problem:
            if name != top and not os.path.lexists(path):
                continue  # removed in the meantime
            raise error(f"{path} cannot be read: {problem.strerror}. Make it readable, or move it away.") from problem
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            raise error(
                f"{path} is a symbolic link to a folder above it, so there is no end to the files. Remove the link."
            )
        yield name, status, entries
        waiting += [(below(name, entry.name), above | {identity}) for entry in inside]


def below(root: str, name: str) -> str:
    """Return the path of ``name`` below ``root``; either may be ``""``."""
    return f"{root}/{name}" if root and name else root or name


# --- listing ----------------------------------------------------------------------------------------------------------


def scan_classes(root: Path, classes: tuple[str, ...] | None = None) -> FolderIndex:
    """Index the images of each class folder in ``root`` and its subfolders, following symbolic links.

    Entries that are not files (a FIFO, a link to a device) are left out with a warning: reading them might never end.

    Args:
        root: the folder of class folders.
        classes: the allowed classes; None for the folder names.

    Raises:
        DatasetError: if ``root`` is not a folder, cannot be read or has no class folders; if a class has no images; if
            there are classes that are not in ``classes``; or if symbolic links form a cycle.
    """
    found = _class_folders(root)
    names = check_classes(found, classes, root)
    stamp = FolderStamp.of(root.stat())  # before its folders are read
    read = {name: sorted(_images(root, name)) for name in found}
    folders = [part[:2] for parts in read.values() for part in parts]
    paths = {
        name: [os.fsencode(f"{folder}/{image}") for folder, _, images in parts for image in images]
        for name, parts in read.items()
    }
    return index_classes(names, paths, root, ((".", stamp), *folders), every=classes is None)


def check_classes(found: list[str], classes: tuple[str, ...] | None, root: object) -> tuple[str, ...]:
    """Return the label names. Raise if there are no class folders, or some that are not in ``classes``."""
    if not found:
        raise DatasetError(
            f"{root} has no folders in it. Use a folder with one folder of images for each class: {root}/cats/1.jpg, "
            f"{root}/dogs/1.jpg; or with train and val folders of such folders."
        )
    strange = sorted(set(found).difference(classes or found))
    if strange:
        raise DatasetError(f"{root} has classes that training does not have: {_some(strange)}. Move them away.")
    return tuple(classes or found)


def index_classes(
    names: tuple[str, ...],
    paths: Mapping[str, list[bytes]],
    root: object,
    folders: tuple[tuple[str, FolderStamp], ...] = (),
    *,
    every: bool,
) -> FolderIndex:
    """Index the images of each class.

    Raises:
        DatasetError: if there are no images at all or, with ``every``, if a class has none.
    """
    counts = [len(paths.get(name, ())) for name in names]
    empty = [name for name, count in zip(names, counts, strict=True) if every and not count]
    if empty or not sum(counts):
        which = f"{'s' if len(empty) > 1 else ''} {_some(empty)}" if empty else "s"
        raise DatasetError(f"No images in the class folder{which} of {root}: add some ({', '.join(IMAGE_SUFFIXES)}).")
    labels = np.repeat(np.arange(len(names), dtype=np.int64), counts)
    return FolderIndex(names, labels, *flat_names([path for name in names for path in paths.get(name, ())]), folders)


def is_pack(path: str | Path) -> bool:
    """True if ``path`` is a pack. Checks only that the manifest exists."""
    return os.path.isfile(os.path.join(path, MANIFEST))  # noqa: PTH113, PTH118 - also False if access fails


def _class_folders(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise DatasetError(f"{root} cannot be read: {error.strerror}. Use a folder of class folders.") from error
    # A pack inside the folder it was made from is not a class.
    return sorted(entry.name for entry in folders if not is_pack(entry.path))


def _images(root: Path, top: str) -> Iterator[tuple[str, FolderStamp, list[str]]]:
    """Yield each folder from ``top`` down: its path below ``root``, its stamp, and the names of its images."""
    for name, status, entries in walk(root, top):
        images = [entry.name for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES) and _is_file(entry)]
        yield name, FolderStamp.of(status), sorted(images)


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """True for a file or a broken link; reading the link will raise an error with its name."""
    if entry.is_dir():
        return False
    if entry.is_file() or not os.path.exists(entry.path):  # noqa: PTH110
        return True
    logger.warning("%s is neither a file nor a folder, so it is not a sample. Move it away.", printable(entry.path))
    return False


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


# --- remembered between runs ------------------------------------------------------------------------------------------


def index_of(
    root: Path, classes: tuple[str, ...] | None = None, *, now_ns: Callable[[], int] = time.time_ns
) -> FolderIndex:
    """Return the index of ``root``: the remembered one if no folder has changed; else a new one, saved if possible.

    Listing a network folder of a million files takes minutes. Folders on FUSE mounts are listed in every run, because
    in a mounted object store the times of a folder do not change when its files do.

    Args:
        root: a folder of class folders.
        classes: the allowed classes; None for the folder names.
        now_ns: clock in ns; replaced in tests.

    Raises:
        DatasetError: as :func:`scan_classes`.
    """
    mount = find_mount(str(root))
    if mount is not None and mount.kind.startswith("fuse"):
        return scan_classes(root, classes)
    key = json.dumps([_VERSION, os.fsencode(root.resolve()).hex(), classes])
    kept = cache_folder() / "index" / f"{_digest(key.encode()).hex()}.npz"
    remembered = _load(kept)
    if remembered is not None and remembered.is_current(root):
        return remembered
    index = scan_classes(root, classes)
    if max(stamp.ctime_ns for _, stamp in index.folders) < now_ns() - _SETTLED_NS:
        about = np.frombuffer(json.dumps({"classes": index.classes, "folders": index.folders}).encode(), np.uint8)
        save_arrays(kept, about=about, labels=index.labels, names=index.names, ends=index.ends)
    return index


def _load(kept: Path) -> FolderIndex | None:
    arrays = load_arrays(kept)
    if arrays is None:
        return None
    about = json.loads(arrays["about"].tobytes())
    return FolderIndex(
        classes=tuple(about["classes"]),
        labels=arrays["labels"],
        names=arrays["names"],
        ends=arrays["ends"],
        folders=tuple((name, FolderStamp(*stamp)) for name, stamp in about["folders"]),
    )


def load_arrays(kept: Path) -> dict[str, npt.NDArray[Any]] | None:
    """Return arrays saved by :func:`save_arrays`; None if they are missing, damaged, or another user's."""
    try:
        content = read_private(kept)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("The remembered index %s is not used: %s. The folder is listed again.", kept, error)
        return None
    stored = content[_DIGEST_BYTES:]
    if content[:_DIGEST_BYTES] != _digest(stored):
        logger.warning("The remembered index %s is damaged. The folder is listed again, and remembered again.", kept)
        return None
    with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
        return dict(arrays)


def save_arrays(kept: Path, **arrays: Any) -> None:
    """Save arrays with a digest, if possible."""
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    try:
        write_private(kept, _digest(stored.getvalue()) + stored.getvalue())
    except OSError as error:
        logger.info("The list of files could not be remembered in %s: %s. The next run lists them again.", kept, error)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
