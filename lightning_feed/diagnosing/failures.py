"""Failures of a diagnosis, with what was measured until then, and of the user's code, summarized in a line."""

import itertools
import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_feed.diagnosing.session import parts_of
from lightning_feed.errors import DatasetError, FeedError, LoaderError, ReportError
from lightning_feed.measure.user_code import is_users
from lightning_feed.trials.cloning import locate_failure, original_error
from lightning_feed.verdict.diagnosis import Diagnosis

_OF_A_WORKER = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)
_LOADING = ("torch.utils.data.dataloader", "lightning_feed.load.")


class _EndedEarly(BaseException):
    """Base of errors that carry what was measured before."""

    def __init__(self, message: str, diagnosis: Diagnosis, written: list[Path]) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The verdict on what was measured."""
        self.written = written
        """The files of its report."""


class DiagnosisInterrupted(_EndedEarly, KeyboardInterrupt):
    """Ctrl-C or SIGTERM while experiments ran, with what had been measured by then."""

    signal_number: int = signal.SIGINT
    """``signal.SIGINT`` or ``signal.SIGTERM``."""
    not_written = ""
    """The reason why there are no files, though some were asked for; empty otherwise."""


class DiagnosisFailed(_EndedEarly, FeedError):
    """The user's code failed after something had been measured."""


class DiagnosisNotWritten(_EndedEarly, ReportError):
    """Everything was measured, and the files could not be written."""


class ProgramEnded(FeedError):
    """The user's program ended before it called ``Trainer.fit``."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code for the command: the program's own, and 1 where that says that all is well."""


@contextmanager
def user_errors(doing: str) -> Iterator[None]:
    """A context in which errors of the user's code become a FeedError, in a line that begins with ``doing``."""
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
    """Class and message of an error, and where in the user's code it was raised."""
    kind, text = original_error(error)
    place = _place(error)
    first_line = next(filter(None, map(str.strip, text.splitlines())), "")
    return (f"{kind}: {first_line}" if first_line else kind) + (f" ({place})" if place else "")


def loading_failed(
    doing: str, error: Exception, model: object, loaders: object, *, first_pass: bool
) -> FeedError | None:
    """The error to raise for one that a training loader raised: with worker, sample and place as far as known.

    Args:
        doing: the activity that failed.
        error: the error raised.
        model: the user's. Loading in its own methods is not by a training loader.
        loaders: the training loaders, restored to before the pass, as are the global random generators.
        first_pass: True for the first pass through them. A later one draws another order.

    Returns:
        None where it was raised elsewhere.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    before = itertools.takewhile(lambda frame: frame.f_locals.get("self") is not model, frames)
    loading = [frame for frame in before if str(frame.f_globals.get("__name__")).startswith(_LOADING)]
    if not loading:
        return None
    try:
        parts = parts_of(loaders)
    except LoaderError:  # no DataLoader, so the failure cannot be located
        return FeedError(f"{doing}: {_closed(in_a_line(error))}")
    if isinstance(error, DatasetError):
        located = error
    else:
        # torch's iterator counts the batches that it gave. Read in torch 2.6 and 2.15.
        counts = (getattr(frame.f_locals.get("self"), "_num_yielded", None) for frame in loading)
        known = next((count for count in counts if first_pass and isinstance(count, int)), None)
        located = locate_failure(parts, error, known)
    place = _place(error)
    return DatasetError(f"{doing}. {located}" + (f" Raised in {place}." if place else ""))


def _place(error: BaseException) -> str:
    """File and line of the user's code that raised it: ``train.py:12``. Empty: none of theirs is in the traceback."""
    frames = [(one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    # What happened in a worker is in the message.
    frames += [(name, int(line)) for name, line in _OF_A_WORKER.findall(str(error))]
    theirs = [(name, line) for name, line in frames if is_users(name)]
    return f"{Path(theirs[-1][0]).name}:{theirs[-1][1]}" if theirs else ""


def _closed(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
