"""Staging: copies a folder or a file to memory or a local disk once per node, updates the copy, and removes it."""

import errno
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.util import Finalize
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from lightning_feed.errors import ArchiveError, SettingsError
from lightning_feed.storage.file_system import find_caveats, find_mount
from lightning_feed.storage.remote import RemotePlace, is_url, place_of, without_secrets
from lightning_feed.storage.stage_copy import (
    LocalOrigin,
    Mirror,
    RemoteOrigin,
    check_owner,
    is_same,
    remove_all,
    scan_copy,
)
from lightning_feed.storage.system import (
    RefcountedFile,
    make_private,
    open_refcounted,
    owner_of,
    read_json,
    write_json,
)

logger = logging.getLogger(__name__)

_SAY_AFTER_S = 1.0
"""A longer wait, in seconds, is logged. Checking an up-to-date copy takes less."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A complete copy, and the work that this call did."""

    source: Path | str
    """The source: an absolute path, or the URL."""
    path: Path
    """The copy: a folder or a file, like the source."""
    files: int
    """Files in the copy."""
    total_bytes: int
    """Bytes in the copy."""
    copied_files: int
    """Files copied by this call; 0 if the copy was up to date, or another process made it meanwhile."""
    copied_bytes: int
    removed: int
    """Files and folders removed because the source no longer has them."""
    took_s: float
    in_memory: bool
    """True if the copy is in memory: a tmpfs or a RAM disk."""
    caveats: tuple[str, ...]
    """Warnings about the place of the copy, one sentence each."""


def stage(  # noqa: PLR0913 - all but two are by name, and have a default
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    hash: bool = False,
    force: bool = False,
    remove_at_exit: bool = False,
    wait_s: float | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> Staged:
    """Copy ``source`` to ``dest/<name of source>``, or update the copy there.

    Every process of a node may call it: one copies, the others wait and use the same copy. Each file is either whole or
    missing; an interrupted copy is completed file by file. Files are compared by size and modification time. No process
    removes the copy until this process ends.

    Args:
        source: a folder or a file, whose symbolic links are followed; or its URL, for fsspec.
        dest: a folder in memory or on a local disk, for example ``/dev/shm/<user>``; made if its parent exists. Only
            this user can open the copy.
        hash: no longer supported: sizes and modification times are compared.
        force: True to remove anything at the target, and copy everything.
        remove_at_exit: True to remove the copy when the last process that uses it ends, unless it existed before. A
            killed process removes nothing.
        wait_s: time limit for waiting for another process that copies; None for no limit.
        storage_options: options of fsspec for a URL.

    Raises:
        ArchiveError: if there is no space (before a byte is written), if one of the two is inside the other, if a file
            cannot be read or written or changes meanwhile, or if the wait times out.
        SettingsError: for ``hash=True``.

    Example:
        >>> staged = stage("/data/birds", "/dev/shm/me")  # doctest: +SKIP
        >>> staged.path  # doctest: +SKIP
        PosixPath('/dev/shm/me/birds')
    """
    if hash:
        raise SettingsError(
            "hash=True is no longer supported: sizes and modification times are compared. Use force=True to copy "
            "everything again."
        )
    since_s = time.time()
    origin, place = find_place(source, dest)
    found = place_of(os.fspath(source) if is_url(origin) else origin, storage_options)
    copied = RemoteOrigin(found) if isinstance(found, RemotePlace) else LocalOrigin(origin, place.target)
    mirror = Mirror(copied, place.target, place.parts)
    with _as_archive_error(f"{dest} cannot be made", "Choose another DEST"):
        place.target.parent.mkdir(mode=0o700, exist_ok=True)
    failed = f"{origin} was not staged to {place.target}"
    with _as_archive_error(failed, "Choose another DEST"), claimed(place, wait_s=wait_s):
        record = _make(place, mirror, origin, since_s, force=force, remove_at_exit=remove_at_exit)
        place.write(record)
        hold(place)
    mount = find_mount(place.target.parent)
    caveats = find_caveats(str(place.target.parent))
    if mirror.to_copy:
        for caveat in caveats:
            logger.warning("%s", caveat)
    return Staged(
        source=origin if is_url(origin) else Path(origin),
        path=place.target,
        files=record.files,
        total_bytes=record.total_bytes,
        copied_files=len(mirror.to_copy),
        copied_bytes=sum(stamp.size for stamp in mirror.to_copy.values()),
        removed=len(set(mirror.to_remove).difference(mirror.to_copy)),
        took_s=time.time() - since_s,
        in_memory=mount is not None and mount.in_memory,
        caveats=caveats,
    )


@contextmanager
def _as_archive_error(what: str, advice: str) -> Iterator[None]:
    """Turn any OSError into an ArchiveError."""
    try:
        yield
    except ArchiveError:
        raise
    except OSError as error:
        raise ArchiveError(f"{what}: {error.strerror or error}. {advice}.") from error


def _make(
    place: "StagePlace", mirror: Mirror, origin: str, since_s: float, *, force: bool, remove_at_exit: bool
) -> "StageRecord":
    """Copy the differences, unless another process made or checked the copy while this one waited."""
    found = place.read()
    owner = owner_of(place.target)
    if found is not None and found.source == origin and (found.checked_s or 0.0) >= since_s:
        return replace(found, remove_at_exit=found.remove_at_exit and remove_at_exit)
    check_owner(place.target)
    mirror.compare(force=force)
    _check_replaceable(place, origin, found, force=force)
    record = StageRecord(
        source=origin,
        remove_at_exit=remove_at_exit and (found.remove_at_exit if found else owner is None),
        copied_by=f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}",
        files=len(mirror.sizes),
        total_bytes=sum(mirror.sizes),
    )
    if mirror.to_copy or mirror.to_remove:
        mirror.check_room()
        place.write(record)  # marks the copy as incomplete, and ours
        mirror.apply()
    mirror.finish()
    return replace(record, checked_s=time.time())


def _check_replaceable(place: "StagePlace", origin: str, found: "StageRecord | None", *, force: bool) -> None:
    target = place.target
    if force:
        release(place)
        if is_used(place):
            raise ArchiveError(f"{target} is used by another process. Wait for that to end, or leave force out.")
    elif owner_of(target) is not None and (found is None or found.source != origin):
        what = f"a copy of {found.source}" if found else "not a staged copy"
        raise ArchiveError(f"{target} is {what}. Choose another DEST, or force=True (--force) to remove it.")
    if found is not None and found.checked_s is None:
        logger.info("Continuing the copy at %s, which was not completed by %s.", target, found.copied_by)


# --- removal ----------------------------------------------------------------------------------------------------------


def unstage(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> bool:
    """Remove the staged copy of ``source`` in ``dest``, complete or not.

    Args:
        source: the same argument as for :func:`stage`; it need not exist any more.
        dest: the same argument as for :func:`stage`.

    Returns:
        False if there is no such copy, else True.

    Raises:
        ArchiveError: if the target is not a copy of ``source``, cannot be removed, or is in use or being copied by
            another process.
    """
    origin, place = find_place(source, dest)
    with _as_archive_error(f"{place.target} cannot be removed", "Use a DEST of your own"):
        if not place.folder.exists():
            return False
        release(place)
        with claimed(place, wait_s=0):
            _remove(place, origin)
    return True


def _remove(place: "StagePlace", origin: str) -> None:
    """Remove a copy and its record. A kill midway leaves an incomplete copy."""
    target = place.target
    record = place.read()
    if record is None or record.source != origin:
        raise ArchiveError(f"{target} is not a staged copy of {origin}. Remove it yourself.")
    if is_same(target, origin):
        raise ArchiveError(f"{target} is now {origin} itself. Unmount it or remove the link.")
    if is_used(place):
        raise ArchiveError(f"{target} is used by another process. Remove it after that process has ended.")
    place.write(replace(record, remove_at_exit=True, checked_s=None))
    if owner_of(target) == os.geteuid():  # after a manual removal, another user's file may be in its place
        remove_all(str(target), list(reversed(scan_copy(str(target)))))
    place.record.unlink()


# --- the record and the locks of a copy -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """Record of a copy, stored beside it.

    It lists no files, because each copied file keeps its source's size and modification time.
    """

    source: str
    """Absolute path, or URL."""
    remove_at_exit: bool
    """True to remove the copy when the last process that uses it ends."""
    copied_by: str = "an earlier version"
    """Description of the process that copies or copied it, for people."""
    files: int = 0
    total_bytes: int = 0
    checked_s: float | None = None
    """Time of the last comparison with the source, in seconds since 1970; None while the copy is incomplete."""


class StagePlace:
    """Paths of one staged copy. All but the copy itself are in ``DEST/.NAME.staging``, which only its owner can access.

    Args:
        target: path of the copy.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target.parent / f".{target.name}.staging"
        self.lock = self.folder / "lock"
        self.users = self.folder / "users"
        self.record = self.folder / "complete.json"
        self.parts = self.folder / "parts"

    def read(self) -> StageRecord | None:
        """Read the record of a copy, also from an earlier version; None if it is missing, or another user's."""
        found = read_json(self.record)
        known = {field.name: found[field.name] for field in fields(StageRecord) if field.name in found}
        return StageRecord(**known) if "source" in known and "remove_at_exit" in known else None

    def write(self, record: StageRecord) -> None:
        """Replace the record atomically."""
        write_json(self.record, asdict(record))


def find_place(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> tuple[str, StagePlace]:
    """Return the absolute path, or the URL, of the source, and the place of its copy."""
    path = os.fspath(source)
    # Not resolved, so that the copy keeps the name that the user wrote. Records and names hold no secrets of a URL.
    origin = without_secrets(path.rstrip("/")) if is_url(path) else os.path.abspath(path)  # noqa: PTH100
    name = os.path.basename(origin.removesuffix("?...").rstrip("/"))  # noqa: PTH119
    return origin, StagePlace(Path(os.path.realpath(dest), name))


@contextmanager
def claimed(place: StagePlace, *, wait_s: float | None = None) -> Iterator[None]:
    """Wait until no other process copies to this place, and exclude other processes until the block ends.

    The kernel drops the lock when its process ends in any way. If there is no record after the block, everything but
    the copy itself is removed.

    Args:
        place: place of the copy; the folder beside it is made if missing.
        wait_s: time limit in seconds; None to wait until the other process has finished or ended.

    Raises:
        ArchiveError: if another process still copies after ``wait_s``, or the folder cannot be written.
    """
    lock = FileLock(place.lock, fallback_to_soft=False)  # a soft lock would outlive a killed process
    soon_s = _SAY_AFTER_S if wait_s is None else min(wait_s, _SAY_AFTER_S)
    held = _acquire(lock, place, soon_s)
    if not held and soon_s != wait_s:
        logger.warning("Waiting for the copy at %s, which is being made by %s.", place.target, _owner(place))
        held = _acquire(lock, place, -1 if wait_s is None else wait_s - soon_s)
    if not held:
        raise ArchiveError(
            f"{place.target} is being copied by {_owner(place)}, and is not complete after {wait_s:g} s. Wait longer, "
            "or stop that process: the files that it has copied are kept."
        )
    try:
        yield
    finally:
        if place.read() is None:
            shutil.rmtree(place.folder, ignore_errors=True)  # fails if a waiting process creates its lock there
        lock.release()


def _acquire(lock: BaseFileLock, place: StagePlace, timeout_s: float) -> bool:
    while True:
        _make_private(place.folder)
        try:
            lock.acquire(timeout=timeout_s)
            return True
        except Timeout:
            return False
        except FileNotFoundError:
            continue  # another process removed it with the copy: make it again
        except OSError as error:
            raise ArchiveError(f"{place.lock} cannot be locked: {error.strerror}. Choose another DEST.") from error


def _owner(place: StagePlace) -> str:
    record = place.read()
    return record.copied_by if record and record.checked_s is None else "another process"


def _make_private(folder: Path) -> None:
    try:
        make_private(folder)
    except OSError as error:
        todo = "Choose a shorter SRC name" if error.errno == errno.ENAMETOOLONG else "Use a folder of your own as DEST"
        raise ArchiveError(f"{folder} cannot be made: {error.strerror}. {todo}.") from error


_uses: dict[tuple[int, str], RefcountedFile] = {}
"""Open ``users`` file of each copy in use, by process id and path of the copy. Module state, because the user of a copy
is a process, not an object."""


def hold(place: StagePlace) -> None:
    """Use a copy until this process ends, so that no process removes it. Call while the place is claimed."""
    key = (os.getpid(), str(place.target))
    if key not in _uses:
        _uses[key] = open_refcounted(place.users)
        # A negative priority runs after multiprocessing has ended its daemonic children: workers may still be reading.
        Finalize(None, leave, args=(place,), exitpriority=-10)


def release(place: StagePlace) -> None:
    """Stop using a copy."""
    if use := _uses.pop((os.getpid(), str(place.target)), None):
        use.give_up()


def is_used(place: StagePlace) -> bool:
    """True if another process uses the copy. Call when this process has claimed the place and does not use the copy."""
    return not open_refcounted(place.users).give_up()


def leave(place: StagePlace) -> None:
    """Stop using a copy. Remove it if ``remove_at_exit`` is set and no other process uses it."""
    release(place)
    record = place.read()
    if record is not None and record.remove_at_exit:
        with suppress(OSError):  # another process uses or updates it
            unstage(record.source, place.target.parent)
