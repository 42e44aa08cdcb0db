"""Private files in which this package remembers results between runs."""

import os
import stat
from pathlib import Path

from lightning_feed.archive.whole_file import whole_file

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """The folder of these files: ``$XDG_CACHE_HOME/lightning_feed``, by default ``~/.cache/lightning_feed``."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "lightning_feed"
    try:
        return Path.home() / ".cache" / "lightning_feed"
    except RuntimeError:  # as in containers: $HOME is not set, and the user is not in /etc/passwd
        return Path(os.environ.get("TMPDIR") or "/tmp") / f"lightning_feed-{os.getuid()}"


def read_remembered(path: Path) -> bytes:
    """The content of a file that nobody but this user can have written.

    Raises:
        OSError: when there is none (``FileNotFoundError``), or it cannot be read or trusted.
    """
    # Opening must not wait for ever for whoever writes into a FIFO, nor follow another user's link.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_MAY_WRITE:
            raise PermissionError(f"it is not a file of user {os.getuid()} alone")
        return file.read()


def write_remembered(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, that only this user can read.

    Raises:
        OSError: when it cannot be written.
    """
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole_file(path, mode=0o600) as file:
        file.write(content)
