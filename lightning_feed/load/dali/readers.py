"""A resumable loader over a DALI pipeline with readers of the user's, and each rank's share of the set."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_feed.errors import DatasetError, FeedError, LoaderError, ResumeError
from lightning_feed.load.carry_over import STATE_VERSION, check_kind, state_of_rank
from lightning_feed.load.dali import binding
from lightning_feed.load.dali.binding import FAILURES
from lightning_feed.load.dali.shares import LastBatch, Place, Share
from lightning_feed.load.order import EpochOrder, mix_seed
from lightning_feed.load.trace import traced

_STATELESS_SOURCE = "Checkpointing enabled in a pipeline with external source operator"
"""DALI's warning of a source that it keeps no state of."""
_LABELS = range(-(2**31), 2**31)


@dataclass(frozen=True, kw_only=True)
class ReaderSettings:
    """How the pipelines of a split are built, and how a loader goes through its set."""

    name: str
    """Of the pipeline function and the split, for errors."""
    batch_size: int
    threads: int
    prefetch: int
    """Batches that DALI makes ahead."""
    rank: int
    """Whose share the readers read."""
    ranks: int
    device: torch.device | None
    """The CUDA device that DALI works on; None: the CPU alone."""
    last_batch: LastBatch
    lives: bool
    """Whether the pipeline outlives a pass. Else there is none before a pass begins and after its last batch."""
    goes_on: bool
    """Whether a pass after one that was broken off has the samples that were left, and not the first ones again."""
    resumable: bool
    """Whether DALI keeps track of the state of its operators."""


@dataclass
class _Pass:
    """Where a pass stands."""

    epoch: int
    """The number of the training epoch that it began in."""
    batches: int
    """Batches of it that were handed out, with those before a resume."""
    live: bool = True


class ReaderLoader:
    """An iterable of a DALI pipeline's batches, with a length that is the same on every rank.

    DALI's own iterators cannot be reset in mid-epoch. Here a pass may be broken off anywhere. Where the reading
    ``goes_on``, the next pass has the samples that were not handed out yet, then those of the reader's next epoch:
    every sample has its turn, however short the passes are. Where not, the pipeline is made anew, and the next pass is
    the same from its beginning.

    Args:
        define: makes the graph from a seed for all that is random, and returns its outputs in the form that batches are
            to have. Called with the pipeline as DALI's current one.
        settings: how to build the pipeline and go through the set.
        order: what seeds the pipeline.

    Raises:
        DatasetError: from ``len()`` and ``iter()``, when the pipeline cannot be built, or ``last_batch="drop"`` leaves
            nothing; from ``next()``, when it cannot make a batch.
    """

    def __init__(self, define: Callable[[int], Any], settings: ReaderSettings, order: EpochOrder) -> None:
        self.batch_size = settings.batch_size
        self.settings, self.order = settings, order
        self._define = define
        self._pipeline: ReaderPipeline | None = None
        self._share: Share | None = None
        self._pass: _Pass | None = None
        """The newest one."""

    def __len__(self) -> int:
        return len(self.share)

    @property
    def share(self) -> "Share":
        """This rank's share of the set. A pipeline is built once to know it, and freed where it does not live."""
        if self._share is None:
            self._share = self._open().share
            if not self.settings.lives:
                self.free()
        return self._share

    @property
    def built(self) -> bool:
        """Whether there is a pipeline now, with its threads and its memory."""
        return self._pipeline is not None

    def facts(self) -> dict[str, Any]:
        """Fields of ``LoopFacts`` that only this loader knows."""
        settings = self.settings
        return {
            "batch_size": settings.batch_size,
            "dali_device": "cpu" if settings.device is None else settings.device.type,
            "dali_threads": settings.threads,
            "dali_prefetch": settings.prefetch,
        }

    def __iter__(self) -> Iterator[Any]:
        self.end_pass()
        total, pipeline = len(self), self._pipeline
        if pipeline is not None and not self.settings.goes_on and 0 < pipeline.place.batch < total:
            self.free()
        self._pass = _Pass(self.order.epoch(), self._handed_out_before())
        return _Batches(self, self._pass, total)

    def end_pass(self) -> None:
        """End the live pass, if there is one. A pipeline that does not live beyond it is freed."""
        if self._pass is not None and self._pass.live:
            self._pass.live = False
            if not self.settings.lives:
                self.free()

    def close(self) -> None:
        """End the live pass, if there is one, and free the pipeline."""
        self.end_pass()
        self.free()

    def free(self) -> None:
        """Free the pipeline. The next batch makes it anew."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()

    def _take(self, to_follow: int) -> Any:
        """The next batch to hand out, ``to_follow`` of whose pass come after it."""
        pipeline = self._open()
        try:
            return pipeline.take(None if self.settings.lives else to_follow)
        except BaseException:
            # What failed cannot go on. The next pass begins with a pipeline of its own.
            self._pipeline = None
            pipeline.close()
            raise

    def _open(self) -> "ReaderPipeline":
        if self._pipeline is not None and self._pipeline.inherited:
            self._pipeline = None
        if self._pipeline is None:
            self._pipeline = self._build()
        return self._pipeline

    def _build(self) -> "ReaderPipeline":
        epoch = self.order.epoch() if self.settings.goes_on else 0
        return ReaderPipeline(self._define, self.settings, mix_seed(self.order.seed, epoch, 0, "dali"))

    def _handed_out_before(self) -> int:
        """Batches of the pass to begin that were handed out before, in the run that is resumed."""
        return 0


class _Batches(Iterator[Any]):
    """The batches of one pass. No generator: one that has raised would then look like the end of the epoch."""

    def __init__(self, loader: ReaderLoader, now: _Pass, total: int) -> None:
        self._loader, self._now, self._total = loader, now, total

    def __next__(self) -> Any:
        loader, now = self._loader, self._now
        if now.batches >= self._total:
            raise StopIteration
        if not now.live:
            raise LoaderError(
                "This pass over the loader was closed before its end: by an error, by close(), by a loaded state, or "
                "because a new pass began. Begin a new pass with iter(loader)."
            )
        try:
            with traced("loader_next"):
                batch = loader._take(self._total - now.batches - 1)
        except BaseException:
            loader.end_pass()
            raise
        now.batches += 1
        if now.batches == self._total:  # Lightning does not ask for more than the length, so no end would be seen
            loader.end_pass()
        return batch

    def __del__(self) -> None:
        if self._now.live:
            self._loader.end_pass()


class ResumableReaderLoader(ReaderLoader):
    """A :class:`ReaderLoader` with a state, of which DALI's own checkpoint is a part.

    The state is that of the batch handed out last, whatever DALI has made ahead of it: DALI keeps the states of its
    operators for each batch, and gives those of the batch whose outputs were taken last.
    """

    state_differs_by_rank = True
    """Each rank reads a share of its own: a checkpoint needs the states of all."""
    _loaded: dict[str, Any] | None = None
    """A loaded state, until the first batch after it."""
    _kept: dict[str, Any] | None = None
    """That of a pipeline that was freed: a checkpoint may still be saved after a fit."""

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: tensors and plain values, of which the tensor must not be changed."""
        return dict(self._loaded or self._kept or self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state`` with the next pass. A live pass is closed, and the pipeline is made anew.

        Args:
            state: of ``state_dict()``, or ``{"ranks": [state of rank 0, state of rank 1, ...]}``.

        Raises:
            ResumeError: the state is of another loader, of another number of ranks, of another batch size, or of a set
                of another size.
        """
        state = state_of_rank(state)
        check_kind(state, "dali", self)
        if state["begun"]:
            self._refuse_another_share(state["share"])
        self.close()
        self._pass = self._kept = None
        if state["seed"] is not None:
            self.order.seed = state["seed"]
        self._loaded = state if state["begun"] else None

    def free(self) -> None:
        """Free the pipeline. Its state is kept."""
        if self._pipeline is not None and not self._pipeline.inherited:
            self._kept = self._loaded or self._state()
        super().free()

    def _take(self, to_follow: int) -> Any:
        batch = super()._take(to_follow)
        self._loaded = self._kept = None
        return batch

    def _state(self) -> dict[str, Any]:
        state = {"version": STATE_VERSION, "kind": "dali", "seed": self.order.seed, "begun": False, "exact": True}
        pipeline = self._pipeline
        if pipeline is None or self._pass is None:
            return state
        return {
            **state,
            "begun": True,
            "epoch": self._pass.epoch,
            "batches": self._pass.batches,
            "checkpoint": pipeline.checkpoint(),
            "pipeline_seed": pipeline.seed,
            "place": [pipeline.place.epoch, pipeline.place.batch],
            "share": asdict(pipeline.share),
        }

    def _handed_out_before(self) -> int:
        # Lightning may iter() a loader twice before its first batch. It is in a later epoch where the one that was
        # interrupted had come to its end.
        state = self._loaded
        return state["batches"] if state is not None and self.order.epoch() <= state["epoch"] else 0

    def _build(self) -> "ReaderPipeline":
        state = self._loaded
        if state is None:
            return super()._build()
        checkpoint = bytes(state["checkpoint"].numpy())
        return ReaderPipeline(self._define, self.settings, state["pipeline_seed"], checkpoint, Place(*state["place"]))

    def _refuse_another_share(self, then: Mapping[str, Any]) -> None:
        now = asdict(self.share)
        differs = [f"{name}={then[name]!r} then and {now[name]!r} now" for name in now if then[name] != now[name]]
        if differs:
            raise ResumeError(
                f"The checkpoint was saved with {', '.join(differs)}, so that its place in the epoch cannot be found "
                "again. Resume with the data and the settings that were trained with, or with resumable=False, which "
                "trains the rest of the epoch from a new order."
            )


class ReaderPipeline:
    """A pipeline that was built, and starts to run with its first batch.

    Args:
        define: as for :class:`ReaderLoader`.
        settings: what to build it with.
        seed: what its order and its random operators are seeded from.
        checkpoint: what ``checkpoint()`` gave, to go on from there.
        place: where the reader stood then.

    Raises:
        DatasetError: for outputs that are not DALI's, a pipeline without a reader, readers of sets that differ in
            size, labels that DALI would change, a source of which a resumable pipeline would lose its place, and
            whatever DALI refuses to build.
    """

    def __init__(
        self,
        define: Callable[[int], Any],
        settings: ReaderSettings,
        seed: int,
        checkpoint: bytes | None = None,
        place: "Place | None" = None,
    ) -> None:
        self.settings, self.seed, self.place = settings, seed, place or Place()
        self._ahead = 0
        drawn = mix_seed(seed, settings.rank, 0, "operators") >> 32
        options = {"seed": drawn, "enable_checkpointing": settings.resumable, "checkpoint": checkpoint}
        self._pipeline = reader_pipeline(settings, **options)
        with self._pipeline:
            nodes, self._form = tree_flatten(define(seed))
        _check_outputs(nodes, settings.name)
        if settings.device is not None:
            nodes = [node.gpu() if node.device == "cpu" else node for node in nodes]
        self._pipeline.set_outputs(*nodes)
        try:
            self._build()
            self.share = _share_of(_the_reader(self._pipeline.reader_meta(), settings), settings)
        except DatasetError:
            self.close()
            raise

    def _build(self) -> None:
        name = self.settings.name
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=_STATELESS_SOURCE)
                self._pipeline.build()
        except UserWarning as warning:
            if not str(warning).startswith(_STATELESS_SOURCE):
                raise
            raise DatasetError(
                f"The source of fn.external_source in {name} keeps no place. A resumed run would begin it again, while "
                "the reader goes on, and its data would go with the wrong samples. Give a callable of one argument "
                "that makes its data from it, and resumes exactly: of nvidia.dali.types.SampleInfo with batch=False, "
                "or of the number of the batch with batch=True. Or give DaliDataModule(resumable=False): a resumed run "
                "then trains the rest of its epoch from a new order."
            ) from warning
        except FAILURES as error:
            raise DatasetError(
                f"DALI cannot build what {name} makes. Where there is no such split, return None. Give decoders "
                "device=self.decoder_device, and DaliDataModule(resumable=False) for operators without a state. DALI "
                f"said:\n{error}"
            ) from error

    @property
    def inherited(self) -> bool:
        """Whether it was made in the process that this one was forked from, so that it can give no batch."""
        return binding.is_inherited(self._pipeline)

    def take(self, to_follow: int | None) -> Any:
        """The next batch to hand out, in the form that the user's function returned.

        Args:
            to_follow: batches that will be taken after it; None: no end is known. No more than these are made ahead.

        Raises:
            DatasetError: when DALI cannot make it. The pipeline cannot be used after that.
        """
        while True:
            outputs = self._outputs(to_follow)
            kept = self.place.advance(self.share)
            if kept:
                whole = kept == self.share.batch_size
                return tree_unflatten(outputs if whole else [output[:kept] for output in outputs], self._form)

    def _outputs(self, to_follow: int | None) -> list[Tensor]:
        name = self.settings.name
        try:
            if not self._ahead:
                self._pipeline.schedule_run()  # the first one fills the queue
                self._ahead = self.settings.prefetch
            outputs = binding.take_outputs(self._pipeline, self.settings.device)
            self._ahead -= 1
            if to_follow is None or self._ahead < to_follow:
                self._pipeline.schedule_run()
                self._ahead += 1
            return outputs
        except FeedError:
            raise
        except StopIteration as error:
            raise DatasetError(
                f"A source in {name} ended before the reader's epoch did. The reader gives an epoch its length: let "
                "every other source go on for as long."
            ) from error
        except FAILURES as error:
            traceback.clear_frames(error.__traceback__)  # they hold the pipeline, for as long as the error is held
            raise DatasetError(
                f"DALI could not make a batch of {name}. It cannot leave a sample out: repair or remove the file, and "
                "resume from the last checkpoint (with resumable=False where a sample was removed). "
                "ImageFolderDataModule(backend='dali-cpu', on_error='skip') leaves out what cannot be decoded, and "
                f"names it. DALI said:\n{error}"
            ) from error

    def checkpoint(self) -> Tensor:
        """The state after the batch that was taken last, whatever was made ahead of it: uint8, of one dimension.

        A tensor, since checkpoints of plain tensors are loaded with ``weights_only=True``.
        """
        return torch.frombuffer(bytearray(self._pipeline.checkpoint()), dtype=torch.uint8)

    def close(self) -> None:
        """Free the pipeline and its memory. Batches that were handed out stay valid: they own theirs."""
        self._pipeline = None  # ends its threads
        if self.settings.device is not None:
            binding.release_unused_memory()


def reader_pipeline(settings: ReaderSettings, **options: Any) -> Any:
    """A DALI pipeline without a graph."""
    given = (settings.batch_size, settings.threads, settings.prefetch, settings.device)
    return binding.new_pipeline(*given, why="DaliDataModule", **options)


def _check_outputs(nodes: list[Any], name: str) -> None:
    """Refuse outputs that are not nodes of DALI's graph, and labels that DALI would change."""
    node_type = binding.require_dali(gpu=False).data_node.DataNode
    other = next((node for node in nodes if not isinstance(node, node_type)), None)
    if other is not None or not nodes:
        what = "no output" if other is None else f"a {type(other).__name__} ({other!r:.80}) among its outputs"
        raise DatasetError(
            f"{name} returned {what}. Return what nvidia.dali.fn gives, alone or in a tuple, list or dict: return "
            "images, labels. It is called with a pipeline as DALI's current one: leave @pipeline_def and Pipeline(...) "
            "out."
        )
    waiting, seen = [node.source for node in nodes], set[int]()
    while waiting:
        operator = waiting.pop()
        if operator is not None and id(operator) not in seen:
            seen.add(id(operator))
            waiting += [node.source for node in operator.inputs or ()]
            _refuse_changed_labels(operator, name)


def _refuse_changed_labels(operator: Any, name: str) -> None:
    """Refuse ``labels=[...]`` of which DALI would silently make others: 1 of 1.5, and -2**31 of 2**31.

    They are found under a private name (``_op._init_args``; DALI 2.4): the public ``spec`` has what became of them.
    Without it, and in the file of ``file_list=``, nothing is refused.
    """
    labels = (getattr(getattr(operator, "_op", None), "_init_args", None) or {}).get("labels")
    if not isinstance(labels, (list, tuple)) or not labels:
        return
    if set(map(type, labels)) == {int} and min(labels) in _LABELS and max(labels) in _LABELS:
        return  # of a million, in 50 ms
    for place, label in enumerate(labels):
        if int(label) not in _LABELS or not (isinstance(label, str) or int(label) == label):
            raise DatasetError(
                f"{name}: labels[{place}]={label!r} is not a whole number of 32 bits, and DALI would silently make "
                "another number of it. Number the classes. For other targets, let labels be the numbers of the "
                "files, by which device_transform looks the targets up."
            )


def _the_reader(readers: Mapping[str, Mapping[str, int]], settings: ReaderSettings) -> Mapping[str, int]:
    """What is known of the reader that gives the epoch its length. Several go through their sets in step."""
    if not readers:
        raise DatasetError(
            f"{settings.name} has no reader of DALI's, so nothing says how long an epoch is. Begin it with one, as in "
            "fn.readers.file(file_root=..., **self.reader()). For samples that Python makes, use FastDataModule."
        )
    first = next(iter(readers.values()))
    expected = {**first, "number_of_shards": settings.ranks, "shard_id": settings.rank, "pad_last_batch": 1}
    for reader, known in readers.items():
        differs = [f"{key}={known[key]}" for key in expected if known[key] != expected[key]]
        if differs:
            raise DatasetError(
                f"The reader {reader!r} in {settings.name} was not told its share of the set, or does not go in step "
                f"with the others ({', '.join(differs)}). Give each reader all of **self.reader(), and sets of one "
                "size: fn.readers.file(file_root=..., **self.reader())."
            )
    return first


def _share_of(reader: Mapping[str, int], settings: ReaderSettings) -> Share:
    share = Share(
        samples=reader["epoch_size"],
        ranks=settings.ranks,
        rank=settings.rank,
        batch_size=settings.batch_size,
        last_batch=settings.last_batch,
        sticks=bool(reader["stick_to_shard"]),
    )
    if not len(share):
        least = share.samples // settings.ranks
        raise DatasetError(
            f"{settings.name}: with last_batch='drop' nothing is left of a rank's share of {least} samples, which is "
            f"less than one batch of {settings.batch_size}. Give a batch size of {least} or less, or "
            "last_batch='partial' (for evaluation, eval_batch_size and eval_last_batch)."
        )
    return share
