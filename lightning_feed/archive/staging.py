"""Stages: copies a folder or a file to memory or a local disk, once per node, and brings the copy up to date."""

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lightning_feed.archive.stage_lock import claim
from lightning_feed.archive.stage_path import StagedPath
from lightning_feed.archive.stage_record import Complete, StagePlace, now_s, read_boot_id
from lightning_feed.archive.stage_room import find_caveats, find_mount
from lightning_feed.archive.stage_tree import identities_above, identity_of, overlap_error, shown
from lightning_feed.archive.stage_users import hold
from lightning_feed.archive.stage_work import StageOptions, StageWork
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A complete copy, and what it took."""

    source: Path
    path: Path
    """The copy: a folder or a file, as the source is."""
    files: int
    """Files in the copy."""
    total_bytes: int
    """Bytes in the copy."""
    copied_files: int
    """Files that this call copied. 0: the copy was up to date, or another process made it while this one waited."""
    copied_bytes: int
    removed: int
    """Files and folders that the source no longer has."""
    took_s: float
    in_memory: bool
    """The copy lies in memory: a tmpfs or a RAM disk."""
    caveats: tuple[str, ...]
    """What to know of a copy there, one sentence each."""
    checked_s: float
    """When the copy was seen to equal the source, on the clock of this run of the machine."""

    def staged_path(self) -> StagedPath:
        """The copy as a path for data modules, which leads to the copy at once."""
        return StagedPath(self.source, self.path, since_s=self.checked_s)


def stage(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    hash: bool = False,
    force: bool = False,
    remove_at_exit: bool = False,
    wait_s: float | None = None,
) -> Staged:
    """Copy ``source`` to ``dest/<name of source>``, or bring the copy there up to date.

    Every process of a node may call it: one copies, the others wait and get the same copy. Each file is whole or not
    there; a copy that was broken off is gone on with. Files are compared by size and time of change. Until this process
    ends, nobody removes the copy.

    Args:
        source: a folder or a file. Symbolic links in it are followed.
        dest: a folder in memory or on a local disk, for example ``/dev/shm/<user>``; made when only it is missing.
            Only this user can open the copy.
        hash: also compare the contents of all files, byte by byte, and copy those again that differ.
        force: remove what lies there, whatever it is, and copy everything.
        remove_at_exit: remove the copy when the last process that uses it ends, unless it was there before. A process
            that is killed removes nothing.
        wait_s: how long to wait for another process that copies. None waits as long as it takes.

    Raises:
        ArchiveError: when there is no room (before a byte is written), when one of the two lies in the other, when a
            file cannot be read or written, when ``source`` does not stop to change, or when the wait is over.

    Example:
        >>> staged = stage("/data/birds", "/dev/shm/me")  # doctest: +SKIP
        >>> staged.path  # doctest: +SKIP
        PosixPath('/dev/shm/me/birds')
    """
    place, origin = find_place(source, dest)
    options = StageOptions(hash=hash, force=force, remove_at_exit=remove_at_exit, wait_s=wait_s)
    done = bring_up_to_date(place, origin, options)
    for caveat in done.caveats if done.copied_files else ():
        logger.warning("%s", caveat)
    return done


def find_place(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> tuple[StagePlace, str]:
    """Where the copy goes, and the absolute path of what is copied; ``dest`` is made.

    Raises:
        ArchiveError: when one lies in the other, or when ``dest`` cannot be made.
    """
    origin = os.path.abspath(source)  # noqa: PTH100 - not resolved: the copy has the name that was given
    name = os.path.basename(origin)  # noqa: PTH119
    real = os.path.realpath(origin)
    target = os.path.join(os.path.realpath(dest), name)  # noqa: PTH118
    # By identity, since the same folder has other paths where it is mounted twice. What lies deeper the scan finds.
    above_source = identities_above(real) | identities_above(origin)
    if identity_of(real) in identities_above(target) or identity_of(target) in above_source:
        raise overlap_error(source, target)
    folder = Path(target).parent
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ArchiveError(
            f"{shown(folder)} cannot be made: {error.strerror}. Give a folder, or a new one in a folder that exists."
        ) from error
    return StagePlace(target), origin


def bring_up_to_date(
    place: StagePlace, origin: str, options: StageOptions, *, use: bool = True, show: bool = True
) -> Staged:
    """What :func:`stage` does, for a place that was found.

    Args:
        place: where the copy goes.
        origin: absolute path of what is copied.
        options: those of :func:`stage`.
        use: this process uses the copy until it ends.
        show: draw progress bars, where stderr is a terminal.

    Raises:
        ArchiveError: as :func:`stage`.
    """
    began_s = now_s()
    lock = claim(place, wait_s=options.wait_s)
    try:
        work = StageWork(place, origin, options, show=show)
        found = place.read_complete()
        if found is None or not _made_since(found, origin, began_s, hash=options.hash):
            found = work.run()
        if use:
            hold(place, origin, remove_at_exit=options.remove_at_exit)
    except ArchiveError:
        raise
    except OSError as error:
        raise ArchiveError(f"{shown(origin)} could not be staged to {shown(place.target)}: {error}") from error
    finally:
        if place.read_complete() is None and place.read_copying() is None:
            shutil.rmtree(place.folder, ignore_errors=True)  # refused before a byte was written
        lock.release()
    mount = find_mount(str(place.target.parent))
    return Staged(
        source=Path(origin),
        path=place.target,
        files=found.files,
        total_bytes=found.total_bytes,
        copied_files=work.copied_files,
        copied_bytes=work.copied_bytes,
        removed=work.removed,
        took_s=now_s() - began_s,
        in_memory=mount is not None and mount.in_memory,
        caveats=find_caveats(str(place.target.parent)),
        checked_s=found.checked_s,
    )


def _made_since(found: Complete, origin: str, began_s: float, *, hash: bool) -> bool:
    """Whether another process made the copy, or looked at it, while this one waited."""
    current = found.boot_id == read_boot_id() and found.checked_s >= began_s
    return current and found.source == origin and (found.hashed or not hash)
