"""What stands beside a staged copy, its record and its locks, and a path that leads to it once it is complete."""

import errno
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.util import Finalize
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_feed.archive.remote import is_url, without_secrets
from lightning_feed.archive.system import (
    RefcountedFile,
    open_refcounted,
    owner_of,
    read_private,
    read_text,
    write_private,
)
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

_VERSION = 1
_SAY_AFTER_S = 1.0
"""A wait that is over sooner, for a process that finds the copy up to date, is not worth a line."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What is known of a copy, kept beside it. No list of files: each has the size and time of its source."""

    source: str
    """Absolute path."""
    boot_id: str
    """Of the machine's present run; ``checked_s`` means nothing in another."""
    remove_at_exit: bool
    """The copy goes with the last process that uses it."""
    copied_by: str = "an earlier version"
    """Who copies or copied it, for people."""
    files: int = 0
    total_bytes: int = 0
    checked_s: float | None = None
    """When the copy was seen to equal the source, on the clock of :func:`now_s`; None while it is being made."""
    hashed: bool = False
    """Contents were compared then, not only sizes and times."""
    version: int = _VERSION

    def is_current(self, source: str, since_s: float = 0.0) -> bool:
        """Whether the copy is complete, of that source, and was seen to equal it since then, in this run."""
        ours = self.source == source and self.boot_id == _boot_id()
        return ours and self.checked_s is not None and self.checked_s >= since_s


def start_record(source: str, *, remove_at_exit: bool) -> StageRecord:
    """The record of a copy that this process begins to make now."""
    who = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    return StageRecord(source=source, boot_id=_boot_id(), remove_at_exit=remove_at_exit, copied_by=who)


class StagePlace:
    """The paths of one staged copy. All but the copy itself lies in ``DEST/.NAME.staging``, which is its owner's alone.

    Args:
        target: where the copy is, or will be.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = Path(target)
        self.folder = self.target.parent / f".{self.target.name}.staging"
        self.lock = self.folder / "lock"
        self.users = self.folder / "users"
        self.record = self.folder / "complete.json"
        self.parts = self.folder / "parts"

    def read(self) -> StageRecord | None:
        """The record of a copy; None when there is none, or another user's, or another version's."""
        try:
            found = StageRecord(**json.loads(read_private(self.record)))
        except (OSError, ValueError, TypeError):
            return None
        return found if found.version == _VERSION else None

    def write(self, record: StageRecord) -> None:
        """Replace the record atomically."""
        write_private(self.record, json.dumps(asdict(record)).encode())


def find_place(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> tuple[str, StagePlace]:
    """The absolute path, or the URL, of what is copied, and where the copy goes."""
    path = os.fspath(source)
    # Not resolved: the copy has the name that was given. Of a URL, what stands in records and names has no secrets.
    origin = without_secrets(path.rstrip("/")) if is_url(path) else os.path.abspath(path)  # noqa: PTH100
    name = os.path.basename(origin.removesuffix("?...").rstrip("/"))  # noqa: PTH119
    return origin, StagePlace(Path(os.path.realpath(dest), name))


def now_s() -> float:
    """Seconds since the machine started: one clock for all of its processes."""
    return time.monotonic()


def _boot_id() -> str:
    """What tells this run of the machine from the one before the last reboot; "" where the kernel does not say."""
    return read_text(Path("/proc/sys/kernel/random/boot_id"))


# --- one process copies, the others wait ------------------------------------------------------------------------------


@contextmanager
def claimed(place: StagePlace, *, wait_s: float | None = None) -> Iterator[None]:
    """Wait until no other process copies to this place, and keep them all out meanwhile.

    The kernel drops the lock when its process ends, however it ends. A place without a record after the block is
    removed, but for the copy itself.

    Args:
        place: where the copy goes; the folder beside it is made when it is not there.
        wait_s: how long to wait, in seconds. None waits for as long as the other process lives.

    Raises:
        ArchiveError: when another process still copies after ``wait_s``, or when the folder cannot be written.
    """
    lock = FileLock(place.lock, fallback_to_soft=False)  # a soft lock would outlive a process that is killed
    said, ends_s = False, float("inf") if wait_s is None else now_s() + wait_s
    while not lock.is_locked:
        _make_private(place.folder)
        left_s = max(0.0, ends_s - now_s())
        try:
            lock.acquire(timeout=min(_SAY_AFTER_S, left_s))
        except FileNotFoundError:
            continue  # removed just now, with the copy: make it again
        except Timeout:
            record = place.read()
            who = record.copied_by if record and record.checked_s is None else "another process"
            if left_s <= _SAY_AFTER_S:
                raise ArchiveError(
                    f"{place.target} is being copied by {who}, and is not complete after {wait_s:g} s. Wait longer, or "
                    "stop that process: what it has copied is kept."
                ) from None
            if not said:
                logger.warning("Waiting for the copy at %s, which is being made by %s.", place.target, who)
                said = True
        except OSError as error:
            raise ArchiveError(f"{place.lock} cannot be locked: {error.strerror}. Give another DEST.") from error
    try:
        yield
    finally:
        if place.read() is None:
            shutil.rmtree(place.folder, ignore_errors=True)  # one who waits may make a lock in it just now
        lock.release()


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        todo = "Give SRC a shorter name" if error.errno == errno.ENAMETOOLONG else "Give a folder of your own as DEST"
        raise ArchiveError(f"{folder} cannot be made: {error.strerror}. {todo}.") from error
    if owner_of(folder) not in (None, os.geteuid()):
        raise ArchiveError(f"{folder} belongs to another user. Give a folder of your own as DEST.")


_uses: dict[tuple[int, str], RefcountedFile] = {}
"""By process and path of the copy: its file of users. Module state, because it is the process that uses copies."""


def hold(place: StagePlace, *, at_exit: Callable[[StagePlace], object]) -> None:
    """Use a copy until this process ends, so that nobody removes it before. Called while the place is claimed."""
    key = (os.getpid(), str(place.target))
    if key not in _uses:
        _uses[key] = open_refcounted(place.users)
        # Below zero: after multiprocessing has ended its daemonic children, the workers that still read.
        Finalize(None, at_exit, args=(place,), exitpriority=-10)


def release(place: StagePlace) -> None:
    """Use a copy no longer."""
    if use := _uses.pop((os.getpid(), str(place.target)), None):
        use.give_up()


def is_used(place: StagePlace) -> bool:
    """Whether another process uses the copy. Called while the place is claimed, and not used by this process."""
    return not open_refcounted(place.users).give_up()


# --- for readers ------------------------------------------------------------------------------------------------------


class StagedPath:
    """Where to read from now. Can be pickled and forked: each process looks for itself.

    Args:
        source: what is copied.
        staged: the copy, there or not.
        since_s: only a copy that was seen to equal its source at this time or later counts, on the clock of
            :func:`now_s`. None takes any complete copy of this run of the machine.
        clock: seconds.

    Example:
        >>> root = StagedPath("/data/birds", "/dev/shm/me/birds")
        >>> root.current()
        PosixPath('/data/birds')
    """

    def __init__(
        self,
        source: str | Path,
        staged: str | Path,
        *,
        since_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = Path(os.path.abspath(source))  # noqa: PTH100 - as it stands in the record, links not resolved
        self.staged = Path(os.path.abspath(staged))  # noqa: PTH100
        self._since_s, self._clock = since_s or 0.0, clock
        self._look_at_s = float("-inf")
        self._found = False

    def current(self) -> Path:
        """The source, or the copy once it is complete. Looks for it once a second, until it is found."""
        return self.staged if self.is_staged else self.source

    @property
    def is_staged(self) -> bool:
        """Whether :meth:`current` leads to the copy."""
        if not self._found and self._clock() >= self._look_at_s:
            self._look_at_s = self._clock() + _LOOK_EVERY_S
            record = StagePlace(self.staged).read()
            current = record is not None and record.is_current(str(self.source), self._since_s)
            self._found = current and owner_of(self.staged) == os.geteuid()
        return self._found

    def __repr__(self) -> str:
        return f"StagedPath({str(self.source)!r}, {str(self.staged)!r})"
