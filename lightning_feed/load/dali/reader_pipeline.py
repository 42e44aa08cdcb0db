"""One DALI pipeline with readers of its own: defined by the user's function, built, run ahead, and freed."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_feed.errors import DatasetError, FeedError
from lightning_feed.load.dali.binding import (
    FAILURES,
    is_inherited,
    outlive_forks,
    release_unused_memory,
    require_dali,
    take_outputs,
)

LastBatch = Literal["partial", "drop", "fill"]
LAST_BATCH: tuple[LastBatch, ...] = get_args(LastBatch)
_STATELESS_SOURCE = "Checkpointing enabled in a pipeline with external source operator"
"""DALI's warning of a source that it keeps no state of."""
_LABELS = range(-(2**31), 2**31)


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """What every pipeline of a split is built with."""

    batch_size: int
    num_threads: int
    prefetch_queue_depth: int
    """Batches that DALI makes ahead."""
    rank: int
    """Whose share the readers read."""
    ranks: int
    device: torch.device | None
    """The CUDA device it works on; None: the CPU alone."""


class ReaderPipeline:
    """A pipeline that was built, and starts to run with its first batch.

    Args:
        define: makes the graph, and returns its outputs in the form that batches are to have. Called once, with the
            pipeline as DALI's current one.
        settings: what to build it with.
        name: of the pipeline function and the split, for errors.
        seed: what its random operators are seeded from.
        resumable: whether DALI keeps track of the state of its operators.
        checkpoint: what ``checkpoint()`` gave, to go on from there.

    Raises:
        DatasetError: for outputs that are not DALI's, a pipeline without a reader, readers of sets that differ in
            size, labels that DALI would change, a source of which a resumable pipeline would lose its place, and
            whatever DALI refuses to build.
    """

    def __init__(
        self,
        define: Callable[[], Any],
        settings: PipelineSettings,
        *,
        name: str,
        seed: int,
        resumable: bool = False,
        checkpoint: bytes | None = None,
    ) -> None:
        self.name = name
        self._device = settings.device
        self._pipeline = new_pipeline(settings, seed=seed, enable_checkpointing=resumable, checkpoint=checkpoint)
        nodes, self._form = _define_outputs(define, self._pipeline, name)
        _refuse_changed_labels(nodes, name)
        if settings.device is not None:
            nodes = [node.gpu() if node.device == "cpu" else node for node in nodes]
        self._pipeline.set_outputs(*nodes)
        try:
            with _sources_keep_their_place(name):
                self._pipeline.build()
        except DatasetError:  # ours, which is a ValueError too
            self.close()
            raise
        except FAILURES as error:
            self.close()
            raise DatasetError(
                f"DALI cannot build what {name} makes. Where there is no such split, return None. Give decoders "
                "device=self.decoder_device, and DaliDataModule(resumable=False) for operators without a state. DALI "
                f"said:\n{error}"
            ) from error
        self.reader = _the_reader(self._pipeline.reader_meta(), settings, name)
        self.failed = False
        """Whether a batch could not be made, after which there are no more."""
        self._queue, self._ahead = settings.prefetch_queue_depth, 0

    def take(self, *, to_follow: int | None) -> list[Tensor]:
        """The outputs of the next batch, for ``put_together``.

        Args:
            to_follow: batches that will be taken after it; None: no end is known. No more than these are made ahead.

        Raises:
            DatasetError: when DALI cannot make it. The pipeline cannot be used after that.
        """
        try:
            if not self._ahead:
                self._pipeline.schedule_run()  # the first one fills the queue
                self._ahead = self._queue
            outputs = take_outputs(self._pipeline, self._device)
            self._ahead -= 1
            if to_follow is None or self._ahead < to_follow:
                self._pipeline.schedule_run()
                self._ahead += 1
            return outputs
        except FeedError:
            self.failed = True
            raise
        except StopIteration as error:
            self.failed = True
            raise DatasetError(
                f"A source in {self.name} ended before the reader's epoch did. The reader gives an epoch its length: "
                "let every other source go on for as long."
            ) from error
        except FAILURES as error:
            self.failed = True
            traceback.clear_frames(error.__traceback__)  # they hold the pipeline, for as long as the error is held
            raise DatasetError(
                f"DALI could not make a batch of {self.name}. It cannot leave a sample out: repair or remove the file, "
                "and resume from the last checkpoint (with resumable=False where a sample was removed). "
                "ImageFolderDataModule(backend='dali-cpu', on_error='skip') leaves out what cannot be decoded, and "
                f"names it. DALI said:\n{error}"
            ) from error

    def put_together(self, outputs: list[Tensor]) -> Any:
        """A batch in the form that the user's function returned."""
        return tree_unflatten(outputs, self._form)

    @property
    def usable(self) -> bool:
        """Whether it can give a batch: it did not fail, and was made in this process."""
        return not self.failed and not is_inherited(self._pipeline)

    def checkpoint(self) -> Tensor:
        """The state after the batch that was taken last, whatever was made ahead of it: uint8, of one dimension.

        A tensor, since checkpoints of plain tensors are loaded with ``weights_only=True``.
        """
        return torch.frombuffer(bytearray(self._pipeline.checkpoint()), dtype=torch.uint8)

    def close(self) -> None:
        """Free the pipeline and its memory. Batches that were handed out stay valid: they own theirs."""
        self._pipeline = None  # ends its threads
        if self._device is not None:
            release_unused_memory()


def new_pipeline(settings: PipelineSettings, **options: Any) -> Any:
    """A DALI pipeline without a graph."""
    dali = require_dali(gpu=settings.device is not None, why="DaliDataModule")
    pipeline = dali.Pipeline(
        batch_size=settings.batch_size,
        num_threads=settings.num_threads,
        device_id=None if settings.device is None else settings.device.index or 0,
        prefetch_queue_depth=settings.prefetch_queue_depth,
        exec_dynamic=True,
        **options,
    )
    outlive_forks(pipeline)
    return pipeline


def _define_outputs(define: Callable[[], Any], pipeline: Any, name: str) -> tuple[list[Any], Any]:
    """The outputs of a pipeline function as nodes of DALI's graph, and their form."""
    dali = require_dali(gpu=False)
    with pipeline:
        nodes, form = tree_flatten(define())
    for node in nodes:
        if isinstance(node, dali.Pipeline):
            raise DatasetError(
                f"{name} returned a Pipeline. It is called with a pipeline as DALI's current one: leave @pipeline_def "
                "and Pipeline(...) out, and return what nvidia.dali.fn gives: return images, labels."
            )
        if not isinstance(node, dali.data_node.DataNode):
            raise DatasetError(
                f"{name} returned a {type(node).__name__} ({node!r:.80}) among its outputs, which is none of DALI's. "
                "Return what nvidia.dali.fn gives, alone or in a tuple, list or dict: return images, labels."
            )
    if not nodes:
        raise DatasetError(f"{name} returned no output. Return what nvidia.dali.fn gives: return images, labels.")
    return nodes, form


def _refuse_changed_labels(nodes: list[Any], name: str) -> None:
    """Refuse ``labels=[...]`` of which DALI would silently make others: 1 of 1.5, and -2**31 of 2**31.

    They are found under a private name (``_op._init_args``; DALI 2.4): the public ``spec`` has what became of them.
    Without it, and in the file of ``file_list=``, nothing is refused.
    """
    waiting, seen = [node.source for node in nodes], set()
    while waiting:
        operator = waiting.pop()
        if operator is None or id(operator) in seen:
            continue
        seen.add(id(operator))
        waiting += [node.source for node in operator.inputs or ()]
        labels = (getattr(getattr(operator, "_op", None), "_init_args", None) or {}).get("labels")
        if not isinstance(labels, (list, tuple)) or not labels:
            continue
        if set(map(type, labels)) == {int} and min(labels) in _LABELS and max(labels) in _LABELS:
            continue  # of a million, in 50 ms
        for place, label in enumerate(labels):
            if int(label) not in _LABELS or not (isinstance(label, str) or int(label) == label):
                raise DatasetError(
                    f"{name}: labels[{place}]={label!r} is not a whole number of 32 bits, and DALI would silently make "
                    "another number of it. Number the classes. For other targets, let labels be the numbers of the "
                    "files, by which device_transform looks the targets up."
                )


def _the_reader(readers: Mapping[str, Mapping[str, int]], settings: PipelineSettings, name: str) -> Mapping[str, int]:
    """What is known of the reader that gives the epoch its length. Several go through their sets in step."""
    if not readers:
        raise DatasetError(
            f"{name} has no reader of DALI's, so nothing says how long an epoch is. Begin it with one, as in "
            "fn.readers.file(file_root=..., **self.reader()). For samples that Python makes, use FastDataModule."
        )
    wanted = {"number_of_shards": settings.ranks, "shard_id": settings.rank, "pad_last_batch": 1}
    first, *_ = readers
    for reader, known in readers.items():
        wrong = [f"{key}={known[key]}" for key, value in wanted.items() if known[key] != value]
        if wrong:
            raise DatasetError(
                f"The reader {reader!r} in {name} was not told its share of the set, or something else than "
                f"self.reader() says ({', '.join(wrong)}). Give it all of that: fn.readers.file(file_root=..., "
                "**self.reader())."
            )
        if known != readers[first]:
            raise DatasetError(
                f"{name} has readers that do not go in step: {first!r} has {readers[first]['epoch_size']} samples and "
                f"{reader!r} has {known['epoch_size']}. Give both **self.reader(), and sets of one size."
            )
    return readers[first]


@contextmanager
def _sources_keep_their_place(name: str) -> Iterator[None]:
    """While a pipeline is built: what DALI only warns of, where it is to keep track of its state, is an error.

    Raises:
        DatasetError: ``external_source`` has a source that would begin anew with a resumed run, though its reader
            goes on: data of one sample with those of another.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_STATELESS_SOURCE)
            yield
    except UserWarning as warning:
        if not str(warning).startswith(_STATELESS_SOURCE):
            raise
        raise DatasetError(
            f"The source of fn.external_source in {name} keeps no place. A resumed run would begin it again, while the "
            "reader goes on, and its data would go with the wrong samples. Give a callable of one argument that makes "
            "its data from it, and resumes exactly: of nvidia.dali.types.SampleInfo with batch=False, or of the number "
            "of the batch with batch=True. Or give DaliDataModule(resumable=False): a resumed run then trains the rest "
            "of its epoch from a new order."
        ) from warning


# --- shares of a set --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's share of a set that is read with ``pad_last_batch=True``.

    Share ``i`` of ``n`` is the samples ``[floor(i * N / n), floor((i + 1) * N / n))``: shares differ by one sample at
    most. The reader repeats the last sample of a share until every rank has the same number of whole batches (read in
    DALI 1.22 to 2.4, ``loader.h: ShouldPadBatch`` and ``loader.cc: start_index``).
    """

    samples: int
    """In the whole set: at least as many as ranks, else DALI builds no pipeline."""
    ranks: int
    rank: int
    batch_size: int
    last_batch: LastBatch
    sticks: bool
    """Whether the rank reads the same share in each epoch, and not the next one's."""

    def __len__(self) -> int:
        """Batches that are handed out in an epoch, the same number on every rank."""
        return self.samples // self.ranks // self.batch_size if self.last_batch == "drop" else self.read_batches

    @property
    def read_batches(self) -> int:
        """Batches that the reader gives in an epoch, the same number on every rank."""
        largest = -(-self.samples // self.ranks)
        return -(-largest // self.batch_size)

    def kept(self, epoch: int, batch: int) -> int:
        """Samples to hand out, the first ones, of a batch that was read; 0: it is left out.

        Args:
            epoch: of the reader, from 0.
            batch: within that epoch, from 0.
        """
        if self.last_batch == "drop":
            return self.batch_size if batch < len(self) else 0
        if self.last_batch == "fill":
            return self.batch_size
        share = self.rank if self.sticks else (self.rank + epoch) % self.ranks
        size = (share + 1) * self.samples // self.ranks - share * self.samples // self.ranks
        # A batch of nothing but padding keeps one sample: every rank has to make the same number of steps.
        return max(1, min(self.batch_size, size - batch * self.batch_size))


@dataclass
class Place:
    """Where a reader stands: in which of its epochs, and how many of that epoch's batches were taken."""

    epoch: int = 0
    batch: int = 0

    def advance(self, share: Share) -> int:
        """Go past one batch. Returns how many of its samples are to be handed out."""
        kept = share.kept(self.epoch, self.batch)
        self.batch += 1
        if self.batch == share.read_batches:
            self.epoch, self.batch = self.epoch + 1, 0
        return kept
