"""LoaderPass: the stages of one pass over a FeedLoader, and the last of them, which counts the batches."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.kinds import Batch
from lightning_feed.load.order import Pass
from lightning_feed.load.stage import Maker, Stage
from lightning_feed.load.trace import traced
from lightning_feed.load.worker import resend_ctrl_c

if TYPE_CHECKING:
    from lightning_feed.load.ahead import BackgroundIterator
    from lightning_feed.load.watchdog import LateBatch, Watch


class LoaderPass(Iterator[Batch]):
    """One pass over a FeedLoader. It ends when it is exhausted, closed, garbage, or has raised.

    Args:
        maker: the first stage.
        later: the stages after it, in their order.
        position: counts the batches that are yielded.
        ahead: the stage among them that draws ahead, if there is one.
        watch: when to warn of a missing batch; None: never.

    Attributes:
        taken: batches that it has yielded.
    """

    _stages: tuple[Stage, ...] = ()
    _late: "LateBatch | None" = None

    def __init__(
        self,
        maker: Maker,
        later: Sequence[Stage],
        position: Pass,
        ahead: "BackgroundIterator | None" = None,
        watch: "Watch | None" = None,
    ) -> None:
        self._maker, self._stages = maker, (maker, *later)
        self._last = self._stages[-1]
        self._end = "was closed before its end: by close(), by a loaded state, or because a new pass began"
        self.position = position
        self.taken = 0
        self.background = ahead
        if watch is not None:
            from lightning_feed.load.watchdog import LateBatch

            self._late = LateBatch(self, watch)

    def __next__(self) -> Batch:
        if not self._stages:
            if self.position.ended:
                raise StopIteration
            raise LoaderError(f"This pass over the loader {self._end}. Begin a new pass with iter(loader).")
        late = self._late
        try:
            if late is not None:
                late.begin()
            with traced("loader_next"):
                item = next(self._last)
        except BaseException as error:
            clearer = self._ended(error) if isinstance(error, StopIteration) else self._failed(error)
            if clearer is None:
                raise
            raise clearer from error
        if late is not None:
            late.came()
        self.taken += 1
        return self.position.hand_out(item)

    @property
    def source(self) -> Any:
        """Torch's iterator, or our workers, whose queues can be measured; None once the pass has ended."""
        return self._maker.source if self._stages else None

    def where(self) -> str:
        """The work that this pass is waiting for, in words. Any thread may ask."""
        return self._maker.where()

    def _ended(self, end: StopIteration) -> FeedError | None:
        """End the pass. Returns the error to raise where this was not the end of the data."""
        position = self.position
        if position.refusal is not None or self.taken >= position.given:
            self.close()
            position.ended = position.refusal is None
            return position.refusal
        self._failed(end)
        said = str(end).strip()
        # Else others were requested since.
        at = f", at {position.newest()!r:.200}" if self.taken + 1 == position.given else ""
        self._end = "ended early, with StopIteration"
        return LoaderError(
            f"The dataset, or collate_fn, raised StopIteration for batch {position.batches} of the epoch{at}. A loop "
            "takes that for the end of the epoch, and the rest of it would never be trained. Fix the dataset, or "
            f"raise another error there.{f' The worker said: {said}' if said else ''}"
        )

    def _failed(self, error: BaseException) -> LoaderError | None:
        """End the pass and its workers. Returns a clearer error to raise, or None."""
        self._end = f"ended with {type(error).__name__}: {error}"
        clearer = [stage.fail(error) for stage in self._stages]
        self.close()
        return next(filter(None, clearer), None)

    def close(self) -> None:
        """End the pass, and its threads. Persistent workers live on. Closing twice does nothing more."""
        if self._late is not None:
            self._late.close()
        stages, self._stages, self.background = self._stages, (), None
        for stage in stages:
            stage.cancel()  # from the first, so that no later stage waits for a batch any more
        with ExitStack() as closing:
            for stage in stages:
                closing.callback(stage.close)

    def __del__(self) -> None:
        if self._stages:
            with resend_ctrl_c():
                self.close()
