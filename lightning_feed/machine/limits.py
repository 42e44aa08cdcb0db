"""CPUs, memory and /dev/shm of this process, and the memory that it may still take."""

import math
import multiprocessing
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lightning_feed.wording import plural

MIB = 2**20
WORKER_BYTES = {"fork": 256 * MIB, "forkserver": 512 * MIB, "spawn": 512 * MIB}
"""Estimated memory of one worker, without its batches. Measured: a spawned worker with torch, torchvision and Lightning
imported has 382 MiB of private memory; a forked one starts with 2 MiB and copies the pages that it touches."""
THREAD_BYTES = 8 * MIB
"""Estimated memory of one worker thread: its stack. A thread copies nothing."""
MEMORY_SHARE = 0.5
"""Largest share of free memory for workers and batches in flight. The model needs the rest."""
SHM_SHARE = 0.8
"""Largest share of free /dev/shm for batches in flight. A process that fills /dev/shm dies of a bus error."""
STREAM_BACKENDS = ("cuda", "xpu")
"""Device types with the streams, events and allocator needed here (checked against torch 2.6 and 2.15).

``torch.mps`` has classes with these names from torch 2.15 on, but only one queue, and its events take no stream. Other
backends (HPU, XLA) have their modules in separate packages.
"""
DECODING_BACKENDS = ("cuda",)
"""Device types that decode images, with nvJPEG or DALI."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The limits of this process, not of the host outside its container."""

    usable_cpus: int
    """CPUs that this process may keep busy, 1 or more."""
    cpu_reason: str
    """Name of the limit that sets ``usable_cpus``."""
    available_memory_bytes: int | None
    """Memory available without swapping and within the container's limit. None if unknown."""
    free_shm_bytes: int | None
    """Free space in /dev/shm, through which worker processes send batches. None if unknown."""
    start_method: str
    """Start method of ``multiprocessing``: ``"fork"``, ``"forkserver"`` or ``"spawn"``."""
    cpu_time: float | None = field(default=None, compare=False)
    """``usable_cpus`` before rounding, such as 0.5 for a quota of half a CPU. None if equal to ``usable_cpus``."""


def read_machine(root: Path = Path("/")) -> Machine:
    """Read the limits of this process. A file that is missing or unreadable sets no limit.

    Args:
        root: the file system to read ``proc``, ``sys`` and ``dev/shm`` from.
    """
    cpus, reason = min(_cpu_limits(root), key=lambda limit: limit[0])
    memory_bytes = min((limit.left_bytes for limit in memory_limits(root)), default=None)
    if memory_bytes is not None:
        memory_bytes = max(0, memory_bytes)
    # get_start_method() without allow_none would fix the method for the whole process. The first method is the default.
    start_method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return Machine(
        usable_cpus=max(1, int(cpus)),
        cpu_reason=reason,
        available_memory_bytes=memory_bytes,
        free_shm_bytes=_free_bytes(root / "dev/shm"),
        start_method=start_method,
        cpu_time=cpus,
    )


HAS_SLOTS = hasattr(os, "memfd_create")
"""True if the system has ``memfd_create``, which :mod:`lightning_feed.load.slots` needs."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory and workers of one running loader."""

    workers: int
    batches: int
    """Largest number of batches in memory at once."""
    batch_bytes: int
    size: str
    """Description of the batches."""
    worker_bytes: int
    """Memory of one worker, without its batches."""
    in_shm: bool = True
    """True if the batches are in /dev/shm: torch's worker processes put them there."""
    sharers: int = 1
    """Number of loaders with this footprint on the machine, including this one."""


def exceeded_limit(machine: Machine, taken: Footprint) -> str:
    """Describe the limit that a loader would exceed. Empty if it would exceed none."""
    batches_bytes = taken.batches * taken.batch_bytes
    for_all = f" for each of {taken.sharers} loaders on this machine" if taken.sharers > 1 else ""
    shm: float = math.inf
    if taken.in_shm and machine.free_shm_bytes is not None:
        shm = machine.free_shm_bytes
    if batches_bytes > SHM_SHARE * shm / taken.sharers:
        return (
            f"{taken.size} need {mib(batches_bytes)}{for_all}, more than {SHM_SHARE:.0%} of the {mib(shm)} free in "
            "/dev/shm; a container gets more with `docker run --shm-size`"
        )
    memory: float = math.inf
    if machine.available_memory_bytes is not None:
        memory = machine.available_memory_bytes
    total = batches_bytes + taken.workers * taken.worker_bytes
    if total > MEMORY_SHARE * memory / taken.sharers:
        return (
            f"{plural(taken.workers, 'worker')} at {mib(taken.worker_bytes)} and {taken.size} need {mib(total)}"
            f"{for_all}, more than {MEMORY_SHARE:.0%} of the {mib(memory)} of free memory"
        )
    return ""


def mib(size: float) -> str:
    """Format bytes as MiB."""
    return f"{size / MIB:,.0f} MiB"


def _cpu_limits(root: Path) -> Iterator[tuple[float, str]]:
    """List all limits on the number of CPUs, with names. The first wins a tie."""
    if hasattr(os, "sched_getaffinity"):
        yield len(os.sched_getaffinity(0)), "CPUs that this process may run on (affinity)"
    else:
        yield os.cpu_count() or 1, "CPUs of the machine"
    if hasattr(os, "process_cpu_count"):  # Python 3.13; PYTHON_CPU_COUNT can lower it
        yield os.process_cpu_count() or 1, "os.process_cpu_count()"
    yield from _cpu_quotas(root)


def _cpu_quotas(root: Path) -> Iterator[tuple[float, str]]:
    # Microseconds per period: "max 100000" or "50000 100000" in one file, or two files. A quota of -1 means no limit.
    texts = [(folder / "cpu.max", read_text(folder / "cpu.max")) for folder in cgroup_folders(root, "")]
    for folder in cgroup_folders(root, "cpu"):
        file = folder / "cpu.cfs_quota_us"
        texts.append((file, f"{read_text(file)} {read_text(folder / 'cpu.cfs_period_us')}"))
    for file, text in texts:
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit() and int(quota) * int(period) > 0:
            yield int(quota) / int(period), f"CPU quota of the cgroup (/{file.relative_to(root)})"


def _free_bytes(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return status.f_bavail * status.f_frsize


def cpu_model(root: Path = Path("/")) -> str:
    """Return the model of the CPU, or its architecture if the system does not name the model."""
    for line in read_text(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
