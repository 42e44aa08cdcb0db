"""LoaderPass: the stages of one pass over a FeedLoader, and the count of its batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.kinds import Batch
from lightning_feed.load.position import Position
from lightning_feed.load.stage import Maker, Stage, traced
from lightning_feed.load.worker import resend_ctrl_c

if TYPE_CHECKING:
    from lightning_feed.load.ahead import BackgroundIterator
    from lightning_feed.load.watchdog import LateBatch, Watch


class Substitutes(NamedTuple):
    """Functions that may return a pass that yields the rest in place of the present one."""

    look: "Callable[[int], LoaderPass | None]"
    """Called with the number of taken batches before each batch."""
    recover: "Callable[[BaseException], LoaderPass | None]"
    """Called with an error of the present pass, or with the StopIteration at its end."""


NO_SUBSTITUTES = Substitutes(look=lambda _: None, recover=lambda _: None)


class LoaderPass(Iterator[Batch]):
    """One pass over a FeedLoader. The pass ends when exhausted, closed or garbage-collected, or after an error.

    Args:
        stages: the stages, in order.
        maker: the first stage.
        position: counts the yielded batches.
        background: the stage that reads ahead in a thread, if any.
        watch: time after which to warn of a missing batch; None for no warning.
        substitutes: may find a pass that yields the rest in place of this one.

    Attributes:
        taken: number of yielded batches.
    """

    _stages: tuple[Stage, ...] = ()
    _late: "LateBatch | None" = None

    def __init__(
        self,
        stages: Sequence[Stage],
        maker: Maker,
        position: Position,
        background: "BackgroundIterator | None" = None,
        watch: "Watch | None" = None,
        substitutes: Substitutes = NO_SUBSTITUTES,
    ) -> None:
        self._maker = maker
        self._stages = tuple(stages)
        self._last = stages[-1]
        self._end = "was closed before its end: by close(), by a loaded state, or because a new pass began"
        self.position = position
        self.taken = 0
        self.background = background
        self._substitutes = substitutes
        self._rest: LoaderPass | None = None
        if watch is not None:
            from lightning_feed.load.watchdog import LateBatch

            self._late = LateBatch(self, watch)

    def __next__(self) -> Batch:
        rest = self._rest or self._found_rest()
        if rest is not None:
            return next(rest)
        if not self._stages:
            if self.position.ended:
                raise StopIteration
            raise LoaderError(f"This pass over the loader {self._end}. Begin a new pass with iter(loader).")
        late = self._late
        try:
            if late is not None:
                late.begin()
            with traced("loader_next"):
                batch = next(self._last)
        except BaseException as error:
            self._rest = self._substitutes.recover(error)
            if self._rest is not None:
                return next(self._rest)
            clearer = self._stopped_by(error)
            if clearer is None:
                raise
            raise clearer from error
        if late is not None:
            late.arrived()
        self.taken += 1
        self.position.count_yielded()
        return batch

    def _found_rest(self) -> "LoaderPass | None":
        """Look for a pass that yields the rest in place of this one."""
        self._rest = self._substitutes.look(self.taken)
        if self._rest is not None:
            self._substitutes = NO_SUBSTITUTES
        return self._rest

    @property
    def source(self) -> Any:
        """Torch's iterator or our workers, whose queues are measured. None once the pass has ended."""
        if self._rest is not None:
            return self._rest.source
        return self._maker.source if self._stages else None

    @property
    def head_of_line_ns(self) -> float | None:
        """Nanoseconds waited while a later batch was ready: see :class:`Maker`. None once the pass has ended."""
        if self._rest is not None:
            return self._rest.head_of_line_ns
        return self._maker.head_of_line_ns if self._stages else None

    def where(self) -> str:
        """Describe the work that this pass is waiting for. May be called from any thread."""
        return self._maker.where() if self._rest is None else self._rest.where()

    def _stopped_by(self, error: BaseException) -> FeedError | None:
        """End the pass after an error or a StopIteration. Returns the error to raise in its place, or None."""
        if isinstance(error, StopIteration):
            return self._ended(error)
        return self._failed(error)

    def _ended(self, end: StopIteration) -> FeedError | None:
        """End the pass after a StopIteration. Returns the error to raise, or None if all batches were yielded."""
        position = self.position
        if position.refusal is not None or self.taken >= position.requested:
            self.close()
            position.ended = position.refusal is None
            return position.refusal
        self._failed(end)
        self._end = "ended early, with StopIteration"
        batch = f"batch {position.batches} of the epoch"
        if self.taken + 1 == position.requested:  # otherwise, later indices have been requested too
            batch += f", at {position.newest()!r:.200}"
        message = (
            f"The dataset, or collate_fn, raised StopIteration for {batch}. That would end the epoch early, without "
            "an error. Fix the dataset, or raise another error there."
        )
        if str(end).strip():
            message += f" The worker said: {str(end).strip()}"
        return LoaderError(message)

    def _failed(self, error: BaseException) -> LoaderError | None:
        """End the pass and its workers. Returns a clearer error to raise, or None."""
        self._end = f"ended with {type(error).__name__}: {error}"
        clearer = [stage.fail(error) for stage in self._stages]
        self.close()
        return next(filter(None, clearer), None)

    def close(self) -> None:
        """End the pass and its threads. Persistent workers stay alive. A second call does nothing."""
        self._substitutes = NO_SUBSTITUTES
        if self._rest is not None:
            self._rest.close()
        if self._late is not None:
            self._late.close()
        stages = self._stages
        self._stages = ()
        self.background = None
        for stage in stages:
            stage.cancel()  # first stage first, so that no later stage still waits for a batch
        with ExitStack() as closing:
            for stage in stages:
                closing.callback(stage.close)

    def __del__(self) -> None:
        if self._stages:
            with resend_ctrl_c():
                self.close()
