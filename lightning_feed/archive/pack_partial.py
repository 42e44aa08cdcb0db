"""A pack in the making: alone in its folder, gone on with where it broke off, renamed when it is whole."""

import ctypes
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightning_feed.archive.folder_source import FolderSource
from lightning_feed.archive.pack_manifest import Format, Kind, is_pack
from lightning_feed.archive.pack_samples import Payloads
from lightning_feed.archive.pack_spool import records_of
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
    """Hold the lock of a pack in the making. The system lets go of it when the process ends, however it does.

    Worker processes do not inherit it: those of a killed process would hold it on.

    Raises:
        ArchiveError: when another process holds it, or when another user could change what is packed.
    """
    mine = _make_private(partial)
    lock = FileLock(partial / _LOCK)
    try:
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError):  # not found: renamed by the other process, which is done
        raise ArchiveError(
            f"Another process is packing to {partial}. Wait for it to end, or give another DEST."
        ) from None
    try:
        _refuse_foreign(partial, mine)
        yield
    finally:
        if partial.is_dir() and [entry.name for entry in partial.iterdir()] == [_LOCK]:
            (partial / _LOCK).unlink()
            partial.rmdir()
        lock.release()


def _make_private(partial: Path) -> int:
    """Make the folder, or take it if it is this user's, and let nobody else write to it.

    Returns:
        What the file system calls this user: root is another on some network file systems.
    """
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            partial.mkdir(mode=0o700)
        folder = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with tempfile.TemporaryFile(dir=partial) as probe:
                mine = os.fstat(probe.fileno()).st_uid
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
    if found.st_uid != mine:
        raise ArchiveError(
            f"{partial} belongs to another user (number {found.st_uid}), who could change what is packed. A pack is "
            "made there, so remove it, or give another DEST."
        )
    return mine


def _refuse_foreign(partial: Path, mine: int) -> None:
    """Look for what others left there while they could write: a link would have another file overwritten."""
    for folder, folders, files in os.walk(partial):
        for name in (*folders, *files):
            status = os.lstat(f"{folder}/{name}")
            single = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
            if status.st_uid != mine or not single:
                raise ArchiveError(
                    f"{folder}/{name} is a link, or another user's, and no part of a pack in the making. Look at it, "
                    f"and remove {partial} to pack anew."
                )


def begin_or_go_on(partial: Path, plan: dict[str, Any]) -> None:
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
    try:
        same = json.loads(written.read_text()) == json.loads(json.dumps(plan))
    except (OSError, ValueError):
        same = False
    if not same:
        if others:
            logger.info("%s is of another source or other options, so it is begun anew.", partial)
        for entry in others:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        written.write_text(json.dumps(plan))


def unchanged(part: Payloads, folder: Path) -> int:
    """How many of the samples in the spool in ``folder``, from the first on, are unchanged in their source.

    Of a dataset that is no folder, all: the plan holds the checksums of some samples.
    """
    changed_ns = records_of(folder)["changed_ns"].tolist()
    return next((index for index, then in enumerate(changed_ns) if part.changed_ns(index) != then), len(changed_ns))


def plan_of(parts: dict[str, Payloads], kind: Kind, format: Format) -> dict[str, Any]:
    """What a broken-off pack must have in common with this one for it to be gone on with."""
    return {
        "spool": 2,
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
    """Put a pack that is whole in its place; what lay at ``target`` is removed after that.

    The two are exchanged, so that there is a pack at every moment. Where the file system cannot do that there is none
    between two renames; killed there, the next call puts the old one back.
    """
    for leftover in (*partial.glob("*/spool/payloads"), *partial.glob("*/index.tmp"), *partial.glob("*.tmp")):
        leftover.unlink()
    one_part = next(entry for entry in partial.iterdir() if entry.is_dir())
    partial.chmod(stat.S_IMODE(one_part.stat().st_mode))  # it was made for this user alone; its parts were not
    if not is_pack(target):
        partial.rename(target)
    elif not _exchanged(partial, target):
        target.rename(partial / _REPLACED)
        partial.rename(target)
    _clear_up(partial, target)


def complete_replacement(partial: Path, target: Path) -> None:
    """Clear up after a process that was killed when its pack was in its place already.

    Raises:
        ArchiveError: when that process lives.
    """
    if not is_pack(target) or not (target / _PLAN).exists() or target.stat().st_uid != os.geteuid():
        return
    lock = FileLock(target / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ArchiveError(
            f"Another process is packing to {target}. Wait for it to end, or give another DEST."
        ) from None
    try:
        _clear_up(partial, target)
    finally:
        lock.release()


def put_back(partial: Path, target: Path) -> None:
    """Put back the pack that a process was about to replace when it was killed between two renames."""
    if (partial / _REPLACED).is_dir() and not os.path.lexists(target):
        (partial / _REPLACED).rename(target)


def _clear_up(partial: Path, target: Path) -> None:
    if is_pack(partial) and not (partial / _PLAN).exists():  # the old one, after an exchange
        partial.rename(target / _REPLACED)
    if (target / _REPLACED).is_symlink():
        (target / _REPLACED).unlink()
    for leftover in (target / _REPLACED, *target.glob("*/spool")):
        shutil.rmtree(leftover, ignore_errors=True)
    for name in (_PLAN, _LOCK):  # last: they say that there is something to clear up, and who is at it
        (target / name).unlink(missing_ok=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the system could exchange two folders in one step."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # not Linux, or an old C library
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


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
        number, text = getattr(error, "errno", None), str(error)
        # LMDB calls it an input/output error when a write fitted in part.
        cut_short = text.startswith("mdb_") and "Input/output error" in text
        if number not in _FULL and "No space left" not in text and not cut_short:
            raise
        raise ArchiveError(
            f"The disk of {partial.parent} is full. What is packed so far is kept in {partial}: free some space there "
            f"and pack to {partial.with_suffix('')} again, which goes on from there. Twice the data must fit until it "
            "is done. To give up, remove that folder."
        ) from error
