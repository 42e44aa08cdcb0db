"""Exceptions that end a diagnosis early and carry its results so far, and one-line summaries of the user's errors."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_feed.errors import FeedError, ReportError
from lightning_feed.load.worker import original_error
from lightning_feed.measure.loader_code import is_users
from lightning_feed.verdict.diagnosis import Diagnosis

_OF_A_WORKER = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)


class _EndedEarly(BaseException):
    """Base class of exceptions that end a diagnosis and carry its results so far."""

    def __init__(self, message: str, diagnosis: Diagnosis, written: list[Path]) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The verdict on the results so far."""
        self.written = written
        """The report's files; empty if none were written."""


class DiagnosisInterrupted(_EndedEarly, KeyboardInterrupt):
    """Ctrl-C interrupted the experiments."""


class DiagnosisFailed(_EndedEarly, FeedError):
    """The user's code failed after a part of the experiments."""


class DiagnosisNotWritten(_EndedEarly, ReportError):
    """Everything was measured, but the files could not be written."""


class ProgramEnded(FeedError):
    """The user's program ended before it called ``Trainer.fit``."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code for the command: the program's, or 1 if that is 0."""


@contextmanager
def user_errors(doing: str) -> Iterator[None]:
    """Context manager to convert errors of the user's code to a FeedError of one line, which begins with ``doing``."""
    try:
        yield
    except FeedError:
        raise
    except Exception as error:
        raise FeedError(
            f"{doing}: {_closed(in_a_line(error))} Call trainer.fit() or the data module yourself to see the whole "
            "traceback."
        ) from error


def in_a_line(error: BaseException) -> str:
    """Return the class and message of an error, and the line of the user's code that raised it."""
    kind, text = original_error(error)
    line = kind
    first_line = next(filter(None, map(str.strip, text.splitlines())), "")
    if first_line:
        line += f": {first_line}"
    location = _location(error)
    if location:
        line += f" ({location})"
    return line


def _location(error: BaseException) -> str:
    """Return file and line of the user's code that raised an error: ``train.py:12``; empty if it was none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # For an error in a worker, file and line are in the message.
    frames += [(name, int(line)) for name, line in _OF_A_WORKER.findall(str(error))]
    users_lines = [f"{Path(name).name}:{line}" for name, line in frames if is_users(name)]
    return next(reversed(users_lines), "")


def _closed(text: str) -> str:
    if text.endswith((".", "!", "?")):
        return text
    return f"{text}."
