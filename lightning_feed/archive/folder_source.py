"""Samples that are files in class folders."""

import os
import stat
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning_feed.archive.folder_index import FolderIndex
from lightning_feed.errors import DatasetError


class Place(Protocol):
    """Where a folder lies now; a staged copy takes over once it is complete."""

    def current(self) -> Path:
        """The folder to read from."""


class FolderSource:
    """The files of a :class:`FolderIndex`, read whole.

    Args:
        root: the folder that the index is of; or a place that says where it lies now.
        index: which files there are.
    """

    def __init__(self, root: Path | Place, index: FolderIndex) -> None:
        self.root = root
        self.index = index

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the class folders, sorted."""
        return self.index.classes

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Shape (n,): indices into ``classes``."""
        return self.index.labels

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        """The bytes of file ``index``.

        Raises:
            DatasetError: when the file cannot be read, or is something else by now, such as a FIFO.
        """
        path = self.name(index)
        try:
            # A Path would cost as much as the read.
            with open(path, "rb", buffering=0, opener=_open_at_once) as file:
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return file.readall()
        except OSError as error:
            raise DatasetError(f"{path} (sample {index}) cannot be read: {error.strerror}.") from error
        raise DatasetError(f"{path} (sample {index}) is not a file, so reading it might never end. Move it away.")

    def name(self, index: int) -> str:
        """The path of file ``index``."""
        root = self.root if isinstance(self.root, Path) else self.root.current()
        return f"{root}/{self.index.path(index)}"

    def relative_name(self, index: int) -> str:
        """The path of file ``index`` below the root."""
        return self.index.path(index)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # which a FIFO would be waited for without
