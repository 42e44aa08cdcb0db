"""Where a data set's files lie, and how fast they are read."""

import re
from collections.abc import Sequence
from pathlib import Path

from lightning_feed.archive.memory import read_text
from lightning_feed.watch.experiments.reads import Reads
from lightning_feed.watch.experiments.results import DiskFacts

_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "mmfs", "beegfs", "glusterfs", "afs", "panfs"),
    *("wekafs", "orangefs", "pvfs2", "ocfs2", "gfs2", "9p", "virtiofs", "daos", "fuse"),
}
"""Besides ``fuse.*``: what is mounted by a user's program is as a rule a bucket or another machine."""
_MEMORY = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}
_VIRTUAL = ("virtio", "vbd-")
"""In the places of disks that a hypervisor gives (KVM, Xen). Linux takes those to rotate whatever they are."""
_OVERLAY = {"overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs"}


def disk_facts(
    files: Sequence[str],
    sizes: Sequence[int],
    *,
    reads: Reads | None,
    files_per_s: float | None,
    root: Path = Path("/"),
) -> DiskFacts:
    """What is known of the files that samples are made of.

    Args:
        files: some of them.
        sizes: theirs, in bytes.
        reads: what the workers read while the loader ran.
        files_per_s: how many they opened.
        root: the file system to read ``proc`` and ``sys`` from.
    """
    system, kind = file_system(files[0], root) if files else (None, None)
    mean = sum(sizes) / len(sizes) if sizes else None
    rate = None
    if reads is not None and reads.elapsed_s > 0:
        rate = reads.asked_bytes / reads.elapsed_s / 1e6
    elif mean is not None and files_per_s is not None:
        rate = mean * files_per_s / 1e6
    return DiskFacts(
        file_system=system,
        kind=kind,
        read_mb_per_s=rate,
        files_per_s=files_per_s,
        mean_file_bytes=mean,
        page_cache_pct=None if reads is None or not files else reads.page_cache_pct,
    )


def file_system(path: str | Path, root: Path = Path("/")) -> tuple[str | None, str | None]:
    """(type, kind) of the file system that a path lies on, from ``/proc/self/mountinfo``; None where that is not told.

    Types are the kernel's names, ``ext4`` or ``nfs4``; kinds are ``"memory"``, ``"local"``, ``"rotational"``,
    ``"overlay"`` and ``"network"`` (proc(5), section mountinfo).
    """
    target = Path(path).resolve()
    best: tuple[int, str, str, str] | None = None
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, found, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if not found or len(fields) < 5 or len(after) < 2:
            continue
        mount = Path(_unescaped(fields[4]))
        # Of two mounts at one place the later one covers the earlier.
        if target.is_relative_to(mount) and (best is None or len(mount.parts) >= best[0]):
            best = (len(mount.parts), after[0], fields[2], _unescaped(after[1]))
    if best is None:
        return None, None
    _, system, device, source = best
    return system, _kind(system, device, source, root)


def _kind(system: str, device: str, source: str, root: Path) -> str:
    if system in _MEMORY:
        return "memory"
    if system in _OVERLAY:
        return "overlay"
    if system in _NETWORK or system.startswith("fuse."):
        return "network"
    places = (root / "sys/dev/block" / device, root / "sys/class/block" / Path(source).name)
    return "rotational" if any(_rotates(place) for place in places) else "local"


def _rotates(block: Path, depth: int = 0) -> bool:
    """Whether a block device, the disk that it is a partition of, or one of the disks under it, rotates."""
    if depth > 8 or not block.exists():
        return False
    block = block.resolve()  # a partition's folder lies in its disk's
    if any(part.startswith(_VIRTUAL) for part in block.parts):
        return False
    for queue in (block / "queue/rotational", block.parent / "queue/rotational"):
        if read_text(queue).strip() == "1":
            return True
    slaves = block / "slaves"
    return slaves.is_dir() and any(_rotates(slave, depth + 1) for slave in slaves.iterdir())


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)
