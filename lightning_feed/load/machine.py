"""What the machine lets this process use: CPUs, memory, shared memory, and how new processes start."""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number just under 2**63, rounded down to a page; nothing real is this large."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The limits that bind this process, not those of the host around its container."""

    usable_cpus: int
    """CPUs that this process may keep busy, 1 or more."""
    cpu_reason: str
    """The limit that gave ``usable_cpus``."""
    available_memory_bytes: int | None
    """Memory that can be taken without swapping and within the container's limit. None: not known."""
    free_shm_bytes: int | None
    """Free space of /dev/shm, through which worker processes hand over their batches. None: not known."""
    start_method: str
    """How ``multiprocessing`` starts a process here: ``"fork"``, ``"forkserver"`` or ``"spawn"``."""


def read_machine(root: Path = Path("/")) -> Machine:
    """Read the limits of this process. A file that is missing or unreadable sets no limit.

    Args:
        root: the file system to read ``proc``, ``sys`` and ``dev/shm`` from.
    """
    cpus, reason = min(_cpu_limits(root), key=lambda limit: limit[0])
    memory = list(_memory_limits(root))
    # get_start_method() would fix the method for the whole process; the first of all methods is the default.
    start_method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return Machine(
        usable_cpus=max(1, int(cpus)),
        cpu_reason=reason,
        available_memory_bytes=max(0, min(memory)) if memory else None,
        free_shm_bytes=_free_bytes(root / "dev/shm"),
        start_method=start_method,
    )


def _cpu_limits(root: Path) -> Iterator[tuple[float, str]]:
    """Every limit on the number of CPUs, with its name. The first named wins a draw."""
    if hasattr(os, "sched_getaffinity"):
        yield len(os.sched_getaffinity(0)), "CPUs that this process may run on (affinity)"
    else:
        yield os.cpu_count() or 1, "CPUs of the machine"
    if hasattr(os, "process_cpu_count"):  # Python 3.13; PYTHON_CPU_COUNT can lower it
        yield os.process_cpu_count() or 1, "os.process_cpu_count()"
    for folder in _cgroup_folders(root, ""):
        quota, _, period = _read(folder / "cpu.max").partition(" ")  # "max 100000", or microseconds of each period
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota) / int(period), f"CPU quota of the cgroup ({_shown(folder / 'cpu.max', root)})"
    for folder in _cgroup_folders(root, "cpu"):
        file = folder / "cpu.cfs_quota_us"
        quota, period = _read(file), _read(folder / "cpu.cfs_period_us")  # a quota of -1 is none
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period), f"CPU quota of the cgroup ({_shown(file, root)})"


def _memory_limits(root: Path) -> Iterator[int]:
    """Every limit on the memory that can still be taken, in bytes."""
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024
    for folder in _cgroup_folders(root, ""):
        yield from _left_in_cgroup(folder, "memory.max", "memory.current", "")
    for folder in _cgroup_folders(root, "memory"):
        yield from _left_in_cgroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _left_in_cgroup(folder: Path, limit_name: str, usage_name: str, prefix: str) -> Iterator[int]:
    limit, usage = _read(folder / limit_name), _read(folder / usage_name)
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= NO_LIMIT_BYTES:
        return
    # Usage counts the page cache, which the kernel gives back under pressure, as it does in MemAvailable. A job that
    # reads files fills its limit with it; taken as used it would leave no memory for a single worker.
    cache = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in (f"{prefix}active_file", f"{prefix}inactive_file") and value.isdigit():
            cache += int(value)
    yield int(limit) - max(0, int(usage) - cache)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process' own cgroup and of those around it: each may set a limit.

    Args:
        root: as in :func:`read_machine`.
        controller: ``""`` for cgroup v2, the name of a controller for v1.
    """
    own = None
    for line in _read(root / "proc/self/cgroup").splitlines():  # "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1)
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own = path
            break
    if own is None:
        return
    mounts = ("", "unified") if controller == "" else (controller, "cpu,cpuacct" if controller == "cpu" else controller)
    # In a container the path may be the host's, of which only the mounted end exists: then the walk ends at the mount,
    # which is the container's own cgroup. A path out of the namespace ("/..") ends there too.
    parts = [part for part in own.split("/") if part not in ("", "..")]
    for mount in dict.fromkeys(mounts):
        base = root / "sys/fs/cgroup" / mount
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""  # not there, or not ours to read: no limit is known from it


def _free_bytes(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return found.f_bavail * found.f_frsize


def _shown(path: Path, root: Path) -> str:
    return f"/{path.relative_to(root)}"
