"""Folders of class folders: listed, remembered between runs, and read; the protocol of all sources of samples."""

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
"""The bytes of one sample: a whole file as it was, or decoded uint8 pixels, (H, W, 3)."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Those of torchvision's ImageFolder; upper or lower case."""
MANIFEST = "pack.json"
"""The file that makes a folder a pack."""
_VERSION = 2
_DIGEST_BYTES = 16
_SETTLED_NS = 2_000_000_000
"""A folder changed within the last two seconds may change again within one tick of its clock, unseen (FAT has ticks of
2 s, the coarsest in use)."""


@runtime_checkable
class SampleSource(Protocol):
    """Labelled samples by index. Can be pickled and forked: files are opened in the process that reads them."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, sorted; ``labels`` are indices into it."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Shape (n,)."""

    def __len__(self) -> int:
        """Samples."""

    def read(self, index: int) -> Encoded:
        """The bytes of sample ``index``.

        Raises:
            DatasetError: when they cannot be read, with the name of the sample and the reason.
        """

    def name(self, index: int) -> str:
        """The name of sample ``index`` in errors: its path, or its path inside the pack."""


class FolderStamp(NamedTuple):
    """The times and the inode of a folder: they change when a file is added, removed or renamed."""

    mtime_ns: int
    ctime_ns: int
    """Set by the kernel alone: programs that unpack archives set the modification time back."""
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FolderStamp":
        """The stamp of a folder whose status was read."""
        return cls(status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def flat_names(names: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """All names, one after the other, and where each ends."""
    return np.frombuffer(b"".join(names), np.uint8), np.cumsum([len(name) for name in names], dtype=np.int64)


def nth_name(names: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64], index: int) -> bytes:
    """A name out of those of :func:`flat_names`."""
    begin = int(ends[index - 1]) if index else 0
    return names[begin : int(ends[index])].tobytes()


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """The files of a folder in a few flat arrays, in the order of torchvision's ``ImageFolder``.

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
        return os.fsdecode(nth_name(self.names, self.ends, index))

    def is_current(self, root: Path) -> bool:
        """True if no file was added, removed or renamed since."""
        try:
            return all(FolderStamp.of((root / name).stat()) == stamp for name, stamp in self.folders)
        except OSError:
            return False


class FolderSource:
    """The files of a :class:`FolderIndex`, read whole.

    Args:
        root: the folder that the index is of.
        index: which files there are.
    """

    def __init__(self, root: Path, index: FolderIndex) -> None:
        self.root = root
        self.index = index
        self.classes = index.classes
        self.labels = index.labels

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        """The bytes of file ``index``.

        Raises:
            DatasetError: when the file cannot be read, or is something else by now, such as a FIFO.
        """
        path = self.name(index)
        try:
            with open_file(path) as file:
                return file.readall()
        except OSError as error:
            raise DatasetError(f"{path} (sample {index}) cannot be read: {error.strerror}.") from error

    def name(self, index: int) -> str:
        """The path of file ``index``."""
        return f"{self.root}/{self.index.path(index)}"

    def changed_ns(self, index: int) -> int:
        """Time of the last change of file ``index``, in ns since 1970; 0 where it is not there.

        That of the inode: a copy that keeps the modification time changes it.
        """
        try:
            return os.stat(self.name(index)).st_ctime_ns  # noqa: PTH116 - a million times
        except OSError:
            return 0


# --- files and folders on a file system -------------------------------------------------------------------------------


def open_file(path: str) -> io.FileIO:
    """Open a file to read.

    Raises:
        OSError: also for what is no file, such as a FIFO: reading it might never end.
    """
    # A Path would cost as much as the read; without O_NONBLOCK, a FIFO would be waited for.
    file = io.FileIO(path, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file, so reading it might never end")
    return file


def walk(
    root: str | Path, top: str = "", *, follow: bool = True, error: type[FeedError] = DatasetError
) -> Iterator[tuple[str, os.stat_result, list["os.DirEntry[str]"]]]:
    """Each folder from ``top`` down, before the folders in it: its path below ``root``, its status, what lies in it.

    Args:
        root: a folder.
        top: the path of a folder below it.
        follow: whether links to folders are followed.
        error: raised when a folder cannot be read, and when links go round in a circle.
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
                continue  # gone in the meantime
            raise error(f"{path} cannot be read: {problem.strerror}. Make it readable, or move it away.") from problem
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            raise error(
                f"{path} is a symbolic link to a folder above it, so there is no end to the files. Remove the link."
            )
        yield name, status, entries
        waiting += [(below(name, entry.name), above | {identity}) for entry in inside]


def below(root: str, name: str) -> str:
    """The path of ``name`` below ``root``; either may be ``""``."""
    return f"{root}/{name}" if root and name else root or name


# --- listing ----------------------------------------------------------------------------------------------------------


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
    names = check_classes(found, classes, root)
    stamp = FolderStamp.of(root.stat())  # before the folders in it are read
    read = {name: sorted(_images(root, name)) for name in found}
    folders = [part[:2] for parts in read.values() for part in parts]
    paths = {
        name: [os.fsencode(f"{folder}/{image}") for folder, _, images in parts for image in images]
        for name, parts in read.items()
    }
    return index_classes(names, paths, root, ((".", stamp), *folders), every=classes is None)


def check_classes(found: list[str], classes: tuple[str, ...] | None, root: object) -> tuple[str, ...]:
    """The names of the labels. Refuses no class folders, and such as there are none of in ``classes``."""
    if not found:
        raise DatasetError(
            f"{root} has no folders in it. Give a folder with one folder of images for each class: {root}/cats/1.jpg, "
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
    """The index of the images of each class, which has none only without ``every``.

    Raises:
        DatasetError: when there are no images.
    """
    counts = [len(paths.get(name, ())) for name in names]
    empty = [name for name, count in zip(names, counts, strict=True) if every and not count]
    if empty or not sum(counts):
        which = f"{'s' if len(empty) > 1 else ''} {_some(empty)}" if empty else "s"
        raise DatasetError(f"No images in the class folder{which} of {root}: add some ({', '.join(IMAGE_SUFFIXES)}).")
    labels = np.repeat(np.arange(len(names), dtype=np.int64), counts)
    return FolderIndex(names, labels, *flat_names([path for name in names for path in paths.get(name, ())]), folders)


def is_pack(path: str | Path) -> bool:
    """True if ``path`` is a pack. Looks for one file."""
    return os.path.isfile(os.path.join(path, MANIFEST))  # noqa: PTH113, PTH118 - False, too, where it cannot be looked for


def _class_folders(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise DatasetError(f"{root} cannot be read: {error.strerror}. Give a folder of class folders.") from error
    # A pack in the folder that it was made of is no class.
    return sorted(entry.name for entry in folders if not is_pack(entry.path))


def _images(root: Path, top: str) -> Iterator[tuple[str, FolderStamp, list[str]]]:
    """Each folder from ``top`` down: its path below ``root``, its stamp, and the names of its images."""
    for name, status, entries in walk(root, top):
        images = [entry.name for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES) and _is_file(entry)]
        yield name, FolderStamp.of(status), sorted(images)


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """True if it is a file, or a link to nowhere, which is an error with its name when it is read."""
    if entry.is_dir():
        return False
    if entry.is_file() or not os.path.exists(entry.path):  # noqa: PTH110
        return True
    logger.warning("%s is neither a file nor a folder, and is no sample. Move it away.", printable(entry.path))
    return False


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


# --- remembered between runs ------------------------------------------------------------------------------------------


def index_of(
    root: Path, classes: tuple[str, ...] | None = None, *, now_ns: Callable[[], int] = time.time_ns
) -> FolderIndex:
    """The index of ``root``: the remembered one if no folder in it has changed, or a new one, remembered if possible.

    A network folder of a million files takes minutes to list. On FUSE every run lists it: mounts of object stores give
    their folders times that do not change with them.

    Args:
        root: a folder of class folders.
        classes: the classes there must be; None takes the names of the folders.
        now_ns: the time, for tests.

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
    """The arrays that :func:`save_arrays` kept; None where they are not there, damaged, or not this user's."""
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
    """Remember some arrays, with a digest, where that is possible."""
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    try:
        write_private(kept, _digest(stored.getvalue()) + stored.getvalue())
    except OSError as error:
        logger.info("The list of files could not be remembered in %s: %s. The next run lists them again.", kept, error)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
