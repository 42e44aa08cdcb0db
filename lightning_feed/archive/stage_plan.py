"""What has to be done to make a copy equal its source: which files to copy, which to remove, and how much they take."""

import heapq
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from lightning_feed.archive.stage_copy import THREADS
from lightning_feed.archive.stage_room import Need
from lightning_feed.archive.stage_tree import FileStamp, Identity, Tree, below, identities_above, overlap_error


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """The difference between a source and its copy."""

    to_copy: list[str]
    """Names of files in the source that the copy lacks, or has in another size or time. The largest first, so that
    no thread is left with a large one at the end."""
    to_remove: list[str]
    """Names in the copy that the source no longer has, folders before what is in them."""
    need: Need

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.to_copy or self.to_remove)


def plan_copy(source: Tree, target: str, *, afresh: bool = False, block_bytes: int = 4096) -> CopyPlan:
    """Compare a source with its copy by the size and time of each file.

    Args:
        source: what is to be there.
        target: where the copy is, or will be.
        afresh: everything is removed and copied again.
        block_bytes: each file takes whole blocks of this size.

    Raises:
        ArchiveError: when the target lies in the source, or a part of the source in the target, by whatever way.
    """
    if identities_above(target) & source.identities:
        raise overlap_error(source.root, target)
    there = _scan_copy(source, target)
    stale = list(there) if afresh else [name for name, stamp in there.items() if not _belongs(source, name, stamp)]
    gone = set(stale)
    # A folder that goes takes what is in it along.
    to_remove = [name for name in stale if not _has_parent_in(name, gone)]
    kept = {name: stamp for name, stamp in there.items() if name not in gone}
    to_copy = sorted(
        (name for name, stamp in source.files.items() if kept.get(name) != stamp),
        key=lambda name: source.files[name].size,
        reverse=True,
    )
    return CopyPlan(to_copy, to_remove, _need(source, there, kept, to_copy, block_bytes))


def remove_entries(target: str, names: list[str]) -> None:
    """Remove files and folders of a copy, however deep; those that are gone already are gone."""
    for name in names:
        path = below(target, name)
        if Path(path).is_dir() and not Path(path).is_symlink():
            _remove_folder(path)
        else:
            Path(path).unlink(missing_ok=True)


def _remove_folder(path: str) -> None:
    # shutil.rmtree calls itself for each folder in a folder, and fails where they are more than Python's stack holds.
    os.chmod(path, 0o700)  # noqa: PTH101 - from here on nobody else puts a link to elsewhere into it
    folders = [path]
    for folder in folders:  # which grows meanwhile
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    os.unlink(entry.path)  # noqa: PTH108
    for folder in reversed(folders):
        os.rmdir(folder)  # noqa: PTH106


def _belongs(source: Tree, name: str, stamp: FileStamp | None) -> bool:
    return name in source.folders if stamp is None else name in source.files


def _has_parent_in(name: str, names: set[str]) -> bool:
    if "" in names:
        return name != ""
    while "/" in name:
        name = name.rpartition("/")[0]
        if name in names:
            return True
    return False


def _need(
    source: Tree,
    there: dict[str, FileStamp | None],
    kept: dict[str, FileStamp | None],
    to_copy: list[str],
    block_bytes: int,
) -> Need:
    def blocks(stamp: FileStamp | None) -> int:
        return -(-stamp.size // block_bytes) * block_bytes if stamp else 0

    # A file that changed stays until its new version is whole, so both are there for a while: that a new one is smaller
    # gives no room to the others.
    grown = sum(max(0, blocks(source.files[name]) - blocks(kept.get(name))) for name in to_copy)
    replaced = [blocks(source.files[name]) for name in to_copy if kept.get(name)]
    freed = sum(blocks(stamp) for name, stamp in there.items() if name not in kept)
    return Need(
        bytes=max(0, grown + sum(heapq.nlargest(THREADS, replaced)) - freed),
        files=sum(name not in kept for name in (*source.folders, *source.files)),
    )


def _scan_copy(source: Tree, target: str) -> dict[str, FileStamp | None]:
    """What lies at the copy: files with their stamps, folders with None. A link or a pipe is no file of a copy."""
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return {}
    if not stat.S_ISDIR(status.st_mode):
        return {"": _copy_stamp(status)}
    found: dict[str, FileStamp | None] = {"": None}
    waiting = [""]
    while waiting:
        name = waiting.pop()
        with os.scandir(below(target, name)) as entries:
            for entry in entries:
                child, status = f"{name}/{entry.name}" if name else entry.name, entry.stat(follow_symlinks=False)
                if Identity.of(status) in source.identities:
                    raise overlap_error(source.root, target)
                if stat.S_ISDIR(status.st_mode):
                    found[child] = None
                    waiting.append(child)
                else:
                    found[child] = _copy_stamp(status)
    return found


def _copy_stamp(status: os.stat_result) -> FileStamp:
    return FileStamp(status.st_size if stat.S_ISREG(status.st_mode) else -1, status.st_mtime_ns)
