"""Files that are written whole or not at all, and files that only this user can read."""

import errno
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends without an error.

    Args:
        path: the file.
        mode: permissions of the file; by default, everybody can read it.

    Raises:
        OSError: if the file cannot be written. ``path`` is then unchanged.
    """
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            os.fchmod(handle, mode)  # mkstemp made the file private; by now, its name could belong to another file
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


# --- private files ----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder kept between runs: ``$XDG_CACHE_HOME/lightning_feed`` or ``~/.cache/lightning_feed``."""
    xdg_folder = os.environ.get("XDG_CACHE_HOME")
    if xdg_folder:
        return Path(xdg_folder) / "lightning_feed"
    try:
        return Path.home() / ".cache" / "lightning_feed"
    except RuntimeError:  # in some containers, $HOME is not set and the user is not in /etc/passwd
        return Path(os.environ.get("TMPDIR") or "/tmp") / f"lightning_feed-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Create a folder that only this user can access, or reuse one that only this user could have written to.

    Raises:
        OSError: if the folder cannot be made, or if others could have written to it.
    """
    try:
        folder.mkdir(mode=0o700)
        return  # owner not checked: root appears as another user on some network file systems
    except FileExistsError:
        status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{folder.name} is not a folder")
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, f"others may write to it (mode {mode:04o}), and may have. Remove it")


def read_private(path: str | Path) -> bytes:
    """Return the content of a file that only this user can have written.

    Raises:
        OSError: if the file is missing (``FileNotFoundError``), cannot be read, or could be another user's.
    """
    # Opening must neither block on a FIFO without a writer, nor follow another user's link.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or others_may_write:
            raise PermissionError(
                f"it must be a regular file that belongs to user {os.getuid()} and that nobody else may write to"
            )
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Atomically write a file that only this user can read. Missing folders are made so that only this user can enter.

    Raises:
        OSError: if the file cannot be written.
    """
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_write(path, mode=0o600) as file:
        file.write(content)


def read_json(path: Path) -> dict[str, Any]:
    """Read the document written by :func:`write_json`; empty if the file is missing, unreadable or untrusted."""
    try:
        document = json.loads(read_private(path))
        if isinstance(document, dict):
            return document
        logger.debug("%s is not used: it has another format.", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        logger.debug("%s is not used: %s.", path, error)
    return {}


def write_json(path: Path, document: dict[str, object]) -> None:
    """Write a document as :func:`write_private` does.

    Raises:
        OSError: if the file cannot be written.
    """
    write_private(path, json.dumps(document, indent=1).encode())
