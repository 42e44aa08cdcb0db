"""Who uses a copy, and its removal by the last of them."""

import os
import shutil
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

from lightning_feed.archive.stage_lock import FileLock, claim
from lightning_feed.archive.stage_plan import remove_entries
from lightning_feed.archive.stage_record import StagePlace, copying_now, is_ours
from lightning_feed.archive.stage_tree import identities_above, identity_of, shown
from lightning_feed.errors import ArchiveError


@dataclass
class _Use:
    place: StagePlace
    lock: FileLock
    source: str
    remove: bool
    pid: int


_uses: dict[str, _Use] = {}
"""By path of the copy: what this process uses until it ends. Module state, because it is the process that uses them."""


def hold(place: StagePlace, source: str, *, remove_at_exit: bool) -> None:
    """Use a copy until this process ends, so that nobody removes it before. Called while the place is claimed.

    Args:
        place: the copy.
        source: what it is a copy of.
        remove_at_exit: remove it at the end, when nobody else uses it and the record beside it says that it may go.
    """
    use = _uses.get(str(place.target))
    if use is not None and use.pid == os.getpid():
        use.remove = remove_at_exit
        return
    lock = FileLock(place.users, shared=True)
    if not lock.try_acquire():
        raise ArchiveError(f"{shown(place.target)} is being removed by another process. Stage it again.")
    use = _Use(place, lock, source, remove_at_exit, os.getpid())
    _uses[str(place.target)] = use
    # Below zero: after multiprocessing has ended its daemonic children, the workers that still read.
    Finalize(None, _leave, args=(use,), exitpriority=-10)


def release(place: StagePlace) -> None:
    """Use a copy no longer."""
    use = _uses.get(str(place.target))
    if use is not None and use.pid == os.getpid():
        use.lock.release()
        del _uses[str(place.target)]


def is_used(place: StagePlace) -> bool:
    """Whether another process uses the copy. Called while the place is claimed, and not used by this process."""
    lock = FileLock(place.users)
    if not lock.try_acquire():
        return True
    lock.release()
    return False


def unstage(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> bool:
    """Remove the staged copy of ``source`` in ``dest``, complete or not.

    Args:
        source: as it was given to :func:`~lightning_feed.archive.staging.stage`; it need not exist any more.
        dest: as above.

    Returns:
        False when there is none.

    Raises:
        ArchiveError: when what lies there is no copy of ``source``, when it cannot be removed, or when a process uses
            it or copies.
    """
    origin = Path(os.path.abspath(source))  # noqa: PTH100 - not resolved: the copy has the name that was given
    place = StagePlace(Path(os.path.realpath(dest)) / origin.name)
    try:
        return _unstage(place, origin)
    except ArchiveError:
        raise
    except OSError as error:
        raise ArchiveError(
            f"{shown(place.target)} cannot be removed: {error.strerror}. Give the DEST that it was staged to, as the "
            "user who staged it."
        ) from error


def _unstage(place: StagePlace, origin: Path) -> bool:
    if not place.folder.is_dir():
        return False
    release(place)
    lock = claim(place, wait_s=0)
    try:
        if not is_copy_of(place, str(origin)):
            raise ArchiveError(f"{shown(place.target)} is not a staged copy of {shown(origin)}. Remove it yourself.")
        if _is_source(place, str(origin)):
            raise ArchiveError(
                f"{shown(place.target)} is {shown(origin)} itself by now, by another mount or a link, so nothing was "
                "removed. Unmount it or remove the link."
            )
        if is_used(place):
            raise ArchiveError(f"{shown(place.target)} is used by another process. Remove it when that has ended.")
        remove_copy(place, str(origin))
    finally:
        lock.release()
    return True


def is_copy_of(place: StagePlace, source: str) -> bool:
    """Whether what lies there is a copy of ``source`` that we made, complete or broken off."""
    records = (place.read_complete(), place.read_copying())
    return any(record is not None and record.source == source for record in records)


def _is_source(place: StagePlace, source: str) -> bool:
    return identity_of(str(place.target)) in identities_above(os.path.realpath(source)) | identities_above(source)


def remove_copy(place: StagePlace, source: str) -> None:
    """Remove a copy and what was written beside it. Killed in the middle, it leaves a copy that was broken off."""
    place.write_copying(copying_now(source, remove_at_exit=True))
    place.complete.unlink(missing_ok=True)
    if is_ours(place.target):  # removed by hand, it may have made room for another user's
        remove_entries(str(place.target), [""])
    shutil.rmtree(place.folder)


def remove_if_last(place: StagePlace, source: str) -> bool:
    """Remove a copy that may go and that no process uses; False when it stays."""
    lock = FileLock(place.lock)
    if not place.folder.is_dir() or not lock.try_acquire():
        return False  # gone already, or somebody brings it up to date
    try:
        record = place.read_complete() or place.read_copying()
        if record is None or record.source != source or not record.remove_at_exit or is_used(place):
            return False
        if _is_source(place, source):
            return False
        remove_copy(place, source)
        return True
    finally:
        lock.release()


def _leave(use: _Use) -> None:
    # A forked child never removes what its parent uses; and what was released is used no longer.
    if use.pid == os.getpid() and _uses.get(str(use.place.target)) is use:
        release(use.place)
        if use.remove:
            remove_if_last(use.place, use.source)
