"""The operating system: files that are atomic, private or shared; memory limits; sizes; progress bars."""

import errno
import json
import logging
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

logger = logging.getLogger(__name__)

NO_LIMIT_BYTES = 1 << 60
"""Upper bound of real limits: cgroup v1 writes "no limit" as 2**63 - 1 rounded down to a page."""


# --- atomic writes ----------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends without an error.

    Args:
        path: the file.
        mode: permissions; readable by everybody by default.

    Raises:
        OSError: if it cannot be written. ``path`` is then unchanged.
    """
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            os.fchmod(handle, mode)  # mkstemp made it private; the name could be another file by now
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
        OSError: if it cannot be made, or is not such a folder.
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
        OSError: if it is missing (``FileNotFoundError``), or cannot be read or trusted.
    """
    # Opening must neither block on a FIFO without a writer, nor follow another user's link.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or others_may_write:
            raise PermissionError(f"it is not a file that only user {os.getuid()} can write")
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Atomically write a file that only this user can read. Missing folders are made so that only this user can enter.

    Raises:
        OSError: if it cannot be written.
    """
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_write(path, mode=0o600) as file:
        file.write(content)


def read_json(path: Path) -> dict[str, Any]:
    """Read the document written by :func:`write_json`; empty if missing or untrusted."""
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
        OSError: if it cannot be written.
    """
    write_private(path, json.dumps(document, indent=1).encode())


# --- locks ------------------------------------------------------------------------------------------------------------

process_lock = threading.RLock()
"""Lock that excludes other threads of this process. Always access it as ``system.process_lock``, because a forked child
replaces it."""


def _renew_lock() -> None:
    global process_lock  # another thread of the parent may have held the old lock
    process_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


# --- memory that this process may still take --------------------------------------------------------------------------


class MemoryLimit(NamedTuple):
    """One limit on the free memory."""

    left_bytes: int
    """Bytes left without swapping. May be negative for a cgroup that is over its limit."""
    reason: str
    """Source of the limit."""


def memory_limits(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Yield every memory limit of this process. A file that is missing or unreadable sets none.

    Args:
        root: the file system to read ``proc`` and ``sys`` from.
    """
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield MemoryLimit(int(value.split()[0]) * 1024, "MemAvailable of the machine")
    yield from cgroup_memory_limits(root)


def cgroup_memory_limits(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Yield only the limits of the container, as in :func:`memory_limits`."""
    for folder in cgroup_folders(root, ""):
        yield from _left_in_cgroup(root, folder / "memory.max", "memory.current", "")
    for folder in cgroup_folders(root, "memory"):
        yield from _left_in_cgroup(root, folder / "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _left_in_cgroup(root: Path, limit_file: Path, usage_name: str, prefix: str) -> Iterator[MemoryLimit]:
    limit = read_text(limit_file)
    usage = read_text(limit_file.parent / usage_name)
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= NO_LIMIT_BYTES:
        return
    # Usage includes the page cache, which the kernel frees under pressure (MemAvailable accounts for that). A job that
    # reads files fills its limit with cache. If that counted as used, no memory would be left for a single worker.
    cache = 0
    for line in read_text(limit_file.parent / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in (f"{prefix}active_file", f"{prefix}inactive_file") and value.isdigit():
            cache += int(value)
    left = int(limit) - max(0, int(usage) - cache)
    yield MemoryLimit(left, f"memory limit of the cgroup (/{limit_file.relative_to(root)})")


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents: each may set a limit.

    Args:
        root: as in :func:`memory_limits`.
        controller: ``""`` for cgroup v2, the controller's name for v1.
    """
    own = None
    for line in read_text(root / "proc/self/cgroup").splitlines():  # "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1)
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own = path
            break
    if own is None:
        return
    mounts = {"": ("", "unified"), "cpu": ("cpu", "cpu,cpuacct")}.get(controller, (controller,))
    # In a container the path may be the host's, with only its end mounted. The walk then ends at the mount, which is
    # the container's own cgroup. A path out of the namespace ("/..") also ends there.
    parts = [part for part in own.split("/") if part not in ("", "..")]
    for mount in mounts:
        base = root / "sys/fs/cgroup" / mount
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def read_text(path: Path) -> str:
    """Return the text of a small file in ``proc`` or ``sys``; "" if it is missing or unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


# --- sizes ------------------------------------------------------------------------------------------------------------


def size_text(size: float) -> str:
    """Format bytes for people: ``"12.3 GiB"``."""
    if size < 1024:
        return f"{size:.0f} bytes"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"


# --- long work --------------------------------------------------------------------------------------------------------


def progress_bar(text: str, total: int, unit: str = "B") -> "tqdm[Any]":
    """Return a progress bar for a terminal; disabled if there is no standard error, as in some services."""
    disable = None  # by tqdm itself, where standard error is no terminal
    if sys.stderr is None or getattr(sys.stderr, "closed", False):
        disable = True
    return tqdm(total=total, desc=text, unit=unit, unit_scale=unit == "B", leave=False, disable=disable)
