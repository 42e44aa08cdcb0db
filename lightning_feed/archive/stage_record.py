"""What is written beside a staged copy: who copies it, and that it is complete.

For the copy ``DEST/NAME`` all of it lies in ``DEST/.NAME.staging``, so that the copy holds nothing but the source. No
list of files is kept: each copied file has the size and time of its source, which is what they are compared by.
"""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Copying:
    """Who copies, written before the first byte and removed after the last."""

    source: str
    """Absolute path."""
    pid: int
    boot_id: str
    """Of the machine's present run: a new one after each reboot."""
    host: str
    started_unix_s: float
    remove_at_exit: bool
    """The copy goes with the last process that uses it."""
    version: int = VERSION

    def described(self) -> str:
        """Who it is, for people."""
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_unix_s))
        return f"process {self.pid} on {self.host}, since {began}"


@dataclass(frozen=True, kw_only=True)
class Complete:
    """The copy is whole, and was the same as its source when that was last looked at. Written last."""

    source: str
    files: int
    total_bytes: int
    boot_id: str
    """As in :class:`Copying`; ``checked_s`` has no meaning in another run of the machine."""
    checked_s: float
    """When it was seen to equal the source, on the clock of :func:`now_s`."""
    hashed: bool
    """Contents were compared then, not only sizes and times."""
    remove_at_exit: bool
    version: int = VERSION


Record = TypeVar("Record", Copying, Complete)


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether this user made what lies there. In a folder that all may write to, another user may have been first."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


class StagePlace:
    """The paths of one staged copy.

    Args:
        target: where the copy is, or will be.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        path = Path(target)
        self.target = path
        self.folder = path.parent / f".{path.name}.staging"
        self.lock = self.folder / "lock"
        self.users = self.folder / "users"
        self.copying = self.folder / "copying.json"
        self.complete = self.folder / "complete.json"
        self.parts = self.folder / "parts"

    def read_copying(self) -> Copying | None:
        """Who copies, or copied when it was broken off."""
        return _read(self.copying, Copying)

    def read_complete(self) -> Complete | None:
        """That the copy is complete; None when it is not, or when another version or another user wrote the record."""
        return _read(self.complete, Complete)

    def write_copying(self, record: Copying) -> None:
        """Say who copies, atomically."""
        _write(self.copying, record)

    def write_complete(self, record: Complete) -> None:
        """Say that the copy is complete, atomically."""
        _write(self.complete, record)


def copying_now(source: str, *, remove_at_exit: bool) -> Copying:
    """The record of this process, beginning now."""
    return Copying(
        source=source,
        pid=os.getpid(),
        boot_id=read_boot_id(),
        host=socket.gethostname(),
        started_unix_s=time.time(),
        remove_at_exit=remove_at_exit,
    )


def read_boot_id() -> str:
    """What tells this run of the machine from the one before the last reboot; "" where the kernel does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def now_s() -> float:
    """Seconds since the machine started: the same clock for all of its processes, and never set back."""
    return time.monotonic()


def _write(path: Path, record: Copying | Complete) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(path)


def _read(path: Path, kind: type[Record]) -> Record | None:
    try:
        # Neither a link nor a FIFO of another user's is followed or waited for.
        with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            found = json.load(file)
    except (OSError, ValueError):
        return None  # not there, or cut short: then nothing is known, and the files are compared again
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return None
    if set(found) != {field.name for field in fields(kind)}:
        return None
    return kind(**found)
