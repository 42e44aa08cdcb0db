"""Errors of the user's code, told in a line."""

import traceback
from pathlib import Path

from lightning_feed.errors import FeedError


class told:
    """Errors of the user's code with what was being done, in a line, and the error itself as the cause."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FeedError):
            raise FeedError(
                f"{self._doing}: {in_a_line(error)}. Everything is as it was before. Call trainer.fit() or the "
                "data module yourself to see the whole traceback."
            ) from error


def in_a_line(error: BaseException) -> str:
    """Class and message of an error, and where in the user's code it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [one for one in frames if "site-packages" not in one.filename and "lightning_feed" not in one.filename]
    at = f" ({Path(mine[-1].filename).name}:{mine[-1].lineno})" if mine else ""
    text = str(error).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    # A worker's error comes with its traceback, whose last line says what it was.
    said = lines[-1] if len(lines) > 1 and "Caught" in lines[0] else lines[0] if lines else ""
    said = said.removeprefix(f"{type(error).__name__}: ")
    return f"{type(error).__name__}: {said}{at}" if said else f"{type(error).__name__}{at}"
