"""File systems: mounts, their kinds (memory, local disk, network), and their free space."""

import os
import re
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_feed.errors import ArchiveError
from lightning_feed.machine.limits import MemoryLimit, cgroup_memory_limits, memory_limits, read_text
from lightning_feed.wording import printable, size_text

RAM_SHARE = 0.9
"""Share of the free memory, and of the free space of a memory file system, that a copy may take. Workers pass their
batches through /dev/shm and are killed when /dev/shm is full; any process can be killed when memory is full."""
_KINDS = {
    "memory": {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"},
    "overlay": {"overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs"},
    "network": {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "mmfs", "beegfs", "glusterfs", "afs"),
        *("panfs", "wekafs", "orangefs", "pvfs2", "ocfs2", "gfs2", "9p", "virtiofs", "daos", "fuse"),
    },
}
"""File system types by kind. ``fuse.*`` counts as network, because such a mount is usually a bucket or another
machine."""
_VIRTUAL = ("virtio", "vbd-")
"""Parts of the paths of virtual disks (KVM, Xen). Linux always reports these as rotational."""


def file_system(path: str | Path, root: Path = Path("/")) -> tuple[str | None, str | None]:
    """Return (type, kind) of a path's file system from ``/proc/self/mountinfo``; both None if unknown.

    Types are the kernel's names, such as ``ext4`` or ``nfs4``; kinds are ``"memory"``, ``"local"``, ``"rotational"``,
    ``"overlay"`` and ``"network"`` (proc(5), section mountinfo).
    """
    mount = find_mount(path, root)
    if mount is None:
        return None, None
    blocks = (root / "sys/dev/block" / mount.device, root / "sys/class/block" / Path(mount.source).name)
    return mount.kind, _kind(mount.kind, blocks)


def _kind(system: str, blocks: Sequence[Path]) -> str:
    known = next((kind for kind, systems in _KINDS.items() if system in systems), None)
    if known is not None or system.startswith("fuse."):
        return known or "network"
    if any(_rotates(block) for block in blocks):
        return "rotational"
    return "local"


def _rotates(block: Path, depth: int = 0) -> bool:
    """Return True if a block device, its disk, or a disk under it is rotational."""
    if depth > 8 or not block.exists():
        return False
    block = block.resolve()  # a partition's folder is inside its disk's
    if any(part.startswith(_VIRTUAL) for part in block.parts):
        return False
    queues = (block / "queue/rotational", block.parent / "queue/rotational")
    if any(read_text(queue).strip() == "1" for queue in queues):
        return True
    slaves = block / "slaves"
    return slaves.is_dir() and any(_rotates(slave, depth + 1) for slave in slaves.iterdir())


# --- mounts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    point: str
    """The path of the mount point."""
    kind: str
    """``"tmpfs"``, ``"ext4"`` ..."""
    device: str
    """Device number, as in ``/sys/dev/block``: ``8:1``."""
    source: str
    """``/dev/sda1``, ``server:/data``."""
    options: frozenset[str]

    @property
    def in_memory(self) -> bool:
        """True if data written to this mount takes memory."""
        return self.kind in ("tmpfs", "ramfs")


def find_mount(path: str | Path, root: Path = Path("/")) -> Mount | None:
    """Return the mount that contains ``path``; None if the system does not report it.

    Args:
        path: a file or a folder.
        root: the file system to read ``proc`` from.
    """
    resolved = Path(path).resolve()
    mount = None
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        # 25 24 0:23 / /dev/shm rw,relatime [fields of any number] - tmpfs tmpfs rw,size=24684084k
        head, _, tail_text = line.partition(" - ")
        words = head.split(" ")
        tail = tail_text.split(" ")
        if len(words) < 6 or len(tail) < 3:
            continue
        point = _unescaped(words[4])
        # Of two mounts at one point, the later hides the earlier.
        if resolved.is_relative_to(point) and (mount is None or len(point) >= len(mount.point)):
            options = frozenset([*words[5].split(","), *tail[2].split(",")])
            mount = Mount(point=point, kind=tail[0], device=words[2], source=_unescaped(tail[1]), options=options)
    return mount


def _unescaped(word: str) -> str:
    """Decode blanks and backslashes, which the kernel writes in paths as ``\\040`` and the like."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), word)


# --- room for a copy --------------------------------------------------------------------------------------------------


def find_room(folder: str | Path, root: Path = Path("/")) -> MemoryLimit:
    """Return the tighter limit on new data in a folder: free space or, if the folder is in memory, free memory."""
    mount = find_mount(folder, root)
    status = os.statvfs(folder)
    name = f"{mount.point} ({mount.kind})" if mount else str(folder)
    limits = [MemoryLimit(status.f_bavail * status.f_frsize, name)]
    if mount is not None and mount.in_memory:
        limits += memory_limits(root)
    least = min(limits)
    return least._replace(left_bytes=max(0, least.left_bytes))


def check_room(new_bytes: int, new_files: int, folder: str, root: Path = Path("/")) -> None:
    """Refuse a copy or a pack that does not fit.

    Args:
        new_bytes: bytes to add, each file rounded up to whole blocks of the file system.
        new_files: number of files and folders to add.
        folder: folder to which they are added; must exist.
        root: the file system to read ``proc`` and ``sys`` from.

    Raises:
        ArchiveError: if the data does not fit. The message has the needed and the free space, and advice.
    """
    mount = find_mount(folder, root)
    least = find_room(folder, root)
    status = os.statvfs(folder)
    in_memory = mount is not None and mount.in_memory
    share = RAM_SHARE if in_memory else 1
    if new_bytes > least.left_bytes * share:
        kept = f", of which {1 - share:.0%} are kept free" if in_memory else ""
        raise ArchiveError(
            f"{size_text(new_bytes)} are needed in {folder}, but the {least.reason} leaves "
            f"{size_text(least.left_bytes)}{kept}. Nothing was written. Make room, pack images smaller "
            "(lightning-feed pack --short-side), choose a local disk, or mount a tmpfs of the right size and use "
            f"that:\n  {mount_command('/mnt/ram', new_bytes, root)}"
        )
    if status.f_files > 0 and new_files > status.f_favail:  # a file system without inodes reports 0
        raise ArchiveError(
            f"{new_files} files are needed in {folder}, which has room for {status.f_favail} more, "
            "whatever their size. Nothing was written. Pack them into one first (lightning-feed pack)."
        )


def find_caveats(folder: str, root: Path = Path("/")) -> tuple[str, ...]:
    """Return warnings about copies in ``folder``, one sentence each.

    Args:
        folder: folder for the copies; must exist.
        root: as in :func:`check_room`.
    """
    mount = find_mount(folder, root)
    status = Path(folder).stat()
    caveats = []
    sticky = status.st_mode & stat.S_ISVTX  # only the owner of a file can move it in a sticky folder
    if status.st_uid not in (0, os.geteuid()) or (status.st_mode & 0o002 and not sticky):
        caveats.append(
            f"Other users can replace a copy in {folder}. Choose a DEST of your own, for example /dev/shm/<user>."
        )
    if mount is None or not mount.in_memory:
        return tuple(caveats)
    caveats.append(f"{mount.point} is memory: the copy is gone after a reboot.")
    if mount.kind == "tmpfs" and "noswap" not in mount.options and _has_swap(root):
        caveats.append(
            f"{mount.point} may be swapped out when memory is short. Mount it with noswap (Linux 6.4) to prevent that."
        )
    limit = min(cgroup_memory_limits(root), default=None)
    if limit is not None:
        available = size_text(max(0, limit.left_bytes))
        caveats.append(f"The copy counts against the {limit.reason}, which leaves {available} to training now.")
    return tuple(caveats)


def mount_command(path: str | os.PathLike[str], total_bytes: int, root: Path = Path("/")) -> str:
    """Return the command that mounts a tmpfs for a copy of ``total_bytes``, owned by the current user.

    Args:
        path: the mount point.
        total_bytes: size of the staged data. 5 % and 64 MiB are added for rounding each file up to pages.
        root: as in :func:`check_room`.
    """
    # Add the share that check_room keeps free, so that the copy fits.
    mib = int(total_bytes * 1.05 / RAM_SHARE / 2**20) + 64
    options = f"size={mib}M,mode=0700,uid={os.getuid()},gid={os.getgid()}"
    if _has_swap(root) and _kernel(root) >= (6, 4):
        options += ",noswap"
    where = shlex.quote(printable(os.fspath(path)))
    return f"sudo mkdir -p {where} && sudo mount -t tmpfs -o {options} tmpfs {where}"


def _has_swap(root: Path) -> bool:
    return len(read_text(root / "proc/swaps").splitlines()) > 1  # the first line is the heading


def _kernel(root: Path) -> tuple[int, ...]:
    release = re.match(r"(\d+)\.(\d+)", read_text(root / "proc/sys/kernel/osrelease"))
    if release is None:
        return (0, 0)
    return tuple(map(int, release.groups()))
