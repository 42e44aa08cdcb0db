"""Kinds of file systems: memory, a local disk, or a network."""

from collections.abc import Sequence
from pathlib import Path

from lightning_feed.storage.system import find_mount, read_text

_KINDS = {
    "memory": {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"},
    "overlay": {"overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs"},
    "network": {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "mmfs", "beegfs", "glusterfs", "afs"),
        *("panfs", "wekafs", "orangefs", "pvfs2", "ocfs2", "gfs2", "9p", "virtiofs", "daos", "fuse"),
    },
}
"""File systems by kind. ``fuse.*`` is of the network, too: what is mounted by a user's program is as a rule a bucket or
another machine."""
_VIRTUAL = ("virtio", "vbd-")
"""In the paths of disks that a hypervisor gives (KVM, Xen). Linux takes those to rotate whatever they are."""


def file_system(path: str | Path, root: Path = Path("/")) -> tuple[str | None, str | None]:
    """(type, kind) of the file system that a path lies on, from ``/proc/self/mountinfo``; None where it is unknown.

    Types are the kernel's names, ``ext4`` or ``nfs4``; kinds are ``"memory"``, ``"local"``, ``"rotational"``,
    ``"overlay"`` and ``"network"`` (proc(5), section mountinfo).
    """
    mount = find_mount(path, root)
    if mount is None:
        return None, None
    places = (root / "sys/dev/block" / mount.device, root / "sys/class/block" / Path(mount.source).name)
    return mount.kind, _kind(mount.kind, places)


def _kind(system: str, places: Sequence[Path]) -> str:
    known = next((kind for kind, systems in _KINDS.items() if system in systems), None)
    if known is not None or system.startswith("fuse."):
        return known or "network"
    return "rotational" if any(_rotates(place) for place in places) else "local"


def _rotates(block: Path, depth: int = 0) -> bool:
    """True if a block device, its disk, or one of the disks under it, rotates."""
    if depth > 8 or not block.exists():
        return False
    block = block.resolve()  # a partition's folder lies in its disk's
    if any(part.startswith(_VIRTUAL) for part in block.parts):
        return False
    queues = (block / "queue/rotational", block.parent / "queue/rotational")
    if any(read_text(queue).strip() == "1" for queue in queues):
        return True
    slaves = block / "slaves"
    return slaves.is_dir() and any(_rotates(slave, depth + 1) for slave in slaves.iterdir())
