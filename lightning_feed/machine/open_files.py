"""Files that this process has open for reading. Forked processes share their positions."""

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_OPEN = Path("/proc/self/fd")


def read_alone() -> None:
    """Give this process a position of its own in each file that it has open for reading.

    Without this, a forked process would move the positions of the files in its parent: also of those that C libraries
    hold, such as rasters.
    """
    for file, flags in _files():
        with suppress(OSError):  # the file may no longer be opened
            again = os.open(_OPEN / str(file), flags)
            os.lseek(again, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(again, file, inheritable=os.get_inheritable(file))
            os.close(again)


def positions() -> dict[tuple[int, Path], int]:
    """Return the position of each file that this process has open for reading, by descriptor and path."""
    by_file = {}
    for file, _ in _files():
        with suppress(OSError):  # closed meanwhile
            by_file[file, (_OPEN / str(file)).readlink()] = os.lseek(file, 0, os.SEEK_CUR)
    return by_file


def moved_file(before: Mapping[tuple[int, Path], int]) -> str:
    """Return the path of a file whose position has changed since :func:`positions`. Empty if there is none."""
    for file, position in positions().items():
        if before.get(file, position) != position:
            return str(file[1])
    return ""


def _files() -> Iterator[tuple[int, int]]:
    """Yield the regular files that this process has open for reading only: their descriptors and flags."""
    if not _OPEN.is_dir():  # not Linux
        return
    for link in list(_OPEN.iterdir()):
        file = int(link.name)
        with suppress(OSError):  # the descriptor with which the folder was listed is closed
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if stat.S_ISREG(os.fstat(file).st_mode) and flags & os.O_ACCMODE == os.O_RDONLY:
                yield file, flags
