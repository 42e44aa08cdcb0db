"""One pass over a loader of DALI's readers: counted where batches leave it, and with an end of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_feed.errors import LoaderError
from lightning_feed.load.trace import traced


@dataclass
class Position:
    """Where a pass stands."""

    epoch: int
    """The number of the training epoch that it began in."""
    batches: int
    """Batches of it that were handed out, with those before a resume."""


class ReaderPass(Iterator[Any]):
    """A pass of as many batches as the loader is long. It ends when it is through, closed, garbage, or has raised."""

    def __init__(self, loader: Any, position: Position, *, lives: bool) -> None:
        self.position = position
        self._lives = lives
        self._end: LoaderError | None = LoaderError(
            "This pass over the loader was closed before its end: by close(), by a loaded state, or because a new pass "
            "began. Begin a new pass with iter(loader)."
        )
        self._loader: Any = None
        self._total = len(loader)
        self._loader = loader

    def __next__(self) -> Any:
        if self._loader is None:
            raise StopIteration if self._end is None else self._end
        if self.position.batches >= self._total:
            self._end = None
            self.close()
            raise StopIteration
        try:
            with traced("loader_next"):
                item = self._loader.take(self._total - self.position.batches - 1)
        except BaseException as error:
            # What failed cannot go on. A new pass begins with a pipeline of its own.
            loader, self._loader = self._loader, None
            loader.free()
            self._end = LoaderError(
                f"This pass over the loader ended with {type(error).__name__}: {error}. "
                "It has no further batches; begin a new pass with iter(loader)."
            )
            raise
        self.position.batches += 1
        if self.position.batches >= self._total and not self._lives:
            self._loader.free()  # Lightning does not ask for more than the length, so that no end would be seen
        return item

    def close(self) -> None:
        """End the pass. A pipeline that does not live beyond it is freed. Closing twice does nothing more."""
        loader, self._loader = self._loader, None
        if loader is not None and not self._lives:
            loader.free()

    def __del__(self) -> None:
        if getattr(self, "_loader", None) is not None:  # __init__ may have failed before
            self.close()
