"""Staging: a folder or a file, copied to memory or a local disk once per node, kept up to date, and removed."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from lightning_feed.archive.remote import RemotePlace, is_url, place_of
from lightning_feed.archive.stage_copy import Mirror, check_owner, lies_in, overlap_error
from lightning_feed.archive.stage_path import (
    StagedPath,
    StagePlace,
    StageRecord,
    claimed,
    find_place,
    hold,
    is_used,
    now_s,
    release,
    start_record,
)
from lightning_feed.archive.stage_remote import RemoteMirror
from lightning_feed.archive.system import end_after, find_caveats, find_mount, owner_of
from lightning_feed.errors import ArchiveError, FeedError

logger = logging.getLogger(__name__)

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
    done = StageWork(source, dest, storage_options, hash, force, remove_at_exit, wait_s).run()
    for caveat in done.caveats if done.copied_files else ():
        logger.warning("%s", caveat)
    return done


@dataclass
class StageWork:
    """Makes a copy equal its source; the options are those of :func:`stage`.

    Attributes:
        origin: absolute path, or URL, of what is copied.
        mirror: makes the copy.
        place: where to. ``dest`` is made.

    Raises:
        ArchiveError: when one lies in the other, or when ``dest`` cannot be made.
    """

    source: str | os.PathLike[str]
    dest: str | os.PathLike[str]
    storage_options: Mapping[str, Any] | None = None
    hash: bool = False
    force: bool = False
    remove_at_exit: bool = False
    wait_s: float | None = None
    since_s: float = field(default_factory=now_s)
    """A copy that another process has seen to equal the source since then is taken."""

    def __post_init__(self) -> None:
        self.origin, self.place = find_place(self.source, self.dest)
        target = str(self.place.target)
        given = os.fspath(self.source)
        found = place_of(given if is_url(given) else self.origin, self.storage_options)
        if isinstance(found, RemotePlace):
            if found.url.startswith(("file:", "local:")):
                raise ArchiveError(f"{found} lies on this machine. Give its path in place of the URL.")
            if self.hash:
                raise ArchiveError(
                    f"{found} is a URL: to compare contents is to read all of it. Give force=True (--force)."
                )
            self.mirror: Mirror = RemoteMirror(found, target, self.place.parts)
        else:
            self.mirror = Mirror(self.origin, target, self.place.parts)
        # By identity, since the same folder has other paths where it is mounted twice. What lies deeper the scan finds.
        if _is_source(self.place, self.origin) or lies_in(target, os.path.realpath(self.origin)):
            raise overlap_error(os.fspath(self.source), target)
        try:
            self.place.target.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ArchiveError(f"{self.dest} cannot be made: {error.strerror}. Give another DEST.") from error

    def run(self) -> Staged:
        """Do it, or wait for the process that does.

        Raises:
            ArchiveError: as :func:`stage`.
        """
        place, mirror, began_s = self.place, self.mirror, now_s()
        try:
            with claimed(place, wait_s=self.wait_s):
                record = self._make()
                hold(place, at_exit=leave)
        except OSError as error:
            if isinstance(error, ArchiveError):
                raise
            raise ArchiveError(
                f"{self.origin} was not staged to {place.target}: {error}. Give another DEST."
            ) from error
        mount = find_mount(place.target.parent)
        return Staged(
            source=self.origin if is_url(self.origin) else Path(self.origin),
            path=place.target,
            files=record.files,
            total_bytes=record.total_bytes,
            copied_files=len(mirror.copied),
            copied_bytes=sum(mirror.copied.values()),
            removed=mirror.removed,
            took_s=now_s() - began_s,
            in_memory=mount is not None and mount.in_memory,
            caveats=find_caveats(str(place.target.parent)),
            checked_s=record.checked_s or 0.0,
        )

    def _make(self) -> StageRecord:
        """Bring the copy up to date, unless another process did, or saw that it was, while this one waited."""
        found = self.place.read()
        if found is not None and found.is_current(self.origin, self.since_s) and (found.hashed or not self.hash):
            if found.remove_at_exit and not self.remove_at_exit:  # one who does not ask for removal keeps it
                self.place.write(replace(found, remove_at_exit=False))
            return found
        may_go = found.remove_at_exit if found else owner_of(self.place.target) is None
        record = start_record(self.origin, remove_at_exit=self.remove_at_exit and may_go)
        self._bring_up_to_date(record, found)
        sizes = [stamp.size for stamp in self.mirror.source.files.values()]
        done = replace(record, files=len(sizes), total_bytes=sum(sizes), checked_s=now_s(), hashed=self.hash)
        self.place.write(done)
        return done

    def _bring_up_to_date(self, record: StageRecord, found: StageRecord | None) -> None:
        """Copy and look again, until the copy equals the source."""
        mirror = self.mirror
        check_owner(self.place.target)
        different = mirror.compare(contents=self.hash, afresh=self.force)
        self._check_what_is_there(found)
        for _ in range(_PASSES):
            if different:
                mirror.check_room()
                self.place.write(record)  # no longer complete, and ours
                mirror.apply()
                different = mirror.compare(contents=self.hash)
        if different:
            raise ArchiveError(
                f"{self.origin} still differs from its copy after it was copied {_PASSES} times, in {len(different)} "
                f"files, such as {different[0]}. Stage it when nothing writes there; or a disk or memory is faulty."
            )
        mirror.finish()

    def _check_what_is_there(self, found: StageRecord | None) -> None:
        target = self.place.target
        if self.force:
            release(self.place)
            if is_used(self.place):
                raise ArchiveError(f"{target} is used by another process. Wait for that to end, or leave force out.")
        elif owner_of(target) is not None and (found is None or found.source != self.origin):
            what = f"a copy of {found.source}" if found else "no staged copy"
            raise ArchiveError(f"{target} is {what}. Give another DEST, or force=True (--force) to remove it.")
        if found is not None and found.checked_s is None:
            logger.info("Going on with the copy at %s, which was not completed by %s.", target, found.copied_by)


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
    origin, place = find_place(source, dest)
    try:
        if not place.folder.exists():
            return False
        release(place)
        with claimed(place, wait_s=0):
            _remove(place, origin)
    except OSError as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"{place.target} cannot be removed: {error.strerror}. Give a DEST of your own.") from error
    return True


def _remove(place: StagePlace, origin: str) -> None:
    """Remove a copy and what was written beside it. Killed in the middle, it leaves a copy that is not complete."""
    target, record = place.target, place.read()
    if record is None or record.source != origin:
        raise ArchiveError(f"{target} is not a staged copy of {origin}. Remove it yourself.")
    if _is_source(place, origin):
        raise ArchiveError(f"{target} is {origin} itself by now, by a mount or a link. Unmount it or remove the link.")
    if is_used(place):
        raise ArchiveError(f"{target} is used by another process. Remove it when that has ended.")
    place.write(start_record(origin, remove_at_exit=True))
    if owner_of(target) == os.geteuid():  # removed by hand, it may have made room for another user's
        Mirror(origin, str(target), place.parts).remove()
    place.record.unlink()


def _is_source(place: StagePlace, source: str) -> bool:
    """Whether the place of a copy is its source, or holds it."""
    return not is_url(source) and any(lies_in(path, str(place.target)) for path in (source, os.path.realpath(source)))


def leave(place: StagePlace) -> None:
    """Use a copy no longer, and remove it if it may go and nobody else uses it."""
    release(place)
    record = place.read()
    if record is not None and record.remove_at_exit:
        with suppress(OSError):  # somebody uses it, or brings it up to date
            unstage(record.source, place.target.parent)


# --- in the background ------------------------------------------------------------------------------------------------

# What this package needs is imported from where it was found here, and never from the working folder ("").
_CHILD = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request.pop('sys_path'); "
    "from lightning_feed.archive.staging import copy_in_child; copy_in_child(**request)"
)


class BackgroundStage:
    """A copy that is being made while training reads from the source. Made by :func:`stage_in_background`.

    A process of its own copies, not a thread: for many small files a copying thread takes the interpreter's lock from
    the training loop. It is a fresh interpreter, since forking a process that has threads is unsafe; it has low
    priority and ends with its parent. Killing it at any time leaves whole files only.

    Attributes:
        path: leads to the source until the copy is complete.
        error: why there is no copy; None while it is being made and when it is complete.
    """

    def __init__(self, work: StageWork) -> None:
        self.path = StagedPath(work.origin, work.place.target, since_s=work.since_s)
        self.error: ArchiveError | None = None
        self._work, self._stopped = work, False
        request = {
            "sys_path": [*filter(None, sys.path), str(Path(__file__).parents[2])],
            "parent": os.getpid(),
            "source": work.origin,
            "dest": str(work.place.target.parent),
            "hash": work.hash,
            "remove_at_exit": work.remove_at_exit,
        }
        # A session of its own: Ctrl-C goes to the training, which stops the copy when it ends.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="backslashreplace",
        )
        # Below zero: after multiprocessing has ended its daemonic children, the workers that still read.
        Finalize(self, BackgroundStage._at_exit, args=(self,), exitpriority=-9)
        self._thread = threading.Thread(target=self._watch, name="lightning-feed-stage", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end.

        Args:
            timeout_s: None waits as long as it takes.

        Returns:
            True when the copy is complete; False when it failed (see :attr:`error`), was stopped, or goes on.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.error is None and not self._stopped

    def stop(self) -> None:
        """End the copying now, and wait for that. What is copied is kept, for the next time."""
        self._stopped = True
        self._child.kill()
        self._thread.join()

    def _watch(self) -> None:
        told, errors = self._child.communicate()
        if self._stopped:
            return
        try:
            if code := self._child.returncode:
                last = (errors.strip() or "no output").splitlines()[-1]
                raise ArchiveError(told.strip() or f"the process that copies ended with code {code}: {last}")
            done = self._work.run()  # which finds the copy, and uses it
            for caveat in done.caveats:
                logger.warning("%s", caveat)
        except ArchiveError as error:
            self.error = error
            logger.warning("Training goes on from %s, which was not staged: %s", self._work.origin, error)

    def _at_exit(self) -> None:
        self.stop()
        leave(self._work.place)


def stage_in_background(
    source: str | os.PathLike[str], dest: str | os.PathLike[str], *, hash: bool = False, remove_at_exit: bool = False
) -> BackgroundStage:
    """Begin to copy, as :func:`~lightning_feed.archive.staging.stage` does, and return at once.

    A copy that fails is said once, as a warning; training goes on from the source. When this process ends first, the
    copying stops, and is completed next time.

    Raises:
        ArchiveError: when one of the two lies in the other, or ``dest`` cannot be made.

    Example:
        >>> copy = stage_in_background("/data/birds", "/dev/shm/me")  # doctest: +SKIP
        >>> copy.path.current()  # doctest: +SKIP
        PosixPath('/data/birds')
    """
    origin, _ = find_place(source, dest)
    if is_url(origin):
        raise ArchiveError(
            f"{origin} is a URL, which training cannot read from as from a folder until the copy is there. Call stage, "
            "which waits, or give a data module stage_limit, with which it begins at once."
        )
    return BackgroundStage(StageWork(source, dest, hash=hash, remove_at_exit=remove_at_exit))


def copy_in_child(*, parent: int, **request: Any) -> None:
    """Copy in the process made for it, and print why there is no copy."""
    end_after(lambda: _wait_for_end_of(parent))
    os.nice(10)
    code = 0
    try:
        stage(**request)
    except FeedError as error:
        sys.stdout.write(str(error))
        code = 1
    sys.stdout.flush()
    os._exit(code)  # a copy that is to go with its last user stays: the parent uses it now


def _wait_for_end_of(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
