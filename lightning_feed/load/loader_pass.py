"""One pass over a loader: counted where batches leave it, and ended with its thread and its workers."""

from collections.abc import Iterator
from typing import Any

from lightning_feed.errors import LoaderError
from lightning_feed.load.background import SOON_S, BackgroundIterator, ctrl_c_again
from lightning_feed.load.batch_decoder import BatchDecoder
from lightning_feed.load.epoch_order import MapPass
from lightning_feed.load.iterable_state import IterablePass, Stamped
from lightning_feed.load.late_batch import LateBatch, Watch
from lightning_feed.load.thread_pass import ThreadPass
from lightning_feed.load.trace import traced
from lightning_feed.load.worker_end import ended_worker, stop_workers


class LoaderPass(Iterator[Any]):
    """One pass over a :class:`FeedLoader`. It ends when it is exhausted, closed, garbage, or has raised.

    Attributes:
        source: the iterator underneath, torch's or that of worker threads; None once the pass has ended.
        background: the thread's side, None without ``background`` and once the pass has ended.
        taken: batches that it has handed out.
    """

    def __init__(
        self,
        source: Iterator[Any],
        depth: int,
        position: MapPass | IterablePass,
        decode: BatchDecoder | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._end = LoaderError(
            "This pass over the loader was closed before its end: by close(), by a loaded state, or because a new pass "
            "began. Begin a new pass with iter(loader)."
        )
        self._late: LateBatch | None = None
        self.source: Iterator[Any] | None = source
        self.position = position
        self.taken = 0
        self.background: BackgroundIterator | None = BackgroundIterator(source, depth) if depth else None
        batches: Iterator[Any] = self.background if self.background is not None else source
        decoding = None if decode is None else decode.run(batches)
        self._upstream: Iterator[Any] | None = batches if decoding is None else decoding
        self._decoding = decoding
        if watch is not None:
            self._late = LateBatch(self, watch)

    def __next__(self) -> Any:
        if self._upstream is None:
            raise StopIteration if self.position.ended else self._end
        late = self._late
        try:
            if late is not None:
                late.begin()
            with traced("loader_next"):
                item = next(self._upstream)
                while isinstance(item, Stamped) and item.skip:
                    item = next(self._upstream)
        except StopIteration as end:
            early = self._ended(end)
            if early is None:
                raise
            raise early from end
        except BaseException as error:
            plainer = self._failed(error)
            if plainer is None:
                raise
            raise plainer from error
        if late is not None:
            late.came()
        self.taken += 1
        return self.position.hand_out(item)

    def _ended(self, end: StopIteration) -> LoaderError | None:
        """End the pass; the error to raise where that was not the end of the data."""
        source = self.source
        self.close()
        early = _early(self.position, self.taken, end)
        if early is None:
            self.position.ended = True
        else:
            _end_workers(source, all_of_them=False)
            self._end = early
        return early

    def _failed(self, error: BaseException) -> LoaderError | None:
        """End the pass and its workers; the error to raise in place of one that says less."""
        source = self.source
        ended = ended_worker(source, error)
        if isinstance(error, KeyboardInterrupt):
            _hurry(source)
            self.close()
        else:
            self.close()
            _end_workers(source, all_of_them=ended is not None)
        self._end = LoaderError(
            f"This pass over the loader ended with {type(error).__name__}: {error}. "
            "It has no further batches; begin a new pass with iter(loader)."
        )
        return None if ended is None or isinstance(error, RuntimeError) else LoaderError(ended)

    def close(self) -> None:
        """End the pass, and its threads. Persistent workers live on. Closing twice does nothing more."""
        if self._late is not None:
            self._late.close()
        background, self.background = self.background, None
        source, self.source, self._upstream = self.source, None, None
        decoding, self._decoding = self._decoding, None
        try:
            if decoding is not None:
                decoding.close()
        finally:  # it cannot be closed while another thread waits in it
            if isinstance(source, ThreadPass):
                source.close()  # first, so that the background thread does not wait for a batch any more
            if background is not None:
                background.close()

    def __del__(self) -> None:
        # __init__ may have failed before they were set
        if getattr(self, "background", None) is not None or getattr(self, "_decoding", None) is not None:
            with ctrl_c_again():
                self.close()


def _early(position: MapPass | IterablePass, taken: int, end: StopIteration) -> LoaderError | None:
    """The error for an end that comes before all batches that were asked for have come; None where they have."""
    if not isinstance(position, MapPass) or taken >= position.given:
        return None
    told = str(end).strip()
    at = f", at {position.newest()!r:.200}" if taken + 1 == position.given else ""  # else others were asked for since
    return LoaderError(
        f"The dataset, or collate_fn, raised StopIteration for batch {position.batches} of the epoch{at}. A loop takes "
        "that for the end of the epoch, and the rest of it would never be trained. Mend the dataset, or raise another "
        f"error there.{f' The worker said: {told}' if told else ''}"
    )


def _hurry(source: Iterator[Any] | None) -> None:
    """End workers for Ctrl-C, whatever they are at."""
    if isinstance(source, ThreadPass):
        source.hurry(SOON_S)  # persistent threads, too: they would be waited for when Python ends
    elif source is not None:
        stop_workers(source)


def _end_workers(source: Iterator[Any] | None, *, all_of_them: bool) -> None:
    """End a failed pass's worker processes now, persistent ones if that is asked for: where one of them is dead, no
    other pass can use the rest. Left to the traceback that holds them, torch waits 5 s for each.

    Seen in torch 2.6 and 2.15: an iterator that dies with its traceback finds its queues gone and can only time out.
    """
    if all_of_them or not getattr(source, "_persistent_workers", True):
        shut_down = getattr(source, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
