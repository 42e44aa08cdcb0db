"""How a diagnosis ends other than with a verdict, and errors of the user's code in a line."""

import os
import re
import signal
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_feed.errors import DatasetError, FeedError, LoaderError, ReportError
from lightning_feed.load.cloning import locate_failure
from lightning_feed.watch.experiments.session import parts_of
from lightning_feed.watch.verdict.diagnosis import Diagnosis

_NOT_THEIRS = tuple(
    {
        *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]) + os.sep,  # and not lightning_feed_runs beside it
        "<",  # of code that Python makes, such as <frozen importlib._bootstrap>
    }
)
_INSTALLED = ("site-packages", "dist-packages")
_OF_A_WORKER = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)
_LOADING = ("torch.utils.data.dataloader", "lightning_feed.load.")


class DiagnosisInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while experiments ran. What had been measured by then is here."""

    def __init__(
        self, diagnosis: Diagnosis, written: list[Path], signal_number: int = signal.SIGINT, not_written: str = ""
    ) -> None:
        super().__init__("diagnose() was interrupted")
        self.diagnosis = diagnosis
        """The verdict on what was measured."""
        self.written = written
        """Its files."""
        self.signal_number = int(signal_number)
        """``signal.SIGINT`` or ``signal.SIGTERM``."""
        self.not_written = not_written
        """Why there are no files, though some were asked for."""


class DiagnosisFailed(FeedError):
    """The user's code failed after something had been measured."""

    def __init__(self, message: str, diagnosis: Diagnosis, written: list[Path]) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The verdict on what was measured before."""
        self.written = written
        """Its files."""


class DiagnosisNotWritten(ReportError):
    """All was measured, and the files could not be written."""

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The verdict."""


class ProgramEnded(FeedError):
    """The user's program ended before it called ``Trainer.fit``."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code for the command: the program's own, and 1 where that says that all is well."""


@contextmanager
def told(doing: str) -> Iterator[None]:
    """A context whose errors of the user's code are raised as a FeedError with ``doing``, in a line."""
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
    place = _place(error)
    at = f" ({place})" if place else ""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    # A worker's error comes with its traceback, whose last line says what it was.
    said = lines[-1] if len(lines) > 1 and "Caught" in lines[0] else lines[0] if lines else ""
    said = said.removeprefix(f"{type(error).__name__}: ")
    return f"{type(error).__name__}: {said}{at}" if said else f"{type(error).__name__}{at}"


def raised_by_loader(error: BaseException, model: Any) -> bool:
    """Whether an error came up in a training loader, and not in a method of the module's that uses one."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_locals.get("self") is model:
            return False
        if str(frame.f_globals.get("__name__")).startswith(_LOADING):
            return True
    return False


def loading_failed(doing: str, error: Exception, loaders: Any, *, first_pass: bool) -> FeedError:
    """The error to raise for one that a training loader raised: with worker, sample and place as far as known.

    Args:
        doing: what was being done.
        error: what was raised.
        loaders: of the training, as they were before the pass, and the global random generators too.
        first_pass: whether it was the first pass through them. A later one draws another order.
    """
    try:
        parts = parts_of(loaders)
    except LoaderError:  # no DataLoader: what it loads is not known
        return FeedError(f"{doing}: {_closed(in_a_line(error))}")
    place = _place(error)
    at = f" Raised in {place}." if place else ""
    what = (
        error if isinstance(error, DatasetError) else locate_failure(parts, error, _came(error) if first_pass else None)
    )
    return DatasetError(f"{doing}. {what}{at}")


def _came(error: BaseException) -> int | None:
    """Batches that the loader gave before it raised. Read in torch 2.6 and 2.15."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")) == "torch.utils.data.dataloader":
            given = getattr(frame.f_locals.get("self"), "_num_yielded", None)
            if isinstance(given, int):
                return given
    return None


def _place(error: BaseException) -> str:
    """File and line of the user's code that raised it: ``train.py:12``. Empty: none of theirs is in the traceback."""
    frames = [(one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    # What happened in a worker is in the message.
    frames += [(name, int(line)) for name, line in _OF_A_WORKER.findall(str(error))]
    theirs = [(name, line) for name, line in frames if is_theirs(name)]
    return f"{Path(theirs[-1][0]).name}:{theirs[-1][1]}" if theirs else ""


def _closed(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def is_theirs(name: str) -> bool:
    """Whether a file of this name is the user's code: no part of Python, of an installed package, or of this one."""
    return not name.startswith(_NOT_THEIRS) and not any(part in name for part in _INSTALLED)
