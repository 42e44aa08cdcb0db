"""Where reports lie: found in the folder of a run, written whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path

from lightning_feed.errors import ReportError

NAME = "feed_report"
"""Of the files, without the ending."""


def find_report(path: Path) -> Path:
    """The report at a path: the file itself, or ``feed_report.json`` in the folder or below it, the newest of several.

    Raises:
        ReportError: when there is none.
    """
    try:
        return _find(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}. Give a feed_report.json.") from error
    except RecursionError as error:
        raise ReportError(
            f"folders in {path} lie too deep to be searched. Give the feed_report.json itself."
        ) from error


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ReportError(f"{path} does not exist. Give a feed_report.json, or the folder of a run.")
    inside = path / f"{NAME}.json"
    if inside.is_file():
        return inside
    below = [(file.stat().st_mtime_ns, file) for file in path.rglob(f"{NAME}.json") if file.is_file()]
    if not below:
        raise ReportError(
            f"there is no {NAME}.json in {path} or below it. GPUStarvationCallback writes one into the Trainer's "
            "log_dir at the end of fit, and `lightning-feed diagnose` where --out says."
        )
    return max(below)[1]


def check_writable(folder: Path) -> None:
    """See that files can be written into a folder, and that it can be made where it is not there. Leaves nothing.

    Raises:
        ReportError: when they cannot.
    """
    made: list[Path] = []
    try:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir()
            made.append(one)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ReportError(
            f"reports cannot be written into {folder}: {error.strerror or error}. Give another folder."
        ) from error
    finally:
        for one in reversed(made):
            with contextlib.suppress(OSError):  # something else was put there meanwhile
                one.rmdir()


def write_whole(path: Path, text: str) -> None:
    """Write a text file, making its folder where needed. What is there stays until all of the new one is written.

    Raises:
        ReportError: when it cannot be written. What was there is unchanged.
    """
    try:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                # Names of users' hooks and transforms may hold what UTF-8 cannot.
                file.write(text.encode("utf-8", "backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: of a name that no file can have
        raise ReportError(f"{path} could not be written: {getattr(error, 'strerror', None) or error}.") from error
