"""Staging: a folder or a file, copied to memory or a local disk once per node and kept up to date."""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_feed.archive.remote import RemotePlace, is_url, place_of
from lightning_feed.archive.stage_copy import (
    CopyPlan,
    FileWork,
    Tree,
    below,
    identities_above,
    identity_of,
    overlap_error,
    plan_copy,
    remove_entries,
    scan_copy,
    scan_source,
)
from lightning_feed.archive.stage_path import (
    StagedPath,
    StagePlace,
    StageRecord,
    claimed,
    hold,
    is_used,
    now_s,
    owner_of,
    release,
    shown,
    start_record,
)
from lightning_feed.archive.stage_remote import fetch_file, scan_remote
from lightning_feed.archive.stage_room import check_room, find_caveats, find_mount
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

_SAY_AFTER_S = 1.0
"""A wait that is over sooner, for a process that finds the copy up to date, is not worth a line."""
_PASSES = 3
"""How often a source that changes while it is copied is copied again."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A complete copy, and what it took."""

    source: Path | str
    """As it was given: a path made absolute, or a URL."""
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
        source = self.source if isinstance(self.source, Path) else self.path
        return StagedPath(source, self.path, since_s=self.checked_s)


def stage(  # noqa: PLR0913 - all but two are by name, and have a default
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    hash: bool = False,
    force: bool = False,
    remove_at_exit: bool = False,
    wait_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Staged:
    """Copy ``source`` to ``dest/<name of source>``, or bring the copy there up to date.

    Every process of a node may call it: one copies, the others wait and get the same copy. Each file is whole or not
    there; a copy that was broken off is completed file by file. Files are compared by size and time of change. Until
    this process ends, nobody removes the copy.

    Args:
        source: a folder or a file. Symbolic links in it are followed. Or the URL of one, for fsspec.
        dest: a folder in memory or on a local disk, for example ``/dev/shm/<user>``; made when only it is missing.
            Only this user can open the copy.
        hash: also compare the contents of all files, byte by byte, and copy those again that differ.
        force: remove what lies there, whatever it is, and copy everything.
        remove_at_exit: remove the copy when the last process that uses it ends, unless it was there before. A process
            that is killed removes nothing.
        wait_s: how long to wait for another process that copies. None waits as long as it takes.
        storage_options: for a URL, those of fsspec.

    Raises:
        ArchiveError: when there is no room (before a byte is written), when one of the two lies in the other, when a
            file cannot be read or written, when ``source`` does not stop to change, or when the wait is over.

    Example:
        >>> staged = stage("/data/birds", "/dev/shm/me")  # doctest: +SKIP
        >>> staged.path  # doctest: +SKIP
        PosixPath('/dev/shm/me/birds')
    """
    place, origin = find_place(source, dest)
    found = place_of(origin, storage_options)
    remote = found if isinstance(found, RemotePlace) else None
    if remote is not None and hash:
        raise ArchiveError(f"{remote} is a URL: to compare contents is to read all of it. Give force=True (--force).")
    work = StageWork(
        place=place, origin=origin, remote=remote, hash=hash, force=force, remove_at_exit=remove_at_exit, wait_s=wait_s
    )
    done = work.run()
    for caveat in done.caveats if done.copied_files else ():
        logger.warning("%s", caveat)
    return done


def find_place(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> tuple[StagePlace, str]:
    """Where the copy goes, and the absolute path of what is copied; ``dest`` is made.

    Raises:
        ArchiveError: when one lies in the other, or when ``dest`` cannot be made.
    """
    origin = _origin_of(source)
    target = Path(os.path.realpath(dest), os.path.basename(origin))  # noqa: PTH119
    if not is_url(origin):
        real = os.path.realpath(origin)
        # By identity, since the same folder has other paths where it is mounted twice. What lies deeper the scan finds.
        above_source = identities_above(real) | identities_above(origin)
        if identity_of(real) in identities_above(str(target)) or identity_of(str(target)) in above_source:
            raise overlap_error(os.fspath(source), str(target))
    try:
        target.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ArchiveError(
            f"{shown(target.parent)} cannot be made: {error.strerror}. Give a folder, or a new one in a folder that "
            "exists."
        ) from error
    return StagePlace(target), origin


def _origin_of(source: str | os.PathLike[str]) -> str:
    """The URL, or the absolute path: not resolved, for the copy has the name that was given."""
    path = os.fspath(source)
    return path.rstrip("/") if is_url(path) else os.path.abspath(path)  # noqa: PTH100


@dataclass(kw_only=True)
class StageWork:
    """Makes a copy equal its source; the options are those of :func:`stage`."""

    place: StagePlace
    origin: str
    """Absolute path, or URL, of what is copied."""
    remote: RemotePlace | None = None
    """What a URL leads to."""
    hash: bool = False
    force: bool = False
    remove_at_exit: bool = False
    wait_s: float | None = None
    in_background: bool = False
    """This process does not use the copy."""
    copied_files: int = 0
    copied_bytes: int = 0
    removed: int = 0

    def run(self) -> Staged:
        """Do it, or wait for the process that does.

        Raises:
            ArchiveError: as :func:`stage`.
        """
        began_s = now_s()
        try:
            with claimed(self.place, wait_s=self.wait_s):
                record = self._make(began_s)
                if not self.in_background:
                    hold(self.place, at_exit=leave)
        except ArchiveError:
            raise
        except OSError as error:
            raise ArchiveError(
                f"{shown(self.origin)} could not be staged to {shown(self.place.target)}: {error}. Give a DEST that "
                "you may write to, with room for it."
            ) from error
        return self._staged(record, took_s=now_s() - began_s)

    def _make(self, began_s: float) -> StageRecord:
        """Bring the copy up to date, unless another process did, or saw that it was, while this one waited."""
        record = self.place.read()
        fresh = record is not None and record.is_current(self.origin) and (record.checked_s or 0.0) >= began_s
        if record is None or not fresh or (self.hash and not record.hashed):
            return self._bring_up_to_date(record)
        if record.remove_at_exit and not self.remove_at_exit:  # one who does not ask for removal keeps it
            self.place.write(replace(record, remove_at_exit=False))
        return record

    def _staged(self, record: StageRecord, *, took_s: float) -> Staged:
        folder = str(self.place.target.parent)
        mount = find_mount(folder)
        return Staged(
            source=Path(self.origin) if self.remote is None else str(self.remote),
            path=self.place.target,
            files=record.files,
            total_bytes=record.total_bytes,
            copied_files=self.copied_files,
            copied_bytes=self.copied_bytes,
            removed=self.removed,
            took_s=took_s,
            in_memory=mount is not None and mount.in_memory,
            caveats=find_caveats(folder),
            checked_s=record.checked_s or 0.0,
        )

    def _bring_up_to_date(self, found: StageRecord | None) -> StageRecord:
        """Copy and look again, until the copy equals the source, then say that it is complete."""
        may_go = found.remove_at_exit if found else owner_of(self.place.target) is None
        record = start_record(self.origin, remove_at_exit=self.remove_at_exit and may_go)
        self._check_owner()
        tree, plan = self._look(afresh=self.force)
        self._check_what_is_there(found)
        for _ in range(_PASSES):
            if not plan.to_copy and not plan.to_remove:
                break
            self._apply(tree, plan, record)
            tree, plan = self._look()
        if different := plan.to_copy or plan.to_remove:
            raise ArchiveError(
                f"{shown(self.origin)} still differs from its copy after it was copied {_PASSES} times, in "
                f"{len(different)} files, for example {shown(different[0])}: it changes, or a disk or memory is "
                "faulty. Stage it when nothing writes to it any more; what is copied is kept."
            )
        return self._finish(tree, record)

    def _look(self, *, afresh: bool = False) -> tuple[Tree, CopyPlan]:
        tree = scan_source(self.origin) if self.remote is None else scan_remote(self.remote)
        target = str(self.place.target)
        if not tree.files:
            raise ArchiveError(f"There are no files in {shown(self.origin)}. Give the folder that has them.")
        plan = plan_copy(tree, scan_copy(target, tree), afresh=afresh)
        if self.hash and not plan.to_copy and not plan.to_remove:
            with self._file_work(tree, "Comparing", tree.files) as work:
                plan = CopyPlan(work.compare(), [])
            if plan.to_copy:
                say = "%d files in %s differ from their source in the same size and time, and are copied again."
                logger.warning(say, len(plan.to_copy), shown(target))
        return tree, plan

    def _check_owner(self) -> None:
        if owner_of(self.place.target) not in (None, os.geteuid()):
            raise ArchiveError(
                f"{shown(self.place.target)} belongs to another user. Give a folder of your own as DEST, for example "
                "/dev/shm/<user>."
            )

    def _check_what_is_there(self, found: StageRecord | None) -> None:
        target = shown(self.place.target)
        if self.force:
            release(self.place)
            if is_used(self.place):
                raise ArchiveError(
                    f"{target} is used by another process, and force=True would remove it first. Wait for that to end, "
                    "or leave force out: files are replaced one by one then."
                )
        elif owner_of(self.place.target) is not None and (found is None or found.source != self.origin):
            what = f"a copy of {shown(found.source)}" if found else "no staged copy"
            raise ArchiveError(
                f"{target} is there already, and is {what}. Give another DEST, or force=True (--force) to remove it."
            )
        if found is not None and found.checked_s is None:
            logger.info("Going on with the copy at %s, which was not completed by %s.", target, found.copied_by)

    def _apply(self, tree: Tree, plan: CopyPlan, record: StageRecord) -> None:
        target, parts = str(self.place.target), self.place.parts
        shutil.rmtree(parts, ignore_errors=True)  # of a process that was killed
        check_room(plan.new_bytes, plan.new_files, str(self.place.target.parent))
        self.place.write(record)  # no longer complete, and ours
        remove_entries(target, plan.to_remove)
        self.removed += len(plan.to_remove)
        parts.mkdir(mode=0o700)
        for name, (mode, _) in tree.folders.items():
            try:
                os.mkdir(below(target, name), mode | 0o700 if name else 0o700)  # noqa: PTH102
            except FileExistsError:
                if not name:
                    self._check_owner()  # another user may have been first
        with self._file_work(tree, "Staging", plan.to_copy) as work:
            copied = work.copy(plan.to_copy)
        self.copied_files += len(copied)
        self.copied_bytes += sum(tree.files[name].size for name in copied)

    def _finish(self, tree: Tree, record: StageRecord) -> StageRecord:
        target = str(self.place.target)
        mode = os.stat(target).st_mode  # noqa: PTH116
        if mode & 0o077:  # made by a version that did not keep it from other users
            os.chmod(target, mode & 0o700)  # noqa: PTH101
        # Folders get the time of their source after all that is in them, so that an index of the source fits the copy.
        for name, (_, mtime_ns) in reversed(tree.folders.items()):
            folder = below(target, name)
            if os.stat(folder).st_mtime_ns != mtime_ns:  # noqa: PTH116 - or their ctime would change each time
                os.utime(folder, ns=(mtime_ns, mtime_ns))
        shutil.rmtree(self.place.parts, ignore_errors=True)
        done = replace(
            record,
            files=len(tree.files),
            total_bytes=sum(stamp.size for stamp in tree.files.values()),
            checked_s=now_s(),
            hashed=self.hash,
        )
        self.place.write(done)
        return done

    @contextmanager
    def _file_work(self, tree: Tree, what: str, names: Iterable[str]) -> Iterator[FileWork]:
        from tqdm import tqdm

        fetch = None if self.remote is None else partial(fetch_file, self.remote)
        total, text = sum(tree.files[name].size for name in names), f"{what} {shown(self.place.target.name)}"
        # disable=None: no bar where stderr is not a terminal.
        with tqdm(total=total, desc=text, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
            yield FileWork(tree, str(self.place.target), self.place.parts, bar.update, fetch)


# --- removal ----------------------------------------------------------------------------------------------------------


def unstage(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> bool:
    """Remove the staged copy of ``source`` in ``dest``, complete or not.

    Args:
        source: as it was given to :func:`stage`; it need not exist any more.
        dest: as above.

    Returns:
        False when there is none.

    Raises:
        ArchiveError: when what lies there is no copy of ``source``, when it cannot be removed, or when a process uses
            it or copies.
    """
    origin = _origin_of(source)
    place = StagePlace(Path(os.path.realpath(dest), os.path.basename(origin)))  # noqa: PTH119
    try:
        return _unstage(place, origin)
    except ArchiveError:
        raise
    except OSError as error:
        raise ArchiveError(
            f"{shown(place.target)} cannot be removed: {error.strerror}. Give the DEST that it was staged to, as the "
            "user who staged it."
        ) from error


def _unstage(place: StagePlace, origin: str) -> bool:
    try:
        place.folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    release(place)
    with claimed(place, wait_s=0):
        _refuse_removal(place, origin)
        remove_copy(place, origin)
    return True


def _refuse_removal(place: StagePlace, origin: str) -> None:
    target, source, record = shown(place.target), shown(origin), place.read()
    if record is None or record.source != origin:
        raise ArchiveError(f"{target} is not a staged copy of {source}. Remove it yourself.")
    if _is_source(place, origin):
        raise ArchiveError(
            f"{target} is {source} itself by now, by another mount or a link, so nothing was removed. Unmount it or "
            "remove the link."
        )
    if is_used(place):
        raise ArchiveError(f"{target} is used by another process. Remove it when that has ended.")


def _is_source(place: StagePlace, source: str) -> bool:
    if is_url(source):
        return False
    return identity_of(str(place.target)) in identities_above(os.path.realpath(source)) | identities_above(source)


def remove_copy(place: StagePlace, source: str) -> None:
    """Remove a copy and what was written beside it. Killed in the middle, it leaves a copy that is not complete."""
    place.write(start_record(source, remove_at_exit=True))
    if owner_of(place.target) == os.geteuid():  # removed by hand, it may have made room for another user's
        copy = scan_copy(str(place.target), source=Tree(source))
        remove_entries(copy.root, [*copy.files, *reversed(copy.folders)])
    place.record.unlink()


def leave(place: StagePlace) -> bool:
    """Use a copy no longer, and remove it if it may go and nobody else uses it. Tells whether it was removed."""
    release(place)
    if place.read() is None:
        return False
    try:
        with claimed(place, wait_s=0):
            record = place.read()
            may_go = record is not None and record.remove_at_exit and not is_used(place)
            if record is None or not may_go or _is_source(place, record.source):
                return False
            remove_copy(place, record.source)
            return True
    except ArchiveError:
        return False  # somebody brings it up to date
