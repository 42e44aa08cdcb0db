"""Limits of the memory that this process may still take: those of the machine, and those of its container."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NO_LIMIT_BYTES = 1 << 60
"""Smallest value that means "no limit": cgroup v1 writes 2**63 - 1, rounded down to whole pages, for it."""


class MemoryLimit(NamedTuple):
    """One limit on the free memory."""

    left_bytes: int
    """Bytes left without swapping. May be negative for a cgroup that is over its limit."""
    reason: str
    """Words for the source of the limit, for messages."""


def memory_limits(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Yield every memory limit of this process. A file that is missing or unreadable sets no limit.

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
    # reads files fills its limit with cache. If the cache counted as used, no memory would be left for any worker.
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
