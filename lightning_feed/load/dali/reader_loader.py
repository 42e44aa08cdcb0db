"""A resumable loader whose batches come from a DALI pipeline with readers of its own."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_feed.errors import DatasetError, LoaderError, ResumeError
from lightning_feed.load.dali.binding import require_dali
from lightning_feed.load.dali.reader_pipeline import LastBatch, PipelineSettings, Place, ReaderPipeline, Share
from lightning_feed.load.order import EpochOrder, mix_seed, rank_of_run, ranks_of_run
from lightning_feed.load.trace import traced

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a loader goes through its set."""

    name: str
    """Of the pipeline function and the split, for errors."""
    settings: PipelineSettings
    last_batch: LastBatch
    lives: bool
    """Whether the pipeline outlives a pass. Else there is none before a pass begins and after its last batch."""
    goes_on: bool
    """Whether a pass after one that was broken off has the samples that were left, and not the first ones again."""


@dataclass
class Position:
    """Where a pass stands."""

    epoch: int
    """The number of the training epoch that it began in."""
    batches: int
    """Batches of it that were handed out, with those before a resume."""


class ReaderLoader:
    """An iterable of a DALI pipeline's batches, with a length that is the same on every rank.

    DALI's own iterators cannot be reset in mid-epoch. Here a pass may be broken off anywhere. Where the reading
    ``goes_on``, the next pass has the samples that were not handed out yet, then those of the reader's next epoch:
    every sample has its turn, however short the passes are. Where not, the pipeline is made anew, and the next pass is
    the same from its beginning.

    Args:
        build: makes the pipeline, from a seed for all that is random and what ``ReaderPipeline.checkpoint`` gave, or
            None.
        reading: how to go through the set.
        order: what seeds the pipeline.

    Raises:
        DatasetError: from ``len()`` and ``iter()``, when DALI cannot build the pipeline, or ``last_batch="drop"``
            leaves nothing; from ``next()``, when it cannot make a batch.
    """

    def __init__(
        self, build: Callable[[int, bytes | None], ReaderPipeline], reading: Reading, order: EpochOrder
    ) -> None:
        self.batch_size = reading.settings.batch_size
        self.reading, self.order = reading, order
        self._build = build
        self._pipeline: ReaderPipeline | None = None
        self._share: Share | None = None
        self._place = Place()
        self._live: weakref.ref[_ReaderPass] | None = None
        self._position: Position | None = None
        """Of the newest pass."""
        self._seed = 0
        """What the pipeline was built from."""

    def __len__(self) -> int:
        return len(self.share)

    @property
    def share(self) -> Share:
        """This rank's share of the set. A pipeline is built once to know it, and freed where it does not live."""
        if self._share is None:
            self._open()
            if not self.reading.lives:
                self.free()
        assert self._share is not None
        return self._share

    @property
    def built(self) -> bool:
        """Whether there is a pipeline now, with its threads and its memory."""
        return self._pipeline is not None

    def facts(self) -> dict[str, Any]:
        """Fields of ``LoopFacts`` that only this loader knows."""
        settings = self.reading.settings
        return {
            "batch_size": settings.batch_size,
            "dali_device": "cpu" if settings.device is None else settings.device.type,
            "dali_threads": settings.num_threads,
            "dali_prefetch": settings.prefetch_queue_depth,
        }

    def __iter__(self) -> Iterator[Any]:
        self.end_pass()
        if self._pipeline is not None and not self.reading.goes_on and 0 < self._place.batch < len(self):
            self.free()
        self._position = Position(self.order.epoch(), self._handed_out_before())
        made = _ReaderPass(self, self._position)
        self._live = weakref.ref(made)
        return made

    def take(self, to_follow: int) -> Any:
        """The next batch to hand out, to be called by a pass.

        Args:
            to_follow: batches of the pass that come after it.
        """
        pipeline, share = self._open(), self.share
        while True:
            outputs = pipeline.take(to_follow=None if self.reading.lives else to_follow)
            kept = self._place.advance(share)
            if kept:
                whole = kept == share.batch_size
                return pipeline.put_together(outputs if whole else [output[:kept] for output in outputs])

    def end_pass(self) -> None:
        """End the live pass, if there is one. A pipeline that does not live beyond it is freed."""
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()

    def close(self) -> None:
        """End the live pass, if there is one, and free the pipeline."""
        self.end_pass()
        self.free()

    def free(self) -> None:
        """Free the pipeline. The next batch makes it anew."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()

    def _handed_out_before(self) -> int:
        """Batches of the pass to begin that were handed out before, in the run that is resumed."""
        return 0

    def _open(self) -> ReaderPipeline:
        if self._pipeline is not None and not self._pipeline.usable:
            self.free()
        if self._pipeline is None:
            epoch = self.order.epoch() if self.reading.goes_on else 0
            self._start(mix_seed(self.order.seed, epoch, 0, "dali"), None, Place())
        assert self._pipeline is not None
        return self._pipeline

    def _start(self, seed: int, checkpoint: bytes | None, place: Place) -> None:
        pipeline, settings = self._build(seed, checkpoint), self.reading.settings
        self._share = Share(
            samples=pipeline.reader["epoch_size"],
            ranks=settings.ranks,
            rank=settings.rank,
            batch_size=settings.batch_size,
            last_batch=self.reading.last_batch,
            sticks=bool(pipeline.reader["stick_to_shard"]),
        )
        if not len(self._share):
            least = self._share.samples // settings.ranks
            self._share = None
            pipeline.close()
            raise DatasetError(
                f"{self.reading.name}: with last_batch='drop' nothing is left of a rank's share of {least} samples, "
                f"which is less than one batch of {settings.batch_size}. Give a batch size of {least} or less, or "
                "last_batch='partial' (for evaluation, eval_batch_size and eval_last_batch)."
            )
        self._pipeline, self._place, self._seed = pipeline, place, seed


class _ReaderPass(Iterator[Any]):
    """A pass of as many batches as the loader is long. It ends when it is through, closed, garbage, or has raised."""

    def __init__(self, loader: ReaderLoader, position: Position) -> None:
        self._loader: ReaderLoader | None = None  # for __del__, where the next line fails
        self._total = len(loader)
        self._loader, self._position = loader, position
        self._through = False

    def __next__(self) -> Any:
        if self._position.batches >= self._total:
            self._through = True
            self.close()
        if self._through:
            raise StopIteration
        if self._loader is None:
            raise LoaderError(
                "This pass over the loader was closed before its end: by an error, by close(), by a loaded state, or "
                "because a new pass began. Begin a new pass with iter(loader)."
            )
        try:
            with traced("loader_next"):
                item = self._loader.take(self._total - self._position.batches - 1)
        except BaseException:
            # What failed cannot go on. A new pass begins with a pipeline of its own.
            self._loader.free()
            self._loader = None
            raise
        self._position.batches += 1
        if self._position.batches >= self._total and not self._loader.reading.lives:
            self._loader.free()  # Lightning does not ask for more than the length, so that no end would be seen
        return item

    def close(self) -> None:
        """End the pass. A pipeline that does not live beyond it is freed. Closing twice does nothing more."""
        loader, self._loader = self._loader, None
        if loader is not None and not loader.reading.lives:
            loader.free()

    def __del__(self) -> None:
        self.close()


class ResumableReaderLoader(ReaderLoader):
    """A :class:`ReaderLoader` with a state, of which DALI's own checkpoint is a part.

    The state is that of the batch handed out last, whatever DALI has made ahead of it: DALI keeps the states of its
    operators for each batch, and gives those of the batch whose outputs were taken last. Its pipeline has to be built
    ``resumable``.
    """

    state_differs_by_rank = True
    """Each rank reads a share of its own: a checkpoint needs the states of all."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pending: dict[str, Any] | None = None
        self._resumed: tuple[int, int] | None = None
        """The epoch and the batches of a loaded state, until the first batch after it."""
        self._known: dict[str, Any] | None = None
        """The state as it was told last, for as long as it holds."""

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: tensors and plain values, of which the tensor must not be changed."""
        if self._pending is not None:
            return copy.deepcopy(self._pending)
        if self._known is None:
            self._known = self._state()
        return dict(self._known)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state`` with the next pass. A live pass is closed, and the pipeline is made anew.

        Args:
            state: of ``state_dict()``, or ``{"ranks": [state of rank 0, state of rank 1, ...]}``.

        Raises:
            ResumeError: the state is of another loader, of another number of ranks, of another batch size, or of a set
                of another size.
        """
        state = dict(_of_this_rank(state) if "ranks" in state else state)
        self._refuse_misfit(state)
        self.close()
        self._position = self._known = None
        if state["seed"] is not None:
            self.order.seed = state["seed"]
        self._pending = state if state["begun"] else None
        self._resumed = (state["epoch"], state["batches"]) if state["begun"] else None

    def take(self, to_follow: int) -> Any:
        """The next batch to hand out. What is known of the state is not true any more."""
        batch = super().take(to_follow)
        self._known = self._resumed = None
        return batch

    def free(self) -> None:
        """Free the pipeline. The state is kept: a checkpoint may still be saved after a fit."""
        if self._pipeline is not None and self._pipeline.usable:
            self.state_dict()
        super().free()

    def __getstate__(self) -> dict[str, Any]:
        # ddp_spawn pickles loaders, before the first batch: there is no pipeline yet that would matter.
        return {**self.__dict__, "_pipeline": None, "_live": None, "_known": None}

    def _state(self) -> dict[str, Any]:
        state = {"version": _VERSION, "kind": "dali", "seed": self.order.seed, "begun": False, "exact": True}
        if self._pipeline is None or self._position is None:
            return state
        return {
            **state,
            "begun": True,
            **asdict(self._position),
            "checkpoint": self._pipeline.checkpoint(),
            "pipeline_seed": self._seed,
            "place": [self._place.epoch, self._place.batch],
            "share": asdict(self.share),
            "dali": str(require_dali(gpu=False).__version__),
        }

    def _handed_out_before(self) -> int:
        # Kept until a batch is taken, since Lightning may iter() a loader twice before its first batch. Lightning is in
        # a later epoch where the one that was interrupted had come to its end.
        resumed = self._resumed
        return resumed[1] if resumed is not None and self.order.epoch() <= resumed[0] else 0

    def _open(self) -> ReaderPipeline:
        if self._pipeline is None and self._pending is not None:
            state = self._pending
            checkpoint = bytes(state["checkpoint"].numpy())
            try:
                self._start(state["pipeline_seed"], checkpoint, Place(*state["place"]))
            except DatasetError as error:
                raise ResumeError(
                    f"The pipeline cannot go on from the checkpoint, which was saved with DALI {state['dali']} (this "
                    f"is {require_dali(gpu=False).__version__}): {error}"
                ) from error
            self._pending = None
        return super()._open()

    def _refuse_misfit(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "dali" or state.get("version") != _VERSION:
            raise ResumeError(
                f"The loader state is of kind {state.get('kind')!r} and version {state.get('version')!r}, and a "
                f"DaliDataModule of this lightning_feed reads kind 'dali' and version {_VERSION}. Resume with the data "
                "module, and the version of lightning_feed, that wrote the checkpoint."
            )
        if not state["begun"]:
            return
        then, now = state["share"], asdict(self.share)
        differs = [f"{name}={then[name]!r} then and {now[name]!r} now" for name in now if then[name] != now[name]]
        if differs:
            raise ResumeError(
                f"The checkpoint was saved with {', '.join(differs)}, so that its place in the epoch cannot be found "
                "again. Resume with the data and the settings that were trained with, or with resumable=False, which "
                "trains the rest of the epoch from a new order."
            )


def _of_this_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = state["ranks"]
    world = ranks_of_run()
    if len(ranks) != world:
        raise ResumeError(
            f"The checkpoint was saved by {len(ranks)} ranks and this run has {world}. DALI's readers divide the "
            f"set among the ranks, so their places cannot be carried over. Resume with {len(ranks)} ranks."
        )
    return ranks[rank_of_run()]
