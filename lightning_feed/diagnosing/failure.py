"""Errors of the user's code, told in a line."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_feed.errors import DatasetError, FeedError, LoaderError
from lightning_feed.load.cloning import locate_failure
from lightning_feed.watch.experiments.session import parts_of

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


class told:
    """Errors of the user's code with what was being done, in a line, and the error itself as the cause."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FeedError):
            raise FeedError(
                f"{self._doing}: {_closed(in_a_line(error))} Everything is as it was before. Call trainer.fit() or the "
                "data module yourself to see the whole traceback."
            ) from error


def in_a_line(error: BaseException) -> str:
    """Class and message of an error, and where in the user's code it was raised."""
    place = _place(error)
    at = f" ({place})" if place else ""
    text = str(error).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    # A worker's error comes with its traceback, whose last line says what it was.
    said = lines[-1] if len(lines) > 1 and "Caught" in lines[0] else lines[0] if lines else ""
    said = said.removeprefix(f"{type(error).__name__}: ")
    return f"{type(error).__name__}: {said}{at}" if said else f"{type(error).__name__}{at}"


def raised_by_loader(error: BaseException, model: Any) -> bool:
    """Whether an error came up in a training loader, and not in a method of the module's that uses one."""
    for frame in _frames(error):
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
        return FeedError(f"{doing}: {_closed(in_a_line(error))} Everything is as it was before.")
    place = _place(error)
    at = f" Raised in {place}." if place else ""
    what = (
        error if isinstance(error, DatasetError) else locate_failure(parts, error, _came(error) if first_pass else None)
    )
    return DatasetError(f"{doing}. {what}{at} Everything is as it was before.")


def _came(error: BaseException) -> int | None:
    """Batches that the loader gave before it raised. Read in torch 2.6 and 2.15."""
    for frame in _frames(error):
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


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(error.__traceback__))
