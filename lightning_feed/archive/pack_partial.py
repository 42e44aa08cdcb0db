"""A pack in the making: alone in its folder, gone on with where it broke off, renamed when it is whole."""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_feed.archive.folder_source import FolderSource
from lightning_feed.archive.pack_manifest import Format, Kind, is_pack
from lightning_feed.archive.pack_samples import Payloads
from lightning_feed.archive.stage_lock import FileLock
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

_PLAN = "plan.json"
_LOCK = "lock"


@contextmanager
def alone_in(partial: Path) -> Iterator[None]:
    """Hold the lock of a pack in the making. The system lets go of it when the process ends, however it does.

    Worker processes do not inherit it: those of a killed process would hold it on.

    Raises:
        ArchiveError: when another process holds it.
    """
    partial.mkdir(parents=True, exist_ok=True)
    lock = FileLock(partial / _LOCK)
    try:
        held = lock.try_acquire()
    except FileNotFoundError:  # renamed by the other process, which is done
        held = False
    if not held:
        raise ArchiveError(f"Another process is packing to {partial}. Wait for it to end, or give another DEST.")
    try:
        yield
    finally:
        if partial.is_dir() and [entry.name for entry in partial.iterdir()] == [_LOCK]:
            (partial / _LOCK).unlink()
            partial.rmdir()
        lock.release()


def begin_or_go_on(partial: Path, plan: dict[str, Any]) -> int:
    """Keep what is there if it is of the same plan; else begin anew.

    Returns:
        Since when, in ns since 1970, the samples there are as they are in the source.

    Raises:
        ArchiveError: when something lies there that is no pack in the making.
    """
    written = partial / _PLAN
    others = [entry for entry in partial.iterdir() if entry.name not in (_LOCK, _PLAN)]
    if others and not written.exists():
        raise ArchiveError(
            f"{partial} holds {others[0].name!r}, which is not of a pack in the making. A pack is made there, so move "
            "that away, or give another DEST."
        )
    try:
        same = json.loads(written.read_text()) == json.loads(json.dumps(plan))
        since_ns = written.stat().st_mtime_ns
    except (OSError, ValueError):
        same, since_ns = False, 0
    if not same:
        if others:
            logger.info("%s is of another source or other options, so it is begun anew.", partial)
        for entry in others:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        written.write_text(json.dumps(plan))
        since_ns = written.stat().st_mtime_ns
    return since_ns


def looked_again(partial: Path, plan: dict[str, Any]) -> None:
    """Remember that what is there was compared with the source now."""
    temporary = partial / f"{_PLAN}.tmp"
    temporary.write_text(json.dumps(plan))
    temporary.replace(partial / _PLAN)


def unchanged(part: Payloads, count: int, since_ns: int) -> int:
    """How many of the first ``count`` samples have not changed in their source since then.

    By the time of the last change of the inode: a copy that keeps the modification time changes that.
    """
    if not isinstance(part.source, FolderSource):
        return count  # the plan holds the checksums of some samples
    for index in range(count):
        try:
            changed_ns = os.stat(part.source.name(index)).st_ctime_ns  # noqa: PTH116 - a million times
        except OSError:
            return index
        if changed_ns > since_ns:
            return index
    return count


def plan_of(parts: dict[str, Payloads], kind: Kind, format: Format) -> dict[str, Any]:
    """What a broken-off pack must have in common with this one for it to be gone on with."""
    return {
        "kind": kind,
        "format": format,
        "parts": {name: [len(part), asdict(part.shrink), _fingerprint(part)] for name, part in parts.items()},
    }


def _fingerprint(part: Payloads) -> list[Any]:
    source = part.source
    if not isinstance(source, FolderSource):
        # Two datasets of one class may be of one length: train and val, or with another transform.
        some = sorted({0, len(part) // 2, len(part) - 1}) if len(part) else []
        name = f"{type(source).__module__}.{type(source).__qualname__}"
        return [name, *(list(part[index][1:]) for index in some)]
    root = source.root if isinstance(source.root, Path) else source.root.current()
    digest = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=16)
    for array in (source.index.names, source.index.ends, source.index.labels):
        digest.update(array.tobytes())
    return [digest.hexdigest()]


def finish(partial: Path, target: Path) -> None:
    """Rename a pack that is whole; what lay at ``target`` is removed after that."""
    for leftover in (*partial.glob("*/spool"), *partial.glob("*/index.tmp"), *partial.glob("*.tmp")):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    old = None
    if is_pack(target):
        old = target.with_name(f"{target.name}.old-{os.getpid()}")
        target.rename(old)
    partial.rename(target)
    for name in (_PLAN, _LOCK):  # now: without its plan, a pack in the making could not be gone on with
        (target / name).unlink(missing_ok=True)
    if old is not None:
        shutil.rmtree(old)


@contextmanager
def full_disk_told(partial: Path) -> Iterator[None]:
    """Give the errors of a full disk the words of this package.

    Raises:
        ArchiveError: in place of any error that says that there is no space.
    """
    try:
        yield
    except ArchiveError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        if number not in (errno.ENOSPC, errno.EDQUOT) and "No space left" not in str(error):
            raise
        raise ArchiveError(
            f"The disk of {partial.parent} is full. What is packed so far is kept in {partial}: free some space and "
            "pack again, which goes on from there."
        ) from error
