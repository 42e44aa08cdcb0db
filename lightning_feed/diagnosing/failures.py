"""Failures of a diagnosis, with the results so far, and failures of the user's code, summarized in a line."""

import itertools
import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_feed.diagnosing.parts import parts_of
from lightning_feed.errors import DatasetError, FeedError, LoaderError, ReportError
from lightning_feed.measure.user_code import is_users
from lightning_feed.trials.cloning import locate_failure, original_error
from lightning_feed.verdict.diagnosis import Diagnosis

_OF_A_WORKER = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)
_LOADING = ("torch.utils.data.dataloader", "lightning_feed.load.")


class _EndedEarly(BaseException):
    """Base of errors that carry the results so far."""

    def __init__(self, message: str, diagnosis: Diagnosis, written: list[Path]) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The verdict on the results so far."""
        self.written = written
        """The report's files."""


class DiagnosisInterrupted(_EndedEarly, KeyboardInterrupt):
    """Ctrl-C or SIGTERM while experiments ran, with the results so far."""

    signal_number: int = signal.SIGINT
    """``signal.SIGINT`` or ``signal.SIGTERM``."""
    not_written = ""
    """The reason why requested files were not written; else empty."""


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
    """Convert errors of the user's code to a FeedError with one line, which begins with ``doing``."""
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
    """Class and message of an error, and the line of the user's code that raised it."""
    kind, text = original_error(error)
    place = _place(error)
    first_line = next(filter(None, map(str.strip, text.splitlines())), "")
    said = kind
    if first_line:
        said += f": {first_line}"
    if place:
        said += f" ({place})"
    return said


def loading_failed(
    doing: str, error: Exception, model: object, loaders: object, *, first_pass: bool
) -> FeedError | None:
    """The error to raise in place of a training loader's error: with worker, sample and line of code, if known.

    Args:
        doing: the activity that failed.
        error: the error raised.
        model: the user's module. Loading in its own methods does not count as a training loader's.
        loaders: the training loaders. They and the global random generators are restored to before the pass.
        first_pass: True for the first pass through them. A later one draws another order.

    Returns:
        None if the error was raised elsewhere.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    before = itertools.takewhile(lambda frame: frame.f_locals.get("self") is not model, frames)
    loading = [frame for frame in before if str(frame.f_globals.get("__name__")).startswith(_LOADING)]
    if not loading:
        return None
    try:
        parts = parts_of(loaders)
    except LoaderError:  # not a DataLoader, so the failure cannot be located
        return FeedError(f"{doing}: {_closed(in_a_line(error))}")
    if isinstance(error, DatasetError):
        located = error
    else:
        # torch's iterator counts the batches that it has returned. Checked against torch 2.6 and 2.15.
        counts = (getattr(frame.f_locals.get("self"), "_num_yielded", None) for frame in loading)
        known = next((count for count in counts if first_pass and isinstance(count, int)), None)
        located = locate_failure(parts, error, known)
    place = _place(error)
    if place:
        return DatasetError(f"{doing}. {located} Raised in {place}.")
    return DatasetError(f"{doing}. {located}")


def _place(error: BaseException) -> str:
    """File and line of the user's code that raised an error: ``train.py:12``; empty if the traceback has none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # For an error in a worker, these are in the message.
    frames += [(name, int(line)) for name, line in _OF_A_WORKER.findall(str(error))]
    theirs = [f"{Path(name).name}:{line}" for name, line in frames if is_users(name)]
    return (theirs or [""])[-1]


def _closed(text: str) -> str:
    if text.endswith((".", "!", "?")):
        return text
    return f"{text}."
