"""Room for a copy on a file system and in memory, checked before a byte is written, and mounts."""

import os
import re
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from lightning_feed.archive.memory import cgroup_memory_limits, memory_limits, read_text
from lightning_feed.archive.stage_path import shown
from lightning_feed.errors import ArchiveError

RAM_SHARE = 0.9
"""How much of the free memory, and of the free space of a file system in memory, a copy may take. A loader's workers
hand over their batches through /dev/shm and are killed when it is full; so is whoever asks next when memory is."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    point: str
    """Where it is mounted."""
    kind: str
    """``"tmpfs"``, ``"ext4"`` ..."""
    device: str
    """Its number, as in ``/sys/dev/block``: ``8:1``."""
    source: str
    """``/dev/sda1``, ``server:/data``."""
    options: frozenset[str]

    @property
    def in_memory(self) -> bool:
        """Whether what is written there takes memory."""
        return self.kind in ("tmpfs", "ramfs")


def find_mount(path: str | Path, root: Path = Path("/")) -> Mount | None:
    """The mount that ``path`` lies on; None where the system does not say.

    Args:
        path: a file or a folder.
        root: the file system to read ``proc`` from.
    """
    resolved, found = Path(path).resolve(), None
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        # 25 24 0:23 / /dev/shm rw,relatime [fields of any number] - tmpfs tmpfs rw,size=24684084k
        left, _, right = line.partition(" - ")
        words, tail = left.split(" "), right.split(" ")
        if len(words) < 6 or len(tail) < 3:
            continue
        point = _unescaped(words[4])
        # Of two mounts on one point the later hides the other.
        if resolved.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            options = frozenset([*words[5].split(","), *tail[2].split(",")])
            found = Mount(point=point, kind=tail[0], device=words[2], source=_unescaped(tail[1]), options=options)
    return found


def check_room(new_bytes: int, new_files: int, folder: str, root: Path = Path("/")) -> None:
    """Refuse a copy that does not fit.

    Args:
        new_bytes: what it takes, in whole blocks of the file system.
        new_files: files and folders.
        folder: where it goes; exists.
        root: the file system to read ``proc`` and ``sys`` from.

    Raises:
        ArchiveError: with what is needed, what is there, and what to do.
    """
    mount = find_mount(folder, root)
    in_memory = mount is not None and mount.in_memory
    status = os.statvfs(folder)
    free = int(status.f_bavail * status.f_frsize * (RAM_SHARE if in_memory else 1))
    where = f"{shown(mount.point)} ({mount.kind})" if mount else shown(folder)
    if new_bytes > free:
        kept = f", of which {1 - RAM_SHARE:.0%} are kept free" if in_memory else ""
        raise ArchiveError(
            f"{size_text(new_bytes)} are to be copied to {shown(folder)}, and {where} has "
            f"{size_text(status.f_bavail * status.f_frsize)} left{kept}. Nothing was written. Make room there, pack "
            "the images smaller first (lightning-feed pack --short-side), or mount a tmpfs of the right size and give "
            f"that:\n  {mount_command(folder, new_bytes, root)}"
        )
    if status.f_files > 0 and new_files > status.f_favail:  # a file system without inodes of its own says 0
        raise ArchiveError(
            f"{new_files} files are to be copied to {shown(folder)}, and {where} has room for {status.f_favail} more, "
            "whatever their size. Nothing was written. Pack them into one first (lightning-feed pack)."
        )
    if not in_memory:
        return
    limit = min(memory_limits(root), default=None)
    if limit is not None and new_bytes > limit.left_bytes * RAM_SHARE:
        raise ArchiveError(
            f"{size_text(new_bytes)} are to be copied to {shown(folder)}, which is memory, and the "
            f"{limit.reason} leaves {size_text(max(0, limit.left_bytes))}, of which {1 - RAM_SHARE:.0%} are kept free. "
            "Nothing was written. Ask for more memory, pack the images smaller first (lightning-feed pack "
            "--short-side), or stage to a local disk."
        )


def find_caveats(folder: str, root: Path = Path("/")) -> tuple[str, ...]:
    """What to know of a copy in ``folder``: one sentence for each thing that holds there.

    Args:
        folder: where the copies go; exists.
        root: as in :func:`check_room`.
    """
    mount, status, found = find_mount(folder, root), os.stat(folder), []  # noqa: PTH116
    sticky = status.st_mode & stat.S_ISVTX  # then what lies there can be moved by its owner alone
    if status.st_uid not in (0, os.geteuid()) or (status.st_mode & 0o002 and not sticky):
        found.append(
            f"Other users may put other data in the place of a copy in {shown(folder)}: it belongs to another user, or "
            "all may write to it. Give a DEST of your own, for example /dev/shm/<user>."
        )
    if mount is None or not mount.in_memory:
        return tuple(found)
    found.append(f"{shown(mount.point)} is memory: the copy is gone after a reboot.")
    if mount.kind == "tmpfs" and "noswap" not in mount.options and _has_swap(root):
        found.append(
            f"{shown(mount.point)} may be moved out to swap when memory is short, and reads are then those of the swap "
            "disk. A tmpfs mounted with noswap (Linux 6.4) is not."
        )
    limit = min(cgroup_memory_limits(root), default=None)
    if limit is not None:
        found.append(
            f"The copy counts against the {limit.reason}, which leaves {size_text(max(0, limit.left_bytes))} to "
            "training now."
        )
    return tuple(found)


def mount_command(path: str | os.PathLike[str], total_bytes: int, root: Path = Path("/")) -> str:
    """The command that mounts a tmpfs for a copy of ``total_bytes``, owned by the user who asks.

    Args:
        path: where to mount it.
        total_bytes: the size of what is to be staged. 5 % and 64 MiB are added for the rounding of each file to pages.
        root: as in :func:`check_room`.
    """
    # The free part that check_room keeps comes on top, so that a copy fits into what this mounts.
    mib = int(total_bytes * 1.05 / RAM_SHARE / 2**20) + 64
    options = f"size={mib}M,mode=0700,uid={os.getuid()},gid={os.getgid()}"
    if _has_swap(root) and _kernel(root) >= (6, 4):
        options += ",noswap"
    where = shlex.quote(shown(path))
    return f"sudo mkdir -p {where} && sudo mount -t tmpfs -o {options} tmpfs {where}"


def size_text(size: float) -> str:
    """Bytes for people: ``"12.3 GiB"``."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _has_swap(root: Path) -> bool:
    return len(read_text(root / "proc/swaps").splitlines()) > 1  # the first line is the heading


def _kernel(root: Path) -> tuple[int, ...]:
    release = re.match(r"(\d+)\.(\d+)", read_text(root / "proc/sys/kernel/osrelease"))
    return tuple(map(int, release.groups())) if release else (0, 0)


def _unescaped(word: str) -> str:
    """The kernel writes blanks and backslashes in paths as ``\\040`` and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)
