"""A pack in the making: private and locked, resumable for the same plan, and renamed when it is whole."""

import ctypes
import errno
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_feed.archive.folder import FolderSource
from lightning_feed.archive.pack_formats import Format, is_pack
from lightning_feed.archive.pack_samples import Payloads
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

_PLAN = "plan.json"
_LOCK = "lock"
_REPLACED = "replaced"
"""A pack that was replaced, until it is removed."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def alone_in(partial: Path) -> Iterator[None]:
    """Hold the lock of a pack in the making. The system drops it when the process ends, however it ends.

    Raises:
        ArchiveError: when another process holds it, or when another user could change what is packed.
    """
    lock = FileLock(partial / _LOCK)
    try:
        _make_private(partial)
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError) as error:  # not found: renamed by the other process, which is done
        raise ArchiveError(
            f"Another process is packing to {partial}. Wait for it to end, or give another DEST."
        ) from error
    try:
        yield
    finally:
        if partial.is_dir() and [entry.name for entry in partial.iterdir()] == [_LOCK]:
            shutil.rmtree(partial)
        lock.release()


def _make_private(partial: Path) -> None:
    """Make the folder, or take it if it is this user's, and let nobody else write to it.

    What others left there while they could write is refused: a link would have another file overwritten.
    """
    try:
        partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with tempfile.TemporaryFile(dir=partial) as probe:
                mine = os.fstat(probe.fileno()).st_uid  # root is another user on some network file systems
            found = os.fstat(folder)
            if found.st_uid == mine:
                with suppress(OSError):  # a file system without modes
                    os.fchmod(folder, found.st_mode & stat.S_ISGID | 0o700)  # the pack is of the folder's group
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise ArchiveError(
            f"{partial} cannot be made or written to: {error.strerror}. A pack is made there, so remove it, or give "
            "another DEST."
        ) from error
    for path in (partial, *partial.rglob("*")):
        status = path.lstat()
        single = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
        if status.st_uid != mine or not single:
            raise ArchiveError(
                f"{path} is a link, or belongs to another user, who could change what is packed. A pack is made there, "
                f"so look at it and remove {partial}, or give another DEST."
            )


def begin_or_resume(partial: Path, plan: str) -> None:
    """Keep what is there if it is of the same plan; else begin anew.

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
    if others and written.read_bytes() == plan.encode():
        return
    if others:
        logger.info("%s is of another source, other options or another version, so it is begun anew.", partial)
    for entry in others:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    written.write_text(plan)


def plan_of(parts: dict[str, Payloads], format: Format) -> str:
    """A digest of what a pack that was broken off must have in common with this one to be resumed."""
    plan = hashlib.blake2b(f"version 3, {format}".encode(), digest_size=16)
    for name, part in parts.items():
        source = part.source
        about = (name, part.kind, part.shrink, len(part), type(source).__module__, type(source).__qualname__)
        plan.update(repr(about).encode())
        if isinstance(source, FolderSource):
            plan.update(os.fsencode(source.folder().resolve()))
            for array in (source.index.names, source.index.ends, source.index.labels):
                plan.update(array.tobytes())
        elif len(part):  # two datasets of one class may be of one length: train and val, or with another transform
            for index in (0, len(part) // 2, len(part) - 1):
                plan.update(repr(part[index][1:]).encode())
    return plan.hexdigest()


# --- the pack in its place --------------------------------------------------------------------------------------------


def finish(partial: Path, target: Path) -> None:
    """Put a pack that is whole in its place; what lay at ``target`` is removed after that.

    The two are exchanged, so that there is a pack at every moment. Where the file system cannot do that there is none
    between two renames; killed there, the next call puts the old one back.
    """
    one_part = next(entry for entry in partial.iterdir() if entry.is_dir())
    partial.chmod(stat.S_IMODE(one_part.stat().st_mode))  # it was made for this user alone; its parts were not
    if not is_pack(target):
        partial.rename(target)
    elif _exchanged(partial, target):
        (partial / _PLAN).touch()  # the old pack: if this call is killed, the next one removes the rest
        shutil.rmtree(partial)
    else:
        target.rename(partial / _REPLACED)
        partial.rename(target)
    for folder in (target / _REPLACED, *target.glob("*/store")):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (*target.glob("*/journal"), target / _PLAN, target / _LOCK):
        file.unlink(missing_ok=True)


def put_back(partial: Path, target: Path) -> None:
    """Put back the pack that a process was about to replace when it was killed between two renames."""
    if (partial / _REPLACED).is_dir() and not os.path.lexists(target):
        (partial / _REPLACED).rename(target)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the system could exchange two folders in one step."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # not Linux, or an old C library
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


@contextmanager
def report_full_disk(partial: Path) -> Iterator[None]:
    """Say what to do when the disk is full.

    Raises:
        ArchiveError: in place of any error that says that there is no space.
    """
    try:
        yield
    except ArchiveError:
        raise
    except Exception as error:
        number, text = getattr(error, "errno", None), str(error)
        # LMDB calls it an input/output error when a write fitted in part.
        cut_short = text.startswith("mdb_") and "Input/output error" in text
        if number not in _FULL and "No space left" not in text and not cut_short:
            raise
        raise ArchiveError(
            f"The disk of {partial.parent} is full. What is packed so far is kept in {partial}: free some space there "
            f"and pack to {partial.with_suffix('')} again, which resumes it. To give up, remove that folder."
        ) from error
